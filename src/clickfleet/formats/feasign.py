"""feasign: `value:slot` tokens, the value first, after an optional id and a tab: `0:1 4351255118977467729:3`."""

from dataclasses import dataclass

from clickfleet.formats._slotted import Slotted
from clickfleet.schema import Schema, preset


@dataclass(frozen=True)
class Feasign(Slotted):
    """Slot 1 is the label of the default schema, slots 2 to 301 hold any number of values."""

    schema = preset("feasign")
    token = "value_name"
    shape = "value:slot"

    def labelled(self, schema: Schema, first_line: bytes) -> bool:
        tokens = first_line.rpartition(b"\t")[2].strip().split(b" ")
        return schema.label.encode() in [token.partition(b":")[2] for token in tokens]
