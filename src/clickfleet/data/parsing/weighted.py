"""Parse lines of features that may have a value: the base of libsvm and vw."""

from dataclasses import dataclass
from typing import Any, ClassVar

from clickfleet import _core
from clickfleet.data.parsing.layout import NativeParser, check_holds, layout
from clickfleet.data.parsing.lines import Lines
from clickfleet.data.schema import Schema
from clickfleet.errors import ConfigError


@dataclass(frozen=True)
class Weighted(Lines):
    """A label, then features, each with an optional value. All features are keys; there are no dense columns."""

    shape: ClassVar[str]
    """The form of a feature or line, for messages."""
    side_names: ClassVar[dict[str, str]]
    """The side columns that a line can hold, and their names in the native parser."""

    def labelled(self, first_line: bytes) -> bool:
        """Tell whether the lines of a file that starts with this line have labels."""
        raise NotImplementedError


def weighted_parser(
    form: Weighted, grammar: str, schema: Schema, fields: list[tuple[str, Any, int]], first_line: bytes, expected: str
) -> NativeParser:
    """Return the parser for a file that starts with this line."""
    name = type(form).__name__.lower()
    check_holds(name, schema, histories=grammar == "spaces")
    if schema.dense:
        raise ConfigError(f"{name} has no dense columns, but the schema has {len(schema.dense)}", "make them slots")
    for kind, column in schema.sides.items():
        native = form.side_names.get(kind)
        if native is None or native not in ("|", column):
            raise ConfigError(f"{name} has no column {column!r} for {kind}", "remove it from the schema")
        fields = [*fields, (native, getattr(_core.Role, kind), 0)]
    labelled = not first_line.strip() or form.labelled(first_line)
    plan = _core.Weighted(layout(schema, label=labelled), getattr(_core.Grammar, grammar), fields)
    return NativeParser(plan, schema, lambda field: f"token {field + 1}", expected)
