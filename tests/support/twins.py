"""Compare a page with its translation, section by section: what must be the same whatever the language.

| compared | how |
| --- | --- |
| sections | number and levels of the headings |
| shape | paragraphs, list items, table rows and pictures of a section |
| code | blocks, comments aside |
| figures | every number outside of code, as often as it occurs; `2 million` equals `200 万` |
| names | what stands between backticks |
| links | targets; an anchor must lead to the same section |
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from pages import FENCE, ROOT, slug

LANGUAGE_LINK = re.compile(r"^\[(?:中文|English)\]\([^)]+\)\n", re.MULTILINE)
HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PICTURE = re.compile(r"""(?:!\[[^\]]*\]\(|<img src=")([^)"]+)""")
TAG = re.compile(r"<[^>]+>")
FIGURE = re.compile(
    r"((?<![\w.])[-+])?(?<![A-Za-z_\d.])(\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)\s?(thousand|million|billion|万|亿)?"
)
RANGE = re.compile(r"(\d[\d,.]*)(?=–\d[\d,.]*\s?(thousand|million|billion|万|亿))")  # 36–57 million: both are millions
TIMES = {"thousand": 10**3, "万": 10**4, "million": 10**6, "亿": 10**8, "billion": 10**9, "": 1}


@dataclass(frozen=True)
class Section:
    level: int
    title: str
    body: str


def twin_of(page: Path) -> Path:
    """Where the Chinese translation of a page is."""
    return ROOT / "README.zh.md" if page == ROOT / "README.md" else page.parent / "zh" / page.name


def original_of(page: Path) -> Path:
    """The page that a Chinese page translates; any other page is its own original."""
    if page == ROOT / "README.zh.md":
        return ROOT / "README.md"
    return page.parent.parent / page.name if page.parent == ROOT / "docs" / "zh" else page


def sections(text: str) -> list[Section]:
    """Cut a page at its headings; a `#` inside of a block is none."""
    hidden = FENCE.sub(lambda block: re.sub("^#", "\0", block[0], flags=re.MULTILINE), LANGUAGE_LINK.sub("", text))
    starts = list(HEADING.finditer(hidden))
    ends = [start.start() for start in starts[1:]] + [len(hidden)]
    return [
        Section(len(start[1]), start[2], hidden[start.end() : end].replace("\0", "#"))
        for start, end in zip(starts, ends, strict=True)
    ]


def differences(original: Path, twin: Path) -> list[str]:
    """What the two pages do not share, each with its section."""
    ours, theirs = (sections(page.read_text(encoding="utf-8")) for page in (original, twin))
    for number, (our, their) in enumerate(zip(ours, theirs, strict=False), start=1):
        if our.level != their.level:
            return [f"heading {number} is {'#' * our.level} {our.title}, but {'#' * their.level} {their.title}"]
    if len(ours) != len(theirs):
        longer = max(ours, theirs, key=len)[min(len(ours), len(theirs))]
        return [f"{len(ours)} headings, but {len(theirs)}; the first without a counterpart is {longer.title!r}"]
    found = []
    for our, their in zip(ours, theirs, strict=True):
        for what, facts in _facts(original, twin):
            missing, added = _apart(facts(original, our.body), facts(twin, their.body))
            if missing or added:
                only = [
                    f"only {where}: {', '.join(some)}" for where, some in (("there", missing), ("here", added)) if some
                ]
                found.append(f"section {their.title!r} ({our.title!r}): {what} differ; {'; '.join(only)}")
    return found


def _facts(original: Path, twin: Path) -> Iterator[tuple[str, Callable[[Path, str], Counter[str]]]]:
    yield "shapes", lambda page, body: _shape(body)
    yield "blocks", lambda page, body: Counter(code(block[2]) for block in FENCE.finditer(body))
    yield "figures", lambda page, body: figures(body)
    yield "names between backticks", lambda page, body: Counter(set(SPAN.findall(FENCE.sub("", body))))
    yield "links", lambda page, body: Counter(set(_targets(page, body)))


def _apart(ours: Counter[str], theirs: Counter[str]) -> tuple[list[str], list[str]]:
    return sorted((ours - theirs).elements()), sorted((theirs - ours).elements())


def code(block: str) -> str:
    """The lines of a block without what is said in comments."""
    lines = (re.sub(r"(^|\s)#(?! [\w./-]+\.(py|yaml)).*", "", line).rstrip() for line in block.splitlines())
    return "\n".join(line for line in lines if line)


def figures(body: str) -> Counter[str]:
    """The numbers of a text, outside of code, link targets and names such as C1."""
    text = RANGE.sub(r"\1 \2", TAG.sub("", LINK.sub("]", SPAN.sub("", FENCE.sub("", body)))))
    found = (
        ((sign or ""), Decimal(number.strip(",").replace(",", "")) * TIMES[unit or ""])
        for sign, number, unit in FIGURE.findall(text)
    )
    return Counter(f"{sign}{number.normalize():f}" for sign, number in found)


def _shape(body: str) -> Counter[str]:
    """How many paragraphs, items, table rows and pictures a section has."""
    shape: Counter[str] = Counter()
    before = ""
    for line in FENCE.sub("", body).splitlines():
        if PICTURE.match(line):
            shape["picture"] += 1
        elif line.startswith("|"):
            shape["table row"] += 1
        elif re.match(r"\s*(?:[*-]|\d+\.) ", line):
            shape["list item"] += 1
        elif line.strip() and not before:
            shape["paragraph"] += 1
        before = line.strip()
    return shape


def _targets(page: Path, body: str) -> Iterator[str]:
    """Where links and pictures lead: files in terms of the original pages, anchors as the number of the section."""
    text = SPAN.sub("", FENCE.sub("", body))
    for link in LINK.findall(text) + PICTURE.findall(text):
        path, _, anchor = link.partition("#")
        if "://" in link:
            yield link
            continue
        file = (page.parent / path).resolve() if path else page
        if file in (twin_of(original_of(page)), original_of(page)) and not anchor:
            continue  # the other language
        number = ""
        if anchor and file.suffix == ".md":
            titles = [section.title for section in sections(file.read_text(encoding="utf-8"))]
            number = f"#{[slug(title) for title in titles].index(anchor)}"
        yield original_of(file).relative_to(ROOT).as_posix() + number
