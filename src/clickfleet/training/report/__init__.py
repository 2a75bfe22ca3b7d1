"""Write report.html: learning curves, quality on test data and time per phase of a run, in one self-contained file."""

from __future__ import annotations

import time
from collections.abc import Callable
from html import escape
from pathlib import Path

import clickfleet
from clickfleet.config.machine import free_memory
from clickfleet.data.dataset import Data
from clickfleet.data.progress import amount
from clickfleet.data.split import RowSplit
from clickfleet.errors import CheckpointError, hide
from clickfleet.store import checkpoint, run_folder
from clickfleet.training.metrics import metric_name, of_other_labels
from clickfleet.training.model import SavedModel, load, rows_per_slot
from clickfleet.training.predict import top_slices
from clickfleet.training.report import charts, page, stream
from clickfleet.training.report.charts import Series
from clickfleet.training.report.evidence import Evidence, Importance, calibration, curve, read_lines, roc, scores
from clickfleet.training.report.stream import Lines

NAME = "report.html"


def rebuild(
    run: str | Path, data: Data = None, log: Callable[[str], None] = lambda text: None, trust: bool = False
) -> Path:
    """Write the report of a run folder again, on its own or on other test data. `trust` allows code that the run names."""
    folder = Path(run)
    if not (folder / "checkpoints").is_dir():
        raise CheckpointError(f"{run} is not a run folder", "name the folder that training wrote (run.dir)")
    model, evidence = load(folder, trust), Evidence()
    assert model.path is not None
    log(f"model: {run_folder.describe(model.path)}")
    test = data or model.config.data.test or None
    if test is not None:
        evidence.gather(model, test)
    elif (valid := validation_data(model)) is not None:
        evidence.gather(model, valid, "validation")
    return write(folder, model, evidence)


def validation_data(model: SavedModel) -> Data:
    """Return the validation data of the run that wrote a checkpoint; None if it has none."""
    config, path = model.config, model.path
    if config.data.valid:
        return config.data.valid
    split = None if path is None or run_folder.entries(path) is not None else run_folder.read_state(path).get("split")
    if split is None or not config.data.train:
        return None
    source = model.source(config.data.train, labels=True)
    source.split, source.validation = RowSplit.from_dict(split), True
    return source


def write(folder: Path, model: SavedModel, evidence: Evidence) -> Path:
    """Draw the charts and write the page into the run folder."""
    lines = read_lines(folder)
    step = max((line["step"] for kind in lines.values() for line in kind), default=0)
    config = (folder / "config.yaml").read_text(encoding="utf-8") if (folder / "config.yaml").is_file() else ""
    name = model.config.model.name
    now = time.strftime("%Y-%m-%d %H:%M")
    best = model.path is not None and checkpoint.is_named(model.path, checkpoint.BEST)
    of = f", model of {model.path.name}, the best on validation data" if best and model.path is not None else ""
    parts = [
        f"<h1>{escape(Path(name).stem)} — {escape(folder.absolute().name)}</h1>",
        f'<p class="soft">{escape(str(folder.absolute()))}, step {step:,}{of}, {now}, clickfleet {clickfleet.__version__}</p>',
        page.tiles(_numbers(model, evidence, lines)),
        page.section("Learning", page.charts(*_learning(lines))),
        page.section("Passes", page.charts(*stream.passes(lines)), stream.slices(lines)),
        page.section("Published", page.charts(*stream.entries(lines))),
        page.section(
            "Freshness", page.charts(*stream.freshness(lines, model.config.publish.freshness_slo)), stream.alarms(lines)
        ),
        page.section(f"On {evidence.of} data", page.charts(*_test(evidence))),
        page.section("Slices", _slices(model, evidence)),
        page.section("Fields", _fields(model, evidence)),
        page.section("Where the time went", _shares(lines)),
        page.section("Configuration", page.details("config.yaml", hide(config)) if config else ""),
    ]
    return page.write(folder / NAME, page.page(f"{Path(name).stem} — {folder.absolute().name}", parts))


def _numbers(model: SavedModel, evidence: Evidence, lines: Lines) -> dict[str, str | None]:
    test = evidence.results
    trained = lines["epoch"][-1] if lines["epoch"] else {}
    speeds = lines["epoch"] or lines["train"]
    speed = next((line["rows_per_s"] for line in reversed(speeds) if line.get("rows_per_s")), None)
    stats = model.learner.table.stats()
    rows = max((line["rows"] for kind in ("train", "epoch") for line in lines[kind]), default=None)
    return {
        f"{evidence.of} AUC": page.number(test.get("auc")),
        f"{evidence.of} log loss": page.number(test.get("logloss")),
        **{f"{evidence.of} {metric_name(name)}": page.number(value) for name, value in of_other_labels(test).items()},
        "normalised entropy": page.number(test.get("ne")),
        "calibration (actual / predicted)": page.number(test.get("calibration"), 3),
        "training AUC": page.number(trained.get("auc")),
        "rows trained on": page.number(rows),
        "rows per second": None if speed is None else f"{speed:,.0f}",
        "rows in the table": page.number(stats["rows"]),
        "memory of the table": amount(stats["bytes"], "bytes"),
        "rows on disk": page.number(stats.get("disk_rows")) if stats.get("disk_rows") else None,
        "dense parameters": page.number(sum(p.numel() for p in model.learner.model.parameters())),
        **stream.numbers(lines),
    }


def _learning(lines: Lines) -> list[str]:
    train, valid, test = lines["train"], lines["valid"], lines["test"]
    auc = [
        Series("training", curve(train, "auc") or curve(lines["epoch"], "auc"), "a"),
        Series("last batches", curve(train, "sliding_auc"), "c"),
        Series("validation", curve(valid, "auc"), "b", dots=True),
        Series("test", curve(test, "auc"), "d" if valid else "b", dots=True),
    ]
    loss = [
        Series("training", curve(train, "loss") or curve(lines["epoch"], "logloss"), "a"),
        Series("validation", curve(valid, "logloss"), "b", dots=True),
        Series("test", curve(test, "logloss"), "d" if valid else "b", dots=True),
    ]
    figures = [charts.lines("AUC", auc, "step"), charts.lines("Log loss", loss, "step")]
    measured = next((kind[-1] for kind in (test, valid, lines["epoch"]) if kind), {})
    for name in of_other_labels(measured):
        series = [
            Series("training", curve(lines["epoch"], name), "a", dots=True),
            Series("validation", curve(valid, name), "b", dots=True),
            Series("test", curve(test, name), "d" if valid else "b", dots=True),
        ]
        figures.append(charts.lines(page.capitalized(metric_name(name)), series, "step"))
    return figures


def _test(evidence: Evidence) -> list[str]:
    if evidence.buckets is None:
        return []
    clicks, others = evidence.buckets.counts()
    figures = []
    if points := roc(clicks, others):
        title = f"ROC, AUC {evidence.buckets.auc:.4f}"
        names = ("share of other rows above the threshold", "share of clicks")
        figures.append(charts.lines(title, [Series("", points, "a")], *names, x=(0, 1), y=(0, 1), diagonal=True))
    points, spans = calibration(clicks, others)
    if points:
        top = max(max(point) for point in points) * 1.05
        series = [Series("bins of equal weight, ± two standard errors", points, "a", dots=True)]
        names, square = ("predicted click rate", "actual"), (0.0, top)
        figures.append(charts.lines("Calibration", series, *names, x=square, y=square, diagonal=True, bars=spans))
    edges, other, clicked = scores(clicks, others)
    if edges:
        both = [Series("not clicked", other, "a"), Series("clicked", clicked, "b")]
        figures.append(charts.histogram("Scores", edges, both, "score", "share of the class"))
    labels = evidence.results.get("tasks", {})
    parts = {"Metrics": {key: value for key, value in evidence.results.items() if key not in ("slices", "tasks")}}
    parts |= {f"Metrics of the label {label}": part for label, part in labels.items()}
    for title, part in parts.items():
        cells = [(escape(key), page.number(value) or "–") for key, value in part.items()]
        figures.append(page.card(escape(title), page.table(("metric", "value"), cells)))
    return figures


def _slices(model: SavedModel, evidence: Evidence) -> str:
    slices = top_slices(evidence.results)
    if not slices:
        return ""
    slot = escape(str(model.config.train.metrics.slices))
    cells = (
        (escape(name), f"{part['rows']:,}", page.number(part["auc"]) or "–", page.number(part["logloss"]) or "–")
        for name, part in slices
    )
    return page.table((slot, "rows", "AUC", "log loss"), cells)


def _fields(model: SavedModel, evidence: Evidence) -> str:
    rows, ranking = rows_per_slot(model.learner), evidence.importance(model)
    if not ranking:  # no test data
        slots = sorted(rows.items(), key=lambda item: -item[1])
        largest = max(rows.values(), default=1) or 1
        cells = ((escape(name), f"{n:,}", page.fill(n / largest)) for name, n in slots)
        return page.table(("slot", "rows", ""), cells)
    sample = 0 if evidence.sample is None else len(evidence.sample)
    largest_drop = max(abs(field.auc_drop) for field in ranking) or 1.0
    text = (
        f'<p class="soft">Importance is the drop in {evidence.of} AUC when the values of a field are shuffled among '
        f"{sample:,} {evidence.of} rows. "
        "Fields that carry the same information share their importance.</p>"
    )
    head = ("field", "rows in the table", "AUC lost", "", "log loss gained")
    return text + page.table(head, (_field(field, rows, largest_drop) for field in ranking))


def _field(field: Importance, rows: dict[str, int], largest_drop: float) -> tuple[str, ...]:
    count = f"{rows[field.name]:,}" if field.name in rows else "dense"
    bar = page.fill(field.auc_drop / largest_drop)
    return escape(field.name), count, f"{field.auc_drop:.4f}", bar, f"{field.logloss_rise:.4f}"


def _shares(lines: Lines) -> str:
    records = reversed([*lines["train"], *lines["epoch"]])
    shares = next((line["shares"] for line in records if line.get("shares")), None)
    return page.shares(shares) if shares else ""


def too_large(table_bytes: int) -> str | None:
    """Return the problem if a table that must first be loaded needs more than half of the free memory."""
    return f"the table needs {amount(table_bytes, 'bytes')} of memory" if table_bytes > free_memory() / 2 else None


def write_report(
    folder: Path, model: SavedModel, evidence: Evidence, log: Callable[[str], None], *, table_bytes: int = 0
) -> None:
    """Write the report at the end of a run. A failure is only logged, because the run is complete and saved.

    `table_bytes` is the memory that the table needs if the model must first be loaded.
    """
    if problem := too_large(table_bytes):
        log(f"no report: {problem}; run clickfleet report {folder} on a machine with more memory")
        return
    try:
        write(folder, model, evidence)
    except Exception as error:
        log(f"no report: {type(error).__name__}: {error}; try again with clickfleet report {folder}")
