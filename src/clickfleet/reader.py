"""Files -> batches: in order or shuffled, by any number of threads, and able to go on exactly where it stopped.

reader = Reader("day_0.tsv", format="criteo", batch_size=1000, shuffle=100_000, seed=7)
for batch in reader:
    ...
state = reader.state()
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from clickfleet.bad_lines import ENOUGH_LINES, BadLines, Counters, Policy
from clickfleet.batch import Batch, concatenate
from clickfleet.blocks import Blocks, Place, Taken
from clickfleet.errors import ConfigError, DataError
from clickfleet.files import expand, split_files
from clickfleet.formats import Format, load
from clickfleet.formats._own import OwnLines
from clickfleet.schema import Schema
from clickfleet.shuffling import order

_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class _Position:
    """From where reading can begin again: before a block of the lane whose turn it is.

    Beside it the reader counts the rows handed out since: of that block, or of the window that begins there.
    """

    places: tuple[Place, ...]
    turn: int = 0
    skip: int = 0
    """Rows of that block to leave out."""
    window: int = 0
    """How many shuffled windows came before."""
    counters: Counters | None = None
    quarantine: int = 0


class Reader:
    """An iterable of batches; each iteration is one pass over the files, and goes on where an earlier one was left.

    `shuffle` is the number of rows shuffled at a time, or "global" for all of them in memory; it also shuffles the
    files of each pass. `interleave` files are read by turns (default: 1 in order, 4 when shuffling).
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        schema: Schema | None = None,
        format: str | Format | Mapping[str, Any] = "criteo",  # noqa: A002
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
            raise ConfigError(f'data.shuffle must be a number of rows or "global", not {shuffle!r}')
        self.format = load(format, base or ".")
        self.format_name = format if isinstance(format, str) else type(self.format).__name__.strip("_").lower()
        self.schema = _schema(schema, self.format)
        self.files = split_files(expand(files, str(base)), *worker)
        self.batch_size = batch_size
        self.seed, self.threads = seed, threads
        self.require_labels = require_labels
        self.whole = True
        """The files are all there is: also a few lines are judged by max_bad_fraction."""
        self.counters = Counters()
        self.epoch = self._passed = 0
        self.window_rows: int | None = None if shuffle == "global" else -(-shuffle // batch_size) * batch_size
        self._shuffles = shuffle == "global" or shuffle > 0
        self._lanes = max(1, min(interleave or (4 if self._shuffles else 1), len(self.files)))
        self._bad = BadLines(bad_lines, max_bad_fraction, quarantine)
        self._position, self._used = self._start(), 0

    def _start(self) -> _Position:
        return _Position((Place(),) * self._lanes, counters=self.counters.copy(), quarantine=self._bad.mark())

    def _files(self) -> list[list[str]]:
        """The files of each lane in this pass."""
        files = [self.files[i] for i in order(len(self.files), self.seed, self.epoch)] if self._shuffles else self.files
        return [files[lane :: self._lanes] for lane in range(self._lanes)]

    def __iter__(self) -> Iterator[Batch]:
        blocks = Blocks(
            self._files(),
            self.format,
            self.schema,
            self._position.places,
            turn=self._position.turn,
            threads=self.threads,
            on_bad=self._bad.on_bad,
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

    def _in_order(self, blocks: Blocks) -> Iterator[Batch]:
        rest: list[Batch] = []
        rows = used = 0
        position = self._position
        for batch, position in self._rows(blocks):
            used = 0
            while rows + len(batch) - used >= self.batch_size:
                start, used = used, used + self.batch_size - rows
                ready = concatenate([*rest, batch[start:used]])
                rest, rows = [], 0
                yield self._hand_out(ready, position, used)
            if used < len(batch):
                rest.append(batch[used:])
                rows += len(batch) - used
                used = len(batch)
        if rest:
            yield self._hand_out(concatenate(rest), position, used)

    def _windows(self, blocks: Blocks) -> Iterator[Batch]:
        source = self._rows(blocks)
        number, done = self._position.window, self._used
        rest: tuple[Batch, _Position] | None = None
        while True:
            parts: list[Batch] = []
            start: _Position | None = None
            rows = 0
            while self.window_rows is None or rows < self.window_rows:
                following, rest = rest or next(source, None), None
                if following is None:
                    break
                batch, position = following
                start = start or position
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
            start = replace(start, window=number)
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
        """The rows of each block not handed out before, with the position that leads to them."""
        places = list(self._position.places)
        skip = self._position.skip if self._shuffles else self._position.skip + self._used
        for taken in blocks:
            place = places[taken.lane]
            if taken.parsed is None:
                places[taken.lane] = Place(taken.file)
                continue
            line = place.line if taken.file == place.file and place.at else self.format.header_lines
            places[taken.lane] = Place(taken.file, taken.at, line)
            position = _Position(
                tuple(places), taken.lane, skip, counters=self.counters.copy(), quarantine=self._bad.mark()
            )
            batch = self._check(taken, line)
            places[taken.lane] = Place(taken.file, taken.end, line + taken.parsed.lines)
            if skip > len(batch):
                raise DataError(f"{taken.path}: has changed since the state was saved; it cannot be read on from there")
            if len(batch) > skip:
                yield batch[skip:], position
            skip = 0

    def _check(self, taken: Taken, line: int) -> Batch:
        assert taken.parsed is not None
        self.counters.bytes += taken.size
        self._bad.handle(taken.path, line, taken.parsed, self.counters, self.format_name)
        batch = taken.parsed.batch
        if self.require_labels and batch.labels is None and len(batch):
            raise DataError(
                f"{taken.path}: its rows have no label ({self.schema.label}), and training and evaluation need one",
                self.format.about_no_labels(self.schema),
            )
        return batch

    def state(self) -> dict[str, Any]:
        """Where the reader stands after the last batch it handed out: plain values for JSON, a few hundred bytes."""
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
        }

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a state to make sense."""
        return {
            "version": _VERSION,
            "schema": self.schema.hash,
            "files": hashlib.blake2b("\0".join(self.files).encode(), digest_size=8).hexdigest(),
            "interleave": self._lanes,
            "shuffle": self.window_rows if self.window_rows is not None else "global",
            "seed": self.seed if self._shuffles else None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to where another reader of the same files stood: the next batch is the one it would have handed out."""
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                raise DataError(
                    f"the saved reader state has {name} {state.get(name)!r}, this reader {mine!r}",
                    "resume with the same files, schema, shuffle, seed and interleave",
                )
        counters = Counters(**state["counters"])
        places = tuple(Place(*place) for place in state["places"])
        self._position = _Position(
            places, state["turn"], state["skip"], state["window"], counters.copy(), state["quarantine"]
        )
        self._used, self.epoch, self._passed = state["used"], state["epoch"], state.get("passed", 0)
        self.counters = counters
        self.counters.rows = state["rows"]
        self._bad.forget_after(state["quarantine"])


def _schema(schema: Schema | None, form: Format) -> Schema:
    if schema is not None:
        if isinstance(form, OwnLines) and form.schema is not None:
            schema.check_same(form.schema, "the given schema", "the format's own")
        return schema
    if form.schema is None:
        raise ConfigError(
            "this format does not say what its columns mean, so a schema is needed", "set data.schema, or name a preset"
        )
    return form.schema
