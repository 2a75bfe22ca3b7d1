import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from clickfleet import Table
from clickfleet.errors import CheckpointError
from clickfleet.store import atomic, checkpoint
from clickfleet.store.rules import rule as update_rule
from clickfleet.store.rules import specs
from reference import rows_of
from small_disk import small_disk

F = np.float32


def trained(rule: str = "adagrad", factors: int = 4, rows: int = 3000) -> Table:
    rng = np.random.default_rng(5)
    table = Table(factors=factors, rule=update_rule(rule), admission="count(2)", memory_limit=None, seed=3)
    for _ in range(4):
        keys = rng.integers(0, 2 * rows, rows, dtype=np.uint64)
        slots = (keys % np.uint64(26)).astype(np.uint16)
        table.push(keys, rng.normal(size=(rows, 1 + factors)).astype(F), click=np.ones(rows, F), slots=slots)
    changes = table.cut_changes()
    rows_of(changes)
    changes.commit()
    table.push(keys[:30], np.ones((30, 1 + factors), F))
    return table


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("rule", specs())
@pytest.mark.parametrize("factors", [0, 4])
def test_save_load_save_is_byte_identical(tmp_path, rule, factors):
    table = trained(rule, factors)
    first = checkpoint.save(table, tmp_path / "first")
    again = checkpoint.load(first)
    second = checkpoint.save(again, tmp_path / "second")
    assert content(first) == content(second)
    assert rows_of(again.cut_changes()) == rows_of(table.cut_changes())


@pytest.mark.parametrize("files", [1, 2, 32])
@pytest.mark.parametrize("shards", [1, 3, 7])
def test_any_number_of_files_loads_on_any_number_of_shards(tmp_path, files, shards):
    table = trained()
    path = checkpoint.save(table, tmp_path / "a", files=files)
    parts = [checkpoint.load(path, shard=i, shards=shards) for i in range(shards)]
    rows: dict = {}
    for part in parts:
        mine = rows_of(part.snapshot())
        assert not rows.keys() & mine.keys()
        rows |= mine
    assert rows == rows_of(table.snapshot())
    assert sum(part.stats()["changed"] for part in parts) == table.stats()["changed"] > 20


def test_row_files_are_plain_arrow(tmp_path):
    table = trained()
    path = checkpoint.save(table, tmp_path / "a", files=2)
    with pa.memory_map(str(path / "rows-00000-of-00002.arrow")) as source:
        found = pa.ipc.open_file(source).read_all()
    assert found.column_names == [
        "key",
        "slot",
        "show",
        "click",
        "unseen_days",
        "delta_score",
        "published",
        "embed_w",
        "embed_state",
        "embedx",
        "embedx_state",
    ]
    mixed = np.empty(len(found), np.uint64)
    from clickfleet import _core

    keys = found["key"].to_numpy()
    _core.mix64(keys, mixed)
    assert (mixed % 1024 < 512).all()
    full = np.array([len(x) for x in found["embedx"]]) > 0
    for kind in (full, ~full):
        assert (np.diff(mixed[kind].astype(object)) > 0).all()


def test_a_golden_checkpoint_of_format_1_is_still_read():
    table = checkpoint.load(Path(__file__).parent / "checkpoint-v1")
    assert table.describe() == trained(rows=40).describe()
    assert rows_of(table.snapshot()) == rows_of(trained(rows=40).snapshot())


def test_random_corruption_is_always_detected(tmp_path):
    path = checkpoint.save(trained(rows=300), tmp_path / "a", files=2)
    whole = content(path)
    dice = random.Random(1)
    for name, data in whole.items():
        for _ in range(40):
            broken = bytearray(data)
            kind = dice.randrange(3)
            at = dice.randrange(len(broken))
            if kind == 0:
                broken[at] ^= 1 << dice.randrange(8)
            elif kind == 1:
                del broken[at:]
            else:
                broken[at:at] = b"\0"
            (path / name).write_bytes(broken)
            with pytest.raises(CheckpointError, match=name):
                checkpoint.load(path)
            with pytest.raises(CheckpointError, match=name):
                checkpoint.verify(path)
        (path / name).write_bytes(data)
    checkpoint.load(path)


def test_missing_foreign_and_too_new_are_refused_by_name(tmp_path):
    path = checkpoint.save(trained(rows=100), tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"nowhere does not exist"):
        checkpoint.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="already exists"):
        checkpoint.save(trained(rows=100), path)
    (path / "rows-00003-of-00008.arrow").rename(tmp_path / "aside")
    with pytest.raises(CheckpointError, match=r"cannot read .*rows-00003-of-00008.arrow"):
        checkpoint.load(path)
    (tmp_path / "aside").rename(path / "rows-00003-of-00008.arrow")

    manifest = json.loads((path / "manifest.json").read_bytes())
    manifest.pop("hash")

    def rewrite(**changes) -> None:
        new = {**manifest, **changes}
        (path / "manifest.json").write_bytes(atomic.canonical({**new, "hash": atomic.digest(new)}))

    rewrite(version=2)
    with pytest.raises(CheckpointError, match="format 2 and this version reads up to 1\n  upgrade"):
        checkpoint.load(path)
    rewrite(format="clickfleet/delta")
    with pytest.raises(CheckpointError, match="is a delta, not a checkpoint"):
        checkpoint.load(path)
    (path / "manifest.json").write_text(json.dumps({**manifest, "hash": atomic.digest(manifest)}))  # other bytes
    with pytest.raises(CheckpointError, match="its hash does not match"):
        checkpoint.load(path)
    (path / "manifest.json").write_text('{"format": "other"}')
    with pytest.raises(CheckpointError, match="not written by clickfleet"):
        checkpoint.load(path)


def test_latest_keep_and_prune(tmp_path):
    table = trained(rows=100)
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        checkpoint.latest(tmp_path)
    for step in (10, 20, 30, 40):
        checkpoint.write(table, tmp_path, step, keep=2)
    assert checkpoint.steps(tmp_path) == [30, 40]
    assert checkpoint.latest(tmp_path).name == "step-000000000040"
    (tmp_path / "LATEST").write_text("step-000000000030 00\n")
    with pytest.raises(CheckpointError, match="LATEST is damaged"):
        checkpoint.latest(tmp_path)


SAVER = """
import sys
import numpy as np
from clickfleet import Table
from clickfleet.store import checkpoint
folder, step = sys.argv[1], int(sys.argv[2])
table = Table(factors=8)
keys = np.arange(60_000, dtype=np.uint64)
while True:
    table.push(keys, np.ones((len(keys), 9), np.float32))
    print("saving", flush=True)
    step += 1
    checkpoint.write(table, folder, step, keep=2)
"""


def test_kill_during_a_save_leaves_the_old_state_or_the_new_one(tmp_path):
    """kill -9 at random moments: LATEST always names a checkpoint that loads whole."""
    kills = 200 if os.environ.get("CLICKFLEET_SOAK") else 6
    dice, step = random.Random(3), 0
    for _ in range(kills):
        saver = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path), str(step)], stdout=subprocess.PIPE)
        for _ in range(1 + dice.randrange(3)):
            saver.stdout.readline()
        with contextlib.suppress(subprocess.TimeoutExpired):
            saver.wait(dice.random() * 0.25)
        saver.send_signal(signal.SIGKILL)
        saver.wait()
        saver.stdout.close()
        if (tmp_path / "LATEST").exists():
            table = checkpoint.load(checkpoint.latest(tmp_path))
            rows = table.pull(np.arange(60_000, dtype=np.uint64), training=False)
            assert (rows[:, 0] == rows[0, 0]).all()
        step = max(checkpoint.steps(tmp_path), default=0)
    assert step > 0


def test_a_full_disk_is_said_plainly_and_leaves_the_old_state(tmp_path):
    """A real file system without room: a tmpfs of 1 MiB."""
    with small_disk(tmp_path / "small", 1 << 20) as disk:
        first = checkpoint.write(trained(rows=300), disk.folder, 1)
        with pytest.raises(CheckpointError, match="the disk is full"):
            checkpoint.write(trained(rows=40_000), disk.folder, 2)
        assert checkpoint.latest(disk.folder) == first
        checkpoint.load(first)
        assert sorted(entry.name for entry in disk.folder.iterdir()) == ["LATEST", "step-000000000001"]
