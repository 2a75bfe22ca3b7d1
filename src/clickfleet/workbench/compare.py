"""Compare models and settings: train them on the same data and seeds, and write tables, curves and plots.


comparison = compare("config.yaml", models=["dnn", "fm"], sets=["dense.lr=0.01,0.001"], out="compare")
comparison.rows[0]["test_auc"], comparison.page
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import clickfleet
from clickfleet.config.check import check, configure
from clickfleet.config.load import Config, override, plain
from clickfleet.config.plugins import Plugin, find
from clickfleet.data.dataset import settle_in
from clickfleet.errors import ConfigError
from clickfleet.store.lock import Lock
from clickfleet.training import modes, validation
from clickfleet.training.metrics import distance, metric_name
from clickfleet.training.report import charts, page
from clickfleet.training.report.charts import KINDS, Series
from clickfleet.training.report.evidence import read_lines
from clickfleet.training.report.stream import numbered
from clickfleet.training.signals import interruptible
from clickfleet.workbench import studies
from clickfleet.workbench.headings import Language, heading, known_language
from clickfleet.workbench.runner import Facts, Order, RunEnd, RunResult, TrialRunner, count, remove_results, share_cores
from clickfleet.workbench.studies import Study, Variant, text_of
from clickfleet.workbench.tables import Column, TextTable, environment

NUMBERS = (
    Column("train_loss", "training loss", "{:.4f}"),
    Column("train_auc", "training AUC", "{:.4f}"),
    Column("valid_auc", "validation AUC", "{:.4f}"),
    Column("valid_auc_std", "±", "{:.4f}"),
    Column("valid_logloss", "validation log loss", "{:.4f}"),
    Column("test_auc", "test AUC", "{:.4f}"),
    Column("test_auc_std", "±", "{:.4f}"),
    Column("logloss", "test log loss", "{:.4f}"),
    Column("rows_per_s", "rows/s", "{:,.0f}"),
    Column("parameters", "parameters", "{:,.0f}"),
    Column("seconds", "seconds", "{:.1f}"),
    Column("without_result", "without result"),
)
OTHER_LABEL = "test "
"""Starts the keys of test metrics of the labels after the first."""
AS_CONFIGURED = " (as configured)"
"""Ends the label of the configured value in a study that does not list it."""


def model_table(comparison: Comparison, language: Language = "en") -> TextTable:
    """Return the table of the models as configured."""
    return _table([Column("model")], comparison.rows, language)


def study_tables(comparison: Comparison, language: Language = "en") -> dict[str, TextTable]:
    """Return one table per studied setting."""
    several = len(comparison.plan.models) > 1
    return {
        key: _table([*([Column("model")] if several else []), Column("value", key)], rows, language)
        for key, rows in comparison.studies.items()
    }


def _table(first: Sequence[Column], rows: Sequence[Facts], language: Language) -> TextTable:
    others = dict.fromkeys(key for row in rows for key in row if key.startswith(OTHER_LABEL))
    labels = [Column(key, f"test {metric_name(key.removeprefix(OTHER_LABEL))}", "{:.4f}") for key in others]
    numbers = [*NUMBERS[:8], *labels, *NUMBERS[8:]]
    columns = [column._replace(title=heading(column.head, language)) for column in (*first, *numbers)]
    if language != "en":
        rows = [{**row, **_translated(row, language)} for row in rows]
    return TextTable(columns, rows)


def _translated(row: Facts, language: Language) -> Facts:
    """Return the texts of a row that are words, not values."""
    changed: Facts = {}
    value = row.get("value")
    if isinstance(value, str) and value.endswith(AS_CONFIGURED):
        changed["value"] = f"{value.removesuffix(AS_CONFIGURED)}（{heading('as configured', language)}）"
    if row.get("without_result"):
        parts = (part.split(" ", 1) for part in row["without_result"].split(", "))
        changed["without_result"] = ", ".join(f"{n} {heading(state, language)}" for n, state in parts)
    return changed


def write_all(comparison: Comparison) -> None:
    """Write compare.csv, compare.md and compare.html."""
    lines = [*comparison.rows, *(row for rows in comparison.studies.values() for row in rows)]
    page.write(comparison.out / "compare.csv", TextTable([], lines).csv())
    page.write(comparison.out / "compare.md", markdown(comparison))
    page.write(comparison.page, html(comparison))


def markdown(comparison: Comparison) -> str:
    language = comparison.language
    parts = [f"## {heading('Models', language)}", "", model_table(comparison, language).markdown()]
    for key, table in study_tables(comparison, language).items():
        parts += ["", f"## {comparison.title(key)}", "", table.markdown()]
    if comparison.failed:
        parts += ["", f"## {heading('Failed', language)}", ""]
        parts += [f"* `{name}`: {text}" for name, text in comparison.failed.items()]
    return "\n".join(parts) + "\n"


def html(comparison: Comparison) -> str:
    language = comparison.language
    now = time.strftime("%Y-%m-%d %H:%M")
    seeds = ", ".join(map(str, comparison.plan.seeds))
    runs = (
        f"{len(comparison.runs)} runs, seeds {seeds}"
        if language == "en"
        else f"{len(comparison.runs)} 次训练，随机种子 {seeds}"
    )
    parts = [
        f"<h1>{escape(comparison.out.name)}</h1>",
        f'<p class="soft">{runs}, {now}, clickfleet {clickfleet.__version__}</p>',
        page.section(heading("Models", language), model_table(comparison, language).html()),
        page.section(heading("Curves", language), page.charts(*curves(comparison))),
    ]
    for key, table in study_tables(comparison, language).items():
        figures = study_charts(key, comparison.studies[key], language)
        parts.append(page.section(comparison.title(key), page.charts(*figures), table.html()))
    failed = "".join(f"<p><b>{escape(name)}</b>: {escape(text)}</p>" for name, text in comparison.failed.items())
    parts.append(page.section(heading("Failed", language), failed))
    machine = page.details(heading("this machine", language), environment().text())
    parts.append(page.section(heading("Environment", language), machine))
    return page.page(f"{comparison.out.name} — {heading('comparison', language)}", parts, language)


def curves(comparison: Comparison) -> list[str]:
    """Plot the curves of every model with its first seed over the rows trained on."""
    figures = []
    for title, kind, key in (
        ("Validation AUC", "valid", "auc"),
        ("Training AUC", "train", "auc"),
        ("Validation log loss", "valid", "logloss"),
        ("Training loss", "train", "loss"),
    ):
        series = [
            Series(line.model, points(line.orders[0], kind, key), KINDS[i % len(KINDS)], dots=kind == "valid")
            for i, line in enumerate(comparison.plan.models)
        ]
        series = [one for one in series if one.points]
        if series:
            language = comparison.language
            figures.append(charts.lines(heading(title, language), series, heading("rows trained on", language)))
    return figures


def points(order: Order, kind: str, key: str) -> list[tuple[float, float]]:
    """Return a curve of a run over the rows trained on."""
    if not (order.folder / "metrics.jsonl").is_file():
        return []
    return numbered(read_lines(order.folder)[kind], key, "trained_rows" if kind == "test" else "rows")


def study_charts(key: str, rows: list[Facts], language: Language = "en") -> list[str]:
    """Plot AUC and log loss over the values of a setting, one curve per model."""
    values = list(dict.fromkeys(str(row["value"]) for row in rows))
    names = list(dict.fromkeys(str(row["model"]) for row in rows))
    figures = []
    for title, measure in (
        ("Validation AUC", "valid_auc"),
        ("Validation log loss", "valid_logloss"),
        ("Test AUC", "test_auc"),
        ("Training AUC", "train_auc"),
    ):
        series = []
        for i, name in enumerate(names):
            points = [
                (float(values.index(str(row["value"]))), float(row[measure]))
                for row in rows
                if row["model"] == name and row[measure] is not None
            ]
            if points:
                series.append(Series(name, sorted(points), KINDS[i % len(KINDS)], dots=True))
        if series:
            text = f"{title} by {key}" if language == "en" else f"{heading(title, language)}（{key}）"
            figures.append(charts.lines(text, series, key, names=values))
    return figures


RESULT, ORDER = "result.json", "order.json"
MEASURED = (
    *("train_loss", "train_auc", "valid_auc", "valid_logloss", "test_auc", "logloss"),
    *("rows_per_s", "parameters", "seconds"),
)


@dataclass
class Comparison:
    """The result of a comparison. Numbers are means over the seeds."""

    plan: ComparisonPlan
    out: Path
    rows: list[Facts] = field(default_factory=list)
    """The models as configured, the best on validation data first."""
    studies: dict[str, list[Facts]] = field(default_factory=dict)
    """For each studied setting, the models with each of its values."""
    runs: list[Facts] = field(default_factory=list)
    """Every run that succeeded."""
    failed: dict[str, str] = field(default_factory=dict)
    """Errors of the runs that failed."""
    signal: int | None = None
    """The signal that interrupted the comparison."""
    language: Language = "en"
    """Of the headings in compare.md and compare.html."""

    def title(self, key: str) -> str:
        """Return the heading of a study."""
        return studies.title(self.plan.about[key], self.language)

    @property
    def page(self) -> Path:
        return self.out / "compare.html"

    def to_dict(self) -> Facts:
        return {
            "rows": self.rows,
            "studies": self.studies,
            "runs": self.runs,
            "failed": self.failed,
            "out": str(self.out),
            "ok": not self.failed,
        }


@dataclass(frozen=True)
class OtherKeys:
    """Keys of a file of another system, which a study may vary like ours."""

    includes: Callable[[str], bool]
    current: Callable[[str], Any]
    """key -> its value in the file"""
    changed: Callable[[Mapping[str, Any]], Config]
    """values by key -> the configuration of the file with these values"""


def compare(
    config: Config | Mapping[str, Any] | str | Path | None,
    *overrides: str,
    models: Sequence[str] = (),
    sets: Sequence[str] = (),
    seeds: Sequence[int] = (),
    jobs: int | None = None,
    recipe: str | None = None,
    overwrite: bool = False,
    out: str | Path = "compare",
    say: Callable[[str], None] = print,
    other_keys: OtherKeys | None = None,
    course: bool = False,
    language: str = "en",
) -> Comparison:
    """Train every model with every setting and seed, skip finished runs, and write the results to `out`.

    Each of `sets` is a study `key=a,b,c`: one setting varies, the others stay as configured. Settings joined by + vary together.
    `course` adds the studies of PaddleRec's course. `overwrite` trains all runs anew. `other_keys` may be varied too.
    `language` is that of the headings in the written tables: en or zh.
    """
    spoken = known_language(language)
    folder = Path(out).absolute()
    base = configure(config, overrides, recipe)
    check(base)
    metric = base.train.monitor
    base = validation.required(settle_in(base, folder, say))
    planned = plan(base, models, sets, seeds, folder, say, other_keys, course)
    comparison = Comparison(planned, folder, language=spoken)
    orders = comparison.plan.orders
    jobs, threads = share_cores(base, len(orders), jobs, modes.distributed(base))
    with Lock(folder / ".lock", "compares"):
        if overwrite:
            remove_results(folder, f"runs/*/{ORDER}", ("runs", "compare.csv", "compare.md", "compare.html"))
        results = {order.name: done for order in orders if (done := finished(order)) is not None}
        waiting = [order for order in orders if order.name not in results]
        before = f", {len(results)} already done" if results else ""
        say(f"{count(len(orders), 'run')}{before}; {jobs} at a time, {count(threads, 'thread')} each")
        _train([_with_threads(order, threads) for order in waiting], jobs, results, comparison, say)
        comparison.runs = [{"run": name, **dataclasses.asdict(one)} for name, one in results.items()]
        failed = comparison.failed
        rows = [_row(line, results, failed) for line in comparison.plan.models]
        comparison.rows = sorted(rows, key=lambda row: distance(metric, row["monitored"]))
        comparison.studies = {
            key: [_row(line, results, failed) for line in lines] for key, lines in comparison.plan.studies.items()
        }
        write_all(comparison)
    return comparison


def _train(
    waiting: list[Order], jobs: int, results: dict[str, RunResult], comparison: Comparison, say: Callable[[str], None]
) -> None:
    def stop(number: int) -> None:
        comparison.signal = number

    with interruptible(stop), TrialRunner(jobs) as processes:
        while (waiting and comparison.signal is None) or processes.busy:
            if comparison.signal is not None:
                for order, end in processes.stop_all():
                    _record(order, end, results, comparison, say)
                break
            while waiting and processes.free:
                order = waiting.pop(0)
                page.write(order.folder / ORDER, json.dumps({"fingerprint": fingerprint(order.config)}))
                processes.start(order)
            for order, end in processes.finished(0.2):
                _record(order, end, results, comparison, say)


def _record(
    order: Order, end: RunEnd, results: dict[str, RunResult], comparison: Comparison, say: Callable[[str], None]
) -> None:
    """Store and report how a run ended."""
    place = f"{len(results) + len(comparison.failed) + 1}/{len(comparison.plan.orders)}"
    if end.result is not None:
        results[order.name] = end.result
        page.write(order.folder / RESULT, json.dumps(dataclasses.asdict(end.result)))
        value, name = end.result.value, metric_name(order.config.train.monitor)
        shown = "" if value is None else f"validation {name} {value:.4f}, "
        say(f"{place} {order.name}: {shown}{end.result.seconds:.1f} s")
    elif end.stopped is not None:
        if comparison.signal is None:
            comparison.failed[order.name] = f"stopped by signal {end.stopped}; the same command resumes it"
        say(f"{order.name} stopped with a checkpoint; the same command resumes it")
    else:
        comparison.failed[order.name] = end.error or ""
        say(f"{place} {order.name} failed: {end.error}")


def finished(order: Order) -> RunResult | None:
    """Return the result of a finished run. Raise if the folder belongs to a run with other settings."""
    started, done = order.folder / ORDER, order.folder / RESULT
    if started.is_file() and json.loads(started.read_text())["fingerprint"] != fingerprint(order.config):
        raise ConfigError(
            f"{order.folder} holds a run with other settings", "choose another --out, or delete that folder"
        )
    return RunResult(**json.loads(done.read_text())) if done.is_file() else None


def _with_threads(order: Order, threads: int) -> Order:
    config = order.config
    return Order(order.name, replace(config, train=replace(config.train, threads=threads)))


def _row(line: ComparisonRow, results: Mapping[str, RunResult], failed: Mapping[str, str]) -> Facts:
    """Return the means over the seeds that succeeded, None where none did, and how many have no result."""
    each = [results[order.name] for order in line.orders if order.name in results]
    row: Facts = {"model": line.model}
    if line.setting is not None:
        row |= {"setting": line.setting, "value": line.value}
    row |= {key: mean(getattr(one, key) for one in each) for key in MEASURED}
    row["monitored"] = mean(one.value for one in each)
    for name in dict.fromkeys(name for one in each for name in one.others):
        row[f"{OTHER_LABEL}{name}"] = mean(one.others.get(name) for one in each)
    if len(line.orders) > 1:
        row["seeds"] = len(each)
        for key in ("valid_auc", "test_auc"):
            aucs = [auc for one in each if (auc := getattr(one, key)) is not None]
            row[f"{key}_std"] = statistics.stdev(aucs) if len(aucs) > 1 else None
    errors = sum(order.name in failed for order in line.orders)
    parts = {"failed": errors, "not finished": len(line.orders) - len(each) - errors}
    row["without_result"] = ", ".join(f"{n} {state}" for state, n in parts.items() if n) or None
    return row


@dataclass(frozen=True)
class ComparisonRow:
    """One row of a table: a model with a setting, trained once per seed."""

    model: str
    setting: str | None
    """The key that differs from the configuration, if any."""
    value: str | None
    orders: tuple[Order, ...]


@dataclass(frozen=True)
class ComparisonPlan:
    """The models as configured, and a study for each setting: the models with each of its values."""

    models: tuple[ComparisonRow, ...]
    studies: Mapping[str, tuple[ComparisonRow, ...]]
    seeds: tuple[int, ...]
    about: Mapping[str, Study] = field(default_factory=dict)
    """What each study varies."""

    @property
    def orders(self) -> list[Order]:
        """Return every run once."""
        lines = [*self.models, *(line for study in self.studies.values() for line in study)]
        return list({order.name: order for line in lines for order in line.orders}.values())


def plan(
    base: Config,
    models: Sequence[str],
    sets: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    say: Callable[[str], None],
    other_keys: OtherKeys | None = None,
    course: bool = False,
) -> ComparisonPlan:
    """Plan all runs. Raise at once for unknown settings."""
    planner = _Planner(out, tuple(seeds) or (base.train.seed,))
    names = list(dict.fromkeys(models)) or [base.model.name]
    wanted = studies.parse(sets)
    if course:
        wanted = studies.course(base, wanted, settings_of, names, paddlerec=other_keys is not None)
    alone, rows = [], {study.key: list[ComparisonRow]() for study in wanted}
    for name in names:
        config = with_model(base, name, say)
        first = planner.row(config, None, None)
        alone.append(first)
        for study in wanted:
            missing = [key for key in study.keys if not _is_of(other_keys, key) and not has_setting(config, key)]
            if missing:
                say(f"{first.model} has no {', '.join(missing)}; left out of that study")
                continue
            lines = [
                planner.row(varied(config, name, variant, other_keys), study.key, variant.label)
                for variant in study.variants
            ]
            rules = {order.config.table.rule.name for line in lines for order in line.orders}
            if study.course and studies.axis_of(study) is studies.OPTIMIZER and len(rules) == 1:
                say(f"{first.model}: the rows keep the rule {rules.pop()} in the study of {study.key}")
            if all(line.orders != first.orders for line in lines):
                now = configured(config, study, other_keys)
                lines.insert(0, replace(first, setting=study.key, value=f"{now}{AS_CONFIGURED}"))
            rows[study.key] += lines
    for study in wanted:
        if not rows[study.key] and not study.course:
            raise ConfigError(f"none of the models has {study.key}", "add a model that has it, or remove that --set")
    kept = {key: tuple(lines) for key, lines in rows.items() if lines}
    return ComparisonPlan(tuple(alone), kept, planner.seeds, {study.key: study for study in wanted})


def _is_of(other_keys: OtherKeys | None, key: str) -> bool:
    return other_keys is not None and other_keys.includes(key)


def varied(config: Config, model: str, variant: Variant, other_keys: OtherKeys | None) -> Config:
    """Return the configuration of a variant: first with the keys of the other system, then with ours."""
    others = {key: value for key, value in variant.settings.items() if _is_of(other_keys, key)}
    if others and other_keys is not None:
        config = with_model(other_keys.changed(others), model, lambda _: None)
    return changed_by(config, {key: value for key, value in variant.settings.items() if key not in others})


def configured(config: Config, study: Study, other_keys: OtherKeys | None) -> str:
    """Return the label of the configured values of a study."""
    values = [
        other_keys.current(key) if other_keys is not None and other_keys.includes(key) else current(config, key)
        for key in study.keys
    ]
    return ", ".join(dict.fromkeys(map(text_of, values)))


class _Planner:
    """Plan runs, so that equal configurations share one."""

    def __init__(self, out: Path, seeds: tuple[int, ...]) -> None:
        self.out, self.seeds = out, seeds
        self._orders: dict[str, Order] = {}

    def row(self, config: Config, key: str | None, text: str | None) -> ComparisonRow:
        stem = Path(config.model.name).stem
        name = stem if key is None else f"{stem}-{key}={text}"
        orders = tuple(self._order(config, name, seed) for seed in self.seeds)
        return ComparisonRow(stem, key, text, orders)

    def _order(self, config: Config, name: str, seed: int) -> Order:
        config = replace(config, train=replace(config.train, seed=seed))
        mark = fingerprint(config)
        if mark not in self._orders:
            slug = re.sub(r"[^\w.=-]+", "_", f"{name}-seed{seed}").strip("_")[:90]
            if any(order.name == slug for order in self._orders.values()):
                slug = f"{slug}-{mark[:8]}"
            folder = replace(config.run, dir=str(self.out / "runs" / slug))
            self._orders[mark] = Order(slug, replace(config, run=folder))
        return self._orders[mark]


def fingerprint(config: Config) -> str:
    """Hash the settings that affect what a run learns: no paths, no threads, no default values."""
    raw, default = plain(config), plain(Config())
    for section in ("run", "online", "publish", "serve", "tune"):
        del raw[section]
    raw["train"] |= {key: default["train"][key] for key in ("threads", "hogwild", "profile")}
    raw["data"]["threads"] = default["data"]["threads"]
    return hashlib.blake2b(json.dumps(_non_defaults(raw, default), sort_keys=True).encode(), digest_size=16).hexdigest()


def _non_defaults(value: Any, default: Any) -> Any:
    """Return the values that differ from the defaults, so that settings added by later versions change no hash."""
    if isinstance(value, dict) and isinstance(default, dict):
        parts = {key: _non_defaults(item, default.get(key)) for key, item in value.items() if item != default.get(key)}
        return {key: part for key, part in parts.items() if part != {}}
    return value


def with_model(config: Config, name: str, say: Callable[[str], None]) -> Config:
    """Return the configuration with another model. Keep the model settings that the other model has too."""
    if name == config.model.name:
        return config
    if name.endswith(".py"):
        name = str(Path(name).absolute())
    known = settings_of(name)
    kept = {key: value for key, value in config.model.settings.items() if key in known}
    dropped = [f"model.{key}" for key in config.model.settings if key not in known]
    if dropped:
        say(f"{Path(name).stem} has no {', '.join(dropped)}; left out for it")
    return replace(config, model=Plugin(name, kept))


def settings_of(name: str) -> set[str]:
    """Return the names of a model's settings."""
    from clickfleet.training.network import Model

    return {field.name for field in dataclasses.fields(find("models", name, Model).Config)}


def has_setting(config: Config, key: str) -> bool:
    """Return whether a setting applies to the model of a configuration."""
    section, _, name = key.partition(".")
    return section != "model" or name == "name" or name in settings_of(config.model.name)


def changed(config: Config, key: str, value: Any) -> Config:
    """Return the configuration with another value, checked like a setting in the file."""
    return changed_by(config, {key: value})


def changed_by(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the configuration with other values of several settings."""
    if not settings:
        return config
    raw = plain(config, as_given=True)
    for key, value in settings.items():
        override(raw, f"{key}={json.dumps(value)}")
    return configure(raw)


def current(config: Config, key: str) -> Any:
    """Return the value of a dotted key; None if the plug-in's default applies."""
    value: Any = plain(config)
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
