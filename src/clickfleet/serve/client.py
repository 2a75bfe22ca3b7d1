"""A small client of a clickfleet server. It needs only the standard library and NumPy, and grpcio for gRPC.

with Client("http://127.0.0.1:8080") as client:
    client.predict([{"age": 30, "city": "Bern"}])
"""

from __future__ import annotations

import gzip
import http.client
import json
import secrets
import ssl
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self
from urllib.parse import quote, urlencode, urlsplit

import numpy as np
from numpy.typing import NDArray

from clickfleet.config.plugins import Plugin
from clickfleet.data.batch import Batch, Floats
from clickfleet.data.files import Unpacked, expand
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Schema
from clickfleet.errors import ConfigError, MissingError, ServeError

MAX_REPLY = 256 << 20
"""Maximum bytes of a reply, in case the server is not a clickfleet server."""


DATATYPES = {"float32": "FP32", "int64": "INT64", "uint64": "UINT64"}
"""Datatype of the protocol for each type of array that a client sends. Every other type is sent as text."""


class UnreachableError(ServeError):
    """No server answers at the address."""


@dataclass(frozen=True)
class Scores:
    """The scores of one request, with the times measured by the client and by the server."""

    scores: Floats
    """[rows], or [rows, labels] if the model has several."""
    client_ms: float
    server_ms: float
    version: str


@dataclass(frozen=True)
class InferReply:
    """The outputs of one request by name, each with one row per row of the request."""

    outputs: dict[str, Floats]
    client_ms: float
    server_ms: float
    version: str


class Client:
    """A client with one persistent connection. It is not thread-safe."""

    def __init__(
        self, url: str, token: str | None = None, timeout_s: float = 30.0, certificate: str | None = None
    ) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServeError(f"{url} is not a server address", "give http://host:port")
        if parts.scheme == "https":
            self.connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname,
                parts.port or 443,
                timeout=timeout_s,
                context=ssl.create_default_context(cafile=certificate),
            )
        else:
            self.connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout_s)
        self.url = url
        self._token = token
        self.model_name: str | None = None
        self.compress_requests = self.compress_replies = False
        """Whether `infer` uses gzip."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    def model(self) -> dict[str, Any]:
        """Return what is served: sequence, age, lag, inputs, schema."""
        return self._object("GET", "/v1/model")

    def predict(
        self, rows: Sequence[Mapping[str, Any]], *, request: str | None = None, items: Sequence[str | int] | None = None
    ) -> Floats | dict[str, Floats]:
        """Return the scores of rows of named features; by label if the model has several.

        `request` is an id of your own for this request, and `items` are ids of the rows. Feedback names them.
        """
        body: dict[str, Any] = {"rows": list(rows)}
        body |= {} if request is None else {"request": request}
        body |= {} if items is None else {"items": list(items)}
        reply = self._send("POST", "/v1/predict", json.dumps(body).encode())[0]
        with self._decoding("/v1/predict"):
            scores = json.loads(reply)["scores"]
            if isinstance(scores, dict):
                return {label: _check_count(np.array(part, np.float32), len(rows)) for label, part in scores.items()}
            return _check_count(np.array(scores, np.float32), len(rows))

    def explain(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return, for each row, its score and the contribution of each of its features, the largest first.

        A history is one feature. With several labels, scores and contributions are mappings from labels to numbers.
        """
        reply = self._object("POST", "/v1/explain", json.dumps({"rows": list(rows)}).encode())
        with self._decoding("/v1/explain"):
            explanations = [dict(one) for one in reply["explanations"]]
            if len(explanations) != len(rows):
                raise ValueError(f"{len(explanations)} explanations for {len(rows)} rows")
            return explanations

    def rank(
        self, candidates: Sequence[Mapping[str, Any]], user: Mapping[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Rank candidates. The options are those of `POST /v1/rank`: by, top_k, min_score, exclude, fixed, request."""
        body = {"user": dict(user or {}), "candidates": list(candidates), **options}
        return self._object("POST", "/v1/rank", json.dumps(body).encode())

    def feedback(self, events: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> int:
        """Send what followed scored rows: one event or several, each `{"request": …, "item": …, "label": {"click": 1}}`.

        Return the number of events in the server's log. Every event gets an id, so that sending it twice is harmless.
        """
        given = [events] if isinstance(events, Mapping) else list(events)
        named = [{"event": secrets.token_urlsafe(12), **event} for event in given]
        reply = self._object("POST", "/v1/feedback", json.dumps({"events": named}).encode())
        with self._decoding("/v1/feedback"):
            return int(reply["accepted"])

    def loop(self) -> dict[str, Any]:
        """Return what the loop of this server does: rows learned, freshness, alarms. Needs a server of `clickfleet loop`."""
        return self._object("GET", "/v1/loop")

    def score(self, batch: Batch) -> Scores:
        """Score a batch that was read by the model's schema, sent as binary tensors."""
        reply = self.infer({name: values for name, values, _ in tensors_of(batch)}, ["score"])
        with self._decoding("infer"):
            scores = _check_count(reply.outputs["score"], len(batch))
        return Scores(scores, reply.client_ms, reply.server_ms, reply.version)

    def infer(self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> InferReply:
        """Send named arrays by the Open Inference Protocol, and return the named outputs.

        An input with a different number of values in every row, such as that of a history, is one array of all values, and
        `NAME.lengths` holds the numbers (int64).
        """
        if self.model_name is None:
            with self._decoding("/v1/model"):
                self.model_name = str(self.model()["name"])
        contents = {name: _content(values) for name, values in inputs.items()}
        tensors = [
            {
                "name": name,
                "shape": list(values.shape),
                "datatype": DATATYPES.get(values.dtype.name, "BYTES"),
                "parameters": {"binary_data_size": len(contents[name])},
            }
            for name, values in inputs.items()
        ]
        wanted = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
        head = json.dumps({"inputs": tensors, "outputs": wanted}).encode()
        body = head + b"".join(contents.values())
        headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
        if self.compress_requests:
            body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
        if self.compress_replies:
            headers["Accept-Encoding"] = "gzip"
        begin = time.perf_counter()
        reply, answer = self._send("POST", f"/v2/models/{quote(self.model_name)}/infer", body, headers)
        seconds = time.perf_counter() - begin
        with self._decoding("infer"):
            at = int(answer["inference-header-content-length"])
            facts, arrays = json.loads(reply[:at]), {}
            for tensor in facts["outputs"]:
                size = int(tensor["parameters"]["binary_data_size"])
                values = np.frombuffer(reply[at : at + size], np.float32)
                arrays[str(tensor["name"])] = values.reshape(tensor["shape"])
                at += size
            found = {name: arrays[name] for name in outputs}
            return InferReply(found, 1e3 * seconds, _server_ms(answer), str(facts["model_version"]))

    def feed(self, feed: Mapping[str, Sequence[Any]], fetch: Sequence[str]) -> InferReply:
        """Send lists by `POST /rec/prediction`. Rows of an input may have different numbers of values."""
        body = json.dumps({"feed": [dict(feed)], "fetch": list(fetch)}).encode()
        begin = time.perf_counter()
        reply, answer = self._send("POST", "/rec/prediction", body, {"Content-Type": "application/json"})
        seconds = time.perf_counter() - begin
        with self._decoding("/rec/prediction"):
            result = json.loads(reply)["result"]
            found = {name: np.array(result[name], np.float32) for name in fetch}
            return InferReply(found, 1e3 * seconds, _server_ms(answer), "")

    def upload(self, lines: bytes, form: str, user: str = "clickfleet") -> Scores:
        """Score text lines, which the server parses."""
        query = urlencode({"user_id": user, "format": form})
        boundary = b"----clickfleet-upload-7d3f"
        body = b'--%b\r\nContent-Disposition: form-data; name="file"; filename="lines"\r\n\r\n%b\r\n--%b--\r\n' % (
            boundary,
            lines,
            boundary,
        )
        kind = {"Content-Type": f"multipart/form-data; boundary={boundary.decode()}"}
        begin = time.perf_counter()
        reply, _ = self._send("POST", f"/upload?{query}", body, kind)
        seconds = time.perf_counter() - begin
        with self._decoding("/upload"):
            facts = json.loads(reply)
            scores = np.array(facts["data"], np.float32)
            if scores.shape[1:] == (1,):
                scores = scores.reshape(-1)
            return Scores(scores, 1e3 * seconds, float(facts["server_ms"]), "")

    def inspect(self, lines: bytes, form: str) -> dict[str, Any]:
        """Return the result of every step from a few lines to their scores, as the server computes them."""
        return self._object("POST", f"/v1/inspect?{urlencode({'format': form})}", lines)

    def _object(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        content = self._send(method, path, body)[0]
        with self._decoding(path.partition("?")[0]):
            return dict(json.loads(content))

    @contextmanager
    def _decoding(self, path: str) -> Iterator[None]:
        """Turn errors of decoding a reply into a `ServeError` that names the server."""
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            reason = str(error).partition("\n")[0][:200]
            raise ServeError(
                f"{self.url}: unexpected reply to {path}: {type(error).__name__}: {reason}",
                "check that it is the address of a clickfleet server",
            ) from None

    def _send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[bytes, Any]:
        all_headers = dict(headers or {})
        if self._token:
            all_headers["Authorization"] = f"Bearer {self._token}"
        try:
            content, answer = self._exchange(method, path, body, all_headers)
        except (OSError, http.client.HTTPException) as error:
            self.connection.close()
            raise UnreachableError(
                f"{self.url}: {error or type(error).__name__}", "is the server running? clickfleet serve"
            ) from None
        if len(content) > MAX_REPLY:
            self.connection.close()
            raise ServeError(f"{self.url}{path.partition('?')[0]}: the reply exceeds {MAX_REPLY >> 20} MiB")
        if answer.status >= 300:
            try:
                why = json.loads(content)["error"]
            except (ValueError, KeyError, TypeError, RecursionError):
                why = content[:200].decode("utf-8", "replace")
            raise ServeError(f"{self.url}{path.partition('?')[0]}: status {answer.status}: {why}")
        received = {name.lower(): value for name, value in answer.getheaders()}
        if received.get("content-encoding") == "gzip":
            with self._decoding(path.partition("?")[0]):
                content = _unpacked(content)
        return content, received

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[bytes, http.client.HTTPResponse]:
        """Send a request and read the reply. Connect again once if the server had closed an idle connection."""
        for reused in (self.connection.sock is not None, False):
            try:
                self.connection.request(method, path, body, dict(headers))
                answer = self.connection.getresponse()
                return answer.read(MAX_REPLY + 1), answer
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                self.connection.close()
                if not reused:
                    raise
        raise AssertionError("a new connection is never reused")


class GrpcClient:
    """A gRPC client; it has only `score`."""

    def __init__(self, address: str, model: str, token: str | None = None, timeout_s: float = 30.0) -> None:
        try:
            import grpc
        except ModuleNotFoundError:
            raise MissingError("grpcio", "serve") from None
        from clickfleet.serve import protobuf

        self._errors, self._timeout = grpc.RpcError, timeout_s
        self.model_name, self.address = model, address
        self._metadata = [("authorization", f"Bearer {token}")] if token else []
        self._channel = grpc.insecure_channel(address)
        self._request, self._reply = protobuf.message("ModelInferRequest"), protobuf.message("ModelInferResponse")
        self._call = self._channel.unary_unary(
            f"/{protobuf.SERVICE}/ModelInfer",
            request_serializer=self._request.SerializeToString,
            response_deserializer=self._reply.FromString,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()

    def score(self, batch: Batch) -> Scores:
        request = self._request(model_name=self.model_name)
        for name, values, kind in tensors_of(batch):
            request.inputs.add(name=name, datatype=kind, shape=values.shape)
            request.raw_input_contents.append(values.tobytes())
        request.outputs.add(name="score")
        begin = time.perf_counter()
        try:
            reply = self._call(request, timeout=self._timeout, metadata=self._metadata)
        except self._errors as error:
            raise ServeError(f"{self.address}: {error.details()}") from None
        seconds = time.perf_counter() - begin
        try:
            values = np.frombuffer(reply.raw_output_contents[0], np.float32).reshape(list(reply.outputs[0].shape))
            scores = _check_count(values, len(batch))
            server_ms = float(reply.parameters["server_ms"].string_param)
        except (ValueError, IndexError) as error:
            raise ServeError(f"{self.address}: unexpected reply: {error}") from None
        return Scores(scores, 1e3 * seconds, server_ms, reply.model_version)


def tensors_of(batch: Batch) -> list[tuple[str, Any, str]]:
    """Return the name, values and datatype of every tensor of an encoded batch."""
    keys = batch.keys.reshape(len(batch), batch.slots) if batch.one_each else batch.keys
    tensors = [
        ("dense", np.ascontiguousarray(batch.dense, np.float32), "FP32"),
        ("keys", np.ascontiguousarray(keys), "UINT64"),
    ]
    if not batch.one_each:
        tensors.append(("offsets", np.ascontiguousarray(batch.offsets, np.int64), "INT64"))
    if batch.values is not None:
        tensors.append(("values", np.ascontiguousarray(batch.values, np.float32), "FP32"))
    return tensors


def _content(values: NDArray[Any]) -> bytes:
    """Return the bytes of a tensor. Texts are packed: a four-byte length, then the text."""
    if values.dtype.name in DATATYPES:
        return values.tobytes()
    texts = [item if isinstance(item, bytes) else str(item).encode() for item in values.reshape(-1).tolist()]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def _check_count(scores: Floats, rows: int) -> Floats:
    if scores.ndim not in (1, 2) or len(scores) != rows:
        raise ValueError(f"scores of the shape {list(scores.shape)} for {rows} rows")
    return scores


def _unpacked(content: bytes) -> bytes:
    """Return an unpacked reply, which may not exceed the limit either."""
    inflate = zlib.decompressobj(31)
    try:
        plain = inflate.decompress(content, MAX_REPLY)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not inflate.eof:
        raise ValueError("the compressed reply is truncated or too long")
    return plain


def _server_ms(headers: Mapping[str, str]) -> float:
    duration = headers.get("server-timing", "").partition("dur=")[2]
    return float(duration or "nan")


Show = Callable[[int, list[float] | dict[str, list[float]], float, float], None]
"""Called with the number of a batch, its scores (by label if there are several), and the milliseconds of client and server."""


def score_files(
    url: str,
    data: Sequence[str],
    show: Show,
    *,
    batch_size: int = 5,
    protocol: str = "http",
    form: str | None = None,
    grpc_address: str | None = None,
    limit: int | None = None,
    token: str | None = None,
    certificate: str | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Score files and return a summary of the request times. `trust` allows running a reader or command that the server names."""
    if protocol not in ("http", "grpc", "upload"):
        raise ConfigError(f"unknown protocol {protocol!r}", "choose http, grpc or upload")
    with Client(url, token, certificate=certificate) as client:
        served = client.model()
        if not isinstance(served.get("schema"), dict):
            raise ServeError(f"{url} is not a clickfleet server: its reply has no schema", "check the address")
        schema = Schema.from_dict(served["schema"])
        format_ = Plugin(form) if form else Plugin.parse(served.get("format"), "" if trust else url)
        if protocol == "upload":
            replies = (client.upload(lines, format_.name) for lines in groups_of_lines(data, batch_size, limit))
            return _summarize(replies, show, schema)
        reader = Reader(list(data), schema, format_, batch_size)
        batches = islice(reader, None if limit is None else -(-limit // batch_size))
        if protocol == "http":
            return _summarize((client.score(batch) for batch in batches), show, schema)
        with GrpcClient(grpc_address or _default_grpc_address(url), str(served["name"]), token) as calls:
            return _summarize((calls.score(batch) for batch in batches), show, schema)


def _summarize(replies: Iterator[Scores], show: Show, schema: Schema) -> dict[str, Any]:
    rows, times = 0, []
    for number, reply in enumerate(replies):
        scores: Any = reply.scores.tolist()
        if reply.scores.ndim == 2:
            scores = dict(zip([task.name for task in schema.tasks], reply.scores.T.tolist(), strict=True))
        show(number, scores, reply.client_ms, reply.server_ms)
        rows += len(reply.scores)
        times.append(reply.client_ms)
    p50, p99 = np.percentile(times, [50, 99]).tolist() if times else (0.0, 0.0)
    return {"rows": rows, "batches": len(times), "p50_ms": p50, "p99_ms": p99}


def _default_grpc_address(url: str) -> str:
    """Return the address with the port after HTTP's, which is the default of `serve`."""
    host, _, port = url.partition("://")[2].strip("/").rpartition(":")
    if not port.isdigit():
        raise ConfigError("cannot derive the gRPC port", "give --grpc-address host:port")
    return f"{host}:{int(port) + 1}"


def groups_of_lines(data: Sequence[str], size: int, limit: int | None = None) -> Iterator[bytes]:
    """Yield unchanged text lines in groups of `size`, at most `limit` lines in all. A group does not span files."""
    left = 1 << 62 if limit is None else limit
    for path in expand(list(data)):
        stream, waiting, carry, got = Unpacked(path), [], b"", 1
        try:
            while got and left > 0:
                space = bytearray(1 << 16)
                with memoryview(space) as view:
                    got = stream.readinto(view)
                lines = (carry + bytes(space[:got])).splitlines(keepends=True)
                carry = lines.pop() if got and lines and not lines[-1].endswith(b"\n") else b""
                waiting += lines
                while left > 0 and (len(waiting) >= size or (waiting and not got)):
                    group = waiting[: min(size, left)]
                    del waiting[: len(group)]
                    left -= len(group)
                    yield b"".join(group)
        finally:
            stream.close()
