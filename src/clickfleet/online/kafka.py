"""A Kafka topic as passes: offset ranges that are written down before they are trained on, their records in a file.

The offsets live in our checkpoints and in the plan of the run, not in the broker: a partition is read from where the last finished pass
ended, by assignment, so no rebalance can take it away and no poll interval can run out while a pass is trained on. A pass ends after
`rows_per_pass` rows, or when `interval` of event time is over in every partition; it never spans two days. Records that come later than
their day or interval are part of the pass that is open then, and counted. A partition with nothing to read does not hold the others up
once another one has gone beyond the end, or `idle` after the end by the clock.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from zoneinfo import ZoneInfo

from clickfleet.config import Config
from clickfleet.errors import ConfigError, DataError
from clickfleet.online.broker import Broker, Record
from clickfleet.online.messages import Spool
from clickfleet.online.passes import Pass, Patience, Position, check_files, number_of, parse_day
from clickfleet.sections import Plugin

KEEP_SPOOLS = 8


@dataclass
class _Partition:
    """How far one partition was read."""

    start: int
    """Its first offset of this pass."""
    next: int
    ahead: Record | None = None
    """A record beyond the end of the pass, which the next one begins with."""
    records: list[Record] = field(default_factory=list)


class Topic:
    """The passes of a topic; its files are written into `spool`."""

    def __init__(
        self,
        config: Config,
        zone: ZoneInfo,
        spool: Path,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        assert config.online.kafka is not None
        self.config, self.kafka, self.zone, self.warn, self.clock = config, config.online.kafka, zone, warn, clock
        if (self.kafka.rows_per_pass is None) == (self.kafka.interval is None):
            raise ConfigError("online.kafka needs rows_per_pass or interval", "give one of them")
        if self.kafka.interval is not None and not 1 <= self.kafka.interval <= 86400:
            raise ConfigError("online.kafka.interval must lie between 1s and 1d")
        self.spool = Spool(spool, config)
        self.format = Plugin("arrow") if self.kafka.format != "text" else None
        online = config.online
        self.first_day = None if online.start_day is None else parse_day(online.start_day, "online.start_day")
        self.end_day = None if online.end_day is None else parse_day(online.end_day, "online.end_day")
        self.broker = Broker(self.kafka)
        self._stand: dict[str, int] | None = None
        """Offsets after the last pass, as its position has them."""
        self._rest: list[Record] = []
        """Records that came with it but belong to passes after it."""

    def after(self, position: Position | None, patience: Patience) -> Pass | None:
        day, number = None, 1
        if position is not None and not position["day_over"]:
            day, number = parse_day(position["day"], "the position"), position["pass"] + 1
        elif position is not None and self.end_day is not None and position["day"] >= number_of(self.end_day):
            return None
        if position is not None and position["offsets"] == self._stand:  # the client stands there
            parts = {int(p): _Partition(o, o) for p, o in position["offsets"].items()}
        else:
            parts, self._rest = self._start(position, patience), []
        if day is None:
            day = self._first_day(parts, patience)
            if day is None:
                return None
        midnight = self._midnight(day)
        begin = datetime.datetime.combine(day, datetime.time(), self.zone).timestamp()
        end_s = self._end_of(begin, midnight, begin if number == 1 else position["end_s"])  # type: ignore[index]
        rows, late, full = 0, 0, False
        times: list[float] = []
        arrived, self._rest = self._rest, []
        while True:
            for record in arrived:
                here, happened = parts[record.partition], record.time_s
                if happened >= end_s:
                    here.ahead = here.ahead or record
                if full or here.ahead is not None:
                    self._rest.append(record)
                    continue
                here.records.append(record)
                here.next = record.offset + 1
                rows += self.spool.rows_of(record)
                late += happened < begin
                times.append(happened)
                full = self.kafka.rows_per_pass is not None and rows >= self.kafka.rows_per_pass
            if full:
                break
            arrived = []
            if self._over(parts, end_s):
                if rows or end_s == midnight:
                    break
                coming = [part.ahead.time_s for part in parts.values() if part.ahead is not None]
                end_s = self._end_of(begin, midnight, min(coming, default=end_s))  # nothing happened in this interval
                for part in parts.values():
                    part.ahead = None
                arrived, self._rest = self._rest, []
            arrived = arrived or self.broker.records(patience)
        if late:
            self.warn(f"{day:%Y%m%d} pass {number} has {late:,} records of days before")
        return self._finish(day, number, parts, end_s, not full and end_s == midnight, times)

    def _first_day(self, parts: dict[int, _Partition], patience: Patience) -> datetime.date | None:
        """The earliest day that any partition goes on with, none before the run's first; None where that is after its last."""
        seen: dict[int, datetime.date] = {}
        arrived, self._rest = self._rest, []
        while True:
            for record in arrived:
                here, p = parts[record.partition], record.partition
                day = datetime.datetime.fromtimestamp(record.time_s, self.zone).date()
                if self.first_day is not None and day < self.first_day and p not in seen:
                    here.start = here.next = record.offset + 1  # passed over
                    continue
                seen.setdefault(p, day)
                self._rest.append(record)
            if seen and all(p in seen or self.broker.is_idle(p) for p in parts):
                break
            arrived = self.broker.records(patience)
        first = min(seen.values())
        return None if self.end_day is not None and first > self.end_day else first

    def _start(self, position: Position | None, patience: Patience) -> dict[int, _Partition]:
        partitions = self.broker.partitions(patience, known=position is not None)
        known = {} if position is None else {int(p): o for p, o in position["offsets"].items()}
        if missing := [p for p in known if p not in partitions]:
            raise DataError(
                f"the topic {self.kafka.topic} has lost partition {missing[0]}: was it deleted and made anew?",
                "start a new run, or name the right topic",
            )
        parts: dict[int, _Partition] = {}
        for p in partitions:
            low, high = self.broker.held(p, patience)
            start = known.get(p, low if position is not None or self.kafka.start == "earliest" else high)
            if not low <= start <= high:
                raise DataError(
                    f"partition {p} of {self.kafka.topic} holds offsets {low} to {high}, and the run goes on at {start}: "
                    "records were lost to the topic's retention, or the topic was made anew",
                    "raise the topic's retention; a new run starts from what is there",
                )
            parts[p] = _Partition(start, start)
        self.broker.assign({p: part.start for p, part in parts.items()})
        return parts

    def _over(self, parts: dict[int, _Partition], end_s: float) -> bool:
        beyond = [part.ahead is not None for part in parts.values()]
        idle = [self.broker.is_idle(p) for p in parts]
        if not all(a or b for a, b in zip(beyond, idle, strict=True)):
            return False
        return any(beyond) or self.clock() >= end_s + self.kafka.idle

    def _midnight(self, day: datetime.date) -> float:
        """When a day ends."""
        return datetime.datetime.combine(day + datetime.timedelta(days=1), datetime.time(), self.zone).timestamp()

    def _end_of(self, begin: float, midnight: float, after: float) -> float:
        """Where a pass must end that goes on at a moment: at midnight, or at the end of its interval."""
        if self.kafka.interval is None:
            return midnight
        return min(begin + ((after - begin) // self.kafka.interval + 1) * self.kafka.interval, midnight)

    def _finish(
        self,
        day: datetime.date,
        number: int,
        parts: dict[int, _Partition],
        end_s: float,
        day_over: bool,
        times: list[float],
    ) -> Pass:
        files, sizes = self.spool.write(
            f"{number_of(day)}-{number:04d}", {p: part.records for p, part in parts.items()}
        )
        self.spool.prune(KEEP_SPOOLS)
        self._stand = {str(p): part.next for p, part in parts.items()}
        return Pass(
            number_of(day),
            number,
            files,
            last=day_over,
            span_s=(min(times), max(times)) if times else None,
            position={
                "day": number_of(day),
                "pass": number,
                "day_over": day_over,
                "offsets": {str(p): part.next for p, part in parts.items()},
                "ranges": {str(p): [part.start, part.next] for p, part in parts.items()},
                "end_s": end_s,
            },
            sizes=sizes,
        )

    def again(self, planned: Pass, patience: Patience) -> Pass:
        if not check_files(planned):
            return planned
        ranges = {int(p): tuple(both) for p, both in planned.position["ranges"].items()}
        wanted = {p: both for p, both in ranges.items() if both[1] > both[0]}
        self._start({**planned.position, "offsets": {p: first for p, (first, _) in ranges.items()}}, patience)
        parts = {p: _Partition(first, first) for p, (first, _) in ranges.items()}
        while any(parts[p].next < last for p, (_, last) in wanted.items()):
            for record in self.broker.records(patience):
                here = parts[record.partition]
                if record.offset < ranges[record.partition][1]:
                    here.records.append(record)
                here.next = record.offset + 1
        self._stand = None
        name = f"{planned.day}-{planned.number:04d}"
        files, sizes = self.spool.write(name, {p: part.records for p, part in parts.items()})
        if (files, sizes) != (planned.data, planned.sizes):
            raise DataError(f"{planned.name}: its offsets hold other records of {self.kafka.topic} than before")
        return planned

    def close(self) -> None:
        self.broker.close()
