"""Click logs with a known teacher, in any format, as plain parts or as days of timed folders."""

import datetime
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickfleet.errors import ConfigError, DataError
from clickfleet.formats import load
from clickfleet.formats._lines import Lines
from clickfleet.logs.encode import raw_lines
from clickfleet.logs.population import BLOCK, CATEGORIES, COUNTS, Features
from clickfleet.logs.sink import ENDINGS, Sink
from clickfleet.logs.source import COLUMNAR, Piece
from clickfleet.logs.target import Target
from clickfleet.logs.teacher import Floats, Teacher
from clickfleet.progress import progress
from clickfleet.schema import Bucket, Slot, preset, write_schema

_TRAIN, _TEST = 0, 1
_NOTE = "synth.json"


@dataclass(frozen=True)
class Options:
    """What to make: `rows` in all, cut evenly into `parts` per folder; with `days`, timed folders `<day>/<HHMM>`."""

    rows: int = 500_000
    test_rows: int = 50_000
    format: str = "criteo"
    parts: int = 1
    days: int = 0
    seed: int = 7
    drift: float | None = None
    """Share of ids replaced each day, and of the way to new effects; default 0.1 with `days`."""
    start_day: str = "20260101"
    split_interval_min: int = 60
    done_file: str = "_DONE"

    def __post_init__(self) -> None:
        if self.rows < 1 or self.test_rows < 0 or self.parts < 1 or self.days < 0 or self.seed < 0:
            raise ConfigError("rows and parts must be at least 1; test rows, days and seed at least 0")
        if self.drift is not None and not 0 <= self.drift <= 1:
            raise ConfigError(f"drift is a share between 0 and 1, not {self.drift}")
        if self.drift and not self.days:
            raise ConfigError("drift happens from day to day", "give --days as well")
        if not 1 <= self.split_interval_min <= 1440:
            raise ConfigError(f"a split interval is 1 to 1440 minutes, not {self.split_interval_min}")
        try:
            datetime.datetime.strptime(self.start_day, "%Y%m%d")
        except ValueError:
            raise ConfigError(f"the start day {self.start_day!r} is not a day written as YYYYMMDD") from None

    def teacher(self, day: int) -> Teacher:
        drift = self.drift if self.drift is not None else 0.1 if self.days else 0.0
        return Teacher(self.seed, day, drift)

    def files(self, out: Path) -> Iterator["_File"]:
        """Every file, in the order of time; the test rows are those of the last day."""
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

    def _parts(self, folder: Path, day: int, stream: int, begin: int, rows: int) -> Iterator["_File"]:
        done = folder / self.done_file if self.days and stream == _TRAIN else None
        shares = [share for share in _shares(rows, self.parts) if share]
        for part, share in enumerate(shares):
            path = folder / f"part-{part}{ENDINGS.get(self.format, '')}"
            yield _File(path, day, stream, begin, share, done if part == len(shares) - 1 else None)
            begin += share


@dataclass(frozen=True)
class _File:
    """`rows` rows of a day's stream from row `begin` on; `done` is written after it."""

    path: Path
    day: int
    stream: int
    begin: int
    rows: int
    done: Path | None

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Blocks and the rows [low, high) of each that this file takes."""
        end = self.begin + self.rows
        for block in range(self.begin // BLOCK, -(-end // BLOCK)):
            yield block, max(self.begin - block * BLOCK, 0), min(end - block * BLOCK, BLOCK)


def synth(
    out: str | Path,
    options: Options | None = None,
    *,
    overwrite: bool = False,
    threads: int | None = None,
) -> dict[str, Any]:
    """Writes a log into the folder `out`; `best_auc` is that of the true probabilities on the test rows."""
    out, options = Path(out), options or Options()
    _make_room(out, overwrite)
    target, files = _target(options.format), list(options.files(out))
    drawn = _draw_ahead(files, lru_cache(16)(options.teacher), target, threads or min(os.cpu_count() or 1, 4))
    _note(out, options, {"rows": None})  # an interrupted run can be overwritten too
    rows = clicks = 0
    judged: list[tuple[Floats, NDArray[np.int8]]] = []
    with progress(f"writing {out}", options.rows + options.test_rows) as bar:
        for file in files:
            with Sink(file.path, options.format) as sink:
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
    """The area under the ROC curve, exactly; equal scores count half.

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
    """Contents, probabilities and labels of all files' blocks in order, made by several threads a little ahead."""

    def make(file: _File, block: int, low: int, high: int) -> _Drawn:
        features, labels, probability = teacher(file.day).draw(file.stream, block)
        piece = _piece(columns(features, labels).slice(low, high - low), target)
        return target.encode(piece), target.header(piece), probability[low:high], labels[low:high]

    waiting: deque[Future[_Drawn]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for file in files:
            teacher(file.day).prepare()  # here, so that threads do not do it twice
            for where in file.blocks():
                waiting.append(pool.submit(make, file, *where))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _target(kind: str) -> Target:
    """The published ids and scaling where a format holds keys; feasign has no dense values, so they go into buckets."""
    if kind in COLUMNAR:
        return Target(kind, preset("criteo"), raw=True)
    if kind != "feasign":
        return Target(kind, preset("criteo-paddle"), raw=False)
    schema = preset("criteo")
    buckets = tuple(
        Slot(f"B{i}", bucket=Bucket(column.name, 0.0, 12.0, 48)) for i, column in enumerate(schema.dense, 1)
    )
    return Target(kind, replace(schema, slots=(*schema.slots, *buckets)), raw=False)


def _piece(rows: Any, target: Target) -> Piece:
    """Rows as they would be read from a raw file."""
    if target.raw:
        return Piece(None, rows)
    lines = raw_lines(rows, "\t", quote=False)
    form = load("criteo")
    assert isinstance(form, Lines)
    parsed = form.parser(target.schema, lines[: lines.index(b"\n")], "")(lines, "stop")
    assert not parsed.bad, parsed.bad
    return Piece(parsed.batch, rows)


def columns(features: Features, labels: NDArray[np.int8]) -> Any:
    """Drawn rows as an Arrow record batch with Criteo's columns."""
    import pyarrow as pa

    made: dict[str, Any] = {"click": pa.array(labels)}
    for i, count in enumerate(COUNTS):
        mask = features.missing[count.group] if count.group else None
        made[f"I{i + 1}"] = pa.array(features.counts[i], mask=mask)
    ends = pa.py_buffer(np.arange(0, 8 * (BLOCK + 1), 8, dtype=np.int32))
    present = [pa.py_buffer(np.packbits(~absent, bitorder="little")) for absent in features.missing]
    for j, category in enumerate(CATEGORIES):
        values = features.values[j]
        text = np.stack([_hex()[values >> np.uint32(16)], _hex()[values & np.uint32(0xFFFF)]], axis=1)
        flags = present[category.group] if category.group else None
        made[f"C{j + 1}"] = pa.StringArray.from_buffers(BLOCK, ends, pa.py_buffer(text), flags)
    return pa.RecordBatch.from_pydict(made)


@cache
def _hex() -> NDArray[np.uint32]:
    """Four hexadecimal digits of every 16-bit number, as the four bytes of one number."""
    return np.frombuffer("".join(f"{i:04x}" for i in range(1 << 16)).encode(), np.uint32)


def _shares(whole: int, parts: int) -> list[int]:
    return [whole * (i + 1) // parts - whole * i // parts for i in range(parts)]


def _note(out: Path, options: Options, result: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / _NOTE).write_text(json.dumps({"options": asdict(options), "result": result}, indent=1) + "\n")


def _make_room(out: Path, overwrite: bool) -> None:
    """Old parts must not mix with new ones; only what an earlier call made is removed."""
    if not out.exists() or not any(out.iterdir()):
        return
    if not overwrite or not (out / _NOTE).exists():
        what = "--overwrite replaces it" if (out / _NOTE).exists() else "choose a folder that is new or empty"
        raise DataError(f"{out} is not empty", what)
    for path in out.iterdir():
        if path.is_dir() and (path.name in ("train", "test") or (len(path.name) == 8 and path.name.isdigit())):
            shutil.rmtree(path)
    (out / "schema.yaml").unlink(missing_ok=True)
    (out / _NOTE).unlink()
