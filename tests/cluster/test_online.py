"""Online learning on a real cluster: the same days as in one process, published as they go, through losses and restarts."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from clickfleet import RunningCluster
from clickfleet.cluster import driver
from clickfleet.cluster.processes import ProcessFailedError
from clickfleet.config.check import configure
from clickfleet.errors import DataError
from clickfleet.online import on_cluster, rewind
from clickfleet.online.learn import learn
from clickfleet.serve import verification
from clickfleet.store import published, run_folder
from clickfleet.training import saving
from fleet import kill, shows, tables
from online.test_text_layout import check_consumer
from soak import only_in_soak
from streams import HEADER, START, lines, settings, write_days

pytestmark = pytest.mark.xdist_group("cluster")
DAYS, SPLITS, ROWS, FILES = 2, 2, 60, 2
SHOWN = 4  # user, ad and two sites


@pytest.fixture
def days(tmp_path: Path, graph: Path) -> dict[str, Any]:
    write_days(tmp_path, DAYS, SPLITS, ROWS)
    (tmp_path / "run").mkdir()
    shutil.copy(graph, tmp_path / "run" / "graph.onnx")
    for part in tmp_path.glob("logs/*/*/part-0.csv"):  # a file for each worker
        head, *lines = part.read_text().splitlines(keepends=True)
        part.write_text(head + "".join(lines[: ROWS // 2]))
        part.with_name("part-1.csv").write_text(head + "".join(lines[ROWS // 2 :]))
    config = settings(tmp_path, SPLITS)
    config["train"], config["publish"]["keep_chains"] = {}, 9
    config["cluster"] = {"shards": 2, "workers": 2, "start_timeout": "250s"}
    return config


def entries(run: Path) -> list[published.Line]:
    return published.Log(run / "published").lines()


@pytest.mark.parametrize("mode", ["sync", only_in_soak("async"), "geo"])
def test_days_on_a_cluster(ray: Any, days: dict[str, Any], mode: str) -> None:
    days["mode"] = {"name": mode}
    run = Path(days["run"]["dir"])
    done = learn(days, quiet=True)
    assert (done.passes, done.rows, done.day) == (DAYS * SPLITS, DAYS * SPLITS * ROWS, 20260102)
    assert [line.kind for line in entries(run)] == ["base", "delta", "base", "delta", "delta", "base"]
    log = published.Log(run / "published")
    served = saving.load_published([log.entry(line) for line in entries(run)][-1:])
    dense, rows = tables(served, saving.load(run_folder.resolve(run)))
    assert (dense, rows) == (0.0, 0.0)
    assert verification.verify(run)["entries"] == 6  # as a server takes them, golden requests and all


def test_deltas_on_a_base_are_the_next_base(ray: Any, days: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, deletions and the network, gathered from two shards; also as text for the original's consumers."""
    seconds = iter(range(1_800_000_000, 1_900_000_000, 1000))  # so that every base has a key of its own
    monkeypatch.setattr("clickfleet.paddlerec.done_files.time.time", lambda: next(seconds))
    days["publish"]["text_parts"] = 2
    days["mode"] = {"name": "sync"}
    days["table"] |= {"delete_threshold": 0.0}  # so that the shrink between the last delta and the base removes nothing
    run = Path(days["run"]["dir"])
    learn(days, quiet=True)
    log = published.Log(run / "published")
    chain = [log.entry(line) for line in entries(run)]
    followed, whole = saving.load_published(chain[2:5]), saving.load_published(chain[5:])
    assert len(followed.table) == len(whole.table)
    assert tables(followed, whole) == (0.0, 0.0)
    assert len((run / "model/patch_donefile.txt").read_text().splitlines()) == 3
    check_consumer(run)


def test_one_worker_and_one_process_learn_the_same(ray: Any, days: dict[str, Any], tmp_path: Path) -> None:
    days["mode"], days["cluster"] = {"name": "sync"}, {**days["cluster"], "workers": 1}
    days["online"] |= {"validate": "pass"}
    url = f"file://{tmp_path}/there"
    there = learn(days, f"run.dir={url}", "run.report=true", quiet=True)
    assert there.to_dict()["checkpoint"].startswith(f"{url}/checkpoints/step-")
    for name in ("report.html", "metrics.prom", "published/LOG.jsonl", "checkpoints/LATEST"):
        assert (tmp_path / "there" / name).exists()
    assert learn(days, f"run.dir={url}", quiet=True).rows == 0  # goes on from there
    here = learn({**days, "mode": {"name": "local"}, "train": {"threads": 1}}, f"run.dir={tmp_path}/here", quiet=True)
    assert tables(there.learner, here.learner) == (0.0, 0.0)
    assert there.validated == pytest.approx(here.validated)
    assert there.last == pytest.approx(here.last)


def check_learned_once(run: Path, done: Any) -> None:
    """Every row of all days is in the counts once, and the last base with its deltas is the model."""
    assert shows(run) == DAYS * SPLITS * ROWS * SHOWN
    log = published.Log(run / "published")
    chain = [log.entry(line) for line in entries(run)]
    last = max(i for i, entry in enumerate(chain) if entry.manifest["kind"] == "base")
    assert tables(saving.load_published(chain[last:]), done.learner) == (0.0, 0.0)


@pytest.mark.parametrize("victim", [only_in_soak("shard 1"), "worker 0"])
def test_a_loss_on_a_stream_loses_nothing(ray: Any, days: dict[str, Any], victim: str) -> None:
    days["mode"] = {"name": "async"}
    days["table"] |= {"delete_threshold": 0.0, "decay_rate": 1.0}
    run = Path(days["run"]["dir"])

    def strike() -> None:
        while len(entries(run) if (run / "published" / published.LOG).exists() else []) < 2:
            time.sleep(0.02)
        kill(run, victim)

    thread = threading.Thread(target=strike)
    thread.start()
    done = learn(days, quiet=True)
    thread.join()
    assert f"{victim} failed: " in (run / "log.txt").read_text()
    assert done.passes == DAYS * SPLITS
    check_learned_once(run, done)


@pytest.mark.parametrize("mode", ["geo", only_in_soak("async")])
def test_a_stream_that_waits_for_data_is_resized(ray: Any, days: dict[str, Any], mode: str) -> None:
    """Between two passes, and before the first: rows are learned once, and published entries make up the model."""
    days["mode"] = {"name": mode}
    days["table"] |= {"delete_threshold": 0.0, "decay_rate": 1.0}
    run, late = Path(days["run"]["dir"]), Path(days["online"]["dir"]) / "20260102"
    late.rename(late.with_name("later"))
    sizes: list[Any] = []

    def resize() -> None:
        cluster = RunningCluster(run)
        while len(entries(run) if (run / "published" / published.LOG).exists() else []) < 2:
            time.sleep(0.02)
        try:
            sizes.extend([cluster.add_workers(1), cluster.set_shards(1), cluster.remove_workers(2)])
        finally:
            late.with_name("later").rename(late)

    thread = threading.Thread(target=resize, daemon=True)
    thread.start()
    done = learn(days, quiet=True)
    thread.join()
    assert [(size["workers"], size["shards"]) for size in sizes] == [(3, 2), (3, 1), (1, 1)]
    assert done.passes == DAYS * SPLITS
    check_learned_once(run, done)


def test_a_stopped_stream_goes_on(ray: Any, days: dict[str, Any]) -> None:
    days["mode"] = {"name": "sync"}
    days["table"] |= {"delete_threshold": 0.0, "decay_rate": 1.0}
    first = learn(days, "online.end_day=20260101", quiet=True)
    assert first.passes == SPLITS
    second = learn(days, "cluster.shards=1", quiet=True)
    assert (second.passes, second.rows) == (DAYS * SPLITS, SPLITS * ROWS)
    assert shows(days["run"]["dir"]) == DAYS * SPLITS * ROWS * SHOWN
    sequences = [line.sequence for line in entries(Path(days["run"]["dir"]))]
    assert sequences == list(range(1, len(sequences) + 1))


def test_a_cluster_run_is_rewound(ray: Any, days: dict[str, Any]) -> None:
    days["mode"], days["run"]["keep"] = {"name": "sync"}, 9
    days["cluster"] |= {"shards": 3, "workers": 1}
    run = Path(days["run"]["dir"])
    first = learn(days, quiet=True)
    assert (first.passes, first.last_sequence) == (DAYS * SPLITS, 6)
    done = rewind.rewind(configure(days), (20260102, 1), 0, print)
    assert (done["learned_until"], done["entry"]) == ("20260101/2", "000007-base")
    second = learn(days, quiet=True)
    assert (second.passes, second.rows) == (DAYS * SPLITS, SPLITS * ROWS)
    assert tables(first.learner, second.learner) == (0.0, 0.0)
    assert tables(saving.load_published(published.Log(run / "published").newest()), second.learner) == (0.0, 0.0)
    verification.verify(run)


@pytest.mark.parametrize("mode", ["sync", only_in_soak("geo")])
def test_a_stream_may_begin_with_an_empty_pass(ray: Any, days: dict[str, Any], tmp_path: Path, mode: str) -> None:
    days["mode"], days["cluster"]["timeout"] = {"name": mode}, "20s"
    days["table"] |= {"delete_threshold": 0.0, "decay_rate": 1.0}
    for part in (tmp_path / "logs/20260101/0000").glob("part-*"):
        part.unlink()
    done = learn(days, "online.end_day=20260101", quiet=True)
    assert (done.passes, done.rows) == (SPLITS, ROWS)
    rewind.rewind(configure(days), (20260101, 2), 1, print)
    again = learn(days, quiet=True)  # it resumes with the pass that is left out
    assert (again.passes, again.rows) == (DAYS * SPLITS, 2 * ROWS)
    assert shows(days["run"]["dir"]) == 2 * ROWS * SHOWN


def test_a_stopped_stream_that_cannot_save_ends_like_any_other(
    ray: Any, days: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(session: on_cluster.ClusterPassSession) -> None:
        session.signal = session.driver.signal = signal.SIGTERM
        raise ProcessFailedError("the last checkpoint", "not there")

    monkeypatch.setattr(driver, "END_LIMIT_S", 600.0)
    monkeypatch.setattr(on_cluster.ClusterPassSession, "run", stop)
    days["mode"] = {"name": "async"}
    assert learn(days, quiet=True).signal == signal.SIGTERM
    text = Path(days["run"]["dir"], "log.txt").read_text()
    assert "no last checkpoint: the last checkpoint failed: not there" in text


def test_rows_in_memory_are_refused(ray: Any, days: dict[str, Any]) -> None:
    import pyarrow as pa

    del days["online"]["dir"], days["online"]["start_day"], days["online"]["end_day"]
    days["mode"] = {"name": "async"}
    days["cluster"] |= {"shards": 1, "workers": 1}
    with pytest.raises(DataError, match="in memory"):
        learn(days, source=[(pa.table({"click": [1.0]}), 20260101, 1)], quiet=True)


def test_the_passes_of_a_topic_are_shared_by_the_workers(ray: Any, days: dict[str, Any]) -> None:
    """JSON records, some of them bad; each pass is scored as a whole before it is trained on."""
    kafka = pytest.importorskip("confluent_kafka")
    owner = kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "", "log_level": 0})
    brokers = ",".join(f"{one.host}:{one.port}" for one in owner.list_topics(timeout=60).brokers.values())
    sender = kafka.Producer({"bootstrap.servers": brokers, "log_level": 0})
    rows = [dict(zip(HEADER.split(","), line.split(","), strict=True)) for line in lines(160, 1)]
    for i, row in enumerate(rows):
        value = "{" if i % 20 == 7 else json.dumps({**row, "site": row["site"].split("|")})
        sender.produce("clicks", value, partition=i % 4, timestamp=(START + i) * 1000)
    for partition in range(4):
        sender.produce("clicks", "{}", partition=partition, timestamp=(START + 2 * 86400) * 1000)
    assert sender.flush(60) == 0
    section = {"brokers": brokers, "topic": "clicks", "rows_per_pass": 80, "max_rows_per_pass": None, "format": "json"}
    days["online"] |= {"dir": None, "kafka": section, "end_day": 20260101, "validate": "pass"}
    days["mode"], days["data"]["bad_lines"] = {"name": "async"}, "quarantine"
    days["table"] |= {"delete_threshold": 0.0, "decay_rate": 1.0}
    done = learn(days, quiet=True)
    run = Path(days["run"]["dir"])
    assert (done.rows, shows(run)) == (152, 152 * SHOWN)
    plan = [json.loads(line) for line in (run / "passes.jsonl").read_text().splitlines()]
    assert all(len(one["data"]) in (2, 4) for one in plan[:2])  # as many for each worker
    assert sum(one["bad_records"] for one in plan) == 8
    assert "files for 2 workers" not in (run / "log.txt").read_text()
    kept = [path.read_text().splitlines() for path in (run / "quarantine").iterdir()]
    assert sum(map(len, kept)) == 8
