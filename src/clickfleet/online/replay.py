"""Replay past logs with different publishing intervals and admission thresholds, and compare the results.

Each setting is scored as consumers would have seen it: the model published before an interval scores the events of that interval. All
settings are compared on the same events, those after the first day.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypedDict

from clickfleet.config.load import Config
from clickfleet.config.sections import SECONDS, Publish, Run
from clickfleet.errors import ConfigError, DataError
from clickfleet.online.learn import learn
from clickfleet.training.report import charts, page
from clickfleet.training.report.charts import Series


class Row(TypedDict):
    """The result of one pair of settings."""

    sync: str
    admit: float
    auc: float
    logloss: float | None
    rows_scored: int
    table_rows: int
    full_rows: int
    table_bytes: int
    deltas: int
    delta_bytes: int
    seconds: float


Plotted = Literal["auc", "table_rows", "delta_bytes"]


def replay(
    config: Config,
    out: Path | str,
    sync: Iterable[str],
    admit: Iterable[float],
    log: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Return one row per pair of settings. The runs are written to folders of `out`; earlier runs there are removed."""
    online, out = config.online, Path(out)
    if online.dir is None or online.start_day is None or online.end_day is None:
        raise ConfigError("a replay needs past logs", "set online.dir, online.start_day and online.end_day")
    if online.start_day == online.end_day:
        raise ConfigError(
            "a replay compares the days after the first, and there is only one day", "set a later online.end_day"
        )
    rows: list[Row] = []
    graph = Path(config.run.dir) / "graph.onnx"
    for interval, splits in [(text, _splits(text, online.split_interval)) for text in sync]:
        for threshold in admit:
            folder = out / f"{interval}-{threshold:g}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            if graph.exists():
                shutil.copy(graph, folder)  # the network does not change
            admission = "birth" if threshold <= 0 else f"score({threshold:g})"
            settings = replace(
                config,
                table=replace(config.table, admission=admission),
                run=Run(dir=str(folder), checkpoint_every=None, keep=1),
                online=replace(
                    online,
                    splits_per_pass=splits,
                    validate="pass",
                    delta_every_passes=1,
                    checkpoint_every_passes=1 << 30,
                ),
                publish=Publish(guard=replace(config.publish.guard, auc_drop=None, copc=None), done_files=False),
            )
            result = learn(settings, quiet=True)
            graph = folder / "graph.onnx"
            deltas = _delta_bytes(folder)
            row: Row = {
                "sync": interval,
                "admit": threshold,
                "auc": result.validated["auc"],
                "logloss": result.validated["logloss"],
                "rows_scored": result.validated["rows"],
                "table_rows": len(result.learner.table),
                "full_rows": result.learner.table.stats()["full_rows"],
                "table_bytes": result.learner.table.stats()["bytes"],
                "deltas": len(deltas),
                "delta_bytes": sum(deltas),
                "seconds": result.seconds,
            }
            rows.append(row)
            log(
                f"sync {interval:>6}  admit {threshold:<6g} AUC {row['auc']:.4f}  {row['table_rows']:>12,} rows "
                f"({row['full_rows']:,} with factors)  {row['delta_bytes']:>14,} bytes in {row['deltas']} deltas"
            )
    (out / "replay.json").write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def _splits(text: str, split_s: float) -> int:
    """Return the number of folders that a publishing interval spans."""
    try:
        seconds = SECONDS.parse(text)
    except Exception:
        raise ConfigError(f"--sync {text!r} is not an interval", "write, for example, 30min, 1h or 1d") from None
    splits = seconds / split_s
    if splits < 1 or splits != int(splits) or seconds > 86400:
        raise ConfigError(
            f"--sync {text} must be a multiple of online.split_interval ({split_s / 60:g} min), at most a day",
            "events within a folder are not ordered, so a shorter interval cannot be replayed",
        )
    return int(splits)


def _delta_bytes(folder: Path) -> list[int]:
    """Return the size of every delta that a run published."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["entry_bytes"] for line in lines if line["kind"] == "published" and line["entry_kind"] == "delta"]


def draw_days(run: Path | str, out: Path | str) -> Path:
    """Draw rows, memory and AUC of a run by day, from its metrics.jsonl."""
    path = Path(run) / "metrics.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    days = [line for line in lines if line["kind"] == "day"]
    passes = [line for line in lines if line["kind"] == "pass" and line["rows"]]
    if not days:
        raise DataError(f"{path} holds no completed day")
    names = [f"{line['day'] // 100 % 100:02}-{line['day'] % 100:02}" for line in days]
    rows = [line["table_rows"] / 1e6 for line in days]
    megabytes = [line["table_bytes"] / 1e6 for line in days]
    aucs = [_mean([p["auc"] for p in passes if p["day"] == line["day"]]) for line in days]
    figures = [
        _by_name("Million rows", [("", rows)], names, "day", from_zero=True),
        _by_name("Table, MB", [("", megabytes)], names, "day", from_zero=True),
        _by_name("AUC before training", [("", aucs)], names, "day"),
    ]
    return page.write(Path(out), charts.picture(figures, columns=1))


def draw_replay(rows: Sequence[Row], out: Path | str) -> Path:
    """Plot AUC, rows and bytes of deltas by publishing interval, one line per admission threshold."""
    names = list(dict.fromkeys(row["sync"] for row in rows))
    thresholds = list(dict.fromkeys(row["admit"] for row in rows))
    by_setting = {(row["sync"], row["admit"]): row for row in rows}
    plots: list[tuple[str, Plotted, float]] = [
        ("AUC", "auc", 1),
        ("Million rows", "table_rows", 1e6),
        ("Deltas, MB", "delta_bytes", 1e6),
    ]
    figures = []
    for title, key, unit in plots:
        curves = [(f"admit {one:g}", [by_setting[name, one][key] / unit for name in names]) for one in thresholds]
        figures.append(_by_name(title, curves, names, "published every"))
    return page.write(Path(out), charts.picture(figures, columns=3))


def _by_name(
    title: str, curves: Sequence[tuple[str, list[float]]], names: list[str], x_label: str, from_zero: bool = False
) -> str:
    """Plot curves over named places; a value that is not a number leaves a gap."""
    series = [
        Series(name, [(float(x), y) for x, y in enumerate(values) if y == y], charts.KINDS[i % len(charts.KINDS)], True)
        for i, (name, values) in enumerate(curves)
    ]
    top = max((y for one in series for _, y in one.points), default=0.0)
    series = [one for one in series if one.points] or [Series("", [(0.0, 0.0)], "d")]
    return charts.lines(title, series, x_label, y=(0.0, top * 1.05) if from_zero and top > 0 else None, names=names)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
