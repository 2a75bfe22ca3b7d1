"""Plain text -> sentences and vocabulary."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickfleet.errors import ConfigError, DataError
from clickfleet.models.word2vec import corpus as module
from clickfleet.models.word2vec.corpus import CorpusOptions, prepare, sentences
from clickfleet.models.word2vec.synth_text import Corpus
from clickfleet.models.word2vec.synth_text import TextOptions as Planted
from clickfleet.models.word2vec.vocabulary import Vocabulary

TEXT = "The fleet, the Sea\n\nthe fleet at sea; sea\nalone\n"


def lines(folder: Path) -> list[str]:
    return [line for part in sorted((folder / "train").iterdir()) for line in part.read_text().splitlines()]


def test_counts_and_sentences(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    made = prepare(tmp_path / "text.txt", tmp_path / "p", CorpusOptions(min_count=2, az=True, parts=2))
    assert (tmp_path / "p/vocabulary.txt").read_text() == "</s> 2\nsea 3\nthe 3\nfleet 2\n"
    assert lines(tmp_path / "p") == ["the fleet the sea", "the fleet sea sea"]
    assert (made["rows"], made["words"], made["words_read"], made["vocabulary"]) == (2, 8, 10, 3)


def test_letters_may_stay_as_they_are(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    prepare(tmp_path / "text.txt", tmp_path / "p", CorpusOptions(min_count=1, lower=False, max_words=2))
    assert Vocabulary.read(tmp_path / "p/vocabulary.txt").words == ("the", "Sea")
    assert lines(tmp_path / "p") == ["the Sea", "the"]


@pytest.mark.parametrize("size", [1, 7, 64])
def test_pieces_of_a_file_cut_no_word_and_long_lines_are_cut(tmp_path, monkeypatch, size):
    monkeypatch.setattr(module, "READ_BYTES", size)
    words = [f"w{i}" for i in range(100)]
    with gzip.open(tmp_path / "text.txt.gz", "wt") as file:
        file.write(" ".join(words) + "\nend")
    found = list(sentences([str(tmp_path / "text.txt.gz")], CorpusOptions(sentence_words=30)))
    assert [len(each) for each in found] == [30, 30, 30, 10, 1]
    assert b" ".join(word for each in found for word in each).decode().split() == [*words, "end"]


@given(st.lists(st.lists(st.sampled_from(["a", "bb", "ccc", "é"]), max_size=9), max_size=9), st.integers(1, 5))
def test_all_words_come_in_order(tmp_path_factory, text, most):
    folder = tmp_path_factory.mktemp("any")
    (folder / "t").write_text("\n".join(" ".join(words) for words in text))
    found = list(sentences([str(folder / "t")], CorpusOptions(sentence_words=most)))
    assert [word.decode() for each in found for word in each] == [word for words in text for word in words]
    assert all(0 < len(each) <= most for each in found)


def test_what_cannot_be_prepared_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("once\n")
    with pytest.raises(DataError, match="no word occurs 5 times in a text of 1 words"):
        prepare(tmp_path / "text.txt", tmp_path / "p")
    with pytest.raises(ConfigError, match="is not empty"):
        prepare(tmp_path / "text.txt", tmp_path)
    with pytest.raises(ConfigError, match="parts must be at least 1"):
        CorpusOptions(parts=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 1\nb\n", "v:2: expected a word and its count, found 'b'"),
        ("a b 1\n", "v:1: expected a word"),
        ("a -1\n", "v:1: expected a word"),
        ("a 1\nb 2\na 3\n", "the word 'a' occurs twice"),
        ("</s> 3\n", "v contains no words"),
    ],
)
def test_a_wrong_vocabulary_is_refused(text, message):
    with pytest.raises(DataError, match=message):
        Vocabulary.parse(text.encode(), "v")


def test_planted_text():
    corpus = Corpus(Planted(words=60_000, vocabulary=200, topics=10, entities=4))
    assert len(set(corpus.names.tolist())) == len(corpus.names)
    counts = Counter(corpus.names[corpus.sentences].reshape(-1).tolist())
    of_topic = np.array([counts[word] for word in corpus.names[:200:10]])  # one topic, falling as Zipf says
    assert of_topic[0] > 2 * of_topic[5] > 2 * of_topic[-1] > 0
    assert corpus.questions()[0] == ("landbaba", "townbaba", "landbabe", "townbabe")
    assert len(corpus.questions()) == 12
    assert corpus.text() == Corpus(Planted(words=60_000, vocabulary=200, topics=10, entities=4)).text()
