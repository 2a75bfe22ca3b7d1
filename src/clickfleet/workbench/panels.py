"""What a dashboard shows of runs: tiles, curves, growth of the table, and of online runs entries and freshness."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from clickfleet.config import load
from clickfleet.errors import ClickfleetError
from clickfleet.progress import amount
from clickfleet.report import charts, page, stream
from clickfleet.report.charts import KINDS, Series
from clickfleet.report.evidence import curve
from clickfleet.workbench.tail import Line, Tail

MOST = 2000
"""Lines of a kind that are kept; of more, every second of the old ones."""
LIVE_S = 30.0
DRAWN = 12
"""Runs that are drawn one by one; the table has all."""


class Followed:
    """A run folder that may still grow."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.absolute().name
        self.lines: dict[str, list[Line]] = {"train": [], "test": [], "epoch": []}
        self._tail = Tail(folder / "metrics.jsonl")
        self._restarts = 0
        self._config: Any = None

    def look(self) -> None:
        """Takes in what is new."""
        found = self._tail.lines()
        if self._tail.restarts != self._restarts:  # it went on from a checkpoint: what came after it never was
            self._restarts = self._tail.restarts
            self.lines = {"train": [], "test": [], "epoch": []}
        for line in found:
            kept = self.lines.setdefault(line["kind"], [])
            kept.append(line)
            if len(kept) > 2 * MOST:
                kept[:MOST] = kept[:MOST:2]

    @property
    def config(self) -> Any:
        """Of the run, once it has one that can be read."""
        path = self.folder / "config.yaml"
        if self._config is None and path.is_file():
            try:
                self._config = load(path, (), self.folder)
            except ClickfleetError:  # half written just now, or of another version
                return None
        return self._config

    @property
    def last(self) -> Line:
        """The newest numbers of training."""
        return max((kind[-1] for name in ("train", "epoch") if (kind := self.lines[name])), key=_time, default={})

    @property
    def silence_s(self) -> float | None:
        """Seconds since anything was written down; None before the first line."""
        newest = max((_time(kind[-1]) for kind in self.lines.values() if kind), default=None)
        return None if newest is None else max(0.0, time.time() - newest)

    @property
    def state(self) -> str:
        silence = self.silence_s
        if silence is None:
            return "waiting for its first numbers"
        return "live" if silence < LIVE_S else f"quiet for {stream.span(silence)}"

    def facts(self) -> dict[str, Any]:
        """For machines: the newest numbers."""
        last, test = self.last, self.lines["test"]
        entry = self.lines.get("published", [{}])[-1] if self.lines.get("published") else {}
        return {
            "run": str(self.folder),
            "state": self.state,
            "silence_s": self.silence_s,
            **{
                key: last.get(key) for key in ("step", "rows", "rows_per_s", "auc", "loss", "table_rows", "table_bytes")
            },
            "test_auc": test[-1].get("auc") if test else None,
            "passes": len(self.lines.get("pass", [])),
            **{key: entry.get(key) for key in ("sequence", "entry_kind", "entry_rows", "entry_bytes")},
            **stream.ages(self.lines),
            "lag_s": time.time() - _time(entry) if entry else None,
        }


def draw(runs: Sequence[Followed]) -> str:
    """The changing part of the page."""
    drawn = sorted(runs, key=lambda run: run.silence_s or 0.0)[:DRAWN]
    told = f'<p class="soft">Drawn below: the {DRAWN} runs that wrote last.</p>' if len(runs) > DRAWN else ""
    return "\n".join([_overview(runs), told, *(_run(run) for run in runs if run in drawn)])


def _overview(runs: Sequence[Followed]) -> str:
    if len(runs) < 2:
        return ""
    head = ("run", "state", "step", "rows", "rows/s", "AUC", "test AUC", "rows in the table")
    cells = []
    for run in runs:
        facts = run.facts()
        speed = facts["rows_per_s"]
        cells.append(
            [
                f'<a href="#{escape(run.name)}">{escape(run.name)}</a>',
                escape(run.state),
                page.number(facts["step"]) or "–",
                page.number(facts["rows"]) or "–",
                "–" if speed is None else f"{speed:,.0f}",
                page.number(facts["auc"]) or "–",
                page.number(facts["test_auc"]) or "–",
                page.number(facts["table_rows"]) or "–",
            ]
        )
    figures = []
    for title, kind, key in (("Test AUC", "test", "auc"), ("Training AUC", "train", "auc"), ("Loss", "train", "loss")):
        series = [
            Series(run.name, curve(run.lines[kind], key), KINDS[i % len(KINDS)], dots=kind == "test")
            for i, run in enumerate(runs)
        ]
        series = [one for one in series if one.points]
        if series:
            figures.append(charts.lines(f"{title} of all", series, "step"))
    return page.section("All runs", page.table(head, cells), page.charts(*figures))


def _run(run: Followed) -> str:
    last, test = run.last, run.lines["test"]
    speed, loss, left = last.get("rows_per_s"), last.get("loss"), last.get("seconds_left")
    size = last.get("table_bytes")
    entry = run.lines.get("published", [])
    tiles = {
        "step": page.number(last.get("step")),
        "rows trained on": page.number(last.get("rows")),
        "rows per second": None if speed is None else f"{speed:,.0f}",
        "loss": page.number(loss),
        "AUC": page.number(last.get("auc")),
        "test AUC": page.number(test[-1].get("auc")) if test else None,
        "rows in the table": page.number(last.get("table_rows")),
        "memory of the table": None if size is None else amount(int(size), "bytes"),
        "left": None if left is None or run.state != "live" else stream.span(left),
        "staleness": page.number(last.get("staleness"), 1),
        "lost processes": page.number(last.get("losses")),
        "age of the last entry": stream.span(time.time() - _time(entry[-1])) if entry else None,
        **stream.numbers(run.lines),
    }
    train = run.lines["train"] or run.lines["epoch"]
    curves = [
        _curves("AUC", [("training", train, "auc"), ("last batches", train, "sliding_auc"), ("test", test, "auc")]),
        _curves("Loss", [("training", train, "loss"), ("test", test, "logloss")]),
        _curves("Rows per second", [("rows/s", train, "rows_per_s")]),
        _curves("Growth of the table, rows", [("rows", train, "table_rows")]),
        _curves("Growth of the table, bytes", [("bytes", train, "table_bytes")]),
        _curves("Staleness of rows", [("steps", train, "staleness")]),
    ]
    config = run.config
    objective = None if config is None else config.publish.freshness_slo
    shown = config.model.name if config is not None else ""
    parts = [
        page.tiles(tiles),
        page.charts(*curves),
        page.charts(*stream.passes(run.lines), *stream.entries(run.lines), *stream.freshness(run.lines, objective)),
        stream.alarms(run.lines),
        page.shares(last["shares"]) if last.get("shares") else "",
    ]
    state = f'<p class="soft"><b class="state">{escape(run.state)}</b> {escape(str(run.folder))} {escape(shown)}</p>'
    return f'<section class="run" id="{escape(run.name)}"><h2>{escape(run.name)}</h2>{state}{"".join(parts)}</section>'


def _curves(title: str, wanted: Sequence[tuple[str, list[Line], str]]) -> str:
    series = [
        Series(name, points, KINDS[i], dots=name == "test")
        for i, (name, lines, key) in enumerate(wanted)
        if (points := curve(lines, key))
    ]
    return charts.lines(title, series, "step") if series else ""


def _time(line: Line) -> float:
    return float(line.get("time") or 0.0)
