import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clickfleet.online.learn import OnlineResult, learn
from streams import settings, write_days


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
def online() -> Callable[..., OnlineResult]:
    def run(config: dict[str, Any], *overrides: str, **more: Any) -> OnlineResult:
        return learn(config, *overrides, quiet=True, **more)

    return run
