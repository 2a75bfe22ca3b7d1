"""Workers and shards that come and go while a run trains: every row is learned once, whatever fails meanwhile."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import clickfleet
from clickfleet import RunningCluster
from clickfleet.cluster.assignments import AssignedStream, dealt, divided
from clickfleet.cluster.control import ControlFolder, SizeRequest, table
from clickfleet.data.batch import concatenate
from clickfleet.data.files import expand
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.data.reader import Reader
from clickfleet.errors import ClusterError
from clickfleet.store import checkpoint, run_folder
from clickfleet.store.lock import Lock
from fleet import LONG, ROWS, SLOTS, kill, processes, shows
from soak import in_soak, only_in_soak

pytestmark = pytest.mark.xdist_group("cluster")


class Conductor(clickfleet.Callback):
    """Does something to a run from another thread while it trains, and lets the run end with the epoch after that."""

    def __init__(self, run: Path, act: Callable[[RunningCluster], None]) -> None:
        self.cluster, self.problems = RunningCluster(run), list[BaseException]()
        self._act = act
        self._thread = threading.Thread(target=self._conduct, daemon=True)
        self._thread.start()

    def _conduct(self) -> None:
        try:
            while True:
                try:
                    if self.cluster.status()["rows"]:
                        break
                except ClusterError:  # it starts
                    time.sleep(0.05)
            self._act(self.cluster)
        except BaseException as problem:
            self.problems.append(problem)

    def on_epoch(self, results: Any) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(60)
        if self.problems:
            raise self.problems[0]


def conducted(config: dict[str, Any], act: Callable[[RunningCluster], None], **options: Any) -> Any:
    """Train until `act` has done its work and the epoch has ended."""
    config["train"] = {**config["train"], "epochs": 1000}
    conductor = Conductor(Path(config["run"]["dir"]), act)
    done = clickfleet.train(config, callbacks=[conductor], quiet=True, **options)
    conductor.join()
    return done


@pytest.mark.parametrize("mode", ["async", only_in_soak("sync"), only_in_soak("half_async"), only_in_soak("geo")])
def test_a_run_grows_and_shrinks_while_it_trains(ray: Any, config: dict[str, Any], mode: str) -> None:
    """More workers, other shards, a killed worker, fewer workers: nothing is lost, nothing is learned twice."""
    run = Path(config["run"]["dir"])
    config["mode"], config["run"]["checkpoint_every_steps"] = {"name": mode}, 300
    config["data"]["batch_size"] = LONG
    sizes = []

    def act(cluster: RunningCluster) -> None:
        sizes.append(cluster.add_workers(1))
        sizes.append(cluster.set_shards(3))
        kill(run, "worker 2")
        sizes.append(cluster.remove_workers(2))
        with pytest.raises(ClusterError, match="cannot remove 1 of 1 workers"):
            cluster.remove_workers(1)
        assert [line["name"] for line in cluster.status()["processes"]] == ["shard 0", "shard 1", "shard 2", "worker 0"]

    done = conducted(config, act)
    assert [(size["workers"], size["shards"]) for size in sizes] == [(3, 2), (3, 3), (1, 3)]
    assert done.rows % ROWS == 0
    assert done.rows > 0
    assert shows(run) == done.rows * SLOTS
    assert done.train["rows"] == ROWS  # of the last epoch
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["change"] for line in lines if line["kind"] == "resize"][-1] == "remove-workers 2"
    assert [line["epoch_rows"] for line in lines if line["kind"] == "epoch"] == [ROWS] * (done.rows // ROWS)
    with pytest.raises(ClusterError, match="no run is alive"):
        RunningCluster(run).status()


def test_a_resized_run_resumes_with_its_size(ray: Any, config: dict[str, Any]) -> None:
    """Unless the configuration has other numbers than the run was started with. Data in memory is divided by row."""
    run = Path(config["run"]["dir"])
    config |= {"mode": {"name": "sync"}}

    def act(cluster: RunningCluster) -> None:
        cluster.add_workers(1)
        cluster.set_shards(1)

    schema = Reader(config["data"]["train"], format="criteo").schema
    rows = concatenate(list(Reader(config["data"]["train"], format="criteo")))
    config["data"] = {"batch_size": LONG, "valid_share": 0, "shuffle": 1}
    given = {"data": [rows], "schema": schema}
    done = conducted(config, act, **given)
    assert "idle" not in (run / "log.txt").read_text()
    logs = [(run / "logs" / f"workerlog.{worker}").read_text() for worker in range(3)]
    assert ": 1 streams" in logs[2]  # in the epoch in which it came: rows are divided exactly
    epochs = done.rows // ROWS
    assert done.rows == epochs * ROWS
    arrangement = run_folder.read_state(checkpoint.latest(run / "checkpoints"))["arrangement"]
    assert (arrangement["workers"], arrangement["shards"]) == (3, 1)
    config["train"]["epochs"] = epochs + 1
    more = clickfleet.train(config, resume=True, quiet=True, **given)
    assert more.rows == (epochs + 1) * ROWS
    assert "it resumes with 3 workers and 1 shards" in (run / "log.txt").read_text()
    config["train"]["epochs"], config["cluster"] = epochs + 2, {**config["cluster"], "workers": 1}
    last = clickfleet.train(config, resume=True, quiet=True, **given)
    arrangement = run_folder.read_state(checkpoint.latest(run / "checkpoints"))["arrangement"]
    assert (arrangement["workers"], arrangement["shards"]) == (1, 1)
    assert shows(run) == last.rows * SLOTS == (epochs + 2) * ROWS * SLOTS


FILES = [f"f{i}" for i in range(23)]


@given(
    live=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    before=st.integers(1, 5),
    workers=st.sets(st.integers(0, 7), min_size=1, max_size=6),
)
def test_what_is_left_is_divided_evenly(live: list[int], before: int, workers: set[int]) -> None:
    """Whole files, each to one worker. A worker that stays keeps the file it has begun."""
    start, streams = 0, []
    for number, count in enumerate(live):
        streams.append(AssignedStream(number, FILES[start : start + count], None, number))
        start += count
    streams = [stream for stream in streams if stream.data]
    shares, exact = divided(streams, sorted(workers), first=10)
    assert exact
    assert sorted(shares) == sorted(workers)
    given_out = Counter(file for each in shares.values() for stream in each for file in stream.data)
    assert given_out == Counter(FILES[:start])
    counts = [sum(len(stream.data) for stream in each) for each in shares.values()]
    assert max(counts) - min(counts) <= 1
    numbers = [stream.number for each in shares.values() for stream in each]
    assert len(set(numbers)) == len(numbers)
    assert all(number >= 10 for number in numbers)


def test_a_stream_stays_with_its_worker() -> None:
    begun = {"reach": [1], "quarantine": 7}
    streams = [AssignedStream(i, ["a"], begun, owner) for i, owner in enumerate((2, 0, 5))]
    shares = dealt(streams, [0, 1, 2])
    assert [[stream.number for stream in shares[worker]] for worker in (0, 1, 2)] == [[1], [], [0, 2]]
    assert shares[2][0].state == begun
    assert shares[2][1].state == {**begun, "quarantine": None}  # the lines that worker 5 has set aside stay there


def test_requests_are_served_in_their_order(tmp_path: Path) -> None:
    """By another process, which the folder of the run is all it knows of."""
    with pytest.raises(ClusterError, match="no run is alive"):
        RunningCluster(tmp_path).status()
    folder = ControlFolder(tmp_path)
    with Lock(tmp_path / ".lock", "trains"):
        with pytest.raises(ClusterError, match="has no cluster that trains"):
            RunningCluster(tmp_path).status()
        folder.open()
        folder.write(STATUS)
        assert "worker 0" in table(RunningCluster(tmp_path).status())
        answers: list[Any] = []

        def ask(act: Callable[[], Any]) -> threading.Thread:
            def run() -> None:
                try:
                    answers.append(act())
                except ClusterError as error:
                    answers.append(str(error))

            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            return thread

        def asked(count: int) -> dict[str, SizeRequest]:
            while len(found := folder.requests()) < count:
                time.sleep(0.01)
            return found

        first = ask(lambda: RunningCluster(tmp_path).add_workers(2))
        asked(1)
        second = ask(lambda: RunningCluster(tmp_path).set_shards(4))
        names = list(asked(2))
        assert list(folder.requests().values()) == [SizeRequest("add-workers", 2), SizeRequest("shards", 4)]
        done = {"change": "", "workers": 4, "shards": 2, "seconds": 1.0, "stopped_s": 0.1, "time": 0.0}
        folder.answer(names[0], {"done": done})  # type: ignore[typeddict-item]
        first.join(10)
        folder.close("the run has ended")
        second.join(10)
        assert answers == [done, "the run has ended"]
        folder.write(STATUS)
        with pytest.raises(ClusterError, match=r"did not remove-workers 1 within 0 s\n.*withdrawn"):
            RunningCluster(tmp_path).remove_workers(1, timeout_s=0.01)
        assert not folder.requests()


def test_a_run_that_ends_answers_before_it_removes_its_status(tmp_path: Path) -> None:
    """Whoever finds neither believes that the run has died."""

    class Folder(ControlFolder):
        def answer(self, name: str, answer: Any) -> None:
            there.append((self.folder / "status.json").exists())
            super().answer(name, answer)

    there: list[bool] = []
    folder = Folder(tmp_path)
    folder.open()
    folder.write(STATUS)
    (folder.folder / "request-1.json").write_text(json.dumps({"kind": "shards", "number": 4}))
    folder.close("the run has ended")
    assert there == [True]
    assert not (folder.folder / "status.json").exists()


STATUS: Any = {
    "time": 0.0,
    "mode": "async",
    "epoch": 0,
    "step": 5,
    "rows": 50,
    "generation": 0,
    "failures": 0,
    "workers": 1,
    "shards": 0,
    "range": None,
    "processes": [{"name": "worker 0", "host": "here", "pid": 7, "rows": 50, "steps": 5, "streams": 1}],
    "change": None,
    "waiting": [],
    "last_change": None,
}


CHANGES = int(os.environ.get("CLICKFLEET_CHANGES", "50"))
ROWS_PER_CHANGE = 80_000
"""More than two cores train during a change: the epoch must not end before the last one."""


@in_soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["async", "sync", "half_async", "geo"])
def test_fifty_changes_under_kills(ray: Any, config: dict[str, Any], tmp_path: Path, mode: str) -> None:
    """Random changes of workers and shards, with kill -9 of a random process between them: right counts, and the AUC stays."""
    rows, rng = ROWS_PER_CHANGE * CHANGES, random.Random(f"{mode} {os.environ.get('CLICKFLEET_SEED', 7)}")
    synth(tmp_path / "log", SynthOptions(rows=rows, test_rows=50_000, parts=5 * CHANGES, seed=3))
    config["data"] |= {"train": expand(str(tmp_path / "log" / "train")), "test": expand(str(tmp_path / "log" / "test"))}
    # Slow, so that all changes fit into one epoch: more of them would only overfit. Small batches would be slow, too, but then the AUC
    # depends on the number of workers.
    config["data"]["batch_size"], config["model"]["hidden"] = 1000, [1024, 1024, 1024]
    config["mode"], config["run"]["checkpoint_every_steps"] = {"name": mode}, 100
    config["cluster"] |= {"max_failures": 40}
    run = Path(config["run"]["dir"])
    stopped: list[float] = []

    def act(cluster: RunningCluster) -> None:
        for number in range(CHANGES):
            status = cluster.status()
            if rng.random() < 0.4:
                victim = rng.choice(status["processes"])["name"]
                threading.Timer(rng.uniform(0, 6), lambda name=victim: _kill(run, name)).start()
            workers, kind = status["workers"], rng.choice(["workers", "workers", "shards"])
            if kind == "shards":
                done = cluster.set_shards(rng.choice([s for s in range(1, 5) if s != status["shards"]]))
            else:
                wanted = rng.choice([w for w in range(1, 5) if w != workers])
                change = cluster.add_workers if wanted > workers else cluster.remove_workers
                done = change(abs(wanted - workers))
            stopped.append(done["stopped_s"])
            print(f"{mode} {number}: {done}", flush=True)

    conductor = Conductor(run, act)
    done = clickfleet.train(config, quiet=True)
    conductor.join()
    failures = (run / "log.txt").read_text().count("rolled back to step")
    print(
        f"{mode}: {len(stopped)} changes, {failures} failures, without progress: median {median(stopped):.1f} s, "
        f"at most {max(stopped):.1f} s"
    )
    assert done.rows == rows
    assert shows(run) == rows * SLOTS
    config["run"]["dir"] = str(tmp_path / "calm")
    calm = clickfleet.train(config, quiet=True)
    print(f"{mode}: AUC {done.test['auc']:.4f}, undisturbed {calm.test['auc']:.4f}")  # type: ignore[index]
    assert abs(done.test["auc"] - calm.test["auc"]) <= 0.003  # type: ignore[index]


def _kill(run: Path, name: str) -> None:
    try:
        if psutil.Process(processes(run)[name]["pid"]).name().startswith("ray::"):  # not a later one with the same id
            kill(run, name)
    except (KeyError, ProcessLookupError, psutil.NoSuchProcess):  # it has left meanwhile
        return


def test_a_configuration_keeps_its_range(tmp_path: Path) -> None:
    from clickfleet.config.load import dump, load
    from clickfleet.config.sections import WorkerRange
    from clickfleet.errors import ConfigError

    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"cluster": {"workers": "2..8"}}))
    config = load(tmp_path / "c.yaml")
    assert config.cluster.workers == WorkerRange(2, 8)
    (tmp_path / "again.yaml").write_text(dump(config))
    assert load(tmp_path / "again.yaml").cluster == config.cluster
    for wrong in ("8..2", "0..3", "many", "2..", "-1..3"):
        with pytest.raises(ConfigError, match=r"cluster.workers: needs a number, or a range such as 2..8"):
            load(None, [f"cluster.workers={wrong}"])
