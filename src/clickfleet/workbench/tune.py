"""Search for settings: an Optuna study whose trials are runs, trained in several processes.


search = tune("config.yaml", out="tune")
search.best["test_auc"], search.config

The study is stored in study.db (SQLite), which only this process writes. A trial that was running when the search was killed is tried
again with the same values, and its run resumes from its newest checkpoint.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import clickfleet
from clickfleet.config.check import check, configure
from clickfleet.config.load import Config, dump
from clickfleet.config.plugins import find
from clickfleet.config.sections import Dimension, Tune
from clickfleet.data.dataset import settle_in
from clickfleet.data.files import check_name, inside
from clickfleet.errors import ConfigError, MissingError, TrainingError
from clickfleet.store.lock import Lock
from clickfleet.training import defaults, modes, validation
from clickfleet.training.metrics import check_monitor, distance, metric_name, value_of
from clickfleet.training.network import Model
from clickfleet.training.report import charts, page
from clickfleet.training.report.charts import Series
from clickfleet.training.signals import interruptible
from clickfleet.workbench.compare import MEASURED, changed, current, fingerprint, settings_of
from clickfleet.workbench.dashboard import MetricsTail
from clickfleet.workbench.runner import Facts, Order, RunEnd, TrialRunner, count, remove_results, share_cores
from clickfleet.workbench.studies import text_of
from clickfleet.workbench.tables import Column, TextTable, environment

if TYPE_CHECKING:
    import optuna


def trial_table(search: Search) -> TextTable:
    """Return the table of all trials, the best first."""
    ranked = sorted(search.rows, key=lambda row: distance(search.metric, row["value"]))
    shown = [{**row, **{key: _short(row[key]) for key in search.space}} for row in ranked]
    keys = [Column(key) for key in search.space]
    name = metric_name(search.metric)
    others = [] if search.metric in ("auc", "logloss") else [Column("value", f"validation {name}", "{:.4f}")]
    return TextTable(
        [
            Column("folder", "trial"),
            Column("state"),
            *keys,
            Column("train_auc", "training AUC", "{:.4f}"),
            *others,
            Column("valid_auc", "validation AUC", "{:.4f}"),
            Column("valid_logloss", "validation log loss", "{:.4f}"),
            Column("test_auc", "test AUC", "{:.4f}"),
            Column("seconds", "seconds", "{:.1f}"),
        ],
        shown,
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else text_of(value)


def importances(study: optuna.Study) -> dict[str, float]:
    """Return the importance of each setting for the metric; empty if there are too few trials."""
    import optuna

    done = [trial for trial in study.trials if trial.state is optuna.trial.TrialState.COMPLETE]
    if len(done) < 4 or len({trial.value for trial in done}) < 2:
        return {}
    return dict(optuna.importance.get_param_importances(study))


def write_all(search: Search, study: optuna.Study, config: Config) -> None:
    whole = trial_table(search)
    page.write(search.out / "tune.csv", TextTable([], search.rows).csv())
    page.write(search.out / "tune.md", f"## Trials\n\n{whole.markdown()}\n")
    best, now = search.best, time.strftime("%Y-%m-%d %H:%M")
    summary = (
        "no trial has succeeded yet"
        if best is None
        else f"best: {best['folder']}, validation {metric_name(search.metric)} {best['value']:.5f}"
    )
    parts = [
        f"<h1>{escape(search.out.name)}</h1>",
        f'<p class="soft">{len(search.rows)} trials, {escape(summary)}, {now}, clickfleet {clickfleet.__version__}</p>',
        page.section("History", page.charts(*history(search))),
        page.section("Importance", _importance(search.importances)),
        page.section("Settings", page.charts(*slices(search, config))),
        page.section("Trials", whole.html()),
        page.section("Failed", _failed(search.rows)),
        page.section("Environment", page.details("this machine", environment().text())),
    ]
    if search.config.is_file():
        parts.append(page.section("Best configuration", page.details("best.yaml", search.config.read_text())))
    page.write(search.page, page.page(f"{search.out.name} — search", parts))


def history(search: Search) -> list[str]:
    """Plot the value of every trial, and the best so far."""
    done = [(float(row["trial"]), float(row["value"])) for row in search.rows if row["state"] == "done"]
    if not done:
        return []
    best: list[tuple[float, float]] = []
    for place, value in done:
        better = not best or distance(search.metric, value) < distance(search.metric, best[-1][1])
        best.append((place, value if better else best[-1][1]))
    series = [Series("trials", done, "a", line=False), Series("best so far", best, "b")]
    given_up = [
        (float(row["trial"]), float(row["value"]))
        for row in search.rows
        if row["state"] == "given up" and row["value"] is not None
    ]
    if given_up:
        series.append(Series("given up", given_up, "d", line=False))
    return [charts.lines(f"Validation {metric_name(search.metric)}", series, "trial")]


def slices(search: Search, config: Config) -> list[str]:
    """Plot the metric over each setting."""
    figures = []
    for key, one in config.tune.space.items():
        rows = [row for row in search.rows if row["value"] is not None]
        if not rows:
            continue
        names = () if one.choices is None else tuple(map(text_of, one.choices))
        parts = []
        for state, kind in (("done", "a"), ("given up", "d")):
            points = [
                (float(names.index(text_of(row[key]))) if names else float(row[key]), float(row["value"]))
                for row in rows
                if row["state"] == state
            ]
            if points:
                parts.append(Series(state, points, kind, line=False))
        figures.append(
            charts.lines(key, parts, key, f"validation {metric_name(search.metric)}", log=one.log, names=names)
        )
    return figures


def _importance(shares: dict[str, float]) -> str:
    if not shares:
        return ""
    cells = ((escape(key), f"{share:.1%}", page.fill(share)) for key, share in shares.items())
    return page.table(("setting", "importance", ""), cells)


def _failed(rows: list[Facts]) -> str:
    return "".join(f"<p><b>{row['folder']}</b>: {escape(str(row['error']))}</p>" for row in rows if row.get("error"))


STUDY, BEST = "study.db", "best.yaml"
MOST_TRIALS = 10_000
"""Trials of a search that ends by the clock."""


@dataclass
class Search:
    """The result of a search. `best` is one of `rows`."""

    out: Path
    metric: str
    rows: list[Facts] = field(default_factory=list)
    best: Facts | None = None
    signal: int | None = None
    space: Mapping[str, Dimension] = field(default_factory=dict)
    """The settings that were searched."""
    importances: dict[str, float] = field(default_factory=dict)
    """How much of the difference between trials each setting explains; empty if there are too few trials."""

    @property
    def config(self) -> Path:
        """Return the path of the best configuration, ready to train."""
        return self.out / BEST

    @property
    def page(self) -> Path:
        return self.out / "tune.html"

    def to_dict(self) -> Facts:
        return {
            "rows": self.rows,
            "best": self.best,
            "importances": self.importances,
            "config": str(self.config),
            "out": str(self.out),
        }


def tune(
    config: Config | Mapping[str, Any] | str | Path | None,
    *overrides: str,
    trials: int | None = None,
    minutes: float | None = None,
    jobs: int | None = None,
    recipe: str | None = None,
    overwrite: bool = False,
    out: str | Path = "tune",
    say: Callable[[str], None] = print,
) -> Search:
    """Try settings of the section `tune` until there are `trials` trials, including those of earlier calls.

    Without tune.space, the search starts from the automatic settings for the data and tries values around them. `minutes` ends it
    after that time, without waiting for running trials, whatever their number. `overwrite` starts a new search in place of an
    earlier one.
    """
    settings = configure(config, overrides, recipe)
    guessed = not settings.tune.space
    metric = settings.tune.metric or settings.train.monitor
    key = "tune.metric" if settings.tune.metric else "train.monitor"
    check_monitor(metric, None, key=key, own=settings.train.metrics.functions)
    settings = replace(
        settings,
        train=replace(settings.train, monitor=metric),
        tune=replace(settings.tune, metric=metric),
    )
    check(settings)
    if not guessed:
        check_space(settings)
    if not settings.data.valid and settings.data.valid_share == 0:
        raise ConfigError("a search needs validation data", "set data.valid, or data.valid_share above 0")
    folder = Path(out).absolute()
    settings = validation.required(settle_in(settings, folder, say))
    validation.check_enough(settings, "a search", local=not modes.distributed(settings))
    if guessed:
        settings = with_space(settings, say)
    elif settings.tune.pruner != "none" and settings.train.eval_every is None:
        say("train.eval_every is not set: trials can be stopped early only at the end of an epoch")
    wanted = trials or (settings.tune.trials if minutes is None else MOST_TRIALS)
    jobs, threads = share_cores(settings, wanted, jobs, modes.distributed(settings))
    with Lock(folder / ".lock", "tunes"):
        if overwrite:
            remove_results(folder, STUDY, (STUDY, "trials", BEST, "tune.csv", "tune.md", "tune.html"))
        study = open_study(settings, folder)
        runner = StudyRunner(study, settings, folder, threads, say)
        if guessed and not study.trials:
            study.enqueue_trial(start_values(settings))
        before = f", {runner.ended} already ended" if runner.ended else ""
        planned = count(wanted, "trial") if minutes is None else f"{minutes:g} minutes of trials"
        say(f"{planned}{before}; {jobs} at a time, {count(threads, 'thread')} each")
        try:
            runner.run(wanted, jobs, None if minutes is None else 60 * minutes)
        finally:
            search = Search(folder, metric, runner.rows(), signal=runner.signal, space=settings.tune.space)
            search.importances = importances(study)
            search.best = next((row for row in search.rows if row["trial"] == runner.best()), None)
            if search.best is not None:
                page.write(search.config, dump(runner.best_config()))
            write_all(search, study, settings)
    if search.best is None and search.signal is None:
        errors = [row["error"] for row in search.rows if row.get("error")]
        raise TrainingError("no trial succeeded", f"the first failed with: {errors[0]}" if errors else "raise --trials")
    return search


def with_space(config: Config, say: Callable[[str], None]) -> Config:
    """Return the configuration with its automatic settings as plain numbers, and a search space around them."""
    chosen = defaults.choose(config)
    for note in chosen.notes:
        say(note)
    config = defaults.fixed(chosen.config)
    rule, first = config.table.rule.settings, (config.table.embed_rule or config.table.rule).settings
    batch = config.data.batch_rows
    known, given = settings_of(config.model.name), config.model.settings
    space = {
        "data.batch_size": Dimension(choices=(max(batch // 4, 1), max(batch // 2, 1), batch, 2 * batch)),
        "dense.lr": _around(config.dense.lr, 5),
    }
    rate, first_rate = rule.get("lr"), first.get("lr")
    if rate and first_rate:
        space |= {"table.rule.lr": _around(rate, 4), "table.embed_rule.lr": _around(first_rate, 4)}
    for key, l2 in (("l2_table", config.train.loss.l2_table), ("l2_rows", config.train.loss.l2_rows)):
        if l2:
            space[f"train.loss.{key}"] = _around(l2, 10)
    if config.table.dim and not config.table.named_slots:
        space["table.dim"] = Dimension(choices=tuple(sorted({4, config.table.dim, 16})))
    if "hidden" in known:
        hidden = given.get("hidden") or _default(config, "hidden")
        widths = {tuple(hidden), (64, 32), (128, 64), (400, 400, 400)}
        space["model.hidden"] = Dimension(choices=tuple(list(width) for width in sorted(widths)))
    if "dropout" in known:
        space["model.dropout"] = Dimension(choices=tuple(sorted({0.0, 0.2, float(given.get("dropout", 0.0))})))
    say(f"no search space given: trying {', '.join(space)}")
    return replace(config, tune=replace(config.tune, space=space))


def _default(config: Config, name: str) -> Any:
    """Return the default of a setting of the model."""
    model: type[Model] = find("models", config.model, Model)
    return getattr(model.Config(), name)


def _around(value: float, factor: float) -> Dimension:
    return Dimension(low=value / factor, high=value * factor, log=True)


def start_values(config: Config) -> dict[str, Any]:
    """Return the settings of the configuration as the parameters of the first trial."""
    params: dict[str, Any] = {}
    for key, one in config.tune.space.items():
        value: Any = current(config, key)
        if value is None and one.choices is not None:  # the default of the model
            value = _default(config, key.rpartition(".")[2])
        value = list(value) if isinstance(value, tuple) else value
        params[key] = json.dumps(value) if one.choices is not None else value
    return params


def open_study(config: Config, folder: Path) -> optuna.Study:
    """Open or create the study of a folder. Raise if it belongs to other settings."""
    try:
        import optuna
    except ModuleNotFoundError:
        raise MissingError("optuna", "tune") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    settings = config.tune
    seed = settings.seed
    study = optuna.create_study(
        storage=f"sqlite:///{folder / STUDY}",
        study_name="clickfleet",
        direction="minimize",  # the distance from the best value of the metric
        load_if_exists=True,
        pruner={
            "median": optuna.pruners.MedianPruner(n_startup_trials=settings.warmup_trials),
            "halving": optuna.pruners.SuccessiveHalvingPruner(),
            "none": optuna.pruners.NopPruner(),
        }[settings.pruner],
    )
    seed += len(study.trials)  # a resumed study must not repeat its samples
    study.sampler = (
        optuna.samplers.TPESampler(seed=seed, n_startup_trials=settings.warmup_trials)
        if settings.sampler == "tpe"
        else optuna.samplers.RandomSampler(seed=seed)
    )
    space = {key: vars(one) for key, one in settings.space.items()}
    mark = json.dumps([fingerprint(config), settings.metric or config.train.monitor, space], sort_keys=True)
    if study.user_attrs.setdefault("clickfleet", mark) != mark:
        raise ConfigError(f"{folder / STUDY} holds a search with other settings", "choose another --out")
    study.set_user_attr("clickfleet", mark)
    return study


class StudyRunner:
    """Ask Optuna for trials, train them, report their evaluations and results to Optuna."""

    def __init__(
        self, study: optuna.Study, config: Config, folder: Path, threads: int, say: Callable[[str], None]
    ) -> None:
        self.study, self.config, self.folder, self.threads, self.say = study, config, folder, threads, say
        self.metric = config.train.monitor
        self.signal: int | None = None
        self.space = {key: distribution(one) for key, one in config.tune.space.items()}
        self._running: dict[str, tuple[optuna.Trial, Order, MetricsTail]] = {}
        self._pruned: set[str] = set()
        self._reported: set[tuple[str, int]] = set()
        """Steps whose evaluation was reported; a resumed run writes some again."""
        self._requeue_interrupted()

    def _requeue_interrupted(self) -> None:
        """Queue the trials of a killed search again, each in its folder."""
        from optuna.trial import TrialState

        for trial in self.study.get_trials(states=(TrialState.RUNNING,)):
            self.study.tell(trial.number, state=TrialState.FAIL)
            folder = trial.user_attrs.get("folder")
            if folder is not None and set(trial.params) == set(self.space):
                self.study.enqueue_trial(trial.params, user_attrs={"folder": folder})

    @property
    def ended(self) -> int:
        return len(self.rows())

    def run(self, wanted: int, jobs: int, limit_s: float | None = None) -> None:
        """Run trials until `wanted` have ended. After `limit_s`, give up the running ones, but let the first one succeed."""
        from optuna.trial import TrialState

        def stop(number: int) -> None:
            self.signal = number

        begin, timeout = time.monotonic(), self.config.tune.timeout
        left = wanted - self.ended
        with interruptible(stop), TrialRunner(jobs) as processes:
            while left > 0 or processes.busy:
                if self.signal is not None:
                    for order, _ in processes.stop_all():  # they stay RUNNING; the next call resumes them
                        self.say(f"{order.name} stopped with a checkpoint")
                    return
                elapsed = time.monotonic() - begin
                if any(limit is not None and elapsed > limit for limit in (timeout, limit_s)):
                    left = 0
                if limit_s is not None and elapsed > limit_s and self.best() is not None:
                    for name in self._running.keys() - self._pruned:
                        self._pruned.add(name)
                        processes.stop(self._running[name][1])
                while left > 0 and processes.free:
                    processes.start(self.ask())
                    left -= 1
                for order, end in processes.finished(0.1):
                    self.record(order, end)
                for name in self._running:
                    self.report(name, processes.stop)
        assert not self.study.get_trials(states=(TrialState.RUNNING,))

    def report(self, name: str, stop: Callable[[Order], None]) -> None:
        """Report new evaluations of a run, and stop it if it is not promising."""
        trial, order, tail = self._running[name]
        for line in tail.lines():
            value = value_of(line, self.metric)
            if line["kind"] == "valid" and value is not None and (name, line["step"]) not in self._reported:
                self._reported.add((name, line["step"]))
                trial.report(distance(self.metric, value), line["step"])
                trial.set_user_attr("value", value)
                if name not in self._pruned and trial.should_prune():
                    self._pruned.add(name)
                    stop(order)

    def ask(self) -> Order:
        """Ask Optuna for the next trial. Return its run."""
        trial = self.study.ask(self.space)
        name = check_name(trial.user_attrs.get("folder") or f"trial-{trial.number:04d}", self.folder)
        trial.set_user_attr("folder", name)
        config = with_settings(self.config, values(self.config.tune.space, trial.params))
        config = replace(
            config,
            train=replace(config.train, threads=self.threads, average=False),  # averages need every epoch
            run=replace(config.run, dir=str(self.folder / "trials" / name), keep=1, keep_epochs=False, report=False),
        )
        order = Order(name, config)
        self._running[name] = (trial, order, MetricsTail(order.folder / "metrics.jsonl"))
        return order

    def record(self, order: Order, end: RunEnd) -> None:
        """Report to Optuna how a trial ended."""
        from optuna.trial import TrialState

        trial, _, _ = self._running.pop(order.name)
        tried = ", ".join(
            f"{key}={f'{value:.4g}' if isinstance(value, float) else value}"
            for key, value in values(self.config.tune.space, trial.params).items()
        )
        name = metric_name(self.metric)
        value = None if end.result is None else end.result.value
        if end.stopped is not None and order.name in self._pruned:
            self.study.tell(trial, state=TrialState.PRUNED)
            self.say(f"{order.name} stopped early ({tried})")
        elif end.result is not None and value is not None and value == value:
            for key, fact in asdict(end.result).items():
                trial.set_user_attr(key, fact)
            self.study.tell(trial, distance(self.metric, value))
            self.say(f"{order.name}: validation {name} {value:.5f} ({tried})")
        else:
            stopped = (
                "stopped by a signal"
                if end.stopped is not None
                else f"there is no validation {name}; see {order.folder}/log.txt"
            )
            error = end.error or stopped
            trial.set_user_attr("error", error)
            self.study.tell(trial, state=TrialState.FAIL)
            self.say(f"{order.name} failed ({tried}): {error}")
        self._remove_checkpoints()

    def _remove_checkpoints(self) -> None:
        """Delete the checkpoints of all trials but the best. Curves and logs stay."""
        best = self.best()
        for trial in self.study.trials:
            name = trial.user_attrs.get("folder")
            if name and trial.state.is_finished() and trial.number != best and name not in self._running:
                shutil.rmtree(inside(self.folder / "trials", name) / "checkpoints", ignore_errors=True)

    def best(self) -> int | None:
        """Return the number of the best trial."""
        try:
            return int(self.study.best_trial.number)
        except ValueError:  # no trial has succeeded yet
            return None

    def best_config(self) -> Config:
        """Return the configuration with the best values and its own run folder, without the search."""
        config = with_settings(self.config, values(self.config.tune.space, self.study.best_trial.params))
        return replace(config, tune=Tune(), run=replace(config.run, dir=str(self.folder / "best")))

    def rows(self) -> list[Facts]:
        """Return all ended trials. An interrupted trial appears as the one that resumed it."""
        from optuna.trial import TrialState

        rows = []
        for trial in self.study.trials:
            facts = dict(trial.user_attrs)
            if trial.state is TrialState.FAIL and "error" not in facts:
                continue
            if trial.state.is_finished():
                state = {TrialState.COMPLETE: "done", TrialState.PRUNED: "given up"}.get(trial.state, "failed")
                tried = values(self.config.tune.space, trial.params)
                row = {"trial": trial.number, "state": state, **tried}
                row["model"] = Path(str(tried.get("model.name", self.config.model.name))).stem
                row |= {key: facts.get(key) for key in (*MEASURED, "error", "folder")}
                row["value"] = facts.get("value") if state != "failed" else None
                rows.append(row)
        return rows


def check_space(config: Config) -> None:
    """Raise if the space is contradictory, or holds a value that the configuration rejects."""
    for key, one in config.tune.space.items():
        where = f"tune.space.{key}"
        ranged = (one.low, one.high)
        if (one.choices is None) == (ranged == (None, None)):
            raise ConfigError(f"{where} needs either choices, or low and high")
        if one.choices is not None:
            if not one.choices or one.step is not None or one.log:
                raise ConfigError(f"{where}: choices must hold at least one value, and allow neither step nor log")
        elif one.low is None or one.high is None or not one.low < one.high:
            raise ConfigError(f"{where}: low and high must both be given, low below high")
        elif one.log and (one.low <= 0 or one.step is not None):
            raise ConfigError(f"{where}: log needs low above 0, and allows no step")
        elif one.step is not None and not 0 < one.step <= one.high - one.low:
            raise ConfigError(f"{where}: step must be above 0 and at most high - low")
        for value in one.choices if one.choices is not None else (_number(one, one.low), _number(one, one.high)):
            try:
                changed(config, key, value)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from None


def distribution(one: Dimension) -> optuna.distributions.BaseDistribution:
    """Convert a dimension to Optuna's type. Choices become JSON, because Optuna does not accept lists."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if one.choices is not None:
        return CategoricalDistribution([json.dumps(choice) for choice in one.choices])
    assert one.low is not None
    assert one.high is not None
    if _whole(one):
        return IntDistribution(int(one.low), int(one.high), log=one.log, step=int(one.step or 1))
    return FloatDistribution(one.low, one.high, log=one.log, step=one.step)


def values(space: Mapping[str, Dimension], tried: Mapping[str, Any]) -> Facts:
    """Convert Optuna's parameters to values of settings."""
    return {key: json.loads(tried[key]) if one.choices is not None else tried[key] for key, one in space.items()}


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    for key, value in settings.items():
        config = changed(config, key, value)
    return config


def _whole(one: Dimension) -> bool:
    return all(isinstance(x, int) for x in (one.low, one.high, one.step) if x is not None)


def _number(one: Dimension, value: float | None) -> float | int:
    assert value is not None
    return int(value) if _whole(one) else value
