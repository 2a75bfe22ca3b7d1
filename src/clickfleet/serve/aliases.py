"""Other names of a model's inputs and outputs, so that clients written for an exported Paddle model work unchanged.

>>> from clickfleet.data.schema import Dense, Schema, Slot
>>> schema = Schema((Dense("I1", source="dense_feature"), Dense("I2", source="dense_feature")), (Slot("1"), Slot("2")))
>>> aliases = Aliases(Fields(schema), ["score", "logit"])
>>> aliases.to_dict()
{'C1': '1', 'C2': '2', 'dense_input': 'dense_feature', 'dense_inputs': 'dense_feature', 'sigmoid_0.tmp_0': 'score'}
>>> aliases.output("save_infer_model/scale_0.tmp_1")
'score'
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from clickfleet.errors import ServeError
from clickfleet.serve.features import Fields

DENSE = ("dense_input", "dense_inputs", "dense_feature")
"""Names of the one input that holds all dense values."""
SCORE = "sigmoid_0.tmp_0"
SCORES = re.compile(r"(save_infer_model/scale|sigmoid|softmax)_(\d{1,9})(\.tmp_\d+)?")
"""Names that Paddle gives to the outputs with probabilities: their number is that of the label."""


class Aliases:
    """Maps other names to those of the model. A name that the model has is never changed."""

    def __init__(self, fields: Fields, outputs: Sequence[str], tasks: Sequence[str] = ("label",)) -> None:
        self._fields, self._outputs, self._tasks = fields, outputs, tasks
        names, slots = set(fields.names), [slot.source or slot.name for slot in fields.schema.read_columns]
        self._inputs = {f"C{slot}": slot for slot in slots if slot.isdigit() and f"C{slot}" not in names}
        self._inputs |= {slot[1:]: slot for slot in slots if re.fullmatch(r"C\d+", slot) and slot[1:] not in names}
        groups = list(fields.dense)
        if len(groups) == 1:
            self._inputs |= {name: groups[0] for name in DENSE if name not in names}
        self._split = {name for name in DENSE if name not in names} if len(groups) > 1 else set[str]()
        """Names of an input whose values belong to several inputs of the model."""

    def to_dict(self) -> dict[str, str]:
        """Return the other names and what they mean, for `/v1/model`."""
        found = {**self._inputs, **{name: ", ".join(self._fields.dense) for name in sorted(self._split)}}
        for number in range(len(self._tasks)):
            name = f"sigmoid_{number}.tmp_0"
            if (ours := self.output(name)) != name:
                found[name] = ours
        return found

    def output(self, name: str) -> str:
        """Return the model's name of an output: `score` or, of several labels, the one that the name counts."""
        match = None
        if name not in self._outputs and name not in self._tasks and "score" in self._outputs:
            match = SCORES.fullmatch(name)
        if match is None:
            return name
        if len(self._tasks) == 1:
            return "score"
        number = int(match[2])
        return self._tasks[number] if number < len(self._tasks) and self._tasks[number] not in self._outputs else name

    def is_split(self, name: str) -> bool:
        """Return whether an input holds the values of several inputs of the model."""
        return name in self._split

    def inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return inputs under the model's names. Raise if two names mean the same input."""
        renamed: dict[str, Any] = {}
        for name, value in given.items():
            ours = self._inputs.get(name, name)
            if ours in renamed:
                raise ServeError(f"input {ours!r} appears twice, once as {name!r}")
            renamed[ours] = value
        return renamed

    def parts(self, name: str, width: int) -> list[tuple[str, int, int]]:
        """Return (input of the model, first value, end) for the values of an input that is split."""
        places, at = [], 0
        for group, columns in self._fields.dense.items():
            places.append((group, at, at + len(columns)))
            at += len(columns)
        if width != at:
            raise ServeError(f"{name}: expected {at} values per row, not {width}")
        return places
