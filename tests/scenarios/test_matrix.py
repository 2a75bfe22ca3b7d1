"""Every model on data of every shape: trained, evaluated, explained, exported, served, published; one reference for all scores.

`make test` runs a selection that has every model and every shape, `make soak` the whole product.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import clickfleet
import shapes
from clickfleet import cli
from clickfleet.config.plugins import find
from clickfleet.data.reader import Reader
from clickfleet.data.schema import write_schema
from clickfleet.errors import ConfigError
from clickfleet.serve import protobuf
from clickfleet.serve.client import Client, GrpcClient, score_files
from clickfleet.serve.predictor import open_version
from clickfleet.serve.uploads import TEXT_FORMATS
from clickfleet.store.onnx import Engine
from clickfleet.store.published import Entry, Log
from clickfleet.training import export
from clickfleet.training.export import Publisher
from clickfleet.training.model import TrainingResult, load
from clickfleet.training.network import Model
from clickfleet.workbench import parity
from clickfleet.workbench.explain import explain
from served import Served, running
from shapes import HISTORIES, MODELS, SHAPES, Row, Shape

EVERY = {**SHAPES, **HISTORIES}
ALL = [(shape, model) for shape in EVERY for model in MODELS]
FAILED_ONCE = [("no_dense", "lr"), ("no_dense", "xdeepfm"), ("one_slot", "deepfefm"), ("no_slots", "dlrm")]
"""Combinations that gave wrong scores or none."""
LIGHT = [shape for shape in EVERY if shape not in ("criteo", "300_slots")]
KINDS = {name: find("models", name, Model) for name in MODELS}
SPECIAL = [
    ("history" if kind.reads_histories else "labels", name)
    for name, kind in KINDS.items()
    if kind.reads_histories or kind.least_labels > 1
]


def selection() -> list[tuple[str, str]]:
    """Each model on one of the small shapes, in turn, and the two large ones on two models each.

    Models that read histories or need several labels see data that has them.
    """
    walk = [(LIGHT[place % len(LIGHT)], model) for place, model in enumerate(MODELS)]
    large = [(shape, model) for shape in ("criteo", "300_slots") for model in ("slot_dnn", "final_mlp")]
    plain = [(shape, model) for shape in HISTORIES for model in ("deepfm", "lr")]
    return list(dict.fromkeys([*walk, *large, *SPECIAL, *plain, *FAILED_ONCE]))


CASES = ALL if os.environ.get("CLICKFLEET_SOAK") else selection()


@dataclass
class Server:
    """A server that follows one log, to which every case publishes its own model."""

    log: Path
    served: Served

    def wait(self, entry: Entry) -> dict[str, Any]:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            found: dict[str, Any] = self.served.http.get("/v1/model").json()
            if found["hash"] == entry.hash:
                return found
            assert found["problem"] is None or found["head"] < entry.sequence, found["problem"]
            time.sleep(0.02)
        raise AssertionError(f"not served: {found}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("matrix")
    shape = SHAPES["sides"]
    first = trained(shape, "lr", files(shape, folder), folder / "run")
    Publisher(first.learner, folder / "log").publish("base", step=1)
    with running(folder / "log", folder / "state", grpc_port=0) as served:
        yield Server(folder / "log", served)


def files(shape: Shape, folder: Path) -> dict[str, list[Row]]:
    """Train files and a test file; their rows."""
    rows = {"train-0": shape.rows(1, 25), "train-1": shape.rows(2, 15), "test": shape.rows(3, 24)}
    for name, some in rows.items():
        shape.write(folder / f"{name}.{shape.ending}", some)
    write_schema(shape.schema, folder / "schema.yaml")
    return rows


def trained(shape: Shape, model: str, rows: dict[str, list[Row]], run: Path) -> TrainingResult:
    folder = run.parent
    config = {
        "data": {
            "train": str(folder / f"train-*.{shape.ending}"),
            "test": str(folder / f"test.{shape.ending}"),
            "schema": str(folder / "schema.yaml"),
            "format": shape.form,
            "batch_size": 8,
        },
        "model": shapes.settings(model),
        "table": {"dim": 2, "rule": {"name": "adagrad", "lr": 0.05}, **shape.table},
        "dense": {"lr": 0.01},
        "train": {"threads": 1, "deterministic": True},
        "run": {"dir": str(run), "report": model == "lr"},
    }
    return clickfleet.train(config, quiet=True)


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0, atol=3e-6)


@pytest.mark.parametrize(("name", "model"), [pytest.param(s, m, id=f"{s}-{m}") for s, m in CASES])
def test_one_model_on_one_shape(name: str, model: str, server: Server, tmp_path: Path, capsys: Any) -> None:
    shape = EVERY[name]
    rows = files(shape, tmp_path)
    run = tmp_path / "run"
    if (message := refusal(shape, model)) is not None:
        with pytest.raises(ConfigError, match=message):
            trained(shape, model, rows, run)
        return
    done = trained(shape, model, rows, run)
    case = Case(shape, model, rows["test"], tmp_path, run, done, shapes.scores(done.learner, rows["test"]))
    scored_offline(case, capsys)
    explained_offline(case)
    artifact = exported(case)
    publisher = Publisher(done.learner, server.log, cache=tmp_path / "graph.onnx")
    (tmp_path / "graph.onnx").write_bytes(artifact.graph())  # the same network: one export is enough
    facts = server.wait(publisher.publish("base", step=1))
    with Client(server.served.url) as client:
        asked_by_name(case, client, server.served)
        asked_by_protocol(case, client, server.served, facts)
        uploaded(case, client, server.served)
        report = parity.check_parity(run, server.served.url, [case.test], artifact=artifact.path)
        assert report.ok, report.to_dict()
        learn_more(case)
        server.wait(publisher.publish("delta", step=2))
        case.wanted = shapes.scores(done.learner, case.rows)
        close(by_label(client.predict(case.features)), case.wanted)
    republished(case, server.log)


def refusal(shape: Shape, model: str) -> str | None:
    """Why a model is not defined on some data."""
    schema, kind = shape.schema, KINDS[model]
    if kind.needs_history and not schema.histories:
        return "needs a history"
    if kind.least_labels > len(schema.tasks):
        return "labels, but the schema has"
    return "needs dense columns" if model == "dlrm" and not schema.dense else None


def by_label(scores: Any) -> Any:
    """Scores by name as columns."""
    return np.stack(list(scores.values()), axis=-1) if isinstance(scores, dict) else scores


@dataclass
class Case:
    """A trained model and what its scores must be."""

    shape: Shape
    model: str
    rows: list[Row]
    folder: Path
    run: Path
    done: TrainingResult
    wanted: np.ndarray

    @property
    def test(self) -> str:
        return str(self.folder / f"test.{self.shape.ending}")

    @property
    def features(self) -> list[Row]:
        return [self.shape.features(row) for row in self.rows]

    @property
    def names(self) -> list[str]:
        schema = self.shape.schema
        return list(dict.fromkeys(c.source or c.name for c in (*schema.dense, *schema.read_columns)))

    @property
    def fields(self) -> dict[str, set[str]]:
        """What a score is explained by: inputs, and histories with all their inputs."""
        histories = {history.name: set(history.columns) for history in self.shape.schema.histories}
        rest = set(self.names).difference(*histories.values())
        return {name: {name} for name in self.names if name in rest} | histories

    def without(self, row: Row, field: str) -> Row:
        return {name: value for name, value in row.items() if name not in self.fields[field]}

    def score(self, *rows: Row) -> np.ndarray:
        return shapes.scores(self.done.learner, list(rows))

    def batch(self) -> Any:
        (found,) = list(Reader([self.test], self.shape.schema, self.shape.form, len(self.rows)))
        return found


def scored_offline(case: Case, capsys: Any) -> None:
    model = load(case.run)
    close(model.predict(case.test, batch_size=7), case.wanted)
    measured = model.evaluate(case.test)
    labels = np.array([row[case.shape.schema.label] for row in case.rows], np.float64)
    first = case.wanted.reshape(len(labels), -1)[:, 0]
    weights = np.array([row[case.shape.schema.weight] if case.shape.schema.weight else 1.0 for row in case.rows])
    losses = -np.log(np.where(labels == 1, first, 1 - first))
    assert measured["rows"] == len(case.rows)
    assert measured["logloss"] == pytest.approx(np.average(losses, weights=weights), abs=1e-5)
    buckets = np.floor(4096 * first)  # as the metric sees them; rounding may move one to its neighbour
    assert measured["auc"] == pytest.approx(auc(buckets, labels, weights), abs=0.01)
    if (case.shape.name, case.model) in FAILED_ONCE or os.environ.get("CLICKFLEET_SOAK"):
        close(model.reading(engine=Engine()).predict(case.test), case.wanted)
    out = case.folder / "scores.txt"
    with pytest.raises(SystemExit) as stop:
        cli.main(["predict", str(case.run), case.test, "--out", str(out)])
    assert stop.value.code == 0, capsys.readouterr().err
    close(np.loadtxt(out, delimiter=",", ndmin=case.wanted.ndim), case.wanted)


def auc(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> float:
    """The share of pairs in the right order; half of one where the scores are equal."""
    above = scores[labels == 1][:, None] - scores[labels == 0][None, :]
    both = weights[labels == 1][:, None] * weights[labels == 0][None, :]
    return float(((above > 0) * both + (above == 0) * both / 2).sum() / both.sum())


def explained_offline(case: Case) -> None:
    for row in (case.features[0], None):
        facts = explain(case.run, case.test, 1) if row is None else explain(case.run, row)
        close(by_label(facts["score"]), case.wanted[0])
        assert {part["field"] for part in facts["contributions"]} == set(case.fields)
        for part in facts["contributions"][:3]:
            without = case.without(case.features[0], part["field"])
            close(by_label(part["contribution"]), case.wanted[0] - case.score(without)[0])


def exported(case: Case) -> Entry:
    entry = export.export(case.done.learner, case.folder / "artifact", 1)
    entry.verify()
    close(open_version(entry).run(case.batch())["score"], case.wanted)
    close(load(entry.path).predict(case.test), case.wanted)
    return entry


def asked_by_name(case: Case, client: Client, served: Served) -> None:
    close(by_label(client.predict(case.features)), case.wanted)
    facts = served.http.post("/v1/explain", json={"rows": case.features[:1]}).json()
    close(by_label(facts["score"]), case.wanted[0])
    for part in facts["contributions"][:3]:
        without = case.without(case.features[0], part["feature"])
        close(by_label(part["contribution"]), case.wanted[0] - case.score(without)[0])
    half = set(case.names[::2])  # the user's
    half = half.union(*(history.columns for history in case.shape.schema.histories))
    user = {key: value for key, value in case.features[0].items() if key in half}
    others = [{key: value for key, value in row.items() if key not in half} for row in case.features[:6]]
    ranked = client.rank([{"id": i, **row} for i, row in enumerate(others)], user)["ranked"]
    scores = case.score(*({**user, **row} for row in others))
    close([by_label(item["score"]) for item in ranked], scores[[item["id"] for item in ranked]])
    assert sorted(item["id"] for item in ranked) == list(range(6))
    if case.wanted.ndim == 1:
        return
    ranked = client.rank([{"id": i, **row} for i, row in enumerate(others)], user, by="click * buy")["ranked"]
    close([item["by"] for item in ranked], np.sort(scores[:, 0] * scores[:, 1])[::-1])


def asked_by_protocol(case: Case, client: Client, served: Served, facts: dict[str, Any]) -> None:
    batch = case.batch()
    close(client.score(batch).scores, case.wanted)
    with GrpcClient(served.grpc, facts["name"]) as calls:
        close(calls.score(batch).scores, case.wanted)
    if case.shape.schema.values:  # by name, a tensor has no place for them
        return
    path = f"/v2/models/{facts['name']}"
    metadata = served.http.get(path).json()
    inputs = metadata["inputs"]
    assert [item["name"] for item in inputs] == case.names
    events = {column for history in case.shape.schema.histories for column in history.columns}
    assert {f"{name}.lengths" for name in events} <= {item["name"] for item in metadata["optional_inputs"]}
    tensors = [as_described(item, case.features) for item in inputs if item["name"] not in events]
    jagged = [part for name in sorted(events) for part in with_lengths(name, case.features, padded=False)]
    outputs = [{"name": name} for name in ("score", *(facts["outputs"] if case.wanted.ndim == 2 else ()))]
    outputs = list({item["name"]: item for item in outputs}.values())
    reply = served.http.post(f"{path}/infer", json={"inputs": [*jagged, *tensors], "outputs": outputs})
    assert reply.status_code == 200, reply.text
    found = {item["name"]: item for item in reply.json()["outputs"]}
    assert found["score"]["shape"] == list(case.wanted.shape)
    close(np.reshape(found["score"]["data"], case.wanted.shape), case.wanted)
    if case.wanted.ndim == 2:
        close(np.stack([found[task.name]["data"] for task in case.shape.schema.tasks], axis=1), case.wanted)
    padded = [part for name in sorted(events) for part in with_lengths(name, case.features, padded=True)]
    close(infer(served.grpc, facts["name"], [*tensors, *padded]).reshape(case.wanted.shape), case.wanted)


def with_lengths(name: str, rows: list[Row], padded: bool) -> list[dict[str, Any]]:
    """The events of a history: one after another or padded, and the number of events of each row."""
    lists = [["" if event is None else str(event) for event in row.get(name) or []] for row in rows]
    width = max(map(len, lists))
    data = [event for events in lists for event in [*events, *["?"] * (width - len(events) if padded else 0)]]
    lengths = {"name": f"{name}.lengths", "datatype": "INT64", "shape": [len(rows)], "data": [*map(len, lists)]}
    shape = [len(rows), width] if padded else [len(data)]
    return [{"name": name, "datatype": "BYTES", "shape": shape, "data": data}, lengths]


def as_described(item: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    """The tensor that the metadata ask for."""
    several = [value if isinstance(value := row.get(item["name"]), list) else [value] for row in rows]
    text = item["datatype"] == "BYTES"
    none: Any = "" if text else None
    width = max(map(len, several)) if item["shape"][-1] == -1 and len(item["shape"]) == 2 else item["shape"][-1]
    width = max(width, 1)
    filled = [[*row, *[None] * (width - len(row))] for row in several]
    data = [none if value is None else str(value) if text else value for row in filled for value in row]
    shape = [len(rows), width] if len(item["shape"]) == 2 else [len(rows)]
    return {"name": item["name"], "datatype": item["datatype"], "shape": shape, "data": data}


def infer(address: str, model: str, tensors: list[dict[str, Any]]) -> np.ndarray:
    """The same tensors over gRPC, as bytes."""
    request = protobuf.message("ModelInferRequest")(model_name=model)
    request.outputs.add(name="score")
    for tensor in tensors:
        request.inputs.add(**{key: tensor[key] for key in ("name", "datatype", "shape")})
        if tensor["datatype"] == "BYTES":
            texts = [text.encode() for text in tensor["data"]]
            content = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
        elif tensor["datatype"] == "INT64":
            content = np.array(tensor["data"], np.int64).tobytes()
        else:
            content = np.array([np.nan if x is None else x for x in tensor["data"]], np.float32).tobytes()
        request.raw_input_contents.append(content)
    with grpc.insecure_channel(address) as channel:
        call: Callable[..., Any] = channel.unary_unary(
            f"/{protobuf.SERVICE}/ModelInfer",
            request_serializer=type(request).SerializeToString,
            response_deserializer=protobuf.message("ModelInferResponse").FromString,
        )
        reply = call(request, timeout=60)
    return np.frombuffer(reply.raw_output_contents[0], np.float32)


def uploaded(case: Case, client: Client, served: Served) -> None:
    form = case.shape.form["name"]
    for protocol in ("http", "grpc", "upload") if form in TEXT_FORMATS and form != "csv" else ("http", "grpc"):
        found: list[Any] = []
        score_files(
            served.url,
            [case.test],
            lambda number, scores, ours, theirs: found.extend(by_label(scores)),  # noqa: B023
            protocol=protocol,
            grpc_address=served.grpc,
        )
        close(found, case.wanted)
    if form in TEXT_FORMATS:
        close(client.upload(Path(case.test).read_bytes(), form).scores, case.wanted)


def learn_more(case: Case) -> None:
    learner = case.done.learner
    train = [str(case.folder / f"train-0.{case.shape.ending}")]
    learner.model.train()
    step = learner.steps(1)[0]
    for batch in Reader(train, case.shape.schema, case.shape.form, 8):
        result = step(batch, learner.table.pull(step.embedding.unique(batch)))
        learner.optimizer.step(step.flat.grads, result.dense_scale)
        learner.table.push(**result.push._asdict())
    learner.model.eval()
    assert np.abs(case.score(*case.rows) - case.wanted).max() > 1e-5


def republished(case: Case, log: Path) -> None:
    assert [line.kind for line in Log(log).lines()[-2:]] == ["base", "delta"]
    close(load(log).predict(case.test), case.wanted)
