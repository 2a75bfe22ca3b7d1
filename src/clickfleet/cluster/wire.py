"""Messages between workers and shards over ZeroMQ: a header of fixed size, then one frame per array, copied as little as possible.

A request carries protocol, run, schema and epoch of the run. The run is a secret of its processes: whatever does not carry it is dropped
and counted, and its sender gets no reply. A message of an older epoch of the run is answered as stale. Answers carry the number of the
request they belong to and may come in another order.
"""

from __future__ import annotations

import hmac
import math
import secrets
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import zmq

from clickfleet.cluster.shard import Answers, UnknownPeerError
from clickfleet.errors import ClusterError
from clickfleet.exchange import Answer, Gradient, Kind, Piece, Request, array, rows_of

PROTOCOL = 2
STALE = "stale"
IPC_BUFFER = 4 << 20
"""Bytes in a socket file on their way, as far as the kernel permits."""
MAX_FRAME = 1 << 30
"""Bytes of the largest frame; who announces more is disconnected before anything is allocated."""
MAX_WAITING = 64
"""Messages of one connection that wait for a shard; then its sender waits."""
MAX_ERROR = 1000
"""Bytes of the reason in an answer."""
HANDSHAKE_MS, HEARTBEAT_MS, SILENT_MS = 5_000, 10_000, 60_000
"""Connections that do not speak our transport, or fall silent, are closed after so long."""
TELL_EVERY_S = 10.0
"""Between two lines about dropped messages."""
RUN_BYTES = 16
_REQUEST = struct.Struct(f"<HBBIQ{RUN_BYTES}sIIQQQdddI")
_ANSWER = struct.Struct("<HBQQI")
_VALUES, _TRAINING, _PUSH, _DENSE, _PULL = 1, 2, 4, 8, 16
_KNOWN = _VALUES | _TRAINING | _PUSH | _DENSE | _PULL
_HAS = ("rows", "values", "keys", "deleted")

Frames = list[Any]


class Identity(NamedTuple):
    """Whom a message belongs to."""

    schema: int
    run: bytes
    """Known to the processes of the run alone."""
    epoch: int


class BadMessageError(ClusterError):
    """Bytes that are no message for this process; `kind` is what they are counted as."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def new_run() -> bytes:
    """What the messages of a run are known by; nobody can guess it."""
    return secrets.token_bytes(RUN_BYTES)


class Header(NamedTuple):
    """The first frame of a request."""

    protocol: int
    kind: int
    flags: int
    cut: int
    schema: int
    run: bytes
    epoch: int
    peer: int
    number: int
    sequence: int
    seen: int
    n: float
    dense_n: float
    scale: float
    batches: int

    @property
    def who(self) -> Identity:
        return Identity(self.schema, self.run, self.epoch)


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


def unpack_header(frames: Sequence[Any]) -> Header:
    """The header of a request; anything else is a BadMessageError."""
    if not frames:
        raise BadMessageError("malformed", "a message without frames")
    first = memoryview(frames[0]).cast("B")
    if len(first) != _REQUEST.size:
        version = int.from_bytes(first[:2], "little") if len(first) >= 2 else PROTOCOL
        if version != PROTOCOL and 0 < version < 100:  # of another clickfleet, perhaps
            raise _other_protocol(version)
        raise BadMessageError("malformed", f"a header of {len(first)} bytes, where {_REQUEST.size} are expected")
    header = Header(*_REQUEST.unpack(first))
    if header.protocol != PROTOCOL:
        raise _other_protocol(header.protocol)
    return header


def _other_protocol(version: int) -> BadMessageError:
    return BadMessageError(
        "protocol", f"a message has protocol {version}, this version of clickfleet speaks {PROTOCOL}"
    )


def unpack_request(frames: Sequence[Any], width: int, floats: int | None = None) -> tuple[Piece, Identity, int]:
    """The piece, whom it belongs to and its peer; anything that does not fit exactly is a BadMessageError.

    Rows have `width` weights, and the shard `floats` dense weights. No array is larger than the frame it lies in.
    """
    header = unpack_header(frames)
    flags, rest = header.flags, list(frames[1:])
    arrays = [flag for flag in (_PUSH, _DENSE, _PULL) if flags & flag]
    if header.kind not in Kind.__members__.values() or flags & ~_KNOWN:
        raise BadMessageError("malformed", f"unknown kind {header.kind} or flags {flags:#x}")
    if len(rest) != len(arrays):
        raise BadMessageError("malformed", f"{len(rest)} arrays, where the header announces {len(arrays)}")
    if not all(map(math.isfinite, (header.n, header.dense_n, header.scale))):
        raise BadMessageError("malformed", "a weight that is no number")
    request = Request(Kind(header.kind), values=bool(flags & _VALUES), training=bool(flags & _TRAINING), cut=header.cut)
    try:
        if flags & _PUSH:
            request.push = rows_of(rest.pop(0), width, header.n)
        if flags & _DENSE:
            vector = array(rest.pop(0), np.float32)
            request.dense = Gradient(vector, header.dense_n, header.scale, header.batches)
        if flags & _PULL:
            request.pull = array(rest.pop(0), np.uint64)
    except (ValueError, ClusterError) as error:  # a length that is no multiple of an item's
        raise BadMessageError("malformed", str(error)) from None
    if request.pull is not None and 4 * width * len(request.pull) > MAX_FRAME:
        raise BadMessageError("malformed", f"{len(request.pull)} rows wanted at once, which no answer can hold")
    if request.dense is not None and floats is not None and len(request.dense.vector) != floats:
        raise BadMessageError(
            "malformed", f"a gradient of {len(request.dense.vector)} weights, where there are {floats}"
        )
    if (request.push is not None or request.dense is not None) != (header.sequence > 0):
        raise BadMessageError("malformed", "a push without its number, or a number without a push")
    return Piece(request, header.sequence, header.seen, header.number), header.who, header.peer


def pack_answer(answer: Answer) -> Frames:
    flags = sum(1 << i for i, name in enumerate(_HAS) if getattr(answer, name) is not None)
    header = _ANSWER.pack(PROTOCOL, flags, answer.number, answer.version, answer.cut)
    arrays = [getattr(answer, name) for name in _HAS]
    return [owned(header), owned(answer.error.encode()), *(owned(a) for a in arrays if a is not None)]


def unpack_answer(frames: Sequence[Any], width: int) -> Answer:
    """What a shard says; anything else is a BadMessageError."""
    if len(frames) < 2 or len(memoryview(frames[0]).cast("B")) != _ANSWER.size or len(frames[1]) > MAX_ERROR:
        raise BadMessageError("malformed", "no answer of a shard")
    protocol, flags, number, version, cut = _ANSWER.unpack(frames[0])
    if protocol != PROTOCOL:
        raise _other_protocol(protocol)
    if flags >> len(_HAS) or len(frames) - 2 != flags.bit_count():
        raise BadMessageError("malformed", f"{len(frames) - 2} arrays in an answer, with flags {flags:#x}")
    answer = Answer(version=version, cut=cut, number=number)
    rest = iter(frames[2:])
    try:
        answer.error = bytes(frames[1]).decode()
        for i, name in enumerate(_HAS):
            if flags & 1 << i:
                found = array(next(rest), np.uint64 if i >= 2 else np.float32)
                setattr(answer, name, found.reshape(-1, width) if name == "rows" else found)
    except ValueError as error:
        raise BadMessageError("malformed", str(error)) from None
    return answer


def limit(socket: zmq.Socket[bytes]) -> None:
    """Bounds what the other end of a connection can make this one keep."""
    socket.linger = 0
    socket.maxmsgsize = MAX_FRAME
    socket.rcvhwm = MAX_WAITING
    socket.handshake_ivl = HANDSHAKE_MS
    socket.heartbeat_ivl, socket.heartbeat_timeout, socket.heartbeat_ttl = HEARTBEAT_MS, SILENT_MS, SILENT_MS


def check_size(frames: Sequence[Any], answer: int = 0) -> None:
    """Refuses to send what nobody would take, or ask for an answer of so many bytes."""
    largest = max(answer, *map(len, frames))
    if largest > MAX_FRAME:
        raise ClusterError(
            f"a message of {largest:,} bytes, where {MAX_FRAME:,} is the most",
            "use more shards, a smaller data.batch_size, or in mode geo a smaller mode.k_steps",
        )


class Dropped:
    """Messages that were not for us: counted by kind, told now and then."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        self._log, self._told = log, -math.inf

    def add(self, problem: BadMessageError, sender: str) -> None:
        self.counts[problem.kind] += 1
        now = time.monotonic()
        if now - self._told >= TELL_EVERY_S:
            self._told = now
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.counts.items()))
            self._log(f"dropped messages so far: {kinds}; the last one from {sender or 'this host'}: {problem}")


class Server:
    """A shard's end: a thread that takes message after message and sends the answers that are due."""

    def __init__(
        self,
        handle: Callable[[int, Piece], Answers],
        who: Callable[[], Identity],
        width: int,
        binds: Sequence[str],
        *,
        floats: int | None = None,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._handle, self._who, self._width, self._floats = handle, who, width, floats
        self.lock = threading.RLock()
        """Held while a message is handled; whoever else changes the shard holds it too."""
        self._context = zmq.Context(1)
        self._socket = self._context.socket(zmq.ROUTER)
        limit(self._socket)
        self._socket.rcvtimeo = 100  # ms, then it looks whether it is to stop
        self.endpoints = [self._bind(address) for address in binds]
        self._routes: dict[int, bytes] = {}  # of each peer
        self.failure: BaseException | None = None
        self.bytes_in = self.bytes_out = self.messages = 0
        self.dropped = Dropped(log)
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
                    route, *frames = self._socket.recv_multipart(copy=False)
                    with self.lock:
                        self._serve(route.bytes, frames)
        except BaseException as error:
            self.failure = error
        finally:
            self._socket.close()
            self._context.term()

    def _serve(self, route: bytes, frames: Sequence[zmq.Frame]) -> None:
        self.messages += 1
        parts = [frame.buffer for frame in frames]
        self.bytes_in += sum(map(len, parts))
        try:
            header, mine = unpack_header(parts), self._who()
            check_origin(mine, header.who)
            if header.epoch != mine.epoch:
                self._send(route, Answer(error=STALE, number=header.number))
                return
            piece, _, peer = unpack_request(parts, self._width, self._floats)
            answers = self._handle(peer, piece)
        except BadMessageError as problem:
            self.dropped.add(problem, _sender(frames))
            return
        except UnknownPeerError as problem:
            self.dropped.add(BadMessageError("of an unknown peer", str(problem)), _sender(frames))
            return
        self._routes[peer] = route
        for whom, answer in answers:
            self._send(self._routes[whom], answer)

    def _send(self, route: bytes, answer: Answer) -> None:
        frames = pack_answer(answer)
        check_size(frames)
        self.bytes_out += sum(map(len, frames))
        self._socket.send_multipart([route, *frames], copy=False)

    def close(self) -> None:
        self._stop = True
        if self._thread.is_alive():
            self._thread.join(timeout=5)


def _sender(frames: Sequence[zmq.Frame]) -> str:
    """The address that a message came from, as far as it is known."""
    for frame in frames:
        with suppress(zmq.ZMQError, UnicodeDecodeError):
            return str(frame.get("Peer-Address"))
    return ""


def widen(socket: zmq.Socket[bytes], address: str) -> None:
    """A message between two processes of a host passes in few pieces; TCP finds its own buffer sizes."""
    if address.startswith("ipc:"):
        socket.sndbuf = socket.rcvbuf = IPC_BUFFER


def check_origin(mine: Identity, theirs: Identity) -> None:
    """Refuses what is not of this run and schema."""
    if not hmac.compare_digest(mine.run, theirs.run):
        raise BadMessageError("of another run", "it belongs to another run")
    if theirs.schema != mine.schema:
        raise BadMessageError("of another schema", "its sender reads data of another schema")
