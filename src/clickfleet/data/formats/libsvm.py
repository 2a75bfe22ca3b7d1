"""libsvm: a label and `index:value` entries, as in LIBSVM, SVMlight and libFM: `1 3:1 17:0.5`. A `#` starts a comment."""

from dataclasses import dataclass
from typing import ClassVar

from clickfleet.data.parsing.layout import check_holds
from clickfleet.data.parsing.lines import Parser
from clickfleet.data.parsing.weighted import Weighted, weighted_parser
from clickfleet.data.schema import Schema
from clickfleet.errors import ConfigError


@dataclass(frozen=True)
class Libsvm(Weighted):
    """The indices are the keys of one multi-valued slot, with `values: true`; or entry i is the key of slot i (`positions`).

    `qid:…` is the group if the schema's group is `qid`.
    """

    positions: bool = False
    """Entry i of a line is the key of slot i; every line has one entry per slot, and all values are 1."""

    shape = "index:value"
    side_names: ClassVar = {"group": "qid"}

    def labelled(self, first_line: bytes) -> bool:
        return b":" not in first_line.split(maxsplit=1)[0]

    def parser(self, schema: Schema, first_line: bytes, path: str) -> Parser:
        check_holds("libsvm", schema)
        if not self.positions and len(schema.slots) != 1:
            raise ConfigError(
                f"libsvm lines fill one slot, but the schema has {len(schema.slots)}",
                "set data.format.positions=true if entry i of every line belongs to slot i",
            )
        grammar = "positions" if self.positions else "bag"
        expected = f"{len(schema.slots)} entries index:value" if self.positions else self.shape
        return weighted_parser(self, grammar, schema, [], first_line, expected)
