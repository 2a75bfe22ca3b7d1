"""One user, many candidates -> a ranked list."""

from typing import Any

import msgspec
import numpy as np
import orjson

from clickfleet.batch import Batch, Floats
from clickfleet.errors import ServeError
from clickfleet.serve.fields import Fields, overlay
from clickfleet.serve.people import decode
from clickfleet.serve.predictor import Outputs, Version


class Fixed(msgspec.Struct, forbid_unknown_fields=True):
    """An item that is shown at a certain place whatever its score."""

    position: int
    id: str | int


class Rank(msgspec.Struct, forbid_unknown_fields=True):
    candidates: list[dict[str, Any]]
    user: dict[str, Any] = {}
    top_k: int | None = None
    min_score: float | None = None
    exclude: list[str | int] = []
    fixed: list[Fixed] = []


MOST_VALUE = 1e300
MOST_ID = 1024
"""Characters of an id."""

_rank = msgspec.json.Decoder(Rank)


def read_rank(body: bytes) -> Rank:
    found: Rank = decode(_rank, body, '{"user": {…}, "candidates": [{"id": …, "feature": value, …}, …], "top_k": 10}')
    return found


def _is_id(item: Any) -> bool:
    if isinstance(item, str):
        return len(item) <= MOST_ID
    return isinstance(item, int) and not isinstance(item, bool) and -(1 << 63) <= item < 1 << 64


class Ranking:
    """One ranking request: candidates without those excluded and repeated, as rows to score, then in order."""

    def __init__(self, request: Rank, version: Version, max_candidates: int) -> None:
        self.request = request
        self.total = len(request.candidates)
        if self.total > max_candidates:
            raise ServeError(f"{self.total} candidates are more than this server takes at once ({max_candidates})")
        if request.top_k is not None and request.top_k < 1:
            raise ServeError("top_k must be at least 1")
        seen = {str(item) for item in request.exclude}
        self.excluded = self.repeated = 0
        self.ids: list[str | int] = []
        values, rows = [], []
        shown = {str(item) for item in request.exclude}
        for place, candidate in enumerate(request.candidates):
            features = dict(candidate)
            item = features.pop("id", None)
            if not _is_id(item):
                raise ServeError(f"candidate {place}: needs an id, a text or an integer of 64 bits")
            value = features.pop("value", 1.0)
            if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= MOST_VALUE:
                raise ServeError(f"candidate {item!r}: its value must be a number")
            if str(item) in seen:
                self.excluded += str(item) in shown
                self.repeated += str(item) not in shown
                continue
            seen.add(str(item))
            self.ids.append(item)
            values.append(float(value))
            rows.append(features)
        self.values = np.array(values, np.float64)
        self._fixed = self._check_fixed({str(item) for item in self.ids})
        self.batch = self._batch(version.fields, rows) if rows else None
        if "score" not in version.outputs:
            raise ServeError("this artifact has no output 'score' to rank by", f"outputs: {', '.join(version.outputs)}")

    def _check_fixed(self, known: set[str]) -> dict[int, str]:
        fixed: dict[int, str] = {}
        for item in self.request.fixed:
            if item.position < 1:
                raise ServeError("positions count from 1")
            if not _is_id(item.id):
                raise ServeError("an item is fixed by an id, a text or an integer of 64 bits")
            if item.position in fixed:
                raise ServeError(f"two items are fixed at position {item.position}")
            fixed[item.position] = str(item.id)
        if len(set(fixed.values())) < len(fixed):
            raise ServeError("an item is fixed at two positions")
        return fixed

    def _batch(self, fields: Fields, rows: list[dict[str, Any]]) -> Batch:
        """The user's features stand once in the request: they are transformed once and repeated as keys."""
        user = self.request.user
        given = set().union(*rows) if rows else set()
        both = given & set(user)
        if both:
            raise ServeError(f"{sorted(both)[0]!r} is given for the user and for candidates", "give it once")
        try:
            candidates = fields.rows(rows)
        except ServeError as error:
            raise ServeError(f"candidates: {error}") from None
        if not user:
            return candidates
        return overlay(fields, fields.rows([user]), candidates, set(user))

    def reply(self, outputs: Outputs | None, version: Version, took: float) -> bytes:
        request = self.request
        scores: Floats = np.empty(0, np.float32) if outputs is None else outputs["score"]
        worth = scores.astype(np.float64) * self.values
        order = np.argsort(-worth, kind="stable").tolist()
        if request.min_score is not None:
            order = [i for i in order if scores[i] >= request.min_score]
        ranked = [
            {
                "id": self.ids[i],
                "score": float(scores[i]),
                **({"value": float(self.values[i])} if self.values[i] != 1.0 else {}),
            }
            for i in order
        ]
        ranked = self._place_fixed(ranked, scores)
        if request.top_k is not None:
            ranked = ranked[: request.top_k]
        return orjson.dumps(
            {
                "ranked": ranked,
                "candidates": self.total,
                "excluded": self.excluded,
                "repeated": self.repeated,
                "model": version.identity.name,
                "sequence": version.identity.sequence,
                "server_ms": round(1e3 * took, 3),
            }
        )

    def _place_fixed(self, ranked: list[dict[str, Any]], scores: Floats) -> list[dict[str, Any]]:
        if not self._fixed:
            return ranked
        score_of = {str(item): float(score) for item, score in zip(self.ids, scores, strict=True)}
        given = {str(item.id): item.id for item in self.request.fixed}
        rest = iter([item for item in ranked if str(item["id"]) not in given])
        placed: list[dict[str, Any]] = []
        waiting = dict(sorted(self._fixed.items()))
        while True:
            position = len(placed) + 1
            if position in waiting:
                name = waiting.pop(position)
                placed.append({"id": given[name], "score": score_of.get(name), "fixed": True})
                continue
            item = next(rest, None)
            if item is None:
                break
            placed.append(item)
        return placed + [{"id": given[name], "score": score_of.get(name), "fixed": True} for name in waiting.values()]
