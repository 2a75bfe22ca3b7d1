"""pipe: a command reads each file from standard input and prints multislot lines; debug it: `cat FILE | COMMAND`."""

import os
import shlex
import shutil
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from weakref import WeakSet

from clickfleet.errors import ConfigError, DataError
from clickfleet.files import Unpacked
from clickfleet.find import shown
from clickfleet.formats._lines import Stream
from clickfleet.formats.multislot import Multislot as _Multislot
from clickfleet.machine import WINDOWS

_BITE = 1 << 18
_running: "WeakSet[_Printed]" = WeakSet()


@dataclass(frozen=True)
class Pipe(_Multislot):
    """The command runs once per file, in bash with pipefail; for the same file it must always print the same lines."""

    command: str = "cat"
    """Reads a file from standard input, prints multislot lines; its exit status is checked."""
    folder: str = ""
    """Where the command runs; default: here. In a configuration a relative one is relative to the file."""

    def __post_init__(self) -> None:
        for name in ("command", "folder"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"data.format.{name} is no text: {getattr(self, name)!r:.80}")
        if not self.command.strip():
            raise ConfigError("data.format.command is empty")

    def runs(self) -> str:
        command = " ".join(part if part.isprintable() else repr(part) for part in map(shlex.quote, _argv(self.command)))
        return f"{command}  (in {shown(str(Path(self.folder).absolute()))})"

    def stream(self, path: str) -> Stream:
        return _Printed(path, self.command, self.folder or None)

    def cancel(self, paths: Collection[str]) -> None:
        for printed in list(_running):
            if printed.path in paths:
                printed.end()


def _argv(command: str) -> list[str]:
    return ["bash", "-c", f"set -o pipefail; {command}"]


class _Printed:
    """What a command prints for a file; its failure is an error once all of it was read."""

    def __init__(self, path: str, command: str, folder: str | None) -> None:
        self.path, self._command = path, command
        self._source = Unpacked(path)  # opened first: a missing file is not the command's fault
        self._failure: Exception | None = None
        self._last_words: deque[bytes] = deque(maxlen=10)
        if shutil.which("bash") is None:
            raise DataError(
                "data.format pipe runs its command in bash, and there is none", "install bash, or read by ./reader.py"
            )
        self._process = subprocess.Popen(
            _argv(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            bufsize=0,
            start_new_session=True,
        )
        self._helpers = [
            threading.Thread(target=self._feed, name="clickfleet-pipe-in", daemon=True),
            threading.Thread(target=self._listen, name="clickfleet-pipe-err", daemon=True),
        ]
        for helper in self._helpers:
            helper.start()
        _running.add(self)

    def _feed(self) -> None:
        stdin = self._pipe(self._process.stdin)
        try:
            space = memoryview(bytearray(_BITE))
            while filled := self._source.readinto(space):
                written = 0
                while written < filled:
                    written += stdin.write(space[written:filled])
        except BrokenPipeError:
            pass  # the command does not want more; its exit status says whether that is right
        except Exception as error:
            self._failure = error
            self.end()
        finally:
            with suppress(BrokenPipeError):
                stdin.close()

    def _listen(self) -> None:
        for line in self._pipe(self._process.stderr):
            self._last_words.append(line[:500])

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe

    def readinto(self, space: memoryview) -> int:
        stdout = self._pipe(self._process.stdout)
        filled = 0
        while filled < len(space):
            got = stdout.readinto(space[filled:])  # type: ignore[attr-defined]
            if not got:
                self._check()
                break
            filled += got
        return filled

    def _check(self) -> None:
        status = self._process.wait()
        for helper in self._helpers:
            helper.join()
        if self._failure is not None:
            raise self._failure
        if status != 0:
            how = f"ended with exit status {status}" if status > 0 else f"was ended by signal {-status}"
            said = b"".join(self._last_words).decode("utf-8", "backslashreplace").rstrip()
            indented = "".join(f"\n    {line}" for line in said.splitlines()) or " nothing"
            raise DataError(
                f"{self.path}: the command `{self._command}` {how}; its last words on stderr:{indented}",
                f"try it alone: cat {self.path} | {self._command}",
            )

    def skip(self, n: int) -> None:
        space = memoryview(bytearray(_BITE))
        while n > 0:
            got = self.readinto(space[: min(n, _BITE)])
            if not got:
                raise DataError(
                    f"{self.path}: the command `{self._command}` printed {n} bytes less than before",
                    "it must print the same lines each time for the same file",
                )
            n -= got

    def end(self) -> None:
        """Ends the command and all it started: a reader may be waiting for its next line."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                if WINDOWS:  # it has no groups of processes
                    self._process.kill()
                else:
                    os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        _running.discard(self)
        self.end()
        self._process.wait()
        for helper in self._helpers:
            helper.join()
        for pipe in (self._process.stdout, self._process.stderr):
            self._pipe(pipe).close()
        self._source.close()
