"""pipe: a command reads each file from standard input and prints multislot lines. Test it with `cat FILE | COMMAND`."""

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

from clickfleet.config.machine import WINDOWS
from clickfleet.config.plugins import extensions, shown
from clickfleet.data.files import ByteStream, Unpacked
from clickfleet.data.formats.multislot import Multislot as _Multislot
from clickfleet.errors import ConfigError, DataError

_CHUNK_BYTES = 1 << 18
_running: "WeakSet[_CommandOutput]" = WeakSet()


@dataclass(frozen=True)
class Pipe(_Multislot):
    """Runs the command once per file, in bash with pipefail. It must print the same lines for the same file every time."""

    command: str = "cat"
    """Command that reads a file from standard input and prints multislot lines. Its exit status is checked."""
    folder: str = ""
    """Working directory of the command. Default: the current one. A relative path is relative to the configuration file."""
    hash_seed: int = 0
    """PYTHONHASHSEED of the command, so that hash() gives a reader in Python the same ids in every process."""

    def __post_init__(self) -> None:
        for name in ("command", "folder"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"data.format.{name} must be text, not {getattr(self, name)!r:.80}")
        if not self.command.strip():
            raise ConfigError("data.format.command is empty")
        if not isinstance(self.hash_seed, int) or not 0 <= self.hash_seed < 2**32:
            raise ConfigError(f"data.format.hash_seed must be from 0 to 4294967295, not {self.hash_seed!r:.80}")

    def runs(self) -> str:
        command = " ".join(part if part.isprintable() else repr(part) for part in map(shlex.quote, _argv(self.command)))
        return f"{command}  (in {shown(str(Path(self.folder).absolute()))})"

    def stream(self, path: str) -> ByteStream:
        return _CommandOutput(path, self.command, self.folder or None, self.hash_seed)

    def cancel(self, paths: Collection[str]) -> None:
        for output in list(_running):
            if output.path in paths:
                output.end()


def _environment(hash_seed: int) -> dict[str, str]:
    """Return the environment of a command: a fixed hash seed, and modules for readers written for another system."""
    modules = [*(folder() for folder in extensions("reader_modules")), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": os.pathsep.join(map(str, modules))}


def _argv(command: str) -> list[str]:
    return ["bash", "-c", f"set -o pipefail; {command}"]


class _CommandOutput(ByteStream):
    """The output of a command for a file. If the command fails, the end of its output raises an error."""

    def __init__(self, path: str, command: str, folder: str | None, hash_seed: int) -> None:
        self.path, self._command = path, command
        self._source = Unpacked(path)  # opened first: a missing file is not a failure of the command
        self._failure: Exception | None = None
        self._last_stderr: deque[bytes] = deque(maxlen=10)
        if shutil.which("bash") is None:
            raise DataError(
                "data.format pipe needs bash, which is not installed", "install bash, or use a reader in Python"
            )
        self._process = subprocess.Popen(
            _argv(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=_environment(hash_seed),
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin: IO[bytes] = self._process.stdin
        self._stdout: IO[bytes] = self._process.stdout
        self._stderr: IO[bytes] = self._process.stderr
        self._helpers = [
            threading.Thread(target=self._feed, name="clickfleet-pipe-in", daemon=True),
            threading.Thread(target=self._listen, name="clickfleet-pipe-err", daemon=True),
        ]
        for helper in self._helpers:
            helper.start()
        _running.add(self)

    def _feed(self) -> None:
        try:
            space = memoryview(bytearray(_CHUNK_BYTES))
            while filled := self._source.readinto(space):
                written = 0
                while written < filled:
                    written += self._stdin.write(space[written:filled])
        except BrokenPipeError:
            pass  # the command closed its input; its exit status tells whether that is an error
        except Exception as error:
            self._failure = error
            self.end()
        finally:
            with suppress(BrokenPipeError):
                self._stdin.close()

    def _listen(self) -> None:
        for line in self._stderr:
            self._last_stderr.append(line[:500])

    def _read_some(self, space: memoryview) -> int:
        got: int = self._stdout.readinto(space)  # type: ignore[attr-defined]
        if not got:
            self._check()
        return got

    def _check(self) -> None:
        status = self._process.wait()
        for helper in self._helpers:
            helper.join()
        if self._failure is not None:
            raise self._failure
        if status != 0:
            how = f"failed with exit status {status}" if status > 0 else f"was stopped by signal {-status}"
            stderr = b"".join(self._last_stderr).decode("utf-8", "backslashreplace").rstrip()
            indented = "".join(f"\n    {line}" for line in stderr.splitlines()) or " nothing"
            raise DataError(
                f"{self.path}: the command `{self._command}` {how}; its last output on stderr:{indented}",
                f"run it alone: cat {self.path} | {self._command}",
            )

    def _too_short(self, missing: int) -> DataError:
        return DataError(
            f"{self.path}: the command `{self._command}` printed {missing} bytes less than before",
            "it must print the same lines for the same file every time",
        )

    def end(self) -> None:
        """Kill the command and its children. A reader may be waiting for its next line."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                if WINDOWS:  # no process groups
                    self._process.kill()
                else:
                    os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        _running.discard(self)
        self.end()
        self._process.wait()
        for helper in self._helpers:
            helper.join()
        self._stdout.close()
        self._stderr.close()
        self._source.close()
