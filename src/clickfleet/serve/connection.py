"""An HTTP connection with limits: size of the header, and time for header, body, reply and idling.

A periodic sweep checks what each connection waits for and closes those that have waited too long. A request therefore pays almost
nothing for the limits, and a client cannot extend them by sending single bytes.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from clickfleet.errors import hide
from clickfleet.serve.counters import Meter

REPEAT_S = 60.0
"""Time before the same traceback is printed again."""
_logged: dict[str, float] = {}


def log_fault() -> str:
    """Print the traceback of the current exception, at most once a minute. Return its last line."""
    text = hide(traceback.format_exc())
    now = time.monotonic()
    if now - _logged.get(text, -REPEAT_S) >= REPEAT_S:
        if len(_logged) > 1000:
            _logged.clear()
        _logged[text] = now
        print(text, end="", file=sys.stderr, flush=True)
    return text.rstrip().rpartition("\n")[2][:500]


HEAD, BODY, REPLY, IDLE = range(4)
PAUSE = "clickfleet.pause_s"
"""Scope key: how long to stop reading the connection after a refusal, so that retries do not crowd out other requests."""
MAX_PIPELINED = 64
_MAX_SWEEP_S, _MIN_SWEEP_S = 1.0, 0.05


@dataclass(frozen=True)
class Limits:
    header_bytes: int
    header_s: float
    body_s: float
    send_s: float
    idle_s: float
    connections: int

    @property
    def sweep_s(self) -> float:
        """Return the period of the sweep: several times within the shortest limit."""
        shortest = min(self.header_s, self.body_s, self.send_s, self.idle_s)
        return min(_MAX_SWEEP_S, max(_MIN_SWEEP_S, shortest / 4))


class Connection(HttpToolsProtocol):
    """Uvicorn's HTTP protocol plus limits."""

    limits: Limits
    meter: Meter

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._last_phase: tuple[int, Any] = HEAD, None
        """Phase and scope at the last sweep."""
        self._phase_since = self.loop.time()
        self._unsent_since: float | None = None
        self._head_bytes = 0
        """Bytes received since the last complete header."""
        self._head_scope: Any = None
        self._closed = False
        self._active: RequestResponseCycle | None = None
        """The request being answered. `cycle` is the newest one read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._phase_since = self.loop.time()
        if len(self.connections) > self.limits.connections:
            self._close(503, "the server has too many connections", "connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_requests()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._closed:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > self.limits.header_bytes:
            self._check_head(len(data))
        if self.pipeline and len(self.pipeline) > MAX_PIPELINED:
            self._close(429, "too many requests were sent before a reply was read", "pipelined")

    def _check_head(self, last: int) -> None:
        """Close the connection if its header is too long. Bytes of bodies and earlier requests do not count."""
        scope: Any = self.scope
        if scope is not None and "method" in scope:  # the header is complete
            self._head_bytes = 0
            if (
                len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
                <= self.limits.header_bytes
            ):
                return
        elif self.cycle is not None and self._head_scope is not scope:  # the header has just begun, after other bytes
            self._head_bytes, self._head_scope = last, scope
            return
        self._close(431, "the header is too long", "header_bytes")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def on_response_complete(self) -> None:
        """Do what the parent does, without a timer per reply. Pause the connection of a refused request first."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        running: Any = self._active
        pause = running.scope.get(PAUSE)
        if pause:
            self.flow.pause_reading()
            self.loop.call_later(pause, self._resume)
        else:
            self._resume()

    def _resume(self) -> None:
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())

    def send_400_response(self, msg: str) -> None:
        """Reply to bytes that are not HTTP (called by the parent)."""
        self._close(400, "this is not an HTTP request", "bad_requests")

    @property
    def phase(self) -> int:
        """Return what the connection waits for."""
        scope: Any = self.scope
        if scope is None or "method" not in scope or cast(Any, self.cycle) is None:
            return HEAD
        if self.cycle.more_body:
            return BODY
        return IDLE if self.cycle.response_complete else REPLY

    def sweep(self, now: float) -> None:
        """Close the connection if it has exceeded a limit."""
        limits, phase = self.limits, self.phase
        unsent = self.transport.is_closing() or self.transport.get_write_buffer_size() > 0
        if not unsent:
            self._unsent_since = None
        elif self._unsent_since is None:
            self._unsent_since = now
        elif now - self._unsent_since > limits.send_s:
            self._count("send")
            self._abort()
            return
        if self._last_phase[0] != phase or self._last_phase[1] is not self.scope:
            self._last_phase, self._phase_since = (phase, self.scope), now
        waited = now - self._phase_since
        if phase == IDLE and waited > limits.idle_s:
            self.transport.close()
        elif phase == HEAD and waited > limits.header_s:
            self._close(408, "the header took too long to arrive", "header_time")
        elif phase == BODY and waited > limits.body_s:
            self._close(408, "the body took too long to arrive", "body_time")

    def _close(self, status: int, text: str, reason: str) -> None:
        """Send an error if the protocol still allows one, and close."""
        if self._closed or self.transport.is_closing():
            return
        self._closed = True
        self._count(reason)
        running = self._active
        if running is None or not running.response_started or (running.response_complete and self.phase == HEAD):
            body = b'{"error":"%s"}' % text.encode()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self._drop_requests()
        self.transport.close()

    def _drop_requests(self) -> None:
        """Signal the disconnect to the active request, and drop the pipelined ones."""
        self.pipeline.clear()
        if self._active is not None and not self._active.response_complete:
            self._active.disconnected = True
            self._active.message_event.set()

    def _abort(self) -> None:
        """Close and discard unsent bytes: a client that does not read would keep them in the kernel for minutes."""
        self._drop_requests()
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _count(self, reason: str) -> None:
        self.meter.count(f"closed_{reason}")


def limited(limits: Limits, meter: Meter) -> type[Connection]:
    """Return the protocol class with these limits."""
    return type("LimitedConnection", (Connection,), {"limits": limits, "meter": meter})


async def sweep(connections: set[Any], limits: Limits) -> None:
    """Check all connections periodically."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(limits.sweep_s)
        now = loop.time()
        for connection in list(connections):
            try:
                connection.sweep(now)
            except Exception:  # a fault in one connection must not stop the sweep
                log_fault()
                connection.transport.abort()
