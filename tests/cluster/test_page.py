"""docs/cluster.md, on the Ray that all tests of the cluster share."""

from pathlib import Path
from typing import Any

import pytest

from pages import ROOT, Page

pytestmark = pytest.mark.xdist_group("cluster")


def test_the_page_runs(ray: Any, tmp_path: Path) -> None:
    Page(ROOT / "docs/cluster.md", tmp_path).run()
