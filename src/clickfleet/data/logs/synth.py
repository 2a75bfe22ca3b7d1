"""Generate click logs from a known model, the teacher, in any format, as plain parts or as timed folders per day."""

from __future__ import annotations

import datetime
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickfleet.data.batch import Floats
from clickfleet.data.formats import load
from clickfleet.data.logs.delayed_log import DelayedLog
from clickfleet.data.logs.interests import InterestTeacher
from clickfleet.data.logs.purchases import PurchaseTeacher
from clickfleet.data.logs.source import COLUMNAR, LogPiece, LogReport
from clickfleet.data.logs.target import ENDINGS, OutputFile, Target, raw_lines
from clickfleet.data.logs.teacher import BLOCK, LABELS, Teacher
from clickfleet.data.parsing.columns import Columns
from clickfleet.data.parsing.lines import Lines
from clickfleet.data.progress import progress
from clickfleet.data.schema import Bucket, Schema, Slot, preset, write_schema
from clickfleet.errors import ConfigError, DataError

_TRAIN, _TEST = 0, 1
_NOTE = "synth.json"


@dataclass(frozen=True)
class SynthOptions:
    """What to generate: `rows` in total, in `parts` files per folder. With `days`, in timed folders `<day>/<HHMM>`."""

    rows: int = 500_000
    test_rows: int = 50_000
    format: str = ""
    """Default: criteo, or csv for rows with histories, several labels or delays."""
    parts: int = 1
    days: int = 0
    seed: int = 7
    drift: float | None = None
    """Fraction of ids and effects replaced per day. Default: 0.1 with `days`, else 0."""
    start_day: str = "20260101"
    split_interval_min: int = 60
    done_file: str = "_DONE"
    histories: bool = False
    """Draw the visits of a shop: rows with the past events of a user, on which the click depends."""
    labels: tuple[str, ...] = ("click",)
    """click, or click and buy: a purchase is known only after a click. Two labels are those of a shop, too."""
    delays: dict[str, float] = field(default_factory=dict)
    """Mean seconds from a show to its click, and from a click to its purchase. The rows are then also written as `shows/` and
    `feedback/`, the logs of a server over `days` days, or over one."""

    def __post_init__(self) -> None:
        known = [label.name for label in LABELS]
        if not self.labels or list(self.labels) != known[: len(self.labels)]:
            raise ConfigError(f"unknown labels {','.join(self.labels)}", "choose click or click,buy")
        if self.delays and list(self.delays) != list(self.labels):
            raise ConfigError("name a delay for every label, in their order", "0s: the label comes with its show")
        if any(not 0 <= delay < math.inf for delay in self.delays.values()):
            raise ConfigError("a delay must be 0 or more")
        if not self.format:
            object.__setattr__(self, "format", "csv" if self.described else "criteo")
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

    @property
    def described(self) -> bool:
        """Whether the rows need a schema of their own: other columns than Criteo's, or logs of a server."""
        return self.histories or len(self.labels) > 1 or bool(self.delays)

    @property
    def span_s(self) -> tuple[float, float]:
        """The first and last time of the training rows, in seconds since 1970."""
        first = datetime.datetime.strptime(self.start_day, "%Y%m%d").replace(tzinfo=datetime.UTC).timestamp()
        return first, first + 86400 * (self.days or 1)

    def teacher(self, day: int) -> Teacher | InterestTeacher:
        drift = self.drift if self.drift is not None else 0.1 if self.days else 0.0
        kind = InterestTeacher if self.histories else PurchaseTeacher if len(self.labels) > 1 else Teacher
        return kind(self.seed, day, drift)

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
    target, files = _target(options), list(options.files(out))
    drawn = _draw_ahead(files, options, target, threads or min(os.cpu_count() or 1, 4))
    _note(out, options, {"rows": None})  # --overwrite can then replace an interrupted run
    rows = 0
    positive = np.zeros(len(options.labels), np.int64)
    judged: list[tuple[Floats, NDArray[np.int8]]] = []
    log = _delayed_log(out, options, target)
    with log or nullcontext(), progress(f"writing {out}", options.rows + options.test_rows) as bar:
        for file in files:
            with OutputFile(file.path, options.format) as sink:
                for _ in file.blocks():
                    content, header, probability, labels, table = next(drawn)
                    if log is not None and file.stream == _TRAIN:
                        log.add(table, labels)
                    count = labels.shape[1]
                    sink.write(content, count, header)
                    bar.advance(count)
                    if file.stream == _TEST or not options.test_rows:
                        judged.append((probability, labels))
                    if file.stream == _TRAIN:
                        rows, positive = rows + count, positive + labels.sum(1)
            if file.done is not None:
                file.done.touch()
    tasks = _best(*(np.concatenate(parts, 1) for parts in zip(*judged, strict=True)))
    for name, count in zip(options.labels, positive.tolist(), strict=True):
        tasks[name]["rate"] = count / rows
    result: LogReport = {"rows": rows, "test_rows": options.test_rows, "ctr": tasks["click"]["rate"]}
    result |= {"best_auc": tasks["click"]["best_auc"], "out": str(out)}
    if options.described or not target.raw:
        write_schema(target.result, out / "schema.yaml")
        result["schema"] = str(out / "schema.yaml")
    if len(tasks) > 1:
        result["tasks"] = tasks
    if log is not None:
        result |= {"shows": str(out / "shows"), "feedback": str(out / "feedback"), "events": log.feedback}
    _note(out, options, result)
    return result


def _delayed_log(out: Path, options: SynthOptions, target: Target) -> DelayedLog | None:
    if not options.delays:
        return None
    slots = [slot.source_name for slot in target.schema.slots if slot.bucket is None and not slot.rows_of]
    return DelayedLog(out, options.delays, slots, options.seed, options.span_s, options.rows)


def _best(probability: Floats, labels: NDArray[np.int8]) -> dict[str, dict[str, float]]:
    """Return the AUC of the true probabilities by label: over all rows and, of a purchase, over those with a click."""
    found = {"click": {"best_auc": auc(probability[0], labels[0])}}
    if len(labels) > 1:
        clicked = labels[0] == 1
        found["buy"] = {
            "best_auc": auc(probability[0] * probability[1], labels[1]),
            "best_auc_given": auc(probability[1, clicked], labels[1, clicked]),
        }
    return found


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


_Encoded = tuple[Any, bytes, Floats, NDArray[np.int8], Any]


def _draw_ahead(files: list[_File], options: SynthOptions, target: Target, threads: int) -> Iterator[_Encoded]:
    """Yield contents, probabilities, labels and raw columns of the blocks of all files in order, drawn ahead by several threads."""
    teacher = lru_cache(16)(options.teacher)

    def make(file: _File, block: int, low: int, high: int) -> _Encoded:
        drawn = teacher(file.day).rows(file.stream, block, len(options.labels))
        table = drawn.table().slice(low, high - low)
        piece = _piece(table, target, options.described)
        rows = slice(low, high)
        return target.encode(piece), target.header(piece), drawn.probability[:, rows], drawn.labels[:, rows], table

    waiting: deque[Future[_Encoded]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for file in files:
            teacher(file.day).prepare()  # once here, not in every thread
            for where in file.blocks():
                waiting.append(pool.submit(make, file, *where))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _target(options: SynthOptions) -> Target:
    """Return the target: with the published ids and scaling if the format stores keys. feasign buckets dense columns."""
    kind, labels = options.format, len(options.labels)
    raw = kind in COLUMNAR
    schema = options.teacher(0).schema(labels)
    if not raw and not options.described:
        schema = preset("criteo" if kind == "feasign" else "criteo-paddle")
    return Target(kind, _bucketed(schema) if kind == "feasign" else schema, raw)


def _bucketed(schema: Schema) -> Schema:
    buckets = tuple(
        Slot(f"B{i}", bucket=Bucket(column.name, 0.0, 12.0, 48)) for i, column in enumerate(schema.dense, 1)
    )
    return replace(schema, slots=(*schema.slots, *buckets))


def _piece(rows: Any, target: Target, described: bool) -> LogPiece:
    """Return rows as if read from a raw file."""
    if target.raw:
        return LogPiece(None, rows)
    if described:
        parsed = Columns(target.schema, rows.schema.names, "synth").parse(rows, "stop")
    else:
        lines = raw_lines(rows, "\t", quote=False)
        form = load("criteo")
        assert isinstance(form, Lines)
        parsed = form.parser(target.schema, lines[: lines.index(b"\n")], "")(lines, "stop")
    assert not parsed.bad, parsed.bad
    return LogPiece(parsed.batch, rows)


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
        if path.is_dir() and (
            path.name in ("train", "test", "shows", "feedback") or (len(path.name) == 8 and path.name.isdigit())
        ):
            shutil.rmtree(path)
    (out / "schema.yaml").unlink(missing_ok=True)
    (out / _NOTE).unlink()
