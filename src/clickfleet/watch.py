"""What a person sees of training: a bar or a line per interval, log.txt, metrics.jsonl, TensorBoard's curves."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from pathlib import Path
from typing import IO, Any

from clickfleet.events import Events
from clickfleet.job import PHASES, Job
from clickfleet.progress import INTERVAL_S, amount

BAR_INTERVAL_S = 0.5


class Watch:
    """Shows a job's progress on stderr and writes it down in the run folder (None: nowhere)."""

    def __init__(
        self, folder: Path | None, total_bytes: int | None = None, *, quiet: bool = False, stream: IO[str] | None = None
    ) -> None:
        self.folder, self.total_bytes, self.quiet = folder, total_bytes, quiet
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty() and not quiet
        self._events: Events | None = None
        self._bar: Any = None
        self._task: Any = None
        self._begin = self._shown = self._lined = time.monotonic()
        self._rows = self._first_rows = 0
        self._first_bytes = 0

    def start(self, job: Job) -> None:
        """Counting of speed begins."""
        self._begin = self._shown = self._lined = time.monotonic()
        self._rows = self._first_rows = job.rows
        self._first_bytes = job.source.counters.bytes
        if self.live:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

            self._bar = Progress(
                SpinnerColumn(),
                BarColumn(20),
                TextColumn("{task.description}"),
                console=Console(file=self.stream),
                transient=True,
            )
            self._task = self._bar.add_task("", total=self.total_bytes)
            self._bar.start()

    def tick(self, job: Job) -> None:
        """After every step; shows something when it is time to."""
        now = time.monotonic()
        if self.live and now - self._shown >= BAR_INTERVAL_S:
            self._shown = now
            self._bar.update(
                self._task, description=self.words(self.facts(job, now)), completed=job.source.counters.bytes
            )
        if now - self._lined >= INTERVAL_S:
            facts = self.facts(job, now)
            self._lined, self._rows = now, job.rows
            job.loss = job.weight = 0.0
            self.record("train", facts)
            self.log(self.words(facts), show=not self.live)

    def words(self, facts: dict[str, Any]) -> str:
        """The numbers of a moment as one line."""
        return describe(facts)

    def facts(self, job: Job, now: float | None = None) -> dict[str, Any]:
        """The numbers of this moment; the loss is the mean over the interval."""
        now = time.monotonic() if now is None else now
        table = job.table.stats()
        elapsed = max(now - self._begin, 1e-9)
        since = max(now - self._lined, 1e-9)
        done = job.source.counters.bytes - self._first_bytes
        left = (self.total_bytes - job.source.counters.bytes) * elapsed / done if self.total_bytes and done else None
        sliding = job.metrics.sliding
        return {
            "epoch": job.source.epoch,
            "step": job.steps,
            "rows": job.rows,
            "rows_per_s": (job.rows - self._rows) / since,
            "loss": job.loss / job.weight if job.weight else None,
            "auc": job.metrics.buckets.auc,
            "sliding_auc": None if sliding is None else sliding.auc,
            "table_rows": table["rows"],
            "table_bytes": table["bytes"],
            "seconds_left": left,
            "bad_lines": job.source.counters.bad_lines,
            "shares": job.shares(),
        }

    def record(self, kind: str, facts: dict[str, Any]) -> None:
        """A line of metrics.jsonl, and points of the curves."""
        if self.folder is not None:
            clean = {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in facts.items()
            }
            with (self.folder / "metrics.jsonl").open("a") as out:
                out.write(json.dumps({"kind": kind, "time": round(time.time(), 3), **clean}) + "\n")

            self._events = self._events or Events(self.folder / "tensorboard")
            numbers = {key: value for key, value in clean.items() if isinstance(value, int | float)}
            shares = {f"share_{phase}": share for phase, share in facts.get("shares", {}).items()}
            curves = {
                f"{kind}/{key}": float(x) for key, x in {**numbers, **shares}.items() if key not in ("epoch", "step")
            }
            self._events.add(facts["step"], curves)

    def size(self) -> int:
        """Bytes of metrics.jsonl."""
        try:
            return (self.folder / "metrics.jsonl").stat().st_size if self.folder else 0
        except FileNotFoundError:
            return 0

    def forget_after(self, size: int) -> None:
        """Cuts metrics.jsonl to where a resumed run goes on."""
        if self.folder is not None and self.size() > size:
            with (self.folder / "metrics.jsonl").open("r+b") as out:
                out.truncate(size)

    def log(self, text: str, show: bool = True) -> None:
        """A line for people, in log.txt too."""
        if self.folder is not None:
            with (self.folder / "log.txt").open("a", encoding="utf-8") as out:
                out.write(time.strftime("%Y-%m-%d %H:%M:%S ") + text + "\n")
        if show and not self.quiet:
            if self._bar is not None:
                self._bar.console.print(text, highlight=False)
            else:
                print(text, file=self.stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(Exception):
                self._bar.stop()
            self._bar = None


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
