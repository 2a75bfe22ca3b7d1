"""One run on a cluster: epochs over the data, checkpoints, and recovery from failures.

The driver assigns streams (shares of the data) to the workers, polls them, and takes checkpoints: states of all shards and workers
between the same batches. After a failure, the run resumes from the last checkpoint in a new generation; messages of the old
generation are rejected.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from clickfleet import cluster
from clickfleet.cluster import process_tree, start_state
from clickfleet.cluster.assignments import (
    NEXT_EPOCH,
    AssignedStream,
    Assignment,
    EpochPosition,
    Share,
    dealt,
    described,
    described_share,
    divided,
    files_of,
    share_of,
)
from clickfleet.cluster.checkpoints import TICK_S, ClusterCheckpoints, buffers_of, kept_of, optimizer_of
from clickfleet.cluster.evaluate import Evaluations, HeldOutFiles
from clickfleet.cluster.processes import Call, ProcessFailedError, ProcessGroup, StoppedError
from clickfleet.cluster.recovery import Recovery
from clickfleet.cluster.resize import Resizing
from clickfleet.cluster.status import ClusterMonitor, closing_facts, closing_table
from clickfleet.cluster.worker import WorkerCheckpoint
from clickfleet.config.load import Config
from clickfleet.config.sections import WorkerRange
from clickfleet.data.feed_files import FeedFiles
from clickfleet.data.schema import Schema
from clickfleet.data.split import RowSplit
from clickfleet.errors import ClusterError
from clickfleet.store import run_folder
from clickfleet.store.mirror import Mirror, origin
from clickfleet.training import modes
from clickfleet.training.learner import Learner, table_spec
from clickfleet.training.loop import Loop, RunProgress
from clickfleet.training.metrics import Metrics, State, make_metrics
from clickfleet.training.sharding import Spread
from clickfleet.training.signals import interruptible, leave
from clickfleet.training.validation import keeps_best

Calls = dict[str, Call]
FIRST_TICK_S = 0.02
"""How long to wait for the workers between two polls, until the first step."""
START_LIMIT_S = 6.0
"""Seconds to stop after a signal while processes start. Then all are killed."""
END_LIMIT_S = 4.0
"""Seconds to stop after the last checkpoint."""


class Driver(Loop[Calls]):
    """Drive the processes of one run."""

    def __init__(
        self,
        config: Config,
        schema: Schema,
        data: Share,
        monitor: ClusterMonitor,
        held_out: HeldOutFiles | None = None,
        split: RowSplit | None = None,
    ) -> None:
        self.config = config = modes.settled(config)
        cluster.check(config)
        self.schema, self.data, self.monitor, self.split = schema, data, monitor, split
        plain = replace(
            config, table=replace(config.table, memory_limit=None, snapshot_reserve=None, disk=None, disk_limit=None)
        )
        self.learner = Learner(plain, schema)
        self.table = table_spec(config, schema)
        self.folder = Path(config.run.dir) / "checkpoints"
        self.logs = self.folder.parent / "logs"
        spread = Spread(config.cluster.shards, 1 + self.learner.table.factors, len(self.learner.flat.values))
        self.processes = ProcessGroup(config, schema, spread, str(self.logs), monitor.log)
        self.overview = self.processes.overview
        self.evaluations = Evaluations(self.processes, self.learner, held_out or HeldOutFiles(), monitor)
        self.checkpoints, self.recovery = ClusterCheckpoints(self), Recovery(self)
        self.resizing = Resizing(self)
        self.start_state = start_state.fresh(config, schema, self.learner)
        self.progress = RunProgress()
        self.path: Path | None = None
        """The last checkpoint."""
        self.mirror: Mirror | None = None
        """Keeps the run folder in step with its URL."""
        self.signal: int | None = None
        """The signal that stopped the run."""
        self.waits = False
        """Whether processes are starting: a signal then stops the run at once, because there is nothing to save."""
        self.idle = False
        """Whether no work is in progress: a signal then ends the program at once."""
        self._stop_by = math.inf
        self.processes.actor_group.check = self._check
        self.evaluations.unwanted = lambda: self.signal is not None
        self.trained_s = self.last_save_s = 0.0
        self.streams_of, self.finished = 0, set[str]()
        """The number of streams that the data was split into, and the streams that were read to their end."""
        self._parts: dict[str, Share] = {}
        """The data of streams that were made within the epoch."""
        self.shares: list[Share] | None = None
        """The data of each stream, if it is not a split of all data."""
        self.untouched = True
        """Whether the workers have got no share of the data since they began."""
        self.next_position: EpochPosition = NEXT_EPOCH
        """Where they begin with their next share."""
        self._kept: dict[int, dict[str, bytes]] = {}
        """What the mode has kept for them, by worker, until they have a share."""
        self._buffers = b""
        self._calls: Calls = {}
        """The workers that train, with their calls."""
        self._tasks: dict[str, Assignment] = {}
        self._began = time.monotonic()
        self._started: State = {}
        self._idle_logged = 0

    def start_new(self) -> None:
        """Do nothing: a new driver already has the start state of a new run."""

    def start_from(self, path: Path) -> list[str]:
        """Start a new run with what fits of an old model; return the names of what does not."""
        self.start_state, misfits = start_state.start_from(path, self.config, self.schema, self.learner)
        self.start_state.path = self._seen_by_all(self.start_state.path)
        return misfits

    def resume(self, path: Path) -> int:
        """Resume from a checkpoint; return its step."""
        self.start_state, state = start_state.resume(path, self.config, self.schema, self.learner, self.monitor.log)
        self.start_state.path = self._seen_by_all(self.start_state.path)
        self._keep_size(path, state.get("arrangement", {}))
        self.progress, self.path = RunProgress.resumed(state["progress"], self.config), path
        self.monitor.forget_after(state["step"], state.get("metrics_bytes"))
        return self.start_state.steps

    def _keep_size(self, path: Path, arrangement: Mapping[str, object]) -> None:
        """Resume with the workers and shards of the checkpoint, if the run was resized. A number that the user changes prevails."""
        before, now, sizes = run_folder.read_config(path).cluster, self.config.cluster, dict[str, int]()
        for key in ("workers", "shards"):
            given, there = getattr(now, key), arrangement.get(key)
            resized = (
                there != getattr(before, key) and given == getattr(before, key) and not isinstance(given, WorkerRange)
            )
            sizes[key] = there if resized and isinstance(there, int) else given
        if now.endpoints or sizes == {"workers": now.workers, "shards": now.shards}:
            return
        self.monitor.log(
            f"the run was resized: it resumes with {sizes['workers']} workers and {sizes['shards']} shards, not with the "
            f"{now.workers} and {now.shards} of its configuration"
        )
        self.processes.resize(range(sizes["workers"]), sizes["shards"])

    def _seen_by_all(self, path: str | None) -> str | None:
        """Return how other hosts find a checkpoint."""
        apart = path is not None and self.config.cluster.address is not None
        return (origin(str(path)) or path) if apart else path

    def start(self) -> None:
        """Start all processes together and wait until they have loaded the start state."""
        begin = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        mode = self.config.mode
        for name, value in mode.settings.items():
            self.monitor.log(f"mode {mode.name}: {name} = {value}")
        with interruptible(self.stop, lambda: START_LIMIT_S, self._force):
            self.waits = True
            try:
                self.processes.start()
                self.begin()
                if self.signal is not None:
                    raise StoppedError("stopped by a signal")
            except StoppedError:
                assert self.signal is not None
                self.monitor.log(f"stopped by {signal.Signals(self.signal).name} before training began")
                leave(self.signal)
            finally:
                self.waits = False
        self.monitor.log(
            f"{self.processes.spread.shards} shards and {len(self.processes.workers)} workers are ready "
            f"after {time.monotonic() - begin:.1f} s"
        )
        self.resizing.open()

    def begin(self, lasts: bool = False) -> None:
        """Put shards and workers into the start state. `lasts`: the workers are in it, and the mode keeps its lasting state."""
        start, self._calls = self.start_state, {}
        self.next_position, self._buffers = start.reader, start.buffers
        self._kept = {} if lasts else files_of(start.saved, self.processes.workers)
        self.processes.begin(start, lasts)
        self._restart(start.steps, start.rows, start.metrics)

    def _restart(self, steps: int, rows: int, metrics: Metrics) -> None:
        """Note that the workers have begun, after this many steps and rows."""
        (self.folder.parent / "processes.json").write_text(json.dumps(self.processes.actor_group.facts, indent=1))
        self._started = metrics.state()
        self.overview.restart(steps, rows, self._started["buckets.buckets"])
        self.untouched = True

    def rearrange(self, reports: Mapping[str, WorkerCheckpoint]) -> None:
        """Continue with the workers that there are now. `reports`: what those before had trained when they paused.

        After a failure meanwhile, the run returns to the last checkpoint, with the new workers.
        """
        trains, position = self.trains, self.position(reports)
        self._kept = files_of(kept_of(reports) if reports else self._kept, self.processes.workers)
        self._buffers = buffers_of(reports) or self._buffers
        self.start_state.worker_steps = {}
        steps = self.overview.start.steps + sum(report["steps"] for report in reports.values())
        rows = self.overview.start.rows + sum(report["rows"] for report in reports.values())
        metrics = self.merged(report["metrics"] for report in reports.values())
        read = [report["read"] for report in reports.values()]
        start = self.overview.start
        size, bad_lines = start.bytes + sum(each[0] for each in read), start.bad_lines + sum(each[1] for each in read)
        optimizer = optimizer_of(reports) or self.processes.optimizer_of(self.start_state)
        self.processes.rearrange(optimizer, self._buffers, steps)
        self._restart(steps, rows, metrics)
        self.overview.start.bytes, self.overview.start.bad_lines = size, bad_lines
        if trains:
            self.next_position = position
            self._give(self.progress.epoch, self._assign())

    def reload(self) -> None:
        """Load the last checkpoint, after which the workers paused, into the shards that there are now, and continue."""
        trains = self.trains
        self.processes.generation += 1
        self.begin(self.lasting)
        if trains:
            self._give(self.progress.epoch, self._assign())

    @property
    def lasting(self) -> bool:
        """Whether workers keep state of the mode when others come and go."""
        return modes.needs(self.config).lasting

    @property
    def trains(self) -> bool:
        """Whether workers are training."""
        return bool(self._calls)

    def check_positions(self, reports: Mapping[str, WorkerCheckpoint]) -> None:
        """Raise ProcessFailedError if a worker has reported the end of an earlier assignment: it had not begun its own."""
        for name, report in reports.items():
            if name in self._tasks and set(report["position"]) != {str(s.number) for s in self._tasks[name].streams}:
                raise ProcessFailedError(name, "it paused before it began its assignment")

    def train_all(self) -> None:
        """Train all epochs that are left and write a last checkpoint. After a failure, resume from the last checkpoint."""
        self.monitor.start(self.overview)
        self.checkpoints.saved_at = time.monotonic()
        while True:
            try:
                self.run()
                return
            except StoppedError as stopped:  # it stopped an evaluation; a last checkpoint can still be written
                self.monitor.log(str(stopped))
            except ProcessFailedError as failure:
                self.trained_s += time.monotonic() - self._began
                try:
                    self.recovery.roll_back(failure)
                except StoppedError as stopped:
                    self.monitor.log(f"no last checkpoint: {stopped}")
                    return

    def epochs(self) -> Iterator[int]:
        while not self._over() and self.signal is None:
            self._began = time.monotonic()
            yield self.progress.epoch
            self.trained_s += time.monotonic() - self._began
            if self.signal is None and not self.progress.stopped_early:
                self._end_epoch()
        self._began = time.monotonic()

    def stretches(self, epoch: int) -> Iterator[Calls]:
        """Give the workers what is left of an epoch, and yield their calls until all have ended or the run stops."""
        self.overview.start.bytes = self.overview.start.bad_lines = 0
        self._give(epoch, self._assign())
        while self.signal is None and not self.progress.stopped_early:
            if self._calls:
                yield self._calls
                continue
            self._tolerate(
                self.checkpoints.wait
            )  # one in progress lies within the epoch, so complete it before its end
            if not self._calls:  # else a worker failed meanwhile and trains the rest of its files
                break

    def _give(self, epoch: int, tasks: dict[str, Assignment]) -> None:
        """Let the workers begin their assignments."""
        self.overview.epoch, self._tasks = epoch, tasks
        self.processes.call(self.processes.shards, "next_epoch")
        self.checkpoints.note()
        actors = self.processes.actor_group.actors
        self._calls = {name: actors[name].train.remote(task) for name, task in tasks.items()}
        self.untouched, self.next_position, self._kept = False, NEXT_EPOCH, {}

    def train(self, stretch: Calls) -> None:
        """Let the workers train for a moment; then poll them."""
        begun = self.overview.rows > self.overview.start.rows
        self._tolerate(lambda: self._poll(stretch, TICK_S if begun else FIRST_TICK_S))
        if begun:
            self.evaluations.collect_names()  # this takes a moment, so the workers begin first
        if self.trains:
            self.resizing.tick()

    def _poll(self, calls: Calls, timeout_s: float) -> None:
        """Wait for a moment. Take note of the workers that have ended, and of the status of all processes."""
        ready, _ = self.processes.actor_group.ray.wait(list(calls.values()), timeout=timeout_s)
        for name in [name for name, call in calls.items() if call in ready]:
            self.overview.workers[name] = self.processes.result(name, calls[name])
            del calls[name]
        self.processes.poll()
        self.monitor.tick(self.overview)

    def open_epoch(self) -> int:
        """Let the workers wait for batches that the program hands to them; return the number of the epoch."""
        epoch, workers = self.progress.epoch, self.processes.workers
        if self.start_state.reader["epoch"] == epoch:
            raise ClusterError(
                "the checkpoint lies in the middle of an epoch", "end that epoch first, with `train` and the same data"
            )
        wanted = self.processes.config.cluster.workers
        if len(workers) < wanted:
            raise ClusterError(f"only {len(workers)} workers of {wanted} are left", "start again")
        saved = self._kept
        self.streams_of, self.finished, self.shares = len(workers), set(), []
        self._give(epoch, {f"worker {w}": Assignment(epoch, (), saved.get(w, {}), by_batch=True) for w in workers})
        return epoch

    def poll_epoch(self) -> None:
        """Poll the processes of an epoch of `open_epoch`. Raise ProcessFailedError if one has failed."""
        if self._calls:
            self._poll(self._calls, 0)

    def close_epoch(self) -> None:
        """Wait until all workers have ended the epoch of `open_epoch`; then evaluate and save."""
        begin, epoch = time.monotonic(), self.progress.epoch
        while self._calls:
            self._poll(self._calls, TICK_S)
            self.processes.actor_group.check()
        self.trained_s += time.monotonic() - begin
        self._end_epoch()
        self.checkpoints.now(epoch)

    def shrink(self) -> int:
        """Decay the statistics of the rows and remove old and rare ones; return how many were removed."""
        removed = self.processes.call(self.processes.shards, "shrink", timeout_s=3600.0).values()
        self.overview.start.steps += 1  # the next checkpoint differs from the last one, and needs a step of its own
        return int(sum(removed))

    def evaluate_if_due(self) -> None:
        self._tolerate(self.checkpoints.evaluate_if_due)

    def save_if_due(self) -> None:
        def save() -> None:
            if self.checkpoints.work is not None:
                self.checkpoints.complete_if_ready()
            elif self._calls and self.checkpoints.due():
                self.checkpoints.begin(None)

        self._tolerate(save)

    def _tolerate(self, act: Callable[[], None]) -> None:
        """Call `act`. If a process fails meanwhile and cluster.on_failure is "continue", replace it."""
        try:
            act()
        except ProcessFailedError as failure:
            if self.config.cluster.on_failure == "rollback" or self.signal is not None:
                raise
            self.recovery.continue_without(failure, self._calls, self._tasks)

    def finish(self) -> None:
        """Evaluate a last time unless a signal stopped the run, and write the last checkpoint."""
        begin = time.monotonic()
        if self.signal is None:
            if self.progress.epoch:
                self.progress.warn_of_few_steps(self.processes.count(), self.monitor)
            self._evaluate_last()
        self.checkpoints.last()
        if self.signal is not None:  # the workers wait: what they have trained is what was saved
            with suppress(ProcessFailedError):
                self.processes.count()
        self.last_save_s = time.monotonic() - begin

    def end_early(self, how: str, problem: str = "") -> NoReturn:
        """Stop after a signal: write a last checkpoint unless there is a problem, and leave the program."""
        assert self.signal is not None
        try:
            if not problem:
                self.checkpoints.last()
        except ProcessFailedError as failure:
            problem = str(failure)
        if problem:
            self.monitor.log(f"no last checkpoint: {problem}")
        name = signal.Signals(self.signal).name
        self.monitor.log(
            f"stopped by {name}; the newest checkpoint is of step {self.start_state.steps:,}; resume with {how}"
        )
        leave(self.signal)

    def _evaluate_last(self) -> None:
        """Evaluate after the last epoch if a signal had interrupted that evaluation; then test the model of the run."""
        steps = self.processes.count()
        held_out, progress = self.evaluations.held_out, self.progress
        if held_out and progress.epoch and progress.evaluated_at != steps:
            self.evaluations.take(progress, progress.epoch - 1, steps)
        chosen = not keeps_best(self.config) or progress.best_step in (None, steps)
        if held_out.valid and held_out.test and chosen and progress.epoch:
            self.evaluations.take_test(progress, progress.epoch - 1, steps)

    def _over(self) -> bool:
        return self.progress.epoch >= self.config.train.epochs or self.progress.stopped_early

    def position(self, reports: Mapping[str, WorkerCheckpoint]) -> EpochPosition:
        """Return how far the epoch has been read, by the reports of the workers."""
        streams: dict[str, Mapping[str, object] | None] = dict.fromkeys(self.finished)
        owners: dict[str, int] = {}
        for name, report in reports.items():
            streams |= report["position"]
            owners |= dict.fromkeys(report["position"], int(name.split()[1]))
        left = [number for number, state in streams.items() if state is not None]
        return {
            "epoch": self.overview.epoch,
            "of": self.streams_of,
            "streams": streams,
            "shares": {number: described(self._parts[number]) for number in left if number in self._parts},
            "workers": len(reports),
            "owners": {number: owners[number] for number in left if number in owners},
        }

    def _assign(self) -> dict[str, Assignment]:
        """Divide what is left of the epoch among the workers."""
        epoch, workers, position = self.progress.epoch, self.processes.workers, self.next_position
        if position["epoch"] != epoch:
            count = len(workers if self.shares is None else self.shares)
            streams = [AssignedStream(i, self._share_of(i, count)) for i in range(count)]
            self.streams_of, self.finished, self._parts = count, set(), {}
        else:
            streams = self._left(position)
        streams = [stream for stream in streams if len(stream.data)]
        changed = position["epoch"] == epoch and position.get("workers", position["of"]) != len(workers)
        if changed and self.shares is None:
            first = max([self.streams_of, *(int(number) + 1 for number in (*position["streams"], *self._parts))])
            shares, exact = divided(streams, workers, first)
            self._parts = {
                str(s.number): s.data for each in shares.values() for s in each if s.number >= self.streams_of
            }
            if not exact:
                self.monitor.log("the shuffled rows of a file that is being read stay with one worker")
        else:
            shares = dealt(streams, workers)
        self._note_idle(sum(not streams for streams in shares.values()))
        return self._tasks_of(shares)

    def _tasks_of(self, shares: Mapping[int, Sequence[AssignedStream]]) -> dict[str, Assignment]:
        """Return the assignment of each worker: its streams, and what the mode has kept for it."""
        kept, epoch = self._kept, self.progress.epoch
        return {f"worker {w}": self.task(epoch, tuple(streams), kept.get(w, {})) for w, streams in shares.items()}

    def _left(self, position: EpochPosition) -> list[AssignedStream]:
        """Return the streams of a position that have not ended."""
        self.streams_of, states = position["of"], position["streams"]
        self.finished = {number for number, state in states.items() if state is None}
        shares, owners = position.get("shares", {}), position.get("owners", {})
        self._parts = {number: described_share(self.data, share) for number, share in shares.items()}
        return [
            AssignedStream(int(n), self._stream_data(n), state, owners.get(n), part=n in self._parts)
            for n, state in states.items()
            if state is not None
        ]

    def _stream_data(self, number: str) -> Share:
        return self._parts[number] if number in self._parts else self._share_of(int(number), self.streams_of)

    def _note_idle(self, idle: int) -> None:
        """Record how many workers have no files. Warn whenever this number changes."""
        if idle and idle != self._idle_logged:
            self._idle_logged = idle
            amounts = self.shares or [self.data]
            there = sum(map(len, amounts))
            files = any(not isinstance(each, FeedFiles) for each in amounts)
            reason = f"{there} files, and each is read by one worker" if files else f"{there} rows"
            remedy = "split the data into more files or use fewer workers" if files else "use fewer workers"
            self.monitor.log(
                f"warning: {idle} of {len(self.processes.workers)} workers are idle: there are only {reason}; {remedy}"
            )
        self.overview.idle_workers = idle

    def task(self, epoch: int, streams: tuple[AssignedStream, ...], saved: dict[str, bytes]) -> Assignment:
        """Return the assignment of a worker."""
        fed = isinstance(self.data, FeedFiles)  # without the rows that are set aside
        return Assignment(epoch, streams, saved, split=None if fed else self.split)

    def assign_nothing(self) -> None:
        """Give each worker an empty share. Workers take part in checkpoints only after a share."""
        self.processes.call(self.processes.shards, "next_epoch")
        actors, tasks = self.processes.actor_group.actors, self._tasks_of(dict.fromkeys(self.processes.workers, ()))
        calls = {name: actors[name].train.remote(task) for name, task in tasks.items()}
        self.processes.actor_group.wait_for(calls, "checkpoint", self.config.cluster.timeout)

    def before_checkpoint(self) -> None:
        """Bring what `more` returns up to date. It must not change until the checkpoint is complete."""

    def more(self) -> Mapping[str, object]:
        """Return what checkpoints of this kind of run hold in addition."""
        return {} if self.split is None else {"split": self.split.to_dict()}

    def _share_of(self, stream: int, count: int) -> Share:
        if self.shares is not None and len(self.shares) == count:
            return self.shares[stream]
        return share_of(self.data, stream, count)

    def advance(self, shares: list[Share]) -> None:
        """Train one epoch over this data, share i by worker i, and save. Every row is trained once, even after failures."""
        self.shares = shares
        self.data = [file for share in shares if not isinstance(share, FeedFiles) for file in share]
        self._check_streams(shares)
        epoch = self.progress.epoch
        while self.progress.epoch <= epoch:
            begin = time.monotonic()
            try:
                self.train_epoch(self.progress.epoch)
                self.trained_s += time.monotonic() - begin
                if self.signal is not None:
                    return
                self._end_epoch()
                self.checkpoints.now(epoch)
            except ProcessFailedError as failure:
                self.recovery.roll_back(failure)

    def _check_streams(self, shares: list[Share]) -> None:
        """Refuse to resume an epoch over data in memory with another number of workers: each has fed its own rows."""
        reader = self.start_state.reader
        fed = any(isinstance(share, FeedFiles) for share in shares)
        if fed and reader["epoch"] == self.progress.epoch and reader["of"] != len(shares):
            raise ClusterError(
                f"the epoch began with the data of {reader['of']} workers, and there are {len(shares)} now",
                f"resume with {reader['of']} workers, and give each the same data again",
            )

    def _end_epoch(self) -> None:
        self.processes.call(self.processes.shards, "end_epoch")
        epoch, steps = self.progress.epoch, self.processes.count()
        metrics = self.merged(self.processes.call(self.processes.trainers, "metrics").values())
        self.progress.end_epoch(self.overview, metrics, self.monitor, self.trained_s)
        if not self.config.train.metrics.continuous:
            self.reset_metrics()
        if self.evaluations.held_out and self.progress.evaluated_at != steps:
            self.evaluations.take(self.progress, epoch, steps)
        if self.shares is None and not self._over() and self.config.run.keep_epochs:
            self.checkpoints.now(epoch)

    def reset_metrics(self) -> None:
        self.processes.call(self.processes.trainers, "reset_metrics")
        self._started = make_metrics(self.config, self.schema).state()
        self.overview.start.buckets = None

    def deliver(self, number: int, final: Path) -> str:
        """Bring a checkpoint to the URL of the run, for all hosts; return where they find it."""
        if self.mirror is None:
            return str(final)
        url = self._seen_by_all(str(final))
        if self.config.cluster.address is not None:
            self.processes.call(self.processes.shards, "deliver", number, url, timeout_s=3600.0)
            self.processes.gather_logs(self.logs)
        self.mirror.push()
        return str(url)

    def merged(self, states: Iterable[State]) -> Metrics:
        """Merge the metrics of the workers with those they started from. The sliding AUC covers the last batches of each."""
        total = make_metrics(self.config, self.schema)
        total.restore(self._started)
        windows = []
        for state in states:
            of_worker = make_metrics(self.config, self.schema)
            of_worker.restore(state)
            total.merge(of_worker)
            if (window := start_state.last_batches(of_worker)) is not None:
                windows.append(window)
        if windows:
            start_state.set_last_batches(total, np.sum(windows, axis=0))
        return total

    def stop_early(self) -> None:
        """End the run as early stopping does."""
        self.progress.stopped_early = True

    def stop(self, number: int) -> None:
        """Stop the run because of a signal. `number` is the signal."""
        self.signal, self._stop_by = number, time.monotonic() + self.config.cluster.stop_timeout
        if self.idle:
            leave(number)

    def _check(self) -> None:
        """Raise an error if a signal has made waiting pointless."""
        if self.signal is None:
            return
        if self.waits:
            raise StoppedError("stopped by a signal")
        if time.monotonic() > self._stop_by:
            limit = self.config.cluster.stop_timeout
            raise ProcessFailedError(
                "the checkpoint", f"not written within {limit:.0f} s of the signal (cluster.stop_timeout)"
            )

    def close(self) -> None:
        """Stop all processes of the run; within a few seconds after a signal."""
        limit = None
        if self.signal is not None:
            limit = threading.Timer(END_LIMIT_S, self._force, [self.signal])
            limit.daemon = True
            limit.start()
        self.resizing.close()
        try:
            self.processes.stop()
        finally:
            if limit is not None:
                limit.cancel()
            self.monitor.close()

    def _force(self, number: int) -> None:
        process_tree.force(number, self.processes.actor_group.roots())

    def interruptible(self, notify: Callable[[int], None] = lambda number: None) -> AbstractContextManager[None]:
        """Save and stop at the first SIGTERM, SIGINT or SIGHUP; call `notify` first. The second one has its usual effect."""

        def stop(number: int) -> None:
            notify(number)
            self.stop(number)

        return interruptible(stop, lambda: self.config.cluster.stop_timeout + END_LIMIT_S, self._force)


def train_on_cluster(driver: Driver) -> None:
    """Start the processes of a run, train to its end, and stop them."""
    monitor = driver.monitor
    with driver.interruptible():
        try:
            driver.start()
            driver.train_all()
            monitor.log(closing_table(driver.overview, driver.processes.actor_group.facts, driver.trained_s))
            facts = closing_facts(driver.overview, driver.trained_s)
            monitor.record("cluster", {"epoch": driver.overview.epoch, "rows": driver.start_state.rows, **facts})
        except ProcessFailedError as failure:
            raise ClusterError(str(failure), f"see {driver.logs}") from None
        finally:
            driver.close()
