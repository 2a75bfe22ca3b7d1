"""The routes that may take their time, under Starlette: the page, the description of the interface, uploads, admin."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.datastructures import FormData, Headers
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from clickfleet.errors import ClickfleetError, MissingError, ServeError
from clickfleet.serve import inspecting, uploads, versions
from clickfleet.serve.batching import BusyError, LateError
from clickfleet.serve.connection import PAUSE
from clickfleet.serve.context import Context
from clickfleet.serve.http import clip
from clickfleet.serve.openapi import description

_HERE = Path(__file__).parent
_SAFE = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_AT_ONCE = 4
"""Uploads and the like that are worked on at a time."""
_ANSWER_S = 10.0


def make(context: Context) -> Starlette:
    """The application behind the fast one."""
    places = asyncio.Semaphore(_AT_ONCE)

    @asynccontextmanager
    async def admitted(request: Request) -> AsyncIterator[bytes]:
        """The body, once a place is free; the memory of all bodies is bounded, and how many are worked on."""
        context.admission.check(_length(request, context.settings.max_body))
        parts: list[bytes] = []
        try:
            async for part in request.stream():
                context.hold(len(part))
                parts.append(part)
            try:
                async with asyncio.timeout(context.settings.max_time_ms / 1e3):
                    await places.acquire()
            except TimeoutError:
                raise context.admission.refusal() from None
            try:
                yield b"".join(parts)
            finally:
                places.release()
        finally:
            context.held_bytes -= sum(map(len, parts))

    async def page(request: Request) -> Response:
        return HTMLResponse((_HERE / "page.html").read_text("utf-8"), headers=_SAFE)

    async def docs(request: Request) -> Response:
        return HTMLResponse((_HERE / "docs.html").read_text("utf-8"), headers=_SAFE)

    async def openapi(request: Request) -> Response:
        return JSONResponse(description(context.batcher.version.identity.name))

    async def upload(request: Request) -> Response:
        async with admitted(request) as body:
            content = await _file(request.headers, body)
            status, body, kind = await uploads.upload(context, request.query_params, content)
        return Response(body, status, media_type=kind)

    async def prediction(request: Request) -> Response:
        async with admitted(request) as body:
            status, body = await uploads.prediction(context, body)
        return Response(body, status, media_type="application/json")

    async def look(request: Request) -> Response:
        async with admitted(request) as lines:
            facts = await asyncio.to_thread(inspecting.inspect, context.batcher.version, lines, request.query_params)
        return Response(facts, media_type="application/json")

    async def rollback(request: Request) -> Response:
        _admin(request, context)
        try:
            sequence = orjson.loads(await _read(request, 4096))["sequence"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            sequence = None
        if not isinstance(sequence, int) or isinstance(sequence, bool) or not 0 <= sequence < 1 << 62:
            raise ServeError("the sequence to go back to is missing", 'send {"sequence": 7}')
        return await _ordered(context, sequence=sequence)

    async def follow(request: Request) -> Response:
        _admin(request, context)
        return await _ordered(context)

    routes = [
        Route("/", page),
        Route("/docs", docs),
        Route("/openapi.json", openapi),
        Route("/upload", upload, methods=["POST"]),
        Route("/rec/prediction", prediction, methods=["POST"]),
        Route("/v1/inspect", look, methods=["POST"]),
        Route("/admin/rollback", rollback, methods=["POST"]),
        Route("/admin/follow", follow, methods=["POST"]),
    ]
    handlers: Any = {
        404: _no_route,
        405: _no_method,
        ClickfleetError: _told,
        ClientDisconnect: _gone,
        Exception: _failed,
    }
    made = Starlette(routes=routes, exception_handlers=handlers)
    made.state.context = context
    return made


def _error(status: int, what: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": clip(what)}, status, headers=headers)


async def _no_route(request: Request, error: Exception) -> Response:
    return _error(404, "there is no such route; /docs lists them")


async def _no_method(request: Request, error: Any) -> Response:
    return _error(405, f"{request.url.path} does not take {request.method}", dict(error.headers or {}))


async def _gone(request: Request, error: Exception) -> Response:
    return _error(400, "the client is gone")


async def _told(request: Request, error: Exception) -> Response:
    if isinstance(error, BusyError):
        request.scope[PAUSE] = request.app.state.context.admission.pause_s()
        return _error(503, str(error), {"retry-after": str(max(1, round(error.retry_s)))})
    if isinstance(error, _RefusedError):
        return _error(error.status, str(error))
    return _error(504 if isinstance(error, LateError) else 501 if isinstance(error, MissingError) else 400, str(error))


async def _failed(request: Request, error: Exception) -> Response:
    """The application in front logs it."""
    return _error(500, "the server failed; its log says why")


class _RefusedError(ClickfleetError):
    def __init__(self, status: int, what: str) -> None:
        super().__init__(what)
        self.status = status


def _length(request: Request, limit: int) -> int:
    length = request.headers.get("content-length")
    if length is None or not length.isascii() or not length.isdigit():
        raise _RefusedError(411, "the length of the body must be known (Content-Length)")
    if len(length) > 18 or int(length) > limit:
        raise _RefusedError(413, f"the body is longer than {limit} bytes")
    return int(length)


async def _file(headers: Headers, body: bytes) -> bytes | None:
    """The field `file` of a form."""
    if not headers.get("content-type", "").startswith("multipart/form-data"):
        return None

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    async def parse() -> FormData:
        return await MultiPartParser(headers, stream(), max_files=4, max_fields=16, max_part_size=len(body)).parse()

    try:  # in a thread: this parser is slow where a form is mostly headers
        form = await asyncio.to_thread(asyncio.run, parse())
    except MultiPartException as error:
        raise ServeError(f"the form cannot be read: {error.message}") from None
    except Exception:  # what the parser of forms raises for bytes that are none
        raise ServeError("the form cannot be read") from None
    try:
        found = form.get("file")
        return None if found is None or isinstance(found, str) else await found.read()
    finally:
        await form.close()


async def _read(request: Request, limit: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _RefusedError(413, f"the body is longer than {limit} bytes")
        parts.append(part)
    return b"".join(parts)


def _admin(request: Request, context: Context) -> None:
    if not context.admin.required:
        raise _RefusedError(403, "this server has no admin token (start it with --admin-token-file)")
    if context.admin.closed:
        raise _RefusedError(503, "this server cannot check tokens now; its log says why")
    if not context.admin.allow(request.headers.get("authorization", "").encode("latin-1")):
        raise _RefusedError(401, "this route wants the admin's bearer token")


async def _ordered(context: Context, **wanted: Any) -> Response:
    """Hands a command to the updater and waits until it was obeyed, and taken over here.

    Commands are obeyed one after the other, each with an answer of its own: of two at once none is lost.
    """
    state = Path(context.settings.state)
    name = versions.command(state, **wanted)
    until = time.monotonic() + _ANSWER_S
    while (answer := versions.fetch(state, name)) is None:
        if time.monotonic() > until and versions.withdraw(state, name):
            raise _RefusedError(504, "the updater did not answer in time; the command was withdrawn")
        if time.monotonic() > 2 * _ANSWER_S + until:
            raise _RefusedError(504, "the updater took the command but did not answer; /v1/model shows what is served")
        await asyncio.sleep(0.02)
    told = answer.pop("told")
    while context.status.told < told and context.problem is None and time.monotonic() < until:
        await asyncio.sleep(0.02)
    return JSONResponse(answer, 409 if answer["problem"] else 200)
