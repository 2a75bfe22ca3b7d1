"""Show and record the progress of training: a bar or a line per interval, log.txt, metrics.jsonl, curves for TensorBoard."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sized
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Protocol, cast

from clickfleet.data.progress import INTERVAL_S, LiveBar, amount
from clickfleet.store import atomic
from clickfleet.store.atomic import Appender
from clickfleet.store.table import size_facts
from clickfleet.training.metrics import by_label
from clickfleet.training.tensorboard import Events

BAR_INTERVAL_S = 0.5
MARK = "checkpoint"
"""The kind of the line that marks a checkpoint."""
END = "end"
"""The kind of the line that tells how a run ended."""
EndState = Literal["finished", "stopped", "failed"]
"""How a run ended: by itself, by a signal, or by an error."""


class Progress(Protocol):
    """What a monitor shows: the sums and counters of a run, on one machine or on a cluster."""

    @property
    def steps(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def weight(self) -> float: ...
    @property
    def epoch(self) -> int: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def bad_lines(self) -> int: ...
    @property
    def auc(self) -> float: ...
    @property
    def sliding_auc(self) -> float | None: ...
    def table_stats(self) -> dict[str, int]: ...
    def shares(self) -> dict[str, float]: ...


class Mark(NamedTuple):
    """The sums of a run at one moment. Speed and loss are means since a mark."""

    time: float = 0.0
    rows: int = 0
    loss: float = 0.0
    weight: float = 0.0

    @classmethod
    def of(cls, run: Progress, now: float) -> Mark:
        return cls(now, run.rows, run.loss, run.weight)


class Monitor:
    """Shows progress on stderr and records it in the run folder, if there is one."""

    def __init__(
        self,
        folder: Path | None,
        total_bytes: int | None = None,
        *,
        epochs: int = 1,
        quiet: bool = False,
        stream: IO[str] | None = None,
        print_every: int | None = None,
    ) -> None:
        self.folder, self.total_bytes, self.epochs, self.quiet = folder, total_bytes, epochs, quiet
        self.print_every = print_every
        """Steps between two lines. None: a line every ten seconds."""
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty() and not quiet
        self._metrics_file = None if folder is None else Appender(folder / "metrics.jsonl")
        self._log_file = None if folder is None else Appender(folder / "log.txt")
        self.listen: Callable[[str, dict[str, object]], None] = lambda kind, facts: None
        """Called with every record."""
        self._events: Events | None = None
        self._warned_full = False
        self._bar: LiveBar | None = None
        self._begin = self._lined = self._pointed = Mark()
        self._shown = 0.0
        self._first_bytes = self._steps = self._pointed_step = self._lined_step = 0
        self._epoch_rows: int | None = None
        self._run: Progress | None = None

    def start(self, run: Progress) -> None:
        """Start to measure speed."""
        self._run = run
        self._begin = self._lined = self._pointed = Mark.of(run, time.monotonic())
        self._first_bytes, self._steps = run.bytes_read, run.steps
        self._pointed_step = self._lined_step = run.steps
        if self.live:
            self._bar = LiveBar(self.stream)

    def tick(self, run: Progress) -> None:
        """Show progress when it is time to. Call it after every step."""
        now = time.monotonic()
        self._steps += 1  # steps done; run.steps counts those begun
        if self._bar is not None and now - self._shown >= BAR_INTERVAL_S:
            self._shown = now
            facts = self.facts(run, now, self._lined)
            self._bar.show(self._share_done(run), self.words(facts))
        if self._line_due(now):
            facts = self.facts(run, now, self._lined)
            self._lined, self._lined_step = Mark.of(run, now), self._steps
            self.log(self.words(facts), show=not self.live or self.print_every is not None)
            self._point(run, now)
        elif last_on_curve(self._steps) > self._pointed_step:
            self._point(run, now)

    def _line_due(self, now: float) -> bool:
        if self.print_every is None:
            return now - self._lined.time >= INTERVAL_S
        return self._steps // self.print_every > self._lined_step // self.print_every

    def words(self, facts: dict[str, object]) -> str:
        """Return the facts as one line."""
        return describe(facts)

    def evaluation(self) -> EvaluationLines:
        """Return what reports the progress of an evaluation that begins now."""
        return EvaluationLines(
            lambda text: self.log(text, show=not self.live or bool(self.print_every)), self.print_every
        )

    def point(self, run: Progress) -> None:
        """Add a point to the curves unless this step has one. Call it when a run stops early."""
        if self._steps > self._pointed_step:
            self._point(run, time.monotonic())

    def _point(self, run: Progress, now: float) -> None:
        self.record("train", self.facts(run, now, self._pointed))
        self._pointed, self._pointed_step = Mark.of(run, now), self._steps

    def end_epoch(self, run: Progress, facts: dict[str, object], trained_s: float) -> None:
        """Record the metrics and costs of an epoch. `trained_s` is the time of training since `start`."""
        if run.epoch:
            self._epoch_rows = run.rows // run.epoch
        rate = (run.rows - self._begin.rows) / max(trained_s, 1e-9)
        table = run.table_stats()
        more = {**size_facts(table), "rows_per_s": rate, "shares": run.shares()}
        # `rows` counts the whole run, as in other records; the metrics cover `epoch_rows`
        self.record("epoch", {**facts, "rows": run.rows, "epoch_rows": facts["rows"], **more})

    @property
    def trained_rows(self) -> int:
        """Rows trained since the run began."""
        return 0 if self._run is None else self._run.rows

    def end(self, state: EndState, **facts: object) -> None:
        """Record how the run ended. A run without this line is running, or was killed."""
        run = self._run
        if run is not None or state == "failed":
            counts = {"step": 0, "rows": 0} if run is None else {"step": run.steps, "rows": run.rows}
            self.record(END, {**counts, "state": state, **facts})

    @property
    def started(self) -> bool:
        """Whether training has begun."""
        return self._run is not None

    def _share_done(self, run: Progress) -> float | None:
        if self.total_bytes:
            return min(run.bytes_read / self.total_bytes, 1.0)
        if self._epoch_rows:  # sizes of files do not help: the rows of the first epoch do
            return min(run.rows / (self._epoch_rows * self.epochs), 1.0)
        return None

    def _seconds_left(self, run: Progress, now: float) -> float | None:
        elapsed, share = max(now - self._begin.time, 1e-9), self._share_done(run)
        if share is None:
            return None
        if self.total_bytes:
            first = self._first_bytes / self.total_bytes
        else:
            first = self._begin.rows / ((self._epoch_rows or 1) * self.epochs)
        return (1 - share) * elapsed / (share - first) if share > first else None

    def facts(self, run: Progress, now: float, since: Mark) -> dict[str, object]:
        """Return the facts of this moment. Speed and loss are means since a mark."""
        table = run.table_stats()
        weight = run.weight - since.weight
        return {
            "epoch": run.epoch,
            "step": self._steps,
            "rows": run.rows,
            "rows_per_s": (run.rows - since.rows) / max(now - since.time, 1e-9),
            "loss": (run.loss - since.loss) / weight if weight else None,
            "auc": run.auc,
            "sliding_auc": run.sliding_auc,
            **size_facts(table),
            "seconds_left": self._seconds_left(run, now),
            "bad_lines": run.bad_lines,
            "shares": run.shares(),
        }

    def record(self, kind: str, facts: dict[str, object]) -> None:
        """Write a line to metrics.jsonl, and points of the curves."""
        self.listen(kind, facts)
        if self.folder is not None and self._metrics_file is not None:
            clean = {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in facts.items()
            }
            line = json.dumps({"kind": kind, "time": round(time.time(), 3), **clean})
            self._metrics_file.add(line.encode() + b"\n")
            self._warn_if_full(self._metrics_file)
            self._events = self._events or Events(self.folder / "tensorboard")
            numbers = {
                key: value for key, value in {**clean, **by_label(clean)}.items() if isinstance(value, int | float)
            }
            phases = cast(Mapping[str, float], facts.get("shares", {}))
            shares = {f"share_{phase}": share for phase, share in phases.items()}
            curves = {
                f"{kind}/{key}": float(x) for key, x in {**numbers, **shares}.items() if key not in ("epoch", "step")
            }
            self._events.add(cast(int, facts["step"]), curves)

    def mark(self, step: int) -> None:
        """Mark in metrics.jsonl where the lines of a step's checkpoint end, and flush the file. Raise if the disk is full.

        The mark is in this file and not in the checkpoint, because the size of the file differs between equal runs.
        """
        if self._metrics_file is None:
            return
        line = json.dumps({"kind": MARK, "time": round(time.time(), 3), "step": step})
        self._metrics_file.add(line.encode() + b"\n")
        if not self._metrics_file.flush():
            assert self._metrics_file.problem is not None
            raise atomic.write_error(self._metrics_file.problem, self._metrics_file.path)

    def _warn_if_full(self, file: Appender) -> None:
        full = bool(file.waiting)
        if full and not self._warned_full and not self.quiet:
            text = f"warning: the disk is full; lines of {file.path} are kept in memory until there is space"
            print(text, file=self.stream, flush=True)
        self._warned_full = full

    def forget_after(self, step: int, size: int | None = None) -> None:
        """Truncate metrics.jsonl to the lines of the checkpoint of a step, or to a size, which old checkpoints hold."""
        if self._metrics_file is None or not self._metrics_file.path.is_file():
            return
        size = end_of_checkpoint(self._metrics_file.path, step) if size is None else size
        if self._metrics_file.path.stat().st_size > size:
            os.truncate(self._metrics_file.path, size)

    def log(self, text: str, show: bool = True) -> None:
        """Print a line and write it to log.txt."""
        if self._log_file is not None:
            self._log_file.add((time.strftime("%Y-%m-%d %H:%M:%S ") + text + "\n").encode())
            self._warn_if_full(self._log_file)
        if show and not self.quiet:
            if self._bar is not None:
                self._bar.print(text)
            else:
                print(text, file=self.stream, flush=True)

    def close(self) -> None:
        for file in (self._metrics_file, self._log_file):
            if file is not None:
                file.flush()
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class EvaluationLines:
    """Logs the progress of an evaluation: a line every `print_every` batches, or every ten seconds."""

    def __init__(self, log: Callable[[str], None], print_every: int | None = None) -> None:
        self._log, self._print_every = log, print_every
        self._begin = self._lined = time.monotonic()
        self._batches = self._rows = 0

    def __call__(self, batch: Sized) -> None:
        """Count a batch that was scored."""
        self._batches, self._rows = self._batches + 1, self._rows + len(batch)
        now = time.monotonic()
        every = self._print_every
        if self._batches % every == 0 if every is not None else now - self._lined >= INTERVAL_S:
            self._lined = now
            rate = self._rows / max(now - self._begin, 1e-9)
            self._log(f"evaluating: batch {self._batches:,}  {self._rows:,} rows  {rate:,.0f} rows/s")


def end_of_checkpoint(path: Path, step: int) -> int:
    """Return where the lines of a step's checkpoint end in metrics.jsonl.

    This is after its mark or, without a mark, before the first line of a later step.
    """
    end = marked = later = 0
    with path.open("rb") as lines:
        for text in lines:
            try:
                line = json.loads(text)
            except ValueError:  # cut off by a kill
                break
            end += len(text)
            if line.get("step", 0) <= step:
                later = end if later == end - len(text) else later
            if (line.get("kind"), line.get("step")) == (MARK, step):
                marked = end
    return marked or later


def last_on_curve(step: int) -> int:
    """Return the last step up to this one with a point on the curves: all early steps, then eight for each doubling.

    >>> [step for step in range(1, 50) if last_on_curve(step) == step][12:]
    [13, 14, 15, 16, 18, 20, 22, 24, 26, 28, 30, 32, 36, 40, 44, 48]
    """
    spacing = 1 << max(step.bit_length() - 4, 0)
    return step // spacing * spacing


def describe(facts: Mapping[str, Any]) -> str:
    """Return the facts as one line."""
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
    if facts.get("table_disk_rows"):
        words.append(f"on disk {facts['table_disk_rows']:,} rows {amount(facts['table_disk_bytes'], 'bytes')}")
    if facts["bad_lines"]:
        words.append(f"{facts['bad_lines']:,} bad lines")
    if facts["seconds_left"] is not None:
        minutes, seconds = divmod(int(max(facts["seconds_left"], 0)), 60)
        words.append(f"{minutes}:{seconds:02} left")
    words.append(" ".join(f"{phase} {facts['shares'][phase]:.0%}" for phase in PHASES))
    return "  ".join(words)


PHASES = ("read", "pull", "compute", "push", "wait")
