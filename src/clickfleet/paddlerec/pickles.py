"""Read `.pdparams` and `.pdopt` files: pickles, interpreted by a machine that creates only arrays, dictionaries and plain values."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from clickfleet.errors import CheckpointError

MAX_BYTES = 1 << 40
NUMERIC = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "b1")
STRUCTURED = "StructuredToParameterName@@"
Arrays = dict[str, np.ndarray[Any, Any]]


class _Array:
    """An array before its content is known. NumPy's constructor would accept any shape and element type."""

    def __init__(self, *_: Any) -> None:
        self.value: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, content = state
        if not isinstance(dtype, _Type) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("it contains an array whose elements are not numbers")
        if not isinstance(shape, tuple) or not all(isinstance(n, int) and 0 <= n < MAX_BYTES for n in shape):
            raise pickle.UnpicklingError("it contains an array with an invalid shape")
        kind = dtype.dtype()
        size = kind.itemsize
        for n in shape:
            size *= n
        if size != len(content):
            raise pickle.UnpicklingError(f"it contains an array of shape {shape} with {len(content)} bytes")
        self.value = np.frombuffer(content, kind).reshape(shape, order="F" if fortran else "C")


class _Type:
    """A numeric type before its byte order is known."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.name, self.order = name, "|"

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]

    def dtype(self) -> np.dtype[Any]:
        if not isinstance(self.name, str) or self.name not in NUMERIC:
            raise pickle.UnpicklingError(f"it contains an array of type {self.name!r}")
        return np.dtype(self.name).newbyteorder(">" if self.order == ">" else "<")


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _frombuffer(content: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    """Create an array as in pickles of protocol 5."""
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", bytes(content) if isinstance(content, bytearray) else content))
    return array


def _encode(text: Any, encoding: Any) -> bytes:
    """Decode bytes as in pickles of protocol 2."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("it contains bytes in an encoding other than latin1")
    return text.encode("latin1")


def _scalar(kind: Any, content: Any) -> Any:
    if not isinstance(kind, _Type) or not isinstance(content, bytes):
        raise pickle.UnpicklingError("it contains a number of an unsupported type")
    return np.frombuffer(content, kind.dtype(), 1)[0].item()


def _ordered(pairs: Any = ()) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str | int):
            raise pickle.UnpicklingError(f"it contains a key of type {type(key).__name__}")
        result[key] = value
    return result


def _whole(array: _Array, name: str) -> np.ndarray[Any, Any]:
    if array.value is None:
        raise CheckpointError(f"{name}: the array has no content")
    return array.value


ALLOWED: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _encode,
    ("collections", "OrderedDict"): _ordered,
    ("numpy", "dtype"): _Type,
    ("numpy", "ndarray"): _Array,
}
for _home in ("numpy.core.multiarray", "numpy._core.multiarray"):
    ALLOWED[(_home, "_reconstruct")] = _reconstruct
    ALLOWED[(_home, "scalar")] = _scalar
for _home in ("numpy.core.numeric", "numpy._core.numeric"):
    ALLOWED[(_home, "_frombuffer")] = _frombuffer


_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING"),
    *("SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES"),
    *("BINBYTES8", "BYTEARRAY8"),
}
_PLAIN = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


class Machine:
    """Runs the instructions of a pickle on plain values.

    Python's unpickler trusts the numbers in a file: an index of a few bytes can make it allocate gigabytes. Here the
    memo is a dictionary, keys are strings or integers, and the size of new objects is limited by the size of the file.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._room = 4 * len(content) + (1 << 20)

    def run(self) -> Any:
        for opcode, value, _ in pickletools.genops(self._content):
            name = opcode.name
            if name == "STOP":
                return self._pop()
            self._do(name, value)
        raise pickle.UnpicklingError("it is truncated")

    def _do(self, name: str, value: Any) -> None:
        stack = self._stack
        if name in ("PROTO", "FRAME"):
            return
        if name in _VALUES:
            stack.append(value)
        elif name in _PLAIN:
            stack.append(_PLAIN[name])
        elif name in _TUPLES:
            stack.append(tuple(reversed([self._pop() for _ in range(_TUPLES[name])])))
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if name == "EMPTY_LIST" else {})
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("TUPLE", "LIST"):
            stack.append(tuple(self._marked()) if name == "TUPLE" else self._marked())
        elif name == "DICT":
            stack.append(self._set({}, self._marked()))
        elif name in ("POP", "POP_MARK"):
            self._marked() if name == "POP_MARK" else self._stack.pop()
        elif name in ("APPEND", "APPENDS"):
            items = self._marked() if name == "APPENDS" else [self._pop()]
            self._top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._marked() if name == "SETITEMS" else [self._pop(), self._pop()][::-1]
            self._set(self._top(dict), items)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else value] = self._peek()
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self._memo[value])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            second, first = (self._pop(), self._pop()) if name == "STACK_GLOBAL" else reversed(value.split(" ", 1))
            stack.append(_known(first, second))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = self._pop(), self._pop()
            self._call(function, arguments)
        elif name == "BUILD":
            self._build(self._pop())
        else:
            raise pickle.UnpicklingError(f"it uses the instruction {name}, which arrays and dictionaries do not need")

    def _peek(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise pickle.UnpicklingError("it uses a missing value")
        return self._stack[-1]

    def _pop(self) -> Any:
        self._peek()
        return self._stack.pop()

    def _top(self, kind: type[Any]) -> Any:
        if not isinstance(self._peek(), kind):
            raise pickle.UnpicklingError(f"it adds to {type(self._peek()).__name__}, not to a {kind.__name__}")
        return self._stack[-1]

    def _marked(self) -> list[Any]:
        items: list[Any] = []
        while self._stack and self._stack[-1] is not _MARK:
            items.append(self._stack.pop())
        if not self._stack:
            raise pickle.UnpicklingError("it has an end without a start")
        self._stack.pop()
        return items[::-1]

    def _set(self, to: dict[Any, Any], items: list[Any]) -> dict[Any, Any]:
        if len(items) % 2:
            raise pickle.UnpicklingError("it contains a key without a value")
        to |= _ordered(zip(items[::2], items[1::2], strict=True))
        return to

    def _call(self, function: Any, arguments: Any) -> None:
        if not callable(function) or function not in ALLOWED.values() or not isinstance(arguments, tuple):
            raise pickle.UnpicklingError("it calls something that creates neither arrays nor dictionaries")
        result = function(*arguments)
        if isinstance(result, bytes):
            self._room -= len(result)
        if isinstance(result, _Array) and result.value is not None:
            self._room -= result.value.nbytes
        if self._room < 0:
            raise pickle.UnpicklingError("its objects are far larger than the file")
        self._stack.append(result)

    def _build(self, state: Any) -> None:
        target = self._peek()
        if isinstance(target, _Array | _Type):
            target.__setstate__(state)
        elif not isinstance(target, dict):  # attributes of a dictionary, a network's metadata, are not needed
            raise pickle.UnpicklingError(f"it changes {type(target).__name__}")


def _known(module: Any, name: Any) -> Any:
    if not isinstance(module, str) or not isinstance(name, str) or (module, name) not in ALLOWED:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is neither an array nor a dictionary")
    return ALLOWED[(module, name)]


def load(path: Path) -> tuple[Arrays, dict[str, str]]:
    """Return the arrays of a file by name, and the names by which the optimizer knows the parameters."""
    try:
        raw = Machine(path.read_bytes()).run()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # a broken pickle can raise anything; none of its code ran
        raise CheckpointError(
            f"cannot load {path}: {error or type(error).__name__}",
            "for safety, only files of arrays and dictionaries are loaded",
        ) from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} contains {type(raw).__name__}, not a dictionary of arrays")
    names = raw.pop(STRUCTURED, {})
    if not isinstance(names, dict) or not all(isinstance(k, str) and isinstance(v, str) for k, v in names.items()):
        raise CheckpointError(f"{path}: the names of the parameters are not strings")
    arrays: Arrays = {}
    for name, value in raw.items():
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):  # (name, array) of some versions
            value = value[1]
        if isinstance(name, str) and isinstance(value, _Array):
            arrays[name] = _whole(value, f"{path}: {name}")
    return arrays, names
