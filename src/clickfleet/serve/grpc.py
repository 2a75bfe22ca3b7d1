"""The Open Inference Protocol v2 over gRPC, on the worker's event loop."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from clickfleet.errors import ClickfleetError, ServeError
from clickfleet.serve import open_inference, protobuf
from clickfleet.serve.batching import BusyError, LateError
from clickfleet.serve.connection import log_fault
from clickfleet.serve.context import Context
from clickfleet.serve.http import clip
from clickfleet.serve.show_log import new_request
from clickfleet.serve.supervisor import Settings

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
PUBLIC = ("ServerLive", "ServerReady", "ModelReady")
MAX_STREAMS = 128
"""Concurrent calls on one connection."""
MAX_AGE_S = 3600.0
"""Age at which a client is asked to reconnect."""
MAX_DETAILS = 1000
"""Maximum characters of an error: it is sent as a header, and clients limit those."""


class RefusedError(Exception):
    def __init__(self, code: Any, what: str) -> None:
        super().__init__(what)
        self.code, self.what = code, what


class Service:
    """The calls of the protocol. Each takes a request message and returns a reply message."""

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
        """Return handlers that read the message themselves: after the token is checked, and with a time limit."""
        handlers = {
            name: grpc.stream_unary_rpc_method_handler(
                self._guarded(name, request), response_serializer=reply.SerializeToString
            )
            for name, request, reply in protobuf.methods()
        }
        return grpc.method_handlers_generic_handler(protobuf.SERVICE, handlers)

    def _guarded(self, name: str, kind: Any) -> Any:
        """Return a call whose errors become status codes. Only the message is sent, never a traceback."""
        context = self.context

        async def guarded(contents: Any, stream: Any) -> Any:
            started = time.perf_counter()
            context.active += 1
            code, what = grpc.StatusCode.OK, ""
            try:
                if context.tokens.required and name not in PUBLIC:
                    self._authorise(stream)
                return await self.answer(name, kind, stream)
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
                code, what = grpc.StatusCode.INTERNAL, "internal server error; see the server's log"
            finally:
                context.active -= 1
                context.meter.reply(f"grpc {name}", code.value[0], time.perf_counter() - started)
            await stream.abort(code, clip(what, MAX_DETAILS))
            return None

        return guarded

    async def answer(self, name: str, kind: Any, stream: Any) -> Any:
        """Read the message and wait until it may be parsed. Raise `BusyError` if the wait would be too long."""
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
            raise RefusedError(grpc.StatusCode.UNAVAILABLE, "the server cannot check tokens at the moment; see its log")
        header = dict(stream.invocation_metadata() or ()).get("authorization", "")
        if not self.context.tokens.allow(header.encode() if isinstance(header, str) else header):
            raise RefusedError(grpc.StatusCode.UNAUTHENTICATED, "this server requires a bearer token")

    def _check_model(self, name: str, version: str) -> None:
        served = self.context.batcher.version
        if name != served.identity.name or version not in ("", served.version):
            raise RefusedError(
                grpc.StatusCode.NOT_FOUND,
                f"unknown model {name!r} {version}; this server has {served.identity.name!r} {served.version}",
            )

    async def _live(self, request: Any, stream: Any) -> Any:
        return protobuf.message("ServerLiveResponse")(live=True)

    async def _ready(self, request: Any, stream: Any) -> Any:
        return protobuf.message("ServerReadyResponse")(ready=self.context.ready()[0])

    async def _model_ready(self, request: Any, stream: Any) -> Any:
        served = self.context.batcher.version
        ready = request.name == served.identity.name and request.version in ("", served.version)
        return protobuf.message("ModelReadyResponse")(ready=ready and self.context.ready()[0])

    async def _server(self, request: Any, stream: Any) -> Any:
        from clickfleet import __version__

        kind = protobuf.message("ServerMetadataResponse")
        return kind(name="clickfleet", version=__version__, extensions=["binary_tensor_data"])

    async def _metadata(self, request: Any, stream: Any) -> Any:
        self._check_model(request.name, request.version)
        facts = open_inference.metadata(self.context.batcher.version)
        fields = {name: value for name, value in facts.items() if name in open_inference.STANDARD}
        return protobuf.message("ModelMetadataResponse")(**fields)

    async def _infer(self, request: Any, stream: Any) -> Any:
        started = time.perf_counter()
        self._check_model(request.model_name, request.model_version)
        version = self.context.batcher.version
        open_inference.check_size(len(request.inputs), request.id)
        names = (
            open_inference.pick_outputs([output.name for output in request.outputs], version) or version.output_names
        )
        tensors, shows = _tensors(request), self.context.shows
        batch = open_inference.batch(tensors, version, self.context.settings.max_rows)
        time_left = min(stream.time_remaining() or 1e9, self.context.settings.max_time_ms / 1e3)
        done = await self.context.batcher.score(batch, version, started + time_left)
        request_id = request.id
        if shows is not None:
            request_id = request_id or new_request()
            shows.infer(request_id, tensors, batch, version, done)
        reply = protobuf.message("ModelInferResponse")(
            model_name=request.model_name, model_version=done.version.version, id=request_id
        )
        for name in names:
            values = np.ascontiguousarray(open_inference.output_of(name, done.outputs, done.version), np.float32)
            reply.outputs.add(name=name, datatype="FP32", shape=values.shape)
            reply.raw_output_contents.append(values.tobytes())
        reply.parameters["server_ms"].string_param = f"{1e3 * (time.perf_counter() - started):.3f}"
        return reply


def _parse(kind: Any, content: bytes) -> Any:
    try:
        return kind.FromString(content)
    except DecodeError:
        raise ServeError("cannot decode the message") from None


def _tensors(request: Any) -> list[open_inference.AnyTensor]:
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise ServeError(f"the request has {len(raw)} raw contents for {len(request.inputs)} inputs")
    tensors: list[open_inference.AnyTensor] = []
    for i, item in enumerate(request.inputs):
        shape = list(item.shape)
        if raw:
            tensors.append(open_inference.RawTensor(item.name, item.datatype, shape, raw[i]))
            continue
        field = _CONTENTS.get(item.datatype)
        if field is None:
            raise ServeError(f"{item.name}: unsupported datatype {item.datatype!r}")
        tensors.append(open_inference.ListTensor(item.name, item.datatype, shape, list(getattr(item.contents, field))))
    return tensors


def _options(settings: Settings) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", settings.max_body),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", settings.max_header_bytes),
        ("grpc.absolute_max_metadata_size", settings.max_header_bytes),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.server_handshake_timeout_ms", round(1e3 * settings.header_timeout_s)),
        ("grpc.max_connection_idle_ms", round(1e3 * settings.idle_timeout_s)),
        ("grpc.max_connection_age_ms", round(1e3 * MAX_AGE_S)),
        ("grpc.max_connection_age_grace_ms", round(1e3 * (settings.body_timeout_s + settings.send_timeout_s))),
        ("grpc.keepalive_time_ms", round(1e3 * settings.idle_timeout_s)),
        ("grpc.keepalive_timeout_ms", round(1e3 * settings.send_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 2),
    ]


async def start(context: Context) -> Any:
    """Start a gRPC server. Several workers share the port."""
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
