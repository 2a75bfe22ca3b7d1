"""Translate `*_reader_path`, `reader_type` and `pipe_command` to `data.format`."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from clickfleet.config.plugins import Plugin
from clickfleet.data.schema import Schema
from clickfleet.errors import ConfigError
from clickfleet.paddlerec import helpers
from clickfleet.paddlerec.keys import Keys
from clickfleet.paddlerec.networks import Network
from clickfleet.paddlerec.original import Original

R = "runner."
PROGRAM = re.compile(r"^\s*(python[\d.]*|\S*/python[\d.]*)\s+(-u\s+)?(\S+\.py)\s*(.*)$")
PIPED = ("queuedataset", "inmemorydataset")
BY_ITERATION = ("dataloader", "recdataset", "customizedataloader")


def take_readers(keys: Keys, network: Network, schema: Schema) -> tuple[dict[str, object], Schema, bool]:
    """Return the format of the data, the schema adapted to it, and whether a reader of the user parses the data."""
    kind = keys.text(R + "reader_type", "DataLoader")
    if kind.lower() not in (*PIPED, *BY_ITERATION):
        raise keys.wrong(
            R + "reader_type", "must be DataLoader, QueueDataset, InmemoryDataset, CustomizeDataLoader or RecDataset"
        )
    if kind.lower() in PIPED and keys.has(R + "pipe_command"):
        for key in ("train_reader_path", "infer_reader_path"):
            keys.skip(R + key, f"reader_type is {kind}, so runner.pipe_command reads the data")
        keys.used(
            R + "reader_type",
            "data.format.name=pipe",
            "read as a stream, in bounded memory" if "memory" in kind.lower() else "",
        )
        return _pipe(keys, network, schema)
    if keys.has(R + "pipe_command"):
        keys.skip(R + "pipe_command", f"reader_type is {kind}, so runner.train_reader_path reads the data")
    for key in ("parse_ins_id", "parse_content"):
        keys.skip(R + key, "applies only to a pipe_command")
    path = reader_file(keys, "train_reader_path") if network.runs_reader else None
    if path is None and network.valued:
        raise ConfigError(
            f"{keys.original.path}: {network.model} reads ids and values, and only the reader of its folder knows their layout",
            f"copy {keys.text(R + 'train_reader_path', 'reader')}.py beside the configuration",
        )
    if path is None:
        form, note = _built_in(keys, network, schema)
        keys.record(R + "train_reader_path", "mapped", f"data.format.name={form['name']}", note)
        keys.record(R + "infer_reader_path", "mapped", f"data.format.name={form['name']}")
        keys.used(R + "reader_type", f"data.format.name={form['name']}")
        return form, schema, False
    keys.used(R + "train_reader_path", f"data.format.name={path.name}", "its RecDataset runs unchanged")
    keys.used(R + "infer_reader_path", "evaluate and predict")
    keys.used(R + "reader_type", f"data.format.name={path.name}")
    if network.slots_only:
        schema = replace(schema, label="click", show="show")
    form = {"name": str(path), "config": keys.original.for_readers}
    if network.arrays is not None:
        form["arrays"] = network.arrays(schema)
    return form, schema, True


def _built_in(keys: Keys, network: Network, schema: Schema) -> tuple[dict[str, object], str]:
    """Return our format for the data, and a note that says why it reads them."""
    if network.form is not None:
        form, what = network.form(keys, schema), "the files"
    elif network.slots_only:
        form, what = {"name": "feasign"}, "value:slot tokens"
    else:
        form, what = {"name": "slots"}, "name:value tokens"
    if not network.runs_reader:
        return form, "the built-in parser reads the files; the reader is not run"
    return form, f"no file {keys.text(R + 'train_reader_path', 'reader')}.py: the built-in parser reads {what}"


def reader_file(keys: Keys, key: str) -> Path | None:
    """Return the file of a reader's module name. None: the name is a default and the file does not exist."""
    name = keys.text(R + key, "reader")
    path = keys.original.folder / f"{name.removesuffix('.py')}.py"
    if path.is_file():
        return path
    if name not in ("reader", "criteo_reader", "queuedataset_reader"):
        raise ConfigError(
            f"{keys.original.path}: runner.{key} is {name!r}, but {path} does not exist",
            "add the file, or set the key to `reader` to use the built-in parser",
        )
    return None


def _pipe(keys: Keys, network: Network, schema: Schema) -> tuple[dict[str, object], Schema, bool]:
    form: dict[str, object] = {"name": "pipe", "folder": str(keys.original.folder)}
    if network.slots_only:
        schema = replace(schema, label="click", show="show")
        form["order"] = ["show", "click", *(slot.name for slot in schema.slots)]
    else:
        dense = ["dense"] if schema.dense else []
        form["order"] = ["click", *(slot.name for slot in schema.read_columns), *dense]
    form["command"], note = command(keys)
    keys.used(R + "pipe_command", "data.format.command", note)
    for key, ours in (("parse_ins_id", "ins_id"), ("parse_content", "content")):
        if keys.has(R + key):
            keys.map(R + key, f"data.format.{ours}", keys.boolean(R + key))
            form[ours] = keys.boolean(R + key)
    return form, schema, True


def command(keys: Keys) -> tuple[str, str]:
    """Return the command that runs for every file, with the two arguments that PaddleRec appends, and a note."""
    text, folder = keys.text(R + "pipe_command"), keys.original.folder
    if text.strip() == "cat":
        return "cat", ""
    arguments = f"{shlex.quote(str(keys.original.path))} {shlex.quote(str(Path(helpers.__file__).parent))}"
    program = PROGRAM.match(text)
    if program is None:
        return f"{text} {arguments}", "with the two arguments that PaddleRec appends"
    file = Path(program[3])
    if not (folder / file).is_file() and (folder / file.name).is_file():
        file = Path(file.name)
    if not (folder / file).is_file():
        raise ConfigError(
            f"{keys.original.path}: runner.pipe_command runs {program[3]}, but {folder / file} does not exist"
        )
    rest = f" {program[4]}" if program[4].strip() else ""
    return (
        f"{python()} -m clickfleet.paddlerec.paddle_names {shlex.quote(str(file))}{rest} {arguments}",
        "run by this Python; base classes of paddle are provided if it is not installed",
    )


def python() -> str:
    """Return the shell command of this interpreter."""
    default = shutil.which("python")
    if default is not None and Path(default).parent == Path(sys.executable).parent:
        return "python"
    return shlex.quote(sys.executable)


def inference_format(original: Original, form: Plugin, inference: bool) -> Plugin:
    """Return the format for evaluation: the reader that the file names for it, with `runner.inference` if labels are absent."""
    if not form.name.endswith(".py"):
        return form
    path = reader_file(Keys(original), "infer_reader_path")
    config = {**original.for_readers, **({"runner.inference": True} if inference else {})}
    return replace(form, name=form.name if path is None else str(path), settings={**form.settings, "config": config})
