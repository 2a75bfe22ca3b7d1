"""Read files as batches: in order or shuffled, with any number of threads, and able to resume at any batch.

reader = Reader("day_0.tsv", format="criteo", batch_size=1000, shuffle=100_000, seed=7)
for batch in reader:
    ...
state = reader.state()
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.config.plugins import Plugin
from clickfleet.data.bad_lines import ENOUGH_LINES, BadLines, Counters, Policy
from clickfleet.data.batch import Batch, SourceState, concatenate
from clickfleet.data.block_queue import BlockResult, Blocks, Place
from clickfleet.data.files import expand, split_files
from clickfleet.data.formats import Format, load
from clickfleet.data.parsing.user_format import UserFormatLines
from clickfleet.data.schema import Schema
from clickfleet.data.split import RowSplit
from clickfleet.errors import ConfigError, DataError

_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class _Position:
    """A position from which reading can resume: before a block of the lane whose turn it is.

    In addition, the reader counts the rows returned since: of that block, or of the window that starts there.
    """

    places: tuple[Place, ...]
    turn: int = 0
    skip: int = 0
    """Rows of that block to skip."""
    window: int = 0
    """Number of shuffled windows before this position."""
    counters: Counters | None = None
    quarantine: int = 0

    def reach(self) -> list[int]:
        """Return how many files of each lane were begun, with the block after this position."""
        lane = self.turn % len(self.places)
        return [place.file + (i == lane or place.at > 0) for i, place in enumerate(self.places)]


class Reader:
    """An iterable of batches. Each iteration is one pass over the files; it continues an interrupted one.

    `shuffle` is the number of rows to shuffle at a time, or "global" for all rows in memory. It also shuffles the files of
    each pass. `interleave` is the number of files to read in turn. Default: 1 in order, 4 when shuffling.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        schema: Schema | None = None,
        format: str | Format | Mapping[str, Any] | Plugin = "criteo",  # noqa: A002
        batch_size: int = 1000,
        *,
        shuffle: int | Literal["global"] = 0,
        seed: int = 0,
        threads: int = 1,
        interleave: int | None = None,
        worker: tuple[int, int] = (0, 1),
        bad_lines: Policy = "error",
        max_bad_fraction: float = 0.1,
        quarantine: str | None = None,
        require_labels: bool = False,
        base: str | Path = "",
    ) -> None:
        if batch_size < 1 or threads < 0 or (interleave is not None and interleave < 1):
            raise ConfigError("batch_size and interleave must be at least 1, threads at least 0")
        if shuffle != "global" and shuffle < 0:
            raise ConfigError(f'data.shuffle must be at least 0, or "global", not {shuffle!r}')
        format = _recognised(format, files, schema, str(base))  # noqa: A001
        self.format = load(format, base or ".")
        self.format_name = format if isinstance(format, str) else type(self.format).__name__.strip("_").lower()
        self.schema = _schema(schema, self.format)
        self.files = split_files(expand(files, str(base)), *worker)
        self.batch_size = batch_size
        self.seed, self.threads = seed, threads
        self.require_labels = require_labels
        self.whole = True
        """The files are the whole dataset, so that max_bad_fraction applies even if they have few lines."""
        self.split: RowSplit | None = None
        """The rows that are set aside. The reader returns the others or, with `validation`, these."""
        self.validation = False
        self.on_block: Callable[[BlockResult], None] = lambda block: None
        """Called with each block before its rows are returned."""
        self.every_bad_line = False
        """Describe every bad line to `on_block`, whatever becomes of it."""
        self.counters = Counters()
        self.epoch = self._passed = 0
        self.window_rows: int | None = None if shuffle == "global" else -(-shuffle // batch_size) * batch_size
        self._shuffles = shuffle == "global" or shuffle > 0
        self._lanes = max(1, min(interleave or (4 if self._shuffles else 1), len(self.files)))
        self._bad = BadLines(bad_lines, max_bad_fraction, quarantine)
        self._position, self._used = self._start(), 0
        self._reach: list[int] = [0] * self._lanes
        """Files of each lane that were begun: rows of them were returned, or are in the window that is being returned."""
        self._stop: list[int] | None = None
        """Files of each lane that belong to this pass, if they are not all: `split_off` gave the others to other readers."""

    def _start(self) -> _Position:
        return _Position((Place(),) * self._lanes, counters=self.counters.copy(), quarantine=self._bad.mark())

    def _files(self) -> list[list[str]]:
        """Return the files of each lane in this pass."""
        files = [self.files[i] for i in order(len(self.files), self.seed, self.epoch)] if self._shuffles else self.files
        lanes = [files[lane :: self._lanes] for lane in range(self._lanes)]
        return lanes if self._stop is None else [lane[:stop] for lane, stop in zip(lanes, self._stop, strict=True)]

    def __iter__(self) -> Iterator[Batch]:
        blocks = Blocks(
            self._files(),
            self.format,
            self.schema,
            self._position.places,
            turn=self._position.turn,
            threads=self.threads,
            on_bad="all" if self.every_bad_line and self._bad.policy == "skip" else self._bad.on_bad,
            ahead_rows=self.window_rows or 0,
        )
        try:
            yield from self._windows(blocks) if self._shuffles else self._in_order(blocks)
        finally:
            blocks.close()
            self._bad.close()
        self._bad.check(self.counters, enough=1 if self.whole else ENOUGH_LINES)
        self.epoch, self._passed = self.epoch + 1, 0
        self._position, self._used = self._start(), 0
        self._reach, self._stop = [0] * self._lanes, None

    def _in_order(self, blocks: Blocks) -> Iterator[Batch]:
        rest: list[Batch] = []
        rows = used = 0
        position = self._position
        for batch, position in self._rows(blocks):
            used, reach = 0, position.reach()
            while rows + len(batch) - used >= self.batch_size:
                start, used = used, used + self.batch_size - rows
                ready = concatenate([*rest, batch[start:used]])
                rest, rows = [], 0
                self._reach = reach
                yield self._hand_out(ready, position, used)
            if used < len(batch):
                rest.append(batch[used:])
                rows += len(batch) - used
                used = len(batch)
        if rest:
            self._reach = position.reach()
            yield self._hand_out(concatenate(rest), position, used)

    def _windows(self, blocks: Blocks) -> Iterator[Batch]:
        source = self._rows(blocks)
        number, done = self._position.window, self._used
        rest: tuple[Batch, _Position] | None = None
        while True:
            parts: list[Batch] = []
            start: _Position | None = None
            rows, reach = 0, self._reach
            while self.window_rows is None or rows < self.window_rows:
                following, rest = rest or next(source, None), None
                if following is None:
                    break
                batch, position = following
                start, reach = start or position, position.reach()
                if self.window_rows is not None and rows + len(batch) > self.window_rows:
                    cut = self.window_rows - rows
                    rest = batch[cut:], replace(position, skip=position.skip + cut)
                    batch = batch[:cut]
                parts.append(batch)
                rows += len(batch)
            if start is None:
                return
            window = concatenate(parts)
            parts = []
            shuffled = order(rows, self.seed, self.epoch, number + 1)
            start, self._reach = replace(start, window=number), reach
            for first in range(done, rows, self.batch_size):
                batch = window.take(shuffled[first : first + self.batch_size])
                yield self._hand_out(batch, start, first + len(batch))
            number, done = number + 1, 0

    def _hand_out(self, batch: Batch, position: _Position, used: int) -> Batch:
        self._position, self._used = position, used
        batch.epoch, batch.row = self.epoch, self._passed
        self._passed += len(batch)
        self.counters.rows += len(batch)
        return batch

    def _rows(self, blocks: Blocks) -> Iterator[tuple[Batch, _Position]]:
        """Yield the rows of each block that were not returned before, with the position to resume from."""
        places = list(self._position.places)
        skip = self._position.skip if self._shuffles else self._position.skip + self._used
        for result in blocks:
            place = places[result.lane]
            if result.parsed is None:
                places[result.lane] = Place(result.file)
                continue
            line = place.line if result.file == place.file and place.at else self.format.header_lines
            places[result.lane] = Place(result.file, result.at, line)
            position = _Position(
                tuple(places), result.lane, skip, counters=self.counters.copy(), quarantine=self._bad.mark()
            )
            batch = self._check(result, line)
            if self.split is not None:
                batch = self.split.part(result.path, line, batch, self.validation)
            places[result.lane] = Place(result.file, result.end, line + result.parsed.lines)
            if skip > len(batch):
                raise DataError(f"{result.path}: cannot resume, because the file has changed since the state was saved")
            if len(batch) > skip:
                yield batch[skip:], position
            skip = 0

    def _check(self, result: BlockResult, line: int) -> Batch:
        assert result.parsed is not None
        self.counters.bytes += result.size
        self._bad.handle(result.path, line, result.parsed, self.counters, self.format_name)
        self.on_block(result)
        batch = result.parsed.batch
        if self.require_labels and batch.labels is None and len(batch):
            raise DataError(
                f"{result.path}: the rows have no label ({', '.join(self.schema.label_columns)}); "
                "training and evaluation need one",
                self.format.about_no_labels(self.schema),
            )
        return batch

    def state(self) -> SourceState:
        """Return the position after the last batch: plain values for JSON, a few hundred bytes."""
        here = self._position
        assert here.counters is not None
        return {
            **self._identity(),
            "epoch": self.epoch,
            "passed": self._passed,
            "places": [list(asdict(place).values()) for place in here.places],
            "turn": here.turn,
            "skip": here.skip if self._shuffles else here.skip + self._used,
            "window": here.window,
            "used": self._used if self._shuffles else 0,
            "rows": self.counters.rows,
            "counters": here.counters.to_dict(),
            "quarantine": here.quarantine,
            "reach": self._reach,
            **({} if self._stop is None else {"stop": self._stop}),
        }

    def _identity(self) -> Mapping[str, Any]:
        """Return the settings that must match for a state to be valid."""
        return {
            "version": _VERSION,
            "schema": self.schema.hash,
            "files": _digest(self.files),
            "interleave": self._lanes,
            "shuffle": self.window_rows if self.window_rows is not None else "global",
            "seed": self.seed if self._shuffles else None,
            **({} if self.split is None else {"split": self.split.to_dict()}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the saved position of a reader of the same files."""
        identity = self._identity()
        for name in (*identity, "split"):
            if state.get(name) != identity.get(name):
                raise DataError(
                    f"the saved reader state has {name} {state.get(name)!r}, this reader has {identity.get(name)!r}",
                    "resume with the same files, schema, shuffle, seed, interleave and data.valid_share",
                )
        counters = Counters(**state["counters"])
        places = tuple(Place(*place) for place in state["places"])
        quarantined = state["quarantine"]  # None if another process wrote the lines before
        mark = self._bad.mark() if quarantined is None else quarantined
        self._position = _Position(places, state["turn"], state["skip"], state["window"], counters.copy(), mark)
        self._used, self.epoch, self._passed = state["used"], state["epoch"], state.get("passed", 0)
        self.counters = counters
        self.counters.rows = state["rows"]
        self._reach, self._stop = state.get("reach") or [len(lane) for lane in self._files()], state.get("stop")
        if quarantined is not None:
            self._bad.forget_after(quarantined)


def split_off(files: Sequence[str], state: SourceState) -> tuple[SourceState | None, list[str]]:
    """Divide the rest of an interrupted pass over some files. Return the state that reads the files begun, and the others.

    The state is None if no file was begun. With it, a reader of the same files returns the rows it would have returned of those
    begun, and then ends. A state of an older version is not divided, and neither are files that changed since.
    """
    if "reach" not in state or state["files"] != _digest(files):
        return state, []
    if not any(state["reach"]):
        return None, list(files)
    seed, lanes = state["seed"], state["interleave"]
    in_turn = list(range(len(files))) if seed is None else order(len(files), seed, state["epoch"]).tolist()
    by_lane = [in_turn[lane::lanes] for lane in range(lanes)]
    stop = state.get("stop") or list(map(len, by_lane))
    unread = [i for lane, first, last in zip(by_lane, state["reach"], stop, strict=True) for i in lane[first:last]]
    return {**state, "stop": state["reach"]}, [files[i] for i in sorted(unread)]


def _digest(files: Sequence[str]) -> str:
    return hashlib.blake2b("\0".join(files).encode(), digest_size=8).hexdigest()


def _recognised(form: Any, files: Any, schema: Schema | None, base: str) -> Any:
    """Return the format that the files have, if it is to be recognised."""
    chosen = Plugin(form) if isinstance(form, str) else Plugin.parse(form) if isinstance(form, Mapping) else form
    if not isinstance(chosen, Plugin) or not chosen.automatic:
        return form
    from clickfleet.data.recognition import sample

    return sample(expand(files, base), chosen, schema).format


def _schema(schema: Schema | None, form: Format) -> Schema:
    if schema is not None:
        if isinstance(form, UserFormatLines) and form.schema is not None:
            schema.check_same(form.schema, "the given schema", "the format's own")
        return schema
    if form.schema is None:
        raise ConfigError("this format has no default schema", "set data.schema or data.preset")
    return form.schema


def order(n: int, *seeds: int) -> NDArray[np.int64]:
    """Return a permutation of n rows that depends on `seeds` only.

    >>> order(5, 7, 0).tolist()
    [3, 1, 4, 0, 2]
    """
    state = np.uint64(0)
    mixed = np.empty(1, np.uint64)
    for seed in seeds:
        _core.mix64(
            np.array([int(state) ^ (seed & 0xFFFFFFFFFFFFFFFF)], np.uint64) + np.uint64(0x9E3779B97F4A7C15), mixed
        )
        state = mixed[0]
    draws = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + state
    _core.mix64(draws, draws)
    return np.argsort(draws, kind="stable")
