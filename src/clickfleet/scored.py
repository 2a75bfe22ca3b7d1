"""Files -> a server -> scores, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from clickfleet.client import Client, GrpcClient, Scores
from clickfleet.errors import ConfigError, ServeError
from clickfleet.files import Unpacked, expand
from clickfleet.find import Plugin
from clickfleet.reader import Reader
from clickfleet.schema import Schema

Show = Callable[[int, list[float], float, float], None]


def score_files(
    url: str,
    data: Sequence[str],
    show: Show,
    *,
    batch_size: int = 5,
    protocol: str = "http",
    form: str | None = None,
    grpc_address: str | None = None,
    limit: int | None = None,
    token: str | None = None,
    certificate: str | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Sends every row; the times of all requests. `trust` allows a reader or a command that the server names to run here."""
    if protocol not in ("http", "grpc", "upload"):
        raise ConfigError(f"unknown protocol {protocol!r}", "choose http, grpc or upload")
    with Client(url, token, certificate=certificate) as client:
        served = client.model()
        if not isinstance(served, dict) or not isinstance(served.get("schema"), dict):
            raise ServeError(f"{url} is no server of ours: it does not say what it serves", "check the address")
        format_ = Plugin(form) if form else Plugin.parse(served.get("format"), "" if trust else url)
        if protocol == "upload":
            asked = (client.upload(lines, format_.name) for lines in groups_of_lines(data, batch_size, limit))
            return _all(asked, show)
        reader = Reader(list(data), Schema.from_dict(served["schema"]), format_, batch_size)
        batches = (batch for batch, _ in zip(reader, _numbers(batch_size, limit), strict=False))
        if protocol == "http":
            return _all((client.score(batch) for batch in batches), show)
        with GrpcClient(grpc_address or _beside(url), str(served["name"]), token) as calls:
            return _all((calls.score(batch) for batch in batches), show)


def _all(asked: Iterator[Scores], show: Show) -> dict[str, Any]:
    rows, times = 0, []
    for number, reply in enumerate(asked):
        show(number, reply.scores.tolist(), reply.client_ms, reply.server_ms)
        rows += len(reply.scores)
        times.append(reply.client_ms)
    p50, p99 = np.percentile(times, [50, 99]).tolist() if times else (0.0, 0.0)
    return {"rows": rows, "batches": len(times), "p50_ms": p50, "p99_ms": p99}


def _numbers(batch_size: int, limit: int | None) -> range:
    return range(1 << 62 if limit is None else -(-limit // batch_size))


def _beside(url: str) -> str:
    """The port after HTTP's, as `serve` chooses by default."""
    host, _, port = url.partition("://")[2].strip("/").rpartition(":")
    if not port.isdigit():
        raise ConfigError("the gRPC port is not known", "give --grpc-address host:port")
    return f"{host}:{int(port) + 1}"


def groups_of_lines(data: Sequence[str], size: int, limit: int | None = None) -> Iterator[bytes]:
    """Text lines as the files have them, `size` at a time, at most `limit` in all; a group does not cross files."""
    left = 1 << 62 if limit is None else limit
    for path in expand(list(data)):
        stream, waiting, carry, got = Unpacked(path), [], b"", 1
        try:
            while got and left > 0:
                space = bytearray(1 << 16)
                with memoryview(space) as view:
                    got = stream.readinto(view)
                lines = (carry + bytes(space[:got])).splitlines(keepends=True)
                carry = lines.pop() if got and lines and not lines[-1].endswith(b"\n") else b""
                waiting += lines
                while left > 0 and (len(waiting) >= size or (waiting and not got)):
                    group = waiting[: min(size, left)]
                    del waiting[: len(group)]
                    left -= len(group)
                    yield b"".join(group)
        finally:
            stream.close()
