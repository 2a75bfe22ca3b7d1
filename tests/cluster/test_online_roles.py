"""A stream learned by processes that a job manager starts, and by `launch`: killed or stopped, started again, each row learned once."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import yaml

from clickfleet.serve import verification
from clickfleet.store import published
from fleet import ALL, Processes, shows
from marked import Marked
from originals import ONLINE, write_slot_days
from soak import in_soak
from streams import settings, write_days

pytestmark = [pytest.mark.xdist_group("own clusters"), pytest.mark.timeout(900)]
ROWS = 60
"""Rows of a pass."""
KINDS = ["base", "delta", "base", "delta", "delta", "base"]
"""Entries of two days with two passes each."""


def entries(run: Path) -> list[str]:
    log = run / "published"
    return [line.kind for line in published.Log(log).lines()] if (log / published.LOG).exists() else []


def wait_for(there: Callable[[], bool], alive: Callable[[], bool], limit_s: float = 400.0) -> None:
    deadline = time.monotonic() + limit_s
    while not there():
        assert alive()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def check_two_days(run: Path, shown: int, kinds: list[str] = KINDS) -> None:
    """Each row is learned once, the published log is intact, and done files name its entries."""
    assert shows(run) == 4 * ROWS * shown
    assert entries(run) == kinds
    assert verification.verify(run)["entries"] == len(kinds)
    for name, kind in (("base_donefile.txt", "base"), ("patch_donefile.txt", "delta")):
        lines = (run / "model" / name).read_text().splitlines()
        assert [Path(json.loads(line)["input"]).resolve().name[7:] for line in lines] == [kind] * kinds.count(kind)


@in_soak
@pytest.mark.parametrize("victims", [ALL, ("worker 1",), ("server 1",)])
def test_config_online_in_four_roles(tmp_path: Path, victims: tuple[str, ...]) -> None:
    """Processes are killed while the last pass is awaited: the pass before it is published, but in no checkpoint."""
    config, run = deepcopy(ONLINE), tmp_path / "stream"
    config["runner"] |= {"end_day": "20190721", "epochs": 3, "sync_mode": "async", "use_gloo": True}
    config["runner"] |= {"checkpoint_per_pass": 6, "data_donefile": "data.done"}
    accessor = config["table_parameters"]["embedding"]["accessor"]["ctr_accessor_param"]
    accessor |= {"show_click_decay_rate": 1.0, "delete_threshold": 0.0}
    home = tmp_path / "slot_dnn"
    home.mkdir()
    (home / "config_online.yaml").write_text(yaml.safe_dump(config))
    write_slot_days(tmp_path / "days", ["20190720", "20190721"], ROWS // 2, parts=2, done="data.done")
    last = tmp_path / "days/20190721/1200/data.done"
    last.unlink()
    words = ["online", "-m", str(home / "config_online.yaml"), "cluster.start_timeout=250s", "publish.keep_chains=9"]
    job = Processes(*words, folder=tmp_path)
    try:
        wait_for(lambda: len(entries(run)) == 4, lambda: job.running["worker 0"].poll() is None)
        job.kill(*victims)
        for name in victims:
            job.start(name)
        last.touch()
    except BaseException:
        job.kill(*ALL)
        raise
    said = job.ends()
    assert f"4 passes, {2 * ROWS if victims == ALL else 4 * ROWS} rows in" in said["worker 0"]
    assert "2 shards and 2 workers are ready" in said["worker 0"]
    assert all("the job has ended" in said[name] for name in ("server 0", "server 1", "worker 1"))
    assert f"tcp://127.0.0.1:{job.ports[1]}" in (run / "processes.json").read_text()
    check_two_days(run, 2, [*KINDS[:4], *KINDS[3:]])  # the pass is learned again, so its delta follows again


def test_launch_learns_a_stream(tmp_path: Path, graph: Path) -> None:
    config, run = settings(tmp_path), tmp_path / "run"
    config |= {"train": {}, "mode": {"name": "async"}, "cluster": {"start_timeout": "250s", "stop_timeout": "25s"}}
    config["table"] |= {"decay_rate": 1.0, "delete_threshold": 0.0}
    config["publish"]["keep_chains"] = 9
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    last = write_days(tmp_path, rows=ROWS) / "20260102/1200/_DONE"
    for part in tmp_path.glob("logs/*/*/part-0.csv"):
        head, *lines = part.read_text().splitlines(keepends=True)
        part.write_text(head + "".join(lines[::2]))
        part.with_name("part-1.csv").write_text(head + "".join(lines[1::2]))
    last.unlink()
    run.mkdir()
    shutil.copy(graph, run / "graph.onnx")
    words = ["launch", "--server_num", "2", "--worker_num", "2", "config.yaml"]
    command = Marked(*words, folder=tmp_path)
    try:
        command.wait_until(lambda: len(entries(run)) == 4)
        command.send(signal.SIGTERM)
        assert command.gone() == 128 + signal.SIGTERM
        assert "stopped by a signal after 3 passes; the same command resumes" in command.said()
    finally:
        command.kill()
    last.touch()
    command = Marked(*words, folder=tmp_path)
    try:
        assert command.gone() == 0, command.said()
        assert f"4 passes, {ROWS} rows in" in command.said()
    finally:
        command.kill()
    check_two_days(run, 4)
    for name, says in (("serverlog.0", "shard 0 of 2"), ("workerlog.1", "worker 1 of 2")):
        assert says in (run / "logs" / name).read_text()
