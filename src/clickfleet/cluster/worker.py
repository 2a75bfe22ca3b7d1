"""A worker: a mode over its share of the files, with what the driver wants to know and to have done meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import zmq

from clickfleet import modes, scoring
from clickfleet.cluster.base import last_batches, metrics_of, pack_buffers
from clickfleet.cluster.examined import Examined, files_to_score
from clickfleet.cluster.process import Stopwatch
from clickfleet.cluster.remote import AbandonedError, Remote
from clickfleet.cluster.streams import ROUNDS, Assignment, Stream, Streams, links_of
from clickfleet.cluster.wire import Identity
from clickfleet.config import Config
from clickfleet.errors import ClusterError
from clickfleet.exchange import Kind, Link, Request, Spread
from clickfleet.job import PHASES, Job, Source
from clickfleet.learner import Learner
from clickfleet.opening import open_source
from clickfleet.reader import Reader
from clickfleet.schema import Schema
from clickfleet.share import Share
from clickfleet.step import NotFiniteError


class Worker:
    """Runs in a process of its own; the driver calls it from other threads while it trains."""

    def __init__(self, config: Config, schema: dict[str, Any], index: int, workers: int) -> None:
        self.config, self.index, self.workers = config, index, workers
        self.schema = Schema.from_dict(schema, "the driver")
        torch.set_num_threads(1)
        torch.manual_seed(config.train.seed + index)
        self.learner = self._fresh_learner()
        self.spread = Spread(config.cluster.shards, 1 + self.learner.table.factors, len(self.learner.flat.values))
        self.trainers = config.cluster.threads
        self.metrics = metrics_of(self.config, self.schema)
        self.job: Share | None = None
        self.links: list[Remote] = []
        self.context: zmq.Context[Any] | None = None
        self.who = Identity(0, b"", -1)
        self.endpoints: list[list[str]] = []
        self._wanted = self._taken = 0
        self._reports: dict[int, dict[str, Any]] = {}
        self._change = threading.Condition()
        self._training = self._held = False
        self._given_up = -1
        """The last epoch of the run of which nothing is wanted any more."""
        self._ended: dict[str, Any] | None = None
        self._carried: dict[str, Any] = {}
        self._counted = (0, 0, 0)
        """Batches handed out, rows and batches trained on before this epoch."""
        self._trained, self._by_phase = Stopwatch(), dict.fromkeys(PHASES, 0.0)
        """CPU of training: of the whole process, and of its trainers in the epochs before this one."""

    def _fresh_learner(self) -> Learner:
        table = replace(self.config.table, memory_limit=None, snapshot_reserve=None)
        return Learner(replace(self.config, table=table), self.schema)

    def connect(
        self, endpoints: Sequence[Sequence[str]], who: tuple[int, bytes, int], learned: Sequence[int] = ()
    ) -> None:
        """Talks to these shards from now on, as part of that epoch of the run; what was before is forgotten.

        In the place of a lost worker: the shards have `learned` so many batches of each of its links.
        """
        self.abandon(self.who.epoch)
        with self._change:
            if not self._change.wait_for(lambda: not self._training, timeout=60):
                raise ClusterError(f"worker {self.index} does not stop training")
            for link in self.links:
                link.close()
            settings = self.config.mode.settings
            self.context = self.context or zmq.Context(int(settings.get("io_threads", 1)))
            self.endpoints, self.who = [list(each) for each in endpoints], Identity(*who)
            self._held = False
            self._wanted = self._taken = 0
            self._reports, self._ended, self.job = {}, None, None
            self._trained, self._by_phase = Stopwatch(), dict.fromkeys(PHASES, 0.0)
            self.metrics, self.learner, self._carried = metrics_of(self.config, self.schema), self._fresh_learner(), {}
            links = links_of(self.config)
            known = [*learned, *[0] * (links - len(learned))]
            self.links = [self._link(self.index * links + i, known[i]) for i in range(links)]
            self._counted = (sum(known), sum(known) * self.config.data.batch_rows, sum(known))

    def _link(self, peer: int, learned: int = 0) -> Remote:
        return Remote(
            self.endpoints,
            self.spread,
            self.who,
            peer,
            timeout_s=self.config.cluster.timeout,
            abandoned=lambda: self._abandoned,
            context=self.context,
            learned=learned,
        )

    def train(self, task: Assignment) -> dict[str, Any]:
        """Trains on the streams of an assignment to their ends."""
        with self._change:
            self._training = True
            self._ended = None
            self._trained.start()
        try:
            source = Streams(
                self.schema, task.epoch, {s.number: self._reader(s, task) for s in task.streams}, task.skip
            )
            self._by_phase = self._phases()
            if self.job is not None:
                self._counted = (self.job.steps, self.job.rows, self.job.trained)
            self.job = job = Share(
                self.learner,
                cast(Source, source),
                self.metrics,
                self._attend,
                lambda job: None,
                links=cast(list[Link], self.links),
                worker=self.index,
                workers=self.workers,
                trainers=self.trainers,
                wanted=self._asked,
                took=self._took,
            )
            job.steps, job.rows, job.trained = self._counted
            job.saved, job.carried = task.saved, self._carried
            for trainer in job.trainers:
                trainer.step.score_first = task.score_first and trainer.step.is_noisy()
            rounds = self.config.mode.name in ROUNDS
            job.stop_when = (lambda: self._abandoned) if rounds else (lambda: self._abandoned or self._asked() > 0)
            self.learner.model.train()
            try:
                modes.load(self.config)(job)
            except NotFiniteError as problem:
                raise ClusterError(
                    f"worker {self.index}, step {job.steps}: {problem}, nothing of that batch was learned",
                    "check the dense columns and weights, lower dense.lr or set dense.clip_norm, and go on with --resume",
                ) from None
            finally:
                job.close()
                self._trained.stop()
            with self._change:  # from here on, `cut` sees that nobody else will mark
                self._ended, self._training = source.state(), False
                if cut := self._asked():
                    self._mark(cut, self._ended)
            return self.progress()
        finally:
            with self._change:
                self._training = False
                self._change.notify_all()

    def _reader(self, stream: Stream, task: Assignment) -> Reader:
        folder = Path(self.config.run.dir) / f"worker-{self.index}"
        reader = open_source(task.reading or self.config, list(stream.files), self.schema, labels=True, folder=folder)
        assert isinstance(reader, Reader)
        reader.whole = task.reading is None  # a pass may be a few lines
        reader.epoch = task.epoch if task.reading is None else 0  # a pass has a seed of its own
        if stream.state is not None:
            reader.restore(stream.state)
        return reader

    def _attend(self, job: Job) -> bool:
        if self._abandoned:
            raise AbandonedError
        if self.config.mode.name not in ROUNDS and (cut := self._asked()):
            self._mark(cut, job.position())
        return not job.epoch_ended

    def _asked(self) -> int:
        """The cut that is wanted and not taken yet."""
        return self._wanted if self._wanted > self._taken else 0

    def _mark(self, cut: int, position: dict[str, Any]) -> None:
        assert self.job is not None
        self.job.before_cut()
        for ticket in [link.ask(Request(Kind.MARK, cut=cut)) for link in self.links]:
            ticket.wait()
        self._took(cut, position)

    def _took(self, cut: int, position: dict[str, Any]) -> None:
        assert self.job is not None
        report = {
            "position": position,
            "steps": self.job.trained,
            "rows": self.job.rows,
            "metrics": self.metrics.state(),
            "keep": self.job.keep(),
            "buffers": pack_buffers(self.learner) if self.index == 0 else b"",
        }
        with self._change:
            self._reports = {cut: report}
            self._taken = max(self._taken, cut)
            self._change.notify_all()
            if self._training and self._held:
                self._change.wait_for(lambda: not self._held or self._abandoned)
                for trainer in self.job.trainers:
                    trainer.clock.start()

    def release(self) -> None:
        """Lets a worker that stands still after a cut go on."""
        with self._change:
            self._held = False
            self._change.notify_all()

    def cut(self, number: int, hold: bool = False) -> dict[str, Any]:
        """Takes part in a cut, and stands still after it if wanted; what the worker had trained on at that instant."""
        with self._change:
            epoch = self.who.epoch
            self._held = hold
            self._wanted = number
            if not self._training and self._ended is not None and self._asked():
                self._mark(number, self._ended)
            self._change.wait_for(lambda: number in self._reports or self._given_up >= epoch)
            if self._given_up >= epoch:
                raise AbandonedError
            return self._reports[number]

    def move(self, shard: int, addresses: Sequence[str]) -> None:
        """A shard was started again elsewhere, and the run goes on with it."""
        self.endpoints[shard] = list(addresses)
        for link in self.links:
            link.move(shard, addresses)

    @property
    def _abandoned(self) -> bool:
        return self._given_up >= self.who.epoch

    def abandon(self, epoch: int) -> None:
        """Stops what is under way of an epoch of the run, as it goes on from an older state in the next."""
        self._given_up = max(self._given_up, epoch)  # not under the lock: its holder may wait for a lost shard
        with self._change:
            self._change.notify_all()

    def progress(self) -> dict[str, Any]:
        """How far the worker is, and whether it moves."""
        job = self.job
        if job is None:
            return {"rows": 0, "steps": 0, "training": self._training, "idle_s": 0.0}
        now = time.perf_counter()
        waiting = self._held or any(link.waiting for link in self.links)
        latest = max(trainer.clock.last for trainer in job.trainers)
        counters = job.source.counters
        return {
            "rows": job.rows,
            "steps": job.trained,
            "loss": job.loss,
            "weight": job.weight,
            "training": self._training,
            "idle_s": now - latest if self._training and not waiting else 0.0,
            "shares": job.shares(),
            "buckets": self.metrics.buckets.state()["buckets"],
            "sliding": last_batches(self.metrics),
            "queued": job.queued(),
            "bytes": counters.bytes,
            "bad_lines": counters.bad_lines,
            "sent": sum(link.bytes_out for link in self.links),
            "received": sum(link.bytes_in for link in self.links),
            "dropped": sum(link.dropped for link in self.links),
            "latencies": self._latencies(),
            "cpu_s": time.process_time(),
            "trained_cpu_s": self._trained.seconds,
            "cpu_by_phase": self._phases(),
        }

    def _phases(self) -> dict[str, float]:
        """CPU seconds of the trainers in each phase of their steps."""
        clocks = [trainer.clock for trainer in self.job.trainers] if self.job is not None else []
        return {phase: spent + sum(c.cpu_seconds[phase] for c in clocks) for phase, spent in self._by_phase.items()}

    def _latencies(self) -> dict[str, list[float]]:
        """Milliseconds until the shards had answered: median and 99th percentile of pulls and of pushes."""
        found = [sample for link in self.links for sample in list(link.latencies)]
        out = {}
        for name, pushed in (("pull", False), ("push", True)):
            times = [1e3 * seconds for learns, seconds in found if learns is pushed]
            out[name] = [float(np.percentile(times, q)) for q in (50, 99)] if times else []
        return out

    def measure(
        self, files: Sequence[str], buffers: bytes = b"", reading: Config | None = None
    ) -> tuple[dict[str, Any], int]:
        """The metrics of the shards' model on files: what a worker found in its share of them, and its bad lines."""
        with self._examined(buffers) as learner:
            if not files:
                return scoring.measure(learner, ()).state(), 0
            source = files_to_score(reading or self.config, self.schema, files)
            return scoring.measure(learner, source).state(), source.counters.bad_lines

    def score(self, files: Sequence[str], buffers: bytes = b"") -> tuple[list[np.ndarray[Any, Any]], int]:
        """The scores of every row of each file, in order, and how many lines were bad."""
        with self._examined(buffers) as learner:
            out, bad = [], 0
            for file in files:
                source = files_to_score(self.config, self.schema, [file], labels=False)
                parts = [scores for _, scores in scoring.Scorer(learner)(source)]
                out.append(np.concatenate([np.empty(0, np.float32), *parts]))
                bad += source.counters.bad_lines
            return out, bad

    def _examined(self, buffers: bytes) -> Examined:
        return Examined(self.learner, self._link(1_000_000 + self.index), buffers)
