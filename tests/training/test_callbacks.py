"""Callbacks hear of steps, evaluations and epochs, may stop a run, and end it with their own exceptions."""

import traceback
from pathlib import Path
from typing import Any

import pytest

import clickfleet
from clickfleet.errors import ConfigError
from clickfleet.store import checkpoint
from clicks import click_frame

FRAME = click_frame(400)
SMALL: dict[str, Any] = {
    "model": "lr",
    "batch_size": 50,
    "epochs": 2,
    "train__threads": 1,
    "quiet": True,
}


class Diary(clickfleet.Callback):
    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int]] = []
        self.losses: list[float | None] = []
        self.others: list[tuple[str, Any]] = []

    def on_step(self, progress: clickfleet.StepProgress) -> None:
        self.steps.append((progress.step, progress.rows, progress.epoch))
        self.losses.append(progress.loss)
        assert 0 <= progress.auc <= 1

    def on_evaluation(self, results: dict[str, Any]) -> None:
        self.others.append(("evaluation", results["step"]))
        assert results["rows"] == 100

    def on_epoch(self, results: dict[str, Any]) -> None:
        self.others.append(("epoch", results["epoch"]))

    def on_end(self, result: Any) -> None:
        self.others.append(("end", result.rows))


def test_callbacks_hear_of_everything_once() -> None:
    diary, seen = Diary(), []
    model = clickfleet.fit(
        FRAME, "clicked", test=FRAME[:100], callbacks=[diary, lambda progress: seen.append(progress.step)], **SMALL
    )
    assert [step for step, _, _ in diary.steps] == seen == list(range(1, 17))
    assert diary.steps[7] == (8, 400, 0)
    assert diary.steps[-1] == (16, 800, 1)
    assert diary.others == [("epoch", 0), ("evaluation", 8), ("epoch", 1), ("evaluation", 16), ("end", 800)]
    assert all(loss is not None and 0.1 < loss < 2 for loss in diary.losses)
    assert model.rows == 800


def test_each_of_several_trainer_threads_calls() -> None:
    diary = Diary()
    clickfleet.fit(
        FRAME, "clicked", test=FRAME[:100], callbacks=[diary], **{**SMALL, "train__threads": 2, "hogwild": 2}
    )
    assert [step for step, _, _ in diary.steps] == list(range(1, 17))


@pytest.mark.parametrize(
    "stops", [lambda progress: progress.step < 5, lambda progress: progress.stop() if progress.step == 5 else None]
)
def test_a_callback_stops_a_run_after_its_step(stops: Any, tmp_path: Path) -> None:
    model = clickfleet.fit(FRAME, "clicked", test=FRAME[:100], callbacks=[stops], run__dir=tmp_path / "run", **SMALL)
    assert (model.step, model.rows) == (5, 250)
    assert model.test == model.evaluate(FRAME[:100])
    assert not checkpoint.epochs(tmp_path / "run/checkpoints")
    resumed = clickfleet.fit(FRAME, "clicked", test=FRAME[:100], resume=True, run__dir=tmp_path / "run", **SMALL)
    assert resumed.rows == 800


def test_an_evaluation_stops_a_run() -> None:
    class Enough:
        def on_evaluation(self, results: dict[str, Any]) -> bool:
            return results["auc"] < 0

    model = clickfleet.fit(FRAME, "clicked", test=FRAME[:100], callbacks=[Enough()], **SMALL)
    assert model.step == 8


@pytest.mark.parametrize("threads", [1, 2])
def test_an_exception_ends_the_run_with_its_own_traceback(threads: int, tmp_path: Path) -> None:
    def clumsy(progress: clickfleet.StepProgress) -> None:
        if progress.step == 3:
            raise KeyError("my mistake")

    keywords = {**SMALL, "train__threads": threads, "run__dir": tmp_path / "run"}
    with pytest.raises(KeyError, match="my mistake") as caught:
        clickfleet.fit(FRAME, "clicked", callbacks=[clumsy], **keywords)
    assert "clumsy" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    done = clickfleet.fit(FRAME, "clicked", **keywords)  # the folder is unlocked
    assert done.rows == 800


def test_what_is_no_callback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a callback"):
        clickfleet.fit(FRAME, "clicked", callbacks=["on_step"], **SMALL)
    FRAME.to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(ConfigError, match="on_step cannot be called in mode sync"):
        clickfleet.train(
            None,
            f"data.train={tmp_path / 'rows.csv'}",
            mode="sync",
            callbacks=[Diary()],
            quiet=True,
        )
