"""Saved models of the original: what is imported scores by the original's formula, and goes on training."""

import gzip
import json
import os
import pickle
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.errors import CheckpointError
from clickfleet.paddlerec import original, pickles, tensors, translation
from clickfleet.paddlerec.importing import import_model, layer_settings
from clickfleet.store import checkpoint, run_folder
from clickfleet.store.table import NO_SLOT
from clickfleet.training import model, saving
from clickfleet.training.learner import Learner
from originals import DENSE, DIM, HYPER, SLOTS, project, write_pickle

VOCABULARY = 60
SAME = ["train.deterministic=true", "train.threads=1", "run.report=false"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def parameters(network: str, translated: translation.Translated) -> dict[str, np.ndarray]:
    """Random parameters of a network under the original's names."""
    learner = Learner(translated.config, translated.schema)
    rng = np.random.default_rng(7)
    found: dict[str, np.ndarray] = {}
    for layer in tensors.layers(network, layer_settings(learner), learner.shape):
        if layer.kind == "embedding":
            width = 1 if layer.name.endswith(("_one", "sparse_weight", "w_embeddings")) else learner.table.factors
            found[layer.parts[0]] = rng.normal(0, 0.3, (VOCABULARY, width)).astype(np.float32)
        for name, shape in layer.shapes.items():
            values = rng.uniform(0.5, 1.5, shape) if name.endswith("_variance") else rng.normal(0, 0.3, shape)
            found[name] = values.astype(np.float32)
    return found


def first_rows(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Ids [B, S] and dense values [B, F] of the test data."""
    ids, dense = [], []
    for line in (folder / "data" / "test" / "part-0").read_text().splitlines():
        tokens = [token.split(":") for token in line.split()]
        dense.append([float(v) for name, v in tokens if name == "dense_feature"])
        ids.append([int(dict(tokens)[str(s)]) for s in range(1, SLOTS + 1)])
    return np.array(ids), np.array(dense)


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


@pytest.mark.parametrize("network", HYPER)
def test_every_network_scores_as_its_formula_says(network: str, tmp_path: Path) -> None:
    translated = translation.translate(original.read(project(tmp_path, network)))
    write_pickle(tmp_path / "saved" / "rec.pdparams", parameters(network, translated))
    done = import_model(translated, tmp_path / "saved", tmp_path / "imported")
    assert done.compared == 64
    assert done.max_abs_diff is not None
    assert done.max_abs_diff < 1e-6
    assert not done.anew
    assert done.rows == VOCABULARY - (translated.config.table.padding_key == 0)


@pytest.mark.parametrize("protocol", [2, 4])
def test_golden_scores_of_dnn_by_hand(protocol: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = project(tmp_path, "dnn")
    p = parameters("dnn", translation.translate(original.read(path)))
    write_pickle(tmp_path / "saved" / "rec.pdparams", p, protocol)
    assert run(build(), ["migrate", "table", str(path), "saved", "imported"]) == 0
    assert "the scores of 64 rows match the original formula" in capsys.readouterr().out
    ids, x = first_rows(path.parent)
    h = np.concatenate([p["embedding.weight"][ids].reshape(len(ids), -1), x], 1)
    h = np.maximum(h @ p["linear_0.weight"] + p["linear_0.bias"], 0)
    h = np.maximum(h @ p["linear_1.weight"] + p["linear_1.bias"], 0)
    z = h @ p["linear_2.weight"] + p["linear_2.bias"]
    expected = np.exp(z[:, 1]) / np.exp(z).sum(1)
    found = model.load("imported").predict(str(path.parent / "data" / "test"))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_golden_scores_of_deepfm_by_hand(tmp_path: Path) -> None:
    path = project(tmp_path, "deepfm")
    translated = translation.translate(original.read(path))
    p = parameters("deepfm", translated)
    import_model(translated, write_pickle(tmp_path / "saved" / "rec.pdparams", p), tmp_path / "imported")
    ids, x = first_rows(path.parent)
    for b, score in enumerate(model.load("imported").predict(str(path.parent / "data" / "test"))):
        fields = [p["fm.embedding.weight"][key] for key in ids[b]]
        fields += [x[b, i] * p["fm.dense_w"][0, i] for i in range(DENSE)]
        pairs = sum(fields[f] @ fields[g] for f in range(SLOTS + DENSE) for g in range(f + 1, SLOTS + DENSE))
        first = p["fm.embedding_one.weight"][ids[b], 0].sum() + x[b] @ p["fm.dense_w_one"]
        h = np.concatenate(fields)
        for i in range(3):
            h = h @ p[f"dnn.linear_{i}.weight"] + p[f"dnn.linear_{i}.bias"]
            h = np.maximum(h, 0) if i < 2 else h
        assert score == pytest.approx(sigmoid(first + pairs + h[0]), abs=1e-6)


def test_moments_become_the_state_of_rows_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project(tmp_path, "dnn")
    translated = translation.translate(original.read(path))
    p = parameters("dnn", translated)
    names = {name: name.replace(".weight", ".w_0").replace(".bias", ".b_0") for name in p}
    names["embedding.weight"] = "SparseFeatFactors"
    kept = {}
    for i, (place, name) in enumerate(names.items()):
        kept[f"{name}_moment1_0"] = np.full_like(p[place], 0.01 * (i + 1))
        kept[f"{name}_moment2_0"] = np.full_like(p[place], 0.001 * (i + 1))
        kept[f"{name}_beta1_pow_acc_0"] = np.array([0.9**4], np.float32)
        kept[f"{name}_beta2_pow_acc_0"] = np.array([0.999**4], np.float32)
    write_pickle(tmp_path / "output" / "0" / "rec.pdparams", {**p, pickles.STRUCTURED: names})
    write_pickle(tmp_path / "output" / "0" / "rec.pdopt", kept)
    done = import_model(translated, tmp_path / "output" / "0", tmp_path / "imported")
    learner = saving.load(run_folder.resolve(done.path))
    with learner.table.snapshot() as rows:
        columns = next(iter(rows))
    state = columns["embedx_state"].reshape(VOCABULARY, 2 * DIM + 2)
    np.testing.assert_allclose(state[:, 0], 0.01)
    np.testing.assert_allclose(state[:, DIM], 0.001)
    np.testing.assert_allclose(state[0, -2:], [0.9**4, 0.999**4], rtol=1e-6)
    assert set(columns["slot"]) == {NO_SLOT}
    assert run_folder.step(run_folder.resolve(done.path)) == 3

    edited = path.read_text().replace(
        "  model_save_path: output\n", "  model_save_path: second\n  model_init_path: output/0\n"
    )
    path.write_text(edited)
    assert run(build(), ["train", str(path), *SAME]) == 0
    assert "starting from" in (tmp_path / "second" / "log.txt").read_text()
    capsys.readouterr()
    assert (
        run(build(), ["evaluate", str(path), "-o", "runner.infer_end_epoch=1", "--json"]) == 0
    )  # of output/0, imported
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == 40
    assert run(build(), ["export", "imported", "artifact"]) == 0


def test_static_files_name_by_kind_and_number(tmp_path: Path) -> None:
    translated = translation.translate(original.read(project(tmp_path, "wide_deep")))
    p = parameters("wide_deep", translated)
    order = ["wide_part", "linear_0", "linear_1", "linear_2"]
    static = {"SparseFeatFactors": p["embedding.weight"]}
    for i, name in enumerate(order):
        static |= {f"linear_{2 * i}.w_0": p[f"{name}.weight"], f"linear_{2 * i}.b_0": p[f"{name}.bias"]}
    write_pickle(tmp_path / "a" / "rec_static.pdparams", static)
    write_pickle(tmp_path / "b" / "rec.pdparams", p)
    for name in "ab":
        import_model(translated, tmp_path / name, tmp_path / f"run-{name}")
    a, b = (saving.load(run_folder.resolve(f"run-{name}")).dense() for name in "ab")
    assert all(np.array_equal(a[name].numpy(), b[name].numpy()) for name in b)


SLOT_DNN = {
    "runner": {"train_data_dir": "data", "train_batch_size": 8, "epochs": 1, "model_save_path": "output"},
    "hyper_parameters": {"sparse_feature_dim": 3, "slot_num": 2, "fc_sizes": [3]},
    "table_parameters": {
        "embedding": {
            "accessor": {
                "embedx_dim": 2,
                "embedx_threshold": 10,
                "embed_sgd_param": {"name": "SparseAdaGradSGDRule"},
                "embedx_sgd_param": {"name": "SparseAdaGradSGDRule"},
            }
        }
    },
}


def slot_dnn(folder: Path) -> translation.Translated:
    home = folder / "slot_dnn"
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.yaml").write_text(yaml.safe_dump(SLOT_DNN))
    return translation.translate(original.read(home / "config.yaml"))


def dump(folder: Path) -> np.ndarray:
    """A table of two shards, short and full rows, and a dense table over two servers; its values."""
    (folder / "000").mkdir(parents=True)
    (folder / "001").mkdir()
    big = 2**63 + 5
    lines = [f"{big} 2 1 0.5 120 3 0.25 1.5 0.5 -0.75 2.5", "7 3 0 0.1 12 0 -0.5 0.125"]
    (folder / "000" / "part-000-00000").write_text("\n".join(lines) + "\n")
    with gzip.open(folder / "000" / "part-001-00001.gz", "wt") as out:
        out.write("9 0 3 0 4 1 1 0 1 2 0\n")
    dense = np.arange(1, 2 * 3 * 3 + 3 + 3 + 1 + 1) / 10 - 1  # linear_0 [6, 3] and [3], linear_1 [3, 1] and [1]
    cut = len(dense) // 2 + 1
    for server, part in enumerate((dense[:cut], dense[cut:])):
        text = "".join(f"{w:g} 0.1 0.2\n" for w in part)
        (folder / "001" / f"part-{server:03d}").write_text(text)
    return dense.astype(np.float32)


def test_a_text_dump_of_slot_dnn_by_hand(tmp_path: Path) -> None:
    translated = slot_dnn(tmp_path)
    dense = dump(tmp_path / "model")
    done = import_model(translated, tmp_path / "model", tmp_path / "imported")
    assert (done.rows, done.full_rows) == (3, 2)
    assert done.max_abs_diff is not None
    assert done.max_abs_diff < 1e-6
    table = checkpoint.load(run_folder.resolve("imported"))
    np.testing.assert_array_equal(
        table.pull(np.array([2**63 + 5, 7, 9], np.uint64)), [[0.25, 0.5, -0.75], [-0.5, 0, 0], [1, 1, 2]]
    )
    with table.snapshot() as rows:
        parts = {bool(part["full"]): part for part in rows}
    assert parts[False]["show"].tolist() == [12.0]
    assert parts[False]["embed_state"].tolist() == [0.125]
    assert parts[False]["slot"].tolist() == [1]
    full = {int(key): i for i, key in enumerate(parts[True]["key"])}
    assert parts[True]["unseen_days"][full[9]] == 3
    assert parts[True]["embedx_state"][full[2**63 + 5]] == 2.5

    b0, w0 = dense[:3], dense[3:21].reshape(6, 3)  # by name: linear_0.b_0 comes before linear_0.w_0
    b1, w1 = dense[21:22], dense[22:25].reshape(3, 1)
    (tmp_path / "rows.txt").write_text(f"0:1 {2**63 + 5}:2 7:2 9:3\n1:1 9:2\n")
    pooled = np.array([[0.25 - 0.5, 0.5, -0.75, 1, 1, 2], [1, 1, 2, 0, 0, 0]])
    logits = np.maximum(pooled @ w0 + b0, 0) @ w1 + b1
    found = model.load("imported").predict("rows.txt")
    np.testing.assert_allclose(found, sigmoid(np.clip(logits[:, 0], -15, 15)), atol=1e-6)


def test_deltas_go_over_their_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = slot_dnn(tmp_path).original.path
    dump(tmp_path / "base")
    for name, line in (("one", "7 3 0 0.1 12 9 0.5 0.125 3 4 0"), ("two", "8 3 0 0.1 12 9 0.75 0.125")):
        (tmp_path / name / "000").mkdir(parents=True)
        (tmp_path / name / "000" / "part-000-00000").write_text(line + "\n")
    deltas = ["--delta", "one", "--delta", "two"]
    assert run(build(), ["migrate", "table", str(path), "base", "imported", *deltas, "--json"]) == 0
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (done["rows"], done["full_rows"], done["ok"]) == (4, 3, True)
    rows = checkpoint.load(run_folder.resolve("imported")).pull(np.array([7, 8, 9], np.uint64))
    np.testing.assert_array_equal(rows, [[0.5, 3, 4], [0.75, 0, 0], [1, 1, 2]])


def test_a_table_of_a_network_without_first_weights_joins_them(tmp_path: Path) -> None:
    """The first weight of such rows is the first of the embedding; a table alone leaves the network as it begins."""
    path = project(tmp_path, "dnn")
    k = DIM - 1
    full = [*range(1, 7), *([0.5] * 4), *([0.25] * k), *([0.125] * (2 * k)), 0.729, 0.997003]
    (tmp_path / "model" / "000").mkdir(parents=True)
    text = "5 " + " ".join(map(str, full)) + "\n8 0 0 0 1 0 0.5 0.1 0.2 0.9 0.999\n"
    (tmp_path / "model" / "000" / "part-000-00000").write_text(text)
    done = import_model(translation.translate(original.read(path)), tmp_path / "model", tmp_path / "imported")
    assert done.anew == ["the network (only a table was saved)"]
    assert done.max_abs_diff is None
    table = checkpoint.load(run_folder.resolve("imported"))
    rows = table.pull(np.array([5, 8], np.uint64))
    np.testing.assert_allclose(rows[:, 1:], [[6, 0.25, 0.25, 0.25], [0.5, 0, 0, 0]])


def test_blocks_of_the_second_generation(tmp_path: Path) -> None:
    path = project(tmp_path, "dnn")
    folder = tmp_path / "model" / "SparseFeatFactors.shard"
    folder.mkdir(parents=True)
    values = [*([0.5] * DIM), *([0.1] * DIM), *([0.2] * DIM), 0.81, 0.998, 0.001]
    (folder / "SparseFeatFactors.block0.txt").write_text(
        f"3\t12\t1\t1\t{','.join(map(str, values))}\n4\t1\t0\t0\t{','.join(map(str, values))}\n"
    )
    (folder / "SparseFeatFactors.block0.meta").write_text(
        "param=SparseFeatFactors\nshard_id=0\nrow_names=Param,Moment1,Moment2,Beta1Pow,Beta2Pow,LearningRate\n"
        f"row_dims={DIM},{DIM},{DIM},1,1,1\ncount=2\n"
    )
    done = import_model(translation.translate(original.read(path)), tmp_path / "model", tmp_path / "imported")
    assert done.rows == 1
    assert any("1 rows that were not admitted yet" in note for note in done.notes)
    with checkpoint.load(run_folder.resolve("imported")).snapshot() as rows:
        (part,) = rows
    assert part["show"].tolist() == [12.0]
    np.testing.assert_allclose(part["embedx_state"], [*([0.1] * DIM), *([0.2] * DIM), 0.81, 0.998], rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "7 3 0 0.1 12 0 -0.5\n",
            r"part-000-00000:1: expected 7 numbers \(without factors\) or 10, found 6",
        ),
        ("x 3 0 0.1 12 0 -0.5 1\n", "expected a key"),
        (f"{2**64} 3 0 0.1 12 0 -0.5 1\n", "expected a key"),
        ("7 3 0 0.1 12 0 much 1\n", "part-000-00000: could not convert"),
        ("7 3 0 0.1 12 0 nan 1\n", "not finite"),
    ],
)
def test_broken_rows_are_refused_by_line(text: str, message: str, tmp_path: Path) -> None:
    translated = slot_dnn(tmp_path)
    dump(tmp_path / "model")
    (tmp_path / "model" / "000" / "part-000-00000").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        import_model(translated, tmp_path / "model", tmp_path / "imported")
    assert not (tmp_path / "imported" / "checkpoints").exists()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    translated = translation.translate(original.read(project(tmp_path, "dnn")))
    p = parameters("dnn", translated)
    for changed, message in (
        ({"linear_0.weight": p["linear_0.weight"][:2]}, "linear_0.weight has shape .* but the configuration needs"),
        ({"embedding.weight": p["embedding.weight"][:, :2]}, "but the configuration needs width 4"),
    ):
        source = write_pickle(tmp_path / "saved" / "rec.pdparams", {**p, **changed})
        with pytest.raises(CheckpointError, match=message):
            import_model(translated, source, tmp_path / "imported")
    del p["linear_1.bias"]
    with pytest.raises(CheckpointError, match=r"has no linear_1\.bias"):
        import_model(translated, write_pickle(tmp_path / "saved" / "rec.pdparams", p), tmp_path / "imported")
    with pytest.raises(CheckpointError, match="contains no model of PaddleRec"):
        import_model(translated, tmp_path, tmp_path / "imported")


def test_the_originals_lost_matrices_are_told(tmp_path: Path) -> None:
    translated = translation.translate(original.read(project(tmp_path, "deepfefm")))
    p = {k: v for k, v in parameters("deepfefm", translated).items() if "field_embeddings" not in k}
    done = import_model(translated, write_pickle(tmp_path / "rec.pdparams", p), tmp_path / "imported")
    assert done.anew == ["matrices"]
    assert "did not save the matrices" in done.text()


class Evil:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


@pytest.mark.parametrize(
    "content",
    [
        Evil(os.system, "touch owned"),
        {"a": Evil(eval, "open('owned', 'w')")},
        {"a": Evil(open, "owned", "w")},
        {"a": Evil(np.load, "x", None, True)},
        {"a": np.array([Evil(os.system, "touch owned")], object)},
        {"a": Evil(getattr, "x", "format")},
        {"a": Evil(__import__, "os")},
        [1, 2],
        {"a": np.array(["text"])},
    ],
    ids=lambda content: type(content).__name__,
)
def test_hostile_pickles_do_nothing(content: Any, tmp_path: Path) -> None:
    path = write_pickle(tmp_path / "rec.pdparams", content, 4)
    with pytest.raises(CheckpointError, match=r"rec\.pdparams"):
        pickles.load(path)
    assert not Path("owned").exists()


def test_arrays_of_impossible_shapes_are_refused(tmp_path: Path) -> None:
    path = write_pickle(tmp_path / "rec.pdparams", {"a": np.zeros((2, 2), np.float32)})
    path.write_bytes(path.read_bytes().replace(b"K\x02K\x02\x86", b"K\x7fK\x7f\x86"))
    with pytest.raises(CheckpointError, match="an array of shape"):
        pickles.load(path)


HUNGRY = {
    "a memo index of 2^32 - 1": b"\x80\x04}r\xff\xff\xff\xff.",
    "a memo index as text": b"}p99999999999\n.",
    "bytes without end": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"ab.",
    "the same text encoded again and again": b"\x80\x02c_codecs\nencode\nq\x00(X"
    + (1 << 16).to_bytes(4, "little")
    + b"a" * (1 << 16)
    + b"q\x01X\x06\x00\x00\x00latin1tq\x02R"
    + b"h\x00h\x02R" * 10_000
    + b".",
    "a key that takes for ever to hash": b"\x80\x02}K\x01" + b"q\x00h\x00\x86" * 60 + b"K\x01s.",
}


@pytest.mark.parametrize("kind", HUNGRY)
def test_small_pickles_cannot_ask_for_much(kind: str, tmp_path: Path) -> None:
    (tmp_path / "rec.pdparams").write_bytes(HUNGRY[kind])
    tracemalloc.start()
    try:
        with suppress(CheckpointError):
            pickles.load(tmp_path / "rec.pdparams")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


GOOD = pickle.dumps({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": {"c": 1}}, 4)


@given(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=8))
def test_any_damage_is_an_error_or_arrays(at: int, bite: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rec.pdparams"
        path.write_bytes(GOOD[:at] + bite + GOOD[at + len(bite) :])
        try:
            arrays, _ = pickles.load(path)
        except CheckpointError:
            return
        assert all(isinstance(array, np.ndarray) for array in arrays.values())


def test_plain_arrays_come_back(tmp_path: Path) -> None:
    content = {"a": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "n": np.float32(3), "k": np.arange(3), "x": 5}
    for protocol in (2, 3, 4, 5):
        arrays, _ = pickles.load(write_pickle(tmp_path / f"{protocol}.pdparams", content, protocol))
        np.testing.assert_array_equal(arrays["a"], content["a"])
        np.testing.assert_array_equal(arrays["k"], [0, 1, 2])
