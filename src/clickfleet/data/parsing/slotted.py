"""Parse lines of tokens that name their slot: the base of slots, feasign and libffm."""

from dataclasses import dataclass
from typing import Any, ClassVar

from clickfleet import _core
from clickfleet.data.parsing.layout import NativeParser, dense_groups, layout
from clickfleet.data.parsing.lines import Lines, Parser
from clickfleet.data.schema import Schema


def named_fields(schema: Schema) -> list[tuple[str, Any, int]]:
    """Return (name in the files, role, index) of every column of a schema, with dense columns by group."""
    role = _core.Role
    fields: list[tuple[str, Any, int]] = [(name, role.label, i) for i, name in enumerate(schema.label_columns)]
    fields += [(column, getattr(role, kind), 0) for kind, column in schema.sides.items()]
    fields += [(name, role.dense, i) for i, name in enumerate(dense_groups(schema))]
    fields += [(slot.source_name, role.slot, i) for i, slot in enumerate(schema.key_columns) if slot.bucket is None]
    return fields


@dataclass(frozen=True)
class Slotted(Lines):
    """Tokens separated by single spaces. Names unknown to the schema are skipped; a slot without a token is missing."""

    token: ClassVar[str]
    shape: ClassVar[str]
    """The form of a token, for messages."""

    def labelled(self, schema: Schema, first_line: bytes) -> bool:
        """Tell whether the lines of a file that starts with this line have labels."""
        raise NotImplementedError

    def parser(self, schema: Schema, first_line: bytes, path: str) -> Parser:
        plan = _core.Slotted(
            layout(schema, label=self.labelled(schema, first_line)),
            getattr(_core.Token, self.token),
            list(dense_groups(schema).values()),
            named_fields(schema),
        )
        groups = list(dense_groups(schema))
        return NativeParser(
            plan, schema, lambda field: f"token {field + 1}" if field >= 0 else groups[-2 - field], self.shape
        )
