"""arrow: Arrow IPC files and streams (also Feather), any columns by the names in the schema."""

from collections.abc import Iterator
from dataclasses import dataclass

from clickfleet.files import open_bytes, reading
from clickfleet.formats import Block, Format
from clickfleet.formats._tables import BLOCK_ROWS, TableBlock, table_columns
from clickfleet.schema import Schema


@dataclass(frozen=True)
class Arrow(Format):
    """Read by record batch; a position is the number of a row."""

    def blocks(self, path: str, schema: Schema, at: int) -> Iterator[Block]:
        from clickfleet.arrow_ipc import Checked, is_file

        with open_bytes(path) as raw, reading(path):
            head = raw.read(8)
            raw.seek(0)
            batches = Checked(raw, is_file=is_file(head))
            columns = table_columns(schema, batches.schema.names, path)
            first = 0
            for batch in batches:
                for start in range(0, len(batch), BLOCK_ROWS):
                    piece = batch.slice(start, BLOCK_ROWS)
                    row = first + start
                    if row >= at:
                        yield TableBlock(row, row + len(piece), piece.nbytes, piece, columns)
                first += len(batch)
