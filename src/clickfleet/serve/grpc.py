"""gRPC: the Open Inference Protocol v2 on the worker's event loop."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from clickfleet.errors import ClickfleetError, ServeError
from clickfleet.serve import messages, oip
from clickfleet.serve.batching import BusyError, LateError
from clickfleet.serve.context import Context
from clickfleet.serve.faults import log_fault
from clickfleet.serve.http import clip
from clickfleet.serve.settings import Settings

_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
OPEN = ("ServerLive", "ServerReady", "ModelReady")
STREAMS = 128
"""Calls at a time on one connection."""
AGE_S = 3600.0
"""After this a connection is asked to come anew; whoever keeps a reply waiting is closed then."""
MOST_DETAILS = 1000
"""Characters of an error: it travels as a header, and clients bound those."""


class RefusedError(Exception):
    def __init__(self, code: Any, what: str) -> None:
        super().__init__(what)
        self.code, self.what = code, what


class Service:
    """The calls of the protocol; each takes its request message and gives its reply message."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.calls: dict[str, Callable[[Any, Any], Awaitable[Any]]] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server,
            "ModelMetadata": self._metadata,
            "ModelInfer": self._infer,
        }

    def handler(self) -> Any:
        """Calls that read their message themselves: not before the token is known, and not for ever."""
        found = {
            name: grpc.stream_unary_rpc_method_handler(
                self._guarded(name, request), response_serializer=reply.SerializeToString
            )
            for name, request, reply in messages.methods()
        }
        return grpc.method_handlers_generic_handler(messages.SERVICE, found)

    def _guarded(self, name: str, kind: Any) -> Any:
        """A call with its errors turned into status codes; nothing of ours goes out but a sentence."""
        context = self.context

        async def guarded(contents: Any, stream: Any) -> Any:
            started = time.perf_counter()
            context.active += 1
            code, what = grpc.StatusCode.OK, ""
            try:
                if context.tokens.required and name not in OPEN:
                    self._authorise(stream)
                return await self._answer(name, kind, stream)
            except RefusedError as refused:
                code, what = refused.code, refused.what
            except BusyError as busy:
                code, what = grpc.StatusCode.RESOURCE_EXHAUSTED, str(busy)
            except LateError as late:
                code, what = grpc.StatusCode.DEADLINE_EXCEEDED, str(late)
            except ClickfleetError as error:
                code, what = grpc.StatusCode.INVALID_ARGUMENT, str(error)
            except Exception:
                log_fault()
                context.meter.count("faults")
                code, what = grpc.StatusCode.INTERNAL, "the server failed; its log says why"
            finally:
                context.active -= 1
                context.meter.reply(f"grpc {name}", code.value[0], time.perf_counter() - started)
            await stream.abort(code, clip(what, MOST_DETAILS))
            return None

        return guarded

    async def _answer(self, name: str, kind: Any, stream: Any) -> Any:
        """Reads the message, then waits until there is time to parse it; refuses what would wait for too long."""
        context = self.context
        if name == "ModelInfer":
            context.admission.check(context.settings.max_body)
        try:
            async with asyncio.timeout(context.settings.body_timeout_s):
                content = await stream.read()
        except TimeoutError:
            raise RefusedError(grpc.StatusCode.DEADLINE_EXCEEDED, "the message took too long to arrive") from None
        if content is grpc.aio.EOF:
            raise ServeError("the call has no message")
        async with context.admitted(len(content)):
            return await self.calls[name](_parse(kind, content), stream)

    def _authorise(self, stream: Any) -> None:
        if self.context.tokens.closed:
            raise RefusedError(grpc.StatusCode.UNAVAILABLE, "this server cannot check tokens now; its log says why")
        given = dict(stream.invocation_metadata() or ()).get("authorization", "")
        if not self.context.tokens.allow(given.encode() if isinstance(given, str) else given):
            raise RefusedError(grpc.StatusCode.UNAUTHENTICATED, "this server wants a bearer token")

    def _model(self, name: str, version: str) -> None:
        served = self.context.batcher.version
        if name != served.identity.name or version not in ("", served.version):
            raise RefusedError(
                grpc.StatusCode.NOT_FOUND,
                f"there is no model {name!r} {version} here; it is {served.identity.name!r} {served.version}",
            )

    async def _live(self, request: Any, stream: Any) -> Any:
        return messages.message("ServerLiveResponse")(live=True)

    async def _ready(self, request: Any, stream: Any) -> Any:
        return messages.message("ServerReadyResponse")(ready=self.context.ready()[0])

    async def _model_ready(self, request: Any, stream: Any) -> Any:
        served = self.context.batcher.version
        ready = request.name == served.identity.name and request.version in ("", served.version)
        return messages.message("ModelReadyResponse")(ready=ready and self.context.ready()[0])

    async def _server(self, request: Any, stream: Any) -> Any:
        from clickfleet import __version__

        kind = messages.message("ServerMetadataResponse")
        return kind(name="clickfleet", version=__version__, extensions=["binary_tensor_data"])

    async def _metadata(self, request: Any, stream: Any) -> Any:
        self._model(request.name, request.version)
        facts = oip.metadata(self.context.batcher.version)
        facts.pop("ready_inputs")
        return messages.message("ModelMetadataResponse")(**facts)

    async def _infer(self, request: Any, stream: Any) -> Any:
        started = time.perf_counter()
        self._model(request.model_name, request.model_version)
        version = self.context.batcher.version
        oip.check_size(len(request.inputs), request.id)
        names = oip.pick_once([output.name for output in request.outputs], version.outputs) or list(version.outputs)
        batch = oip.batch(_tensors(request), version, self.context.settings.max_rows)
        left = min(stream.time_remaining() or 1e9, self.context.settings.max_time_ms / 1e3)
        done = await self.context.batcher.score(batch, version, started + left)
        reply = messages.message("ModelInferResponse")(
            model_name=request.model_name, model_version=done.version.version, id=request.id
        )
        for name in names:
            values = np.ascontiguousarray(done.outputs[name], np.float32)
            reply.outputs.add(name=name, datatype="FP32", shape=values.shape)
            reply.raw_output_contents.append(values.tobytes())
        reply.parameters["server_ms"].string_param = f"{1e3 * (time.perf_counter() - started):.3f}"
        return reply


def _parse(kind: Any, content: bytes) -> Any:
    try:
        return kind.FromString(content)
    except DecodeError:
        raise ServeError("the message is not one of the protocol") from None


def _tensors(request: Any) -> list[oip.Raw | oip.Listed]:
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise ServeError(f"there are {len(raw)} raw contents for {len(request.inputs)} inputs")
    found: list[oip.Raw | oip.Listed] = []
    for i, item in enumerate(request.inputs):
        shape = list(item.shape)
        if raw:
            found.append(oip.Raw(item.name, item.datatype, shape, raw[i]))
            continue
        field = _CONTENTS.get(item.datatype)
        if field is None:
            raise ServeError(f"{item.name}: the datatype {item.datatype!r} cannot be read here")
        found.append(oip.Listed(item.name, item.datatype, shape, list(getattr(item.contents, field))))
    return found


def _options(settings: Settings) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", settings.max_body),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", settings.max_header_bytes),
        ("grpc.absolute_max_metadata_size", settings.max_header_bytes),
        ("grpc.max_concurrent_streams", STREAMS),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.server_handshake_timeout_ms", round(1e3 * settings.header_timeout_s)),
        ("grpc.max_connection_idle_ms", round(1e3 * settings.idle_timeout_s)),
        ("grpc.max_connection_age_ms", round(1e3 * AGE_S)),
        ("grpc.max_connection_age_grace_ms", round(1e3 * (settings.body_timeout_s + settings.send_timeout_s))),
        ("grpc.keepalive_time_ms", round(1e3 * settings.idle_timeout_s)),
        ("grpc.keepalive_timeout_ms", round(1e3 * settings.send_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 2),
    ]


async def start(context: Context) -> Any:
    """A running gRPC server; several workers share the port."""
    settings = context.settings
    server = grpc.aio.server(options=_options(settings), maximum_concurrent_rpcs=settings.max_connections)
    server.add_generic_rpc_handlers((Service(context).handler(),))
    address = f"{settings.host}:{settings.grpc_port}"
    if settings.tls_cert and settings.tls_key:
        with open(settings.tls_key, "rb") as key, open(settings.tls_cert, "rb") as certificate:
            port = server.add_secure_port(address, grpc.ssl_server_credentials([(key.read(), certificate.read())]))
    else:
        port = server.add_insecure_port(address)
    if port == 0:
        raise ServeError(f"cannot listen on {address}", "choose another --grpc-port")
    await server.start()
    return server
