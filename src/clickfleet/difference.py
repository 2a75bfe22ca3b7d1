"""What differs between two files of one length, in few bytes: the weights of a network before and after some training.

Bytes are XORed and put in four planes, as the first bytes of floats that moved a little are mostly equal, and compressed by zstd.

>>> old, new = bytes(4000), bytes(3999) + b"x"
>>> len(make(new, old)) < 100, apply(make(new, old), old, Path("dense.xor")) == new
(True, True)
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clickfleet.errors import CheckpointError

Bytes = NDArray[np.uint8]


def make(new: bytes, old: bytes) -> bytes:
    """How `new` differs from `old`, which has the same length."""
    planes = np.ascontiguousarray((_padded(new) ^ _padded(old)).reshape(-1, 4).T)
    packed: bytes = pa.compress(planes.tobytes(), codec="zstd", asbytes=True)
    return packed


def apply(difference: bytes, old: bytes, path: Path) -> bytes:
    """The new file; `path` is where the difference comes from, for errors."""
    before = _padded(old)
    try:
        raw = pa.decompress(difference, decompressed_size=len(before), codec="zstd", asbytes=True)
        planes = np.frombuffer(raw, np.uint8).reshape(4, -1)
        return (np.ascontiguousarray(planes.T).reshape(-1) ^ before).tobytes()[: len(old)]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is broken: {error}") from error


def _padded(content: bytes) -> Bytes:
    return np.frombuffer(content + bytes(-len(content) % 4), np.uint8)
