"""Clients of an exported Paddle model: its names of inputs and outputs work over every protocol, whatever the schema calls them."""

from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest

from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.serve import protobuf
from clickfleet.training import export
from originals import SLOTS, project, slot_lines
from served import FLAT, Model, Served, features, running


def old_feed(rows: int) -> tuple[dict[str, list[list[float]]], list[dict[str, list[str]]]]:
    """A batch as old clients send it, C1 … and dense_input, and its lines."""
    parsed = []
    for line in slot_lines(rows, 5).splitlines():
        found: dict[str, list[str]] = {}
        for token in line.split():
            name, _, value = token.partition(":")
            found.setdefault(name, []).append(value)
        parsed.append(found)
    feed: dict[str, list[list[float]]] = {
        f"C{i}": [[int(row[str(i)][0])] for row in parsed] for i in range(1, SLOTS + 1)
    }
    feed["dense_input"] = [[float(x) for x in row["dense_feature"]] for row in parsed]
    return feed, parsed


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("migrated")
    path = project(folder, "deepfm")
    (folder / "test").write_text(slot_lines(6, 5))
    more = ["-o", f"runner.model_save_path={folder / 'run'}", "-o", f"runner.infer_load_path={folder / 'run'}"]
    assert run(build(), ["train", "-m", str(path), *more]) == 0
    assert run(build(), ["export", str(folder / "run"), str(folder / "artifact")]) == 0
    scores = ["predict", str(folder / "run"), str(folder / "test"), "--out", str(folder / "scores.npy")]
    assert run(build(), scores) == 0
    return folder


def check_old_clients(served: Served, expected: np.ndarray, name: str) -> None:
    feed, _ = old_feed(len(expected))
    reply = served.http.post("/rec/prediction", json={"feed": [feed], "fetch": ["sigmoid_0.tmp_0"]})
    assert reply.status_code == 200, reply.text
    np.testing.assert_allclose(np.array(reply.json()["result"]["sigmoid_0.tmp_0"]), expected[:, None], atol=1e-6)
    inputs = [
        {"name": key, "shape": [len(rows), len(rows[0])], "datatype": "FP32" if key == "dense_input" else "INT64",
         "data": [x for row in rows for x in row]}
        for key, rows in feed.items()
    ]  # fmt: skip
    body = {"inputs": inputs, "outputs": [{"name": "sigmoid_0.tmp_0"}]}
    (output,) = served.http.post(f"/v2/models/{name}/infer", json=body).json()["outputs"]
    assert (output["name"], output["shape"]) == ("sigmoid_0.tmp_0", [len(expected), 1])
    np.testing.assert_allclose(output["data"], expected, atol=1e-6)
    request = protobuf.message("ModelInferRequest")(model_name=name)
    for key, rows in feed.items():
        values = np.array(rows, np.float32 if key == "dense_input" else np.int64)
        request.inputs.add(name=key, datatype="FP32" if key == "dense_input" else "INT64", shape=values.shape)
        request.raw_input_contents.append(values.tobytes())
    request.outputs.add(name="sigmoid_0.tmp_0")
    with grpc.insecure_channel(served.grpc) as channel:
        call = channel.unary_unary(
            f"/{protobuf.SERVICE}/ModelInfer",
            request_serializer=type(request).SerializeToString,
            response_deserializer=protobuf.message("ModelInferResponse").FromString,
        )
        answer = call(request, timeout=30)
    np.testing.assert_allclose(np.frombuffer(answer.raw_output_contents[0], np.float32), expected, atol=1e-6)
    twice = {"feed": [{**feed, "1": feed["C1"]}], "fetch": ["sigmoid_0.tmp_0"]}
    assert served.http.post("/rec/prediction", json=twice).status_code == 400
    short = {**feed, "dense_input": [row[:-1] for row in feed["dense_input"]]}
    assert served.http.post("/rec/prediction", json={"feed": [short], "fetch": ["score"]}).status_code == 400


def test_a_migrated_model_answers_its_old_clients(migrated: Path, tmp_path: Path) -> None:
    with running(migrated / "artifact", tmp_path / "state", grpc_port=0) as served:
        check_old_clients(served, np.load(migrated / "scores.npy"), "deepfm")
        aliases = served.http.get("/v1/model").json()["aliases"]
        assert (aliases["C1"], aliases["dense_input"], aliases["sigmoid_0.tmp_0"]) == ("1", "dense_feature", "score")


def test_single_dense_columns_take_one_input(tmp_path: Path) -> None:
    """The schema has I0, I1, I2 as inputs of their own, and slots that no old name means."""
    model = Model(FLAT)
    model.train(1)
    export.export(model.learner, tmp_path / "artifact", 1)
    rows = features(3, 5, FLAT)
    for row in rows:
        row |= {f"I{i}": row.get(f"I{i}", 0.0) for i in range(3)}
    feed = {f"C{i}": [row.get(f"C{i}") for row in rows] for i in range(4)}
    feed["dense_input"] = [[row[f"I{i}"] for i in range(3)] for row in rows]
    with running(tmp_path / "artifact", tmp_path / "state", grpc_port=0) as served:
        reply: httpx.Response = served.http.post("/rec/prediction", json={"feed": [feed], "fetch": ["softmax_0.tmp_0"]})
        assert reply.status_code == 200, reply.text
        scores = np.array(reply.json()["result"]["softmax_0.tmp_0"])[:, 0]
        np.testing.assert_allclose(scores, model.scores(rows), atol=1e-6)
        feed["dense_input"][0] = 3
        assert served.http.post("/rec/prediction", json={"feed": [feed], "fetch": ["score"]}).status_code == 400
