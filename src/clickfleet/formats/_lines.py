"""What the text formats share: a file -> blocks of whole lines -> a native loop or a function of the user's."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from clickfleet.files import Unpacked
from clickfleet.formats import Bad, Block, Format, OnBad, Parsed
from clickfleet.schema import Schema

BLOCK_BYTES = 1 << 21
MAX_LINE_BYTES = 16 << 20


Text = bytes | bytearray | memoryview


class Parser(Protocol):
    """Whole lines, the last one with its newline -> rows."""

    def __call__(self, lines: Text, on_bad: OnBad, /) -> Parsed: ...


class Stream(Protocol):
    """Where the bytes come from: a file, or what a command prints."""

    def readinto(self, space: memoryview) -> int:
        """Fills `space` and says how much; less than all only at the end."""

    def skip(self, n: int) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class LineBlock(Block):
    at: int
    end: int
    size: int
    space: bytearray
    """The lines, and room that is not used."""
    used: int
    parser: Parser

    def parse(self, on_bad: OnBad) -> Parsed:
        with memoryview(self.space) as space:
            parsed = self.parser(space[: self.used], on_bad)
        if len(_spare) < _MOST_SPARE and len(self.space) == _SPACE:
            _spare.append(self.space)
        return parsed


@dataclass(slots=True)
class EndlessLine(Block):
    """A line too long to be one: a bad line, of which only the beginning is kept."""

    at: int
    end: int
    size: int
    start: bytes
    parser: Parser

    def parse(self, on_bad: OnBad) -> Parsed:
        nothing = self.parser(b"", on_bad).batch
        reason = f"the line is longer than {MAX_LINE_BYTES >> 20} MiB ({self.size} bytes)"
        return Parsed(nothing, 1, 1, [Bad(0, self.start, "", reason)])


class Lines(Format):
    """A text format: one row per line."""

    @abstractmethod
    def parser(self, schema: Schema, first_line: bytes, path: str) -> Parser:
        """How to parse a file that begins with this line."""

    def stream(self, path: str) -> Stream:
        return Unpacked(path)

    def blocks(self, path: str, schema: Schema, at: int) -> Iterator[Block]:
        stream = self.stream(path)
        try:
            head = _read(stream, _HEAD_BYTES)
            while b"\n" not in head and len(head) < MAX_LINE_BYTES and (more := _read(stream, BLOCK_BYTES)):
                head += more
            first, _, _ = head.partition(b"\n")
            parser = self.parser(schema, first.removesuffix(b"\r"), path)
            start = max(at, min(len(first) + 1, len(head))) if self.header_lines else at
            if start > len(head):
                stream.skip(start - len(head))
            yield from _cut(stream, head[start:], start, parser)
        finally:
            stream.close()


# Memory for lines is used again: taking a fresh mebibyte from the system costs as much as reading it.
_SPACE = BLOCK_BYTES + 1
_MOST_SPARE = 16
_HEAD_BYTES = 1 << 14
_spare: list[bytearray] = []


def _space() -> bytearray:
    try:
        return _spare.pop()
    except IndexError:
        return bytearray(_SPACE)


def _read(stream: Stream, n: int) -> bytes:
    space = bytearray(n)
    with memoryview(space) as view:
        got = stream.readinto(view)
    return bytes(space[:got])


def _cut(stream: Stream, carry: bytes, at: int, parser: Parser) -> Iterator[Block]:
    """Whole lines from `carry` and the rest of the stream. Where a block ends depends only on where it starts."""
    while True:
        space = _space()
        with memoryview(space) as view:
            kept = min(len(carry), BLOCK_BYTES)
            view[:kept] = carry[:kept]
            filled = kept if kept == BLOCK_BYTES else kept + stream.readinto(view[kept:BLOCK_BYTES])
            end = space.rfind(b"\n", 0, filled) + 1
            rest = bytes(view[end:filled]) + carry[kept:]
        if end:
            yield LineBlock(at, at + end, end, space, end, parser)
        elif filled < BLOCK_BYTES:  # the end of the file
            if filled:  # and its last line has no newline
                space[filled] = ord("\n")
                yield LineBlock(at, at + filled, filled, space, filled + 1, parser)
            return
        else:
            block, rest = _long_line(stream, rest, at, parser)
            yield block
            end = block.size
        at, carry = at + end, rest


def _long_line(stream: Stream, data: bytes, at: int, parser: Parser) -> tuple[Block, bytes]:
    """The line that starts with `data`, which is longer than a block, and what was read beyond it."""
    end, more = data.find(b"\n") + 1, b"?"
    while not end and more and len(data) <= MAX_LINE_BYTES:
        more = _read(stream, BLOCK_BYTES)
        end = more.find(b"\n") + 1
        end += len(data) if end else 0
        data += more
    size = end or len(data)
    if size <= MAX_LINE_BYTES:
        line = bytearray(data[:size] if end else data + b"\n")
        return LineBlock(at, at + size, size, line, len(line), parser), data[size:]
    start, rest = data[:200], data[size:]
    while not end and (more := _read(stream, BLOCK_BYTES)):
        end = more.find(b"\n") + 1
        size += end or len(more)
        rest = more[end:] if end else b""
    return EndlessLine(at, at + size, size, start, parser), rest
