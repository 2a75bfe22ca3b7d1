"""The Open Inference Protocol, as the stock Triton client speaks it: REST with JSON and binary tensors, and gRPC."""

import contextlib
import random
import socket
from typing import Any

import grpc
import numpy as np
import pytest

from clickfleet.serve import protobuf
from clickfleet.serve.features import Fields
from served import SCHEMA, WAIT_S, Model, Served, features

triton_grpc = pytest.importorskip("tritonclient.grpc", reason="not installed on Python 3.14")
triton_http = pytest.importorskip("tritonclient.http", reason="not installed on Python 3.14")
InferenceServerException = pytest.importorskip("tritonclient.utils").InferenceServerException

KINDS = ["json", "binary", "grpc"]


def client(served: Served, kind: str) -> Any:
    if kind == "grpc":
        return triton_grpc.InferenceServerClient(served.grpc)
    return triton_http.InferenceServerClient(served.url.removeprefix("http://"))


def tensor(kind: str, name: str, values: Any, datatype: str) -> Any:
    if kind == "grpc":
        made = triton_grpc.InferInput(name, list(values.shape), datatype)
        made.set_data_from_numpy(values)
    else:
        made = triton_http.InferInput(name, list(values.shape), datatype)
        made.set_data_from_numpy(values, binary_data=kind == "binary")
    return made


def whole_rows(seed: int, n: int) -> list[dict[str, Any]]:
    """Rows where nothing is missing: tensors have no holes."""
    filled = [{"age": 1.0, "n": 2.0, "user": "v1", "ad": "v2", **row} for row in features(seed, n)]
    return [{**row, "tags": (row["tags"] + ["v5", "v6"])[:2]} for row in filled]


@pytest.mark.parametrize("kind", KINDS)
def test_health_and_metadata(served: Served, kind: str) -> None:
    with client(served, kind) as triton:
        assert triton.is_server_live()
        assert triton.is_server_ready()
        assert triton.is_model_ready("deepfm")
        assert not triton.is_model_ready("other")
        server, model = triton.get_server_metadata(), triton.get_model_metadata("deepfm")
        if kind == "grpc":
            assert (server.name, model.name) == ("clickfleet", "deepfm")
            assert [item.name for item in model.inputs] == ["age", "n", "user", "tags", "ad"]
        else:
            assert server["extensions"] == ["binary_tensor_data"]
            assert [item["name"] for item in model["outputs"]] == ["score", "logit"]


@pytest.mark.parametrize("kind", KINDS)
def test_raw_features(served: Served, model: Model, kind: str) -> None:
    rows = whole_rows(70, 9)
    text = {name: np.array([row[name] for row in rows], np.object_) for name in ("user", "ad", "tags")}
    inputs = [tensor(kind, name, np.array([row[name] for row in rows], np.float32), "FP32") for name in ("age", "n")]
    inputs += [tensor(kind, name, values, "BYTES") for name, values in text.items()]
    with client(served, kind) as triton:
        result = triton.infer("deepfm", inputs, request_id="7")
        np.testing.assert_allclose(result.as_numpy("score"), model.scores(rows), rtol=0, atol=1e-6)
        assert result.as_numpy("logit").shape == (9,)
        with pytest.raises(InferenceServerException, match="no input 'more'"):
            triton.infer("deepfm", [*inputs, tensor(kind, "more", np.zeros(9, np.float32), "FP32")])
        with pytest.raises(InferenceServerException, match="'age' is missing"):
            triton.infer("deepfm", inputs[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_ready_keys(served: Served, model: Model, kind: str) -> None:
    rows = features(71, 9)
    batch = Fields(SCHEMA).rows(rows)
    inputs = [
        tensor(kind, "dense", batch.dense, "FP32"),
        tensor(kind, "keys", batch.keys, "UINT64"),
        tensor(kind, "offsets", batch.offsets, "INT64"),
    ]
    with client(served, kind) as triton:
        output = (triton_grpc if kind == "grpc" else triton_http).InferRequestedOutput("score")
        result = triton.infer("deepfm", inputs, outputs=[output], model_version="1")
        np.testing.assert_allclose(result.as_numpy("score"), model.scores(rows), rtol=0, atol=1e-6)
        assert result.as_numpy("logit") is None
        broken = np.ascontiguousarray(batch.offsets[::-1])
        with pytest.raises(InferenceServerException, match="offsets must be"):
            triton.infer("deepfm", [*inputs[:2], tensor(kind, "offsets", broken, "INT64")])


def test_packed_requests(served: Served, model: Model) -> None:
    rows = features(72, 5)
    batch = Fields(SCHEMA).rows(rows)
    arrays = {"dense": (batch.dense, "FP32"), "keys": (batch.keys, "UINT64"), "offsets": (batch.offsets, "INT64")}
    inputs = [tensor("binary", name, values, datatype) for name, (values, datatype) in arrays.items()]
    with client(served, "binary") as triton:
        for packing in ("gzip", "deflate"):
            result = triton.infer(
                "deepfm", inputs, request_compression_algorithm=packing, response_compression_algorithm=packing
            )
            np.testing.assert_allclose(result.as_numpy("score"), model.scores(rows), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "tensor",
    [
        {"name": "keys", "shape": [1, 3], "datatype": "UINT64", "data": [1, 2]},
        {"name": "keys", "shape": [1, -3], "datatype": "UINT64", "data": [1, 2, 3]},
        {"name": "keys", "shape": [1, 3], "datatype": "UINT64", "data": [1, -2, 3]},
        {"name": "keys", "shape": [1, 3], "datatype": "UINT64", "data": ["1", "2", "3"]},
        {"name": "keys", "shape": [1, 3], "datatype": "COMPLEX", "data": [1, 2, 3]},
        {"name": "keys", "shape": [2**40, 2**40], "datatype": "UINT64", "data": []},
        {"name": "keys", "shape": [0, 3], "datatype": "UINT64", "data": []},
        {"name": "keys", "shape": [], "datatype": "UINT64", "data": [1]},
        {"name": "keys", "shape": [1, 3], "datatype": "UINT64", "parameters": {"binary_data_size": 99}},
        {"name": "keys", "shape": [1, 3], "datatype": "UINT64", "data": [[1, 2], 3]},
        {"name": "keys", "shape": [1, 3], "datatype": "UINT64", "data": [1, 2, {}]},
    ],
)
def test_tensors_that_are_none(served: Served, tensor: dict[str, Any]) -> None:
    dense = {"name": "dense", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
    reply = served.http.post("/v2/models/deepfm/infer", json={"inputs": [dense, tensor]})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]


def test_the_compiled_protocol_is_that_of_its_text() -> None:
    from pathlib import Path

    from google.protobuf import descriptor_pb2
    from grpc_tools import protoc

    folder = Path(protobuf.__file__).parent
    made = folder / "made.binpb"
    try:
        assert protoc.main(["", f"-I{folder}", f"--descriptor_set_out={made}", "inference.proto"]) == 0
        read = descriptor_pb2.FileDescriptorSet.FromString
        assert read(made.read_bytes()) == read((folder / "inference.binpb").read_bytes())
    finally:
        made.unlink(missing_ok=True)


def test_random_bytes_are_answered_or_closed_and_nothing_dies(served: Served) -> None:
    """HTTP as bytes, HTTP as bodies, gRPC as messages: the same worker goes on."""
    rng = random.Random(7)
    before = served.http.get("/v1/model").json()["pid"]
    starts = [
        b"",
        b"POST /v1/predict HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\n",
    ]
    for turn in range(30):
        with socket.create_connection(("127.0.0.1", served.fleet.settings.port), timeout=WAIT_S) as raw:
            raw.sendall(starts[turn % 4] + rng.randbytes(rng.randrange(200)))
            raw.settimeout(0.05)
            with contextlib.suppress(TimeoutError, ConnectionError):
                assert b"Traceback" not in raw.recv(65536)
    body = b'{"inputs":[{"name":"keys","shape":[1,3],"datatype":"UINT64","data":[1,2,3]}],"rows":[{"age":1}]}'
    for _ in range(150):
        broken = bytearray(body)
        for _ in range(rng.randrange(1, 6)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        route = rng.choice(["/v2/models/deepfm/infer", "/v1/predict", "/v1/rank", "/rec/prediction"])
        length = {"inference-header-content-length": str(rng.randrange(120))} if rng.random() < 0.3 else {}
        reply = served.http.post(route, content=bytes(broken), headers=length)
        assert reply.status_code in (200, 400, 413), reply.text
        assert "Traceback" not in reply.text
    with grpc.insecure_channel(served.grpc) as channel:
        call = channel.unary_unary(f"/{protobuf.SERVICE}/ModelInfer")
        good = protobuf.message("ModelInferRequest")(model_name="deepfm", raw_input_contents=[b"x"])
        good.inputs.add(name="keys", datatype="UINT64", shape=[1, 3])
        for turn in range(60):
            content = bytearray(good.SerializeToString() if turn % 2 else rng.randbytes(rng.randrange(60)))
            for _ in range(turn % 5):
                if content:
                    content[rng.randrange(len(content))] = rng.randrange(256)
            with pytest.raises(grpc.RpcError) as caught:
                call(bytes(content), timeout=WAIT_S)
            assert "Traceback" not in str(caught.value.details())
            assert caught.value.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert served.http.get("/v1/model").json()["pid"] == before
    assert not served.said
