"""Write the state of a stream as a Prometheus text file, `metrics.prom` in the run folder.

The file is replaced after every pass, entry, alarm and day; with micro-passes, about every second. Point node_exporter's textfile
collector at it, or serve it with any web server:

    clickfleet_online_event_to_published_seconds{quantile="0.99"} 41.0
    clickfleet_online_held 0.0

Counters start at 0 with the process, as Prometheus expects. Values that are not known yet are left out.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clickfleet.data.files import replacing
from clickfleet.online.freshness import Freshness

if TYPE_CHECKING:
    from prometheus_client import Metric

Facts = Mapping[str, Any]
"""What the monitor records of an event."""
NAME = "metrics.prom"
PREFIX = "clickfleet_online_"
HELP = {
    "passes_total": "Passes trained on.",
    "rows_total": "Rows trained on.",
    "run_rows": "Rows trained on since the run began, over all its processes.",
    "bad_lines_total": "Lines and records that could not be read.",
    "entries_total": "Entries published, by kind.",
    "alarms_total": "Entries held back, by the guard or by a full disk.",
    "held": "Entries held back since the last published entry. More than 0 needs attention.",
    "sequence": "Sequence number of the last published entry.",
    "entry_bytes": "Size of the last published entry.",
    "published_timestamp_seconds": "Time of the last published entry.",
    "newest_event_timestamp_seconds": "Time of the newest event trained on; time() minus this value is the lag of training.",
    "event_to_trained_seconds": "Age of the last entry's events when they were trained on.",
    "event_to_published_seconds": "Age of the last entry's events when they were published.",
    "freshness_objective_seconds": "publish.freshness_slo.",
    "freshness_missed": "1 if the 99th percentile of event-to-published time exceeds publish.freshness_slo, else 0.",
    "auc": "AUC of the last pass, from scores before training on it where available.",
    "copc": "Actual clicks divided by predicted clicks of the last pass, from the same scores.",
    "slice_copc": "With publish.calibrate: actual clicks divided by predicted clicks of a slice, of the scores that were served.",
    "slice_copc_error": "Standard error of it.",
    "slice_shows": "Shows of the slice that it was measured on; older shows count less.",
    "guard_rows": "Rows in the guard's window.",
    "guard_auc": "AUC of the guard's window.",
    "guard_copc": "Actual clicks divided by predicted clicks of the guard's window.",
    "guard_warmup_rows": "Rows until the guard starts to check entries; 0 after the warm-up.",
    "backlog_records": "Records waiting in the topic when the last pass was found.",
    "late_files_total": "Files that arrived or changed after their folder was read. They were not trained on.",
    "table_rows": "Rows in the table.",
    "table_bytes": "Memory of the table after the last day.",
    "table_disk_rows": "Rows of the table on disk after the last day.",
    "table_disk_bytes": "Files of the table on disk after the last day.",
    "evicted_total": "Rows evicted by table.memory_limit or table.disk_limit, up to the end of the last day.",
    "join_events": "Events that the join has read since it began, by kind: shows, feedback, and those that it could not use.",
    "join_rows": "Rows that the join has made since it began, by kind: negatives, labels and corrections.",
    "join_waiting": "Shows that wait for a label, and feedback that waits for its show (parked).",
    "join_store_bytes": "Size of the files of shows that wait or may be corrected.",
    "labels_open": "Share of the labels learned so far that are 0 and may still change, by label.",
    "labels_on_time": "Share of positive labels that were known when their rows were first learned, by label.",
}
LABELS = {
    "entries_total": "kind",
    "event_to_trained_seconds": "quantile",
    "event_to_published_seconds": "quantile",
    "join_events": "kind",
    "join_rows": "kind",
    "join_waiting": "kind",
    "labels_open": "label",
    "labels_on_time": "label",
    "slice_copc": "slice",
    "slice_copc_error": "slice",
    "slice_shows": "slice",
}
JOINED_ROWS, WAITING = ("negatives", "labels", "corrections"), ("waiting", "parked")

ZERO_AT_START = ("passes_total", "rows_total", "bad_lines_total", "alarms_total", "held", "late_files_total")


class OnlineMetrics:
    """Listen to what the monitor records, and update the file."""

    def __init__(self, folder: Path, fresh: Freshness, objective_s: float) -> None:
        self.path, self.fresh, self.objective_s = folder / NAME, fresh, objective_s
        self._values: dict[str, dict[str, float]] = {name: {} for name in HELP}  # metric -> label -> value
        for name in ZERO_AT_START:
            self._set(name, 0.0)
        self._set("freshness_objective_seconds", objective_s)
        self._lock = threading.Lock()

    def take(self, kind: str, facts: Facts) -> None:
        """Update the file with the facts of a pass, an entry, an alarm, late files or a day. Ignore other kinds."""
        take = {
            "pass": self._pass,
            "published": self._entry,
            "alarm": self._alarm,
            "late_files": self._late,
            "day": self._day,
            "join": self._join,
            "progress": self._progress,
        }.get(kind)
        if take is None:
            return
        with self._lock:
            take(facts)
            if self.fresh.newest_s is not None:
                self._set("newest_event_timestamp_seconds", self.fresh.newest_s)
            self._write()

    def _pass(self, facts: Facts) -> None:
        self._add("passes_total", facts.get("passes", 1))
        self._add("rows_total", facts["rows"])
        self._add("bad_lines_total", facts["bad_lines"])
        for name, key in (("auc", "auc"), ("copc", "calibration")):
            self._set(name, facts.get(f"validation_{key}", facts.get(key)))
            self._set(f"guard_{name}", facts.get(f"guard_{key}"))
        for name, key in (("guard_rows",) * 2, ("guard_warmup_rows",) * 2, ("backlog_records", "backlog")):
            self._set(name, facts.get(key))
        self._set("table_rows", facts["table_rows"])
        self._set("run_rows", facts.get("run_rows"))
        if facts.get("slices"):
            for name in ("slice_copc", "slice_copc_error", "slice_shows"):
                self._values[name].clear()
            for one in facts["slices"]:
                self._set("slice_copc", one["copc"], one["slice"])
                self._set("slice_copc_error", one["error"], one["slice"])
                self._set("slice_shows", one["shows"], one["slice"])

    def _entry(self, facts: Facts) -> None:
        self._add("entries_total", facts.get("entries", 1), facts["entry_kind"])
        self._set("held", 0)
        self._set("sequence", facts["sequence"])
        self._set("entry_bytes", facts["entry_bytes"])
        self._set("published_timestamp_seconds", round(time.time(), 3))
        for what in ("trained", "published"):
            for percent in (50, 99):
                age = facts.get(f"event_to_{what}_p{percent}")
                self._set(f"event_to_{what}_seconds", age, f"{percent / 100:g}")
        if (late := facts.get("event_to_published_p99")) is not None:
            self._set("freshness_missed", late > self.objective_s)

    def _alarm(self, facts: Facts) -> None:
        self._add("alarms_total", 1)
        self._set("held", facts["held"])

    def _late(self, facts: Facts) -> None:
        self._add("late_files_total", facts["files"])

    def _day(self, facts: Facts) -> None:
        self._set("table_rows", facts["table_rows"])
        for name in ("table_bytes", "table_disk_rows", "table_disk_bytes"):
            self._set(name, facts.get(name))
        self._set("evicted_total", facts["evicted"])

    def _progress(self, facts: Facts) -> None:
        self._set("run_rows", facts["run_rows"])
        self._join({kind: count for kind, count in facts.items() if kind != "run_rows"})

    def _join(self, facts: Facts) -> None:
        for kind, count in facts.items():
            if kind == "store_bytes":
                self._set("join_store_bytes", count)
            elif isinstance(count, Mapping):  # open and on_time
                for label, share in count.items():
                    self._set(f"labels_{kind}", share, label)
            elif kind != "step":
                name = "join_rows" if kind in JOINED_ROWS else "join_waiting" if kind in WAITING else "join_events"
                self._set(name, count, kind)

    def _set(self, name: str, value: float | None, label: str = "") -> None:
        if value is not None and math.isfinite(value):
            self._values[name][label] = float(value)

    def _add(self, name: str, value: float, label: str = "") -> None:
        self._values[name][label] = self._values[name].get(label, 0.0) + value

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that have a value, for a Prometheus registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, values in self._values.items():
            if values:
                family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                metric = family(PREFIX + name, HELP[name], labels=[LABELS[name]] if name in LABELS else [])
                for label, value in values.items():
                    metric.add_metric([label] if name in LABELS else [], value)
                yield metric

    def text(self) -> bytes:
        """Return the content of the file."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def _write(self) -> None:
        with suppress(OSError), replacing(self.path) as temporary:  # a full disk is logged; the next write comes soon
            temporary.write_bytes(self.text())
