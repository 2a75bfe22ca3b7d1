"""Read PaddleRec's table dumps: rows of checkpoints, bases and deltas, and dense values.

<dir>/000/part-000-00000[.gz]        key slot unseen_days delta_score show click embed_w state… [embedx… state…]
<dir>/001/part-000[.gz]              one line per dense value: w [state…]
<dir>/<var>.shard/<var>.block0.txt   id TAB count TAB unseen_days TAB is_entry TAB v,v,…    (releases 2.0 to 2.2)
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clickfleet.errors import CheckpointError

_DIGITS = re.compile(rb"[0-9]{1,20}")
PART = re.compile(r"^part-\d{3}-\d{5}(\.gz)?$")
DENSE = re.compile(r"^part-\d{3}(\.gz)?$")
KIND = "paddle-text"
"""The kind of a folder in this layout that clickfleet wrote, in its manifest."""
LINES = 20_000
MAX_LINE = 16 << 20
Numbers = np.ndarray[Any, np.dtype[np.float32]]


@dataclass
class DumpRows:
    """Rows of one table, all short or all full. `fields` are as in the file: 6 + state [+ embedx + state]."""

    keys: np.ndarray[Any, np.dtype[np.uint64]]
    fields: Numbers


def tables(folder: Path) -> list[Path]:
    """Return the folders of the sparse tables by number, or the folder itself if it holds the files."""
    if _has(folder, PART):
        return [folder]
    return [sub for sub in sorted(folder.glob("[0-9][0-9][0-9]")) if _has(sub, PART)]


def dense_table(folder: Path) -> Path | None:
    """Return the folder of the dense values: the first table with one file per server."""
    return next(
        (sub for sub in sorted(folder.glob("[0-9][0-9][0-9]")) if _has(sub, DENSE) and not _has(sub, PART)), None
    )


def blocks(folder: Path) -> list[Path]:
    """Return the folders of tables of releases 2.0 to 2.2."""
    return sorted(sub for sub in folder.glob("*.shard") if sub.is_dir() and any(sub.glob("*.block*.txt")))


def _has(folder: Path, pattern: re.Pattern[str]) -> bool:
    return folder.is_dir() and any(pattern.match(entry.name) for entry in folder.iterdir())


def read_rows(folder: Path, short: int, full: int) -> Iterator[DumpRows]:
    """Yield the rows of a table, with `short` or `full` numbers each. Reject lines of any other length."""
    for path in sorted(entry for entry in folder.iterdir() if PART.match(entry.name)):
        waiting: dict[int, tuple[list[int], list[bytes]]] = {short: ([], []), full: ([], [])}
        for number, line in enumerate(_lines(path), start=1):
            words = line.split()
            if not words:
                continue
            if len(words) - 1 not in waiting:
                raise CheckpointError(
                    f"{path}:{number}: expected {short} numbers (without factors) or {full}, found {len(words) - 1}",
                    "check sparse_feature_dim in hyper_parameters and the rules in table_parameters",
                )
            key = int(words[0]) if _DIGITS.fullmatch(words[0]) else -1
            if not 0 <= key < 2**64:
                raise CheckpointError(f"{path}:{number}: expected a key, found {words[0][:40]!r}")
            keys, texts = waiting[len(words) - 1]
            keys.append(key)
            texts.append(b" ".join(words[1:]))
            if len(keys) == LINES:
                yield _rows(path, keys, texts, len(words) - 1)
                waiting[len(words) - 1] = ([], [])
        for width, (keys, texts) in waiting.items():
            if keys:
                yield _rows(path, keys, texts, width)


def _rows(path: Path, keys: list[int], texts: list[bytes], width: int) -> DumpRows:
    return DumpRows(np.array(keys, np.uint64), _numbers(path, b" ".join(texts), len(keys) * width).reshape(-1, width))


def _numbers(path: Path, text: bytes, count: int) -> Numbers:
    try:
        with np.errstate(over="ignore"):  # overflow gives infinity, which is rejected below
            values = np.array(text.split(), np.float64).astype(np.float32)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if len(values) != count or not np.isfinite(values).all():
        raise CheckpointError(f"{path}: contains a value that is not finite")
    return values


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), start=1):
                if len(line) == MAX_LINE:
                    raise CheckpointError(f"{path}:{number}: line longer than {MAX_LINE >> 20} MiB")
                yield line
    except (OSError, EOFError, zlib.error) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def read_dense(folder: Path) -> Numbers:
    """Return all dense values in order: the weights [n] in column 0, their state in the other columns."""
    parts = []
    for path in sorted(entry for entry in folder.iterdir() if DENSE.match(entry.name)):
        lines = [line.split() for line in _lines(path) if line.strip()]
        if lines:
            if len({len(line) for line in lines}) > 1:
                raise CheckpointError(f"{path}: lines have different lengths")
            words = [word for line in lines for word in line]
            parts.append(_numbers(path, b" ".join(words), len(words)).reshape(len(lines), -1))
    if not parts or len({part.shape[1] for part in parts}) > 1:
        raise CheckpointError(f"{folder} contains no dense values, or files of different widths")
    return np.concatenate(parts)


@dataclass
class DumpBlock:
    """Admitted rows of a table of releases 2.0 to 2.2, by field."""

    keys: np.ndarray[Any, np.dtype[np.uint64]]
    counts: Numbers
    unseen_days: Numbers
    fields: dict[str, Numbers]
    not_entered: int


def read_blocks(folder: Path) -> Iterator[DumpBlock]:
    """Yield the content of each file of a `<var>.shard` folder. A .meta file beside it describes the fields."""
    for path in sorted(folder.glob("*.block*.txt")):
        names, dims = _meta(path)
        width, heads, texts, keys, skipped = sum(dims), [], [], [], 0
        for number, line in enumerate(_lines(path), start=1):
            words = line.split()
            values = words[4].split(b",") if len(words) == 5 else []
            if (
                len(values) != width
                or not _DIGITS.fullmatch(words[0])
                or int(words[0]) >= 2**64
                or words[3] not in (b"0", b"1")
            ):
                raise CheckpointError(f"{path}:{number}: expected id, count, unseen_days, is_entry and {width} values")
            if words[3] == b"0":
                skipped += 1
                continue
            keys.append(int(words[0]))
            heads.append(b" ".join(words[1:3]))
            texts.append(b" ".join(values))
        head = _numbers(path, b" ".join(heads), 2 * len(keys)).reshape(-1, 2)
        values_ = _numbers(path, b" ".join(texts), width * len(keys)).reshape(-1, width)
        ends = np.cumsum([0, *dims])
        fields = {name: values_[:, ends[i] : ends[i + 1]] for i, name in enumerate(names)}
        yield DumpBlock(np.array(keys, np.uint64), head[:, 0], head[:, 1], fields, skipped)


def _meta(path: Path) -> tuple[list[str], list[int]]:
    meta = path.with_suffix(".meta")
    if not meta.is_file():
        raise CheckpointError(f"{path} needs the file {meta.name}, which describes its values")
    text = meta.read_text(encoding="utf-8", errors="replace")
    facts = dict(line.strip().split("=", 1) for line in text.splitlines() if "=" in line)
    names = [name for name in re.split(r"[,\s]+", facts.get("row_names", "")) if name]
    dims = [int(dim) for dim in re.findall(r"[0-9]+", facts.get("row_dims", "")[:10_000])]
    if not names or len(names) != len(dims) or names[0] != "Param" or sum(dims) > 1 << 24:
        raise CheckpointError(f"{meta}: row_names and row_dims do not describe the values")
    return names, dims
