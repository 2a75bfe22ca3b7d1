"""Slots with widths of their own: trained, evaluated, resumed, exported, published, served and on a cluster alike."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clickfleet
import shapes
from clickfleet import _core, cli
from clickfleet.cluster.simulate import SimulatedCluster, with_mode
from clickfleet.config.load import load as load_config
from clickfleet.config.plugins import find, names
from clickfleet.data.memory import Feed
from clickfleet.data.reader import Reader
from clickfleet.errors import ConfigError
from clickfleet.serve import overlays
from clickfleet.serve.client import Client
from clickfleet.serve.predictor import open_version
from clickfleet.store import checkpoint
from clickfleet.store.onnx import Engine
from clickfleet.store.published import Log
from clickfleet.store.rollback import rollback
from clickfleet.store.row_format import RowFormat
from clickfleet.training import export, modes, saving
from clickfleet.training.export import Publisher
from clickfleet.training.layers import OwnColumns
from clickfleet.training.learner import Learner
from clickfleet.training.loop import Job
from clickfleet.training.metrics import Metrics
from clickfleet.training.model import TrainingResult, load
from clickfleet.training.network import Model
from clickfleet.workbench import diff, inspection, parity
from scenarios.test_matrix import Case, close, files, learn_more, trained
from served import running
from shapes import HISTORIES, SHAPES

WIDTHS: dict[str, dict[str, Any]] = {
    "no_dense": {"dim": 2, "dims": {"ad": 5, "tags": 1}},
    "history": {"dim": 4, "dims": {"shop": 1, "default": 4}},
    "labels": {"dim": 2, "slots": {"item": {"dim": 3, "rule": {"name": "adam", "lr": 0.01}, "admission": "count(2)"}}},
}
TOWERS = [name for name in names("models") if find("models", name, Model).unequal_widths]
QUICK = [
    ("no_dense", "wide_deep"),
    ("history", "din"),
    ("labels", "mmoe"),
]
EVERY = [(shape, model) for shape in WIDTHS for model in TOWERS]
SHAPES_OF = {**SHAPES, **HISTORIES}


def fits(shape: str, model: str) -> bool:
    kind = find("models", model, Model)
    schema = SHAPES_OF[shape].schema
    return len(schema.tasks) >= kind.least_labels and bool(schema.histories) >= kind.needs_history


CASES = [case for case in (EVERY if os.environ.get("CLICKFLEET_SOAK") else QUICK) if fits(*case)]


@pytest.fixture(scope="module", params=[pytest.param(case, id="-".join(case)) for case in CASES])
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, model = request.param
    shape = replace(SHAPES_OF[name], table=WIDTHS[name])
    folder: Path = tmp_path_factory.mktemp(f"{name}-{model}")
    rows = files(shape, folder)
    done: TrainingResult = trained(shape, model, rows, folder / "run")
    wanted = shapes.scores(done.learner, rows["test"])
    return Case(shape, model, rows["test"], folder, folder / "run", done, wanted)


def test_predict_evaluate_and_the_server_have_the_scores_of_plain_loops(case: Case) -> None:
    model = load(case.run)
    close(model.predict(case.test, batch_size=7), case.wanted)
    close(model.reading(engine=Engine()).predict(case.test, batch_size=5), case.wanted)
    entry = export.export(case.done.learner, case.folder / "artifact", 1)
    entry.verify()
    close(open_version(entry).run(case.batch())["score"], case.wanted)
    publisher = Publisher(case.done.learner, case.folder / "log", cache=case.folder / "graph.onnx")
    publisher.publish("base", step=1)
    learn_more(case)
    publisher.publish("delta", step=2)
    wanted = shapes.scores(case.done.learner, case.rows)
    close(load(case.folder / "log").predict(case.test), wanted)
    entries = Log(case.folder / "log").newest()
    for one in entries:
        one.verify()
    # A server merges overlays; rows keep their widths.
    factors = case.done.learner.table.factors
    layers = [overlays.open_layer(one.path, factors) for one in reversed(entries)]
    overlays.write_merged(layers, factors, case.folder / "merged", False)
    widths = {len(batch.column("embedx").flatten()) // batch.num_rows for batch in entries[0].batches()}
    assert widths >= {own.factors for own in case.done.learner.table.classes if own.admission.by == "birth"}
    merged = overlays.open_layer(case.folder / "merged", factors)
    assert overlays.size(merged) == len(case.done.learner.table)


def test_models_read_only_the_columns_of_a_slot(case: Case) -> None:
    """Values beyond the width of a slot have no influence, and get no gradient."""
    learner = load(case.run).learner
    model, batch = learner.model, case.batch()
    embedding = learner.embedding()
    rows = learner.table.pull(embedding.unique(batch), training=True)
    x = embedding.inputs(batch, rows)
    model.eval()
    before = model(x)
    before.sum().backward()
    own = OwnColumns(learner.shape).index
    beyond = np.ones(x.factors[0].numel(), bool)
    assert own is not None
    beyond[own.numpy()] = False
    assert x.factors.grad is not None
    assert not x.factors.grad.flatten(1)[:, beyond].any()
    noisy = x.factors.detach().clone()
    noisy.flatten(1)[:, beyond] = 9.0
    histories = {}
    for history in learner.shape.histories:
        events = x.histories[history.name]
        changed = torch.full_like(events.factors, 7.0).flatten(2)
        assert history.columns is not None
        changed[:, :, list(history.columns)] = events.factors.detach().flatten(2)[:, :, list(history.columns)]
        histories[history.name] = events._replace(factors=changed.view(events.factors.shape))
    assert torch.equal(model(x._replace(factors=noisy, histories=histories)), before)


def test_a_resumed_run_equals_a_whole_one(tmp_path: Path) -> None:
    shape = replace(SHAPES["no_dense"], table=WIDTHS["no_dense"])
    rows = files(shape, tmp_path)
    whole = trained(shape, "dnn", rows, tmp_path / "whole").learner
    base = load_config(tmp_path / "whole" / "config.yaml")
    assert base.table.dims == {"ad": 5, "tags": 1}
    first = replace(base, train=replace(base.train, epochs=1), run=replace(base.run, dir=str(tmp_path / "parts")))
    clickfleet.train(first, quiet=True)
    started, misfits = saving.start_from(checkpoint.latest(tmp_path / "whole" / "checkpoints"), base, shape.schema)
    assert (len(started.table), misfits) == (len(whole.table), [])
    resumed = clickfleet.train(replace(first, train=replace(first.train, epochs=2)), resume=True, quiet=True).learner
    twice = replace(base, train=replace(base.train, epochs=2), run=replace(base.run, dir=str(tmp_path / "twice")))
    expected = clickfleet.train(twice, quiet=True).learner
    assert torch.equal(resumed.flat.values, expected.flat.values)
    assert shapes.contents(resumed).keys() == shapes.contents(expected).keys()
    for key, row in shapes.contents(resumed).items():
        np.testing.assert_array_equal(row, shapes.contents(expected)[key])
    other = load_config(tmp_path / "whole" / "config.yaml", [f"run.dir={tmp_path / 'parts'}", "table.dims.ad=6"])
    with pytest.raises(ConfigError, match=r"dims is .*'ad': 6"):
        clickfleet.train(other, resume=True, quiet=True)
    wider = load_config(tmp_path / "whole" / "config.yaml", ["table.dims.ad=6"])
    started, misfits = saving.start_from(checkpoint.latest(tmp_path / "whole" / "checkpoints"), wider, shape.schema)
    assert started.table.factors == 6
    assert misfits[0] == "all rows: slot ad has 5 factors in the old model, 6 in this one"


def test_a_cluster_learns_what_one_machine_learns(tmp_path: Path) -> None:
    shape = replace(SHAPES["no_dense"], table=WIDTHS["no_dense"])
    files(shape, tmp_path)
    reader = Reader(str(tmp_path / "train-*.csv"), format=shape.form, schema=shape.schema, batch_size=8)
    batches = [batch for batch in reader if len(batch) == 8] * 6
    settings = ["model.name=dnn", "model.hidden=[8]", "table.dims={ad: 5, tags: 1, default: 2}", "data.batch_size=8"]
    settings += ["table.rule={name: adagrad, lr: 0.05}", "train.loss.shared_error=1"]
    config = load_config(None, settings)
    expected = Learner(config, shape.schema)
    modes.load(config)(Job(expected, Feed(batches, shape.schema, 8), Metrics()))
    parts = [Feed([batch[i * 4 : (i + 1) * 4] for batch in batches], shape.schema, 4) for i in (0, 1)]
    found = {
        "sync": SimulatedCluster(with_mode(config, "sync"), shape.schema, 2, shards=2).train(parts),
        "geo": SimulatedCluster(with_mode(config, "geo", k_steps=3), shape.schema, 1, shards=2).train(
            [Feed(batches, shape.schema, 8)]
        ),
    }
    rows = shapes.contents(expected)
    for mode, learner in found.items():
        assert (learner.flat.values - expected.flat.values).abs().max() <= 1e-5, mode
        others = shapes.contents(learner)
        assert others.keys() == rows.keys()
        for key, row in rows.items():
            np.testing.assert_allclose(others[key], row, rtol=0, atol=1e-5)
        assert [own.factors for own in learner.table.classes] == [own.factors for own in expected.table.classes]


@pytest.mark.parametrize("form", ["float16", "int8"])
def test_small_rows_keep_their_widths(tmp_path: Path, form: RowFormat) -> None:
    """In entries, merged layers and after a rollback; the server has the scores of the rounded rows."""
    shape = replace(SHAPES["no_dense"], table=WIDTHS["no_dense"])
    rows = files(shape, tmp_path)
    done = trained(shape, "dnn", rows, tmp_path / "run")
    publisher = Publisher(done.learner, tmp_path / "log", rows=form)
    publisher.publish("base", step=1)
    wanted = shapes.scores(done.learner, rows["test"])
    case = Case(shape, "dnn", rows["test"], tmp_path, tmp_path / "run", done, wanted)
    first = load(tmp_path / "log").predict(case.test)
    learn_more(case)
    publisher.publish("delta", step=2)
    base, delta = Log(tmp_path / "log").newest()
    assert {width for width, _ in base.records()} >= {1, 2, 5}
    assert "rows-1.arrow" in base.row_files
    factors, keys = done.learner.table.factors, np.concatenate([part.keys for _, part in base.records()])
    layers = [overlays.open_layer(one.path, factors) for one in (delta, base)]
    overlays.write_merged(layers, factors, tmp_path / "merged", False)
    found = [np.empty((len(keys), 1 + factors), np.float32) for _ in range(2)]
    for out, parts in zip(found, (layers, [overlays.open_layer(tmp_path / "merged", factors)]), strict=True):
        _core.FrozenRows(tuple(parts), factors).read(keys, out)
    np.testing.assert_array_equal(*found)
    assert overlays.size(overlays.open_layer(tmp_path / "merged", factors)) == len(done.learner.table)
    with running(tmp_path / "log", tmp_path / "state") as served, Client(served.url) as client:
        scores = client.predict([shape.features(row) for row in rows["test"]])
        close(scores, load(tmp_path / "log").predict(case.test))
        assert np.abs(np.array(scores) - shapes.scores(done.learner, case.rows)).max() < 0.01
    rollback(Log(tmp_path / "log"), base.sequence)
    close(load(tmp_path / "log").predict(case.test), first)


def test_a_served_model_a_report_and_an_inspection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = replace(SHAPES["no_dense"], table=WIDTHS["no_dense"])
    rows = files(shape, tmp_path)
    done = trained(shape, "dnn", rows, tmp_path / "run")
    wanted = shapes.scores(done.learner, rows["test"])
    export.export(done.learner, tmp_path / "artifact", 1)
    with running(tmp_path / "artifact", tmp_path / "state") as served, Client(served.url) as client:
        close(client.predict([shape.features(row) for row in rows["test"]]), wanted)
        report = parity.check_parity(tmp_path / "run", served.url, [str(tmp_path / "test.csv")])
        assert report.ok, report.to_dict()
    facts = inspection.describe(tmp_path / "run")
    assert set(facts["widths"]) == {"1", "2", "5"}
    assert sum(one["rows"] for one in facts["widths"].values()) == facts["rows"]
    kinds = {str(width): size for width, _, _, size, _ in done.learner.table.core.kinds}
    assert all(one["bytes_per_row"] >= kinds[width] for width, one in facts["widths"].items())
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        cli.main(["inspect", str(tmp_path / "run")])
    shown = capsys.readouterr().out
    assert "up to 5 factors" in shown
    assert "rows with 1 factors: " in shown
    assert diff.diff(tmp_path / "run", tmp_path / "run")["moved"] == 0
    manifest = json.loads((checkpoint.latest(tmp_path / "run" / "checkpoints") / "manifest.json").read_text())
    assert manifest["model"]["dims"] == {"ad": 5, "tags": 1}
    assert manifest["table"]["factors"] == 2
    assert {slot: own["factors"] for slot, own in manifest["table"]["slots"].items()} == {"1": 5, "2": 1}
