"""A worker's replica: its copy of the rows it uses, and what it has learned since the last shipment."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.data.batch import Floats, Keys
from clickfleet.store import checkpoint
from clickfleet.store.key_set import KeySet
from clickfleet.store.table import Table
from clickfleet.training.embedding import Push
from clickfleet.training.loop import WorkerJob
from clickfleet.training.modes._own_weights import OwnWeights
from clickfleet.training.sharding import Kind, Request, Ticket, unique


@dataclass(frozen=True, eq=False, slots=True)
class Fetch:
    """A request for rows that are not in the replica yet."""

    keys: Keys
    slots: NDArray[np.uint16] | None
    """Of each key, if slots have widths, rules or admissions of their own."""
    ticket: Ticket | None


@dataclass(frozen=True, eq=False, slots=True)
class Shipment:
    """Progress that the shards have not acknowledged yet."""

    keys: Keys
    difference: Floats
    ticket: Ticket
    fetches: list[Fetch]
    """Rows that were requested before and not stored when it was sent. The answer to the shipment is newer than theirs."""

    def add_to(self, keys: Keys, rows: Floats) -> None:
        """Add the differences to those of the rows that it contains."""
        index = unique(np.concatenate([self.keys, keys]))[1][len(self.keys) :]
        shared = index < len(self.keys)
        rows[shared] += self.difference[index[shared]]


class Replica:
    """Fetch rows on first use, ship differences to the shards and receive what other workers changed.

    All progress of a row goes with the next shipment. So the rows that were not trained since the last one are those of the shards,
    as far as this worker knows, and only of the others the values before training are kept (`_touched`).
    """

    def __init__(self, job: WorkerJob, limit: int | None) -> None:
        self.job, self.link, self.limit = job, job.links[0], limit
        self._spec = replica_spec(job.table, job.workers)
        self.blank, self._held = Table.like(self._spec), KeySet()
        self._set_rows(self._rows_before())
        """The rows of the replica. Those not in `_held` have only the states of their rules: their values are not fetched yet."""
        self._alone = len(job.trainers) == 1
        self.weights = OwnWeights(job)
        self._touched = _core.Touched(1 + job.table.factors)
        self.steps = 0
        """Steps since the last shipment."""
        self._shipped_batches = job.trained
        self.shipments: deque[Shipment] = deque()
        """Those whose answers were not applied yet, in order."""
        self._asked: list[Fetch] = []
        """Rows that were requested and are not stored yet."""
        self._late: list[Keys] = []
        """Keys fetched since that shipment. Its answer may hold older values of them, if they were dropped before."""
        self._lock = threading.RLock()  # guards the link, exchanges and what was touched
        self._reading = threading.Lock()  # a table has one snapshot at a time

    def _rows_before(self) -> Table:
        """Return the rows that this worker had before a change of the workers or shards, or saved rows, or none."""
        rows: Table | None = self.job.lasting.get(ROWS)
        if rows is None:
            return saved_rows(self._spec, self.job.saved)
        rows.set_rules(self._spec)
        return rows

    def _set_rows(self, rows: Table) -> None:
        self.rows = self.job.lasting[ROWS] = rows

    def ask(self, batches: Sequence[Keys], slots: Sequence[NDArray[np.uint16]] = ()) -> Fetch:
        """Request the rows of some batches that the replica lacks. `slots` are those of the keys, if rows differ by slot."""
        with (
            self._lock
        ):  # one trainer stores rows in the order of its requests: what it has requested is here when it trains
            lacking = [self._held.insert(keys) if self._alone else ~self._held.has(keys) for keys in batches]
        unknown = [keys[wanted] for keys, wanted in zip(batches, lacking, strict=True)]
        keys, where = unique(np.concatenate([np.empty(0, np.uint64), *unknown]))
        of_keys = None
        if slots:
            of_keys = np.empty(len(keys), np.uint16)
            of_keys[where] = np.concatenate([each[wanted] for each, wanted in zip(slots, lacking, strict=True)])
        with self._lock:
            fetch = Fetch(keys, of_keys, self.link.ask(Request(pull=keys)) if len(keys) else None)
            self._asked.append(fetch)
            return fetch

    def put(self, fetch: Fetch) -> None:
        """Store requested rows, unless they are. Call it before training on their batches."""
        with self._lock:
            if fetch not in self._asked:
                return
            self._asked.remove(fetch)
            if fetch.ticket is None:
                return
            keys, slots, rows = fetch.keys, fetch.slots, fetch.ticket.wait().rows
            assert rows is not None
            if self.limit is not None and self.shipments:
                self._late.append(keys)
            if not self._alone and not (new := self._held.insert(keys)).all():
                # Another trainer fetched the others, and they may be trained since.
                keys, rows, slots = keys[new], rows[new], None if slots is None else slots[new]
            self.rows.move(keys, rows, add=False, distinct=True, slots=slots)

    def pull(self, keys: Keys, out: Floats) -> Floats:
        return self.rows.pull(keys, out=out)

    def push(self, push: Push, rows: Floats | None = None) -> None:
        """Apply one step of the rule to the replica. `rows` are the values before it, if no other trainer may have changed them."""
        with self._lock:
            before = self.rows.pull(push.keys) if rows is None else rows
            self._touched.add(push.keys, before, push.show, push.click, push.slots)
            self.rows.push(**push._asdict())
            self.steps += 1

    def waiting(self) -> int:
        return len(self.shipments)

    def ship(self, unanswered: int = 0) -> None:
        """Send the progress since the last shipment, and all counts. Before that, wait until at most `unanswered` are under way."""
        while len(self.shipments) > unanswered:
            self._receive()
        self.steps = 0
        if not len(self._touched):
            return
        push = self._progress()
        request = Request(Kind.SHIP, push=push, batches=self.job.trained - self._shipped_batches)
        self._shipped_batches = self.job.trained
        self.weights.put(request)
        self.shipments.append(Shipment(push.keys, push.grads, self.link.ask(request), list(self._asked)))
        if self.limit is not None:
            self.rows.end_day()  # an age counts shipments without use
            if self.rows.stats()["bytes"] > self.limit:
                self._drop()

    def _progress(self) -> Push:
        """Return the differences and counts of the touched rows. From now on they count as not touched."""
        size = len(self._touched)
        keys, show, click = np.empty(size, np.uint64), np.empty(size, np.float32), np.empty(size, np.float32)
        slots = np.empty(size, np.uint16)
        self._touched.copy_keys(keys)
        delta = self.rows.pull(keys)
        self._touched.take(delta, show, click, slots)
        return Push(keys, delta, show, click, slots, 0.0)

    def receive(self, wait: bool = True) -> None:
        """Apply the answers to all shipments. Without `wait`, only those that have arrived."""
        while self.shipments:
            with self._lock:
                if not self.shipments or not (wait or self.shipments[0].ticket.ready()):
                    return
                self._receive()

    def _receive(self) -> None:
        """Apply the answer to the first shipment that has none."""
        with self._lock:
            shipment = self.shipments.popleft()
            reply = shipment.ticket.wait()
            for fetch in shipment.fetches:
                self.put(fetch)
            assert reply.keys is not None
            assert reply.rows is not None
            assert reply.deleted is not None
            keys, rows, current = reply.keys, reply.rows, self._held.has(reply.keys)
            if self._late:
                current &= ~np.isin(keys, np.concatenate(self._late))
                self._late = []
            if not current.all():  # dropped rows are fetched again on their next use
                keys, rows = keys[current], rows[current]
            self._take(keys, rows)
            deleted = reply.deleted[self._held.has(reply.deleted)]
            if len(deleted):
                values = self._with_shipments(deleted, self.blank.pull(deleted))
                self._touched.rebase(deleted, values.copy(), np.empty(len(deleted), np.uint8))
                self.rows.move(deleted, values, add=False)
            self.weights.take(reply)

    def _take(self, keys: Keys, rows: Floats) -> None:
        """Move the replica to the values that the shards have now. Keep what was learned since."""
        if not len(keys):
            return
        rows = self._with_shipments(keys, rows)
        touched = np.empty(len(keys), np.uint8)
        self._touched.rebase(keys, rows, touched)
        learned = touched.view(np.bool_)
        if learned.any():
            self.rows.move(keys[learned], rows[learned], add=True, distinct=True)
            keys, rows = keys[~learned], rows[~learned]
        self.rows.move(keys, rows, add=False, distinct=True)

    def _with_shipments(self, keys: Keys, rows: Floats) -> Floats:
        """Return rows of the shards together with the progress that is on its way to them."""
        for shipment in self.shipments:
            shipment.add_to(keys, rows)
        return rows

    def exchange(self) -> None:
        """Ship and receive. Call it while no trainer works."""
        self.ship()
        self.receive()

    def _drop(self) -> None:
        """Shrink the replica: drop the least recently used rows. Call it right after a shipment, when the shards have all progress."""
        assert self.limit is not None
        self.receive()
        with self._reading, self.rows.snapshot() as snapshot:
            ages = np.concatenate([part["unseen_days"] for part in snapshot])
        keep = max(1, int(len(ages) * 0.8 * self.limit / self.rows.stats()["bytes"]))
        oldest = int(np.partition(ages, keep - 1)[keep - 1])
        if not oldest or not (ages > oldest).any():
            return
        rows = Table.like(self._spec)
        with self._reading, self.rows.snapshot() as snapshot:
            checkpoint.keep_rows(snapshot, rows, lambda part: part["unseen_days"] <= oldest)
        held, left = KeySet(), _keys_of(rows)
        held.add(left[self._held.has(left)])
        self._set_rows(rows)
        self._held = held

    def save(self) -> dict[str, bytes]:
        """Return the rows with the states of their rules as files. Possible at any time: whoever loads them fetches the values."""
        with self._reading:
            return {ROWS: checkpoint.pack(self.rows)}


ROWS = "rows.arrow"
"""The name of the rows of a replica, as a file and as lasting state."""


def replica_spec(table: Table, workers: int) -> dict[str, Any]:
    """Return the description of the rows of one replica of N."""
    spec = checkpoint.portable(table.describe()) | {"memory_limit": None, "snapshot_reserve": None}
    spec["policy"] = {**spec["policy"], "admission": "birth"}
    spec["slots"] = {slot: {**own, "admission": "birth"} for slot, own in spec.get("slots", {}).items()}
    for part in (spec, *spec["slots"].values()):
        part |= {name: part_of_all(part[name], workers) for name in ("rule", "embed_rule") if name in part}
    return spec


def saved_rows(spec: Mapping[str, Any], files: Mapping[str, bytes]) -> Table:
    """Return the rows in the files of a replica, for the states of their rules. Without files, return none."""
    rows = Table.like(spec)
    if files:
        checkpoint.unpack(rows, files[ROWS])
    return rows


def part_of_all(rule: Mapping[str, Any], workers: int) -> dict[str, Any]:
    """Return the rule of one replica of N. AdaGrad's steps shrink with the squares of all gradients, of which it sees an N-th.

    It counts each square N times: lr/√(c + N·g²) is (lr/√N)/√(c/N + g²). Without this, the sum of N replicas overshoots.

    >>> part_of_all({"name": "adagrad_v2", "lr": 0.2, "initial_g2sum": 0.4}, workers=4)
    {'name': 'adagrad_v2', 'lr': 0.1, 'initial_g2sum': 0.1}
    """
    part = dict(rule)
    if part["name"] in ("adagrad", "std_adagrad", "adagrad_v2"):
        part["initial_g2sum"] /= workers
    if part["name"] == "adagrad_v2":  # the others multiply by √c, so that a new row makes steps of lr
        part["lr"] /= workers**0.5
    return part


def _keys_of(table: Table) -> Keys:
    with table.snapshot() as snapshot:
        return np.concatenate([np.empty(0, np.uint64), *(part["key"] for part in snapshot)])
