"""The shards as a worker sees them: requests to all of them at once, and the verbs of Table."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zmq

from clickfleet.batch import Floats, Keys
from clickfleet.cluster import sockets
from clickfleet.cluster.wire import (
    STALE,
    BadMessageError,
    Frames,
    Identity,
    check_size,
    limit,
    pack_request,
    unpack_answer,
    widen,
)
from clickfleet.errors import ClusterError
from clickfleet.exchange import Answer, Piece, Reply, Request, Split, Spread

RESEND_S = 10.0
"""A request without an answer is sent again after so long; the shard learns it once."""
WAIT_MS = 200
"""How long a worker waits for a message before it looks whether it is still wanted."""


class AbandonedError(Exception):
    """The run goes on in another epoch: what this worker does is no longer wanted."""


class Remote:
    """A link over ZeroMQ; one thread uses it at a time."""

    def __init__(
        self,
        endpoints: Sequence[Sequence[str]],
        spread: Spread,
        who: Identity,
        peer: int,
        *,
        timeout_s: float = 120.0,
        abandoned: Callable[[], bool] = lambda: False,
        context: zmq.Context[Any] | None = None,
        learned: int = 0,
    ) -> None:
        self.spread, self.who, self.peer = spread, who, peer
        self.timeout_s, self._abandoned = timeout_s, abandoned
        self._own = context is None
        self._context = context or zmq.Context(1)
        self._names = [addresses[0] for addresses in endpoints]
        self._sockets = [self._connect(addresses) for addresses in endpoints]
        self._number = 0
        self._sequence = learned
        """Batches of this peer that were sent; in the place of a lost one, those of it that the shards know."""
        self._answers: list[dict[int, Answer]] = [{} for _ in endpoints]
        self._sent: list[dict[int, Frames]] = [{} for _ in endpoints]
        self._moves: dict[int, list[str]] = {}
        self._splits: deque[Split] = deque(maxlen=3)
        self.bytes_in = self.bytes_out = self.dropped = 0
        self.waiting = False
        """Whether the worker's thread waits for an answer."""
        self.latencies: deque[tuple[bool, float]] = deque(maxlen=4096)
        """Whether something was pushed, and seconds until the answer was there."""

    def _connect(self, addresses: Sequence[str]) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        limit(socket)
        socket.rcvtimeo = WAIT_MS
        address = nearest(addresses)
        widen(socket, address)
        socket.connect(address)
        return socket

    def ask(self, request: Request) -> RemoteTicket:
        pull = None if request.pull is None else self.spread.split(request.pull)
        push = None if request.push is None else self._known(request.push.keys)
        learns = request.push is not None or request.dense is not None
        self._sequence += max(1, request.dense.batches if request.dense is not None else 0) * learns
        self._move()
        self._number += 1
        for i, part in enumerate(self.spread.cut(request, pull, push)):
            seen = request.seen[i] if request.seen else 0
            piece = Piece(part, self._sequence if learns else 0, seen, self._number)
            frames = pack_request(piece, self.who, self.peer)
            check_size(frames, 0 if part.pull is None else 4 * self.spread.width * len(part.pull))
            self._send(i, self._number, frames)
        if pull is not None:
            self._splits.append(pull)
        return RemoteTicket(self, self._number, pull, learns)

    def _known(self, keys: Keys) -> Split | None:
        """Gradients go back for the very array of keys whose rows were read: it has been split already."""
        return next((split for split in self._splits if split.given is keys), None)

    def _send(self, shard: int, number: int, frames: Frames) -> None:
        self._sent[shard][number] = frames
        self.bytes_out += sum(map(len, frames))
        self._sockets[shard].send_multipart(frames, copy=False)

    def move(self, shard: int, addresses: Sequence[str]) -> None:
        """That shard is elsewhere from now on; what it has not answered is sent there. May be called from any thread."""
        self._moves[shard] = list(addresses)

    def _move(self) -> None:
        while self._moves:
            shard, addresses = self._moves.popitem()
            self._sockets[shard].close(linger=0)
            self._names[shard], self._sockets[shard] = addresses[0], self._connect(addresses)
            for number, frames in list(self._sent[shard].items()):
                self._send(shard, number, frames)

    def there(self, number: int) -> bool:
        """Whether all shards have answered a request."""
        for i in range(len(self._sockets)):
            while number not in self._answers[i] and self._receive(i, zmq.NOBLOCK):
                pass
        return all(number in answers for answers in self._answers)

    def collect(self, number: int) -> list[Answer]:
        """The answers of all shards, once they are there; asks again after a while, and gives up after a longer one."""
        self.waiting = True
        try:
            return self._collect(number)
        finally:
            self.waiting = False

    def _collect(self, number: int) -> list[Answer]:
        begin = again = time.monotonic()
        for i in range(len(self._sockets)):
            while number not in self._answers[i]:
                self._move()
                if self._receive(i):
                    continue
                now = time.monotonic()
                if self._abandoned():
                    raise AbandonedError
                if now - begin > self.timeout_s:
                    raise ClusterError(
                        f"shard {i} ({self._names[i]}) has not answered for {self.timeout_s:.0f} s",
                        "is its process alive, and can this host reach it?",
                    )
                if now - again > RESEND_S:
                    again = now
                    for j in range(i, len(self._sockets)):
                        if number in self._sent[j]:
                            self._send(j, number, self._sent[j][number])
        return [answers.pop(number) for answers in self._answers]

    def _receive(self, shard: int, flags: int = 0) -> bool:
        """Takes the next answer of a shard; False if there was none for a while."""
        try:
            frames = [frame.buffer for frame in self._sockets[shard].recv_multipart(flags, copy=False)]
        except zmq.Again:
            return False
        self.bytes_in += sum(map(len, frames))
        try:
            answer = unpack_answer(frames, self.spread.width)
        except BadMessageError:  # what was asked is asked again after a while
            self.dropped += 1
            return True
        if answer.error == STALE:
            raise AbandonedError
        if answer.error:
            raise ClusterError(f"shard {shard} ({self._names[shard]}) refuses worker {self.peer}: {answer.error}")
        if self._sent[shard].pop(answer.number, None) is not None:  # else it was asked twice and answered twice
            self._answers[shard][answer.number] = answer
        return True

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        if self._own:
            self._context.term()


class RemoteTicket:
    def __init__(self, link: Remote, number: int, pull: Split | None, learns: bool) -> None:
        self._link, self._number, self._pull, self._learns = link, number, pull, learns
        self._begin = time.perf_counter()
        self._reply: Reply | None = None

    def ready(self) -> bool:
        return self._link.there(self._number)

    def wait(self) -> Reply:
        """The reply; whoever waits for it again gets the same."""
        if self._reply is None:
            answers = self._link.collect(self._number)
            self._link.latencies.append((self._learns, time.perf_counter() - self._begin))
            self._reply = self._link.spread.join(answers, self._pull)
        return self._reply


class RemoteTable:
    """The reading half of Table over a link: what scoring needs."""

    def __init__(self, link: Remote, factors: int) -> None:
        self._link, self.factors = link, factors

    def pull(self, keys: Keys, *, training: bool = True, out: Floats | None = None) -> Floats:
        rows = self._link.ask(Request(pull=keys, training=training)).wait().rows
        assert rows is not None
        if out is not None:
            np.copyto(out, rows)
        return rows


def nearest(addresses: Sequence[str]) -> str:
    """A socket file of this user and host if there is one, else the address on the network."""
    for address in addresses:
        if address.startswith("ipc://") and sockets.is_ours(address.removeprefix("ipc://")):
            return address
    return addresses[0]
