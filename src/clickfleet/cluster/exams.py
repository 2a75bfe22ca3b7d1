"""How good the shards' model is: test data and scores, each worker taking its share of the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from clickfleet import scoring
from clickfleet.cluster.crew import Crew
from clickfleet.cluster.fleet import StoppedError
from clickfleet.cluster.overview import ClusterWatch
from clickfleet.config import Config
from clickfleet.files import split_files
from clickfleet.learner import Learner
from clickfleet.metrics import Metrics
from clickfleet.session import Progress, words

Results = dict[str, Any]


class Exams:
    """Evaluations of a run: on its test files, now and then, and on any others."""

    def __init__(self, crew: Crew, learner: Learner, files: Sequence[str], watch: ClusterWatch) -> None:
        self.crew, self.learner, self.files, self.watch = crew, learner, list(files), watch
        self.unwanted: Callable[[], bool] = lambda: False
        """Whether nobody waits for an evaluation any more."""
        self.bad_lines = 0
        """Lines of the last files that have no score."""

    def due(self, steps: int, progress: Progress) -> bool:
        """Whether so many steps ask for an evaluation besides those after each epoch."""
        every = self.learner.config.train.eval_every
        return every is not None and bool(self.files) and steps // every > max(0, progress.evaluated_at) // every

    def take(self, progress: Progress, epoch: int, steps: int) -> None:
        """Evaluates on the test files; the result becomes part of the run's progress."""
        now, patience = progress, self.learner.config.train.patience
        results = self.evaluate(self.files)
        now.tested(results, steps)
        shown = {key: value for key, value in results.items() if key != "slices"}
        self.watch.record("test", {"epoch": epoch, "step": steps, **shown})
        self.watch.log(f"test after step {steps:,}: {words(results)}")
        if patience is not None and now.waited >= patience:
            now.stopped_early = True
            self.watch.log(f"stopped: no better test AUC than {now.best_auc:.4f} in {now.waited} evaluations")

    def evaluate(self, files: Sequence[str]) -> Results:
        """The metrics of the shards' model on files, by name."""
        return scoring.results(self.measure(files))

    def measure(self, files: Sequence[str], reading: Config | None = None) -> Metrics:
        """The same as sums and buckets; `reading` is how the files are read, where not as the workers' configuration says."""
        total = scoring.metrics_of(self.learner)
        for state in self._shared("measure", files, reading):
            mine = scoring.metrics_of(self.learner)
            mine.restore(state)
            total.merge(mine)
        return total

    def predict(self, files: Sequence[str]) -> Iterator[Any]:
        """The scores of all rows, file after file in order."""
        for parts in self._shared("score", files):
            yield from parts

    def _shared(self, verb: str, files: Sequence[str], *more: Any) -> list[Any]:
        """What each worker made of its share of the files, in order; bad lines are added up."""
        names = [f"worker {worker}" for worker in self.crew.workers]
        actors = self.crew.fleet.actors
        buffers = self.crew.tell({names[0]: actors[names[0]]}, "buffers")[names[0]]
        calls = {}
        for i, name in enumerate(names):
            calls[name] = getattr(actors[name], verb).remote(split_files(list(files), i, len(names)), buffers, *more)

        def attend() -> None:
            if self.unwanted():
                raise StoppedError("an evaluation was given up, as a signal stopped the run", "go on with --resume")
            self.crew.feel()

        done = self.crew.fleet.wait_for(calls, verb, float("inf"), watch=attend)
        self.bad_lines = sum(bad for _, bad in done.values())
        return [done[name][0] for name in names]
