"""The description of the HTTP interface, OpenAPI 3.1: written by hand, kept true by fuzzing the server against it."""

from typing import Any

Json = dict[str, Any]

_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string", "description": "What is wrong, and what to do."}},
}
_VALUE: Json = {
    "description": "Text or an integer for a slot, a number for a dense feature, a list where several are taken.",
    "anyOf": [
        {"type": ["string", "number", "null"]},
        {"type": "array", "items": {"type": ["string", "number"]}},
        {"type": "object", "additionalProperties": {"type": "number"}},
    ],
}
_ROW: Json = {
    "type": "object",
    "additionalProperties": _VALUE,
    "description": "Features by name; absent ones are missing.",
}
_ID: Json = {"type": ["string", "integer"]}
_TENSOR: Json = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "datatype": {"type": "string", "examples": ["BYTES", "FP32", "UINT64"]},
        "data": {"type": "array"},
        "parameters": {"type": "object"},
    },
}


def _body(schema: Json, kind: str = "application/json") -> Json:
    return {"required": True, "content": {kind: {"schema": schema}}}


def _replies(schema: Json, what: str, kind: str = "application/json", *more: int) -> Json:
    """200, and the refusals that every route shares."""
    texts = {
        400: "The request cannot be read or names what the model does not have.",
        401: "A bearer token is wanted.",
        403: "The route is closed.",
        404: "There is no such model or version.",
        405: "Another method is wanted.",
        408: "The body took too long.",
        409: "It cannot be done.",
        411: "The length of the body must be known.",
        413: "The body is too long.",
        415: "The body is packed in an unknown way.",
        503: "BusyError or stopping; Retry-After says when to come again.",
        504: "The deadline passed.",
    }
    known = {400, 401, 405, 503, 504, *more}
    replies: Json = {"200": {"description": what, "content": {kind: {"schema": schema}}}}
    for status in sorted(known):
        replies[str(status)] = {"description": texts[status], "content": {"application/json": {"schema": _ERROR}}}
    return replies


def _get(summary: str, schema: Json, kind: str = "application/json", *more: int) -> Json:
    return {"get": {"summary": summary, "responses": _replies(schema, "OK", kind, *more)}}


def _post(summary: str, body: Json, reply: Json, *more: int, parameters: list[Json] | None = None) -> Json:
    facts: Json = {
        "summary": summary,
        "requestBody": body,
        "responses": _replies(reply, "OK", "application/json", *more),
    }
    if parameters:
        facts["parameters"] = parameters
    return {"post": facts}


def _query(name: str, what: str, schema: Json, required: bool = False) -> Json:
    return {"name": name, "in": "query", "required": required, "description": what, "schema": schema}


def description(name: str) -> Json:
    """The document for a server of the model `name`."""
    scores: Json = {
        "type": "object",
        "required": ["scores", "model", "sequence", "server_ms"],
        "properties": {
            "scores": {"type": "array", "items": {"type": "number"}},
            "outputs": {"type": "object"},
            "model": {"type": "string"},
            "sequence": {"type": "integer"},
            "server_ms": {"type": "number"},
        },
    }
    ranked: Json = {
        "type": "object",
        "required": ["ranked", "candidates", "excluded", "repeated", "sequence"],
        "properties": {
            "ranked": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["id", "score"],
                    "properties": {
                        "id": _ID,
                        "score": {"type": ["number", "null"]},
                        "value": {"type": "number"},
                        "fixed": {"type": "boolean"},
                    },
                },
            }
        },
    }
    rank: Json = {
        "type": "object",
        "required": ["candidates"],
        "additionalProperties": False,
        "properties": {
            "user": _ROW,
            "candidates": {
                "type": "array",
                "items": {**_ROW, "required": ["id"], "properties": {"id": _ID, "value": {"type": "number"}}},
            },
            "top_k": {"type": ["integer", "null"], "minimum": 1},
            "min_score": {"type": ["number", "null"]},
            "exclude": {"type": "array", "items": _ID},
            "fixed": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["position", "id"],
                    "additionalProperties": False,
                    "properties": {"position": {"type": "integer", "minimum": 1}, "id": _ID},
                },
            },
        },
    }
    rows: Json = {
        "type": "object",
        "required": ["rows"],
        "additionalProperties": False,
        "properties": {
            "rows": {"type": "array", "minItems": 1, "items": _ROW},
            "outputs": {"type": "array", "items": {"type": "string"}},
        },
    }
    infer: Json = {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "inputs": {"type": "array", "minItems": 1, "items": _TENSOR},
            "outputs": {
                "type": "array",
                "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
            },
            "parameters": {"type": "object"},
        },
    }
    upload_query = [
        _query("user_id", "Echoed; the key of the results in Redis.", {"type": "string"}, required=True),
        _query("full", "true: one list per batch; else one flat list.", {"type": "string"}),
        _query("re_model", "Where results go.", {"type": "string", "enum": ["json", "redis"]}),
        _query("save", "true: keep the upload.", {"type": "string"}),
        _query("debug", "true: say how long each step took.", {"type": "string"}),
        _query("format", "Format of the lines.", {"type": "string", "default": "slots"}),
        _query("batch_size", "Rows per batch.", {"type": "integer", "minimum": 1, "maximum": 100000, "default": 5}),
    ]
    file: Json = {
        "type": "object",
        "required": ["file"],
        "properties": {"file": {"type": "string", "format": "binary"}},
    }
    anything: Json = {"type": "object"}
    explained: Json = {"type": "object", "required": ["score", "contributions", "sequence"]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "clickfleet", "version": "1", "description": f"Scores of the model {name}."},
        "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "paths": {
            "/v1/predict": _post("Score rows of named features", _body(rows), scores, 413),
            "/v1/rank": _post("Rank candidates for one user", _body(rank), ranked, 413),
            "/v1/explain": _post("What each feature of a row contributes", _body(rows), explained, 413),
            f"/v2/models/{name}/infer": _post("Open Inference Protocol v2", _body(infer), anything, 404, 413),
            "/v1/model": _get("What is served: sequence, age, lag, inputs", anything),
            "/v1/stats": _get("Latency and throughput of the last seconds", anything),
            "/v2": _get("The server, in the protocol's words", anything),
            f"/v2/models/{name}": _get("The model, in the protocol's words", anything, "application/json", 404),
            "/v2/health/live": _get("Whether the process answers", anything),
            "/v2/health/ready": _get("Whether requests are welcome", anything),
            "/health": _get("Whether the process answers", anything),
            "/ready": _get("Whether requests are welcome", anything),
            "/metrics": _get("Counters for Prometheus", {"type": "string"}, "text/plain"),
            "/upload": _post(
                "Score a file of text lines",
                _body(file, "multipart/form-data"),
                anything,
                411,
                413,
                parameters=upload_query,
            ),
            "/rec/prediction": _post(
                "Score by feed and fetch",
                _body(
                    {
                        "type": "object",
                        "required": ["feed", "fetch"],
                        "properties": {
                            "feed": {"type": "array", "items": anything},
                            "fetch": {"type": "array", "items": {"type": "string"}},
                        },
                    }
                ),
                anything,
                411,
                413,
            ),
            "/v1/inspect": _post(
                "Every step from a line to its score",
                _body({"type": "string"}, "text/plain"),
                anything,
                411,
                413,
                parameters=[_query("format", "Format of the lines.", {"type": "string", "default": "slots"})],
            ),
            "/admin/rollback": _post(
                "Go back to a sequence and stay there",
                _body(
                    {
                        "type": "object",
                        "required": ["sequence"],
                        "properties": {"sequence": {"type": "integer", "minimum": 0}},
                    }
                ),
                anything,
                403,
                409,
            ),
            "/admin/follow": {
                "post": {
                    "summary": "Follow the log again",
                    "responses": _replies(anything, "OK", "application/json", 403, 409),
                }
            },
        },
        "security": [{}, {"bearer": []}],
    }
