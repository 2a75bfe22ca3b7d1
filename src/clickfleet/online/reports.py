"""Record passes and entries in the log, metrics.jsonl and the curves.

A run with long passes records each of them. Where a pass takes a second, the passes and entries of ten seconds are one record: their
rows, scores and events together. So the files of a run grow with its time and not with its number of passes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clickfleet.online.freshness import TICKS, TrainedEvents, quantile
from clickfleet.online.passes import Pass
from clickfleet.store.published import Entry
from clickfleet.training.metrics import Buckets, MetricResults, Metrics
from clickfleet.training.monitor import Monitor, Progress

TOGETHER_S = 10.0
"""Seconds of micro-passes that are recorded together."""
LIVE_S = 1.0
"""Seconds between two updates of the metrics in between, which are recorded nowhere."""
Facts = dict[str, object]


@dataclass
class PassReport:
    """A pass that was trained."""

    ended: Pass
    step: int
    trained: Metrics
    scored: Buckets | None
    """Its scores before training; None if `judged` are the metrics of training, or there are none."""
    judged: MetricResults | None
    """Metrics of the scores made before training."""
    seconds: float
    bad_lines: int
    facts: Mapping[str, object]
    """What is true at its end: the guard's window, the size of the table, the backlog."""
    source: Mapping[str, Any] | None = None
    """What the source has counted, if it is a join."""


@dataclass
class EntryReport:
    """An entry that was published."""

    entry: Entry
    step: int
    events: TrainedEvents
    published_at: float
    """Time of its line in the log."""
    seconds: float
    """From the end of the last pass in it until then."""


@dataclass
class _Passes:
    """Passes that are recorded together."""

    trained: Metrics
    first: PassReport
    last: PassReport
    scored: Buckets | None = None
    count: int = 0
    seconds: float = 0.0
    bad_lines: int = 0

    def add(self, report: PassReport) -> None:
        self.last, self.count = report, self.count + 1
        self.seconds, self.bad_lines = self.seconds + report.seconds, self.bad_lines + report.bad_lines
        self.trained.merge(report.trained)
        if report.scored is not None:
            if self.scored is None:
                self.scored = Buckets(report.scored.thresholds)
            self.scored.merge(report.scored)

    @property
    def name(self) -> str:
        first, last = self.first.ended, self.last.ended
        if self.count == 1:
            return last.name
        return f"{first.day} passes {first.number} to {f'{last.day}/' * (first.day != last.day)}{last.number}"


@dataclass
class _Entries:
    """Entries of one kind that are recorded together."""

    last: EntryReport
    count: int = 0
    rows: int = 0
    deleted: int = 0
    bytes: int = 0
    seconds: float = 0.0
    ages: dict[str, Counter[float]] = field(default_factory=dict)

    def add(self, report: EntryReport) -> None:
        facts = report.entry.manifest
        self.last, self.count, self.seconds = report, self.count + 1, self.seconds + report.seconds
        self.rows, self.deleted = self.rows + facts["rows"], self.deleted + facts["deleted"]
        self.bytes += report.entry.size
        for what, ages in report.events.ages_at(report.published_at).items():
            self.ages.setdefault(what, Counter()).update(ages)

    def quantiles(self) -> dict[str, float]:
        """Return quantiles of the ages of all events, in seconds."""
        return {
            f"event_to_{what}_p{percent}": round(quantile(ages, percent / 100) / TICKS, 3)
            for what, ages in self.ages.items()
            for percent in (50, 99)
            if ages
        }


class StreamReports:
    """Records what a stream does. `every_s`: how many seconds are recorded together; 0 records each pass and entry."""

    def __init__(
        self,
        monitor: Monitor,
        make_metrics: Callable[[], Metrics],
        every_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.monitor, self.every_s = monitor, every_s
        self.watched: Progress | None = None
        """What the curves show; they end where a recorded pass does."""
        self._make_metrics, self._clock = make_metrics, clock
        self._passes: _Passes | None = None
        self._entries: _Entries | None = None
        self._since = self._told_at = clock()
        self._untold: PassReport | None = None

    @property
    def together(self) -> bool:
        """Whether passes and entries are recorded together."""
        return self.every_s > 0

    def passed(self, report: PassReport) -> None:
        """Record a pass."""
        if self._passes is None:
            self._passes = _Passes(self._make_metrics(), report, report)
        self._passes.add(report)
        self._untold = report
        self.flush_if_due()

    def published(self, report: EntryReport) -> dict[str, float]:
        """Record an entry. Return the ages of its events."""
        if self._entries is not None and self._entries.last.entry.base != report.entry.base:
            self.flush()
        if self._entries is None:
            self._entries = _Entries(report)
        self._entries.add(report)
        self.flush_if_due()
        return report.events.facts(report.published_at)

    def flush_if_due(self) -> None:
        """Record what is not recorded yet, if the last record is old enough."""
        if self._clock() - self._since >= self.every_s:
            self.flush()
        elif self._untold is not None and self._clock() - self._told_at >= LIVE_S:
            last, self._untold, self._told_at = self._untold, None, self._clock()
            self.monitor.listen("progress", {"run_rows": last.facts.get("run_rows"), **(last.source or {})})

    def flush(self) -> None:
        """Record what is not recorded yet."""
        passes, entries = self._passes, self._entries
        self._passes = self._entries = self._untold = None
        self._since = self._clock()
        if passes is not None:
            self._record_passes(passes)
        if entries is not None:
            self._record_entries(entries)

    def _record_passes(self, passes: _Passes) -> None:
        last, trained = passes.last, passes.trained.results()
        trained.pop("sliding_auc", None)
        judged = last.judged
        if passes.count > 1 and judged is not None:
            judged = trained if passes.scored is None else passes.scored.results()
        self.monitor.log(f"{passes.name} trained: {describe(trained)}")
        facts: Facts = {"day": last.ended.day, "pass": last.ended.number, "step": last.step, **trained}
        if self.together:
            facts["passes"] = passes.count
        if judged is not None:
            facts |= {f"validation_{key}": value for key, value in judged.items()}
        facts |= {"seconds": passes.seconds, "bad_lines": passes.bad_lines, **last.facts}
        if self.watched is not None:
            self.monitor.point(self.watched)
        self.monitor.record("pass", facts)
        if last.source is not None:
            self.monitor.record("join", {"step": last.step, **last.source})

    def _record_entries(self, entries: _Entries) -> None:
        last, ages = entries.last, entries.quantiles()
        facts: Facts = {"sequence": last.entry.sequence, "entry_kind": last.entry.manifest["kind"], "step": last.step}
        facts |= {"entry_rows": entries.rows, "entry_deleted": entries.deleted, "entry_bytes": entries.bytes}
        if self.together:
            facts["entries"] = entries.count
        self.monitor.record("published", {**facts, **ages, "seconds": entries.seconds})
        names = last.entry.path.name if entries.count == 1 else f"{entries.count} entries up to {last.entry.path.name}"
        self.monitor.log(
            f"published {names}: {entries.rows:,} rows, {entries.deleted:,} deleted, {entries.bytes:,} bytes in "
            f"{entries.seconds:.2f} s{_words(ages)}"
        )


def describe(results: Mapping[str, Any]) -> str:
    """Return the metrics of a pass as a line of log, under PaddleRec's names with the spelling corrected."""
    names = {
        "auc": "AUC",
        "bucket_error": "BUCKET_ERROR",
        "mae": "MAE",
        "rmse": "RMSE",
        "actual_ctr": "Actual_CTR",
        "predicted_ctr": "Predicted_CTR",
        "calibration": "COPC",
    }
    words = [f"{text}={'-' if results[key] is None else format(results[key], '.6f')}" for key, text in names.items()]
    return f"global {' '.join(words)} rows={results['rows']}"


def _words(ages: Mapping[str, float]) -> str:
    """Return the ages of events for the log. Ages of minutes are told in whole seconds."""
    if not ages:
        return ""

    def words(seconds: float) -> str:
        return f"{seconds:,.0f} s" if seconds >= 20 else f"{seconds:.2f} s"

    return "; events " + ", ".join(
        f"{what} after {words(ages[f'event_to_{what}_p50'])} (99%: {words(ages[f'event_to_{what}_p99'])})"
        for what in ("trained", "published")
    )
