"""The package without its extras: one machine needs neither Ray nor ZeroMQ, and a command does not import what it does not use."""

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from clickfleet.cli import main
sys.argv = ["clickfleet", *sys.argv[1:]]
main()
"""


def run(missing: set[str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT.format(missing=missing), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log, and a model trained on it without the extra [cluster]."""
    path = tmp_path_factory.mktemp("extras")
    assert run(set(), path, "synth", "log", "--rows", "500", "--test-rows", "100").returncode == 0
    done = run({"ray", "zmq"}, path, "train", "data.train=log/train", "data.test=log/test", "model=lr", "run.dir=run")
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.parametrize(
    "command", [["evaluate", "run", "log/test"], ["inspect", "run"], ["export", "run", "artifact"]]
)
def test_commands_of_one_machine_need_no_cluster(folder: Path, command: list[str]) -> None:
    done = run({"ray", "zmq"}, folder, *command)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("missing", [{"ray", "zmq"}, {"cryptography"}], ids=["ray", "cryptography"])
def test_a_cluster_mode_names_the_missing_extra(folder: Path, missing: set[str]) -> None:
    done = run(missing, folder, "train", "data.train=log/train", "mode.name=sync", "run.dir=other")
    assert done.returncode == 1
    assert "clickfleet[cluster]" in done.stderr
