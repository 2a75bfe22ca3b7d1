"""The shards and workers of a run: created, put into the state of a base, connected to each other, felt for a pulse."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from clickfleet.cluster.base import Base, split_dense
from clickfleet.cluster.fleet import Fleet, Log, LostError, StoppedError, counted
from clickfleet.cluster.overview import Overview
from clickfleet.cluster.remote import AbandonedError
from clickfleet.cluster.shard import rules_of
from clickfleet.cluster.shard_actor import Origin, ShardActor
from clickfleet.cluster.streams import links_of
from clickfleet.cluster.wire import new_run
from clickfleet.cluster.worker_actor import WorkerActor
from clickfleet.config import Config
from clickfleet.errors import ClusterError
from clickfleet.exchange import Spread
from clickfleet.schema import Schema

POLL_S = 0.5


class Crew:
    """Who takes part in a run by now, and in which epoch of it."""

    def __init__(self, config: Config, schema: Schema, spread: Spread, row_files: int, logs: str, log: Log) -> None:
        self.config, self.schema, self.spread, self.row_files = config, schema, spread, row_files
        self.log, self._logs = log, logs
        self.fleet = Fleet(config, log)
        self.overview = Overview(config.train.metrics.thresholds)
        self.workers = list(range(config.cluster.workers))
        self.run_epoch = 0
        self._run = new_run()
        self._polls: dict[str, tuple[Any, float]] = {}
        self._polled = 0.0

    @property
    def who(self) -> tuple[int, bytes, int]:
        return int(self.schema.hash[:15], 16), self._run, self.run_epoch

    @property
    def peers(self) -> list[int]:
        links = links_of(self.config)
        return [worker * links + i for worker in self.workers for i in range(links)]

    @property
    def shards(self) -> dict[str, Any]:
        return self.fleet.named("shard")

    @property
    def trainers(self) -> dict[str, Any]:
        """The workers' actors."""
        return self.fleet.named("worker")

    def start(self) -> None:
        """Starts all processes together and waits until they are there."""
        self.fleet.start()
        names = [f"shard {i}" for i in range(self.config.cluster.shards)] + [f"worker {i}" for i in self.workers]
        left = max(0.0, self.fleet.deadline - time.monotonic())
        self.log(f"waiting for {counted(names)} to start, for {left:.0f} s at most …")
        self.create(names, left)

    def create(self, names: Iterable[str], timeout_s: float | None = None) -> None:
        calls = {}
        for name in names:
            kind, number = name.split()
            if kind == "shard":
                rules = rules_of(self.config, self.row_files)
                self.fleet.create(name, ShardActor, int(number), self.config, rules, self.who, self._logs, cpus=1)
            else:
                schema, threads = self.schema.to_dict(), self.config.cluster.threads
                self.fleet.create(name, WorkerActor, int(number), self.config, schema, self._logs, cpus=threads)
            calls[name] = self.fleet.actors[name].process.remote()
        limit = self.config.cluster.start_timeout if timeout_s is None else timeout_s
        self.fleet.facts |= self.fleet.wait_for(calls, "start", limit)

    def begin(self, base: Base) -> None:
        """Puts everyone into the state of the base, in the present epoch of the run."""
        self.load(self.shards, base)
        self.connect(self.trainers, base)
        self._polls = {}

    def load(self, shards: Iterable[str], base: Base) -> None:
        parts = split_dense(self.spread, base.dense)
        calls = {}
        for name in shards:
            origin = Origin(base.path, base.table, parts[int(name.split()[1])], base.batches)
            calls[name] = self.fleet.actors[name].load.remote(origin, self.who, self.peers)
        self.fleet.facts |= self.fleet.wait_for(calls, "loading", max(self.config.cluster.start_timeout, 600.0))

    def connect(self, workers: Iterable[str], base: Base, learned: Sequence[int] = ()) -> None:
        """The shards have `learned` so many batches of each link of a worker that takes the place of a lost one."""
        endpoints = [self.fleet.facts[name]["endpoints"] for name in self.shards]
        calls = {
            name: self.fleet.actors[name].connect.remote(endpoints, self.who, base.buffers, learned) for name in workers
        }
        self.fleet.wait_for(calls, "connecting", self.config.cluster.start_timeout)

    def replace(self, name: str) -> None:
        """A new process for a lost one; a worker that finds no place leaves its files to the others."""
        self.fleet.end(name)
        self._polls.pop(name, None)
        index = int(name.split()[1])
        if name.startswith("worker") and index not in self.workers:
            return
        try:
            self.create([name])
        except StoppedError:
            raise
        except ClusterError:
            if name.startswith("shard") or len(self.workers) == 1:
                raise
            self.fleet.end(name)
            self.workers.remove(index)
            self.log(f"there is no place for {name}: its files go to the other {len(self.workers)} workers")

    def tell(self, actors: dict[str, Any], verb: str, *arguments: Any, timeout_s: float = 60.0) -> dict[str, Any]:
        """Calls all of them at once; what each answers."""
        calls = {name: getattr(actor, verb).remote(*arguments) for name, actor in actors.items()}
        return self.fleet.wait_for(calls, verb, timeout_s)

    def result(self, name: str, call: Any) -> Any:
        """Of a call that has ended; a worker that cannot go on with the others is as good as lost."""
        try:
            return self.fleet.result(name, call)
        except AbandonedError:
            raise LostError(name, "a shard refused it") from None
        except ClusterError as error:
            if "has not answered" in str(error):
                raise LostError(name, str(error).splitlines()[0]) from None
            raise

    def feel(self) -> None:
        """Asks every process how it is; who does not answer, or answers that it stands still, is lost."""
        now, limit = time.monotonic(), self.config.cluster.heartbeat_timeout
        for name, (call, since) in list(self._polls.items()):
            if self.fleet.ray.wait([call], timeout=0)[0]:
                del self._polls[name]
                found = self._note(name, self.result(name, call))
                if found.get("idle_s", 0.0) > limit:
                    raise LostError(name, f"hung: it has not moved for {found['idle_s']:.0f} s")
            elif now - since > limit:
                raise LostError(name, f"hung: no sign of life for {now - since:.0f} s")
        if now - self._polled >= POLL_S:
            self._polled = now
            for name, actor in self.fleet.actors.items():
                if name not in self._polls:
                    self._polls[name] = (actor.look.remote(), now)

    def count(self) -> int:
        """Batches trained on, exactly."""
        for name, found in self.tell(self.fleet.actors, "look").items():
            self._note(name, found)
        return self.overview.steps

    def _note(self, name: str, found: dict[str, Any]) -> dict[str, Any]:
        if name.startswith("worker"):
            self.overview.heard = time.monotonic()
        (self.overview.workers if name.startswith("worker") else self.overview.shards)[name] = found
        return found

    def gather_logs(self, folder: Path) -> None:
        """Logs of processes on other hosts, as far as they are."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.tell(self.fleet.actors, "said").items():
            (folder / f"{name.replace(' ', '-')}.log").write_text(text)

    def stop(self) -> None:
        self.fleet.stop(self.shards)
