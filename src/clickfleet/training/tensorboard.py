"""Write TensorBoard event files without TensorBoard: records of a length, a checksum and a small protocol buffer.

>>> crc32c(b"123456789") == 0xE3069283
True
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from clickfleet.store.atomic import Appender


class Events:
    """Appends the scalars of one run to a new file in `folder`. TensorBoard shows the file while it grows."""

    def __init__(self, folder: Path) -> None:
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = Appender(folder / name)
        self._append(_field(3, b"brain.Event:2"))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append the values of some curves at a step."""
        values = b"".join(
            _field(1, _field(1, tag.encode()) + b"\x15" + struct.pack("<f", x)) for tag, x in scalars.items()
        )
        self._append(b"\x10" + _varint(step) + _field(5, values))

    def _append(self, content: bytes) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + content
        length = struct.pack("<Q", len(event))
        self._file.add(length + _masked(length) + event + _masked(event))


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """Return the Castagnoli checksum. It is slow, but the records are short."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


@cache
def _table() -> list[int]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table
