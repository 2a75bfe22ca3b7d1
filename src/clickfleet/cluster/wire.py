"""Messages between workers and shards over ZeroMQ: a header of fixed size, then one frame per array, copied as little as possible.

A request carries protocol, run, schema and epoch of the run; a shard refuses what belongs to others by saying so, and what belongs to an
older epoch of its own run as stale. Answers carry the number of the request they belong to and may come in another order.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import zmq

from clickfleet.cluster.shard import Answers
from clickfleet.errors import ClusterError
from clickfleet.exchange import Answer, Gradient, Kind, Piece, Request, array, rows_of

PROTOCOL = 1
STALE = "stale"
IPC_BUFFER = 4 << 20
"""Bytes in a socket file on their way, as far as the kernel permits."""
_REQUEST = struct.Struct("<HBBIQQIIQQQdddI")
_ANSWER = struct.Struct("<HBQQI")
_VALUES, _TRAINING, _PUSH, _DENSE, _PULL = 1, 2, 4, 8, 16
_HAS = ("rows", "values", "keys", "deleted")

Frames = list[Any]


class Identity(NamedTuple):
    """Whom a message belongs to."""

    schema: int
    run: int
    epoch: int


def pack_request(piece: Piece, who: Identity, peer: int) -> Frames:
    request = piece.request
    push, dense, pull = request.push, request.dense, request.pull
    flags = (
        request.values * _VALUES
        | request.training * _TRAINING
        | (push is not None) * _PUSH
        | (dense is not None) * _DENSE
        | (pull is not None) * _PULL
    )
    header = _REQUEST.pack(
        PROTOCOL,
        request.kind,
        flags,
        request.cut,
        *who,
        peer,
        piece.number,
        piece.sequence,
        piece.seen,
        0.0 if push is None else push.n,
        0.0 if dense is None else dense.n,
        0.0 if dense is None else dense.scale,
        0 if dense is None else dense.batches,
    )
    arrays = (request.rows, None if dense is None else dense.vector, pull)
    return [owned(header), *(owned(each) for each in arrays if each is not None)]


def owned(data: Any) -> zmq.Frame:
    """A frame with bytes of its own: who made them may go on, and no thread of Python is called once it is sent."""
    return zmq.Frame(data, copy=True)


def unpack_request(frames: Sequence[Any], width: int) -> tuple[Piece, Identity, int]:
    """The piece, whom it belongs to and its peer; an error names what does not fit."""
    if len(frames[0]) != _REQUEST.size or _REQUEST.unpack(frames[0])[0] != PROTOCOL:
        version = struct.unpack("<H", bytes(frames[0][:2]))[0] if len(frames[0]) >= 2 else "none"
        raise ClusterError(f"a message has protocol {version}, this version of clickfleet speaks {PROTOCOL}")
    (_, kind, flags, cut, schema, run, epoch, peer, number, sequence, seen, n, dense_n, scale, batches) = (
        _REQUEST.unpack(frames[0])
    )
    rest = iter(frames[1:])
    request = Request(Kind(kind), values=bool(flags & _VALUES), training=bool(flags & _TRAINING), cut=cut)
    if flags & _PUSH:
        request.push = rows_of(next(rest), width, n)
    if flags & _DENSE:
        request.dense = Gradient(array(next(rest), np.float32), dense_n, scale, batches)
    if flags & _PULL:
        request.pull = array(next(rest), np.uint64)
    return Piece(request, sequence, seen, number), Identity(schema, run, epoch), peer


def pack_answer(answer: Answer) -> Frames:
    flags = sum(1 << i for i, name in enumerate(_HAS) if getattr(answer, name) is not None)
    header = _ANSWER.pack(PROTOCOL, flags, answer.number, answer.version, answer.cut)
    arrays = [getattr(answer, name) for name in _HAS]
    return [owned(header), owned(answer.error.encode()), *(owned(a) for a in arrays if a is not None)]


def unpack_answer(frames: Sequence[Any], width: int) -> Answer:
    _, flags, number, version, cut = _ANSWER.unpack(frames[0])
    answer = Answer(version=version, cut=cut, error=bytes(frames[1]).decode(), number=number)
    rest = iter(frames[2:])
    for i, name in enumerate(_HAS):
        if flags & 1 << i:
            found = array(next(rest), np.uint64 if i >= 2 else np.float32)
            setattr(answer, name, found.reshape(-1, width) if name == "rows" else found)
    return answer


class Server:
    """A shard's end: a thread that takes message after message and sends the answers that are due."""

    def __init__(
        self, handle: Callable[[int, Piece], Answers], who: Callable[[], Identity], width: int, binds: Sequence[str]
    ) -> None:
        self._handle, self._who, self._width = handle, who, width
        self.lock = threading.RLock()
        """Held while a message is handled; whoever else changes the shard holds it too."""
        self._context = zmq.Context(1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.router_handover = True
        self._socket.rcvtimeo = 100  # ms, then it looks whether it is to stop
        self.endpoints = [self._bind(address) for address in binds]
        self._routes: dict[int, bytes] = {}  # of each peer
        self.failure: BaseException | None = None
        self.bytes_in = self.bytes_out = self.messages = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="clickfleet-shard", daemon=True)

    def _bind(self, address: str) -> str:
        widen(self._socket, address)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ClusterError(f"a shard cannot listen on {address}: {error}", "is the port in use?") from error
        return bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop:
                with suppress(zmq.Again):
                    frames = self._socket.recv_multipart(copy=False)
                    with self.lock:
                        self._serve(frames[0].bytes, [frame.buffer for frame in frames[1:]])
        except BaseException as error:
            self.failure = error
        finally:
            self._socket.close()
            self._context.term()

    def _serve(self, route: bytes, frames: Sequence[Any]) -> None:
        self.messages += 1
        self.bytes_in += sum(map(len, frames))
        try:
            piece, theirs, peer = unpack_request(frames, self._width)
        except ClusterError as error:
            self._send(route, Answer(error=str(error)))
            return
        if problem := refusal(self._who(), theirs):
            self._send(route, Answer(error=problem, number=piece.number))
            return
        self._routes[peer] = route
        for whom, answer in self._handle(peer, piece):
            self._send(self._routes[whom], answer)

    def _send(self, route: bytes, answer: Answer) -> None:
        frames = pack_answer(answer)
        self.bytes_out += sum(map(len, frames))
        self._socket.send_multipart([route, *frames], copy=False)

    def close(self) -> None:
        self._stop = True
        if self._thread.is_alive():
            self._thread.join(timeout=5)


def widen(socket: zmq.Socket[bytes], address: str) -> None:
    """A message between two processes of a host passes in few pieces; TCP finds its own buffer sizes."""
    if address.startswith("ipc:"):
        socket.sndbuf = socket.rcvbuf = IPC_BUFFER


def refusal(mine: Identity, theirs: Identity) -> str:
    """Why a message is not for us; empty if it is."""
    if theirs.run != mine.run:
        return f"the message belongs to run {theirs.run:016x}, this shard to run {mine.run:016x}"
    if theirs.schema != mine.schema:
        return "the sender reads data of another schema"
    return STALE if theirs.epoch != mine.epoch else ""
