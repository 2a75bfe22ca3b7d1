"""parquet: the schema selects columns by name. Lists are multi-valued slots; a map holds keys with values."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from clickfleet.data.files import open_bytes, reading
from clickfleet.data.formats import Block, Format
from clickfleet.data.parsing.columns import BLOCK_ROWS, Columns, TableBlock
from clickfleet.data.schema import Schema


@dataclass(frozen=True)
class Parquet(Format):
    """Reads row groups. A position is a row number."""

    named_columns = True

    def blocks(self, path: str, schema: Schema, at: int) -> Iterator[Block]:
        import pyarrow.parquet as pq

        with open_bytes(path) as raw, reading(path):
            metadata = pq.read_metadata(raw)
            columns = Columns(schema, metadata.schema.to_arrow_schema().names, path)
            file = pq.ParquetFile(raw, metadata=metadata, read_dictionary=_texts(metadata, columns.needed))
            row = 0
            for group in range(metadata.num_row_groups):
                about = metadata.row_group(group)
                if row + about.num_rows <= at:
                    row += about.num_rows
                    continue
                for batch in file.iter_batches(
                    BLOCK_ROWS, row_groups=[group], columns=columns.needed, use_threads=False
                ):
                    end = row + len(batch)
                    if row >= at:
                        size = about.total_byte_size * len(batch) // about.num_rows
                        yield TableBlock(row, end, size, batch, columns)
                    row = end


def _texts(metadata: Any, needed: list[str]) -> list[str]:
    """Return the text columns. They are read as dictionaries, so that each entry is hashed once."""
    leaves = [metadata.schema.column(i) for i in range(metadata.num_columns)]
    return [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY" and leaf.path.split(".")[0] in needed]
