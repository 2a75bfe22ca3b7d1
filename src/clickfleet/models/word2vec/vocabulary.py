"""The words of a corpus and their counts: `word count` per line, as the original word2vec tools write it.

The line `</s> N` holds the number of sentences.

>>> vocabulary = Vocabulary(("the", "fleet"), np.array([60, 40]), sentences=10)
>>> Vocabulary.parse(vocabulary.text().encode(), "vocabulary.txt").words
('the', 'fleet')
>>> vocabulary.keep(0.1).round(3).tolist(), vocabulary.noise(0.75).round(1).tolist()
([0.575, 0.75], [21.6, 15.9])
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.data.batch import Integers, Keys
from clickfleet.errors import DataError

FILE = "vocabulary.txt"
SENTENCE = "</s>"
_COUNT = re.compile(r"[0-9]{1,19}")
LONG_SENTENCE = 1000

Doubles = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Vocabulary:
    words: tuple[str, ...]
    counts: Integers
    sentences: int | None = None

    def __len__(self) -> int:
        return len(self.words)

    def keys(self, slot: str) -> Keys:
        """Return the keys of all words in a slot."""
        return np.array([_core.hash64(slot, word.encode()) for word in self.words], np.uint64)

    def sentences_with(self, words: int) -> int:
        """Return how many sentences have about this many words. If the number of sentences is unknown, assume long ones."""
        length = LONG_SENTENCE if not self.sentences else self.counts.sum() / self.sentences
        return max(1, round(words / max(length, 1)))

    def keep(self, sample: float) -> Doubles:
        """Return, per word, the probability that an occurrence is trained on. Frequent words are subsampled."""
        if not sample:
            return np.ones(len(self))
        rare = sample * self.counts.sum() / self.counts
        kept: Doubles = np.minimum(np.sqrt(rare) + rare, 1.0)
        return kept

    def noise(self, power: float) -> Doubles:
        """Return, per word, an unnormalised probability of being drawn as noise."""
        return self.counts.astype(np.float64) ** power

    def text(self) -> str:
        first = "" if self.sentences is None else f"{SENTENCE} {self.sentences}\n"
        return first + "".join(f"{word} {count}\n" for word, count in zip(self.words, self.counts, strict=True))

    @classmethod
    def parse(cls, text: bytes, where: str) -> Vocabulary:
        words: list[str] = []
        counts: list[int] = []
        sentences = None
        for number, line in enumerate(text.decode(errors="replace").splitlines(), start=1):
            word, _, count = line.rpartition(" ")
            if not word or " " in word or not _COUNT.fullmatch(count) or not 0 < int(count) < 2**63:
                raise DataError(f"{where}:{number}: expected a word and its count, found {line[:80]!r}")
            if word == SENTENCE:
                sentences = int(count)
            else:
                words.append(word)
                counts.append(int(count))
        if len(set(words)) != len(words):
            seen: set[str] = set()
            twice = next(word for word in words if word in seen or seen.add(word))  # type: ignore[func-returns-value]
            raise DataError(f"{where}: the word {twice!r} occurs twice")
        if not words:
            raise DataError(f"{where} contains no words", "create it with clickfleet words prepare")
        return cls(tuple(words), np.array(counts, np.int64), sentences)

    @classmethod
    def read(cls, path: str | Path) -> Vocabulary:
        try:
            return cls.parse(Path(path).read_bytes(), str(path))
        except OSError as error:
            raise DataError(
                f"cannot read {path}: {error.strerror or error}",
                "data.vocabulary names the vocabulary.txt of clickfleet words prepare",
            ) from error
