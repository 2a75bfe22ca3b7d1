"""The loop on one machine: a server with its logs, and a trainer that joins and learns them and publishes to the server.

with FeedbackLoop("config.yaml") as loop:
    print(loop.url)  # requests, feedback and the page /loop

Each part is a process of its own, and is started again when it dies. Files lie between them, so whatever is killed at whatever moment, no
show is lost and none is learned twice; meanwhile the server answers with the last model. The join is part of the trainer, because what it
has read belongs to the trainer's checkpoint.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from clickfleet.config.check import configure
from clickfleet.config.load import Config, plain
from clickfleet.config.sections import Join, PassLimits
from clickfleet.data.events import topic_of
from clickfleet.errors import ConfigError, ServeError
from clickfleet.serve import supervisor
from clickfleet.serve.priority import TRAINER_SESSION
from clickfleet.serve.state_folder import TRAINER, read_json, write_json
from clickfleet.serve.supervisor import ChildProcess, Settings, Supervisor
from clickfleet.store.lock import Lock
from clickfleet.store.mirror import url_of
from clickfleet.store.published import LOG, Log

FOLDER = "loop"
"""Folder in the run folder for the files of the server and the supervisor."""
PASS_S = 0.2
"""Time of a pass, if online.pass is not set."""
STOP_S = 120.0
"""How long a trainer may take to write its last checkpoint."""
POLL_S = 0.05


def loop_config(config: Config) -> Config:
    """Return the configuration of all parts of a loop: what is not set follows from the rest.

    >>> config = loop_config(configure({"run": {"dir": "run"}}))
    >>> Path(config.online.join.shows).name, Path(config.serve.feedback).name, config.online.pass_.seconds
    ('shows', 'feedback', 0.2)
    """
    online, serve = config.online, config.serve
    if online.dir is not None or online.kafka is not None:
        raise ConfigError(
            "a loop learns from its own show log and feedback, but online.dir or online.kafka is set",
            "remove it; online.join says how they are joined",
        )
    if url_of(config.run.dir) is not None:
        raise ConfigError(
            "a loop needs a run folder on this machine", "set run.dir to a folder; publish.to copies the entries"
        )
    for key in ("start_day", "end_day"):
        if getattr(online, key) is not None:
            raise ConfigError(f"online.{key} is for a stream that ends; a loop runs until it is stopped", "remove it")
    run = Path(config.run.dir).resolve()
    join = online.join or Join(serve.log or str(run / "shows"), serve.feedback or str(run / "feedback"))
    for key, logged, joined in (("log", serve.log, join.shows), ("feedback", serve.feedback, join.feedback)):
        if logged is not None and _place(logged) != _place(joined):
            name = "shows" if key == "log" else key
            raise ConfigError(f"serve.{key} is {logged}, but online.join.{name} is {joined}", "remove one of them")
    if serve.log_sample < 1:
        raise ConfigError("a loop learns from every show, but serve.log_sample is below 1", "remove it")
    join = replace(join, shows=_place(join.shows), feedback=_place(join.feedback))
    divided = online.pass_ is not None or join.interval is not None or join.rows_per_pass is not None
    limits = online.pass_ if divided else PassLimits(seconds=PASS_S)
    return replace(
        config,
        run=replace(config.run, dir=str(run)),
        online=replace(online, join=join, pass_=limits, first_base=True),
        serve=replace(serve, log=join.shows, feedback=join.feedback),
    )


def _place(where: str) -> str:
    return where if topic_of(where) else str(Path(where).resolve())


class FeedbackLoop:
    """Server and trainer inside a `with` block. `log` is told what is started and what dies."""

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *overrides: str,
        log: Callable[[str], None] = print,
        quiet: bool = False,
    ) -> None:
        self.config = loop_config(configure(config, overrides))
        self.run_folder = Path(self.config.run.dir)
        self.state = self.run_folder / FOLDER
        self.log, self.quiet = log, quiet
        self._server: Supervisor | None = None
        self._trainer: ChildProcess | None = None
        self._lock: Lock | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.stopping = False

    @property
    def server(self) -> Supervisor:
        assert self._server is not None
        return self._server

    @property
    def url(self) -> str:
        """Address of the server."""
        return self.server.address

    @property
    def processes(self) -> dict[str, int]:
        """Process ids of the parts that are alive."""
        children = self.server.children.items()
        return {name: child.process.pid for name, child in children if child.alive and child.process is not None}

    def __enter__(self) -> Self:
        self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = Lock(self.state / ".lock", "runs a loop")
        self._lock.__enter__()
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        self._thread = threading.Thread(target=self._supervise, name="clickfleet-loop", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        (self.state / TRAINER).unlink(missing_ok=True)
        write_json(self.state / "trainer-config.json", plain(self.config))
        settings = Settings.of_section(self.config.serve, self.run_folder / "published", self.state)
        # The socket is opened first: connections wait until there is a model.
        self._server = supervisor.create(replace(settings, run=str(self.run_folder)))
        command = [sys.executable, "-m", "clickfleet.online.loop_trainer", str(self.state)]
        self._trainer = ChildProcess(
            [*command, *(["quiet"] if self.quiet else [])], stop_s=STOP_S, session=TRAINER_SESSION
        )
        self._trainer.start()
        self._wait_for_base(self._trainer)
        if not self.stopping:
            self._server.start()
            self._server.children["trainer"] = self._trainer

    def _wait_for_base(self, trainer: ChildProcess) -> None:
        published = self.run_folder / "published"
        while not self.stopping:
            if (published / LOG).is_file() and any(line.kind == "base" for line in Log(published).kept()):
                return
            if not trainer.alive:
                told = read_json(self.state / TRAINER) or {}
                raise ServeError(f"the trainer did not start: {told.get('error', 'see its message above')}")
            time.sleep(POLL_S)

    def _supervise(self) -> None:
        try:
            self.server.supervise(self.log)
        except BaseException as error:
            self._failure = error

    def wait(self) -> None:
        """Wait until `stopping` is set, or no worker of the server can be kept alive."""
        while not self.stopping and self._thread is not None and self._thread.is_alive():
            self._thread.join(POLL_S)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop all parts. The server answers what it has begun, and the trainer writes a checkpoint."""
        self.stopping = True
        if self._trainer is not None:
            if self._trainer.alive and self._trainer.process is not None:
                self._trainer.process.terminate()  # it saves while the server stops
            if self._server is not None:
                self._server.stopping = True
            if self._thread is not None:
                self._thread.join()
        if self._server is not None:
            self._server.stop()
        if self._trainer is not None:
            supervisor.stop([self._trainer])
        if self._lock is not None:
            self._lock.__exit__()
            self._lock = None


def run(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *overrides: str,
    log: Callable[[str], None] = print,
    ready: Callable[[FeedbackLoop], None] = lambda loop: None,
) -> FeedbackLoop:
    """Run a loop until SIGINT or SIGTERM. `ready` is called when the server answers."""
    loop = FeedbackLoop(config, *overrides, log=log)

    def stop(*_: object) -> None:
        loop.stopping = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with loop:
            if not loop.stopping:
                ready(loop)
            loop.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return loop
