"""csv: the first line of each file, or `columns`, names the columns. Quoted fields may contain separators."""

import csv
from dataclasses import dataclass

from clickfleet.data.parsing.delimited import Delimited, delimited_parser
from clickfleet.data.parsing.lines import Parser
from clickfleet.data.schema import Schema
from clickfleet.errors import DataError


@dataclass(frozen=True)
class Csv(Delimited):
    """The schema selects columns by name. An empty field is a missing value, and so is NA, null, None or \\N in a dense column."""

    separator: str = ","
    """Separator between two columns."""
    columns: tuple[str, ...] = ()
    """Names of the columns, for files without a header line."""
    list_separator: str = "|"
    quotes: bool = True
    missing_words = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "columns", tuple(map(str, self.columns)))
        object.__setattr__(self, "header_lines", 0 if self.columns else 1)

    def parser(self, schema: Schema, first_line: bytes, path: str) -> Parser:
        if self.columns:
            return super().parser(schema, first_line, path)
        if not first_line:  # an empty file
            return delimited_parser(self, schema, self.expected(schema), path)
        try:
            names = self.split(first_line.decode("utf-8-sig"))
        except UnicodeDecodeError:
            raise DataError(f"{path}:1: the header line is not UTF-8") from None
        except (csv.Error, StopIteration) as error:
            raise DataError(f"{path}:1: cannot read the header line: {error}") from None
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"{path}:1: two columns are named {twice!r}")
        return delimited_parser(self, schema, names, path)

    def split(self, line: str) -> list[str]:
        if not self.quotes:
            return line.split(self.separator)
        return next(csv.reader([line], delimiter=self.separator))

    def expected(self, schema: Schema) -> list[str]:
        """Return the names of the columns that a schema needs."""
        dense = [column.source_name for column in schema.dense]
        slots = [slot.source_name for slot in schema.read_columns]
        return [*schema.label_columns, *schema.sides.values(), *dense, *slots]
