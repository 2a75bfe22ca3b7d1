"""Rows published in float16 and int8: served, merged, rolled back, put into Redis and compared like float32 rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clickfleet.cli import build, frame
from clickfleet.config.load import Config, checked
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.serve import overlays, verification
from clickfleet.serve.predictor import Version, open_version
from clickfleet.serve.redis_cache import RedisRows
from clickfleet.store import atomic, run_folder
from clickfleet.store.published import Entry, Log
from clickfleet.store.redis_rows import connect, fill, head, row_formats
from clickfleet.store.rollback import rollback
from clickfleet.store.row_format import SHORT, RowFormat
from clickfleet.training import saving
from clickfleet.training.export import Publisher
from clickfleet.training.predict import Scorer
from served import EVENTS, SCHEMA, Model, ask, features, running, until

SMALL: tuple[RowFormat, ...] = ("float16", "int8")
ADMISSION = {"admission": "count(4)", "delete_threshold": 0.2, "decay_rate": 0.5, "base_threshold": 0}


def command(*argv: Any) -> int:
    return frame.run(build(), [str(one) for one in argv])


def last(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where exported networks are kept: an export takes a second."""
    return tmp_path_factory.mktemp("graphs")


def scores(model: Model, rows: list[dict[str, Any]], form: RowFormat = "float32") -> Any:
    """What the model gives with its rows rounded to a format."""
    ((_, found),) = list(Scorer(model.learner, rows=form)([model.batch(rows)]))
    return found.copy()


def served_scores(entries: list[Entry], rows: list[dict[str, Any]], folders: list[Path] | None = None) -> Any:
    version = open_version(entries[-1], folders or [entry.path for entry in reversed(entries)])
    return version.run(version.fields.rows(rows))["score"]


@pytest.mark.parametrize("form", SMALL)
@pytest.mark.parametrize("schema", [SCHEMA, EVENTS], ids=["slots", "histories"])
def test_a_chain_gives_the_rounded_model(form: RowFormat, schema: Any, graphs: Path, tmp_path: Path) -> None:
    name = "din" if schema is EVENTS else "deepfm"
    model = Model(schema, name, **ADMISSION)
    publisher = Publisher(model.learner, tmp_path / "log", cache=graphs / name, rows=form)
    probe, states = features(900, 12, schema), []
    for seed in range(1, 6):
        model.train(seed)
        if seed == 4:
            model.learner.table.shrink()
        entry = publisher.publish("delta", seed)
        assert (entry.row_format, entry.manifest["version"]) == (form, 4)
        assert 0 <= entry.info["golden_drift"] < 0.01
        states.append(scores(model, probe, form))
    entries = Log(tmp_path / "log").newest()
    assert verification.check(entries)
    for upto, expected in enumerate(states, start=1):
        np.testing.assert_allclose(served_scores(entries[:upto], probe), expected, rtol=0, atol=1e-6)
    again = saving.load(run_folder.resolve(tmp_path / "log"))
    ((_, offline),) = list(Scorer(again)([model.batch(probe)]))
    np.testing.assert_allclose(offline, states[-1], rtol=0, atol=1e-6)

    layers = [overlays.open_layer(entry.path, 3) for entry in reversed(entries)]
    overlays.write_merged(layers[:2], 3, tmp_path / "newer", keep_deleted=True)
    overlays.write_merged(layers, 3, tmp_path / "all", keep_deleted=False)
    for folders in ([tmp_path / "newer", *(entry.path for entry in entries[2::-1])], [tmp_path / "all"]):
        np.testing.assert_array_equal(served_scores(entries, probe, folders), served_scores(entries, probe))
    assert overlays.open_layer(tmp_path / "all", 3).format == form

    back = rollback(publisher.log, 2)
    assert (back.base, back.row_format) == (False, form)
    np.testing.assert_array_equal(served_scores([*entries, back], probe), served_scores(entries[:2], probe))
    assert back.info["golden_drift"] == entries[1].info["golden_drift"]


def test_short_rows_have_a_file_of_their_own(graphs: Path, tmp_path: Path) -> None:
    model = Model(**ADMISSION)
    model.train(1)
    entry = Publisher(model.learner, tmp_path / "short", cache=graphs / "deepfm", rows="int8").publish("base", 1)
    layer = overlays.open_layer(entry.path, 3)
    assert layer.short_rows == sum(part["embedx"].to_pylist().count([]) for part in entry.batches()) > 0
    assert entry.row_files == ("rows.arrow", SHORT)
    (entry.path / SHORT).unlink()
    with pytest.raises(CheckpointError, match=SHORT):
        entry.verify()
    full = Model()
    full.train(1)
    only = Publisher(full.learner, tmp_path / "full", cache=graphs / "deepfm", rows="int8").publish("base", 1)
    assert only.row_files == ("rows.arrow",)
    plain = Model(name="lr")
    plain.train(1)
    weights = Publisher(plain.learner, tmp_path / "weights", rows="float16").publish("base", 1)
    np.testing.assert_allclose(
        served_scores([weights], features(3)), scores(plain, features(3), "float16"), rtol=0, atol=1e-6
    )


def test_the_format_may_change_within_a_chain(graphs: Path, tmp_path: Path) -> None:
    model = Model()
    publisher = Publisher(model.learner, tmp_path / "log", cache=graphs / "deepfm")
    probe, found = features(900, 12), []
    forms: tuple[RowFormat, ...] = ("float32", "int8", "float16", "int8")
    for seed, form in enumerate(forms, start=1):
        publisher.rows = form
        model.train(seed)
        publisher.publish("delta", seed)
        entries = Log(tmp_path / "log").newest()
        again = saving.load(run_folder.resolve(tmp_path / "log"))
        ((_, offline),) = list(Scorer(again)([model.batch(probe)]))
        found.append(served_scores(entries, probe))
        np.testing.assert_allclose(found[-1], offline, rtol=0, atol=1e-6)
    assert {entry.manifest["chain"] for entry in entries} == {entries[0].manifest["chain"]}
    layers = [overlays.open_layer(entry.path, 3) for entry in reversed(entries)]
    overlays.write_merged(layers, 3, tmp_path / "all", keep_deleted=False)
    assert overlays.open_layer(tmp_path / "all", 3).format == "float32"  # it holds every format exactly
    np.testing.assert_array_equal(served_scores(entries, probe, [tmp_path / "all"]), found[-1])
    back = rollback(publisher.log, 3)
    assert back.row_format == "float32"
    np.testing.assert_array_equal(served_scores([*entries, back], probe), found[2])


def test_rows_that_do_not_fit_are_not_published(graphs: Path, tmp_path: Path) -> None:
    model = Model()
    model.train(1)
    keys = np.array([77], np.uint64)
    model.learner.table.move(keys, np.array([[0, 1e6, 0, 0]], np.float32), add=False)
    publisher = Publisher(model.learner, tmp_path / "log", cache=graphs / "deepfm", rows="int8")
    with pytest.raises(CheckpointError, match="the row of key 77 holds 1e\\+06, which int8 cannot hold"):
        publisher.publish("base", 1)
    assert Log(tmp_path / "log").lines() == []
    publisher.rows = "float32"
    assert publisher.publish("base", 1).manifest["rows"] == len(model.learner.table)


def test_a_manifest_with_another_format_is_refused(graphs: Path, tmp_path: Path) -> None:
    model = Model()
    model.train(1)
    entry = Publisher(model.learner, tmp_path / "log", cache=graphs / "deepfm", rows="int8").publish("base", 1)
    for wrong, match in (("float16", "does not hold rows in float16"), ("int4", "unknown row_format: int4")):
        manifest = {**entry.manifest, "row_format": wrong}
        (entry.path / atomic.MANIFEST).write_bytes(atomic.seal(manifest))
        with pytest.raises(CheckpointError, match=match):
            list(Entry(entry.path).batches())


@pytest.mark.parametrize("form", SMALL)
def test_served_followed_and_rolled_back(form: RowFormat, graphs: Path, tmp_path: Path) -> None:
    model = Model(**ADMISSION)
    publisher = Publisher(model.learner, tmp_path / "log", cache=graphs / "deepfm", rows=form)
    probe, states = features(900, 12), {}

    def publish(kind: Any) -> None:
        model.train(len(states) + 1)
        sequence = publisher.publish(kind, 1).sequence
        states[sequence] = scores(model, probe, form)

    publish("base")
    (tmp_path / "admin").write_text("boss\n")
    boss = {"Authorization": "Bearer boss"}
    with running(tmp_path / "log", tmp_path / "state", admin_token_file=str(tmp_path / "admin")) as served:
        for _ in range(7):  # more than a version has overlays
            publish("delta")
            until(lambda: ask(served)["sequence"] == len(states))
            reply = served.http.post("/v1/predict", json={"rows": probe}).json()
            np.testing.assert_allclose(reply["scores"], states[reply["sequence"]], rtol=0, atol=1e-6)
        assert ask(served)["row_formats"] == [form]
        assert served.http.post("/admin/rollback", json={"sequence": 3}, headers=boss).status_code == 200
        until(lambda: ask(served)["sequence"] == 3)
        reply = served.http.post("/v1/predict", json={"rows": probe}).json()
        np.testing.assert_allclose(reply["scores"], states[3], rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", SMALL)
def test_in_redis(
    form: RowFormat, redis: str, graphs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(**ADMISSION)
    publisher = Publisher(model.learner, tmp_path / "log", cache=graphs / "deepfm", rows=form)
    model.train(1)
    publisher.publish("base", 1)
    fill(redis, tmp_path / "log")
    model.train(2)
    entry = publisher.publish("delta", 2)
    fill(redis, tmp_path / "log")
    client, probe = connect(redis), features(5, 20)
    facts = head(client)
    assert facts is not None
    assert row_formats(facts) == (form,)
    sizes = {client.strlen(name) for name in client.scan_iter(match=f"clickfleet:{facts['prefix']}:*")}
    assert sizes == ({3, 9} if form == "float16" else {3, 7})
    version = Version(entry, RedisRows(redis, entry))
    found = version.run(version.fields.rows(probe))["score"]
    np.testing.assert_allclose(found, scores(model, probe, form), rtol=0, atol=1e-6)
    assert command("parity", tmp_path / "log", "--redis", redis, "--json") == 0
    assert f"stored as {form}" in last(capsys)["checks"][0]["detail"]
    publisher.rows = "float32"  # a delta in another format beside them
    model.train(3)
    entry = publisher.publish("delta", 3)
    fill(redis, tmp_path / "log")
    version = Version(entry, RedisRows(redis, entry))
    assert set(version.rows.row_formats) == {form, "float32"}
    files = served_scores(Log(tmp_path / "log").newest(), probe)
    np.testing.assert_array_equal(version.run(version.fields.rows(probe))["score"], files)
    assert command("parity", tmp_path / "log", "--redis", redis, "--json") == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    synth(folder / "log", SynthOptions(rows=2000, test_rows=500))
    settings = ["model=deepfm", "model.hidden=[8]", "table.dim=10", "train.threads=1", "data.batch_size=100"]
    where = [f"data.train={folder / 'log' / 'train'}", f"data.test={folder / 'log' / 'test'}"]
    assert command("train", *where, f"run.dir={folder / 'run'}", *settings) == 0
    return folder


def test_from_the_command_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {}
    for form in ("float32", *SMALL):
        assert command("export", run / "run", tmp_path / form, "--rows", form, "--json") == 0
        found = last(capsys)
        assert found["row_format"] == form
        assert (found["golden_drift"] is None) == (form == "float32")
        sizes[form] = found["row_bytes"]
        assert command("parity", run / "run", run / "log" / "test", "--artifact", tmp_path / form) == 0
    rows = found["rows"]
    for form, each in zip(("float32", *SMALL), (58, 31, 22), strict=True):
        assert 0 <= sizes[form] - each * rows < 4096  # what Arrow adds
    assert sizes["float16"] < 0.56 * sizes["float32"]
    assert sizes["int8"] < 0.4 * sizes["float32"]
    assert command("publish", run / "run", "base", "--rows", "int8", "--json") == 0
    found = last(capsys)
    assert (found["row_format"], found["row_bytes"]) == ("int8", sizes["int8"])
    assert command("publish", run / "run", "--rollback", "1", "--json") == 0
    assert last(capsys)["row_format"] == "int8"
    assert command("verify", run / "run", "--json") == 0
    assert command("inspect", run / "run" / "published", "--json") == 0
    for wrong in (
        ("export", run / "run", tmp_path / "x", "--rows", "int4"),
        ("export", run / "run", tmp_path / "x", "--rows", "int8", "--layout", "paddle-text"),
        ("publish", run / "run", "base", "--rows", "int4"),
        ("publish", run / "run", "--rollback", "1", "--rows", "int8"),
        ("publish", run / "run", "base", "--what-if"),
        ("publish", run / "run", "base", "--data", "x"),
    ):
        assert command(*wrong) == 2


def test_parity_with_a_server_of_small_rows(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learner = saving.load(run_folder.resolve(run / "run"))
    log = Publisher(learner, tmp_path / "log", rows="int8")
    log.publish("base", 1)
    with running(tmp_path / "log", tmp_path / "state") as served:
        argv = ("parity", run / "run", run / "log" / "test", "--server", served.url, "--json")
        assert command(*argv) == 0
        checks = {check["name"]: check["detail"] for check in last(capsys)["checks"]}
        assert "int8 online, so offline rows are rounded too" in checks["format of rows"]
        with learner.table.snapshot() as rows:
            keys = np.concatenate([columns["key"] for columns in rows])
        learner.table.push(keys, np.full((len(keys), 11), 5.0, np.float32))
        log.publish("delta", 2)
        until(lambda: ask(served)["sequence"] == 2)
        assert command(*argv) == 1
        checks = {check["name"]: check["detail"] for check in last(capsys)["checks"]}
        assert "row of key" in checks["first step that differs"]


def test_what_if(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("publish", run / "run", "--what-if") == 0
    shown = capsys.readouterr().out
    assert "int8" in shown
    assert "largest drift" in shown
    before = sorted(path.name for path in (run / "run").iterdir())
    assert command("publish", run / "run", "--what-if", "--data", run / "log" / "test", "--json") == 0
    assert sorted(path.name for path in (run / "run").iterdir()) == before
    found = last(capsys)
    facts = {one["format"]: one for one in found["formats"]}
    assert [facts[form]["bytes_per_row"] for form in ("float32", *SMALL)] == [58, 31, 22]
    assert found["scored"] == 500
    assert (facts["float32"]["drift"], facts["float32"]["auc_change"]) == (0, 0)
    for form in SMALL:
        assert 0 < facts[form]["mean_drift"] <= facts[form]["drift"] < 0.01
        assert abs(facts[form]["auc_change"]) < 0.01
    assert facts["int8"]["memory_per_row"] < facts["float16"]["memory_per_row"] < facts["float32"]["memory_per_row"]


def test_unknown_formats_are_refused() -> None:
    assert checked(Config, {"publish": {"rows": "int8"}}, source="test").publish.rows == "int8"
    with pytest.raises(ConfigError, match=r"publish\.rows"):
        checked(Config, {"publish": {"rows": "int4"}}, source="test")
