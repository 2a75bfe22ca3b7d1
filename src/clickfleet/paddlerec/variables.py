"""Read and write variables of Paddle as binary files.

<dir>/<var>                        one variable (`save_persistables`, `dnn_plugin/`)
<dir>/<file>                       all variables in the order of their names (`save_persistables` with a file name, `.pdiparams`)
<dir>/__model__, <dir>/*.pdmodel   the program, which has the names

A variable is: version, levels of detail (none), version, length of the description, description, numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clickfleet.errors import CheckpointError
from clickfleet.paddlerec.pickles import Arrays

HEAD = struct.Struct("<IQIi")
MAX_DESCRIPTION = 256
FLOAT32 = 5
SIZES = {0: 1, 1: 2, 2: 4, 3: 8, 4: 2, FLOAT32: 4, 6: 8, 20: 1, 21: 1, 22: 2}
"""Bytes per number of each type of Paddle."""
MAX_PROGRAM = 64 << 20
TENSOR = 7
"""The kind of a variable with numbers. Feeds and fetches are other kinds."""


@dataclass(frozen=True)
class Variable:
    """Where a variable is in a file."""

    kind: int
    shape: tuple[int, ...]
    start: int
    end: int


def variables(path: Path) -> list[Variable]:
    """Return the variables of a file; none if it holds anything else."""
    found: list[Variable] = []
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            at = 0
            while at < size:
                file.seek(at)
                one = _variable(file.read(HEAD.size + MAX_DESCRIPTION), at)
                if one is None or one.end > size:
                    return []
                found.append(one)
                at = one.end
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return found


def _variable(data: bytes, at: int) -> Variable | None:
    if len(data) < HEAD.size:
        return None
    version, levels, version_again, length = HEAD.unpack_from(data)
    if (version, levels, version_again) != (0, 0, 0) or not 0 < length <= min(MAX_DESCRIPTION, len(data) - HEAD.size):
        return None
    kind, shape = -1, []
    for field, value in _fields(data[HEAD.size : HEAD.size + length]):
        if field == 1 and isinstance(value, int):
            kind = value
        elif field == 2:
            shape += [value] if isinstance(value, int) else list(_varints(value))
        else:
            return None
    if kind not in SIZES or any(n < 0 or n >= 1 << 40 for n in shape):
        return None
    start = at + HEAD.size + length
    return Variable(kind, tuple(shape), start, start + SIZES[kind] * int(np.prod(shape, dtype=object)))


def array(path: Path, variable: Variable) -> np.ndarray[Any, Any]:
    """Return the numbers of a float32 variable, mapped from its file."""
    if variable.start == variable.end:
        return np.empty(variable.shape, np.float32)
    return np.asarray(np.memmap(path, "<f4", "r", variable.start, variable.shape))


def files(folder: Path) -> list[Path]:
    """Return the files of a folder that hold variables."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and variables(path)] if folder.is_dir() else []


def read_variables(folder: Path) -> Arrays:
    """Return the float32 variables of the files with one variable each."""
    found: Arrays = {}
    for path in files(folder):
        each = variables(path)
        if len(each) == 1 and each[0].kind == FLOAT32:
            found[path.name] = array(path, each[0])
    return found


def bundles(folder: Path) -> list[Path]:
    """Return the files that hold several variables."""
    return [path for path in files(folder) if len(variables(path)) > 1]


def read_bundle(path: Path, names: list[str]) -> Arrays:
    """Return the float32 variables of a file with several. `names` has all of them, in order."""
    return {name: array(path, one) for name, one in zip(names, variables(path), strict=True) if one.kind == FLOAT32}


def program(bundle: Path) -> Path | None:
    """Return the file with the names of the variables of a bundle; None if there is none."""
    for path in (bundle.with_suffix(".pdmodel"), bundle.parent / "__model__"):
        if path.is_file():
            return path
    others = sorted(bundle.parent.glob("*.pdmodel"))
    return others[0] if len(others) == 1 else None


def program_names(path: Path) -> list[str]:
    """Return the names of the variables that a program saves, in the order in which a bundle has them."""
    names = set()
    try:
        if path.stat().st_size > MAX_PROGRAM:
            raise CheckpointError(f"{path} is larger than {MAX_PROGRAM >> 20} MiB, too large for a program")
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    for block in _messages(content, 1):
        for variable in _messages(block, 3):
            facts = dict(_fields(variable))
            kind = dict(_fields(facts[2])) if isinstance(facts.get(2), bytes) else {}
            if facts.get(3) == 1 and kind.get(1) == TENSOR and isinstance(facts.get(1), bytes):
                names.add(facts[1].decode("utf-8", "replace"))
    if not names:
        raise CheckpointError(f"{path} names no variables", "restore the file that was saved with the variables")
    return sorted(names)


def _messages(data: bytes, number: int) -> Iterator[bytes]:
    return (value for field, value in _fields(data) if field == number and isinstance(value, bytes))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protobuf message: numbers, or bytes. Stop where the message is damaged."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
        elif wire == 2:
            size, at = _varint(data, at)
            if size < 0 or at + size > len(data):
                return
            yield tag >> 3, data[at : at + size]
            at += size
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            return


def _varints(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            return value, at
    return -1, len(data)


def pack(values: np.ndarray[Any, Any]) -> bytes:
    """Return a float32 variable as the content of its file.

    >>> len(pack(np.zeros((2, 3), np.float32)))
    50
    """
    description = b"\x08" + bytes([FLOAT32]) + b"".join(b"\x10" + _encoded(n) for n in values.shape)
    return HEAD.pack(0, 0, 0, len(description)) + description + np.ascontiguousarray(values, "<f4").tobytes()


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
