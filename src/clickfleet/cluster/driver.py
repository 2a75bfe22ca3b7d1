"""One run on a cluster: epochs over the data, cuts, and going back to the last cut when a process is lost.

The driver hands every worker streams (shares of the files), watches, and asks for cuts: checkpoints of all shards at instants that lie
between the same batches. Whatever is lost, the run goes on from the last cut in a new epoch; messages of the old one are refused.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from clickfleet import checkpoint, cluster, modes, scoring
from clickfleet.cluster import base as bases
from clickfleet.cluster import cutting
from clickfleet.cluster.actors import Origin, ShardActor, WorkerActor, split_dense
from clickfleet.cluster.fleet import Fleet, LostError
from clickfleet.cluster.overview import ClusterWatch, Overview, closing_facts, closing_table
from clickfleet.cluster.remote import AbandonedError
from clickfleet.cluster.shard import rules_of
from clickfleet.cluster.worker import ROUNDS, Assignment, Stream, links_of
from clickfleet.config import Config
from clickfleet.errors import ClickfleetError, ClusterError, DataError
from clickfleet.exchange import Spread
from clickfleet.files import split_files
from clickfleet.interrupts import interruptible
from clickfleet.learner import Learner
from clickfleet.metrics import Metrics
from clickfleet.schema import Schema
from clickfleet.session import Progress, words

TICK_S = 0.25
POLL_S = 0.5
Results = dict[str, Any]
Calls = dict[str, Any]


class Driver:
    """Places, watches and leads the processes of one run."""

    def __init__(
        self, config: Config, schema: Schema, files: Sequence[str], test: Sequence[str], watch: ClusterWatch
    ) -> None:
        self.config = config = modes.settled(config)
        cluster.check(config)
        self.schema, self.files, self.test, self.watch = schema, list(files), list(test), watch
        plain = replace(config, table=replace(config.table, memory_limit=None, snapshot_reserve=None))
        self.learner = Learner(plain, schema)
        self.table = Learner(config, schema).table.describe()
        self.spread = Spread(config.cluster.shards, 1 + self.learner.table.factors, len(self.learner.flat.values))
        self.row_files = row_files(config.cluster.shards)
        self.folder = Path(config.run.dir) / "checkpoints"
        self.fleet = Fleet(config, watch.log)
        self.overview = Overview(config.train.metrics.thresholds)
        self.run_id, self.run_epoch = secrets.randbits(63), 0
        self.workers = list(range(config.cluster.workers))
        self.base = bases.fresh(config, schema, self.learner)
        self.progress = Progress()
        self.path: Path | None = None
        """The last checkpoint."""
        self.signal: int | None = None
        self.losses: list[str] = []
        self.trained_s = self.last_save_s = 0.0
        self._started: dict[str, Any] = {}
        self._cut: cutting.Cutting | None = None
        self._unwanted: list[Any] = []
        self._cuts = self._losses_since_cut = 0
        self._saved_at = time.monotonic()
        self._streams_of, self._finished = 0, set[str]()
        self._polls: dict[str, tuple[Any, float]] = {}
        self._polled = 0.0

    def start_from(self, path: Path) -> list[str]:
        """A new run with what fits of an old model; what does not, in words."""
        self.base, anew = bases.start_from(path, self.config, self.schema, self.learner)
        return anew

    def resume(self, path: Path) -> None:
        """Goes on from a checkpoint."""
        self.base, state = bases.resume(path, self.config, self.schema, self.learner, self.watch.log)
        self.progress, self.path = Progress(**state["progress"]), path
        self.watch.forget_after(state["metrics_bytes"])

    # ---- processes ----

    @property
    def who(self) -> tuple[int, int, int]:
        return int(self.schema.hash[:15], 16), self.run_id, self.run_epoch

    @property
    def peers(self) -> list[int]:
        links = links_of(self.config)
        return [worker * links + i for worker in self.workers for i in range(links)]

    def start(self) -> None:
        """Starts all processes together and waits until they are there."""
        begin = time.monotonic()
        for name, value in self.config.mode.settings.items():
            self.watch.log(f"mode {self.config.mode.name}: {name} = {value}")
        threads = self.config.cluster.threads
        for name in ("merge", "queue_size"):
            if self.config.mode.name in ROUNDS and self.config.mode.settings.get(name, threads) != threads:
                self.watch.log(f"warning: mode {self.config.mode.name} has mode.{name} = cluster.threads = {threads}")
        self.fleet.start()
        names = [f"shard {i}" for i in range(self.config.cluster.shards)] + [f"worker {i}" for i in self.workers]
        self._create(names)
        self.begin()
        self.watch.log(
            f"{self.config.cluster.shards} shards and {len(self.workers)} workers are there "
            f"after {time.monotonic() - begin:.1f} s"
        )

    def _create(self, names: Iterable[str]) -> None:
        logs = str(self.folder.parent / "logs")
        calls = {}
        for name in names:
            kind, number = name.split()
            if kind == "shard":
                rules = rules_of(self.config, self.row_files)
                self.fleet.create(name, ShardActor, int(number), self.config, rules, self.who, logs, cpus=1)
            else:
                schema, threads = self.schema.to_dict(), self.config.cluster.threads
                self.fleet.create(name, WorkerActor, int(number), self.config, schema, logs, cpus=threads)
            calls[name] = self.fleet.actors[name].process.remote()
        self.fleet.facts |= self.fleet.wait_for(calls, "start", self.config.cluster.start_timeout)

    def begin(self) -> None:
        """Puts shards and workers into the state of the base, in the present epoch of the run."""
        self._load(self.fleet.named("shard"))
        self._connect(self.fleet.named("worker"))
        (self.folder.parent / "processes.json").write_text(json.dumps(self.fleet.facts, indent=1))
        self._started = self.base.metrics.state()
        self.overview.restart(self.base.steps, self.base.rows, self._started["buckets.buckets"])
        self._polls = {}

    def _load(self, shards: Iterable[str]) -> None:
        parts = split_dense(self.spread, self.base.dense)
        calls = {}
        for name in shards:
            origin = Origin(self.base.path, self.base.table, parts[int(name.split()[1])], self.base.batches)
            calls[name] = self.fleet.actors[name].load.remote(origin, self.who, self.peers)
        self.fleet.facts |= self.fleet.wait_for(calls, "loading", max(self.config.cluster.start_timeout, 600.0))

    def _connect(self, workers: Iterable[str]) -> None:
        endpoints = [self.fleet.facts[name]["endpoints"] for name in self.fleet.named("shard")]
        calls = {
            name: self.fleet.actors[name].connect.remote(endpoints, self.who, self.base.buffers) for name in workers
        }
        self.fleet.wait_for(calls, "connecting", self.config.cluster.start_timeout)

    # ---- epochs ----

    def train(self) -> None:
        """All epochs that are left, whatever is lost meanwhile, and a last checkpoint."""
        self.watch.start(self.overview)  # type: ignore[arg-type]
        self._saved_at = time.monotonic()
        while True:
            begin = time.monotonic()
            try:
                if self._over() or self.signal is not None:
                    self._last_cut()
                    self.last_save_s = time.monotonic() - begin
                    return
                self._epoch()
                self.trained_s += time.monotonic() - begin
                if self.signal is None:
                    self._end_epoch()
            except LostError as loss:
                self.trained_s += time.monotonic() - begin
                self._roll_back(loss)

    def _over(self) -> bool:
        return self.progress.epoch >= self.config.train.epochs or self.progress.stopped_early

    def _assign(self) -> dict[str, Assignment]:
        """What is left of the present epoch, in shares."""
        epoch, reader = self.progress.epoch, self.base.reader
        if reader["epoch"] != epoch:
            count = len(self.workers)
            left = [Stream(i, tuple(split_files(self.files, i, count))) for i in range(count)]
            self._streams_of, self._finished = count, set()
            if len(self.files) < count:
                self.watch.log(f"warning: {len(self.files)} files for {count} workers: some have nothing to do")
        else:
            count, states = reader["of"], reader["streams"]
            files = {number: tuple(split_files(self.files, int(number), count)) for number in states}
            left = [Stream(int(n), files[n], state) for n, state in states.items() if state is not None]
            self._streams_of, self._finished = count, {n for n, state in states.items() if state is None}
        left = [stream for stream in left if stream.files]
        shares: dict[int, list[Stream]] = {worker: [] for worker in self.workers}
        for i, stream in enumerate(left):
            shares[self.workers[i % len(self.workers)]].append(stream)
        saved = self.base.saved
        return {f"worker {w}": Assignment(epoch, tuple(mine), saved.get(w, {})) for w, mine in shares.items()}

    def _epoch(self) -> None:
        """Trains what is left of an epoch."""
        self.overview.epoch = self.progress.epoch
        tasks = self._assign()
        rounds = {name: actor.next_epoch.remote() for name, actor in self.fleet.named("shard").items()}
        self.fleet.wait_for(rounds, "next epoch", 60.0)
        self.base.saved = {}  # the workers have it
        calls = {name: self.fleet.actors[name].train.remote(task) for name, task in tasks.items()}
        while calls and self.signal is None:
            try:
                self._attend(calls)
            except LostError as loss:
                if self.config.cluster.on_loss == "rollback":
                    raise
                self._go_on_without(loss, calls, tasks)

    def _attend(self, calls: Calls) -> None:
        """One look at everything: who has ended, how far the others are, whether a cut is due or complete."""
        ready, _ = self.fleet.ray.wait(list(calls.values()), timeout=TICK_S)
        for name in [name for name, call in calls.items() if call in ready]:
            self.overview.workers[name] = self._result(name, calls[name])
            del calls[name]
        self._poll()
        self.watch.tick(self.overview)  # type: ignore[arg-type]
        if self._cut is not None:
            self._collect_cut()
        elif calls and self._cut_is_due():
            self._begin_cut(None)

    def _result(self, name: str, call: Any) -> Any:
        try:
            return self.fleet.result(name, call)
        except AbandonedError:
            raise LostError(name, "a shard refused it") from None
        except ClusterError as error:
            if "has not answered" in str(error):
                raise LostError(name, str(error).splitlines()[0]) from None
            raise

    def _poll(self) -> None:
        """Asks every process how it is; who does not answer, or answers that it stands still, is lost."""
        now, limit = time.monotonic(), self.config.cluster.heartbeat_timeout
        for name, (call, since) in list(self._polls.items()):
            if self.fleet.ray.wait([call], timeout=0)[0]:
                del self._polls[name]
                found = self._result(name, call)
                (self.overview.workers if name.startswith("worker") else self.overview.shards)[name] = found
                if found.get("idle_s", 0.0) > limit:
                    raise LostError(name, f"hung: it has not moved for {found['idle_s']:.0f} s")
            elif now - since > limit:
                raise LostError(name, f"hung: no sign of life for {now - since:.0f} s")
        if now - self._polled >= POLL_S:
            self._polled = now
            for name, actor in self.fleet.actors.items():
                if name not in self._polls:
                    self._polls[name] = (actor.look.remote(), now)

    def _end_epoch(self) -> None:
        epoch, steps = self.progress.epoch, self._count()
        if self.overview.rows == 0:
            raise DataError("there are no rows to train on", "check data.train: the files are empty")
        calls = {name: actor.metrics.remote() for name, actor in self.fleet.named("worker").items()}
        found = self._merged(self.fleet.wait_for(calls, "metrics", 60.0).values())
        self.progress.train = dict(found.results())
        facts = {"epoch": epoch, "step": steps, "rows": self.overview.rows, **self.progress.train}
        self.watch.end_epoch(self.overview, facts, self.trained_s)  # type: ignore[arg-type]
        self.watch.log(f"epoch {epoch} done: step {steps:,}, {words(self.progress.train)}")
        self.progress.epoch += 1
        if self.test:
            self._test(epoch, steps)
        if not self.config.train.metrics.continuous:
            calls = {name: actor.reset_metrics.remote() for name, actor in self.fleet.named("worker").items()}
            self.fleet.wait_for(calls, "metrics", 60.0)
            self._started = bases.metrics_of(self.config, self.schema).state()
            self.overview.base["buckets"] = None
        if not self._over() and self.config.run.keep_epochs:
            self._cut_now(epoch)

    def _test(self, epoch: int, steps: int) -> None:
        now = self.progress
        now.test = self.evaluate(self.test)
        now.evaluated_at = steps
        if now.best_auc is None or now.test["auc"] > now.best_auc:
            now.best_auc, now.best_step, now.waited = now.test["auc"], steps, 0
        else:
            now.waited += 1
        shown = {key: value for key, value in now.test.items() if key != "slices"}
        self.watch.record("test", {"epoch": epoch, "step": steps, **shown})
        self.watch.log(f"test after step {steps:,}: {words(now.test)}")
        patience = self.config.train.patience
        if patience is not None and now.waited >= patience:
            now.stopped_early = True
            self.watch.log(f"stopped: no better test AUC than {now.best_auc:.4f} in {now.waited} evaluations")

    def evaluate(self, files: Sequence[str]) -> Results:
        """The metrics of the shards' model on files, each worker taking its share of them."""
        total = scoring.metrics_of(self.learner)
        for state in self._shared("measure", files):
            mine = scoring.metrics_of(self.learner)
            mine.restore(state)
            total.merge(mine)
        return scoring.results(total)

    def predict(self, files: Sequence[str]) -> Iterator[Any]:
        """The scores of all rows, file after file in order."""
        for parts in self._shared("score", files):
            yield from parts

    def _shared(self, verb: str, files: Sequence[str]) -> list[Any]:
        """What each worker made of its share of the files, in order."""
        first = self.fleet.actors[f"worker {self.workers[0]}"]
        buffers = self.fleet.wait_for({"worker 0": first.buffers.remote()}, verb, 60.0)["worker 0"]
        calls = {}
        for i, worker in enumerate(self.workers):
            share = split_files(list(files), i, len(self.workers))
            calls[f"worker {worker}"] = getattr(self.fleet.actors[f"worker {worker}"], verb).remote(share, buffers)
        done = self.fleet.wait_for(calls, verb, float("inf"), watch=self._poll)
        return [done[f"worker {worker}"] for worker in self.workers]

    # ---- cuts ----

    def _cut_is_due(self) -> bool:
        if self._unwanted:  # of a cut that was dropped: a shard writes one at a time
            done = self.fleet.ray.wait(self._unwanted, num_returns=len(self._unwanted), timeout=0)[0]
            self._unwanted = [call for call in self._unwanted if call not in done]
            if self._unwanted:
                return False
        run, steps = self.config.run, self.overview.steps - self.base.steps
        by_time = run.checkpoint_every is not None and time.monotonic() - self._saved_at >= run.checkpoint_every
        by_steps = run.checkpoint_every_steps is not None and steps >= run.checkpoint_every_steps
        return steps > 0 and (by_time or by_steps)

    def _begin_cut(self, epoch: int | None) -> None:
        self._cuts += 1
        work = self._cut = cutting.begin(self._cuts, self.folder, epoch)
        hidden, limit = str(work.writer.hidden), self.config.cluster.timeout
        work.calls = {name: actor.cut.remote(work.number) for name, actor in self.fleet.named("worker").items()}
        for name, actor in self.fleet.named("shard").items():
            work.calls[name] = actor.save.remote(work.number, hidden, limit)

    def _collect_cut(self) -> None:
        """Takes what is there of a cut, and completes it when all is there."""
        work = self._cut
        assert work is not None
        left = {call: name for name, call in work.calls.items() if name not in work.done}
        for call in self.fleet.ray.wait(list(left), num_returns=len(left), timeout=0)[0] if left else ():
            work.done[left[call]] = self._result(left[call], call)
        if len(work.done) == len(work.calls):
            self._complete(work)
            self._cut = None

    def _complete(self, work: cutting.Cutting) -> None:
        counted = self.overview.base
        streams: dict[str, Any] = dict.fromkeys(self._finished)
        for report in work.reports.values():
            streams |= report["position"]
        reader = {"epoch": self.overview.epoch, "of": self._streams_of, "streams": streams}
        state = {
            "version": 1,
            "step": counted["steps"] + sum(report["steps"] for report in work.reports.values()),
            "rows": counted["rows"] + sum(report["rows"] for report in work.reports.values()),
            "reader": bases.NEXT_EPOCH if self.progress.epoch > self.overview.epoch else reader,
            "progress": vars(self.progress).copy(),
            "metrics_bytes": self.watch.size(),
        }
        metrics = self._merged(report["metrics"] for report in work.reports.values())
        shards = list(self.fleet.named("shard"))
        self.base = cutting.finish(
            work, shards, self.config, self.learner, metrics, self.base, state, self.row_files, self.table
        )
        self.path, self._saved_at, self._losses_since_cut = Path(str(self.base.path)), time.monotonic(), 0
        took = time.monotonic() - work.begin
        self.watch.log(f"cut {work.number}: step {state['step']:,}, {state['rows']:,} rows, {took:.1f} s", show=False)

    def _cut_now(self, epoch: int | None) -> None:
        """A checkpoint of this moment, written when this returns."""
        self._wait_for_cut()
        self._begin_cut(epoch)
        self._wait_for_cut()

    def _wait_for_cut(self) -> None:
        while (work := self._cut) is not None:
            left = [call for name, call in work.calls.items() if name not in work.done]
            if left:
                self.fleet.ray.wait(left, timeout=TICK_S)
            self._poll()
            self._collect_cut()

    def _last_cut(self) -> None:
        epoch = self.progress.epoch - 1 if self.progress.epoch and self.signal is None else None
        saved = self.path is not None and self.base.progress == vars(self.progress)
        if self._count() != self.base.steps or not saved:
            self._cut_now(epoch)
        elif epoch is not None and self.config.run.keep_epochs and self.path is not None:
            checkpoint.label_epoch(self.folder, epoch, self.path)

    def _count(self) -> int:
        """Batches trained on, exactly."""
        calls = {name: actor.look.remote() for name, actor in self.fleet.actors.items()}
        for name, found in self.fleet.wait_for(calls, "progress", 60.0).items():
            (self.overview.workers if name.startswith("worker") else self.overview.shards)[name] = found
        return self.overview.steps

    def _merged(self, states: Iterable[dict[str, Any]]) -> Metrics:
        """The metrics that workers started from, with what they have seen since."""
        total = bases.metrics_of(self.config, self.schema)
        total.restore(self._started)
        for state in states:
            mine = bases.metrics_of(self.config, self.schema)
            mine.restore(state)
            total.merge(mine)
        return total

    # ---- losses ----

    def _count_loss(self, loss: LostError) -> None:
        self._losses_since_cut += 1
        self.overview.losses += 1
        self.losses.append(str(loss))
        self.watch.log(f"lost {loss}")
        self._drop_cut()
        if self._losses_since_cut > self.config.cluster.max_losses:
            raise ClusterError(
                f"{self._losses_since_cut} losses without a new checkpoint; the last one: {loss}",
                f"see {self.folder.parent / 'logs'}; go on with --resume once the cause is found",
            )

    def _drop_cut(self) -> None:
        if self._cut is not None:
            self._cut.drop()
            self._unwanted = list(self._cut.calls.values())
            for actor in self.fleet.named("shard").values():
                actor.drop_cut.remote(self._cut.number)
            self._cut = None

    def _roll_back(self, loss: LostError) -> None:
        """Puts everything back to the last cut, with a new process for the lost one."""
        while True:
            self._count_loss(loss)
            self.run_epoch += 1
            self.progress = Progress(**self.base.progress)
            begin, before = time.monotonic(), self.overview.rows
            self._unwanted = []
            try:
                for actor in self.fleet.named("worker").values():
                    actor.abandon.remote()
                self._replace(loss.name)
                self.begin()
            except LostError as another:
                loss = another
                continue
            again = before - self.base.rows
            self.watch.log(
                f"back to step {self.base.steps:,} after {time.monotonic() - begin:.1f} s; "
                f"about {max(0, again):,} rows are trained on again"
            )
            return

    def _replace(self, name: str) -> None:
        """A new process for a lost one; a worker that finds no place leaves its files to the others."""
        self.fleet.end(name)
        try:
            self._create([name])
        except ClusterError:
            index = int(name.split()[1])
            if name.startswith("shard") or len(self.workers) == 1:
                raise
            self.fleet.end(name)
            self.workers.remove(index)
            self.watch.log(f"there is no place for {name}: its files go to the other {len(self.workers)} workers")

    def _go_on_without(self, loss: LostError, calls: Calls, tasks: dict[str, Assignment]) -> None:
        """on_loss continue: only the lost process goes back to the last cut; what it had learned since is lost, and shown."""
        self._count_loss(loss)
        name = loss.name
        known = self.overview.shards.get(name, {}) if name.startswith("shard") else {}
        self._replace(name)
        self._polls.pop(name, None)
        if name.startswith("shard"):
            drop = {name: self.fleet.actors[name].drop_cut.remote(self._cuts)}  # marks of it may still come
            self.fleet.wait_for(drop, "moving", 60.0)
            self._load([name])
            endpoints = self.fleet.facts[name]["endpoints"]
            moves = {w: a.move.remote(int(name.split()[1]), endpoints) for w, a in self.fleet.named("worker").items()}
            self.fleet.wait_for(moves, "moving", 60.0)
            pushes = known.get("pushes", 0)
            self.watch.log(
                f"{name} is back with the rows of step {self.base.steps:,}; it had learned {pushes:,} pushes since it was started"
            )
            return
        self._connect([name])
        shards = self.fleet.named("shard")
        seen = self.fleet.wait_for({s: a.learned.remote() for s, a in shards.items()}, "positions", 60.0).values()
        links, index = links_of(self.config), int(name.split()[1])
        mine = range(index * links, (index + 1) * links)
        learned = sum(max(found.get(peer, 0) for found in seen) for peer in mine)
        task = self._share_of(name, tasks[name])
        skip = max(0, learned - self.base.worker_steps.get(name, 0))
        calls[name] = self.fleet.actors[name].train.remote(replace(task, skip=skip))
        self.watch.log(f"{name} goes on after {skip:,} batches since the last cut; what it had not sent is lost")

    def _share_of(self, name: str, task: Assignment) -> Assignment:
        """The streams of a worker as the last cut has them."""
        states = self.base.reader["streams"] if self.base.reader["epoch"] == task.epoch else {}
        streams = [replace(s, state=states.get(str(s.number), s.state)) for s in task.streams]
        left = [s for s in streams if str(s.number) not in states or s.state is not None]
        return replace(task, streams=tuple(left), saved={})

    # ---- the end ----

    def stop(self) -> None:
        self.fleet.stop(self.fleet.named("shard"))

    def interruptible(self) -> AbstractContextManager[None]:
        """The first SIGTERM or SIGINT leads to a checkpoint and the end; the second does what it always does."""

        def stop(number: int) -> None:
            self.signal = number

        return interruptible(stop)


def row_files(shards: int) -> int:
    """Row files of a checkpoint: the fewest, from 8 on, of which each shard has whole ones.

    >>> row_files(2), row_files(3), row_files(16)
    (8, 32, 16)
    """
    edges = [checkpoint.span(shard, shards)[0] for shard in range(shards)]
    return next(n for n in (8, 16, 32) if all(edge * n % 1024 == 0 for edge in edges))


def run(
    config: Config,
    schema: Schema,
    files: Sequence[str],
    test: Sequence[str],
    watch: ClusterWatch,
    prepare: Callable[[Driver], None],
) -> Driver:
    """Trains; `prepare` says where from. The driver that did it, with its processes ended."""
    driver = Driver(config, schema, files, test, watch)
    prepare(driver)
    try:
        driver.start()
        with driver.interruptible():
            driver.train()
        watch.log(closing_table(driver.overview, driver.fleet.facts, driver.trained_s))
        watch.record("cluster", {"epoch": driver.overview.epoch, **closing_facts(driver.overview, driver.trained_s)})
    except ClickfleetError:
        raise
    except LostError as loss:
        raise ClusterError(f"lost {loss}", f"see {driver.folder.parent / 'logs'}") from None
    finally:
        driver.stop()
        watch.close()
    return driver
