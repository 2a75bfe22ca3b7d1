import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clickfleet.lock import Lock
from clickfleet.online.learn import Learned, learn
from streams import settings, write_days


@pytest.fixture(scope="session")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported network of the streams' model, made once for all tests: exporting takes seconds."""
    shared = tmp_path_factory.getbasetemp().parent
    made = shared / "clickfleet-graph.onnx"
    with Lock(shared / "clickfleet-graph.lock", "exports", patience_s=120):
        if not made.exists():
            folder = tmp_path_factory.mktemp("graph")
            write_days(folder, days=1, splits=1, rows=4)
            learn(settings(folder, splits=1, online={"end_day": 20260101}), quiet=True)
            shutil.copy(folder / "run" / "graph.onnx", made)
    return made


@pytest.fixture
def stream(tmp_path: Path, graph: Path) -> Callable[..., dict[str, Any]]:
    """Days of logs and the configuration over them."""

    def make(days: int = 2, splits: int = 2, rows: int = 60, **more: Any) -> dict[str, Any]:
        write_days(tmp_path, days, splits, rows)
        (tmp_path / "run").mkdir()
        shutil.copy(graph, tmp_path / "run" / "graph.onnx")
        return settings(tmp_path, splits, **more)

    return make


@pytest.fixture
def online() -> Callable[..., Learned]:
    def run(config: dict[str, Any], *overrides: str, **more: Any) -> Learned:
        return learn(config, *overrides, quiet=True, **more)

    return run
