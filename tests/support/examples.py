"""Runs the programs of examples/ as a reader would: in an empty folder, as the main program."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "examples"
ON_THE_CLUSTER = {"criteo_ctr_dnn"}  # tests/cluster has the Ray it needs
NAMES = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__")


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(ROOT / name / f"{name}.py"), run_name="__main__")
