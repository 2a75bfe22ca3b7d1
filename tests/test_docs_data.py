"""The examples of docs/data.md run, and print what the page says."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "data.md"


def test_the_page_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```\n(?:```\n(.*?)```\n)?", PAGE.read_text(), re.DOTALL)
    assert len(examples) > 7
    names: dict[str, object] = {}
    for code, expected in examples:
        exec(compile(code, str(PAGE), "exec"), names)
        assert capsys.readouterr().out == expected
