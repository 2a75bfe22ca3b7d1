"""arrow: Arrow IPC files and streams, including Feather. The schema selects columns by name."""

from collections.abc import Iterator
from dataclasses import dataclass

from clickfleet.data.files import open_bytes, reading
from clickfleet.data.formats import Block, Format
from clickfleet.data.parsing.columns import BLOCK_ROWS, Columns, TableBlock
from clickfleet.data.schema import Schema


@dataclass(frozen=True)
class Arrow(Format):
    """Reads record batches. A position is a row number."""

    named_columns = True

    def blocks(self, path: str, schema: Schema, at: int) -> Iterator[Block]:
        from clickfleet.data.arrow_ipc import open_ipc

        with open_bytes(path) as raw, reading(path):
            batches = open_ipc(raw)
            columns = Columns(schema, batches.schema.names, path)
            first = 0
            for batch in batches:
                for start in range(0, len(batch), BLOCK_ROWS):
                    piece = batch.slice(start, BLOCK_ROWS)
                    row = first + start
                    if row >= at:
                        yield TableBlock(row, row + len(piece), piece.nbytes, piece, columns)
                first += len(batch)
