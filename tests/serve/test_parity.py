"""`score`, `parity` and rows in Redis, by the command line against real servers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clickfleet.cli import build, frame
from clickfleet.cli.serving import serve_section
from clickfleet.config.sections import Serve
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.errors import ConfigError
from clickfleet.online.publisher import copy_to
from clickfleet.serve.client import Client
from clickfleet.serve.predictor import Version, open_version
from clickfleet.serve.redis_cache import RedisRows
from clickfleet.store import run_folder
from clickfleet.store.published import Entry
from clickfleet.store.redis_rows import HEAD, connect, count, fill, head
from clickfleet.training import export, saving
from originals import QUEUE_READER, project
from served import Model, ask, features, running, until

SETTINGS = ["model=deepfm", "model.hidden=[8]", "table.dim=3", "train.threads=1", "data.batch_size=100"]


def command(*argv: Any) -> int:
    return frame.run(build(), [str(one) for one in argv])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on raw Criteo text, its artifact and some rows."""
    folder = tmp_path_factory.mktemp("parity")
    synth(folder / "log", SynthOptions(rows=600, test_rows=60))
    assert command("train", f"data.train={folder / 'log' / 'train'}", f"run.dir={folder / 'run'}", *SETTINGS) == 0
    learner = saving.load(run_folder.resolve(folder / "run"))
    export.export(learner, folder / "artifact", 6)
    export.export(learner, folder / "pruned", 6, ["I1", "I2", "C1", "C7"])
    return folder


def last(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_score_and_parity(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("predict", run / "run", run / "log" / "test", "--out", tmp_path / "scores.npy") == 0
    offline = np.load(tmp_path / "scores.npy")
    with running(run / "artifact", tmp_path / "state", grpc_port=0) as served:
        for protocol in ("http", "grpc", "upload"):
            capsys.readouterr()
            more = ["--protocol", protocol, "--grpc-address", served.grpc]
            assert command("score", served.url, run / "log" / "test", *more) == 0
            lines = capsys.readouterr().out.splitlines()
            assert len(lines) == 13
            assert "client" in lines[0]
            assert "server" in lines[0]
            shown = [float(x) for line in lines[:-1] for x in line.partition(": ")[2].partition("  ")[0].split()]
            np.testing.assert_allclose(shown, offline, rtol=0, atol=1e-6)
        assert command("score", served.url, run / "log" / "test", "--protocol", "smoke") == 1
        others = ["--artifact", run / "pruned"]
        assert command("parity", run / "run", run / "log" / "test", "--server", served.url, *others, "--json") == 0
        found = last(capsys)
        assert (found["ok"], found["rows"]) == (True, 60)
        assert found["max_abs_diff"] <= 1e-6
        assert "35 inputs pruned" in next(check["detail"] for check in found["checks"] if check["name"] == "graph")
        with Client(served.url) as client:
            assert client.model()["name"] == "deepfm"
            assert client.rank([{"id": 1, "C1": "a"}, {"id": 2, "C1": "b"}], {"I1": 3}, top_k=1)["candidates"] == 2


def test_parity_names_the_first_step_that_differs(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another model behind the server: its rows differ first; then only a layer does."""
    learner = saving.load(run_folder.resolve(run / "run"))
    weights = dict(learner.dense())
    learner.restore_dense({name: value + 0.25 if value.ndim == 2 else value for name, value in weights.items()})
    export.export(learner, tmp_path / "layers", 6)
    learner.restore_dense(weights)
    with learner.table.snapshot() as rows:
        keys = np.concatenate([columns["key"] for columns in rows])
    learner.table.push(keys, np.full((len(keys), 4), 5.0, np.float32))
    export.export(learner, tmp_path / "rows", 6)
    for name, step in (("layers", "layer "), ("rows", "row of key")):
        with running(tmp_path / name, tmp_path / f"state-{name}") as served:
            assert command("parity", run / "run", run / "log" / "test", "--server", served.url, "--json") == 1
        found = last(capsys)
        assert found["ok"] is False
        assert step in next(check["detail"] for check in found["checks"] if check["name"] == "first step that differs")
    assert command("parity", run / "run", "--artifact", tmp_path / "rows", "--json") == 1
    assert "0 missing, 0 extra" in next(
        c["detail"] for c in last(capsys)["checks"] if c["name"] == "rows of the artifact"
    )


def test_parity_reads_what_predict_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A separator, columns without a header, a command, and bad lines that are skipped."""
    rng = np.random.default_rng(0)
    lines = [f"{rng.integers(0, 2)};{rng.integers(0, 9)};{rng.integers(0, 9)};{rng.random():.3f}" for _ in range(50)]
    (tmp_path / "plain").write_text("\n".join(lines) + "\n")
    (tmp_path / "headed").write_text("\n".join(["click;a;b;x", *lines]) + "\n")
    (tmp_path / "broken").write_text("\n".join([*lines[:20], "1;2", *lines[20:]]) + "\n")
    (tmp_path / "schema.yaml").write_text("label: click\ndense: [{name: x}]\nslots: [a, b]\n")
    columns = ["data.format.separator=;", "data.format.columns=[click, a, b, x]"]
    command_ = "awk -F';' '{print 1,$1,1,$4,1,$2,1,$3}'"
    cases = {
        "plain": ["data.format.name=csv", *columns],
        "headed": ["data.format.name=csv", "data.format.separator=;"],
        "broken": ["data.format.name=csv", *columns, "data.bad_lines=skip"],
        "piped": ["data.format.name=pipe", f"data.format.command={command_}", "data.format.order=[click, dense, a, b]"],
    }
    for name, settings in cases.items():
        data, run = tmp_path / ("plain" if name == "piped" else name), tmp_path / f"run-{name}"
        more = [f"data.schema={tmp_path / 'schema.yaml'}", *SETTINGS, *settings]
        assert command("train", f"data.train={data}", f"run.dir={run}", *more) == 0
        export.export(saving.load(run_folder.resolve(run), trust=True), tmp_path / f"artifact-{name}", 6)
        with running(tmp_path / f"artifact-{name}", tmp_path / f"state-{name}") as served:
            assert command("parity", run, data, "--server", served.url, "--trust", "--json") == 0
        assert last(capsys)["rows"] == 50


def test_parity_takes_a_paddlerec_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = project(tmp_path, "dnn", rows=30, reader_type="QueueDataset", pipe_command="python reader.py")
    (path.parent / "reader.py").write_text(QUEUE_READER)
    assert command("train", "-m", path) == 0
    assert command("export", "-m", path, "artifact") == 0
    with running(Path("artifact"), tmp_path / "state") as served:
        assert command("parity", "-m", path, "--server", served.url, "--artifact", "artifact", "--json") == 0
        assert last(capsys)["rows"] == 30
        assert command("parity", "-m", path, "-o", "runner.infer_end_epoch=1", "--server", served.url, "--json") == 1
    assert command("parity", "--artifact", "artifact") == 2


def test_a_run_says_how_its_log_is_served(tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    (tmp_path / "published/LOG.jsonl").touch()
    (tmp_path / "config.yaml").write_text("serve: {port: 9001, workers: 3, token_file: tokens.txt}")
    told = serve_section(tmp_path / "published")
    assert (told.port, told.workers, told.token_file) == (9001, 3, str(tmp_path / "tokens.txt"))
    assert serve_section(tmp_path / "artifact") == Serve()


def test_rows_in_redis(redis: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    published = export.Publisher(model.learner, tmp_path / "log")
    model.train(1)
    published.publish("base", 1)
    assert fill(redis, tmp_path / "log")["entries"] == 1
    model.train(2)
    model.train(3)
    rows = features(5, 20)
    with running(tmp_path / "log", tmp_path / "state", rows=redis, results_redis=redis) as served:
        before = served.http.post("/v1/predict", json={"rows": rows}).json()
        assert before["sequence"] == 1
        published.publish("delta", 3)
        assert copy_to(published.log, redis) == 1  # what `publish --to redis://…` does
        assert copy_to(published.log, redis) == 0
        until(lambda: ask(served)["sequence"] == 2)
        reply = served.http.post("/v1/predict", json={"rows": rows}).json()
        np.testing.assert_allclose(reply["scores"], model.scores(rows), rtol=0, atol=1e-6)
        files = {"file": ("a", b"user:v1 age:3\nuser:v2 ad:v5\n" * 3)}
        sent = served.http.post("/upload", params={"user_id": "11", "re_model": "Redis"}, files=files)
        assert (sent.status_code, sent.text) == (200, "ok")
        kept = connect(redis).lrange("deepfm_re:11", 0, -1)
        assert [len(json.loads(item)["data"]) for item in kept] == [1, 5]
    version = open_version(Entry(tmp_path / "log" / "000001-base"))
    with pytest.raises(Exception, match="Redis holds entry 2, not entry 1"):
        RedisRows(redis, version.entry)
    newest = Entry(tmp_path / "log" / "000002-delta")
    held = Version(newest, RedisRows(redis, newest))
    batch = held.fields.rows(rows)
    assert held.known(batch.keys).any()
    np.testing.assert_allclose(held.run(batch)["score"], model.scores(rows), rtol=0, atol=1e-6)
    assert command("parity", tmp_path / "log", "--redis", redis, "--json") == 0
    assert last(capsys)["ok"]
    client = connect(redis)
    prefix = (head(client) or {})["prefix"]
    client.delete(next(client.scan_iter(match=f"clickfleet:{prefix}:*")))
    assert command("parity", tmp_path / "log", "--redis", redis, "--json") == 1
    assert "1 missing, 0 extra, 0 different" in last(capsys)["checks"][0]["detail"]
    model.train(4)
    published.publish("base", 4)
    fill(redis, tmp_path / "log")
    assert count(client, prefix) == 0  # the old base is gone


def test_passwords_are_in_no_reply_and_no_log(redis: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    secret = "hunter2"
    model = Model()
    published = export.Publisher(model.learner, tmp_path / "log")
    model.train(1)
    published.publish("base", 1)
    client = connect(redis)
    url = redis.replace("redis://", f"redis://:{secret}@")
    client.config_set("requirepass", secret)
    texts: list[str] = []
    try:
        fill(url, tmp_path / "log")
        with running(tmp_path / "log", tmp_path / "state", rows=url, results_redis=url) as served:
            client.set(HEAD, json.dumps({"sequence": 7, "hash": "of another log", "prefix": "x"}))
            until(lambda: served.http.get("/v1/model").json()["problem"] is not None)
            routes = ("/v1/model", "/v1/stats", "/metrics", "/ready", "/health", "/openapi.json", "/v2/models/deepfm")
            texts += [served.http.get(route).text for route in routes]
            assert "redis://***@127.0.0.1" in texts[0]
            client.delete("deepfm_re:1")
            client.set("deepfm_re:1", "not a list")
            files = {"file": ("a", b"user:v1\n")}
            sent = served.http.post("/upload", params={"user_id": "1", "re_model": "redis"}, files=files)
            assert sent.status_code == 502
            texts += [sent.text, *served.said]
            assert (tmp_path / "state" / "settings.json").stat().st_mode & 0o077 == 0
    finally:
        client.config_set("requirepass", "")
    broken = url.rpartition(":")[0] + ":1/0"
    for argv in (
        ("publish", tmp_path / "log", "--rollback", "1", "--to", broken),
        ("parity", tmp_path / "log", "--redis", broken),
    ):
        assert command(*argv, "--json") == 1
    assert command("serve", tmp_path / "log", "--port", "0", "--grpc-port", "-1", "--rows", broken) == 1
    said = capfd.readouterr()
    texts += [said.out, said.err, frame.to_json({"url": url}), str(ConfigError(url, f"try {url}"))]
    assert "cannot reach redis://***@" in said.err
    assert not [text for text in texts if secret in text]
