"""Open the data of a configuration, files or objects in memory, as a source of batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from clickfleet.config.load import Config
from clickfleet.config.plugins import Plugin
from clickfleet.data.batch import Batch, SourceState
from clickfleet.data.files import decompressed_size, expand
from clickfleet.data.formats import Format
from clickfleet.data.formats import load as load_format
from clickfleet.data.memory import Feed
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Schema, preset, read_schema
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
    """Open files or data in memory as batches of `schema`. Default: the schema of the configuration."""
    settings = config.data
    if isinstance(data, Reader | Feed):
        if schema is not None:
            schema.check_same(data.schema, "the model", "the data")
        return data
    form = load_format(settings.format)
    paths = isinstance(data, str | Path) or (
        isinstance(data, list | tuple) and all(isinstance(item, str | Path) for item in data)
    )
    if not paths:
        if schema is None and not (settings.schema or settings.preset or settings.keys is not None):
            raise ConfigError(
                "data in memory needs a schema", "pass schema=Schema(…), or set data.schema or data.preset"
            )
        if settings.shuffle:
            raise ConfigError("data.shuffle applies to files only", "shuffle data in memory yourself")
        return Feed(data, schema or schema_of(config, form), settings.batch_rows)
    if not data:
        raise ConfigError("data.train is missing", "name files, for example data.train=train/part-*")
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
        interleave=settings.interleave,
        bad_lines=settings.bad_lines,
        max_bad_fraction=settings.max_bad_fraction,
        quarantine=quarantine if settings.bad_lines == "quarantine" else None,
        require_labels=labels,
    )
    reader.format_name = settings.format.name
    return reader


def total_bytes(source: Source, config: Config) -> int | None:
    """Return the number of bytes that training will read, or None if it is unknown."""
    size = decompressed_size(expand(source.files)) if isinstance(source, Reader) else None
    return None if size is None else config.train.epochs * size


class Source(Protocol):
    """A Reader or a Feed."""

    schema: Schema
    epoch: int
    counters: Any

    def __iter__(self) -> Iterator[Batch]: ...
    def state(self) -> SourceState: ...
    def restore(self, state: SourceState, /) -> None: ...
