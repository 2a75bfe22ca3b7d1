"""Rows and steps of a run, from every place that shows them."""

import json
import re
from pathlib import Path

from clickfleet.training import report
from clickfleet.workbench.dashboard import FollowedRun


def shown_numbers(folder: Path) -> dict[str, tuple[int, int]]:
    """Return (rows trained on, steps) by where they are shown."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    run = FollowedRun(folder)
    run.read()
    facts = run.facts()
    found = {
        "end": (lines[-1]["rows"], lines[-1]["step"]),
        "curves": max((line["rows"], line["step"]) for line in lines if line["kind"] in ("train", "epoch")),
        "dashboard": (facts["rows"], facts["step"]),
    }
    log = (folder / "log.txt").read_text()
    if done := re.findall(r"epoch \d+ done: step ([\d,]+), ([\d,]+) rows", log):
        found["log.txt"] = (int(done[-1][1].replace(",", "")), int(done[-1][0].replace(",", "")))
    page = report.rebuild(folder).read_text()
    tile = re.search(r"<b>([\d,]+)</b><span>rows trained on", page)
    step = re.search(r", step ([\d,]+)", page)
    assert tile
    assert step
    found["report"] = (int(tile[1].replace(",", "")), int(step[1].replace(",", "")))
    return found
