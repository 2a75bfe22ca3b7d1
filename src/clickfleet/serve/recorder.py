"""The recorder: a low-priority process that writes what the workers scored to the show log.

It uses cores that nothing else wants. If they are all busy, so that it falls behind, another thread of more priority takes over for a
while.

python -m clickfleet.serve.recorder STATE
"""

import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from clickfleet._core import ShowColumns
from clickfleet.data.events import REQUESTS
from clickfleet.errors import ClickfleetError
from clickfleet.serve import parent
from clickfleet.serve.batching import Counts
from clickfleet.serve.connection import log_fault
from clickfleet.serve.counters import RECORDER, Meter
from clickfleet.serve.event_queue import EventSink
from clickfleet.serve.frames import FramePlace, FrameReader
from clickfleet.serve.priority import RECORDER_SLICE_S, renice_session, shorten_slices
from clickfleet.serve.show_log import Scored, batch_of, encode, scored_of
from clickfleet.serve.supervisor import Settings
from clickfleet.store.event_log import complete_leftovers

NAP_S = 0.1
"""Sleep between two polls at a time: the end of the server is noticed in between, and a worker that has much to log."""
WAITING_FILES = 4
"""Number of files of one worker from which the next poll starts early. A worker may have four times as many."""
SAVE_S = 0.5
BATCH_ROWS = 4096
BATCH_BYTES = 16 << 20
"""A record batch is written when it has this many rows or bytes, and at the end of a poll."""
NICE = 5
IDLE_SESSION, RELIEF_SESSION = 19, 5
"""Niceness of the session of the recorder: usually, and while the other thread works."""
LATE_S = 0.5
"""How long a poll and the delay before it may take before the other thread takes over."""
RELIEF_S = 5.0
"""How long it then works."""
REPORT_S = 60.0


class Recorder:
    """Takes frames and writes them. What the log does not take is dropped and counted."""

    def __init__(self, settings: Settings) -> None:
        assert settings.log is not None
        self.settings = settings
        self.meter = Meter(Path(settings.state) / RECORDER)
        self.reader = FrameReader(*settings.frames)
        self._sink: EventSink | None = None
        self._shows = ShowColumns()
        self._taken: list[FramePlace] = []
        """Places whose rows were written, but perhaps not delivered yet."""
        self._reported_at = -REPORT_S
        if settings.log_folder is not None:
            complete_leftovers(settings.log_folder)

    def poll(self) -> int:
        """Write everything that workers have handed over. Return the number of rows."""
        rows, shows, idle = 0, self._shows, True
        for place in self.reader.read(shows):
            idle = False
            self._taken.append(place)
            rows += self._write_others()
            if shows.rows >= BATCH_ROWS or shows.bytes >= BATCH_BYTES:
                rows += self._write()
        rows += self._write()
        if idle and self._sink is not None:
            self._guarded(self._sink.rotate)
        if self._taken:
            self._release()
        return rows

    def hurries(self) -> bool:
        """Return whether a worker has so much to log that it may soon have to drop some."""
        return self.reader.most_files() >= WAITING_FILES

    def _write(self) -> int:
        """Write the columns that the core has made. Return the number of rows."""
        rows: int = self._shows.rows
        if rows:
            self._store(batch_of(self._shows), rows)
        return rows

    def _write_others(self) -> int:
        """Write the frames that the core has left. Return the number of rows."""
        entries = list[Scored]()
        for content in self._shows.take_others():
            try:
                entries += scored_of(content)
            except ValueError:  # of another version of this program
                self.meter.count("shows_dropped", 1)
        if entries and not self._try(entries):
            for entry in entries if len(entries) > 1 else []:  # one that cannot be converted does not cost the others
                self._try([entry])
        return sum(entry.rows for entry in entries)

    def _release(self) -> None:
        """Let go of the frames that are in the log. What a broker has not taken yet is read again after a kill."""
        if self._sink is None or self._sink.settle():
            for place in {id(place.file): place for place in self._taken}.values():  # the last one of each file
                place.done()
            self.reader.release()
            self._taken = []

    def _try(self, group: list[Scored]) -> bool:
        """Write some entries. Return False if they should be tried one by one."""
        try:
            batch = encode(group)
        except Exception:
            if len(group) > 1:
                return False
            log_fault()
            self.meter.count("shows_dropped", group[0].rows)
            return True
        self._store(batch, sum(entry.rows for entry in group))
        return True

    def _store(self, batch: pa.RecordBatch, rows: int) -> None:
        if self._sink is None:
            self._guarded(self._open)
        sink = self._sink
        written = sink is not None and self._guarded(lambda: sink.write(batch))
        self.meter.count("shows_logged" if written else "shows_dropped", rows)

    def _open(self) -> None:
        assert self.settings.log is not None
        self._sink = self.settings.target(self.settings.log).open(REQUESTS, durable=False, lost=self._lost)

    def _lost(self, rows: int) -> None:
        """Count rows that Kafka had taken and did not deliver."""
        self.meter.count("shows_logged", -rows)
        self.meter.count("shows_dropped", rows)

    def _guarded(self, work: object) -> bool:
        """Do some work that may fail for want of a disk or a broker. Return whether it did not."""
        assert callable(work)
        try:
            work()
        except OSError as error:
            if (now := time.monotonic()) >= self._reported_at + REPORT_S:
                self._reported_at = now
                print(f"recorder: cannot write the show log: {error.strerror or error}", file=sys.stderr, flush=True)
            return False
        return True

    def save(self) -> None:
        with suppress(OSError):  # the disk of the state may be full while that of the log is not
            self.meter.save(Counts())

    def close(self) -> None:
        if self._sink is not None:
            self._guarded(self._sink.close)
            self._release()
        self.reader.close()
        for folder in self.settings.frames[:-1]:  # in memory
            with suppress(OSError):
                folder.rmdir()
        self.save()


class RecorderLoop:
    """Polls again and again, on two threads in turn: this one of the policy `idle`, and one that is never starved."""

    def __init__(self, recorder: Recorder, ended: Callable[[], bool], every_s: float) -> None:
        self.recorder, self.ended, self.every_s = recorder, ended, every_s
        self.late = 0
        """How often a poll ended late."""
        self._saved_at = 0.0
        self._relief = ThreadPoolExecutor(
            1, "clickfleet-relief", lambda: shorten_slices(RECORDER_SLICE_S, nice=NICE, policy="batch")
        )
        self._relief.submit(int).result()  # it inherits the policy of this thread, so it is started first

    def run(self) -> None:
        """Poll until it has ended, and then once more."""
        shorten_slices(RECORDER_SLICE_S, nice=NICE, policy="idle")
        while not self.ended():
            renice_session(IDLE_SESSION)
            if self._poll_for(float("inf"), LATE_S):
                self.late += 1
                renice_session(RELIEF_SESSION)
                self._relief.submit(self._poll_for, RELIEF_S).result()
        renice_session(RELIEF_SESSION)
        self._relief.submit(self._finish).result()
        self._relief.shutdown()

    def _poll_for(self, seconds: float, late_s: float = float("inf")) -> bool:
        """Poll until it has ended, for so long, or until a poll ends late. Return whether one did."""
        end = time.monotonic() + seconds
        while not self.ended() and (now := time.monotonic()) < end:
            self._poll()
            late = time.monotonic() - now + self._wait()
            if late > late_s:
                return True
        return False

    def _wait(self) -> float:
        """Wait until the next poll is due. Return how much longer that took than it should."""
        now = time.monotonic()
        due, late = now + self.every_s, 0.0
        while not self.ended() and (rest := due - now) > 0:
            nap = min(rest, NAP_S)
            time.sleep(nap)
            before, now = now, time.monotonic()
            late += now - before - nap
            if self.recorder.hurries():
                break
        return late

    def _poll(self) -> None:
        try:
            self.recorder.poll()
        except Exception:  # whatever happens, go on: the files stay until they are read
            log_fault()
        if (now := time.monotonic()) >= self._saved_at + SAVE_S:
            self._saved_at = now
            self.recorder.save()

    def _finish(self) -> None:
        self._poll()
        self.recorder.close()


def main() -> None:
    settings = Settings.read(sys.argv[1])
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor stops this process after the workers
    try:
        recorder = Recorder(settings)
    except ClickfleetError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    RecorderLoop(recorder, lambda: stopped or parent.is_gone(), settings.write_every_s).run()


if __name__ == "__main__":
    main()
