"""Whole runs on a real cluster of several processes on this machine."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import clickfleet
from clickfleet.cluster.run_on_cluster import scorers
from clickfleet.data.files import expand
from clickfleet.errors import ClusterError, ConfigError
from clickfleet.store import checkpoint, run_folder
from fleet import LONG, ROWS, SLOTS, TEST_ROWS, kill, shows, tables, when_saved
from marked import Marked
from numbers_shown import shown_numbers
from soak import only_in_soak

pytestmark = pytest.mark.xdist_group("cluster")


def test_sync_with_one_worker_is_local_and_models_go_both_ways(
    ray: Any, config: dict[str, Any], tmp_path: Path
) -> None:
    config["cluster"] = {"shards": 2, "workers": 1}
    config["mode"] = {"name": "sync"}
    done = clickfleet.train(config, quiet=True)
    here = {**config, "mode": {"name": "local"}, "train": {"deterministic": True, "threads": 1}}
    alone = clickfleet.train({**here, "run": {**config["run"], "dir": str(tmp_path / "local")}}, quiet=True)
    assert tables(alone.learner, done.learner) == (0.0, 0.0)
    assert done.test is not None
    assert alone.test is not None
    assert done.test["auc"] == alone.test["auc"]  # evaluated by the workers there, in this process here
    assert np.array_equal(done.predict(config["data"]["test"]), alone.predict(config["data"]["test"]))
    # A new run on one machine starts from the cluster's model.
    more = {
        **here,
        "train": {"init_from": config["run"]["dir"]},
        "run": {**config["run"], "dir": str(tmp_path / "more")},
    }
    assert clickfleet.train(more, quiet=True).rows == ROWS


def test_shards_with_rows_on_disk_are_local_too_and_resume(ray: Any, config: dict[str, Any], tmp_path: Path) -> None:
    config["cluster"] = {"shards": 2, "workers": 1}
    here = {**config, "mode": {"name": "local"}, "train": {"deterministic": True, "threads": 1}}
    alone = clickfleet.train({**here, "run": {**config["run"], "dir": str(tmp_path / "local")}}, quiet=True)
    disk, run = tmp_path / "disk", Path(config["run"]["dir"])
    config["mode"] = {"name": "sync"}
    config["table"] = {
        **config["table"],
        "memory_limit": "2500KB",
        "snapshot_reserve": "800KB",
        "disk": str(disk),
    }
    config["run"] = {**config["run"], "checkpoint_every_steps": 100}
    watcher = when_saved(run, lambda: kill(run, "shard 1"))
    done = clickfleet.train(config, quiet=True)
    watcher.join(60)
    assert "shard 1 failed: " in (run / "log.txt").read_text()
    assert tables(alone.learner, done.learner) == (0.0, 0.0)
    assert done.test is not None
    assert alone.test is not None
    assert done.test["auc"] == alone.test["auc"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["table_disk_rows"] > 0 for line in lines if line["kind"] == "epoch"] == [True]


TOY = """
from dataclasses import dataclass

from clickfleet.training.modes import Needs
from clickfleet.training.sharding import Request

NEEDS = Needs(distributed=True)


@dataclass(frozen=True)
class Config:
    learns: bool = False


def train(job, config):
    def work(trainer):
        for batch in job.batches(trainer.clock):
            reply = job.links[0].ask(Request(pull=trainer.step.embedding.unique(batch), values=True)).wait()
            job.adopt(reply.values)
            result = trainer.step(batch, reply.rows)
            if config.learns:
                gradient = job.gradient(trainer, result)
                job.links[0].ask(Request(push=result.push, dense=gradient, seen=reply.seen)).wait()
            job.report(batch, result)

    job.together(work)
"""


def test_one_file_adds_a_mode(ray: Any, config: dict[str, Any], tmp_path: Path) -> None:
    """A user's mode that waits for each push, trains like local with one worker."""
    (tmp_path / "patient.py").write_text(TOY)
    config["mode"] = {"name": str(tmp_path / "patient.py"), "learns": True}
    config["cluster"] |= {"workers": 1}
    done = clickfleet.train(config, quiet=True)
    here = {**config, "mode": {"name": "local"}, "train": {"deterministic": True, "threads": 1}}
    alone = clickfleet.train({**here, "run": {**config["run"], "dir": str(tmp_path / "local")}}, quiet=True)
    assert tables(alone.learner, done.learner) == (0.0, 0.0)
    assert checkpoint.steps(Path(config["run"]["dir"]) / "checkpoints")
    config["train"] = {"deterministic": True}
    with pytest.raises(ConfigError, match=r"train.deterministic is not supported in mode .*patient.py"):
        clickfleet.train(config, resume=True, quiet=True)


def test_a_run_goes_on_with_other_shards_and_workers(ray: Any, config: dict[str, Any]) -> None:
    """Stopped in the middle, resumed on more shards and fewer workers: every row once per epoch, whatever the mode."""
    run = Path(config["run"]["dir"])
    config["mode"] = {"name": "half_async"}
    config["run"]["checkpoint_every_steps"] = 20
    path = run.parent / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    command = Marked("train", str(path), "train.epochs=1", folder=run.parent)
    try:
        command.wait_until(lambda: (run / "checkpoints" / "LATEST").exists())
        command.first.send_signal(signal.SIGSTOP)  # it is not over while we look
        places = command.listening()
        command.send(signal.SIGKILL)  # the driver: nobody can say goodbye
        command.gone()
    finally:
        command.kill()
    assert places
    assert places <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}  # nobody else can reach it
    stopped = run_folder.read_state(checkpoint.latest(run / "checkpoints"))
    config["cluster"] = {"shards": 3, "workers": 1, "threads": 2}
    config["mode"] = {"name": "async"}
    done = clickfleet.train(config, resume=True, quiet=True)
    assert (done.rows, done.new_rows) == (ROWS, ROWS - stopped["rows"])
    assert shows(run) == ROWS * SLOTS
    assert done.train["rows"] == ROWS


def test_a_checkpoint_in_progress_when_an_epoch_ends_lies_within_it(ray: Any, config: dict[str, Any]) -> None:
    """It was recorded as the end of the epoch, and a run that resumed from it left out the rest."""
    config["mode"], config["train"] = {"name": "async"}, {"epochs": 2}
    config["data"]["batch_size"] = LONG  # the driver polls several times per epoch
    config["run"] |= {"checkpoint_every_steps": 20, "keep": 100}
    config["cluster"] |= {"shards": 1, "checkpoint_cpu": 1e-9}  # written only when somebody waits for it
    done = clickfleet.train(config, quiet=True)
    folder = Path(config["run"]["dir"]) / "checkpoints"
    states = [run_folder.read_state(checkpoint.step_folder(folder, step)) for step in checkpoint.steps(folder)]
    assert [state["rows"] for state in states if state["reader"]["epoch"] == -1] == [ROWS, 2 * ROWS]
    assert any(state["rows"] % ROWS > 0 for state in states)
    assert done.rows == 2 * ROWS


def test_a_hung_worker_is_named_and_replaced(ray: Any, config: dict[str, Any]) -> None:
    run = Path(config["run"]["dir"])
    config["mode"], config["run"]["checkpoint_every_steps"] = {"name": "sync"}, 100
    config["cluster"]["heartbeat_timeout"] = "3s"
    config["data"]["batch_size"] = LONG
    when_saved(run, lambda: kill(run, "worker 1", signal.SIGSTOP))
    done = clickfleet.train(config, quiet=True)
    assert "worker 1 failed: hung" in (run / "log.txt").read_text()
    assert shows(run) == done.rows * SLOTS == ROWS * SLOTS


@pytest.mark.parametrize(
    ("mode", "victim"), [("async", "shard 1"), only_in_soak("async", "worker 0"), only_in_soak("geo", "worker 1")]
)
def test_a_run_can_go_on_without_what_was_lost(ray: Any, config: dict[str, Any], mode: str, victim: str) -> None:
    run = Path(config["run"]["dir"])
    config["mode"], config["run"]["checkpoint_every_steps"] = {"name": mode}, 200
    config["cluster"] |= {"on_failure": "continue", "checkpoint_cpu": 1.0}
    config["data"]["batch_size"], epochs = LONG // 5, 1  # so that it is killed long before the end of the epoch
    config["train"] = {**config["train"], "epochs": epochs}
    when_saved(run, lambda: kill(run, victim))
    done = clickfleet.train(config, quiet=True)
    log = (run / "log.txt").read_text()
    assert f"{victim} failed: " in log
    assert len(re.findall(r" failed: ", log)) == 1  # and nothing else died with it
    assert "back to step" not in log
    assert done.rows == epochs * ROWS
    learned, given = shows(run), epochs * ROWS * SLOTS
    assert learned <= given  # something may be lost, nothing is learned twice
    assert learned > (0.5 if victim.startswith("shard") else 0.98) * given  # of a worker: what was on its way


@pytest.mark.parametrize("mode", ["sync", only_in_soak("geo")])
def test_validation_data_is_evaluated_in_the_middle_of_an_epoch(ray: Any, config: dict[str, Any], mode: str) -> None:
    """While an evaluation goes on all workers stand still at the instant of a cut, so its checkpoint has just that AUC."""
    run = Path(config["run"]["dir"])
    config |= {"mode": {"name": mode}, "train": {"eval_every": 200, "patience": 50}}
    config["run"]["keep"], config["data"]["batch_size"] = 20, LONG
    config["data"]["valid"] = config["data"]["test"]
    done = clickfleet.train(config, quiet=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    tests = {line["step"]: line for line in lines if line["kind"] == "valid"}
    assert len(tests) >= 2
    assert max(tests) == ROWS // LONG
    first = run / "checkpoints" / f"step-{min(tests):012d}"
    there = clickfleet.load(first).evaluate(config["data"]["test"])
    assert there["auc"] == pytest.approx(tests[min(tests)]["auc"], abs=1e-6)
    assert done.valid is not None
    assert done.valid["auc"] == max(line["auc"] for line in tests.values())
    assert done.test is not None
    assert done.test["auc"] == pytest.approx(done.valid["auc"], abs=1e-6)  # the best model on the same rows
    assert done.path == done.best == run_folder.resolve(run)
    assert shows(run / "LATEST") == ROWS * SLOTS


def test_rows_set_aside_on_a_cluster_are_those_of_one_machine(ray: Any, config: dict[str, Any], tmp_path: Path) -> None:
    """The workers train on the same rows as one machine does, validate on the others, and resume a run of one machine."""
    run = Path(config["run"]["dir"])
    config |= {"mode": {"name": "sync"}, "train": {"patience": 3, "epochs": 2}}
    config["data"]["batch_size"] = 480  # the rows matter, not the steps
    done = clickfleet.train(config, quiet=True)
    assert done.valid is not None
    assert done.test is not None
    assert done.test["rows"] == TEST_ROWS
    aside = done.valid["rows"]
    assert 0.05 * ROWS < aside < 0.15 * ROWS
    assert done.rows == 2 * (ROWS - aside)
    assert shows(run / "LATEST") == done.rows * SLOTS
    local = {**config, "mode": {"name": "local"}, "run": {**config["run"], "dir": str(tmp_path / "local")}}
    alone = clickfleet.train({**local, "train": {**config["train"], "epochs": 1, "threads": 1}}, quiet=True)
    assert alone.valid is not None
    assert (alone.valid["rows"], alone.rows) == (aside, ROWS - aside)
    for folder in (config["run"], local["run"]):
        train = {**config["train"], "epochs": 3}
        more = clickfleet.train({**config, "run": folder, "train": train}, resume=True, quiet=True)
        assert more.valid is not None
        assert (more.valid["rows"], more.rows) == (aside, 3 * (ROWS - aside))
    assert run_folder.read_state(run_folder.resolve(run / "LATEST"))["split"]["share"] == 0.1


def test_scoring_on_a_cluster_is_scoring_here(ray: Any, config: dict[str, Any]) -> None:
    """Several shards and workers, several files, and the scores in their order; lines without a score are counted."""
    config["data"]["bad_lines"] = "skip"
    model = clickfleet.train({**config, "mode": {"name": "local"}, "train": {"threads": 1}}, quiet=True)
    files = expand([*config["data"]["test"], *config["data"]["train"]])
    longer = Path(config["run"]["dir"]).with_name("longer")
    longer.write_text(Path(files[-1]).read_text() + "no line of this format\n")
    files[-1] = str(longer)
    with scorers(config["run"]["dir"], workers=2, shards=2) as fleet:
        found = fleet.evaluate(files)
        assert fleet.bad_lines == 1
        scores = np.concatenate(list(fleet.predict(files)))
        assert fleet.bad_lines == 1
    assert np.allclose(scores, model.predict(files), atol=1e-6)
    assert found["rows"] == ROWS + TEST_ROWS
    assert found["auc"] == pytest.approx(model.evaluate(files)["auc"], abs=1e-6)


def test_workers_without_files_are_told_once(ray: Any, config: dict[str, Any]) -> None:
    run = Path(config["run"]["dir"])
    config |= {"mode": {"name": "sync"}, "train": {"epochs": 2}}
    config["data"] |= {"train": expand(config["data"]["train"])[:1], "test": [], "valid_share": 0}
    done = clickfleet.train(config, quiet=True)
    assert done.rows == ROWS // 4 * 2
    log = (run / "log.txt").read_text()
    assert log.count("1 of 2 workers are idle") == 1
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert [line["rows"] for line in epochs] == [ROWS // 4, ROWS // 2]
    assert all(line["idle_workers"] == 1 for line in lines if line["kind"] == "train")
    assert all(line["sliding_auc"] != 0.5 for line in epochs)  # that of the one who had batches
    (file,) = config["data"]["train"]
    logs = [(run / "logs" / f"workerlog.{i}").read_text() for i in range(2)]
    assert [text.count(f"  {file}\n") for text in logs] in ([2, 0], [0, 2])  # in each epoch
    assert (run / "logs" / "serverlog.0").is_file()


def test_a_program_may_save_before_it_trains(ray: Any, config: dict[str, Any]) -> None:
    config["mode"], config["cluster"]["timeout"] = {"name": "sync"}, "20s"
    files = config["data"]["train"]
    with clickfleet.join(config, quiet=True) as job:
        assert Path(job.save()).name == "step-000000000000"
    with clickfleet.join(config, resume=True, quiet=True) as job:
        assert job.train(files)["rows"] == ROWS


def test_who_is_missing_at_the_start_is_named(ray: Any, config: dict[str, Any]) -> None:
    config["mode"] = {"name": "async"}
    config["cluster"] = {"shards": 1, "workers": 1, "threads": 99, "start_timeout": "4s"}
    with pytest.raises(ClusterError, match=r"still missing: .*worker 0"):
        clickfleet.train(config, quiet=True)


def test_what_a_cluster_cannot_do_is_refused(config: dict[str, Any]) -> None:
    without = {**config["data"], "test": [], "valid_share": 0}
    with pytest.raises(ConfigError, match="eval_every"):
        clickfleet.train({**config, "data": without, "mode": {"name": "async"}, "train": {"eval_every": 5}}, quiet=True)
    with pytest.raises(ConfigError, match="shards"):
        clickfleet.train({**config, "mode": {"name": "geo"}, "cluster": {"shards": 1025}}, quiet=True)
    everywhere = {"shards": 1, "endpoints": ["0.0.0.0:7000"]}
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:7000 names no host"):
        clickfleet.train({**config, "mode": {"name": "geo"}, "cluster": everywhere}, quiet=True)


def test_numbers_and_names_of_a_cluster_run(ray: Any, config: dict[str, Any]) -> None:
    """Rows, steps and the values of slices, as on one machine."""
    config["cluster"] = {"shards": 2, "workers": 2}
    config["mode"] = {"name": "async"}
    config.setdefault("train", {}).update({"epochs": 2, "metrics": {"slices": "C9"}})
    done = clickfleet.train(config, quiet=True)
    folder = Path(config["run"]["dir"])
    assert (done.rows, done.new_rows) == (2 * ROWS, 2 * ROWS)
    numbers = shown_numbers(folder)
    assert set(numbers.values()) == {(done.rows, done.steps)}
    assert done.test is not None
    names = done.names
    assert names is not None
    for name, part in done.test["slices"].items():
        assert names.name("C9", part["key"]) == name
    with scorers(folder, 2) as cluster:
        assert set(cluster.evaluate(expand(config["data"]["test"]))["slices"]) == set(done.test["slices"])
