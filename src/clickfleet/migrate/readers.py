"""`*_reader_path`, `reader_type` and `pipe_command` -> `data.format`."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from clickfleet.errors import ConfigError
from clickfleet.migrate import helpers
from clickfleet.migrate.keys import Keys
from clickfleet.migrate.networks import Network
from clickfleet.migrate.original import Original
from clickfleet.schema import Schema
from clickfleet.sections import Plugin

R = "runner."
PROGRAM = re.compile(r"^\s*(python[\d.]*|\S*/python[\d.]*)\s+(-u\s+)?(\S+\.py)\s*(.*)$")
PIPED = ("queuedataset", "inmemorydataset")
BY_ITERATION = ("dataloader", "recdataset", "customizedataloader")


def take_readers(keys: Keys, network: Network, schema: Schema) -> tuple[dict[str, Any], Schema, bool]:
    """The format of the data, the schema in its terms, and whether a reader of the user's own is asked."""
    kind = keys.text(R + "reader_type", "DataLoader")
    if kind.lower() not in (*PIPED, *BY_ITERATION):
        raise keys.wrong(
            R + "reader_type", "must be DataLoader, QueueDataset, InmemoryDataset, CustomizeDataLoader or RecDataset"
        )
    if kind.lower() in PIPED and keys.has(R + "pipe_command"):
        for key in ("train_reader_path", "infer_reader_path"):
            keys.skip(R + key, f"reader_type is {kind}: runner.pipe_command reads")
        keys.used(
            R + "reader_type",
            "data.format.name=pipe",
            "as a stream: memory is bounded" if "memory" in kind.lower() else "",
        )
        return _pipe(keys, network, schema)
    if keys.has(R + "pipe_command"):
        keys.skip(R + "pipe_command", f"reader_type is {kind}: runner.train_reader_path reads")
    for key in ("parse_ins_id", "parse_content"):
        keys.skip(R + key, "only a pipe_command prints these")
    path = reader_file(keys, "train_reader_path")
    if path is None:
        form, said = ("feasign", "value:slot tokens") if network.slots_only else ("slots", "name:value tokens")
        note = f"there is no {keys.text(R + 'train_reader_path', 'reader')}.py: {said} are read by our own parser"
        keys.told(R + "train_reader_path", "mapped", f"data.format.name={form}", note)
        keys.told(R + "infer_reader_path", "mapped", f"data.format.name={form}")
        keys.used(R + "reader_type", f"data.format.name={form}")
        return {"name": form}, schema, False
    keys.used(R + "train_reader_path", f"data.format.name={path.name}", "its RecDataset runs as it is")
    keys.used(R + "infer_reader_path", "evaluate and predict")
    keys.used(R + "reader_type", f"data.format.name={path.name}")
    if network.slots_only:
        schema = replace(schema, label="click", show="show")
    return {"name": str(path), "config": keys.original.for_readers}, schema, True


def reader_file(keys: Keys, key: str) -> Path | None:
    """The file that a reader's module name means, where it is there."""
    name = keys.text(R + key, "reader")
    path = keys.original.folder / f"{name.removesuffix('.py')}.py"
    if path.is_file():
        return path
    if name not in ("reader", "criteo_reader", "queuedataset_reader"):
        raise ConfigError(
            f"{keys.original.path}: runner.{key} is {name!r}, and there is no {path}",
            "put the reader there, or name `reader`: without a file of that name our own parser reads the text",
        )
    return None


def _pipe(keys: Keys, network: Network, schema: Schema) -> tuple[dict[str, Any], Schema, bool]:
    form: dict[str, Any] = {"name": "pipe", "folder": str(keys.original.folder)}
    if network.slots_only:
        schema = replace(schema, label="click", show="show")
        form["order"] = ["show", "click", *(slot.name for slot in schema.slots)]
    else:
        dense = ["dense"] if schema.dense else []
        form["order"] = ["click", *(slot.name for slot in schema.read_slots), *dense]
    form["command"], note = command(keys)
    keys.used(R + "pipe_command", "data.format.command", note)
    for key, ours in (("parse_ins_id", "ins_id"), ("parse_content", "content")):
        if keys.has(R + key):
            keys.to(R + key, f"data.format.{ours}", keys.truth(R + key))
            form[ours] = keys.truth(R + key)
    return form, schema, True


def command(keys: Keys) -> tuple[str, str]:
    """What runs for every file: the command with the two arguments that the old tools appended."""
    text, folder = keys.text(R + "pipe_command"), keys.original.folder
    if text.strip() == "cat":
        return "cat", ""
    arguments = f"{shlex.quote(str(keys.original.path))} {shlex.quote(str(Path(helpers.__file__).parent))}"
    found = PROGRAM.match(text)
    if found is None:
        return f"{text} {arguments}", "with the two arguments it always had"
    file = Path(found[3])
    if not (folder / file).is_file() and (folder / file.name).is_file():
        file = Path(file.name)
    if not (folder / file).is_file():
        raise ConfigError(f"{keys.original.path}: runner.pipe_command runs {found[3]}, and there is no {folder / file}")
    rest = f" {found[4]}" if found[4].strip() else ""
    return (
        f"{python()} -m clickfleet.paddle_names {shlex.quote(str(file))}{rest} {arguments}",
        "by this Python, with base classes of paddle's where it is not installed",
    )


def python() -> str:
    """How to call this interpreter from a shell."""
    found = shutil.which("python")
    return (
        "python"
        if found is not None and Path(found).parent == Path(sys.executable).parent
        else shlex.quote(sys.executable)
    )


def inference_format(original: Original, form: Plugin, inference: bool) -> Plugin:
    """The format by which evaluation reads: the reader that the file names for it, told whether labels are wanted."""
    if not form.name.endswith(".py"):
        return form
    path = reader_file(Keys(original), "infer_reader_path")
    config = {**original.for_readers, **({"runner.inference": True} if inference else {})}
    return replace(form, settings={"config": config}) if path is None else Plugin(str(path), {"config": config})
