"""Write drawn rows as the logs of a server: shows, and the feedback that follows each of them after a known delay.

Shows come at equal distances. The delay of a label is exponential. Its mean differs from row to row: it depends on the values of some
slots, so a model that ignores delays also ranks rows wrongly. A purchase follows its click. Feedback that would come after the last show
is not in the log, as it would not be at that moment.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clickfleet.data.events import FEEDBACK, LABELS, SHOWS
from clickfleet.data.logs.target import OutputFile
from clickfleet.errors import ConfigError

SLOTS = 8
"""Number of slots whose values decide how slow a row is."""
SPREAD = 1.0
"""Standard deviation of the logarithm of the mean delay."""
PIECE_ROWS = 4096


def parse_delays(text: str, labels: Sequence[str]) -> dict[str, float]:
    """Return the mean delay of each label, in seconds.

    >>> parse_delays("click=20s,buy=2h", ("click", "buy"))
    {'click': 20.0, 'buy': 7200.0}
    """
    from clickfleet.config.sections import SECONDS

    found: dict[str, float] = {}
    for item in text.split(","):
        name, given, delay = (part.strip() for part in item.partition("="))
        if not given or name not in labels or name in found:
            raise ConfigError(f"cannot read the delays {text!r}", f"write {','.join(f'{one}=20s' for one in labels)}")
        try:
            found[name] = float(SECONDS.parse(delay))
        except ValueError as error:
            raise ConfigError(f"the delay of {name}: {error}") from None
    if missing := [name for name in labels if name not in found]:
        raise ConfigError(f"the label {missing[0]} has no delay", "name a delay for every label; 0s: none")
    return {name: found[name] for name in labels}


def slowness(columns: pa.RecordBatch, slots: Sequence[str], seed: int) -> NDArray[np.float64]:
    """Return a number per row with mean 0 and deviation 1 that depends on the values of some slots."""
    chosen = list(slots)[:SLOTS]
    total = np.zeros(len(columns))
    for name in chosen:
        coded = columns.column(name).dictionary_encode()
        texts = [str(value).encode() for value in coded.dictionary.to_pylist()] + [b"missing"]
        codes = np.array([zlib.crc32(text, zlib.crc32(f"{seed}/{name}".encode())) for text in texts], np.uint64)
        places = coded.indices.fill_null(len(texts) - 1).to_numpy(zero_copy_only=False)
        total += _normal(codes)[places]
    return total / math.sqrt(max(len(chosen), 1))


def _normal(codes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a standard normal number for every code (Box and Muller)."""
    mixed = codes * np.uint64(0x9E3779B97F4A7C15)
    u, v = ((mixed >> np.uint64(bits)) % np.uint64(1 << 20) for bits in (20, 42))
    return np.asarray(np.sqrt(-2 * np.log((u + 0.5) / (1 << 20))) * np.cos(2 * np.pi * v / (1 << 20)))


class DelayedLog:
    """Writes `shows/` and `feedback/` of a log that lasts from `begin_s` to `end_s`. Add its rows in order, then close it."""

    def __init__(
        self,
        out: Path,
        delays: Mapping[str, float],
        slots: Sequence[str],
        seed: int,
        span_s: tuple[float, float],
        rows: int,
    ) -> None:
        self.delays, self.slots, self.seed = dict(delays), list(slots), seed
        self.begin_s, self.end_s = span_s
        self.step_s = (self.end_s - self.begin_s) / rows
        self.rows = 0
        self.feedback = 0
        self._waiting: list[tuple[float, str, str]] = []
        """Time, label and request of feedback that comes after the last show so far."""
        self._files = ExitStack()
        self._shows, self._events = (
            self._files.enter_context(OutputFile(out / name / "part-0.arrow", "arrow"))
            for name in ("shows", "feedback")
        )
        self._events.write(_feedback([]), 0)

    def __enter__(self) -> DelayedLog:
        return self

    def __exit__(self, *problem: Any) -> None:
        self._files.__exit__(*problem)

    def add(self, table: pa.RecordBatch, labels: NDArray[np.int8]) -> None:
        """Add rows. `labels` are [labels, rows]; columns of the table with their names are not features."""
        rows = len(table)
        features = table.select([name for name in table.schema.names if name not in self.delays])
        times = self.begin_s + self.step_s * (self.rows + np.arange(rows))
        requests = [f"r{self.rows + i}" for i in range(rows)]
        for start in range(0, rows, PIECE_ROWS):
            piece = slice(start, start + PIECE_ROWS)
            self._shows.write(
                _shows(requests[piece], times[piece], features.slice(start, PIECE_ROWS)), len(times[piece])
            )
        rng = np.random.default_rng([self.seed, self.rows])
        spread = np.exp(SPREAD * slowness(features, self.slots, self.seed) - SPREAD**2 / 2)
        known = times
        for (name, mean), column in zip(self.delays.items(), labels, strict=True):
            known = known + rng.exponential(1.0, rows) * mean * spread
            for i in np.flatnonzero(column == 1).tolist():
                self._waiting.append((float(known[i]), name, requests[i]))
        self.rows += rows
        self._flush(float(times[-1]) if rows else self.begin_s)

    def _flush(self, until_s: float) -> None:
        """Write the feedback up to a time, in its order."""
        self._waiting.sort()
        due = [event for event in self._waiting if event[0] <= min(until_s, self.end_s)]
        self._waiting = self._waiting[len(due) :]
        self.feedback += len(due)
        for piece in _pieces(due):
            self._events.write(_feedback(piece), len(piece))


def _pieces(events: list[tuple[float, str, str]]) -> Iterator[list[tuple[float, str, str]]]:
    for start in range(0, len(events), PIECE_ROWS):
        yield events[start : start + PIECE_ROWS]


def _shows(requests: list[str], times: NDArray[np.floating[Any]], features: pa.RecordBatch) -> pa.RecordBatch:
    texts = [json.dumps(_present(row), ensure_ascii=False, separators=(",", ":")) for row in features.to_pylist()]
    columns: dict[str, Any] = {"request": requests, "item": ["0"] * len(requests), "features": texts}
    columns |= {"time": np.round(times * 1e6).astype(np.int64), "position": [1] * len(requests)}
    arrays = [pa.array(columns.get(field.name, [None] * len(requests)), field.type) for field in SHOWS]
    return pa.record_batch(arrays, schema=SHOWS)


def _present(row: dict[str, Any]) -> dict[str, Any]:
    """Return the features that are not missing."""
    return {
        name: value
        for name, value in row.items()
        if value is not None and not (isinstance(value, float) and math.isnan(value))
    }


def _feedback(events: list[tuple[float, str, str]]) -> pa.RecordBatch:
    times = np.round(np.array([time for time, _, _ in events], np.float64) * 1e6).astype(np.int64)
    columns: dict[str, Any] = {
        "request": [request for _, _, request in events],
        "item": ["0"] * len(events),
        "event": [f"{request}/{name}" for _, name, request in events],
        "time": times,
        "received": times,
        "labels": pa.array([[(name, 1.0)] for _, name, _ in events], LABELS),
    }
    return pa.record_batch([pa.array(columns[field.name], field.type) for field in FEEDBACK], schema=FEEDBACK)
