"""What a configuration may say of word2vec, and how its rows begin."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge
from torch import Tensor

from clickfleet.config import Config
from clickfleet.errors import ConfigError
from clickfleet.models import Inputs, Model, TableInit
from clickfleet.words.vocabulary import FILE, Vocabulary

BATCH_WORDS = 10_000


class Word2Vec(Model):
    """Skip-gram with negative sampling: u·v + β tells a word's neighbours from noise (arXiv:1310.4546).

    Rows in slot `in` are u, rows in slot `out` v with the bias β as first-order weight.
    """

    row_rule: ClassVar[dict[str, Any]] = {"name": "sgd", "lr": 0.025, "scale": "none"}

    @dataclass(frozen=True)
    class Config:  # without the settings that all scores of rows share
        window: Annotated[int, Ge(1)] = 5
        """Words to each side at most; each centre word draws its own reach from 1 to this."""
        negatives: Annotated[int, Ge(1)] = 5
        """Words of noise beside every true neighbour, drawn afresh for each."""
        sample: Annotated[float, Ge(0)] = 0.001
        """Words with a larger share of the corpus are thinned out; 0 keeps all."""
        power: float = 0.75
        """Noise is drawn by count to this power."""
        bias: bool = True
        """Output words have a bias; off, as in most other tools, they have none."""
        decay: bool | None = None
        """Whether the rate falls in a straight line over the whole run; by default where the rule is plain sgd."""
        floor: Annotated[float, Ge(0)] = 0.004
        """The last rate, as a share of the first."""

    @classmethod
    def batch_rows(cls, config: Any) -> int:
        """Sentences may be lines or whole texts, so a batch is a number of words; in larger ones the rate falls too late."""
        if config.data.vocabulary is None:
            return super().batch_rows(config)
        return vocabulary(config).sentences_with(BATCH_WORDS)

    @classmethod
    def table_init(cls, config: Any, dim: int) -> TableInit:
        return TableInit(embedx="zero" if not dim else f"uniform({-0.5 / dim:.8g},{0.5 / dim:.8g})")

    def own_steps(self, learner: Any, flats: list[Any]) -> list[Any]:
        from clickfleet.words.step import steps

        return list(steps(learner, flats))

    def attached(self, config: Any) -> dict[str, bytes]:
        return {FILE: vocabulary(config).text().encode()}

    def forward(self, x: Inputs) -> Tensor:
        raise ConfigError(
            "word2vec has vectors of words and no score of a row",
            "clickfleet words nearest, analogy and export use them; evaluate takes a file of analogies",
        )


def vocabulary(config: Config) -> Vocabulary:
    """The one that a configuration names."""
    if config.data.vocabulary is None:
        raise ConfigError(
            "word2vec needs the words and their counts", "set data.vocabulary to what clickfleet words prepare wrote"
        )
    path = Path(config.data.vocabulary)
    changed = path.stat().st_mtime_ns if path.exists() else 0
    return _read(str(path), changed)


@lru_cache(maxsize=2)
def _read(path: str, changed: int) -> Vocabulary:
    return Vocabulary.read(path)
