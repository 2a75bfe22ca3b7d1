"""A search for settings: an Optuna study whose trials are runs, trained by a crew of processes.

from clickfleet.workbench.tune import tune

found = tune("config.yaml", out="tune")
found.best["test_auc"], found.config

The study stands in study.db (SQLite), which this process alone writes. A trial that was running when the search was killed is tried
again with the same values, and its run goes on from its newest checkpoint.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clickfleet import modes
from clickfleet.config import Config, dump
from clickfleet.configuring import check, configure
from clickfleet.errors import ConfigError, MissingError, TrainingError
from clickfleet.interrupts import interruptible
from clickfleet.lock import Lock
from clickfleet.paths import check_name, inside
from clickfleet.report import page
from clickfleet.sections import Tune
from clickfleet.workbench.compare import MEASURED
from clickfleet.workbench.crew import Crew, Facts, Order, count, share_cores
from clickfleet.workbench.plan import fingerprint
from clickfleet.workbench.space import applied, check_space, distribution, values
from clickfleet.workbench.tail import Tail

if TYPE_CHECKING:
    import optuna

STUDY, BEST = "study.db", "best.yaml"
MEASURES = {"auc": "test_auc", "logloss": "logloss"}
NAMES = {"auc": "AUC", "logloss": "log loss"}


@dataclass
class Search:
    """What was tried; `best` is a row of `rows`."""

    out: Path
    metric: str
    rows: list[Facts] = field(default_factory=list)
    best: Facts | None = None
    signal: int | None = None

    @property
    def config(self) -> Path:
        """The best configuration, ready to train."""
        return self.out / BEST

    @property
    def page(self) -> Path:
        return self.out / "tune.html"

    def to_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "best": self.best, "config": str(self.config), "out": str(self.out)}


def tune(
    config: Config | Mapping[str, Any] | str | Path | None,
    *overrides: str,
    trials: int | None = None,
    jobs: int | None = None,
    out: str | Path = "tune",
    say: Callable[[str], None] = print,
) -> Search:
    """Tries settings of the section `tune` until there are so many trials, those of earlier calls included."""
    from clickfleet.workbench.search_page import write_all

    settings = configure(config, overrides)
    check(settings)
    check_space(settings)
    if not settings.data.test:
        raise ConfigError("a search needs test data to judge by", "set data.test")
    if settings.tune.pruner != "none" and settings.train.eval_every is None:
        say("train.eval_every is not set: trials can only be given up at the ends of epochs")
    folder = Path(out).absolute()
    wanted = trials or settings.tune.trials
    jobs, threads = share_cores(settings, wanted, jobs, modes.distributed(settings))
    with Lock(folder / ".lock", "tunes"):
        study = open_study(settings, folder)
        search = _Search(study, settings, folder, threads, say)
        before = f", {search.ended} ended before" if search.ended else ""
        say(f"{count(wanted, 'trial')}{before}; {jobs} at a time, {count(threads, 'thread')} each")
        try:
            search.run(wanted, jobs)
        finally:
            found = Search(folder, settings.tune.metric, search.rows(), signal=search.signal)
            found.best = next((row for row in found.rows if row["trial"] == search.best()), None)
            if found.best is not None:
                page.write(found.config, dump(search.best_config()))
            write_all(found, study, settings)
    if found.best is None and found.signal is None:
        errors = [row["error"] for row in found.rows if row.get("error")]
        raise TrainingError("no trial ended well", f"the first failed with: {errors[0]}" if errors else "raise trials")
    return found


def open_study(config: Config, folder: Path) -> optuna.Study:
    """The study of a folder; one of other settings is refused."""
    try:
        import optuna
    except ModuleNotFoundError:
        raise MissingError("optuna", "tune") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    how = config.tune
    seed = how.seed
    study = optuna.create_study(
        storage=f"sqlite:///{folder / STUDY}",
        study_name="clickfleet",
        direction="maximize" if how.metric == "auc" else "minimize",
        load_if_exists=True,
        pruner={
            "median": optuna.pruners.MedianPruner(n_startup_trials=how.warmup_trials),
            "halving": optuna.pruners.SuccessiveHalvingPruner(),
            "none": optuna.pruners.NopPruner(),
        }[how.pruner],
    )
    seed += len(study.trials)  # one that goes on does not try again what it tried before
    study.sampler = (
        optuna.samplers.TPESampler(seed=seed, n_startup_trials=how.warmup_trials)
        if how.sampler == "tpe"
        else optuna.samplers.RandomSampler(seed=seed)
    )
    space = {key: vars(one) for key, one in how.space.items()}
    mark = json.dumps([fingerprint(config), how.metric, space], sort_keys=True)
    if study.user_attrs.setdefault("clickfleet", mark) != mark:
        raise ConfigError(f"{folder / STUDY} is a search with other settings", "choose another --out")
    study.set_user_attr("clickfleet", mark)
    return study


class _Search:
    """Asks for trials, has them trained, watches their evaluations, tells how they ended."""

    def __init__(
        self, study: optuna.Study, config: Config, folder: Path, threads: int, say: Callable[[str], None]
    ) -> None:
        self.study, self.config, self.folder, self.threads, self.say = study, config, folder, threads, say
        self.signal: int | None = None
        self.space = {key: distribution(one) for key, one in config.tune.space.items()}
        self._running: dict[str, tuple[optuna.Trial, Order, Tail]] = {}
        self._given_up: set[str] = set()
        self._reported: set[tuple[str, int]] = set()
        """Steps whose evaluation is known: a run that goes on writes some again."""
        self._take_up()

    def _take_up(self) -> None:
        """Trials of a search that was killed: asked for again, in the folders they have."""
        from optuna.trial import TrialState

        for trial in self.study.get_trials(states=(TrialState.RUNNING,)):
            self.study.tell(trial.number, state=TrialState.FAIL)
            folder = trial.user_attrs.get("folder")
            if folder is not None and set(trial.params) == set(self.space):
                self.study.enqueue_trial(trial.params, user_attrs={"folder": folder})

    @property
    def ended(self) -> int:
        return len(self.rows())

    def run(self, wanted: int, jobs: int) -> None:
        from optuna.trial import TrialState

        def stop(number: int) -> None:
            self.signal = number

        begin, timeout = time.monotonic(), self.config.tune.timeout
        left = wanted - self.ended
        with interruptible(stop), Crew(jobs) as crew:
            while left > 0 or crew.busy:
                if self.signal is not None:
                    for order, _ in crew.stop_all():  # they stay RUNNING, and are taken up by the next call
                        self.say(f"{order.name} stopped with a checkpoint")
                    return
                if timeout is not None and time.monotonic() - begin > timeout:
                    left = 0
                while left > 0 and crew.free:
                    crew.start(self._ask())
                    left -= 1
                for order, facts in crew.finished(0.1):
                    self._tell(order, facts)
                for name in self._running:
                    self._report(name, crew.stop)
        assert not self.study.get_trials(states=(TrialState.RUNNING,))

    def _report(self, name: str, stop: Callable[[Order], None]) -> None:
        """Tells what a run has written down since the last look, and gives it up where that is not promising."""
        trial, order, tail = self._running[name]
        for line in tail.lines():
            value = line.get(self.config.tune.metric)
            if line["kind"] == "test" and value is not None and (name, line["step"]) not in self._reported:
                self._reported.add((name, line["step"]))
                trial.report(value, line["step"])
                if name not in self._given_up and trial.should_prune():
                    self._given_up.add(name)
                    stop(order)

    def _ask(self) -> Order:
        trial = self.study.ask(self.space)
        name = check_name(trial.user_attrs.get("folder") or f"trial-{trial.number:04d}", self.folder)
        trial.set_user_attr("folder", name)
        config = applied(self.config, values(self.config.tune.space, trial.params))
        config = replace(
            config,
            train=replace(config.train, threads=self.threads),
            run=replace(config.run, dir=str(self.folder / "trials" / name), keep=1, keep_epochs=False, report=False),
        )
        order = Order(name, config)
        self._running[name] = (trial, order, Tail(order.folder / "metrics.jsonl"))
        return order

    def _tell(self, order: Order, facts: Facts) -> None:
        from optuna.trial import TrialState

        trial, _, _ = self._running.pop(order.name)
        tried = ", ".join(
            f"{key}={f'{value:.4g}' if isinstance(value, float) else value}"
            for key, value in values(self.config.tune.space, trial.params).items()
        )
        value = facts.get(MEASURES[self.config.tune.metric])
        if "error" in facts or ("stopped" in facts and order.name not in self._given_up):
            trial.set_user_attr("error", facts.get("error") or "stopped by a signal")
            self.study.tell(trial, state=TrialState.FAIL)
            self.say(f"{order.name} failed ({tried}): {trial.user_attrs['error']}")
        elif "stopped" in facts:
            self.study.tell(trial, state=TrialState.PRUNED)
            self.say(f"{order.name} given up ({tried})")
        elif value is None or value != value:
            trial.set_user_attr("error", f"the test {self.config.tune.metric} is no number")
            self.study.tell(trial, state=TrialState.FAIL)
            self.say(f"{order.name} failed ({tried}): {trial.user_attrs['error']}")
        else:
            for key, fact in facts.items():
                trial.set_user_attr(key, fact)
            self.study.tell(trial, value)
            self.say(f"{order.name}: test {NAMES[self.config.tune.metric]} {value:.5f} ({tried})")
        self._tidy()

    def _tidy(self) -> None:
        """Keeps the checkpoints of the best trial alone; curves and logs stay of all."""
        best = self.best()
        for trial in self.study.trials:
            name = trial.user_attrs.get("folder")
            if name and trial.state.is_finished() and trial.number != best and name not in self._running:
                shutil.rmtree(inside(self.folder / "trials", name) / "checkpoints", ignore_errors=True)

    def best(self) -> int | None:
        """The number of the best trial."""
        try:
            return int(self.study.best_trial.number)
        except ValueError:  # there is none yet
            return None

    def best_config(self) -> Config:
        """Ready to train: with the best values, without the search, in a folder of its own."""
        config = applied(self.config, values(self.config.tune.space, self.study.best_trial.params))
        return replace(config, tune=Tune(), run=replace(config.run, dir=str(self.folder / "best")))

    def rows(self) -> list[Facts]:
        """Every trial that ended, and how; one that was interrupted is told by the trial that took it up."""
        from optuna.trial import TrialState

        found = []
        for trial in self.study.trials:
            facts = dict(trial.user_attrs)
            if trial.state is TrialState.FAIL and "error" not in facts:
                continue
            if trial.state.is_finished():
                state = {TrialState.COMPLETE: "done", TrialState.PRUNED: "given up"}.get(trial.state, "failed")
                tried = values(self.config.tune.space, trial.params)
                row = {"trial": trial.number, "state": state, "value": trial.value, **tried}
                row["model"] = Path(str(tried.get("model.name", self.config.model.name))).stem
                row |= {key: facts.get(key) for key in (*MEASURED, "error", "folder")}
                found.append(row)
        return found
