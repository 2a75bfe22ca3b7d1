"""A small coverage-guided fuzzer for functions of bytes: inputs that reach a new pair of lines are kept and changed further.

It needs nothing but Python, gives the same inputs for the same seed, and runs many targets in one process.
"""

from __future__ import annotations

import random
import re
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from clickfleet.errors import ClickfleetError

Target = tuple[str, Callable[[bytes], object], Sequence[bytes]]
"""A name, a function that returns or raises ClickfleetError whatever it is given, and inputs to start from."""

MAX_BYTES = 1 << 16
SECONDS = 10
"""No input may take longer."""
_SOURCES = str(Path(sys.modules["clickfleet"].__file__ or "").parent)
_WHOLE = (
    -(2**63),
    -(2**31),
    -1,
    0,
    1,
    2,
    127,
    128,
    255,
    256,
    32767,
    65535,
    65536,
    2**31 - 1,
    2**32 - 1,
    2**40,
    2**63 - 1,
)
_TEXTS = (b"", b"0", b"-1", b"1e400", b"nan", b"inf", b"18446744073709551616", b"9" * 400, b"\x00", b"\xff\xfe", b"\xed\xa0\x80",
          b"\\ud800", b"null", b"true", b"{}", b"[]", b'"', b"\n", b"\t", b":", b",", b"\xf0\x9f\x98\x80")  # fmt: skip


@dataclass
class Finding:
    """What a target must not do, and the input that made it."""

    target: str
    what: str
    where: str
    data: bytes


@dataclass
class Outcome:
    """What became of the inputs of a target."""

    name: str
    runs: int = 0
    returned: int = 0
    refused: int = 0
    kept: int = 0
    lines: int = 0
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)


class SlowError(Exception):
    """An input took too long."""


class Coverage:
    """Pairs of lines that follow each other inside our package."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.fresh = False
        self._last = 0

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(_SOURCES) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        here = hash((frame.f_code, frame.f_lineno))
        edge = self._last ^ here
        self._last = here >> 1
        if edge not in self.known:
            self.known.add(edge)
            self.fresh = True
        return self._line

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.fresh, self._last = False, 0
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(None)


def change(data: bytes, corpus: Sequence[bytes], draw: random.Random) -> bytes:
    """A neighbour of an input, or a mixture of two."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.randrange(len(out) + 1)
        match draw.randrange(11):
            case 0 if out:
                out[at % len(out)] ^= 1 << draw.randrange(8)
            case 1 if out:
                out[at % len(out)] = draw.randrange(256)
            case 2:
                size, value = draw.choice((1, 2, 4, 8)), draw.choice((*_WHOLE, len(out), draw.randrange(1 << 20)))
                text = struct.pack("<Q", value % 2**64)[:size]
                out[at : at + size] = text if draw.randrange(2) else text[::-1]
            case 3:
                del out[at : at + draw.choice((1, 2, 8, 64, len(out)))]
            case 4:
                end = at + draw.choice((1, 4, 16, 64, 256))
                out[at:at] = bytes(out[at:end]) * draw.choice((1, 2, 10))
            case 5:
                out[at:at] = draw.choice(_TEXTS)
            case 6:
                numbers = [found.span() for found in re.finditer(rb"-?\d+", bytes(out[at : at + 200]))]
                if numbers:
                    start, end = draw.choice(numbers)
                    out[at + start : at + end] = draw.choice((b"%d" % draw.choice(_WHOLE), *_TEXTS[:8]))
            case 7:
                words = [found.span() for found in re.finditer(rb"\w+", bytes(out[at : at + 200]))]
                other = re.findall(rb"\w+", draw.choice(corpus)[:5000])
                if words and other:
                    start, end = draw.choice(words)
                    out[at + start : at + end] = draw.choice(other)
            case 8:
                other = draw.choice(corpus)
                begin = draw.randrange(len(other) + 1)
                out[at:] = other[begin:]
            case 9 if out:
                out[at:at] = bytes([out[at % len(out)]]) * draw.choice((2, 100, 3000))
            case _:
                out[at:at] = draw.randbytes(draw.choice((1, 4, 16)))
    return bytes(out[:MAX_BYTES])


def explore(target: Target, runs: int, seed: int, note: Callable[[bytes], None] = lambda data: None) -> Outcome:
    """Gives a target its seeds and then inputs made from them; `note` hears of each before it is run."""
    name, function, seeds = target
    outcome, coverage, draw = Outcome(name), Coverage(), random.Random(f"{name} {seed}")
    corpus = [bytes(data) for data in seeds] or [b""]
    given = iter(list(corpus))
    while outcome.runs < runs:
        data = next(given, None)
        fresh = data is None
        if data is None:
            # Half of the time one of the newest, which are where something is left to find.
            near = corpus[-16:] if draw.randrange(2) else corpus
            data = change(draw.choice(near), corpus, draw)
        note(data)
        finding = _run(function, data, coverage, outcome)
        if finding is not None:
            finding.target = name
            outcome.findings.setdefault((finding.what.split(":")[0], finding.where), finding)
        if fresh and coverage.fresh and finding is None:
            corpus.append(data)
        outcome.runs += 1
    outcome.kept, outcome.lines = len(corpus), len(coverage.known)
    return outcome


def _run(function: Callable[[bytes], object], data: bytes, coverage: Coverage, outcome: Outcome) -> Finding | None:
    def late(number: int, frame: Any) -> None:
        raise SlowError(f"took more than {SECONDS} s of this processor")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with coverage.watching():
            function(data)
        outcome.returned += 1
    except ClickfleetError:
        outcome.refused += 1
    except BaseException as error:  # a panic of foreign code is none of Exception's
        if isinstance(error, KeyboardInterrupt):
            raise
        ours = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(_SOURCES)]
        last = ours[-1] if ours else traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return Finding("", f"{type(error).__name__}: {str(error)[:160]}", where, data)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return None
