"""The handbook is true: every block of every page runs, every link and anchor leads somewhere. Chinese pages show the same blocks."""

import re
from pathlib import Path

import pytest

from pages import FENCE, ROOT, Page, anchors, links, pages

ON_THE_CLUSTER = {"docs/cluster.md", "docs/fleet.md"}  # tests/cluster has the Ray it needs
NAMES = [path.relative_to(ROOT).as_posix() for path in pages()]
SMALL_LOGS = {"README.md", "docs/quickstart.md"}  # they show which settings a small log gets
CHINESE = [name for name in NAMES if name == "README.zh.md" or "/zh/" in name]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {*CHINESE, *ON_THE_CLUSTER}])
def test_a_page_runs(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if name in SMALL_LOGS:
        request.getfixturevalue("small_logs")
    Page(ROOT / name, tmp_path).run()


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


@pytest.mark.parametrize("name", NAMES)
def test_what_is_named_in_passing_exists(name: str) -> None:
    """Commands, options, settings and measurements between backticks, outside of blocks."""
    text = FENCE.sub("", (ROOT / name).read_text(encoding="utf-8"))
    cli, config = ((ROOT / "docs/reference" / page).read_text(encoding="utf-8") for page in ("cli.md", "config.md"))
    commands = set(re.findall(r"^## (.*)$", cli, re.MULTILINE))
    sections = set(re.findall(r"^## (.*)$", config, re.MULTILINE))
    settings = set(re.findall(r"^\| `([\w.]+)`", config, re.MULTILINE)) | sections | {"model.name", "mode.name"}
    for span in re.findall(r"`([^`\n]+)`", text):
        words = span.split()
        if words[0] == "clickfleet" and len(words) > 1 and words[1].isalpha() and words[1].islower():
            assert words[1] in commands or " ".join(words[1:3]) in commands or words[1] in _groups(commands), span
            for option in re.findall(r"--[\w-]+", span):
                assert f"`{option}`" in cli or f"{option}," in cli or f", {option}`" in cli or option == "--help", span
        elif words[0] == "python" and len(words) > 1 and words[1].startswith("benchmarks/"):
            source = (ROOT / words[1]).read_text()
            assert not {option for option in re.findall(r"--[\w-]+", span) if f'"{option}"' not in source}, span
        for key in re.findall(r"^([a-z]+(?:\.[a-z_]+)+)(?:[:=]|$)", span):
            if key.partition(".")[0] in sections and not key.endswith(
                (".py", ".md", ".h", ".html", ".json", ".yaml", ".txt", ".csv", ".svg")
            ):
                parents = {".".join(one.split(".")[:-1]) for one in settings}
                assert key in settings | parents or key.startswith(("table.rule.", "table.embed_rule.")), span


def _groups(commands: set[str]) -> set[str]:
    return {command.split()[0] for command in commands}
