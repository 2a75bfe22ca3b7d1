"""A worker's own copy of the rows and dense weights it uses, and what the shards knew of them at the last exchange."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import numpy as numpy_tensors

from clickfleet import _core, checkpoint
from clickfleet.batch import Floats, Keys
from clickfleet.embedding import Push
from clickfleet.exchange import Gradient, Kind, Request, Ticket, merged, unique
from clickfleet.rules import rule
from clickfleet.share import Share
from clickfleet.table import NO_SLOT, Table


class Fetch(NamedTuple):
    """Rows that are on their way."""

    keys: Keys
    ticket: Ticket | None


class Replica:
    """Rows are fetched on first use; `ship` sends differences, `receive` takes over what others changed."""

    def __init__(self, job: Share, limit: int | None) -> None:
        self.job, self.link, self.limit = job, job.links[0], limit
        like = job.table.describe() | {"memory_limit": None, "snapshot_reserve": None}
        like["policy"] = {**like["policy"], "admission": "birth"}
        self._like: dict[str, Any] = like
        plain = rule("sgd").to_dict()
        self._like_old: dict[str, Any] = {**like, "rule": plain, "embed_rule": plain}
        self.rows, self.blank, self.old = Table.like(like), Table.like(like), Table.like(self._like_old)
        self.dense = job.learner.flat.values  # the live weights
        self.old_dense = self.dense.clone()
        self._touched: list[Push] = []
        self._steps = job.steps
        self._ticket: Ticket | None = None
        self._sent: tuple[Keys, Floats] | None = None
        """Differences on the way: `old` gets them with the answer, which replaces nearly all of it."""
        self._late: list[Keys] = []
        """Fetched since that shipment: rows dropped before may be in its answer, older than what was fetched."""
        self._lock = threading.RLock()  # of the link and of exchanges; trainers meet here only for rows they lack
        self._begun = False

    def begin(self) -> None:
        """Takes over what the shards have, once."""
        if self._begun:
            return
        self._begun = True
        reply = self.link.ask(Request(values=True)).wait()
        self.job.adopt(reply.values)
        self.old_dense.copy_(self.dense)
        if self.job.saved:
            self._restore(self.job.saved)

    def ask(self, batches: Sequence[Keys]) -> Fetch:
        """Asks the shards for the rows of some batches that were never used before."""
        unknown = [keys[~self.rows.known(keys)] for keys in batches]
        keys = unique(np.concatenate([np.empty(0, np.uint64), *unknown]))[0]
        with self._lock:
            return Fetch(keys, self.link.ask(Request(pull=keys)) if len(keys) else None)

    def put(self, fetch: Fetch) -> None:
        """Takes over what was asked for, before those batches are trained on."""
        keys, ticket = fetch
        if ticket is None:
            return
        with self._lock:
            rows = ticket.wait().rows
            assert rows is not None
            new = ~self.rows.known(keys)  # others were asked for by an earlier batch too, and trained on since
            if len(self.job.trainers) == 1:
                # Rows as they begin need no putting, as long as no other trainer could push them before this one puts them.
                new &= (rows != self.blank.pull(keys)).any(axis=1)
            for table in (self.old, self.rows):
                table.move(keys[new], rows[new], add=False, distinct=True)
            if self.limit is not None and self._ticket is not None:
                self._late.append(keys)

    def pull(self, keys: Keys, out: Floats) -> Floats:
        return self.rows.pull(keys, out=out)

    def push(self, push: Push) -> None:
        """One step of the rule on the copy."""
        self.rows.push(**push._asdict())
        none = np.empty((len(push.keys), 0), np.float32)
        counts = Push(push.keys.copy(), none, push.show.copy(), push.click.copy(), push.slots.copy(), push.n)
        with self._lock:
            self._touched.append(counts)

    def waiting(self) -> int:
        return int(self._ticket is not None)

    def ship(self) -> None:
        """Sends the N-th part of the progress since the last shipment, and all of the counts."""
        self.receive(wait=True)
        if self._touched:
            used, self._touched = merged(self._touched), []
            self._send(used, 1.0 / self.job.workers)
            self.rows.end_day()  # age counts shipments without use
            if self.limit is not None and self.rows.stats()["bytes"] > self.limit:
                self._drop()

    def _send(self, used: Push, share: float, dense: bool = True) -> None:
        delta = self.rows.pull(used.keys)
        delta -= self.old.pull(used.keys)
        delta *= np.float32(share)
        self._sent = used.keys, delta
        batches = self.job.steps - self._steps
        gradient = None
        if dense:
            change = (self.dense - self.old_dense) * share
            self.old_dense += change
            gradient = Gradient(change.numpy(), used.n, 1.0, batches)
            self._steps = self.job.steps
        request = Request(Kind.SHIP, push=used._replace(grads=delta), dense=gradient, values=dense)
        self._ticket = self.link.ask(request)

    def receive(self, wait: bool = True) -> None:
        """Takes over what the shards had after the last shipment, if it is there."""
        if self._ticket is None:
            return
        with self._lock:
            if self._ticket is None or not (wait or self._ticket.ready()):
                return
            reply, self._ticket = self._ticket.wait(), None
            assert reply.keys is not None
            assert reply.rows is not None
            assert reply.deleted is not None
            keys, rows, here = reply.keys, reply.rows, self.rows.known(reply.keys)
            if self._late:
                here &= ~np.isin(keys, np.concatenate(self._late))
                self._late = []
            if not here.all():  # rows dropped meanwhile are fetched again when they are used
                keys, rows = keys[here], rows[here]
            self._take(keys, rows)
            gone = reply.deleted[self.rows.known(reply.deleted)]
            for table in (self.rows, self.old):
                table.move(gone, self.blank.pull(gone), add=False)
            if reply.values is not None:
                values = torch.from_numpy(reply.values.copy())
                self.dense += values - self.old_dense
                self.old_dense.copy_(values)

    def _take(self, keys: Keys, rows: Floats) -> None:
        """The shards have these rows by now."""
        old = self.old.pull(keys)
        if self._sent is not None:
            (sent, delta), self._sent = self._sent, None
            at = unique(np.concatenate([keys, sent]))[1][len(keys) :]
            there = at < len(keys)
            if not there.all():
                self.old.move(sent[~there], delta[~there], add=True, distinct=True)
                at, delta = at[there], delta[there]
            _core.add_rows(at, delta, old)
        self.rows.move(keys, np.subtract(rows, old, out=old), add=True, distinct=True)
        self.old.move(keys, rows, add=False, distinct=True)

    def exchange(self) -> None:
        """Ships and receives, while no trainer works."""
        self.ship()
        self.receive()

    def _keys(self) -> Keys:
        with self.rows.snapshot() as snapshot:
            return np.concatenate([np.empty(0, np.uint64), *(part["key"] for part in snapshot)])

    def _drop(self) -> None:
        """Makes the copy smaller: what was unused for longest is shipped to the rest and forgotten."""
        assert self.limit is not None
        self.receive()
        with self.rows.snapshot() as snapshot:
            parts = list(snapshot)
        ages = np.concatenate([part["unseen_days"] for part in parts])
        keep = max(1, int(len(ages) * 0.8 * self.limit / self.rows.stats()["bytes"]))
        oldest = int(np.partition(ages, keep - 1)[keep - 1])
        keys = np.concatenate([part["key"] for part in parts])
        gone = keys[ages > oldest] if oldest else keys[:0]
        if not len(gone):
            return
        self._send(_uncounted(gone), 1.0, dense=False)
        self.receive()
        stay = keys[ages <= oldest]
        old = Table.like(self._like_old)
        old.move(stay, self.old.pull(stay), add=False, distinct=True)
        rows = Table.like(self._like)
        with self.rows.snapshot() as snapshot:
            checkpoint.keep_rows(snapshot, rows, lambda part: part["unseen_days"] <= oldest)
        self.rows, self.old = rows, old

    def save(self) -> dict[str, bytes]:
        """The copy with its rule's state, as files of a cut; call it right after `exchange`."""
        optimizer = {key: value.numpy() for key, value in self.job.optimizer.state().items()}
        arrays = {"dense": self.dense.numpy(), "old_dense": self.old_dense.numpy(), **optimizer}
        return {
            "rows.arrow": checkpoint.pack(self.rows),
            "old.arrow": checkpoint.pack(self.old),
            "dense.safetensors": numpy_tensors.save({key: np.ascontiguousarray(a) for key, a in arrays.items()}),
        }

    def _restore(self, saved: dict[str, bytes]) -> None:
        """Goes on with a saved copy, brought up to what the shards have by now."""
        checkpoint.unpack(self.rows, saved["rows.arrow"])
        checkpoint.unpack(self.old, saved["old.arrow"])
        arrays = {
            key: torch.from_numpy(array.copy()) for key, array in numpy_tensors.load(saved["dense.safetensors"]).items()
        }
        mine, old = arrays.pop("dense"), arrays.pop("old_dense")
        self.job.optimizer.restore(arrays)
        with torch.no_grad():
            self.dense += mine - old  # the shards' values with what was not shipped yet
        keys = self._keys()
        rows = self.link.ask(Request(pull=keys)).wait().rows
        assert rows is not None
        self._take(keys, rows)


def _uncounted(keys: Keys) -> Push:
    """A push of these keys that counts no shows; its differences are still to be put in."""
    none = np.zeros(len(keys), np.float32)
    return Push(keys, np.empty((len(keys), 0), np.float32), none, none, np.full(len(keys), NO_SLOT, np.uint16), 0.0)
