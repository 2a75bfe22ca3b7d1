"""vw: the text of Vowpal Wabbit: `1 0.5 'tag |user u17 |ad a3 price:0.5`. A namespace is a multi-valued slot."""

from dataclasses import dataclass
from typing import ClassVar

from clickfleet import _core
from clickfleet.data.parsing.lines import Parser
from clickfleet.data.parsing.weighted import Weighted, weighted_parser
from clickfleet.data.schema import Schema


@dataclass(frozen=True)
class Vw(Weighted):
    """The name of a slot is that of its namespace. The importance is the weight if the schema has one. A tag is skipped."""

    unnamed: str = "features"
    """Name of the slot that holds the features of the namespace without a name."""

    shape = "label |namespace feature:value …"
    side_names: ClassVar = {"weight": "|"}

    def labelled(self, first_line: bytes) -> bool:
        words = first_line.partition(b"|")[0]
        tokens = words.split()
        if tokens and (words[-1:].strip() or tokens[-1].startswith(b"'")):
            tokens.pop()  # a tag touches the bar or starts with an apostrophe
        return bool(tokens)

    def parser(self, schema: Schema, first_line: bytes, path: str) -> Parser:
        names = ["" if slot.source_name == self.unnamed else slot.source_name for slot in schema.key_columns]
        fields = [(name, _core.Role.slot, i) for i, name in enumerate(names)]
        return weighted_parser(self, "spaces", schema, fields, first_line, self.shape)
