"""A user's own stream: any iterable of (data, day, pass)."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from clickfleet.config.plugins import Plugin
from clickfleet.config.sections import PassLimits
from clickfleet.data.batch import Batch
from clickfleet.data.files import expand
from clickfleet.errors import DataError
from clickfleet.online.passes import (
    GatheredItems,
    LateFiles,
    Pass,
    PassEnd,
    Patience,
    Position,
    check_files,
    parse_day,
)


class Item(NamedTuple):
    """What a stream returned."""

    data: Any
    day: int
    number: int
    arrived_s: float = 0.0


class IterableSource:
    """The passes of an iterable. Days must not decrease, and numbers must increase within a day.

    After a restart, the iterable must return the same items; those already trained on are skipped. If it has a method
    `seek(day, pass)`, this is called instead, with the last pass trained on.

    With `limits`, an item is not a pass but a part of one: a pass has the items of some seconds, or those with enough rows, and is
    named after the last of them. A thread reads the iterable, so that a pass ends even if no item follows.
    """

    format: Plugin | None = None
    backlog: int | None = None
    status: dict[str, Any] | None = None

    def __init__(
        self,
        stream: Iterable[tuple[Any, int, int]],
        end_day: int | None = None,
        limits: PassLimits | None = None,
        count_rows: Callable[[str], int] = lambda path: 1,
    ) -> None:
        self.stream, self.end_day, self.limits = stream, end_day, limits
        self._count_rows = count_rows
        self._items: Iterator[Any] | None = None
        self._pump: _Pump | None = None
        self._seeking = False
        """Whether items that were trained on before a restart may come."""
        self._put_back: Item | None = None
        """An item that was read and belongs to the next pass."""

    def after(self, position: Position | None, patience: Patience) -> Pass | None:
        here = (0, 0) if position is None else (position["day"], position["pass"])
        self._start(position)
        first = self._next(here, patience)
        if first is None:
            return None
        return self._pass([first]) if self.limits is None else self._gather(first, patience)

    def _start(self, position: Position | None) -> None:
        if self._items is not None:
            return
        self._seeking = position is not None
        if position is not None and hasattr(self.stream, "seek"):
            self.stream.seek(position["day"], position["pass"])
        self._items = iter(self.stream)
        if self.limits is not None:
            self._pump = _Pump(self._items)

    def _next(
        self, here: tuple[int, int], patience: Patience, wait: Callable[[], float | None] = lambda: None
    ) -> Item | None:
        """Return the next item after a place; None at the end, or if `wait` returned 0 before it came."""
        while (item := self._read(patience, wait)) is not None:
            if (item.day, item.number) > here:
                self._seeking = False
                return None if self.end_day is not None and item.day > self.end_day else item
            if not self._seeking:
                raise DataError(
                    f"the stream returned {item.day} pass {item.number} after {here[0]} pass {here[1]}",
                    "days and passes must increase: a completed day cannot be trained on again",
                )
        return None

    def _read(self, patience: Patience, wait: Callable[[], float | None]) -> Item | None:
        if self._put_back is not None:
            item, self._put_back = self._put_back, None
            return item
        assert self._items is not None
        if self._pump is not None:
            return self._pump.next(patience, wait)
        return next((checked(item) for item in self._items), None)

    def _gather(self, first: Item, patience: Patience) -> Pass:
        """Add the items that follow until the pass ends. Files and data in memory are not mixed, and neither are days."""
        assert self.limits is not None
        end, items = PassEnd(self.limits), [first]
        end.add(self._rows(first.data))
        while not end.reached:
            item = self._next((items[-1].day, items[-1].number), patience, lambda: end.left_s)
            if item is None:
                break
            if item.day != first.day or _is_files(item.data) != _is_files(first.data):
                self._put_back = item
                break
            items.append(item)
            end.add(self._rows(item.data))
        return self._pass(items)

    def _rows(self, data: Any) -> int:
        if self.limits is None or self.limits.rows is None:
            return 1
        if _is_files(data):
            return sum(map(self._count_rows, expand(data))) if data else 0
        rows = length(data)
        if rows is None:
            raise DataError(
                f"online.pass.rows cannot count the rows of a {type(data).__name__}",
                "yield frames, tables, mappings of arrays, lists or batches; or set only online.pass.seconds",
            )
        return rows

    def _pass(self, items: Sequence[Item]) -> Pass:
        last = items[-1]
        position: Position = {"day": last.day, "pass": last.number}
        span_s = None
        if self.limits is not None:
            position["items"] = len(items)
            span_s = items[0].arrived_s, last.arrived_s
        if _is_files(last.data):
            files = tuple(path for item in items if item.data for path in expand(item.data))
            sizes = tuple(-1 if "://" in path else os.path.getsize(path) for path in files)
            return Pass(last.day, last.number, files, position=position, sizes=sizes)
        data = last.data if self.limits is None else GatheredItems(tuple(item.data for item in items))
        return Pass(last.day, last.number, data, span_s=span_s, position=position)

    def again(self, planned: Pass, patience: Patience, before: Position | None = None) -> Pass:
        if planned.in_files:
            if wrong := check_files(planned):
                raise DataError(f"{wrong[0]} changed after {planned.name} had begun", "restore it")
            self._seeking = True  # its items come again
            return planned
        self._start(before)
        here = (0, 0) if before is None else (before["day"], before["pass"])
        items: list[Item] = []
        while len(items) < planned.position["items"]:
            item = self._next(here, patience)
            if item is None or (item.day, item.number) > planned.place:
                raise DataError(
                    f"the stream does not return the {planned.position['items']} items of {planned.name} again"
                )
            items.append(item)
            here = item.day, item.number
        return self._pass(items)

    def late_files(self, read: Sequence[Pass]) -> list[LateFiles]:
        return []

    def recall(self, planned: Sequence[Pass]) -> None: ...

    def close(self) -> None:
        if self._pump is not None:
            self._pump.close()
        elif self._items is not None and hasattr(self._items, "close"):
            self._items.close()


def checked(item: Any) -> Item:
    """Return what a stream returned, after a check of its form."""
    try:
        data, day, number = item
        parse_day(day, "a pass of the stream")
        return Item(data, day, number, time.time())
    except (TypeError, ValueError):
        raise DataError(
            f"the stream returned {type(item).__name__} {item!r:.80}",
            "return (data, day, pass), with the day as YYYYMMDD",
        ) from None


def length(data: Any) -> int | None:
    """Return the number of rows of data in memory, or None if it must be read to know.

    >>> length({"label": [0, 1, 1]}), length([{"label": 0}]), length(iter([]))
    (3, 1, None)
    """
    if isinstance(data, Batch):
        return len(data)
    if isinstance(data, Mapping):
        return length(next(iter(data.values()), []))
    if isinstance(data, list | tuple) and data and isinstance(data[0], Batch):
        return sum(map(len, data))
    return len(data) if hasattr(data, "__len__") else None


def _is_files(data: Any) -> bool:
    several = isinstance(data, list | tuple) and all(isinstance(item, str | Path) for item in data)
    return isinstance(data, str | Path) or several


AHEAD_ITEMS = 256
"""Items that are read ahead of the passes."""
SLICE_S = 0.1
"""Longest wait in one piece: the run may end meanwhile."""


@dataclass
class _End:
    """The end of an iterable, or its failure."""

    error: BaseException | None = None


class _Pump:
    """Reads an iterable in a thread, so that a reader can stop waiting for it."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._ready: queue.Queue[Item | _End] = queue.Queue(AHEAD_ITEMS)
        self._stop = False
        self._thread = threading.Thread(target=self._read, name="clickfleet-stream", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for item in self._items:
                if not self._put(checked(item)):
                    return
            self._put(_End())
        except BaseException as error:
            self._put(_End(error))

    def _put(self, item: Item | _End) -> bool:
        while not self._stop:
            try:
                self._ready.put(item, timeout=SLICE_S)
                return True
            except queue.Full:
                continue
        return False

    def next(self, patience: Patience, wait: Callable[[], float | None]) -> Item | None:
        """Return the next item; None at the end, or when `wait`, which returns the seconds to wait or None, returns 0."""
        while True:
            left = wait()
            try:
                item = self._ready.get(timeout=SLICE_S if left is None else min(max(left, 0.0), SLICE_S))
            except queue.Empty:
                if left is not None and left <= 0:
                    return None
                patience.check()
                continue
            if isinstance(item, _End):
                self._put(item)  # for the next call
                if item.error is not None:
                    raise item.error
                return None
            return item

    def close(self) -> None:
        self._stop = True
        self._thread.join(SLICE_S * 5)  # it may wait for the user's iterable, which nothing can interrupt
        if not self._thread.is_alive() and hasattr(self._items, "close"):
            self._items.close()
