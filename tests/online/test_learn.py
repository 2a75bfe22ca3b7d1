"""Passes and days: what is trained, in which order things happen, what stands in the log."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from clickfleet.errors import CheckpointError, ConfigError, DataError
from clickfleet.online import session
from clickfleet.online.learn import learn
from clickfleet.store import run_folder
from clickfleet.store.published import Log
from clickfleet.training.model import load
from clickfleet.training.run import train
from streams import HEADER, SCHEMA, lines


def kinds(folder):
    return [line.kind for line in Log(folder / "run/published").lines()]


def metrics(folder, kind):
    found = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == kind]


def test_days_and_passes(stream, online, tmp_path):
    done = online(stream(days=2, splits=3))
    assert (done.passes, done.rows, done.day, done.held) == (6, 360, 20260102, 0)
    assert kinds(tmp_path) == ["base", "delta", "delta", "base"] + ["delta"] * 3 + ["base"]
    assert done.last_sequence == 8
    passes = metrics(tmp_path, "pass")
    assert [(p["day"], p["pass"], p["rows"]) for p in passes] == [(20260101 + i // 3, i % 3 + 1, 60) for i in range(6)]
    assert passes[-1]["auc"] > 0.53
    assert passes[0]["validation_auc"] == passes[0]["auc"]  # progressive: the forward pass that trains
    log = (tmp_path / "run/log.txt").read_text()
    assert "20260101 pass 1 trained: global AUC=" in log
    order = [
        log.index(text) for text in ("000003-delta", "20260101 ends: shrink", "000004-base", "20260102 pass 1 begins")
    ]
    assert order == sorted(order)


def test_a_finished_run_has_nothing_to_do_and_goes_on_with_a_later_last_day(stream, online):
    config = stream(days=3)
    assert online(config).passes == 4
    again = online(config)
    assert (again.passes, again.rows) == (4, 0)
    assert online(config, "online.end_day=20260103").passes == 6


def test_a_row_seen_today_is_new_at_shrink_and_base(stream, online, tmp_path):
    config = stream(days=1, table={"decay_rate": 1.0, "delete_after_unseen_days": 0, "delete_threshold": 0.0})
    done = online(config, "online.end_day=20260101")
    assert len(done.learner.table) > 0  # rows of today are not unseen
    base = Log(tmp_path / "run/published").newest()[0]
    assert base.manifest["rows"] > 0


def test_validate_pass_scores_the_whole_pass_first(stream, online, tmp_path):
    online(stream(), "online.validate=pass")
    first, *others = metrics(tmp_path, "pass")
    assert first["validation_auc"] == 0.5 or first["validation_predicted_ctr"] == pytest.approx(0.5, abs=0.05)
    assert all(line["validation_auc"] != line["auc"] for line in others)
    assert "before training: global AUC=" in (tmp_path / "run/log.txt").read_text()


def test_validate_none_judges_nothing(stream, online, tmp_path):
    online(stream(), "online.validate=none", "publish.guard={copc: [5.0, 6.0], min_rows: 0, warmup_rows: 0}")
    assert "validation_auc" not in metrics(tmp_path, "pass")[0]
    assert len(kinds(tmp_path)) == 6


def test_intervals_of_deltas_and_checkpoints(stream, online, tmp_path):
    config = stream(
        days=1, splits=4, online={"delta_every_passes": 3, "checkpoint_every_passes": 2, "end_day": 20260101}
    )
    online(config, "run.keep=9")
    assert kinds(tmp_path) == ["base", "delta", "base"]  # after pass 3, at the day's end, the day's base
    assert len(list((tmp_path / "run/checkpoints").glob("step-*"))) == 2  # after pass 2 and the day


def test_first_base(stream, online, tmp_path):
    online(stream(days=1, online={"end_day": 20260101, "first_base": True}))
    assert kinds(tmp_path) == ["base", "delta", "delta", "base"]
    assert Log(tmp_path / "run/published").entry(Log(tmp_path / "run/published").lines()[0]).manifest["rows"] == 0


def test_splits_make_passes_and_leftovers_are_not_read(stream, online, tmp_path):
    done = online(stream(days=1, splits=5, online={"splits_per_pass": 2, "end_day": 20260101}))
    assert (done.passes, done.rows) == (2, 240)
    assert "the last 1 folders of each day are too few for a pass" in (tmp_path / "run/log.txt").read_text()


def test_waits_for_a_done_file_and_says_so(stream, tmp_path):
    config = stream(days=1, online={"end_day": 20260101})
    done = tmp_path / "logs/20260101/1200/_DONE"
    done.unlink()
    results = []
    thread = threading.Thread(target=lambda: results.append(learn(config, quiet=True)))
    thread.start()
    log = tmp_path / "run/log.txt"
    while not (log.exists() and f"waiting for {done}" in log.read_text()):
        assert thread.is_alive()
        time.sleep(0.01)
    done.touch()
    thread.join()
    assert results[0].passes == 2


def test_a_signal_ends_the_waiting_and_the_day_goes_on_later(stream, online, tmp_path):
    config = stream(days=1, online={"end_day": 20260101})
    late = tmp_path / "logs/20260101/1200/_DONE"
    late.unlink()
    log = tmp_path / "run/log.txt"

    def stop():
        said = ("000001-base", f"waiting for {late}")  # the first pass is published; the second has to wait
        while not (log.exists() and all(text in log.read_text() for text in said)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    stopped = online(config)
    assert (stopped.signal, stopped.passes) == (signal.SIGTERM, 1)
    assert "ends: shrink" not in log.read_text()
    late.touch()
    assert online(config).passes == 2


def test_empty_and_unfinished_files(stream, online, tmp_path):
    config = stream(days=1, splits=3, online={"end_day": 20260101})
    (tmp_path / "logs/20260101/0800/part-0.csv").unlink()
    half = tmp_path / "logs/20260101/1600"
    (half / "part-1.csv.tmp").write_text("half a li")
    done = online(config)
    assert (done.passes, done.rows) == (3, 120)
    log = (tmp_path / "run/log.txt").read_text()
    assert "20260101 pass 2 has no rows" in log
    assert "part-1.csv.tmp looks unfinished" in log


def test_a_broken_file_stops_the_run_by_name_and_loses_nothing(stream, online, tmp_path):
    config = stream(days=2)
    broken = tmp_path / "logs/20260102/0000/part-0.csv"
    good = broken.read_text()
    broken.write_text(good + "1,not a time,x\n")
    with pytest.raises(DataError, match=r"20260102/0000/part-0\.csv:62"):
        online(config)
    broken.write_text(good)
    assert online(config).passes == 4
    assert "is listed again" in (tmp_path / "run/log.txt").read_text()
    assert kinds(tmp_path) == ["base", "delta", "base", "delta", "delta", "base"]


def test_files_that_changed_in_the_middle_of_a_pass_are_refused(stream, online, tmp_path, small_blocks):
    config = stream(days=1, rows=200, online={"end_day": 20260101}, run={"checkpoint_every_steps": 1})
    config["data"]["shuffle"] = 16  # so that the first rows are trained on before the last are read
    late = tmp_path / "logs/20260101/1200/part-0.csv"
    text = late.read_text()
    late.write_text(text + "1,not a time,x\n")
    with pytest.raises(DataError, match=r"1200/part-0\.csv:202"):
        online(config, "data.bad_lines=error")
    late.write_text(text)
    with pytest.raises(DataError, match="the files of 20260101 pass 2 changed after it was partly trained on"):
        online(config)
    late.write_text(text + "1,not a time,x\n")
    assert online(config, "data.bad_lines=skip").passes == 2


def test_one_trainer_per_run_folder(stream, online, tmp_path):
    from clickfleet.store.lock import Lock

    config = stream()
    with (
        Lock(tmp_path / "run/.lock", "trains"),
        pytest.raises(CheckpointError, match=f"process {os.getpid()} .* trains there"),
    ):
        online(config)
    online(config)


def test_training_on_files_takes_the_same_lock(stream, online, tmp_path):
    """Held by a process that is killed, it is free at once."""
    config = stream(days=1)
    files = {**config, "data": {**config["data"], "train": [str(tmp_path / "logs/20260101/0000")]}}
    del files["online"], files["publish"]
    program = (
        "import sys, time; from clickfleet.store.lock import Lock; from pathlib import Path\n"
        "with Lock(Path(sys.argv[1]), 'trains'): print('held', flush=True); time.sleep(600)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "run/.lock")], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    for refused in (lambda: train(files, quiet=True), lambda: online(config)):
        with pytest.raises(CheckpointError, match=rf"run is in use: process {other.pid} on .* trains there"):
            refused()
    other.kill()
    other.communicate()
    assert train(files, quiet=True).rows == 60
    with pytest.raises(ConfigError, match="holds a run of `train`"):
        online(config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("online.kafka={brokers: b, topic: t, rows_per_pass: 5}", "needs exactly one stream"),
        ("online.start_day=null", "online.start_day is missing"),
        ("online.start_day=20261301", "not a day written as YYYYMMDD"),
        ("online.end_day=20250101", "is before"),
        ("online.split_interval=1500ms", "whole seconds"),
        ("online.splits_per_pass=9", "a day has only 2 splits"),
        ("online.timezone=Mars/Olympus", "unknown time zone"),
        ("data.test=somewhere", "data.test is for training on files"),
    ],
)
def test_settings_that_make_no_sense_are_refused(stream, online, override, message):
    with pytest.raises(ConfigError, match=message):
        online(stream(days=1, rows=2), override)


class Stream:
    """A user's own: rows in memory."""

    def __init__(self, passes):
        self.passes, self.asked = passes, []

    def __iter__(self):
        for day, number in self.passes:
            self.asked.append((day, number))
            columns = [line.split(",") for line in lines(40, number)]
            rows = [dict(zip(HEADER.split(","), line, strict=True)) for line in columns]
            yield (
                [
                    {
                        **row,
                        "click": int(row["click"]),
                        "time": int(row["time"]),
                        "price": float(row["price"]),
                        "site": [row["site"]],
                    }
                    for row in rows
                ],
                day,
                number,
            )


def test_any_object_that_yields_data_day_and_pass(stream, online, tmp_path):
    config = stream(days=1, rows=2, online={"dir": None, "end_day": None})
    own = Stream([(20260101, 1), (20260101, 2), (20260103, 1)])
    done = online(config, source=own, schema=SCHEMA)
    assert (done.passes, done.rows) == (3, 120)
    assert kinds(tmp_path) == ["base", "delta", "base", "delta", "base"]
    more = Stream([*own.passes, (20260103, 2)])
    with pytest.raises(DataError, match="after 20260103 pass 2"):
        online(config, source=Stream([*more.passes, (20260103, 1)]), schema=SCHEMA)
    assert online(config, source=more, schema=SCHEMA).passes == 4


def test_files_of_a_users_stream(stream, online, tmp_path):
    config = stream(days=2, online={"dir": None, "end_day": 20260101})
    folders = [(str(tmp_path / f"logs/2026010{day}/0000"), 20260100 + day, 1) for day in (1, 2)]
    done = online(config, source=folders)
    assert (done.passes, done.rows) == (1, 60)


def test_event_times_are_followed_to_the_entry(stream, online, tmp_path):
    online(stream(days=1, online={"end_day": 20260101}), "publish.freshness_slo=1s")
    entry = metrics(tmp_path, "published")[0]
    now = time.time()
    assert entry["event_to_published_p99"] >= entry["event_to_published_p50"] >= entry["event_to_trained_p50"] > 0
    assert now - entry["event_to_published_p50"] == pytest.approx(1767225600 + 1800, abs=600)
    assert "freshness is missed" in (tmp_path / "run/log.txt").read_text()


def test_the_report_and_the_gauges_tell_how_it_went(stream, online, tmp_path):
    online(stream(days=1, online={"end_day": 20260101}), "publish.freshness_slo=1s", "run.report=true")
    page = (tmp_path / "run/report.html").read_text()
    assert all(text in page for text in ("Passes", "Freshness", "AUC of passes"))
    text = (tmp_path / "run/metrics.prom").read_text()
    found = {
        f"{sample.name}{''.join(sample.labels.values())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    of = "clickfleet_online_"
    assert (found[of + "passes_total"], found[of + "rows_total"], found[of + "sequence"]) == (2, 120, 3)
    assert (found[of + "entries_totalbase"], found[of + "entries_totaldelta"]) == (2, 1)
    assert (found[of + "held"], found[of + "freshness_missed"], found[of + "freshness_objective_seconds"]) == (0, 1, 1)
    assert found[of + "event_to_published_seconds0.99"] >= found[of + "event_to_trained_seconds0.5"] > 0
    assert found[of + "newest_event_timestamp_seconds"] == 1767225600 + 43200 + 3540
    last = metrics(tmp_path, "pass")[-1]
    assert found[of + "auc"] == last["validation_auc"]


def test_an_alarm_is_a_gauge_too(stream, online, tmp_path):
    online(
        stream(days=1, online={"end_day": 20260101}), "publish.guard={copc: [5.0, 6.0], min_rows: 0, warmup_rows: 0}"
    )
    text = (tmp_path / "run/metrics.prom").read_text()
    assert "clickfleet_online_held 4.0\n" in text
    assert "clickfleet_online_alarms_total 4.0\n" in text
    assert "clickfleet_online_sequence" not in text


def test_memory_limit_holds_while_ids_drift(stream, online, tmp_path):
    config = stream(days=6, rows=200, table={"memory_limit": "5MB"}, online={"end_day": 20260106})
    done = online(config)
    assert done.learner.table.stats()["peak_bytes"] <= 5_000_000
    assert np.isfinite(done.last["auc"])


def test_frequent_values_are_kept_and_published_with_bases(stream, online, tmp_path, monkeypatch):
    config = stream(days=2)
    done = online(config, "online.end_day=20260101")
    names = done.names
    assert any(text.startswith("u") for text in names.values["user"])
    log = Log(tmp_path / "run/published")
    for line in log.lines():
        assert ("names" in log.entry(line).info) == (line.kind == "base")
    assert done.total_rows == done.rows
    monkeypatch.setattr(session, "NAMES_EVERY_S", 0.0)
    (tmp_path / "run/names.json").write_text("damaged")  # a run goes on without it
    again = online(config, "online.end_day=20260102")
    assert (again.rows, again.total_rows) == (done.rows, 2 * done.rows)
    assert any(text.startswith("u") for text in load(tmp_path / "run").names.values["user"])
    newest = [line for line in log.lines() if line.kind == "base"][-1]
    published = run_folder.read_names(shutil.copytree(log.folder / newest.name, tmp_path / "alone"), done.schema)
    assert published.values["user"]
