"""libffm: a label and `field:feature:value` tokens: `1 0:14:0.3651 2:1163:0.3651`. The value multiplies the row."""

from dataclasses import dataclass

from clickfleet.data.parsing.layout import check_holds
from clickfleet.data.parsing.lines import Parser
from clickfleet.data.parsing.slotted import Slotted
from clickfleet.data.schema import Schema


@dataclass(frozen=True)
class Libffm(Slotted):
    """The name of a slot is the number of its field. The schema sets `values: true`."""

    token = "name_key_value"
    shape = "field:feature:value"

    def labelled(self, schema: Schema, first_line: bytes) -> bool:
        return b":" not in first_line.strip().partition(b" ")[0]

    def parser(self, schema: Schema, first_line: bytes, path: str) -> Parser:
        check_holds("libffm", schema, histories=True)
        return super().parser(schema, first_line, path)
