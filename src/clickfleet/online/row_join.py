"""Join two logs into files of rows, so that every show is in them once, whatever is killed when.

Rows are written to hidden files. The commit that makes the state of the join durable also names these files. Only then do they get their
final names; if the process is killed in between, they get them when the join is opened again. So the files, the places in the logs and the
shows that wait always belong together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clickfleet.data.arrow_ipc import numbers
from clickfleet.data.events import CORRECTION, JOINED
from clickfleet.data.files import flush, inside, move
from clickfleet.data.formats.joined import with_on_time
from clickfleet.errors import CheckpointError
from clickfleet.online.join_inputs import JoinInputs
from clickfleet.online.joiner import Joiner, JoinRules
from clickfleet.online.passes import Patience
from clickfleet.store import atomic
from clickfleet.store.event_log import merged
from clickfleet.store.lock import Lock

BLOCK_ROWS = 4096
POLL_S = 0.02
"""Pause while there is nothing to read."""


@dataclass(frozen=True)
class JoinSettings:
    """What is joined, and how. `shows` and `feedback` are folders, or kafka://BROKERS/TOPIC."""

    shows: str
    feedback: str
    rules: JoinRules = field(default_factory=JoinRules)
    corrections: bool = True
    """Whether corrections become rows."""
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """Additional librdkafka settings."""
    start_us: int = 0
    """Shows from before this time are left out."""


@dataclass
class JoinedPart:
    """Rows that came to be known, not committed yet."""

    batches: list[pa.RecordBatch] = field(default_factory=list)
    rows: int = 0
    begun_us: int = 0
    """The latest clock of all streams when the first row came to be known."""
    clock_us: int = 0
    """The same after the last one."""
    ended: bool = False
    """Everything that there is was read."""

    @property
    def span_s(self) -> tuple[float, float] | None:
        """The first and last time at which a row came to be known."""
        if not self.rows:
            return None
        known = np.concatenate([numbers(batch.column("known"), np.int64) for batch in self.batches])
        return float(known.min()) / 1e6, float(known.max()) / 1e6


class RowJoin:
    """A join and the files of its rows, in the folder `out`. `folder` holds its state; `facts` are the caller's of the last commit."""

    def __init__(
        self,
        settings: JoinSettings,
        folder: Path,
        out: Path,
        warn: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.folder, self.out, self.warn = settings, folder, out, warn
        self._clock, self._elapsed = clock, elapsed
        self.patience = Patience(warn, 1.0)
        """What a wait for a broker asks whether to go on. Replace it before `gather`."""
        for private in (folder, out):
            private.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = Lock(folder / ".lock", "joins")
        self._lock.__enter__()
        try:
            self._open()
        except BaseException:
            self._lock.__exit__()
            raise

    def _open(self) -> None:
        self.joiner = Joiner(self.folder, self.settings.rules)
        saved = self.joiner.facts
        self.facts: dict[str, Any] = saved.get("facts", {})
        try:
            self._publish(saved.get("files", []))
            self.inputs = JoinInputs(
                self.settings.shows,
                self.settings.feedback,
                saved.get("inputs", {}),
                warn=self.warn,
                patience=lambda: self.patience,
                options=self.settings.options,
                start_us=self.settings.start_us,
                wait_s=self.settings.rules.wait_s,
                clock=self._clock,
                elapsed=self._elapsed,
            )
        except BaseException:
            self.joiner.close()
            raise
        self._dirty = False

    def reopen(self) -> None:
        """Go back to the last commit, if anything was read since."""
        if self._dirty:
            self.inputs.close()
            self.joiner.close()
            self._open()

    def gather(
        self, most: int, seconds: float, over: Callable[[JoinedPart], bool] = lambda part: False, *, once: bool = False
    ) -> JoinedPart:
        """Read until there are `most` rows, or `seconds` passed since the first one, or `over` says so.

        With `once`, also when everything that there is was read.
        """
        self.reopen()
        self._dirty = True
        part, begun = JoinedPart(), None
        while True:
            self.patience.check()
            arrived = self.inputs.take()
            self._add(part, self.joiner.apply(arrived, most))
            part.clock_us = max([part.clock_us, *arrived.clocks.values()])
            part.ended = self.inputs.caught_up
            if part.rows and begun is None:
                begun, part.begun_us = self._elapsed(), part.clock_us
            full = part.rows >= most or (begun is not None and self._elapsed() >= begun + seconds)
            if full or over(part) or (once and part.ended):
                return part
            if part.ended:
                self.patience.pause(POLL_S)

    def finish(self, part: JoinedPart) -> None:
        """Decide all shows that wait, because no more feedback will come."""
        self._add(part, self.joiner.finish())

    def _add(self, part: JoinedPart, rows: Sequence[pa.RecordBatch]) -> None:
        for batch in rows:
            if not self.settings.corrections:
                batch = _first_labels(batch)
            if len(batch):
                part.batches.append(batch)
                part.rows += len(batch)

    def commit(
        self, part: JoinedPart, shares: Mapping[str, int], facts: Callable[[tuple[int, ...]], Mapping[str, Any]]
    ) -> None:
        """Write the rows to files of these names and numbers of rows, and make everything durable.

        `facts` returns what is committed with them, given the sizes of the files.
        """
        assert sum(shares.values()) == part.rows
        rows, first = pa.Table.from_batches(part.batches, JOINED), 0
        files: list[dict[str, Any]] = []
        for name, count in shares.items():
            hidden = _hidden(inside(self.out, name))
            with atomic.write_errors(hidden):
                hidden.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _write_rows(hidden, rows.slice(first, count), self.joiner.delays.on_time)
            files.append({"name": name, "bytes": hidden.stat().st_size})
            first += count
        self.inputs.forget_gone(self.joiner)
        committed = dict(facts(tuple(file["bytes"] for file in files)))
        self.joiner.commit({"inputs": self.inputs.state(), "files": files, "facts": committed})
        self.facts, self._dirty = committed, False
        self._publish(files)

    def _publish(self, files: Sequence[Mapping[str, Any]]) -> None:
        """Give committed files their final names."""
        for file in files:
            path = inside(self.out, file["name"])
            hidden = _hidden(path)
            if hidden.exists():
                if hidden.stat().st_size != file["bytes"]:
                    raise CheckpointError(f"{hidden} is damaged", "the join starts anew with an empty folder")
                with atomic.write_errors(path):
                    move(hidden, path)
                    flush(path.parent)

    def status(self) -> dict[str, Any]:
        """Return what was counted since the join began, what waits and, by label, the shares that are open and that came on time."""
        counts, delays = self.joiner.counts, self.joiner.delays
        learns = self.settings.corrections
        named = {name: counts[name] for name in COUNTS}
        bad = self.inputs.shows.bad + self.inputs.feedback.bad
        return {
            **named,
            "bad_events": bad,
            "waiting": self.joiner.pending,
            "parked": self.joiner.parked,
            "store_bytes": self.joiner.bytes,
            OPEN: delays.open if learns else dict.fromkeys(delays.labels, 0.0),
            ON_TIME: delays.on_time,
        }

    def close(self) -> None:
        self.inputs.close()
        self.joiner.close()
        self._lock.__exit__()


OPEN, ON_TIME = "open", "on_time"
COUNTS = (
    *("shows", "feedback", "negatives", "labels", "corrections", "unshown", "repeated_shows", "repeated_feedback"),
    *("late", "lost_feedback", "other_labels", "cut_short"),
)
"""What a join counts."""


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.writing")


def _first_labels(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows without corrections of labels that were known. One that completes the labels of its show stays."""
    corrects = pc.equal(rows.column("kind"), CORRECTION).to_numpy(zero_copy_only=False)
    if not corrects.any():
        return rows
    counts = [np.diff(numbers(rows.column(name).offsets, np.int32)) for name in ("labels", "previous")]
    return rows.filter(pa.array(~corrects | (counts[0] > counts[1])))


def _write_rows(path: Path, rows: pa.Table, on_time: Mapping[str, float]) -> None:
    """Write rows as an Arrow file that only its owner can read. It names the share of each label that comes on time."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as sink:
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        with pa.ipc.new_file(sink, with_on_time(on_time), options=options) as out:
            for batch in merged(iter(rows.to_batches(max_chunksize=BLOCK_ROWS)), BLOCK_ROWS):
                out.write_batch(batch)
        sink.flush()
        os.fsync(sink.fileno())
