"""Open the data of a configuration, files or objects in memory, as a source of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from clickfleet.config.load import Config
from clickfleet.config.plugins import Plugin
from clickfleet.config.sections import Data as DataSection
from clickfleet.data.batch import Batch, SourceState
from clickfleet.data.files import decompressed_size, expand, open_bytes, reading
from clickfleet.data.formats import Format
from clickfleet.data.formats import load as load_format
from clickfleet.data.guess import Guess, guess, is_files, is_frame
from clickfleet.data.memory import Feed
from clickfleet.data.parsing.lines import Lines
from clickfleet.data.reader import Reader
from clickfleet.data.recognition import sample
from clickfleet.data.repeatable import check_repeatable
from clickfleet.data.schema import Schema, preset, read_schema
from clickfleet.data.split import RowSplit
from clickfleet.errors import ConfigError

QUARANTINE = "quarantine.txt"
Data = Any
"""Paths of files, or anything a Feed accepts: a frame, a table, a mapping of arrays, rows, batches."""


def schema_of(config: Config, form: Format | None = None) -> Schema:
    """Return the schema of a configuration: data.schema, data.preset or that of the format, with the rule of data.keys.

    `form` is the format of the configuration, if it is already loaded.
    """
    settings = config.data
    if settings.schema:
        schema: Schema | None = read_schema(settings.schema)
    else:
        schema = preset(settings.preset) if settings.preset else (form or load_format(settings.format)).schema
    if schema is None:
        raise ConfigError(f"the format {settings.format.name} has no default schema", "set data.schema or data.preset")
    return schema if settings.keys is None else schema.with_keys(settings.keys)


SCHEMA_FILE = "schema.yaml"
"""The guessed schema in the folder of a run, a comparison or a search."""


def settle(config: Config, data: Data = None, schema: Schema | None = None) -> tuple[Config, Guess | None]:
    """Return the configuration with the format that the files have, and the guess of the schema if nothing names one.

    `data` defaults to data.train. A format, schema or preset that the user gave is kept. Data in memory has no format.
    """
    settings = config.data
    data = settings.train if data is None else data
    known = schema is not None or settings.schema is not None or settings.preset is not None
    if is_files(data):
        if settings.format.automatic and known:
            form = sample(expand(data), settings.format, schema or schema_of(config)).format
            return replace(config, data=replace(settings, format=form)), None
        if known or not (settings.format.automatic or load_format(settings.format).schema is None):
            return config, None
    elif known or not is_frame(data):
        return config, None
    found = guess(data, settings.label, settings.format)
    if settings.keys is not None:
        found = replace(found, schema=found.schema.with_keys(settings.keys))
    return replace(config, data=replace(settings, format=found.format, label=None)), found


def with_schema_file(config: Config, found: Guess | None, folder: Path | None) -> Config:
    """Return the configuration that reads a guessed schema from `folder`, where `found.write` puts it."""
    if found is None or found.of_format or folder is None:
        return config
    return replace(config, data=replace(config.data, schema=str(folder / SCHEMA_FILE)))


def settle_in(config: Config, folder: Path, say: Callable[[str], None]) -> Config:
    """Return the configuration with the format and schema of data.train, for many runs. `folder` keeps a guessed schema.

    A schema that is already there is used again: the same command continues earlier work with the same columns.
    """
    path, label = folder / SCHEMA_FILE, config.data.label
    kept = path.is_file() and config.data.schema is None and config.data.preset is None
    if kept:
        if label is not None and read_schema(path).label != label:
            raise ConfigError(f"{path} has another label than data.label={label}", "choose another --out, or remove it")
        config = replace(config, data=replace(config.data, schema=str(path), label=None))
    config, found = settle(config)
    if found is not None:
        say(found.text())
        if not found.of_format:
            found.write(path)
    return with_schema_file(config, found, folder)


def for_scoring(config: Config, batch_size: int | None = None) -> Config:
    """Return the configuration to read rows for scoring: in file order, without shuffling, interleaving or a quarantine file."""
    data = config.data
    return replace(
        config,
        data=replace(
            data,
            batch_size=batch_size or data.test_batch_size or data.batch_rows,
            shuffle=0,
            interleave=1,
            bad_lines="skip" if data.bad_lines == "quarantine" else data.bad_lines,
            quarantine=None,
        ),
    )


PARQUET = b"PAR1"
"""First bytes of a Parquet file."""


def count_rows(path: str, plugin: Plugin) -> int:
    """Return the number of rows of a file, including bad ones, without parsing them."""
    form = load_format(plugin)
    if isinstance(form, Lines):
        rows, last, space = 0, ord("\n"), bytearray(1 << 18)
        with closing(form.stream(path)) as stream:
            while size := stream.readinto(memoryview(space)):
                rows += space.count(b"\n", 0, size)
                last = space[size - 1]
        return rows + (last != ord("\n")) - form.header_lines
    from pyarrow import parquet

    from clickfleet.data.arrow_ipc import open_ipc

    with open_bytes(path) as file, reading(path):
        magic = file.read(len(PARQUET))
        file.seek(0)
        if magic == PARQUET:
            return int(parquet.ParquetFile(file).metadata.num_rows)
        return sum(batch.num_rows for batch in open_ipc(file))


def with_format(config: Config, name: str | None) -> Config:
    """Return the configuration for files of the format `name`. None, or the current format, keeps the settings.

    A .py file that the user names becomes trusted. The command of a `pipe` keeps the origin of the model.
    """
    current = config.data.format
    if name is None or (name == current.name and not name.endswith(".py")):
        return config
    chosen = replace(current, origin="") if name == current.name else Plugin(name)
    return replace(config, data=replace(config.data, format=chosen))


def open_source(
    config: Config, data: Data, schema: Schema | None, *, labels: bool = False, folder: Path | None = None
) -> Source:
    """Open files or data in memory as batches of `schema`. Default: the schema of the configuration.

    Without `labels`, the columns that only training and evaluation need may be missing.
    """
    settings = config.data
    if isinstance(data, Reader | Feed):
        if schema is not None:
            here, there = (schema, data.schema) if labels else (schema.inputs(), data.schema.inputs())
            here.check_same(there, "the model", "the data")
        return data
    if not is_files(data) and not (isinstance(data, list | tuple) and not data):
        schema = schema.inputs() if schema is not None and not labels else schema
        form = load_format(settings.format)
        if schema is None and not (settings.schema or settings.preset or settings.keys is not None):
            raise ConfigError(
                "data in memory needs a schema", "pass schema=Schema(…), or set data.schema or data.preset"
            )
        return Feed(
            data,
            schema or schema_of(config, form),
            settings.batch_rows,
            shuffle=settings.shuffle != 0,
            seed=config.train.seed,
        )
    if not data:
        raise ConfigError("data.train is missing", "name files, for example data.train=train/part-*")
    if settings.format.automatic:
        config, found = settle(config, data, schema)
        settings, schema = config.data, schema or (None if found is None else found.schema)
    form = load_format(settings.format)
    if schema is not None and not labels and form.named_columns:
        schema = schema.inputs()
    quarantine = settings.quarantine
    if settings.bad_lines == "quarantine" and quarantine is None:
        quarantine = str((folder or Path()) / QUARANTINE)
        Path(quarantine).parent.mkdir(parents=True, exist_ok=True)
    reader = Reader(
        data,
        schema or schema_of(config, form),
        form,
        settings.batch_rows,
        shuffle=settings.shuffle,
        seed=config.train.seed,
        threads=settings.threads,
        interleave=_interleave(settings, form),
        bad_lines=settings.bad_lines,
        max_bad_fraction=settings.max_bad_fraction,
        quarantine=quarantine if settings.bad_lines == "quarantine" else None,
        require_labels=labels,
    )
    reader.format_name = settings.format.name
    check_repeatable(settings.format, form, reader.schema, reader.files[0])
    return reader


def _interleave(settings: DataSection, form: Format) -> int | None:
    """Return the number of files to read in turn. Each file of a command is read by its own process, so threads share files."""
    if settings.interleave is None and form.runs() and settings.threads > 1:
        return max(settings.threads, 4) if settings.shuffle else settings.threads
    return settings.interleave


def total_bytes(source: Source, config: Config) -> int | None:
    """Return the number of bytes that training will read, or None if it is unknown."""
    size = decompressed_size(expand(source.files)) if isinstance(source, Reader) else None
    return None if size is None else config.train.epochs * size


class Source(Protocol):
    """A Reader or a Feed."""

    schema: Schema
    epoch: int
    counters: Any
    split: RowSplit | None
    validation: bool

    def __iter__(self) -> Iterator[Batch]: ...
    def state(self) -> SourceState: ...
    def restore(self, state: SourceState, /) -> None: ...
