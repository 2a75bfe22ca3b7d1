"""The routes that may be slow, as a Starlette application: pages, the OpenAPI document, uploads and admin commands."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash
from starlette.applications import Starlette
from starlette.datastructures import FormData, Headers
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from clickfleet.errors import ClickfleetError, ServeError
from clickfleet.serve import loop_status, state_folder, uploads
from clickfleet.serve.context import Context
from clickfleet.serve.example import InputHint, example_row, input_hints
from clickfleet.serve.http import RefusedError, clip, refuse
from clickfleet.serve.predictor import Version
from clickfleet.serve.uploads import parse
from clickfleet.store import onnx

_HERE = Path(__file__).parent
_SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_CONCURRENT = 4
"""Uploads and inspections processed at a time."""
_ANSWER_S = 10.0


def admin_app(context: Context) -> Starlette:
    """Return the application that handles what `http.App` does not."""
    slots = asyncio.Semaphore(_CONCURRENT)

    @asynccontextmanager
    async def admitted(request: Request) -> AsyncIterator[bytes]:
        """Yield the body once a slot is free. Both the memory of all bodies and the number processed are bounded."""
        context.admission.check(_content_length(request, context.settings.max_body))
        parts: list[bytes] = []
        try:
            async for part in request.stream():
                context.hold(len(part))
                parts.append(part)
            try:
                async with asyncio.timeout(context.settings.max_time_ms / 1e3):
                    await slots.acquire()
            except TimeoutError:
                raise context.admission.refusal() from None
            try:
                yield b"".join(parts)
            finally:
                slots.release()
        finally:
            context.held_bytes -= sum(map(len, parts))

    async def page(request: Request) -> Response:
        return HTMLResponse((_HERE / "page.html").read_text("utf-8"), headers=_SECURITY_HEADERS)

    async def docs(request: Request) -> Response:
        return HTMLResponse((_HERE / "docs.html").read_text("utf-8"), headers=_SECURITY_HEADERS)

    async def loop_page(request: Request) -> Response:
        return HTMLResponse((_HERE / "loop.html").read_text("utf-8"), headers=_SECURITY_HEADERS)

    async def loop(request: Request) -> Response:
        facts = await asyncio.to_thread(loop_status.describe, context)
        return Response(orjson.dumps(facts), media_type="application/json", headers={"cache-control": "no-store"})

    async def openapi(request: Request) -> Response:
        return Response(await asyncio.to_thread(openapi_of, context.batcher.version), media_type="application/json")

    async def example(request: Request) -> Response:
        return Response(await asyncio.to_thread(example_json, context.batcher.version), media_type="application/json")

    async def upload(request: Request) -> Response:
        async with admitted(request) as body:
            content = await _uploaded_file(request.headers, body)
            status, body, kind = await uploads.upload(context, request.query_params, content)
        return Response(body, status, media_type=kind)

    async def prediction(request: Request) -> Response:
        async with admitted(request) as body:
            status, body = await uploads.prediction(context, body)
        return Response(body, status, media_type="application/json")

    async def inspect_lines(request: Request) -> Response:
        async with admitted(request) as lines:
            facts = await asyncio.to_thread(inspect, context.batcher.version, lines, request.query_params)
        return Response(facts, media_type="application/json")

    async def rollback(request: Request) -> Response:
        _require_admin(request, context)
        try:
            sequence = orjson.loads(await _read(request, 4096))["sequence"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            sequence = None
        if not isinstance(sequence, int) or isinstance(sequence, bool) or not 0 <= sequence < 1 << 62:
            raise ServeError("the request has no valid sequence to roll back to", 'send {"sequence": 7}')
        return await _run_command(context, state_folder.Command(sequence))

    async def follow(request: Request) -> Response:
        _require_admin(request, context)
        return await _run_command(context, state_folder.Command())

    routes = [
        Route("/", page),
        Route("/docs", docs),
        Route("/openapi.json", openapi),
        Route("/v1/example", example),
        Route("/loop", loop_page),
        Route("/v1/loop", loop),
        Route("/upload", upload, methods=["POST"]),
        Route("/rec/prediction", prediction, methods=["POST"]),
        Route("/v1/inspect", inspect_lines, methods=["POST"]),
        Route("/admin/rollback", rollback, methods=["POST"]),
        Route("/admin/follow", follow, methods=["POST"]),
    ]
    handlers: Any = {
        404: _no_route,
        405: _no_method,
        ClickfleetError: _client_error,
        ClientDisconnect: _disconnected,
        Exception: _internal_error,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.context = context
    return app


@lru_cache(maxsize=2)
def example_json(version: Version) -> bytes:
    """Return the reply of `/v1/example`."""
    identity = version.identity
    facts = {"example": example_row(version), "inputs": input_hints(version)}
    return orjson.dumps({**facts, "model": identity.name, "sequence": identity.sequence})


@lru_cache(maxsize=2)
def openapi_of(version: Version) -> bytes:
    """Return the OpenAPI document of a version, with its features and a row that can be sent."""
    return openapi_json(version.identity.name, input_hints(version), example_row(version))


def openapi_json(name: str, inputs: Sequence[InputHint] = (), example: Mapping[str, Any] | None = None) -> bytes:
    """Return the OpenAPI document of a server whose model is called `name`, with these inputs and this example row."""
    import yaml

    text = (_HERE / "openapi.yaml").read_text("utf-8")
    document = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    del document["x-shared"]
    if inputs:
        _describe_rows(document["paths"], inputs, example or {})
    document["info"]["description"] = document["info"]["description"].replace("{name}", name)
    document["paths"] = {path.replace("{name}", name): item for path, item in document["paths"].items()}
    return orjson.dumps(document)


def _describe_rows(paths: dict[str, Any], inputs: Sequence[InputHint], example: Mapping[str, Any]) -> None:
    """Name the features of the model in the schema of every row, and add an example to the routes that take rows."""
    properties = {one["name"]: _property(one) for one in inputs}
    row: dict[str, Any] = {
        "type": "object",
        "description": "Features by name; absent ones are missing.",
        "properties": properties,
    }
    row["additionalProperties"] = False
    for path in ("/v1/predict", "/v1/explain"):
        content = paths[path]["post"]["requestBody"]["content"]["application/json"]
        content["schema"]["properties"]["rows"]["items"] = row
        content["example"] = {"rows": [dict(example)]}
    content = paths["/v1/rank"]["post"]["requestBody"]["content"]["application/json"]
    schema = content["schema"]["properties"]
    schema["user"] = row
    own = schema["candidates"]["items"]["properties"]
    candidate = {
        **row,
        "required": ["id"],
        "properties": {**properties, **own},
    }  # a candidate's id and value take precedence
    schema["candidates"]["items"] = candidate
    of_user = {one["name"] for one in inputs if "history" in one}
    user = {name: value for name, value in example.items() if name in of_user}
    features = {name: value for name, value in example.items() if name not in own and name not in of_user}
    content["example"] = {"user": user, "candidates": [{"id": "a", **features}, {"id": "b"}], "top_k": 10}


def _property(one: InputHint) -> dict[str, Any]:
    """Return the schema of a feature."""
    several = one["values"] != 1
    if one["kind"] == "number":
        number: dict[str, Any] = {"type": ["number", "null"]}
        if several:
            number = {
                "type": "array",
                "items": {"type": "number"},
                "minItems": one["values"],
                "maxItems": one["values"],
            }
        words = "A number." if "low" not in one else f"A number, mostly from {one['low']:g} to {one['high']:g}."
        return {**number, "description": words}
    value: dict[str, Any] = {"type": ["string", "integer", "null"]}
    if several:
        lists = {"type": "array", "items": {"type": ["string", "integer"]}}
        value = {"anyOf": [value, lists, {"type": "object", "additionalProperties": {"type": "number"}}]}
    if one["kind"] != "key":
        value = {"type": ["number", "string", "null"]}
    shown = {"examples": one["frequent"][:5]} if one.get("frequent") else {}
    words = "Text or an integer."
    if "history" in one:
        words = f"Past values of {one['slot']}, the oldest first; an input of the history {one['history']}."
    return {**value, "description": words, **shown}


def _error(status: int, what: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": clip(what)}, status, headers=headers)


async def _no_route(request: Request, error: Exception) -> Response:
    return _error(404, "unknown route; see /docs for the list")


async def _no_method(request: Request, error: Any) -> Response:
    return _error(405, f"{request.url.path} does not accept {request.method}", dict(error.headers or {}))


async def _disconnected(request: Request, error: Exception) -> Response:
    return _error(400, "the client disconnected")


async def _client_error(request: Request, error: Any) -> Response:
    status, body, headers = refuse(error, request.scope, request.app.state.context)
    return Response(body, status, {name.decode(): value.decode() for name, value in headers})


async def _internal_error(request: Request, error: Exception) -> Response:
    """Reply to an unexpected exception, which `http.App` logs."""
    return _error(500, "internal server error; see the server's log")


def _content_length(request: Request, limit: int) -> int:
    length = request.headers.get("content-length")
    if length is None or not length.isascii() or not length.isdigit():
        raise RefusedError(411, "the request needs a Content-Length header")
    if len(length) > 18 or int(length) > limit:
        raise RefusedError(413, f"the body exceeds {limit} bytes")
    return int(length)


async def _uploaded_file(headers: Headers, body: bytes) -> bytes | None:
    """Return the field `file` of a form, or None."""
    if not headers.get("content-type", "").startswith("multipart/form-data"):
        return None

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    async def parse() -> FormData:
        return await MultiPartParser(headers, stream(), max_files=4, max_fields=16, max_part_size=len(body)).parse()

    try:  # in a thread: the parser is slow for a form that is mostly headers
        form = await asyncio.to_thread(asyncio.run, parse())
    except MultiPartException as error:
        raise ServeError(f"cannot parse the form: {error.message}") from None
    except Exception:  # the parser raises many kinds for malformed bytes
        raise ServeError("cannot parse the form") from None
    try:
        file = form.get("file")
        return None if file is None or isinstance(file, str) else await file.read()
    finally:
        await form.close()


async def _read(request: Request, limit: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise RefusedError(413, f"the body exceeds {limit} bytes")
        parts.append(part)
    return b"".join(parts)


def _require_admin(request: Request, context: Context) -> None:
    if not context.admin.required:
        raise RefusedError(403, "admin routes are disabled; start the server with --admin-token-file")
    if context.admin.closed:
        raise RefusedError(503, "the server cannot check tokens at the moment; see its log")
    if not context.admin.allow(request.headers.get("authorization", "").encode("latin-1")):
        raise RefusedError(401, "this route requires the admin bearer token")


async def _run_command(context: Context, command: state_folder.Command) -> Response:
    """Send a command to the updater and wait until it is executed and this worker has switched.

    The updater executes commands in order and answers each one, so concurrent commands are not lost.
    """
    state = Path(context.settings.state)
    name = state_folder.send_command(state, command)
    deadline = time.monotonic() + _ANSWER_S
    while (answer := state_folder.take_answer(state, name)) is None:
        if time.monotonic() > deadline and state_folder.withdraw_command(state, name):
            raise RefusedError(504, "the updater did not answer in time; the command was withdrawn")
        if time.monotonic() > 2 * _ANSWER_S + deadline:
            raise RefusedError(504, "the updater took the command but did not answer; see /v1/model for what is served")
        await asyncio.sleep(0.02)
    while context.status.revision < answer.revision and context.problem is None and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    facts = asdict(answer)
    del facts["revision"]
    return JSONResponse(facts, 409 if answer.problem else 200)


MAX_INSPECT_ROWS, MAX_INSPECT_KEYS = 16, 1 << 16


def inspect(version: Version, lines: bytes, query: Mapping[str, str]) -> bytes:
    """Return keys, rows, pooled inputs and outputs of a few lines, and checksums of the network's weights, as JSON."""
    batch = parse(lines, query.get("format") or "slots", version)
    if len(batch) > MAX_INSPECT_ROWS:
        raise ServeError(f"cannot inspect {len(batch)} rows at once", f"send at most {MAX_INSPECT_ROWS}")
    if len(batch.keys) > MAX_INSPECT_KEYS:
        raise ServeError(f"cannot inspect {len(batch.keys)} keys at once", f"send at most {MAX_INSPECT_KEYS}")
    return orjson.dumps(
        {
            "sequence": version.identity.sequence,
            "keys": batch.keys,
            "offsets": batch.offsets,
            "rows": version.read(batch.keys),
            **version.inputs(batch),
            "outputs": {name: np.ascontiguousarray(values) for name, values in version.run(batch).items()},
            "weights": weights(version.entry.graph()),
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


def weights(graph: bytes) -> dict[str, str]:
    """Return a checksum of every parameter, by its name in the model."""
    from onnx import numpy_helper

    return {
        tensor.name.removeprefix("model."): checksum(numpy_helper.to_array(tensor))
        for tensor in onnx.parse(graph).graph.initializer
        if tensor.name.startswith("model.")
    }


def checksum(values: Any) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(values).tobytes())
