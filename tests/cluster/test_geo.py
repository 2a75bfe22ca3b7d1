"""Geo against its definition: random histories of steps, shipments, answers and deletions, beside a few dictionaries."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from clickfleet.cluster.assignments import files_of
from clickfleet.cluster.shard import Shard
from clickfleet.cluster.simulate import SimulatedCluster, SimulatedLink, with_mode
from clickfleet.config.load import load
from clickfleet.data import arrow_ipc
from clickfleet.data.memory import Feed
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.store import checkpoint
from clickfleet.store.key_set import KeySet
from clickfleet.store.table import Table
from clickfleet.training.embedding import Push
from clickfleet.training.learner import Learner
from clickfleet.training.loop import WorkerJob
from clickfleet.training.metrics import Metrics
from clickfleet.training.modes import geo
from clickfleet.training.modes._replica import Fetch, Replica, replica_spec
from clickfleet.training.sharding import Link

SCHEMA = Schema(dense=(Dense("age"),), slots=(Slot("city"),))
WORKERS, SHARDS, LR, WIDTH = 3, 2, np.float32(0.1), 3
COUNTED = 6.0
ROUNDS = 400 if os.environ.get("CLICKFLEET_SOAK") else 60
Rows = dict[int, Any]


class Definition:
    """Geo as it is written down: x what a worker has, o what it thinks the shards have, s what they have."""

    def __init__(self, table: Table, counted: bool, home: Callable[[int], int]) -> None:
        self._blank, self._counted, self._home = table, counted, home
        self.s: Rows = {}
        self.shows: dict[int, float] = {}
        self.x: list[Rows] = [{} for _ in range(WORKERS)]
        self.o: list[Rows] = [{} for _ in range(WORKERS)]
        self.used: list[dict[int, float]] = [{} for _ in range(WORKERS)]
        self.changed: list[set[int]] = [set() for _ in range(WORKERS)]
        self.coming: list[list[tuple[Rows, Rows, list[Rows]]]] = [[] for _ in range(WORKERS)]
        """The differences of each shipment that was not answered, its answer, and the rows asked for before it."""
        self.asked: list[list[Rows]] = [[] for _ in range(WORKERS)]
        self.gone: list[set[int]] = [set() for _ in range(WORKERS)]  # shards that deleted rows since they told a worker

    def begin(self, key: int) -> Any:
        return self._blank.pull(np.array([key], np.uint64))[0].copy()

    def seen(self, key: int) -> Any:
        """The row as a pull of the shards has it: without factors until it is admitted."""
        row = self.s[key].copy() if key in self.s else self.begin(key)
        if self._counted and self.shows.get(key, 0.0) < COUNTED:
            row[1:] = 0
        return row

    def step(self, worker: int, keys: list[int], grads: Any) -> None:
        self.ask(worker, keys)
        self.put(worker, self.asked[worker])
        for key, grad in zip(keys, grads, strict=True):
            self.x[worker][key] = self.x[worker][key] - LR * grad
            self.used[worker][key] = self.used[worker].get(key, 0.0) + 1.0

    def ask(self, worker: int, keys: list[int]) -> None:
        lacking = [key for key in keys if not any(key in rows for rows in (self.x[worker], *self.asked[worker]))]
        self.asked[worker].append({key: self.seen(key) for key in lacking})

    def put(self, worker: int, asked: list[Rows]) -> None:
        for rows in [rows for rows in self.asked[worker] if any(rows is each for each in asked)]:
            self.x[worker].update(rows)
            self.o[worker].update(rows)
        self.asked[worker] = [rows for rows in self.asked[worker] if not any(rows is each for each in asked)]

    def ship(self, worker: int, unanswered: int) -> None:
        while len(self.coming[worker]) > unanswered:
            self.receive(worker)
        if not self.used[worker]:
            return
        x, o = self.x[worker], self.o[worker]
        had = x.keys() | {key for rows in self.asked[worker] for key in rows}
        shipped: Rows = {}
        for key, shows in self.used[worker].items():
            delta = shipped[key] = x[key] - o[key]
            o[key] = o[key] + delta
            admitted = not self._counted or self.shows.get(key, 0.0) >= COUNTED
            row = self.s.get(key, self.begin(key))
            row = row + delta if admitted else np.concatenate([row[:1] + delta[:1], row[1:]])
            self.s[key], self.shows[key] = row, self.shows.get(key, 0.0) + shows
            for changed in self.changed:
                changed.add(key)
        lost = {key for key in had - self.s.keys() if self._home(key) in self.gone[worker]}
        told = {key for key in self.changed[worker] if key in had} | lost
        answer = {key: self.seen(key) if key in self.s else None for key in told}
        self.coming[worker].append((shipped, answer, list(self.asked[worker])))
        self.used[worker], self.changed[worker], self.gone[worker] = {}, set(), set()

    def receive(self, worker: int) -> None:
        if not self.coming[worker]:
            return
        _, answer, asked = self.coming[worker].pop(0)
        self.put(worker, asked)
        for key, row in answer.items():
            under_way = sum(shipped.get(key, 0.0) for shipped, *_ in self.coming[worker])
            new = (self.begin(key) if row is None else row) + under_way
            self.x[worker][key] = new if row is None else self.x[worker][key] + (new - self.o[worker][key])
            self.o[worker][key] = new

    def deleted(self, known: Any) -> int:
        gone = [key for key in self.s if not known(key)]
        for key in gone:
            del self.s[key], self.shows[key]
            for worker in range(WORKERS):
                self.changed[worker].discard(key)
                self.gone[worker].add(self._home(key))
        return len(gone)


class Real:
    """Replicas and shards as they are, with messages that are answered at once."""

    def __init__(self, *settings: str) -> None:
        table = ["table.rule={name: sgd, lr: 0.1, scale: none}", "table.embed_rule={name: sgd, lr: 0.1, scale: none}"]
        config = with_mode(
            load(None, ["model.name=dnn", "model.hidden=[4]", "table.dim=2", *table, *settings]), "geo", k_steps=1
        )
        self.fleet = SimulatedCluster(config, SCHEMA, WORKERS, SHARDS)
        self.fleet.turns = cast(Any, SimpleNamespace(give=lambda worker: None))
        self.replicas = []
        for worker in range(WORKERS):
            learner = Learner(config, SCHEMA, Table.like(self.fleet.first.table.describe()))
            links = [cast(Link, SimulatedLink(self.fleet, worker))]
            source = cast(Any, Feed([], SCHEMA))
            job = WorkerJob(
                learner,
                source,
                Metrics(),
                links=links,
                worker=worker,
                workers=WORKERS,
            )
            self.replicas.append(Replica(job, None))
        self.asked: list[list[Fetch]] = [[] for _ in range(WORKERS)]

    def step(self, worker: int, keys: list[int], grads: Any) -> None:
        replica, wanted = self.replicas[worker], np.array(keys, np.uint64)
        self.ask(worker, keys)
        while self.asked[worker]:
            replica.put(self.asked[worker].pop(0))
        ones = np.ones(len(keys), np.float32)
        replica.push(Push(wanted, grads, ones, np.zeros_like(ones), np.zeros(len(keys), np.uint16), 1.0))

    def ask(self, worker: int, keys: list[int]) -> None:
        self.asked[worker].append(self.replicas[worker].ask([np.array(keys, np.uint64)]))

    def home(self, key: int) -> int:
        found = self.fleet.spread.split(np.array([key], np.uint64)).spans
        return next(i for i, own in enumerate(found) if own.stop > own.start)

    def shard_of(self, key: int) -> Table:
        return self.fleet.shards[self.home(key)].table

    def known(self, key: int) -> bool:
        return bool(self.shard_of(key).known(np.array([key], np.uint64))[0])

    def equals(self, wanted: Definition) -> None:
        for key in wanted.s:
            one = np.array([key], np.uint64)
            assert np.allclose(self.shard_of(key).pull(one)[0], wanted.seen(key), atol=1e-5), key
        for worker, replica in enumerate(self.replicas):
            keys = np.array(sorted(wanted.x[worker]), np.uint64)
            rows = np.array([wanted.x[worker][int(key)] for key in keys], np.float32).reshape(-1, WIDTH)
            assert np.allclose(replica.pull(keys, np.empty_like(rows)), rows, atol=1e-5), worker


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("admission", ["birth", f"count({COUNTED})"])
@pytest.mark.parametrize("deletes", [False, True])
def test_replicas_and_shards_do_what_geo_says(seed: int, admission: str, deletes: bool) -> None:
    chance = np.random.default_rng(seed)
    policy = ["table.delete_after_unseen_days=1"] if deletes else []
    real = Real(f"table.admission={admission}", *policy)
    blank = Table.like(real.replicas[0].blank.describe())
    wanted, deleted = Definition(blank, admission != "birth", real.home), 0
    for _ in range(ROUNDS):
        worker = int(chance.integers(WORKERS))
        what = chance.choice(["step", "ask", "ship", "receive", "delete"], p=[0.4, 0.1, 0.25, 0.15, 0.1])
        if what == "ask":
            keys = [int(key) for key in chance.choice(40, 6, replace=False)]
            wanted.ask(worker, keys)
            real.ask(worker, keys)
        elif what == "step":
            keys = [int(key) for key in chance.choice(40, 6, replace=False)]
            grads = chance.normal(size=(6, WIDTH)).astype(np.float32)
            wanted.step(worker, keys, grads)
            real.step(worker, keys, grads)
        elif what == "ship":
            unanswered = int(chance.integers(3))
            real.replicas[worker].ship(unanswered)
            wanted.ship(worker, unanswered)
        elif what == "receive":
            real.replicas[worker].receive(wait=True)
            while wanted.coming[worker]:
                wanted.receive(worker)
        elif deletes:
            for shard in real.fleet.shards:
                shard.table.end_day()
                shard.table.shrink()
            deleted += wanted.deleted(real.known)
        real.equals(wanted)
    assert (deleted > 0) == deletes


def test_a_worker_is_told_only_what_it_cannot_know() -> None:
    """Rows that nobody else changed stay at home, those of others come."""
    real = Real()
    real.step(0, [1, 2, 3], np.ones((3, WIDTH), np.float32))
    real.step(1, [3, 4], np.ones((2, WIDTH), np.float32))
    told = {}
    for worker in (0, 1, 0):
        replica = real.replicas[worker]
        real.step(worker, [3], np.ones((1, WIDTH), np.float32))
        replica.ship()
        assert replica.shipments
        reply = replica.shipments[-1].ticket.wait()
        assert reply.keys is not None
        told[worker] = sorted(reply.keys.tolist())
        replica.receive()
    assert told == {0: [3], 1: [3]}


def test_a_shard_in_the_place_of_a_lost_one_is_heard() -> None:
    """It knows nothing of who has what: a worker that ships a row is told what there is of it now."""
    real = Real("cluster.on_failure=continue")
    replica, grads = real.replicas[0], np.ones((3, WIDTH), np.float32)
    for _ in range(2):
        real.step(0, [1, 2, 3], grads)
        replica.exchange()
    for i, (first, last) in enumerate(real.fleet.spread.spans):  # what was learned since the last checkpoint is lost
        lost = real.fleet.shards[i]
        real.fleet.shards[i] = Shard(
            Table.like(lost.table.describe()), torch.zeros(last - first), real.fleet.config.dense, lost.rules
        )
        real.fleet.shards[i].begin(range(WORKERS))
        real.fleet.shards[i].replicate(range(WORKERS))
    real.step(0, [1, 2, 3], grads)
    replica.exchange()
    for key in (1, 2, 3):
        one = np.array([key], np.uint64)
        assert np.array_equal(replica.rows.pull(one), real.shard_of(key).pull(one))


def test_an_answer_does_not_undo_what_was_fetched_after_it() -> None:
    """A row that was dropped is known to the shards as had: it is in the answer, though it was fetched anew meanwhile."""
    real = Real()
    replica, grads = real.replicas[0], np.ones((1, WIDTH), np.float32)
    replica.limit = 1
    for keys in ([1], [2], [2]):
        real.step(0, keys, grads)
        replica.exchange()
    one = np.array([1], np.uint64)
    assert not replica.rows.known(one)[0]
    replica.limit = 1 << 40
    real.step(1, [1], grads)
    real.replicas[1].exchange()
    real.step(0, [2], grads)
    replica.ship()
    real.step(1, [1], grads)
    real.replicas[1].exchange()
    real.step(0, [1], grads)
    replica.receive()
    replica.exchange()
    assert np.array_equal(replica.rows.pull(one), real.shard_of(1).pull(one))


def test_keys_somebody_has() -> None:
    chance = np.random.default_rng(1)
    held, wanted = KeySet(), set[int]()
    for size in (0, 1, 700, 30_000):
        keys = chance.integers(0, 1 << 64, size, dtype=np.uint64)
        keys[: size // 2] &= np.uint64(0xFFF)  # some twice, and 0
        held.add(keys)
        wanted |= set(keys.tolist())
        asked = np.concatenate([keys[::3], chance.integers(0, 5000, 1000, dtype=np.uint64)])
        assert held.has(asked).tolist() == [key in wanted for key in asked.tolist()]
        assert len(held) == len(wanted)
        assert set(held.keys().tolist()) == wanted


def replica_of(
    real: Real, worker: int, workers: int, kept: dict[str, bytes], lasting: dict[str, Any] | None = None
) -> Replica:
    config = real.fleet.config
    learner = Learner(config, SCHEMA, Table.like(real.fleet.first.table.describe()))
    links = [cast(Link, SimulatedLink(real.fleet, worker))]
    job = WorkerJob(learner, cast(Any, Feed([], SCHEMA)), Metrics(), links=links, worker=worker, workers=workers)
    job.saved, job.lasting = kept, {} if lasting is None else lasting
    return Replica(job, None)


def states_of(replica: Replica) -> Any:
    """The states of the rules by key."""
    parts = arrow_ipc.open_bytes(checkpoint.pack(replica.rows))
    return {row["key"]: row["embed_state"] for part in parts for row in part.to_pylist()}


@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize("workers", [[0, 1], [0], [1, 2], [0, 1, 2, 3], [3]])
def test_replicas_begin_at_the_shards_values_when_workers_come_and_go(workers: list[int], lasts: bool) -> None:
    """After an exchange nothing is left that the shards lack. Who stays keeps its states; who joins has those of another.

    Their rows come from files, or with `lasts` from the worker itself and from the files that another one lends.
    """
    adagrad = "{name: adagrad_v2, lr: 0.1, scale: none}"
    real, rng = Real(f"table.rule={adagrad}", f"table.embed_rule={adagrad}"), np.random.default_rng(7)
    every = np.arange(1, 31, dtype=np.uint64)
    for _ in range(12):
        for worker in range(WORKERS):
            keys = rng.choice(every[: 30 - 5 * worker], 6, replace=False)
            real.step(worker, keys.tolist(), rng.normal(size=(6, WIDTH)).astype(np.float32))
            real.replicas[worker].exchange()
    before = [states_of(replica) for replica in real.replicas]
    shards = np.stack([real.shard_of(int(key)).pull(np.array([key], np.uint64))[0] for key in every])
    kept = {worker: replica.save() for worker, replica in enumerate(real.replicas)}
    for shard in real.fleet.shards:
        shard.begin(workers)
        shard.replicate(workers)
    real.fleet.boxes = [{} for _ in range(max(workers) + 1)]
    files = files_of(kept, workers)
    for worker in workers:
        lasting: dict[str, Any] = {}
        if lasts and worker < WORKERS:
            lasting = real.replicas[worker].job.lasting
        elif lasts and files[worker]:
            lasting = geo.unpack(real.fleet.first.table, files[worker])
        after = replica_of(real, worker, len(workers), {} if lasts else files[worker], lasting)
        assert after.rows.classes == Table.like(replica_spec(real.fleet.first.table, len(workers))).classes
        stayed = [each for each in workers if each < WORKERS]
        like = worker if worker < WORKERS else stayed[0] if stayed else None
        assert states_of(after) == ({} if like is None else before[like])
        after.put(after.ask([every]))
        assert np.array_equal(after.rows.pull(every), shards)
        assert after.job.lasting["rows.arrow"] is after.rows


def test_rows_whose_values_were_not_fetched_are_not_held_after_a_drop() -> None:
    """A replica that drops rows keeps states of others, too. Their values are still unknown, so they are fetched on first use."""
    real = Real()
    grads = np.ones((2, WIDTH), np.float32)
    real.step(0, [1, 2], grads)
    real.replicas[0].exchange()
    after = replica_of(real, 0, WORKERS, real.replicas[0].save())
    real.step(1, [1, 2], grads)
    real.replicas[1].exchange()
    one, two = np.array([1], np.uint64), np.array([2], np.uint64)
    after.limit = 1
    for _ in range(3):
        after.put(after.ask([one]))
        after.push(Push(one, grads[:1], grads[:1, 0], grads[:1, 0], np.zeros(1, np.uint16), 1.0))
        after.exchange()
    after.limit = None
    after.put(after.ask([two]))
    assert np.array_equal(after.rows.pull(two), real.shard_of(2).pull(two))


def test_a_row_of_two_replicas_moves_as_on_one_machine() -> None:
    """Each of N replicas of AdaGrad sees an N-th of the gradients. Together they move a row about as far as one table."""
    adagrad = "{name: adagrad_v2, lr: 0.1, initial_g2sum: 0.1, scale: none}"
    real = Real(f"table.rule={adagrad}", f"table.embed_rule={adagrad}")
    alone, key = Table.like(real.fleet.first.table.describe()), np.array([5], np.uint64)
    start, grad = alone.pull(key), np.ones((1, WIDTH), np.float32)
    for _ in range(50):
        for worker in range(WORKERS):
            real.step(worker, [5], grad)
            real.replicas[worker].exchange()
            alone.push(key, grad)
    wanted, found = alone.pull(key) - start, real.shard_of(5).pull(key) - start
    assert np.allclose(found / wanted, 1.0, atol=0.1)
