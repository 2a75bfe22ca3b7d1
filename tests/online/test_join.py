"""From a served row to a learned one: the join as a source of passes, as a command, and in a loop with a real server."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from clickfleet.data.reader import Reader
from clickfleet.data.schema import Schema, Slot, write_schema
from clickfleet.errors import CheckpointError, ConfigError, DataError
from clickfleet.online import rewind
from clickfleet.online.join_folder import FolderJoin, join
from clickfleet.online.joiner import JoinRules
from clickfleet.online.learn import OnlineResult
from clickfleet.online.passes import Pass, PassPlan
from clickfleet.online.row_join import JoinSettings, RowJoin
from clickfleet.serve.client import Client
from clickfleet.store import checkpoint, run_folder
from joined import write_logs
from online.test_kills import contents, run
from served import Served, running, until
from small_disk import small_disk
from soak import SOAK
from streams import SCHEMA, settings


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """All joined rows of a folder."""
    files = sorted(folder.glob("**/[!.]*.arrow"))
    return [row for file in files for row in pa.ipc.open_file(str(file)).read_all().to_pylist()]


def last_labels(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The label in the last row of every request, in the order in which they came to be known."""
    found: dict[str, float] = {}
    for row in rows:
        ((_, found[row["request"]]),) = row["labels"]
    return found


def first_rows(rows: list[dict[str, Any]]) -> Counter[str]:
    """How often each show was learned, corrections aside."""
    return Counter(row["request"] for row in rows if row["kind"] != "correction")


@pytest.fixture
def logs(tmp_path: Path) -> dict[str, float]:
    """Logs of a day; the last label of each request."""
    return write_logs(tmp_path, 600)


@pytest.fixture
def config(tmp_path: Path, graph: Path) -> dict[str, Any]:
    """A run over these logs, whose passes end by rows only."""
    (tmp_path / "run").mkdir()
    shutil.copy(graph, tmp_path / "run" / "graph.onnx")
    section = {
        "shows": str(tmp_path / "shows"),
        "feedback": str(tmp_path / "feedback"),
        "wait": "30s",
        "rows_per_pass": 70,
        "interval": "1h",
    }
    made = settings(tmp_path, online={"dir": None, "join": section, "start_day": None, "end_day": 20260101})
    del made["data"]["format"]
    return made


def test_a_run_learns_every_show_once_and_its_labels(
    tmp_path: Path, logs: dict[str, float], config: dict[str, Any], online: Callable[..., OnlineResult]
) -> None:
    done = online(config, "run.keep=99")
    rows = rows_in(tmp_path / "run/spool")
    assert set(first_rows(rows).values()) == {1}
    assert last_labels(rows) == logs
    assert done.total_rows == len(rows) > len(logs), "corrections are learned too"
    assert done.passes > 5
    text = (tmp_path / "run/metrics.prom").read_text()
    assert f'clickfleet_online_join_events{{kind="shows"}} {len(logs) + 1}' in text
    assert 'clickfleet_online_join_rows{kind="corrections"}' in text
    names = json.loads((tmp_path / "run/names.json").read_bytes())
    assert "a1" in names["values"]["ad"][0], "values of joined rows have names too"


def test_corrections_may_be_dropped(
    tmp_path: Path, logs: dict[str, float], config: dict[str, Any], online: Callable[..., OnlineResult]
) -> None:
    done = online(config, "run.keep=99", "online.join.corrections=drop")
    rows = rows_in(tmp_path / "run/spool")
    assert {row["kind"] for row in rows} == {"negative", "label"}
    assert done.total_rows == len(rows) == len(logs)


def test_files_that_no_checkpoint_needs_are_removed(
    tmp_path: Path, logs: dict[str, float], config: dict[str, Any], online: Callable[..., OnlineResult]
) -> None:
    online(config, "run.keep=2", "online.join.rows_per_pass=10")
    kept = sorted(int(path.name.partition("-")[0]) for path in (tmp_path / "run/spool").glob("*.arrow"))
    plan = PassPlan(tmp_path / "run/passes.jsonl")
    assert kept[0] > 1
    assert kept[-1] == len(plan.places())
    states = [
        run_folder.read_state(checkpoint.step_folder(tmp_path / "run/checkpoints", step))["online"]["position"]
        for step in checkpoint.steps(tmp_path / "run/checkpoints")
    ]
    assert kept[0] <= min(state["join"] for state in states) + 1


@pytest.mark.parametrize("seed", range(6 if SOAK else 1))
def test_a_run_killed_anywhere_ends_the_same(tmp_path: Path, config: dict[str, Any], seed: int) -> None:
    """No show is lost, none is learned twice: the model, the log and the metrics have the same bytes."""
    labels = write_logs(tmp_path, 1500, seed=seed)
    config["run"] |= {"checkpoint_every_steps": 3, "keep": 99}
    path, folder = tmp_path / "config.yaml", tmp_path / "run"
    path.write_text(yaml.safe_dump(config))
    graph = (folder / "graph.onnx").read_bytes()
    assert run(path, 0, seed) == 0
    wanted = contents(folder)
    rows = rows_in(folder / "spool")
    assert last_labels(rows) == labels
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "graph.onnx").write_bytes(graph)
    assert run(path, 40 if SOAK else 3, seed) > 0
    found = contents(folder)
    for one in (wanted, found):
        metrics: Any = one["metrics"]
        one["metrics"] = [line for line in metrics if line["kind"] != "join"]
    assert found == wanted
    assert rows_in(folder / "spool") == rows


def test_a_stopped_run_goes_on_with_what_waits(
    tmp_path: Path, config: dict[str, Any], online: Callable[..., OnlineResult]
) -> None:
    """Shows wait in the run folder, not in the log: it may be removed when it was read."""
    write_logs(tmp_path, 200)
    first = online(config, "online.end_day=20260101")
    assert first.passes > 1
    join_ = RowJoin(
        JoinSettings(config["online"]["join"]["shows"], config["online"]["join"]["feedback"], JoinRules(30)),
        tmp_path / "run/join",
        tmp_path / "run/spool",
        lambda text: None,
    )
    waiting = join_.status()["waiting"]
    join_.close()
    again = online(config, "online.end_day=20260101")
    assert again.rows == 0
    assert again.total_rows == first.total_rows
    assert waiting >= 0


def test_a_pass_that_was_joined_but_not_begun_is_handed_out_again(
    tmp_path: Path, logs: dict[str, float], config: dict[str, Any], online: Callable[..., OnlineResult]
) -> None:
    """Killed between the commit of the join and the plan of the run."""
    online(config, "run.keep=99")
    plan = tmp_path / "run/passes.jsonl"
    lines = plan.read_bytes().splitlines(keepends=True)
    for name in ("checkpoints", "published"):
        shutil.rmtree(tmp_path / "run" / name)
    plan.write_bytes(b"".join(lines[:-1]))
    done = online(config, "run.keep=99")
    assert [json.loads(line) for line in plan.read_bytes().splitlines()] == [json.loads(line) for line in lines]
    assert done.total_rows == len(rows_in(tmp_path / "run/spool"))
    plan.write_bytes(b"".join(lines[:-3]))
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(DataError, match=r"has made .* passes, but the run continues after"):
        online(config)
    plan.write_bytes(b"".join(lines))
    shutil.rmtree(tmp_path / "run/checkpoints")
    Path(Pass.from_dict(json.loads(lines[0])).data[0]).unlink()
    with pytest.raises(DataError, match="is missing or has another size"):
        online(config)


def test_a_run_can_be_rewound(
    tmp_path: Path, logs: dict[str, float], config: dict[str, Any], online: Callable[..., OnlineResult]
) -> None:
    from clickfleet.config.check import configure

    done = online(config, "run.keep=99")
    rewind.rewind(configure(config), (20260101, 3), 1, lambda text: None)
    again = online(config, "run.keep=99")
    skipped = PassPlan(tmp_path / "run/passes.jsonl").last(99)[2]
    rows = pa.ipc.open_file(skipped.to_dict()["data"][0]).read_all() if skipped.data else None  # type: ignore[index]
    assert skipped.skipped
    assert again.total_rows == done.total_rows - (70 if rows is None else len(rows))


def test_settings_that_contradict_each_other_are_refused(
    config: dict[str, Any], online: Callable[..., OnlineResult]
) -> None:
    for overrides, message in (
        (["online.dir=logs"], "exactly one stream"),
        (["online.start_pass=2"], "start_pass needs timed folders"),
        (["online.join.window=10s"], "at least as long as the wait"),
        ([f"online.join.feedback={config['online']['join']['shows']}"], "cannot be the same log"),
        (["run.dir=s3://bucket/run"], "needs a run folder on this machine"),
        (["online.join.shows=kafka://broker"], "names no Kafka topic"),
    ):
        with pytest.raises(ConfigError, match=message):
            online(config, *overrides)


# The command


def command(tmp_path: Path, *more: str) -> list[str]:
    where = [str(tmp_path / name) for name in ("shows", "feedback")]
    return [str(Path(sys.executable).parent / "clickfleet"), "join", *where, "--out", str(tmp_path / "rows"), *more]


def test_logs_become_timed_folders(tmp_path: Path, logs: dict[str, float]) -> None:
    done = subprocess.run(command(tmp_path, "--once", "--json"), capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    rows = rows_in(tmp_path / "rows")
    assert result["rows"] == len(rows)
    assert result["shows"] == len(logs) + 1
    assert result["waiting"] == 0
    assert last_labels(rows) == {**logs, "after the last day": 0.0}
    assert set(first_rows(rows).values()) == {1}
    folders = sorted(path for path in (tmp_path / "rows").glob("2026*/*"))
    hours = [f"{path.parent.name}/{path.name}" for path in folders]
    assert hours[:3] == ["20260101/0000", "20260101/0100", "20260101/0200"]
    assert hours[-1] == "20260102/0000"
    assert len(hours) == 25, "those without rows are there too"
    assert all((path / "_DONE").exists() for path in folders)
    for file in (tmp_path / "rows").glob("2026*/*/*.arrow"):
        start = time.strptime(f"{file.parent.parent.name}{file.parent.name}", "%Y%m%d%H%M")
        known = pa.ipc.open_file(str(file)).read_all().column("known")[0].as_py()
        assert abs(known.timestamp() - (time.mktime(start) - time.timezone)) < 2 * 3600
    again = subprocess.run(command(tmp_path, "--once", "--json"), capture_output=True, text=True, check=True)
    assert json.loads(again.stdout.splitlines()[-1])["rows"] == len(rows)
    assert rows_in(tmp_path / "rows") == rows


def test_timed_folders_are_a_stream(
    tmp_path: Path, logs: dict[str, float], config: dict[str, Any], online: Callable[..., OnlineResult]
) -> None:
    join(JoinSettings(str(tmp_path / "shows"), str(tmp_path / "feedback")), tmp_path / "rows", once=True)
    config["online"] |= {"dir": str(tmp_path / "rows"), "join": None, "start_day": 20260101, "split_interval": "1h"}
    config["data"]["format"] = "joined"
    done = online(config)
    day = rows_in(tmp_path / "rows/20260101")
    assert done.total_rows == len(day) > len(logs)


@pytest.mark.parametrize("seed", range(20 if SOAK else 1))
def test_a_join_killed_anywhere_writes_every_row_once(tmp_path: Path, seed: int) -> None:
    labels = write_logs(tmp_path, 3000, seed=seed)
    rng = random.Random(seed)
    code = (
        "import sys\nfrom clickfleet.online import join_folder, row_join\n"
        "from clickfleet.online.join_folder import *\nfrom clickfleet.online.row_join import JoinSettings\n"
        "join_folder.PART_ROWS = 100\n"
        "join(JoinSettings(sys.argv[1], sys.argv[2]), sys.argv[3], once=True, every_s=0.01)\n"
    )
    arguments = [str(tmp_path / name) for name in ("shows", "feedback", "rows")]
    kills = 0
    while True:
        process = subprocess.Popen([sys.executable, "-c", code, *arguments])
        goal = len(list((tmp_path / "rows").glob("2026*/*/*.arrow"))) + rng.randrange(1, 8)
        while process.poll() is None and len(list((tmp_path / "rows").glob("2026*/*/*.arrow"))) < goal:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.02)
        if process.poll() is not None or kills >= (30 if SOAK else 4):
            assert process.wait() == 0
            break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    assert kills > 1
    rows = rows_in(tmp_path / "rows")
    assert set(first_rows(rows).values()) == {1}
    assert last_labels(rows) == {**labels, "after the last day": 0.0}
    files = sorted((tmp_path / "rows").glob("2026*/*/*.arrow"))
    assert [file.name for file in files] == [f"part-{i:08d}.arrow" for i in range(1, len(files) + 1)]


def test_a_signal_stops_the_join_and_the_command_continues(tmp_path: Path, logs: dict[str, float]) -> None:
    process = subprocess.Popen(command(tmp_path, "--every", "100ms"), stdout=subprocess.PIPE, text=True)
    until(lambda: bool(list((tmp_path / "rows").glob("2026*/*/*.arrow"))))
    with pytest.raises(CheckpointError, match="joins there"):
        FolderJoin(JoinSettings("a", "b"), tmp_path / "rows", 3600, 1.0, print)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGTERM
    assert "the same command continues" in output
    subprocess.run(command(tmp_path, "--once"), check=True, capture_output=True)
    rows = rows_in(tmp_path / "rows")
    assert set(first_rows(rows).values()) == {1}
    assert last_labels(rows) == {**logs, "after the last day": 0.0}


def test_a_full_disk_is_reported_and_costs_nothing(tmp_path: Path, logs: dict[str, float]) -> None:
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        given = JoinSettings(str(tmp_path / "shows"), str(tmp_path / "feedback"))
        disk.leave(20_000)
        with pytest.raises(CheckpointError, match="the disk is full"):
            join(given, disk.folder / "rows", once=True)
        disk.free()
        join(given, disk.folder / "rows", once=True)
        rows = rows_in(disk.folder / "rows")
        assert set(first_rows(rows).values()) == {1}
        assert last_labels(rows) == {**logs, "after the last day": 0.0}


def test_usage(tmp_path: Path) -> None:
    for more, message in (
        (["--wait", "30"], "needs a number and a unit"),
        (["--split", "7min"], "does not divide a day"),
        (["--split", "1s"], "does not divide a day"),
        (["--window", "1s"], "at least as long as the wait"),
        (["--label", "a,a"], "each only once"),
    ):
        done = subprocess.run(command(tmp_path, "--once", *more), capture_output=True, text=True)
        assert done.returncode in (1, 2)
        assert message in done.stderr, done.stderr


# Rows for training


def test_joined_rows_are_read_like_any_log(tmp_path: Path, logs: dict[str, float]) -> None:
    join(JoinSettings(str(tmp_path / "shows"), str(tmp_path / "feedback")), tmp_path / "rows", once=True)
    files = sorted((tmp_path / "rows").glob("2026*/*/*.arrow"))
    rows = rows_in(tmp_path / "rows")
    for schema in (SCHEMA, Schema(slots=(Slot("user"),), label="click", group="request", show="n", weight="w")):
        reader = Reader(files, schema, "auto", 100)
        batches = list(reader)
        assert sum(map(len, batches)) == len(rows)
        labels = np.concatenate([batch.labels for batch in batches if batch.labels is not None])
        assert labels.tolist() == [row["labels"][0][1] for row in rows]
        times = np.concatenate([batch.times for batch in batches if batch.times is not None])
        assert times.tolist() == [int(row["known"].timestamp()) for row in rows]
    groups = np.concatenate([batch.groups for batch in batches if batch.groups is not None])
    assert len(set(groups.tolist())) == len(logs) + 1, "a group that is no feature is the request"
    with pytest.raises(ConfigError, match=r"set data\.schema or data\.preset"):
        Reader(files, None, "auto", 100)
    other = Schema(slots=(Slot("user"),), label="buy")
    assert sum(map(len, Reader(files, other, "joined", 100))) == 0, "rows without its label are left out"


def test_bad_rows_are_named(tmp_path: Path) -> None:
    from clickfleet.data.events import JOINED

    def row(features: str, label: float = 1.0, user: str | None = None, route: str = "predict") -> dict[str, Any]:
        facts = {"kind": "label", "request": "r", "item": "0", "labels": [("click", label)], "shown": 5, "known": 6}
        return {**facts, "features": features, "user": user, "route": route}

    given = [
        row('{"user": "a", "price": 1}'),
        row('{"user": "a", "price": "x"}'),
        row("{"),
        row('{"user": "a"}', 2.0),
        row('{"user": ["a", "b"]}'),
        row('["other", [1], [], null]'),
        row('{"user": "b", "unknown": 1}'),
        row('{"id": 1, "ad": "x"}', user="7", route="rank"),
        row('{"price": NaN}'),
        row('{"id": 1, "value": 3, "ad": "x"}', user='{"user": "c"}', route="rank"),
    ]
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, JOINED) as out:
        out.write_batch(pa.RecordBatch.from_pylist(given, JOINED))
    path = tmp_path / "quarantine.txt"
    reader = Reader(
        tmp_path / "rows.arrow", SCHEMA, "joined", 9, bad_lines="quarantine", max_bad_fraction=1.0, quarantine=str(path)
    )
    (batch,) = list(reader)
    assert len(batch) == 3
    text = path.read_text()
    for reason in (
        "expected a number",
        "the features are not JSON",
        "2 is not a label",
        "expected one value, found several",
        "encoded by another schema",
        "expected an object",
        "NaN is not a number",
    ):
        assert reason in text, text
    with pytest.raises(DataError, match=r"rows.arrow:2: price: expected a number"):
        list(Reader(tmp_path / "rows.arrow", SCHEMA, "joined", 9))
    broken = pa.table({"x": [1]})
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, broken.schema) as out:
        out.write_table(broken)
    with pytest.raises(DataError, match="has no joined rows"):
        list(Reader(tmp_path / "x.arrow", SCHEMA, "joined", 9))


# The loop


def test_a_click_changes_the_score_that_is_served(tmp_path: Path, graph: Path) -> None:
    """A server, its logs, a run that joins and learns them and publishes to the server: all real, each in its process."""
    schema = Schema(slots=(Slot("user"), Slot("ad")), label="click")
    write_schema(schema, tmp_path / "schema.yaml")
    config = {
        "data": {"schema": "schema.yaml", "batch_size": 32},
        "model": {"name": "lr"},
        "table": {"rule": {"name": "adagrad", "lr": 0.5}},
        "train": {"threads": 1},
        "run": {"dir": "run", "report": False, "checkpoint_every": None},
        "publish": {"guard": {"auc_drop": None, "copc": None}},
        "online": {
            "join": {"shows": "shows", "feedback": "feedback", "wait": "300ms", "interval": "100ms"},
            "first_base": True,
            "poll": "50ms",
        },
        "serve": {"log": str(tmp_path / "shows"), "feedback": str(tmp_path / "feedback")},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    online = [str(Path(sys.executable).parent / "clickfleet"), "online", str(tmp_path / "config.yaml")]
    trainer = subprocess.Popen(online, stdout=subprocess.DEVNULL)
    try:
        until(lambda: (tmp_path / "run/published/LOG.jsonl").exists())
        logs = {"log": str(tmp_path / "shows"), "feedback": str(tmp_path / "feedback")}
        with running(tmp_path / "run/published", tmp_path / "state", **logs) as served, Client(served.url) as client:
            seen = _exercise(client, trainer)
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()
            trainer = subprocess.Popen(online, stdout=subprocess.DEVNULL)
            seen = _exercise(client, trainer, seen)
            _learned_once(tmp_path, served, seen, trainer)
    finally:
        if trainer.poll() is None:
            trainer.kill()
        trainer.wait()


def _exercise(client: Client, trainer: subprocess.Popen[Any], sent: int = 0) -> int:
    """Click on one ad and never on the other, until the server tells them apart. Return how many rows were shown."""

    def differ() -> bool:
        nonlocal sent
        assert trainer.poll() is None
        candidates = [{"id": ad, "ad": ad} for ad in ("good", "bad")]
        reply = client.rank(candidates, {"user": f"u{sent % 7}"})
        sent += 2
        client.feedback({"request": reply["request"], "item": "good", "label": {"click": 1}, "event": f"e{sent}"})
        client.feedback({"request": reply["request"], "item": "good", "label": {"click": 1}, "event": f"e{sent}"})
        scores = {item["id"]: item["score"] for item in reply["ranked"]}
        return bool(scores["good"] > scores["bad"] + 0.05)

    until(differ)
    return sent


def _learned_once(folder: Path, served: Served, sent: int, trainer: subprocess.Popen[Any]) -> None:
    """Every show of the exercises is learned, and none twice; those of the last moment follow."""

    def learned() -> Counter[str]:
        lines = [json.loads(line) for line in (folder / "run/passes.jsonl").read_text().splitlines()]
        rows = [row for line in lines for path in line["data"] for row in pa.ipc.open_file(path).read_all().to_pylist()]
        return Counter(f"{row['request']}/{row['item']}" for row in rows if row["kind"] != "correction")

    def complete() -> bool:
        assert trainer.poll() is None
        found = learned()
        assert max(found.values(), default=1) == 1
        return len(found) == sent

    until(complete)
    assert served.http.get("/v1/stats").json()["counts"]["shows_logged"] == sent
