"""The defaults on a small log, as a stranger meets them."""

from pathlib import Path

import pytest

import clickfleet
from clickfleet.data.logs.synth import SynthOptions, synth

pytestmark = pytest.mark.usefixtures("small_logs")


def test_the_defaults_beat_one_epoch_of_large_batches_and_a_regression(tmp_path: Path) -> None:
    synth(tmp_path / "log", SynthOptions(rows=6000, test_rows=4000))
    paths = {"data": {"train": str(tmp_path / "log/train"), "test": str(tmp_path / "log/test")}}

    def auc(name: str, *settings: str) -> float:
        folder = f"run.dir={tmp_path / name}"
        done = clickfleet.train(paths, folder, "run.report=false", "train.threads=1", *settings, quiet=True)
        assert done.test is not None
        return float(done.test["auc"])

    ours = auc("ours")
    assert ours > auc("before", "train.epochs=1", "data.batch_size=1000") + 0.02
    assert ours > auc("lr", "model=lr", "train.epochs=1", "data.batch_size=1000") + 0.01
    text = (tmp_path / "ours/log.txt").read_text()
    assert "6,000 rows: batches of 64, up to 20 epochs with early stopping, averaged, shuffled" in text
    assert "warning" not in text
    assert "warning: only 6 steps" in (tmp_path / "before/log.txt").read_text()
