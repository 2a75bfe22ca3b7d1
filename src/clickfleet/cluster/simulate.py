"""A cluster in one process: N logical workers take turns in an order that a seed decides.

Modes, shards and messages are those of a cluster; only the wire is a function call. A worker keeps its turn until it sends a request,
so a run is deterministic. Its staleness is that of N workers of equal speed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from clickfleet.cluster.shard import Shard, rules_of
from clickfleet.config import plugins
from clickfleet.config.load import Config
from clickfleet.data.dataset import Source
from clickfleet.data.schema import Schema
from clickfleet.store import checkpoint
from clickfleet.store.table import Table
from clickfleet.training import modes
from clickfleet.training.learner import Learner
from clickfleet.training.loop import WorkerJob
from clickfleet.training.metrics import Metrics
from clickfleet.training.sharding import Answer, Link, Piece, Reply, Request, Split, Spread


class Turns:
    """Let one of several threads work at a time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._waiting: dict[int, threading.Event] = {}
        self._alive: set[int] = set()

    def start(self, works: Sequence[Callable[[], None]]) -> None:
        """Run all functions to their ends. Raise the first error."""
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
        """Give the turn to a random thread and wait until it comes back to thread `i`."""
        self._pass()
        self._waiting[i].wait()
        self._waiting[i].clear()


class SimulatedLink:
    """A link that calls the shards directly."""

    def __init__(self, simulation: SimulatedCluster, worker: int) -> None:
        self.simulation, self.worker = simulation, worker
        self._sequence = self._number = 0

    def ask(self, request: Request) -> SimulatedTicket:
        spread = self.simulation.spread
        pull = None if request.pull is None else spread.split(request.pull)
        learns = request.learns
        self._sequence += learns
        self._number += 1
        for i, part in enumerate(spread.divide(request, pull)):
            seen = request.seen[i] if request.seen else 0
            if part.dense is not None:  # a shard may hold it while the worker continues
                part.dense = part.dense._replace(vector=part.dense.vector.copy())
            if part.difference is not None:
                part.difference = part.difference.copy()
            piece = Piece(part, self._sequence if learns else 0, seen, self._number)
            for peer, answer in self.simulation.shards[i].handle(self.worker, piece):
                self.simulation.boxes[peer].setdefault(answer.number, {})[i] = answer
        self.simulation.turns.give(self.worker)
        return SimulatedTicket(self, pull, self._number)


class SimulatedTicket:
    def __init__(self, link: SimulatedLink, pull: Split | None, number: int) -> None:
        self._link, self._pull, self._number = link, pull, number
        self._reply: Reply | None = None

    def ready(self) -> bool:
        simulation = self._link.simulation
        return len(simulation.boxes[self._link.worker].get(self._number, ())) == simulation.spread.shards

    def wait(self) -> Reply:
        simulation, worker = self._link.simulation, self._link.worker
        while self._reply is None:
            if self.ready():
                answers = simulation.boxes[worker].pop(self._number)
                self._reply = simulation.spread.join([answers[i] for i in range(simulation.spread.shards)], self._pull)
            else:
                simulation.turns.give(worker)
        return self._reply


class SimulatedCluster:
    """Shards and logical workers of one configuration."""

    def __init__(
        self, config: Config, schema: Schema, workers: int, shards: int = 1, seed: int = 0, trainers: int = 1
    ) -> None:
        config = modes.with_shared_error(config)
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
            if modes.needs(config).replicates_rows:
                shard.replicate(range(workers))
        # Pending answers, by worker, number of the request and shard.
        self.boxes: list[dict[int, dict[int, Answer]]] = [{} for _ in range(workers)]

    def train(self, sources: Sequence[Source], metrics: Metrics | None = None) -> Learner:
        """Train one pass of each worker over its source. Return the resulting model."""
        metrics = metrics or Metrics()

        def work(i: int) -> Callable[[], None]:
            learner = Learner(self.config, self.schema, Table.like(self.first.table.describe()))
            links: list[Link] = [SimulatedLink(self, i)]
            job = WorkerJob(
                learner, sources[i], metrics, links=links, worker=i, workers=self.workers, trainers=self.trainers
            )
            return lambda: modes.load(self.config)(job)

        self.turns.start([work(i) for i in range(self.workers)])
        for shard in self.shards:
            shard.resume_rounds()
        return self.model()

    def model(self) -> Learner:
        """Return the current state of the shards as one model."""
        table = Table.like(self.first.table.describe())
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
    return replace(config, mode=plugins.Plugin(name, dict(settings)))
