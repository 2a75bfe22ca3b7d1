"""A comparison -> compare.csv, compare.md and compare.html."""

from __future__ import annotations

import time
from html import escape
from typing import Any

import clickfleet
from clickfleet.report import charts, page
from clickfleet.report.charts import KINDS, Series
from clickfleet.report.evidence import curve, read_lines
from clickfleet.workbench.compare import Comparison
from clickfleet.workbench.crew import Order
from clickfleet.workbench.machine import environment
from clickfleet.workbench.tables import Column, Table

NUMBERS = (
    Column("train_loss", "training loss", "{:.4f}"),
    Column("train_auc", "training AUC", "{:.4f}"),
    Column("test_auc", "test AUC", "{:.4f}"),
    Column("test_auc_std", "±", "{:.4f}"),
    Column("logloss", "log loss", "{:.4f}"),
    Column("rows_per_s", "rows/s", "{:,.0f}"),
    Column("parameters", "parameters", "{:,.0f}"),
    Column("seconds", "seconds", "{:.1f}"),
)


def selection(found: Comparison) -> Table:
    """The models, as they are configured."""
    return Table([Column("model"), *NUMBERS], found.rows)


def studies(found: Comparison) -> dict[str, Table]:
    """One table per setting."""
    several = len(found.plan.models) > 1
    return {
        key: Table([*([Column("model")] if several else []), Column("value", key), *NUMBERS], rows)
        for key, rows in found.studies.items()
    }


def write_all(found: Comparison) -> None:
    """The tables as files, and the page."""
    lines = [*found.rows, *(row for rows in found.studies.values() for row in rows)]
    page.write(found.out / "compare.csv", Table([], lines).csv())
    page.write(found.out / "compare.md", markdown(found))
    page.write(found.page, html(found))


def markdown(found: Comparison) -> str:
    parts = ["## Models", "", selection(found).markdown()]
    for key, table in studies(found).items():
        parts += ["", f"## {key}", "", table.markdown()]
    if found.failed:
        parts += ["", "## Failed", "", *(f"* `{name}`: {text}" for name, text in found.failed.items())]
    return "\n".join(parts) + "\n"


def html(found: Comparison) -> str:
    made = time.strftime("%Y-%m-%d %H:%M")
    seeds = ", ".join(map(str, found.plan.seeds))
    parts = [
        f"<h1>{escape(found.out.name)}</h1>",
        f'<p class="soft">{len(found.runs)} runs, seeds {seeds}, {made}, clickfleet {clickfleet.__version__}</p>',
        page.section("Models", selection(found).html()),
        page.section("Curves", page.charts(*curves(found))),
    ]
    for key, table in studies(found).items():
        parts.append(page.section(key, page.charts(*study(key, found.studies[key])), table.html()))
    failed = "".join(f"<p><b>{escape(name)}</b>: {escape(text)}</p>" for name, text in found.failed.items())
    parts.append(page.section("Failed", failed))
    parts.append(page.section("Environment", page.details("this machine", environment().text())))
    return page.page(f"{found.out.name} — comparison", parts)


def curves(found: Comparison) -> list[str]:
    """Of every model with its first seed, over the rows it was trained on."""
    orders = [line.orders[0] for line in found.plan.models]
    figures = []
    for title, kind, key in (
        ("Test AUC", "test", "auc"),
        ("Training AUC", "train", "auc"),
        ("Test log loss", "test", "logloss"),
        ("Training loss", "train", "loss"),
    ):
        series = [
            Series(line.model, _points(order, kind, key), KINDS[i % len(KINDS)], dots=kind == "test")
            for i, (line, order) in enumerate(zip(found.plan.models, orders, strict=True))
        ]
        series = [one for one in series if one.points]
        if series:
            figures.append(charts.lines(title, series, "rows trained on"))
    return figures


def _points(order: Order, kind: str, key: str) -> list[tuple[float, float]]:
    if not (order.folder / "metrics.jsonl").is_file():
        return []
    size = order.config.data.batch_rows
    return [(step * size, value) for step, value in curve(read_lines(order.folder)[kind], key)]


def study(key: str, rows: list[dict[str, Any]]) -> list[str]:
    """Test AUC and log loss over the values of a setting, one curve per model."""
    values = list(dict.fromkeys(str(row["value"]) for row in rows))
    names = list(dict.fromkeys(str(row["model"]) for row in rows))
    figures = []
    for title, measure in (("Test AUC", "test_auc"), ("Test log loss", "logloss"), ("Training AUC", "train_auc")):
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
            figures.append(charts.lines(f"{title} by {key}", series, key, names=values))
    return figures
