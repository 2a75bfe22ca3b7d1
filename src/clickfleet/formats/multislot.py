"""multislot: blocks `n v1 … vn` in a fixed order without names: `13 0.05 … 0.04 1 715353 1 817085 … 1 787527 1 0`."""

from dataclasses import dataclass
from typing import Any

from clickfleet import _core
from clickfleet.errors import ConfigError
from clickfleet.find import closest
from clickfleet.formats._lines import Lines, Parser
from clickfleet.formats._native import NativeParser, dense_groups, layout
from clickfleet.formats._slotted import named_fields
from clickfleet.schema import Schema, preset


@dataclass(frozen=True)
class Step:
    """One block: its name, what its values are for, how many there must be (0: any), and their dense columns."""

    name: str
    uses: list[tuple[Any, int]]
    width: int
    dense: list[int]


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
        labels = [i for i, step in enumerate(steps) if step.name == schema.label]
        if labels and _blocks(first_line) == len(steps) - 1:
            del steps[labels[0]]  # rows without a label
        plan = layout(schema, label=any(step.name == schema.label for step in steps))
        groups = [step.dense for step in steps]
        native = [
            ([*((_core.Role.dense, i) for _ in step.dense[:1]), *step.uses], step.width) for i, step in enumerate(steps)
        ]
        names = [step.name for step in steps]
        return NativeParser(
            _core.MultiSlot(plan, groups, native), schema, lambda field: names[field] if field < len(names) else ""
        )

    def about_no_labels(self, schema: Schema) -> str:
        names = [step.name for step in self.steps(schema)]
        return (
            f"the first line has one block fewer than {len(names)} ({', '.join(names[:4])} …), which says that the label is missing; "
            "if it is another block, name those that are there in data.format.order"
        )

    def steps(self, schema: Schema) -> list[Step]:
        """What each block is; a block may have several uses."""
        known = {name: self._step(name, schema) for name, _, _ in named_fields(schema)}
        every_dense = Step("dense", [], len(schema.dense), list(range(len(schema.dense))))
        slots = [slot.source or slot.name for slot in schema.read_slots]
        default = [*(["dense"] if schema.dense else []), *slots, *schema.sides.values(), schema.label]
        steps = [Step(name, [], 1, []) for name in ("ins_id", "content") if getattr(self, name)]
        for name in self.order or dict.fromkeys(default):
            if name not in known and name != "dense":
                raise ConfigError(f"data.format.order: the schema has no {name!r}{closest(name, [*known, 'dense'])}")
            steps.append(known.get(name, every_dense))
        both = [step.name for step in steps if step.dense and step.uses]
        if both and not self.order:
            raise ConfigError(
                f"column {both[0]!r} is a dense column and a slot, so it cannot be a part of the block 'dense'",
                f"name the blocks of a line in data.format.order: {', '.join(dict.fromkeys([*dense_groups(schema), *default[1:]]))}",
            )
        names = [step.name for step in steps]
        dense = [column for step in steps for column in step.dense]
        absent = [name for name in known if name not in names and known[name].uses and name != schema.label]
        absent += [column.name for i, column in enumerate(schema.dense) if i not in dense]
        if absent or len(set(names)) < len(names) or len(set(dense)) < len(dense):
            raise ConfigError(
                f"data.format.order must name every column of the schema once; absent: {', '.join(absent) or 'none'}"
            )
        return steps

    @staticmethod
    def _step(name: str, schema: Schema) -> Step:
        fields = [(kind, index) for other, kind, index in named_fields(schema) if other == name]
        dense = dense_groups(schema).get(name, [])
        uses = [(kind, index) for kind, index in fields if kind != _core.Role.dense]
        multi = bool(uses) and all(kind == _core.Role.slot and schema.slots[index].multi for kind, index in uses)
        return Step(name, uses, len(dense) or (0 if multi else 1), dense)


def _blocks(line: bytes) -> int:
    """How many blocks a line has; -1 where it is not made of blocks."""
    texts = line.split()
    at = blocks = 0
    while at < len(texts):
        if not texts[at].isdigit() or len(texts[at]) > 9:
            return -1
        at += int(texts[at]) + 1
        blocks += 1
    return blocks if at == len(texts) else -1
