"""The teacher of a shop: a click depends on whether the category of the item is among the past events of the visitor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from clickfleet.data.batch import Floats
from clickfleet.data.logs.teacher import BLOCK, CVR, LABELS, Category, Drawn, bias_for, mix32, sigmoid, with_buys, zipf
from clickfleet.data.schema import Dense, History, Schema, Slot, Transform

SHOWN = 4
"""Items shown on a visit. Their rows are consecutive and have the same history."""
INTERESTS = 4
"""Categories that a visitor looks for. They are drawn anew for every visit, so only the history tells them."""
MAX_EVENTS = 50
FOCUS, TARGETED = 0.4, 0.35
"""Fraction of the past events, and of the items shown, that are of a category the visitor looks for."""
CTR = 0.2
USERS, ITEMS, CATEGORIES = 5_000, 1_000, 40

USER = Category(USERS, 1.05, 100.0, 0, 0.0)
CATEGORY = Category(CATEGORIES, 1.05, 60.0, 0, 0.0)
_IN_CATEGORY = Category(ITEMS // CATEGORIES, 1.1, 4.0, 0, 0.0)  # items of one category
_SLOTS = {"user": 0.3, "item": 0.5, "category": 0.3, "city": 0.3, "device": 0.2, "hour": 0.2}
"""Standard deviations of the linear effects."""
_INTEREST, _PRICE = 4.0, 0.3
_BUY_INTEREST, _BUY_APPEAL, _BUY_OWN, _BUY_PRICE = 1.5, -0.8, 0.6, -0.6
"""What counts after a click: the interest, what led to the click (items that are clicked much sell little), own effects, the price."""
_PATTERNS = 4096
_ROWS, _SCALE, EFFECTS, BUY = 11, 12, 13, 14  # purposes of random generators


@dataclass(frozen=True)
class Visits:
    """The features of `BLOCK` rows."""

    slots: dict[str, NDArray[np.int32]]  # [B] each
    price: Floats  # [B]
    idle_hours: Floats  # [B], NaN without events
    starts: NDArray[np.int32]  # [visits + 1]: the events of each visit
    events: dict[str, NDArray[np.int32]]  # item and category of all events
    matches: NDArray[np.int64]  # [B]: events of the category of the row's item


@dataclass(frozen=True)
class InterestTeacher:
    """The true model of one seed on one day. `drift` is the fraction of items, and of all effects, replaced per day.

    >>> drawn = InterestTeacher(seed=7).rows(stream=0, block=0, labels=2)
    >>> drawn.columns.schema.names[:3], drawn.labels.shape
    (['user', 'item', 'category'], (2, 16384))
    """

    ctr: ClassVar[float] = CTR
    in_category: ClassVar[Category] = _IN_CATEGORY
    seed: int
    day: int = 0
    drift: float = 0.0

    def schema(self, labels: int = 1) -> Schema:
        return Schema(
            (Dense("price", Transform("log1p")), Dense("idle_hours", Transform("log1p"))),
            tuple(Slot(name) for name in _SLOTS),
            group="user",
            histories=(History("clicked", ("item", "category"), max=MAX_EVENTS),),
            labels=LABELS[:labels],
        )

    def rows(self, stream: int, block: int, labels: int = 1) -> Drawn:
        """Return `BLOCK` rows with the first `labels` of `LABELS`."""
        rng = self._rng(_ROWS, self.day, stream, block)
        visits = self._draw(rng)
        probability = sigmoid(self._bias + self._logit(visits))
        clicks = (rng.random(BLOCK, dtype=np.float32) < probability).astype(np.int8)
        drawn = Drawn(_columns(visits), clicks[None], probability[None])
        if labels == 1:
            return drawn
        return with_buys(drawn, self._buy_bias + self._buy_logit(visits), self._rng(BUY, self.day, stream, block))

    def prepare(self) -> None:
        """Draw and scale the effects now instead of in the first `rows`."""
        _ = self._bias, self._buy_bias

    def _rng(self, *purpose: int) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence([self.seed, *purpose])))

    def _draw(self, rng: np.random.Generator) -> Visits:
        visits = BLOCK // SHOWN
        interests = zipf(CATEGORY, rng.random((visits, INTERESTS)))
        lengths = np.minimum(np.exp(rng.normal(2.7, 0.9, visits)), MAX_EVENTS).astype(np.int64)
        lengths[rng.random(visits) < 0.03] = 0  # new users
        of_event = np.repeat(np.arange(visits), lengths)
        past = self._items(rng, interests, of_event, FOCUS)
        of_row = np.repeat(np.arange(visits), SHOWN)
        shown = self._items(rng, interests, of_row, TARGETED)
        seen = np.bincount(of_event * CATEGORIES + past % CATEGORIES, minlength=visits * CATEGORIES)
        hour = np.repeat(rng.integers(0, 24, visits, dtype=np.int32), SHOWN)
        user = np.repeat(zipf(USER, rng.random(visits)).astype(np.int32), SHOWN)
        idle = np.repeat(np.where(lengths, np.floor(np.exp(rng.normal(2.0, 1.5, visits))), np.nan), SHOWN)
        slots = {
            "user": user,
            "item": shown,
            "category": shown % CATEGORIES,
            "city": (mix32(user.astype(np.uint32)) % np.uint32(60)).astype(np.int32),
            "device": np.repeat(rng.choice(4, visits, p=[0.55, 0.25, 0.15, 0.05]).astype(np.int32), SHOWN),
            "hour": hour,
        }
        return Visits(
            slots,
            price_of(shown),
            idle,
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            {"item": past, "category": past % CATEGORIES},
            seen[of_row * CATEGORIES + shown % CATEGORIES],
        )

    def _items(
        self, rng: np.random.Generator, interests: NDArray[np.uint32], visit: NDArray[np.int64], focus: float
    ) -> NDArray[np.int32]:
        """Draw an item per entry of `visit`, with the probability `focus` of a category the visitor looks for."""
        n = len(visit)
        wanted = interests[visit, rng.integers(0, INTERESTS, n)]
        category = np.where(rng.random(n, dtype=np.float32) < focus, wanted, zipf(CATEGORY, rng.random(n)))
        return self._of_category(rng, category)

    def _of_category(self, rng: np.random.Generator, category: NDArray[np.uint32]) -> NDArray[np.int32]:
        """Draw an item of each category."""
        kind = self.in_category
        rank = zipf(kind, rng.random(len(category))) * np.uint32(CATEGORIES) + category
        if age := self.day * self.drift:  # each item is replaced at its own moment of a generation
            phase = mix32(rank + np.uint32(self.seed & 0xFFFF)).astype(np.float32) / np.float32(2**32)
            rank = rank + (np.float32(age) + phase).astype(np.uint32) * np.uint32(kind.size * CATEGORIES)
        return rank.astype(np.int32)

    def _logit(self, visits: Visits) -> Floats:
        return np.asarray(
            self._linear(visits, _SLOTS, EFFECTS)
            + np.float32(_PRICE) * standard(visits.price)
            + np.float32(_INTEREST) * _interest(visits)
        )

    def _buy_logit(self, visits: Visits) -> Floats:
        return np.asarray(
            np.float32(_BUY_APPEAL) * self._linear(visits, _SLOTS, EFFECTS)
            + np.float32(_BUY_OWN) * self._linear(visits, _SLOTS, BUY)
            + np.float32(_BUY_PRICE) * standard(visits.price)
            + np.float32(_BUY_INTEREST) * _interest(visits)
        )

    def _linear(self, visits: Visits, deviations: Mapping[str, float], purpose: int) -> Floats:
        """Return the sum of the linear effects of some slots, each with its standard deviation."""
        total = np.zeros(BLOCK, np.float32)
        for i, name in enumerate(_SLOTS):
            if not (deviation := deviations.get(name)):
                continue
            pattern = mix32(visits.slots[name].astype(np.uint32) + np.uint32(0x9E3779B9)) & np.uint32(_PATTERNS - 1)
            total += np.float32(deviation) * self._effects[purpose][i].take(pattern)
        return total

    @cached_property
    def _effects(self) -> dict[int, Floats]:
        """Unit normal effects, of the click and of the purchase, that turn day by day from one draw to the next."""
        generation, share = divmod(self.day * self.drift, 1.0)
        turn = np.array([np.cos(share * np.pi / 2), np.sin(share * np.pi / 2)], np.float32)
        shape = (len(_SLOTS), _PATTERNS)
        return {
            purpose: sum(
                turn[i] * self._rng(purpose, EFFECTS, int(generation) + i).standard_normal(shape, dtype=np.float32)
                for i in (0, 1)
            )
            for purpose in (EFFECTS, BUY)
        }

    @cached_property
    def _sample(self) -> Visits:
        """Rows used only to find the biases."""
        return self._draw(self._rng(_SCALE, self.day))

    @cached_property
    def _bias(self) -> np.float32:
        return bias_for(self._logit(self._sample), self.ctr)

    @cached_property
    def _buy_bias(self) -> np.float32:
        clicks = sigmoid(self._bias + self._logit(self._sample))
        return bias_for(self._buy_logit(self._sample), CVR, clicks)


def _interest(visits: Visits) -> Floats:
    """Return 0 if no past event is of the category of the row's item, ½ for one such event, and up to 1 for many."""
    return np.asarray(1 - np.exp2(-visits.matches.astype(np.float32)))


def price_of(items: NDArray[np.int32]) -> Floats:
    uniform = mix32(items.astype(np.uint32) ^ np.uint32(0xC0FFEE)).astype(np.float32) / np.float32(2**32)
    return np.asarray(np.round(5 * np.exp(4 * uniform), 2), np.float32)


def standard(price: Floats) -> Floats:
    return np.asarray(np.log(price / 5) / 2 - 1, np.float32)


def _columns(visits: Visits) -> Any:
    import pyarrow as pa

    named: dict[str, Any] = {name: pa.array(values) for name, values in visits.slots.items()}
    named["price"] = pa.array(visits.price.astype(np.float64).round(2))
    idle = np.isnan(visits.idle_hours)
    named["idle_hours"] = pa.array(np.where(idle, 0, visits.idle_hours).astype(np.int32), mask=idle)
    of_row = pa.array(np.repeat(np.arange(BLOCK // SHOWN, dtype=np.int32), SHOWN))
    for name, values in visits.events.items():
        named[f"clicked_{name}"] = pa.ListArray.from_arrays(pa.array(visits.starts), pa.array(values)).take(of_row)
    return pa.RecordBatch.from_pydict(named)
