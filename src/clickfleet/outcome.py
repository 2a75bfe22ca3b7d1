"""What training made: a model that evaluates and predicts, and the numbers of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clickfleet import mirror, saving
from clickfleet.learner import Learner
from clickfleet.scoring import Results
from clickfleet.trained import Trained


@dataclass
class Outcome(Trained):
    """What training made."""

    learner: Learner
    path: Path | None
    """Its checkpoint: the best where the run keeps it, else the newest."""
    threads: int
    rows: int = 0
    """Rows that the run has learned from: all epochs, and before a resume too."""
    new_rows: int = 0
    """Those of this call."""
    seconds: float = 0.0
    rows_per_s: float = 0.0
    train: Results = field(default_factory=dict)
    """Metrics of the last epoch's training, taken as it went on."""
    test: Results | None = None
    """Metrics of this model on the test data."""
    last: Path | None = None
    """The newest checkpoint, from which a resume goes on."""
    signal: int | None = None
    """The signal that stopped the run before its end."""
    best: Path | None = None
    """The checkpoint with the best test AUC, where it is kept (run.keep_best, train.patience)."""
    best_auc: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "new_rows": self.new_rows,
            "seconds": self.seconds,
            "rows_per_s": self.rows_per_s,
            "train_auc": self.train.get("auc"),
            "test_auc": None if self.test is None else self.test["auc"],
            "checkpoint": None if self.path is None else mirror.origin(self.path) or str(self.path),
        }


class LoadedLater:
    """A model that is loaded from its checkpoint when it is first used."""

    path: Path | None
    learner: Learner

    def __getattr__(self, name: str) -> Any:
        if name != "learner" or self.path is None:
            raise AttributeError(name)
        self.learner = saving.load(saving.whole(self.path))
        return self.learner


class Distant(LoadedLater, Outcome):
    """What training made that is not in the memory of this process: on a cluster, or an earlier checkpoint that was the best."""


def distant(**facts: Any) -> Distant:
    """One with these facts."""
    made = Distant.__new__(Distant)
    vars(made).update(facts)
    return made
