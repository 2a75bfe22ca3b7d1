"""Join show logs and feedback into a folder of rows, for training elsewhere or later.

    <out>/<YYYYMMDD>/<HHMM>/part-00000007.arrow   rows that came to be known in that interval, by the clocks of the logs
    <out>/<YYYYMMDD>/<HHMM>/_DONE                 no more rows of it will come

This is the layout of `online.dir`, and every part is complete or absent. The state of the join is in `<out>/.join`. A join that was
stopped or killed continues where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clickfleet.data.files import flush
from clickfleet.errors import ConfigError
from clickfleet.online.passes import Patience, StopWaitingError
from clickfleet.online.row_join import JoinedPart, JoinSettings, RowJoin
from clickfleet.store import atomic
from clickfleet.training.signals import interruptible

DONE = "_DONE"
PART_ROWS = 200_000
"""Maximum rows of a part."""
REPORT_S = 10.0
DAY_S = 86400


@dataclass(frozen=True)
class JoinResult:
    """What a join has done since it began, and what waits."""

    out: str
    parts: int
    counts: dict[str, Any]

    def to_dict(self) -> dict[str, object]:
        rows = sum(self.counts[kind] for kind in ("negatives", "labels", "corrections"))
        return {"out": self.out, "parts": self.parts, "rows": rows, **self.counts}


class FolderJoin:
    """Writes the rows of a join as parts of timed folders."""

    def __init__(
        self,
        settings: JoinSettings,
        out: Path,
        split_s: int,
        every_s: float,
        warn: Callable[[str], None],
        **clocks: Any,
    ) -> None:
        if split_s % 60 or not 60 <= split_s <= DAY_S or DAY_S % split_s:
            raise ConfigError(f"a split of {split_s} s does not divide a day", "give whole minutes, such as 1min or 1h")
        self.out, self.split_s, self.every_s = out, split_s, every_s
        self.join = RowJoin(settings, out / ".join", out, warn, **clocks)
        self._finish_folders()

    @property
    def parts(self) -> int:
        return int(self.join.facts.get("parts", 0))

    def step(self, once: bool = False) -> JoinedPart:
        """Join until a part is complete, or its folder is. With `once`, until everything that there is was read."""
        here = self.join.facts.get("folder")
        part = self.join.gather(PART_ROWS, self.every_s, lambda part: self._is_over(here, part), once=once)
        self._commit(part)
        return part

    def _is_over(self, here: int | None, part: JoinedPart) -> bool:
        """Return whether the clocks have left the folder of this part, or the one before it."""
        now, begun = self._folder_of(part.clock_us), self._folder_of(part.begun_us)
        return bool(part.clock_us) and ((here is not None and now > here) or (bool(part.rows) and now > begun))

    def _folder_of(self, clock_us: int) -> int:
        """Return the start of an interval, in seconds since 1970."""
        return clock_us // 1_000_000 // self.split_s * self.split_s

    def finish(self) -> None:
        """Decide everything that waits, and complete the last folder."""
        part = self.join.gather(PART_ROWS, 0.0, once=True)
        self.join.finish(part)
        self._commit(part, last=True)

    def _commit(self, part: JoinedPart, last: bool = False) -> None:
        before = self.join.facts.get("folder")
        folder = self._folder_of(part.begun_us if part.rows else part.clock_us)
        folder = folder if before is None else max(folder, before)
        after = max(folder, self._folder_of(part.clock_us)) + (self.split_s if last else 0)
        number = self.parts + bool(part.rows)
        shares = {f"{_name(folder)}/part-{number:08d}.arrow": part.rows} if part.rows else {}
        if not part.clock_us and not part.rows:
            return
        facts = {"parts": number, "folder": after, "before": folder if before is None else before}
        self.join.commit(part, shares, lambda sizes: facts)
        self._finish_folders()

    def _finish_folders(self) -> None:
        """Mark the folders before the current one as done; also those without rows, for which a reader waits too."""
        facts = self.join.facts
        if "folder" in facts:
            for start in range(facts["before"], facts["folder"], self.split_s):
                self._finish_folder(start)

    def _finish_folder(self, start: int) -> None:
        folder = self.out / _name(start)
        with atomic.write_errors(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / DONE).touch()
            flush(folder)

    def result(self) -> JoinResult:
        return JoinResult(str(self.out), self.parts, self.join.status())

    def close(self) -> None:
        self.join.close()


def _name(start: int) -> str:
    """Return the folder of an interval.

    >>> _name(1767225600 + 3660)
    '20260101/0101'
    """
    return time.strftime("%Y%m%d/%H%M", time.gmtime(start))


def join(
    settings: JoinSettings,
    out: Path | str,
    *,
    split_s: int = 3600,
    every_s: float = 10.0,
    once: bool = False,
    log: Callable[[str], None] = lambda text: None,
) -> tuple[JoinResult, int | None]:
    """Join logs into a folder until a signal comes; with `once`, until they are read, and then decide all shows that wait.

    Return what was done, and the signal.
    """
    received: list[int] = []
    patience = Patience(log, 1.0)

    def stop(number: int) -> None:
        received.append(number)
        patience.cancel()

    with interruptible(stop):
        work = FolderJoin(settings, Path(out), split_s, every_s, lambda text: log(f"warning: {text}"))
        work.join.patience = patience
        reported, before = time.monotonic(), work.result()
        try:
            while True:
                part = work.step(once)
                if time.monotonic() >= reported + REPORT_S or (once and part.ended):
                    log(_report(work.result(), before, time.monotonic() - reported))
                    reported, before = time.monotonic(), work.result()
                if once and part.ended:
                    break
            work.finish()
        except StopWaitingError:
            pass
        finally:
            done = work.result()
            work.close()
    return done, received[0] if received else None


def _report(now: JoinResult, before: JoinResult, seconds: float) -> str:
    counts = now.counts
    events = sum(counts[kind] - before.counts[kind] for kind in ("shows", "feedback"))
    rows = [f"{counts[kind]:,} {kind}" for kind in ("labels", "negatives", "corrections")]
    return (
        f"{counts['shows']:,} shows, {counts['feedback']:,} feedback ({events / max(seconds, 1e-9):,.0f} events/s): "
        f"{', '.join(rows)}; {counts['waiting']:,} shows wait"
    )
