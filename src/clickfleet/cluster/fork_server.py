"""Fork the processes of a private Ray from one that has imported everything (Linux).

Ray starts each of its processes as a new interpreter, which spends two seconds of processor time on imports. A fork needs a fifth of a
second. The driver starts this server first, and Ray's own command for a worker process becomes
`fork_client.py`, which asks the server to fork.

The server has one thread and has computed nothing, so a fork of it is as good as new. When the driver ends, however it ends, the
server kills what it has forked.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CLIENT = str(Path(__file__).with_name("fork_client.py"))
SUPPORTED = sys.platform.startswith("linux")
OF_RAY = ("jsonschema", "requests", "psutil", "msgpack", "uvloop")
"""Packages that Ray imports. Each process imports Ray itself, because Ray reads the environment at that moment."""
LIMIT_S = 5.0
"""How long the server waits for a client that has connected to say what it wants."""


class ForkServer:
    """The driver's side: start the server, and end it."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fork-", dir=folder))  # mode 0700
        self.path = str(self.folder / "socket")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self.path)
            listening.listen(128)
            # One thread, so that no other holds a lock when it forks. Linear algebra is torch's business.
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
            code = "from clickfleet.cluster import fork_server; fork_server.main()"
            self._process = subprocess.Popen(
                [sys.executable, *flags(), "-c", code, str(listening.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listening.fileno()],
                env=environment,
            )

    def command(self, setup: str) -> list[str]:
        """Return the command of a client that stands for Ray's script `setup`."""
        return [sys.executable, "-I", "-S", CLIENT, self.path, setup]

    def end(self) -> None:
        """End the server. The processes that it has forked stay."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def flags() -> list[str]:
    """Return the flags of this interpreter that decide which modules it finds. The working folder is not searched."""
    kept = {"-s": sys.flags.no_user_site, "-S": sys.flags.no_site, "-E": sys.flags.ignore_environment}
    return ["-P", *(flag for flag, given in kept.items() if given)]


class ForkRequest(NamedTuple):
    """What a process is to be: Ray's arguments, environment and working folder, and its standard files."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]


def main() -> None:
    """Import what processes need, and fork one for each client until the driver ends."""
    listening = socket.socket(fileno=int(sys.argv[1]))
    from clickfleet.cluster import shard_server, worker  # noqa: F401

    for name in OF_RAY:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, every page
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what has ended
    forks: list[int] = []  # as file descriptors: the number of a process that has ended may be used again
    request = _serve(listening, forks)
    if request is None:
        shutil.rmtree(os.path.dirname(listening.getsockname()), ignore_errors=True)
        for fork in forks:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fork, signal.SIGKILL)
        return
    for fork in forks:
        os.close(fork)
    listening.close()
    os.setpgid(0, 0)  # Ray kills the group of a process that has ended
    _run(request)


def _serve(listening: socket.socket, forks: list[int]) -> ForkRequest | None:
    """Fork for each client. Return its request in the fork, and None once the driver has ended."""
    while True:
        ready, _, _ = select.select([listening, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        connection, _ = listening.accept()
        with connection, suppress(OSError, ValueError):
            connection.settimeout(LIMIT_S)
            request = _receive(connection)
            number = os.fork()
            if number == 0:
                return request
            with suppress(ProcessLookupError):
                forks.append(os.pidfd_open(number))
            connection.sendall(b"+")
            for file in request.files:
                os.close(file)


def _receive(connection: socket.socket) -> ForkRequest:
    size, files, _, _ = socket.recv_fds(connection, 4, 3)
    text = b""
    while len(text) < int.from_bytes(size, "little"):
        part = connection.recv(1 << 16)
        if not part:
            raise OSError("the client has left")
        text += part
    return ForkRequest(**json.loads(text), files=files)


def _run(request: ForkRequest) -> None:
    """Be the process that a client asks for: run Ray's script."""
    for number, file in enumerate(request.files):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    script, *arguments = without_setup(request.arguments)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")


def without_setup(arguments: list[str]) -> list[str]:
    """Return the script of a worker process and its arguments, without those for Ray's set-up script.

    >>> without_setup(["worker.py", "--node-id=7", "--language=PYTHON", "--serialized-runtime-env-context={}"])
    ['worker.py', '--node-id=7']
    """
    of_setup = ("--serialized-runtime-env-context", "--language", "-s", "-S")
    return [each for each in arguments if not each.startswith(of_setup)]
