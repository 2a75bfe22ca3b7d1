"""One HTTP connection with limits: bytes of its head, time for its head, its body, its reply and its silence.

One sweep over all connections sees what each waits for, and closes those that wait for the same thing too long. So a request pays
almost nothing for the limits, and a client cannot extend one by sending a byte now and then.
"""

import asyncio
import socket
import struct
from dataclasses import dataclass
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from clickfleet.serve.faults import log_fault
from clickfleet.serve.meter import Meter

HEAD, BODY, REPLY, IDLE = range(4)
PAUSE = "clickfleet.pause_s"
"""Key of a scope: how long its connection is not read after a refusal, so that retries do not crowd out other requests."""
MOST_PIPELINED = 64
_MOST_SWEEP_S, _LEAST_SWEEP_S = 1.0, 0.05


@dataclass(frozen=True)
class Limits:
    """What a connection may take."""

    header_bytes: int
    header_s: float
    body_s: float
    send_s: float
    idle_s: float
    connections: int

    @property
    def sweep_s(self) -> float:
        """How often to look at the connections: several times within the shortest limit."""
        shortest = min(self.header_s, self.body_s, self.send_s, self.idle_s)
        return min(_MOST_SWEEP_S, max(_LEAST_SWEEP_S, shortest / 4))


class Connection(HttpToolsProtocol):
    """Uvicorn's protocol, which has none of these limits."""

    limits: Limits
    meter: Meter

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._seen: tuple[int, Any] = HEAD, None
        """What it waited for at the last sweep, and since when."""
        self._since = self.loop.time()
        self._unsent_since: float | None = None
        self._fed = 0
        """Bytes since a head was last known to be whole."""
        self._fed_for: Any = None
        self._dropped = False
        self._running: RequestResponseCycle | None = None
        """The request being answered; `cycle` is the newest one read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        if len(self.connections) > self.limits.connections:
            self._close(503, "the server has too many connections", "connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._dropped:
            return
        self._fed += len(data)
        super().data_received(data)
        if self._fed > self.limits.header_bytes:
            self._check_head(len(data))
        if self.pipeline and len(self.pipeline) > MOST_PIPELINED:
            self._close(429, "too many requests were sent before a reply was read", "pipelined")

    def _check_head(self, last: int) -> None:
        """Refuses a head that is too long; bytes of bodies and of earlier requests do not count."""
        scope: Any = self.scope
        if scope is not None and "method" in scope:  # it is whole
            self._fed = 0
            if (
                len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
                <= self.limits.header_bytes
            ):
                return
        elif self.cycle is not None and self._fed_for is not scope:  # it has just begun, behind other bytes
            self._fed, self._fed_for = last, scope
            return
        self._close(431, "the header is too long", "header_bytes")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def on_response_complete(self) -> None:
        """As its parent does, but without a timer for every reply; the connection of a refused request rests first."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        running: Any = self._running
        pause = running.scope.get(PAUSE)
        if pause:
            self.flow.pause_reading()
            self.loop.call_later(pause, self._go_on)
        else:
            self._go_on()

    def _go_on(self) -> None:
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())

    def send_400_response(self, msg: str) -> None:
        """Called for bytes that are not HTTP."""
        self._close(400, "this is not an HTTP request", "bad_requests")

    @property
    def phase(self) -> int:
        """What the connection waits for."""
        scope: Any = self.scope
        if scope is None or "method" not in scope or cast(Any, self.cycle) is None:
            return HEAD
        if self.cycle.more_body:
            return BODY
        return IDLE if self.cycle.response_complete else REPLY

    def sweep(self, now: float) -> None:
        """Closes the connection if it has exceeded a limit."""
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
        if self._seen[0] != phase or self._seen[1] is not self.scope:
            self._seen, self._since = (phase, self.scope), now
        waited = now - self._since
        if phase == IDLE and waited > limits.idle_s:
            self.transport.close()
        elif phase == HEAD and waited > limits.header_s:
            self._close(408, "the header took too long to arrive", "header_time")
        elif phase == BODY and waited > limits.body_s:
            self._close(408, "the body took too long to arrive", "body_time")

    def _close(self, status: int, text: str, reason: str) -> None:
        """Answers where an answer may still be sent, and closes."""
        if self._dropped or self.transport.is_closing():
            return
        self._dropped = True
        self._count(reason)
        running = self._running
        if running is None or not running.response_started or (running.response_complete and self.phase == HEAD):
            body = b'{"error":"%s"}' % text.encode()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self._forget()
        self.transport.close()

    def _forget(self) -> None:
        """Lets whoever answers a request know that nobody listens, and drops those that follow."""
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _abort(self) -> None:
        """Closes without sending what is unsent: a client that does not read would keep it in the kernel for minutes."""
        self._forget()
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _count(self, reason: str) -> None:
        self.meter.count(f"closed_{reason}")


def limited(limits: Limits, meter: Meter) -> type[Connection]:
    """The protocol class with some limits."""
    return type("LimitedConnection", (Connection,), {"limits": limits, "meter": meter})


async def sweep(connections: set[Any], limits: Limits) -> None:
    """Looks at all connections again and again."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(limits.sweep_s)
        now = loop.time()
        for connection in list(connections):
            try:
                connection.sweep(now)
            except Exception:  # one that we misjudge must not keep the others open
                log_fault()
                connection.transport.abort()
