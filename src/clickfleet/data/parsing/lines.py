"""Split text files into blocks of whole lines for a native parser or a user's function."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from clickfleet.data.files import ByteStream, Unpacked
from clickfleet.data.formats import Bad, Block, Format, OnBad, Parsed
from clickfleet.data.schema import Schema

BLOCK_BYTES = 1 << 21
MAX_LINE_BYTES = 16 << 20

Text = bytes | bytearray | memoryview


class Parser(Protocol):
    """Converts whole lines, each with its newline, to rows."""

    def __call__(self, lines: Text, on_bad: OnBad, /) -> Parsed: ...


@dataclass(slots=True)
class LineBlock(Block):
    space: bytearray
    """The lines, followed by unused space."""
    used: int
    parser: Parser

    def parse(self, on_bad: OnBad) -> Parsed:
        with memoryview(self.space) as space:
            parsed = self.parser(space[: self.used], on_bad)
        if len(spare) < _MOST_SPARE and len(self.space) == SPACE:
            spare.append(self.space)
        return parsed


@dataclass(slots=True)
class EndlessLine(Block):
    """A line that exceeds the limit: a bad line of which only the beginning is kept."""

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
        """Return the parser for a file that starts with this line."""

    def stream(self, path: str) -> ByteStream:
        return Unpacked(path)

    def blocks(self, path: str, schema: Schema, at: int) -> Iterator[Block]:
        stream = self.stream(path)
        try:
            head = _read(stream, HEAD_BYTES)
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


# Buffers are reused: allocating a fresh mebibyte costs as much as reading it.
SPACE = BLOCK_BYTES + 1
_MOST_SPARE = 16
HEAD_BYTES = 1 << 14
spare: list[bytearray] = []


def _space() -> bytearray:
    try:
        return spare.pop()
    except IndexError:
        return bytearray(SPACE)


def _read(stream: ByteStream, n: int) -> bytes:
    space = bytearray(n)
    with memoryview(space) as view:
        got = stream.readinto(view)
    return bytes(space[:got])


def _cut(stream: ByteStream, carry: bytes, at: int, parser: Parser) -> Iterator[Block]:
    """Yield whole lines from `carry` and the rest of the stream. The end of a block depends only on its start."""
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


def _long_line(stream: ByteStream, data: bytes, at: int, parser: Parser) -> tuple[Block, bytes]:
    """Return the line that starts with `data` and is longer than a block, and the bytes read beyond it."""
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
