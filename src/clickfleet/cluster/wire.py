"""Messages between workers and shards over ZeroMQ: a header of fixed size, then one frame per array, with few copies.

A shard has a socket on the network, which its guard protects (authentication.py), and a Unix socket in a private folder. It drops
and counts a message that is not genuine, belongs to another run or is malformed, and sends no reply.

A request carries protocol, run, schema and generation. A shard answers a message of an older generation as stale. Answers carry the
number of their request and may arrive in another order.
"""

from __future__ import annotations

import hmac
import math
import secrets
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from clickfleet.cluster.authentication import (
    PROTOCOL,
    TAG_BYTES,
    BadMessageError,
    Frames,
    ProcessKey,
    Rejections,
    Seal,
    ServerGuard,
    is_private,
    other_protocol,
)
from clickfleet.cluster.shard import Answers, UnknownPeerError
from clickfleet.errors import ClusterError, MissingError
from clickfleet.training.sharding import Answer, Gradient, Kind, Piece, Request, array, rows_of

try:
    import zmq
except ModuleNotFoundError:
    raise MissingError("pyzmq", "cluster") from None

STALE = "stale"
IPC_BUFFER = 4 << 20
"""Buffer of a Unix socket, as far as the kernel permits."""
MAX_FRAME = 1 << 30
"""Bytes of the largest frame before encryption. A peer that announces more is disconnected before anything is allocated."""
MAX_WAITING = 64
"""Messages of one connection that may wait for a shard. Then its sender waits."""
MAX_ERROR = 1000
"""Bytes of the error text in an answer."""
HANDSHAKE_MS, HEARTBEAT_MS, SILENT_MS = 5_000, 10_000, 60_000
"""Time limits for the handshake and for silent connections, which are then closed."""
STOP_MS = 100
"""Time between two checks of a shard whether to stop."""
RUN_BYTES = 16
_REQUEST = struct.Struct(f"<HBBIQ{RUN_BYTES}sIIQQQdddI")
_ANSWER = struct.Struct("<HBQQIQ")
_VALUES, _TRAINING, _PUSH, _DENSE, _DIFFERENCE, _PULL = 1, 2, 4, 8, 16, 32
_ARRAYS = (_PUSH, _DENSE, _DIFFERENCE, _PULL)
_KNOWN = _VALUES | _TRAINING | sum(_ARRAYS)
_HAS = ("rows", "values", "keys", "deleted")


class PeerIdentity(NamedTuple):
    """The run, schema and generation that a message belongs to."""

    schema: int
    run: bytes
    """A random number that distinguishes runs. Keys and file permissions decide who may speak, not this number."""
    generation: int


def new_run() -> bytes:
    """Return a new random number that identifies the messages of a run."""
    return secrets.token_bytes(RUN_BYTES)


class MessageHeader(NamedTuple):
    """The first frame of a request."""

    protocol: int
    kind: int
    flags: int
    checkpoint: int
    schema: int
    run: bytes
    generation: int
    peer: int
    number: int
    sequence: int
    seen: int
    n: float
    dense_n: float
    scale: float
    batches: int

    @property
    def who(self) -> PeerIdentity:
        return PeerIdentity(self.schema, self.run, self.generation)


def pack_request(piece: Piece, who: PeerIdentity, peer: int) -> Frames:
    request = piece.request
    push, dense, pull = request.push, request.dense, request.pull
    flags = (
        request.values * _VALUES
        | request.training * _TRAINING
        | (push is not None) * _PUSH
        | (dense is not None) * _DENSE
        | (request.difference is not None) * _DIFFERENCE
        | (pull is not None) * _PULL
    )
    header = _REQUEST.pack(
        PROTOCOL,
        request.kind,
        flags,
        request.checkpoint,
        *who,
        peer,
        piece.number,
        piece.sequence,
        piece.seen,
        0.0 if push is None else push.n,
        0.0 if dense is None else dense.n,
        0.0 if dense is None else dense.scale,
        request.batches,
    )
    arrays = (request.rows, None if dense is None else dense.vector, request.difference, pull)
    return [owned(header), *(owned(each) for each in arrays if each is not None)]


def owned(data: Any) -> zmq.Frame:
    """Return a frame with its own copy of the bytes. The caller may reuse `data`, and sending needs no Python callback."""
    return zmq.Frame(data, copy=True)


def unpack_header(frames: Sequence[Any]) -> MessageHeader:
    """Return the header of a request, or raise BadMessageError."""
    if not frames:
        raise BadMessageError("malformed", "a message without frames")
    first = memoryview(frames[0]).cast("B")
    if len(first) != _REQUEST.size:
        version = int.from_bytes(first[:2], "little") if len(first) >= 2 else PROTOCOL
        if version != PROTOCOL and 0 < version < 100:  # probably from another version of clickfleet
            raise other_protocol(version)
        raise BadMessageError("malformed", f"the header has {len(first)} bytes instead of {_REQUEST.size}")
    header = MessageHeader(*_REQUEST.unpack(first))
    if header.protocol != PROTOCOL:
        raise other_protocol(header.protocol)
    return header


def unpack_request(frames: Sequence[Any], width: int, floats: int | None = None) -> tuple[Piece, PeerIdentity, int]:
    """Return the piece, its identity and its peer, or raise BadMessageError if anything does not fit exactly.

    Rows have `width` weights, and the shard has `floats` dense weights. No array is larger than its frame.
    """
    header = unpack_header(frames)
    flags, rest = header.flags, list(frames[1:])
    arrays = [flag for flag in _ARRAYS if flags & flag]
    if header.kind not in Kind.__members__.values() or flags & ~_KNOWN:
        raise BadMessageError("malformed", f"unknown kind {header.kind} or flags {flags:#x}")
    if len(rest) != len(arrays):
        raise BadMessageError("malformed", f"{len(rest)} arrays; the header announces {len(arrays)}")
    if not all(map(math.isfinite, (header.n, header.dense_n, header.scale))):
        raise BadMessageError("malformed", "a weight is not finite")
    request = Request(
        Kind(header.kind),
        batches=header.batches,
        values=bool(flags & _VALUES),
        training=bool(flags & _TRAINING),
        checkpoint=header.checkpoint,
    )
    try:
        if flags & _PUSH:
            request.push = rows_of(rest.pop(0), width, header.n)
        if flags & _DENSE:
            vector = array(rest.pop(0), np.float32)
            request.dense = Gradient(vector, header.dense_n, header.scale)
        if flags & _DIFFERENCE:
            request.difference = array(rest.pop(0), np.float32)
        if flags & _PULL:
            request.pull = array(rest.pop(0), np.uint64)
    except (ValueError, ClusterError) as error:  # the length is not a multiple of the item size
        raise BadMessageError("malformed", str(error)) from None
    if request.pull is not None and 4 * width * len(request.pull) > MAX_FRAME:
        raise BadMessageError("malformed", f"a request for {len(request.pull)} rows, more than an answer can hold")
    for vector in (None if request.dense is None else request.dense.vector, request.difference):
        if vector is not None and floats is not None and len(vector) != floats:
            raise BadMessageError("malformed", f"a vector of {len(vector)} dense weights; the shard has {floats}")
    if request.learns != (header.sequence > 0):
        raise BadMessageError("malformed", "a push without a sequence number, or a sequence number without a push")
    return Piece(request, header.sequence, header.seen, header.number), header.who, header.peer


def pack_answer(answer: Answer) -> Frames:
    flags = sum(1 << i for i, name in enumerate(_HAS) if getattr(answer, name) is not None)
    header = _ANSWER.pack(PROTOCOL, flags, answer.number, answer.version, answer.checkpoint, answer.batches)
    arrays = [getattr(answer, name) for name in _HAS]
    return [owned(header), owned(answer.error.encode()), *(owned(a) for a in arrays if a is not None)]


def unpack_answer(frames: Sequence[Any], width: int) -> Answer:
    """Return the answer of a shard, or raise BadMessageError."""
    if len(frames) < 2 or len(memoryview(frames[0]).cast("B")) != _ANSWER.size or len(frames[1]) > MAX_ERROR:
        raise BadMessageError("malformed", "not an answer of a shard")
    protocol, flags, number, version, checkpoint, batches = _ANSWER.unpack(frames[0])
    if protocol != PROTOCOL:
        raise other_protocol(protocol)
    if flags >> len(_HAS) or len(frames) - 2 != flags.bit_count():
        raise BadMessageError("malformed", f"{len(frames) - 2} arrays in an answer, with flags {flags:#x}")
    answer = Answer(version=version, checkpoint=checkpoint, number=number, batches=batches)
    rest = iter(frames[2:])
    try:
        answer.error = bytes(frames[1]).decode()
        for i, name in enumerate(_HAS):
            if flags & 1 << i:
                values = array(next(rest), np.uint64 if i >= 2 else np.float32)
                setattr(answer, name, values.reshape(-1, width) if name == "rows" else values)
    except ValueError as error:
        raise BadMessageError("malformed", str(error)) from None
    return answer


def limit(socket: zmq.Socket[bytes]) -> None:
    """Limit the memory that the other end of a connection can occupy here."""
    socket.linger = 0
    socket.maxmsgsize = MAX_FRAME + TAG_BYTES
    socket.rcvhwm = MAX_WAITING
    socket.handshake_ivl = HANDSHAKE_MS
    socket.heartbeat_ivl, socket.heartbeat_timeout, socket.heartbeat_ttl = HEARTBEAT_MS, SILENT_MS, SILENT_MS


def check_size(frames: Sequence[Any], answer: int = 0) -> None:
    """Refuse to send a frame, or to request an answer, that is larger than the receiver accepts."""
    largest = max(answer, *map(len, frames))
    if largest > MAX_FRAME:
        raise ClusterError(
            f"a message of {largest:,} bytes exceeds the limit of {MAX_FRAME:,}",
            "use more shards, a smaller data.batch_size or, in mode geo, a smaller mode.k_steps",
        )


class Route(NamedTuple):
    """The way of an answer to its peer."""

    socket: zmq.Socket[bytes]
    connection: bytes
    seal: Seal


class Server:
    """The server of a shard: one thread that handles messages in order and sends the answers that are due."""

    def __init__(
        self,
        handle: Callable[[int, Piece], Answers],
        who: Callable[[], PeerIdentity],
        width: int,
        binds: Sequence[str],
        key: ProcessKey,
        *,
        floats: int | None = None,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._handle, self._who, self._width, self.floats = handle, who, width, floats
        self.lock = threading.RLock()
        """Held while a message is handled. Hold it for any other change of the shard."""
        self.failure: BaseException | None = None
        self.bytes_in = self.bytes_out = self.messages = 0
        self.dropped = Rejections("dropped messages", log)
        self.refused = Rejections("refused connections", log)
        self._context = zmq.Context(1)
        self._guard = ServerGuard(key, self._context, self.refused)
        self._sockets: dict[zmq.Socket[bytes], bool] = {}
        """Each socket, and whether its messages pass the guard."""
        self.endpoints = [self._bind(address) for address in binds]
        self._routes: dict[int, Route] = {}  # of each peer
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="clickfleet-shard", daemon=True)

    def _bind(self, address: str) -> str:
        socket = self._context.socket(zmq.ROUTER)
        limit(socket)
        widen(socket, address)
        self._sockets[socket] = guarded = not is_private(address)
        if guarded:
            self._guard.protect(socket)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ClusterError(f"a shard cannot listen on {address}: {error}", "check that the port is free") from error
        return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    def accept(self, keys: Iterable[bytes]) -> None:
        """Accept the workers with these keys, and no others, on the network. Possible at any time."""
        with self.lock:
            self._guard.accept(keys)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        try:
            while not self._stop:
                for socket, _ in poller.poll(STOP_MS):
                    connection, *frames = socket.recv_multipart(copy=False)
                    with self.lock:
                        self._serve(socket, connection.bytes, frames)
        except BaseException as error:
            self.failure = error
        finally:
            for socket in self._sockets:
                socket.close()
            self._context.term()

    def _serve(self, socket: zmq.Socket[bytes], connection: bytes, frames: Sequence[zmq.Frame]) -> None:
        self.messages += 1
        parts: Frames = [frame.buffer for frame in frames]
        self.bytes_in += sum(map(len, parts))
        route = Route(socket, connection, list)
        try:
            if self._sockets[socket]:
                parts, link = self._guard.open(parts, _property(frames, "User-Id"))
                header = unpack_header(parts)
                link.claim(header.peer)
                route = route._replace(seal=link.seal)
            else:
                header = unpack_header(parts)
            identity = self._who()
            check_origin(identity, header.who)
            if header.generation != identity.generation:
                self.send(route, Answer(error=STALE, number=header.number))
                return
            piece, _, peer = unpack_request(parts, self._width, self.floats)
            answers = self._handle(peer, piece)
        except BadMessageError as problem:
            self.dropped.add(problem, _property(frames, "Peer-Address"))
            return
        except UnknownPeerError as problem:
            self.dropped.add(BadMessageError("of an unknown peer", str(problem)), _property(frames, "Peer-Address"))
            return
        self._routes[peer] = route
        for whom, answer in answers:
            self.send(self._routes[whom], answer)

    def send(self, route: Route, answer: Answer) -> None:
        frames = pack_answer(answer)
        check_size(frames)
        frames = route.seal(frames)
        self.bytes_out += sum(map(len, frames))
        route.socket.send_multipart([route.connection, *frames], copy=False)

    def close(self) -> None:
        self._stop = True
        if self._thread.is_alive():
            self._thread.join(timeout=5)


def _property(frames: Sequence[zmq.Frame], name: str) -> str:
    """Return what ZeroMQ knows of the sender of a message; empty if unknown."""
    for frame in frames:
        with suppress(zmq.ZMQError, UnicodeDecodeError):
            return str(frame.get(name))
    return ""


def widen(socket: zmq.Socket[bytes], address: str) -> None:
    """Enlarge the buffers of a Unix socket, so that a message passes in few pieces. TCP adapts its own."""
    if is_private(address):
        socket.sndbuf = socket.rcvbuf = IPC_BUFFER


def check_origin(receiver: PeerIdentity, sender: PeerIdentity) -> None:
    """Raise BadMessageError for a message of another run or schema."""
    if not hmac.compare_digest(receiver.run, sender.run):
        raise BadMessageError("of another run", "the message belongs to another run")
    if sender.schema != receiver.schema:
        raise BadMessageError("of another schema", "the sender has another schema")
