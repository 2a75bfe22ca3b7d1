"""A whole run against NumPy, pair by pair, and against gensim, by what it makes of the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clickfleet
from clickfleet.config.check import configure
from clickfleet.data.dataset import open_source
from clickfleet.models.word2vec import vectors
from clickfleet.models.word2vec.corpus import CorpusOptions as Prepare
from clickfleet.models.word2vec.corpus import prepare
from clickfleet.models.word2vec.vectors import Vectors
from clickfleet.models.word2vec.vocabulary import Vocabulary
from clickfleet.training.learner import Learner


@pytest.mark.parametrize("way", ["in place", "pull and push"])
def test_every_pair_of_a_run_moves_rows_as_written_down(config, corpus, tmp_path, way):
    text = tmp_path / "few.txt"
    text.write_text("".join((corpus / "p/train/part-00000.txt").read_text().splitlines(keepends=True)[:40]))
    known = Vocabulary.read(corpus / "p/vocabulary.txt")
    few = tmp_path / "vocabulary.txt"
    few.write_text(Vocabulary(known.words, known.counts, 40).text())
    data = {"train": str(text), "vocabulary": str(few), "batch_size": 7}
    settings = configure(config(data=data, train={"epochs": 2, "deterministic": way != "in place"}))
    source = open_source(settings, settings.data.train, None, labels=True)
    learner = Learner(settings, source.schema)
    (step,) = learner.steps(1)
    core: Any = step.drawn.core  # type: ignore[attr-defined]
    u, v = (learner.table.pull(known.keys(slot)).astype(np.float64) for slot in ("in", "out"))
    assert np.abs(u[:, 1:]).max() <= 0.5 / 16
    done = 0
    for epoch in range(2):
        for batch in source:
            step.train(batch, learner.table, learner.optimizer, lambda phase: None)
            centres, ends, targets = core.drawn()
            lr = 0.025 * max(0.004, 1 - 0.996 * (epoch + done % 40 / 40) / 2)
            for centre, first, last in zip(centres, [0, *ends[:-1]], ends, strict=True):
                for pair in np.split(targets[first:last], (last - first) // 6):
                    change = np.zeros(16)
                    for place, target in enumerate(pair[pair != 2**32 - 1]):
                        logit = u[centre, 1:] @ v[target, 1:] + v[target, 0]
                        g = lr * ((place == 0) - 1 / (1 + np.exp(-logit)))
                        change += g * v[target, 1:]
                        v[target] += g * np.append(1, u[centre, 1:])
                    u[centre, 1:] += change
            done += len(batch)
    assert done == 80
    for slot, wanted in (("in", u), ("out", v)):
        assert np.abs(learner.table.pull(known.keys(slot)) - wanted).max() < 2e-5


def agreement(a: Vectors, b: Vectors) -> float:
    """The correlation of all similarities; their order within a topic is noise in this text."""
    x, y = (of.unit[[of.place[word] for word in a.words]] for of in (a, b))
    return float(np.corrcoef((x @ x.T).ravel(), (y @ y.T).ravel())[0, 1])


def gensim(text: Path, seed: int) -> Vectors:
    """By its iterable: with its file reader and two threads the rate falls only half its way."""
    word2vec = pytest.importorskip("gensim.models.word2vec", reason="not installed on Python 3.14")
    model = word2vec.Word2Vec(
        word2vec.LineSentence(str(text)),
        vector_size=16,
        window=5,
        min_count=1,
        sg=1,
        negative=5,
        workers=1,
        epochs=2,
        seed=seed,
    )
    return Vectors(model.wv.index_to_key, np.array(model.wv.vectors))


def test_words_are_as_similar_as_by_gensim(config, corpus, tmp_path):
    text = tmp_path / "joined.txt"
    text.write_bytes(b"".join(path.read_bytes() for path in sorted((corpus / "p/train").iterdir())))
    clickfleet.train(config(model={"bias": False}), quiet=True)
    mine, one, other = vectors.load(tmp_path / "run"), gensim(text, 1), gensim(text, 2)
    assert len(mine) == len(one)
    assert agreement(mine, one) > agreement(one, other) - 0.03 > 0.5


def test_the_default_batch_learns_from_long_sentences(config, corpus, tmp_path):
    """A batch is a number of words: of 1000 sentences with 1000 words each the rate would fall once per epoch."""
    (tmp_path / "text.txt").write_text((corpus / "text.txt").read_text().replace("\n", " ") + "\n")
    prepare(tmp_path / "text.txt", tmp_path / "p", Prepare(parts=1))
    settings = config(model={"bias": False}, train={"deterministic": True, "threads": 1})
    settings["data"] |= {"train": str(tmp_path / "p/train"), "vocabulary": str(tmp_path / "p/vocabulary.txt")}
    del settings["data"]["batch_size"]
    done = clickfleet.train(settings, quiet=True)
    assert done.config.data.batch_size == 10
    assert agreement(vectors.load(tmp_path / "run"), gensim(tmp_path / "p/train/part-00000.txt", 1)) > 0.9
