"""Signals that stop a run. This module imports nothing heavy: commands use it before they import torch."""

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
    """Call `stop` at the first SIGTERM, SIGINT or SIGHUP. The second one has its usual effect.

    If the block has not ended `limit_s` seconds after the first signal, another thread calls `force`. Ignored signals stay ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    handlers = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    ended = threading.Event()

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def force_after(limit: float, number: int) -> None:
        if not ended.wait(limit):
            force(number)

    def handle(number: int, frame: FrameType | None) -> None:
        restore()
        if limit_s is not None:
            threading.Thread(target=force_after, args=(limit_s(), number), daemon=True, name="clickfleet-stop").start()
        stop(number)

    for number in handlers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        ended.set()
        restore()


def leave(number: int) -> NoReturn:
    """End the program as a signal does: by KeyboardInterrupt after SIGINT, otherwise by SystemExit with 128 plus its number."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
