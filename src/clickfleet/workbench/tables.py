"""Rows of facts as tables: for a terminal, as Markdown, CSV and HTML.

>>> found = Table([Column("model"), Column("auc", "AUC", "{:.3f}")], [{"model": "fm", "auc": 0.75}, {"model": "lr", "auc": None}])
>>> print(found.text())
model    AUC
fm     0.750
lr         –
>>> print(found.markdown())
| model | AUC |
|---|---:|
| fm | 0.750 |
| lr | – |
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from clickfleet.report import page

Row = Mapping[str, Any]


class Column(NamedTuple):
    """A key of the rows, its heading, and how its numbers are written; text stays as it is."""

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


class Table:
    """Columns and rows; text stands left, numbers right."""

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
        lines = [[column.head for column in self.columns], *self.cells()]
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
        """Every key of every row, with all digits."""
        keys = list(dict.fromkeys(key for row in self.rows for key in row))
        out = io.StringIO()
        writer = csv.DictWriter(out, keys, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return out.getvalue()
