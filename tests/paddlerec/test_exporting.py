"""Models in the original's layout: a naive reader, the original's formula and our own import read them back exactly."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.errors import CheckpointError
from clickfleet.paddlerec import original, tensors, translation
from clickfleet.paddlerec.importing import import_model, layer_settings
from clickfleet.store import checkpoint, run_folder
from clickfleet.training import model, saving
from clickfleet.training.learner import Learner
from originals import HYPER, project, write_pickle

VOCABULARY = 60
SAME = ["train.deterministic=true", "train.threads=1", "run.report=false"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def naive_rows(folder: Path, table: str = "000") -> dict[int, list[float]]:
    """What a consumer reads: every line is a key and float32 numbers."""
    found = {}
    for path in sorted((folder / table).iterdir()):
        number = int(path.name.split("-")[2])
        for line in path.read_text().splitlines():
            words = line.split(" ")
            found[int(words[0])] = [float(np.float32(word)) for word in words[1:]]
            assert int(words[0]) % len(list((folder / table).iterdir())) == number
    return found


def naive_variable(path: Path) -> np.ndarray[Any, Any]:
    """A variable as Paddle's loader reads it: each dimension is a field of its own."""
    data = path.read_bytes()
    version, levels, version_again, length = struct.unpack_from("<IQIi", data)
    assert (version, levels, version_again) == (0, 0, 0)
    description, shape, at = data[20 : 20 + length], [], 2
    assert description[:2] == b"\x08\x05"
    while at < length:
        assert description[at] == 0x10
        value, shift, at = 0, 0, at + 1
        while True:
            value |= (description[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if description[at - 1] < 128:
                break
        shape.append(value)
    return np.frombuffer(data[20 + length :], "<f4").reshape(shape)


def trained(folder: Path, network: str) -> translation.Translated:
    """A model of two epochs in `output`."""
    path = project(folder, network)
    assert run(build(), ["train", str(path), *SAME]) == 0
    return translation.translate(original.read(path))


def scores(path: str, data: Path) -> Any:
    return model.load(path).predict(str(data))


@pytest.mark.parametrize("network", HYPER)
def test_every_network_comes_back_with_the_same_scores(network: str, tmp_path: Path) -> None:
    """Every parameter is random, so that none can take the place of another."""
    path = project(tmp_path, network)
    translated = translation.translate(original.read(path))
    learner = Learner(translated.config, translated.schema)
    rng = np.random.default_rng(7)
    found: dict[str, Any] = {}
    for layer in tensors.layers(network, layer_settings(learner), learner.shape):
        if layer.kind == "embedding":
            width = 1 if layer.name.endswith(("_one", "sparse_weight")) else learner.table.factors
            found[layer.parts[0]] = rng.normal(0, 0.3, (VOCABULARY, width)).astype(np.float32)
        for name, shape in layer.shapes.items():
            values = rng.uniform(0.5, 1.5, shape) if name.endswith("_variance") else rng.normal(0, 0.3, shape)
            found[name] = values.astype(np.float32)
    write_pickle(tmp_path / "saved" / "rec.pdparams", found)
    import_model(translated, tmp_path / "saved", tmp_path / "first")
    assert run(build(), ["export", "first", "text", "--layout", "paddle-text", "--parts", "3"]) == 0
    done = import_model(translated, tmp_path / "text", tmp_path / "again")
    assert done.ok
    assert not done.anew
    data = path.parent / "data" / "test"
    np.testing.assert_allclose(scores("again", data), scores("first", data), rtol=0, atol=1e-6)


def test_training_goes_on_from_the_text(tmp_path: Path) -> None:
    """Statistics and the states of the rules and of Adam survive; the rows of a network without first weights are one vector."""
    translated = trained(tmp_path, "dnn")
    assert run(build(), ["export", "output", "text", "--layout", "paddle-text"]) == 0
    import_model(translated, tmp_path / "text", tmp_path / "again")

    def rows(path: str) -> dict[int, dict[str, Any]]:
        found = {}
        with checkpoint.load(run_folder.resolve(path)).snapshot() as parts:
            for part in parts:
                n = len(part["key"])
                for i, key in enumerate(part["key"].tolist()):
                    found[key] = {
                        name: part[name].reshape(n, -1)[i].tolist()
                        for name in ("show", "click", "slot", "unseen_days", "embedx", "embedx_state")
                    }
        return found

    assert rows("again") == rows("output")
    before, after = (run_folder.resolve(name) for name in ("output", "again"))
    assert saving.read_state(after)["step"] == 0  # the original does not save it
    from safetensors import numpy as safe

    old, new = (safe.load(checkpoint.read(path, "optimizer.safetensors")) for path in (before, after))
    for name in old.keys() - {"steps"}:
        np.testing.assert_array_equal(new[name], old[name])


SLOT_DNN: dict[str, Any] = {
    "runner": {"train_data_dir": "data", "train_batch_size": 8, "epochs": 1, "model_save_path": "output"},
    "hyper_parameters": {"sparse_feature_dim": 3, "slot_num": 2, "fc_sizes": [8], "optimizer": {"learning_rate": 0.01}},
    "table_parameters": {
        "embedding": {
            "accessor": {
                "embedx_dim": 2,
                "embedx_threshold": 3,
                "embed_sgd_param": {"name": "SparseAdaGradSGDRule"},
                "embedx_sgd_param": {"name": "StdAdaGradSGDRule"},
            }
        }
    },
}


def slot_dnn(folder: Path) -> Path:
    """A run of slot_dnn with short and full rows and a key beyond 2^63."""
    home = folder / "slot_dnn"
    (home / "data").mkdir(parents=True)
    (home / "config.yaml").write_text(yaml.safe_dump(SLOT_DNN))
    rng = np.random.default_rng(0)
    keys = [(2**63 + int(rng.integers(3)), int(rng.zipf(1.5)) % 90 + 100) for _ in range(300)]
    lines = [f"{int(rng.random() < 0.2 + 0.3 * (a % 2))}:1 {a}:2 {b}:3" for a, b in keys]
    (home / "data" / "part-0").write_text("\n".join(lines) + "\n")
    assert run(build(), ["train", str(home / "config.yaml"), *SAME]) == 0
    return home / "config.yaml"


def test_slot_dnn_by_a_naive_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = slot_dnn(tmp_path)
    capsys.readouterr()
    assert run(build(), ["export", "output", "text", "--layout", "paddle-text", "--parts", "4", "--json"]) == 0
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sorted(path.name for path in (tmp_path / "text" / "000").iterdir()) == [
        f"part-000-{part:05d}" for part in range(4)
    ]
    found = naive_rows(tmp_path / "text")
    learner = saving.load(run_folder.resolve("output"))
    assert done["exported"][0]["rows"] == len(found) == len(learner.table)
    widths = {len(fields) for fields in found.values()}
    assert widths == {6 + 1, 6 + 1 + 2 + 2}  # short and full
    with learner.table.snapshot() as parts:
        for part in parts:
            n = len(part["key"])
            for i, key in enumerate(part["key"].tolist()):
                wide = [part[name].reshape(n, -1)[i].tolist() for name in ("embed_w", "embed_state")]
                wide += [part[name].reshape(n, -1)[i].tolist() for name in ("embedx", "embedx_state") if part["full"]]
                head = [int(learner.schema.slots[part["slot"][i]].name)]
                head += [part[name][i] for name in ("unseen_days", "delta_score", "show", "click")]
                assert found[key] == [*head, *(value for values in wide for value in values)]

    weights = {path.name: naive_variable(path) for path in (tmp_path / "text" / "dnn_plugin").iterdir()}
    assert {name: values.shape for name, values in weights.items()} == {
        "linear_0.w_0": (6, 8), "linear_0.b_0": (8,), "linear_1.w_0": (8, 1), "linear_1.b_0": (1,),
    }  # fmt: skip
    data = config.parent / "data"
    expected = []
    for line in (data / "part-0").read_text().splitlines():
        keys = [int(token.split(":")[0]) for token in line.split()]
        pooled = [(found[key][5:6] + (found[key][7:9] or [0.0, 0.0])) for key in keys[1:]]
        hidden = np.maximum(np.concatenate(pooled) @ weights["linear_0.w_0"] + weights["linear_0.b_0"], 0)
        expected.append(1 / (1 + np.exp(-(hidden @ weights["linear_1.w_0"] + weights["linear_1.b_0"])[0])))
    found_scores = model.load("output").predict(str(data))
    assert np.std(found_scores) > 1e-4
    np.testing.assert_allclose(found_scores, expected, atol=1e-6)

    dense = np.loadtxt(tmp_path / "text" / "001" / "part-000", dtype=np.float32)
    names = ("linear_0.b_0", "linear_0.w_0", "linear_1.b_0", "linear_1.w_0")
    np.testing.assert_array_equal(dense[:, 0], np.concatenate([weights[name].ravel() for name in names]))
    assert dense.shape[1] == 3
    assert run(build(), ["migrate", "table", str(config), "text", "again"]) == 0
    np.testing.assert_array_equal(scores("again", data), found_scores)


def test_a_model_that_paddlerec_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows are whole; the network has our names."""
    config = slot_dnn(tmp_path)
    assert run(build(), ["migrate", "paddlerec", str(config), "--out", "ours.yaml"]) == 0
    other = ["model={name: lr}", "table.rule={name: ftrl}", "table.embed_rule=null", "run.dir=lr"]
    assert run(build(), ["train", "ours.yaml", *other, *SAME]) == 0
    assert run(build(), ["export", "lr", "text", "--layout", "paddle-text"]) == 0
    said = capsys.readouterr().out
    assert "PaddleRec does not have this lr: dnn_plugin has its tensors under our names" in said
    assert "PaddleRec does not have the rule ftrl: rows are written without its state" in said
    learner = saving.load(run_folder.resolve("lr"))
    for key, fields in naive_rows(tmp_path / "text").items():
        assert fields[5:] == learner.table.pull(np.array([key], np.uint64), training=False)[0].tolist()
    for name, tensor in learner.dense().items():
        if tensor.numel():
            np.testing.assert_array_equal(naive_variable(tmp_path / "text" / "dnn_plugin" / name), tensor.numpy())


def test_what_cannot_be_meant_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = slot_dnn(tmp_path)
    for arguments, message in (
        (["output", "text", "--layout", "text"], "--layout must be artifact or paddle-text"),
        (["output", "text", "--parts", "3"], "--parts needs --layout paddle-text"),
        (["output", "text", "--layout", "paddle-text", "--inputs", "2"], "--inputs and --outputs are for an artifact"),
    ):
        assert run(build(), ["export", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert run(build(), ["export", "output", "artifact"]) == 0
    assert run(build(), ["export", "artifact", "text", "--layout", "paddle-text"]) == 1
    assert "does not tell the rules of its rows" in capsys.readouterr().err
    assert run(build(), ["export", "-m", str(config), "text", "--layout", "paddle-text", "--parts", "2"]) == 0
    assert run(build(), ["export", "output", "text", "--layout", "paddle-text"]) == 1
    assert "text already exists" in capsys.readouterr().err
    assert run(build(), ["export", "output", "text", "--layout", "paddle-text", "--overwrite"]) == 0
    assert len(list((tmp_path / "text" / "000").iterdir())) == 1


def test_damage_is_found_when_the_text_is_imported(tmp_path: Path) -> None:
    config = slot_dnn(tmp_path)
    assert run(build(), ["export", "output", "text", "--layout", "paddle-text"]) == 0
    part = tmp_path / "text" / "000" / "part-000-00000"
    part.write_text(part.read_text().replace("1", "2", 1))
    translated = translation.translate(original.read(config))
    with pytest.raises(CheckpointError, match=r"part-000-00000 is damaged"):
        import_model(translated, tmp_path / "text", tmp_path / "again")
    (tmp_path / "text" / "manifest.json").unlink()  # a consumer's copy may lack it
    import_model(translated, tmp_path / "text", tmp_path / "again")


def test_a_full_disk_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot_dnn(tmp_path)
    real = Path.open

    def full(path: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if path.name == "part-000-00001" and "a" in mode:
            raise OSError(28, "No space left on device")
        return real(path, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", full)
    from clickfleet.paddlerec.exporting import export_text

    with pytest.raises(CheckpointError, match="the disk is full"):
        export_text(run_folder.resolve("output"), tmp_path / "text", parts=3)
    assert not list(tmp_path.glob("*text*"))
