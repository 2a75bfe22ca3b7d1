"""Limits: silent and slow clients are closed, and no request can name a quantity that costs more than its bytes."""

import asyncio
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from clickfleet.errors import ServeError
from clickfleet.serve import protobuf
from clickfleet.serve.batching import AdmissionControl, BusyError, Counts
from clickfleet.serve.client import Client
from clickfleet.serve.features import Fields, overlay
from served import SCHEMA, WAIT_S, Model, Served, features, running, until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@pytest.fixture(scope="module")
def strict(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with short limits."""
    limits = {
        "header_timeout_s": 0.4,
        "body_timeout_s": 0.4,
        "send_timeout_s": 0.4,
        "idle_timeout_s": 0.8,
        "max_header_bytes": 8192,
    }
    with running(artifact, tmp_path_factory.mktemp("strict"), grpc_port=0, max_body=1 << 20, **limits) as found:
        found.http.headers["connection"] = (
            "close"  # a kept connection may be closed for idleness as its next request leaves
        )
        yield found


@pytest.fixture(scope="module")
def crowded(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for few connections, which waits long for requests and shortly for clients that do not read."""
    folder = tmp_path_factory.mktemp("crowded")
    with running(artifact, folder, send_timeout_s=0.4, max_connections=40, max_body=1 << 20) as found:
        found.http.headers["connection"] = "close"
        yield found


def closed(served: Served, reason: str) -> float:
    """How many connections were closed for a reason."""
    lines = served.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(f"clickfleet_closed_{reason}_total "))


def connect(served: Served, port: int | None = None) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.settimeout(WAIT_S)
    made.connect(("127.0.0.1", port or served.fleet.settings.port))
    return made


def rest(sock: socket.socket) -> bytes:
    """What comes until the server closes."""
    found = b""
    try:
        while part := sock.recv(65536):
            found += part
    except ConnectionError:
        pass
    return found


def drip(sock: socket.socket, content: bytes) -> None:
    """Sends a byte now and then until the server has had enough."""

    def send() -> None:
        try:
            for at in range(len(content)):
                sock.sendall(content[at : at + 1])
                time.sleep(0.03)
        except OSError:
            pass

    threading.Thread(target=send, daemon=True).start()


HEAD = b"POST /v1/predict HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n"
SILENT: dict[str, Callable[[socket.socket], None]] = {
    "says nothing": lambda sock: None,
    "half a request line": lambda sock: sock.sendall(b"POST /v1/pre"),
    "half a head": lambda sock: sock.sendall(HEAD),
    "a head byte by byte": lambda sock: drip(sock, HEAD + b"x-more: " + b"y" * 1000),
    "empty lines": lambda sock: drip(sock, b"\r\n" * 500),
    "no body": lambda sock: sock.sendall(HEAD + b"\r\n"),
    "a body byte by byte": lambda sock: (sock.sendall(HEAD + b"\r\n"), drip(sock, b" " * 400))[0],
    "a chunked body that does not end": lambda sock: sock.sendall(
        b"POST /v1/predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"
    ),
    "an upload without its body": lambda sock: sock.sendall(
        b"POST /upload?user_id=1 HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=x\r\ncontent-length: 99\r\n\r\n"
    ),
    "a body that nobody wants": lambda sock: sock.sendall(
        b"POST /v1/model HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n"
    ),
    "silence after a reply": lambda sock: sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"),
    "half a second request": lambda sock: sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /hea"),
}


@pytest.mark.parametrize("kind", SILENT)
def test_silent_clients_are_closed(strict: Served, kind: str) -> None:
    with connect(strict) as sock:
        SILENT[kind](sock)
        told = rest(sock)
    answered = ("silence after a reply", "a body that nobody wants")
    assert (b"408" in told) == (kind not in answered), told
    assert strict.http.get("/health").status_code == 200


def test_a_client_that_does_not_read_its_replies_is_closed(crowded: Served) -> None:
    lines = (b" ".join(b"tags:%d" % i for i in range(4000)) + b"\n") * 15  # its reply is far longer than all buffers
    request = b"POST /v1/inspect HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(lines) + lines
    with connect(crowded) as sock:
        ended = select.poll()
        ended.register(sock, select.POLLHUP | select.POLLERR)
        sock.sendall(request + request)
        assert ended.poll(1e3 * WAIT_S)
    assert closed(crowded, "send") == 1


def test_requests_sent_ahead_are_bounded(crowded: Served) -> None:
    with connect(crowded) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)
        assert b"429" in rest(sock)


@pytest.mark.parametrize("said", [b"", PREFACE[:10], PREFACE, PREFACE + SETTINGS], ids=str)
def test_silent_grpc_clients_are_closed(strict: Served, said: bytes) -> None:
    with connect(strict, strict.fleet.settings.grpc_port) as sock:
        sock.sendall(said)
        sent = rest(sock)  # a connection that stays open ends in a timeout
    assert sent[3:4] in (b"", SETTINGS[3:4])  # at most HTTP/2: its first frame is the server's settings
    with grpc.insecure_channel(strict.grpc) as channel:
        live = channel.unary_unary(f"/{protobuf.SERVICE}/ServerLive")(b"", timeout=WAIT_S)
        assert protobuf.message("ServerLiveResponse").FromString(live).live


def test_a_grpc_call_without_a_message_ends(strict: Served) -> None:
    never = threading.Event()

    def messages_() -> Iterator[bytes]:
        never.wait(WAIT_S)
        yield b""

    with grpc.insecure_channel(strict.grpc) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.stream_unary(f"/{protobuf.SERVICE}/ModelInfer")(messages_(), timeout=WAIT_S)
        never.set()
    assert "took too long to arrive" in caught.value.details()


def test_heads_are_bounded(strict: Served) -> None:
    with connect(strict) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 20000 + b"\r\n\r\n")
        assert b"431" in rest(sock)
    with connect(strict) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 3000)  # never ends
        assert b"431" in rest(sock)
    body = b'{"rows":[{}]}'.ljust(30000)
    assert strict.http.post("/v1/predict", content=body).status_code == 200  # a long body is not a long head
    with pytest.raises(grpc.RpcError) as caught, grpc.insecure_channel(strict.grpc) as channel:
        channel.unary_unary(f"/{protobuf.SERVICE}/ServerLive")(b"", timeout=WAIT_S, metadata=[("x", "y" * 20000)])
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert closed(strict, "header_bytes") == 2


def test_connections_are_bounded(crowded: Served) -> None:
    many = [connect(crowded) for _ in range(60)]
    refused: set[socket.socket] = set()
    while len(refused) < 20:
        ready, _, _ = select.select([sock for sock in many if sock not in refused], [], [], WAIT_S)
        assert ready, f"only {len(refused)} connections were refused"
        assert all(b"503" in rest(sock) for sock in ready)
        refused |= set(ready)
    kept = next(sock for sock in many if sock not in refused)
    kept.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b" 200 " in kept.recv(100)
    for sock in many:
        sock.close()
    until(lambda: crowded.http.get("/health").status_code == 200)  # there is room again
    assert closed(crowded, "connections") >= 20


OFFSETS = [0, 2**63 - 1, -(2**63), -1, 1, 1, 1, 1, 1, 3]  # each difference overflows to a number that is not negative


def _offsets_request(kind: str) -> tuple[bytes, dict[str, str]]:
    import orjson

    tensors = [
        ("dense", "FP32", np.zeros((3, 2), np.float32)),
        ("keys", "UINT64", np.zeros(3, np.uint64)),
        ("offsets", "INT64", np.array(OFFSETS, np.int64)),
    ]
    if kind == "json":
        inputs: list[Any] = [
            {"name": name, "datatype": datatype, "shape": values.shape, "data": values.reshape(-1).tolist()}
            for name, datatype, values in tensors
        ]
        return orjson.dumps({"inputs": inputs}), {}
    inputs = [
        {"name": name, "datatype": datatype, "shape": values.shape, "parameters": {"binary_data_size": values.nbytes}}
        for name, datatype, values in tensors
    ]
    head = orjson.dumps({"inputs": inputs})
    body = head + b"".join(values.tobytes() for _, _, values in tensors)
    return body, {"inference-header-content-length": str(len(head))}


@pytest.mark.parametrize("kind", ["json", "binary"])
def test_offsets_whose_differences_overflow_are_refused(served: Served, kind: str) -> None:
    assert (np.diff(np.array(OFFSETS)) >= 0).all()  # what was asked before
    body, headers = _offsets_request(kind)
    reply = served.http.post("/v2/models/deepfm/infer", content=body, headers=headers)
    assert reply.status_code == 400
    assert "offsets must be" in reply.json()["error"]
    assert not served.said


def test_offsets_whose_differences_overflow_are_refused_by_grpc(served: Served) -> None:
    request = protobuf.message("ModelInferRequest")(model_name="deepfm")
    request.inputs.add(name="dense", datatype="FP32", shape=[3, 2])
    request.inputs.add(name="keys", datatype="UINT64", shape=[3])
    request.inputs.add(name="offsets", datatype="INT64", shape=[10])
    request.raw_input_contents.extend(
        [bytes(24), np.zeros(3, np.uint64).tobytes(), np.array(OFFSETS, np.int64).tobytes()]
    )
    with grpc.insecure_channel(served.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{protobuf.SERVICE}/ModelInfer")(request.SerializeToString(), timeout=WAIT_S)
    assert "offsets must be" in caught.value.details()
    assert not served.said


def tensor(**facts: Any) -> dict[str, Any]:
    return {"name": "keys", "shape": [1, 3], "datatype": "UINT64", "data": [1, 2, 3], **facts}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"inputs": [tensor(shape=[2**31] * 80_000)]}, "dimensions, more than 8"),
        ({"inputs": [tensor(shape=[2**62, 0], data=[])]}, "larger than"),
        ({"inputs": [tensor(name="user", shape=[2**30, 0], data=[])]}, "limit of"),
        ({"inputs": [tensor(name="n" * 5000)]}, "exceeds 1024"),
        ({"inputs": [tensor(data=[[[[[[1, 2, 3]]]]]])]}, "do not match the shape"),
        ({"inputs": [tensor()] * 10_001}, "limit of"),
        ({"inputs": [tensor()], "id": "i" * 2000}, "id of the request"),
        ({"inputs": [tensor()], "outputs": [{"name": "score"}] * 1000}, "requested twice"),
        ({"inputs": [tensor(), {**tensor(name="offsets"), "datatype": "FP32"}]}, "offsets must be INT64"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_quantities_of_tensors_are_bounded(served: Served, request_: Any, message: str) -> None:
    reply = served.http.post("/v2/models/deepfm/infer", json=request_)
    assert reply.status_code == 400, reply.text[:300]
    assert message in reply.json()["error"]
    assert len(reply.text) < 5000


@pytest.mark.parametrize(
    ("headers", "parameters", "message"),
    [
        ({"inference-header-content-length": "9" * 5000}, {}, "at most 18 digits"),
        ({"inference-header-content-length": "9" * 18}, {}, "longer than the body"),
        ({}, {"timeout": 10**400}, "number of microseconds"),
        ({}, {"timeout": -(10**400)}, "number of microseconds"),
        ({}, {"timeout": [1]}, "number of microseconds"),
    ],
)
def test_numbers_beside_the_tensors_are_bounded(
    served: Served, headers: dict[str, str], parameters: dict[str, Any], message: str
) -> None:
    offsets = tensor(name="offsets", shape=[4], datatype="INT64", data=[0, 1, 2, 3])
    dense = tensor(name="dense", shape=[1, 2], datatype="FP32", data=[1.0, 2.0])
    body = {"inputs": [dense, tensor(shape=[3]), offsets], "parameters": parameters}
    reply = served.http.post("/v2/models/deepfm/infer", json=body, headers=headers)
    assert reply.status_code == 400, reply.text[:300]
    assert message in reply.json()["error"]


def test_the_keys_of_a_user_are_not_multiplied(served: Served, model: Model) -> None:
    """1,500 candidates share 20,000 values, which are 30 million keys if each has its own."""
    tags = [f"v{i % 40}" for i in range(20_000)]
    row = {"user": "a", "tags": tags, "ad": "b"}
    assert served.http.post("/v1/explain", json={"rows": [row]}).status_code == 200
    asked = {"user": {"tags": tags}, "candidates": [{"id": i, "ad": f"v{i % 50}"} for i in range(1500)]}
    reply = served.http.post("/v1/rank", json=asked).json()
    scores = {item["id"]: item["score"] for item in reply["ranked"]}
    assert len(scores) == 1500
    wanted = model.scores([{"tags": tags, "ad": f"v{i}"} for i in range(3)])
    np.testing.assert_allclose([scores[i] for i in range(3)], wanted, rtol=0, atol=1e-6)
    fields = Fields(SCHEMA)
    user, candidates = fields.rows([{"tags": tags}]), fields.rows([{}] * 1500)
    with pytest.raises(ServeError, match="expands to 30,003,000 keys"):
        overlay(fields, user, candidates, {"tags"})


def test_long_names_are_not_sent_back(served: Served) -> None:
    reply = served.http.post("/v1/predict", json={"rows": [{"x" * 500_000: 1}]})
    assert reply.status_code == 400
    assert len(reply.content) < 5000


def test_who_would_wait_too_long_is_refused_before_it_is_parsed() -> None:
    async def run() -> None:
        clock = [0.0]
        counts = Counts()
        gate = AdmissionControl(0.05, counts, lambda: clock[0])
        for _ in range(200):  # each of 100 kB takes 10 ms
            ticket = gate.enter(100_000)
            assert isinstance(ticket, float)
            clock[0] += 0.01
            gate.leave(ticket, 100_000)
        inside = [gate.enter(100_000) for _ in range(2)]
        waiting = [gate.enter(100_000) for _ in range(4)]
        assert [isinstance(one, float) for one in (*inside, *waiting)] == [True] * 2 + [False] * 4
        with pytest.raises(BusyError):
            gate.enter(10_000)
        with pytest.raises(BusyError):
            gate.check(10_000)
        gate.check(100)
        assert gate.enter(100) == 0.0  # a small one goes in
        gate.leave(0.0, 100)
        assert counts.refused == 2
        waiting[0].cancel()  # type: ignore[union-attr]
        gate.leave(inside[0], 100_000)  # type: ignore[arg-type]
        assert [one.done() for one in waiting] == [True, True, False, False]  # type: ignore[union-attr]
        for ticket in (inside[1], await waiting[1]):  # type: ignore[misc]
            gate.leave(ticket, 100_000)  # type: ignore[arg-type]
        for ticket in waiting[2:]:
            gate.leave(await ticket, 100_000)  # type: ignore[misc]
        assert gate.inside == 0
        assert isinstance(gate.enter(10_000), float)

    with ThreadPoolExecutor(1) as other:  # the browser of earlier tests keeps a loop in this thread
        other.submit(asyncio.run, run()).result()


def test_ready_rows_still_score(served: Served, model: Model) -> None:
    rows = features(77, 4)
    batch = Fields(SCHEMA).rows(rows)
    inputs = [
        {"name": "dense", "datatype": "FP32", "shape": [4, 2], "data": batch.dense.tolist()},  # nested once
        {"name": "keys", "datatype": "UINT64", "shape": [len(batch.keys)], "data": batch.keys.tolist()},
        {"name": "offsets", "datatype": "INT64", "shape": [1, 13], "data": batch.offsets.tolist()},
    ]
    reply = served.http.post("/v2/models/deepfm/infer", json={"inputs": inputs}).json()
    np.testing.assert_allclose(reply["outputs"][0]["data"], model.scores(rows), rtol=0, atol=1e-6)


def test_a_client_connects_again_after_its_idle_connection_was_closed(strict: Served) -> None:
    with Client(strict.url) as client:
        first = client.model()
        assert select.select([client.connection.sock], [], [], WAIT_S)[0]  # the end of the connection has arrived
        assert client.model()["sequence"] == first["sequence"]
