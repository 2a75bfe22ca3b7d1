"""The HTTP routes that must be fast, as a bare ASGI application. Everything else is passed to the Starlette application in `admin`."""

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

from clickfleet.data.events import id_of
from clickfleet.errors import ClickfleetError, MissingError, ServeError, hide
from clickfleet.serve import json_api, open_inference
from clickfleet.serve.batching import SMALL_BYTES, BusyError, LateError
from clickfleet.serve.connection import PAUSE, log_fault
from clickfleet.serve.context import Context
from clickfleet.serve.feedback import read_feedback
from clickfleet.serve.show_log import new_request

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
Answer = tuple[int, bytes, Headers]

JSON: Headers = [(b"content-type", b"application/json")]
TEXT: Headers = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
BINARY = (b"content-type", b"application/octet-stream")
HEADER_LENGTH = b"inference-header-content-length"
PUBLIC = ("/health", "/ready", "/v2/health/live", "/v2/health/ready")
"""Routes that need no token: health checks have none."""
PAGES = ("/", "/docs", "/loop")
"""Pages without facts of the model: their requests carry the token that the user enters."""
COMPRESS_FROM = 1 << 14


class RefusedError(ClickfleetError):
    """A request that gets this status, with these headers besides the usual ones."""

    def __init__(self, status: int, what: str, headers: Headers | None = None) -> None:
        super().__init__(what)
        self.status, self.headers = status, headers or []


def error_reply(status: int, what: str, headers: Headers | None = None) -> Answer:
    return status, orjson.dumps({"error": clip(what)}), [*JSON, *(headers or [])]


def refuse(error: ClickfleetError, scope: Scope, context: Context) -> Answer:
    """Return the reply to a request that failed with an error of the client or of the server's load."""
    if isinstance(error, RefusedError):
        return error_reply(error.status, str(error), error.headers)
    if isinstance(error, BusyError):
        scope[PAUSE] = context.admission.pause_s()
        return error_reply(503, str(error), [(b"retry-after", b"%d" % max(1, round(error.retry_s)))])
    status = 504 if isinstance(error, LateError) else 501 if isinstance(error, MissingError) else 400
    return error_reply(status, str(error))


def clip(what: str, limit: int = 2000) -> str:
    """Return an error text that can be sent: bounded in length, valid Unicode, without passwords."""
    return hide(what if len(what) <= limit else f"{what[:limit]} …").encode(errors="replace").decode()


class App:
    """One worker's HTTP application."""

    def __init__(self, context: Context, fallback: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.context, self.fallback = context, fallback
        self._get: dict[str, Callable[[], Answer]] = {
            "/health": lambda: (200, b'{"status":"alive"}', JSON),
            "/v2/health/live": lambda: (200, b'{"live":true}', JSON),
            "/ready": self._ready,
            "/v2/health/ready": self._ready,
            "/v1/model": lambda: (200, orjson.dumps(self.context.describe()), JSON),
            "/v1/stats": lambda: (200, orjson.dumps(self.context.stats()), JSON),
            "/metrics": lambda: (200, self.context.metrics(), TEXT),
            "/v2": self._server,
            "/v2/": self._server,
        }
        self._post: dict[str, Callable[..., Awaitable[Answer]]] = {
            "/v1/predict": self._predict,
            "/v1/rank": self._rank,
            "/v1/explain": self._explain,
            "/v1/feedback": self._feedback,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":  # WebSockets are not supported
            await send({"type": "websocket.close", "code": 1008})
            return
        context = self.context
        started = time.perf_counter()
        context.active += 1
        path, route = scope["path"], "other"
        try:
            try:
                route, answer = await self._answer(scope, receive, path, started)
            except ClickfleetError as error:
                route, answer = _route_name(path), refuse(error, scope, context)
            if answer is None:
                status = await self._run_fallback(scope, receive, send, started)
                context.active -= 1
                context.meter.reply("slow", status, time.perf_counter() - started)
                return
        except Exception:
            log_fault()
            context.meter.count("faults")
            answer = error_reply(500, "internal server error; see the server's log")
        status, body, headers = answer
        took = time.perf_counter() - started
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": status,
                    "headers": [
                        *headers,
                        (b"content-length", b"%d" % len(body)),
                        (b"server-timing", b"total;dur=%.3f" % (1e3 * took)),
                        *([(b"connection", b"close")] if context.draining else ()),
                    ],
                }
            )
            await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
        finally:
            context.active -= 1
        context.meter.reply(route, status, took)
        if context.shows is not None:
            context.shows.make_room()

    async def _answer(self, scope: Scope, receive: Receive, path: str, started: float) -> tuple[str, Any]:
        context, method = self.context, scope["method"]
        if context.tokens.required and path not in PUBLIC:
            self._authorise(scope, path)
        if method == "POST":
            handler = self._post.get(path)
            if handler is None and path.startswith("/v2/models/") and path.endswith("/infer"):
                self._check_model(path.removesuffix("/infer"))
                handler, path = self._infer, "/v2/infer"
            if handler is not None:
                return path, await self._admitted(handler, dict(scope["headers"]), receive, started)
        elif method in ("GET", "HEAD"):
            get = self._get.get(path)
            if get is not None:
                return path, get()
            if path.startswith("/v2/models/"):
                return "/v2/models", self._model_metadata(path)
        if path in self._get or path in self._post:
            allowed = b"GET" if path in self._get else b"POST"
            raise RefusedError(405, f"{path} accepts only {allowed.decode()}", [(b"allow", allowed)])
        if not scope["query_string"].isascii():
            raise ServeError("the query string is not ASCII")
        return "slow", None

    async def _admitted(self, handler: Any, headers: dict[bytes, bytes], receive: Receive, started: float) -> Answer:
        """Read the body and wait until it may be parsed. Raise `BusyError` if the wait would be too long."""
        context = self.context
        context.admission.check(self._content_length(headers))
        body = await self._body(receive)
        size = len(body)
        if size <= SMALL_BYTES:  # the common case, kept short
            return await self._handle(handler, headers, body, started)
        async with context.admitted(size):
            return await self._handle(handler, headers, body, started)

    def _handle(self, handler: Any, headers: dict[bytes, bytes], body: bytes, started: float) -> Awaitable[Answer]:
        packed = headers.get(b"content-encoding")
        if packed is not None and packed != b"identity":
            body = _unpack(packed, body, self.context.settings.max_body)
        answer: Awaitable[Answer] = handler(headers, body, started)
        return answer

    def _authorise(self, scope: Scope, path: str) -> None:
        if path in PAGES or path.startswith("/admin"):
            return  # the pages ask for the token themselves; admin routes have their own tokens
        if self.context.tokens.closed:
            raise RefusedError(503, "the server cannot check tokens at the moment; see its log")
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not self.context.tokens.allow(header):
            raise RefusedError(401, "this server requires a bearer token", [(b"www-authenticate", b"Bearer")])

    async def _run_fallback(self, scope: Scope, receive: Receive, send: Send, started: float) -> int:
        status = 0

        async def record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                took = b"total;dur=%.3f" % (1e3 * (time.perf_counter() - started))
                message = {**message, "headers": [*message["headers"], (b"server-timing", took)]}
            await send(message)

        try:
            await self.fallback(scope, receive, record_status)
        except Exception:
            if not status:
                raise
            log_fault()  # a reply was sent (500), or the client disconnected
            self.context.meter.count("faults")
        return status

    def _content_length(self, headers: dict[bytes, bytes]) -> int:
        """Return the declared length of the body, or the limit if it is chunked."""
        limit = self.context.settings.max_body
        length = headers.get(b"content-length", b"0")
        if len(length) > 18 or not length.isdigit() or int(length) > limit:
            raise RefusedError(413, f"the body exceeds {limit} bytes", [(b"connection", b"close")])
        return limit if b"transfer-encoding" in headers else int(length)

    async def _body(self, receive: Receive) -> bytes:
        message = await receive()
        body: bytes = message.get("body", b"")
        if message.get("more_body"):
            body = await self._chunked_body(message, receive, self.context.settings.max_body)
        elif message["type"] == "http.disconnect":
            raise RefusedError(400, "the client disconnected")
        return body

    async def _chunked_body(self, message: Message, receive: Receive, limit: int) -> bytes:
        """Read the rest of a body that arrives in parts."""
        context = self.context
        parts, size = [message["body"]], len(message["body"])
        context.hold(size)
        try:
            async with asyncio.timeout(context.settings.max_time_ms / 1e3):
                while message.get("more_body"):
                    message = await receive()
                    part = message.get("body", b"")
                    context.hold(len(part))
                    size += len(part)
                    if size > limit:
                        raise RefusedError(413, f"the body exceeds {limit} bytes", [(b"connection", b"close")])
                    parts.append(part)
        except TimeoutError:
            raise RefusedError(408, "the body took too long to arrive", [(b"connection", b"close")]) from None
        finally:
            context.held_bytes -= size
        if message["type"] == "http.disconnect":
            raise RefusedError(400, "the client disconnected")
        return b"".join(parts)

    def _deadline(self, headers: dict[bytes, bytes], started: float, microseconds: Any = None) -> float:
        """Return when the reply is due: the earliest of the header `x-timeout-ms`, the protocol's `timeout` and the server's limit."""
        limit = self.context.settings.max_time_ms
        timeout_ms = headers.get(b"x-timeout-ms")
        if timeout_ms is not None:
            try:
                limit = min(limit, float(timeout_ms))
            except ValueError:
                raise ServeError("x-timeout-ms must be a number") from None
        if microseconds:
            if not isinstance(microseconds, int | float):
                raise ServeError("timeout must be a number of microseconds")
            try:
                limit = min(limit, microseconds / 1e3)
            except OverflowError:  # an integer larger than any float
                raise ServeError("timeout must be a number of microseconds") from None
        return started + limit / 1e3

    async def _infer(self, headers: dict[bytes, bytes], body: bytes, started: float) -> Answer:
        version = self.context.batcher.version
        length = headers.get(HEADER_LENGTH)
        if length is not None and (len(length) > 18 or not length.isdigit()):
            raise ServeError("Inference-Header-Content-Length must be a number of at most 18 digits")
        request, tensors = open_inference.read(body, None if length is None else int(length))
        names = open_inference.requested_outputs(request, version)
        batch = open_inference.batch(tensors, version, self.context.settings.max_rows)
        request_id = self._request_id(headers, request.id or None)
        deadline = self._deadline(headers, started, request.parameters.get("timeout"))
        done = await self.context.batcher.score(batch, version, deadline)
        if done.version is not version:
            names = open_inference.requested_outputs(request, done.version)
        reply, head = open_inference.reply(request_id, done.version, done.outputs, names)
        if self.context.shows is not None:
            self.context.shows.infer(request_id, tensors, batch, version, done)
        answer: Headers = JSON if head is None else [BINARY, (HEADER_LENGTH, b"%d" % head)]
        return _pack(headers, reply, answer)

    async def _predict(self, headers: dict[bytes, bytes], body: bytes, started: float) -> Answer:
        version = self.context.batcher.version
        request = json_api.read_predict(body)
        open_inference.check_rows(len(request.rows), self.context.settings.max_rows)
        batch = version.fields.rows(request.rows)
        request_id, items = self._request_id(headers, request.request), json_api.item_ids(request)
        done = await self.context.batcher.score(batch, version, self._deadline(headers, started))
        reply = json_api.predict_reply(request, done, time.perf_counter() - started, request_id)
        if self.context.shows is not None:
            self.context.shows.predict(request_id, body, items, done)
        return _pack(headers, reply, JSON)

    async def _rank(self, headers: dict[bytes, bytes], body: bytes, started: float) -> Answer:
        version = self.context.batcher.version
        request = json_api.read_rank(body)
        rank = json_api.Ranking(request, version, self.context.settings.max_candidates)
        request_id, deadline = self._request_id(headers, request.request), self._deadline(headers, started)
        if rank.batch is None:
            return 200, rank.reply(None, version, time.perf_counter() - started, request_id), JSON
        done = await self.context.batcher.score(rank.batch, version, deadline)
        reply = rank.reply(done.outputs, done.version, time.perf_counter() - started, request_id)
        if self.context.shows is not None:
            items = [str(item) for item in rank.ids]
            self.context.shows.rank(request_id, body, items, rank.places, rank.ranked, done)
        return _pack(headers, reply, JSON)

    async def _explain(self, headers: dict[bytes, bytes], body: bytes, started: float) -> Answer:
        version = self.context.batcher.version
        request = json_api.read_predict(body)
        max_rows = self.context.settings.max_rows
        open_inference.check_rows(len(request.rows), max_rows)
        ablations = json_api.Ablations(request.rows, version, max_rows)
        done = await self.context.batcher.score(ablations.batch, version, self._deadline(headers, started))
        return _pack(headers, ablations.reply(done), JSON)

    async def _feedback(self, headers: dict[bytes, bytes], body: bytes, started: float) -> Answer:
        log = self.context.feedback
        if log is None:
            raise RefusedError(403, "feedback is disabled; start the server with --feedback FOLDER")
        events = read_feedback(body)
        return 200, await log.store(events, len(body), self._deadline(headers, started) - started), JSON

    def _request_id(self, headers: dict[bytes, bytes], given: str | int | None) -> str:
        """Return the id that the client gave, in the request or in x-request-id; else a new one if shows are logged."""
        if given is None and (header := headers.get(b"x-request-id")) is not None:
            given = header.decode("utf-8", "replace")
        if given is None:
            return "" if self.context.shows is None else new_request()
        try:
            return id_of(given, "id of the request")
        except ValueError as error:
            raise ServeError(str(error)) from None

    def _ready(self) -> Answer:
        ready, details = self.context.ready()
        return 200 if ready else 503, orjson.dumps(details), JSON

    def _server(self) -> Answer:
        from clickfleet import __version__

        facts = {"name": "clickfleet", "version": __version__, "extensions": ["binary_tensor_data"]}
        return 200, orjson.dumps(facts), JSON

    def _check_model(self, path: str) -> None:
        """Raise `RefusedError` for a model or version that is not served."""
        name, _, rest = path.removeprefix("/v2/models/").partition("/")
        version = self.context.batcher.version
        if name != version.identity.name:
            raise RefusedError(404, f"unknown model {name!r}; this server has {version.identity.name!r}")
        if rest and rest != f"versions/{version.version}":
            raise RefusedError(404, f"{rest} is not served; the current version is {version.version}")

    def _model_metadata(self, path: str) -> Answer:
        if path.endswith("/ready"):
            self._check_model(path.removesuffix("/ready"))
            return self._ready()
        self._check_model(path)
        return 200, orjson.dumps(open_inference.metadata(self.context.batcher.version)), JSON


def _route_name(path: str) -> str:
    """Return the route's label in the metrics. Unknown paths share one label."""
    if path.startswith("/v2/models/"):
        return "/v2/infer" if path.endswith("/infer") else "/v2/models"
    return path if path in _ROUTES else "other"


_ROUTES = ("/v1/predict", "/v1/rank", "/v1/explain", "/v1/feedback", "/v1/model", "/metrics")


def _unpack(packed: bytes, body: bytes, limit: int) -> bytes:
    windows = {b"gzip": 31, b"deflate": 15}.get(packed)
    if windows is None:
        raise RefusedError(415, f"unsupported content encoding {packed.decode('latin-1')!r}; use gzip or deflate")
    try:
        inflate = zlib.decompressobj(windows)
        plain = inflate.decompress(body, limit + 1)
    except zlib.error:
        raise ServeError("the body does not match its Content-Encoding") from None
    if len(plain) > limit or inflate.unconsumed_tail:
        raise RefusedError(413, f"the body exceeds {limit} bytes")
    if not inflate.eof:
        raise ServeError("the compressed body is truncated")
    return plain


def _pack(headers: dict[bytes, bytes], body: bytes, answer: Headers) -> Answer:
    if len(body) < COMPRESS_FROM or b"gzip" not in headers.get(b"accept-encoding", b""):
        return 200, body, answer
    deflate = zlib.compressobj(1, wbits=31)
    return 200, deflate.compress(body) + deflate.flush(), [*answer, (b"content-encoding", b"gzip")]


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
