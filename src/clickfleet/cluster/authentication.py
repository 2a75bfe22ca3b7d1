"""Who may speak on the wire: a key for every process, two guards that check it, and counts of what they reject.

Each process makes its key for the run. The driver hands the keys out through Ray, and a shard accepts only the workers it names.

* With encryption, ZeroMQ's CURVE protects a connection in both directions. Only public keys travel through Ray.
* Without encryption, every message ends with a seal: an HMAC-SHA256 under a key that only one worker and one shard derive for one
  link. A request also carries a count, so that it is accepted once. Here the keys of the workers travel through Ray.

A Unix socket needs neither: its folder admits only the user who runs the shard.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import math
import secrets
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from clickfleet.errors import ClusterError, MissingError

try:
    import zmq
    from zmq.utils import z85
except ModuleNotFoundError:
    raise MissingError("pyzmq", "cluster") from None

LOG_EVERY_S = 10.0
"""Time between two log lines about rejected messages or connections."""
KEY_BYTES = 32
_ID_BYTES = 16
_DOMAIN = b"clickfleet"
_ZAP = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks whether a key is accepted (ZeroMQ RFC 27)."""
_FAILED = zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
"""Handshakes that ended before the other end showed a key. It may notice first that they do not fit, and leave."""
_MARK = struct.Struct(f"<{_ID_BYTES}sQQ")
"""The worker, its link, and the count of a sealed request."""
_MAC_BYTES = hashlib.sha256().digest_size
_links = itertools.count(1)
"""Numbers of the sealed links of this process. A shard accepts no link that is older than the last one of its peer."""

Frames = list[Any]
Seal = Callable[[Frames], Frames]
"""Returns the frames of a message together with its seal, if it needs one."""


class BadMessageError(ClusterError):
    """A message that this process must drop; `kind` is the name under which it is counted."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Rejections:
    """Count rejected messages or connections by kind and log them now and then. Thread-safe."""

    def __init__(self, what: str, log: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        self._what, self._log, self._logged_at = what, log, -math.inf
        self._lock = threading.Lock()

    def add(self, problem: BadMessageError, sender: str) -> None:
        with self._lock:
            self.counts[problem.kind] += 1
            now = time.monotonic()
            if now - self._logged_at < LOG_EVERY_S:
                return
            self._logged_at = now
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.counts.items()))
        self._log(f"{self._what} so far: {kinds}; the last one from {sender or 'this host'}: {problem}")

    @property
    def total(self) -> int:
        with self._lock:
            return sum(self.counts.values())


class ProcessKey(NamedTuple):
    """The key of one process, made for the run."""

    encrypt: bool
    shared: bytes
    """What the driver hands out: a public key; without encryption, the secret of a worker or a random number of a shard."""
    secret: bytes


class ShardAddress(NamedTuple):
    """Where a shard listens, and its key."""

    addresses: Sequence[str]
    key: bytes


def new_key(encrypt: bool) -> ProcessKey:
    if not encrypt:
        secret = secrets.token_bytes(KEY_BYTES)
        return ProcessKey(False, secret, secret)
    check_curve()
    return ProcessKey(True, *zmq.curve_keypair())


def check_curve() -> None:
    """Raise ClusterError if the installed ZeroMQ cannot encrypt."""
    if not zmq.has("curve"):
        raise ClusterError(
            f"pyzmq {zmq.__version__} with libzmq {zmq.zmq_version()} is built without CURVE, which encrypts the wire",
            "install a wheel of pyzmq (`pip install --force-reinstall --only-binary pyzmq pyzmq`), "
            "or set cluster.encrypt: false if the network is trusted",
        )


def is_private(address: str) -> bool:
    """Return whether the kernel lets only this user connect to an address."""
    return address.startswith("ipc:")


class ClientGuard:
    """Protect the connection of one link to one shard."""

    def __init__(self, key: ProcessKey, shard: ShardAddress, address: str) -> None:
        self._sealed = not key.encrypt and not is_private(address)
        self._curve = (shard.key, key) if key.encrypt and not is_private(address) else None
        if self._sealed:
            self._worker, self._link, self._count = _id_of(key.secret), next(_links), 0
            self._keys = LinkKeys.derive(key.secret, shard.key, self._link)

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Set the keys of a socket that is not connected yet."""
        if self._curve is not None:
            socket.curve_serverkey, key = self._curve
            socket.curve_publickey, socket.curve_secretkey = key.shared, key.secret

    def seal(self, frames: Frames) -> Frames:
        if not self._sealed:
            return frames
        self._count += 1
        mark = _MARK.pack(self._worker, self._link, self._count)
        return [*frames, mark + _mac(self._keys.requests, mark, frames)]

    def open(self, frames: Frames) -> Frames:
        """Return the frames of an answer without its seal, or raise BadMessageError."""
        if not self._sealed:
            return frames
        *rest, seal = frames
        if not hmac.compare_digest(bytes(seal), _mac(self._keys.answers, b"", rest)):
            raise BadMessageError("with a wrong seal", "the seal of an answer is wrong")
        return rest


class LinkKeys(NamedTuple):
    """The keys of the seals between one link of a worker and one shard."""

    requests: bytes
    answers: bytes

    @classmethod
    def derive(cls, worker: bytes, shard: bytes, link: int) -> LinkKeys:
        context = shard + link.to_bytes(8, "little")
        return cls(*(hmac.digest(worker, context + use, "sha256") for use in (b"requests", b"answers")))


def _id_of(worker: bytes) -> bytes:
    """Return the public name of a worker's secret."""
    return hmac.digest(worker, b"name", "sha256")[:_ID_BYTES]


def _mac(key: bytes, mark: bytes, frames: Sequence[Any]) -> bytes:
    """Return the MAC of a message. Lengths are part of it, so that no byte can move to another frame."""
    mac = hmac.new(key, mark, "sha256")
    for frame in frames:
        view = memoryview(frame)
        mac.update(view.nbytes.to_bytes(8, "little"))
        mac.update(view)
    return mac.digest()


class ServerGuard(Protocol):
    """Protects the network socket of a shard."""

    def accept(self, keys: Iterable[bytes]) -> None:
        """Accept these workers, and no others, from now on. Thread-safe."""

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Prepare a socket that does not listen yet."""

    def open(self, frames: Sequence[zmq.Frame], peer: int) -> tuple[Frames, Seal]:
        """Return the frames of a request without its seal, and how to seal the answer. Raise BadMessageError if it is not genuine."""


def guard(key: ProcessKey, context: zmq.Context[Any], refused: Rejections) -> ServerGuard:
    """Return the guard of a shard with this key."""
    return CurveGuard(key, context, refused) if key.encrypt else SealGuard(key)


class CurveGuard:
    """Let ZeroMQ encrypt, and accept connections of known public keys only.

    A thread answers ZeroMQ's question whether a key is accepted, and counts those that are not. The sender of every message is
    checked again, so that a worker that is no longer accepted is rejected although it is connected.
    """

    def __init__(self, key: ProcessKey, context: zmq.Context[Any], refused: Rejections) -> None:
        self._key, self._context, self._refused = key, context, refused
        self._accepted: frozenset[str] = frozenset()
        self._questions = context.socket(zmq.REP)
        self._questions.linger = 0
        self._questions.bind(_ZAP)
        self._failures = context.socket(zmq.PAIR)
        self._failures.linger = 0

    def accept(self, keys: Iterable[bytes]) -> None:
        self._accepted = frozenset(key.decode() for key in keys)

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._key.shared, self._key.secret
        socket.zap_domain = _DOMAIN
        socket.monitor("inproc://handshakes", _FAILED)
        self._failures.connect("inproc://handshakes")
        threading.Thread(target=self._answer, name="clickfleet-keys", daemon=True).start()

    def _answer(self) -> None:
        """Answer questions about keys until the context ends."""
        poller = zmq.Poller()
        for socket in (self._questions, self._failures):
            poller.register(socket, zmq.POLLIN)
        try:
            while True:
                for socket, _ in poller.poll():
                    frames = socket.recv_multipart()
                    if socket is self._questions:
                        socket.send_multipart(self._verdict(frames))
                    else:
                        problem = BadMessageError("without a key", "it ended before the other end showed a key")
                        self._refused.add(problem, "an unknown address")
        except zmq.ContextTerminated:
            pass
        finally:
            self._questions.close()
            self._failures.close()

    def _verdict(self, frames: Sequence[bytes]) -> list[bytes]:
        version, number, _, address, _, mechanism, *credentials = frames
        name = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and credentials else ""
        if name in self._accepted:
            return [version, number, b"200", b"OK", name.encode(), b""]
        problem = BadMessageError("with an unknown key", "its key does not belong to a worker of this run")
        self._refused.add(problem, address.decode(errors="replace"))
        return [version, number, b"400", b"unknown key", b"", b""]

    def open(self, frames: Sequence[zmq.Frame], peer: int) -> tuple[Frames, Seal]:
        with suppress(zmq.ZMQError, UnicodeDecodeError):
            if frames[0].get("User-Id") in self._accepted:
                return [frame.buffer for frame in frames], lambda answer: answer
        raise BadMessageError("with a key that is no longer accepted", "its worker has left the run")


@dataclass
class _SealedLink:
    """The newest link of a peer: its number, its last count and its keys."""

    number: int
    count: int
    keys: LinkKeys


class SealGuard:
    """Check the seal of every request, accept each of them once, and seal the answers."""

    def __init__(self, key: ProcessKey) -> None:
        self._key = key
        self._workers: dict[bytes, bytes] = {}
        self._links: dict[tuple[bytes, int], _SealedLink] = {}

    def accept(self, keys: Iterable[bytes]) -> None:
        self._workers = workers = {_id_of(key): key for key in keys}
        self._links = {at: link for at, link in self._links.copy().items() if at[0] in workers}

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Do nothing: a seal belongs to a message."""

    def open(self, frames: Sequence[zmq.Frame], peer: int) -> tuple[Frames, Seal]:
        *parts, seal = (frame.buffer for frame in frames)
        if seal.nbytes != _MARK.size + _MAC_BYTES:
            raise BadMessageError("without a seal", "it has no seal")
        mark, mac = bytes(seal[: _MARK.size]), bytes(seal[_MARK.size :])
        worker, number, count = _MARK.unpack(mark)
        secret = self._workers.get(worker)
        if secret is None:
            raise BadMessageError("with an unknown key", "its key does not belong to a worker of this run")
        link = self._links.get((worker, peer))
        same = link is not None and link.number == number
        keys = link.keys if link is not None and same else LinkKeys.derive(secret, self._key.shared, number)
        if not hmac.compare_digest(mac, _mac(keys.requests, mark, parts)):
            raise BadMessageError("with a wrong seal", "its seal is wrong: it was changed, or was for another shard")
        if link is not None and (number, count) <= (link.number, link.count):
            raise BadMessageError("repeated", "it was recorded and sent again")
        self._links[worker, peer] = _SealedLink(number, count, keys)
        return parts, lambda answer: [*answer, _mac(keys.answers, b"", answer)]
