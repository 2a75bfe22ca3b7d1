from collections.abc import Callable
from pathlib import Path

import pytest

from clickfleet.formats import _lines


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file and gives its path."""

    def write(name: str, content: bytes | str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few lines, so that small files have many."""
    monkeypatch.setattr(_lines, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(_lines, "_SPACE", 2001)
    monkeypatch.setattr(_lines, "_HEAD_BYTES", 500)
    monkeypatch.setattr(_lines, "_spare", [])
