"""Join shows with the feedback that follows them, and make training rows of both.

A show waits for feedback. A label makes a row at once. A show without one becomes a negative when `wait` has passed by the clock of the
stream it came from. Whenever later feedback changes the labels of a show, within `window`, there is one more row, a correction, which also
names the labels that it replaces. So the labels of the last row of a show are those that all its feedback together amounts to.

Of two values for one label, the later one holds, by the time of its event; of the same microsecond, the larger one. The order in which
events arrive does not matter, and an event that arrives twice counts once.

Everything that waits lies on disk, in a folder. `commit` makes the state durable, together with facts of the caller. A joiner that is
opened again continues from the last commit, and whatever happened after it never happened.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.data.arrow_ipc import numbers
from clickfleet.data.batch import Keys
from clickfleet.data.events import (
    CORRECTION,
    FEEDBACK,
    JOINED,
    LABEL,
    LABELS,
    NEGATIVE,
    Feedback,
    concatenated,
    feedback_columns,
    feedback_rows,
)
from clickfleet.data.files import flush
from clickfleet.data.parsing.columns import text_buffers
from clickfleet.data.parsing.layout import layout
from clickfleet.data.schema import Schema, Slot
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.online.label_delays import LabelDelays
from clickfleet.store import atomic
from clickfleet.store.event_log import StreamTail, stream_bytes, stream_head
from clickfleet.store.show_store import STORED, ShowStore
from clickfleet.store.sorted_runs import SortedRuns

COMMIT = "join.json"
KEPT_EVENTS = 8
"""How many of the last events of a show are remembered, so that one that arrives again is recognised."""
MAX_PARKED = 200_000
"""Maximum number of events that wait for their shows. Beyond it, the oldest are dropped and counted."""
REPEAT_SHOWS = 1 << 20
"""A show that arrives twice is recognised while the first waits, and among so many shows before it."""
NEVER = np.iinfo(np.int64).max
Times = NDArray[np.int64]
"""Microseconds since 1970."""


@dataclass(frozen=True)
class JoinRules:
    """When a show counts as negative, how long corrections are taken, and which labels there are."""

    wait_s: float = 30.0
    window_s: float = 7 * 86400.0
    labels: tuple[str, ...] = ("click",)
    limit_bytes: int = 20 << 30
    """Maximum size of the files of what waits. Beyond it, the oldest shows are decided early."""

    def __post_init__(self) -> None:
        if not 0 <= self.wait_s <= self.window_s:
            raise ConfigError(
                f"wait is {self.wait_s:g} s and window {self.window_s:g} s", "a window is at least as long as the wait"
            )
        if not self.labels or len(set(self.labels)) < len(self.labels):
            raise ConfigError("name at least one label, and each only once")


@dataclass
class EventRound:
    """Some events that arrived, and the clocks of the show streams after them, in microseconds."""

    shows: list[tuple[int, pa.RecordBatch]] = field(default_factory=list)
    """The number of a stream, and shows of it."""
    feedback: list[pa.RecordBatch] = field(default_factory=list)
    clocks: dict[int, int] = field(default_factory=dict)


@dataclass
class _Waiting:
    """Shows that arrived together and are not all decided."""

    first: int
    deadlines: Times
    streams: NDArray[np.int32]
    open: NDArray[np.bool_]
    """Not decided."""
    partly: NDArray[np.bool_]
    """Open, but with a row: only some labels are known."""
    earliest: int


class _Label(NamedTuple):
    """The labels of a show with feedback."""

    values: list[float]
    times: list[int]
    events: list[int]


class _Row(NamedTuple):
    """A row to be made of a show with feedback."""

    place: int
    kind: str
    values: Sequence[float]
    previous: Sequence[float] | None
    known_us: int
    labelled_us: int | None
    event: str | None


class Joiner:
    """See the module. Use it from one thread. `facts` are those of the last commit."""

    def __init__(self, folder: Path, rules: JoinRules, *, memory_records: int | None = None) -> None:
        self.folder, self.rules = folder, rules
        self.wait_us, self.window_us = round(rules.wait_s * 1e6), round(rules.window_s * 1e6)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = self._read()
        more: dict[str, Any] = {} if memory_records is None else {"memory_records": memory_records}
        width = len(rules.labels)
        kind = np.dtype(
            [
                ("at", np.int64),
                ("values", np.float64, (width,)),
                ("times", np.int64, (width,)),
                ("events", np.uint64, (KEPT_EVENTS,)),
            ]
        )
        place = np.dtype([("at", np.int64), ("check", np.uint64)])
        # What can be missing or damaged is opened before the files of shows.
        self.index = SortedRuns(folder, "keys", place, state.get("index"), **more)
        self.labels = SortedRuns(folder, "labels", kind, state.get("labels"), newest=True, **more)
        self.shows = ShowStore(folder, state.get("shows"))
        self.index.first = self.labels.first = self.shows.first
        self.counts: Counter[str] = Counter(state.get("counts", {}))
        self.delays = LabelDelays(rules.labels, self.window_us, state.get("delays"))
        self.facts: dict[str, Any] = state.get("facts", {})
        self.frontiers: dict[int, int] = {int(key): value for key, value in state.get("frontiers", {}).items()}
        """Shows of a stream are decided up to this time: those that arrived by it without feedback are negatives."""
        self._number_of = {name: i for i, name in enumerate(rules.labels)}
        self._plan = layout(Schema(slots=(Slot("request"), Slot("item"))), label=False)
        self._waiting: list[_Waiting] = []
        self._disk = ThreadPoolExecutor(4, "clickfleet-join")
        self._parked = _Parked(folder, state.get("parked"))
        self._bytes = 0
        self._oldest: tuple[int, int] | None = None
        """The first place of the oldest segment, and the time of its newest show."""
        try:
            self._restore(state.get("oldest", 0))
        except BaseException:
            self.close()
            raise

    def _read(self) -> dict[str, Any]:
        path = self.folder / COMMIT
        try:
            state = atomic.unseal(path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is damaged: {error}", "remove the folder; the join then starts anew"
            ) from error
        if tuple(state["rules"]["labels"]) != self.rules.labels:
            raise ConfigError(
                f"{self.folder} joins the labels {', '.join(state['rules']['labels'])}, not {', '.join(self.rules.labels)}",
                "name the same labels, or start with another folder",
            )
        return state

    def _restore(self, oldest: int) -> None:
        """Find the shows that wait: those from the oldest such show on, whose deadlines have not passed and that have no labels."""
        for first, times, streams in self.shows.times(max(oldest, self.shows.first)):
            self._wait_for(first, times + self.wait_us, streams)
        for waiting in self._waiting:
            waiting.open = waiting.deadlines > self._frontiers_of(waiting.streams)
        for _, records in self.labels.since(self._waiting[0].first if self._waiting else self.shows.rows):
            for record in records:
                self._mark(int(record["at"]), record["values"].tolist())
        self._forget_decided()
        parked = self._parked.load()
        keys, _ = self._hashes_of(parked)
        matched = set(self.index.find(keys)[0].tolist())  # they were taken since
        for i, event in enumerate(parked):
            if i not in matched:
                self._parked.put(int(keys[i]), event)
        self._parked.loaded(len(parked))
        self._bytes = self.bytes

    @property
    def pending(self) -> int:
        """Number of shows that are not decided."""
        return sum(int(waiting.open.sum()) for waiting in self._waiting)

    @property
    def parked(self) -> int:
        """Number of events that wait for their shows."""
        return len(self._parked)

    @property
    def bytes(self) -> int:
        """Size of the files of what waits."""
        return self.shows.bytes + self.index.bytes + self.labels.bytes

    def apply(self, arrived: EventRound, most: int | None = None) -> list[pa.RecordBatch]:
        """Take events and return the rows that come to be known. At most about `most` negatives; others follow in the next round."""
        new = self.shows.rows
        events = [event for batch in arrived.feedback for event in feedback_rows(batch)]
        self.counts["feedback"] += len(events)
        with atomic.write_errors(self.folder):
            events += self._add(arrived.shows)
        rows = self._follow(events, new) if events else []
        return [*rows, *self._expire(arrived.clocks, most), *self._forget(arrived.clocks)]

    # Shows

    def _add(self, arrived: Iterable[tuple[int, pa.RecordBatch]]) -> list[Feedback]:
        """Store new shows. Return the events that waited for them."""
        batches = []
        for stream, shows in arrived:
            columns = [*shows.columns, pa.array(np.full(len(shows), stream, np.int32))]
            batches.append(pa.record_batch(columns, schema=STORED))
            self.counts["shows"] += len(shows)
        if not batches:
            return []
        shows = concatenated(batches)
        if shows.column("position").null_count:  # scored, but not shown
            shown = shows.filter(shows.column("position").is_valid())
            self.counts["unshown"] += len(shows) - len(shown)
            shows = shown
        keys, checks = self._hashes(shows.column("request"), shows.column("item"))
        fresh = self._fresh(keys, checks)
        if fresh is not None:
            self.counts["repeated_shows"] += len(keys) - len(fresh)
            shows, keys, checks = shows.take(pa.array(fresh)), keys[fresh], checks[fresh]
        if not len(keys):
            return []
        first = self.shows.append(shows)
        places = np.empty(len(keys), self.index.kind)
        places["at"], places["check"] = np.arange(first, first + len(keys)), checks
        self.index.add(keys, places)
        times, streams = numbers(shows.column("time"), np.int64), numbers(shows.column("stream"), np.int32)
        self._wait_for(first, times + self.wait_us, streams.copy())
        return self._parked.take(keys)

    def _fresh(self, keys: Keys, checks: Keys) -> NDArray[np.int64] | None:
        """Return which shows did not arrive before, or None if all are new."""
        since = self.shows.rows - REPEAT_SHOWS
        if self._waiting:
            since = min(since, self._waiting[0].first)
        which, records = self.index.find(keys, since)
        known = np.zeros(len(keys), bool)
        known[which[records["check"] == checks[which]]] = True
        order = np.lexsort((np.arange(len(keys)), checks, keys))
        twins = (keys[order][1:] == keys[order][:-1]) & (checks[order][1:] == checks[order][:-1])
        known[order[1:][twins]] = True
        return np.flatnonzero(~known) if known.any() else None

    def _wait_for(self, first: int, deadlines: Times, streams: NDArray[np.int32]) -> None:
        count = len(deadlines)
        for stream in np.unique(streams):
            self.frontiers.setdefault(int(stream), -NEVER)
        self._waiting.append(
            _Waiting(first, deadlines, streams, np.ones(count, bool), np.zeros(count, bool), int(deadlines.min()))
        )

    def _hashes(self, requests: pa.Array, items: pa.Array) -> tuple[Keys, Keys]:
        """Return the key of each show, and another hash that tells it apart from others with the same key."""
        halves = []
        for slot, column in enumerate((requests, items)):
            out = np.empty((len(column), 1), np.uint64)
            self._plan.text_keys(slot, *text_buffers(column), out)
            halves.append(out[:, 0])
        both: Keys = halves[0] * np.uint64(0x9E3779B97F4A7C15) + halves[1]
        keys = np.empty_like(both)
        _core.mix64(both, keys)
        return keys, halves[0] ^ (halves[1] << np.uint64(1))

    def _hashes_of(self, events: Sequence[Feedback]) -> tuple[Keys, Keys]:
        requests = pa.array([event.request for event in events], pa.string())
        return self._hashes(requests, pa.array([event.item for event in events], pa.string()))

    def _frontiers_of(self, streams: NDArray[np.int32]) -> Times:
        """Return the frontier of the stream of each show. A stream that is gone has decided all its shows."""
        numbers_, back = np.unique(streams, return_inverse=True)
        return np.array([self.frontiers.get(int(number), NEVER) for number in numbers_], np.int64)[back]

    # Feedback

    def _follow(self, events: list[Feedback], new: int) -> list[pa.RecordBatch]:
        """Apply events to their shows. Park those whose shows did not arrive. Shows from the number `new` on came in this round."""
        keys, checks = self._hashes_of(events)
        which, records = self.index.find(keys)
        show_of: dict[int, int] = {}
        same = records["check"] == checks[which]
        for i, place in zip(which[same].tolist(), records["at"][same].tolist(), strict=True):
            show_of[i] = min(place, show_of.get(i, place))
        by_show: dict[int, list[int]] = {}
        for i, event in enumerate(events):
            if i in show_of:
                by_show.setdefault(show_of[i], []).append(i)
            else:
                self.counts["parked"] += self._parked.put(int(keys[i]), event)
        if not by_show:
            return []
        places = np.array(sorted(by_show), np.int64)
        shows = self.shows.take(places)
        shown, streams = numbers(shows.column("time"), np.int64), numbers(shows.column("stream"), np.int32)
        decided = (shown + self.wait_us <= self._frontiers_of(streams)) & (places < new)
        known = self._known_labels(keys, [by_show[int(place)][0] for place in places], places)
        rows: list[_Row] = []
        changed: list[tuple[int, int, _Label]] = []
        for place, time_us, is_decided in zip(places.tolist(), shown.tolist(), decided.tolist(), strict=True):
            mine = sorted((events[i] for i in by_show[place]), key=lambda one: (one.time_us, one.event))
            mine = [event for event in mine if self._in_time(event, time_us)]
            label = known.get(place)
            label = label or _no_label(len(self.rules.labels))
            had_row = is_decided or not all(map(math.isnan, label.values))
            before = _effective(label.values, is_decided)
            last = self._set(label, mine)
            if last is None:
                continue
            changed.append((int(keys[by_show[place][0]]), place, label))
            after = _effective(label.values, is_decided)
            if not is_decided:
                self._mark(place, label.values)
            if not _same(before, after):
                kind = CORRECTION if had_row else LABEL
                previous = before if had_row else None
                rows.append(_Row(place, kind, after, previous, last.received_us, last.received_us, last.event))
        self._store_labels(changed)
        return self._rows_of(rows, dict(zip(places.tolist(), range(len(places)), strict=True)), shows)

    def _in_time(self, event: Feedback, shown_us: int) -> bool:
        if event.received_us <= shown_us + self.window_us:
            return True
        self.counts["late"] += 1
        return False

    def _set(self, label: _Label, events: Sequence[Feedback]) -> Feedback | None:
        """Apply the events of a show to its labels. Return the last one that was not known before."""
        last = None
        for event in events:
            mark = _core.hash64("event", event.event.encode())
            if mark in label.events:
                self.counts["repeated_feedback"] += 1
                continue
            label.events.append(mark)
            del label.events[:-KEPT_EVENTS]
            last = event
            for name, value in event.labels.items():
                i = self._number_of.get(name)
                if i is None:
                    self.counts["other_labels"] += 1
                elif (event.time_us, value) > (label.times[i], label.values[i]):
                    label.values[i], label.times[i] = value, event.time_us
        return last

    def _known_labels(self, keys: Keys, firsts: Sequence[int], places: NDArray[np.int64]) -> dict[int, _Label]:
        """Return the labels that earlier feedback gave to shows. `firsts` are the indices of their keys."""
        which, records = self.labels.find(keys[firsts])
        known: dict[int, _Label] = {}
        for i, record in zip(which.tolist(), records, strict=True):
            place = int(places[i])
            if int(record["at"]) == place and place not in known:
                events = [mark for mark in record["events"].tolist() if mark]
                known[place] = _Label(record["values"].tolist(), record["times"].tolist(), events)
        return known

    def _store_labels(self, changed: Sequence[tuple[int, int, _Label]]) -> None:
        records = np.zeros(len(changed), self.labels.kind)
        for record, (_, place, label) in zip(records, changed, strict=True):
            record["at"], record["values"], record["times"] = place, label.values, label.times
            record["events"][: len(label.events)] = label.events
        self.labels.add(np.array([key for key, _, _ in changed], np.uint64), records)

    def _mark(self, place: int, labels: Sequence[float]) -> None:
        """Note the labels of a show that waits: it is decided when all are known, and partly if some are."""
        unknown = sum(map(math.isnan, labels))
        if unknown == len(labels):
            return
        at = bisect_right(self._waiting, place, key=lambda one: one.first) - 1
        if at < 0 or place - self._waiting[at].first >= len(self._waiting[at].open):
            return
        waiting, i = self._waiting[at], place - self._waiting[at].first
        if waiting.open[i]:
            waiting.open[i] = waiting.partly[i] = unknown > 0

    # The end of the wait

    def _expire(self, clocks: Mapping[int, int], most: int | None) -> list[pa.RecordBatch]:
        """Decide shows whose wait has ended by the clocks of their streams, the longest overdue first."""
        due: list[tuple[_Waiting, NDArray[np.int64]]] = []
        late: list[Times] = []
        latest = max(clocks.values(), default=-NEVER)
        for waiting in self._waiting:
            if waiting.earliest > latest:
                continue
            where = np.flatnonzero(waiting.open)
            by = _each(clocks, waiting.streams[where]) - waiting.deadlines[where]
            overdue = by >= 0
            if overdue.any():
                due.append((waiting, where[overdue]))
                late.append(by[overdue])
        lateness = 0
        if most is not None and sum(map(len, late)) > most:
            every = np.concatenate(late)
            lateness = int(np.partition(every, len(every) - most)[len(every) - most])
        for stream, clock in clocks.items():
            self.frontiers[stream] = max(self.frontiers.get(stream, -NEVER), clock - lateness)
        rows: list[pa.RecordBatch] = []
        for waiting, where in due:
            ended = where[waiting.deadlines[where] <= self._frontiers_of(waiting.streams[where])]
            rows += self._decide(waiting, ended)
        self._forget_decided()
        return rows

    def _decide(self, waiting: _Waiting, which: NDArray[np.int64]) -> list[pa.RecordBatch]:
        """Return the rows of shows whose wait has ended: negatives, and corrections where some labels were known."""
        if not len(which):
            return []
        waiting.open[which] = False
        partly = which[waiting.partly[which]]
        plain = which[~waiting.partly[which]]
        self.counts["negatives"] += len(plain)
        rows = self._negatives(waiting.first + plain) if len(plain) else []
        return [*rows, *self._completed(waiting, partly)] if len(partly) else rows

    def _negatives(self, places: NDArray[np.int64]) -> list[pa.RecordBatch]:
        shows, count = self.shows.take(places), len(places)
        values = np.zeros((count, len(self.rules.labels)))
        shown = numbers(shows.column("time"), np.int64)
        nothing: list[Any] = [None] * count
        return [self._joined(shows, [NEGATIVE] * count, values, None, shown + self.wait_us, nothing, nothing)]

    def _completed(self, waiting: _Waiting, partly: NDArray[np.int64]) -> list[pa.RecordBatch]:
        """Return corrections for shows with some labels: those that are still unknown at the end of the wait are 0."""
        places = waiting.first + partly
        shows = self.shows.take(places)
        keys, _ = self._hashes(shows.column("request"), shows.column("item"))
        known = self._known_labels(keys, range(len(places)), places)
        rows = [
            _Row(place, CORRECTION, _effective(known[place].values, True), known[place].values, deadline, None, None)
            for place, deadline in zip(places.tolist(), waiting.deadlines[partly].tolist(), strict=True)
        ]
        return self._rows_of(rows, dict(zip(places.tolist(), range(len(places)), strict=True)), shows)

    def _forget_decided(self) -> None:
        """Drop the shows that no longer wait."""
        kept = []
        for waiting in self._waiting:
            if waiting.open.any():
                waiting.earliest = int(waiting.deadlines[waiting.open].min())
                kept.append(waiting)
        self._waiting = kept

    def finish(self) -> list[pa.RecordBatch]:
        """Decide all shows that wait, because no more feedback will come."""
        rows: list[pa.RecordBatch] = []
        for waiting in self._waiting:
            streams = np.unique(waiting.streams[waiting.open])
            for stream in streams.tolist():
                here = waiting.deadlines[waiting.open & (waiting.streams == stream)]
                self.frontiers[stream] = max(self.frontiers[stream], int(here.max()))
        for waiting in self._waiting:
            rows += self._decide(waiting, np.flatnonzero(waiting.open))
        self._forget_decided()
        return rows

    # The end of the window

    def _forget(self, clocks: Mapping[int, int]) -> list[pa.RecordBatch]:
        """Forget shows beyond the window, and the oldest if the store is too large. Return the rows of those not decided."""
        rows: list[pa.RecordBatch] = []
        now = max(clocks.values(), default=-NEVER)
        while (newest := self._newest_of_oldest()) is not None:
            full = self._bytes > self.rules.limit_bytes
            if not full and newest + self.window_us >= now:
                break
            end = self.shows.first + self.shows.segment_rows
            if not full and self._waiting and self._waiting[0].first < end:
                break  # some of its shows are not decided yet
            for waiting in self._waiting:
                inside = np.flatnonzero(waiting.open & (waiting.first + np.arange(len(waiting.open)) < end))
                self.counts["cut_short"] += len(inside)
                rows += self._decide(waiting, inside)
            self._forget_decided()
            self.delays.forget(newest)
            self.index.forget(self.shows.forget(end))
            self.labels.forget(self.shows.first)
            self._oldest, self._bytes = None, self.bytes
        self.delays.forget(now - self.window_us)
        self.counts["lost_feedback"] += self._parked.expire(now - self.window_us)
        return rows

    def _newest_of_oldest(self) -> int | None:
        """Return the time of the newest show in the oldest segment; None if that segment is not full yet."""
        if self.shows.rows < self.shows.first + self.shows.segment_rows:
            return None
        if self._oldest is None or self._oldest[0] != self.shows.first:
            self._oldest = (self.shows.first, self.shows.newest_time(self.shows.first))
        return self._oldest[1]

    # Rows

    def _rows_of(self, rows: Sequence[_Row], index: Mapping[int, int], shows: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Return rows as columns. `index` tells which of `shows` is at each place."""
        if not rows:
            return []
        for row in rows:
            self.counts[f"{row.kind}s"] += 1
        width = len(self.rules.labels)
        previous = np.array([row.previous if row.previous is not None else [np.nan] * width for row in rows])
        return [
            self._joined(
                shows.take(pa.array([index[row.place] for row in rows])),
                [row.kind for row in rows],
                np.array([row.values for row in rows], np.float64),
                (previous, np.array([row.previous is not None for row in rows])),
                np.array([row.known_us for row in rows], np.int64),
                [row.labelled_us for row in rows],
                [row.event for row in rows],
            )
        ]

    def _joined(
        self,
        shows: pa.RecordBatch,
        kinds: list[str],
        values: NDArray[np.float64],
        previous: tuple[NDArray[np.float64], NDArray[np.bool_]] | None,
        known: Times,
        labelled: list[int | None],
        events: list[str | None],
    ) -> pa.RecordBatch:
        self.delays.learned(numbers(shows.column("time"), np.int64), values, None if previous is None else previous[0])
        given = dict(zip(shows.schema.names, shows.columns, strict=True))
        columns: dict[str, Any] = {
            **given,
            "kind": pa.array(kinds, pa.string()),
            "labels": self._maps(values, None),
            "shown": given["time"],
            "known": pa.array(known, JOINED.field("known").type),
            "labelled": pa.array(labelled, JOINED.field("labelled").type),
            "event": pa.array(events, pa.string()),
            "previous": pa.nulls(len(shows), LABELS) if previous is None else self._maps(*previous),
        }
        return pa.record_batch([columns[field.name] for field in JOINED], schema=JOINED)

    def _maps(self, values: NDArray[np.float64], present: NDArray[np.bool_] | None) -> pa.Array:
        """Return the known labels of rows, by name. Rows that are not `present` have none at all."""
        known = ~np.isnan(values)
        ends = np.concatenate([np.zeros(1, np.int32), np.cumsum(known.sum(axis=1), dtype=np.int32)])
        names = pa.array(self.rules.labels, pa.string()).take(pa.array(np.nonzero(known)[1]))
        offsets = pa.array(ends, mask=None if present is None else np.append(~present, False))
        return pa.MapArray.from_arrays(offsets, names, pa.array(values[known]))

    # Commits

    def commit(self, facts: Mapping[str, Any]) -> None:
        """Make the state and some facts of the caller durable, all or nothing."""
        with atomic.write_errors(self.folder / COMMIT):
            parts: dict[str, Any] = {
                "shows": self.shows,
                "index": self.index,
                "labels": self.labels,
                "parked": self._parked,
            }
            # Each waits for the disk, so they do it at the same time.
            written: dict[str, Future[Any]] = {name: self._disk.submit(part.commit) for name, part in parts.items()}
            wait(written.values())
            state: dict[str, Any] = {
                "version": 1,
                "rules": {"labels": list(self.rules.labels)},
                **{name: part.result() for name, part in written.items()},
                "frontiers": {str(stream): time for stream, time in self.frontiers.items()},
                "oldest": self._waiting[0].first if self._waiting else self.shows.rows,
                "counts": dict(self.counts),
                "delays": self.delays.state(),
                "facts": dict(facts),
            }
            flush(self.folder)
        atomic.write_file(self.folder / COMMIT, atomic.seal(state))
        self.facts = dict(facts)
        self.shows.committed(state["oldest"])
        for part in (self.index, self.labels, self._parked):
            part.committed()
        self._bytes = self.bytes

    def drop_stream(self, stream: int) -> bool:
        """Forget a stream that has ended. Return False if shows of it still wait."""
        if any((waiting.open & (waiting.streams == stream)).any() for waiting in self._waiting):
            return False
        self.frontiers.pop(stream, None)
        return True

    def close(self) -> None:
        self._disk.shutdown()
        self.shows.close()
        self.index.close()
        self.labels.close()


def _no_label(width: int) -> _Label:
    return _Label([math.nan] * width, [-NEVER] * width, [])


def _effective(values: Sequence[float], decided: bool) -> list[float]:
    """Return the labels of a show. After its wait, unknown ones are 0."""
    return [0.0 if decided and math.isnan(value) else value for value in values]


def _same(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in zip(a, b, strict=True))


def _each(clocks: Mapping[int, int], streams: NDArray[np.int32]) -> Times:
    """Return the clock of the stream of each show."""
    numbers_, back = np.unique(streams, return_inverse=True)
    return np.array([clocks.get(int(number), -NEVER // 2) for number in numbers_], np.int64)[back]


class _Parked:
    """Events that wait for their shows, by key, the oldest first; also in a file."""

    def __init__(self, folder: Path, state: Mapping[str, int] | None) -> None:
        self.folder = folder
        self.events: dict[int, list[Feedback]] = {}
        self._count = 0
        self._number = 0 if state is None else state["number"]
        self._size = 0 if state is None else state["bytes"]
        self._logged = 0
        self._unlogged: list[Feedback] = []
        self._old: list[Path] = []
        for path in folder.glob("parked-*.log"):
            if path != self._path(self._number):
                path.unlink(missing_ok=True)

    def __len__(self) -> int:
        return self._count

    def _path(self, number: int) -> Path:
        return self.folder / f"parked-{number:08d}.log"

    def load(self) -> list[Feedback]:
        """Return the events in the file. Put those that still wait."""
        if not self._size:
            return []
        try:
            with self._path(self._number).open("r+b", buffering=0) as source:
                source.truncate(self._size)
                events = [event for batch in StreamTail(source) for event in feedback_rows(batch)]
        except (OSError, pa.ArrowException, ValueError) as error:
            raise CheckpointError(f"{self._path(self._number)} is damaged: {error}") from error
        return events

    def loaded(self, count: int) -> None:
        """Note that what was put is in the file, among `count` events."""
        self._logged, self._unlogged = count, []

    def put(self, key: int, event: Feedback) -> int:
        """Add an event. Return 1 if it was not there, else 0."""
        known = self.events.setdefault(key, [])
        if any(one.event == event.event for one in known):
            return 0
        known.append(event)
        self._unlogged.append(event)
        self._count += 1
        return 1

    def take(self, keys: Keys) -> list[Feedback]:
        """Remove and return the events for shows with these keys."""
        if not self.events:
            return []
        if len(self.events) < len(keys):
            waiting = np.array(list(self.events), np.uint64)
            found = waiting[np.isin(waiting, keys)].tolist()
        else:
            found = [key for key in keys.tolist() if key in self.events]
        taken = [event for key in dict.fromkeys(found) for event in self.events.pop(key)]
        self._count -= len(taken)
        return taken

    def expire(self, before_us: int) -> int:
        """Drop events received before a time, and the oldest if there are too many. Return how many were dropped."""
        dropped = 0
        for key in list(self.events):
            if self._count - dropped <= MAX_PARKED and self.events[key][-1].received_us >= before_us:
                break
            dropped += len(self.events.pop(key))
        self._count -= dropped
        return dropped

    def commit(self) -> dict[str, int]:
        if self._logged + len(self._unlogged) > 2 * self._count + 1000 or (not self._count and self._size):
            self._old.append(self._path(self._number))
            self._number, self._size, self._logged = self._number + 1, 0, 0
            self._unlogged = [event for events in self.events.values() for event in events]
        if self._unlogged:
            path = self._path(self._number)
            content = b"" if self._size else stream_head(FEEDBACK)
            content += stream_bytes(feedback_columns(self._unlogged))
            with path.open("r+b" if self._size else "wb", buffering=0) as out:
                out.seek(self._size)
                rest = memoryview(content)
                while rest:
                    rest = rest[out.write(rest) :]
                out.truncate()
                flush(path)
            self._size += len(content)
            self._logged, self._unlogged = self._logged + len(self._unlogged), []
        return {"number": self._number, "bytes": self._size}

    def committed(self) -> None:
        for path in self._old:
            path.unlink(missing_ok=True)
        self._old = []
