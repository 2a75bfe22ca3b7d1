"""Criteo: a label, 13 counts and 26 categories on a tab-separated line; the label may be left out."""

from dataclasses import dataclass

from clickfleet.formats._delimited import Delimited
from clickfleet.schema import preset


@dataclass(frozen=True)
class _Criteo(Delimited):
    schema = preset("criteo")


criteo = _Criteo(
    separator="\t",
    columns=("click", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))),
)
