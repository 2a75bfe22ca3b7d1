"""A search -> tune.csv, tune.md and tune.html: its history, what mattered, and each setting by itself."""

from __future__ import annotations

import time
from html import escape
from typing import TYPE_CHECKING, Any

import clickfleet
from clickfleet.config import Config
from clickfleet.report import charts, page
from clickfleet.report.charts import Series
from clickfleet.workbench.crew import Facts
from clickfleet.workbench.machine import environment
from clickfleet.workbench.plan import text_of
from clickfleet.workbench.tables import Column, Table
from clickfleet.workbench.tune import NAMES, Search

if TYPE_CHECKING:
    import optuna


def table(found: Search, config: Config) -> Table:
    """Every trial, the best first."""
    sign = -1 if found.metric == "auc" else 1
    ranked = sorted(found.rows, key=lambda row: (row["value"] is None, sign * (row["value"] or 0.0)))
    shown = [{**row, **{key: _short(row[key]) for key in config.tune.space}} for row in ranked]
    keys = [Column(key) for key in config.tune.space]
    return Table(
        [
            Column("folder", "trial"),
            Column("state"),
            *keys,
            Column("train_auc", "training AUC", "{:.4f}"),
            Column("test_auc", "test AUC", "{:.4f}"),
            Column("logloss", "log loss", "{:.4f}"),
            Column("seconds", "seconds", "{:.1f}"),
        ],
        shown,
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else text_of(value)


def importances(study: optuna.Study) -> dict[str, float]:
    """The share of each setting in what made trials good; none where there are too few to tell."""
    import optuna

    done = [trial for trial in study.trials if trial.state is optuna.trial.TrialState.COMPLETE]
    if len(done) < 4 or len({trial.value for trial in done}) < 2:
        return {}
    return dict(optuna.importance.get_param_importances(study))


def write_all(found: Search, study: optuna.Study, config: Config) -> None:
    whole = table(found, config)
    page.write(found.out / "tune.csv", Table([], found.rows).csv())
    page.write(found.out / "tune.md", f"## Trials\n\n{whole.markdown()}\n")
    best, made = found.best, time.strftime("%Y-%m-%d %H:%M")
    words = (
        "no trial has ended well yet"
        if best is None
        else f"best: {best['folder']}, test {NAMES[found.metric]} {best['value']:.5f}"
    )
    parts = [
        f"<h1>{escape(found.out.name)}</h1>",
        f'<p class="soft">{len(found.rows)} trials, {escape(words)}, {made}, clickfleet {clickfleet.__version__}</p>',
        page.section("History", page.charts(*history(found))),
        page.section("Importance", _importance(importances(study))),
        page.section("Settings", page.charts(*slices(found, config))),
        page.section("Trials", whole.html()),
        page.section("Failed", _failed(found.rows)),
        page.section("Environment", page.details("this machine", environment().text())),
    ]
    if found.config.is_file():
        parts.append(page.section("Best configuration", page.details("best.yaml", found.config.read_text())))
    page.write(found.page, page.page(f"{found.out.name} — search", parts))


def history(found: Search) -> list[str]:
    """The value of every trial, and the best so far."""
    done = [(float(row["trial"]), float(row["value"])) for row in found.rows if row["state"] == "done"]
    if not done:
        return []
    better = max if found.metric == "auc" else min
    best: list[tuple[float, float]] = []
    for place, value in done:
        best.append((place, better(value, best[-1][1]) if best else value))
    series = [Series("trials", done, "a", line=False), Series("best so far", best, "b")]
    given_up = [
        (float(row["trial"]), float(row["value"]))
        for row in found.rows
        if row["state"] == "given up" and row["value"] is not None
    ]
    if given_up:
        series.append(Series("given up", given_up, "d", line=False))
    return [charts.lines(f"Test {NAMES[found.metric]}", series, "trial")]


def slices(found: Search, config: Config) -> list[str]:
    """The value over each setting by itself."""
    figures = []
    for key, one in config.tune.space.items():
        rows = [row for row in found.rows if row["value"] is not None]
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
        figures.append(charts.lines(key, parts, key, f"test {found.metric}", log=one.log, names=names))
    return figures


def _importance(shares: dict[str, float]) -> str:
    if not shares:
        return ""
    cells = ((escape(key), f"{share:.1%}", page.fill(share)) for key, share in shares.items())
    return page.table(("setting", "importance", ""), cells)


def _failed(rows: list[Facts]) -> str:
    return "".join(f"<p><b>{row['folder']}</b>: {escape(str(row['error']))}</p>" for row in rows if row.get("error"))
