"""The guard over windows of rows: small passes, cold starts, chance, labels that are flipped and come right again."""

import json
from dataclasses import replace

import numpy as np
import pytest

from clickfleet.config import sections
from clickfleet.data.schema import Label, write_schema
from clickfleet.errors import ConfigError
from clickfleet.online.publisher import PublishGuard, Window, check_guard, pack, unpack
from clickfleet.training.metrics import Buckets, Metrics
from streams import HEADER, SCHEMA, lines, settings

ROWS = 500


def scored(seed: int, flipped: bool = False, ctr: float = 0.2, rows: int = ROWS, signal: float = 1.0) -> Buckets:
    """A pass with labels drawn from its scores: as good and as calibrated as can be, unless they are flipped."""
    rng = np.random.default_rng(seed)
    logits = np.log(ctr / (1 - ctr)) + rng.normal(0, signal, rows)
    scores = 1 / (1 + np.exp(-logits))
    labels = rng.random(rows) < scores
    seen = Buckets()
    seen.update(scores.astype(np.float32), (labels ^ flipped).astype(np.float32))
    return seen


def run(judge: PublishGuard, passes: list[Buckets]) -> list[list[str]]:
    """Judges pass after pass, as a run does."""
    out = []
    for seen in passes:
        results = [{**seen.results(), "window": judge.add(seen)}]
        out.append(judge.reasons(results, 0, 1))
        if not out[-1]:
            judge.released(results)
    return out


@pytest.mark.parametrize("ctr", [0.02, 0.2])
def test_a_good_stream_of_small_passes_never_alarms(ctr):
    for seed in range(10):
        judge = PublishGuard(sections.Guard())
        found = run(judge, [scored(1000 * seed + n, ctr=ctr) for n in range(100)])
        assert not any(found), (seed, found)


def test_flipped_labels_are_caught_within_one_window_whatever_the_size_of_passes():
    for rows in (50, 500, 3000):
        guard = sections.Guard(min_rows=2000, copc=None)
        judge = PublishGuard(guard)
        good = run(judge, [scored(n, rows=rows) for n in range(20_000 // rows)])
        bad = run(judge, [scored(n, rows=rows, flipped=True) for n in range(10_000 // rows)])
        assert not any(good)
        first = next(n for n, reasons in enumerate(bad) if reasons)
        assert first * rows < guard.min_rows
        assert all(bad[first:])
        again = run(judge, [scored(n, rows=rows) for n in range(10_000 // rows)])
        clear = next(n for n, reasons in enumerate(again) if not reasons)
        assert clear * rows <= guard.min_rows + rows
        assert not any(again[clear:])


def test_a_drop_beyond_chance_is_seen_in_large_windows_only():
    small, large = (PublishGuard(sections.Guard(warmup_rows=0, min_rows=rows)) for rows in (500, 50_000))
    weaker = [[scored(n, signal=signal) for n in range(200)] for signal in (1.0, 0.8)]  # AUC falls by about 0.04
    assert not any(run(small, weaker[0] + weaker[1]))
    found = run(large, weaker[0] + weaker[1])
    assert not any(found[:200])
    assert found[-1][0].startswith("AUC ")


def test_nothing_is_judged_before_the_model_is_warm():
    cold = [scored(n, flipped=True) for n in range(6)]
    assert not any(run(PublishGuard(sections.Guard(warmup_rows=3000)), cold))
    assert any(run(PublishGuard(sections.Guard(warmup_rows=0)), cold))
    assert any(run(PublishGuard(sections.Guard(warmup_rows=3000), warm=True), cold))  # it began as a trained model


def test_the_state_goes_through_json_exactly():
    one, other = PublishGuard(sections.Guard(min_rows=3000)), PublishGuard(sections.Guard(min_rows=3000))
    run(one, [scored(n) for n in range(30)])
    other.restore(one.aucs, json.loads(json.dumps(one.state())))
    later = [scored(n, flipped=n > 40) for n in range(30, 60)]
    assert run(one, later) == run(other, later)
    assert one.state() == other.state()


def test_a_state_of_an_earlier_version_is_taken_up():
    judge = PublishGuard(sections.Guard())
    judge.restore([0.9, 0.9], None)
    assert run(judge, [scored(n) for n in range(2)])[-1][0].startswith("AUC ")  # of 0.7, at once


def test_a_window_stays_small_however_small_the_passes_are():
    window = Window(1000, 4096)
    for n in range(3000):
        window.add(scored(n, rows=1))
    assert 1000 <= window.rows < 1000 + 1000 // 8
    assert len(window.state()) <= 10
    restored = unpack(pack(scored(1)), 4096)
    assert restored.results() == scored(1).results()


def passes(folder, plan):
    """Files of 500 rows each; where the plan says so, with labels flipped."""
    for number, flipped in enumerate(plan, start=1):
        path = folder / f"pass-{number}.csv"
        rows = lines(ROWS, 7 * number, users=10)
        if flipped:
            rows = [f"{1 - int(row[0])}{row[1:]}" for row in rows]
        path.write_text("\n".join([HEADER, *rows]) + "\n")
        yield str(path), 20260101, number


def recorded(folder, kind):
    return [
        line
        for line in map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
        if line["kind"] == kind
    ]


def test_flipped_rows_in_small_passes_are_withheld_and_the_alarm_clears(stream, online, tmp_path):
    guard = {"auc_drop": 0.02, "copc": [0.8, 1.25], "min_rows": 1000, "warmup_rows": 2000}
    config = stream(
        days=1,
        rows=2,
        online={"dir": None, "end_day": None, "checkpoint_every_passes": 99},
        publish={"guard": guard, "done_files": False},
    )
    plan = [False] * 8 + [True] * 3 + [False] * 10
    done = online(config, source=list(passes(tmp_path, plan)))
    held = [line["step"] for line in recorded(tmp_path, "alarm")]
    ends = [line["step"] for line in recorded(tmp_path, "pass")]
    assert min(held) == ends[8]  # the first bad pass, and none of the cold start
    assert set(ends[8:11]) <= set(held)
    assert max(held) < ends[-1]
    assert done.held == 0
    last = recorded(tmp_path, "pass")[-1]
    assert (last["guard_rows"], last["guard_warmup_rows"]) == (1000, 0)
    text = (tmp_path / "run/metrics.prom").read_text()
    assert "clickfleet_online_guard_rows 1000.0\n" in text
    assert f"clickfleet_online_guard_auc {last['guard_auc']}\n" in text


def test_validate_pass_fills_the_window_too(stream, online, tmp_path):
    config = stream(days=1, rows=300, splits=4, online={"end_day": 20260101, "validate": "pass"})
    online(config, "publish.guard={min_rows: 500, warmup_rows: 0}")
    assert [line["guard_rows"] for line in recorded(tmp_path, "pass")] == [300, 600, 600, 600]


TWO = replace(SCHEMA, labels=(Label("click"), Label("buy", given="click")))
"""The same data with purchases."""


def test_a_window_of_another_metric_is_forgotten():
    judge = PublishGuard(sections.Guard())
    run(judge, [scored(n) for n in range(40)])
    assert judge.aucs
    same, other = PublishGuard(sections.Guard()), PublishGuard(sections.Guard(monitor="buy.auc"))
    for guard in (same, other):
        guard.restore(list(judge.aucs), judge.state())
    assert (same.aucs, other.aucs, other.window.rows) == (judge.aucs, [], 0)


@pytest.mark.parametrize(
    ("monitor", "message"),
    [
        ("by.auc", "unknown label 'by'"),
        ("buy.logloss", "judges an AUC"),
        ("gauc", "needs a group column"),
        ("click.auc_given", "has no given"),
        ("aux", "unknown metric 'aux' in publish.guard.monitor"),
    ],
)
def test_the_guard_names_a_metric_of_a_label(monitor, message):
    with pytest.raises(ConfigError, match=message):
        check_guard(sections.Guard(monitor=monitor), TWO)
    for good in ("auc", "click.auc", "buy.auc", "buy.auc_given"):
        check_guard(sections.Guard(monitor=good), TWO)


def test_scores_of_any_label_that_are_not_finite_are_held_back():
    metrics = Metrics(tasks=TWO.tasks)
    scores = np.full((100, 2), 0.5, np.float32)
    scores[:3, 1] = np.nan
    metrics.update(scores, np.ones((100, 2), np.float32))
    (reason,) = PublishGuard(sections.Guard()).reasons([metrics.results()], 0, 1)
    assert reason == "3 of 100 scores of buy are not finite"


@pytest.mark.parametrize("validate", ["progressive", "pass"])
def test_purchases_that_turn_are_withheld_though_clicks_are_as_before(online, tmp_path, validate):
    """Users with an even number buy what they click on; in two passes, the others do."""
    guard = {"monitor": "buy.auc_given", "auc_drop": 0.02, "copc": None, "min_rows": 150, "warmup_rows": 300}
    config = settings(
        tmp_path,
        online={"dir": None, "end_day": None, "checkpoint_every_passes": 99, "validate": validate},
        publish={"guard": guard, "done_files": False},
    )
    write_schema(TWO, tmp_path / "schema.yaml")

    def files():
        for number in range(1, 13):
            rows = []
            for row in lines(ROWS, 7 * number, users=10):
                even = int(row.split(",")[3][1:]) % 2 == 0
                rows.append(f"{row},{int(even != (number in (8, 9))) if row[0] == '1' else ''}")
            path = tmp_path / f"pass-{number}.csv"
            path.write_text("\n".join([f"{HEADER},buy", *rows]) + "\n")
            yield str(path), 20260101, number

    online(config, source=list(files()))
    held, ends = recorded(tmp_path, "alarm"), [line["step"] for line in recorded(tmp_path, "pass")]
    assert min(line["step"] for line in held) == ends[7]
    assert all("AUC of buy given" in reason for line in held for reason in line["reasons"])
    assert recorded(tmp_path, "pass")[-1]["guard_rows"] < ROWS  # only rows with a click
