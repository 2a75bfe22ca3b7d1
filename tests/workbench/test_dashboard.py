"""The dashboard in a real Chromium, over a run that grows and over an online run; reports of online runs."""

import http.client
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from clickfleet.errors import ConfigError
from clickfleet.training import report
from clickfleet.workbench.dashboard import MOST, Dashboard, FollowedRun, MetricsTail, folders


def get(port: int, path: str, host: str | None = None, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    asking = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    asking.request("GET", path, headers={"Host": host or f"127.0.0.1:{port}", **headers})
    reply = asking.getresponse()
    found = reply.status, reply.read(), dict(reply.getheaders())
    asking.close()
    return found


def test_it_follows_runs_in_a_real_browser(browser: Any, run: Path, stream: Path, tmp_path: Path) -> None:
    growing = tmp_path / "growing"
    growing.mkdir()
    whole = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    problems: list[str] = []
    asked: list[str] = []
    with Dashboard([growing, stream], every_s=0.2) as board:
        page = browser.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(board.url)
        expect(page.locator("#growing .state")).to_have_text("waiting for its first metrics")

        lines = [json.loads(line) for line in whole]
        for line in lines:
            line["time"] = time.time()
        out = growing / "metrics.jsonl"
        half = len(lines) // 2
        out.write_text("".join(json.dumps(line) + "\n" for line in lines[:half]))
        expect(page.locator("#growing .state")).to_have_text("running")
        step = [line["step"] for line in lines[:half] if line["kind"] == "train"][-1]
        tile = page.locator("#growing .tile", has_text="step").first
        expect(tile).to_contain_text(str(step))
        with out.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines[half:]))
        last = [line["step"] for line in lines if line["kind"] == "train"][-1]
        expect(tile).to_contain_text(str(last))
        expect(page.locator("#growing figcaption", has_text="Table size, rows")).to_have_count(1)
        test_auc = [line for line in lines if line["kind"] == "test"][-1]["auc"]
        expect(page.locator("#growing .tile", has_text="test AUC")).to_contain_text(f"{test_auc:.4f}")

        names = [one.inner_text() for one in page.query_selector_all("#run figcaption")]
        for wanted in (
            "AUC of passes",
            "Bytes of entries",
            "Rows of entries",
            "Seconds from an event until it is published, objective 60",
            "Seconds from an event until it is trained",
        ):
            assert wanted in names
        shown = page.inner_text("#run")
        assert "published within (99%)" in shown
        assert "age of the last entry" in shown
        page.wait_for_function(
            "document.querySelector('#run svg')?.getBoundingClientRect().width > 250"
        )  # it is drawn anew all the time
        assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
        assert problems == []
        assert all(url.startswith((board.url, "data:")) for url in asked)

        status, body, _ = get(board.port, "/data.json")
        facts = {Path(one["run"]).name: one for one in json.loads(body)}
        assert status == 200
        assert facts["growing"]["step"] == last
        assert facts["run"]["event_to_published_p99"] >= facts["run"]["event_to_published_p50"] > 0
        assert facts["run"]["lag_s"] > 0
        assert facts["run"]["entry_bytes"] > 0
        assert get(board.port, "/data.json", host=f"evil.example:{board.port}")[0] == 403
        assert get(board.port, "/elsewhere")[0] == 404
        url = board.url
        page.evaluate("1")
    expect(page.locator("#status")).to_have_text("the dashboard has stopped")
    page.close()
    assert url.startswith("http://127.0.0.1:")


def test_lines_that_are_half_written_cut_or_foreign(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.lines() == []
    path.write_text('{"kind": "test", "step": 1}\n{"kind": "te')
    assert [line["step"] for line in tail.lines()] == [1]
    assert tail.lines() == []
    with path.open("a") as file:
        file.write('st", "step": 2}\nnonsense\n[1]\n')
    assert [line["step"] for line in tail.lines()] == [2]
    path.write_text('{"kind": "test", "step": 1}\n{"kind": "test", "step": 9}\n' + '{"kind": "test", "step": 10}\n' * 9)
    assert tail.lines()[1]["step"] == 9  # longer than before, but another file
    assert tail.restarts == 1


def test_many_lines_take_bounded_memory(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"kind": "train", "step": n, "time": n}) + "\n" for n in range(5 * MOST))
    )
    run = FollowedRun(tmp_path)
    run.read()
    steps = [line["step"] for line in run.lines["train"]]
    assert len(steps) <= 2 * MOST
    assert steps == sorted(steps)
    assert steps[-1] == 5 * MOST - 1


def test_folders_of_comparisons_and_what_is_not_there(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "cmp/runs" / name).mkdir(parents=True)
    assert [path.name for path in folders([tmp_path / "cmp"])] == ["a", "b"]
    with pytest.raises(ConfigError, match="there is no folder"):
        folders([tmp_path / "nothing"])


def test_the_report_of_an_online_run(stream: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(stream, tmp_path / "run", symlinks=True)
    text = report.rebuild(copy).read_text()
    for wanted in ("Passes", "Published", "Freshness", "AUC of passes", "Bytes of entries", "published within (99%)"):
        assert wanted in text
    with (copy / "metrics.jsonl").open("a") as out:
        out.write(
            json.dumps({"kind": "alarm", "step": 3, "entry_kind": "delta", "held": 1, "reasons": ["<bad>"]}) + "\n"
        )
    assert "a delta was held back: &lt;bad&gt;" in report.rebuild(copy).read_text()


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_what_a_run_wrote(run: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    curves = accumulator.EventAccumulator(str(run / "tensorboard"))
    curves.Reload()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for kind, key in (("train", "auc"), ("train", "table_rows"), ("test", "auc"), ("test", "logloss")):
        mine = [(line["step"], line[key]) for line in lines if line["kind"] == kind]
        found = [(point.step, point.value) for point in curves.Scalars(f"{kind}/{key}")]
        assert [step for step, _ in found] == [step for step, _ in mine]
        assert [value for _, value in found] == pytest.approx([value for _, value in mine], rel=1e-6)
