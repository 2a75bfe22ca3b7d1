"""What the text formats share: a file -> blocks of whole lines -> a native loop or a function of the user's."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from clickfleet.files import Unpacked
from clickfleet.formats import Bad, Block, Format, OnBad, Parsed
from clickfleet.schema import Schema

BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 16 << 20


class Parser(Protocol):
    """Whole lines, the last one with its newline -> rows."""

    def __call__(self, lines: bytes, on_bad: OnBad) -> Parsed: ...


class Stream(Protocol):
    """Where the bytes come from: a file, or what a command prints."""

    def read(self, n: int) -> bytes: ...
    def skip(self, n: int) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class LineBlock(Block):
    at: int
    end: int
    size: int
    lines: bytes
    parser: Parser

    def parse(self, on_bad: OnBad) -> Parsed:
        return self.parser(self.lines, on_bad)


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
            head = stream.read(BLOCK_BYTES)
            while b"\n" not in head and len(head) < MAX_LINE_BYTES and (more := stream.read(BLOCK_BYTES)):
                head += more
            first, _, _ = head.partition(b"\n")
            parser = self.parser(schema, first.removesuffix(b"\r"), path)
            start = max(at, min(len(first) + 1, len(head))) if self.header_lines else at
            if start < len(head):
                head = head[start:]
            else:
                stream.skip(start - len(head))
                head = b""
            yield from _cut(stream, head, start, parser)
        finally:
            stream.close()


def _cut(stream: Stream, carry: bytes, at: int, parser: Parser) -> Iterator[Block]:
    """Whole lines from `carry` and the rest of the stream. Where a block ends depends only on where it starts."""
    data = carry
    while True:
        if len(data) < BLOCK_BYTES:
            data += stream.read(BLOCK_BYTES - len(data))
        if not data:
            return
        end = data.rfind(b"\n", 0, BLOCK_BYTES) + 1
        searched = BLOCK_BYTES
        while not end:
            more = stream.read(BLOCK_BYTES) if len(data) < MAX_LINE_BYTES else b""
            if len(data) >= MAX_LINE_BYTES or not more:
                break
            data += more
            end = data.find(b"\n", searched) + 1
            searched = len(data)
        if end:
            yield LineBlock(at, at + end, end, data[:end], parser)
        elif len(data) < MAX_LINE_BYTES:  # the last line has no newline
            end = len(data)
            yield LineBlock(at, at + end, end, data + b"\n", parser)
        else:
            start, end = data[:200], 0
            while (newline := data.find(b"\n")) < 0 and (more := stream.read(BLOCK_BYTES)):
                end, data = end + len(data), more
            used = newline + 1 or len(data)
            yield EndlessLine(at, at + end + used, end + used, start, parser)
            at, data = at + end + used, data[used:]
            continue
        at, data = at + end, data[end:]
