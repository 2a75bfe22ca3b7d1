"""The events of the loop as Arrow columns: shows (what was scored), feedback (what followed), and the joined rows made of both.

A show is keyed by `request` and `item`. Its features stay JSON text, exactly as the client sent them: `features` of one row or candidate,
and `user` of a ranking request. Features that the client had already encoded are a list instead:
`[hash of the schema, dense values, keys of each slot, values of the keys or null]`.

>>> feedback_of({"request": "r1", "item": 7, "label": {"click": 1}}, received_us=5).labels
{'click': 1.0}
>>> feedback_of({"request": "r1", "label": {"click": "yes"}}, received_us=5)
Traceback (most recent call last):
ValueError: the label 'click' must be a number
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from clickfleet.data.arrow_ipc import open_bytes
from clickfleet.errors import ConfigError

MAX_ID = 1024
"""Maximum characters of the id of a request, item or event."""
MAX_LABELS = 32
"""Maximum labels of one event."""
MAX_LABEL_NAME = 256
MAX_LABEL = 1e15
MAX_TIME_S = 1e11
"""Times are seconds since 1970. A larger number is likely in milliseconds."""
FIRST_ITEM = "0"
"""The item of feedback that names none: the first row of a request, whose rows are numbered if they have no ids."""

TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
TIME = pa.timestamp("us", "UTC")
LABELS = pa.map_(pa.string(), pa.float64())
VERSION = b"clickfleet"
"""Key of the kind and version in the metadata of a file."""


def _columns(kind: str, needed: dict[str, pa.DataType], optional: dict[str, pa.DataType]) -> pa.Schema:
    fields = [pa.field(name, type_, nullable=False) for name, type_ in needed.items()]
    fields += [pa.field(name, type_) for name, type_ in optional.items()]
    return pa.schema(fields, {VERSION: f"{kind}/1".encode()})


_SHOW = {"position": pa.int32(), "model": pa.string(), "sequence": pa.int64(), "score": pa.float32()}
_FEATURES = {"route": pa.string(), "user": pa.string()}

SHOWS = _columns(
    "shows",
    {"request": pa.string(), "item": pa.string(), "time": TIME, "features": pa.string()},
    {**_SHOW, **_FEATURES},
)
"""`position` is the place in the reply, from 1. A candidate that a ranking left out has none: it was scored, but not shown."""

_ROWS = ["item", "features", "position", "score"]

REQUESTS = _columns(
    "requests",
    {
        "request": pa.string(),
        "time": TIME,
        "rows": pa.list_(pa.field("row", pa.struct([SHOWS.field(name) for name in _ROWS]), nullable=False)),
    },
    {name: SHOWS.field(name).type for name in ("model", "sequence", "route", "user")},
)
"""Shows with a row per request, as a show log has them while it grows: what its rows share is there once."""

_TEXTS_OF_REQUESTS = [field.name for field in REQUESTS if field.type == pa.string()]
MAX_TEXTS = 1 << 30
"""Bytes of the texts of a column in a record batch. Arrow counts them with 31 bits."""

FEEDBACK = _columns(
    "feedback",
    {
        "request": pa.string(),
        "item": pa.string(),
        "event": pa.string(),
        "time": TIME,
        "received": TIME,
        "labels": LABELS,
    },
    {},
)
"""`time` is the sender's clock, `received` that of the server. Both are the server's if the sender gave no time."""

JOINED = _columns(
    "joined",
    {"kind": pa.string(), "request": pa.string(), "item": pa.string(), "labels": LABELS, "shown": TIME, "known": TIME},
    {
        "labelled": TIME,
        "event": pa.string(),
        "previous": LABELS,
        **_SHOW,
        **_FEATURES,
        "features": pa.string(),
    },
)
"""`kind` is negative, label or correction. `known` is when the row came to be known: the time of its label, or the end of the wait.
A correction replaces the labels `previous` of an earlier row of the same show."""

NEGATIVE, LABEL, CORRECTION = "negative", "label", "correction"


class Feedback(NamedTuple):
    """What followed a show."""

    request: str
    item: str
    labels: dict[str, float]
    event: str
    time_us: int
    received_us: int


def feedback_of(raw: Any, received_us: int, event: str = "", strict: bool = True) -> Feedback:
    """Return the event in a JSON object. Raise ValueError with the reason if it is none.

    `event` is its id if it names none. `strict` refuses unknown members.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"an event must be an object, not {type(raw).__name__}")
    if strict and (unknown := [name for name in raw if name not in _EVENT]):
        raise ValueError(f"unknown member {unknown[0]!r:.60}; members: {', '.join(_EVENT)}")
    request, item = id_of(raw.get("request"), "request"), raw.get("item")
    labels = _labels_of(raw.get("label"))
    named = raw.get("event")
    when = raw.get("time")
    return Feedback(
        request,
        FIRST_ITEM if item is None else id_of(item, "item"),
        labels,
        event if named is None else id_of(named, "event"),
        received_us if when is None else _time_of(when),
        received_us,
    )


_EVENT = ("request", "item", "label", "event", "time")


def id_of(value: Any, what: str) -> str:
    """Return an id as text: a text, or an integer of 64 bits."""
    if isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 64:
        return str(value)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID:
        raise ValueError(f"the {what} must be a text of 1 to {MAX_ID} characters, or an integer")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the {what} holds half a surrogate pair, which is not valid text") from None
    return value


def _labels_of(given: Any) -> dict[str, float]:
    if not isinstance(given, dict) or not 0 < len(given) <= MAX_LABELS:
        raise ValueError(f'the label must be an object of 1 to {MAX_LABELS} numbers by name, such as {{"click": 1}}')
    labels = {}
    for name, value in given.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_LABEL_NAME:
            raise ValueError(f"the name of a label must be a text of 1 to {MAX_LABEL_NAME} characters")
        id_of(name, "name of a label")
        if not isinstance(value, int | float) or not abs(value) <= MAX_LABEL:
            raise ValueError(f"the label {name!r:.60} must be a number")
        labels[name] = float(value)
    return labels


def _time_of(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_TIME_S:
        raise ValueError("the time must be a number of seconds since 1970")
    return math.floor(value * 1e6)


class Show(NamedTuple):
    """One scored row, in the order of the columns `SHOWS`."""

    request: str
    item: str
    time_us: int
    features: str
    position: int | None = 1
    model: str | None = None
    sequence: int | None = None
    score: float | None = None
    route: str | None = None
    user: str | None = None


def show_of(raw: Any, received_us: int) -> Show:
    """Return the show in a JSON object that another program wrote. Raise ValueError with the reason if it is none."""
    if not isinstance(raw, dict):
        raise ValueError(f"a show must be an object, not {type(raw).__name__}")
    features, user, item, when = raw.get("features"), raw.get("user"), raw.get("item"), raw.get("time")
    if not isinstance(features, dict | list) or not isinstance(user, dict | None):
        raise ValueError("the features must be an object by name")
    position, score = raw.get("position", 1), raw.get("score")
    if position is not None and (type(position) is not int or not 0 < position < 1 << 31):
        raise ValueError("the position must be a number from 1 on")
    if score is not None and (isinstance(score, bool) or not isinstance(score, int | float)):
        raise ValueError("the score must be a number")
    model, sequence = raw.get("model"), raw.get("sequence")
    if sequence is not None and (type(sequence) is not int or not 0 <= sequence < 1 << 62):
        raise ValueError("the sequence must be a number")
    return Show(
        id_of(raw.get("request"), "request"),
        FIRST_ITEM if item is None else id_of(item, "item"),
        received_us if when is None else _time_of(when),
        _text(features),
        position,
        None if model is None else id_of(model, "model"),
        sequence,
        None if score is None else float(score),
        None,
        None if user is None else _text(user),
    )


def _text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    text.encode()  # half a surrogate pair raises UnicodeEncodeError, a ValueError
    return text


def shows_of(requests: pa.RecordBatch) -> pa.RecordBatch:
    """Return a record batch of REQUESTS as SHOWS, and any other one as it is. Raise ValueError if it has more texts than fit."""
    if not requests.schema.equals(REQUESTS):
        return requests
    rows = requests.column("rows")
    counts = pc.list_value_length(rows)
    for name in _TEXTS_OF_REQUESTS:
        lengths = pc.binary_length(requests.column(name)).cast(pa.int64())
        if (pc.sum(pc.multiply(lengths, counts)).as_py() or 0) > MAX_TEXTS:
            raise ValueError(f"the column {name!r} of all rows has more than {MAX_TEXTS >> 20} MiB")
    parents, parts = pc.list_parent_indices(rows), rows.flatten().flatten()
    own = dict(zip(_ROWS, parts, strict=True))
    columns = [own[name] if name in own else requests.column(name).take(parents) for name in SHOWS.names]
    return pa.record_batch(columns, schema=SHOWS)


def show_columns(shows: Sequence[Show]) -> pa.RecordBatch:
    """Return shows as Arrow columns."""
    columns = zip(*shows, strict=True) if shows else [()] * len(SHOWS)
    return pa.record_batch(
        [pa.array(values, field.type) for values, field in zip(columns, SHOWS, strict=True)], schema=SHOWS
    )


def feedback_columns(events: Iterable[Feedback]) -> pa.RecordBatch:
    """Return feedback as Arrow columns."""
    rows = list(events)
    columns: dict[str, Any] = {
        "request": [one.request for one in rows],
        "item": [one.item for one in rows],
        "event": [one.event for one in rows],
        "time": [one.time_us for one in rows],
        "received": [one.received_us for one in rows],
        "labels": [list(one.labels.items()) for one in rows],
    }
    return pa.record_batch([pa.array(columns[field.name], field.type) for field in FEEDBACK], schema=FEEDBACK)


def feedback_rows(batch: pa.RecordBatch) -> list[Feedback]:
    """Return the events of Arrow columns."""
    micro = pa.int64()
    columns = [batch.column(name).to_pylist() for name in ("request", "item", "labels", "event")]
    times = [batch.column(name).cast(micro).to_pylist() for name in ("time", "received")]
    return [
        Feedback(request, item, dict(labels), event, when, received)
        for request, item, labels, event, when, received in zip(*columns, *times, strict=True)
    ]


class EventsRead(NamedTuple):
    """Events, and how many others could not be read."""

    batch: pa.RecordBatch
    bad: int = 0
    reason: str = ""
    """Why the first bad one could not be read."""


def read_lines(lines: bytes, schema: pa.Schema, received_us: int) -> EventsRead:
    """Return the events of lines with one JSON object each, as other programs write them. `schema` is SHOWS or FEEDBACK."""
    shows: list[Show] = []
    events: list[Feedback] = []
    bad, reason = 0, ""
    for line in lines.split(b"\n"):
        if not line.strip():
            continue
        try:
            raw = json.loads(line, parse_constant=_no_number)
            if schema is SHOWS:
                shows.append(show_of(raw, received_us))
            else:
                made = hashlib.blake2b(line, digest_size=12).hexdigest()  # the same line twice is the same event
                events.append(feedback_of(raw, received_us, made, strict=False))
        except (ValueError, RecursionError, OverflowError) as error:
            bad, reason = bad + 1, reason or str(error)[:200] or type(error).__name__
    return EventsRead(show_columns(shows) if schema is SHOWS else feedback_columns(events), bad, reason)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def read_columns(batch: pa.RecordBatch, schema: pa.Schema) -> EventsRead:
    """Return the columns of `schema` from a checked record batch. Raise ValueError if it is of another kind."""
    if batch.schema.equals(schema) and not any(
        batch.column(field.name).null_count for field in schema if not field.nullable
    ):
        return EventsRead(batch)
    names, columns = batch.schema.names, []
    for field in schema:
        if names.count(field.name) > 1 or (not field.nullable and field.name not in names):
            raise ValueError(f"it has {'two columns' if field.name in names else 'no column'} {field.name!r}")
        if field.name not in names:
            columns.append(pa.nulls(len(batch), field.type))
            continue
        try:
            columns.append(batch.column(field.name).cast(field.type))
        except (pa.ArrowException, NotImplementedError) as error:
            raise ValueError(f"column {field.name!r}: {str(error).partition(chr(10))[0]}") from None
    needed = [column for column, field in zip(columns, schema, strict=True) if not field.nullable]
    bad = 0
    if any(column.null_count for column in needed):
        whole = functools.reduce(pc.and_, [column.is_valid() for column in needed])
        columns = [column.filter(whole) for column in columns]
        bad = len(batch) - len(columns[0])
    return EventsRead(pa.record_batch(columns, schema=schema), bad, "a value is missing" if bad else "")


def read_message(value: bytes, schema: pa.Schema, received_us: int) -> EventsRead:
    """Return the events in a message of a topic: an Arrow stream, or lines of JSON."""
    if not value.startswith(_ARROW):
        return read_lines(value, schema, received_us)
    empty = no_events(schema)
    try:
        read = [read_columns(batch, schema) for batch in open_bytes(value)]
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError) as error:
        return EventsRead(empty, 1, f"it is no Arrow stream of events: {str(error).partition(chr(10))[0][:200]}")
    if not read:
        return EventsRead(empty)
    reason = next((one.reason for one in read if one.bad), "")
    return EventsRead(concatenated([one.batch for one in read]), sum(one.bad for one in read), reason)


_ARROW = b"\xff\xff\xff\xff"


def no_events(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema)


def concatenated(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows of several record batches of one schema as one."""
    if len(batches) == 1:
        return batches[0]
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def topic_of(where: str) -> tuple[str, str] | None:
    """Return the brokers and the topic of kafka://BROKERS/TOPIC, or None for anything else.

    >>> topic_of("kafka://a:9092,b:9092/shows"), topic_of("shows")
    (('a:9092,b:9092', 'shows'), None)
    """
    if not where.startswith("kafka://"):
        return None
    brokers, _, topic = where.removeprefix("kafka://").partition("/")
    if not brokers or not topic or "/" in topic or not TOPIC.fullmatch(topic):
        raise ConfigError(f"{where} names no Kafka topic", "write kafka://HOST:PORT,HOST:PORT/TOPIC")
    return brokers, topic
