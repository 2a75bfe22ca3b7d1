from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn import metrics as sk

from clickfleet.data.schema import Label
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.training.metrics import Buckets, Groups, MetricResults, Metrics, Slices, Sliding

Floats = NDArray[np.float32]


def rows(n: int, seed: int = 0, grid: int | None = 4096) -> tuple[Floats, Floats, Floats]:
    """Scores (on the buckets' own grid, so that AUC is exact), labels and weights."""
    rng = np.random.default_rng(seed)
    scores = rng.random(n, dtype=np.float32)
    if grid:
        scores = np.floor(scores * grid).astype(np.float32) / np.float32(grid)
    labels = (rng.random(n) < scores).astype(np.float32)
    return scores, labels, rng.choice(np.array([0.25, 1, 2, 3], np.float32), n)


def filled(*batches: tuple[Floats, ...]) -> Buckets:
    buckets = Buckets()
    for batch in batches:
        buckets.update(*batch)
    return buckets


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n", [3, 8, 1000, 5003])
def test_everything_agrees_with_scikit_learn(n: int, weighted: bool) -> None:
    scores, labels, weights = rows(n, seed=n)
    labels[:2] = 0, 1
    w = weights if weighted else None
    got = filled((scores, labels, w) if weighted else (scores, labels)).results()  # type: ignore[arg-type]
    clipped = np.clip(scores.astype(np.float64), 2.0**-23, 1 - 2.0**-23)
    mean = np.average(labels, weights=w)
    loss = sk.log_loss(labels, clipped, sample_weight=w, labels=[0, 1])
    expected = {
        "rows": n,
        "invalid": 0,
        "auc": sk.roc_auc_score(labels, scores, sample_weight=w),
        "logloss": loss,
        "ne": loss / sk.log_loss(labels, np.full(n, mean), sample_weight=w, labels=[0, 1]),
        "accuracy": sk.accuracy_score(labels, scores >= 0.5, sample_weight=w),
        "calibration": mean / np.average(scores.astype(float), weights=w),
        "actual_ctr": mean,
        "predicted_ctr": np.average(scores.astype(float), weights=w),
        "mae": sk.mean_absolute_error(labels, scores.astype(float), sample_weight=w),
        "rmse": sk.root_mean_squared_error(labels, scores.astype(float), sample_weight=w),
    }
    del got["bucket_error"]
    assert got == pytest.approx(expected, rel=1e-6)


def test_scores_between_the_buckets_cost_little() -> None:
    scores, labels, _ = rows(50_000, grid=None)
    assert filled((scores, labels)).auc == pytest.approx(sk.roc_auc_score(labels, scores), abs=1e-4)


def test_the_worked_example() -> None:
    """pos = [1, 0, 2, 3], neg = [4, 1, 1, 0] over four buckets."""
    buckets = Buckets(thresholds=3)
    at = np.array([0.0, 0.34, 0.67, 1.0], np.float32)
    for label, counts in ((1, [1, 0, 2, 3]), (0, [4, 1, 1, 0])):
        scores = np.repeat(at, counts)
        buckets.update(scores, np.full(len(scores), label, np.float32))
    assert buckets.auc == pytest.approx(0.861111, abs=1e-6)
    pos, neg = buckets.counts()
    assert (pos.tolist(), neg.tolist()) == ([1, 0, 2, 3], [4, 1, 1, 0])


def bucket_error(pos: list[float], neg: list[float]) -> float:
    """The definition, step by step."""
    start, shown, expected, clicks, error, counted = -1.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(len(pos)):
        ctr = i / len(pos)
        if abs(ctr - start) > 0.01:
            start, shown, expected, clicks = ctr, 0.0, 0.0, 0.0
        shown, expected, clicks = shown + pos[i] + neg[i], expected + ctr * (pos[i] + neg[i]), clicks + pos[i]
        if not shown or not expected:
            continue
        adjusted = expected / shown
        if ((1 - adjusted) / (adjusted * shown)) ** 0.5 < 0.05:
            error, counted, start = error + abs(clicks / shown / adjusted - 1) * shown, counted + shown, -1.0
    return error / counted if counted else 0.0


def test_bucket_error_follows_its_definition() -> None:
    scores, labels, _ = rows(200_000, grid=None)
    buckets = filled((scores, labels))
    pos, neg = buckets.counts()
    assert buckets.results()["bucket_error"] == pytest.approx(bucket_error(pos.tolist(), neg.tolist()))
    assert buckets.results()["bucket_error"] < 0.1  # type: ignore[operator]
    skewed = filled((scores**2, labels))
    assert skewed.results()["bucket_error"] > 0.3  # type: ignore[operator]


@pytest.mark.parametrize(("score", "ctr"), [(0.0001, 0.001), (0.005, 0.05), (0.05, 0.5), (0.5, 0.05)])
def test_a_tenfold_miscalibration_is_an_error_or_not_known_yet(score: float, ctr: float) -> None:
    found = []
    for n in (100, 10_000, 10_000_000):
        clicks = np.array([n * ctr, n - n * ctr], np.float32)
        buckets = Buckets()
        buckets.update(np.full(2, score, np.float32), np.array([1, 0], np.float32), clicks)
        found.append(buckets.results()["bucket_error"])
    assert found[0] is None or score == 0.5
    wrong = abs(ctr / score - 1)
    assert all(error is None or error == pytest.approx(wrong, rel=0.1) for error in found)
    assert found[-1] is not None


def test_a_few_good_groups_do_not_hide_many_bad_rows() -> None:
    scores, labels = np.array([0.0001, 0.0001, 0.5, 0.5], np.float32), np.array([1, 0, 1, 0], np.float32)
    buckets = Buckets()
    buckets.update(scores, labels, np.array([10_000, 9_990_000, 500, 500], np.float32))
    assert buckets.results()["bucket_error"] == pytest.approx(9, rel=0.1)
    too_few = Buckets()
    too_few.update(
        np.array([0.001, 0.001, 1.0], np.float32),
        np.array([1, 0, 1], np.float32),
        np.array([200, 19_800, 5], np.float32),
    )
    assert too_few.results()["calibration"] > 8  # type: ignore[operator]
    assert too_few.results()["bucket_error"] is None


def test_scores_that_are_no_probability_are_counted_and_left_out() -> None:
    bad = np.array([np.nan, -0.1, 1.1, np.inf, -np.inf] * 3, np.float32)
    scores, labels, _ = rows(40)
    mixed, both = np.concatenate([scores, bad]), np.concatenate([labels, np.ones(15, np.float32)])
    order = np.random.default_rng(1).permutation(55)
    got, clean = filled((mixed[order], both[order])).results(), filled((scores, labels)).results()
    assert got.pop("invalid") == 15
    assert clean.pop("invalid") == 0
    assert got == pytest.approx(clean)


def test_perfect_and_hopeless_scores_stay_finite() -> None:
    scores, labels = np.array([0, 1, 1, 0], np.float32), np.array([0, 1, 0, 1], np.float32)
    assert filled((scores, labels)).results()["logloss"] == pytest.approx(-np.log(2.0**-23) / 2, rel=1e-6)


def test_without_rows_or_with_one_class() -> None:
    empty = Buckets().results()
    assert (empty["rows"], empty["auc"], empty["logloss"], empty["calibration"]) == (0, 0.5, None, None)
    ones = filled((np.full(3, 0.5, np.float32), np.ones(3, np.float32))).results()
    assert (ones["auc"], ones["ne"], ones["calibration"]) == (0.5, None, 2.0)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 100))
def test_parts_merged_equal_the_whole(sizes: list[int], seed: int) -> None:
    scores, labels, weights = rows(sum(sizes), seed)
    merged, start = Buckets(), 0
    for size in sizes:
        part = slice(start, start + size)
        merged.merge(filled((scores[part], labels[part], weights[part])))
        start += size
    assert merged.results() == pytest.approx(filled((scores, labels, weights)).results())


def test_sliding_auc_forgets_all_but_the_last_batches() -> None:
    sliding = Sliding(size=3)
    batches = [rows(100, seed)[:2] for seed in range(7)]
    for n, batch in enumerate(batches, start=1):
        sliding.update(*batch)
        scores, labels = (np.concatenate(c) for c in zip(*batches[max(0, n - 3) : n], strict=True))
        assert sliding.auc == pytest.approx(sk.roc_auc_score(labels, scores))


def gauc(groups: NDArray[np.uint64], scores: Floats, labels: Floats) -> float:
    total = weight = 0.0
    for group in np.unique(groups):
        mine = groups == group
        if 0 < labels[mine].sum() < mine.sum():
            total += sk.roc_auc_score(labels[mine], scores[mine]) * mine.sum()
            weight += float(mine.sum())
    return total / weight


def test_gauc_is_the_mean_auc_of_the_groups() -> None:
    scores, labels, _ = rows(3000, grid=50)
    users = np.random.default_rng(2).integers(0, 200, 3000).astype(np.uint64)
    whole, parts = Groups(), [Groups(), Groups()]
    whole.update(users, scores, labels)
    assert whole.gauc == pytest.approx(gauc(users, scores, labels))
    for part, half in zip(parts, (slice(0, 1000), slice(1000, None)), strict=True):
        part.update(users[half], scores[half], labels[half])
    parts[0].merge(parts[1])
    assert parts[0].gauc == pytest.approx(whole.gauc)
    assert Groups().gauc == 0.5


def test_past_its_limit_gauc_keeps_whole_groups_and_workers_keep_the_same() -> None:
    scores, labels, _ = rows(6_000, grid=None)
    users = np.random.default_rng(2).integers(0, 400, 6_000).astype(np.uint64)
    bounded, other = Groups(limit=1500), Groups(limit=1500)
    bounded.update(users[:3_000], scores[:3_000], labels[:3_000])
    other.update(users[3_000:], scores[3_000:], labels[3_000:])
    bounded.merge(other)
    kept = bounded.state()["groups"]
    assert 0 < len(kept) <= 1500
    mine = np.isin(users, kept)
    assert mine.sum() == len(kept)  # a group is kept with all its rows or not at all
    assert bounded.gauc == pytest.approx(gauc(users[mine], scores[mine], labels[mine]))
    assert bounded.gauc == pytest.approx(gauc(users, scores, labels), abs=0.05)


def test_slices_have_the_metrics_of_their_rows() -> None:
    scores, labels, weights = rows(2000)
    column = np.random.default_rng(3).choice(np.array([5, 7, 2**63 + 1], np.uint64), 2000)
    slices = Slices(thresholds=4096)
    slices.update(column, scores, labels, weights)
    results = slices.results()
    assert set(results) == {5, 7, 2**63 + 1}
    for value, got in results.items():
        mine = column == np.uint64(value)  # type: ignore[arg-type]
        assert got == pytest.approx(filled((scores[mine], labels[mine], weights[mine])).results())


def test_values_beyond_the_limit_are_summed_together() -> None:
    scores, labels, _ = rows(100)
    slices = Slices(limit=2)
    slices.update(np.arange(100, dtype=np.uint64) % 4, scores, labels)
    results = slices.results()
    assert list(results) == [0, 1, None]
    assert [r["rows"] for r in results.values()] == [25, 25, 50]
    other = Slices(limit=2)
    other.update(np.full(100, 3, np.uint64), scores, labels)
    slices.merge(other)
    assert [r["rows"] for r in slices.results().values()] == [25, 25, 150]


def all_metrics() -> Metrics:
    return Metrics(sliding=2, groups=True, slices=True)


def feed(metrics: Metrics, seed: int) -> None:
    scores, labels, weights = rows(50, seed)
    keys = np.arange(50, dtype=np.uint64) % 5
    metrics.update(scores, labels, weights, groups=keys, slices=keys)


def test_a_restored_state_goes_on_as_if_nothing_had_happened() -> None:
    metrics, resumed = all_metrics(), all_metrics()
    for seed in range(3):
        feed(metrics, seed)
    resumed.restore({key: array.copy() for key, array in metrics.state().items()})
    for seed in range(3, 6):
        feed(metrics, seed)
        feed(resumed, seed)
    assert metrics.results() == resumed.results()
    assert metrics.slices is not None
    assert resumed.slices is not None
    assert metrics.slices.results() == resumed.slices.results()


def test_reset_forgets_the_epoch_and_keeps_the_window() -> None:
    metrics = all_metrics()
    feed(metrics, 0)
    before = metrics.results()["sliding_auc"]
    metrics.reset()
    assert (metrics.results()["rows"], metrics.results()["gauc"]) == (0, 0.5)
    assert metrics.results()["sliding_auc"] == before


def test_threads_may_share_one() -> None:
    buckets, batch = Buckets(), rows(1000)
    threads = [threading.Thread(target=lambda: [buckets.update(*batch) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert buckets.results()["rows"] == 200_000
    assert buckets.auc == pytest.approx(filled(batch).auc)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Buckets(0), ConfigError, "at least 1"),
        (lambda: Sliding(0), ConfigError, "sliding must be at least 1"),
        (lambda: Buckets(10).merge(Buckets(20)), ConfigError, "cannot merge"),
        (lambda: Buckets(10).restore(Buckets(20).state()), CheckpointError, "expected 31"),
        (lambda: Slices().restore(Slices(thresholds=5).state()), CheckpointError, "saved slices"),
        (lambda: Metrics(sliding=2).restore(Metrics().state()), CheckpointError, "no sliding"),
        (lambda: Metrics(groups=True).update(*rows(3)), ConfigError, "need a key per row"),
        (lambda: Buckets().update(rows(3)[0], rows(4)[1]), ValueError, "labels has 4 values, expected 3"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_the_handbook_defines_every_metric() -> None:
    """The names in the tables of docs/metrics.md are those that an evaluation returns."""
    text = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
    defined = set(re.findall(r"^\| `(\w+)` \|", text.partition("## While training")[0], re.MULTILINE))
    assert defined == set(MetricResults.__annotations__)
    metrics = Metrics(sliding=2, groups=True, tasks=(Label("click"), Label("buy", given="click")))
    scores, labels = np.array([[0.2] * 2, [0.9] * 2], np.float32), np.array([[0, 0], [1, 1]], np.float32)
    metrics.update(scores, labels, groups=np.zeros(2, np.uint64))
    assert set(metrics.results()) == defined


def test_the_handbook_says_when_a_metric_is_null() -> None:
    empty = Metrics(groups=True).results()
    assert {name for name, value in empty.items() if value is None} == {
        "logloss", "ne", "accuracy", "calibration", "bucket_error", "actual_ctr", "predicted_ctr", "mae", "rmse",
    }  # fmt: skip
    assert (empty["auc"], empty["gauc"]) == (0.5, 0.5)
    one_class = Buckets()
    one_class.update(np.array([0.1, 0.2], np.float32), np.zeros(2, np.float32))
    assert one_class.results()["ne"] is None
    assert one_class.results()["auc"] == 0.5
    nothing = Buckets()
    nothing.update(np.zeros(2, np.float32), np.array([0, 1], np.float32))
    assert nothing.results()["calibration"] == 0.0


def test_metrics_are_what_their_formulas_say() -> None:
    rng = np.random.default_rng(5)
    p = rng.uniform(0.02, 0.98, 500).astype(np.float32)
    y, w = (rng.random(500) < p).astype(np.float32), rng.uniform(0.5, 2, 500).astype(np.float32)
    buckets = Buckets()
    buckets.update(p, y, w)
    found, whole = buckets.results(), w.sum(dtype=float)
    p, y, w = p.astype(float), y.astype(float), w.astype(float)
    loss = -(w * (y * np.log(p) + (1 - y) * np.log(1 - p))).sum() / whole
    ctr = (w * y).sum() / whole
    wanted = {
        "logloss": loss,
        "ne": loss / -(ctr * np.log(ctr) + (1 - ctr) * np.log(1 - ctr)),
        "calibration": (w * y).sum() / (w * p).sum(),
        "actual_ctr": ctr,
        "predicted_ctr": (w * p).sum() / whole,
        "mae": (w * abs(y - p)).sum() / whole,
        "rmse": np.sqrt((w * (y - p) ** 2).sum() / whole),
        "accuracy": (w * ((p >= 0.5) == (y == 1))).sum() / whole,
    }
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)  # type: ignore[literal-required]
