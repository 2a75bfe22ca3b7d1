"""What we write, TensorBoard reads."""

from pathlib import Path

import pytest

from clickfleet.training.tensorboard import Events


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_the_curves(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = Events(tmp_path)
    events.add(0, {"train/auc": 0.5})
    events.add(300, {"train/auc": 0.75, "train/loss": 0.25})
    curves = accumulator.EventAccumulator(str(tmp_path))
    curves.Reload()
    assert curves.Tags()["scalars"] == ["train/auc", "train/loss"]
    assert [(point.step, point.value) for point in curves.Scalars("train/auc")] == [(0, 0.5), (300, 0.75)]
