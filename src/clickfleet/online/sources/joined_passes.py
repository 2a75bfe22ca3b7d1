"""Passes of rows that are joined from show logs and feedback while the run trains.

A pass ends when it has enough rows, or some time after its first one. It never spans two days, by the clocks of the logs. Its rows are
in files in the run folder, like those of a topic, because a run that was killed in a pass must read the same rows again. The state of
the join moves with the passes: it is committed together with the rows of each. A checkpoint names the last pass that was trained on.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from clickfleet.config.load import Config
from clickfleet.config.plugins import Plugin
from clickfleet.config.sections import PassLimits
from clickfleet.data.dataset import schema_of
from clickfleet.errors import CheckpointError, DataError
from clickfleet.online.joiner import JoinRules
from clickfleet.online.passes import LateFiles, Pass, Patience, Position, check_files, number_of, parse_day
from clickfleet.online.row_join import JoinedPart, JoinSettings, RowJoin
from clickfleet.online.sources.messages import PARTS_PER_WORKER, split_evenly
from clickfleet.store import checkpoint, run_folder
from clickfleet.training import modes

PASS_ROWS, PASS_S = 20_000, 10.0
PRUNED_EVERY = 16
"""Files of passes that no checkpoint needs are removed after so many passes."""


class JoinedPasses:
    """The passes of a join; its state and files are in the run folder."""

    format: Plugin | None = Plugin("joined")
    backlog: int | None = None

    def __init__(
        self,
        config: Config,
        zone: ZoneInfo,
        run: Path,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        assert config.online.join is not None
        join, online = config.online.join, config.online
        self.config, self.zone, self.run = config, zone, run
        self.end_day = None if online.end_day is None else parse_day(online.end_day, "online.end_day")
        start_us = 0
        if online.start_day is not None:
            start = parse_day(online.start_day, "online.start_day")
            start_us = round(datetime.datetime.combine(start, datetime.time(), zone).timestamp() * 1e6)
        limits = online.pass_ or PassLimits(PASS_S if join.interval is None else join.interval, join.rows_per_pass)
        self.most = limits.rows or PASS_ROWS
        self.seconds = math.inf if limits.seconds is None else limits.seconds
        rules = JoinRules(join.wait, join.window, schema_of(config).label_columns, join.store_limit)
        settings = JoinSettings(
            join.shows, join.feedback, rules, join.corrections == "learn", join.kafka_options, start_us
        )
        self.workers = config.cluster.workers if modes.distributed(config) else 1
        self.join = RowJoin(settings, run / "join", run / "spool", warn, clock=clock, elapsed=elapsed)
        self.status: dict[str, Any] | None = self.join.status()
        self._passes = 0

    def after(self, position: Position | None, patience: Patience) -> Pass | None:
        done, last = 0 if position is None else position["join"], self.join.facts.get("pass")
        if last is not None and last["position"]["join"] != done:
            if last["position"]["join"] == done + 1:  # it was joined, but not begun
                return Pass.from_dict(last)
            raise DataError(
                f"the join in {self.run / 'join'} has made {last['position']['join']:,} passes, but the run continues after {done:,}",
                "restore passes.jsonl and spool/, or remove join/ and spool/ to join the logs from their beginning",
            )
        self.join.patience = patience
        day = None if position is None else parse_day(position["day"], "the position")
        part = self.join.gather(self.most, self.seconds, lambda part: self._is_over(day, part))
        today = self._day(part.begun_us or part.clock_us)
        if day is not None:
            today = max(today, day)
        if self.end_day is not None and today > self.end_day:
            return None
        number = position["pass"] + 1 if position is not None and day == today else 1
        return self._commit(today, number, done + 1, part)

    def _is_over(self, day: datetime.date | None, part: JoinedPart) -> bool:
        """Return whether a pass must end because another day, or the end of the run, has begun."""
        if not part.clock_us:
            return False
        today, begun = self._day(part.clock_us), self._day(part.begun_us) if part.rows else None
        over = self.end_day is not None and today > self.end_day
        return over or (begun is not None and today > max(begun, day or begun))

    def _day(self, clock_us: int) -> datetime.date:
        return datetime.datetime.fromtimestamp(clock_us / 1e6, self.zone).date()

    def _commit(self, day: datetime.date, number: int, join: int, part: JoinedPart) -> Pass:
        counts = self._shares(part.rows)
        name = f"{join:08d}-{number_of(day)}-{number}"
        names = [f"{name}.arrow"] if len(counts) == 1 else [f"{name}.{i:03d}.arrow" for i in range(len(counts))]
        shares = {name: count for name, count in zip(names, counts, strict=True) if count}
        planned = Pass(
            number_of(day),
            number,
            tuple(str(self.join.out / name) for name in shares),
            span_s=part.span_s,
            position={"day": number_of(day), "pass": number, "join": join},
        )
        self.join.commit(part, shares, lambda sizes: {"pass": replace(planned, sizes=sizes).to_dict()})
        self.status = self.join.status()
        self._passes += 1
        if self._passes % PRUNED_EVERY == 0:
            self._prune()
        return Pass.from_dict(self.join.facts["pass"])

    def _shares(self, rows: int) -> list[int]:
        """Return the number of rows of each file: for several workers of a cluster, several files each."""
        if self.workers == 1:
            return [rows]
        each = min(PARTS_PER_WORKER, rows // self.config.data.batch_rows // self.workers)
        return split_evenly(rows, max(1, min(rows, self.workers * max(each, 1))))

    def again(self, planned: Pass, patience: Patience, before: Position | None = None) -> Pass:
        if wrong := check_files(planned):
            raise DataError(
                f"{wrong[0]} is missing or has another size, but {planned.name} had begun",
                "restore it: its rows were joined, and the join does not make them again",
            )
        return planned

    def _prune(self) -> None:
        """Remove the files of passes that every kept checkpoint has learned."""
        folder = self.run / "checkpoints"
        learned = []
        for step in checkpoint.steps(folder):
            try:
                position = run_folder.read_state(checkpoint.step_folder(folder, step))["online"]["position"]
            except (CheckpointError, KeyError):  # it is being written or removed
                return
            learned.append(0 if position is None else position["join"])
        for path in self.join.out.glob("*.arrow"):
            number = path.name.partition("-")[0]
            if number.isdigit() and int(number) <= min(learned, default=0):
                path.unlink(missing_ok=True)

    def late_files(self, read: Sequence[Pass]) -> list[LateFiles]:
        return []

    def recall(self, planned: Sequence[Pass]) -> None: ...

    def close(self) -> None:
        self.join.close()
