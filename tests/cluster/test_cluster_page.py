"""docs/cluster.md, docs/fleet.md and the example of the classic CTR-DNN, on the Ray that all tests of the cluster share."""

from pathlib import Path
from typing import Any

import pytest

from examples import ON_THE_CLUSTER, run
from pages import ROOT, Page

pytestmark = pytest.mark.xdist_group("cluster")


@pytest.mark.timeout(600)  # each role is a process that imports torch and Ray
@pytest.mark.parametrize("name", ["cluster", "fleet"])
def test_the_page_runs(name: str, ray: Any, tmp_path: Path) -> None:
    Page(ROOT / f"docs/{name}.md", tmp_path).run()


@pytest.mark.parametrize("name", sorted(ON_THE_CLUSTER))
def test_an_example_runs(name: str, ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, tmp_path, monkeypatch)
