"""Bearer tokens from a file (one per line, `#` starts a comment) or an environment variable.

A changed file takes effect within a second. If the file becomes unreadable or empty, it may be in the middle of a replacement:
the previous tokens stay valid for a few seconds, then every request is rejected until the file is readable again.
"""

import hmac
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

from clickfleet.errors import ConfigError

REFRESH_S = 1.0
"""Time between two reads of the token file."""
GRACE_S = 5.0
"""How long tokens stay valid while their file cannot be read."""
MAX_BYTES = 1 << 20


class Tokens:
    """The accepted bearer tokens. Without a file or variable, no token is required."""

    def __init__(self, file: str | None, variable: str, now: Callable[[], float] = time.monotonic) -> None:
        self._file = None if file is None else Path(file)
        self._accepted: tuple[bytes, ...] = ()
        self._now = now
        self._checked_at = self._read_at = now()
        self.problem: str | None = None
        """Why the last read of the file failed."""
        self.required = file is not None
        if self._file is None and (text := os.environ.get(variable)):
            self._accepted = tuple(f"Bearer {token}".encode() for token in text.split())
            self.required = True
        if self._file is not None:
            try:
                self._accepted = _read_tokens(self._file)
            except (OSError, ValueError) as error:
                raise ConfigError(f"cannot read the tokens in {self._file}: {_reason(error)}") from None
        if self.required and not self._accepted:
            raise ConfigError(f"{file or variable} holds no token", "write one token per line")

    @property
    def closed(self) -> bool:
        """Return whether every request is rejected because the valid tokens are unknown."""
        self.refresh()
        return self.problem is not None and self._now() - self._read_at > GRACE_S

    def refresh(self) -> None:
        """Read the file again if the last read is more than a second ago."""
        now = self._now()
        if self._file is None or now - self._checked_at < REFRESH_S:
            return
        self._checked_at = now
        try:
            tokens = _read_tokens(self._file)
            if not tokens:
                raise ValueError("it holds no token")
        except (OSError, ValueError) as error:
            if self.problem is None:
                print(f"cannot read the tokens in {self._file}: {_reason(error)}", file=sys.stderr, flush=True)
            self.problem = f"cannot read the tokens: {_reason(error)}"
            return
        self._accepted, self._read_at, self.problem = tokens, now, None

    def allow(self, header: bytes) -> bool:
        """Return whether an `Authorization` header holds an accepted token, in constant time."""
        if self.closed:
            return False
        accepted = False
        for token in self._accepted:
            accepted |= hmac.compare_digest(token, header)
        return accepted


def _read_tokens(file: Path) -> tuple[bytes, ...]:
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError("it is not a regular file")
    with file.open("rb") as opened:
        content = opened.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it exceeds {MAX_BYTES} bytes")
    lines = content.decode().splitlines()
    return tuple(f"Bearer {token}".encode() for line in lines if (token := line.partition("#")[0].strip()))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or "I/O error"
    return "it is not text" if isinstance(error, UnicodeDecodeError) else str(error)
