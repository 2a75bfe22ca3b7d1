"""The routes that may take their time, under Starlette: the page, the description of the interface, uploads, admin."""

import asyncio
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from clickfleet.errors import ClickfleetError, MissingError, ServeError
from clickfleet.serve import inspecting, uploads
from clickfleet.serve.batching import BusyError, LateError
from clickfleet.serve.context import Context
from clickfleet.serve.openapi import description

_HERE = Path(__file__).parent
_SAFE = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def make(context: Context) -> Starlette:
    """The application behind the fast one."""

    async def page(request: Request) -> Response:
        return HTMLResponse((_HERE / "page.html").read_text("utf-8"), headers=_SAFE)

    async def docs(request: Request) -> Response:
        return HTMLResponse((_HERE / "docs.html").read_text("utf-8"), headers=_SAFE)

    async def openapi(request: Request) -> Response:
        return JSONResponse(description(context.batcher.version.identity.name))

    async def upload(request: Request) -> Response:
        await _bounded(request, context.settings.max_body)
        content: bytes | None = None
        if request.headers.get("content-type", "").startswith("multipart/form-data"):
            try:
                form = await request.form(max_files=4, max_fields=16, max_part_size=context.settings.max_body)
            except MultiPartException as error:
                raise ServeError(f"the form cannot be read: {error.message}") from None
            except Exception as error:  # what the parser of forms raises for bytes that are none
                if isinstance(error, ClientDisconnect):
                    raise
                raise ServeError("the form cannot be read") from None
            found = form.get("file")
            if found is not None and not isinstance(found, str):
                content = await found.read()
            await form.close()
        status, body, kind = await uploads.upload(context, request.query_params, content)
        return Response(body, status, media_type=kind)

    async def prediction(request: Request) -> Response:
        await _bounded(request, context.settings.max_body)
        status, body = await uploads.prediction(context, await _read(request, context.settings.max_body))
        return Response(body, status, media_type="application/json")

    async def look(request: Request) -> Response:
        await _bounded(request, context.settings.max_body)
        given = await _read(request, context.settings.max_body)
        facts = await asyncio.to_thread(inspecting.inspect, context.batcher.version, given, request.query_params)
        return Response(facts, media_type="application/json")

    async def rollback(request: Request) -> Response:
        _admin(request, context)
        try:
            sequence = orjson.loads(await _read(request, 4096))["sequence"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            sequence = None
        if not isinstance(sequence, int) or isinstance(sequence, bool) or sequence < 0:
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
        404: lambda request, error: _error(404, "there is no such route; /docs lists them"),
        405: lambda request, error: _error(
            405, f"{request.url.path} does not take {request.method}", dict(error.headers or {})
        ),
        ClickfleetError: _told,
        ClientDisconnect: lambda request, error: _error(400, "the client is gone"),
        Exception: _failed,
    }
    return Starlette(routes=routes, exception_handlers=handlers)


def _error(status: int, what: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": what}, status, headers=headers)


def _told(request: Request, error: Exception) -> Response:
    if isinstance(error, BusyError):
        return _error(503, str(error), {"retry-after": str(max(1, round(error.retry_s)))})
    if isinstance(error, _RefusedError):
        return _error(error.status, str(error))
    return _error(504 if isinstance(error, LateError) else 501 if isinstance(error, MissingError) else 400, str(error))


def _failed(request: Request, error: Exception) -> Response:
    traceback.print_exception(error, file=sys.stderr)
    return _error(500, "the server failed; its log says why")


class _RefusedError(ClickfleetError):
    def __init__(self, status: int, what: str) -> None:
        super().__init__(what)
        self.status = status


async def _bounded(request: Request, limit: int) -> None:
    length = request.headers.get("content-length")
    if length is None:
        raise _RefusedError(411, "the length of the body must be known (Content-Length)")
    if int(length) > limit:
        raise _RefusedError(413, f"the body is longer than {limit} bytes")


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
    if not context.admin.allow(request.headers.get("authorization", "").encode("latin-1")):
        raise _RefusedError(401, "this route wants the admin's bearer token")


async def _ordered(context: Context, **wanted: Any) -> Response:
    """Hands a command to the updater and waits until it was obeyed here."""
    before = context.status.answered
    context.command(**wanted)
    until = time.monotonic() + 10
    while context.status.answered == before and time.monotonic() < until:
        await asyncio.sleep(0.02)
    if context.status.answered == before:
        raise _RefusedError(504, "the updater did not answer in time")
    facts = {key: context.describe()[key] for key in ("sequence", "hash", "pinned", "head", "problem")}
    return JSONResponse(facts, 409 if context.status.problem else 200)
