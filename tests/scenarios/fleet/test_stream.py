"""The streaming trainer: three days of two passes, and the done files that its consumers poll."""

import json
import re
from pathlib import Path

import pytest

from scenarios.fleet.conftest import DAYS, PASS_ROWS
from shell import Shell

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("own clusters")]
NEXT = dict(zip(DAYS, (*DAYS[1:], "20190723"), strict=True))


def test_three_days(shell: Shell) -> None:
    said = shell("clickfleet online -m dnn/config_online.yaml")
    for day in DAYS:
        for number in (1, 2):
            assert f"{day} pass {number} begins: 1 files" in said
            assert f"{day} pass {number} trained: global AUC=" in said
        assert f"{day} ends: shrink removed " in said
    assert f"6 passes, {6 * PASS_ROWS:,} rows in " in said
    assert "last published entry: 10;" in said  # a first base, then two deltas and a base a day
    model = shell.folder / "output_online/model"
    bases, patches = ([json.loads(line) for line in (model / f"{name}_donefile.txt").read_text().splitlines()]
                      for name in ("base", "patch"))  # fmt: skip
    assert [line["input"] for line in bases] == [f"{model}/{day}/base/000" for day in (DAYS[0], *NEXT.values())]
    deltas = [f"{model}/{day}/delta-{number}/000" for day in DAYS for number in (1, 2)]
    assert [line["input"] for line in patches] == deltas
    keys = [line["key"] for line in bases]
    assert keys == sorted(keys)
    assert [line["key"] for line in patches] == [key for key in keys[:3] for _ in (1, 2)]
    assert all(line["monitor_data"].startswith("AUC=0.") for line in patches)
    saved = [line.split("\t") for line in (model / "donefile.txt").read_text().splitlines()]
    assert [(day, number) for day, _, _, number, _ in saved] == [
        part for day in DAYS for part in ((day, "1"), (NEXT[day], "-1"))
    ]
    for path in (*(line["input"] for line in (*bases[-2:], *patches[-2:])), saved[-1][2]):  # older ones are not kept
        assert Path(path, "manifest.json").is_file()
    aucs = [float(line["monitor_data"].split()[0].removeprefix("AUC=")) for line in patches]
    assert max(aucs[3:]) > max(0.6, aucs[0])  # each pass is scored before it is trained on
    assert re.search(r"checkpoints, 4 entries, .* all intact", shell("clickfleet verify output_online"))
