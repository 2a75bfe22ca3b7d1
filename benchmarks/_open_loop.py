"""Send requests at fixed times, however slowly the server replies, and print the results as JSON.

python _open_loop.py URL BODIES RATE SECONDS [ROUTE]

BODIES is a file with a JSON body per line, which are sent in turn. Plain sockets and one thread: a request costs the client about a tenth
of what it costs the server, so it does not wait for the client.

Where client and server share cores, the client may be late: to send, and to notice a reply. `served_ms` has no such delays. It counts from
the call that sends a request until the reply is in the kernel, by the kernel's time stamp of the packet (Linux).
"""

import json
import select
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

PATIENCE_S = 10.0
"""How long the last replies are waited for."""
STAMPS, STAMP_RECEIVED = 37, 1 << 3 | 1 << 4
"""SO_TIMESTAMPING, and its flags for the time at which the kernel received a packet."""
STAMP = struct.Struct("@qq")
"""Seconds and nanoseconds of CLOCK_REALTIME."""


class Link:
    """A connection with at most one request on its way."""

    def __init__(self, host: str, port: int) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, STAMPS, STAMP_RECEIVED)
        self.due = 0.0
        self.sent_ns = self.arrived_ns = 0
        self.received = b""

    def complete(self) -> bool:
        """Read what is there. Return whether it is a whole reply. Raise OSError if the server closed the connection."""
        part, ancillary, *_ = self.socket.recvmsg(1 << 18, 256)
        if not part:
            raise OSError("the server closed the connection")
        for level, kind, stamp in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, STAMPS):
                seconds, nanoseconds = STAMP.unpack_from(stamp)
                self.arrived_ns = seconds * 10**9 + nanoseconds
        self.received += part
        head, found, body = self.received.partition(b"\r\n\r\n")
        return bool(found) and len(body) >= int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])


def open_loop(
    url: str, bodies: list[bytes], rate: float, seconds: float, route: str = "/v1/predict", connections: int = 16
) -> dict[str, Any]:
    """Send requests at fixed times. Latency counts from the time a request was due."""
    host, port = url.removeprefix("http://").split(":")
    head = f"POST {route} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
    messages = [f"{head}{len(body)}\r\n\r\n".encode() + body for body in bodies]
    links = {link.socket.fileno(): link for link in (Link(host, int(port)) for _ in range(connections))}
    free = list(links.values())
    times: list[float] = []
    served: list[int] = []
    contents: list[bytes] = []
    failed = sent = 0
    total = int(rate * seconds)
    now = begin = time.perf_counter()
    last = begin + seconds + PATIENCE_S
    while len(times) + failed < total and now < last:
        due = begin + sent / rate
        if sent < total and free and due <= now:
            link = free.pop()
            link.due, link.received, link.sent_ns = due, b"", time.time_ns()
            link.socket.sendall(messages[sent % len(messages)])
            sent += 1
            pause = 0.0
        else:
            pause = max(0.0, due - now) if sent < total and free else 0.1
        ready = select.select(list(links), (), (), pause)[0]  # poll would round to milliseconds
        now = time.perf_counter()
        for number in ready:
            link = links[number]
            try:
                if not link.complete():
                    continue
                if link.received.startswith(b"HTTP/1.1 200"):
                    times.append(now - link.due)
                    served.append(link.arrived_ns - link.sent_ns)
                    contents.append(link.received)
                else:
                    failed += 1
                free.append(link)
            except OSError:
                failed += 1
                del links[number]
    for link in links.values():
        link.socket.close()
    p50, p99 = np.percentile(np.array(times) * 1e3, [50, 99]).tolist()
    milliseconds = [round(1e3 * seconds, 4) for seconds in times]
    replies = [score_of(content) for content in contents]
    failed += total - len(times) - failed
    served_ms = [nanoseconds / 1e6 for nanoseconds in served]
    return {
        "p50_ms": p50,
        "p99_ms": p99,
        "failed": failed,
        "replies": replies,
        "times_ms": milliseconds,
        "served_ms": served_ms,
    }


def score_of(content: bytes) -> tuple[int, float]:
    """Return the sequence of a reply and its first score."""
    found = json.loads(content.partition(b"\r\n\r\n")[2])
    return found["sequence"], found["ranked"][0]["score"] if "ranked" in found else found["scores"][0]


if __name__ == "__main__":
    url, bodies, rate, seconds, *route = sys.argv[1:]
    print(json.dumps(open_loop(url, Path(bodies).read_bytes().splitlines(), float(rate), float(seconds), *route)))
