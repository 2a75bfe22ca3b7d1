"""Plain JSON for people: rows of named features -> scores, one row -> what each feature contributes."""

from typing import Any

import msgspec
import numpy as np
import orjson

from clickfleet.batch import Batch
from clickfleet.errors import ServeError
from clickfleet.serve.batching import Scored
from clickfleet.serve.fields import check_keys, pick
from clickfleet.serve.predictor import Version


class Predict(msgspec.Struct, forbid_unknown_fields=True):
    rows: list[Any]
    outputs: list[str] = []


_predict = msgspec.json.Decoder(Predict)


def decode(decoder: Any, body: bytes, shape: str) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ServeError(f"the request cannot be read: {error}", f"send {shape}") from None


def read_predict(body: bytes) -> Predict:
    found: Predict = decode(_predict, body, '{"rows": [{"feature": value, …}, …]}')
    return found


def predict_reply(request: Predict, done: Scored, took: float) -> bytes:
    outputs = pick(request.outputs, done.version.outputs, "output") if request.outputs else ()
    facts: dict[str, Any] = {}
    if "score" in done.outputs:
        facts["scores"] = done.outputs["score"]
    for name in outputs:
        facts.setdefault("outputs", {})[name] = done.outputs[name]
    facts |= {
        "model": done.version.identity.name,
        "sequence": done.version.identity.sequence,
        "server_ms": round(1e3 * took, 3),
    }
    return orjson.dumps(facts, option=orjson.OPT_SERIALIZE_NUMPY)


def left_out(version: Version, row: Any) -> tuple[list[str], Batch]:
    """The row as it is, then once without each feature it has: the difference is what the feature contributes."""
    if not isinstance(row, dict):
        raise ServeError("row 0: is not a mapping from features to values")
    names = [name for name in version.fields.names if row.get(name) not in (None, "", [])]
    values = sum(len(value) for value in row.values() if isinstance(value, list | dict))
    check_keys(values * len(names), len(version.schema.slots) * (1 + len(names)))
    return names, version.fields.rows([row, *({k: v for k, v in row.items() if k != name} for name in names)])


def explain_reply(names: list[str], done: Scored) -> bytes:
    if "score" not in done.outputs:
        raise ServeError("this artifact has no output 'score'")
    scores = done.outputs["score"].astype(np.float64)
    shares = sorted(zip(names, (scores[0] - scores[1:]).tolist(), strict=True), key=lambda item: -abs(item[1]))
    return orjson.dumps(
        {
            "score": float(scores[0]),
            "contributions": [{"feature": name, "contribution": share} for name, share in shares],
            "sequence": done.version.identity.sequence,
        }
    )
