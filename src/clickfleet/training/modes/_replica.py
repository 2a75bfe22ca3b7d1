"""A worker's replica: its copy of the rows it uses, and their values on the shards at the last exchange."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.data.batch import Floats, Keys
from clickfleet.store import checkpoint
from clickfleet.store.rules import rule
from clickfleet.store.table import Table
from clickfleet.training.embedding import Push
from clickfleet.training.loop import WorkerJob
from clickfleet.training.modes._own_weights import OwnWeights
from clickfleet.training.sharding import Kind, Request, Ticket, merged, unique


class Fetch(NamedTuple):
    """A request for rows that are not in the replica yet."""

    keys: Keys
    slots: NDArray[np.uint16] | None
    """Of each key, if slots have widths, rules or admissions of their own."""
    ticket: Ticket | None


class Replica:
    """Fetch rows on first use, ship differences to the shards and receive what other workers changed."""

    def __init__(self, job: WorkerJob, limit: int | None) -> None:
        self.job, self.link, self.limit = job, job.links[0], limit
        spec = checkpoint.portable(job.table.describe()) | {"memory_limit": None, "snapshot_reserve": None}
        spec["policy"] = {**spec["policy"], "admission": "birth"}
        spec["slots"] = {slot: {**own, "admission": "birth"} for slot, own in spec.get("slots", {}).items()}
        plain = rule("sgd").to_dict()
        # Old values need no slots: they are as wide as the widest rows, and nothing reads beyond a row's own width.
        old = {"rule": plain, "embed_rule": plain, "factors": job.table.factors, "slots": {}}
        self._old_spec = {**spec, **old}
        for part in (spec, *spec["slots"].values()):
            part |= {name: part_of_all(part[name], job.workers) for name in ("rule", "embed_rule") if name in part}
        self._spec = spec
        self.rows, self.blank, self.old = Table.like(spec), Table.like(spec), Table.like(self._old_spec)
        self.weights = OwnWeights(job)
        self._touched: list[Push] = []
        self.shipped_at, self._shipped_batches = job.steps, job.trained
        self.ticket: Ticket | None = None
        self._sent: tuple[Keys, Floats] | None = None
        """Differences in flight. They are added to `old` with the answer, which replaces nearly all of it."""
        self._late: list[Keys] = []
        """Keys fetched since that shipment. Its answer may hold older values of them, if they were dropped before."""
        self._lock = threading.RLock()  # guards the link and exchanges; trainers take it only for missing rows
        self._loaded = False

    def begin(self) -> None:
        """Load a saved replica if there is one. Later calls do nothing."""
        if self._loaded:
            return
        self._loaded = True
        self._restore()

    def ask(self, batches: Sequence[Keys], slots: Sequence[NDArray[np.uint16]] = ()) -> Fetch:
        """Request the rows of some batches that the replica lacks. `slots` are those of the keys, if rows differ by slot."""
        lacking = [~self.rows.known(keys) for keys in batches]
        unknown = [keys[wanted] for keys, wanted in zip(batches, lacking, strict=True)]
        keys, where = unique(np.concatenate([np.empty(0, np.uint64), *unknown]))
        of_keys = None
        if slots:
            of_keys = np.empty(len(keys), np.uint16)
            of_keys[where] = np.concatenate([each[wanted] for each, wanted in zip(slots, lacking, strict=True)])
        with self._lock:
            return Fetch(keys, of_keys, self.link.ask(Request(pull=keys)) if len(keys) else None)

    def put(self, fetch: Fetch) -> None:
        """Store requested rows. Call it before training on their batches."""
        keys, slots, ticket = fetch
        if ticket is None:
            return
        with self._lock:
            rows = ticket.wait().rows
            assert rows is not None
            new = ~self.rows.known(keys)  # an earlier batch fetched the others, and they were trained since
            if len(self.job.trainers) == 1:
                # A row with its initial value need not be stored, unless another trainer could push it first.
                new &= (rows != self.blank.pull(keys)).any(axis=1)
            slots = None if slots is None else slots[new]
            for table in (self.old, self.rows):
                table.move(keys[new], rows[new], add=False, distinct=True, slots=slots)
            if self.limit is not None and self.ticket is not None:
                self._late.append(keys)

    def pull(self, keys: Keys, out: Floats) -> Floats:
        return self.rows.pull(keys, out=out)

    def push(self, push: Push) -> None:
        """Apply one step of the rule to the replica."""
        self.rows.push(**push._asdict())
        none = np.empty((len(push.keys), 0), np.float32)
        counts = Push(push.keys.copy(), none, push.show.copy(), push.click.copy(), push.slots.copy(), push.n)
        with self._lock:
            self._touched.append(counts)

    def waiting(self) -> int:
        return int(self.ticket is not None)

    def ship(self) -> None:
        """Send the progress since the last shipment, and all counts."""
        self.receive(wait=True)
        self.shipped_at = self.job.steps
        if self._touched:
            used, self._touched = merged(self._touched), []
            self._send(used)
            self.rows.end_day()  # an age counts shipments without use
            if self.limit is not None and self.rows.stats()["bytes"] > self.limit:
                self._drop()

    def _send(self, used: Push, dense: bool = True) -> None:
        delta = self.rows.pull(used.keys)
        delta -= self.old.pull(used.keys)
        self._sent = used.keys, delta
        request = Request(Kind.SHIP, push=used._replace(grads=delta), batches=0)
        if dense:
            self.weights.put(request)
            request.batches, self._shipped_batches = self.job.trained - self._shipped_batches, self.job.trained
        self.ticket = self.link.ask(request)

    def receive(self, wait: bool = True) -> None:
        """Apply the answer to the last shipment. Without `wait`, only if it has arrived."""
        if self.ticket is None:
            return
        with self._lock:
            if self.ticket is None or not (wait or self.ticket.ready()):
                return
            reply, self.ticket = self.ticket.wait(), None
            assert reply.keys is not None
            assert reply.rows is not None
            assert reply.deleted is not None
            keys, rows, current = reply.keys, reply.rows, self.rows.known(reply.keys)
            if self._late:
                current &= ~np.isin(keys, np.concatenate(self._late))
                self._late = []
            if not current.all():  # dropped rows are fetched again on their next use
                keys, rows = keys[current], rows[current]
            self._take(keys, rows)
            deleted = reply.deleted[self.rows.known(reply.deleted)]
            for table in (self.rows, self.old):
                table.move(deleted, self.blank.pull(deleted), add=False)
            self.weights.take(reply)

    def _take(self, keys: Keys, rows: Floats) -> None:
        """Move the replica to the values that the shards have now."""
        old = self.old.pull(keys)
        if self._sent is not None:
            (sent, delta), self._sent = self._sent, None
            at = unique(np.concatenate([keys, sent]))[1][len(keys) :]
            answered = at < len(keys)
            if not answered.all():
                self.old.move(sent[~answered], delta[~answered], add=True, distinct=True)
                at, delta = at[answered], delta[answered]
            _core.add_rows(at, delta, old)
        self.rows.move(keys, np.subtract(rows, old, out=old), add=True, distinct=True)
        self.old.move(keys, rows, add=False, distinct=True)

    def exchange(self) -> None:
        """Ship and receive. Call it while no trainer works."""
        self.ship()
        self.receive()

    def _keys(self) -> Keys:
        return _keys_of(self.rows)

    def _drop(self) -> None:
        """Shrink the replica: ship the least recently used rows, then drop them."""
        assert self.limit is not None
        self.receive()
        with self.rows.snapshot() as snapshot:
            parts = list(snapshot)
        ages = np.concatenate([part["unseen_days"] for part in parts])
        keep = max(1, int(len(ages) * 0.8 * self.limit / self.rows.stats()["bytes"]))
        oldest = int(np.partition(ages, keep - 1)[keep - 1])
        keys = np.concatenate([part["key"] for part in parts])
        if not oldest or not (ages > oldest).any():
            return
        slots = np.concatenate([part["slot"] for part in parts])
        self._send(_uncounted(keys[ages > oldest], slots[ages > oldest]), dense=False)
        self.receive()
        stay = keys[ages <= oldest]
        old = Table.like(self._old_spec)
        old.move(stay, self.old.pull(stay), add=False, distinct=True)
        rows = Table.like(self._spec)
        with self.rows.snapshot() as snapshot:
            checkpoint.keep_rows(snapshot, rows, lambda part: part["unseen_days"] <= oldest)
        self.rows, self.old = rows, old

    def save(self) -> dict[str, bytes]:
        """Return the replica with the state of its rule as files of a checkpoint. Call it right after `exchange`."""
        return {"rows.arrow": checkpoint.pack(self.rows)}

    def _restore(self) -> None:
        """Load a saved replica for the states of its rules. The weights are those that the shards have now."""
        if not self.job.saved:
            return
        checkpoint.unpack(self.rows, self.job.saved["rows.arrow"])
        keys = self._keys()
        if len(keys):
            rows = self.link.ask(Request(pull=keys)).wait().rows
            assert rows is not None
            for table in (self.rows, self.old):
                table.move(keys, rows, add=False, distinct=True)


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


def _uncounted(keys: Keys, slots: NDArray[np.uint16]) -> Push:
    """Return a push of these keys without counts; the caller fills in the differences."""
    none = np.zeros(len(keys), np.float32)
    return Push(keys, np.empty((len(keys), 0), np.float32), none, none, slots, 0.0)
