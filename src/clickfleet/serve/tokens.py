"""Bearer tokens from a file (one per line, `#` starts a comment) or an environment variable; a changed file counts at once."""

import hmac
import os
from pathlib import Path

from clickfleet.errors import ConfigError


class Tokens:
    """What may follow `Authorization: Bearer`; without a file or variable nothing is asked for."""

    def __init__(self, file: str | None, variable: str) -> None:
        self._file = None if file is None else Path(file)
        self._stamp: tuple[int, int] | None = None
        self._accepted: tuple[bytes, ...] = ()
        self.required = file is not None
        if self._file is None and (given := os.environ.get(variable)):
            self._accepted = tuple(f"Bearer {token}".encode() for token in given.split())
            self.required = True
        self.refresh()
        if self.required and not self._accepted:
            raise ConfigError(f"{file or variable} holds no token", "write one token per line")

    def refresh(self) -> None:
        """Reads the file again where it changed; an unreadable or empty one leaves the tokens as they were."""
        if self._file is None:
            return
        try:
            found = self._file.stat()
            stamp = (found.st_mtime_ns, found.st_ino)
            if stamp == self._stamp:
                return
            lines = self._file.read_text().splitlines()
        except OSError as error:
            if self._stamp is None:
                raise ConfigError(f"cannot read the tokens in {self._file}: {error.strerror}") from None
            return
        self._stamp = stamp
        tokens = [token for line in lines if (token := line.partition("#")[0].strip())]
        if tokens:
            self._accepted = tuple(f"Bearer {token}".encode() for token in tokens)

    def allow(self, header: bytes) -> bool:
        """Whether an `Authorization` header is one of ours; takes equally long for every wrong one."""
        found = False
        for token in self._accepted:
            found |= hmac.compare_digest(token, header)
        return found
