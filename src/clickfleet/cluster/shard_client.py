"""The client of the shards in a worker: requests to all shards at once, and a table for scoring."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from clickfleet.cluster import shard_server
from clickfleet.cluster.authentication import BadMessageError, ClientGuard, Frames, ProcessKey, ShardAddress
from clickfleet.cluster.wire import STALE, PeerIdentity, check_size, limit, pack_request, unpack_answer, widen
from clickfleet.data.batch import Floats, Keys
from clickfleet.errors import ClusterError, MissingError
from clickfleet.training.sharding import Answer, Piece, Reply, Request, Split, Spread

try:
    import zmq
except ModuleNotFoundError:
    raise MissingError("pyzmq", "cluster") from None

RESEND_S = 10.0
"""Time after which an unanswered request is sent again. The shard applies it only once."""
WAIT_MS = 200
"""How long a worker waits for a message between two checks whether it was abandoned."""


class AbandonedError(Exception):
    """The run continues in a newer generation and does not need this work any more."""


class ShardConnection(NamedTuple):
    """The connection of a link to one shard."""

    name: str
    """The network address of the shard, also if the connection is local."""
    socket: zmq.Socket[bytes]
    guard: ClientGuard


class ShardClient:
    """A link over ZeroMQ, for one thread at a time."""

    def __init__(
        self,
        shards: Sequence[ShardAddress],
        spread: Spread,
        who: PeerIdentity,
        peer: int,
        key: ProcessKey,
        *,
        timeout_s: float = 120.0,
        abandoned: Callable[[], bool] = lambda: False,
        context: zmq.Context[Any] | None = None,
        learned: int = 0,
    ) -> None:
        self.spread, self.who, self.peer, self._key = spread, who, peer, key
        self.timeout_s, self._abandoned = timeout_s, abandoned
        self._owns_context = context is None
        self._context = context or zmq.Context(1)
        self._connections = [self._connect(shard) for shard in shards]
        self._number = 0
        self._sequence = learned
        """Messages that the shards learn from, including those of a failed worker that this one replaces."""
        self._answers: list[dict[int, Answer]] = [{} for _ in shards]
        self._sent: list[dict[int, Frames]] = [{} for _ in shards]
        self._moves: dict[int, ShardAddress] = {}
        self._splits: deque[Split] = deque(maxlen=3)
        self.bytes_in = self.bytes_out = self.dropped = 0
        self.waiting = False
        """Whether the thread of the worker waits for an answer."""
        self.latencies: deque[tuple[bool, float]] = deque(maxlen=4096)
        """For each request: whether it was a push, and the seconds until its answer."""

    def _connect(self, shard: ShardAddress) -> ShardConnection:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        limit(socket)
        socket.rcvtimeo = WAIT_MS
        address = nearest(shard.addresses)
        widen(socket, address)
        guard = ClientGuard(self._key, shard, address)
        guard.protect(socket)
        socket.connect(address)
        return ShardConnection(shard.addresses[0], socket, guard)

    def ask(self, request: Request) -> ShardTicket:
        pull = None if request.pull is None else self.spread.split(request.pull)
        push = None if request.push is None else self._split_of(request.push.keys)
        learns = request.learns
        self._sequence += learns
        self._move()
        self._number += 1
        for i, part in enumerate(self.spread.divide(request, pull, push)):
            seen = request.seen[i] if request.seen else 0
            piece = Piece(part, self._sequence if learns else 0, seen, self._number)
            frames = pack_request(piece, self.who, self.peer)
            check_size(frames, 0 if part.pull is None else 4 * self.spread.width * len(part.pull))
            self._send(i, self._number, frames)
        if pull is not None:
            self._splits.append(pull)
        return ShardTicket(self, self._number, pull, learns)

    def _split_of(self, keys: Keys) -> Split | None:
        """Return the split of this array of keys if a recent pull has computed it."""
        return next((split for split in self._splits if split.given is keys), None)

    def _send(self, shard: int, number: int, frames: Frames) -> None:
        self._sent[shard][number] = frames
        connection = self._connections[shard]
        sealed = connection.guard.seal(frames)
        self.bytes_out += sum(map(len, sealed))
        connection.socket.send_multipart(sealed, copy=False)

    def move(self, shard: int, address: ShardAddress) -> None:
        """Use a new address for a shard and resend unanswered requests there. Thread-safe."""
        self._moves[shard] = address

    def _move(self) -> None:
        while self._moves:
            shard, address = self._moves.popitem()
            self._connections[shard].socket.close(linger=0)
            self._connections[shard] = self._connect(address)
            for number, frames in list(self._sent[shard].items()):
                self._send(shard, number, frames)

    def answered(self, number: int) -> bool:
        """Return whether all shards have answered a request."""
        for i in range(len(self._connections)):
            while number not in self._answers[i] and self._receive(i, zmq.NOBLOCK):
                pass
        return all(number in answers for answers in self._answers)

    def collect(self, number: int) -> list[Answer]:
        """Wait for the answers of all shards. Resend after RESEND_S, and fail after `timeout_s`."""
        self.waiting = True
        try:
            return self._collect(number)
        finally:
            self.waiting = False

    def _collect(self, number: int) -> list[Answer]:
        begin = sent_at = time.monotonic()
        for i in range(len(self._connections)):
            while number not in self._answers[i]:
                self._move()
                if self._receive(i):
                    continue
                now = time.monotonic()
                if self._abandoned():
                    raise AbandonedError
                if now - begin > self.timeout_s:
                    raise ClusterError(
                        f"shard {i} ({self._connections[i].name}) has not answered for {self.timeout_s:.0f} s",
                        "check that its process runs and that this host can reach it",
                    )
                if now - sent_at > RESEND_S:
                    sent_at = now
                    for j in range(i, len(self._connections)):
                        for earlier in sorted(each for each in self._sent[j] if each <= number):
                            self._send(j, earlier, self._sent[j][earlier])
        return [answers.pop(number) for answers in self._answers]

    def _receive(self, shard: int, flags: int = 0) -> bool:
        """Receive the next answer of a shard. Return False if none arrived in time."""
        connection = self._connections[shard]
        try:
            frames = [frame.buffer for frame in connection.socket.recv_multipart(flags, copy=False)]
        except zmq.Again:
            return False
        self.bytes_in += sum(map(len, frames))
        try:
            answer = unpack_answer(connection.guard.open(frames), self.spread.width)
        except BadMessageError:  # the request is sent again later
            self.dropped += 1
            return True
        if answer.error == STALE:
            raise AbandonedError
        if answer.error:
            raise ClusterError(f"shard {shard} ({connection.name}) rejects peer {self.peer}: {answer.error}")
        if self._sent[shard].pop(answer.number, None) is not None:  # otherwise it was sent and answered twice
            self._answers[shard][answer.number] = answer
        return True

    def close(self) -> None:
        for connection in self._connections:
            connection.socket.close(linger=0)
        if self._owns_context:
            self._context.term()


class ShardTicket:
    def __init__(self, link: ShardClient, number: int, pull: Split | None, learns: bool) -> None:
        self._link, self._number, self._pull, self._learns = link, number, pull, learns
        self._begin = time.perf_counter()
        self._reply: Reply | None = None

    def ready(self) -> bool:
        return self._link.answered(self._number)

    def wait(self) -> Reply:
        """Wait for the reply and return it. Later calls return the same one."""
        if self._reply is None:
            answers = self._link.collect(self._number)
            self._link.latencies.append((self._learns, time.perf_counter() - self._begin))
            self._reply = self._link.spread.join(answers, self._pull)
        return self._reply


class ShardTable:
    """A read-only table over a link, for scoring."""

    disk: str | None = None  # shards read rows from disk when they are asked
    classes: tuple[()] = ()  # shards know the widths of their rows

    def __init__(self, link: ShardClient, factors: int) -> None:
        self._link, self.factors = link, factors

    def pull(self, keys: Keys, *, training: bool = True, out: Floats | None = None, slots: None = None) -> Floats:
        rows = self._link.ask(Request(pull=keys, training=training)).wait().rows
        assert rows is not None
        if out is not None:
            np.copyto(out, rows)
        return rows


def nearest(addresses: Sequence[str]) -> str:
    """Return the Unix socket of this user on this host if there is one, else the network address."""
    for address in addresses:
        if address.startswith("ipc://") and shard_server.is_ours(address.removeprefix("ipc://")):
            return address
    return addresses[0]
