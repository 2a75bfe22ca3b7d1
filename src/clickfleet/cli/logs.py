"""Commands about click logs: `synth`, `fetch`, `prepare`, `stats`, `convert`."""

from pathlib import Path
from typing import Annotated

import typer

from clickfleet.cli.frame import Result, command, say

Inputs = Annotated[list[str], typer.Argument(help="Files, folders, globs or URLs; .gz and .zst are unpacked.")]
Format = Annotated[
    str,
    typer.Option(
        "--format", help="Format of the files: criteo, slots, feasign, multislot, libffm, csv, parquet, arrow."
    ),
]
SchemaFile = Annotated[
    Path | None,
    typer.Option("--schema", help="YAML file that names the columns (default: what the format means, else Criteo's)."),
]
BadLines = Annotated[str, typer.Option("--bad-lines", help="What a line that cannot be read does: error or skip.")]
Keys = Annotated[str | None, typer.Option("--keys", help="How values become keys: hash64, py2, py2 mod M, or raw.")]


def add(app: typer.Typer) -> None:
    command(app)(synth)
    command(app)(fetch)
    command(app)(prepare)
    command(app)(stats)
    command(app)(convert)


def synth(
    out: Annotated[Path, typer.Argument(help="Folder to write into: train/ and test/, or one folder per day.")],
    rows: Annotated[int, typer.Option(help="Rows to train on, in all.")] = 500_000,
    test_rows: Annotated[int, typer.Option(help="Rows to test on.")] = 50_000,
    format: Annotated[  # noqa: A002
        str, typer.Option(help="criteo, csv, parquet, arrow (raw values); slots, multislot, feasign, libffm (keys).")
    ] = "criteo",
    parts: Annotated[int, typer.Option(help="Files per folder.")] = 1,
    days: Annotated[
        int, typer.Option(help="Days of timed folders <day>/<HHMM>/ with done files, for online training.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same rows.")] = 7,
    drift: Annotated[
        float | None,
        typer.Option(help="Share of ids that die each day, and of all effects that change (with --days: 0.1)."),
    ] = None,
    start_day: Annotated[str, typer.Option(help="The first day, YYYYMMDD.")] = "20260101",
    split_interval: Annotated[int, typer.Option(help="Minutes per timed folder.")] = 60,
    done_file: Annotated[str, typer.Option(help="Name of the file that says a timed folder is complete.")] = "_DONE",
    threads: Annotated[int | None, typer.Option(help="Threads that make rows (default: the cores, 4 at most).")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier synth wrote there.")] = False,
) -> Result:
    """Make click logs that look like Criteo's, with a known teacher, so that the best possible AUC is known."""
    from clickfleet.logs.synth import Options
    from clickfleet.logs.synth import synth as make

    options = Options(rows, test_rows, format, parts, days, seed, drift, start_day, split_interval, done_file)
    made = make(out, options, overwrite=overwrite, threads=threads)
    say(f"{made['rows']:,} rows and {made['test_rows']:,} test rows in {out}")
    say(f"click rate {made['ctr']:.4f}, best possible AUC {made['best_auc']:.4f}")
    return made


def fetch(
    name: Annotated[
        str, typer.Argument(help="criteo (raw text, 4 GB) or criteo-slots (slot text, scaled and hashed).")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder to put it into (default: one named like the dataset).")
    ] = None,
    url: Annotated[list[str] | None, typer.Option(help="Fetch from here instead; once per archive.")] = None,
    mirror: Annotated[str, typer.Option(help="Fetch the same archives from this address.")] = "",
    clean: Annotated[bool, typer.Option("--clean", help="Remove the archives and the data instead.")] = False,
) -> Result:
    """Fetch a public click log: download (going on where it stopped), check, unpack, make folders for a quick run."""
    from clickfleet.logs.fetch import clean as remove
    from clickfleet.logs.fetch import dataset
    from clickfleet.logs.fetch import fetch as get

    data = dataset(name, url or (), mirror)
    where = out or Path(name)
    return remove(data, where, say) if clean else get(data, where, say)


def prepare(
    raw: Inputs,
    out: Annotated[Path, typer.Option(help="New folder for train/, test/ and schema.yaml.")],
    format: Format = "criteo",  # noqa: A002
    schema: SchemaFile = None,
    transform: Annotated[
        str,
        typer.Option(help="Fitted to the dense columns: minmax (up to the 95th percentile), standard, log1p or none."),
    ] = "minmax",
    keys: Keys = None,
    test_share: Annotated[float, typer.Option(help="Share of the rows, the last ones, to test on.")] = 0.1,
    part_rows: Annotated[int, typer.Option(help="Rows per part file.")] = 200_000,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Shuffle all rows first (on disk).")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the shuffle.")] = 7,
    bad_lines: BadLines = "error",
) -> Result:
    """Split raw logs 9:1 into part files and fit the transforms of the dense columns."""
    from clickfleet.logs.prepare import Options
    from clickfleet.logs.prepare import prepare as split
    from clickfleet.schema import read_schema

    options = Options(format, transform, test_share, part_rows, shuffle, seed, keys, bad_lines)  # type: ignore[arg-type]
    made = split(raw, out, options, read_schema(schema) if schema else None)
    for name in ("train", "test"):
        say(f"{name}: {made[f'{name}_rows']:,} rows in {made['parts'][name]} files in {out / name}")
    say(f"schema: {made['schema']}")
    return made


def stats(
    data: Inputs,
    format: Format = "criteo",  # noqa: A002
    schema: SchemaFile = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with a plot per column.")] = None,
    top: Annotated[int, typer.Option(help="Frequent values to show per slot.")] = 3,
    bad_lines: BadLines = "error",
) -> Result:
    """Describe logs: rows, click rate, and per column what is missing, how many values it has, the frequent ones."""
    from clickfleet.logs.page import page, table
    from clickfleet.logs.stats import stats as describe
    from clickfleet.schema import read_schema

    summary = describe(data, format, read_schema(schema) if schema else None, bad_lines)  # type: ignore[arg-type]
    say(table(summary, top))
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(page(summary, ", ".join(data)), encoding="utf-8")
        say(f"page: {html}")
    return summary.to_dict()


def convert(
    inputs: Inputs,
    source: Annotated[str, typer.Option("--from", help="Format of the files.")],
    target: Annotated[str, typer.Option("--to", help="Format to write.")],
    out: Annotated[
        str,
        typer.Option(
            help="File to write (.gz and .zst pack it), a folder (ends in /) for one per input, or - for stdout."
        ),
    ],
    keys: Keys = None,
    schema: SchemaFile = None,
    drop_dense: Annotated[
        bool, typer.Option("--drop-dense", help="Leave out dense columns where the format has no place for them.")
    ] = False,
    bad_lines: BadLines = "error",
) -> Result:
    """Convert logs to another format; raw values stay raw where both formats hold them, else they become keys."""
    from clickfleet.logs.convert import convert as rewrite
    from clickfleet.schema import read_schema

    made = rewrite(
        inputs,
        out,
        source,
        target,
        keys=keys,
        schema=read_schema(schema) if schema else None,
        drop_dense=drop_dense,
        bad_lines=bad_lines,  # type: ignore[arg-type]
    )
    if out != "-":
        say(f"{made['rows']:,} rows in {', '.join(made['files'])}")
        if made["schema"]:
            say(f"schema: {made['schema']}")
    return made
