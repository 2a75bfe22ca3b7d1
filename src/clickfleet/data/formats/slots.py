"""slots: `name:value` tokens in any order, separated by single spaces or tabs: `click:0 dense_feature:0.05 … 1:715353`."""

from dataclasses import dataclass

from clickfleet.data.parsing.slotted import Slotted
from clickfleet.data.schema import Schema, preset


@dataclass(frozen=True)
class Slots(Slotted):
    """A name may occur several times: for the columns of a dense group, or the values of a multi-valued slot."""

    schema = preset("criteo-slots")
    token = "name_value"
    shape = "name:value"

    def labelled(self, schema: Schema, first_line: bytes) -> bool:
        names = [token.partition(b":")[0] for token in first_line.replace(b"\t", b" ").strip().split(b" ")]
        return any(label.encode() in names for label in schema.label_columns)
