"""A value is forgotten: in the table, for servers, and in the end everywhere. Until then, every place that holds it is named."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import clickfleet
from clickfleet import cli
from clickfleet.config.check import configure
from clickfleet.errors import CheckpointError, ClickfleetError, ConfigError
from clickfleet.online import manual, rewind
from clickfleet.online.forget import forget
from clickfleet.serve import verification
from clickfleet.store import atomic, checkpoint, erasure, redis_rows, run_folder
from clickfleet.store.erasure import value_keys
from clickfleet.store.lock import Lock
from clickfleet.store.published import Log
from online.test_publisher import base_of, state_of
from served import running, until
from soak import SOAK, only_in_soak
from streams import SCHEMA, lines

USER, AD = (int(value_keys(SCHEMA, slot, pa.array([value]))[0]) for slot, value in (("user", "u7"), ("ad", "a3")))


def call(capsys: Any, *arguments: str, code: int = 0) -> dict[str, Any]:
    with pytest.raises(SystemExit) as stop:
        cli.main([*arguments, "--json"])
    said = capsys.readouterr()
    assert stop.value.code == code, said.err
    out: dict[str, Any] = json.loads(said.out.splitlines()[-1]) if said.out.strip() else {"error": said.err}
    return out


def without_user(folder: Path, day: int) -> None:
    """The days from now on have no rows of the user."""
    for part in (folder / f"logs/{day}").rglob("*.csv"):
        part.write_text("".join(line for line in part.read_text().splitlines(True) if ",u7," not in line))


def places(holders: list[Any], run: Path) -> set[str]:
    return {os.path.relpath(one["place"], run) for one in holders if erasure.holds(one)}


def table_of(run: Path) -> clickfleet.Table:
    return checkpoint.load(checkpoint.latest(run / "checkpoints"))


@pytest.fixture
def learned(stream: Any, online: Any, tmp_path: Path) -> dict[str, Any]:
    """A run over one of two days; the second one does not show the user."""
    config: dict[str, Any] = stream(run={"keep": 3, "names": True}, publish={"keep_chains": 2})
    online(config, "online.end_day=20260101")
    without_user(tmp_path, 20260102)
    return config


@pytest.fixture
def copied(stream: Any, online: Any, tmp_path: Path) -> dict[str, Any]:
    """The same, with copies of its entries."""
    config: dict[str, Any] = stream(publish={"keep_chains": 2, "to": str(tmp_path / "copies")})
    online(config, "online.end_day=20260101")
    without_user(tmp_path, 20260102)
    return config


def test_a_run_that_continues_deletes_the_rows_for_consumers(
    learned: dict[str, Any], online: Any, tmp_path: Path, capsys: Any
) -> None:
    run, log = tmp_path / "run", Log(tmp_path / "run/published")
    assert {USER, AD} <= state_of(log).keys()
    rows = len(table_of(run))
    verified = call(capsys, "forget", str(run), "--value", "user=u7", "--value", "ad=a3", "--verify", code=1)
    assert verified["ok"] is False
    assert any(one["kind"] == "names" and one["names"] == 2 for one in verified["holders"])
    newest = [one for one in verified["holders"] if one["place"].endswith(checkpoint.latest(run / "checkpoints").name)]
    assert newest[0]["rows"] == 2
    done = call(capsys, "forget", str(run), "--value", "user=u7", "--value", "ad=a3")
    assert (done["removed"], done["rows"], done["deletions"], done["names"]) == (2, rows - 2, 2, 2)
    assert done["checkpoint"] == str(checkpoint.latest(run / "checkpoints"))
    assert not table_of(run).known(np.array([USER, AD], np.uint64)).any()
    assert len(table_of(run)) == rows - 2
    text = (run / "names.json").read_text()
    assert '"u7"' not in text
    assert '"u5"' in text
    assert USER in state_of(log), "published entries do not change"
    held = places(done["holders"], run)
    assert {"published/000001-base", "published/000003-base"} <= held
    assert os.path.relpath(done["checkpoint"], run) not in held
    again = call(capsys, "forget", str(run), "--value", "user=u7", "--value", "ad=a3")
    assert (again["checkpoint"], again["removed"], again["deletions"]) == (None, 0, 2)
    before = log.lines()[-1].sequence
    result = online(learned)  # ad a3 is shown again and learned anew, the user is not
    deltas = [log.entry(line) for line in log.lines() if line.sequence > before]
    assert USER in deltas[0].deleted().tolist()
    assert USER not in state_of(log)
    assert AD in state_of(log)
    assert state_of(log) == base_of(result.learner.table)
    verification.verify(run)
    assert places(call(capsys, "forget", str(run), "--value", "user=u7", "--verify", code=1)["holders"], run) == {
        name for name in held if "published/000003" in name or name.startswith("checkpoints/")
    } & {os.path.relpath(path, run) for folder in ("checkpoints", "published") for path in (run / folder).iterdir()}


def test_retention_removes_the_rest(learned: dict[str, Any], online: Any, tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    forget(run, values={"user": "u7"})
    for day in (3, 4):
        shutil.copytree(tmp_path / "logs/20260102", tmp_path / f"logs/2026010{day}")
        for part in (tmp_path / f"logs/2026010{day}").rglob("*.csv"):
            head, *rows = part.read_text().splitlines()
            later = [row.split(",") for row in rows]
            moved = [",".join([row[0], str(int(row[1]) + (day - 2) * 86400), *row[2:]]) for row in later]
            part.write_text("\n".join([head, *moved]) + "\n")
    online(learned, "online.end_day=20260104")
    found = call(capsys, "forget", str(run), "--value", "user=u7", "--verify")
    assert found["ok"] is True
    assert places(found["holders"], run) == set()


def test_a_served_score_becomes_that_of_a_value_never_seen(learned: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    row = {"price": 0.4, "ad": "a4", "site": ["s1"]}

    def scores(server: Any) -> list[float]:
        rows = [{**row, "user": user} for user in ("u7", "nobody", "u8")]
        return list(server.http.post("/v1/predict", json={"rows": rows}).json()["scores"])

    with running(run / "published", tmp_path / "state") as server:
        before = scores(server)
        assert before[0] != before[1]
        forget(run, values={"user": "u7"})
        assert scores(server) == before
        entry = manual.publish(run, "delta")
        assert (entry["kind"], entry["deleted"]) == ("delta", 1)
        until(lambda: server.http.get("/v1/model").json()["sequence"] == entry["sequence"])
        after = scores(server)
        assert after[0] == after[1] == before[1]
        assert after[2] == before[2]


def test_everything_goes_at_once(copied: dict[str, Any], online: Any, tmp_path: Path, capsys: Any) -> None:
    run, copies = tmp_path / "run", tmp_path / "copies"
    online(copied)
    keys = tmp_path / "keys.txt"
    keys.write_text(f"user\tu8\n{AD}\n")
    done = call(capsys, "forget", str(run), "--keys", str(keys), "--now")
    assert done["ok"] is True
    assert places(done["holders"], run) == set()
    assert done["entry"].endswith("-base")
    assert checkpoint.steps(run / "checkpoints") == checkpoint.steps(run / "checkpoints")[-1:]
    assert [path.name for path in sorted(copies.glob("0*"))] == [Path(done["entry"]).name]
    assert AD not in state_of(Log(copies))
    assert any(str(copies) in place for place in done["dropped"])
    assert call(capsys, "forget", str(run), "--keys", str(keys), "--verify")["ok"] is True
    assert call(capsys, "forget", str(copies), "--keys", str(keys), "--verify")["ok"] is True  # a log without its run
    verification.verify(run)
    assert online(copied).passes == 4


STEPS: list[tuple[Any, str]] = [
    (erasure.ForgottenKeys, "add"),
    (atomic, "flush"),
    (checkpoint, "make_latest"),
    (checkpoint, "prune"),
    (checkpoint, "relabel"),
    (erasure, "forget_names"),
    (manual, "publish"),
    (erasure, "remove_old_entries"),
]


@pytest.mark.parametrize(("owner", "name"), STEPS, ids=[name for _, name in STEPS])
@pytest.mark.parametrize("before", [only_in_soak(True), False])
def test_the_same_command_completes_what_was_killed(
    copied: dict[str, Any],
    online: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    before: bool,
) -> None:
    """Whatever is killed, the run can be loaded, verified and resumed, and the same command ends the same."""
    run = tmp_path / "run"
    checkpoint.label_best(checkpoint.latest(run / "checkpoints"))
    original = getattr(owner, name)

    def killed(*arguments: Any, **more: Any) -> Any:
        if not before:
            original(*arguments, **more)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(KeyboardInterrupt):
            forget(run, values={"user": "u7"}, now=True)
    for label in ("LATEST", "BEST"):
        checkpoint.load(checkpoint.labelled(run / "checkpoints", label))
    verification.verify(run)
    done = forget(run, values={"user": "u7"}, now=True)
    assert done["ok"]
    best = checkpoint.best(run / "checkpoints")
    assert best is not None
    assert not checkpoint.load(best).known(np.array([USER], np.uint64)).any()
    result = online(copied)
    assert state_of(Log(run / "published")) == base_of(result.learner.table)
    assert USER not in state_of(Log(tmp_path / "copies"))


def test_kill_minus_nine_leaves_a_run_that_loads(learned: dict[str, Any], tmp_path: Path) -> None:
    """A process that is killed while it writes: at each of its first writes to the disk."""
    run = tmp_path / "run"
    program = (
        "import os, signal, sys\n"
        "from clickfleet.data import files\n"
        "from clickfleet.store import atomic\n"
        "from clickfleet.online.forget import forget\n"
        "left, original = int(sys.argv[2]), files.flush\n"
        "def flush(path):\n"
        "    global left\n"
        "    left -= 1\n"
        "    if left == 0:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    original(path)\n"
        "files.flush = atomic.flush = flush\n"
        "forget(sys.argv[1], values={'user': 'u7'})\n"
    )
    codes = []
    for moment in (1, 3, 7, 9, 13) if SOAK else (1, 5, 9):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        copy = shutil.copytree(run, tmp_path / "copy")
        done = subprocess.run([sys.executable, "-c", program, str(copy), str(moment)], capture_output=True)
        codes.append(done.returncode)
        table = table_of(copy)
        verification.verify(copy)
        forgotten = forget(copy, values={"user": "u7"})
        assert forgotten["removed"] == int(table.known(np.array([USER], np.uint64))[0])
        assert not table_of(copy).known(np.array([USER], np.uint64)).any()
        assert not [path.name for path in (copy / "checkpoints").iterdir() if path.name.startswith(".")]
    assert codes[0] == -signal.SIGKILL


def test_a_rollback_or_rewind_does_not_bring_it_back(learned: dict[str, Any], online: Any, tmp_path: Path) -> None:
    run, log = tmp_path / "run", Log(tmp_path / "run/published")
    learned["run"]["keep"] = learned["publish"]["keep_chains"] = 9
    online(learned)
    last = state_of(log)
    assert USER in state_of(log, 3)
    forget(run, values={"user": "u7"})
    entry = manual.publish(run, rollback=3)
    assert state_of(log) == {key: row for key, row in state_of(log, 3).items() if key != USER}
    verification.verify(run)
    manual.publish(run, "delta")
    assert state_of(log) == {key: row for key, row in last.items() if key != USER}
    rewind.rewind(configure(learned), (20260102, 1), 0, print)
    assert USER not in state_of(log)
    assert not table_of(run).known(np.array([USER], np.uint64)).any()
    assert not erasure.holds(erasure.KeySearch(str(run), erasure.WantedKeys(np.array([USER], np.uint64)), SCHEMA).checkpoint(
        f"checkpoints/{checkpoint.latest(run / 'checkpoints').name}"))  # fmt: skip
    verification.verify(run)
    result = online(learned)
    assert state_of(log) == base_of(result.learner.table)
    assert entry["sequence"] > 3


def test_slices_and_groups_are_forgotten(stream: Any, online: Any, tmp_path: Path) -> None:
    config = stream(publish={"calibrate": {"by": ["ad"]}})
    online(config, "online.end_day=20260101")
    run = tmp_path / "run"
    newest = checkpoint.latest(run / "checkpoints")
    state = run_folder.read_state(newest)["published"]["calibrator"]
    assert AD in state["keys"]
    search = erasure.KeySearch(str(run), erasure.WantedKeys(np.array([AD], np.uint64)), SCHEMA)
    assert search.checkpoint(f"checkpoints/{newest.name}")["slices"] == 1
    forget(run, values={"ad": "a3"})
    newest = checkpoint.latest(run / "checkpoints")
    left = run_folder.read_state(newest)["published"]["calibrator"]
    assert left["keys"] == [key for key in state["keys"] if key != AD]
    assert str(AD) not in left["calibration"]
    assert not erasure.holds(search.checkpoint(f"checkpoints/{newest.name}"))
    result = online(config)
    assert state_of(Log(run / "published")) == base_of(result.learner.table)


def test_a_table_with_rows_on_disk(stream: Any, online: Any, tmp_path: Path, capsys: Any) -> None:
    """What a killed process left on disk is named, and goes with the rows."""
    config = stream(table={"memory_limit": "4MB", "disk": str(tmp_path / "rows")}, rows=400)
    online(config, "online.end_day=20260101")
    run = tmp_path / "run"
    (tmp_path / "rows/table-left").mkdir()
    (tmp_path / "rows/table-left/segment").write_bytes(b"rows")
    found = call(capsys, "forget", str(run), "--value", "user=u7", "--verify", code=1)
    assert [one["rows"] for one in found["holders"] if one["kind"] == "leftover"] == [None]
    done = forget(run, values={"user": "u7"})
    assert done["removed"] == 1
    assert not [one for one in done["holders"] if one["kind"] == "leftover"]
    result = online(config)
    assert state_of(Log(run / "published")) == base_of(result.learner.table)


class RedisClient:
    """What we use of Redis."""

    def __init__(self) -> None:
        self.kept: dict[bytes, Any] = {}

    def get(self, name: bytes) -> Any:
        return self.kept.get(name)

    def set(self, name: bytes, value: Any) -> None:
        self.kept[name] = value

    def mset(self, pairs: dict[bytes, Any]) -> None:
        self.kept.update(pairs)

    def delete(self, *names: bytes) -> int:
        return sum(self.kept.pop(name, None) is not None for name in names)

    def exists(self, *names: bytes) -> int:
        return sum(name in self.kept for name in names)

    def scan_iter(self, match: bytes, count: int) -> list[bytes]:
        return [name for name in self.kept if name.startswith(match[:-1])]


def test_rows_in_redis(learned: dict[str, Any], online: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = RedisClient()
    monkeypatch.setattr(redis_rows, "connect", lambda url: client)
    learned["publish"]["to"] = "redis://nowhere"
    without_user(tmp_path, 20260101)
    online(learned)
    run = tmp_path / "run"
    done = forget(run, values={"ad": "a3"})
    assert [one["rows"] for one in done["holders"] if one["kind"] == "redis"] == [1]
    manual.publish(run, "delta", to="redis://nowhere")
    again = forget(run, values={"ad": "a3"}, verify=True)
    assert not [one for one in again["holders"] if one["kind"] == "redis"]


def test_a_run_with_a_best_checkpoint(tmp_path: Path, write: Callable[..., Path]) -> None:
    """Commands use the best checkpoint, which retention never removes: it is written again."""
    from clickfleet.data.schema import write_schema

    write_schema(SCHEMA, tmp_path / "schema.yaml")
    head = "click,time,price,user,ad,site"
    for name, seed in (("train.csv", 1), ("valid.csv", 2)):
        write(name, "\n".join([head, *lines(300, seed)]) + "\n")
    result = clickfleet.train(
        {
            "data": {"format": "csv", "schema": str(tmp_path / "schema.yaml"), "train": [str(tmp_path / "train.csv")],
                     "valid": [str(tmp_path / "valid.csv")], "batch_size": 16},
            "model": {"name": "lr"},
            "train": {"epochs": 3, "patience": 2},
            "run": {"dir": str(tmp_path / "run"), "keep_epochs": True, "report": False},
        },
        quiet=True,
    )  # fmt: skip
    assert result is not None
    run = tmp_path / "run"
    done = forget(run, values={"user": ["u7"]})
    assert len(done["replaced"]) >= 2
    for path in (*checkpoint.epochs(run / "checkpoints").values(), checkpoint.best(run / "checkpoints")):
        assert path is not None
        assert not checkpoint.load(path).known(np.array([USER], np.uint64)).any()
    verification.verify(run)
    assert clickfleet.load(run).evaluate(str(tmp_path / "valid.csv"))["rows"] == 300


def test_what_cannot_be_forgotten_is_refused(learned: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    with Lock(run / ".lock", "trains"):
        process = subprocess.run(
            [sys.executable, "-c", f"from clickfleet.online.forget import forget; forget({str(run)!r}, [1])"],
            capture_output=True,
            text=True,
        )
        assert "trains there\n  wait for it, or stop it first" in process.stderr
        assert forget(run, [1], verify=True)["ok"]  # only reads
    with pytest.raises(CheckpointError, match="at a URL"):
        forget("s3://bucket/run", [1])
    with pytest.raises(CheckpointError, match="not a run folder"):
        forget(tmp_path, [1])
    with pytest.raises(CheckpointError, match="holds no checkpoint or published entry"):
        forget(tmp_path / "logs", [1], verify=True)
    with pytest.raises(ConfigError, match="no slot colour"):
        forget(run, values={"colour": "red"})
    for arguments in ((), ("--value", "u7"), ("--value", "user=u7", "--now", "--verify")):
        call(capsys, "forget", str(run), *arguments, code=2)
    with pytest.raises(ClickfleetError, match="cannot be read"):
        forget(run, tmp_path / "nothing.txt")
