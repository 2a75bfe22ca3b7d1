"""A trained word2vec model -> its vectors: nearest words, analogies, the text format that other tools read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clickfleet import checkpoint, saving
from clickfleet.batch import Floats
from clickfleet.errors import CheckpointError, DataError
from clickfleet.files import expand, reading
from clickfleet.find import closest
from clickfleet.words.vocabulary import FILE, Vocabulary

CHUNK = 256
Found = list[tuple[str, float]]


class Vectors:
    """Words and their vectors, one row each, most frequent first."""

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
        """The cosine between two words' vectors."""
        return float(self.unit[self._at(a)] @ self.unit[self._at(b)])

    def nearest(self, word: str, n: int = 10) -> Found:
        """The words with the most similar vectors, best first."""
        return self._best(self.unit[self._at(word)], {word}, n)

    def analogy(self, a: str, b: str, c: str, n: int = 1, raw: bool = False) -> Found:
        """What is to c as b is to a; `raw` adds the vectors as they are, and not their directions."""
        of = self.rows if raw else self.unit
        return self._best(of[self._at(b)] - of[self._at(a)] + of[self._at(c)], {a, b, c}, n)

    def _best(self, to: Floats, without: set[str], n: int) -> Found:
        scores = self.unit @ (to / max(float(np.linalg.norm(to)), 1e-30))
        for word in without:
            scores[self.place[word]] = -np.inf
        count = min(n, len(self) - len(without))
        best = np.argpartition(-scores, max(0, count - 1))[:count] if count > 0 else np.empty(0, np.int64)
        return [(self.words[i], float(scores[i])) for i in best[np.argsort(-scores[best], kind="stable")]]

    def evaluate(self, files: str | Path | Iterable[str | Path], raw: bool = False) -> dict[str, Any]:
        """The share of analogy questions `a b c d` whose d is found; those with a word that is not known are only counted.

        `: name` starts a section; letters are lowered where only that makes a word known.
        """
        sections = self._questions(expand(files))
        found: dict[str, dict[str, Any]] = {}
        for name, (questions, total) in sections.items():
            right = self._right(np.array(questions, np.int64).reshape(-1, 4), raw)
            found[name] = {"questions": total, "known": len(questions), "right": right}
        total, known, right = (sum(part[key] for part in found.values()) for key in ("questions", "known", "right"))
        if not total:
            raise DataError("there are no analogies to evaluate on", "a question is four words on a line: a b c d")
        for part in found.values():
            part["accuracy"] = part["right"] / part["known"] if part["known"] else None
        return {
            "rows": total,
            "known": known,
            "right": right,
            "accuracy": right / known if known else None,
            "accuracy_of_all": right / total,
            "sections": found,
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

    def export(self, path: str | Path) -> dict[str, Any]:
        """The word2vec text format: `words dim`, then a word and its numbers per line, with digits enough to be exact."""
        path = Path(path)
        hidden = path.with_name(f".{path.name}.writing")
        dim = self.rows.shape[1]
        line = "%s" + " %.9g" * dim + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with hidden.open("w", encoding="utf-8", newline="\n") as file:
                file.write(f"{len(self)} {dim}\n")
                for word, row in zip(self.words, self.rows, strict=True):
                    file.write(line % (word, *row.tolist()))
            hidden.replace(path)
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror or error}") from error
        finally:
            hidden.unlink(missing_ok=True)
        return {"words": len(self), "dim": dim, "bytes": path.stat().st_size, "out": str(path)}


def load(model: str | Path) -> Vectors:
    """The vectors of a run's newest checkpoint, or of a checkpoint."""
    if not is_words(model):
        raise CheckpointError(f"{model} is no model of word2vec: it has no vectors of words")
    path = saving.resolve(model)
    learner = saving.load(path)
    known = Vocabulary.parse(checkpoint.read(path, FILE), f"{path}/{FILE}")
    return Vectors(known.words, learner.table.pull(known.keys("in"), training=False)[:, 1:])


def is_words(model: str | Path) -> bool:
    """Whether a saved model is one of words."""
    path = saving.resolve(model)
    return saving.entries(path) is None and saving.read_config(path).model.name == "word2vec"
