"""A Kafka topic as passes: offset ranges that are recorded before they are trained on, with their records in files.

Offsets are kept in checkpoints and in the plan of the run, not in the broker. Partitions are assigned, and each is read from the end of
the last finished pass. So no rebalance and no poll interval can interrupt a pass.

A pass ends after `rows_per_pass` rows, or when `interval` of event time has passed in every partition, whichever comes first. It never
spans two days. While the run is behind, passes grow up to `max_rows_per_pass`. Late records, of an earlier day or interval, become part
of the open pass and are counted. An empty partition does not delay the others: the pass ends when another partition is past its end, or
`idle` seconds after its end by the clock. Records with implausible times are set aside, so that none moves the run to another day.

A micro-pass (`online.pass`) ends some seconds after its first record was received, whatever the times of the records, or after a
number of rows. Only the end of a day follows the times of the records.
"""

from __future__ import annotations

import datetime
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from clickfleet.config.load import Config
from clickfleet.config.plugins import Plugin
from clickfleet.errors import ConfigError, DataError
from clickfleet.online.passes import LateFiles, Pass, PassEnd, Patience, Position, check_files, number_of, parse_day
from clickfleet.online.sources.broker import Broker, Record
from clickfleet.online.sources.messages import BadRecord, PassFiles, Records, Spool
from clickfleet.training import modes

KEEP_SPOOLS = 8
ONE_DAY = datetime.timedelta(days=1)
LATEST_S = datetime.datetime(9999, 1, 1, tzinfo=datetime.UTC).timestamp()
"""Later times are not dates."""
ENOUGH = 1000
"""If this many records at the start all have wrong times, the run ends: the cause is likely a clock."""
_WRONG = {
    "none": "it has no timestamp",
    "clock": "its timestamp {time} is ahead of the clock by more than online.kafka.max_clock_skew",
    "gap": "its timestamp {time} is later than the open day by more than online.kafka.max_gap, but the next records' are not",
}
"""Why the time of a record is wrong."""


@dataclass
class _Partition:
    """The position in one partition."""

    start: int
    """First offset of this pass."""
    next: int
    ahead: Record | None = None
    """A record past the end of the pass; the next pass starts with it."""
    records: list[Record] = field(default_factory=list)
    wrong: list[tuple[Record, str]] = field(default_factory=list)
    """Records with wrong times, each with the name of the reason."""

    def put_aside(self, record: Record, why: str) -> None:
        self.wrong.append((record, why))
        self.next = record.offset + 1


class Topic:
    """The passes of a topic; their files are written to the folder `spool`."""

    status: dict[str, Any] | None = None

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
        self.limits = config.online.pass_
        if self.kafka.rows_per_pass is None and self.kafka.interval is None and self.limits is None:
            raise ConfigError("online.kafka needs rows_per_pass or interval", "set one or both, or online.pass")
        if self.kafka.interval is not None and not 1 <= self.kafka.interval <= 86400:
            raise ConfigError("online.kafka.interval must lie between 1s and 1d")
        form = config.data.format
        if self.kafka.format == "text" and form.name == "csv" and "columns" not in form.settings:
            raise ConfigError("the records of a topic have no header line", "name the columns: data.format.columns")
        workers = config.cluster.workers if modes.distributed(config) else 1
        self.spool = Spool(spool, config, workers)
        self.format = Plugin("arrow") if self.kafka.format != "text" else None
        online = config.online
        self.first_day = None if online.start_day is None else parse_day(online.start_day, "online.start_day")
        self.end_day = None if online.end_day is None else parse_day(online.end_day, "online.end_day")
        self.broker = Broker(self.kafka, prompt=self.limits is not None)
        self.backlog: int | None = None
        """Number of records waiting in the topic when the last pass was found."""
        self._next_offsets: dict[str, int] | None = None
        """Offsets after the last pass, in the form of its position."""
        self._rest: list[Record] = []
        """Records received with it that belong to later passes."""

    def after(self, position: Position | None, patience: Patience) -> Pass | None:
        try:
            return self._after(position, patience)
        except BaseException:
            self._next_offsets = None  # the records received so far belong to no pass: read them again
            raise

    def _after(self, position: Position | None, patience: Patience) -> Pass | None:
        day, number = None, 1
        if position is not None and not position["day_over"]:
            day, number = parse_day(position["day"], "the position"), position["pass"] + 1
        elif position is not None and self.end_day is not None and position["day"] >= number_of(self.end_day):
            return None
        if position is not None and position["offsets"] == self._next_offsets:  # the client is already there
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
            arrived = arrived or self.broker.records(patience, gathered.within_s)
        self._rest = gathered.rest
        if gathered.late:
            self.warn(f"{day:%Y%m%d} pass {number} has {gathered.late:,} records of earlier days")
        return self._finish(day, number, gathered)

    def time_problem(self, record: Record) -> str | None:
        """Return the reason why the time of a record is wrong, by this machine's clock; None if it is plausible."""
        if record.time_s < 0:
            return "none"
        return "clock" if record.time_s > min(self.clock() + self.kafka.max_clock_skew, LATEST_S) else None

    def _next_day(self, parts: dict[int, _Partition], last: int | None, patience: Patience) -> datetime.date | None:
        """Return the earliest day of the next records in any partition; None if it is after the run's last day.

        It is never a completed day, and never before the run's first day: a new run skips older records.
        """
        seen: dict[int, list[tuple[float, datetime.date]]] = {}
        over = None if last is None else parse_day(last, "the position") + ONE_DAY
        passed_over, held = 0, set[int]()
        arrived, self._rest = self._rest, []
        while True:
            for record in arrived:
                here, p = parts[record.partition], record.partition
                if why := self.time_problem(record):
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
            self.warn(f"{passed_over:,} records from before online.start_day are skipped")
        first = min(self._first_of(found) for found in seen.values())
        return None if self.end_day is not None and first > self.end_day else first

    def _refuse(self, record: Record, why: str, given_up: bool) -> None:
        """Raise DataError for a record with a wrong time if bad records are errors, or if no record has a plausible time."""
        wrong = _wrong(record, why)
        self.spool.refuse(wrong)
        if given_up:
            raise DataError(
                f"the first {len(self._rest):,} records have implausible times, the last is {wrong.words}",
                "check this machine's clock and the producers', or raise online.kafka.max_clock_skew",
            )

    def _first_of(self, seen: list[tuple[float, datetime.date]]) -> datetime.date:
        """Return the day of a partition's first record, leaving out outliers far after the median."""
        latest = statistics.median_low(when for when, _ in seen) + self.kafka.max_gap
        return next(day for when, day in seen if when <= latest)

    def _start(self, position: Position | None, patience: Patience) -> dict[int, _Partition]:
        partitions = self.broker.partitions(patience, known=position is not None)
        known = {} if position is None else {int(p): o for p, o in position["offsets"].items()}
        if missing := [p for p in known if p not in partitions]:
            raise DataError(
                f"the topic {self.kafka.topic} no longer has partition {missing[0]}; it may have been deleted and created again",
                "start a new run, or name the right topic",
            )
        parts: dict[int, _Partition] = {}
        for p in partitions:
            low, high = self.broker.held(p, patience)
            start = known.get(p, low if position is not None or self.kafka.start == "earliest" else high)
            if not low <= start <= high:
                raise DataError(
                    f"partition {p} of {self.kafka.topic} holds offsets {low} to {high}, but the run continues at {start}: "
                    "retention removed the records, or the topic was created again",
                    "raise the topic's retention; a new run starts from the records that exist",
                )
            parts[p] = _Partition(start, start)
        self.broker.assign({p: part.start for p, part in parts.items()})
        return parts

    def over(self, parts: dict[int, _Partition], end_s: float) -> bool:
        """Return whether no partition has more records of a pass that ends at `end_s`."""
        beyond = any(part.ahead is not None for part in parts.values())
        return self.all_read(parts) and (beyond or self.clock() >= end_s + self.kafka.idle)

    def all_read(self, parts: dict[int, _Partition]) -> bool:
        """Return whether there is nothing more to read at the moment."""
        return all(part.ahead is not None or self.broker.is_idle(p) for p, part in parts.items())

    def _midnight(self, day: datetime.date) -> float:
        """Return when a day begins."""
        return datetime.datetime.combine(day, datetime.time(), self.zone).timestamp()

    def end_of(self, begin: float, midnight: float, after: float) -> float:
        """Return when a pass that continues at `after` must end: at the end of its interval, or at midnight."""
        if self.kafka.interval is None:
            return midnight
        return min(begin + ((after - begin) // self.kafka.interval + 1) * self.kafka.interval, midnight)

    def _finish(self, day: datetime.date, number: int, gathered: _Gathering) -> Pass:
        parts, times = gathered.parts, gathered.times
        offsets = {p: part.next for p, part in parts.items()}
        wrong = [one for part in parts.values() for one in part.wrong]
        spooled = self._write(number_of(day), number, {p: part.records for p, part in parts.items()}, wrong)
        self.spool.prune(KEEP_SPOOLS)
        self._next_offsets = {str(p): offset for p, offset in offsets.items()}
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

    def _write(self, day: int, number: int, records: Records, wrong: list[tuple[Record, str]]) -> PassFiles:
        spooled = self.spool.write(f"{day}-{number:04d}", records, [_wrong(*one) for one in wrong])
        if spooled.bad:
            where = "dropped" if spooled.quarantine is None else f"kept in {spooled.quarantine}"
            count = f"{len(spooled.bad):,} bad record{'s' if len(spooled.bad) > 1 else ''}"
            self.warn(f"{day} pass {number}: {count} {where}, first {spooled.bad[0].words}")
        return spooled

    def again(self, planned: Pass, patience: Patience, before: Position | None = None) -> Pass:
        if not check_files(planned):
            return planned
        ranges = {int(p): (first, last) for p, (first, last) in planned.position["ranges"].items()}
        aside = {
            (p, offset): why
            for p, first, count, why in planned.position.get("aside", [])
            for offset in range(first, first + count)
        }
        starts = {str(p): first for p, (first, _) in ranges.items()}
        arrived, self._rest = self._rest, []
        if starts != self._next_offsets:  # otherwise the client is already there
            self._start({**planned.position, "offsets": starts}, patience)
            arrived = []
        self._next_offsets = None
        parts = {p: _Partition(first, first) for p, (first, _) in ranges.items()}
        wrong: list[tuple[Record, str]] = []
        while True:
            for record in arrived:
                here, why = parts[record.partition], aside.get((record.partition, record.offset))
                if record.offset >= ranges[record.partition][1]:
                    self._rest.append(record)
                elif why is not None:
                    wrong.append((record, why))
                else:
                    here.records.append(record)
                here.next = record.offset + 1
            if all(parts[p].next >= last for p, (_, last) in ranges.items()):
                break
            arrived = self.broker.records(patience)
        spooled = self._write(planned.day, planned.number, {p: part.records for p, part in parts.items()}, wrong)
        if (spooled.files, spooled.sizes) != (planned.data, planned.sizes):
            raise DataError(f"{planned.name}: the records of {self.kafka.topic} at its offsets changed")
        self.spool.prune(KEEP_SPOOLS)
        self._next_offsets = {str(p): last for p, (_, last) in ranges.items()}
        return planned

    def late_files(self, read: Sequence[Pass]) -> list[LateFiles]:
        return []

    def recall(self, planned: Sequence[Pass]) -> None: ...

    def close(self) -> None:
        self.broker.close()


class _Gathering:
    """Collects the records of a pass until it ends.

    A record past the end stops its partition until the next pass. A record later than the open day by more than `max_gap` may be wrong:
    it is if its partition then continues with a record that is not so late.
    """

    def __init__(
        self, topic: Topic, parts: dict[int, _Partition], begin: float, midnight: float, done_s: float
    ) -> None:
        self.topic, self.kafka, self.parts, self.begin, self.midnight = topic, topic.kafka, parts, begin, midnight
        self.done_s = done_s
        """End of the last interval that was read completely."""
        self.end_s = topic.end_of(begin, midnight, done_s)
        self.usual = self.kafka.rows_per_pass if topic.limits is None else topic.limits.rows
        """Number of rows of a pass while the run is not behind."""
        self.limit = self.usual if topic.limits is None else self.usual or self.kafka.max_rows_per_pass
        """Number of rows at which the pass ends."""
        self.end = None if topic.limits is None else PassEnd(topic.limits)
        self.rest: list[Record] = []
        """Records that belong, or may belong, to later passes."""
        self.rows = self.records = self.late = 0
        self.times: list[float] = []
        self.full = False
        self.again = False
        """Whether the end of the pass was moved, so that the rest must be taken again."""

    @property
    def day_over(self) -> bool:
        return not self.full and self.end_s == self.midnight

    def take(self, record: Record) -> None:
        """Add a record to the pass, set it aside, or leave it to later passes."""
        here = self.parts[record.partition]
        if self.full:
            self.rest.append(record)
            return
        why = self.topic.time_problem(record)
        if why is None and here.ahead is not None and self._is_far(here.ahead) and self._is_near(record):
            self._set_aside_far(record.partition)
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

    @property
    def within_s(self) -> float | None:
        """How long a micro-pass waits for further records; None for other passes."""
        if self.end is None:
            return None
        left = self.end.left_s
        return math.inf if left is None else left

    def _count(self, rows: int) -> None:
        if self.end is not None:
            self.end.add(rows)
        self.rows += rows
        self.records += 1
        self.full = self.limit is not None and self.rows >= self.limit

    def _is_far(self, record: Record) -> bool:
        return record.time_s >= self.midnight + self.kafka.max_gap

    def _is_near(self, record: Record) -> bool:
        return self.begin <= record.time_s < self.midnight + self.kafka.max_gap

    def _set_aside_far(self, partition: int) -> None:
        """Set aside the far-future records of a partition, because it continues with records of this day."""
        held = [record for record in self.rest if record.partition == partition]
        self.rest = [record for record in self.rest if record.partition != partition]
        here = self.parts[partition]
        here.ahead = None
        for record in held:
            if self._is_far(record) and not self.full and self.topic.time_problem(record) is None:
                here.put_aside(record, "gap")
                self._count(1)
            else:
                self.take(record)

    def ends(self) -> bool:
        """Return whether the pass ends here, after all received records were taken. May move the end instead."""
        if self.full:
            return not self._grow()
        if self.end is not None and self.end.left_s == 0.0:
            self.full = True
            return True
        if not self.topic.over(self.parts, self.end_s):
            # A pass that grew beyond the usual size ends when there is nothing more to read.
            self.full = self.usual is not None and self.rows >= self.usual and self.topic.all_read(self.parts)
            return self.full
        if self.end_s == self.midnight:
            return True
        if self.rows:
            return not self._lengthen()
        coming = [part.ahead.time_s for part in self.parts.values() if part.ahead is not None]
        self._move_end(min(coming, default=self.end_s))  # this interval had no events
        return False

    def _grow(self) -> bool:
        """Raise the row limit if the topic holds enough records for another pass. Return whether it was raised."""
        most, usual = self.kafka.max_rows_per_pass or 0, self.usual
        if usual is None or self.limit is None or self.rows >= most:
            return False
        waiting = self.topic.broker.waiting({p: part.next for p, part in self.parts.items()})
        if waiting * self.rows / self.records < usual:
            return False
        self.limit, self.full = min(max(self.limit, self.rows) + usual, most), False
        self._take_rest_again()
        return True

    def _lengthen(self) -> bool:
        """Add the next interval if the topic is already past it. Return whether it was added."""
        following = self.topic.end_of(self.begin, self.midnight, self.end_s)
        newest = max(
            (one.time_s for one in self.rest if not self._is_far(one) and not self.topic.time_problem(one)), default=0
        )
        if self.rows >= (self.kafka.max_rows_per_pass or 0) or newest < following:
            return False
        if self.limit is None:
            self.limit = self.kafka.max_rows_per_pass
        self._move_end(self.end_s)
        return True

    def _move_end(self, after: float) -> None:
        self.done_s, self.end_s = self.end_s, self.topic.end_of(self.begin, self.midnight, after)
        self._take_rest_again()

    def _take_rest_again(self) -> None:
        for part in self.parts.values():
            part.ahead = None
        self.again = True


def _wrong(record: Record, why: str) -> BadRecord:
    return BadRecord(record, _WRONG[why].format(time=_words(record.time_s)), record.value)


def _runs(wrong: list[tuple[Record, str]]) -> list[list[Any]]:
    """Return records as runs [partition, first offset, count, reason], for the plan of a pass."""
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
