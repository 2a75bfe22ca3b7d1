"""What clients send: bodies of every route, headers and queries, bytes of HTTP connections, messages of gRPC.

Each goes through the real application of a worker; a reply of 500 is a finding, as is every exception that is not an error of ours.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pyarrow as pa
import uvicorn

from clickfleet.data.events import feedback_columns, feedback_rows, shows_of
from clickfleet.data.formats.joined import features_of
from clickfleet.errors import ClickfleetError
from clickfleet.serve import admin, grpc, protobuf
from clickfleet.serve.auth import Tokens
from clickfleet.serve.batching import AdmissionControl, Batcher
from clickfleet.serve.connection import Limits, limited
from clickfleet.serve.context import Context
from clickfleet.serve.counters import Meter
from clickfleet.serve.features import Fields
from clickfleet.serve.feedback import FeedbackLog
from clickfleet.serve.http import App
from clickfleet.serve.predictor import open_version
from clickfleet.serve.show_log import Scored, ShowLog, encode
from clickfleet.serve.state_folder import Status, UpdaterHealth
from clickfleet.serve.supervisor import Settings
from clickfleet.store.onnx import Engine
from clickfleet.store.published import Entry
from clickfleet.training import export
from served import EVENTS, Model, features

FOLDER = Path(tempfile.mkdtemp(prefix="clickfleet-fuzz-"))
LIMITS = Limits(8192, 9.0, 9.0, 9.0, 9.0, 100)


class FaultError(Exception):
    """A reply of 500."""


@cache
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@cache
def context() -> Context:
    """That of a worker, without its processes."""

    async def make() -> Context:
        model = Model(EVENTS, "din")
        model.train(1)
        entry = export.export(model.learner, FOLDER / "artifact", 1)
        settings = Settings(str(FOLDER / "artifact"), str(FOLDER), max_rows=200, max_candidates=200, max_body=1 << 17)
        batcher = Batcher(open_version(Entry(entry.path), engine=Engine()), max_queue_s=60)
        meter, none = Meter(FOLDER / "worker-0.json"), Tokens(None, "NO_SUCH_VARIABLE")
        admin = FOLDER / "admin"
        admin.write_text("boss\n")
        status = Status(str(entry.path), [str(entry.path)], 1)
        gate = AdmissionControl(60.0, batcher.counts)
        made = Context(settings, batcher, meter, none, Tokens(str(admin), "NONE"), status, gate, UpdaterHealth())
        made.shows, made.feedback = (
            ShowLog([FOLDER / "frames"], meter),
            FeedbackLog(settings.target(str(FOLDER / "told")), meter),
        )
        made.shows.close()
        made.feedback.queue.close()
        made.shows.writer, made.feedback.queue = Recording(), Telling()  # type: ignore[assignment]
        return made

    return loop().run_until_complete(make())


class UnreadableShow(BaseException):
    """A show that the recorder could not read. A show log drops what it cannot write, but not this."""


class Recording:
    """The way from a show log to the recorder, and the recorder, at once."""

    waiting_bytes = 0

    def write(self, entries: Sequence[Any]) -> None:
        for entry in entries:
            try:
                rows = shows_of(encode([Scored(*msgspec.msgpack.decode(msgspec.msgpack.encode(entry)))]))
                assert len(rows) == Scored(*entry).rows
                joined = {name: rows.column(name) for name in ("request", "item", "features", "user", "route")}
                features_of(pa.record_batch(joined))
            except Exception as error:
                raise UnreadableShow(str(error)) from error

    def make_room(self) -> None:
        """There is always room."""


class Telling:
    """The queue of feedback."""

    def put(self, sent: Any, work: int, size: int) -> bool:
        assert feedback_rows(feedback_columns(sent.events)) == sent.events
        sent.stored.set_result(None)
        return True


@cache
def app() -> App:
    return App(context(), admin.admin_app(context()))


async def _ask(path: str, body: bytes, headers: list[tuple[bytes, bytes]], query: bytes, method: str) -> int:
    statuses: list[int] = []
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return waiting.pop() if waiting else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http", "path": path,
        "raw_path": path.encode(errors="replace"), "query_string": query, "root_path": "", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
    }  # fmt: skip
    await app()(scope, receive, send)
    return statuses[0]


def ask(path: str, body: bytes, *headers: tuple[bytes, bytes], query: bytes = b"", method: str = "POST") -> int:
    """The status of a reply; 500 is a finding, with what was logged."""
    whole = [(b"host", b"x"), (b"content-length", b"%d" % len(body)), *headers]
    with redirect_stderr(io.StringIO()) as log:
        status = loop().run_until_complete(_ask(path, body, whole, query, method))
    if status >= 500 and status not in (501, 503, 504):
        raise FaultError(f"{status}: {log.getvalue()[-2000:]}")
    return status


def posts(path: str, *headers: tuple[bytes, bytes], query: bytes = b"") -> Callable[[bytes], object]:
    return lambda data: ask(path, data, *headers, query=query)


def by(data: bytes) -> object:
    """What to rank by."""
    asked = {"candidates": [{"id": 1, "value": 0.5}, {"id": 2}], "by": data.decode(errors="replace")}
    return ask("/v1/rank", orjson.dumps(asked))


def binary(data: bytes) -> object:
    """Two bytes for the length of the JSON part, then the body."""
    length = int.from_bytes(data[:2], "little")
    return ask("/v2/models/din/infer", data[2:], (b"inference-header-content-length", b"%d" % length))


def head(data: bytes) -> object:
    """Lines: method, path, query, then headers; the body follows an empty line."""
    lines, _, body = data.partition(b"\n\n")
    parts = [*lines.split(b"\n"), b"", b"", b""]
    headers = [(name.lower(), value) for name, _, value in (line.partition(b":") for line in parts[3:]) if name]
    path = parts[1].decode("latin-1") or "/"
    if path.startswith("/admin"):
        headers = [one for one in headers if one[0] != b"authorization"]  # a command would wait for an updater
    method = parts[0].decode("latin-1") or "GET"
    with redirect_stderr(io.StringIO()) as log:
        status = loop().run_until_complete(_ask(path, body, headers, parts[2], method))
    if status == 500:
        raise FaultError(log.getvalue()[-2000:])
    return status


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed = b"", False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


def connection(data: bytes) -> object:
    """Bytes of a connection, `|` between its packets."""

    async def run() -> bytes:
        config = uvicorn.Config(
            app(), http=limited(LIMITS, context().meter), ws="none", log_level="critical", access_log=False
        )
        config.load()
        kind: Any = config.http_protocol_class
        made = kind(config=config, server_state=uvicorn.Server(config).server_state, app_state={})
        transport = _Transport()
        made.connection_made(transport)
        for packet in data.split(b"|"):
            made.data_received(packet)
            await asyncio.sleep(0)
        made.sweep(asyncio.get_running_loop().time() + 100)
        made.connection_lost(None)
        for task in list(made.tasks):
            await task
        return transport.written

    with redirect_stderr(io.StringIO()) as log:
        told = loop().run_until_complete(run())
    if b"HTTP/1.1 500" in told:
        raise FaultError(log.getvalue()[-2000:])
    return told


class _Stream:
    def __init__(self, content: bytes) -> None:
        self.content = content

    async def read(self) -> bytes:
        return self.content

    def time_remaining(self) -> None:
        return None


def call(name: str) -> Callable[[bytes], object]:
    kind = next(request for method, request, _ in protobuf.methods() if method == name)

    def run(data: bytes) -> object:
        service = grpc.Service(context())
        try:
            return loop().run_until_complete(service.answer(name, kind, _Stream(data)))
        except grpc.RefusedError as error:
            raise ClickfleetError(str(error)) from None

    return run


ROW = features(5, 1, EVENTS)[0]
BATCH = Fields(EVENTS).rows(features(6, 3, EVENTS))
TENSORS = [("dense", "FP32", BATCH.dense), ("keys", "UINT64", BATCH.keys), ("offsets", "INT64", BATCH.offsets)]
OVERFLOW = np.array([0, 2**63 - 1, -(2**63), -1, *[1] * 11, 3], np.int64)


def tensors(parts: list[tuple[str, str, Any]], as_binary: bool = False) -> bytes:
    inputs = []
    for name, datatype, values in parts:
        told: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(values.shape)}
        extra = (
            {"parameters": {"binary_data_size": values.nbytes}} if as_binary else {"data": values.reshape(-1).tolist()}
        )
        inputs.append({**told, **extra})
    text = orjson.dumps({"inputs": inputs, "id": "7", "outputs": [{"name": "score"}], "parameters": {"timeout": 1e6}})
    if not as_binary:
        return text
    return len(text).to_bytes(2, "little") + text + b"".join(values.tobytes() for _, _, values in parts)


def raw_tensors() -> bytes:
    columns: dict[str, Any] = {
        "age": [1.0, 2.0],
        "n": [3, 4],
        "user": ["a", "b"],
        "ad": ["c", "5"],
        "tags": [["x", "y"], ["z", "1"]],
    }
    inputs = [
        {"name": name, "datatype": "FP32" if name in ("age", "n") else "BYTES", "data": values,
         "shape": [2, 2] if name == "tags" else [2]}
        for name, values in columns.items()
    ]  # fmt: skip
    inputs += [
        {"name": "ads", "datatype": "BYTES", "shape": [2, 2], "data": ["a", "b", "c", ""]},
        {"name": "users", "datatype": "BYTES", "shape": [3], "data": ["x", "y", "z"]},
        {"name": "ads.lengths", "datatype": "INT64", "shape": [2], "data": [2, 1]},
        {"name": "users.lengths", "datatype": "UINT8", "shape": [2], "data": [2, 1]},
    ]
    return orjson.dumps({"inputs": inputs})


def infer_message(offsets: Any, raw: bool = True) -> bytes:
    request = protobuf.message("ModelInferRequest")(model_name="din", id="7")
    for name, datatype, values in [*TENSORS[:2], ("offsets", "INT64", offsets)]:
        item = request.inputs.add(name=name, datatype=datatype, shape=list(values.shape))
        if raw:
            request.raw_input_contents.append(values.tobytes())
        else:
            field = {"FP32": "fp32_contents", "UINT64": "uint64_contents", "INT64": "int64_contents"}[datatype]
            getattr(item.contents, field).extend(values.reshape(-1).tolist())
    request.outputs.add(name="score")
    return bytes(request.SerializeToString())


RANK = orjson.dumps(
    {
        "user": {"user": "u", "age": 3, "ads": ["v1", "v2"], "users": ["v1", 5]}, "by": "click * buy ** .5 * value",
        "candidates": [{"id": "a", "ad": "v1", "value": 2.5}, {"id": 7, "ad": "v2", "tags": ["x", 3]}, {"id": "c"}],
        "top_k": 2, "min_score": {"click": 0.001}, "exclude": ["c"], "fixed": [{"position": 1, "id": "b"}],
    }
)  # fmt: skip
LINES = b"age:3 n:1.5 user:v1 ad:v2 tags:a tags:b\nuser:v3\n"
FORM = (
    b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\ncontent-type: text/plain\r\n\r\n'
    + LINES
    + b"\r\n--x--\r\n"
)
MULTIPART = (b"content-type", b"multipart/form-data; boundary=x")
HTTP = b'POST /v1/predict HTTP/1.1\r\nhost: x\r\ncontent-length: 13\r\n\r\n{"rows":[{}]}'
HEAD = b'POST\n/v1/predict\na=b&format=slots\ncontent-length:13\nx-timeout-ms:100\ncontent-encoding:identity\n\n{"rows":[{}]}'
INFER = "/v2/models/din/infer"

METADATA = bytes(protobuf.message("ModelMetadataRequest")(name="din", version="1").SerializeToString())

_TARGETS = [
    ("predict", posts("/v1/predict"), [
        orjson.dumps({"rows": features(7, 3, EVENTS), "outputs": ["logit", "buy"]}), b'{"rows":[{"tags":{"a":1.5,"b":2}}]}',
        b'{"rows":[{"age":1e400}]}', b'{"rows":[{"user":"\\ud800"}]}', b'{"rows":[{"user":12345678901234567890123}]}',
        b'{"rows":[{"age":1,"age":2}],"rows":[{}]}', b'{"rows":' + b"[" * 3000,
    ]),
    ("predict-gzip", posts("/v1/predict", (b"content-encoding", b"gzip")), [gzip.compress(orjson.dumps({"rows": [ROW]}))]),
    ("predict-ids", posts("/v1/predict"), [
        b'{"rows":[{},{}],"items":["a",7],"request":"r"}', b'{"request":18446744073709551616,"rows":[{}],"items":["\\ud800"]}',
    ]),
    ("feedback", posts("/v1/feedback"), [
        b'{"request":"r","item":"a","label":{"click":1,"dwell":2.5},"event":"e","time":1700000000.5}',
        b'{"events":[{"request":7,"label":{"click":true}},{"request":"r","item":null,"label":{"buy":0}}]}',
        b'{"request":"\\udfff","label":{"":1e999}}', b'{"events":' + b"[" * 3000,
    ]),
    ("explain", posts("/v1/explain"), [orjson.dumps({"rows": [ROW]})]),
    ("rank", posts("/v1/rank"), [
        RANK, b'{"candidates":[{"id":123456789012345678901234567890,"value":' + b"9" * 400 + b"}]}",
        b'{"candidates":[{"id":true}],"fixed":[{"position":99999999999999999999,"id":"\\udfff"}]}',
    ]),
    ("by", by, [b"click * buy ** -.5 + value / 1e3", b"min(click, max(buy, 1)) - log(exp(value))", b"`click` ** value", b"-" * 60]),
    ("infer", posts(INFER), [
        tensors(TENSORS), raw_tensors(), tensors([*TENSORS[:2], ("offsets", "INT64", OVERFLOW)]),
        tensors([("dense", "FP32", BATCH.dense), ("keys", "UINT64", np.zeros((3, 3), np.uint64))]),
    ]),
    ("infer-binary", binary, [tensors(TENSORS, as_binary=True), tensors([*TENSORS[:2], ("offsets", "INT64", OVERFLOW)], as_binary=True)]),
    ("prediction", posts("/rec/prediction"), [
        b'{"feed":[{"age":[1,2],"user":["a","b"],"tags":[["x"],[]]}],"fetch":["score"]}',
        b'{"feed":[{"keys":[[1,2,3,4,5]],"dense":[[0.5,1]]}],"fetch":["logit"]}',
    ]),
    ("upload", posts("/upload", MULTIPART, query=b"user_id=1&full=true&debug=true"), [FORM]),
    *(
        (f"inspect-{form}", posts("/v1/inspect", query=b"format=" + form.encode()), [LINES, b"5\t\t\t68fd1e6\r\x00", b"1 2:3:1\n"])
        for form in ("slots", "csv")
    ),
    ("rollback", posts("/admin/rollback"), [b'{"sequence":1}', b'{"sequence":1e30}']),
    ("head", head, [
        HEAD, b"GET\n/v2/models/din/versions/1\n\n", b"POST\n/upload\nuser_id=1&batch_size=5\ncontent-type:multipart/form-data\n\nx",
        b"POST\n/upload\nuser_\x80\ncontent-length:nan\n\nx",
    ]),
    ("connection", connection, [
        HTTP, HTTP + HTTP, b"GET /health HTTP/1.1\r\n|host: x\r\n\r\n|GET /metrics HTTP/1.0\r\n\r\n", b"OPTIONS * HTTP/1.1\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", b"GET /" + b"a" * 9000,
        b"POST / HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n",
    ]),
    ("grpc-infer", call("ModelInfer"), [infer_message(BATCH.offsets), infer_message(BATCH.offsets, raw=False), infer_message(OVERFLOW)]),
    ("grpc-metadata", call("ModelMetadata"), [METADATA]),
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """`TARGETS`, with the application made before the time of the first input begins, and not by whoever only imports this."""
    if name != "TARGETS":
        raise AttributeError(name)
    app()
    return _TARGETS
