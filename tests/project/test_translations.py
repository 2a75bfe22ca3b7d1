"""Every page has a Chinese twin that says the same: sections, code, figures, names and links cannot drift apart."""

import re
from pathlib import Path

import pytest

import twins
from pages import FENCE, ROOT, pages

ENGLISH_ONLY = {"docs/LOG.md"}  # a laboratory notebook; docs/reference is generated from English help
NAMES = {path.relative_to(ROOT).as_posix(): path for path in pages()}
ORIGINALS = [name for name, path in NAMES.items() if twins.original_of(path) == path and name not in ENGLISH_ONLY]
CHINESE = [name for name, path in NAMES.items() if twins.original_of(path) != path]
AVOIDED = ("切割", "读者", "守卫", "消费者", "恰好一次")  # the glossary has the words we use instead
TERM = re.compile(r"^\| ([^|]+?) \| ([^|]+?) \|", re.MULTILINE)
PAGE = """# Title

Two million rows in 3.5 s, see [the rest](#rest).

## Rest

* `run.dir` is kept.

```console
$ clickfleet doctor  # what is installed
```

| speed | 0.85× |
|---|---|
"""
TWIN = """# 标题

3.5 s 处理两百万行，见[其余](#其余)。

## 其余

* 保留 `run.dir`。

```console
$ clickfleet doctor  # 已安装的组件
```

| 速度 | 0.85× |
|---|---|
"""


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_page_and_its_twin_say_the_same(name: str) -> None:
    page = NAMES[name]
    twin = twins.twin_of(page)
    written = twin.relative_to(ROOT).as_posix()
    assert twin.is_file(), f"{name} has no translation; write {written}"
    found = twins.differences(page, twin)
    assert not found, "\n".join([f"{written} is not what {name} says:", *found])


@pytest.mark.parametrize("name", CHINESE)
def test_a_twin_has_an_original(name: str) -> None:
    assert twins.original_of(NAMES[name]).is_file(), f"{name} translates no page; delete it"


@pytest.mark.parametrize("name", ORIGINALS)
def test_pages_lead_to_the_other_language(name: str) -> None:
    page = NAMES[name]
    twin = twins.twin_of(page)
    for here, label, there in ((page, "中文", twin), (twin, "English", page)):
        link = re.match(rf"# [^\n]+\n\n\[{label}\]\(([^)]+)\)\n\n", here.read_text(encoding="utf-8"))
        assert link, f"{here.relative_to(ROOT)} does not begin with a link [{label}] below its title"
        assert (here.parent / link[1]).resolve() == there


def test_the_site_lists_both_languages_in_the_same_order() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r": ((?:zh/|reference/)?\w+\.md)$", menu, re.MULTILINE)
    english = [page for page in listed if "/" not in page and f"docs/{page}" not in ENGLISH_ONLY]
    assert [page.removeprefix("zh/") for page in listed if page.startswith("zh/")] == english


@pytest.mark.parametrize("name", CHINESE)
def test_chinese_pages_use_the_words_of_the_glossary(name: str) -> None:
    text = FENCE.sub("", NAMES[name].read_text(encoding="utf-8"))
    assert not [word for word in AVOIDED if word in text]


def test_both_glossaries_have_the_same_terms() -> None:
    english, chinese = (
        (ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("glossary.md", "zh/glossary.md")
    )
    ours = [pair for pair in TERM.findall(english) if pair[0] != "term"]
    assert len(ours) > 40
    assert ours == [(english, chinese) for chinese, english in TERM.findall(chinese) if chinese != "术语"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", None),
        ("两百万", "200 万", "section '标题' ('Title'): figures differ; only here: 2000000"),
        ("3.5", "3.6", "section '标题' ('Title'): figures differ; only there: 3.5; only here: 3.6"),
        ("0.85", "0.58", "section '其余' ('Rest'): figures differ; only there: 0.85; only here: 0.58"),
        ("run.dir", "run.log", "names between backticks differ; only there: run.dir; only here: run.log"),
        ("doctor", "stats", "section '其余' ('Rest'): blocks differ"),
        ("(#其余)", "(#标题)", "links differ; only there: docs/page.md#1; only here: docs/page.md#0"),
        ("* 保留", "* 新的一条。\n* 保留", "shapes differ; only here: list item"),
        ("## 其余", "### 其余", "heading 2 is ## Rest, but ### 其余"),
        ("## 其余", "## 其余\n\n## 更多", "2 headings, but 3; the first without a counterpart is '更多'"),
    ],
)
def test_drift_is_found(old: str, new: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "ROOT", tmp_path)
    page = tmp_path / "docs" / "page.md"
    twin = twins.twin_of(page)
    twin.parent.mkdir(parents=True)
    page.write_text(PAGE, encoding="utf-8")
    twin.write_text(TWIN.replace(old, new, 1) if old else TWIN, encoding="utf-8")
    found = twins.differences(page, twin)
    assert (said in found[0]) if said else not found


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ("1 million and 20 million", "100 万与 2000 万"),
        ("36–57 million rows", "3600–5700 万行"),
        ("-0.044 after 300 steps", "300 步后为 -0.044"),
        ("1,040,000 rows, 0.9×", "1040000 行，0.9 倍"),
        ("a 3-day run of C1 and `x 5`", "C1 的 3 天运行"),
    ],
)
def test_figures_are_compared_in_any_notation(english: str, chinese: str) -> None:
    assert twins.figures(english) == twins.figures(chinese)
