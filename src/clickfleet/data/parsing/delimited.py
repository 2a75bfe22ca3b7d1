"""Parse lines of fields between separators: the base of criteo and csv."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from clickfleet import _core
from clickfleet.config.plugins import closest
from clickfleet.data.parsing.layout import NativeParser, layout, without_absent_sides
from clickfleet.data.parsing.lines import Lines, Parser
from clickfleet.data.schema import Schema
from clickfleet.errors import ConfigError, DataError

SEPARATORS = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " "}
"""Names of separators that are hard to write on a command line."""
MISSING_WORDS = ("NA", "N/A", "NaN", "nan", "NULL", "null", "None", "?", "\\N")
"""Words for a missing label or number, where a format knows them. The parser in the core has the same list."""


@dataclass(frozen=True)
class Delimited(Lines):
    """Columns by position. The schema defines their meaning by name."""

    named_columns = True
    separator: str = "\t"
    columns: tuple[str, ...] = ()
    list_separator: str = ""
    """Separator between the values of a multi-valued slot or the events of a history."""
    quotes: bool = False
    """Fields in double quotes may contain separators."""
    missing_words: ClassVar[bool] = False
    """NA, N/A, NaN, nan, NULL, null, None, ? and \\N are missing labels and missing values of dense columns."""
    blank_is_missing: ClassVar[bool] = False
    """A field of spaces is a missing value."""

    def __post_init__(self) -> None:
        for name in ("separator", "list_separator"):
            given = getattr(self, name)
            text = SEPARATORS.get(given, given) if isinstance(given, str) else "??"
            object.__setattr__(self, name, text)
            if len(text.encode()) > 1 or text in ("\n", "\r", '"') or (name == "separator" and not text):
                raise ConfigError(
                    f"data.format.{name} must be one ASCII character or {', '.join(SEPARATORS)}, not {given!r}"
                )
        if self.separator == self.list_separator:
            raise ConfigError("data.format.separator and data.format.list_separator must differ")

    def parser(self, schema: Schema, first_line: bytes, path: str) -> Parser:
        for name in schema.label_columns:
            if name not in self.columns:
                raise ConfigError(f"the format has no column {name!r} for the label{closest(name, self.columns)}")
        fields = first_line.count(self.separator.encode()) + 1
        columns = list(self.columns)
        if fields == len(columns) - len(schema.label_columns):
            columns = [name for name in columns if name not in schema.label_columns]  # rows without a label
        return delimited_parser(self, schema, columns, path)


def delimited_parser(form: Delimited, schema: Schema, columns: Sequence[str], path: str) -> Parser:
    """Return the parser for a file with these columns."""
    role = _core.Role
    uses: list[list[tuple[object, int]]] = [[] for _ in columns]

    def place(name: str, kind: object, index: int, what: str) -> None:
        if name not in columns:
            raise DataError(
                f"{path}: there is no column {name!r} for {what}{closest(name, columns)}",
                "set the column's name in the file in the schema (source: …)",
            )
        uses[columns.index(name)].append((kind, index))

    has_label = all(name in columns for name in schema.label_columns)
    schema = schema if has_label else without_absent_sides(schema, columns)
    if has_label:
        for i, name in enumerate(schema.label_columns):
            place(name, role.label, i, "the label")
    for kind, column in schema.sides.items():
        place(column, getattr(role, kind), 0, kind)
    for i, dense in enumerate(schema.dense):
        place(dense.source_name, role.dense, i, f"the dense column {dense.name}")
    for i, slot in enumerate(schema.key_columns):
        if slot.bucket is None:
            what = "slot" if i < len(schema.slots) else "history"
            place(slot.source_name, role.slot, i, f"the {what} {slot.name}")
    plan = _core.Delimited(
        layout(schema, label=has_label),
        uses,
        form.separator,
        form.list_separator or "\0",
        form.quotes,
        form.missing_words,
        form.blank_is_missing,
    )
    what = {"\t": "tab", ",": "comma"}.get(form.separator, repr(form.separator))
    expected = f"{len(columns)} {what}-separated fields"
    if len(columns) == len(form.columns) and has_label:
        expected += f" ({len(columns) - len(schema.label_columns)} without a label)"
    elif len(columns) < len(form.columns):
        expected += " (the first line has no label)"
    # A misplaced quotation mark may be in a field after the last column.
    return NativeParser(
        plan, schema, lambda field: columns[field] if field < len(columns) else f"field {field + 1}", expected
    )
