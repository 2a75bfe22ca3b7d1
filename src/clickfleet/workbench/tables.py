"""Format rows as tables for a terminal, Markdown, CSV and HTML.

>>> table = TextTable([Column("model"), Column("auc", "AUC", "{:.3f}")], [{"model": "fm", "auc": 0.75}, {"model": "lr", "auc": None}])
>>> print(table.text())
model    AUC
fm     0.750
lr         –
>>> print(table.markdown())
| model | AUC |
|---|---:|
| fm | 0.750 |
| lr | – |
"""

from __future__ import annotations

import csv
import importlib.metadata
import io
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import clickfleet
from clickfleet.config.plugins import shown
from clickfleet.training.report import page


@dataclass(frozen=True)
class Environment:
    """Facts about the machine and the installed software."""

    facts: dict[str, str | int] = field(default_factory=dict)

    def text(self) -> str:
        width = max(map(len, self.facts))
        return "\n".join(f"{key:<{width}}  {value}" for key, value in self.facts.items())


def environment(**more: str) -> Environment:
    """Describe processor, memory, load and the versions of the numerical libraries."""
    from clickfleet import _core

    versions = {}
    for name in ("torch", "onnxruntime", "numpy", "pyarrow"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    pages, size = (os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_PAGE_SIZE"))
    return Environment(
        {
            "clickfleet": clickfleet.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "core built for": _core.cpu_level(),
            "memory": f"{pages * size / 2**30:.1f} GiB",
            "load": " ".join(f"{x:.2f}" for x in os.getloadavg()),
            **versions,
            **more,
        }
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


Row = Mapping[str, Any]


class Column(NamedTuple):
    """A key of the rows, its heading, and the format of its numbers. Text stays unchanged."""

    key: str
    title: str = ""
    form: str = "{}"

    @property
    def head(self) -> str:
        return self.title or self.key

    def show(self, row: Row) -> str:
        value = row.get(self.key)
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return "–"
        return value if isinstance(value, str) else self.form.format(value)


class TextTable:
    """Columns and rows. Text is aligned left, numbers right. Columns without values are dropped."""

    def __init__(self, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        self.columns = [
            column for column in columns if any(row.get(column.key) is not None for row in rows) or not rows
        ]
        self.rows = list(rows)

    def cells(self) -> list[list[str]]:
        return [[column.show(row) for column in self.columns] for row in self.rows]

    def _left(self) -> list[bool]:
        return [any(isinstance(row.get(column.key), str) for row in self.rows) for column in self.columns]

    def text(self) -> str:
        lines = [[column.head for column in self.columns], *([shown(cell) for cell in line] for line in self.cells())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        left = self._left()
        return "\n".join(
            "  ".join(
                f"{cell:<{width}}" if to_left else f"{cell:>{width}}"
                for cell, width, to_left in zip(line, widths, left, strict=True)
            ).rstrip()
            for line in lines
        )

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

        rule = "|" + "|".join("---" if left else "---:" for left in self._left()) + "|"
        return "\n".join([line([column.head for column in self.columns]), rule, *map(line, self.cells())])

    def html(self) -> str:
        return page.table(
            [column.head for column in self.columns], ([escape(c) for c in line] for line in self.cells())
        )

    def csv(self) -> str:
        """Return every key of every row, with all digits."""
        keys = list(dict.fromkeys(key for row in self.rows for key in row))
        out = io.StringIO()
        writer = csv.DictWriter(out, keys, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return out.getvalue()
