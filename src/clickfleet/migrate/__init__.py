"""What people made for PaddleRec -> ours: configurations, readers, saved tables.

    translated = translate(read("models/rank/dnn/config.yaml"))
    translated.config, translated.schema, translated.report

`original` reads the YAML as the old tools did, `translate` finds what each key means here and says so in a `Report`,
`importing` turns `.pdparams` files and table dumps into a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from clickfleet.migrate.original import Original, is_paddlerec, read
from clickfleet.migrate.report import Report
from clickfleet.migrate.translate import Translated, translate
from clickfleet.migrate.written import write

if TYPE_CHECKING:
    from clickfleet.config import Config

__all__ = ["Original", "Report", "Translated", "configure", "is_paddlerec", "read", "translate", "write"]


def configure(path: str | Path, *overrides: str) -> Config:
    """What to give `clickfleet.train` for a PaddleRec file, with `key=value` of its own or ours over it."""
    from clickfleet.migrate.models import settle
    from clickfleet.migrate.original import is_override

    theirs = [item for item in overrides if is_override(item)]
    return settle(translate(read(path, theirs), [item for item in overrides if item not in theirs]))
