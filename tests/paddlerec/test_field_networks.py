"""PaddleRec's networks over fields alone: each has data of its own shape, which its reader or our parser reads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.paddlerec import original, tensors, translation
from clickfleet.paddlerec.importing import import_model, layer_settings
from clickfleet.training.learner import Learner
from originals import project, rows_of, write_pickle
from soak import SOAK

SAME = ["train.deterministic=true", "train.threads=1", "run.report=false"]
ROWS = 60

AVAZU_READER = """
import numpy as np
from paddle.io import IterableDataset


class RecDataset(IterableDataset):
    def __init__(self, file_list, config):
        super(RecDataset, self).__init__()
        self.file_list = file_list

    def __iter__(self):
        for file in self.file_list:
            with open(file) as lines:
                for line in lines:
                    yield [np.array(value).astype("int64") for value in line.strip().split(",")]
"""

MATRIX_READER = """
import numpy as np
import paddle
from paddle.io import IterableDataset


class RecDataset(IterableDataset):
    def __init__(self, file_list, config):
        super(RecDataset, self).__init__()
        self.file_list = file_list

    def __iter__(self):
        for file in self.file_list:
            for row in np.load(file):
                yield [row[:-1].astype("int64"), row[-1:].astype("int64")]
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def clicks(fields: int, seed: int = 0, rows: int = ROWS) -> np.ndarray:
    """Rows of ids, then the label, which follows the first id."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, 9, (rows, fields))
    return np.column_stack([ids, rng.random(rows) < np.where(ids[:, 0] % 2, 0.9, 0.1)]).astype(np.int64)


def write_project(folder: Path, network: str, hyper: dict[str, Any], write: Callable[[Path, int], None]) -> Path:
    home = folder / network
    for part, seed in (("train", 1), ("test", 2)):
        (home / "data" / part).mkdir(parents=True)
        write(home / "data" / part, seed)
    runner = {
        "train_data_dir": "data/train",
        "train_reader_path": "reader",
        "train_batch_size": 10,
        "epochs": 1,
        "model_save_path": "output",
        "test_data_dir": "data/test",
        "infer_reader_path": "reader",
        "infer_batch_size": 10,
        "infer_load_path": "output",
        "infer_start_epoch": 0,
        "infer_end_epoch": 1,
    }
    adam = {"class": "Adam", "learning_rate": 0.01}
    path = home / "config.yaml"
    path.write_text(yaml.safe_dump({"runner": runner, "hyper_parameters": {"optimizer": adam, **hyper}}))
    return path


def flen(folder: Path, *, reader: bool = True, **hyper: Any) -> Path:
    def write(part: Path, seed: int) -> None:
        lines = [",".join(map(str, [7, *row])) for row in clicks(18, seed)]
        (part / "part-0").write_text("\n".join(lines) + "\n")

    adagrad = {"class": "Adagrad", "learning_rate": 0.04, "strategy": "async"}
    usual = {"sparse_inputs_slots": 18, "sparse_feature_number": 20, "sparse_num_field": 3, "sparse_feature_dim": 4}
    usual |= {"layer_sizes_dnn": [6, 4], "distributed_embedding": 0, "optimizer": adagrad}
    path = write_project(folder, "flen", {**usual, **hyper}, write)
    if reader:
        (path.parent / "reader.py").write_text(AVAZU_READER)
    return path


def fgcnn(folder: Path, **hyper: Any) -> Path:
    def write(part: Path, seed: int) -> None:
        np.save(part / "part.npy", clicks(7, seed))

    usual = {"sparse_inputs_slots": 4, "dense_inputs_slots": 3, "sparse_feature_size": 20, "feature_dim": 5}
    usual |= {"feature_name": ["I1", "I2", "I3", "C1", "C2", "C3", "C4"], "conv_kernel_width": [3, 3]}
    usual |= {"conv_filters": [2, 3], "new_maps": [2, 2], "pooling_width": [2, 2], "stride": [1, 1]}
    usual |= {"dnn_hidden_units": [6, 5], "dnn_dropout": 0.1}
    path = write_project(folder, "fgcnn", {**usual, **hyper}, write)
    (path.parent / "reader.py").write_text(MATRIX_READER)
    return path


def autofis(folder: Path, **hyper: Any) -> Path:
    def write(part: Path, seed: int) -> None:
        rows = clicks(5, seed)
        np.savetxt(part / "some_x.txt", rows[:, :-1], fmt="%d")
        np.savetxt(part / "some_y.txt", rows[:, -1], fmt="%d")

    usual = {"num_inputs": 5, "input_size": 20, "embedding_size": 4, "width": 6, "depth": 2, "n_col": 10, "pairs": 10}
    usual |= {"grad_c": 0.0005, "grad_mu": 0.8}
    usual |= {"optimizer": {"class": "Adam", "learning_rate": 0.01, "gamma": 0.7}}
    return write_project(folder, "autofis", {**usual, **hyper}, write)


def sign(folder: Path, **hyper: Any) -> Path:
    def write(part: Path, seed: int) -> None:
        lines = [" ".join(map(str, [float(row[-1]), *row[:-1]])) for row in clicks(3, seed)]
        (part / "some.data").write_text("\n".join(lines) + "\n")

    usual = {"pred_edges": 1, "dim": 4, "hidden_layer": 8, "l0_para": [0.5, -0.2, 1.2], "l0_weight": 0.002}
    usual |= {"l2_weight": 0.001}
    return write_project(folder, "sign", {**usual, **hyper}, write)


PROJECTS = {"flen": flen, "fgcnn": fgcnn, "autofis": autofis, "sign": sign}


def result(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    code = run(build(), [*map(str, argv), "--json"])
    out = capsys.readouterr()
    assert code == 0, out.err
    found: dict[str, Any] = json.loads(out.out.splitlines()[-1])
    return found


@pytest.mark.parametrize("network", PROJECTS)
def test_it_trains_evaluates_and_its_own_yaml_gives_the_same_bytes(
    network: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = PROJECTS[network](tmp_path)
    direct = result(capsys, "train", "-m", path, *SAME)
    assert direct["rows"] == ROWS
    assert result(capsys, "evaluate", "-m", path)["auc"] == direct["test_auc"]
    assert result(capsys, "predict", "-m", path, "--out", "scores.npy")["rows"] == ROWS
    if SOAK or network == "sign":  # tests/models exports every network
        result(capsys, "export", path, "artifact")
    done = result(capsys, "migrate", "paddlerec", path)
    assert done["unknown"] == 0
    again = result(capsys, "train", done["path"], f"run.dir={tmp_path}/again", *SAME)
    assert again["train_auc"] == direct["train_auc"]
    assert rows_of(tmp_path / "output") == rows_of(tmp_path / "again")


def test_flen_reads_the_same_with_its_reader_and_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_reader = flen(tmp_path / "a")
    without = flen(tmp_path / "b", reader=False)
    for name, path in (("a", with_reader), ("b", without)):
        result(capsys, "train", path, f"run.dir={tmp_path}/run-{name}", *SAME)
    assert rows_of(tmp_path / "run-a") == rows_of(tmp_path / "run-b") != {}
    translated = translation.translate(original.read(with_reader))
    groups = translated.config.model.settings["groups"]
    assert [len(group) for group in groups] == [13, 3, 2]
    assert translated.config.dense.initial_sum == 0.001
    limit = (6 / 24) ** 0.5
    assert translated.raw["table"]["init"]["embedx"] == f"uniform({-limit:.6g},{limit:.6g})"


def test_what_the_keys_become(tmp_path: Path) -> None:
    settings = translation.translate(original.read(project(tmp_path, "difm"))).config.model.settings
    assert (settings["hidden"], settings["dense_hidden"], settings["heads"], settings["width"]) == ([6], [5], 2, 6)
    settings = translation.translate(original.read(autofis(tmp_path))).config.model.settings
    assert settings["hidden"] == [6, 6]
    translated = translation.translate(original.read(sign(tmp_path)))
    assert translated.config.model.settings == {
        "paddlerec": True,
        "pair_hidden": 8,
        "temperature": 0.5,
        "stretch": [-0.2, 1.2],
        "l0": 0.002,
        "l2": 0.002,
    }
    assert len(translated.schema.slots) == 3
    notes = {line.key: line.note for line in translated.report.lines}
    assert "always used Adagrad" in notes["hyper_parameters.optimizer.class"]
    fields = translation.translate(original.read(fgcnn(tmp_path)))
    assert [slot.name for slot in fields.schema.slots][:4] == ["I1", "I2", "I3", "C1"]
    assert fields.schema.keys.by_slot  # every field had a table of its own


@pytest.mark.parametrize(
    ("make", "hyper", "message"),
    [
        (flen, {"layer_sizes_dnn": [6, 5]}, "must end with sparse_feature_dim, 4"),
        (flen, {"sparse_num_field": 4}, "has 3 groups"),
        (fgcnn, {"conv_kernel_width": [3, 4]}, "must be odd"),
        (fgcnn, {"stride": [2, 1]}, "must be .1, 1."),
        (fgcnn, {"feature_name": ["a", "b"]}, "must be 7 different names"),
        (autofis, {"pairs": 3}, "5 fields have 10 pairs"),
        (sign, {"pred_edges": 0}, "must be 1"),
        (sign, {"l0_para": [1]}, "three numbers"),
    ],
)
def test_wrong_values_are_refused_by_name(make: Any, hyper: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        translation.translate(original.read(make(tmp_path, **hyper)))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("fen_layers_size", [6, 9], "must end with 6"),
        ("dense_layers_size", [6, 9], "must end with sparse_feature_dim, 4"),
        ("sparse_field_num", 9, "give 5"),
    ],
)
def test_widths_of_difm_must_fit(key: str, value: Any, message: str, tmp_path: Path) -> None:
    path = project(tmp_path, "difm")
    raw = yaml.safe_load(path.read_text())
    raw["hyper_parameters"][key] = value
    path.write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match=message):
        translation.translate(original.read(path))


def test_a_reader_with_other_arrays_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = fgcnn(tmp_path)
    (path.parent / "reader.py").write_text(MATRIX_READER.replace("row[:-1]", "row[:-2]"))
    assert run(build(), ["train", str(path), *SAME]) == 1
    assert "yields 2 arrays of [6, 1] elements, expected 2 of [7, 1]" in capsys.readouterr().err


def test_files_of_ids_and_labels_must_have_the_same_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = autofis(tmp_path)
    (path.parent / "data" / "train" / "some_y.txt").write_text("1\n0\n")
    assert run(build(), ["train", str(path), *SAME]) == 1
    assert "different numbers of lines" in capsys.readouterr().err


def saved(translated: translation.Translated, network: str) -> dict[str, np.ndarray]:
    """Random parameters under the original's names."""
    learner, rng = Learner(translated.config, translated.schema), np.random.default_rng(7)
    found: dict[str, np.ndarray] = {}
    for layer in tensors.layers(network, layer_settings(learner), learner.shape):
        if layer.kind == "embedding":
            width = 1 if layer.name == "w_embeddings" else learner.table.factors
            found[layer.parts[0]] = rng.normal(0, 0.3, (20, width)).astype(np.float32)
        for name, shape in layer.shapes.items():
            values = rng.uniform(0.5, 1.5, shape) if name.endswith("_variance") else rng.normal(0, 0.3, shape)
            found[name] = values.astype(np.float32)
    return found


@pytest.mark.parametrize("network", ["flen", "autofis"])
def test_an_imported_model_scores_as_its_formula_says(network: str, tmp_path: Path) -> None:
    translated = translation.translate(original.read(PROJECTS[network](tmp_path)))
    write_pickle(tmp_path / "saved" / "rec.pdparams", saved(translated, network))
    done = import_model(translated, tmp_path / "saved", tmp_path / "imported")
    assert done.max_abs_diff is not None
    assert done.max_abs_diff < 1e-6
    assert not done.anew
    assert done.rows == 20


@pytest.mark.parametrize("network", ["fgcnn", "sign"])
def test_models_that_cannot_be_imported_are_refused_with_the_reason(network: str, tmp_path: Path) -> None:
    translated = translation.translate(original.read(PROJECTS[network](tmp_path)))
    write_pickle(tmp_path / "saved" / "rec.pdparams", {"embedding.weight": np.zeros((3, 4), np.float32)})
    with pytest.raises(CheckpointError, match=f"saved models of {network} cannot be imported"):
        import_model(translated, tmp_path / "saved", tmp_path / "imported")
