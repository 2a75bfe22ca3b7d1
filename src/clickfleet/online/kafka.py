"""A Kafka topic as passes: offset ranges that are written down before they are trained on, their records in a file.

The offsets live in our checkpoints and in the plan of the run, not in the broker: a partition is read from where the last finished pass
ended, by assignment, so no rebalance can take it away and no poll interval can run out while a pass is trained on. A pass ends after
`rows_per_pass` rows, or when `interval` of event time is over in every partition, whichever comes first; it never spans two days. While
the run is behind, passes grow up to `max_rows_per_pass`. Records that come later than their day or interval are part of the pass that is
open then, and counted. A partition with nothing to read does not hold the others up once another one has gone beyond the end, or `idle`
after the end by the clock. Records whose time cannot be right are put aside, so that none moves the run to another day.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from clickfleet import modes
from clickfleet.config import Config
from clickfleet.errors import ConfigError, DataError
from clickfleet.online.broker import Broker, Record
from clickfleet.online.messages import Records, Spool, Spooled, Wrong
from clickfleet.online.passes import LateFiles, Pass, Patience, Position, check_files, number_of, parse_day
from clickfleet.sections import Plugin

KEEP_SPOOLS = 8
ONE_DAY = datetime.timedelta(days=1)
LATEST_S = datetime.datetime(9999, 1, 1, tzinfo=datetime.UTC).timestamp()
"""Later times are no dates."""
ENOUGH = 1000
"""So many records with wrong times and no other: something else is wrong."""
_WRONG = {
    "none": "it has no timestamp",
    "clock": "its timestamp {time} lies ahead of the clock by more than online.kafka.max_clock_skew",
    "gap": "its timestamp {time} lies after the open day by more than online.kafka.max_gap, and those after it do not",
}
"""Why the time of a record is not believed."""


@dataclass
class _Partition:
    """How far one partition was read."""

    start: int
    """Its first offset of this pass."""
    next: int
    ahead: Record | None = None
    """A record beyond the end of the pass, which the next one begins with."""
    records: list[Record] = field(default_factory=list)
    wrong: list[tuple[Record, str]] = field(default_factory=list)
    """Records whose time is not believed, with the reason's name."""

    def put_aside(self, record: Record, why: str) -> None:
        self.wrong.append((record, why))
        self.next = record.offset + 1


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
        if self.kafka.rows_per_pass is None and self.kafka.interval is None:
            raise ConfigError("online.kafka needs rows_per_pass or interval", "give one of them, or both")
        if self.kafka.interval is not None and not 1 <= self.kafka.interval <= 86400:
            raise ConfigError("online.kafka.interval must lie between 1s and 1d")
        if (
            self.kafka.format == "text"
            and config.data.format.name == "csv"
            and "columns" not in config.data.format.settings
        ):
            raise ConfigError("the records of a topic have no header line", "name the columns: data.format.columns")
        workers = config.cluster.workers if modes.distributed(config) else 1
        self.spool = Spool(spool, config, workers)
        self.format = Plugin("arrow") if self.kafka.format != "text" else None
        online = config.online
        self.first_day = None if online.start_day is None else parse_day(online.start_day, "online.start_day")
        self.end_day = None if online.end_day is None else parse_day(online.end_day, "online.end_day")
        self.broker = Broker(self.kafka)
        self.backlog: int | None = None
        """Records that waited in the topic when the last pass was found."""
        self._stand: dict[str, int] | None = None
        """Offsets after the last pass, as its position has them."""
        self._rest: list[Record] = []
        """Records that came with it but belong to passes after it."""

    def after(self, position: Position | None, patience: Patience) -> Pass | None:
        try:
            return self._after(position, patience)
        except BaseException:
            self._stand = None  # records were taken that no pass has: they must be read again
            raise

    def _after(self, position: Position | None, patience: Patience) -> Pass | None:
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
            day = self._next_day(parts, None if position is None else position["day"], patience)
            if day is None:
                return None
        begin = self._midnight(day)
        done_s = begin if number == 1 else position["end_s"]  # type: ignore[index]
        gathered = _Gathering(self, parts, begin, self._midnight(day + ONE_DAY), done_s)
        arrived, self._rest = self._rest, []
        while True:
            for record in arrived:
                gathered.take(record)
            arrived = []
            if gathered.ends():
                break
            if gathered.again:
                arrived, gathered.rest, gathered.again = gathered.rest, [], False
            arrived = arrived or self.broker.records(patience)
        self._rest = gathered.rest
        if gathered.late:
            self.warn(f"{day:%Y%m%d} pass {number} has {gathered.late:,} records of days before")
        return self._finish(day, number, gathered)

    def doubt(self, record: Record) -> str | None:
        """Why the time of a record is not believed, whatever the stream's own clock says."""
        if record.time_s < 0:
            return "none"
        return "clock" if record.time_s > min(self.clock() + self.kafka.max_clock_skew, LATEST_S) else None

    def _next_day(self, parts: dict[int, _Partition], last: int | None, patience: Patience) -> datetime.date | None:
        """The earliest day that any partition goes on with; None where that is after the run's last.

        It is never a day that has ended, and none before the run's first: such records of a new run are passed over.
        """
        seen: dict[int, list[tuple[float, datetime.date]]] = {}
        over = None if last is None else parse_day(last, "the position") + ONE_DAY
        passed_over, held = 0, set[int]()
        arrived, self._rest = self._rest, []
        while True:
            for record in arrived:
                here, p = parts[record.partition], record.partition
                if why := self.doubt(record):
                    self._rest.append(record)
                    held.add(p)
                    self._refuse(record, why, given_up=not seen and len(self._rest) >= ENOUGH)
                    continue
                day = datetime.datetime.fromtimestamp(record.time_s, self.zone).date()
                if over is not None:
                    day = max(day, over)
                elif self.first_day is not None and day < self.first_day:
                    if p not in held:
                        passed_over += 1
                        here.start = here.next = record.offset + 1
                        continue
                    day = self.first_day
                held.add(p)
                seen.setdefault(p, []).append((record.time_s, day))
                self._rest.append(record)
            if seen and all(p in seen or self.broker.is_idle(p) for p in parts):
                break
            arrived = self.broker.records(patience)
        if passed_over:
            self.warn(f"{passed_over:,} records of days before online.start_day are passed over")
        first = min(self._first_of(found) for found in seen.values())
        return None if self.end_day is not None and first > self.end_day else first

    def _refuse(self, record: Record, why: str, given_up: bool) -> None:
        """Ends the run at a record whose time is wrong, where that is an error or there are no others."""
        wrong = _wrong(record, why)
        self.spool.refuse(wrong)
        if given_up:
            raise DataError(
                f"the first {len(self._rest):,} records have times that cannot be right, the last is {wrong.words}",
                "check this machine's clock and the producers', or raise online.kafka.max_clock_skew",
            )

    def _first_of(self, seen: list[tuple[float, datetime.date]]) -> datetime.date:
        """The day of a partition's first record, of those that lie not far beyond most others."""
        latest = statistics.median_low(when for when, _ in seen) + self.kafka.max_gap
        return next(day for when, day in seen if when <= latest)

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

    def over(self, parts: dict[int, _Partition], end_s: float) -> bool:
        """Whether no partition has more records of a pass that ends then."""
        beyond = any(part.ahead is not None for part in parts.values())
        return self.all_read(parts) and (beyond or self.clock() >= end_s + self.kafka.idle)

    def all_read(self, parts: dict[int, _Partition]) -> bool:
        """Whether there is nothing more to read just now."""
        return all(part.ahead is not None or self.broker.is_idle(p) for p, part in parts.items())

    def _midnight(self, day: datetime.date) -> float:
        """When a day begins."""
        return datetime.datetime.combine(day, datetime.time(), self.zone).timestamp()

    def end_of(self, begin: float, midnight: float, after: float) -> float:
        """Where a pass must end that goes on at a moment: at midnight, or at the end of its interval."""
        if self.kafka.interval is None:
            return midnight
        return min(begin + ((after - begin) // self.kafka.interval + 1) * self.kafka.interval, midnight)

    def _finish(self, day: datetime.date, number: int, gathered: _Gathering) -> Pass:
        parts, times = gathered.parts, gathered.times
        offsets = {p: part.next for p, part in parts.items()}
        wrong = [one for part in parts.values() for one in part.wrong]
        spooled = self._write(number_of(day), number, {p: part.records for p, part in parts.items()}, wrong)
        self.spool.prune(KEEP_SPOOLS)
        self._stand = {str(p): offset for p, offset in offsets.items()}
        self.backlog = self.broker.waiting(offsets)
        return Pass(
            number_of(day),
            number,
            spooled.files,
            last=gathered.day_over,
            span_s=(min(times), max(times)) if times else None,
            position={
                "day": number_of(day),
                "pass": number,
                "day_over": gathered.day_over,
                "offsets": {str(p): part.next for p, part in parts.items()},
                "ranges": {str(p): [part.start, part.next] for p, part in parts.items()},
                "end_s": gathered.done_s if gathered.full else gathered.end_s,
                "aside": _runs(wrong),
            },
            sizes=spooled.sizes,
            bad_records=len(spooled.bad),
        )

    def _write(self, day: int, number: int, records: Records, wrong: list[tuple[Record, str]]) -> Spooled:
        spooled = self.spool.write(f"{day}-{number:04d}", records, [_wrong(*one) for one in wrong])
        if spooled.bad:
            where = "dropped" if spooled.quarantine is None else f"kept in {spooled.quarantine}"
            count = f"{len(spooled.bad):,} bad record{'s' if len(spooled.bad) > 1 else ''}"
            self.warn(f"{day} pass {number}: {count} {where}, first {spooled.bad[0].words}")
        return spooled

    def again(self, planned: Pass, patience: Patience) -> Pass:
        if not check_files(planned):
            return planned
        ranges = {int(p): tuple(both) for p, both in planned.position["ranges"].items()}
        aside = {
            (p, offset): why
            for p, first, count, why in planned.position.get("aside", [])
            for offset in range(first, first + count)
        }
        wanted = {p: both for p, both in ranges.items() if both[1] > both[0]}
        self._start({**planned.position, "offsets": {p: first for p, (first, _) in ranges.items()}}, patience)
        self._stand = None
        parts = {p: _Partition(first, first) for p, (first, _) in ranges.items()}
        wrong: list[tuple[Record, str]] = []
        while any(parts[p].next < last for p, (_, last) in wanted.items()):
            for record in self.broker.records(patience):
                here, why = parts[record.partition], aside.get((record.partition, record.offset))
                if why is not None:
                    wrong.append((record, why))
                elif record.offset < ranges[record.partition][1]:
                    here.records.append(record)
                here.next = record.offset + 1
        spooled = self._write(planned.day, planned.number, {p: part.records for p, part in parts.items()}, wrong)
        if (spooled.files, spooled.sizes) != (planned.data, planned.sizes):
            raise DataError(f"{planned.name}: its offsets hold other records of {self.kafka.topic} than before")
        return planned

    def late_files(self, read: Sequence[Pass]) -> list[LateFiles]:
        return []

    def close(self) -> None:
        self.broker.close()


class _Gathering:
    """The records of a pass as they come, until it ends.

    A record beyond the end holds its partition until the next pass. One that lies beyond the open day by more than `max_gap` may be
    wrong: it is, if its partition then goes on with a record that is not.
    """

    def __init__(
        self, topic: Topic, parts: dict[int, _Partition], begin: float, midnight: float, done_s: float
    ) -> None:
        self.topic, self.kafka, self.parts, self.begin, self.midnight = topic, topic.kafka, parts, begin, midnight
        self.done_s = done_s
        """Where the last interval ended that is wholly read."""
        self.end_s = topic.end_of(begin, midnight, done_s)
        self.limit = self.kafka.rows_per_pass
        """Rows at which it ends."""
        self.rest: list[Record] = []
        """Records that belong to passes after it, or are not yet known to."""
        self.rows = self.records = self.late = 0
        self.times: list[float] = []
        self.full = False
        self.again = False
        """Its end was moved, so the rest must be looked at again."""

    @property
    def day_over(self) -> bool:
        return not self.full and self.end_s == self.midnight

    def take(self, record: Record) -> None:
        """Takes a record of its partition in, puts it aside or leaves it to later passes."""
        here = self.parts[record.partition]
        if self.full:
            self.rest.append(record)
            return
        why = self.topic.doubt(record)
        if why is None and here.ahead is not None and self._is_far(here.ahead) and self._is_near(record):
            self._expose(record.partition)
        if here.ahead is not None or self.full:
            self.rest.append(record)
        elif why is not None:
            here.put_aside(record, why)
            self._count(1)
        elif record.time_s >= self.end_s:
            here.ahead = record
            self.rest.append(record)
        else:
            here.records.append(record)
            here.next = record.offset + 1
            self.late += record.time_s < self.begin
            self.times.append(record.time_s)
            self._count(self.topic.spool.rows_of(record))

    def _count(self, rows: int) -> None:
        self.rows += rows
        self.records += 1
        self.full = self.limit is not None and self.rows >= self.limit

    def _is_far(self, record: Record) -> bool:
        return record.time_s >= self.midnight + self.kafka.max_gap

    def _is_near(self, record: Record) -> bool:
        return self.begin <= record.time_s < self.midnight + self.kafka.max_gap

    def _expose(self, partition: int) -> None:
        """A partition goes on with this day: what it held far beyond it was wrong."""
        held = [record for record in self.rest if record.partition == partition]
        self.rest = [record for record in self.rest if record.partition != partition]
        here = self.parts[partition]
        here.ahead = None
        for record in held:
            if self._is_far(record) and not self.full and self.topic.doubt(record) is None:
                here.put_aside(record, "gap")
                self._count(1)
            else:
                self.take(record)

    def ends(self) -> bool:
        """Whether the pass ends here, once all records at hand were taken; it may move its end instead."""
        if self.full:
            return not self._grow()
        if not self.topic.over(self.parts, self.end_s):
            usual = self.kafka.rows_per_pass
            self.full = usual is not None and self.rows >= usual and self.topic.all_read(self.parts)  # it grew
            return self.full
        if self.end_s == self.midnight:
            return True
        if self.rows:
            return not self._lengthen()
        coming = [part.ahead.time_s for part in self.parts.values() if part.ahead is not None]
        self._move_end(min(coming, default=self.end_s))  # nothing happened in this interval
        return False

    def _grow(self) -> bool:
        """Takes more rows while another pass waits already."""
        most, usual = self.kafka.max_rows_per_pass or 0, self.kafka.rows_per_pass
        if usual is None or self.limit is None or self.rows >= most:
            return False
        waiting = self.topic.broker.waiting({p: part.next for p, part in self.parts.items()})
        if waiting * self.rows / self.records < usual:
            return False
        self.limit, self.full = min(max(self.limit, self.rows) + usual, most), False
        self._look_again()
        return True

    def _lengthen(self) -> bool:
        """Takes one more interval while the topic is beyond that one too."""
        following = self.topic.end_of(self.begin, self.midnight, self.end_s)
        newest = max(
            (one.time_s for one in self.rest if not self._is_far(one) and not self.topic.doubt(one)), default=0
        )
        if self.rows >= (self.kafka.max_rows_per_pass or 0) or newest < following:
            return False
        if self.limit is None:
            self.limit = self.kafka.max_rows_per_pass
        self._move_end(self.end_s)
        return True

    def _move_end(self, after: float) -> None:
        self.done_s, self.end_s = self.end_s, self.topic.end_of(self.begin, self.midnight, after)
        self._look_again()

    def _look_again(self) -> None:
        for part in self.parts.values():
            part.ahead = None
        self.again = True


def _wrong(record: Record, why: str) -> Wrong:
    return Wrong(record, _WRONG[why].format(time=_words(record.time_s)), record.value)


def _runs(wrong: list[tuple[Record, str]]) -> list[list[Any]]:
    """Records as [partition, first offset, count, reason], for the plan of a pass."""
    runs: list[list[Any]] = []
    for record, why in wrong:
        last = runs[-1] if runs else []
        if last and (last[0], last[1] + last[2], last[3]) == (record.partition, record.offset, why):
            last[2] += 1
        else:
            runs.append([record.partition, record.offset, 1, why])
    return runs


def _words(time_s: float) -> str:
    """
    >>> _words(0.0), _words(1e15)
    ('1970-01-01T00:00:00Z', '1000000000000000 s')
    """
    try:
        return datetime.datetime.fromtimestamp(time_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"{time_s:.0f} s"
