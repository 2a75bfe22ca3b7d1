"""The teacher of purchases: what draws clicks puts buyers off, so rows with a click are not like the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from clickfleet.data.batch import Floats
from clickfleet.data.logs.interests import (
    BUY,
    CATEGORIES,
    CATEGORY,
    EFFECTS,
    USER,
    InterestTeacher,
    Visits,
    price_of,
    standard,
)
from clickfleet.data.logs.teacher import BLOCK, mix32, zipf
from clickfleet.data.schema import Schema

_CLICK = {"item": 1.0, "category": 0.3, "city": 0.2, "device": 0.2, "hour": 0.3}
"""Standard deviations of the linear effects on clicks."""
_BUY_APPEAL, _BUY_PRICE, _BUY_DEVICE = -1.0, -1.5, 0.5
"""What counts after a click: what led to the click, the price, and the device."""


@dataclass(frozen=True)
class PurchaseTeacher(InterestTeacher):
    """The true model of one seed on one day. Rows have the columns of the shop without the past events.

    Clicks are few, and a purchase depends on every effect of the click, with the opposite sign. So clicked rows alone teach little about
    single items; all rows teach how much an item draws clicks, and a few clicks what that means for purchases.

    >>> drawn = PurchaseTeacher(seed=7).rows(stream=0, block=0, labels=2)
    >>> drawn.columns.schema.names[:3], drawn.labels.shape
    (['user', 'item', 'category'], (2, 16384))
    """

    ctr: ClassVar[float] = 0.05

    def schema(self, labels: int = 1) -> Schema:
        return replace(super().schema(labels), histories=())

    def _draw(self, rng: np.random.Generator) -> Visits:
        user = zipf(USER, rng.random(BLOCK)).astype(np.int32)
        item = self._of_category(rng, zipf(CATEGORY, rng.random(BLOCK)))
        slots = {
            "user": user,
            "item": item,
            "category": item % CATEGORIES,
            "city": (mix32(user.astype(np.uint32)) % np.uint32(60)).astype(np.int32),
            "device": rng.choice(4, BLOCK, p=[0.55, 0.25, 0.15, 0.05]).astype(np.int32),
            "hour": rng.integers(0, 24, BLOCK, dtype=np.int32),
        }
        idle = np.floor(np.exp(rng.normal(2.0, 1.5, BLOCK)))
        return Visits(slots, price_of(item), idle, np.zeros(1, np.int32), {}, np.zeros(BLOCK, np.int64))

    def _logit(self, visits: Visits) -> Floats:
        return self._linear(visits, _CLICK, EFFECTS)

    def _buy_logit(self, visits: Visits) -> Floats:
        return np.asarray(
            np.float32(_BUY_APPEAL) * self._logit(visits)
            + np.float32(_BUY_PRICE) * standard(visits.price)
            + self._linear(visits, {"device": _BUY_DEVICE}, BUY)
        )
