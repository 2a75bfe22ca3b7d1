"""Bearer tokens from a file (one per line, `#` starts a comment) or an environment variable; a changed file counts within a second.

A file that cannot be read, or holds no token, may be one that is being replaced: the tokens before it stay valid for a few seconds.
After that nobody is let in until it can be read again.
"""

import hmac
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

from clickfleet.errors import ConfigError

FRESH_S = 1.0
"""Age at which the tokens are read again."""
GRACE_S = 5.0
"""How long tokens stay valid while their file cannot be read."""
MOST_BYTES = 1 << 20


class Tokens:
    """What may follow `Authorization: Bearer`; without a file or variable nothing is asked for."""

    def __init__(self, file: str | None, variable: str, now: Callable[[], float] = time.monotonic) -> None:
        self._file = None if file is None else Path(file)
        self._accepted: tuple[bytes, ...] = ()
        self._now = now
        self._looked = self._read = now()
        self.problem: str | None = None
        """Why the file could not be read the last time."""
        self.required = file is not None
        if self._file is None and (given := os.environ.get(variable)):
            self._accepted = tuple(f"Bearer {token}".encode() for token in given.split())
            self.required = True
        if self._file is not None:
            try:
                self._accepted = _tokens(self._file)
            except (OSError, ValueError) as error:
                raise ConfigError(f"cannot read the tokens in {self._file}: {_reason(error)}") from None
        if self.required and not self._accepted:
            raise ConfigError(f"{file or variable} holds no token", "write one token per line")

    @property
    def closed(self) -> bool:
        """Whether nobody is let in, because nobody knows which tokens are still valid."""
        self.refresh()
        return self.problem is not None and self._now() - self._read > GRACE_S

    def refresh(self) -> None:
        """Reads the file again after a second."""
        now = self._now()
        if self._file is None or now - self._looked < FRESH_S:
            return
        self._looked = now
        try:
            found = _tokens(self._file)
            if not found:
                raise ValueError("it holds no token")
        except (OSError, ValueError) as error:
            if self.problem is None:
                print(f"cannot read the tokens in {self._file}: {_reason(error)}", file=sys.stderr, flush=True)
            self.problem = f"the tokens cannot be read: {_reason(error)}"
            return
        self._accepted, self._read, self.problem = found, now, None

    def allow(self, header: bytes) -> bool:
        """Whether an `Authorization` header is one of ours; takes equally long for every wrong one."""
        if self.closed:
            return False
        found = False
        for token in self._accepted:
            found |= hmac.compare_digest(token, header)
        return found


def _tokens(file: Path) -> tuple[bytes, ...]:
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError("it is not a regular file")
    with file.open("rb") as opened:
        content = opened.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it is longer than {MOST_BYTES} bytes")
    lines = content.decode().splitlines()
    return tuple(f"Bearer {token}".encode() for line in lines if (token := line.partition("#")[0].strip()))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or "an input or output error"
    return "it is not text" if isinstance(error, UnicodeDecodeError) else str(error)
