"""gRPC: the Open Inference Protocol v2 on the worker's event loop."""

import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import numpy as np

from clickfleet.errors import ClickfleetError, ServeError
from clickfleet.serve import messages, oip
from clickfleet.serve.batching import BusyError, LateError
from clickfleet.serve.context import Context
from clickfleet.serve.fields import pick

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
        found = {
            name: grpc.unary_unary_rpc_method_handler(
                self._guarded(name),
                request_deserializer=request.FromString,
                response_serializer=reply.SerializeToString,
            )
            for name, request, reply in messages.methods()
        }
        return grpc.method_handlers_generic_handler(messages.SERVICE, found)

    def _guarded(self, name: str) -> Any:
        """A call with its errors turned into status codes; nothing of ours goes out but a sentence."""
        call, context = self.calls[name], self.context

        async def guarded(request: Any, stream: Any) -> Any:
            started = time.perf_counter()
            context.active += 1
            code, what = grpc.StatusCode.OK, ""
            try:
                if context.tokens.required and name not in OPEN:
                    self._authorise(stream)
                return await call(request, stream)
            except RefusedError as refused:
                code, what = refused.code, refused.what
            except BusyError as busy:
                code, what = grpc.StatusCode.RESOURCE_EXHAUSTED, str(busy)
            except LateError as late:
                code, what = grpc.StatusCode.DEADLINE_EXCEEDED, str(late)
            except ClickfleetError as error:
                code, what = grpc.StatusCode.INVALID_ARGUMENT, str(error)
            except Exception:
                traceback.print_exc(file=sys.stderr)
                code, what = grpc.StatusCode.INTERNAL, "the server failed; its log says why"
            finally:
                context.active -= 1
                context.meter.reply(f"grpc {name}", code.value[0], time.perf_counter() - started)
            await stream.abort(code, what)
            return None

        return guarded

    def _authorise(self, stream: Any) -> None:
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
        return messages.message("ServerReadyResponse")(ready=not self.context.draining)

    async def _model_ready(self, request: Any, stream: Any) -> Any:
        served = self.context.batcher.version
        ready = request.name == served.identity.name and request.version in ("", served.version)
        return messages.message("ModelReadyResponse")(ready=ready and not self.context.draining)

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
        names = pick([output.name for output in request.outputs], version.outputs, "output") or list(version.outputs)
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


async def start(context: Context) -> Any:
    """A running gRPC server; several workers share the port."""
    settings = context.settings
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", settings.max_body),
            ("grpc.max_send_message_length", -1),
        ]
    )
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
