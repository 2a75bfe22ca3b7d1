"""Charts of online learning from metrics.jsonl: passes, rows, published entries and freshness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from clickfleet.training.metrics import value_of
from clickfleet.training.report import charts, page
from clickfleet.training.report.charts import Point, Series

Lines = dict[str, list[dict[str, Any]]]
"""The lines of metrics.jsonl by kind."""


def numbered(lines: Sequence[Mapping[str, Any]], key: str, x: str | None = None, limit: int = 300) -> list[Point]:
    """Return the values of a key over the line number, or over another key, thinned to at most `limit` points."""
    points = [
        (float(line[x]) if x else float(place), float(value))
        for place, line in enumerate(lines, 1)
        if (value := value_of(line, key)) is not None and (x is None or line.get(x) is not None)
    ]
    every = -(-len(points) // limit) or 1
    return points[::-1][::every][::-1]  # keeps the last point


def passes(lines: Lines) -> list[str]:
    """Return charts of the quality of each pass and the size of the table."""
    done = [line for line in lines.get("pass", ()) if line.get("rows")]
    auc = [
        Series("before training on it", numbered(done, "validation_auc"), "b", dots=len(done) < 60),
        Series("trained", numbered(done, "auc"), "a"),
        Series("window of the guard", numbered(done, "guard_auc"), "c"),
    ]
    figures = [charts.lines("AUC of passes", auc, "pass")]
    copc = [
        Series("actual / predicted clicks", numbered(done, "calibration"), "c"),
        Series("window of the guard", numbered(done, "guard_calibration"), "a"),
    ]
    figures.append(charts.lines("Calibration of passes", copc, "pass", level=1.0))
    figures.append(charts.lines("Rows in the table", [Series("rows", numbered(done, "table_rows"), "a")], "pass"))
    backlog = [Series("records", numbered(done, "backlog"), "b")]
    figures.append(charts.lines("Records waiting in the topic", backlog, "pass"))
    days = [Series("removed at the end of a day", numbered(lines.get("day", []), "removed"), "f", dots=True)]
    return [*figures, charts.lines("Rows removed", days, "day")]


def entries(lines: Lines) -> list[str]:
    """Return charts of the sizes of published bases and deltas."""
    published = lines.get("published", [])
    kinds = [("delta", "a"), ("base", "b")]
    figures = []
    for title, key in (("Bytes of entries", "entry_bytes"), ("Rows of entries", "entry_rows")):
        series = [
            Series(
                kind,
                numbered([line for line in published if line["entry_kind"] == kind], key, "sequence"),
                colour,
                True,
            )
            for kind, colour in kinds
        ]
        figures.append(charts.lines(title, series, "sequence"))
    return figures


def freshness(lines: Lines, objective_s: float | None = None) -> list[str]:
    """Return charts of the age of events when they were trained on and when they were published."""
    published, figures = lines.get("published", []), []
    for what, level in (("published", objective_s), ("trained", None)):
        series = [
            Series(f"{percent}% of events", numbered(published, f"event_to_{what}_p{percent}", "sequence"), colour)
            for percent, colour in ((50, "a"), (99, "b"))
        ]
        title = f"Seconds from an event until it is {what}" + (f", objective {level:g}" if level is not None else "")
        figures.append(charts.lines(title, series, "sequence", level=level))
    return figures


def numbers(lines: Lines) -> dict[str, str | None]:
    """Return the numbers of the tiles: progress and the last entry."""
    done, published, held_back = lines.get("pass", []), lines.get("published", []), lines.get("alarm", [])
    late = lines.get("late_files", [])
    last, entry, fresh = (done[-1] if done else {}), (published[-1] if published else {}), ages(lines)
    return {
        "passes": page.number(len(done)) if done else None,
        "day and pass": f"{last['day']} / {last['pass']}" if last else None,
        "AUC before training": page.number(last.get("validation_auc")),
        "AUC of the last pass": page.number(last.get("auc")),
        "last entry": f"{entry['sequence']} ({entry['entry_kind']})" if entry else None,
        "bytes of the last entry": page.number(entry.get("entry_bytes")),
        "published within (50%)": span(fresh.get("event_to_published_p50")),
        "published within (99%)": span(fresh.get("event_to_published_p99")),
        "trained within (99%)": span(fresh.get("event_to_trained_p99")),
        "held back": page.number(len(held_back)) if held_back else None,
        "records behind": page.number(last.get("backlog")),
        "bad lines": page.number(bad) if (bad := sum(line.get("bad_lines", 0) for line in done)) else None,
        "late files": page.number(sum(line["files"] for line in late)) if late else None,
    }


def ages(lines: Lines) -> dict[str, float]:
    """Return the ages of the events in the last entry that has any; a base at the end of a day has none."""
    for line in reversed(lines.get("published", [])):
        event_ages = {key: float(value) for key, value in line.items() if key.startswith("event_to_")}
        if event_ages:
            return event_ages
    return {}


def alarms(lines: Lines) -> str:
    """Return paragraphs on late files and on entries that were held back, with the reasons."""
    late = "".join(f"<p>{escape(line['words'])}</p>" for line in lines.get("late_files", [])[-20:])
    return late + "".join(
        f"<p>step {line['step']:,}: a {escape(str(line['entry_kind']))} was held back: {escape('; '.join(line['reasons']))}</p>"
        for line in lines.get("alarm", [])[-20:]
    )


def slices(lines: Lines) -> str:
    """Return the COPC of all rows and of the largest slices, with error bars, as the last pass found them."""
    found = next((line["slices"] for line in reversed(lines.get("pass", [])) if line.get("slices")), None)
    if found is None:
        return ""
    cells = [
        [
            escape(str(one["slice"])),
            f"{one['shows']:,.0f}",
            f"{one['copc']:.3f} ± {2 * one['error']:.3f}",
            f"{one['raw']:.3f}",
        ]
        for one in found
    ]
    note = "Scores made before training, as they were served, in about the last quarter of the half-life. ±: two standard errors."
    head = ["slice", "shows", "COPC", "COPC without calibration"]
    return f'<p class="soft">{note}</p>' + page.table(head, cells)


def span(seconds: float | None) -> str | None:
    """Format a number of seconds; None stays None.

    >>> span(5), span(200), span(9000), span(400000)
    ('5 s', '3 min 20 s', '2 h 30 min', '4 d 15 h')
    """
    if seconds is None:
        return None
    whole = int(seconds)
    for size, unit, part, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {name}"
    return f"{whole} s"
