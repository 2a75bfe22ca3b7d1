"""The join by dictionaries: what the one on disk must do, in the plainest way. And small events for tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from clickfleet import _core
from clickfleet.data.events import Feedback, Show, feedback_columns, show_columns
from clickfleet.online.joiner import KEPT_EVENTS, EventRound, JoinRules

SECOND = 1_000_000
START = 1_767_225_600 * SECOND  # 2026-01-01 00:00 UTC


class Row(NamedTuple):
    """A joined row, as tests compare it."""

    kind: str
    request: str
    item: str
    labels: tuple[tuple[str, float], ...]
    previous: tuple[tuple[str, float], ...] | None
    known: int
    labelled: int | None
    event: str | None
    features: str


def rows_of(batches: list[pa.RecordBatch]) -> list[Row]:
    """Joined rows, in any order."""
    found = []
    for batch in batches:
        times = {name: batch.column(name).cast(pa.int64()).to_pylist() for name in ("known", "labelled")}
        for i, row in enumerate(batch.to_pylist()):
            previous = None if row["previous"] is None else tuple(sorted(row["previous"]))
            labels = tuple(sorted(row["labels"]))
            known, labelled = times["known"][i], times["labelled"][i]
            names = row["kind"], row["request"], row["item"]
            found.append(Row(*names, labels, previous, known, labelled, row["event"], row["features"]))
    return sorted(found, key=repr)


def show(request: str, at: float, item: str = "0", features: str = "{}", position: int | None = 1) -> Show:
    return Show(request, item, START + round(at * SECOND), features, position, "m", 1, 0.5, "predict", None)


def feedback(
    request: str, at: float, item: str = "0", event: str | None = None, received: float | None = None, **labels: float
) -> Feedback:
    """Feedback with a click, if no other label is given."""
    when = START + round(at * SECOND)
    got = when if received is None else START + round(received * SECOND)
    return Feedback(request, item, labels or {"click": 1.0}, event or f"{request}/{item}/{at}", when, got)


def arrived(
    shows: dict[int, list[Show]] | list[Show] | None = None,
    events: list[Feedback] | None = None,
    clocks: dict[int, float] | float | None = None,
) -> EventRound:
    """A round. A list of shows is of stream 1, and one clock is its."""
    by_stream = shows if isinstance(shows, dict) else {1: shows or []}
    times = clocks if isinstance(clocks, dict) else {} if clocks is None else {1: clocks}
    return EventRound(
        [(stream, show_columns(some)) for stream, some in by_stream.items() if some],
        [feedback_columns(events)] if events else [],
        {stream: START + round(clock * SECOND) for stream, clock in times.items()},
    )


@dataclass
class _Known:
    show: Show
    stream: int
    values: dict[str, tuple[int, float]] = field(default_factory=dict)
    events: list[int] = field(default_factory=list)
    decided: bool = False

    def labels(self, names: tuple[str, ...]) -> dict[str, float]:
        found = {name: value for name, (_, value) in self.values.items()}
        return {name: found.get(name, 0.0) for name in names} if self.decided else found


@dataclass
class Reference:
    """Shows, events and clocks in dictionaries."""

    rules: JoinRules
    shows: dict[tuple[str, str], _Known] = field(default_factory=dict)
    parked: dict[tuple[str, str], list[Feedback]] = field(default_factory=dict)
    clocks: dict[int, int] = field(default_factory=dict)

    def apply(self, shows: dict[int, list[Show]], events: list[Feedback], clocks: dict[int, int]) -> list[Row]:
        events = list(events)
        new = set()
        for stream, some in shows.items():
            for one in some:
                key = (one.request, one.item)
                if one.position is not None and key not in self.shows:
                    self.shows[key] = _Known(one, stream)
                    new.add(key)
        for key in [key for key in self.parked if key in self.shows]:
            events += self.parked.pop(key)
        rows = self._follow(events)
        for stream, clock in clocks.items():
            self.clocks[stream] = max(self.clocks.get(stream, clock), clock)
        return sorted(rows + self._expire(set(clocks)), key=repr)

    def _follow(self, events: list[Feedback]) -> list[Row]:
        by_show: dict[tuple[str, str], list[Feedback]] = {}
        for event in events:
            key = (event.request, event.item)
            if key in self.shows:
                by_show.setdefault(key, []).append(event)
            elif all(one.event != event.event for one in self.parked.setdefault(key, [])):
                self.parked[key].append(event)
        rows = []
        for key, some in by_show.items():
            known = self.shows[key]
            before, had_row = known.labels(self.rules.labels), known.decided or bool(known.values)
            last = None
            for event in sorted(some, key=lambda one: (one.time_us, one.event)):
                mark = _core.hash64("event", event.event.encode())
                late = event.received_us > known.show.time_us + self.rules.window_s * SECOND
                if late or mark in known.events:
                    continue
                known.events = [*known.events, mark][-KEPT_EVENTS:]
                last = event
                for name, value in event.labels.items():
                    if name in self.rules.labels and (event.time_us, value) > known.values.get(name, (-math.inf, 0.0)):
                        known.values[name] = (event.time_us, value)
            after = known.labels(self.rules.labels)
            if last is not None and after != before:
                kind = "correction" if had_row else "label"
                rows.append(self._row(known, kind, after, before if had_row else None, last.received_us, last))
        return rows

    def _expire(self, streams: set[int]) -> list[Row]:
        rows = []
        wait = round(self.rules.wait_s * SECOND)
        for known in self.shows.values():
            if known.decided or known.stream not in streams or known.show.time_us + wait > self.clocks[known.stream]:
                continue
            before = known.labels(self.rules.labels)
            known.decided = True
            after = known.labels(self.rules.labels)
            if not before:
                rows.append(self._row(known, "negative", after, None, known.show.time_us + wait, None))
            elif after != before:
                rows.append(self._row(known, "correction", after, before, known.show.time_us + wait, None))
        return rows

    @staticmethod
    def _row(known: _Known, kind: str, labels: Any, previous: Any, when: int, last: Feedback | None) -> Row:
        return Row(
            kind,
            known.show.request,
            known.show.item,
            tuple(sorted(labels.items())),
            None if previous is None else tuple(sorted(previous.items())),
            when,
            None if last is None else last.received_us,
            None if last is None else last.event,
            known.show.features,
        )


def write_logs(folder: Any, shows: int, *, days: int = 1, seed: int = 1, writers: int = 2) -> dict[str, float]:
    """Write show logs and feedback of some days, with features of `streams.SCHEMA`; ads with even numbers are clicked more.

    Some clicks come late, some twice, some before their shows, some for nothing. Return the last label of every request.
    """
    import json

    import numpy as np

    from clickfleet.data.events import FEEDBACK, SHOWS
    from clickfleet.store.event_log import LogWriter

    rng = np.random.default_rng(seed)
    logs = [LogWriter(folder / "shows", SHOWS, rotate_bytes=20_000) for _ in range(writers)]
    answers = [LogWriter(folder / "feedback", FEEDBACK, rotate_bytes=20_000) for _ in range(writers)]
    labels: dict[str, float] = {}
    waiting: list[Feedback] = []
    span = days * 86400
    for start in range(0, shows, 20):
        rows = []
        for i in range(start, min(start + 20, shows)):
            at, ad, user = 60 + i * (span - 7200) / shows, int(rng.zipf(1.5)) % 50, int(rng.integers(40))
            features = {
                "price": round(float(rng.random()), 3),
                "user": f"u{user}",
                "ad": f"a{ad}",
                "site": [f"s{ad % 5}"],
            }
            rows.append(show(f"r{i}", at, "0", json.dumps(features)))
            labels[f"r{i}"] = float(rng.random() < (0.6 if ad % 2 == 0 else 0.1))
            if labels[f"r{i}"]:
                delay = float(rng.choice([1, 10, 300, -5]))
                waiting += [feedback(f"r{i}", at + delay)] * int(rng.choice([1, 1, 1, 2]))
        if start % 200 == 0:
            waiting.append(feedback(f"nothing{start}", at))
        logs[start // 20 % writers].write(show_columns(rows))
        waiting.sort(key=lambda one: one.received_us)
        due = [one for one in waiting if one.received_us <= rows[-1].time_us]
        waiting = waiting[len(due) :]
        if due:
            answers[start // 40 % writers].write(feedback_columns(due))
    if waiting:
        answers[0].write(feedback_columns(waiting))
    logs[0].write(show_columns([show("after the last day", span + 60)]))  # moves the clock past its end
    for log in (*logs, *answers):
        log.close()
    return labels
