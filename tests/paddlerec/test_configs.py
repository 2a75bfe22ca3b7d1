"""PaddleRec configurations: every network trains, every key gets a word, and the YAML that `migrate` writes does the same."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.cli.migrating import with_translation
from clickfleet.config.load import load
from clickfleet.config.plugins import names
from clickfleet.errors import ConfigError
from clickfleet.paddlerec import networks, original, translation
from clickfleet.paddlerec.catalog import CATALOG
from clickfleet.paddlerec.original import flatten, read
from clickfleet.paddlerec.report import NOT_APPLICABLE
from originals import HYPER, ONLINE, READER, project, rows_of, slot_lines, write_slot_days

SAME = ["train.deterministic=true", "train.threads=1", "run.report=false"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def result(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    code = run(build(), [*map(str, argv), "--json"])
    out = capsys.readouterr()
    assert code == 0, out.err
    found: dict[str, Any] = json.loads(out.out.splitlines()[-1])
    return found


def edit(path: Path, **changes: Any) -> Path:
    """Sets dotted keys, written with two underscores for a dot."""
    raw = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        place: Any = raw
        *parents, last = key.split("__")
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.mark.parametrize("network", HYPER)
def test_every_network_trains_and_its_own_yaml_gives_the_same_bytes(
    network: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project(tmp_path, network, epochs=1, infer_end_epoch=1)
    direct = result(capsys, "train", path, *SAME)
    assert direct["rows"] == 40
    assert direct["test_auc"] is not None
    done = result(capsys, "migrate", "paddlerec", path)
    assert done["unknown"] == 0
    again = result(capsys, "train", done["path"], f"run.dir={tmp_path}/again", *SAME)
    assert again["train_auc"] == direct["train_auc"]
    assert rows_of(tmp_path / "output") == rows_of(tmp_path / "again")


def test_every_key_has_a_line(tmp_path: Path) -> None:
    for network in HYPER:
        path = project(tmp_path, network)
        translated = translation.translate(original.read(path))
        keys = flatten(yaml.safe_load(path.read_text()))
        assert sorted(line.key for line in translated.report.lines) == sorted(keys)
        for line in translated.report.lines:
            assert line.became or line.note, line.key
    assert all(NOT_APPLICABLE.values())


def test_the_model_and_its_settings(tmp_path: Path) -> None:
    translated = translation.translate(original.read(project(tmp_path, "gatenet")))
    assert translated.raw["model"] == {
        "name": "gate_dnn",
        "paddlerec": True,
        "hidden": [6, 5],
        "embedding_gate": True,
        "hidden_gate": True,
    }
    assert translated.config.table.rule.settings["lr"] == 0.01
    assert translated.config.train.seed == 12345
    assert translation.translate(original.read(project(tmp_path, "deepfm"))).config.table.padding_key == 0


def test_the_same_file_drives_evaluate_predict_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = project(tmp_path, "fm")
    trained = result(capsys, "train", "-m", path, "-o", "runner.epochs=2", "runner.train_batch_size=4", *SAME)
    assert trained["rows"] == 80
    assert trained["checkpoint"].endswith("step-000000000020")
    found = result(capsys, "evaluate", path)
    assert [line["epoch"] for line in found["epochs"]] == [0, 1]
    assert found["auc"] == trained["test_auc"]
    assert result(capsys, "evaluate", "-m", path, "-o", "runner.infer_start_epoch=1")["epochs"][0]["epoch"] == 1
    assert run(build(), ["evaluate", str(path), "-o", "runner.infer_end_epoch=5"]) == 1
    assert "no checkpoint of epoch 2" in capsys.readouterr().err
    assert result(capsys, "predict", "-m", path, "--out", "scores.npy")["rows"] == 40
    ours = result(capsys, "predict", "output", path.parent / "data" / "test", "--out", "ours.npy")
    assert ours["rows"] == 40
    np.testing.assert_array_equal(np.load("scores.npy"), np.load("ours.npy"))
    exported = result(capsys, "export", edit(path, runner__save_inference_feed_varnames=["label", "C1", "dense_input"]))
    assert exported["path"] == str(tmp_path / "output" / "inference")
    assert exported["inputs"] == ["1", "I1", "I2", "I3"]


def test_starting_from_an_epoch_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = project(tmp_path, "fm", epochs=1)
    result(capsys, "train", path, *SAME)
    edit(path, runner__model_init_path="output/0", runner__model_save_path="second")
    result(capsys, "train", path, *SAME)
    assert "starting from" in (tmp_path / "second" / "log.txt").read_text()
    edit(path, runner__model_init_path="output/7", runner__model_save_path="third")
    assert run(build(), ["train", str(path)]) == 1
    assert "no checkpoint of epoch 7" in capsys.readouterr().err


def test_overrides_take_the_type_of_what_they_replace(tmp_path: Path) -> None:
    path = project(tmp_path, "dnn", use_visual=False)
    edit(path, hyper_parameters__optimizer__learning_rate="5e-6")
    original = read(path, ["runner.use_visual=TRUE", "runner.epochs=7", "hyper_parameters.fc_sizes=[3, 2]"])
    assert original.values["runner.use_visual"] is True
    assert original.values["runner.epochs"] == 7
    translated = translation.translate(original)
    assert translated.config.dense.lr == 5e-6
    assert translated.config.model.settings["hidden"] == [3, 2]
    for wrong in ("runner.epochs=many", "epochs=3", "runner.epochs", "runner.a=b=c"):
        with pytest.raises(ConfigError, match="-o"):
            read(path, [wrong])


def test_unknown_keys_are_told_and_near_misses_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = edit(project(tmp_path, "dnn"), runner__my_own_thing=3)
    (line,) = (line for line in translation.translate(original.read(path)).report.lines if line.kind == "unknown")
    assert str(line) == "runner.my_own_thing = 3 unknown: ignored"
    edit(path, runner__print_intervall=3)
    with pytest.raises(ConfigError, match=r"unknown key runner.print_intervall; did you mean runner.print_interval\?"):
        translation.translate(original.read(path))
    (path.parent / "reader.py").write_text(READER)
    with pytest.raises(ConfigError, match=r"unknown key runner.print_intervall; did you mean runner.print_interval\?"):
        translation.translate(original.read(path))
    assert run(build(), ["train", str(path), "-o", "runner.epoch=1", *SAME]) == 1
    (path.parent / "reader.py").write_text(READER + "\nKEY = 'runner.print_intervall'\n")
    lines = {line.key: line.note for line in translation.translate(original.read(path)).report.lines}
    assert lines["runner.my_own_thing"] == "passed to your reader"
    assert lines["runner.print_intervall"] == "passed to your reader; the closest known key is runner.print_interval"
    assert run(build(), ["train", str(path), "-o", "runner.epochs=1", *SAME]) == 0
    assert "warning: runner.my_own_thing" in capsys.readouterr().out


def test_keys_given_twice_and_other_sections_are_told(tmp_path: Path) -> None:
    path = project(tmp_path, "dnn")
    path.write_text(path.read_text() + "\nextra: {a: 1}\n")
    path.write_text(path.read_text().replace("  epochs: 2\n", "  epochs: 9\n  epochs: 3\n"))
    translated = translation.translate(original.read(path))
    assert translated.config.train.epochs == 3
    assert any("sets epochs more than once" in note for note in translated.report.notes)
    assert any("section extra" in note for note in translated.report.notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runner__epochs": None}, "runner.epochs is missing"),
        ({"runner__epochs": "x"}, "must be an integer of at least 1"),
        ({"runner__use_gpu": "perhaps"}, "must be true or false"),
        ({"runner__sync_mode": "later"}, "must be sync, half_async, async or geo"),
        ({"runner__reader_type": "Other"}, "must be DataLoader"),
        ({"runner__train_reader_path": "my_reader"}, "my_reader.py does not exist"),
        ({"runner__infer_end_epoch": 0}, "infer_end_epoch .0. must be larger"),
        ({"hyper_parameters__optimizer__class": "Adem"}, "did you mean Adam"),
        ({"hyper_parameters__fc_sizes": "6,5"}, "must be a list of widths"),
        ({"runner__save_inference_feed_varnames": ["C99"]}, "unknown input 'C99'"),
        ({"runner__save_inference_feed_varnames": "C1"}, "must be a list of names"),
    ],
)
def test_wrong_values_are_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = edit(project(tmp_path, "dnn"), **changes)
    with pytest.raises(ConfigError, match=message):
        translation.translate(original.read(path))


def test_a_foreign_network_is_refused_with_the_guide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = project(tmp_path, "my_network")
    assert run(build(), ["train", str(path)]) == 1
    assert "docs/migration.md" in capsys.readouterr().err
    assert translation.translate(original.read(path), ["model.name=fm"]).config.model.name == "fm"


def test_launch_takes_the_mode_and_geo_steps(tmp_path: Path) -> None:
    path = project(tmp_path, "dnn", sync_mode="geo", geo_step=400, thread_num=1)
    there = translation.translate(original.read(path), ["cluster.shards=2"], "launch")
    assert (there.config.mode.name, there.config.mode.settings) == ("geo", {"k_steps": 400})
    assert there.config.cluster.threads == 1
    assert translation.translate(original.read(path)).config.mode.name == "local"
    told = {line.key: line.became for line in translation.translate(original.read(path)).report.lines}
    assert told["runner.sync_mode"] == "clickfleet launch"


def test_the_report_is_a_table_and_paths_are_relative(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = project(tmp_path, "dnn")
    done = result(capsys, "migrate", "paddlerec", path)
    assert done["path"] == str(path.with_suffix(".clickfleet.yaml"))
    raw = yaml.safe_load(Path(done["path"]).read_text())
    assert (raw["data"]["train"], raw["run"]["dir"], raw["data"]["schema"]) == (
        "data/train",
        "../output",
        "config.clickfleet.schema.yaml",
    )
    report = path.with_suffix(".clickfleet.report.md").read_text()
    assert "| runner.epochs | `2` | train.epochs=2 |  |" in report
    assert "| runner.print_interval | `2` | train.print_every=2 |" in report
    config = load(done["path"])
    direct = translation.translate(original.read(path)).config
    assert config.data.train == direct.data.train
    assert config.run.dir == str(tmp_path / "dnn" / ".." / "output")


@pytest.mark.parametrize(
    ("purpose", "cluster", "days", "mode", "threads"),
    [
        (None, False, True, "local", None),
        ("online", False, True, "local", None),
        ("online", True, True, "geo", 1),
        ("launch", False, True, "geo", 1),
        ("train", True, False, "geo", None),  # train_thread_num is for online learning
    ],
)
def test_a_file_with_days_on_a_cluster(
    tmp_path: Path, purpose: Any, cluster: bool, days: bool, mode: str, threads: int | None
) -> None:
    path = tmp_path / "slot_dnn" / "config_online.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump({**ONLINE, "runner": {**ONLINE["runner"], "epochs": 3, "sync_mode": "geo"}}))
    translated = translation.translate(original.read(path), (), purpose, cluster)
    assert (translated.config.online.dir is not None, translated.config.mode.name) == (days, mode)
    assert translated.raw.get("cluster", {}).get("threads") == threads


def test_only_worker_0_writes_the_inputs_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "slot_dnn" / "config_online.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(ONLINE))
    servers = {"PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:6170", "PADDLE_TRAINERS_NUM": "2"}
    for name, value in {**servers, "TRAINING_ROLE": "TRAINER", "POD_IP": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    config, _ = with_translation(str(path), [], "online")
    assert (config.mode.name, config.online.start_day) == ("async", 20190720)
    assert not (tmp_path / "stream").exists()
    monkeypatch.setenv("PADDLE_TRAINER_ID", "0")
    config, _ = with_translation(str(path), [], "online")
    assert config.data.schema == str(tmp_path / "stream" / "schema.yaml")


def test_online_learns_from_the_days_of_slot_dnn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "slot_dnn"
    home.mkdir()
    (home / "config_online.yaml").write_text(yaml.safe_dump(ONLINE))
    write_slot_days(tmp_path / "days", ["20190720"], rows=30)
    translated = translation.translate(original.read(home / "config_online.yaml"), purpose="online")
    table = translated.raw["table"]
    assert table["dim"] == 4
    assert table["admission"] == "score(2)"
    assert table["rule"] == {"name": "adagrad", "lr": 0.04, "initial_g2sum": 3.0, "bounds": [-9.0, 9.0]}
    assert table["embed_rule"]["lr"] == 0.05
    assert table["init"] == {"embedx": "uniform(-0.01, 0.01)"}
    assert (table["nonclick_coeff"], table["decay_rate"], table["delete_after_unseen_days"]) == (0.2, 0.9, 30.0)
    assert translated.raw["online"]["split_interval"] == "720min"
    done = result(capsys, "online", "-m", home / "config_online.yaml", "online.quiet=1s", *SAME)
    assert (done["passes"], done["rows"]) == (2, 60)
    assert (tmp_path / "stream" / "model" / "base_donefile.txt").exists()
    rows = tmp_path / "days" / "20190720" / "1200"
    assert result(capsys, "evaluate", home / "config_online.yaml", rows)["rows"] == 30
    assert run(build(), ["train", "-m", str(home / "config_online.yaml")]) == 1
    assert "clickfleet online" in capsys.readouterr().err
    cluster = result(capsys, "migrate", "paddlerec", home / "config_online.yaml", "--purpose", "launch")["path"]
    both = yaml.safe_load(Path(cluster).read_text())
    assert (both["online"]["start_day"], both["mode"]) == (20190720, {"name": "async"})
    written = result(capsys, "migrate", "paddlerec", home / "config_online.yaml")["path"]
    assert yaml.safe_load(Path(written).read_text())["online"]["start_day"] == 20190720
    assert result(capsys, "online", written, f"run.dir={tmp_path}/again", "online.quiet=1s", *SAME)["rows"] == 60
    assert rows_of(tmp_path / "stream") == rows_of(tmp_path / "again") != {}


@pytest.mark.parametrize("raw", [{"train": {"trainer": {"strategy": "async"}}}, {"runner": [{"class": "train"}]}])
def test_configurations_of_release_1_are_told_apart(
    raw: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**raw, "hyper_parameters": {"sparse_feature_dim": 9}}))
    assert run(build(), ["train", "-m", str(path)]) == 1
    assert "a configuration of PaddleRec 1" in capsys.readouterr().err


def test_the_workbench_takes_a_paddlerec_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Studies of its keys, the comparison of modes, and measurements of its model."""
    monkeypatch.chdir(tmp_path)
    path = project(tmp_path, "deepfm", rows=60)
    (path.parent / "reader.py").write_text(READER)
    studies = ["--set", "runner.epochs=1,2", "--set", "hyper_parameters.fc_sizes=[4],[3, 2]", "--jobs", "1"]
    assert run(build(), ["compare", "-m", str(path), "-o", "runner.train_batch_size=6", *studies, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["value"] for row in found["studies"]["runner.epochs"]] == ["1", "2"]
    parameters = [row["parameters"] for row in found["studies"]["hyper_parameters.fc_sizes"]]
    assert parameters[0] > parameters[1] != parameters[2]
    assert len(found["runs"]) == 4  # two epochs are as configured
    course = [
        "--course",
        "--set",
        "runner.epochs=1",
        "--set",
        "runner.train_batch_size=6,9",
        "--set",
        "model.hidden=[4]",
    ]
    argv = ["compare", "-m", str(path), "-o", "runner.epochs=1", *course, "--jobs", "1", "--out", "course", "--json"]
    assert run(build(), argv) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(found["studies"]) == [
        *("runner.epochs", "runner.train_batch_size", "hyper_parameters.optimizer.learning_rate", "model.hidden"),
        "hyper_parameters.optimizer.class",
    ]
    for name in ("SGD", "Adagrad"):
        used = yaml.safe_load(
            Path(f"course/runs/deepfm-hyper_parameters.optimizer.class={name}-seed12345/config.yaml").read_text()
        )
        rule = {"SGD": "sgd", "Adagrad": "adagrad_v2"}[name]
        assert (used["dense"]["optimizer"], used["table"]["rule"]["name"]) == (name.lower(), rule)
        assert used["dense"]["lr"] == used["table"]["rule"]["lr"] == 0.01
    for key in ("runner.epoch=1,2", "runner.auc_num=1,2", "runner.what=1"):
        assert run(build(), ["compare", str(path), "--set", key, "--out", "other"]) == 1
    assert run(build(), ["bench", "modes", "-m", str(path), "--workers", "1,2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]) == 8
    assert run(build(), ["train", "-m", str(path)]) == 0
    more = ["--engines", "torch", "--threads", "1", "--batch-sizes", "5", "--batches", "5"]
    assert run(build(), ["bench", "infer", "-m", str(path), *more]) == 0
    assert run(build(), ["bench", "infer", "output", "--trust", *more]) == 2


def test_replay_takes_a_paddlerec_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for day, hour in itertools.product((20260101, 20260102), ("0000", "1200")):
        folder = tmp_path / "days" / str(day) / hour
        folder.mkdir(parents=True)
        (folder / "part-0").write_text(slot_lines(60, day + int(hour)))
        (folder / "to.hadoop.done").touch()
    stream = {"start_day": 20260101, "end_day": 20260102, "split_interval": 720, "data_donefile": "to.hadoop.done"}
    path = project(tmp_path, "dnn", train_data_dir="days", save_delta_frequency=1, **stream)
    assert run(build(), ["replay", "-m", str(path), "--sync", "1d,12h", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]) == 2


VALUED_READER = """
import numpy as np
from paddle.io import IterableDataset


class RecDataset(IterableDataset):
    def __init__(self, file_list, config):
        self.file_list = file_list
        self.fields = config["hyper_parameters.num_field"]
        self.inference = config.get("runner.inference", False)

    def __iter__(self):
        for file in self.file_list:
            with open(file) as lines:
                for line in lines:
                    words = line.split()
                    label, ids, values = words[0], words[1 : 1 + self.fields], words[1 + self.fields :]
                    sample = [np.array([label], "int64"), np.array(ids, "int64"), np.array(values, "float32")]
                    yield sample[1:] if self.inference else sample
"""


@pytest.mark.parametrize(
    ("network", "hyper"),
    [
        ("autoint", {"embedding_dim": 4, "attn_layer_sizes": [6, 6], "head_num": 3, "fc_sizes": [], "scaling": True,
                     "use_residual": True, "use_wide": True, "use_sparse": True, "feature_number": 99}),
        ("logistic_regression", {"sparse_feature_number": 99, "reg": 0.001}),
    ],
)  # fmt: skip
def test_networks_over_ids_and_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], network: str, hyper: dict[str, Any]
) -> None:
    path = project(tmp_path, network)
    raw = yaml.safe_load(path.read_text())
    raw["hyper_parameters"] = {"optimizer": {"class": "Adam", "learning_rate": 0.05}, "num_field": 3, **hyper}
    path.write_text(yaml.safe_dump(raw))
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        ids, values = rng.integers(1, 9, (200, 3)) + np.array([0, 10, 20]), rng.integers(0, 2, 200)
        clicks = (ids[:, 0] % 2 == 1) & (values == 1)  # the id counts only with its value
        lines = [f"{int(c)} {' '.join(map(str, i))} {v} 1 0.5" for c, i, v in zip(clicks, ids, values, strict=True)]
        (path.parent / "data" / part / "part-0").write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match="only the reader of its folder knows"):
        translation.translate(original.read(path))
    (path.parent / "reader.py").write_text(VALUED_READER)
    assert not [line for line in translation.translate(original.read(path)).report.lines if line.kind == "unknown"]
    assert result(capsys, "train", "-m", path, "runner.epochs=20", *SAME)["test_auc"] > 0.95
    scored = result(capsys, "evaluate", "-m", path, "runner.infer_end_epoch=20", "runner.infer_start_epoch=19")
    assert scored["auc"] > 0.95
    assert result(capsys, "predict", "-m", path, "-o", "runner.infer_end_epoch=20", "--out", "s.npy")["rows"] == 200
    assert run(build(), ["migrate", "table", str(path), str(tmp_path / "saved"), str(tmp_path / "imported")]) == 1
    assert "cannot be imported" in capsys.readouterr().err
    edit(path, hyper_parameters__num_field=4)
    assert run(build(), ["train", "-m", str(path), "-o", "runner.model_save_path=other"]) == 1
    assert "expected a label, 4 ids and 4 values" in capsys.readouterr().err


@pytest.mark.parametrize("folder", sorted(CATALOG))
def test_folders_that_cannot_be_migrated_tell_what_they_are(tmp_path: Path, folder: str) -> None:
    if folder in networks.NETWORKS:
        pytest.skip("it can be migrated now")
    path = project(tmp_path, folder)
    with pytest.raises(ConfigError) as told:
        translation.translate(original.read(path))
    text = str(told.value)
    assert CATALOG[folder].title in text
    if folder in names("models"):
        assert "the model exists here" in text
    else:
        assert ("planned" if CATALOG[folder].planned else "does not have it") in text
        assert CATALOG[folder].nearest in text
    named = re.findall(r"model.name=(\w+)", CATALOG[folder].nearest)
    assert set(named) <= set(names("models"))


def test_half_async_is_a_mode_of_the_file(tmp_path: Path) -> None:
    path = project(tmp_path, "dnn", sync_mode="half_async")
    assert translation.translate(original.read(path), purpose="launch").config.mode.name == "half_async"
