"""Use the vectors of a trained word2vec model: nearest words, analogies, export to the word2vec text format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from clickfleet.config.plugins import closest
from clickfleet.data.batch import Floats
from clickfleet.data.files import expand, reading, writing
from clickfleet.errors import CheckpointError, DataError
from clickfleet.models.word2vec.vocabulary import FILE, Vocabulary
from clickfleet.store import checkpoint, run_folder
from clickfleet.training import saving

CHUNK = 256
Ranking = list[tuple[str, float]]


class AnalogyScore(TypedDict):
    """Analogy questions of a section: all, those with known words, and those answered right."""

    questions: int
    known: int
    right: int
    accuracy: float | None


class AnalogyResults(TypedDict):
    rows: int
    known: int
    right: int
    accuracy: float | None
    accuracy_of_all: float
    sections: dict[str, AnalogyScore]


class Vectors:
    """Words and their vectors, one row each, the most frequent words first."""

    def __init__(self, words: Sequence[str], rows: Floats) -> None:
        self.words, self.rows = list(words), rows
        self.place = {word: i for i, word in enumerate(self.words)}
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        self.unit: Floats = (rows / np.where(lengths > 0, lengths, 1)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, word: str) -> Floats:
        row: Floats = self.rows[self._at(word)]
        return row

    def _at(self, word: str) -> int:
        if word not in self.place:
            raise DataError(
                f"the vocabulary has no word {word!r}{closest(word, self.words) if len(self) < 5000 else ''}"
            )
        return self.place[word]

    def similarity(self, a: str, b: str) -> float:
        """Return the cosine between the vectors of two words."""
        return float(self.unit[self._at(a)] @ self.unit[self._at(b)])

    def nearest(self, word: str, n: int = 10) -> Ranking:
        """Return the words with the most similar vectors, best first."""
        return self._best(self.unit[self._at(word)], {word}, n)

    def analogy(self, a: str, b: str, c: str, n: int = 1, raw: bool = False) -> Ranking:
        """Return the words that are to c as b is to a. `raw` adds the vectors without normalising them first."""
        of = self.rows if raw else self.unit
        return self._best(of[self._at(b)] - of[self._at(a)] + of[self._at(c)], {a, b, c}, n)

    def _best(self, to: Floats, without: set[str], n: int) -> Ranking:
        scores = self.unit @ (to / max(float(np.linalg.norm(to)), 1e-30))
        for word in without:
            scores[self.place[word]] = -np.inf
        count = min(n, len(self) - len(without))
        best = np.argpartition(-scores, max(0, count - 1))[:count] if count > 0 else np.empty(0, np.int64)
        return [(self.words[i], float(scores[i])) for i in best[np.argsort(-scores[best], kind="stable")]]

    def evaluate(self, files: str | Path | Iterable[str | Path], raw: bool = False) -> AnalogyResults:
        """Return the share of analogy questions `a b c d` with the right answer d. Questions with an unknown word are only counted.

        `: name` starts a section. An unknown word is also looked up in lower case.
        """
        sections = self._questions(expand(files))
        scores: dict[str, AnalogyScore] = {}
        for name, (questions, total) in sections.items():
            known = len(questions)
            right = self._right(np.array(questions, np.int64).reshape(-1, 4), raw)
            accuracy = right / known if known else None
            scores[name] = {"questions": total, "known": known, "right": right, "accuracy": accuracy}
        total = sum(score["questions"] for score in scores.values())
        known = sum(score["known"] for score in scores.values())
        right = sum(score["right"] for score in scores.values())
        if not total:
            raise DataError("the files contain no analogies", "a question is a line of four words: a b c d")

        return {
            "rows": total,
            "known": known,
            "right": right,
            "accuracy": right / known if known else None,
            "accuracy_of_all": right / total,
            "sections": scores,
        }

    def _questions(self, files: Iterable[str]) -> dict[str, tuple[list[list[int]], int]]:
        sections: dict[str, tuple[list[list[int]], int]] = {}
        name = ""
        for path in files:
            with reading(path):
                text = Path(path).read_text(encoding="utf-8", errors="replace")
            for number, line in enumerate(text.splitlines(), start=1):
                words = line.split()
                if words and words[0].startswith(":"):
                    name = line.strip()[1:].strip()
                elif words:
                    if len(words) != 4:
                        raise DataError(f"{path}:{number}: expected four words, found {len(words)}")
                    known = [self.place.get(word, self.place.get(word.lower(), -1)) for word in words]
                    questions, total = sections.get(name, ([], 0))
                    if -1 not in known:
                        questions.append(known)
                    sections[name] = questions, total + 1
        return sections

    def _right(self, questions: Any, raw: bool) -> int:
        of, right = self.rows if raw else self.unit, 0
        for first in range(0, len(questions), CHUNK):
            a, b, c, d = questions[first : first + CHUNK].T
            scores = (of[b] - of[a] + of[c]) @ self.unit.T
            rows = np.arange(len(a))
            for used in (a, b, c):
                scores[rows, used] = -np.inf
            right += int((scores.argmax(1) == d).sum())
        return right

    def export(self, path: str | Path) -> dict[str, int | str]:
        """Write the word2vec text format: `words dim`, then a word and its numbers per line, with all significant digits."""
        path = Path(path)
        dim = self.rows.shape[1]
        line = "%s" + " %.9g" * dim + "\n"
        with writing(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(f"{len(self)} {dim}\n")
            for word, row in zip(self.words, self.rows, strict=True):
                file.write(line % (word, *row.tolist()))
        return {"words": len(self), "dim": dim, "bytes": path.stat().st_size, "out": str(path)}


def load(model: str | Path) -> Vectors:
    """Return the vectors of a checkpoint, or of the newest checkpoint of a run."""
    if not is_words(model):
        raise CheckpointError(f"{model} is not a word2vec model")
    path = run_folder.resolve(model)
    learner = saving.load(path)
    known = Vocabulary.parse(checkpoint.read(path, FILE), f"{path}/{FILE}")
    return Vectors(known.words, learner.table.pull(known.keys("in"), training=False)[:, 1:])


def is_words(model: str | Path) -> bool:
    """Return whether a saved model is a word2vec model."""
    path = run_folder.resolve(model)
    return run_folder.entries(path) is None and run_folder.read_config(path).model.name == "word2vec"
