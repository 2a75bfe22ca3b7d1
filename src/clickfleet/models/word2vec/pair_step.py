"""The training step of word2vec: draw windows and noise for a batch of sentences, then compute loss and gradients.

With plain sgd, the pairs of a batch are trained one after the other, each on the result of the one before. In one
process this happens directly on the rows of the table. Elsewhere it happens on the pulled rows, and the total change
is pushed. With any other rule, the step computes the gradient of the whole batch at the pulled rows.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from clickfleet import _core
from clickfleet.config.load import checked
from clickfleet.data.batch import Batch, Floats, Keys
from clickfleet.errors import ConfigError
from clickfleet.models.word2vec import Word2Vec, vocabulary
from clickfleet.models.word2vec.vocabulary import Vocabulary
from clickfleet.store.table import Table
from clickfleet.training import modes
from clickfleet.training.embedding import Embedding, Push, ScratchArrays
from clickfleet.training.learner import Learner
from clickfleet.training.optimizer import Flat, Optimizer
from clickfleet.training.step import NotFiniteError, Result, Step

PIECE = 4096


class DrawnPairs:
    """The pairs drawn from a batch and the rows they need. It replaces the `Embedding` of other models."""

    def __init__(self, words: _core.Words, settings: Word2Vec.Config, seed: int, factors: int) -> None:
        self.core = _core.Pairs(words, settings.window, settings.negatives)
        self.seed, self.factors = seed, factors
        self._take = ScratchArrays().take
        self.keys: Keys = np.empty(0, np.uint64)

    def draw(self, batch: Batch) -> None:
        """Draw pairs. They depend only on the run's seed, the position of the batch in the run, and its words."""
        place = struct.pack("<QQQ", self.seed % 2**64, batch.epoch, batch.row)
        seed = hashlib.blake2b(place + batch.keys[:64].tobytes(), digest_size=8).digest()
        self.core.draw(batch.keys, batch.offsets, batch.slots, int.from_bytes(seed, "little"))

    def unique(self, batch: Batch) -> Keys:
        """Draw pairs and return the key of each of their rows once."""
        self.draw(batch)
        size = self.core.gather()
        self.keys, self.show = self._take("keys", np.uint64, size), self._take("show", np.float32, size)
        self.slots = self._take("slots", np.uint16, size)
        self.core.rows(self.keys, self.show, self.slots)
        return self.keys

    def room(self) -> Floats:
        return self._take("rows", np.float32, len(self.keys), 1 + self.factors)

    def gradients(self) -> Floats:
        return self._take("grads", np.float32, len(self.keys), 1 + self.factors)

    def push(self, grads: Floats) -> Push:
        return Push(self.keys, grads, self.show, np.zeros_like(self.show), self.slots, float(len(self.core)))

    def result(self, batch: Batch, push: Push) -> Result:
        """Return loss and scores, estimated from a sample of the pairs. True neighbours have label 1, noise has 0."""
        true, noise, loss = self.core.scores()
        logits = np.concatenate([true, noise])
        labels = np.zeros(len(logits), np.float32)
        labels[: len(true)] = 1
        loss *= len(self.core) / max(1, len(true))
        if not math.isfinite(loss):
            raise NotFiniteError(batch, loss)
        scores = (1 / (1 + np.exp(-np.clip(logits, -30, 30)))).astype(np.float32)
        return Result(loss, scores, push, 1.0, labels)


class WordStep(Step):
    """The step of one trainer thread."""

    def __init__(self, flat: Flat, learner: Learner, words: _core.Words, known: Vocabulary, shared: bool) -> None:
        assert isinstance(flat.model, Word2Vec)
        self.settings: Word2Vec.Config = settings_of(learner)
        self._words, self._seed = words, learner.config.train.seed
        super().__init__(flat, learner.loss, learner.schema, learner.table.factors)
        self.table, self.shared = learner.table, shared
        rule, other = self.table.rule, self.table.embed_rule
        self.plain = (
            rule.name == "sgd" and rule.scale == "none" and (rule.settings, rule.scale) == (other.settings, other.scale)
        )
        self.lr = dict(rule.settings)["lr"]
        self.decays = self.plain if self.settings.decay is None else self.settings.decay
        config = learner.config
        self.epochs = config.train.epochs
        here = not modes.distributed(config)
        workers = 1 if here else config.cluster.workers
        self.sentences = (known.sentences or 0) / workers
        self.in_place = (
            self.plain
            and here
            and not config.train.deterministic
            and self.table.memory_limit is None
            and self.table.policy.admission.by == "birth"
        )
        self._vocabulary = known
        self._held: Any = None

    @property
    def drawn(self) -> DrawnPairs:
        return cast(DrawnPairs, self.embedding)

    def spare(self) -> Embedding:
        return cast(Embedding, DrawnPairs(self._words, self.settings, self._seed, self.factors))

    def rate(self, batch: Batch) -> float:
        """Return the learning rate at the batch's position in the run."""
        if not self.decays:
            return self.lr
        done = (batch.epoch + min(1.0, batch.row / self.sentences)) / self.epochs
        return self.lr * max(self.settings.floor, 1.0 - (1.0 - self.settings.floor) * done)

    def __call__(self, batch: Batch, rows: Floats) -> Result:
        drawn = self.drawn
        grads = drawn.gradients()
        if self.plain:
            bounds = self.table.rule.bounds, self.table.embed_rule.bounds
            drawn.core.move(rows, self.rate(batch), self.lr, self.settings.bias, *bounds, grads)
        else:
            drawn.core.gradient(rows, self.settings.bias, grads)
        return drawn.result(batch, drawn.push(grads))

    def train(self, batch: Batch, table: Table, optimizer: Optimizer, lap: Callable[[str], None]) -> Result:
        if not self.in_place:
            return super().train(batch, table, optimizer, lap)
        if self._held is None:
            self._held = self._hold()
        drawn = self.drawn
        drawn.draw(batch)
        drawn.core.train(self._held, self.rate(batch), self.settings.bias, self.shared)
        none = np.empty(0, np.float32)
        push = Push(self.row_keys[:0], none.reshape(0, 1), none, none, self.row_slots[:0], float(len(drawn.core)))
        result = drawn.result(batch, push)
        lap("compute")
        return result

    def _hold(self) -> _core.InPlace:
        """Create the rows of all words and return the core's handle to them."""
        self.row_keys = np.concatenate([self._vocabulary.keys("in"), self._vocabulary.keys("out")])
        self.row_slots = np.repeat(np.arange(2, dtype=np.uint16), len(self._vocabulary))
        missing = ~self.table.known(self.row_keys)
        self._add(self.row_keys[missing], np.zeros(int(missing.sum()), np.float32), self.row_slots[missing])
        return _core.InPlace(self.table.core, self.row_keys)

    def flush(self) -> None:
        """Add to the table how often `train` used each row."""
        if self._held is not None:
            counts = np.empty((2, len(self.row_keys) // 2), np.float32)
            self.drawn.core.take_counts(counts[0], counts[1])
            flat = counts.reshape(-1)
            used = flat > 0
            self._add(self.row_keys[used], flat[used], self.row_slots[used])

    def _add(self, keys: Keys, show: Floats, slots: Any) -> None:
        nothing = np.zeros((PIECE, 1 + self.factors), np.float32)
        for first in range(0, len(keys), PIECE):
            part = slice(first, first + PIECE)
            rows = nothing[: len(keys[part])]
            self.table.move(keys[part], rows, add=True, show=show[part], slots=slots[part])

    def is_noisy(self) -> bool:
        return False


def settings_of(learner: Learner) -> Word2Vec.Config:
    model = learner.config.model
    return checked(Word2Vec.Config, model.settings, "model", model.name)


def steps(learner: Learner, flats: list[Flat]) -> list[WordStep]:
    """Return one step per trainer thread. All share one vocabulary."""
    if [slot.name for slot in learner.schema.slots] != ["in", "out"]:
        raise ConfigError("word2vec needs sentences as data", "set data.format=sentences")
    known, settings = vocabulary(learner.config), settings_of(learner)
    words = _core.Words(known.keys("in"), known.keys("out"), known.keep(settings.sample), known.noise(settings.power))
    word_steps = [WordStep(flat, learner, words, known, len(flats) > 1) for flat in flats]
    if word_steps[0].decays and not word_steps[0].plain:
        raise ConfigError(
            "model.decay needs plain sgd, but table.rule is another rule",
            "remove model.decay, or set table.rule={name: sgd, lr: 0.025, scale: none}",
        )
    if word_steps[0].decays and not known.sentences:
        raise ConfigError(
            f"model.decay needs the number of sentences, which {learner.config.data.vocabulary} does not state",
            "add the line `</s> N`, or set model.decay=false",
        )
    return word_steps
