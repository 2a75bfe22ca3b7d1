"""One small planted corpus, prepared once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clickfleet.models.word2vec.corpus import CorpusOptions as Prepare
from clickfleet.models.word2vec.corpus import prepare
from clickfleet.models.word2vec.synth_text import TextOptions, synth


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    synth(folder, TextOptions(words=180_000, vocabulary=300, topics=10, entities=8, seed=3))
    prepare(folder / "text.txt", folder / "p", Prepare(parts=2))
    return folder


@pytest.fixture
def config(corpus: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def make(**more: dict[str, Any]) -> dict[str, Any]:
        sections: dict[str, dict[str, Any]] = {
            "data": {
                "format": "sentences",
                "train": str(corpus / "p/train"),
                "vocabulary": str(corpus / "p/vocabulary.txt"),
                "batch_size": 100,
            },
            "model": {"name": "word2vec"},
            "table": {"dim": 16},
            "train": {"epochs": 2, "threads": 2},
            "run": {"dir": str(tmp_path / "run"), "checkpoint_every": None, "report": False},
        }
        return {name: {**sections.get(name, {}), **more.get(name, {})} for name in sections.keys() | more.keys()}

    return make
