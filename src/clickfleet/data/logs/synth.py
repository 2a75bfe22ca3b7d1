"""Generate click logs from a known model, the teacher, in any format, as plain parts or as timed folders per day."""

from __future__ import annotations

import datetime
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickfleet.data.batch import Floats
from clickfleet.data.formats import load
from clickfleet.data.logs.source import COLUMNAR, LogPiece, LogReport
from clickfleet.data.logs.target import ENDINGS, OutputFile, Target, raw_lines
from clickfleet.data.parsing.lines import Lines
from clickfleet.data.progress import progress
from clickfleet.data.schema import Bucket, Slot, preset, write_schema
from clickfleet.errors import ConfigError, DataError

BLOCK = 16384
"""Rows drawn at once. The rows of a seed depend on it, so it never changes."""


@dataclass(frozen=True)
class Count:
    """A heavy-tailed dense column: floor(exp(centre + spread·z)) − shift, at least `least`, sometimes missing."""

    centre: float
    spread: float
    shift: int
    group: int
    least: int = 0


@dataclass(frozen=True)
class Category:
    """A slot with `size` ids. Id r has the weight (r + offset)^-slope."""

    size: int
    slope: float
    offset: float
    group: int
    strength: float
    """Strength of its linear effects, relative to other slots."""

    @property
    def pair_strength(self) -> float:
        """Strength of its pair effects: smaller for many ids, because nothing can be learned from pairs of rare ids."""
        return 1.0 if self.size < 700 else 0.75 if self.size < 20_000 else 0.65


# The columns of a group are missing in the same rows, with this probability. Group 0 is never missing.
MISSING = (0.0, 0.45, 0.21, 0.22, 0.026, 0.22, 0.043, 0.0005, 0.77, 0.034, 0.12, 0.44, 0.76)

COUNTS = (
    Count(0.6, 1.20, 1, 1),
    Count(2.4, 2.10, 2, 0, least=-2),
    Count(2.1, 1.30, 0, 2),
    Count(1.7, 0.95, 1, 3),
    Count(7.3, 2.40, 1, 4),
    Count(3.6, 1.80, 1, 5),
    Count(1.4, 1.45, 1, 6),
    Count(2.1, 1.10, 1, 7),
    Count(3.6, 1.70, 1, 6),
    Count(0.3, 0.50, 1, 1),
    Count(0.8, 0.85, 1, 6),
    Count(0.1, 0.80, 1, 8),
    Count(1.9, 1.05, 1, 3),
)

CATEGORIES = (
    Category(1460, 2.00, 1.10, 0, 1.0),
    Category(583, 1.85, 5.95, 0, 1.4),
    Category(10131227, 1.05, 1.46, 9, 1.1),
    Category(2202608, 1.10, 1.27, 9, 1.1),
    Category(305, 2.55, 0.83, 0, 0.8),
    Category(24, 2.60, 1.60, 10, 0.8),
    Category(12517, 1.20, 27.9, 0, 1.0),
    Category(633, 2.35, 1.10, 0, 0.8),
    Category(3, 2.30, 0.31, 0, 0.6),
    Category(93145, 1.05, 0.05, 0, 1.0),
    Category(5683, 1.30, 18.3, 0, 1.2),
    Category(8351593, 1.05, 1.46, 9, 1.1),
    Category(3194, 1.30, 15.9, 0, 1.2),
    Category(27, 1.75, 1.46, 0, 1.4),
    Category(14992, 1.45, 24.3, 0, 1.2),
    Category(5461306, 1.10, 2.23, 9, 1.1),
    Category(10, 2.30, 2.23, 0, 1.4),
    Category(5652, 1.55, 10.5, 0, 1.4),
    Category(2173, 1.20, 0.05, 11, 0.8),
    Category(4, 0.85, 1.68, 11, 1.1),
    Category(7046547, 1.05, 1.46, 9, 1.1),
    Category(18, 2.30, 1.00, 12, 0.8),
    Category(15, 1.01, 0.13, 0, 1.2),
    Category(286181, 1.25, 2.95, 9, 1.0),
    Category(105, 2.55, 3.39, 11, 1.1),
    Category(142572, 1.15, 1.68, 11, 1.1),
)


@dataclass(frozen=True)
class Features:
    """The features of `BLOCK` rows, one array per column."""

    counts: NDArray[np.int32]  # [13, B]
    values: NDArray[np.uint32]  # [26, B]: the categories, written as eight hexadecimal digits
    missing: NDArray[np.bool_]  # [groups, B]


def draw(rng: np.random.Generator, seed: int, age: float) -> Features:
    """Draw features. `age` is the fraction of ids replaced since day 0; above 1, there were several generations."""
    missing = rng.random((len(MISSING), BLOCK), dtype=np.float32) < np.array(MISSING, np.float32)[:, None]
    activity = rng.standard_normal(BLOCK, dtype=np.float32)  # correlates the counts of a row
    standard = rng.standard_normal((len(COUNTS), BLOCK), dtype=np.float32)
    standard *= np.float32(np.sqrt(1 - 0.3**2))
    standard += np.float32(0.3) * activity
    counts = np.empty((len(COUNTS), BLOCK), np.int32)
    for i, count in enumerate(COUNTS):
        drawn = np.exp(np.float32(count.spread) * standard[i] + np.float32(count.centre))
        counts[i] = np.minimum(drawn, 2e9).astype(np.int32) - count.shift
        np.maximum(counts[i], count.least, out=counts[i])
    values = np.empty((len(CATEGORIES), BLOCK), np.uint32)
    for j, category in enumerate(CATEGORIES):
        values[j] = _names(j, _zipf(category, rng.random(BLOCK)), seed, age)
    return Features(counts, values, missing)


def _zipf(category: Category, u: NDArray[np.float64]) -> NDArray[np.uint32]:
    """Return ranks from 0 by inverting the continuous distribution function."""
    power = 1 - category.slope
    low, high = category.offset**power, (category.size + category.offset) ** power
    u *= high - low
    u += low
    return (np.minimum(u ** (1 / power) - category.offset, category.size - 1)).astype(np.uint32)


def _names(slot: int, rank: NDArray[np.uint32], seed: int, age: float) -> NDArray[np.uint32]:
    """Return the text of each id as a number. This is a bijection: the ids of a slot have different texts."""
    salt = np.uint32(0x9E3779B9 * (slot + 1) & 0xFFFFFFFF)
    if age:  # each id is replaced at its own moment of a generation
        phase = _mix32(rank ^ salt).astype(np.float32) / np.float32(2**32)
        rank = rank + (np.float32(age) + phase).astype(np.uint32) * np.uint32(1 << 24)
    return _mix32(_mix32(rank ^ np.uint32(seed & 0xFFFFFFFF)) + salt)


def _mix32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Apply a bijection of 32 bits (the MurmurHash3 finaliser)."""
    x = x ^ (x >> np.uint32(16))
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x


FACTORS = 4
PATTERNS = 4096  # distinct (w, v) per slot: few enough for the cache, enough to look random
LINEAR, PAIRS, DENSE = 1.28, 0.82, 0.65
"""Standard deviations of the three parts of the logit."""
CTR = 0.25
_ROWS, _SCALE, _EFFECTS, _SHAPES = 1, 2, 3, 4  # purposes of random generators


@dataclass(frozen=True)
class Teacher:
    """The true model of one seed on one day. `drift` is the fraction of ids, and of all effects, replaced per day.

    >>> features, labels, probability = Teacher(seed=7).draw(stream=0, block=0)
    >>> features.counts.shape, features.values.shape, labels.shape
    ((13, 16384), (26, 16384), (16384,))
    """

    seed: int
    day: int = 0
    drift: float = 0.0

    def draw(self, stream: int, block: int) -> tuple[Features, NDArray[np.int8], Floats]:
        """Return features, labels and true click probabilities of `BLOCK` rows."""
        rng = self._rng(_ROWS, self.day, stream, block)
        features = self._features(rng)
        probability = _sigmoid(self._bias + self._slots(features) + self.dense(features))
        labels = (rng.random(BLOCK, dtype=np.float32) < probability).astype(np.int8)
        return features, labels, probability

    def prepare(self) -> None:
        """Draw and scale the effects now instead of in the first `draw`."""
        _ = self._bias

    def _rng(self, *purpose: int) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence([self.seed, *purpose])))

    def _features(self, rng: np.random.Generator) -> Features:
        return draw(rng, self.seed, self.day * self.drift)

    @cached_property
    def _sample(self) -> Features:
        """Rows used only to scale the parts of the logit."""
        return self._features(self._rng(_SCALE, self.day))

    def _slots(self, features: Features) -> Floats:
        return pooled(self.effects, features)

    @cached_property
    def effects(self) -> Floats:
        w, v = self._unscaled_effects()
        w *= np.array([category.strength for category in CATEGORIES], np.float32)[:, None]
        v *= np.array([category.pair_strength for category in CATEGORIES], np.float32)[:, None, None]
        for slot in range(len(CATEGORIES)):  # a mean would act as a linear effect
            v[slot] -= v[slot, _patterns(slot, self._sample)].mean(0)
        linear = pooled(_table(w, np.zeros_like(v)), self._sample).std()
        pairs = pooled(_table(np.zeros_like(w), v), self._sample).std()
        return _table(w * (LINEAR / linear), v * np.sqrt(PAIRS / pairs))

    def _unscaled_effects(self) -> tuple[Floats, Floats]:
        """Return unit normal w and v that rotate, day by day, from one draw to the next."""
        generation, share = divmod(self.day * self.drift, 1.0)
        turn = np.array([np.cos(share * np.pi / 2), np.sin(share * np.pi / 2)], np.float32)
        shape = (1 + FACTORS, len(CATEGORIES), PATTERNS + 1)
        drawn = [self._rng(_EFFECTS, int(generation) + i).standard_normal(shape, dtype=np.float32) for i in (0, 1)]
        effects = turn[0] * drawn[0] + turn[1] * drawn[1]
        return effects[0], np.moveaxis(effects[1:], 0, 2).copy()

    def dense(self, features: Features) -> Floats:
        return self._dense_scale * self._unscaled_dense(features)

    @cached_property
    def _dense_scale(self) -> np.float32:
        return np.float32(DENSE / self._unscaled_dense(self._sample).std())

    def _unscaled_dense(self, features: Features) -> Floats:
        total = np.zeros(BLOCK, np.float32)
        shapes = self._rng(_SHAPES).standard_normal((len(COUNTS), 3), dtype=np.float32)
        for count, values, (slope, bend, absent) in zip(COUNTS, features.counts, shapes, strict=True):
            x = np.log1p(np.abs(values), dtype=np.float32)
            np.copysign(x, values.astype(np.float32), out=x)
            z = (x - np.float32(count.centre)) / np.float32(count.spread)
            effect = slope * z + bend / 4 * np.cos(2 * z)
            total += np.where(features.missing[count.group], absent / 2, effect)
        return total

    @cached_property
    def _bias(self) -> np.float32:
        """The bias that yields the click rate `CTR`, found by bisection."""
        logit = self._slots(self._sample) + self.dense(self._sample)
        low, high = np.float32(-20), np.float32(20)
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if _sigmoid(logit + middle).mean() < CTR else (low, middle)
        return low


def _patterns(slot: int, features: Features) -> NDArray[np.intp]:
    """Return the row of the effects table for every value of a slot. The last row is for a missing value."""
    pattern = (features.values[slot] & np.uint32(PATTERNS - 1)).astype(np.intp)
    if group := CATEGORIES[slot].group:
        pattern[features.missing[group]] = PATTERNS
    return np.asarray(pattern)


def _table(w: Floats, v: Floats) -> Floats:
    """Return [slots, patterns + 1, (w − |v|²/2, v)]. Its sum over the slots of a row yields linear and pair effects."""
    return np.concatenate([(w - 0.5 * np.square(v).sum(2))[:, :, None], v], axis=2)


def pooled(table: Floats, features: Features) -> Floats:
    parts = np.zeros((BLOCK, 1 + FACTORS), np.float32)
    for slot in range(len(CATEGORIES)):
        parts += table[slot].take(_patterns(slot, features), axis=0)
    return np.asarray(parts[:, 0] + 0.5 * np.square(parts[:, 1:]).sum(1))


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-x)))


_TRAIN, _TEST = 0, 1
_NOTE = "synth.json"


@dataclass(frozen=True)
class SynthOptions:
    """What to generate: `rows` in total, in `parts` files per folder. With `days`, in timed folders `<day>/<HHMM>`."""

    rows: int = 500_000
    test_rows: int = 50_000
    format: str = "criteo"
    parts: int = 1
    days: int = 0
    seed: int = 7
    drift: float | None = None
    """Fraction of ids and effects replaced per day. Default: 0.1 with `days`, else 0."""
    start_day: str = "20260101"
    split_interval_min: int = 60
    done_file: str = "_DONE"

    def __post_init__(self) -> None:
        if self.rows < 1 or self.test_rows < 0 or self.parts < 1 or self.days < 0 or self.seed < 0:
            raise ConfigError("rows and parts must be at least 1; test rows, days and seed at least 0")
        if self.drift is not None and not 0 <= self.drift <= 1:
            raise ConfigError(f"drift must be between 0 and 1, not {self.drift}")
        if self.drift and not self.days:
            raise ConfigError("drift needs days", "set --days")
        if not 1 <= self.split_interval_min <= 1440:
            raise ConfigError(f"the split interval must be 1 to 1440 minutes, not {self.split_interval_min}")
        try:
            datetime.datetime.strptime(self.start_day, "%Y%m%d")
        except ValueError:
            raise ConfigError(f"the start day {self.start_day!r} is not a date in the form YYYYMMDD") from None

    def teacher(self, day: int) -> Teacher:
        drift = self.drift if self.drift is not None else 0.1 if self.days else 0.0
        return Teacher(self.seed, day, drift)

    def files(self, out: Path) -> Iterator[_File]:
        """Yield all files in order of time. The test rows belong to the last day."""
        first = datetime.datetime.strptime(self.start_day, "%Y%m%d").date()
        splits = 1440 // self.split_interval_min
        for day, rows in enumerate(_shares(self.rows, self.days or 1)):
            begin = 0
            name = (first + datetime.timedelta(days=day)).strftime("%Y%m%d")
            for split, share in enumerate(_shares(rows, splits if self.days else 1)):
                hours, minutes = divmod(split * self.split_interval_min, 60)
                folder = out / name / f"{hours:02}{minutes:02}" if self.days else out / "train"
                yield from self._parts(folder, day, _TRAIN, begin, share)
                begin += share
        yield from self._parts(out / "test", max(self.days - 1, 0), _TEST, 0, self.test_rows)

    def _parts(self, folder: Path, day: int, stream: int, begin: int, rows: int) -> Iterator[_File]:
        done = folder / self.done_file if self.days and stream == _TRAIN else None
        shares = [share for share in _shares(rows, self.parts) if share]
        for part, share in enumerate(shares):
            path = folder / f"part-{part}{ENDINGS.get(self.format, '')}"
            yield _File(path, day, stream, begin, share, done if part == len(shares) - 1 else None)
            begin += share


@dataclass(frozen=True)
class _File:
    """A file with `rows` rows of a day's stream, from row `begin`. The file `done` is written after it."""

    path: Path
    day: int
    stream: int
    begin: int
    rows: int
    done: Path | None

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield the blocks of this file, and the rows [low, high) to take from each."""
        end = self.begin + self.rows
        for block in range(self.begin // BLOCK, -(-end // BLOCK)):
            yield block, max(self.begin - block * BLOCK, 0), min(end - block * BLOCK, BLOCK)


def synth(
    out: str | Path,
    options: SynthOptions | None = None,
    *,
    overwrite: bool = False,
    threads: int | None = None,
) -> LogReport:
    """Write a log to the folder `out`. `best_auc` is the AUC of the true probabilities on the test rows."""
    out, options = Path(out), options or SynthOptions()
    _clear(out, overwrite)
    target, files = _target(options.format), list(options.files(out))
    drawn = _draw_ahead(files, lru_cache(16)(options.teacher), target, threads or min(os.cpu_count() or 1, 4))
    _note(out, options, {"rows": None})  # --overwrite can then replace an interrupted run
    rows = clicks = 0
    judged: list[tuple[Floats, NDArray[np.int8]]] = []
    with progress(f"writing {out}", options.rows + options.test_rows) as bar:
        for file in files:
            with OutputFile(file.path, options.format) as sink:
                for _ in file.blocks():
                    content, header, probability, labels = next(drawn)
                    sink.write(content, len(labels), header)
                    bar.advance(len(labels))
                    if file.stream == _TEST or not options.test_rows:
                        judged.append((probability, labels))
                    if file.stream == _TRAIN:
                        rows, clicks = rows + len(labels), clicks + int(labels.sum())
            if file.done is not None:
                file.done.touch()
    best = auc(np.concatenate([p for p, _ in judged]), np.concatenate([y for _, y in judged]))
    result = {"rows": rows, "test_rows": options.test_rows, "ctr": clicks / rows, "best_auc": best, "out": str(out)}
    if not target.raw:
        write_schema(target.result, out / "schema.yaml")
    _note(out, options, result)
    return result


def auc(scores: Floats, labels: NDArray[np.int8]) -> float:
    """Return the exact area under the ROC curve. Ties count half.

    >>> auc(np.array([0.1, 0.4, 0.4, 0.8], np.float32), np.array([0, 0, 1, 1], np.int8))
    0.875
    """
    _, where, counts = np.unique(scores, return_inverse=True, return_counts=True)
    rank = np.cumsum(counts) - (counts - 1) / 2
    ones = int(labels.sum())
    zeros = len(labels) - ones
    return (
        float((rank[where[labels == 1]].sum() - ones * (ones + 1) / 2) / (ones * zeros)) if ones and zeros else np.nan
    )


_Drawn = tuple[Any, bytes, Floats, NDArray[np.int8]]


def _draw_ahead(
    files: list[_File], teacher: Callable[[int], Teacher], target: Target, threads: int
) -> Iterator[_Drawn]:
    """Yield contents, probabilities and labels of the blocks of all files in order, drawn ahead by several threads."""

    def make(file: _File, block: int, low: int, high: int) -> _Drawn:
        features, labels, probability = teacher(file.day).draw(file.stream, block)
        piece = _piece(columns(features, labels).slice(low, high - low), target)
        return target.encode(piece), target.header(piece), probability[low:high], labels[low:high]

    waiting: deque[Future[_Drawn]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for file in files:
            teacher(file.day).prepare()  # once here, not in every thread
            for where in file.blocks():
                waiting.append(pool.submit(make, file, *where))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _target(kind: str) -> Target:
    """Return the target: with the published ids and scaling if the format stores keys. feasign buckets dense columns."""
    if kind in COLUMNAR:
        return Target(kind, preset("criteo"), raw=True)
    if kind != "feasign":
        return Target(kind, preset("criteo-paddle"), raw=False)
    schema = preset("criteo")
    buckets = tuple(
        Slot(f"B{i}", bucket=Bucket(column.name, 0.0, 12.0, 48)) for i, column in enumerate(schema.dense, 1)
    )
    return Target(kind, replace(schema, slots=(*schema.slots, *buckets)), raw=False)


def _piece(rows: Any, target: Target) -> LogPiece:
    """Return rows as if read from a raw file."""
    if target.raw:
        return LogPiece(None, rows)
    lines = raw_lines(rows, "\t", quote=False)
    form = load("criteo")
    assert isinstance(form, Lines)
    parsed = form.parser(target.schema, lines[: lines.index(b"\n")], "")(lines, "stop")
    assert not parsed.bad, parsed.bad
    return LogPiece(parsed.batch, rows)


def columns(features: Features, labels: NDArray[np.int8]) -> Any:
    """Return drawn rows as an Arrow record batch with Criteo's columns."""
    import pyarrow as pa

    arrays = {"click": pa.array(labels)}
    for i, count in enumerate(COUNTS):
        mask = features.missing[count.group] if count.group else None
        arrays[f"I{i + 1}"] = pa.array(features.counts[i], mask=mask)
    ends = pa.py_buffer(np.arange(0, 8 * (BLOCK + 1), 8, dtype=np.int32))
    present = [pa.py_buffer(np.packbits(~absent, bitorder="little")) for absent in features.missing]
    for j, category in enumerate(CATEGORIES):
        values = features.values[j]
        text = np.stack([_hex()[values >> np.uint32(16)], _hex()[values & np.uint32(0xFFFF)]], axis=1)
        flags = present[category.group] if category.group else None
        arrays[f"C{j + 1}"] = pa.StringArray.from_buffers(BLOCK, ends, pa.py_buffer(text), flags)
    return pa.RecordBatch.from_pydict(arrays)


@cache
def _hex() -> NDArray[np.uint32]:
    """Return the four hexadecimal digits of every 16-bit number, packed into one 32-bit number."""
    return np.frombuffer("".join(f"{i:04x}" for i in range(1 << 16)).encode(), np.uint32)


def _shares(whole: int, parts: int) -> list[int]:
    return [whole * (i + 1) // parts - whole * i // parts for i in range(parts)]


def _note(out: Path, options: SynthOptions, result: LogReport) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / _NOTE).write_text(json.dumps({"options": asdict(options), "result": result}, indent=1) + "\n")


def _clear(out: Path, overwrite: bool) -> None:
    """Remove the files of an earlier call, and nothing else. Old and new parts must not mix."""
    if not out.exists() or not any(out.iterdir()):
        return
    if not overwrite or not (out / _NOTE).exists():
        todo = "--overwrite replaces it" if (out / _NOTE).exists() else "choose a new or empty folder"
        raise DataError(f"{out} is not empty", todo)
    for path in out.iterdir():
        if path.is_dir() and (path.name in ("train", "test") or (len(path.name) == 8 and path.name.isdigit())):
            shutil.rmtree(path)
    (out / "schema.yaml").unlink(missing_ok=True)
    (out / _NOTE).unlink()
