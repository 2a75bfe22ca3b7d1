"""A run folder at a URL: whatever machine goes on from there, it ends as if it had always been one."""

import json
import shutil
from pathlib import Path

import pytest

import clickfleet
from clickfleet.errors import CheckpointError
from clickfleet.online import manual
from clickfleet.online.learn import learn
from clickfleet.store import checkpoint, mirror, run_folder
from clickfleet.store.published import Log
from clickfleet.training import run
from online.test_kills import contents
from streams import HEADER, lines, settings, write_days

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def fetched(bucket, name: str, to: Path) -> Path:
    for path in bucket.find(f"models/{name}"):
        here = to / path.removeprefix(f"models/{name}/")
        here.parent.mkdir(parents=True, exist_ok=True)
        bucket.get_file(path, str(here))
    return to


def test_a_stream_goes_on_from_s3_on_an_empty_machine(tmp_path, graph, bucket):
    write_days(tmp_path, days=2, splits=1)
    config = settings(tmp_path, splits=1)
    (tmp_path / "run").mkdir()
    shutil.copy(graph, tmp_path / "run/graph.onnx")
    learn(config, quiet=True)
    url = "s3://models/live"
    config["run"]["dir"] = url
    bucket.put_file(str(graph), "models/live/graph.onnx")
    learn(config, "online.end_day=20260101", quiet=True)
    shutil.rmtree(mirror.local_folder(url))  # another machine
    done = learn(config, quiet=True)
    assert (done.passes, done.rows) == (2, 60)
    assert done.to_dict()["checkpoint"].startswith(f"{url}/checkpoints/step-")
    there = fetched(bucket, "live", tmp_path / "there")
    assert contents(there) == contents(tmp_path / "run")
    assert "dir: s3://models/live" in (there / "config.yaml").read_text()
    entry = json.loads((there / "model/base_donefile.txt").read_text().splitlines()[-1])["input"]
    assert bucket.exists(f"{entry}/manifest.json")
    assert clickfleet.load(url).learner.table.factors == 2
    made = manual.publish(url, "delta")
    assert made["entry"] == f"{url}/published/000005-delta"
    assert [line.sequence for line in Log(fetched(bucket, "live", tmp_path / "later") / "published").lines()][-1] == 5


def test_training_at_a_url(tmp_path):
    (tmp_path / "train.csv").write_text("\n".join([HEADER, *lines(200, 1)]) + "\n")
    config = settings(tmp_path, run={"dir": f"file://{tmp_path}/there", "report": False})
    del config["online"], config["publish"]
    config["data"] = {**config["data"], "train": [str(tmp_path / "train.csv")]}
    done = run.train(config, quiet=True)
    there = tmp_path / "there"
    assert done.to_dict()["checkpoint"] == f"file://{there}/checkpoints/{done.path.name}"
    assert checkpoint.verify(checkpoint.latest(there / "checkpoints"))
    with pytest.raises(CheckpointError, match="holds a run"):
        run.train(config, quiet=True)
    more = run.train(config, "train.epochs=2", resume=True, quiet=True)
    assert (more.rows, more.new_rows) == (400, 200)
    assert len(list((there / "checkpoints").glob("EPOCH-*"))) == 2


def test_what_cannot_be_put_stays_and_is_named(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/there"
    (tmp_path / "there").write_text("in the way")
    with pytest.raises(CheckpointError, match="the whole run is in"), run_folder.open_folder(url) as (folder, _):
        (folder / "log.txt").write_text("all of it")
    assert (folder / "log.txt").read_text() == "all of it"
    shutil.rmtree(folder)


def test_a_name_is_never_put_before_what_it_names(tmp_path):
    """A checkpoint that is replaced while the one before is put: the URL has one that is whole at any time."""
    url = f"file://{tmp_path}/there"
    table = clickfleet.Table(factors=2)
    with run_folder.open_folder(url) as (folder, copy):
        checkpoint.write(table, folder / "checkpoints", 1, keep=1)
        real = copy.fs.put_file

        def slow(path, to):
            if "step-000000000001" in path and not (folder / "checkpoints/step-000000000002").exists():
                checkpoint.write(table, folder / "checkpoints", 2, keep=1)
            real(path, to)
            latest = tmp_path / "there/checkpoints/LATEST"
            if latest.exists():
                checkpoint.latest(latest.parent)

        copy.fs.put_file = slow
        try:
            copy.push()
        finally:
            copy.fs.put_file = real
    assert checkpoint.verify(checkpoint.latest(tmp_path / "there/checkpoints"))["step"] == 2
