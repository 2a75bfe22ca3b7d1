"""Callbacks: functions of the user that a run calls after each step, evaluation and epoch, and at its end.

class Print(clickfleet.Callback):
    def on_evaluation(self, results):
        print(results["step"], results["auc"])

clickfleet.fit(frame, "clicked", callbacks=[Print()])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from clickfleet.errors import ConfigError
from clickfleet.training.metrics import by_label
from clickfleet.training.monitor import Progress

Record = dict[str, Any]
"""A record of a run: `kind`, `epoch`, `step`, `rows` and metrics by name."""
HOOKS = ("on_step", "on_evaluation", "on_epoch", "on_end")


class StepProgress:
    """Where a run is after a step."""

    def __init__(self, run: Progress, step: int, loss: float | None, stop: Callable[[], None]) -> None:
        self._run, self._stop = run, stop
        self.step = step
        """Steps trained since the run began."""
        self.loss = loss
        """Mean loss of the rows of this step; None if their weights are all 0."""

    @property
    def rows(self) -> int:
        """Rows trained since the run began."""
        return self._run.rows

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._run.epoch

    @property
    def auc(self) -> float:
        """AUC of the rows trained in this epoch, each scored before it was trained."""
        return self._run.auc

    def stop(self) -> None:
        """End the run after this step. It is then evaluated and saved as at its usual end."""
        self._stop()


class Callback:
    """Base class of callbacks. Override what you need. A method that returns False ends the run.

    Any object with some of these methods is a callback too, and a function is one with only `on_step`. They are called by
    training threads, never two at a time. An exception ends the run; checkpoints written before remain.
    """

    def on_step(self, progress: StepProgress) -> bool | None:
        """Called after each step."""
        return None

    def on_evaluation(self, results: Record) -> bool | None:
        """Called after each evaluation during training, with its metrics, `epoch` and `step`."""
        return None

    def on_epoch(self, results: Record) -> bool | None:
        """Called after each epoch, with its training metrics, `epoch` and `step`. It comes before the evaluation of the epoch."""
        return None

    def on_end(self, result: Any) -> bool | None:
        """Called with the TrainingResult when the run has ended."""
        return None


class Callbacks:
    """The callbacks of a run, by what they want to hear. Passed to the monitor, which reports evaluations and epochs."""

    def __init__(self, given: Sequence[Any] = ()) -> None:
        self.hooks: dict[str, list[Callable[[Any], Any]]] = {hook: [] for hook in HOOKS}
        for callback in given:
            named = [hook for hook in HOOKS if callable(getattr(callback, hook, None))]
            if not named and not callable(callback):
                raise ConfigError(
                    f"{callback!r:.80} is not a callback",
                    f"pass a function, or an object with some of {', '.join(HOOKS)}",
                )
            for hook in named:
                if getattr(type(callback), hook, None) is not getattr(Callback, hook):  # not overridden: free
                    self.hooks[hook].append(getattr(callback, hook))
            if not named:
                self.hooks["on_step"].append(callback)
        self.history: list[Record] = []
        """Records of epochs and evaluations."""
        self.stop: Callable[[], None] = lambda: None
        """Ends the run after the step."""
        self._steps = 0
        self._loss = self._weight = 0.0

    def start(self, run: Progress, stop: Callable[[], None]) -> None:
        """Count steps from where the run starts."""
        self.stop, self._steps, self._loss, self._weight = stop, run.steps, run.loss, run.weight

    def reporting(self, report: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return what a job calls after each step: `report`, and then the callbacks, if there are any."""
        if not self.hooks["on_step"]:
            return report

        def report_and_call(run: Any) -> None:
            report(run)
            self._steps += 1
            loss, weight = run.loss - self._loss, run.weight - self._weight
            self._loss, self._weight = run.loss, run.weight
            self._call("on_step", StepProgress(run, self._steps, loss / weight if weight else None, self.stop))

        return report_and_call

    def listen(self, kind: str, facts: dict[str, object]) -> None:
        """Take a record of the monitor."""
        hook = {"train": None, "epoch": "on_epoch"}.get(kind, "on_evaluation" if "auc" in facts else None)
        if hook is not None:
            self.history.append(flat(kind, facts))
            self._call(hook, dict(facts))

    def end(self, result: Any) -> None:
        """Report the end of the run."""
        for call in self.hooks["on_end"]:
            call(result)

    def _call(self, hook: str, about: Any) -> None:
        for call in self.hooks[hook]:
            if call(about) is False:
                self.stop()


def flat(kind: str, facts: Record) -> Record:
    """Return a record without its nested parts, so that a list of them makes a table. Metrics of labels are `label.metric`."""
    plain = {key: value for key, value in facts.items() if not isinstance(value, dict | list)}
    return {"kind": kind, **plain, **by_label(facts)}
