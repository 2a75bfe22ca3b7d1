"""The loop that all training shares, and the opening of a run."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clickfleet.config.load import load
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.training.loop import Loop
from clickfleet.training.monitor import Monitor
from clickfleet.training.run import open_run


class Recorded(Loop[str]):
    """Two epochs of two stretches."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def epochs(self) -> Iterator[int]:
        for epoch in range(2):
            yield epoch
            self.calls.append(f"epoch {epoch} ended")

    def stretches(self, epoch: int) -> Iterator[str]:
        yield from (f"train {epoch}a", f"train {epoch}b")

    def train(self, stretch: str) -> None:
        self.calls.append(stretch)

    def evaluate_if_due(self) -> None:
        self.calls.append("evaluate")

    def save_if_due(self) -> None:
        self.calls.append("save")

    def finish(self) -> None:
        self.calls.append("finish")


def test_every_stretch_is_followed_by_what_is_due() -> None:
    loop = Recorded()
    loop.run()
    between = ["evaluate", "save"]
    assert loop.calls == [
        *("train 0a", *between, "train 0b", *between, "epoch 0 ended"),
        *("train 1a", *between, "train 1b", *between, "epoch 1 ended"),
        "finish",
    ]


class Started:
    """Records how a run was started."""

    def __init__(self) -> None:
        self.how = ""

    def start_new(self) -> None:
        self.how = "new"

    def start_from(self, path: Path) -> list[str]:
        self.how = f"from {path.name}"
        return ["top.weight"]

    def resume(self, path: Path) -> int:
        self.how = f"resumed {path.name}"
        return 7


def test_a_run_is_opened_once_and_says_how_it_starts(tmp_path: Path) -> None:
    config = replace(load(None, []), run=replace(load(None, []).run, dir=str(tmp_path / "run")))
    for resume, noted in ((False, False), (True, True), (None, False)):
        started = Started()
        with open_run(config, config.run.dir, resume, Monitor, quiet=True) as run:
            with (
                pytest.raises(CheckpointError, match="trains"),
                open_run(config, config.run.dir, resume, Monitor, quiet=True),
            ):
                pass
            run.begin(started)
        assert started.how == "new"
        assert (tmp_path / "run/config.yaml").is_file()
        log = tmp_path / "run/log.txt"
        assert (log.is_file() and "no checkpoint in" in log.read_text()) == noted
        log.unlink(missing_ok=True)


def test_there_is_nothing_to_resume_without_a_folder() -> None:
    with (
        pytest.raises(ConfigError, match="no run folder to resume from"),
        open_run(load(None, []), None, True, Monitor),
    ):
        pass
