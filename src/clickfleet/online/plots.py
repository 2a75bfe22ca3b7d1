"""Pictures of online learning: a run over its days, settings side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clickfleet.errors import DataError, MissingError


def draw_days(run: Path | str, out: Path | str) -> Path:
    """Rows, memory and AUC of a run over its days, from its metrics.jsonl."""
    path = Path(run) / "metrics.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    days = [line for line in lines if line["kind"] == "day"]
    passes = [line for line in lines if line["kind"] == "pass" and line["rows"]]
    if not days:
        raise DataError(f"{path} holds no day that has ended")
    figure, axes = _figure(3, 1)
    names = [f"{line['day'] // 100 % 100:02}-{line['day'] % 100:02}" for line in days]
    axes[0].plot(names, [line["table_rows"] / 1e6 for line in days], marker=".")
    axes[0].set_ylabel("million rows")
    axes[1].plot(names, [line["table_bytes"] / 1e6 for line in days], marker=".", color="tab:orange")
    axes[1].set_ylabel("table, MB")
    means = [_mean([p["auc"] for p in passes if p["day"] == line["day"]]) for line in days]
    axes[2].plot(names, means, marker=".", color="tab:green")
    axes[2].set_ylabel("AUC before training")
    for axis in axes:
        axis.set_ylim(bottom=0) if axis is not axes[2] else None
        axis.grid(alpha=0.3)
        axis.set_xticks(range(0, len(names), max(1, len(names) // 8)))
    return _save(figure, Path(out))


def draw_replay(rows: Sequence[dict[str, Any]], out: Path | str) -> Path:
    """AUC, rows and delta bytes by interval of publishing, one line per threshold of admission."""
    figure, axes = _figure(1, 3)
    names = list(dict.fromkeys(row["sync"] for row in rows))
    for admit in dict.fromkeys(row["admit"] for row in rows):
        mine = {row["sync"]: row for row in rows if row["admit"] == admit}
        for axis, key, scale, label in zip(
            axes,
            ("auc", "table_rows", "delta_bytes"),
            (1, 1e6, 1e6),
            ("AUC", "million rows", "deltas, MB"),
            strict=True,
        ):
            axis.plot(names, [mine[name][key] / scale for name in names], marker="o", label=f"admit {admit:g}")
            axis.set_title(label)
            axis.set_xlabel("published every")
            axis.grid(alpha=0.3)
    axes[0].legend()
    return _save(figure, Path(out))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _figure(rows: int, columns: int) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingError("matplotlib, which draws the plot,", "plots") from None
    figure = Figure(figsize=(4 * columns + 4, 2 * rows + 2), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, sharex=rows > 1)


def _save(figure: Any, out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out
