"""multislot: blocks `n v1 … vn` in a fixed order without names: `13 0.05 … 0.04 1 715353 1 817085 … 1 787527 1 0`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clickfleet import _core
from clickfleet.errors import ConfigError
from clickfleet.find import closest
from clickfleet.formats._lines import Lines, Parser
from clickfleet.formats._native import NativeParser, layout
from clickfleet.formats._slotted import named_fields
from clickfleet.schema import Schema, preset


@dataclass(frozen=True)
class Multislot(Lines):
    """The blocks in the order of the model's inputs; names are those of the schema, `dense` is all dense columns."""

    schema = preset("criteo-slots")

    order: tuple[str, ...] = ()
    """Names of the blocks; default: dense, the slots, then show, click, weight, time, group and the label."""
    ins_id: bool = False
    """A block `1 <id>` starts the line."""
    content: bool = False
    """A block `1 <text>` follows the id, or starts the line."""

    def parser(self, schema: Schema, first_line: bytes, path: str) -> Parser:
        steps = self.steps(schema)
        names = [name for name, *_ in steps]
        if _blocks(first_line) == len(steps) - 1 and schema.label in names:
            del steps[names.index(schema.label)]  # rows without a label
        groups: list[list[int]] = []
        native = []
        names = [name for name, *_ in steps]
        for _, role, index, width, columns in steps:
            if role == _core.Role.dense:
                index = len(groups)
                groups.append(columns)
            native.append((role, index, width))
        plan = _core.MultiSlot(layout(schema, label=schema.label in names), groups, native)
        return NativeParser(plan, schema, lambda field: names[field] if field < len(names) else "")

    def steps(self, schema: Schema) -> list[tuple[str, Any, int, int, list[int]]]:
        """(name, role, index, width or 0, dense columns) of each block."""
        role = _core.Role
        found = {name: (kind, index) for name, kind, index in named_fields(schema)}
        slots = [slot.source or slot.name for slot in schema.read_slots]
        order: Sequence[str] = self.order or [
            *(["dense"] if schema.dense else []),
            *slots,
            *schema.sides.values(),
            schema.label,
        ]
        steps: list[tuple[str, Any, int, int, list[int]]] = []
        for name, given in (("ins_id", self.ins_id), ("content", self.content)):
            if given:
                steps.append((name, role.skip, 0, 1, []))
        for name in order:
            if name == "dense" and "dense" not in found:
                steps.append((name, role.dense, 0, len(schema.dense), list(range(len(schema.dense)))))
                continue
            if name not in found:
                raise ConfigError(f"data.format.order: the schema has no {name!r}{closest(name, [*found, 'dense'])}")
            kind, index = found[name]
            if kind == role.dense:
                columns = [i for i, column in enumerate(schema.dense) if (column.source or column.name) == name]
                steps.append((name, kind, 0, len(columns), columns))
            else:
                multi = kind == role.slot and schema.slots[index].multi
                steps.append((name, kind, index, 0 if multi else 1, []))
        self._complete(schema, steps)
        return steps

    @staticmethod
    def _complete(schema: Schema, steps: Sequence[tuple[str, Any, int, int, list[int]]]) -> None:
        names = [name for name, *_ in steps]
        dense = [column for _, _, _, _, columns in steps for column in columns]
        absent = [slot.name for slot in schema.read_slots if (slot.source or slot.name) not in names]
        absent += [column.name for i, column in enumerate(schema.dense) if i not in dense]
        absent += [name for name in schema.sides.values() if name not in names]
        if absent or len(set(names)) < len(names) or len(set(dense)) < len(dense):
            raise ConfigError(
                f"data.format.order must name every column of the schema once; absent: {', '.join(absent) or 'none'}"
            )


def _blocks(line: bytes) -> int:
    """How many blocks a line has; -1 where it is not made of blocks."""
    texts = line.split()
    at = blocks = 0
    while at < len(texts):
        if not texts[at].isdigit():
            return -1
        at += int(texts[at]) + 1
        blocks += 1
    return blocks if at == len(texts) else -1
