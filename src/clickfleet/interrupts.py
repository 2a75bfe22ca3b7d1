"""Signals that ask a run to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))


@contextmanager
def interruptible(
    stop: Callable[[int], None],
    limit_s: Callable[[], float] | None = None,
    force: Callable[[int], None] = lambda number: None,
) -> Iterator[None]:
    """The first SIGTERM, SIGINT or SIGHUP only calls `stop`; the second one does what it always does.

    If the block has not ended `limit_s` after the first signal, another thread calls `force`. A signal that was ignored stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    ended = threading.Event()

    def watch(number: int, limit: float) -> None:
        if not ended.wait(limit):
            force(number)

    def handle(number: int, frame: FrameType | None) -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        if limit_s is not None:
            threading.Thread(target=watch, args=(number, limit_s()), daemon=True, name="clickfleet-stop").start()
        stop(number)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        ended.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(number: int) -> NoReturn:
    """Ends the program as a signal does: by KeyboardInterrupt after SIGINT, else by SystemExit with 128 and its number."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
