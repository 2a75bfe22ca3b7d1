"""The plain JSON routes: scores of rows of named features, rankings, and the contribution of each feature."""

from typing import Any, NotRequired, TypedDict, TypeVar

import msgspec
import numpy as np
import orjson

from clickfleet.data.events import MAX_ID, id_of
from clickfleet.data.schema import Label
from clickfleet.errors import ServeError
from clickfleet.serve import expression
from clickfleet.serve.batching import ScoreResult
from clickfleet.serve.features import Fields, Rows, check_keys, features_of, pick, share
from clickfleet.serve.predictor import Outputs, Version

Row = dict[str, Any]
"""Features by name."""
PER_TASK = ("score", "logit")
"""Outputs with a value for every label."""


class Predict(msgspec.Struct, forbid_unknown_fields=True):
    rows: list[Any]
    outputs: list[str] = []
    request: str | int | None = None
    items: list[str | int] | None = None


_predict = msgspec.json.Decoder(Predict)
_Request = TypeVar("_Request")


def _decode(decoder: msgspec.json.Decoder[_Request], body: bytes, shape: str) -> _Request:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ServeError(f"cannot parse the request: {error}", f"send {shape}") from None


def read_predict(body: bytes) -> Predict:
    return _decode(_predict, body, '{"rows": [{"feature": value, …}, …]}')


def item_ids(request: Predict) -> list[str] | None:
    """Return the ids of the rows as text, each once; None if the request has none."""
    if request.items is None:
        return None
    if len(request.items) != len(request.rows):
        raise ServeError(f"items has {len(request.items)} ids for {len(request.rows)} rows")
    try:
        ids = [id_of(item, "id of an item") for item in request.items]
    except ValueError as error:
        raise ServeError(str(error)) from None
    if len(set(ids)) < len(ids):
        raise ServeError("an id appears twice in items", "feedback could not tell the two rows apart")
    return ids


def predict_reply(request: Predict, done: ScoreResult, seconds: float, request_id: str = "") -> bytes:
    version = done.version
    outputs = pick(request.outputs, version.output_names, "output") if request.outputs else ()
    facts: dict[str, object] = {}
    if "score" in done.outputs:
        facts["scores"] = version.by_task(done.outputs["score"])
    if outputs:
        facts["outputs"] = {
            name: version.by_task(done.outputs[name]) if name in PER_TASK else version.output(name, done.outputs)
            for name in outputs
        }
    facts |= {
        "model": version.identity.name,
        "sequence": version.identity.sequence,
        "server_ms": round(1e3 * seconds, 3),
    }
    if request_id:
        facts["request"] = request_id
    return orjson.dumps(facts, option=orjson.OPT_SERIALIZE_NUMPY)


class Ablations:
    """An explain request: each row, followed by the same row without each of its features. A history is one feature.

    The difference of the two scores is the contribution of the feature. `batch` holds all of them, and the row without features.
    """

    def __init__(self, rows: list[Any], version: Version, max_rows: int) -> None:
        self.rows: list[Row] = []
        self.features: list[dict[str, tuple[str, ...]]] = []
        """The features of each row, with the inputs that belong to them."""
        known = features_of(version.fields)
        values = 0
        for place, row in enumerate(rows):
            if not isinstance(row, dict):
                raise ServeError(f"row {place}: expected a mapping from features to values")
            present = {name: inputs for name, inputs in known.items() if any(_is_given(row, one) for one in inputs)}
            values += len(present) * sum(len(value) for value in row.values() if isinstance(value, list | dict))
            self.rows.append(row)
            self.features.append(present)
        if not rows:
            raise ServeError("the request has no rows", 'send {"rows": [{"feature": value, …}]}')
        size = 1 + sum(1 + len(present) for present in self.features)
        if len(rows) > 1 and size > max_rows:
            raise ServeError(
                f"explaining {len(rows)} rows takes {size:,} scores, more than the server's limit of {max_rows:,} rows",
                f"send at most {max(1, (max_rows - 1) // (1 + len(known))):,} rows at once",
            )
        check_keys(values, len(version.schema.key_columns) * size)
        self.batch = version.fields.rows([each for i in range(len(rows)) for each in self._without_each(i)] + [{}])

    def _without_each(self, i: int) -> list[Row]:
        row = self.rows[i]
        return [row, *({k: v for k, v in row.items() if k not in inputs} for inputs in self.features[i].values())]

    def reply(self, done: ScoreResult) -> bytes:
        if "score" not in done.outputs:
            raise ServeError("the model has no output 'score'")
        version = done.version
        scores = done.outputs["score"].astype(np.float64).reshape(len(self.batch), -1)
        logits = logits_of(scores, version.schema.tasks)

        def by_task(values: Any) -> Any:
            return (
                float(values[0]) if len(version.tasks) == 1 else dict(zip(version.tasks, values.tolist(), strict=True))
            )

        explanations, at = [], 0
        for row, present in zip(self.rows, self.features, strict=True):
            order = np.argsort(-np.abs(scores[at] - scores[at + 1 : at + 1 + len(present), :])[:, 0], kind="stable")
            names = list(present)
            parts: list[dict[str, Any]] = [
                {
                    "feature": names[i],
                    "value": _value_of(row, present[names[i]]),
                    "contribution": by_task(scores[at] - scores[at + 1 + i]),
                    "logit": by_task(logits[at] - logits[at + 1 + i]),
                }
                for i in order.tolist()
            ]
            explanations.append({"score": by_task(scores[at]), "logit": by_task(logits[at]), "contributions": parts})
            at += 1 + len(present)
        facts: dict[str, object] = dict(explanations[0]) if len(explanations) == 1 else {}
        facts |= {
            "explanations": explanations,
            "score_of_nothing": by_task(scores[-1]),
            "model": version.identity.name,
            "sequence": version.identity.sequence,
        }
        return orjson.dumps(facts)


def _is_given(row: Row, name: str) -> bool:
    return row.get(name) not in (None, "", [])


def _value_of(row: Row, inputs: tuple[str, ...]) -> Any:
    """Return the value of a feature; of a history with several inputs, those of all of them."""
    return row.get(inputs[0]) if len(inputs) == 1 else {name: row.get(name) for name in inputs}


def logits_of(scores: Any, tasks: tuple[Label, ...]) -> Any:
    """Return the logits behind scores [rows, labels]: what the network adds up before the last function."""
    logits = np.empty_like(scores)
    with np.errstate(divide="ignore", invalid="ignore"):
        for i, task in enumerate(tasks):
            column = scores[:, i]
            if task.loss == "log":
                logits[:, i] = np.log(column) - np.log1p(-column)
            else:
                logits[:, i] = np.log(column) if task.loss == "poisson" else column
    return logits


class Fixed(msgspec.Struct, forbid_unknown_fields=True):
    """An item with a fixed position, whatever its score."""

    position: int
    id: str | int


class Rank(msgspec.Struct, forbid_unknown_fields=True):
    candidates: list[Row]
    user: Row = {}
    by: str | None = None
    """What to rank by (default: the score of the first label × value); see `expression`."""
    top_k: int | None = None
    min_score: float | dict[str, float] | None = None
    """The least score, of the first label or of each label that is named."""
    exclude: list[str | int] = []
    fixed: list[Fixed] = []
    request: str | int | None = None


MAX_VALUE = 1e300


class RankedItem(TypedDict):
    """An item of the reply."""

    id: str | int
    score: float | dict[str, float] | None
    """By label if there are several."""
    by: NotRequired[float | None]
    """What the request ranks by; None if it is not finite."""
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
        self.places: list[int] = []
        """Which candidates of the request are scored."""
        self.ranked: list[str] = []
        """Ids in the order of the reply."""
        values, rows = [], []
        for place, candidate in enumerate(request.candidates):
            features = dict(candidate)
            item = features.pop("id", None)
            if item is None:
                raise ServeError(f"candidate {place} has no id", "an id is text or a 64-bit integer")
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
            self.places.append(place)
            values.append(float(value))
            rows.append(features)
        self.values = np.array(values, np.float64)
        self._fixed = self._check_fixed()
        self._tasks = version.tasks
        self._by = None if request.by is None else expression.parse(request.by, version.tasks, self._others)
        self._least = self._least_scores()
        self.batch = self._batch(version.fields, rows) if rows else None
        if "score" not in version.outputs:
            raise ServeError("the model has no output 'score' to rank by", f"outputs: {', '.join(version.outputs)}")

    @property
    def _others(self) -> tuple[str, ...]:
        """The names in `by` besides those of the labels."""
        return ("value", "score") if len(self._tasks) == 1 else ("value",)

    def _least_scores(self) -> dict[int, float]:
        """Return the least score of each label that has one, by its number."""
        least = self.request.min_score
        if not isinstance(least, dict):
            return {} if least is None else {0: least}
        pick(list(least), self._tasks, "label")
        return {self._tasks.index(name): value for name, value in least.items()}

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

    def _batch(self, fields: Fields, rows: list[Row]) -> Rows:
        """Transform the user's features once. All candidates share the resulting keys."""
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
        return share(fields, fields.rows([user]), candidates, set(user))

    def reply(self, outputs: Outputs | None, version: Version, seconds: float, request_id: str = "") -> bytes:
        request = self.request
        scores = np.empty(0) if outputs is None else outputs["score"].astype(np.float64)
        scores = scores.reshape(len(self.ids), len(self._tasks))
        keys = scores[:, 0] * self.values
        if self._by is not None:
            keys = self._by([self.values, *([scores[:, 0]] if len(self._tasks) == 1 else []), *scores.T])
        order = np.argsort(-keys, kind="stable")
        for task, least in self._least.items():  # compared as float32, so that a score of a reply can be sent
            order = order[scores[order, task] >= np.float64(np.float32(least))]
        if request.top_k is not None:
            order = order[: request.top_k + len(self._fixed)]
        ranked = self._place_fixed([self._item(i, scores, keys) for i in order.tolist()], scores, keys)
        if request.top_k is not None:
            ranked = ranked[: request.top_k]
        self.ranked = [str(item["id"]) for item in ranked]
        return orjson.dumps(
            {
                "ranked": ranked,
                "candidates": self.total,
                "excluded": self.excluded,
                "repeated": self.repeated,
                "model": version.identity.name,
                "sequence": version.identity.sequence,
                "server_ms": round(1e3 * seconds, 3),
                **({"request": request_id} if request_id else {}),
            }
        )

    def _item(self, i: int, scores: Any, keys: Any) -> RankedItem:
        item: RankedItem = {"id": self.ids[i], "score": self._score(scores[i])}
        if self._by is not None:
            item["by"] = float(keys[i])
        if self.values[i] != 1.0:
            item["value"] = float(self.values[i])
        return item

    def _score(self, scores: Any) -> float | dict[str, float]:
        return float(scores[0]) if len(self._tasks) == 1 else dict(zip(self._tasks, scores.tolist(), strict=True))

    def _place_fixed(self, ranked: list[RankedItem], scores: Any, keys: Any) -> list[RankedItem]:
        if not self._fixed:
            return ranked
        place_of = {str(item): i for i, item in enumerate(self.ids)}
        ids = {str(item.id): item.id for item in self.request.fixed}

        def fixed(name: str) -> RankedItem:
            item: RankedItem = {"id": ids[name], "score": None}
            if name in place_of:
                known = self._item(place_of[name], scores, keys)
                item["score"] = known["score"]
                if "by" in known:
                    item["by"] = known["by"]
            return {**item, "fixed": True}

        rest = iter([item for item in ranked if str(item["id"]) not in ids])
        placed: list[RankedItem] = []
        waiting = dict(sorted(self._fixed.items()))
        while True:
            position = len(placed) + 1
            if position in waiting:
                placed.append(fixed(waiting.pop(position)))
                continue
            item = next(rest, None)
            if item is None:
                break
            placed.append(item)
        return placed + [fixed(name) for name in waiting.values()]
