"""Commands that make models for readers: `export`."""

from pathlib import Path
from typing import Annotated

import typer

from clickfleet.cli.frame import Result, command, say
from clickfleet.cli.migrating import ConfigFile, Settings, of_model
from clickfleet.cli.training import ModelOrConfig


def add(app: typer.Typer) -> None:
    command(app)(export)


def export(
    model: ModelOrConfig = None,
    out: Annotated[
        Path | None,
        typer.Argument(
            help="A folder that does not exist yet (of a PaddleRec configuration by default: inference in its model_save_path).",
            metavar="OUT",
            show_default=False,
        ),
    ] = None,
    inputs: Annotated[
        str | None, typer.Option(help="Columns that requests will have, by commas (default: all of the schema).")
    ] = None,
    outputs: Annotated[
        str, typer.Option(help="What requests get, by commas: score, logit, or layers of the network.")
    ] = "score,logit",
    config_file: ConfigFile = None,
    option: Settings = None,
) -> Result:
    """Write a model for serving: its rows, its network as ONNX, its schema, and requests with known answers."""
    from clickfleet import saving

    old = of_model(model, [] if out is None else [str(out)], config_file, option)
    if old is not None:
        from clickfleet.migrate import models

        translated, others = old
        folder = Path(others[0]) if others else Path(translated.config.run.dir) / "inference"
        with models.found(translated, translated.last_epoch) as found:
            return _export(found, folder, inputs or ",".join(translated.inputs) or None, outputs)
    if model is None or out is None:
        raise typer.BadParameter("Missing argument 'OUT'.")
    path = saving.resolve(model)
    say(f"model: {saving.describe(path)}")
    return {**_export(path, out, inputs, outputs), "checkpoint": str(path)}


def _export(path: Path, out: Path, inputs: str | None, outputs: str) -> Result:
    from clickfleet import exporting, saving

    learner = saving.load(path)
    names = [column.name for column in learner.schema.dense] + [slot.name for slot in learner.schema.slots]
    wanted = names if inputs is None else inputs.split(",")
    entry = exporting.export(learner, out, saving.step(path), None if wanted == names else wanted, outputs.split(","))
    facts = entry.manifest
    size = sum(file["bytes"] for file in facts["files"].values())
    say(f"{out}: {learner.config.model.name} of step {facts['step']:,}, {facts['rows']:,} rows, {size:,} bytes")
    return {
        "path": str(out),
        "rows": facts["rows"],
        "bytes": size,
        "step": facts["step"],
        "inputs": wanted,
        "outputs": facts["outputs"],
        "hash": entry.hash,
    }
