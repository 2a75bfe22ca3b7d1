"""Generate text with planted structure: topics whose words occur together, and analogies.

A sentence is of one of two kinds. Either it has one topic, and its words are drawn from the topic by Zipf's law. Or it
is about one entity in one role: the word for this pair occurs among words of the entity and words of the role. The two
words of an entity therefore differ only by role. All sentences also contain common words without meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clickfleet.errors import ConfigError, DataError

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class TextOptions:
    words: int = 1_000_000
    """Length of the text."""
    vocabulary: int = 5000
    """Distinct words of the topics."""
    topics: int = 40
    entities: int = 20
    seed: int = 7

    def __post_init__(self) -> None:
        if self.words < 1 or self.entities < 2 or not 1 <= self.topics <= self.vocabulary:
            raise ConfigError("a corpus needs words, at least two entities, and at least one word per topic")


COMMON, CONTEXT, LENGTH = 50, 6, 12
ROLES = ("land", "town")


def name(i: int) -> str:
    """Return a distinct word of a–z for a number.

    >>> name(0), name(99), name(12345)
    ('baba', 'bazu', 'begoma')
    """
    syllables = [c + v for c in "bcdfghjklmnprstvwxyz" for v in "aeiou"]
    out = ""
    while i or len(out) < 4:
        out = syllables[i % 100] + out
        i //= 100
    return out


class Corpus:
    """Sentences as arrays of word numbers, and the structure planted in them."""

    def __init__(self, options: TextOptions) -> None:
        self.options = options
        random = np.random.default_rng(options.seed)
        topic_words = [name(i) for i in range(options.vocabulary)]
        common = [name(options.vocabulary + i) for i in range(COMMON)]
        entities = range(options.entities)
        pairs = [f"{role}{name(i)}" for i in entities for role in ROLES]
        of_entity = [f"about{name(i)}{name(k)}" for i in entities for k in range(CONTEXT)]
        of_role = [f"as{role}{name(k)}" for role in ROLES for k in range(CONTEXT)]
        parts = (topic_words, common, pairs, of_entity, of_role)
        self.names = np.array([word for part in parts for word in part])
        starts = np.cumsum([0, *map(len, parts)])
        count = -(-options.words // LENGTH)
        self.sentences = np.where(
            random.random((count, 1)) < 0.75,
            _topics(random, count, options),
            _entities(random, count, options, starts),
        )
        plain = random.random(self.sentences.shape) < 0.25
        self.sentences[plain] = starts[1] + _zipf(random, COMMON, int(plain.sum()))
        self.topic = np.arange(options.vocabulary) % options.topics
        """The topic of each word; topic words come first in `names`."""

    def questions(self) -> list[tuple[str, str, str, str]]:
        """Return the planted analogies: a is to b as c is to d."""
        first, second = ROLES
        n = self.options.entities
        return [
            (first + name(i), second + name(i), first + name(j), second + name(j))
            for i in range(n)
            for j in range(n)
            if i != j
        ]

    def text(self) -> str:
        return "".join(" ".join(words) + "\n" for words in self.names[self.sentences].tolist())


def _zipf(random: np.random.Generator, n: int, size: int | tuple[int, ...]) -> Ids:
    weights = 1 / (np.arange(n) + 2.7)
    ranks: Ids = np.searchsorted(np.cumsum(weights / weights.sum()), random.random(size)).clip(0, n - 1)
    return ranks


def _topics(random: np.random.Generator, count: int, options: TextOptions) -> Ids:
    """Draw sentences of topics. Topic t has the words whose number is t modulo the topics; smaller numbers are more frequent."""
    topic = random.integers(0, options.topics, (count, 1))
    rank = _zipf(random, options.vocabulary // options.topics, (count, LENGTH))
    words: Ids = topic + options.topics * rank
    return words


def _entities(random: np.random.Generator, count: int, options: TextOptions, starts: Ids) -> Ids:
    entity = random.integers(0, options.entities, (count, 1))
    role = random.integers(0, len(ROLES), (count, 1))
    shape = (count, LENGTH)
    about = starts[3] + entity * CONTEXT + random.integers(0, CONTEXT, shape)
    fitting = starts[4] + role * CONTEXT + random.integers(0, CONTEXT, shape)
    out: Ids = np.where(random.random(shape) < 0.5, about, fitting)
    out[:, LENGTH // 2] = (starts[2] + entity * len(ROLES) + role)[:, 0]
    return out


def synth(out: str | Path, options: TextOptions | None = None) -> dict[str, int | str]:
    """Write text.txt and questions.txt. Return a summary."""
    out, corpus = Path(out), Corpus(options or TextOptions())
    questions = corpus.questions()
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "text.txt").write_text(corpus.text(), encoding="utf-8")
        lines = "".join(" ".join(question) + "\n" for question in questions)
        (out / "questions.txt").write_text(": planted\n" + lines, encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror or error}") from error
    return {"rows": len(corpus.sentences), "words": corpus.sentences.size, "questions": len(questions), "out": str(out)}
