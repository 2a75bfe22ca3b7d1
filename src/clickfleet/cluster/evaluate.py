"""Evaluate and score with the shards' model. Each worker reads its share of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from clickfleet.cluster.assignments import Share, share_of
from clickfleet.cluster.processes import ProcessGroup, StoppedError
from clickfleet.cluster.status import ClusterMonitor
from clickfleet.config.load import Config
from clickfleet.data.names import Names
from clickfleet.data.split import RowSplit
from clickfleet.training.learner import Learner
from clickfleet.training.loop import RunProgress
from clickfleet.training.metrics import Metrics
from clickfleet.training.predict import MetricFunctions, Results, metrics_of, name_slices, results


@dataclass(frozen=True)
class HeldOutFiles:
    """The data that a run is validated and tested on."""

    valid: Share = ()
    test: Share = ()
    split: RowSplit | None = None
    """If `valid` are the training files: the rows that are set aside."""

    def __bool__(self) -> bool:
        return bool(self.valid or self.test)


class Evaluations:
    """Evaluations of a run, on its validation and test files and on any others."""

    def __init__(
        self, processes: ProcessGroup, learner: Learner, held_out: HeldOutFiles, monitor: ClusterMonitor
    ) -> None:
        self.processes, self.learner, self.held_out, self.monitor = processes, learner, held_out, monitor
        self.unwanted: Callable[[], bool] = lambda: False
        """Whether nobody needs the result of the evaluation any more, as after a signal."""
        self.find_names: Callable[[], Names | None] = lambda: None
        """Returns the values behind frequent keys. Called once."""
        self.bad_lines = 0
        """Bad lines in the files that were evaluated or scored last."""

    @cached_property
    def names(self) -> Names | None:
        """The values behind frequent keys."""
        return self.find_names()

    def collect_names(self) -> None:
        """Find the names now. Otherwise the first evaluation does."""
        self.names  # noqa: B018

    def due(self, steps: int, progress: RunProgress) -> bool:
        """Return whether train.eval_every asks for an evaluation after so many steps."""
        every = self.learner.config.train.eval_every
        return (
            every is not None and bool(self.held_out.valid) and steps // every > max(0, progress.evaluated_at) // every
        )

    def take(self, progress: RunProgress, epoch: int, steps: int) -> None:
        """Evaluate on the validation data or, without any, on the test data. Add the result to the progress of the run."""
        held_out = self.held_out
        if held_out.valid:
            valid = results(self.measure(held_out.valid, split=held_out.split))
            progress.take_validation(valid, epoch, steps, self.learner.config, self.monitor)
        elif held_out.test:
            self.take_test(progress, epoch, steps)

    def take_test(self, progress: RunProgress, epoch: int, steps: int) -> None:
        """Evaluate on the test data and add the result to the progress of the run."""
        progress.take_test(self.evaluate(self.held_out.test), epoch, steps, self.monitor)

    def evaluate(self, data: Share | None, shares: Sequence[Share] | None = None) -> Results:
        """Return the metrics of the shards' model on data, by name. The workers share the data, or have a share each."""
        measured = self.measure(data or (), shares=shares)
        return name_slices(results(measured), self.names, self.learner.config.train.metrics.slices)

    def measure(
        self,
        data: Share,
        reading: Config | None = None,
        split: RowSplit | None = None,
        shares: Sequence[Share] | None = None,
    ) -> Metrics:
        """Return the metrics on data as sums and buckets. `reading` replaces the workers' configuration for reading.

        With a split, only the rows that are set aside count.
        """
        total, own = metrics_of(self.learner), MetricFunctions(self.learner.config)
        collect = bool(own.functions)  # of the user: they need all rows at once
        for state, rows in self._by_worker("measure", shares or self._divided(data), reading, split, collect):
            of_worker = metrics_of(self.learner)
            of_worker.restore(state)
            total.merge(of_worker)
            if rows is not None:
                own.rows.extend(rows)
        total.own = own.results()
        return total

    def predict(self, files: Sequence[str]) -> Iterator[Any]:
        """Yield the scores of all rows, file by file in order."""
        for parts in self._by_worker("score", self._divided(files)):
            yield from parts

    def _divided(self, data: Share) -> list[Share]:
        """Return a share of the data for each worker."""
        workers = len(self.processes.workers)
        return [share_of(data, i, workers) for i in range(workers)]

    def _by_worker(self, verb: str, shares: Sequence[Share], *more: Any) -> list[Any]:
        """Return the result of a worker on each share, in order. Count the bad lines."""
        names = [f"worker {worker}" for worker in self.processes.workers]
        actors = self.processes.actor_group.actors
        buffers = self.processes.call({names[0]: actors[names[0]]}, "buffers")[names[0]]

        def poll() -> None:
            if self.unwanted():
                raise StoppedError("evaluation cancelled: a signal stopped the run", "resume with --resume")
            self.processes.poll()

        parts: list[tuple[Any, int]] = []
        for first in range(0, len(shares), len(names)):  # a lost worker leaves its share to the others
            pairs = zip(names, shares[first : first + len(names)], strict=False)
            calls = {name: getattr(actors[name], verb).remote(share, buffers, *more) for name, share in pairs}
            done = self.processes.actor_group.wait_for(calls, verb, float("inf"), monitor=poll)
            parts += [done[name] for name in calls]
        self.bad_lines = sum(bad for _, bad in parts)
        return [result for result, _ in parts]
