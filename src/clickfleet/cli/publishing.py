"""Commands that make models for readers: `export`."""

from pathlib import Path
from typing import Annotated

import typer

from clickfleet.cli.frame import Result, command, say
from clickfleet.cli.training import Model


def add(app: typer.Typer) -> None:
    command(app)(export)


def export(
    model: Model,
    out: Annotated[Path, typer.Argument(help="A folder that does not exist yet.", metavar="OUT")],
    inputs: Annotated[
        str | None, typer.Option(help="Columns that requests will have, by commas (default: all of the schema).")
    ] = None,
    outputs: Annotated[
        str, typer.Option(help="What requests get, by commas: score, logit, or layers of the network.")
    ] = "score,logit",
) -> Result:
    """Write a model for serving: its rows, its network as ONNX, its schema, and requests with known answers."""
    from clickfleet import exporting, saving

    path = saving.resolve(model)
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
