"""The project of someone who comes from Paddle: its reader, configurations and clients, and a log of raw Criteo lines."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from shell import Shell

collect_ignore_glob = ["project/*"]
"""Programs that import paddle: the tests start them."""
ROWS, TEST_ROWS, PASS_ROWS = 1_600, 400, 200
DAYS = ("20190720", "20190721", "20190722")


def criteo_lines(rows: int, seed: int) -> str:
    """Raw Criteo text: a label, 13 counts and 26 categories, some of them missing. The first category decides most clicks."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(rows):
        values = rng.integers(0, 12, 26)
        click = int(rng.random() < (0.85 if values[0] % 2 else 0.1))
        counts = ["" if rng.random() < 0.2 else str(count) for count in rng.integers(0, 30, 13)]
        words = ["" if rng.random() < 0.05 and i else f"{i:04x}{value:04x}" for i, value in enumerate(values)]
        lines.append("\t".join([str(click), *counts, *words]))
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="package")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A shell in the project's folder."""
    folder = tmp_path_factory.mktemp("fleet") / "project"
    shutil.copytree(Path(__file__).parent / "project", folder)
    for kind, rows in (("train", ROWS), ("test", TEST_ROWS)):
        (folder / "data" / kind).mkdir(parents=True)
        for part in range(4):
            text = criteo_lines(rows // 4, 10 * part + len(kind))
            (folder / "data" / kind / f"part-{part}").write_text(text)
    for number, (day, split) in enumerate((day, split) for day in DAYS for split in ("0000", "1200")):
        place = folder / "days" / day / split
        place.mkdir(parents=True)
        (place / "part-0").write_text(criteo_lines(PASS_ROWS, 100 + number))
        (place / "to.hadoop.done").touch()
    return Shell(folder.parent / "environment", folder)


@pytest.fixture(scope="package")
def stand_in(shell: Shell) -> None:
    """After this, programs import what we replace of paddle."""
    refused = shell.run("cat data/train/part-0 | python dnn/dataset_generator.py")
    assert refused.returncode == 1
    assert "No module named 'paddle'" in refused.stderr
    said = shell("clickfleet migrate stand-in")
    assert re.fullmatch(r"wrote \S+/clickfleet_paddle.pth\n", said)


@pytest.fixture(scope="package")
def trained(shell: Shell) -> str:
    """What training on one machine prints. It does not need the stand-in."""
    return shell("clickfleet train -m dnn/config.yaml -o runner.epochs=1")
