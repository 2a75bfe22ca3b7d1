"""The state of a stream for Prometheus: a text file in the run folder that is replaced after every pass, entry, alarm and day.

node_exporter's textfile collector takes it as it is, or any web server of yours hands it out:

    clickfleet_online_event_to_published_seconds{quantile="0.99"} 41.0
    clickfleet_online_held 0

Counters begin with the process, as Prometheus expects; what is not known yet is left out.
"""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from clickfleet.online.freshness import Freshness

NAME = "metrics.prom"
PREFIX = "clickfleet_online_"
HELP = {
    "passes_total": "Passes trained on.",
    "rows_total": "Rows trained on.",
    "bad_lines_total": "Lines and records that could not be read.",
    "entries_total": "Entries published, by kind.",
    "alarms_total": "Entries held back, by the guard or by a full disk.",
    "held": "Entries held back since the last one published: more than 0 calls for somebody.",
    "sequence": "The last entry published.",
    "entry_bytes": "Its size.",
    "published_timestamp_seconds": "When it was published.",
    "newest_event_timestamp_seconds": "The newest event trained on; time() minus it is how far training lags behind.",
    "event_to_trained_seconds": "Age of events when they had been trained on, of the last entry.",
    "event_to_published_seconds": "Age of events when they could be served, of the last entry.",
    "freshness_objective_seconds": "publish.freshness_slo.",
    "freshness_missed": "1 while 99% of events take longer than that to be published.",
    "auc": "AUC of the last pass, before it was trained on where that is known.",
    "copc": "Actual by predicted clicks of the last pass, likewise.",
    "guard_rows": "Rows of the window that the guard judges.",
    "guard_auc": "AUC of that window.",
    "guard_copc": "Actual by predicted clicks of that window.",
    "guard_warmup_rows": "Rows until the guard begins to judge; 0 once the model is warm.",
    "backlog_records": "Records that waited in the topic when the last pass was found.",
    "late_files_total": "Files that came or changed after their folder was read, and were not learned from.",
    "table_rows": "Rows in the table.",
    "table_bytes": "Its memory, after the last day.",
    "evicted_total": "Rows that table.memory_limit has taken, until the last day's end.",
}

NONE_YET = ("passes_total", "rows_total", "bad_lines_total", "alarms_total", "held", "late_files_total")
"""What is 0 until it happens."""


class Gauges:
    """Listens to what is recorded of a run, and keeps the file."""

    def __init__(self, folder: Path, fresh: Freshness, objective_s: float) -> None:
        self.path, self.fresh, self.objective_s = folder / NAME, fresh, objective_s
        self._values: dict[tuple[str, str], float] = {(name, ""): 0.0 for name in NONE_YET}
        self._values["freshness_objective_seconds", ""] = objective_s
        self._lock = threading.Lock()

    def take(self, kind: str, facts: dict[str, Any]) -> None:
        """Facts of a pass, an entry, an alarm or a day; others are passed over."""
        take = {
            "pass": self._pass,
            "published": self._entry,
            "alarm": self._alarm,
            "late_files": self._late,
            "day": self._day,
        }.get(kind)
        if take is None:
            return
        with self._lock:
            take(facts)
            if self.fresh.newest_s is not None:
                self._set("newest_event_timestamp_seconds", self.fresh.newest_s)
            self._write()

    def _pass(self, facts: dict[str, Any]) -> None:
        self._add("passes_total", 1)
        self._add("rows_total", facts["rows"])
        self._add("bad_lines_total", facts["bad_lines"])
        for name, key in (("auc", "auc"), ("copc", "calibration")):
            self._set(name, facts.get(f"validation_{key}", facts.get(key)))
            self._set(f"guard_{name}", facts.get(f"guard_{key}"))
        for name, key in (("guard_rows",) * 2, ("guard_warmup_rows",) * 2, ("backlog_records", "backlog")):
            self._set(name, facts.get(key))
        self._set("table_rows", facts["table_rows"])

    def _entry(self, facts: dict[str, Any]) -> None:
        self._add("entries_total", 1, f'{{kind="{facts["entry_kind"]}"}}')
        self._set("held", 0)
        self._set("sequence", facts["sequence"])
        self._set("entry_bytes", facts["entry_bytes"])
        self._set("published_timestamp_seconds", round(time.time(), 3))
        for what in ("trained", "published"):
            for percent in (50, 99):
                label = f'{{quantile="{percent / 100:g}"}}'
                self._set(f"event_to_{what}_seconds", facts.get(f"event_to_{what}_p{percent}"), label)
        if (late := facts.get("event_to_published_p99")) is not None:
            self._set("freshness_missed", late > self.objective_s)

    def _alarm(self, facts: dict[str, Any]) -> None:
        self._add("alarms_total", 1)
        self._set("held", facts["held"])

    def _late(self, facts: dict[str, Any]) -> None:
        self._add("late_files_total", facts["files"])

    def _day(self, facts: dict[str, Any]) -> None:
        self._set("table_rows", facts["table_rows"])
        self._set("table_bytes", facts["table_bytes"])
        self._set("evicted_total", facts["evicted"])

    def _set(self, name: str, value: float | None, label: str = "") -> None:
        if value is not None and math.isfinite(value):
            self._values[name, label] = float(value)

    def _add(self, name: str, value: float, label: str = "") -> None:
        self._values[name, label] = self._values.get((name, label), 0.0) + value

    def text(self) -> str:
        """The file's content."""
        out = []
        for name, words in HELP.items():
            mine = {label: value for (known, label), value in self._values.items() if known == name}
            if mine:
                kind = "counter" if name.endswith("_total") else "gauge"
                out += [f"# HELP {PREFIX}{name} {words}", f"# TYPE {PREFIX}{name} {kind}"]
                out += [f"{PREFIX}{name}{label} {value!r}" for label, value in mine.items()]
        return "\n".join(out) + "\n"

    def _write(self) -> None:
        hidden = self.path.with_name(f".{NAME}.writing")
        with suppress(OSError):  # the disk is full: the log says so, and the next one comes soon
            hidden.write_text(self.text())
            os.replace(hidden, self.path)
