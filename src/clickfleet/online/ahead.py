"""The rows of a pass, read ahead by a thread of their own while the pass before is trained on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from clickfleet.batch import Batch
from clickfleet.job import Source

AHEAD_BATCHES = 128


class Ahead:
    """A source whose batches wait in memory: `whole` keeps all of them, so that they can be scored before they are trained on."""

    def __init__(self, source: Source, *, whole: bool = False) -> None:
        self.source, self.schema, self.whole = source, source.schema, whole
        self.epoch = 0
        self.counters = source.counters
        self._state = source.state()
        self._ready: deque[tuple[Batch, dict[str, Any]]] = deque()
        self._change = threading.Condition()
        self._ended = self._stop = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Reading begins; without it, it begins with the first batch asked for."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="clickfleet-pass", daemon=True)
            self._thread.start()

    def _read(self) -> None:
        stream = iter(self.source)
        try:
            for batch in stream:
                with self._change:
                    while not (self.whole or self._stop) and len(self._ready) >= AHEAD_BATCHES:
                        self._change.wait()
                    if self._stop:
                        return
                    self._ready.append((batch, self.source.state()))
                    self._change.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            if hasattr(stream, "close"):
                stream.close()
            with self._change:
                self._ended = True
                self._change.notify_all()

    def all(self) -> list[Batch]:
        """Every batch that is still to come, once all are read; they stay to be iterated over."""
        assert self.whole
        self.start()
        with self._change:
            while not self._ended:
                self._change.wait()
        if self._error is not None:
            raise self._error
        return [batch for batch, _ in self._ready]

    def __iter__(self) -> Iterator[Batch]:
        self.start()
        while True:
            with self._change:
                while not self._ready and not self._ended:
                    self._change.wait()
                if not self._ready:
                    break
                batch, self._state = self._ready.popleft()
                self._change.notify_all()
            yield batch
        if self._error is not None:
            raise self._error

    def state(self) -> dict[str, Any]:
        """Where the source stood after the last batch handed out."""
        return self._state

    def restore(self, state: dict[str, Any], /) -> None:
        """Goes to where it stood; to be called before it is read."""
        assert self._thread is None
        self.source.restore(state)
        self.counters, self._state = self.source.counters, self.source.state()

    def close(self) -> None:
        with self._change:
            self._stop = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()
