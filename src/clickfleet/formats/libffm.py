"""libffm: a label, then `field:feature:value` tokens: `1 0:14:0.3651 2:1163:0.3651`; the value multiplies the row."""

from dataclasses import dataclass

from clickfleet.formats._slotted import Slotted
from clickfleet.schema import Schema


@dataclass(frozen=True)
class Libffm(Slotted):
    """A slot of the schema is named by its field's number; the schema says `values: true`."""

    token = "name_key_value"
    shape = "field:feature:value"

    def labelled(self, schema: Schema, first_line: bytes) -> bool:
        return b":" not in first_line.strip().partition(b" ")[0]
