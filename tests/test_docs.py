"""The handbook is true: every block of every page runs, every link and anchor leads somewhere, Chinese pages show the same commands."""

import re
from pathlib import Path

import pytest

from pages import ROOT, Page, anchors, blocks, links, pages

ON_THE_CLUSTER = {"docs/cluster.md"}  # tests/cluster has the Ray it needs
NAMES = [path.relative_to(ROOT).as_posix() for path in pages()]
CHINESE = [name for name in NAMES if name == "README.zh.md" or "/zh/" in name]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {*CHINESE, *ON_THE_CLUSTER}])
def test_a_page_runs(name: str, tmp_path: Path) -> None:
    Page(ROOT / name, tmp_path).run()


@pytest.mark.parametrize("name", CHINESE)
def test_a_chinese_page_shows_what_the_english_one_runs(name: str) -> None:
    english = ROOT / name.replace("README.zh.md", "README.md").replace("/zh/", "/")
    ours, theirs = ([_code(block.text) for block in blocks(page)] for page in (ROOT / name, english))
    assert ours == theirs


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for link in links(page):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name}: {link}"


def _code(text: str) -> list[str]:
    """Lines without what is said in comments."""
    lines = (re.sub(r"(^|\s)#(?! [\w./-]+\.(py|yaml)).*", "", line).rstrip() for line in text.splitlines())
    return [line for line in lines if line]
