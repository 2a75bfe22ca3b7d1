"""What the columnar formats share: a slice of a table as a block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clickfleet.formats import Block, OnBad, Parsed
from clickfleet.schema import Schema

if TYPE_CHECKING:
    from clickfleet.formats._columns import Columns

BLOCK_ROWS = 16384


@dataclass(slots=True)
class TableBlock(Block):
    at: int
    end: int
    size: int
    table: Any
    columns: "Columns"

    def parse(self, on_bad: OnBad) -> Parsed:
        return self.columns.parse(self.table, on_bad)


def table_columns(schema: Schema, present: Sequence[str], path: str) -> "Columns":
    from clickfleet.formats._columns import Columns

    return Columns(schema, present, path)
