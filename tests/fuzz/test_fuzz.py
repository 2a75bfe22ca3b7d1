"""Ten thousand wrong inputs in all, a million with CLICKFLEET_SOAK: every parser returns or raises an error of ours."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuzz.__main__ import areas

SOAK = bool(os.environ.get("CLICKFLEET_SOAK"))
RUNS = 20_000 if SOAK else 200
"""Inputs of each of some fifty targets."""


@pytest.mark.parametrize("area", areas())
def test_wrong_inputs_are_refused(area: str, tmp_path: Path) -> None:
    seed = int(time.time()) if SOAK else 0
    keep = Path(os.environ.get("CLICKFLEET_FUZZ_DIR", tmp_path))
    command = [sys.executable, "-m", "fuzz", area, "--runs", str(RUNS), "--seed", str(seed), "--keep", str(keep)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr[-2000:]}"


def test_what_a_target_must_not_do_is_found(tmp_path: Path) -> None:
    from fuzz.engine import explore

    def fragile(data: bytes) -> object:
        return data[3] if data.startswith(b"ab") else data.decode("latin1")

    found = explore(("fragile", fragile, [b"abcdef"]), 300, 0).findings
    assert [finding.what for finding in found.values()] == ["IndexError: index out of range"]


def test_a_process_that_ends_leaves_the_input(tmp_path: Path) -> None:
    """The parent says which input ended the child."""
    program = tmp_path / "fuzz"
    program.mkdir()
    for file in Path(__file__).parent.glob("*.py"):
        if not file.name.startswith("target_"):
            (program / file.name).write_text(file.read_text())
    (program / "target_deadly.py").write_text(
        "import os\nTARGETS = [('deadly', lambda data: os.abort() if data[:1] == b'x' else None, [b'a', b'xyz'])]\n"
    )
    command = [sys.executable, "-m", "fuzz", "deadly", "--keep", str(tmp_path / "keep")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "deadly: the process ended with -6" in done.stdout
    assert [path.read_bytes() for path in (tmp_path / "keep").glob("deadly-*")] == [b"xyz"]
