"""parquet: any columns, by the names in the schema; lists are multi-valued slots, a map holds keys with values."""

from collections.abc import Iterator
from dataclasses import dataclass

from clickfleet.files import open_bytes, reading
from clickfleet.formats import Block, Format
from clickfleet.formats._tables import BLOCK_ROWS, TableBlock, table_columns
from clickfleet.schema import Schema


@dataclass(frozen=True)
class Parquet(Format):
    """Read by row group; a position is the number of a row."""

    def blocks(self, path: str, schema: Schema, at: int) -> Iterator[Block]:
        import pyarrow.parquet as pq

        with open_bytes(path) as raw, reading(path):
            metadata = pq.read_metadata(raw)
            columns = table_columns(schema, metadata.schema.to_arrow_schema().names, path)
            # Repeated text stays a dictionary, and each of its entries is hashed once.
            file = pq.ParquetFile(
                raw, metadata=metadata, read_dictionary=[s.source or s.name for s in schema.read_slots]
            )
            per_row = _bytes(file) / max(file.metadata.num_rows, 1)
            first = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if first + rows > at:
                    row = first
                    for batch in file.iter_batches(
                        BLOCK_ROWS, row_groups=[group], columns=columns.needed, use_threads=False
                    ):
                        if row >= at:
                            yield TableBlock(row, row + len(batch), int(per_row * len(batch)), batch, columns)
                        row += len(batch)
                first += rows


def _bytes(file: "object") -> int:
    metadata = file.metadata  # type: ignore[attr-defined]
    return sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
