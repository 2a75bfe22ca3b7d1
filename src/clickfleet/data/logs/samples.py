"""Show samples as training sees them: for every column its value in the file, its transformed value, or its keys.

>>> from tempfile import NamedTemporaryFile
>>> from clickfleet.data.schema import Dense, Slot, Transform
>>> with NamedTemporaryFile("w") as file:
...     _ = file.write("click:1 age:3 city:Bern\\n"), file.flush()
...     schema = Schema((Dense("age", Transform("log1p")),), (Slot("city"),), label="click")
...     (sample,) = read_samples([file.name], Plugin("slots"), schema, rows=1)
>>> sample.label, sample.dense[0].raw, round(sample.dense[0].value, 4), sample.slots[0].raw
(1.0, '3', 1.3863, ['Bern'])
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from clickfleet.config.plugins import Plugin
from clickfleet.data.bad_lines import describe
from clickfleet.data.batch import AMOUNTS, Batch
from clickfleet.data.formats import Format, load
from clickfleet.data.formats.multislot import Multislot
from clickfleet.data.histories import history_columns
from clickfleet.data.logs.source import LineRows, TableRows, column_names, stored
from clickfleet.data.parsing.columns import TableBlock
from clickfleet.data.parsing.delimited import Delimited
from clickfleet.data.parsing.lines import LineBlock
from clickfleet.data.parsing.slotted import Slotted
from clickfleet.data.repeatable import check_repeatable
from clickfleet.data.schema import History, Schema, Slot

RawValues = dict[str, list[str]]
"""Name of a column in the file -> its values as text."""
MOST_VALUES = 8
"""Values of a multi-valued slot that the text shows."""


@dataclass(frozen=True)
class DenseSample:
    """A dense value. `raw` is None if the value is missing in the file, or if the reader does not show it."""

    name: str
    raw: str | None
    value: float
    transform: str


@dataclass(frozen=True)
class SlotSample:
    """The keys of a slot, with the values in the file they come from."""

    name: str
    raw: list[str] | None
    keys: list[int]
    weights: list[float] | None = None


@dataclass
class LogSample:
    """One row of a file. `problem` says why it is a bad line; it then has no values."""

    file: str
    row: int
    """Number of the row or line in its file, from 1."""
    label: float | None = None
    """The first label; None if it is missing."""
    labels: dict[str, float | None] = field(default_factory=dict)
    dense: list[DenseSample] = field(default_factory=list)
    slots: list[SlotSample] = field(default_factory=list)
    histories: list[SlotSample] = field(default_factory=list)
    """The columns of the histories. `raw` has all events of the file, `keys` those that count."""
    sides: dict[str, float] = field(default_factory=dict)
    line: str | None = None
    problem: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_samples(files: Sequence[str], plugin: Plugin, schema: Schema, rows: int = 5) -> Iterator[LogSample]:
    """Yield the first rows of files as training reads them. Bad lines are samples with a problem."""
    form = load(plugin)
    left = rows
    for path in files:
        check_repeatable(plugin, form, schema, path)
        for sample in _samples(form, path, schema):
            if left <= 0:
                return
            yield sample
            left -= 1


def _samples(form: Format, path: str, schema: Schema) -> Iterator[LogSample]:
    line, raw_of = form.header_lines, None
    for block in form.blocks(path, schema, 0):
        texts = stored(block) if isinstance(block, LineBlock | TableBlock) else None
        parsed = block.parse("all")
        bad = {item.line: describe(item) for item in parsed.bad}
        lines = texts.content.splitlines() if isinstance(texts, LineRows) else []
        good = [i for i in range(parsed.lines) if i not in bad]
        aligned = len(good) == len(parsed.batch)  # a user's reader may make several rows of a line
        raw_of = raw_of or _raw_reader(form, path, schema)
        for place, number in enumerate(good if aligned else range(len(parsed.batch))):
            text = lines[number] if aligned and number < len(lines) else None
            raw = None
            if aligned and isinstance(texts, TableRows):
                raw = _table_values(texts.content.slice(number, 1).to_pylist()[0])
            elif text is not None and raw_of is not None:
                raw = raw_of(text)
            yield _sample(parsed.batch, place, schema, raw, path, line + number + 1, text)
        for number, problem in bad.items():
            text = lines[number] if number < len(lines) else b""
            yield LogSample(path, line + number + 1, line=text.decode("utf-8", "backslashreplace"), problem=problem)
        line += parsed.lines


def _sample(
    batch: Batch, place: int, schema: Schema, raw: RawValues | None, path: str, row: int, text: bytes | None
) -> LogSample:
    one = batch[place : place + 1]
    values = raw or {}
    taken: dict[str, int] = {}
    dense: list[DenseSample] = []
    for column, value in zip(schema.dense, one.dense[0].tolist(), strict=True):
        name = column.source_name if column.source_name in values else "dense"  # one block may hold all dense values
        at = taken.get(name, 0)  # several columns may share the values of one name
        taken[name] = at + 1
        given = values.get(name, [])
        number = given[at] if at < len(given) else None
        dense.append(DenseSample(column.name, number, value, str(column.transform)))
    slots = []
    for i, slot in enumerate(schema.key_columns):
        begin, end = int(one.offsets[i]), int(one.offsets[i + 1])
        texts = None if raw is None or slot.bucket is not None else raw.get(slot.source_name, [])
        weights = None if one.values is None else one.values[begin:end].tolist()
        slots.append(SlotSample(slot.name, texts, one.keys[begin:end].tolist(), weights))
    sides = {name: float(getattr(one, name)[0]) for name in AMOUNTS if getattr(one, name) is not None}
    sides |= {"times": int(one.times[0])} if one.times is not None else {}
    shown = None if text is None else text.decode("utf-8", "backslashreplace")
    labels: dict[str, float | None] = {}
    if one.labels is not None:
        numbers = one.labels.reshape(-1).tolist()
        labels = {task.name: None if x != x else x for task, x in zip(schema.tasks, numbers, strict=True)}
    return LogSample(
        path,
        row,
        labels.get(schema.tasks[0].name),
        labels,
        dense,
        slots[: len(schema.slots)],
        slots[len(schema.slots) :],
        sides,
        shown,
    )


def _raw_reader(form: Format, path: str, schema: Schema) -> Callable[[bytes], RawValues] | None:
    """Return the function that finds the values of a line. None: only the reader itself knows them."""
    if isinstance(form, Delimited):
        names = column_names(form, path, schema)
        lists = {slot.source_name for slot in schema.key_columns[len(schema.slots) :]}
        return lambda line: _delimited_values(line, names, form, lists)
    if isinstance(form, Slotted):
        return lambda line: _slotted_values(line, form, schema)
    if isinstance(form, Multislot):
        blocks = [block.name for block in form.block_specs(schema)]
        unlabelled = [name for name in blocks if name not in schema.label_columns]
        return lambda line: _multislot_values(line, blocks, unlabelled)
    return None


def _delimited_values(line: bytes, names: Sequence[str], form: Delimited, histories: Collection[str]) -> RawValues:
    text = line.decode("utf-8", "backslashreplace")
    separator = form.separator
    fields = next(csv.reader([text], delimiter=separator)) if form.quotes and text else text.split(separator)
    values: RawValues = {}
    for name, value in zip(names, fields, strict=False):
        parts = value.split(form.list_separator) if form.list_separator else [value]
        parts = [part for part in parts if part.strip(" ") or not form.blank_is_missing]
        keep_empty = name in histories and value  # an event without a value
        values[name] = parts if keep_empty else [part for part in parts if part]
    return values


def _slotted_values(line: bytes, form: Slotted, schema: Schema) -> RawValues:
    values: RawValues = {}
    text = line.decode("utf-8", "backslashreplace")
    tokens = text.rpartition("\t")[2].split() if form.token == "value_name" else text.split()
    for token in tokens:
        parts = token.split(":")
        if len(parts) == 1:
            values[schema.label] = parts
        elif form.token == "value_name":
            values.setdefault(parts[1], []).append(parts[0])
        else:
            values.setdefault(parts[0], []).append(parts[1])
    return values


def _multislot_values(line: bytes, blocks: Sequence[str], unlabelled: Sequence[str]) -> RawValues:
    tokens, parts, at = line.decode("utf-8", "backslashreplace").split(), list[list[str]](), 0
    while at < len(tokens):
        count = int(tokens[at])
        parts.append(tokens[at + 1 : at + 1 + count])
        at += 1 + count
    return dict(zip(blocks if len(parts) == len(blocks) else unlabelled, parts, strict=False))


def _table_values(row: dict[str, Any]) -> RawValues:
    values: RawValues = {}
    for name, value in row.items():
        items = value if isinstance(value, list) else [] if value is None else [value]
        values[name] = [
            item.decode("utf-8", "backslashreplace") if isinstance(item, bytes) else "" if item is None else str(item)
            for item in items
        ]
    return values


def text_of(sample: LogSample, schema: Schema) -> str:
    """Return a sample as text, one line per column."""
    head = f"{sample.file}:{sample.row}"
    if sample.problem is not None:
        return f"{head}: bad line: {sample.problem}\n  {(sample.line or '')[:200]}"
    slots = [*sample.slots, *sample.histories]
    tasks = [task.name if schema.labels else schema.label for task in schema.tasks]
    names = [*(d.name for d in sample.dense), *(s.name for s in slots), *tasks, *sample.sides]
    width = min(max(map(len, names), default=0), 40)
    lines = [head]
    for name, task in zip(tasks, schema.tasks, strict=True):
        value = sample.labels.get(task.name)
        missing = "missing" if sample.labels else "no label"
        lines.append(f"  {name:{width}}  {missing if value is None else f'{value:g}'}")
    lines += [f"  {name:{width}}  {value:g}" for name, value in sample.sides.items()]
    shows_raw = any(d.raw is not None for d in sample.dense) or any(s.raw is not None for s in sample.slots)
    for dense in sample.dense:
        raw = dense.raw if dense.raw is not None else "-" if shows_raw else ""
        transform = "" if dense.transform == "none" else f"  ({dense.transform})"
        lines.append(f"  {dense.name:{width}}  {raw}{' -> ' if raw else ''}{dense.value:.6g}{transform}")
    limits = {
        slot.name: history for history, first in history_columns(schema) for slot in _columns(schema, first, history)
    }
    for slot in slots:
        pairs = [f"{key}" if slot.weights is None else f"{key}:{slot.weights[i]:g}" for i, key in enumerate(slot.keys)]
        raw = "" if slot.raw is None else f"{_shortened(slot.raw) or '-'} -> "
        if (history := limits.get(slot.name)) is not None:
            raw = "" if slot.raw is None else f"{_shortened([text or '-' for text in slot.raw]) or '-'} -> "
            dropped = 0 if slot.raw is None else len(slot.raw) - len(slot.keys)
            kept = f", the {history.keep} {len(slot.keys)} of {len(slot.raw or ())}" if dropped > 0 else ""
            lines.append(f"  {slot.name:{width}}  {raw}{_shortened(pairs) or 'no events'}  ({_events(slot)}{kept})")
            continue
        lines.append(f"  {slot.name:{width}}  {raw}{_shortened(pairs) or 'no key'}")
    return "\n".join(lines)


def _shortened(values: Sequence[str]) -> str:
    more = f" … {len(values) - MOST_VALUES} more" if len(values) > MOST_VALUES else ""
    return " ".join(values[:MOST_VALUES]) + more


def _events(slot: SlotSample) -> str:
    return "1 event" if len(slot.keys) == 1 else f"{len(slot.keys)} events"


def _columns(schema: Schema, first: int, history: History) -> Sequence[Slot]:
    return schema.key_columns[first : first + len(history.slots)]
