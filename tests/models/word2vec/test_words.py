"""Training on planted text in every mode, exact resuming, and what is done with the vectors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gensim.models import KeyedVectors

import clickfleet
from clickfleet import _core
from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.cluster.simulate import SimulatedCluster, with_mode
from clickfleet.config.check import configure
from clickfleet.config.load import Config
from clickfleet.data.dataset import open_source
from clickfleet.errors import CheckpointError, ConfigError, DataError, TableError
from clickfleet.models.word2vec import vectors
from clickfleet.models.word2vec.vectors import Vectors
from clickfleet.models.word2vec.vocabulary import Vocabulary
from clickfleet.online.learn import learn
from clickfleet.store import checkpoint, run_folder
from clickfleet.store.table import Table
from clickfleet.training import modes, saving
from clickfleet.training.learner import Learner
from clickfleet.training.loop import Job
from clickfleet.training.metrics import Metrics
from clickfleet.training.saving import Saver


def accuracy(of: Vectors, corpus: Path) -> float:
    return float(of.evaluate(corpus / "questions.txt")["accuracy"])


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    data = {"format": "sentences", "train": str(corpus / "p/train"), "vocabulary": str(corpus / "p/vocabulary.txt")}
    settings = {
        "data": {**data, "batch_size": 100},
        "model": "word2vec",
        "table": {"dim": 16},
        "run": {"dir": str(folder)},
    }
    done = clickfleet.train({**settings, "train": {"epochs": 3, "threads": 2}}, quiet=True)
    assert done.train["auc"] > 0.8
    assert (folder / "report.html").exists()
    return folder


def test_rows_trained_in_place_find_the_planted_analogies(trained, corpus):
    of = vectors.load(trained)
    assert accuracy(of, corpus) > 0.95
    assert of.similarity("landbaba", "townbaba") > of.similarity("landbaba", "landbabe")
    shows = {"in": 0.0, "out": 0.0}
    with saving.load(run_folder.resolve(trained)).table.snapshot() as rows:
        for part in rows:
            for slot, name in enumerate(shows):
                shows[name] += part["show"][part["slot"] == slot].sum()
    assert shows["out"] == pytest.approx(6 * shows["in"], rel=0.001)  # a neighbour and five words of noise


def test_neighbours_are_of_the_same_topic(trained):
    found = [word for word, _ in vectors.load(trained).nearest("baba", 5)]
    assert all(word in {"baba", *(f"ba{c}{v}" for c in "bcdfghjklmnprstvwxyz" for v in "aeiou")} for word in found)


@pytest.mark.parametrize("rule", [{"name": "adagrad", "lr": 0.2}, {"name": "adam", "lr": 0.01}])
def test_other_rules_learn_from_the_gradient_of_a_batch(config, corpus, tmp_path, rule):
    clickfleet.train(config(table={"rule": rule}, data={"batch_size": 20}), quiet=True)
    assert accuracy(vectors.load(tmp_path / "run"), corpus) > 0.7


class Stop(Exception):  # noqa: N818
    pass


def test_a_deterministic_run_resumes_bit_for_bit(config, tmp_path, monkeypatch):
    def settings(name: str) -> dict[str, Any]:
        more = {"dir": str(tmp_path / name), "checkpoint_every_steps": 37, "keep": 9}
        return config(run=more, train={"deterministic": True}, data={"shuffle": 700, "batch_size": 150})

    whole = clickfleet.train(settings("whole"), quiet=True)
    save = Saver.save

    def stop(self: Saver, *args: Any, **more: Any) -> None:
        save(self, *args, **more)
        if int(args[2]["step"]) == 111:  # in the second epoch
            self.wait()
            raise Stop

    monkeypatch.setattr(Saver, "save", stop)
    with pytest.raises(Stop):
        clickfleet.train(settings("cut"), quiet=True)
    monkeypatch.setattr(Saver, "save", save)
    rest = clickfleet.train(settings("cut"), resume=True, quiet=True)
    assert whole.path is not None
    assert rest.path is not None
    assert whole.path.name == rest.path.name
    files = [
        file.name for file in whole.path.iterdir() if file.name not in ("config.yaml", "manifest.json", "state.json")
    ]
    assert len([name for name in files if name.startswith("rows-")]) == 8
    for name in files:
        assert checkpoint.read(whole.path, name) == checkpoint.read(rest.path, name), name


def local(config: Config) -> Learner:
    source = open_source(config, config.data.train, None, labels=True)
    learner = Learner(config, source.schema)
    modes.load(config)(Job(learner, source, Metrics()))
    return learner


def of_fleet(config: Config, mode: str, workers: int, **more: Any) -> Learner:
    files = sorted(Path(config.data.train[0]).iterdir())
    shares = [files] if workers == 1 else [files[:1], files[1:]]
    config = with_mode(replace(config, cluster=replace(config.cluster, workers=workers)), mode, **more)
    sources = [open_source(config, [str(file) for file in share], None, labels=True) for share in shares]
    return SimulatedCluster(config, sources[0].schema, workers, shards=2).train(sources)  # type: ignore[arg-type]


def rows_of(learner: Learner, corpus: Path, slot: str = "in") -> Any:
    return learner.table.pull(Vocabulary.read(corpus / "p/vocabulary.txt").keys(slot), training=False)


def test_sync_with_one_worker_is_local(config, corpus):
    settings = configure(config(train={"epochs": 1, "deterministic": True}))
    one, other = local(settings), of_fleet(settings, "sync", 1)
    for slot in ("in", "out"):
        assert (rows_of(one, corpus, slot) == rows_of(other, corpus, slot)).all()


@pytest.mark.parametrize(
    ("mode", "more"), [("geo", {"k_steps": 5}), ("async", {}), ("half_async", {}), ("sync", {})], ids=lambda x: str(x)
)
def test_two_workers_find_the_planted_analogies(config, corpus, mode, more):
    learner = of_fleet(configure(config(data={"batch_size": 50}, train={"epochs": 1})), mode, 2, **more)
    known = Vocabulary.read(corpus / "p/vocabulary.txt")
    assert accuracy(Vectors(known.words, rows_of(learner, corpus)[:, 1:]), corpus) > 0.7


def test_the_rate_falls_over_the_whole_run(config):
    settings = configure(config(train={"epochs": 4}))
    source = open_source(settings, settings.data.train, None, labels=True)
    (step,) = Learner(settings, source.schema).steps(1)
    rates = []
    for _ in range(4):
        rates += [step.rate(batch) for batch in source]  # type: ignore[attr-defined]
    assert rates[0] == 0.025
    assert rates == sorted(rates, reverse=True)
    assert rates[len(rates) // 2] == pytest.approx(0.0125, rel=0.02)
    assert rates[-1] == pytest.approx(0.0001, rel=2)
    assert rates[-1] >= 0.0001


def test_text_for_gensim_and_the_same_answers(trained, corpus, tmp_path):
    of = vectors.load(trained)
    assert of.export(tmp_path / "v.txt")["words"] == len(of)
    other = KeyedVectors.load_word2vec_format(str(tmp_path / "v.txt"))
    assert other.index_to_key == of.words
    assert (other.vectors == of.rows).all()
    for word in ("baba", "landbaba"):
        ours, theirs = of.nearest(word, 10), other.most_similar(word, topn=10)
        assert [one for one, _ in ours] == [one for one, _ in theirs]
        assert np.allclose([score for _, score in ours], [score for _, score in theirs], atol=1e-5)
    ours = of.analogy("landbaba", "townbaba", "landbabe", 5)
    assert [one for one, _ in ours] == [
        one for one, _ in other.most_similar(positive=["townbaba", "landbabe"], negative=["landbaba"], topn=5)
    ]
    assert other.evaluate_word_analogies(str(corpus / "questions.txt"))[0] == accuracy(of, corpus)


def test_questions(tmp_path):
    rows = np.array([[1, 0], [1, 1], [0.1, 1], [0, 1], [-1, 0]], np.float32)
    of = Vectors(["a", "b", "c", "d", "e"], rows)
    (tmp_path / "q").write_text(": first\na b c d\nA B c e\n\n: second one\na b c unknown\n")
    found = of.evaluate(tmp_path / "q")
    assert (found["rows"], found["known"], found["accuracy_of_all"]) == (3, 2, found["right"] / 3)
    assert found["sections"]["second one"] == {"questions": 1, "known": 0, "right": 0, "accuracy": None}
    (tmp_path / "q").write_text("a b c\n")
    with pytest.raises(DataError, match=r"q:1: expected four words, found 3"):
        of.evaluate(tmp_path / "q")
    (tmp_path / "q").write_text(": none\n")
    with pytest.raises(DataError, match="no analogies"):
        of.evaluate(tmp_path / "q")
    with pytest.raises(DataError, match="no word 'f'"):
        of.nearest("f")
    assert of.nearest("a", 99)[0][0] == "b"


def test_what_does_not_fit_is_refused(config, corpus, trained, tmp_path):
    for more, message in (
        ({"data": {"vocabulary": None}}, "set data.vocabulary"),
        ({"data": {"vocabulary": str(tmp_path / "none")}}, "No such file"),
        ({"data": {"test": [str(corpus / "questions.txt")]}}, "data.test cannot be used with model word2vec"),
        ({"data": {"format": "criteo"}}, "set data.format=sentences"),
        ({"model": {"name": "dnn"}}, "data.vocabulary cannot be used with model dnn"),
        ({"model": {"decay": True}, "table": {"rule": {"name": "adagrad"}}}, "model.decay needs plain sgd"),
        ({"model": {"negatives": 0}}, "model.negatives"),
        ({"model": {"wide": True}}, "unknown key model.wide"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            clickfleet.train(config(**more), quiet=True)
    with pytest.raises(ConfigError, match="cannot learn online"):
        learn(config(online={"dir": str(tmp_path), "start_day": 20260101}), quiet=True)
    short = tmp_path / "short.txt"
    short.write_text("baba 5\nbabe 3\n")
    with pytest.raises(ConfigError, match="needs the number of sentences"):
        clickfleet.train(config(data={"vocabulary": str(short)}), quiet=True)
    clickfleet.train(config(train={"epochs": 1}), quiet=True)
    with pytest.raises(ConfigError, match=r"vocabulary\.txt differs from the one in the checkpoint"):
        clickfleet.train(config(train={"epochs": 2}, data={"vocabulary": str(short)}), resume=True, quiet=True)
    with pytest.raises(ConfigError, match="cannot score rows"):
        clickfleet.load(trained).predict([str(corpus / "p/train")])


def test_a_table_with_a_limit_is_trained_by_pull_and_push(config, corpus, tmp_path):
    clickfleet.train(config(table={"memory_limit": "8MiB"}, train={"epochs": 1}), quiet=True)
    assert accuracy(vectors.load(tmp_path / "run"), corpus) > 0.7
    with pytest.raises(TableError, match="memory limit"):
        _core.InPlace(Table(2, memory_limit=1 << 24).core, np.array([1], np.uint64))
    pairs = _core.Pairs(_core.Words(*[np.ones(1, np.uint64)] * 2, *[np.ones(1)] * 2), 1, 1)
    held = _core.InPlace(Table(2).core, np.array([1, 2], np.uint64))
    with pytest.raises(TableError, match="a row is missing or has no factors"):
        pairs.train(held, 0.1, True, False)


def test_the_commands(trained, corpus, tmp_path, capsys):
    def said(*argv: str) -> dict[str, Any]:
        assert run(build(), [*argv, "--json"]) == 0, capsys.readouterr().err
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    model, questions = str(trained), str(corpus / "questions.txt")
    assert said("evaluate", model, questions)["accuracy"] > 0.95
    assert len(said("words", "nearest", model, "baba", "babe", "-n", "3")["nearest"]["babe"]) == 3
    assert said("words", "analogy", model, "landbaba", "townbaba", "landbabe")["found"][0][0] == "townbabe"
    assert said("words", "export", model, str(tmp_path / "v.txt"))["dim"] == 16
    facts = said("inspect", model)
    assert (facts["model"]["name"], facts["parameters"]) == ("word2vec", 0)
    assert facts["slots"]["in"] == facts["slots"]["out"] == len(Vocabulary.read(corpus / "p/vocabulary.txt"))
    assert said("verify", model)["ok"] is True
    assert run(build(), ["export", model, str(tmp_path / "artifact")]) == 1
    assert "cannot score rows" in capsys.readouterr().err
    assert run(build(), ["evaluate", model, questions, "--epochs", "0:2"]) == 1
    capsys.readouterr()


def test_other_models_have_no_vectors(tmp_path):
    with pytest.raises(CheckpointError):
        vectors.load(tmp_path)


def test_the_recipe(corpus, tmp_path):
    data = [
        f"data.train={corpus}/p/train",
        f"data.vocabulary={corpus}/p/vocabulary.txt",
        "table.dim=8",
        "train.epochs=1",
    ]
    done = clickfleet.train(None, *data, f"run.dir={tmp_path}/r", "run.report=false", recipe="word2vec", quiet=True)
    assert done.rows == Vocabulary.read(corpus / "p/vocabulary.txt").sentences
