"""A small client of a clickfleet server; nothing but the standard library and NumPy, gRPC where it is asked for.

with Client("http://127.0.0.1:8080") as client:
    client.predict([{"age": 30, "city": "Bern"}])
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlencode, urlsplit

import numpy as np

from clickfleet.batch import Batch, Floats
from clickfleet.errors import MissingError, ServeError

MAX_REPLY = 256 << 20
"""Bytes of a reply: a server that is not ours may send without end."""


@dataclass(frozen=True)
class Scores:
    """What came back, and how long it took here and there."""

    scores: Floats
    client_ms: float
    server_ms: float
    version: str


class Client:
    """One connection that is kept open; not for several threads at once."""

    def __init__(
        self, url: str, token: str | None = None, timeout_s: float = 30.0, certificate: str | None = None
    ) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServeError(f"{url} is not the address of a server", "give http://host:port")
        if parts.scheme == "https":
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname,
                parts.port or 443,
                timeout=timeout_s,
                context=ssl.create_default_context(cafile=certificate),
            )
        else:
            self._connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout_s)
        self.url = url
        self._token = token
        self._model: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def model(self) -> dict[str, Any]:
        """What is served: sequence, age, lag, inputs, schema."""
        return self._object("/v1/model", self._ask("GET", "/v1/model")[0])

    def predict(self, rows: Sequence[Mapping[str, Any]]) -> Floats:
        """The scores of rows of named features."""
        reply = self._ask("POST", "/v1/predict", json.dumps({"rows": list(rows)}).encode())[0]
        with self._understanding("/v1/predict"):
            return _one_each(np.array(json.loads(reply)["scores"], np.float32), len(rows))

    def rank(
        self, candidates: Sequence[Mapping[str, Any]], user: Mapping[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        """The candidates in order; options are those of `POST /v1/rank`: top_k, min_score, exclude, fixed."""
        body = {"user": dict(user or {}), "candidates": list(candidates), **options}
        return self._object("/v1/rank", self._ask("POST", "/v1/rank", json.dumps(body).encode())[0])

    def score(self, batch: Batch) -> Scores:
        """The scores of a batch that was read by the model's schema, as binary tensors."""
        if self._model is None:
            with self._understanding("/v1/model"):
                self._model = str(self.model()["name"])
        tensors = tensors_of(batch)
        inputs = [
            {
                "name": name,
                "shape": list(values.shape),
                "datatype": kind,
                "parameters": {"binary_data_size": values.nbytes},
            }
            for name, values, kind in tensors
        ]
        output = {"name": "score", "parameters": {"binary_data": True}}
        head = json.dumps({"inputs": inputs, "outputs": [output]}).encode()
        body = head + b"".join(values.tobytes() for _, values, _ in tensors)
        headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
        begin = time.perf_counter()
        reply, answer = self._ask("POST", f"/v2/models/{quote(self._model)}/infer", body, headers)
        took = time.perf_counter() - begin
        with self._understanding("infer"):
            length = int(answer["inference-header-content-length"])
            facts = json.loads(reply[:length])
            scores = _one_each(np.frombuffer(reply[length:], np.float32), len(batch))
            return Scores(scores, 1e3 * took, _server_ms(answer), str(facts["model_version"]))

    def upload(self, lines: bytes, form: str, user: str = "clickfleet") -> Scores:
        """The scores of text lines, read by the server."""
        query = urlencode({"user_id": user, "format": form})
        border = b"----clickfleet-upload-7d3f"
        body = b'--%b\r\nContent-Disposition: form-data; name="file"; filename="lines"\r\n\r\n%b\r\n--%b--\r\n' % (
            border,
            lines,
            border,
        )
        kind = {"Content-Type": f"multipart/form-data; boundary={border.decode()}"}
        begin = time.perf_counter()
        reply, _ = self._ask("POST", f"/upload?{query}", body, kind)
        took = time.perf_counter() - begin
        with self._understanding("/upload"):
            facts = json.loads(reply)
            scores = np.array(facts["data"], np.float32).reshape(-1)
            return Scores(scores, 1e3 * took, float(facts["server_ms"]), "")

    def inspect(self, lines: bytes, form: str) -> dict[str, Any]:
        """Every step of a few lines as the server does it."""
        path = f"/v1/inspect?{urlencode({'format': form})}"
        return self._object("/v1/inspect", self._ask("POST", path, lines)[0])

    def _object(self, path: str, content: bytes) -> dict[str, Any]:
        with self._understanding(path):
            return dict(json.loads(content))

    @contextmanager
    def _understanding(self, path: str) -> Iterator[None]:
        """A reply that means nothing is the server's fault, and named so."""
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            reason = str(error).partition("\n")[0][:200]
            raise ServeError(
                f"{self.url} answered {path} with what a clickfleet server does not say: {type(error).__name__}: {reason}",
                "is it the address of one?",
            ) from None

    def _ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[bytes, Any]:
        sent = dict(headers or {})
        if self._token:
            sent["Authorization"] = f"Bearer {self._token}"
        try:
            self._connection.request(method, path, body, sent)
            answer = self._connection.getresponse()
            content = answer.read(MAX_REPLY + 1)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ServeError(
                f"{self.url}: {error or type(error).__name__}", "is the server running? clickfleet serve"
            ) from None
        if len(content) > MAX_REPLY:
            self._connection.close()
            raise ServeError(f"{self.url}{path.partition('?')[0]} answered with more than {MAX_REPLY >> 20} MiB")
        if answer.status >= 300:
            try:
                why = json.loads(content)["error"]
            except (ValueError, KeyError, TypeError, RecursionError):
                why = content[:200].decode("utf-8", "replace")
            raise ServeError(f"{self.url}{path.partition('?')[0]} answered {answer.status}: {why}")
        return content, {name.lower(): value for name, value in answer.getheaders()}


class GrpcClient:
    """The same over gRPC: `score` alone."""

    def __init__(self, address: str, model: str, token: str | None = None, timeout_s: float = 30.0) -> None:
        try:
            import grpc
        except ModuleNotFoundError:
            raise MissingError("grpcio", "serve") from None
        from clickfleet.serve import messages

        self._errors, self._timeout = grpc.RpcError, timeout_s
        self._model, self.address = model, address
        self._metadata = [("authorization", f"Bearer {token}")] if token else []
        self._channel = grpc.insecure_channel(address)
        self._request, self._reply = messages.message("ModelInferRequest"), messages.message("ModelInferResponse")
        self._call = self._channel.unary_unary(
            f"/{messages.SERVICE}/ModelInfer",
            request_serializer=self._request.SerializeToString,
            response_deserializer=self._reply.FromString,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def score(self, batch: Batch) -> Scores:
        request = self._request(model_name=self._model)
        for name, values, kind in tensors_of(batch):
            request.inputs.add(name=name, datatype=kind, shape=values.shape)
            request.raw_input_contents.append(values.tobytes())
        request.outputs.add(name="score")
        begin = time.perf_counter()
        try:
            reply = self._call(request, timeout=self._timeout, metadata=self._metadata)
        except self._errors as error:
            raise ServeError(f"{self.address}: {error.details()}") from None
        took = time.perf_counter() - begin
        try:
            scores = _one_each(np.frombuffer(reply.raw_output_contents[0], np.float32), len(batch))
            server_ms = float(reply.parameters["server_ms"].string_param)
        except (ValueError, IndexError) as error:
            raise ServeError(f"{self.address} answered with what a clickfleet server does not say: {error}") from None
        return Scores(scores, 1e3 * took, server_ms, reply.model_version)


def tensors_of(batch: Batch) -> list[tuple[str, Any, str]]:
    """Name, values and datatype of what a ready batch is sent as."""
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


def _one_each(scores: Floats, rows: int) -> Floats:
    if scores.shape != (rows,):
        raise ValueError(f"{scores.size} scores for {rows} rows")
    return scores


def _server_ms(headers: Mapping[str, str]) -> float:
    found = headers.get("server-timing", "").partition("dur=")[2]
    return float(found or "nan")
