"""The modes without processes: N logical workers in one, taking turns in an order that a seed decides.

The same modes, shards and messages as on a cluster; only the wire is a function call. A worker keeps the turn until it asks the shards
something, so a run is deterministic, and staleness is that of N workers of equal speed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from clickfleet import modes, sections
from clickfleet.cluster.shard import Shard, rules_of
from clickfleet.config import Config
from clickfleet.exchange import Answer, Link, Piece, Reply, Request, Split, Spread
from clickfleet.job import Job, Source
from clickfleet.learner import Learner
from clickfleet.metrics import Metrics
from clickfleet.schema import Schema
from clickfleet.share import Share
from clickfleet.table import Table


class Turns:
    """Lets one of several threads work at a time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._waiting: dict[int, threading.Event] = {}
        self._alive: set[int] = set()

    def start(self, works: Sequence[Callable[[], None]]) -> None:
        """Runs all of them to their ends; the first error is raised here."""
        failures: list[BaseException] = []
        self._alive = set(range(len(works)))
        self._waiting = {i: threading.Event() for i in self._alive}

        def run(i: int, work: Callable[[], None]) -> None:
            self._waiting[i].wait()
            self._waiting[i].clear()
            try:
                work()
            except BaseException as error:
                failures.append(error)
            self._alive.discard(i)
            self._pass()

        threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(works)]
        for thread in threads:
            thread.start()
        self._pass()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def _pass(self) -> None:
        if self._alive:
            self._waiting[self._random.choice(sorted(self._alive))].set()

    def give(self, i: int) -> None:
        """Another one's turn, or again one's own."""
        self._pass()
        self._waiting[i].wait()
        self._waiting[i].clear()


class Near:
    """A link by function call."""

    def __init__(self, fleet: Fleet, worker: int) -> None:
        self.fleet, self.worker = fleet, worker
        self._sequence = self._number = 0

    def ask(self, request: Request) -> NearTicket:
        spread = self.fleet.spread
        pull = None if request.pull is None else spread.split(request.pull)
        learns = request.push is not None or request.dense is not None
        self._sequence += learns
        self._number += 1
        for i, part in enumerate(spread.cut(request, pull)):
            seen = request.seen[i] if request.seen else 0
            if part.dense is not None:  # a shard may keep it while the worker goes on
                part.dense = part.dense._replace(vector=part.dense.vector.copy())
            piece = Piece(part, self._sequence if learns else 0, seen, self._number)
            for whom, answer in self.fleet.shards[i].handle(self.worker, piece):
                self.fleet.boxes[whom].setdefault(answer.number, {})[i] = answer
        self.fleet.turns.give(self.worker)
        return NearTicket(self, pull, self._number)


class NearTicket:
    def __init__(self, link: Near, pull: Split | None, number: int) -> None:
        self._link, self._pull, self._number = link, pull, number
        self._reply: Reply | None = None

    def ready(self) -> bool:
        return len(self._link.fleet.boxes[self._link.worker].get(self._number, ())) == self._link.fleet.spread.shards

    def wait(self) -> Reply:
        fleet, worker = self._link.fleet, self._link.worker
        while self._reply is None:
            if self.ready():
                answers = fleet.boxes[worker].pop(self._number)
                self._reply = fleet.spread.join([answers[i] for i in range(fleet.spread.shards)], self._pull)
            else:
                fleet.turns.give(worker)
        return self._reply


class Fleet:
    """Shards and logical workers of one configuration."""

    def __init__(
        self, config: Config, schema: Schema, workers: int, shards: int = 1, seed: int = 0, trainers: int = 1
    ) -> None:
        self.config, self.schema = config, schema
        self.turns = Turns(seed)
        self.first = Learner(config, schema)
        flat = self.first.flat.values
        self.spread = Spread(shards, 1 + self.first.table.factors, len(flat))
        rules = rules_of(config)
        self.shards = [
            Shard(Table.like(self.first.table.describe()), flat[first:last].clone(), config.dense, rules)
            for first, last in self.spread.spans
        ]
        self.workers, self.trainers = workers, trainers
        for shard in self.shards:
            shard.begin(range(workers))
            if config.mode.name == "geo":
                shard.replicate(range(workers))
        # Answers not fetched yet, by worker, number of the request and shard.
        self.boxes: list[dict[int, dict[int, Answer]]] = [{} for _ in range(workers)]

    def train(self, sources: Sequence[Source], metrics: Metrics | None = None) -> Learner:
        """One pass of each worker over its source; the model that came of it."""
        metrics = metrics or Metrics()

        def work(i: int) -> Callable[[], None]:
            learner = Learner(self.config, self.schema, Table.like(self.first.table.describe()))
            begun: list[bool] = []

            def attend(job: Job) -> bool:
                if begun and job.epoch_ended:
                    return False
                begun.append(True)
                return True

            links: list[Link] = [Near(self, i)]
            job = Share(
                learner,
                sources[i],
                metrics,
                attend,
                lambda job: None,
                links=links,
                worker=i,
                workers=self.workers,
                trainers=self.trainers,
            )
            return lambda: modes.load(self.config)(job)

        self.turns.start([work(i) for i in range(self.workers)])
        for shard in self.shards:
            shard.resume_rounds()
        return self.model()

    def model(self) -> Learner:
        """What the shards have by now, as one model."""
        table = Table.like(self.first.table.describe())
        from clickfleet import checkpoint

        for shard in self.shards:
            checkpoint.unpack(table, checkpoint.pack(shard.table))
        learner = Learner(self.config, self.schema, table)
        with torch.no_grad():
            learner.flat.values.copy_(torch.cat([shard.optimizer.values for shard in self.shards]))
        return learner

    @property
    def staleness(self) -> float:
        late = self.shards[0].staleness
        return late.total / late.pushes if late.pushes else 0.0


def with_mode(config: Config, name: str, **settings: object) -> Config:
    return replace(config, mode=sections.Plugin(name, dict(settings)))
