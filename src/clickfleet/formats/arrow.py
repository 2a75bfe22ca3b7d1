"""arrow: Arrow IPC files and streams (also Feather), any columns by the names in the schema."""

from collections.abc import Iterator
from dataclasses import dataclass

from clickfleet.files import open_bytes, reading
from clickfleet.formats import Block, Format
from clickfleet.formats._tables import BLOCK_ROWS, TableBlock, table_columns
from clickfleet.schema import Schema

_MAGIC = b"ARROW1"


@dataclass(frozen=True)
class Arrow(Format):
    """Read by record batch; a position is the number of a row."""

    def blocks(self, path: str, schema: Schema, at: int) -> Iterator[Block]:
        import pyarrow as pa

        with open_bytes(path) as raw, reading(path):
            is_file = raw.read(len(_MAGIC)) == _MAGIC
            raw.seek(0)
            reader = pa.ipc.open_file(raw) if is_file else pa.ipc.open_stream(raw)
            columns = table_columns(schema, reader.schema.names, path)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else iter(reader)
            first = 0
            for batch in batches:
                for start in range(0, len(batch), BLOCK_ROWS):
                    piece = batch.slice(start, BLOCK_ROWS)
                    row = first + start
                    if row >= at:
                        yield TableBlock(row, row + len(piece), piece.nbytes, piece, columns)
                first += len(batch)
