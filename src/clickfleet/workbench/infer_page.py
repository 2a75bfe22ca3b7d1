"""The inference matrix as text, infer.csv, infer.md and infer.html."""

from __future__ import annotations

from html import escape
from pathlib import Path

from clickfleet.report import charts, page
from clickfleet.report.charts import KINDS, Series
from clickfleet.workbench.infer import Inference, Row
from clickfleet.workbench.tables import Column, Table

COLUMNS = (
    Column("engine"),
    Column("threads"),
    Column("batch_size", "batch"),
    Column("graph"),
    Column("arena"),
    Column("p50_ms", "p50 ms", "{:.3f}"),
    Column("p99_ms", "p99 ms", "{:.3f}"),
    Column("preparing_ms", "preparing", "{:.3f}"),
    Column("running_ms", "running", "{:.3f}"),
    Column("collecting_ms", "collecting", "{:.3f}"),
    Column("total_s", "total s", "{:.2f}"),
    Column("rows_per_s", "rows/s", "{:,.0f}"),
    Column("memory_mb", "memory MB", "{:.1f}"),
)
ACCURACY = (
    Column("engine"),
    Column("max_drift", "largest drift", "{:.2e}"),
    Column("mean_drift", "mean drift", "{:.2e}"),
    Column("auc", "AUC", "{:.5f}"),
    Column("auc_change", "change of AUC", "{:+.5f}"),
)


def matrix(found: Inference) -> Table:
    rows = [
        {**row, "memory_mb": None if row["memory_bytes"] is None else row["memory_bytes"] / 1e6} for row in found.rows
    ]
    return Table(COLUMNS, rows)


def accuracy(found: Inference) -> Table:
    exact = found.accuracy["torch"]["auc"]
    rows = [
        {"engine": name, **facts, "auc_change": None if exact is None else facts["auc"] - exact}
        for name, facts in found.accuracy.items()
    ]
    return Table(ACCURACY, rows)


def reasons(found: Inference) -> dict[str, list[str]]:
    """Why providers were not measured, and which."""
    by_reason: dict[str, list[str]] = {}
    for name, why in found.skipped.items():
        by_reason.setdefault(why, []).append(name.removesuffix("ExecutionProvider"))
    return by_reason


def text(found: Inference) -> str:
    ratios = "\n".join(f"{ratio:>6.2f} ×  {name}" for name, ratio in found.ratios().items())
    parts = [matrix(found).text(), ratios, accuracy(found).text(), found.environment.text()]
    parts += ["\n".join(f"not measured, {why}: {', '.join(names)}" for why, names in reasons(found).items())]
    return "\n\n".join(part for part in parts if part)


def write_all(found: Inference, out: Path) -> Path:
    """The files; the page."""
    page.write(out / "infer.csv", Table([], found.rows).csv())
    skipped = "".join(f"* {why}: {', '.join(names)}\n" for why, names in reasons(found).items())
    lines = ["## Inference", "", matrix(found).markdown(), "", "## Scores", "", accuracy(found).markdown(), ""]
    lines += ["## Environment", "", "```text", found.environment.text(), "```", ""]
    lines += ["## Not measured", "", skipped] if skipped else []
    page.write(out / "infer.md", "\n".join(lines))
    missing = "".join(f"<p><b>{escape(why)}</b>: {', '.join(names)}</p>" for why, names in reasons(found).items())
    parts = [
        "<h1>Inference</h1>",
        page.section("Speed", page.charts(*plots(found))),
        page.section("Scores", accuracy(found).html()),
        page.section("Matrix", matrix(found).html()),
        page.section("Environment", page.details("this machine", found.environment.text())),
        page.section("Not measured", missing),
    ]
    return page.write(out / "infer.html", page.page("Inference", parts))


def plots(found: Inference) -> list[str]:
    """Rows per second and latency over the batch size, for every engine and number of threads at its best setting."""
    best: dict[tuple[str, int], dict[int, Row]] = {}
    for row in found.rows:
        cells = best.setdefault((row["engine"], row["threads"]), {})
        size = row["batch_size"]
        if size not in cells or row["p50_ms"] < cells[size]["p50_ms"]:
            cells[size] = row
    figures = []
    for title, key, unit in (("Rows per second", "rows_per_s", "rows/s"), ("p99 of a batch", "p99_ms", "ms")):
        series = [
            Series(
                f"{name}, {count} thread{'s' if count > 1 else ''}",
                [(float(size), float(cells[size][key])) for size in sorted(cells)],
                KINDS[i % len(KINDS)],
                dots=True,
            )
            for i, ((name, count), cells) in enumerate(best.items())
        ]
        sizes = {size for cells in best.values() for size in cells}
        figures.append(charts.lines(title, series, "batch size", unit, log=len(sizes) > 1))
    return figures
