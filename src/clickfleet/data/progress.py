"""Show the progress of long operations on stderr: a bar on a terminal, else a line every ten seconds.

>>> with progress("counting", total=3) as bar:
...     for _ in range(3):
...         bar.advance(1)
>>> bar.done
3
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

INTERVAL_S = 10.0
"""Seconds between two lines without a terminal."""


class Bar:
    """Counts the work done and prints one line per interval."""

    def __init__(self, what: str, total: int | None, unit: str, stream: IO[str], interval_s: float) -> None:
        self.what, self.total, self.unit, self.done = what, total, unit, 0
        self._stream, self._interval_s = stream, interval_s
        self._start = self._shown = time.monotonic()

    def advance(self, amount: int) -> None:
        """Add `amount` to the work done."""
        self.done += amount
        now = time.monotonic()
        if now - self._shown >= self._interval_s:
            self._shown = now
            print(self._line(now), file=self._stream, flush=True)

    def expect(self, total: int | None) -> None:
        """Set the total amount, once it is known."""
        self.total = total

    def _line(self, now: float) -> str:
        share = f" ({self.done / self.total:.0%})" if self.total else ""
        speed = self.done / max(now - self._start, 1e-9)
        return f"{self.what}: {amount(self.done, self.unit)}{share}, {amount(round(speed), self.unit)}/s"


class _RichBar(Bar):
    """Shows the work done as a moving bar."""

    def __init__(self, what: str, total: int | None, unit: str, stream: IO[str]) -> None:
        from rich import progress as rich_progress
        from rich.console import Console

        super().__init__(what, total, unit, stream, float("inf"))
        counts: tuple[rich_progress.ProgressColumn, ...]
        if unit == "bytes":
            counts = (rich_progress.DownloadColumn(), rich_progress.TransferSpeedColumn())
        else:
            counts = (rich_progress.MofNCompleteColumn(), rich_progress.TextColumn(unit))
        self.rich = rich_progress.Progress(
            rich_progress.SpinnerColumn(),
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            *counts,
            rich_progress.TimeRemainingColumn(),
            console=Console(file=stream),
            transient=True,
        )
        self._task = self.rich.add_task(what, total=total)

    def advance(self, amount: int) -> None:
        self.done += amount
        self.rich.advance(self._task, amount)

    def expect(self, total: int | None) -> None:
        super().expect(total)
        self.rich.update(self._task, total=total)


@contextmanager
def progress(
    what: str,
    total: int | None = None,
    unit: str = "rows",
    stream: IO[str] | None = None,
    interval_s: float = INTERVAL_S,
) -> Iterator[Bar]:
    """Show a bar for `total` units of work (None: unknown). Call its `advance` during the work."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield Bar(what, total, unit, stream, interval_s)
        return
    bar = _RichBar(what, total, unit, stream)
    with bar.rich:
        yield bar


def amount(number: int, unit: str) -> str:
    """Return a number in readable form.

    >>> amount(4041125592, "bytes"), amount(1234567, "rows")
    ('4.04 GB', '1,234,567 rows')
    """
    if unit != "bytes":
        return f"{number:,} {unit}"
    size = float(number)
    for name in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {name}"
        size /= 1000
    return f"{size:.3g} TB"


class LiveBar:
    """A bar with text below it that wraps to the width of the terminal."""

    def __init__(self, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(file=stream), transient=True, auto_refresh=False)
        self._live.start()

    def show(self, share: float | None, text: str) -> None:
        """Show the fraction of work done (None: unknown) and the text below the bar."""
        from rich.console import Group
        from rich.padding import Padding
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        bar = ProgressBar(total=None if share is None else 1.0, completed=share or 0.0, width=60)
        self._live.update(Group(Padding(bar, 0), Text(text)), refresh=True)  # a padded bar ends its line

    def print(self, text: str) -> None:
        """Print a permanent line above the bar."""
        self._live.console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()
