"""HDFS: logs are read from it, runs and published logs are written to it; what cannot be done is refused with the way around."""

import gzip
import json
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

import clickfleet
import webhdfs
from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.data.files import expand
from clickfleet.errors import CheckpointError, ConfigError, DataError
from clickfleet.online.learn import learn
from clickfleet.store import checkpoint, mirror, run_folder
from clickfleet.store.published import Log
from streams import HEADER, lines, settings, write_days


@pytest.fixture
def hdfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[webhdfs.Hdfs]:
    monkeypatch.setenv("no_proxy", "*")
    (tmp_path / "hdfs").mkdir()
    with webhdfs.running(tmp_path / "hdfs") as running:
        yield running
    fsspec.get_filesystem_class("webhdfs").clear_instance_cache()


def text(rows: int, seed: int) -> str:
    return "\n".join([HEADER, *lines(rows, seed)]) + "\n"


def store_log(hdfs: webhdfs.Hdfs) -> None:
    for part, seed in (("train/part-0", 1), ("train/part-1", 2), ("test/part-0", 3)):
        path = hdfs.root / "logs" / f"{part}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(100, seed))
    (hdfs.root / "logs/train/_SUCCESS").touch()
    (hdfs.root / "logs/train/part-1.csv").unlink()
    (hdfs.root / "logs/train/part-1.csv.gz").write_bytes(gzip.compress(text(100, 2).encode()))


def test_paths_keep_user_host_and_port(hdfs: webhdfs.Hdfs) -> None:
    store_log(hdfs)
    parts = [f"{hdfs.url}/logs/train/part-0.csv", f"{hdfs.url}/logs/train/part-1.csv.gz"]
    for given in ("/logs/train", "/logs/train/", "/logs/train/part-*", "/logs/t*in/*.csv*"):
        assert expand(hdfs.url + given) == parts
    assert expand(parts[0]) == parts[:1]
    assert hdfs.users == {"clicks"}
    with pytest.raises(DataError, match="no file matches"):
        expand(f"{hdfs.url}/logs/nothing*")
    hdfs.fails = "StandbyException"
    with pytest.raises(DataError, match="not supported in state standby"):
        expand(f"{hdfs.url}/logs/train/part-*")


def test_a_run_from_and_at_hdfs(hdfs: webhdfs.Hdfs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It trains, resumes on a machine without its files, evaluates and predicts. No label is ever seen half written."""
    store_log(hdfs)
    url = f"{hdfs.url}/runs/live"
    config = settings(tmp_path, run={"dir": url, "report": False})
    config["data"] |= {"train": f"{hdfs.url}/logs/train", "test": f"{hdfs.url}/logs/test"}
    config["train"] |= {"epochs": 1}
    del config["online"]
    clickfleet.train(config, quiet=True)
    shutil.rmtree(mirror.local_folder(url), ignore_errors=True)  # another machine
    config["train"] |= {"epochs": 2}
    done = clickfleet.train(config, resume=True, quiet=True)
    assert done.rows == 400
    there = hdfs.root / "runs/live"
    assert checkpoint.labelled(there / "checkpoints", checkpoint.LATEST).is_dir()
    assert f"dir: {url}" in (there / "config.yaml").read_text()
    assert not list(there.rglob("*.uploading"))
    written = {name for op, name in hdfs.calls if op in ("CREATE", "APPEND")}
    assert written
    assert all(name.endswith(".uploading") for name in written)  # and then renamed, over the old one

    local = {**config, "run": {"dir": str(tmp_path / "here"), "report": False}}
    assert clickfleet.train(local, quiet=True).test == done.test
    assert run(build(), ["evaluate", url, f"{hdfs.url}/logs/test", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["auc"] == done.test["auc"]  # type: ignore[index]
    scores = tmp_path / "scores.txt"
    assert run(build(), ["predict", url, f"{hdfs.url}/logs/test/part-0.csv", "--out", str(scores)]) == 0
    assert len(scores.read_text().splitlines()) == 100


def test_a_stream_from_hdfs_is_published_to_hdfs(hdfs: webhdfs.Hdfs, tmp_path: Path, graph: Path) -> None:
    write_days(hdfs.root, days=2, splits=1)
    (hdfs.root / "runs/live").mkdir(parents=True)
    shutil.copy(graph, hdfs.root / "runs/live/graph.onnx")
    url = f"{hdfs.url}/runs/live"
    config = settings(tmp_path, splits=1, run={"dir": url}, online={"dir": f"{hdfs.url}/logs"})
    config["publish"] |= {"to": f"{hdfs.url}/copy"}
    learn(config, "online.end_day=20260101", quiet=True)
    shutil.rmtree(mirror.local_folder(url), ignore_errors=True)
    assert learn(config, quiet=True).passes == 2
    there = [line.name for line in Log(hdfs.root / "runs/live/published").lines()]
    assert there == [line.name for line in Log(hdfs.root / "copy").lines()]
    assert len(there) >= 3
    assert run_folder.resolve(f"{hdfs.url}/copy").is_dir()
    assert ("RENAME", "/copy/LOG.jsonl") in hdfs.calls


def test_a_gateway_that_cannot_replace_files(hdfs: webhdfs.Hdfs, tmp_path: Path) -> None:
    hdfs.overwrites = False
    url = f"{hdfs.url}/runs/live"
    copy = mirror.Mirror(url, tmp_path / "local")
    (tmp_path / "local").mkdir()
    (tmp_path / "local/log.txt").write_text("one")
    copy.push()
    (tmp_path / "local/log.txt").write_text("another")
    with pytest.raises(CheckpointError, match=r"cannot replace /runs/live/log.txt.*\n  use the URL of the name node"):
        copy.push()
    assert (hdfs.root / "runs/live/log.txt").read_text() == "one"


def test_hdfs_without_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hdfs:// needs Java and Hadoop's client. Runs are not written there, since it cannot replace a file in one step."""
    for name in ("JAVA_HOME", "HADOOP_HOME", "ARROW_LIBHDFS_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"hdfs://nn:8020/logs: Unable to load lib\S+\n  install Java.*or name the file by webhdfs"
    ):
        expand("hdfs://nn:8020/logs")
    config: dict[str, Any] = settings(tmp_path, run={"dir": "hdfs://nn:8020/runs/live"})
    write_days(tmp_path, days=1, splits=1)
    with pytest.raises(ConfigError, match=r"cannot replace a file in one step\n  use webhdfs://HOST:9870/PATH"):
        learn(config, quiet=True)
    with pytest.raises(ConfigError, match=r"no library reads afs://; mount it, copy the files"):
        expand("afs://cluster/logs")


def test_afs_through_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each file names a remote one, and the command lets the site's own client print it."""
    monkeypatch.chdir(tmp_path)
    remote = tmp_path / "far"
    remote.mkdir()
    Path("paths").mkdir()
    for part in range(2):
        rows = [f"2 {i % 7 + 1} {i % 3 + 1} 1 {i % 2}" for i in range(part, 60)]
        (remote / f"part-{part}").write_text("\n".join(rows) + "\n")
        Path(f"paths/part-{part}").write_text(f"afs://cluster/logs/part-{part}\n")
    client = tmp_path / "bin/hadoop"
    client.parent.mkdir()
    client.write_text(f'#!/bin/sh\n[ "$1 $2" = "fs -cat" ] || exit 2\nexec cat {remote}/"${{3##*/}}"\n')
    client.chmod(client.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{client.parent}:/usr/bin:/bin")
    Path("schema.yaml").write_text("keys: raw\nslots:\n  - {name: word, multi: true}\n")
    form = {"name": "pipe", "command": "xargs -n 1 hadoop fs -cat"}
    data = {"train": "paths", "schema": "schema.yaml", "format": form, "batch_size": 10, "valid_share": 0}
    config = {"data": data, "model": {"name": "lr"}, "table": {"dim": 0}, "run": {"report": False}}
    Path("c.yaml").write_text(yaml.safe_dump(config))
    assert run(build(), ["train", "c.yaml", "train.epochs=1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == 119
    through = "data.format.command=\"sh -c 'xargs -n 1 hadoop fs -cat | head -n 10'\""
    assert run(build(), ["train", "c.yaml", through, "train.epochs=1", "run.dir=second", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == 20
    Path("paths/part-1").write_text("afs://cluster/logs/none\n")
    assert run(build(), ["train", "c.yaml", "run.dir=other"]) == 1
    assert "part-1" in capsys.readouterr().err
