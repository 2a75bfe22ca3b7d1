"""Publish during online learning: judge an entry, append it to the log, copy it, and notify consumers."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import shutil
import threading
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NotRequired, Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor

from clickfleet.config import sections
from clickfleet.config.check import done_files
from clickfleet.config.load import Config
from clickfleet.config.plugins import extensions
from clickfleet.data.files import filesystem, reading
from clickfleet.data.names import Names
from clickfleet.data.schema import Schema
from clickfleet.errors import CheckpointError, ClickfleetError, ConfigError
from clickfleet.online.calibrator import Calibrator, CalibratorState
from clickfleet.online.freshness import Freshness, TrainedEvents
from clickfleet.online.passes import Position
from clickfleet.online.reports import EntryReport, StreamReports
from clickfleet.serve.verification import check_rows
from clickfleet.store import atomic, published, redis_rows, run_folder
from clickfleet.store.calibration import Calibration
from clickfleet.store.lock import Lock
from clickfleet.store.mirror import Mirror, check_writable, replace_file
from clickfleet.store.published import LOG, Entry, Line, Log, prune
from clickfleet.store.rollback import changed_keys
from clickfleet.store.table import PendingChanges, PublishableTable, TakenChanges
from clickfleet.training.export import Publisher
from clickfleet.training.learner import Learner
from clickfleet.training.metrics import GIVEN, Buckets, MetricResults, check_monitor, make_metrics, metric_name
from clickfleet.training.monitor import Monitor

if TYPE_CHECKING:
    from clickfleet.online.session import OnlinePosition


class LogCopies:
    """Copies of a log in a folder, at a URL or, as rows, in Redis. The existing entries are listed only once."""

    def __init__(self, log: Log, url: str) -> None:
        self.log, self.url = log, url
        self._copied: set[str] | None = None
        """Hashes of the entries at the URL before the first copy."""
        self._last: Line | None = None
        """The newest entry there."""
        self._text = b""

    def bring(self) -> int:
        """Copy the missing entries, each manifest last, then the log. Return how many were copied."""
        if self.url.startswith(("redis://", "rediss://")):
            return int(redis_rows.fill(self.url, self.log, check=check_rows)["entries"])
        check_writable(self.url)
        fs, root = filesystem(self.url)
        copied = 0
        with reading(self.url):
            if self._copied is None:
                fs.makedirs(root, exist_ok=True)
                self._copied, self._text = _hashes(fs, f"{root}/{LOG}")
            for line in self._missing():
                if line.hash not in self._copied:
                    _copy(fs, self.log.folder / line.name, f"{root}/{line.name}")
                    copied += 1
                self._last = line
            text = self.log.text()  # without entries that were published meanwhile
            if text is None:  # retention has just rewritten it, or nothing was published yet
                return copied + self.bring() if self.log.path.exists() else copied
            if text != self._text:
                replace_file(fs, f"{root}/{LOG}", lambda to: fs.pipe_file(to, text))
                self._text = text
        return copied

    def _missing(self) -> list[Line]:
        """Return the lines that may be missing there: those after the last copy, or all whose folders exist."""
        self.log.refresh()
        newer = None if self._last is None else self.log.after(self._last.sequence, self._last.hash)
        return self.log.kept() if newer is None else newer


def copy_to(log: Log, url: str) -> int:
    """Copy the missing entries to a folder or URL; return how many were copied."""
    return LogCopies(log, url).bring()


def _hashes(fs: Any, path: str) -> tuple[set[str], bytes]:
    """Return the hashes of the entries in a log elsewhere, and the text of that log."""
    try:
        text = bytes(fs.cat_file(path))
    except FileNotFoundError:
        return set(), b""
    return {facts["hash"] for facts in map(json.loads, text.splitlines()) if "hash" in facts}, text


def _copy(fs: Any, folder: Path, to: str) -> None:
    fs.makedirs(to, exist_ok=True)
    names = sorted((path.name for path in folder.iterdir()), key=lambda name: (name == atomic.MANIFEST, name))
    for name in names:
        fs.put_file(str(folder / name), f"{to}/{name}")


Kind = Literal["base", "delta"]
LIGHT_BYTES = 256 << 20
"""Size of deltas that a consumer reads quickly, whatever the size of the base."""


class Chain(NamedTuple):
    """How much a consumer that starts now must read."""

    base_bytes: int = 0
    deltas: int = 0
    delta_bytes: int = 0

    def after(self, entry: Entry) -> Chain:
        """Return the chain with one more entry."""
        if entry.base:
            return Chain(entry.size)
        return Chain(self.base_bytes, self.deltas + 1, self.delta_bytes + entry.size)

    def is_long(self, most: int | None) -> bool:
        """Return whether a base is due: after `most` deltas, or when large deltas outweigh the base."""
        return most is not None and (self.deltas >= most or self.delta_bytes > max(self.base_bytes, LIGHT_BYTES))


class EntryListener(Protocol):
    """Notifies consumers that wait for files of entries and checkpoints."""

    def published(
        self, entry: Entry, position: Position | None, results: Mapping[str, object] | None, day_over: bool = False
    ) -> None: ...
    def checkpointed(self, position: Position, end_of_day: bool, path: Path) -> None: ...
    def flush(self) -> None: ...


class Head(TypedDict):
    """An entry of the log, by its place and content."""

    sequence: int
    hash: str


class GuardState(TypedDict):
    """The state of a guard in a checkpoint."""

    window: list[str]
    variances: list[float]
    trained: int
    since: int
    monitor: NotRequired[str]
    """Old checkpoints lack it: `auc`."""


class PublisherState(TypedDict):
    """The state of publishing in a checkpoint. Old checkpoints lack `chain` and `guard`."""

    head: Head | None
    chain: NotRequired[list[int]]
    aucs: list[float]
    guard: NotRequired[GuardState]
    calibrator: NotRequired[CalibratorState]
    due: bool
    held: int
    verdict: list[str]


class LogMovedError(Exception):
    """Raised when someone else has appended to the log since changes were taken."""


@dataclass
class PendingEntry:
    """An entry that is being written, and what it was made of."""

    kind: Kind
    step: int
    course: OnlinePosition
    position: Position | None
    passes: list[PassResults]
    """The passes that it holds; the guard has judged them."""
    events: TrainedEvents
    day_over: bool
    began_at: float
    changes: TakenChanges | PendingChanges | None = None
    """The rows, if it is written while training continues."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    calibration: Calibration | None = None
    written: Future[tuple[Entry, float]] = field(default_factory=Future)
    """The entry, and the time of its line in the log."""


TAKEN_ROWS = 1 << 22
"""Most changed rows that are copied in memory, to be written while training continues."""


class PassPublisher:
    """Publish a learner during training. Changes of an entry that fails or is held back are part of the next one.

    `begin` takes what changed and returns; a thread writes the entry while training continues. `settle` takes over the result. At
    most one entry is being written at a time.
    """

    overlaps_bases = True
    """Whether a base, too, is written while training continues."""

    def __init__(
        self,
        config: Config,
        learner: Learner,
        folder: Path,
        monitor: Monitor,
        fresh: Freshness,
        table: PublishableTable | None = None,
        reports: StreamReports | None = None,
    ) -> None:
        self.config, self.learner, self.monitor, self.fresh = config, learner, monitor, fresh
        rows = config.publish.rows
        self.publisher = Publisher(learner, folder / "published", cache=folder / "graph.onnx", table=table, rows=rows)
        self.publisher.names = self._names
        self._folder = folder
        self.table = self.publisher.table
        self.log = self.publisher.log
        self.copies = None if config.publish.to is None else LogCopies(Log(self.log.folder), config.publish.to)
        train = config.train
        check_guard(config.publish.guard, learner.schema)
        self.guard = PublishGuard(config.publish.guard, train.metrics.thresholds, warm=train.init_from is not None)
        self.calibrator: Calibrator | None = None
        if config.publish.calibrate is not None:
            self.calibrator = Calibrator(config.publish.calibrate, learner.schema)
            learner.calibration = self.calibrator.calibration
        self.done: EntryListener | None = None
        if done_files(config):
            self.done = next(make(folder / "model", learner) for make in extensions("done_files"))
        self.reports = reports or StreamReports(monitor, lambda: make_metrics(config, learner.schema))
        self.mirror: Mirror | None = None
        """Keeps the run folder in step with its URL."""
        self.before_cut: Callable[[], None] = lambda: None
        """Called before all rows are read: a table has one snapshot at a time, and a checkpoint may hold it."""
        self.head: Head | None = None
        """Sequence and hash of the entry after which the table records changes."""
        self.chain = Chain()
        self.due = False
        """Whether there were passes since the last entry."""
        self.held = 0
        """Entries held back since the last one published."""
        self.verdict: list[str] = []
        """Why the guard held back the last entry."""
        self.stale = False
        """Whether the last entry missed publish.freshness_slo."""
        self.problem = ""
        """Why the last entry could not be written."""
        self._pending: PendingEntry | None = None
        self._writer = ThreadPoolExecutor(1, "clickfleet-publish", partial(torch.set_num_threads, 1))
        self._copier = ThreadPoolExecutor(1, "clickfleet-copy")
        self._copy_lock = threading.Lock()
        self._copying: Future[None] | None = None
        """The copying that will include the newest entry."""
        self._rollbacks: dict[str, bool] = {}
        """By hash: whether an entry after the head is a rollback."""

    @property
    def last_sequence(self) -> int | None:
        return None if self.head is None else int(self.head["sequence"])

    @property
    def busy(self) -> bool:
        """Whether an entry is being written."""
        return self._pending is not None and not self._pending.written.done()

    @property
    def next_kind(self) -> Kind:
        """The kind of the next entry: a base if consumers that start would have to read too many deltas."""
        return "base" if self.chain.is_long(self.config.publish.base_every_deltas) else "delta"

    def prepare(self) -> None:
        """Check the log and export the network now.

        A later export would delay the first entry, and torch must not train meanwhile. A damaged log is rejected before training.
        """
        with self._log_lock():
            self.log.recover()
        self.publisher.content(0)

    def _log_lock(self) -> Lock:
        """Return the lock for writing to the log."""
        return Lock(self.log.folder / ".lock", "publishes", patience_s=60.0)

    def _names(self) -> Names | None:
        """Return the values behind frequent keys, for a base. Damage to their file must not stop publishing."""
        if not self.config.run.names:
            return None
        try:
            return run_folder.read_names(self._folder, self.learner.schema)
        except CheckpointError:
            return None

    def refresh(self) -> None:
        """Bring the dense weights of the learner up to date."""

    def release(
        self, kind: Kind, step: int, course: OnlinePosition, judged: bool = True, day_over: bool = False
    ) -> None:
        """Append an entry unless the guard holds it back or the disk is full, and wait until it is published and copied.

        `day_over`: it is the last entry of its day.
        """
        self.begin(kind, step, course, judged, day_over)
        self.settle()
        self._wait_for_copies()

    def begin(self, kind: Kind, step: int, course: OnlinePosition, judged: bool = True, day_over: bool = False) -> None:
        """Begin to publish what the table and the network are now. Training may continue when this returns.

        Nothing is published if the guard holds the entry back, or while consumers have a newer model than this run, which has
        resumed from a checkpoint.
        """
        self.settle()
        self.refresh()
        newer = self._newer()
        if judged and newer and self._is_behind(newer, course):
            return
        stats = self.table.stats()
        changed = stats["changed"] if kind == "delta" and self.head is not None else 0
        if judged and (course.undelivered or not self.verdict):  # without a pass since then, the last verdict stays
            self.verdict = self.guard.reasons(course.undelivered, changed, stats["rows"])
        if judged and self.verdict:
            self._hold(kind, self.verdict, step)
            course.undelivered.clear()  # the next entry is judged by the passes to come
            return
        judged_by, began_at = list(course.undelivered), self.fresh.clock()
        pending = PendingEntry(kind, step, course, course.position, judged_by, self.fresh.take(), day_over, began_at)
        course.undelivered.clear()
        self.due = False
        if self.calibrator is not None:
            pending.calibration = self.learner.calibration = self.calibrator.fit_if_due()
        if newer == [] and self._overlaps(kind, changed):
            pending.weights = self.learner.dense()
            if kind == "delta":
                pending.changes = self.table.take_changes()
            else:
                self.before_cut()
                pending.changes = self.table.cut_changes(base=True)
            pending.written = self._writer.submit(self._write, pending, pending.changes)
        else:
            self.before_cut()
            try:
                with self._log_lock():
                    entry = self.append_entry(kind, step, self._facts(pending))
                pending.written.set_result((entry, self.fresh.clock()))
            except CheckpointError as error:
                pending.written.set_exception(error)
        self._pending = pending

    def _overlaps(self, kind: Kind, changed: int) -> bool:
        """Return whether an entry is written while training continues.

        A base that is being read makes the table use its memory differently, which a deterministic run must not.
        """
        if kind == "base":
            return self.overlaps_bases and not self.config.train.deterministic
        return self.head is not None and self.table.tracking and changed <= TAKEN_ROWS

    def _facts(self, pending: PendingEntry) -> dict[str, Any]:
        """Return what info.json tells about an entry of this run: its last pass, and the times of its events."""
        position, times = pending.position, pending.events.times()
        facts: dict[str, Any] = {} if position is None else {"pass": [position["day"], position["pass"]]}
        return facts if times is None else {**facts, "events": times}

    def _write(self, pending: PendingEntry, changes: TakenChanges | PendingChanges) -> tuple[Entry, float]:
        """Write an entry, in the thread of the writer."""
        try:
            with self._log_lock():
                head, known = self.log.recover(), self.head
                if (None if head is None else head.hash) != (None if known is None else known["hash"]):
                    raise LogMovedError
                facts = self._facts(pending)
                content = self.publisher.content(pending.step, pending.weights, pending.calibration, **facts)
                entry = self.log.append(changes, content)
            published_at = self.fresh.clock()
        except BaseException:
            if not isinstance(changes, TakenChanges):
                changes.abort()
            raise
        if not isinstance(changes, TakenChanges):
            changes.commit()
        return entry, published_at

    def settle(self, wait: bool = True) -> None:
        """Take over the result of the entry that is being written. Without `wait`, do nothing until it is written."""
        if self._pending is None or (not wait and self.busy):
            return
        pending, self._pending = self._pending, None
        try:
            entry, published_at = pending.written.result()
        except (CheckpointError, LogMovedError) as error:
            self._give_back(pending)
            if isinstance(error, LogMovedError):  # a rollback by hand: the next entry repairs what it changed
                return
            if self.config.train.deterministic:  # its log must be reproducible: a restart publishes the same entry
                raise
            self.problem = str(error)  # the disk is full: training continues
            self._hold(pending.kind, [self.problem], pending.step)
            return
        self.head = {"sequence": entry.sequence, "hash": entry.hash}
        self.chain = self.chain.after(entry)
        self.guard.released(pending.passes)
        self.held, self.verdict = 0, []
        report = EntryReport(entry, pending.step, pending.events, published_at, published_at - pending.began_at)
        ages = self.reports.published(report)
        self._check_freshness(ages)
        judged_by = pending.passes[-1] if pending.passes else None
        self.tell_consumers(lambda done: done.published(entry, pending.position, judged_by, pending.day_over))
        if entry.base:
            self._writer.submit(self._prune)
        else:
            self._copy_soon()

    def _give_back(self, pending: PendingEntry) -> None:
        """Make what an entry held part of the next one."""
        if isinstance(pending.changes, TakenChanges):
            self.table.restore_readers(pending.changes.keys)
        pending.course.undelivered[:0] = pending.passes
        self.fresh.give_back(pending.events)
        self.due = True

    def drop(self) -> None:
        """Forget the entry that is being written, because the run returns to a checkpoint. It may be in the log."""
        pending, self._pending = self._pending, None
        if pending is not None:
            wait([pending.written])
            if not pending.written.cancelled():
                pending.written.exception()

    def close(self) -> None:
        """Wait for everything that was begun, and stop the threads."""
        try:
            self.settle()
        finally:
            self._writer.shutdown()
            self._copier.shutdown()

    def _check_freshness(self, ages: dict[str, float]) -> None:
        """Log when the freshness objective is missed, and when it is met again."""
        slo, late = self.config.publish.freshness_slo, ages.get("event_to_published_p99")
        if late is not None and (late > slo) != self.stale:
            self.stale = late > slo
            verdict = "warning: freshness is missed" if self.stale else "freshness is met again"
            self.monitor.log(
                f"{verdict}: 99% of events were published within {late:,.3g} s, publish.freshness_slo is {slo:g} s"
            )

    def _hold(self, kind: Kind, reasons: list[str], step: int) -> None:
        self.held += 1
        self.reports.flush()
        self.monitor.record("alarm", {"step": step, "entry_kind": kind, "held": self.held, "reasons": reasons})
        for reason in reasons:
            self.monitor.log(f"ALARM: a {kind} is held back: {reason}")

    def append_entry(self, kind: Kind, step: int, info: Mapping[str, Any] = MappingProxyType({})) -> Entry:
        """Append the next entry. After a restart behind the head of the log, reuse the entry that is there if it is the same."""
        self.log.recover()
        newer = self._newer()
        if newer is None:  # another log than before: start with a base
            return self.publisher.publish("base", step, **info)
        if newer and self.config.train.deterministic and not self._rolled_back(newer):
            if (entry := self._reproduced(kind, step, newer[0])) is not None:
                return entry
            self.monitor.log(
                f"warning: this run does not reproduce {newer[0].name}, which was published before; repairing the chain"
            )
        if newer:
            kind = self._repair(kind, newer)
        return self.publisher.publish(kind, step, **info)

    def _newer(self) -> list[Line] | None:
        """Return the lines after the head that this run knows; None if the log does not contain it."""
        self.log.refresh()
        if self.head is None:
            return self.log.lines()
        return self.log.after(self.head["sequence"], self.head["hash"])

    def _is_behind(self, newer: list[Line], course: OnlinePosition) -> bool:
        """Return whether consumers have later passes than this run has trained since it resumed.

        Entries are published again when it has caught up, so that consumers never go back to an older model. A deterministic run
        reproduces each entry instead.
        """
        if self.config.train.deterministic or self._rolled_back(newer) or not self._is_kept(newer[-1]):
            return False
        place = self.log.entry(newer[-1]).info.get("pass")
        position = course.position
        return place is not None and (position is None or (position["day"], position["pass"]) < tuple(place))

    def _is_kept(self, line: Line) -> bool:
        return (self.log.folder / line.name).exists()

    def _rolled_back(self, newer: list[Line]) -> bool:
        """Return whether consumers were rolled back to an earlier entry. If so, later changes must be published again."""
        for line in newer:
            if line.hash not in self._rollbacks:
                self._rollbacks[line.hash] = self._is_kept(line) and "rollback_to" in self.log.entry(line).info
        return any(self._rollbacks[line.hash] for line in newer)

    def _reproduced(self, kind: Kind, step: int, line: Line) -> Entry | None:
        """Return the entry of a line if this run reproduces it exactly."""
        changes = self.table.cut_changes(base=kind == "base" or self.head is None)
        aside = self.log.folder / ".again"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            place: dict[str, Any] = {"sequence": line.sequence, "parent": line.parent, "chain": line.chain}
            entry = published.write(
                aside / line.name, changes, self.publisher.content(step), self._before(line), **place
            )
            if entry.hash != line.hash:
                changes.abort()
                return None
            changes.commit()
            entry.path = self.log.folder / line.name
            return self.log.entry(line) if entry.path.exists() else entry  # it may have been pruned
        except BaseException:
            with contextlib.suppress(ClickfleetError):
                changes.abort()
            raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _before(self, line: Line) -> Entry | None:
        """Return the entry before a line, if it is kept."""
        before = self.log.find(line.sequence - 1)
        return None if before is None or not self._is_kept(before) else self.log.entry(before)

    def _repair(self, kind: Kind, newer: list[Line]) -> Kind:
        """Return the kind of the next entry. It brings consumers of newer entries to the state of the table."""
        self.monitor.log(
            f"the published log is {len(newer)} entries ahead of this run: the next entry replaces what they changed"
        )
        if self.head is None or any(line.kind == "base" for line in newer):
            return "base"
        for line in newer:
            for keys in changed_keys(self.log.entry(line)):
                self.table.restore_readers(keys)
        return kind

    def _prune(self) -> None:
        """Prune old chains after a base, and copy what is left. A failure is only logged: the entry is published."""
        try:
            with self._log_lock():
                prune(self.log, self.config.publish.keep_chains)
        except (ClickfleetError, OSError) as error:
            self.monitor.log(f"warning: {error}")
        self._copy_soon()

    def _copy_soon(self) -> None:
        """Copy new entries in the background. A copy that has not begun yet will include this entry."""
        if self.copies is None and self.mirror is None:
            return
        with self._copy_lock:
            if self._copying is None or self._copying.running() or self._copying.done():
                self._copying = self._copier.submit(self._copy)

    def _copy(self) -> None:
        """Copy new entries. A failure is only logged: they are copied with the next entry."""
        try:
            if self.copies is not None:
                self.copies.bring()
            if self.mirror is not None:
                self.mirror.push()
        except (ClickfleetError, OSError) as error:
            self.monitor.log(f"warning: {error}")

    def _wait_for_copies(self) -> None:
        self._writer.submit(int).result()  # after what was submitted before
        if self._copying is not None:
            self._copying.result()

    def checkpointed(self, course: OnlinePosition, path: Path) -> None:
        """Notify consumers of a checkpoint that is being written to a path."""
        if (position := course.position) is not None:
            self.tell_consumers(lambda done: done.checkpointed(position, course.open_day is None, path))

    def tell_consumers(self, act: Callable[[EntryListener], None]) -> None:
        """Write done files if publish.done_files is set. Lines that do not fit on the disk are written later."""
        if self.done is None:
            return
        try:
            act(self.done)
        except CheckpointError as error:
            if self.config.train.deterministic:
                raise
            self.monitor.log(f"warning: {error}")

    def state(self) -> PublisherState:
        """Return the state for a checkpoint. Call `settle` first: a checkpoint knows whether an entry was published."""
        assert self._pending is None
        state: PublisherState = {
            "head": self.head,
            "chain": list(self.chain),
            "aucs": list(self.guard.aucs),
            "guard": self.guard.state(),
            "due": self.due,
            "held": self.held,
            "verdict": self.verdict,
        }
        if self.calibrator is not None:
            state["calibrator"] = self.calibrator.state()
        return state

    def restore(self, state: PublisherState) -> None:
        self.head = state["head"]
        self.guard.restore(state["aucs"], state.get("guard"))
        self.chain = Chain(*state.get("chain", ()))
        self.due, self.held, self.verdict = state["due"], state["held"], list(state["verdict"])
        if self.calibrator is not None and (known := state.get("calibrator")) is not None:
            self.calibrator.restore(known)
            self.learner.calibration = self.calibrator.calibration


class WindowMetrics(TypedDict):
    """The metrics of a window that the guard compares."""

    rows: int
    auc: float
    calibration: float | None
    actual_ctr: float | None
    predicted_ctr: float | None


class WindowResults(WindowMetrics):
    """A window, and how the guard uses it."""

    judged: bool
    """Whether it has enough rows, after the warm-up."""
    apart: bool
    """Whether it shares no rows with the last one that was apart."""
    warmup_rows: int
    """Rows until the warm-up ends."""


class PassResults(MetricResults):
    """The metrics of a pass, scored before it was trained, and the window that ends with it."""

    window: NotRequired[WindowResults]


SIGMAS = 4.0
"""Standard errors beyond which a difference is not chance: exceeded once in 30,000 windows."""
PIECES = 8
"""Small passes are combined until a piece is this fraction of a window."""


class Window:
    """Metrics of the newest passes: the fewest that have `min_rows` rows together."""

    def __init__(self, min_rows: int, thresholds: int) -> None:
        self.min_rows, self.thresholds = min_rows, thresholds
        self._pieces: list[Buckets] = []

    def add(self, seen: Buckets) -> None:
        """Add a pass and drop the oldest ones that are no longer needed."""
        rows = _rows(seen)
        if not self._pieces or (_rows(self._pieces[-1]) + rows) * PIECES > self.min_rows:
            self._pieces.append(Buckets(self.thresholds))
        self._pieces[-1].merge(seen)
        while len(self._pieces) > 1 and self.rows - _rows(self._pieces[0]) >= max(self.min_rows, 1):
            del self._pieces[0]

    @property
    def rows(self) -> int:
        return sum(map(_rows, self._pieces))

    def results(self) -> WindowMetrics:
        whole = Buckets(self.thresholds)
        for piece in self._pieces:
            whole.merge(piece)
        results = whole.results()
        return {
            "rows": results["rows"],
            "auc": results["auc"],
            "calibration": results["calibration"],
            "actual_ctr": results["actual_ctr"],
            "predicted_ctr": results["predicted_ctr"],
        }

    def clear(self) -> None:
        self._pieces.clear()

    def state(self) -> list[str]:
        return [pack(piece) for piece in self._pieces]

    def restore(self, state: list[str]) -> None:
        self._pieces = [unpack(text, self.thresholds) for text in state]


class PublishGuard:
    """Compares windows of passes with bounds and with windows whose model was released. Its state is part of every checkpoint.

    >>> guard = PublishGuard(sections.Guard(auc_drop=0.02, copc=None, min_rows=1000, warmup_rows=0))
    >>> labels = (np.arange(500) % 2).astype(np.float32)
    >>> def found(scores):  # the reasons to hold back the model of a pass of 500 rows
    ...     seen = Buckets()
    ...     seen.update(scores.astype(np.float32), labels)
    ...     passes = [{**seen.results(), "window": guard.add(seen)}]
    ...     if not (reasons := guard.reasons(passes, 10, 100)):
    ...         guard.released(passes)
    ...     return reasons
    >>> good = 0.4 + 0.2 * labels
    >>> [found(good) for _ in range(4)]
    [[], [], [], []]
    >>> print(found(1 - good)[0])
    AUC 0.5000 is 0.5000 below the mean 1.0000 of the last 2 windows released (1,000 rows; publish.guard.auc_drop is 0.02)
    """

    def __init__(self, settings: sections.Guard, thresholds: int = 4096, warm: bool = False) -> None:
        self.settings = settings
        self.window = Window(settings.min_rows, thresholds)
        self.warmup_rows = 0 if warm else settings.warmup_rows
        self.aucs: list[float] = []
        """AUCs of released windows that share no rows."""
        self._variances: list[float] = []
        self._trained = self._since = 0
        """Rows in total, and since the last window that shares none with earlier ones."""

    def add(self, seen: Buckets) -> WindowResults:
        """Add the scores of a pass, made before it was trained; return the window that ends with it."""
        self.window.add(seen)
        rows = _rows(seen)
        self._trained, self._since = self._trained + rows, self._since + rows
        apart = self._since >= max(self.settings.min_rows, 1)
        if apart:
            self._since = 0
        window = self.window.results()
        judged = window["rows"] >= self.settings.min_rows and self._trained - window["rows"] >= self.warmup_rows
        return {**window, "judged": judged, "apart": apart, "warmup_rows": max(0, self.warmup_rows - self._trained)}

    def reasons(self, passes: list[PassResults], changed: int, rows: int) -> list[str]:
        """Return the reasons to hold back an entry with these passes and `changed` rows; none to release it."""
        reasons = [reason for results in passes for reason in self._reasons_of_pass(results)]
        share = self.settings.delta_share
        if share is not None and changed > share * rows:
            reasons.append(
                f"{changed:,} of {rows:,} rows change, more than publish.guard.delta_share {share:g} of the table"
            )
        return reasons

    def _reasons_of_pass(self, results: PassResults) -> list[str]:
        share, reasons = self.settings.nan_share, []
        parts: Mapping[str, Mapping[str, Any]] = results.get("tasks", {"": results})
        for label, part in parts.items():
            rows, invalid = part["rows"], part["invalid"]
            if share is not None and invalid > share * (rows + invalid):
                what = f"scores of {label}" if label else "scores"
                reasons.append(f"{invalid:,} of {rows + invalid:,} {what} are not finite")
        window = results.get("window")
        if window is None or not window["judged"]:
            return reasons
        return [*reasons, *filter(None, (self._auc(window), self._copc(window)))]

    def _auc(self, window: WindowResults) -> str | None:
        limit, auc, variance = self.settings.auc_drop, window["auc"], auc_variance(window)
        if limit is None or not self.aucs or variance is None:
            return None
        mean = sum(self.aucs) / len(self.aucs)
        error = math.sqrt(variance + sum(self._variances) / len(self.aucs) ** 2)
        if mean - auc <= limit + SIGMAS * error:
            return None
        name = metric_name(self.settings.monitor)
        return (
            f"{name} {auc:.4f} is {mean - auc:.4f} below the mean {mean:.4f} of the last {len(self.aucs)} windows released "
            f"({window['rows']:,} rows; publish.guard.auc_drop is {limit:g})"
        )

    def _copc(self, window: WindowResults) -> str | None:
        copc, rows = window["calibration"], window["rows"]
        actual_ctr, predicted_ctr = window["actual_ctr"], window["predicted_ctr"]
        if self.settings.copc is None or copc is None or actual_ctr is None or predicted_ctr is None:
            return None
        low, high = self.settings.copc
        clicks, predicted = rows * actual_ctr, rows * predicted_ctr
        if _below(clicks, low * predicted, rows) or _below(-clicks, -high * predicted, rows):
            return f"{_copc_name(self.settings.monitor)} {copc:.4f} lies outside of publish.guard.copc {low:g} to {high:g} ({rows:,} rows)"
        return None

    def released(self, passes: list[PassResults]) -> None:
        """Note that the model of these passes was released: later ones are compared with it."""
        for window in (results.get("window") for results in passes):
            variance = None if window is None else auc_variance(window)
            if window is not None and variance is not None and window["judged"] and window["apart"]:
                self.aucs.append(window["auc"])
                self._variances.append(variance)
        del self.aucs[: -self.settings.window], self._variances[: -self.settings.window]

    def forget(self) -> None:
        """Forget earlier windows. After an entry was published by hand, later models are compared with that one."""
        self.aucs, self._variances, self._since = [], [], 0
        self.window.clear()

    def state(self) -> GuardState:
        return {
            "window": self.window.state(),
            "variances": list(self._variances),
            "trained": self._trained,
            "since": self._since,
            "monitor": self.settings.monitor,
        }

    def restore(self, aucs: list[float], state: GuardState | None) -> None:
        """Restore the state of a checkpoint. Earlier versions saved only the AUCs, after the warm-up.

        If publish.guard.monitor has changed, begin anew: windows of two metrics cannot be compared.
        """
        if state is not None and state.get("monitor", "auc") != self.settings.monitor:
            self.forget()
            return
        self.aucs = list(aucs)
        if state is None:
            state = {"window": [], "variances": [], "trained": self.warmup_rows if aucs else 0, "since": 0}
        self.window.restore(state["window"])
        self._variances = list(state["variances"]) or [0.0] * len(aucs)
        self._trained, self._since = state["trained"], state["since"]


def check_guard(guard: sections.Guard, schema: Schema) -> None:
    """Refuse a metric that the guard cannot judge."""
    check_monitor(guard.monitor, schema, key="publish.guard.monitor")
    if guard.monitor.rpartition(".")[2] not in ("auc", f"auc{GIVEN}"):
        raise ConfigError(
            f"the guard judges an AUC, but publish.guard.monitor is {guard.monitor}", "use auc, or LABEL.auc"
        )


def _copc_name(monitor: str) -> str:
    return metric_name(monitor).replace("AUC", "COPC", 1)


def auc_variance(window: WindowMetrics) -> float | None:
    """Return the variance of an AUC (Hanley and McNeil, 1982); None if one class is missing.

    >>> round(auc_variance({"rows": 1000, "auc": 0.75, "actual_ctr": 0.2}) ** 0.5, 4)
    0.0212
    """
    rows, auc, rate = window["rows"], window["auc"], window["actual_ctr"]
    if not rate or rate >= 1:
        return None
    clicks, others = max(1.0, rows * rate), max(1.0, rows * (1 - rate))
    first, second = auc / (2 - auc), 2 * auc * auc / (1 + auc)
    spread = auc * (1 - auc) + (clicks - 1) * (first - auc * auc) + (others - 1) * (second - auc * auc)
    return max(0.0, float(spread / (clicks * others)))


def _below(clicks: float, bound: float, rows: int) -> bool:
    """Return whether clicks are below a bound by more than chance. For an upper bound, pass both negated."""
    rate = min(1.0, abs(bound) / rows)
    return clicks < bound - SIGMAS * math.sqrt(abs(bound) * (1 - rate))


def _rows(seen: Buckets) -> int:
    return int(seen.state()["buckets"][0])


def pack(seen: Buckets) -> str:
    """Encode buckets exactly as text for JSON."""
    return base64.b64encode(zlib.compress(seen.state()["buckets"].astype("<f8").tobytes())).decode()


def unpack(text: str, thresholds: int) -> Buckets:
    """Decode the buckets of `pack`."""
    seen = Buckets(thresholds)
    seen.restore({"buckets": np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f8").astype(np.float64)})
    return seen
