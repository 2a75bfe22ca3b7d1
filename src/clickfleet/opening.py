"""Data of any kind -> batches of a schema, as a configuration says."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from clickfleet import schema as schemas
from clickfleet.config import Config
from clickfleet.errors import ConfigError
from clickfleet.feeds import Feed
from clickfleet.files import expand, packing
from clickfleet.formats import load as load_format
from clickfleet.job import Source
from clickfleet.reader import Reader
from clickfleet.schema import Schema
from clickfleet.sections import Plugin

QUARANTINE = "quarantine.txt"
Data = Any
"""Paths of files, or anything a Feed takes: a frame, a table, a mapping of arrays, rows, batches."""


def schema_of(config: Config) -> Schema:
    """What the configuration says the data are: data.schema, data.preset, or the format's own."""
    of = config.data
    if of.schema or of.preset:
        return schemas.read_schema(of.schema) if of.schema else schemas.preset(str(of.preset))
    form: Any = load_format(of.format)
    if form.schema is None:
        raise ConfigError(
            "this format does not say what its columns mean, so a schema is needed", "set data.schema, or name a preset"
        )
    return form.schema  # type: ignore[no-any-return]


def for_scoring(config: Config, batch_size: int | None = None) -> Config:
    """The configuration to read rows for scoring: in the order of the files, and without a quarantine file.

    Training may shuffle rows, read files by turns and put bad lines aside. A score belongs to its row, so scoring does none of it.
    """
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
    """The configuration for files of the format `name`; None or the format it has already keeps its settings.

    A file that the user names is theirs, whoever named it before; the command of a `pipe` stays the model's.
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
    """Files or data in memory as batches of the schema: the given one, else the configuration's."""
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
            raise ConfigError("data.keys changes a schema, and there is none", "set data.schema or data.preset")
        wanted = base.with_keys(of.keys)
    paths = isinstance(data, str | Path) or (
        isinstance(data, list | tuple) and all(isinstance(item, str | Path) for item in data)
    )
    if not paths:
        if wanted is None:
            raise ConfigError("data in memory needs a schema", "give schema=Schema(…), data.schema or data.preset")
        if of.shuffle:
            raise ConfigError("data.shuffle is for files", "shuffle what is in memory before you give it")
        return Feed(data, wanted, of.batch_rows)
    if not data:
        raise ConfigError("data.train is missing", "name files, e.g. data.train=train/part-*")
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
    """Bytes that training will read, where they are known."""
    files = expand(source.files) if isinstance(source, Reader) else []
    if not files or any("://" in path or packing(path) or path.endswith(".parquet") for path in files):
        return None
    return config.train.epochs * sum(map(os.path.getsize, files))
