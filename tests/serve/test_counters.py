"""The counters of a worker: the page of the loop reads them from another thread while requests are answered."""

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clickfleet.serve import counters
from clickfleet.serve.batching import Counts
from clickfleet.serve.counters import Meter


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads that take turns all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_another_thread_reads_while_a_worker_counts(
    tmp_path: Path, hasty_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "FRESH_S", 0.001)  # ages leave while they are read, too
    meter, stopped = Meter(tmp_path / "meter.json"), threading.Event()

    def work() -> None:
        number = 0
        while not stopped.is_set():
            number += 1
            meter.reply(f"route {number % 500}", 200, 0.001)
            meter.count(f"counter {number % 500}")
            meter.serve_events([{"rows": 1, "times": [time.time()], "newest": 1.0}])
            if number % 500 == 0:
                meter.replies.clear()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(100):
            assert meter.recent_summary().events >= 0
            assert sum(meter.totals(Counts()).replies.values()) >= 0
    finally:
        stopped.set()
        thread.join()
