"""Who may speak on the wire: a key for every process, seals on every message, and counts of what is rejected.

Each process makes a key pair (X25519) for the run. The driver hands out the public keys through Ray, and a shard accepts only the
workers it names. A worker and a shard derive the keys of a link from their keys (HKDF-SHA256). A link is one connection of a worker.

* A connection shows a token of its link before a shard receives anything from it (PLAIN of ZeroMQ). The token admits, no more.
* Every message ends with a mark: worker, link and count. With encryption, AES-256-GCM encrypts every frame. Without it, the mark
  carries a tag of AES-256-GCM for every frame. The nonce of a frame holds the count, the number of frames and the place of the frame,
  so a message cannot be changed, cut, reordered, repeated or moved to another link.

A Unix socket needs no key: its folder admits only the user who runs the shard.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import math
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from clickfleet.errors import ClusterError, MissingError

try:
    import zmq
except ModuleNotFoundError:
    raise MissingError("pyzmq", "cluster") from None
try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ModuleNotFoundError:
    raise MissingError("cryptography", "cluster") from None

PROTOCOL = 4
"""Version of the messages and of their protection."""
LOG_EVERY_S = 10.0
"""Time between two log lines about rejected messages or connections."""
KEY_BYTES = 32
TAG_BYTES = 16
"""How much longer encryption makes a frame."""
_ID_BYTES = 16
_DOMAIN = b"clickfleet"
_ZAP = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks whether a connection is accepted (ZeroMQ RFC 27)."""
_FAILED = zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
"""Handshakes that ended before the other end showed a token. It may notice first that they do not fit, and leave."""
_LINK = struct.Struct("<HBQ")
"""Protocol, whether messages are encrypted, and the number of the link: the beginning of what its keys are derived from."""
_TOKEN = struct.Struct(f"<HQ{KEY_BYTES}s")
"""Protocol, number and token of a link, as a connection shows them."""
_MARK = struct.Struct(f"<{_ID_BYTES}sQQ")
"""The worker, the number of its link, and the count of a message on this link in its direction."""
_NONCE = struct.Struct("<QHH")
"""The nonce of a frame: the count of its message, the number of frames and its place. No two frames under one key have the same."""
_MAX_FRAMES = 0xFFFF
_INTO = hasattr(AESGCM, "decrypt_into")  # since cryptography 47
_links = itertools.count(1)
"""Numbers of the links of this process. A shard accepts no link that is older than the last one of its peer."""

Frames = list[Any]
Seal = Callable[[Frames], Frames]
"""Returns the frames of a message as they are sent."""


class BadMessageError(ClusterError):
    """A message that this process must drop; `kind` is the name under which it is counted."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def other_protocol(version: int, what: str = "the message") -> BadMessageError:
    return BadMessageError(
        "protocol", f"{what} has protocol {version}; this version of clickfleet has protocol {PROTOCOL}"
    )


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
    """The key of one process, made for the run. Use it in one process only, and in one guard of a shard."""

    encrypt: bool
    shared: bytes
    """The public key, which the driver hands out."""
    secret: bytes


class ShardAddress(NamedTuple):
    """Where a shard listens, and its public key."""

    addresses: Sequence[str]
    key: bytes


def new_key(encrypt: bool) -> ProcessKey:
    pair = X25519PrivateKey.generate()
    return ProcessKey(encrypt, pair.public_key().public_bytes_raw(), pair.private_bytes_raw())


def is_private(address: str) -> bool:
    """Return whether the kernel lets only this user connect to an address."""
    return address.startswith("ipc:")


class SealedMessage(NamedTuple):
    """A message as it was received."""

    views: list[memoryview]
    mark: bytes
    tags: memoryview

    @classmethod
    def split(cls, frames: Sequence[Any], encrypt: bool) -> SealedMessage:
        """Separate the mark from the other frames, or raise BadMessageError."""
        *views, last = (_bytes_of(frame) for frame in frames) if frames else (memoryview(b""),)
        if not views or len(last) != _MARK.size + (0 if encrypt else TAG_BYTES * len(views)):
            raise BadMessageError("without a seal", "it has no seal")
        if len(views) > _MAX_FRAMES:
            raise BadMessageError("malformed", f"a message of {len(views):,} frames")
        return cls(views, bytes(last[: _MARK.size]), last[_MARK.size :])


class Channel:
    """One direction of a link: the key of its messages, and the count of the last one. For one end, which seals or opens."""

    def __init__(self, encrypt: bool, key: bytes, origin: tuple[bytes, int]) -> None:
        self._encrypt, self._cipher, self._origin = encrypt, AESGCM(key), origin
        self._count = 0

    def seal(self, frames: Frames) -> Frames:
        """Return the frames of a message as they are sent. A message that is sent again is sealed again."""
        self._count += 1  # first of all: no nonce is used twice, whatever happens
        encrypt, views = self._cipher.encrypt, [_bytes_of(frame) for frame in frames]
        nonces = [_NONCE.pack(self._count, len(views), place) for place in range(len(views))]
        mark = _MARK.pack(*self._origin, self._count)
        if not self._encrypt:
            tags = (encrypt(nonce, b"", view) for nonce, view in zip(nonces, views, strict=True))
            return [*frames, b"".join((mark, *tags))]
        # A copy is cheaper than the callback with which ZeroMQ would release the bytes.
        sealed = (zmq.Frame(encrypt(nonce, view, None), copy=True) for nonce, view in zip(nonces, views, strict=True))
        return [*sealed, mark]

    def open(self, message: SealedMessage) -> Frames:
        """Return the frames of a message without its protection, or raise BadMessageError."""
        views, mark, tags = message
        worker, number, count = _MARK.unpack(mark)
        if (worker, number) != self._origin:
            raise BadMessageError("with a wrong seal", "its seal is of another link")
        nonces = [_NONCE.pack(count, len(views), place) for place in range(len(views))]
        try:
            if self._encrypt:
                opened = [self._decrypt(nonce, view) for nonce, view in zip(nonces, views, strict=True)]
            else:
                opened = list[Any](views)
                for place, nonce in enumerate(nonces):
                    self._cipher.decrypt(nonce, tags[TAG_BYTES * place :][:TAG_BYTES], views[place])
        except InvalidTag:
            raise BadMessageError(
                "with a wrong seal", "its seal is wrong: it was changed, or is of another process"
            ) from None
        if count <= self._count:
            raise BadMessageError("repeated", "it was recorded and sent again")
        self._count = count
        return opened

    def _decrypt(self, nonce: bytes, view: memoryview) -> Any:
        """Return the bytes of a frame. They may be changed, as those of a received frame."""
        size = len(view) - TAG_BYTES
        if size <= 0 or not _INTO:
            return bytearray(self._cipher.decrypt(nonce, view, None))
        plain = np.empty(size, np.uint8).data
        self._cipher.decrypt_into(nonce, view, None, plain)
        return plain


def _bytes_of(frame: Any) -> memoryview:
    """Return the bytes of a frame: `len` must count bytes, also for an array."""
    view = memoryview(frame)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class LinkKeys:
    """The secrets of one connection between a worker and a shard."""

    def __init__(self, encrypt: bool, secret: bytes, worker: bytes, shard: bytes, number: int) -> None:
        """Derive them from what only these two processes can compute, and from their public keys."""
        info = b"clickfleet wire" + _LINK.pack(PROTOCOL, encrypt, number) + worker + shard
        derived = HKDF(SHA256(), 3 * KEY_BYTES, salt=None, info=info).derive(secret)
        requests, answers, self.token = (derived[at : at + KEY_BYTES] for at in range(0, len(derived), KEY_BYTES))
        self.number, origin = number, (id_of(worker), number)
        self.requests, self.answers = Channel(encrypt, requests, origin), Channel(encrypt, answers, origin)

    @property
    def password(self) -> str:
        return _TOKEN.pack(PROTOCOL, self.number, self.token).hex()


def id_of(worker: bytes) -> bytes:
    """Return the short name of a public key."""
    return hashlib.sha256(worker).digest()[:_ID_BYTES]


def _common_secret(key: ProcessKey, other: bytes) -> bytes:
    """Return what only the owners of two keys can compute."""
    return X25519PrivateKey.from_private_bytes(key.secret).exchange(X25519PublicKey.from_public_bytes(other))


class ClientGuard:
    """Protect the connection of one link to one shard."""

    def __init__(self, key: ProcessKey, shard: ShardAddress, address: str) -> None:
        self._encrypt, self.worker = key.encrypt, id_of(key.shared)
        self.link: LinkKeys | None = None
        if not is_private(address):
            secret = _common_secret(key, shard.key)
            self.link = LinkKeys(key.encrypt, secret, key.shared, shard.key, next(_links))

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Set the token of a socket that is not connected yet."""
        if self.link is not None:
            socket.plain_username, socket.plain_password = self.worker.hex().encode(), self.link.password.encode()

    def seal(self, frames: Frames) -> Frames:
        return frames if self.link is None else self.link.requests.seal(frames)

    def open(self, frames: Frames) -> Frames:
        """Return the frames of an answer without its protection, or raise BadMessageError."""
        return frames if self.link is None else self.link.answers.open(SealedMessage.split(frames, self._encrypt))


class _Worker:
    """A worker that a shard has accepted at some time."""

    def __init__(self, key: bytes, secret: bytes) -> None:
        self.key, self.secret = key, secret
        self.links: dict[int, LinkKeys] = {}
        """Kept as long as the key of the shard is used: a link that starts again would use its nonces twice."""
        self.newest: dict[int, int] = {}
        """The newest link of each peer."""


class WorkerLink(NamedTuple):
    """A link that a message came over, at the shard."""

    worker: _Worker
    link: LinkKeys

    @property
    def seal(self) -> Seal:
        """How to seal the answers."""
        return self.link.answers.seal

    def claim(self, peer: int) -> None:
        """Let a peer use this link, and no older one. Raise BadMessageError if it has used a newer one."""
        if self.link.number < self.worker.newest.get(peer, 0):
            raise BadMessageError("repeated", "it was recorded on a link that its peer no longer uses")
        self.worker.newest[peer] = self.link.number


class WorkerLinks:
    """The links of workers to one shard: which workers are accepted, which connections, and which messages."""

    def __init__(self, key: ProcessKey) -> None:
        self._key = key
        self._workers: dict[bytes, _Worker] = {}
        self._accepted: frozenset[bytes] = frozenset()

    def accept(self, keys: Iterable[bytes]) -> None:
        """Accept the workers with these public keys, and no others, from now on. Thread-safe."""
        ids = {id_of(key): key for key in keys}
        for worker, key in ids.items():
            if worker not in self._workers:
                self._workers[worker] = _Worker(key, _common_secret(self._key, key))
        self._accepted = frozenset(ids)

    def admit(self, name: bytes, password: bytes) -> str:
        """Return the user of a new connection, or raise BadMessageError. A stranger's attempt leaves nothing in memory."""
        unknown = BadMessageError("with an unknown key", "its key does not belong to a worker of this run")
        try:
            worker = bytes.fromhex(name.decode())
            protocol, number, token = _TOKEN.unpack(bytes.fromhex(password.decode()))
        except (ValueError, struct.error):
            raise unknown from None
        if protocol != PROTOCOL:
            raise other_protocol(protocol, "the worker")
        if worker not in self._accepted:
            raise unknown
        known = self._workers[worker]
        link = known.links.get(number) or LinkKeys(self._key.encrypt, known.secret, known.key, self._key.shared, number)
        if not hmac.compare_digest(token, link.token):
            raise unknown
        known.links.setdefault(number, link)
        return _user(worker, number)

    def open(self, frames: Sequence[Any], user: str) -> tuple[Frames, WorkerLink]:
        """Return the frames of a request of this user without its protection, and its link. Raise BadMessageError if it is not genuine."""
        message = SealedMessage.split(frames, self._key.encrypt)
        name, number, _ = _MARK.unpack(message.mark)
        worker = self._workers.get(name)
        if worker is None:
            raise BadMessageError("with an unknown key", "its key does not belong to a worker of this run")
        if name not in self._accepted:
            raise BadMessageError("with a key that is no longer accepted", "its worker has left the run")
        link = worker.links.get(number)
        if link is None or user != _user(name, number):
            raise BadMessageError("with a wrong seal", "its seal is of another connection")
        return link.requests.open(message), WorkerLink(worker, link)


def _user(worker: bytes, number: int) -> str:
    """Return the name that ZeroMQ keeps for a connection and reports with each of its messages."""
    return f"{worker.hex()}-{number}"


class ServerGuard(WorkerLinks):
    """Protect the network socket of a shard.

    A thread answers ZeroMQ's question whether a connection is accepted, and counts those that are not. Every message is checked
    again, so a worker that is no longer accepted is rejected although it is connected.
    """

    def __init__(self, key: ProcessKey, context: zmq.Context[Any], refused: Rejections) -> None:
        super().__init__(key)
        self._refused = refused
        self._questions = context.socket(zmq.REP)
        self._questions.linger = 0
        self._questions.bind(_ZAP)
        self._failures = context.socket(zmq.PAIR)
        self._failures.linger = 0

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Prepare a socket that does not listen yet."""
        socket.plain_server = True
        socket.zap_domain = _DOMAIN
        socket.monitor("inproc://handshakes", _FAILED)
        self._failures.connect("inproc://handshakes")
        threading.Thread(target=self._answer, name="clickfleet-keys", daemon=True).start()

    def _answer(self) -> None:
        """Answer questions about connections until the context ends."""
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
        version, request, _, address, _, mechanism, *credentials = frames
        name, password = credentials if mechanism == b"PLAIN" and len(credentials) == 2 else (b"", b"")
        try:
            user = self.admit(name, password)
        except BadMessageError as problem:
            self._refused.add(problem, address.decode(errors="replace"))
            return [version, request, b"400", b"unknown key", b"", b""]
        return [version, request, b"200", b"OK", user.encode(), b""]
