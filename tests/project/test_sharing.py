"""How workers share tests: a group has one worker, and a worker that ends costs one test."""

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = """
def pytest_xdist_make_scheduler(config, log):
    from sharing import Sharing
    return Sharing(config, log)
"""
GROUP = """
import os, pytest
pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.xdist_group("one")]
@pytest.mark.parametrize("number", range(6))
def test_where(number):
    with open("workers.txt", "a") as file:
        file.write(os.environ["PYTEST_XDIST_WORKER"] + chr(10))
"""
ENDS = """
import os, pytest
@pytest.mark.parametrize("number", range(8))
def test_ends(number):
    if number == 7:
        os._exit(3)
"""


def test_a_group_has_one_worker_and_a_crash_costs_one_test(tmp_path: Path) -> None:
    for name, text in {"conftest.py": CONFTEST, "test_group.py": GROUP, "test_ends.py": ENDS}.items():
        (tmp_path / name).write_text(text)
    support = str(Path(__file__).parents[1] / "support")
    hidden = ("PYTEST_XDIST", "PYTEST_CURRENT")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-c", os.devnull, str(tmp_path)],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": support},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1, done.stdout
    assert "1 failed, 13 passed" in done.stdout
    assert "crashed while running 'test_ends.py::test_ends[7]'" in done.stdout
    workers = (tmp_path / "workers.txt").read_text().split()
    assert len(workers) == 6
    assert len(set(workers)) == 1
