"""Processes of a command, known by a mark in their environment: all of them, whoever their parents are."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

GONE_S = 120.0
"""Ten seconds are promised; a busy machine gets more, and `cluster.stop_timeout` on top."""


class Marked:
    """A command of clickfleet in a session of its own."""

    def __init__(self, *words: str, folder: Path) -> None:
        self._mark, self.out = secrets.token_hex(8), folder / "out.txt"
        command = [str(Path(sys.executable).with_name("clickfleet")), *words]
        with self.out.open("wb") as out:
            self.first = subprocess.Popen(
                command,
                env={**os.environ, "CLICKFLEET_MARK": self._mark},
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=folder,
                start_new_session=True,
            )

    def alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                zombie = process.status() == psutil.STATUS_ZOMBIE
                if not zombie and process.environ().get("CLICKFLEET_MARK") == self._mark:
                    found.append(process)
            except psutil.Error:
                pass
        return found

    def said(self) -> str:
        return self.out.read_text(errors="replace")

    def wait_until(self, there: Callable[[], bool], limit_s: float = 240.0) -> None:
        deadline = time.monotonic() + limit_s
        while not there():
            assert self.first.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def listening(self) -> set[str]:
        """Addresses where any of the processes listens."""
        found = set()
        for process in self.alive():
            try:
                connections = process.net_connections("inet")
            except psutil.Error:
                continue
            found |= {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
        return found

    def send(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            self.first.send_signal(number)
            time.sleep(0.2)

    def gone(self) -> int:
        """Waits until nothing is left; the exit code of the command."""
        deadline = time.monotonic() + GONE_S
        while left := self.alive():
            if time.monotonic() > deadline:
                names = [" ".join(process.cmdline()) for process in left]
                self.kill()
                raise AssertionError(f"still there: {names}\n{self.said()}")
            time.sleep(0.2)
        return self.first.wait()

    def kill(self) -> None:
        for process in self.alive():
            process.kill()
        self.first.wait()
