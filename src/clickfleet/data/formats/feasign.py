"""feasign: `value:slot` tokens after an optional id and a tab: `0:1 4351255118977467729:3`."""

from dataclasses import dataclass

from clickfleet.data.parsing.slotted import Slotted
from clickfleet.data.schema import Schema, preset


@dataclass(frozen=True)
class Feasign(Slotted):
    """In the default schema, slot 1 is the label, and slots 2 to 301 are multi-valued."""

    schema = preset("feasign")
    token = "value_name"
    shape = "value:slot"

    def labelled(self, schema: Schema, first_line: bytes) -> bool:
        tokens = first_line.rpartition(b"\t")[2].strip().split(b" ")
        names = [token.partition(b":")[2] for token in tokens]
        return any(label.encode() in names for label in schema.label_columns)
