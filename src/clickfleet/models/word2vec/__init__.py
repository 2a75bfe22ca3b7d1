"""word2vec: word vectors from plain text, with the same table, reader and modes as all models.

vocabulary.py  the words of a corpus and their counts
corpus.py      plain text -> sentences in part files, and the vocabulary
synth_text.py  text with planted topics and analogies
__init__.py    the settings and the initial values of rows
pair_step.py   the training step: draws pairs of words, then computes gradients or trains rows in place
vectors.py     a trained model -> nearest words, analogies, the word2vec text format
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge
from torch import Tensor

from clickfleet.config.load import Config
from clickfleet.errors import ConfigError
from clickfleet.models.word2vec.vocabulary import FILE, Vocabulary
from clickfleet.training.learner import Learner
from clickfleet.training.network import Inputs, Model, TableInit
from clickfleet.training.optimizer import Flat
from clickfleet.training.step import Step

BATCH_WORDS = 10_000


class Word2Vec(Model):
    """Skip-gram with negative sampling: u·v + β separates the neighbours of a word from noise (arXiv:1310.4546).

    Rows of slot `in` hold u. Rows of slot `out` hold v, with the bias β as first-order weight.
    """

    scores_rows: ClassVar[bool] = False
    reads_vocabulary: ClassVar[bool] = True
    row_rule: ClassVar[Mapping[str, object]] = {"name": "sgd", "lr": 0.025, "scale": "none"}

    @dataclass(frozen=True)
    class Config:  # without the settings of `Model.Config`, which concern scores
        window: Annotated[int, Ge(1)] = 5
        """Maximum distance of a neighbour. Each centre word draws its own distance from 1 to this."""
        negatives: Annotated[int, Ge(1)] = 5
        """Noise words per true neighbour, drawn independently."""
        sample: Annotated[float, Ge(0)] = 0.001
        """Subsample words whose share of the corpus is larger. 0 keeps all."""
        power: float = 0.75
        """Draw noise words in proportion to their count to this power."""
        bias: bool = True
        """Give output words a bias. Most other tools have none."""
        decay: bool | None = None
        """Lower the learning rate linearly over the whole run. Default: true if the rule is plain sgd."""
        floor: Annotated[float, Ge(0)] = 0.004
        """The final learning rate, as a fraction of the first."""

    @classmethod
    def batch_rows(cls, config: Any) -> int:
        """Return the number of sentences with about `BATCH_WORDS` words. In larger batches the learning rate decays too late."""
        if config.data.vocabulary is None:
            return super().batch_rows(config)
        return vocabulary(config).sentences_with(BATCH_WORDS)

    @classmethod
    def table_init(cls, config: Any, dim: int) -> TableInit:
        return TableInit(embedx="zero" if not dim else f"uniform({-0.5 / dim:.8g},{0.5 / dim:.8g})")

    def steps(self, learner: Learner, flats: list[Flat]) -> list[Step]:
        from clickfleet.models.word2vec.pair_step import steps

        return list(steps(learner, flats))

    @classmethod
    def checkpoint_files(cls, config: Any) -> dict[str, bytes]:
        return {FILE: vocabulary(config).text().encode()}

    def forward(self, x: Inputs) -> Tensor:
        raise ConfigError(
            "word2vec computes word vectors and cannot score rows",
            "use clickfleet words nearest, analogy or export; evaluate accepts a file of analogies",
        )


def vocabulary(config: Config) -> Vocabulary:
    """Return the vocabulary that a configuration names."""
    if config.data.vocabulary is None:
        raise ConfigError(
            "word2vec needs a vocabulary", "set data.vocabulary to the vocabulary.txt of clickfleet words prepare"
        )
    path = Path(config.data.vocabulary)
    changed = path.stat().st_mtime_ns if path.exists() else 0
    return _read(str(path), changed)


@lru_cache(maxsize=2)
def _read(path: str, changed: int) -> Vocabulary:
    return Vocabulary.read(path)
