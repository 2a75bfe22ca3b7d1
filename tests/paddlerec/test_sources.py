"""Models of the original by folder: what is found in one, which of several is taken, and what is refused."""

import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.errors import CheckpointError
from clickfleet.paddlerec import original, translation
from clickfleet.paddlerec.importing import Imported, import_model
from clickfleet.store import checkpoint, run_folder
from clickfleet.training import saving
from originals import DENSE, DIM, SLOTS, project, write_pickle

VOCABULARY = 60
Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def dnn(tmp_path: Path) -> translation.Translated:
    return translation.translate(original.read(project(tmp_path, "dnn")))


def static(seed: int = 0, linear: str = "fc") -> Arrays:
    """The persistable variables of CTR-DNN after some steps of Adam, as a static program names them."""
    rng = np.random.default_rng(seed)
    found: Arrays = {"SparseFeatFactors": rng.normal(0, 0.3, (VOCABULARY, DIM)).astype(np.float32)}
    widths = (SLOTS * DIM + DENSE, 6, 5, 2)
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        found[f"{linear}_{i}.w_0"] = rng.normal(0, 0.3, (inputs, outputs)).astype(np.float32)
        found[f"{linear}_{i}.b_0"] = rng.normal(0, 0.3, outputs).astype(np.float32)
    for name, value in list(found.items()):
        found[f"{name}_moment1_0"] = rng.normal(0, 0.1, value.shape).astype(np.float32)
        found[f"{name}_moment2_0"] = rng.uniform(0, 0.1, value.shape).astype(np.float32)
        found[f"{name}_beta1_pow_acc_0"] = np.array([0.9**4], np.float32)
        found[f"{name}_beta2_pow_acc_0"] = np.array([0.999**4], np.float32)
    return {
        **found,
        "learning_rate_0": np.array([0.001], np.float32),
        "_generated_var_0": np.arange(8),  # the buckets of the AUC
    }


def variable(values: np.ndarray[Any, Any]) -> bytes:
    kind = {"f": 5, "i": 3}[values.dtype.kind]
    description = bytes([8, kind]) + b"".join(b"\x10" + bytes([n]) for n in values.shape)
    return struct.pack("<IQIi", 0, 0, 0, len(description)) + description + values.tobytes()


def write_variables(folder: Path, arrays: Arrays) -> Path:
    folder.mkdir(parents=True)
    for name, values in arrays.items():
        (folder / name).write_bytes(variable(values))
    return folder


def message(number: int, content: bytes) -> bytes:
    size = len(content)
    length = bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])
    return bytes([number << 3 | 2]) + length + content


def program(names: list[str]) -> bytes:
    """A program with these persistable variables, a feed, and a variable that is not saved."""
    kinds = [(name, 7, 1) for name in names] + [("feed", 9, 1), ("fc_0.tmp_0", 7, 0)]
    block = b"".join(
        message(3, message(1, name.encode()) + message(2, bytes([8, kind])) + bytes([3 << 3, kept]))
        for name, kind, kept in kinds
    )
    size = len(block)
    return bytes([1 << 3 | 2, size & 127 | 128, size >> 7 & 127 | 128, size >> 14]) + block


def check_whole(done: Imported, saved: Arrays, linear: str = "fc") -> None:
    """The rows, the network and Adam's moments are those that were saved."""
    assert done.max_abs_diff is not None
    assert done.max_abs_diff < 1e-6
    assert not done.anew
    learner = saving.load(run_folder.resolve(done.path))
    rows = learner.table.pull(np.arange(VOCABULARY, dtype=np.uint64), training=False)
    np.testing.assert_array_equal(rows[:, 1:], saved["SparseFeatFactors"])
    np.testing.assert_array_equal(learner.dense()["deep.layers.1.weight"].T, saved[f"{linear}_1.w_0"])
    if "fc_1.w_0_moment1_0" in saved or "linear_1.w_0_moment1_0" in saved:
        with learner.table.snapshot() as parts:
            states = {
                int(key): state
                for part in parts
                for key, state in zip(part["key"], part["embedx_state"].reshape(-1, 2 * DIM + 2), strict=True)
            }
        np.testing.assert_array_equal(states[7][:DIM], saved["SparseFeatFactors_moment1_0"][7])
        np.testing.assert_array_equal(states[7][DIM : 2 * DIM], saved["SparseFeatFactors_moment2_0"][7])
        assert run_folder.step(run_folder.resolve(done.path)) == 3


def test_save_persistables_writes_one_file_per_variable(dnn: translation.Translated, tmp_path: Path) -> None:
    saved = static()
    source = write_variables(tmp_path / "models" / "epoch_0", saved)
    check_whole(import_model(dnn, source, tmp_path / "imported"), saved)


@pytest.mark.parametrize("linear", ["fc", "linear"])
def test_save_persistables_into_one_file(dnn: translation.Translated, linear: str, tmp_path: Path) -> None:
    """Such a file has no names. The variables are in the order of their names."""
    saved = static(linear=linear)
    (tmp_path / "epoch_0").mkdir()
    text = b"".join(variable(saved[name]) for name in sorted(saved))
    (tmp_path / "epoch_0" / "checkpoint").write_bytes(text)
    check_whole(import_model(dnn, tmp_path / "epoch_0", tmp_path / "imported"), saved, linear)
    check_whole(import_model(dnn, tmp_path / "epoch_0" / "checkpoint", tmp_path / "again"), saved, linear)


@pytest.mark.parametrize(("params", "model"), [("__params__", "__model__"), ("ctr.pdiparams", "ctr.pdmodel")])
def test_one_file_with_the_names_of_its_program(
    dnn: translation.Translated, params: str, model: str, tmp_path: Path
) -> None:
    saved = {name: values for name, values in static().items() if name.endswith((".w_0", ".b_0", "Factors"))}
    saved["extra"] = np.zeros((2, 2), np.float32)  # without names, its place would be unknown
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / params).write_bytes(b"".join(variable(saved[name]) for name in sorted(saved)))
    with pytest.raises(CheckpointError, match="8 variables without names") as refused:
        import_model(dnn, tmp_path / "saved", tmp_path / "imported")
    assert "put __model__ or the .pdmodel file of its program beside it" in str(refused.value)
    (tmp_path / "saved" / model).write_bytes(program(sorted(saved)))
    done = import_model(dnn, tmp_path / "saved", tmp_path / "imported")
    check_whole(done, saved)
    assert "no optimizer variables" in done.text()
    (tmp_path / "saved" / model).write_bytes(program(sorted(saved)[1:]))
    with pytest.raises(CheckpointError, match=r"has 8 variables, but .* names 7"):
        import_model(dnn, tmp_path / "saved", tmp_path / "other")


def test_fluid_save_under_any_prefix(dnn: translation.Translated, tmp_path: Path) -> None:
    saved = static()
    params = {name: values for name, values in saved.items() if name.endswith((".w_0", ".b_0", "Factors"))}
    write_pickle(tmp_path / "saved" / "ctr.pdparams", params)
    write_pickle(tmp_path / "saved" / "ctr.pdopt", {name: saved[name] for name in saved.keys() - params.keys()})
    (tmp_path / "saved" / "ctr.pdmodel").write_bytes(program(sorted(saved)))
    check_whole(import_model(dnn, tmp_path / "saved", tmp_path / "imported"), saved)


def test_several_prefixes_are_named(dnn: translation.Translated, tmp_path: Path) -> None:
    params = {name: values for name, values in static().items() if name.endswith((".w_0", ".b_0", "Factors"))}
    for name in ("a", "b"):
        write_pickle(tmp_path / "saved" / f"{name}.pdparams", params)
    with pytest.raises(CheckpointError, match=r"has 2 models: a\.pdparams, b\.pdparams"):
        import_model(dnn, tmp_path / "saved", tmp_path / "imported")
    write_pickle(tmp_path / "saved" / "rec_static.pdparams", params)  # the name of PaddleRec's tools
    done = import_model(dnn, tmp_path / "saved", tmp_path / "imported")
    assert done.source.name == "rec_static.pdparams"
    assert "imported rec_static.pdparams" in done.text()
    assert import_model(dnn, tmp_path / "saved" / "b.pdparams", tmp_path / "b").source.name == "b.pdparams"


@pytest.mark.parametrize("names", [("0", "2", "10"), ("epoch_0", "epoch_2", "epoch_10")])
def test_the_last_of_numbered_folders(
    dnn: translation.Translated, names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i, name in enumerate(names):
        write_variables(tmp_path / "output" / name, static(i))
    assert run(build(), ["migrate", "table", str(dnn.original.path), "output", "imported"]) == 0
    said = capsys.readouterr().out
    assert f"imported {names[2]}, the last number; the others are {names[0]}, {names[1]}" in said
    rows = checkpoint.load(run_folder.resolve("imported")).pull(np.arange(VOCABULARY, dtype=np.uint64))
    np.testing.assert_array_equal(rows[:, 1:], static(2)["SparseFeatFactors"])


def test_training_starts_from_the_last_of_numbered_folders(dnn: translation.Translated, tmp_path: Path) -> None:
    for i in range(2):
        write_variables(tmp_path / "old" / f"epoch_{i}", static(i))
    options = ["-o", "runner.model_init_path=old", "runner.epochs=1", "train.threads=1", "run.report=false"]
    assert run(build(), ["train", "-m", str(dnn.original.path), *options]) == 0
    rows = checkpoint.load(run_folder.resolve("output-init")).pull(np.arange(VOCABULARY, dtype=np.uint64))
    np.testing.assert_array_equal(rows[:, 1:], static(1)["SparseFeatFactors"])
    learner = saving.load(run_folder.resolve("output"))
    assert learner.table.known(np.array([59], np.uint64)).all()  # a key that the data does not have


SLOT_DNN = {
    "runner": {"train_data_dir": "data", "train_batch_size": 8, "epochs": 1, "model_save_path": "output"},
    "hyper_parameters": {"sparse_feature_dim": 3, "slot_num": 2, "fc_sizes": [3]},
    "table_parameters": {"embedding": {"accessor": {"embedx_sgd_param": {"name": "SparseAdaGradSGDRule"}}}},
}


def stream(folder: Path, *names: str) -> translation.Translated:
    """Models of the streaming trainer, each with one row that holds its place in `names`, and a network."""
    rng = np.random.default_rng(0)
    network = {"linear_0.w_0": (6, 3), "linear_0.b_0": (3,), "linear_1.w_0": (3, 1), "linear_1.b_0": (1,)}
    for i, name in enumerate(names):
        (folder / "model" / name / "000").mkdir(parents=True)
        (folder / "model" / name / "000" / "part-000-00000").write_text(f"7 2 0 0 1 1 {i} 0 0.5 0.5 0\n")
        arrays = {key: rng.normal(0, 0.3, size).astype(np.float32) for key, size in network.items()}
        write_variables(folder / "model" / name / "dnn_plugin", arrays)
    (folder / "slot_dnn").mkdir()
    (folder / "slot_dnn" / "config.yaml").write_text(yaml.safe_dump(SLOT_DNN))
    return translation.translate(original.read(folder / "slot_dnn" / "config.yaml"))


def first_weight(path: str) -> float:
    return float(checkpoint.load(run_folder.resolve(path)).pull(np.array([7], np.uint64))[0, 0])


def test_days_and_passes_of_a_stream(tmp_path: Path) -> None:
    slot_dnn = stream(tmp_path, "20190720/6", "20190721/0", "20190721/12", "20190721/6", "20190721/base")
    done = import_model(slot_dnn, tmp_path / "model", tmp_path / "imported")
    assert first_weight("imported") == 2
    assert "imported 20190721, the last number" in done.text()
    assert "imported 12, the last number; the others are 0, 6, base" in done.text()


def test_a_base_beside_deltas_and_deltas_alone(tmp_path: Path) -> None:
    slot_dnn = stream(tmp_path, "20190721/base", "20190721/delta-6", "20190722/delta-6", "20190722/delta-12")
    done = import_model(slot_dnn, tmp_path / "model" / "20190721", tmp_path / "imported")
    assert "has a base and delta-6: imported the base alone; add deltas with --delta" in done.text()
    assert done.max_abs_diff is not None
    with pytest.raises(
        CheckpointError, match=r"contains no model .* itself, but these folders in it do: delta-12, delta-6"
    ):
        import_model(slot_dnn, tmp_path / "model" / "20190722", tmp_path / "other")
    later = import_model(
        slot_dnn,
        tmp_path / "model/20190721/base",
        tmp_path / "later",
        deltas=[tmp_path / "model/20190722/delta-6"],
    )
    assert later.ok
    assert first_weight("later") == 2


def test_the_path_in_a_done_file_names_the_table(tmp_path: Path) -> None:
    slot_dnn = stream(tmp_path, "20190721/base")
    done = import_model(slot_dnn, tmp_path / "model" / "20190721" / "base" / "000", tmp_path / "imported")
    assert done.max_abs_diff is not None  # so the network is there
    assert done.parameters == 6 * 3 + 3 + 3 + 1


def test_variables_beside_a_table_of_the_second_generation(dnn: translation.Translated, tmp_path: Path) -> None:
    saved = static()
    network = {name: values for name, values in saved.items() if name.endswith((".w_0", ".b_0"))}
    folder = write_variables(tmp_path / "model", network) / "SparseFeatFactors.shard"
    folder.mkdir()
    (folder / "SparseFeatFactors.block0.txt").write_text("3\t12\t1\t1\t0.5,0.5,0.5,0.5\n")
    (folder / "SparseFeatFactors.block0.meta").write_text(f"row_names=Param\nrow_dims={DIM}\n")
    done = import_model(dnn, tmp_path / "model", tmp_path / "imported")
    assert not done.anew
    assert done.max_abs_diff is not None


def test_static_files_of_gates_keep_their_layers(tmp_path: Path) -> None:
    """The gates have the same names in static and dynamic files; the other layers do not."""
    gatenet = translation.translate(original.read(project(tmp_path, "gatenet")))
    rng = np.random.default_rng(0)
    sizes = {f"embedding_gate_weight_{i}": (1,) for i in range(SLOTS)}
    sizes |= {"hidden_gate_weight_0": (6, 6), "hidden_gate_weight_1": (5, 5), "SparseFeatFactors": (VOCABULARY, DIM)}
    for i, (inputs, outputs) in enumerate([(5, 1), (SLOTS * DIM + DENSE, 6), (6, 5)]):
        sizes |= {f"linear_{i}.w_0": (inputs, outputs), f"linear_{i}.b_0": (outputs,)}
    arrays = {name: rng.normal(0, 0.3, size).astype(np.float32) for name, size in sizes.items()}
    done = import_model(gatenet, write_variables(tmp_path / "saved", arrays), tmp_path / "imported")
    assert done.max_abs_diff is not None
    assert done.max_abs_diff < 1e-6


def test_damaged_variables_are_not_taken_for_a_model(dnn: translation.Translated, tmp_path: Path) -> None:
    folder = write_variables(tmp_path / "saved", {"SparseFeatFactors": np.zeros((3, DIM), np.float32)})
    whole = (folder / "SparseFeatFactors").read_bytes()
    for bad in (whole[:-1], whole[:10], b"", b"\0" * 64):
        (folder / "SparseFeatFactors").write_bytes(bad)
        with pytest.raises(CheckpointError, match="contains no model of PaddleRec"):
            import_model(dnn, folder, tmp_path / "imported")
