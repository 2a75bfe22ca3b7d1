"""The plain JSON routes: scores of rows of named features, rankings, and the contribution of each feature."""

from typing import Any, NotRequired, TypedDict, TypeVar

import msgspec
import numpy as np
import orjson

from clickfleet.data.batch import Batch, Floats
from clickfleet.errors import ServeError
from clickfleet.serve.batching import ScoreResult
from clickfleet.serve.features import Fields, check_keys, overlay, pick
from clickfleet.serve.predictor import Outputs, Version

Row = dict[str, Any]
"""Features by name."""


class Predict(msgspec.Struct, forbid_unknown_fields=True):
    rows: list[Any]
    outputs: list[str] = []


_predict = msgspec.json.Decoder(Predict)
_Request = TypeVar("_Request")


def _decode(decoder: msgspec.json.Decoder[_Request], body: bytes, shape: str) -> _Request:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ServeError(f"cannot parse the request: {error}", f"send {shape}") from None


def read_predict(body: bytes) -> Predict:
    return _decode(_predict, body, '{"rows": [{"feature": value, …}, …]}')


def predict_reply(request: Predict, done: ScoreResult, seconds: float) -> bytes:
    outputs = pick(request.outputs, done.version.outputs, "output") if request.outputs else ()
    facts: dict[str, object] = {}
    if "score" in done.outputs:
        facts["scores"] = done.outputs["score"]
    if outputs:
        facts["outputs"] = {name: done.outputs[name] for name in outputs}
    facts |= {
        "model": done.version.identity.name,
        "sequence": done.version.identity.sequence,
        "server_ms": round(1e3 * seconds, 3),
    }
    return orjson.dumps(facts, option=orjson.OPT_SERIALIZE_NUMPY)


class Ablations:
    """An explain request: each row, followed by the same row without each of its features.

    The difference of the two scores is the contribution of the feature. `batch` holds all of them, and the row without features.
    """

    def __init__(self, rows: list[Any], version: Version, max_rows: int) -> None:
        self.rows: list[Row] = []
        self.names: list[list[str]] = []
        values = 0
        for place, row in enumerate(rows):
            if not isinstance(row, dict):
                raise ServeError(f"row {place}: expected a mapping from features to values")
            names = [name for name in version.fields.names if row.get(name) not in (None, "", [])]
            values += len(names) * sum(len(value) for value in row.values() if isinstance(value, list | dict))
            self.rows.append(row)
            self.names.append(names)
        if not rows:
            raise ServeError("the request has no rows", 'send {"rows": [{"feature": value, …}]}')
        size = 1 + sum(1 + len(names) for names in self.names)
        if len(rows) > 1 and size > max_rows:
            raise ServeError(
                f"explaining {len(rows)} rows takes {size:,} scores, more than the server's limit of {max_rows:,} rows",
                f"send at most {max(1, (max_rows - 1) // (1 + len(version.fields.names))):,} rows at once",
            )
        check_keys(values, len(version.schema.slots) * size)
        self.batch = version.fields.rows([each for i in range(len(rows)) for each in self._without_each(i)] + [{}])

    def _without_each(self, i: int) -> list[Row]:
        row = self.rows[i]
        return [row, *({k: v for k, v in row.items() if k != name} for name in self.names[i])]

    def reply(self, done: ScoreResult) -> bytes:
        if "score" not in done.outputs:
            raise ServeError("the model has no output 'score'")
        scores = done.outputs["score"].astype(np.float64)
        with np.errstate(divide="ignore"):
            logits = np.log(scores) - np.log1p(-scores)
        explanations, at = [], 0
        for row, names in zip(self.rows, self.names, strict=True):
            parts: list[dict[str, Any]] = [
                {
                    "feature": name,
                    "value": row[name],
                    "contribution": float(scores[at] - scores[at + i]),
                    "logit": float(logits[at] - logits[at + i]),
                }
                for i, name in enumerate(names, 1)
            ]
            parts.sort(key=lambda part: -abs(part["contribution"]))
            explanations.append({"score": float(scores[at]), "logit": float(logits[at]), "contributions": parts})
            at += 1 + len(names)
        facts: dict[str, object] = dict(explanations[0]) if len(explanations) == 1 else {}
        facts |= {
            "explanations": explanations,
            "score_of_nothing": float(scores[-1]),
            "model": done.version.identity.name,
            "sequence": done.version.identity.sequence,
        }
        return orjson.dumps(facts)


class Fixed(msgspec.Struct, forbid_unknown_fields=True):
    """An item with a fixed position, whatever its score."""

    position: int
    id: str | int


class Rank(msgspec.Struct, forbid_unknown_fields=True):
    candidates: list[Row]
    user: Row = {}
    top_k: int | None = None
    min_score: float | None = None
    exclude: list[str | int] = []
    fixed: list[Fixed] = []


MAX_VALUE = 1e300
MAX_ID = 1024
"""Maximum characters of an id."""


class RankedItem(TypedDict):
    """An item of the reply."""

    id: str | int
    score: float | None
    value: NotRequired[float]
    fixed: NotRequired[bool]


_rank = msgspec.json.Decoder(Rank)


def read_rank(body: bytes) -> Rank:
    return _decode(_rank, body, '{"user": {…}, "candidates": [{"id": …, "feature": value, …}, …], "top_k": 10}')


def _is_id(item: Any) -> bool:
    if isinstance(item, str):
        return len(item) <= MAX_ID
    return isinstance(item, int) and not isinstance(item, bool) and -(1 << 63) <= item < 1 << 64


class Ranking:
    """A ranking request: drops excluded and repeated candidates, builds the rows to score, and orders the result."""

    def __init__(self, request: Rank, version: Version, max_candidates: int) -> None:
        self.request = request
        self.total = len(request.candidates)
        if self.total > max_candidates:
            raise ServeError(f"{self.total} candidates exceed the server's limit of {max_candidates}")
        if request.top_k is not None and request.top_k < 1:
            raise ServeError("top_k must be at least 1")
        excluded = {str(item) for item in request.exclude}
        seen = set(excluded)
        self.excluded = self.repeated = 0
        self.ids: list[str | int] = []
        values, rows = [], []
        for place, candidate in enumerate(request.candidates):
            features = dict(candidate)
            item = features.pop("id", None)
            if not _is_id(item):
                raise ServeError(f"candidate {place}: the id must be text or a 64-bit integer")
            value = features.pop("value", 1.0)
            if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= MAX_VALUE:
                raise ServeError(f"candidate {item!r}: the value must be a number")
            if str(item) in seen:
                self.excluded += str(item) in excluded
                self.repeated += str(item) not in excluded
                continue
            seen.add(str(item))
            self.ids.append(item)
            values.append(float(value))
            rows.append(features)
        self.values = np.array(values, np.float64)
        self._fixed = self._check_fixed()
        self.batch = self._batch(version.fields, rows) if rows else None
        if "score" not in version.outputs:
            raise ServeError("the model has no output 'score' to rank by", f"outputs: {', '.join(version.outputs)}")

    def _check_fixed(self) -> dict[int, str]:
        fixed: dict[int, str] = {}
        for item in self.request.fixed:
            if item.position < 1:
                raise ServeError(f"invalid position {item.position} in fixed", "positions start at 1")
            if not _is_id(item.id):
                raise ServeError("the id of a fixed item must be text or a 64-bit integer")
            if item.position in fixed:
                raise ServeError(f"two items are fixed at position {item.position}")
            fixed[item.position] = str(item.id)
        if len(set(fixed.values())) < len(fixed):
            raise ServeError("an item is fixed at two positions")
        return fixed

    def _batch(self, fields: Fields, rows: list[Row]) -> Batch:
        """Transform the user's features once, and repeat the resulting keys for every candidate."""
        user = self.request.user
        names = set().union(*rows) if rows else set()
        both = names & set(user)
        if both:
            raise ServeError(f"{sorted(both)[0]!r} is given both for the user and for candidates", "give it once")
        try:
            candidates = fields.rows(rows)
        except ServeError as error:
            raise ServeError(f"candidates: {error}") from None
        if not user:
            return candidates
        return overlay(fields, fields.rows([user]), candidates, set(user))

    def reply(self, outputs: Outputs | None, version: Version, seconds: float) -> bytes:
        request = self.request
        scores: Floats = np.empty(0, np.float32) if outputs is None else outputs["score"]
        weighted = scores.astype(np.float64) * self.values
        order = np.argsort(-weighted, kind="stable").tolist()
        if request.min_score is not None:
            order = [i for i in order if scores[i] >= request.min_score]
        ranked = self._place_fixed([self._item(i, scores) for i in order], scores)
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
                "server_ms": round(1e3 * seconds, 3),
            }
        )

    def _item(self, i: int, scores: Floats) -> RankedItem:
        item: RankedItem = {"id": self.ids[i], "score": float(scores[i])}
        if self.values[i] != 1.0:
            item["value"] = float(self.values[i])
        return item

    def _place_fixed(self, ranked: list[RankedItem], scores: Floats) -> list[RankedItem]:
        if not self._fixed:
            return ranked
        score_of = {str(item): float(score) for item, score in zip(self.ids, scores, strict=True)}
        ids = {str(item.id): item.id for item in self.request.fixed}
        rest = iter([item for item in ranked if str(item["id"]) not in ids])
        placed: list[RankedItem] = []
        waiting = dict(sorted(self._fixed.items()))
        while True:
            position = len(placed) + 1
            if position in waiting:
                name = waiting.pop(position)
                placed.append({"id": ids[name], "score": score_of.get(name), "fixed": True})
                continue
            item = next(rest, None)
            if item is None:
                break
            placed.append(item)
        tail: list[RankedItem] = [
            {"id": ids[name], "score": score_of.get(name), "fixed": True} for name in waiting.values()
        ]
        return placed + tail
