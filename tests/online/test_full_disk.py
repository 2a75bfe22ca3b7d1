"""A disk that is really full: clear words, nothing torn, and after space was freed the run ends as if nothing had been."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from clickfleet.errors import CheckpointError
from clickfleet.online.learn import learn
from clickfleet.store import atomic, checkpoint, published
from clickfleet.training import run
from online.test_kills import contents
from small_disk import Disk, small_disk
from streams import HEADER, lines, settings, write_days

SOAK = bool(os.environ.get("CLICKFLEET_SOAK"))
SIZE = 24 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk", SIZE) as made:
        yield made


@pytest.fixture
def stream_on(tmp_path, disk, graph):
    """A deterministic stream whose run folder is on the small disk, and what it gives undisturbed."""
    write_days(tmp_path, days=2, splits=2, rows=60)
    config = settings(tmp_path, run={"dir": str(disk.folder / "run"), "checkpoint_every_steps": 3, "keep": 2})

    def anew() -> Path:
        shutil.rmtree(disk.folder / "run", ignore_errors=True)
        (disk.folder / "run").mkdir()
        shutil.copy(graph, disk.folder / "run/graph.onnx")
        return disk.folder / "run"

    folder = anew()
    learn(config, quiet=True)
    return config, contents(folder), anew


def check_whole(folder: Path) -> None:
    """All that can be found is whole."""
    log = published.Log(folder / "published")
    for line in log.lines():
        if (log.folder / line.name).exists():
            log.entry(line).verify()
    for step in checkpoint.steps(folder / "checkpoints"):
        checkpoint.verify(folder / f"checkpoints/step-{step:012d}")
    for name in ("metrics.jsonl", "passes.jsonl"):
        if (folder / name).exists():
            for line in (folder / name).read_text().splitlines():
                json.loads(line)


@pytest.mark.parametrize("part", ["delta", "base", "step-"])
def test_it_fills_while_an_entry_or_a_checkpoint_is_written(disk, stream_on, monkeypatch, part):
    config, wanted, anew = stream_on
    folder = anew()
    began, filled = atomic.FolderWriter.__enter__, []

    def fill(self):
        if part in self.path.name and not filled and self.path.name != "000001-base" and disk.used > 200_000:
            filled.append(self.path)
            disk.leave(4096)
        return began(self)

    monkeypatch.setattr(atomic.FolderWriter, "__enter__", fill)
    with pytest.raises(CheckpointError, match=r"the disk is full: cannot write ") as told:
        learn(config, quiet=True)
    assert filled
    assert "free space" in str(told.value)
    if part != "step-":  # a checkpoint that is being written at the same time may need the last bytes first
        assert any(name in str(told.value) for name in (str(filled[0]), "checkpoints/step-"))
    check_whole(folder)
    disk.free()
    learn(config, quiet=True)
    assert contents(folder) == wanted


def test_it_fills_at_any_moment(disk, stream_on):
    config, wanted, anew = stream_on
    needs = disk.used
    told = []
    shares = 40 if SOAK else 5
    for share in range(shares):
        folder = anew()
        disk.leave(needs * share // shares)
        try:
            learn(config, quiet=True)
        except CheckpointError as error:
            told.append(str(error))
        check_whole(folder)
        disk.free()
        learn(config, quiet=True)
        assert contents(folder) == wanted, share
    assert len(told) > shares // 2
    assert all("disk is full" in text or "No space" in text for text in told)


def test_a_run_that_need_not_be_the_same_holds_entries_and_goes_on(disk, stream_on, monkeypatch):
    config, _, anew = stream_on
    folder = anew()
    config["train"] = {**config["train"], "deterministic": False}
    # No checkpoint in between: the files that it removes, its own or older ones, would leave space for the entry.
    config["run"] = {**config["run"], "checkpoint_every_steps": 1000, "keep": 20}
    config["online"] = {**config["online"], "checkpoint_every_passes": 99}
    began, filled, freed = atomic.FolderWriter.__enter__, [], []

    def fill(self):
        if self.path.name.endswith("-delta") and not freed:
            filled.append(self.path)
            disk.leave(4096)
        elif filled and self.path.name.endswith("-base"):
            freed.append(self.path)
            disk.free()
        return began(self)

    monkeypatch.setattr(atomic.FolderWriter, "__enter__", fill)
    done = learn(config, quiet=True)
    log = published.Log(folder / "published")
    assert [line.kind for line in log.lines()] == ["base", "base", "delta", "delta", "base"]
    assert (done.passes, done.held) == (4, 0)
    said = (folder / "log.txt").read_text()
    assert f"ALARM: a delta is held back: the disk is full: cannot write {filled[0]}" in said
    alarms = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if '"alarm"' in line]
    assert [alarm["held"] for alarm in alarms] == [1, 2]
    check_whole(folder)


def test_training_on_files(disk, tmp_path):
    (tmp_path / "train.csv").write_text("\n".join([HEADER, *lines(200, 1)]) + "\n")
    config = settings(tmp_path, run={"dir": str(disk.folder / "run"), "checkpoint_every_steps": 4, "report": False})
    del config["online"], config["publish"]
    config["data"] = {**config["data"], "train": [str(tmp_path / "train.csv")]}

    def final(folder: Path) -> dict[str, bytes]:
        last = checkpoint.latest(folder / "checkpoints")
        files = {path.name: path.read_bytes() for path in last.iterdir()}
        state = json.loads(files.pop("state.json"))
        del files["manifest.json"]
        return {**files, "state": json.dumps(state).encode()}

    folder = disk.folder / "run"
    run.train(config, quiet=True)
    wanted, needs, told = final(folder), disk.used, []
    shares = 24 if SOAK else 4
    for share in range(shares):
        shutil.rmtree(folder)
        disk.leave(needs * share // shares)
        try:
            run.train(config, quiet=True)
        except CheckpointError as error:
            told.append(str(error))
        check_whole(folder)
        disk.free()
        run.train(config, resume=bool(checkpoint.steps(folder / "checkpoints")), quiet=True)
        assert final(folder) == wanted, share
    assert len(told) > shares // 2
    assert all("disk is full" in text or "No space" in text for text in told)
