"""Done files that name bases and deltas in the original's layout: a consumer that knows only text has the published model."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.errors import ConfigError
from clickfleet.online import manual
from clickfleet.paddlerec import exporting, original, translation
from clickfleet.paddlerec.importing import import_model
from clickfleet.store import atomic
from clickfleet.store.published import Log
from clickfleet.training import model, saving
from online.test_kills import run as killed
from streams import RULE, settings, write_days

TEXT = {"guard": {"auc_drop": None, "copc": None}, "text_parts": 2}


def told(folder: Path, name: str) -> list[dict[str, Any]]:
    file = folder / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def consume(folder: Path) -> dict[int, list[float]]:
    """The rows of a consumer: the newest base, then every delta with its key. Rows replace rows."""
    base = told(folder, "base_donefile.txt")[-1]
    rows: dict[int, list[float]] = {}
    for one in (base, *(patch for patch in told(folder, "patch_donefile.txt") if patch["key"] == base["key"])):
        files = sorted(Path(one["input"]).glob("part-*"))
        assert [file.name for file in files] == ["part-000-00000", "part-000-00001"]
        for file in files:
            for line in file.read_text().splitlines():
                key, *words = line.split(" ")
                rows[int(key)] = [float(np.float32(word)) for word in words]
    return rows


def published_rows(folder: Path) -> dict[int, list[float]]:
    table = saving.rows(Log(folder / "published").newest())
    with table.snapshot() as parts:
        return {
            int(key): [float(part["embed_w"][i]), *part["embedx"].reshape(len(part["key"]), -1)[i].tolist()]
            for part in parts
            for i, key in enumerate(part["key"])
        }


def check_consumer(folder: Path) -> int:
    """The rows of a consumer are those that are published, or zeros. Return how many are zeros."""
    theirs, ours = consume(folder / "model"), published_rows(folder)
    assert theirs.keys() >= ours.keys()
    for key, fields in theirs.items():
        weights = [fields[5], *fields[7:9]]  # 6 numbers, the state of the first weight, the factors, their state
        assert weights == ours.get(key, [0.0])
        assert fields[1:5] == [0.0] * 4
    return len(theirs.keys() - ours.keys())


@pytest.fixture
def unnatural_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every base has a key of its own, however fast the days pass."""
    seconds = iter(range(1_800_000_000, 1_900_000_000, 1000))
    monkeypatch.setattr("clickfleet.paddlerec.done_files.time.time", lambda: next(seconds))


@pytest.mark.usefixtures("unnatural_time")
def test_a_consumer_of_text_has_the_published_model(stream, online, tmp_path):
    online(stream(days=2, splits=3, publish=TEXT))
    model_folder = tmp_path / "run/model"
    lines = told(model_folder, "base_donefile.txt") + told(model_folder, "patch_donefile.txt")
    assert len(lines) > 5
    for line in lines:
        assert (Path(line["input"]) / "part-000-00000").is_file()
        assert (Path(line["input"]).parent / "dnn_plugin" / "deep.layers.0.weight").is_file()
    check_consumer(tmp_path / "run")


@pytest.mark.usefixtures("unnatural_time")
def test_a_deleted_row_is_zeros_in_a_delta(stream, online, tmp_path):
    """A row that fell below the threshold of what is published has its deletion in a delta, not only in the next base."""
    table = {"dim": 2, "rule": RULE, "decay_rate": 0.3, "delete_threshold": 0.15, "base_threshold": 0.15}
    online(stream(days=1, publish=TEXT, table=table), "online.end_day=20260101")
    manual.shrink(tmp_path / "run")
    assert manual.publish(tmp_path / "run", "delta")["deleted"] > 0
    assert check_consumer(tmp_path / "run") > 0
    gone = published_rows(tmp_path / "run")
    manual.shrink(tmp_path / "run")
    manual.publish(tmp_path / "run", "delta")  # a second delta of the same pass, in the same folder
    assert published_rows(tmp_path / "run").keys() < gone.keys()
    assert check_consumer(tmp_path / "run") > len(gone) - len(published_rows(tmp_path / "run"))


ONLINE: dict[str, Any] = {
    "runner": {
        "train_data_dir": "days", "train_batch_size": 8, "model_save_path": "stream", "start_day": 20190720,
        "end_day": 20190720, "split_interval": 480, "save_delta_frequency": 1, "checkpoint_per_pass": 1,
        "save_first_base": True,
    },
    "hyper_parameters": {
        "sparse_feature_dim": 3, "slot_num": 2, "fc_sizes": [8], "optimizer": {"class": "Adam", "learning_rate": 0.01},
    },
    "table_parameters": {
        "embedding": {
            "accessor": {
                "embedx_dim": 2,
                "embedx_threshold": 1,
                "embed_sgd_param": {"name": "SparseAdaGradSGDRule", "adagrad": {"learning_rate": 1.0}},
                "embedx_sgd_param": {"name": "SparseAdaGradSGDRule", "adagrad": {"initial_range": 0.5}},
            }
        }
    },
}  # fmt: skip


def test_slot_dnn_from_its_yaml_to_text_and_back(tmp_path, monkeypatch, capsys):
    """The same scores: published, from base and deltas as text, and from the log exported by hand."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slot_dnn").mkdir()
    config = tmp_path / "slot_dnn" / "config_online.yaml"
    config.write_text(yaml.safe_dump(ONLINE))
    rng = np.random.default_rng(3)
    for split in ("0000", "0800", "1600"):
        folder = tmp_path / "days" / "20190720" / split
        folder.mkdir(parents=True)
        keys = [(2**63 + int(rng.integers(9)), int(rng.integers(1, 90))) for _ in range(90)]
        text = "".join(f"{int(rng.random() < 0.2 + 0.5 * (a % 2))}:1 {a}:2 {b}:3\n" for a, b in keys)
        (folder / "part-0").write_text(text)
    same = [
        "online.quiet=1s",
        "train.deterministic=true",
        "train.threads=1",
        "run.report=false",
        "publish.guard.copc=null",
    ]
    assert run(build(), ["online", "-m", str(config), "publish.text_parts=3", *same]) == 0
    folder = tmp_path / "stream" / "model"
    base = told(folder, "base_donefile.txt")[0]["input"]
    deltas = [line["input"] for line in told(folder, "patch_donefile.txt")]
    assert [Path(path).parent.name for path in deltas] == ["delta-1", "delta-2", "delta-3"]
    add = [word for delta in deltas for word in ("--delta", delta)]
    assert run(build(), ["migrate", "table", str(config), base, "imported", *add]) == 0
    assert "match the original formula" in capsys.readouterr().out
    data = [str(path) for path in sorted((tmp_path / "days").glob("*/*/part-0"))]
    log = Log(tmp_path / "stream" / "published")
    last = [line for line in log.lines() if line.kind == "delta"][-1]
    expected = model.load(log.folder / last.name, trust=True).predict(data, 64)
    assert np.std(expected) > 1e-4
    np.testing.assert_array_equal(model.load("imported").predict(data, 64), expected)

    assert run(build(), ["export", "stream/published", "text", "--layout", "paddle-text"]) == 0
    newest = sorted(path.name for path in (tmp_path / "text").iterdir())
    assert newest == [line.path.name for line in log.newest()]
    assert run(build(), ["export", f"stream/published/{last.name}", "one", "--layout", "paddle-text"]) == 0
    mine = sorted((tmp_path / "one" / "000" / "part-000-00000").read_text().splitlines())
    theirs = [line for file in Path(deltas[-1]).iterdir() for line in file.read_text().splitlines()]
    assert mine == sorted(theirs)
    translated = translation.translate(original.read(config))
    assert import_model(translated, tmp_path / "stream" / "model", tmp_path / "found").ok  # the last day's base


@pytest.mark.usefixtures("unnatural_time")
def test_text_goes_with_its_entries_and_the_setting_may_change(stream, online, tmp_path):
    config = stream(days=5, splits=1, publish={**TEXT, "keep_chains": 1})
    model_folder = tmp_path / "run/model"
    online(config, "online.end_day=20260102")
    assert (model_folder / "20260102/base/000/part-000-00000").is_file()
    online(config, "online.end_day=20260103", "publish.text_parts=null")
    assert (model_folder / "20260104/base/000").is_symlink()
    online(config, "online.end_day=20260105")
    assert not (model_folder / "20260102/base").exists()  # its chain is no longer kept
    assert (model_folder / "20260106/base/000/part-000-00001").is_file()
    check_consumer(tmp_path / "run")


def test_a_replaced_pass_replaces_links_and_text(stream, online, tmp_path):
    """The same days anew, in the folder of an earlier run: with links before, and with text before."""
    config = stream(days=1)
    delta = tmp_path / "run/model/20260101/delta-2/000"
    for publish, is_link in (({}, True), ({"text_parts": 2}, False), ({}, True)):
        for name in ("published", "checkpoints"):
            shutil.rmtree(tmp_path / "run" / name, ignore_errors=True)
        online({**config, "publish": {**config["publish"], **publish}}, "online.end_day=20260101")
        assert delta.is_symlink() == is_link
        assert delta.is_dir()


@pytest.mark.usefixtures("unnatural_time")
def test_a_full_disk_and_a_kill_leave_no_half_folder(stream, online, tmp_path, monkeypatch):
    """A line is written after its folder is complete. What did not fit is written with the next entry."""
    config = stream(days=2, splits=2, publish=TEXT, train={"deterministic": False, "threads": 1})
    model_folder = tmp_path / "run/model"
    half = model_folder / "20260101/.delta-2.writing"
    (half / "000").mkdir(parents=True)  # of a process that was killed
    (half / "000/part-000-00000").write_text("7 1")
    real, refused = Path.open, []

    def full(path: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if path.name == "part-000-00001" and mode == "ab" and len(refused) < 2:
            refused.append([line["input"] for line in told(model_folder, "base_donefile.txt")])
            raise OSError(28, "No space left on device")
        return real(path, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", full)
    online(config)
    assert refused == [[], []]  # no line before the folder
    assert "the disk is full" in (tmp_path / "run/log.txt").read_text()
    assert not list(model_folder.glob("*/.*"))
    lines = told(model_folder, "base_donefile.txt") + told(model_folder, "patch_donefile.txt")
    assert len(lines) == 6
    assert all((Path(line["input"]) / "part-000-00001").is_file() for line in lines)
    check_consumer(tmp_path / "run")


def test_killed_anywhere_every_line_names_a_whole_folder(tmp_path, graph):
    write_days(tmp_path, days=2, splits=2, rows=90)
    raw = settings(tmp_path, publish={**TEXT, "text_parts": 40}, run={"checkpoint_every_steps": 4})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw))
    (tmp_path / "run").mkdir()
    shutil.copy(graph, tmp_path / "run/graph.onnx")
    assert killed(tmp_path / "config.yaml", 4, 5) > 0
    log = Log(tmp_path / "run/published")
    lines = told(tmp_path / "run/model", "base_donefile.txt") + told(tmp_path / "run/model", "patch_donefile.txt")
    sources = {line["input"]: exporting.source_of(Path(line["input"]).parent) for line in lines}
    found = {path: source[:2] for path, source in sources.items() if source is not None}
    entries = {(line.name, line.hash): log.folder / line.name for line in log.lines()}
    assert {*found.values()} <= {*entries}
    assert {*found.values()} >= {entry for entry, path in entries.items() if path.exists()}  # others are being pruned
    for path in found:
        folder = Path(path).parent
        atomic.verify_files(folder, atomic.read_manifest(folder, "paddle-text"))
        assert len(list(Path(path).iterdir())) == 40


def test_text_of_a_run_at_a_url(tmp_path, graph, online):
    write_days(tmp_path, days=1, splits=1)
    there = tmp_path / "there"
    there.mkdir()
    shutil.copy(graph, there / "graph.onnx")
    config = settings(tmp_path, splits=1, publish=TEXT, run={"dir": f"file://{there}", "report": False})
    online(config, "online.end_day=20260101")
    (line,) = told(there / "model", "base_donefile.txt")[-1:]
    assert line["input"] == f"file://{there}/model/20260102/base/000"
    assert (there / "model/20260102/base/000/part-000-00001").is_file()
    assert (there / "model/20260102/base/dnn_plugin/deep.layers.0.weight").is_file()


def test_text_needs_done_files(stream, online):
    with pytest.raises(ConfigError, match=r"publish\.text_parts needs done files"):
        online(stream(publish={"text_parts": 2, "done_files": False}))
