"""One batch of sentences: windows and noise drawn afresh, then rows in, loss and gradients out.

Under plain gradient descent the pairs of a batch are taken one after the other, each from where the one before left the rows: on a
copy of the rows that was pulled, whose whole way is then pushed; or, in one process, on the table's own rows. Under any other rule, the
gradient is that of the whole batch at the rows as they were pulled.
"""

from __future__ import annotations

import hashlib
import math
import struct
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from clickfleet import _core
from clickfleet.batch import Batch, Floats, Keys
from clickfleet.embedding import Embedding, Push, Space
from clickfleet.errors import ConfigError
from clickfleet.step import NotFiniteError, Result, Step
from clickfleet.words.model import Word2Vec, vocabulary
from clickfleet.words.vocabulary import Vocabulary

if TYPE_CHECKING:
    from clickfleet.learner import Learner
    from clickfleet.optimizers import Flat

PIECE = 4096


class Drawn:
    """The pairs of a batch and the rows they need; it stands where other models have their `Embedding`."""

    def __init__(self, words: _core.Words, settings: Word2Vec.Config, seed: int, factors: int) -> None:
        self.core = _core.Pairs(words, settings.window, settings.negatives)
        self.seed, self.factors = seed, factors
        self._space = Space()
        self.keys: Keys = np.empty(0, np.uint64)

    def draw(self, batch: Batch) -> None:
        """Draws pairs by nothing but the run's seed, the place of the batch in the run, and its words."""
        place = struct.pack("<QQQ", self.seed % 2**64, batch.epoch, batch.row)
        seed = hashlib.blake2b(place + batch.keys[:64].tobytes(), digest_size=8).digest()
        self.core.draw(batch.keys, batch.offsets, batch.slots, int.from_bytes(seed, "little"))

    def unique(self, batch: Batch) -> Keys:
        """Each row of the batch's pairs once."""
        self.draw(batch)
        size = self.core.gather()
        self.keys, self.show = self._space.take("keys", np.uint64, size), self._space.take("show", np.float32, size)
        self.slots = self._space.take("slots", np.uint16, size)
        self.core.rows(self.keys, self.show, self.slots)
        return self.keys

    def room(self) -> Floats:
        return self._space.take("rows", np.float32, len(self.keys), 1 + self.factors)

    def gradients(self) -> Floats:
        return self._space.take("grads", np.float32, len(self.keys), 1 + self.factors)

    def push(self, grads: Floats) -> Push:
        return Push(self.keys, grads, self.show, np.zeros_like(self.show), self.slots, float(len(self.core)))

    def result(self, batch: Batch, push: Push) -> Result:
        """How well neighbours were told from noise, by a share of the pairs."""
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
        workers = 1 if config.mode.name == "local" else config.cluster.workers
        self.sentences = (known.sentences or 0) / workers
        self.in_place = (
            self.plain
            and config.mode.name == "local"
            and not config.train.deterministic
            and self.table.memory_limit is None
            and self.table.policy.admission.by == "birth"
        )
        self.row_keys = (
            np.concatenate([known.keys("in"), known.keys("out")]) if self.in_place else np.empty(0, np.uint64)
        )
        self.row_slots = np.repeat(np.arange(2, dtype=np.uint16), len(known))
        self._held: Any = None

    @property
    def drawn(self) -> Drawn:
        return cast(Drawn, self.embedding)

    def spare(self) -> Embedding:
        return cast(Embedding, Drawn(self._words, self.settings, self._seed, self.factors))

    def rate(self, batch: Batch) -> float:
        """The learning rate at a batch: from the place where it stands in the run."""
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

    def train_in_place(self, batch: Batch) -> Result | None:
        if not self.in_place:
            return None
        if self._held is None:
            missing = ~self.table.known(self.row_keys)
            self._add(self.row_keys[missing], np.zeros(int(missing.sum()), np.float32), self.row_slots[missing])
            self._held = _core.InPlace(self.table.core, self.row_keys)
        drawn = self.drawn
        drawn.draw(batch)
        drawn.core.train(self._held, self.rate(batch), self.settings.bias, self.shared)
        none = np.empty(0, np.float32)
        push = Push(self.row_keys[:0], none.reshape(0, 1), none, none, self.row_slots[:0], float(len(drawn.core)))
        return drawn.result(batch, push)

    def settle(self) -> None:
        """How often rows were trained goes into the table with whatever comes next: a checkpoint, the end."""
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
    from clickfleet.config import checked

    model = learner.config.model
    return checked(Word2Vec.Config, model.settings, "model", model.name)


def steps(learner: Learner, flats: list[Flat]) -> list[WordStep]:
    """One per trainer thread, on one vocabulary."""
    if [slot.name for slot in learner.schema.slots] != ["in", "out"]:
        raise ConfigError("word2vec reads sentences of words", "set data.format=sentences")
    known, settings = vocabulary(learner.config), settings_of(learner)
    words = _core.Words(known.keys("in"), known.keys("out"), known.keep(settings.sample), known.noise(settings.power))
    made = [WordStep(flat, learner, words, known, len(flats) > 1) for flat in flats]
    if made[0].decays and not made[0].plain:
        raise ConfigError(
            "model.decay lets the rate of plain sgd fall, and table.rule is another one",
            "leave model.decay out, or set table.rule={name: sgd, lr: 0.025, scale: none}",
        )
    if made[0].decays and not known.sentences:
        raise ConfigError(
            f"{learner.config.data.vocabulary} does not say how many sentences there are, so the rate cannot fall over them",
            "add the line `</s> N`, or set model.decay=false",
        )
    return made
