"""Open the data of a configuration, files or objects in memory, as a source of batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from clickfleet.config.load import Config
from clickfleet.config.plugins import Plugin
from clickfleet.data import schema as schemas
from clickfleet.data.batch import Batch, SourceState
from clickfleet.data.files import expand, packing
from clickfleet.data.formats import load as load_format
from clickfleet.data.memory import Feed
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Schema
from clickfleet.errors import ConfigError

QUARANTINE = "quarantine.txt"
Data = Any
"""Paths of files, or anything a Feed accepts: a frame, a table, a mapping of arrays, rows, batches."""


def schema_of(config: Config) -> Schema:
    """Return the schema of a configuration: data.schema, data.preset, or that of the format."""
    of = config.data
    if of.schema or of.preset:
        return schemas.read_schema(of.schema) if of.schema else schemas.preset(str(of.preset))
    form: Any = load_format(of.format)
    if form.schema is None:
        raise ConfigError(f"the format {of.format.name} has no default schema", "set data.schema or data.preset")
    return form.schema  # type: ignore[no-any-return]


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
    form = config.data.format
    if name is None or (name == form.name and not name.endswith(".py")):
        return config
    if name == form.name:
        return replace(config, data=replace(config.data, format=replace(form, origin="")))
    return replace(config, data=replace(config.data, format=Plugin(name)))


def open_source(
    config: Config, data: Data, schema: Schema | None, *, labels: bool = False, folder: Path | None = None
) -> Source:
    """Open files or data in memory as batches of `schema`. Default: the schema of the configuration."""
    of = config.data
    if isinstance(data, Reader | Feed):
        if schema is not None:
            schema.check_same(data.schema, "the model", "the data")
        return data
    form: Any = load_format(of.format)
    wanted = schema or (
        schemas.read_schema(of.schema) if of.schema else schemas.preset(of.preset) if of.preset else None
    )
    if schema is None and of.keys is not None:
        base = wanted or form.schema
        if base is None:
            raise ConfigError("data.keys needs a schema", "set data.schema or data.preset")
        wanted = base.with_keys(of.keys)
    paths = isinstance(data, str | Path) or (
        isinstance(data, list | tuple) and all(isinstance(item, str | Path) for item in data)
    )
    if not paths:
        if wanted is None:
            raise ConfigError(
                "data in memory needs a schema", "pass schema=Schema(…), or set data.schema or data.preset"
            )
        if of.shuffle:
            raise ConfigError("data.shuffle applies to files only", "shuffle data in memory yourself")
        return Feed(data, wanted, of.batch_rows)
    if not data:
        raise ConfigError("data.train is missing", "name files, for example data.train=train/part-*")
    quarantine = of.quarantine
    if of.bad_lines == "quarantine" and quarantine is None:
        quarantine = str((folder or Path()) / QUARANTINE)
        Path(quarantine).parent.mkdir(parents=True, exist_ok=True)
    reader = Reader(
        data,
        wanted,
        form,
        of.batch_rows,
        shuffle=of.shuffle,
        seed=config.train.seed,
        threads=of.threads,
        interleave=of.interleave,
        bad_lines=of.bad_lines,
        max_bad_fraction=of.max_bad_fraction,
        quarantine=quarantine if of.bad_lines == "quarantine" else None,
        require_labels=labels,
    )
    reader.format_name = of.format.name
    return reader


def total_bytes(source: Source, config: Config) -> int | None:
    """Return the number of bytes that training will read, or None if it is unknown."""
    files = expand(source.files) if isinstance(source, Reader) else []
    if not files or any("://" in path or packing(path) or path.endswith(".parquet") for path in files):
        return None
    return config.train.epochs * sum(map(os.path.getsize, files))


class Source(Protocol):
    """A Reader or a Feed."""

    schema: Schema
    epoch: int
    counters: Any

    def __iter__(self) -> Iterator[Batch]: ...
    def state(self) -> SourceState: ...
    def restore(self, state: SourceState, /) -> None: ...
