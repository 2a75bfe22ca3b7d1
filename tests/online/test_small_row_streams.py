"""Online runs that publish small rows: consumers get the rounded model, and what cannot be rounded is held back."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clickfleet import load
from clickfleet.config.check import configure
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.online.freshness import Freshness
from clickfleet.online.learn import learn
from clickfleet.online.publisher import PassPublisher
from clickfleet.online.session import OnlinePosition
from clickfleet.serve import verification
from clickfleet.store.published import Log
from clickfleet.training.learner import Learner
from clickfleet.training.monitor import Monitor
from clickfleet.training.predict import Scorer
from online.test_calibrator import SETTINGS
from online.test_micro_passes import table


@pytest.mark.parametrize("form", ["float16", "int8"])
def test_consumers_get_the_rounded_model(form: Any, stream: Any, tmp_path: Path) -> None:
    guard = {"auc_drop": None, "copc": None}
    config = stream(days=1, **SETTINGS, publish={"rows": form, "calibrate": {"by": ["ad"]}, "guard": guard})
    items = [(table(100, number), 20260101, number) for number in range(1, 7)]
    learn(config, source=items[:3], quiet=True)
    done = learn(config, source=items, quiet=True)
    log = Log(tmp_path / "run/published")
    assert {log.entry(line).row_format for line in log.kept()} == {form}
    probe = {name: values for name, values in table(40, 99).items() if name not in ("click", "time")}
    source = done.source(probe)
    rounded = np.concatenate([scores.copy() for _, scores in Scorer(done.learner, rows=form)(source)])
    assert load(tmp_path / "run/published").predict(probe) == pytest.approx(rounded, abs=1e-6)
    assert 0 < np.abs(rounded - done.predict(probe)).max() < 0.01
    verification.verify(tmp_path / "run")


def test_a_row_that_does_not_fit_holds_the_entry_back(tmp_path: Path) -> None:
    raw: dict[str, Any] = {"model": {"name": "deepfm", "hidden": [4]}, "table": {"dim": 4}}
    config = configure({**raw, "run": {"dir": str(tmp_path)}, "publish": {"rows": "int8", "done_files": False}})
    learner = Learner(config, Schema(dense=(Dense("price"),), slots=(Slot("user"), Slot("ad"))))
    publisher = PassPublisher(config, learner, tmp_path, Monitor(tmp_path, quiet=True), Freshness(time.time))
    keys = np.arange(9, dtype=np.uint64)
    learner.table.push(keys, np.ones((9, 5), np.float32))
    publisher.release("base", 1, OnlinePosition(), judged=False)
    good, wrong = learner.table.pull(keys[7:8]), np.full((1, 5), 1e6, np.float32)
    learner.table.move(keys[7:8], wrong, add=False)
    publisher.release("delta", 2, OnlinePosition(), judged=False)
    assert (publisher.held, publisher.last_sequence) == (1, 1)
    assert "the row of key 7 holds 1e+06, which int8 cannot hold" in publisher.problem
    learner.table.move(keys[7:8], good, add=False)
    publisher.release("delta", 3, OnlinePosition(), judged=False)
    publisher.close()
    assert (publisher.held, publisher.last_sequence) == (0, 2)
    verification.verify(publisher.log.folder)
