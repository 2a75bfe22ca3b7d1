"""Replace a reader in Python by our native parser if both return the same rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from clickfleet.config.plugins import Plugin
from clickfleet.data.batch import Batch
from clickfleet.data.files import expand
from clickfleet.data.reader import Reader
from clickfleet.errors import ConfigError
from clickfleet.paddlerec.translation import Translated

ROWS = 1000


def use_native_parser(translated: Translated) -> Translated:
    """Return the translation with the format `slots` or `feasign`, after checking that it reads the same first rows."""
    config = translated.config
    form = config.data.format
    if not form.name.endswith(".py"):
        raise ConfigError(f"--native replaces a RecDataset, but {form.name} reads the data", "remove --native")
    native = Plugin("slots" if translated.schema.dense else "feasign")
    first = expand(config.data.train)[:1]
    ours, theirs = _rows(first, native, translated), _rows(first, form, translated)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False), start=1):
        for what in ("labels", "dense", "keys", "offsets"):
            if not np.array_equal(getattr(a, what), getattr(b, what)):
                raise ConfigError(
                    f"{first[0]}: the reader and the format {native.name} return different {what} for row {number}",
                    "remove --native to keep the reader",
                )
    translated.report.notes.append(
        f"data.format={native.name} replaces {form.name}: both return the same first {len(ours)} rows of {first[0]}"
    )
    raw = {**translated.raw, "data": {**translated.raw["data"], "format": {"name": native.name}}}
    return replace(translated, raw=raw, config=replace(config, data=replace(config.data, format=native)))


def _rows(files: list[str], form: Plugin, translated: Translated) -> list[Batch]:
    reader: Any = Reader(files, translated.schema, {"name": form.name, **form.settings}, 1)
    return list(islice(reader, ROWS))
