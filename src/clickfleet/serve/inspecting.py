"""Every step between a line and its score, as this server does it: what `clickfleet parity` compares."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
import xxhash

from clickfleet import engine
from clickfleet.errors import ServeError
from clickfleet.serve.predictor import Version
from clickfleet.serve.uploads import parse

MOST_ROWS, MOST_KEYS = 16, 1 << 16


def inspect(version: Version, lines: bytes, query: Mapping[str, str]) -> bytes:
    """Keys, rows, pooled inputs and outputs of a few lines, and checksums of the network's weights."""
    batch = parse(lines, query.get("format") or "slots", version)
    if len(batch) > MOST_ROWS:
        raise ServeError(f"{len(batch)} rows are too many to look at ({MOST_ROWS})")
    if len(batch.keys) > MOST_KEYS:
        raise ServeError(f"{len(batch.keys)} keys are too many to look at ({MOST_KEYS})")
    dense, first, factors = version.inputs(batch)
    return orjson.dumps(
        {
            "sequence": version.identity.sequence,
            "dense": dense,
            "keys": batch.keys,
            "offsets": batch.offsets,
            "rows": version.read(batch.keys),
            "first": first,
            "factors": factors,
            "outputs": {name: np.ascontiguousarray(values) for name, values in version.run(batch).items()},
            "weights": weights(version.entry.graph()),
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


def weights(graph: bytes) -> dict[str, str]:
    """A checksum of every parameter by its name in the model."""
    from onnx import numpy_helper

    return {
        tensor.name.removeprefix("model."): checksum(numpy_helper.to_array(tensor))
        for tensor in engine.parse(graph).graph.initializer
        if tensor.name.startswith("model.")
    }


def checksum(values: Any) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(values).tobytes())
