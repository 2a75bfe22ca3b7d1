"""Calibration of a stream: what is served predicts as many clicks as there are, in every slice, also after the world has changed."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clickfleet import load
from clickfleet.config.sections import Calibrate
from clickfleet.data.batch import Batch
from clickfleet.data.schema import Schema, Slot
from clickfleet.errors import ConfigError
from clickfleet.online.calibrator import MOST_SLICES, Calibrator
from clickfleet.online.learn import learn
from clickfleet.serve import verification
from clickfleet.store.calibration import probability
from clickfleet.store.published import Log
from clickfleet.store.rollback import rollback
from clickfleet.training.metrics import Buckets
from online.test_micro_passes import table
from served import running

SCHEMA = Schema(slots=(Slot("site"),))
SLICES = 4


class World:
    """Shows whose click probability is known, scored by a network that was right before the world changed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.slope, self.shifts = 1.0, np.zeros(SLICES)

    def change(self) -> None:
        self.slope, self.shifts = 0.8, self.rng.normal(-0.3, 0.5, SLICES)

    def shows(self, count: int) -> tuple[Batch, Any, Any, Any]:
        """Return rows, raw scores, clicks, and the true probabilities of clicks."""
        where, logits = self.rng.integers(0, SLICES, count), self.rng.normal(-0.5, 1.0, count)
        true = probability(self.slope * logits + self.shifts[where])
        batch = Batch(np.zeros((count, 0), np.float32), (where + 10).astype(np.uint64), 1)
        raw = probability(logits).astype(np.float32)
        return batch, raw, (self.rng.random(count) < true).astype(np.float32), true

    def live(self, calibrator: Calibrator, hours: float, begin_s: float, per_hour: int = 400_000) -> float:
        steps = round(hours * 60)
        for _ in range(steps):
            batch, raw, clicks, _ = self.shows(per_hour // 60)
            calibrator.learn(batch, raw, clicks, None, begin_s)
            calibrator.fit_if_due()
            begin_s += 60.0
        return begin_s

    def copc(self, calibrator: Calibrator) -> Any:
        batch, raw, _, true = self.shows(400_000)
        served = calibrator.calibration.apply(raw, batch, (0,))
        where = (batch.keys - 10).astype(np.int64)
        return np.bincount(where, true) / np.bincount(where, served)


def test_every_slice_is_calibrated_within_an_hour_of_a_change() -> None:
    """About 100,000 shows per slice and hour, of which 36,000 are clicked: an error of 0.4% by chance."""
    world, calibrator = World(1), Calibrator(Calibrate(by=("site",)), SCHEMA)
    now = world.live(calibrator, 3, 1e9)
    assert np.abs(world.copc(calibrator) - 1).max() < 0.02
    world.change()
    before = world.copc(calibrator)
    assert np.abs(before - 1).max() > 0.1
    world.live(calibrator, 1, now)
    assert np.abs(world.copc(calibrator) - 1).max() < 0.02
    everything, *slices = calibrator.results(top=SLICES)
    assert (everything["slice"], len(slices)) == ("all", SLICES)
    assert all(0 < one["error"] < 0.02 for one in slices)


def test_auc_is_unchanged_in_every_slice() -> None:
    world, calibrator = World(2), Calibrator(Calibrate(by=("site",)), SCHEMA)
    world.change()
    world.live(calibrator, 1, 1e9)
    batch, raw, clicks, _ = world.shows(100_000)
    served = calibrator.calibration.apply(raw, batch, (0,))
    for key in range(10, 10 + SLICES):
        aucs = []
        for scores in (raw, served):
            buckets, mine = Buckets(1 << 20), batch.keys == key
            buckets.update(np.ascontiguousarray(scores[mine]), np.ascontiguousarray(clicks[mine]))
            aucs.append(buckets.auc)
        assert aucs[0] == pytest.approx(aucs[1], abs=1e-4)


def test_few_shows_move_a_slice_little_and_none_not_at_all() -> None:
    calibrator = Calibrator(Calibrate(by=("site",)), SCHEMA)
    batch = Batch(np.zeros((3, 0), np.float32), np.array([10, 10, 11], np.uint64), 1)
    calibrator.learn(batch, np.full(3, 0.5, np.float32), np.array([1, 1, 0], np.float32), None, 1e9)
    served = calibrator.fit_if_due().apply(np.full(3, 0.5, np.float32), batch, (0,))
    assert (np.abs(served - 0.5) < 0.2).all()
    assert calibrator.fit_if_due() is calibrator.calibration


def test_scores_that_are_no_numbers_and_too_many_slices_are_left_out() -> None:
    calibrator = Calibrator(Calibrate(by=("site",)), SCHEMA)
    count = 3 * MOST_SLICES
    batch = Batch(np.zeros((count, 0), np.float32), np.arange(count, dtype=np.uint64), 1)
    scores = np.full(count, 0.3, np.float32)
    scores[::7] = np.nan
    calibrator.learn(batch, scores, (np.arange(count) % 2).astype(np.float32), None, 1e9)
    found = calibrator.fit_if_due()
    assert len(found.shifts or {}) <= MOST_SLICES
    assert np.isfinite(found.apply(np.full(count, 0.3, np.float32), batch, (0,))).all()


@pytest.mark.parametrize("by", [(), ("site",)])
@pytest.mark.parametrize("method", ["isotonic", "shift"])
def test_a_restored_calibrator_goes_on_the_same(by: tuple[str, ...], method: Any) -> None:
    world, first = World(3), Calibrator(Calibrate(by=by, method=method), SCHEMA)
    now = world.live(first, 1, 1e9, 50_000)
    again = Calibrator(Calibrate(by=by, method=method), SCHEMA)
    again.restore(json.loads(json.dumps(first.state())))
    for calibrator in (first, again):
        World(4).live(calibrator, 0.5, now, 50_000)
    assert first.calibration.to_bytes() == again.calibration.to_bytes()
    assert first.results() == again.results()


SETTINGS = {"online": {"dir": None, "pass": {"rows": 100}, "start_day": None, "end_day": None}}


def test_served_predicted_and_published_scores_are_the_same(stream: Any, tmp_path: Path) -> None:
    """By the server, by the run, by its checkpoint, by its log; after a restart, and after a rollback."""
    config = stream(
        days=1, **SETTINGS, publish={"calibrate": {"by": ["ad"]}, "guard": {"auc_drop": None, "copc": None}}
    )
    items = [(table(100, number), 20260101, number) for number in range(1, 13)]
    learn(config, source=items[:6], quiet=True)
    done = learn(config, source=items, quiet=True)
    probe = {name: values for name, values in table(40, 99).items() if name not in ("click", "time")}
    wanted = done.predict(probe)
    log = Log(tmp_path / "run/published")
    entry = log.newest()[-1]
    assert entry.calibration() is not None
    assert entry.manifest["version"] == 3
    done.learner.calibration = None
    assert np.abs(done.predict(probe) - wanted).max() > 1e-3  # it does something
    for model in ("run", "run/published"):
        assert load(tmp_path / model).predict(probe) == pytest.approx(wanted, abs=1e-6)
    rows = [{name: values[i] for name, values in probe.items()} for i in range(40)]
    with running(log.folder, tmp_path / "state") as served:
        scores = served.http.post("/v1/predict", json={"rows": rows}).json()["scores"]
        assert scores == pytest.approx(wanted.tolist(), abs=2e-6)
    verification.verify(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    slices = [line for line in lines if line["kind"] == "pass"][-1]["slices"]
    assert slices[0]["slice"] == "all"
    assert {"a2", "a4"} & {one["slice"] for one in slices}
    assert 'clickfleet_online_slice_copc{slice="all"}' in (tmp_path / "run/metrics.prom").read_text()
    earlier = log.kept()[1]
    back = rollback(log, earlier.sequence)
    assert back.calibration().to_bytes() == log.entry(earlier).calibration().to_bytes()  # type: ignore[union-attr]


def test_a_damaged_calibration_is_refused(stream: Any, tmp_path: Path) -> None:
    config = stream(days=1, **SETTINGS, publish={"calibrate": {}, "guard": {"auc_drop": None, "copc": None}})
    learn(config, source=[(table(100, 1), 20260101, 1)], quiet=True)
    entry = Log(tmp_path / "run/published").newest()[-1]
    (entry.path / "calibration.json").write_text('{"slots": [], "curve": [[0, 1]], "slices": {}}')
    from clickfleet.errors import CheckpointError
    from clickfleet.serve.predictor import open_version

    with pytest.raises(CheckpointError, match=r"calibration\.json is damaged"):
        open_version(entry)
    with pytest.raises(CheckpointError):
        entry.verify()
    shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"publish": {"calibrate": {"by": ["adv"]}}}, "unknown slot"),
        ({"publish": {"calibrate": {"by": ["site"]}}}, "several values"),
        ({"publish": {"calibrate": {}}, "online": {"validate": "none"}}, "scores made before training"),
        ({"publish": {"calibrate": {}}, "mode": {"name": "sync"}}, "cluster"),
        ({"publish": {"calibrate": {"method": "spline"}}}, "method"),
        ({"publish": {"calibrate": {}}, "train": {"loss": {"negatives_kept": 0.5}}}, "negatives_kept"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(stream: Any, online: Any, settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        online(stream(days=1, **settings))
