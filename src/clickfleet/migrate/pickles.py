"""`.pdparams` and `.pdopt` files: pickles, read by an unpickler that can make arrays, dictionaries and plain values only."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from clickfleet.errors import CheckpointError

MAX_BYTES = 1 << 40
STRUCTURED = "StructuredToParameterName@@"
Arrays = dict[str, np.ndarray[Any, Any]]


class _Array:
    """An array before its content is known: NumPy's own maker would take any shape and any type of elements."""

    def __init__(self) -> None:
        self.value: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, content = state
        if not isinstance(dtype, _Type) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("an array of something else than numbers")
        if not isinstance(shape, tuple) or not all(isinstance(n, int) and 0 <= n < MAX_BYTES for n in shape):
            raise pickle.UnpicklingError("an array of an impossible shape")
        kind = dtype.made()
        size = kind.itemsize
        for n in shape:
            size *= n
        if size != len(content):
            raise pickle.UnpicklingError(f"an array of shape {shape} with {len(content)} bytes")
        self.value = np.frombuffer(content, kind).reshape(shape, order="F" if fortran else "C")


class _Type:
    """A type of numbers before its byte order is known."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.name, self.order = name, "|"

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]

    def made(self) -> np.dtype[Any]:
        if not isinstance(self.name, str) or self.name not in (
            "f2",
            "f4",
            "f8",
            "i1",
            "i2",
            "i4",
            "i8",
            "u1",
            "u2",
            "b1",
        ):
            raise pickle.UnpicklingError(f"an array of type {self.name!r}")
        return np.dtype(self.name).newbyteorder(">" if self.order == ">" else "<")


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _frombuffer(content: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    """How pickles of protocol 5 hold an array."""
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", bytes(content) if isinstance(content, bytearray) else content))
    return array


def _encode(text: Any, encoding: Any) -> bytes:
    """How pickles of protocol 2 hold bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("bytes in another code than latin1")
    return text.encode("latin1")


def _scalar(kind: Any, content: Any) -> Any:
    if not isinstance(kind, _Type) or not isinstance(content, bytes):
        raise pickle.UnpicklingError("a number of another type")
    return np.frombuffer(content, kind.made(), 1)[0].item()


def _whole(array: _Array, name: str) -> np.ndarray[Any, Any]:
    if array.value is None:
        raise CheckpointError(f"{name}: an array without content")
    return array.value


ALLOWED: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _encode,
    ("collections", "OrderedDict"): OrderedDict,
    ("numpy", "dtype"): _Type,
    ("numpy", "ndarray"): _Array,
}
for _home in ("numpy.core.multiarray", "numpy._core.multiarray"):
    ALLOWED[(_home, "_reconstruct")] = _reconstruct
    ALLOWED[(_home, "scalar")] = _scalar
for _home in ("numpy.core.numeric", "numpy._core.numeric"):
    ALLOWED[(_home, "_frombuffer")] = _frombuffer


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it wants {module}.{name}, which is neither an array nor a dictionary")
        return ALLOWED[(module, name)]

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside of itself")


def load(path: Path) -> tuple[Arrays, dict[str, str]]:
    """The arrays of a file by name, and the names that the optimizer knows the parameters by."""
    try:
        raw = _Unpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # a broken pickle can raise anything; nothing of it was run
        raise CheckpointError(
            f"{path} is not loaded: {error or type(error).__name__}", "only files of arrays and dictionaries are"
        ) from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds {type(raw).__name__}, not a dictionary of arrays")
    names = raw.pop(STRUCTURED, {})
    if not isinstance(names, dict) or not all(isinstance(k, str) and isinstance(v, str) for k, v in names.items()):
        raise CheckpointError(f"{path}: the names of the parameters are no names")
    arrays: Arrays = {}
    for name, value in raw.items():
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):  # (name, array) of some versions
            value = value[1]
        if isinstance(name, str) and isinstance(value, _Array):
            arrays[name] = _whole(value, f"{path}: {name}")
    return arrays, names
