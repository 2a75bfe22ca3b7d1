"""A small model that is trained and exported once, and one server for all tests that only ask."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clickfleet.training import export
from ports import free_ports
from served import Model, Publication, Served, running


@pytest.fixture(scope="session")
def model() -> Model:
    made = Model()
    for seed in range(6):
        made.train(seed)
    return made


@pytest.fixture(scope="session")
def artifact(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serving") / "artifact"
    export.export(model.learner, path, 6)
    return path


@pytest.fixture(scope="session")
def served(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests that only ask."""
    folder = tmp_path_factory.mktemp("state")
    with running(
        artifact, folder, grpc_port=0, max_rows=2000, max_body=1 << 20, upload_dir=str(folder / "uploads")
    ) as found:
        yield found


@pytest.fixture
def log(tmp_path: Path) -> Publication:
    """A published log with a base."""
    made = Publication(tmp_path / "published")
    made.publish("base")
    return made


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real redis-server."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.fail("redis-server is not installed: apt-get install redis-server")
    folder = tmp_path_factory.mktemp("redis")
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [program, "--port", str(port), "--save", "", "--dir", str(folder), "--bind", "127.0.0.1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert any("eady to accept connections" in line for line in process.stdout)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.communicate()
