"""What is published: the chain after holds, restarts, rollbacks and evictions is always the base of that moment."""

import json
import os
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickfleet import Table, cli
from clickfleet.errors import CheckpointError
from clickfleet.online import manual, publisher
from clickfleet.online.publisher import copy_to
from clickfleet.serve import verification
from clickfleet.store import checkpoint, published
from clickfleet.store.published import Content, Log, prune
from clickfleet.store.rollback import changed_keys, rollback
from pages import ROOT
from reference import rows_of

F = np.float32


def content(step: int) -> Content:
    import pyarrow as pa

    return Content(
        schema={}, model={}, factors=2, step=step, graph=b"graph %d" % step,
        golden=lambda sample: pa.table({"score": [float(step)]}), outputs=("score",),
    )  # fmt: skip


def state_of(log: Log, upto: int | None = None) -> dict:
    """What a reader of the log has."""
    lines = [line for line in log.lines() if upto is None or line.sequence <= upto]
    bases = [i for i, line in enumerate(lines) if line.kind == "base"]
    rows: dict = {}
    for line in lines[bases[-1] :]:
        entry = log.entry(line)
        for batch in entry.batches():
            for row in batch.to_pylist():
                rows[row["key"]] = (
                    row["slot"],
                    np.float32(row["embed_w"]).tobytes(),
                    np.array(row["embedx"], F).tobytes(),
                )
        for key in entry.deleted().tolist():
            rows.pop(key, None)
    return rows


def base_of(table: Table) -> dict:
    changes = table.cut_changes(base=True)
    found = {
        k: (int(np.ravel(r["slot"])[0]), F(r["embed_w"]).tobytes(), np.array(r["embedx"], F).tobytes())
        for k, r in rows_of(changes).items()
    }
    changes.abort()
    return found


pushes = st.tuples(st.just("push"), st.lists(st.integers(0, 60), min_size=1, max_size=30), st.integers(0, 2))
others = st.tuples(
    st.sampled_from(["shrink", "day", "delta", "delta", "delta", "base", "held", "save", "lost", "back"])
)


@given(actions=st.lists(pushes | others, min_size=5, max_size=50))
def test_base_plus_deltas_is_the_base_of_that_moment(actions, tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    log = Log(folder / "published")
    policy = {"base_threshold": 0.25, "delta_keep_days": 1, "decay_rate": 0.8, "delete_threshold": 0.12}
    table = Table(factors=2, admission="count(2)", delete_after_unseen_days=2, memory_limit=5_000_000, **policy)
    head: str | None = None
    saved = (checkpoint.save(table, folder / "start", files=1), head)

    def publish(base: bool) -> None:
        """As Release does: readers of newer entries are brought to where the table is."""
        nonlocal head
        lines = log.lines()
        known = [line.hash for line in lines]
        newer = lines if head is None else lines[known.index(head) + 1 :]
        if newer and (head is None or any(line.kind == "base" for line in newer)):
            base = True
        for line in newer if not base else ():
            for keys in changed_keys(log.entry(line)):
                table.restore_readers(keys)
        changes = table.cut_changes(base=base or not lines)
        head = log.append(changes, content(len(lines))).hash
        changes.commit()

    for n, (what, *more) in enumerate([*actions, ("delta",)]):
        if what == "push":
            keys = np.array(more[0], np.uint64)
            table.push(keys, np.full((len(keys), 3), n % 5 - 2, F), click=np.full(len(keys), more[1], F))
        elif what == "shrink":
            table.shrink()
        elif what == "day":
            table.end_day()
        elif what == "held":
            changes = table.cut_changes(base=n % 2 == 0)
            rows_of(changes)
            changes.abort()
        elif what == "save":
            saved = (checkpoint.save(table, folder / f"{n}", files=1), head)
        elif what == "lost":  # a crash: back to the checkpoint, behind the log's head
            table, head = checkpoint.load(saved[0]), saved[1]
        elif what == "back":
            lines = log.lines()
            if lines:
                target = lines[n % len(lines)].sequence
                wanted = state_of(log, target)
                rollback(log, target)
                assert state_of(log) == wanted
        else:
            publish(what == "base")
            assert state_of(log) == base_of(table)


def test_a_rollback_costs_what_changed_since_and_brings_network_and_requests_back(tmp_path):
    log, table = Log(tmp_path / "published"), Table(factors=2)
    keys = np.arange(5000, dtype=np.uint64)
    for step, count in enumerate([5000, 10, 20]):
        table.push(keys[:count], np.ones((count, 3), F))
        changes = table.cut_changes()
        log.append(changes, content(step))
        changes.commit()
    entry = rollback(log, 1)
    assert (entry.sequence, entry.manifest["kind"], entry.manifest["rows"]) == (4, "delta", 20)
    assert (entry.graph(), entry.golden().column("score").to_pylist()) == (b"graph 0", [0.0])
    assert entry.info["rollback_to"] == 1
    assert state_of(log) == state_of(log, 1)
    with pytest.raises(CheckpointError, match="has no entry 9"):
        rollback(log, 9)


def test_old_chains_are_pruned_and_entries_are_copied(tmp_path):
    log, table = Log(tmp_path / "published"), Table(factors=2)
    copies = tmp_path / "copies"
    for n in range(7):
        table.push(np.array([n], np.uint64), np.ones((1, 3), F))
        changes = table.cut_changes(base=n % 3 == 0)
        log.append(changes, content(n))
        changes.commit()
        assert copy_to(log, f"file://{copies}") == 1
    assert prune(log, 2) == ["000001-base", "000002-delta", "000003-delta"]
    assert prune(log, 2) == []
    assert [entry.sequence for entry in log.newest()] == [7]
    assert state_of(log) == state_of(Log(copies))
    with pytest.raises(CheckpointError, match="cannot roll back to entry 2"):
        rollback(log, 2)


def chains(folder: Path, kinds: str) -> Log:
    """A log with a letter per entry: b and d."""
    log, table = Log(folder), Table(factors=2)
    for n, letter in enumerate(kinds):
        table.push(np.array([n], np.uint64), np.ones((1, 3), F))
        changes = table.cut_changes(base=letter == "b")
        log.append(changes, content(n))
        changes.commit()
        prune(log, 2)
    return log


def test_a_log_stays_short_and_knows_where_its_kept_part_begins(tmp_path):
    follower = Log(tmp_path)
    log = chains(tmp_path, "bd")
    assert [line.sequence for line in follower.lines()] == [1, 2]
    size = log.path.stat().st_size
    log = chains(tmp_path / "long", "bdd" * 12)
    assert [line.sequence for line in log.lines()] == [*range(25, 37)]  # two chains kept, the lines of two more
    assert (log.header.begins, log.header.kept) == (25, 31)
    assert log.path.stat().st_size < 7 * size
    assert [line.sequence for line in log.kept()] == [*range(31, 37)]
    assert sorted(path.name for path in log.folder.glob("0*"))[0] == "000031-base"
    shutil.copytree(log.folder, tmp_path, dirs_exist_ok=True)  # a follower that holds an offset reads it anew
    assert follower.lines() == log.lines()
    shutil.rmtree(tmp_path / "long/000032-delta")
    with pytest.raises(CheckpointError, match="000032-delta"):
        [log.entry(line) for line in log.kept()]


def test_a_pruned_run_is_verified_and_what_is_missing_is_found(stream, online, tmp_path, capsys):
    config = stream(days=4, publish={"keep_chains": 1}, online={"end_day": 20260104})
    online(config)
    run = tmp_path / "run"
    assert len(list((run / "published").glob("0*"))) == 1
    found = verification.verify(run)
    assert (found["entries"], found["checkpoints"], found["golden"]) == (1, 3, True)
    assert verification.verify(run / "published")["entries"] == 1
    rows = next((run / "checkpoints").glob("step-*")) / "rows-00000-of-00008.arrow"
    whole = rows.read_bytes()
    rows.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="rows-00000"):
        verification.verify(run)
    rows.write_bytes(whole)
    shutil.rmtree(next((run / "published").glob("0*")))
    with pytest.raises(CheckpointError, match="-base"):
        verification.verify(run)
    with pytest.raises(SystemExit) as stop:
        cli.main(["verify", str(run)])
    assert stop.value.code == 1
    assert "-base" in capsys.readouterr().err


def test_a_long_chain_gets_a_base_within_the_day(stream, online, tmp_path):
    config = stream(days=1, splits=6, online={"end_day": 20260101}, publish={"base_every_deltas": 2, "keep_chains": 9})
    done = online(config)
    log = Log(tmp_path / "run/published")
    assert "".join(line.kind[0] for line in log.lines()) == "bddbddb"  # after two deltas a base; the last is the day's
    assert state_of(log) == base_of(done.learner.table)
    bases = [json.loads(line) for line in (tmp_path / "run/model/base_donefile.txt").read_text().splitlines()]
    assert [one["input"].split("/")[-2] for one in bases] == ["base-1", "base-4", "base"]
    assert verification.verify(tmp_path / "run")["entries"] == 7


@pytest.mark.parametrize("entries", [3, 4, 5])
def test_a_restart_around_such_a_base_makes_the_same_log(stream, online, tmp_path, monkeypatch, entries):
    config = stream(days=1, splits=4, online={"end_day": 20260101}, publish={"base_every_deltas": 2, "keep_chains": 1})
    with monkeypatch.context() as patch:
        crash_after(patch, entries)
        with pytest.raises(KeyboardInterrupt):
            online(config)
    online(config)
    crashed = (tmp_path / "run/published/LOG.jsonl").read_bytes()
    shutil.copy(tmp_path / "run/graph.onnx", tmp_path)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    shutil.copy(tmp_path / "graph.onnx", tmp_path / "run")
    online(config)
    assert (tmp_path / "run/published/LOG.jsonl").read_bytes() == crashed


def test_the_cost_of_one_more_entry_can_be_measured(tmp_path):
    compare = runpy.run_path(str(ROOT / "benchmarks/publish.py"))["compare"]
    found = compare(tmp_path / "500", 12, 500)
    assert found["ms_at_12"] > 0
    assert len(Log(tmp_path / "500/long/published").lines()) == 12 + 20  # the rounds that were measured


def test_a_chain_is_long_by_number_or_by_weight():
    chain = publisher.Chain(base_bytes=1 << 30)
    assert not chain.is_long(500)
    assert chain._replace(deltas=500).is_long(500)
    assert not chain._replace(deltas=500, delta_bytes=1 << 40).is_long(None)
    assert not chain._replace(deltas=3, delta_bytes=1 << 29).is_long(500)
    assert chain._replace(deltas=3, delta_bytes=(1 << 30) + 1).is_long(500)
    assert not publisher.Chain(1000, 3, 200 << 20).is_long(500)  # little, whatever the base
    assert publisher.Chain(1000, 3, 300 << 20).is_long(500)


def test_a_run_whose_log_was_cut_off_is_refused_before_it_learns(stream, online, tmp_path, capsys):
    config = stream()
    online(config)
    log = tmp_path / "run/published/LOG.jsonl"
    kept = Log(log.parent).kept()
    log.write_bytes(b"")
    with pytest.raises(CheckpointError, match="was truncated"):
        online(config, "online.end_day=20260103")
    with pytest.raises(SystemExit) as stop:
        cli.main(["verify", str(tmp_path / "run"), "--repair", "--json"])
    assert stop.value.code == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["repaired"]["last"] == 6
    assert Log(log.parent).kept() == kept
    online(config)


def alarms(folder: Path) -> list[dict]:
    found = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == "alarm"]


def test_a_bad_pass_is_held_and_the_next_good_entry_carries_it(stream, online, tmp_path):
    config = stream(days=1, splits=4, rows=120, online={"end_day": 20260101})
    bad = tmp_path / "logs/20260101/1200/part-0.csv"  # the third pass
    head, *rows = bad.read_text().splitlines()
    bad.write_text("\n".join([head, *("1" + row[1:] for row in rows)]) + "\n")  # everybody clicks
    config["publish"] = {"guard": {"auc_drop": None, "copc": [0.2, 1.9], "min_rows": 10, "warmup_rows": 0}}
    done = online(config)
    (held, *more) = alarms(tmp_path)
    assert "COPC" in held["reasons"][0]
    assert not more
    assert "ALARM: a delta is held back: COPC" in (tmp_path / "run/log.txt").read_text()
    log = Log(tmp_path / "run/published")
    assert [line.kind for line in log.lines()] == ["base", "delta", "delta", "base"]  # passes 1, 2, 4 and the day
    assert done.held == 0
    assert state_of(log, 3).keys() >= state_of(log, 4).keys()


def test_everything_is_held_while_the_model_is_bad_and_released_by_hand(stream, online, tmp_path):
    config = stream(publish={"guard": {"auc_drop": None, "copc": [50.0, 60.0], "min_rows": 0, "warmup_rows": 0}})
    done = online(config)
    assert done.last_sequence is None
    assert done.held == 8  # four passes, each day's delta again and its base
    assert not Log(tmp_path / "run/published").lines()
    entry = manual.publish(tmp_path / "run", "delta")
    assert (entry["sequence"], entry["kind"]) == (1, "base")
    assert entry["rows"] == len(state_of(Log(tmp_path / "run/published")))
    again = manual.publish(tmp_path / "run", "delta")
    assert (again["sequence"], again["rows"]) == (2, 0)


def test_a_full_disk_during_a_delta_loses_nothing(stream, online, tmp_path, monkeypatch):
    config = stream(days=1, splits=4, online={"end_day": 20260101})
    real, calls = published.write, []

    def full(path, *args, **kwargs):
        calls.append(path)
        if len(calls) == 2:
            raise CheckpointError("the disk is full: nothing was written, older ones are as they were")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(published, "write", full)
    online(config, "train.deterministic=false")
    assert alarms(tmp_path)[0]["reasons"] == ["the disk is full: nothing was written, older ones are as they were"]
    log = Log(tmp_path / "run/published")
    assert [line.kind for line in log.lines()] == ["base", "delta", "delta", "base"]


def crash_after(monkeypatch, entries: int) -> None:
    """The process dies right after so many entries, before their checkpoint."""
    real, count = Log.append, [0]

    def dying(self, rows, content):
        entry = real(self, rows, content)
        count[0] += 1
        if count[0] == entries:
            raise KeyboardInterrupt
        return entry

    monkeypatch.setattr(Log, "append", dying)


@pytest.mark.parametrize("entries", [1, 2, 3])
def test_a_deterministic_run_makes_the_same_entries_again(stream, online, tmp_path, monkeypatch, entries):
    config = stream()
    with monkeypatch.context() as patch:
        crash_after(patch, entries)
        with pytest.raises(KeyboardInterrupt):
            online(config)
    log = Log(tmp_path / "run/published")
    before = [line.hash for line in log.lines()]
    online(config)
    assert [line.hash for line in log.lines()][: len(before)] == before
    assert len(log.lines()) == 6
    assert "ahead of this run" not in (tmp_path / "run/log.txt").read_text()


@pytest.mark.parametrize("entries", [2, 3])
def test_another_run_repairs_the_chain(stream, online, tmp_path, monkeypatch, entries):
    config = stream(train={"deterministic": False, "threads": 1})
    with monkeypatch.context() as patch:
        crash_after(patch, entries)
        with pytest.raises(KeyboardInterrupt):
            online(config)
    done = online(config)
    log = Log(tmp_path / "run/published")
    assert "the next entry replaces what they changed" in (tmp_path / "run/log.txt").read_text()
    assert log.lines()[-1].sequence == 5 + entries
    assert state_of(log) == base_of(done.learner.table)


def test_a_rollback_under_a_run_is_repaired_by_its_next_entry(stream, online, tmp_path):
    config = stream(days=3)
    online(config)
    back = manual.publish(tmp_path / "run", rollback=5)
    log = Log(tmp_path / "run/published")
    assert state_of(log) == state_of(log, 5)
    assert back["sequence"] == 7
    done = online(config, "online.end_day=20260103")
    assert state_of(log) == base_of(done.learner.table)
    assert "1 entries ahead of this run: the next entry replaces" in (tmp_path / "run/log.txt").read_text()


def test_shrink_by_hand(stream, online, tmp_path):
    done = online(stream())
    shrunk = manual.shrink(tmp_path / "run")
    assert shrunk["rows"] == len(done.learner.table) - shrunk["removed"]
    assert manual.publish(tmp_path / "run", "delta")["deleted"] >= 0
    with pytest.raises(CheckpointError, match="not a run folder"):
        manual.shrink(tmp_path)


def test_done_files_for_existing_consumers(stream, online, tmp_path):
    online(stream())
    model = tmp_path / "run/model"
    bases = [json.loads(line) for line in (model / "base_donefile.txt").read_text().splitlines()]
    patches = [json.loads(line) for line in (model / "patch_donefile.txt").read_text().splitlines()]
    done = [line.split("\t") for line in (model / "donefile.txt").read_text().splitlines()]
    assert [one["input"].split("/")[-3:-1] for one in bases] == [
        ["20260101", "base-1"], ["20260102", "base"], ["20260103", "base"],
    ]  # fmt: skip
    assert [one["input"].split("/")[-3:-1] for one in patches] == [
        ["20260101", "delta-2"], ["20260102", "delta-1"], ["20260102", "delta-2"],
    ]  # fmt: skip
    assert patches[-1]["key"] in [one["key"] for one in bases]
    assert [(line[0], line[3], line[4]) for line in done] == [
        ("20260101", "1", "0"), ("20260102", "-1", "0"), ("20260102", "1", "0"), ("20260103", "-1", "0"),
    ]  # fmt: skip
    assert os.path.realpath(patches[-1]["input"]).endswith("-delta")
    assert "AUC=" in patches[0]["monitor_data"]


def test_the_line_of_a_checkpoint_names_the_base_it_was_made_with(stream, online, tmp_path, monkeypatch):
    """Every base gets another key here. The line of a checkpoint is written after the next base."""
    seconds = iter(range(1_800_000_000, 1_900_000_000, 1000))
    monkeypatch.setattr("clickfleet.paddlerec.done_files.time.time", lambda: next(seconds))
    online(stream(days=2))
    model = tmp_path / "run/model"
    keys = [json.loads(line)["key"] for line in (model / "base_donefile.txt").read_text().splitlines()]
    done = [line.split("\t") for line in (model / "donefile.txt").read_text().splitlines()]
    assert len(set(keys)) == 3
    assert [int(line[1]) for line in done] == [keys[0], keys[1], keys[1], keys[2]]
    patches = [json.loads(line)["key"] for line in (model / "patch_donefile.txt").read_text().splitlines()]
    assert patches == [keys[0], keys[1], keys[1]]


def test_links_to_what_is_no_longer_kept_go_with_the_next_base(stream, online, tmp_path):
    config, pruned = stream(), tmp_path / "run/model/20251231/delta-1/000"
    pruned.parent.mkdir(parents=True)
    pruned.symlink_to("gone")
    online(config)
    assert not pruned.is_symlink()
    kept = tmp_path / "run/model/20260103/base/000"
    assert kept.is_symlink()
    assert kept.exists()


def test_copies_go_to_a_remote_store(stream, online, tmp_path):
    online(stream(publish={"to": "memory://published"}))
    import fsspec

    fs = fsspec.filesystem("memory")
    assert (tmp_path / "run/published/LOG.jsonl").read_bytes() == fs.cat_file("/published/LOG.jsonl")
    assert fs.exists("/published/000006-base/manifest.json")
    shutil.rmtree(tmp_path / "run/published/000001-base", ignore_errors=True)
