"""criteo: a label, 13 counts and 26 categories per tab-separated line. The label may be omitted. Blank is missing."""

from dataclasses import dataclass

from clickfleet.data.parsing.delimited import Delimited
from clickfleet.data.parsing.layout import check_holds
from clickfleet.data.parsing.lines import Parser
from clickfleet.data.schema import Schema, preset


@dataclass(frozen=True)
class _Criteo(Delimited):
    schema = preset("criteo")
    blank_is_missing = True

    def parser(self, schema: Schema, first_line: bytes, path: str) -> Parser:
        check_holds("criteo", schema)
        return super().parser(schema, first_line, path)


criteo = _Criteo(
    separator="\t",
    columns=("click", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))),
)
