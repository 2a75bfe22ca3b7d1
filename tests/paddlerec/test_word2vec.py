"""PaddleRec's word2vec: text as numbers of words and a dictionary."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.errors import DataError
from clickfleet.models.word2vec import vectors
from clickfleet.paddlerec import original, translation
from clickfleet.paddlerec.words import NAMES, words_of, write_questions, write_vocabulary
from originals import rows_of, write_pickle

WORDS = ["<UNK>", "paris", "france", "rome", "italy", "the"]


def project(folder: Path) -> Path:
    home = folder / "word2vec"
    for name in ("data/train", "data/test", "data/dict"):
        (home / name).mkdir(parents=True)
    rng = np.random.default_rng(0)
    lines = [" ".join(map(str, rng.integers(0, len(WORDS), 12))) for _ in range(50)]
    (home / "data/train/part-0").write_text("\n".join(lines) + "\n")
    (home / "data/test/questions").write_text("Paris France Rome Italy\nParis France Oslo Norway\n")
    counts = "".join(f"{word} {100 - i}\n" for i, word in enumerate(WORDS))
    (home / "data/dict/word_count_dict.txt").write_text(counts)
    config = {
        "runner": {
            "train_data_dir": "data/train",
            "test_data_dir": "data/test",
            "train_batch_size": 100,
            "epochs": 1,
            "model_save_path": "output",
            "infer_load_path": "output",
            "infer_start_epoch": 0,
            "infer_end_epoch": 1,
            "thread_num": 1,
            "word_count_dict_path": "data/dict/word_count_dict.txt",
        },
        "hyper_parameters": {
            "optimizer": {"class": "sgd", "learning_rate": 1.0},
            "sparse_feature_number": len(WORDS),
            "sparse_feature_dim": 8,
            "neg_num": 5,
            "window_size": 3,
        },
    }
    (home / "config.yaml").write_text(yaml.safe_dump(config))
    return home / "config.yaml"


def test_dictionaries_become_numbers(tmp_path: Path) -> None:
    dictionary = project(tmp_path).parent / "data/dict/word_count_dict.txt"
    assert write_vocabulary(dictionary, tmp_path / "v.txt").read_text().splitlines()[:2] == ["0 100", "1 99"]
    questions = write_questions(dictionary, [str(tmp_path / "word2vec/data/test")], tmp_path / "q.txt").read_text()
    assert questions == "1 2 3 4\n1 2 ?oslo ?norway\n"


@pytest.mark.parametrize("count", ["", "many", "--5", "²", "9" * 5000])
def test_a_count_that_is_none_is_named(tmp_path: Path, count: str) -> None:
    (tmp_path / "dict.txt").write_text(f"a 3\nb {count}\n")
    with pytest.raises(DataError, match=r"dict\.txt:2: expected a word and its count"):
        words_of(tmp_path / "dict.txt")


def test_train_and_evaluate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = project(tmp_path)
    translated = translation.translate(original.read(path))
    assert translated.raw["model"] == {"name": "word2vec", "decay": False, "sample": 0, "window": 3, "negatives": 5}
    assert translated.raw["table"] == {"dim": 8, "rule": {"name": "sgd", "lr": 0.01, "scale": "none"}}
    assert not [line for line in translated.report.lines if line.kind == "unknown"]
    same = ["train.deterministic=true", "train.threads=1"]
    assert run(build(), ["train", str(path), *same]) == 0
    assert run(build(), ["evaluate", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["rows"], found["known"]) == (2, 1)
    assert run(build(), ["migrate", "paddlerec", str(path)]) == 0
    assert run(build(), ["train", str(path.with_suffix(".clickfleet.yaml")), "run.dir=ours", *same]) == 0
    assert rows_of(tmp_path / "output") == rows_of(tmp_path / "ours") != {}


@pytest.mark.parametrize("names", list(zip(*NAMES.values(), strict=True)))
def test_saved_vectors_are_imported(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path, rng = project(tmp_path), np.random.default_rng(5)
    u, v, bias = rng.normal(size=(9, 8)), rng.normal(size=(9, 8)), rng.normal(size=(9, 1))
    u[4] = u[2] - u[1] + u[3]  # france - paris + rome = italy
    matrices = zip(names, (u, v, bias), strict=True)
    write_pickle(tmp_path / "output/0/rec.pdparams", {name: m.astype(np.float32) for name, m in matrices})
    assert run(build(), ["migrate", "table", str(path), "output/0", "imported", "--json"]) == 0
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (done["rows"], done["compared"], done["ok"]) == (12, 64, True)
    assert "3 vectors belong to no word" in done["notes"][0]
    np.testing.assert_array_equal(vectors.load(tmp_path / "imported")["4"], u[4].astype(np.float32))
    assert run(build(), ["evaluate", str(path), "--json"]) == 0  # the original's file, where the configuration has it
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["right"] == 1
    assert run(build(), ["train", str(path), "-o", "runner.model_init_path=output/0", "run.dir=more"]) == 0
    assert run(build(), ["migrate", "table", str(path), "nowhere", "other"]) == 1
    assert "expected rec.pdparams" in capsys.readouterr().err
