"""Measurements: `bench modes`, `bench infer`."""

from pathlib import Path
from typing import Annotated

import typer

from clickfleet.cli.cluster import modes
from clickfleet.cli.frame import Result, Trust, command, say
from clickfleet.cli.training import Format, Inputs, Model


def add(app: typer.Typer) -> None:
    bench = typer.Typer(help="Measurements.", no_args_is_help=True)
    app.add_typer(bench, name="bench")
    command(bench)(modes)
    command(bench)(infer)


def infer(
    model: Model,
    data: Inputs,
    engines: Annotated[
        str | None,
        typer.Option(help="By commas: torch, onnx, int8, providers of ONNX Runtime (default: all there are)."),
    ] = None,
    threads: Annotated[str, typer.Option(help="Threads of one run, by commas.")] = "1,2",
    batch_sizes: Annotated[str, typer.Option(help="Rows of a batch, by commas.")] = "1,5,100,1000",
    graph: Annotated[
        str, typer.Option(help="Graph optimisation, by commas, among off, basic, extended, all.")
    ] = "all,off",
    arena: Annotated[str, typer.Option(help="Whether ONNX Runtime keeps memory: on, off or both.")] = "on,off",
    batches: Annotated[int, typer.Option(min=5, help="Batches scored per cell.")] = 100,
    rows: Annotated[int, typer.Option(min=1, help="Rows read; batches take them over and over.")] = 10_000,
    format: Format = None,  # noqa: A002
    out: Annotated[Path, typer.Option(help="Folder for infer.csv, infer.md and infer.html.")] = Path("infer"),
    trust: Trust = False,
) -> Result:
    """Measure how fast a model scores: engines, threads, batch sizes, graph optimisation and memory arena; drift of int8."""
    from clickfleet.workbench import infer_page
    from clickfleet.workbench.infer import measure

    kept = [text.strip() for text in arena.split(",")]
    if set(kept) - {"on", "off"}:
        raise typer.BadParameter(f"--arena {arena}: say on, off or on,off")
    found = measure(
        model,
        data,
        engines=engines.split(",") if engines else [],
        threads=_numbers(threads, "--threads"),
        batch_sizes=_numbers(batch_sizes, "--batch-sizes"),
        graph=graph.split(","),
        arena=[text == "on" for text in kept],
        batches=batches,
        rows=rows,
        form=format,
        say=say,
        trust=trust,
    )
    say(infer_page.text(found))
    say(f"\n{infer_page.write_all(found, out)}")
    return {**found.to_dict(), "out": str(out)}


def _numbers(text: str, option: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise typer.BadParameter(f"{option} {text}: whole numbers of at least 1, by commas")
    return found
