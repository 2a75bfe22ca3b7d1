"""multislot: unnamed blocks `n v1 … vn` in a fixed order: `13 0.05 … 0.04 1 715353 1 817085 … 1 787527 1 0`."""

from dataclasses import dataclass
from typing import Any

from clickfleet import _core
from clickfleet.config.plugins import closest
from clickfleet.data.parsing.layout import NativeParser, dense_groups, layout
from clickfleet.data.parsing.lines import Lines, Parser
from clickfleet.data.parsing.slotted import named_fields
from clickfleet.data.schema import Schema, preset
from clickfleet.errors import ConfigError


@dataclass(frozen=True)
class BlockSpec:
    """One block: its name, the uses of its values, their number (0: any), and their dense columns."""

    name: str
    uses: list[tuple[Any, int]]
    width: int
    dense: list[int]


@dataclass(frozen=True)
class Multislot(Lines):
    """Blocks in the order of the model's inputs. The schema names them; `dense` stands for all dense columns."""

    schema = preset("criteo-slots")

    order: tuple[str, ...] = ()
    """Names of the blocks in order. Default: dense, the slots, show, click, weight, time, group, the label."""
    ins_id: bool = False
    """Lines start with a block `1 <id>`."""
    content: bool = False
    """A block `1 <text>` follows the id, or starts the line if there is no id."""

    def parser(self, schema: Schema, first_line: bytes, path: str) -> Parser:
        blocks = self.block_specs(schema)
        labels = schema.label_columns
        unlabelled = [block for block in blocks if block.name not in labels]
        if len(unlabelled) < len(blocks) and _count_blocks(first_line) == len(unlabelled):
            blocks = unlabelled
        plan = layout(schema, label=any(block.name in labels for block in blocks))
        groups = [block.dense for block in blocks]
        native = [
            ([*((_core.Role.dense, i) for _ in block.dense[:1]), *block.uses], block.width)
            for i, block in enumerate(blocks)
        ]
        names = [block.name for block in blocks]
        return NativeParser(
            _core.MultiSlot(plan, groups, native), schema, lambda field: names[field] if field < len(names) else ""
        )

    def about_no_labels(self, schema: Schema) -> str:
        names = [block.name for block in self.block_specs(schema)]
        return (
            f"the first line has {len(names) - len(schema.tasks)} blocks instead of {len(names)} ({', '.join(names[:4])} …), "
            "so the label seems to be missing; if another block is missing, set data.format.order to the blocks in the files"
        )

    def block_specs(self, schema: Schema) -> list[BlockSpec]:
        """Return the blocks of a line in order. A block may have several uses."""
        known = {name: self._block(name, schema) for name, _, _ in named_fields(schema)}
        every_dense = BlockSpec("dense", [], len(schema.dense), list(range(len(schema.dense))))
        slots = [slot.source_name for slot in schema.read_columns]
        default = [*(["dense"] if schema.dense else []), *slots, *schema.sides.values(), *schema.label_columns]
        blocks = [BlockSpec(name, [], 1, []) for name in ("ins_id", "content") if getattr(self, name)]
        for name in self.order or dict.fromkeys(default):
            if name not in known and name != "dense":
                raise ConfigError(f"data.format.order: the schema has no {name!r}{closest(name, [*known, 'dense'])}")
            blocks.append(known.get(name, every_dense))
        both = [block.name for block in blocks if block.dense and block.uses]
        if both and not self.order:
            raise ConfigError(
                f"column {both[0]!r} is both a dense column and a slot, so it cannot be part of the block 'dense'",
                f"list the blocks of a line in data.format.order: {', '.join(dict.fromkeys([*dense_groups(schema), *default[1:]]))}",
            )
        names = [block.name for block in blocks]
        dense = [column for block in blocks for column in block.dense]
        absent = [name for name in known if name not in names and known[name].uses and name not in schema.label_columns]
        absent += [column.name for i, column in enumerate(schema.dense) if i not in dense]
        if absent or len(set(names)) < len(names) or len(set(dense)) < len(dense):
            raise ConfigError(
                f"data.format.order must name every column of the schema once; missing: {', '.join(absent) or 'none'}"
            )
        return blocks

    @staticmethod
    def _block(name: str, schema: Schema) -> BlockSpec:
        fields = [(kind, index) for other, kind, index in named_fields(schema) if other == name]
        dense = dense_groups(schema).get(name, [])
        uses = [(kind, index) for kind, index in fields if kind != _core.Role.dense]
        multi = bool(uses) and all(kind == _core.Role.slot and schema.key_columns[index].multi for kind, index in uses)
        return BlockSpec(name, uses, len(dense) or (0 if multi else 1), dense)


def _count_blocks(line: bytes) -> int:
    """Return the number of blocks in a line, or -1 if it does not consist of blocks."""
    tokens = line.split()
    at = blocks = 0
    while at < len(tokens):
        if not tokens[at].isdigit() or len(tokens[at]) > 9:
            return -1
        at += int(tokens[at]) + 1
        blocks += 1
    return blocks if at == len(tokens) else -1
