"""What a person sees of training: a bar or a line per interval, log.txt, metrics.jsonl, TensorBoard's curves."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

from clickfleet import storage
from clickfleet.appended import Appended
from clickfleet.events import Events
from clickfleet.job import PHASES, Job
from clickfleet.progress import INTERVAL_S, LiveBar, amount

BAR_INTERVAL_S = 0.5


class Mark(NamedTuple):
    """The sums of a job at a moment; speed and loss are told since one."""

    time: float = 0.0
    rows: int = 0
    loss: float = 0.0
    weight: float = 0.0

    @classmethod
    def of(cls, job: Job, now: float) -> Mark:
        return cls(now, job.rows, job.loss, job.weight)


class Watch:
    """Shows a job's progress on stderr and writes it down in the run folder (None: nowhere)."""

    def __init__(
        self,
        folder: Path | None,
        total_bytes: int | None = None,
        *,
        epochs: int = 1,
        quiet: bool = False,
        stream: IO[str] | None = None,
    ) -> None:
        self.folder, self.total_bytes, self.epochs, self.quiet = folder, total_bytes, epochs, quiet
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty() and not quiet
        self._lines = None if folder is None else Appended(folder / "metrics.jsonl")
        self._words = None if folder is None else Appended(folder / "log.txt")
        self.listen: Callable[[str, dict[str, Any]], None] = lambda kind, facts: None
        """Called with everything recorded."""
        self._events: Events | None = None
        self._told_full = False
        self._bar: LiveBar | None = None
        self._begin = self._lined = self._pointed = Mark()
        self._shown = 0.0
        self._first_bytes = self._steps = self._pointed_step = 0
        self._epoch_rows: int | None = None

    def start(self, job: Job) -> None:
        """Counting of speed begins."""
        self._begin = self._lined = self._pointed = Mark.of(job, time.monotonic())
        self._first_bytes, self._steps = job.source.counters.bytes, job.steps
        self._pointed_step = job.steps
        if self.live:
            self._bar = LiveBar(self.stream)

    def tick(self, job: Job) -> None:
        """After every step; shows something when it is time to."""
        now = time.monotonic()
        self._steps += 1  # those that are done, where job.steps were begun
        if self._bar is not None and now - self._shown >= BAR_INTERVAL_S:
            self._shown = now
            facts = self.facts(job, now, self._lined)
            self._bar.show(self._share_done(job), self.words(facts))
        if now - self._lined.time >= INTERVAL_S:
            facts = self.facts(job, now, self._lined)
            self._lined = Mark.of(job, now)
            self.log(self.words(facts), show=not self.live)
            self._point(job, now)
        elif last_on_curve(self._steps) > self._pointed_step:
            self._point(job, now)

    def words(self, facts: dict[str, Any]) -> str:
        """The numbers of a moment as one line."""
        return describe(facts)

    def _point(self, job: Job, now: float) -> None:
        self.record("train", self.facts(job, now, self._pointed))
        self._pointed, self._pointed_step = Mark.of(job, now), self._steps

    def end_epoch(self, job: Job, facts: dict[str, Any], trained_s: float) -> None:
        """The metrics of an epoch that ended, beside what it took; `trained_s` were spent on training since `start`."""
        if job.source.epoch:
            self._epoch_rows = job.rows // job.source.epoch
        rate = (job.rows - self._begin.rows) / max(trained_s, 1e-9)
        table = job.table.stats()
        more = {"table_rows": table["rows"], "table_bytes": table["bytes"], "rows_per_s": rate, "shares": job.shares()}
        # `rows` as everywhere: what the run has learned from so far; the metrics are those of `epoch_rows`
        self.record("epoch", {**facts, "rows": job.rows, "epoch_rows": facts["rows"], **more})

    def _share_done(self, job: Job) -> float | None:
        if self.total_bytes:
            return min(float(job.source.counters.bytes) / self.total_bytes, 1.0)
        if self._epoch_rows:  # files whose size tells nothing: after the first epoch its rows do
            return min(job.rows / (self._epoch_rows * self.epochs), 1.0)
        return None

    def _seconds_left(self, job: Job, now: float) -> float | None:
        elapsed, share = max(now - self._begin.time, 1e-9), self._share_done(job)
        if share is None:
            return None
        if self.total_bytes:
            first = self._first_bytes / self.total_bytes
        else:
            first = self._begin.rows / ((self._epoch_rows or 1) * self.epochs)
        return (1 - share) * elapsed / (share - first) if share > first else None

    def facts(self, job: Job, now: float, since: Mark) -> dict[str, Any]:
        """The numbers of this moment; speed and loss are means since a mark."""
        table, sliding = job.table.stats(), job.metrics.sliding
        weight = job.weight - since.weight
        return {
            "epoch": job.source.epoch,
            "step": self._steps,
            "rows": job.rows,
            "rows_per_s": (job.rows - since.rows) / max(now - since.time, 1e-9),
            "loss": (job.loss - since.loss) / weight if weight else None,
            "auc": job.metrics.buckets.auc,
            "sliding_auc": None if sliding is None else sliding.auc,
            "table_rows": table["rows"],
            "table_bytes": table["bytes"],
            "seconds_left": self._seconds_left(job, now),
            "bad_lines": job.source.counters.bad_lines,
            "shares": job.shares(),
        }

    def record(self, kind: str, facts: dict[str, Any]) -> None:
        """A line of metrics.jsonl, and points of the curves."""
        self.listen(kind, facts)
        if self.folder is not None and self._lines is not None:
            clean = {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in facts.items()
            }
            line = json.dumps({"kind": kind, "time": round(time.time(), 3), **clean})
            self._lines.add(line.encode() + b"\n")
            self._tell_full(self._lines)
            self._events = self._events or Events(self.folder / "tensorboard")
            numbers = {key: value for key, value in clean.items() if isinstance(value, int | float)}
            shares = {f"share_{phase}": share for phase, share in facts.get("shares", {}).items()}
            curves = {
                f"{kind}/{key}": float(x) for key, x in {**numbers, **shares}.items() if key not in ("epoch", "step")
            }
            self._events.add(facts["step"], curves)

    def size(self) -> int:
        """Bytes of metrics.jsonl, for a checkpoint: all lines must be in it."""
        if self._lines is None:
            return 0
        if not self._lines.flush():
            assert self._lines.problem is not None
            raise storage.refusal(self._lines.problem, self._lines.path)
        try:
            return self._lines.path.stat().st_size
        except FileNotFoundError:
            return 0

    def _tell_full(self, file: Appended) -> None:
        if bool(file.waiting) and not self._told_full and not self.quiet:
            print(
                f"warning: the disk is full: lines of {file.path} wait until there is space",
                file=self.stream,
                flush=True,
            )
        self._told_full = bool(file.waiting)

    def forget_after(self, size: int) -> None:
        """Cuts metrics.jsonl to where a resumed run goes on."""
        if self._lines is not None and self.size() > size:
            os.truncate(self._lines.path, size)

    def log(self, text: str, show: bool = True) -> None:
        """A line for people, in log.txt too."""
        if self._words is not None:
            self._words.add((time.strftime("%Y-%m-%d %H:%M:%S ") + text + "\n").encode())
            self._tell_full(self._words)
        if show and not self.quiet:
            if self._bar is not None:
                self._bar.print(text)
            else:
                print(text, file=self.stream, flush=True)

    def close(self) -> None:
        for file in (self._lines, self._words):
            if file is not None:
                file.flush()
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def last_on_curve(step: int) -> int:
    """The last step up to this one at which a curve has a point: all of the first, then eight whenever their number doubles.

    >>> [step for step in range(1, 50) if last_on_curve(step) == step][12:]
    [13, 14, 15, 16, 18, 20, 22, 24, 26, 28, 30, 32, 36, 40, 44, 48]
    """
    spacing = 1 << max(step.bit_length() - 4, 0)
    return step // spacing * spacing


def describe(facts: dict[str, Any]) -> str:
    """One line of a moment's numbers."""
    words = [
        f"epoch {facts['epoch']}",
        f"step {facts['step']:,}",
        f"{facts['rows']:,} rows",
        f"{facts['rows_per_s']:,.0f} rows/s",
    ]
    if facts["loss"] is not None:
        words.append(f"loss {facts['loss']:.4f}")
    words.append(f"AUC {facts['auc']:.4f}")
    if facts["sliding_auc"] is not None:
        words.append(f"last batches {facts['sliding_auc']:.4f}")
    words.append(f"table {facts['table_rows']:,} rows {amount(facts['table_bytes'], 'bytes')}")
    if facts["bad_lines"]:
        words.append(f"{facts['bad_lines']:,} bad lines")
    if facts["seconds_left"] is not None:
        minutes, seconds = divmod(int(max(facts["seconds_left"], 0)), 60)
        words.append(f"{minutes}:{seconds:02} left")
    words.append(" ".join(f"{phase} {facts['shares'][phase]:.0%}" for phase in PHASES))
    return "  ".join(words)
