"""A program of one's own in every role: what each worker gives, what all get, what is on disk afterwards."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

import clickfleet
from clickfleet.cli import build, frame
from fleet import ROWS, SLOTS, TEST_ROWS, shows
from soak import in_soak, only_in_soak

pytestmark = pytest.mark.xdist_group("own clusters")


def cli(words: list[str]) -> int:
    return frame.run(build(), words)


PROGRAM = """
import json, os, sys
import clickfleet
from clickfleet.data.files import expand

config, train, test = sys.argv[1:4]
with clickfleet.join(config, quiet=True) as job:
    files = expand(train)
    done = [job.train(job.split_files(half)) for half in (files[:3], files[3:])]
    found = {
        "worker": job.worker_index, "of": job.worker_num, "first": job.is_first_worker,
        "sum": job.all_reduce(job.worker_index + 1), "max": job.all_reduce([1.0, job.worker_index], "max").tolist(),
        "rows": [each["rows"] for each in done], "removed": job.shrink(),
        "base": job.save("base"),
        "again": job.train(job.split_files(files))["rows"],
        "delta": job.save("delta"),
        "test": job.evaluate(test)["rows"],
    }
    import ray
    above = os.path.dirname(ray._private.worker._global_node.get_temp_dir_path())  # Ray opens its own to everybody
    found["private"] = (os.stat(above).st_mode & 0o777, os.stat(above).st_uid)
    job.barrier()
    print(json.dumps(found))
"""


@in_soak
@pytest.mark.timeout(900)
def test_a_program_runs_in_every_role(config: dict[str, Any], tmp_path: Path) -> None:
    run, program, path = Path(config["run"]["dir"]), tmp_path / "program.py", tmp_path / "config.yaml"
    program.write_text(PROGRAM)
    path.write_text(yaml.safe_dump({**config, "mode": {"name": "half_async"}}))
    files = [config["data"]["train"][0], config["data"]["test"][0]]
    log = str(tmp_path / "log")
    assert (
        cli(["launch", "--server_num", "2", "--worker_num", "2", "--log_dir", log, str(program), str(path), *files])
        == 0
    )
    said = [json.loads((tmp_path / "log" / f"workerlog.{i}").read_text().splitlines()[-1]) for i in range(2)]
    assert [(one["worker"], one["of"], one["first"]) for one in said] == [(0, 2, True), (1, 2, False)]
    for one in said:
        assert (one["sum"], one["max"]) == (3, [1.0, 1.0])
        assert (one["rows"], one["again"], one["test"]) == ([ROWS * 3 // 4, ROWS // 4], ROWS, TEST_ROWS)
        assert one["private"] == [0o700, os.getuid()]
        assert (Path(one["base"]).name, Path(one["delta"]).name) == ("000001-base", "000002-delta")
    assert shows(run) == 2 * ROWS * SLOTS
    published = clickfleet.load(run / "published").predict(files[1])
    assert published.tolist() == pytest.approx(clickfleet.load(run).predict(files[1]).tolist(), abs=1e-6)


BY_BATCH = """
import json, sys
import numpy as np
import clickfleet
from clickfleet.data.schema import Schema, Slot

def rows(count, seed):
    draw = np.random.default_rng(seed)
    return {"label": draw.integers(0, 2, count), "city": draw.integers(0, 50, count)}

with clickfleet.join(sys.argv[1], schema=Schema(slots=(Slot("city"),)), quiet=True) as job:
    mine = 7 if job.is_first_worker else 3
    with job.epoch() as epoch:
        losses = [epoch.step(rows(20, i)) for i in range(mine)]
        seen = epoch.metrics()["rows"]
    found = {"losses": len(losses), "seen": seen, "steps": epoch.steps, "rows": epoch.results["rows"]}
    found["step"] = epoch.results["step"]
    found["fed"] = job.train(rows(100 * mine, job.worker_index))["rows"]
    found["none"] = job.train([] if job.is_first_worker else rows(30, 1))["rows"]
    found["test"] = job.evaluate(rows(10 * mine, 5))["rows"]
    print(json.dumps(found))
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["sync", only_in_soak("half_async"), only_in_soak("async"), only_in_soak("geo")])
def test_workers_feed_their_own_rows_and_may_have_unequal_numbers_of_batches(
    config: dict[str, Any], tmp_path: Path, mode: str
) -> None:
    run, program, path = Path(config["run"]["dir"]), tmp_path / "program.py", tmp_path / "config.yaml"
    program.write_text(BY_BATCH)
    path.write_text(yaml.safe_dump({**config, "data": {"batch_size": 20}, "mode": {"name": mode}}))
    log = ["--log_dir", str(tmp_path / "log")]
    assert cli(["launch", "--server_num", "2", "--worker_num", "2", *log, str(program), str(path)]) == 0
    said = [json.loads((tmp_path / "log" / f"workerlog.{i}").read_text().splitlines()[-1]) for i in range(2)]
    assert [(one["losses"], one["seen"], one["steps"]) for one in said] == [(7, 140, 7), (3, 60, 3)]
    for one in said:
        assert (one["rows"], one["step"], one["fed"], one["none"], one["test"]) == (200, 10, 1000, 30, 100)
    assert shows(run) == 1230
    assert not (run / "feed").exists()


def test_a_program_that_fails_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\nsys.exit('no ' + ' '.join(sys.argv[1:]) if os.environ['TRAINING_ROLE'] == 'TRAINER' else 0)"
    )
    words = ["launch", "--server_num", "1", "--worker_num", "1", "--log_dir", str(tmp_path / "log")]
    assert cli([*words, str(program), "--luck", "today"]) == 1
    assert "worker-0 ended with exit code 1: no --luck today" in capsys.readouterr().err
    assert cli([*words, str(tmp_path / "none.py")]) == 1
    assert "none.py does not exist" in capsys.readouterr().err
