"""A reader's Python -> our own parser of the same text, where both give the same rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from clickfleet.batch import Batch
from clickfleet.config import Config
from clickfleet.errors import ConfigError
from clickfleet.files import expand
from clickfleet.migrate.translate import Translated
from clickfleet.reader import Reader
from clickfleet.sections import Plugin

ROWS = 1000


def by_own_parser(translated: Translated) -> Translated:
    """The same with the format `slots` (or `feasign`), after both have read the first rows alike."""
    config = translated.config
    form = config.data.format
    if not form.name.endswith(".py"):
        raise ConfigError(f"the data are read by {form.name}, not by a RecDataset of yours", "leave --native out")
    own = "slots" if translated.schema.dense else "feasign"
    first = expand(config.data.train)[:1]
    mine, theirs = _rows(config, first, Plugin(own), translated), _rows(config, first, form, translated)
    for number, (a, b) in enumerate(zip(mine, theirs, strict=False), start=1):
        for what in ("labels", "dense", "keys", "offsets"):
            if not np.array_equal(getattr(a, what), getattr(b, what)):
                raise ConfigError(
                    f"{first[0]}: row {number} has other {what} in the reader than in the text (format {own})",
                    "keep the reader: leave --native out",
                )
    translated.report.notes.append(
        f"data.format={own} instead of {form.name}: the first {len(mine)} rows of {first[0]} were read alike by both"
    )
    raw = {**translated.raw, "data": {**translated.raw["data"], "format": {"name": own}}}
    return replace(translated, raw=raw, config=replace(config, data=replace(config.data, format=Plugin(own))))


def _rows(config: Config, files: list[str], form: Plugin, translated: Translated) -> list[Batch]:
    reader: Any = Reader(files, translated.schema, {"name": form.name, **form.settings}, 1)
    return list(islice(reader, ROWS))
