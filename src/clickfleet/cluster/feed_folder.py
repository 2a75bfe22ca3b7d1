"""The folder with the rows of data in memory, from which the workers of a run read them."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from clickfleet.config.load import Config
from clickfleet.data.batch import Batch
from clickfleet.data.feed_files import FeedFiles, write_rows
from clickfleet.errors import ConfigError
from clickfleet.store.mirror import FEED


class FeedFolder:
    """A part of the run folder that lives as long as the run. What an earlier run has left there is removed.

    `reached`: workers on other hosts see the run folder. `owner` tells the folders of several processes apart.
    """

    def __init__(self, run: Path, config: Config, *, reached: bool = True, owner: str = "driver") -> None:
        self.folder = run / FEED / owner
        self._parent, self._reached = run / FEED, reached or config.cluster.address is None
        self._numbers = itertools.count()
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, name: str, rows: Iterable[Batch]) -> FeedFiles:
        """Write rows for the workers."""
        if not self._reached:
            raise ConfigError(
                "data in memory reaches workers on other hosts through the run folder, and run.dir is a URL",
                "set run.dir to a folder that all hosts see, or give files",
            )
        return write_rows(rows, self.folder / f"{name}-{next(self._numbers)}")

    def clear(self) -> None:
        """Remove all rows."""
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            self._parent.rmdir()
        except OSError:  # another process has rows there, or there were none
            return

    def __enter__(self) -> FeedFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
