"""A summary of a log for people: a table for the terminal, a self-contained HTML page with a plot per column."""

from html import escape
from typing import Any

from clickfleet.logs.stats import Summary

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --soft: #5b6b7b; --bar: #2f7ebc; --mark: #d9541e;
        --paper: #fff; --card: #f4f6f8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9fb0c0; --bar: #58a6e0; --mark: #ff8a5c; --paper: #10161c; --card: #1a232c }
}
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       margin: 2rem auto; max-width: 76rem; padding: 0 1rem }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(22rem, 1fr)); gap: 1rem }
section { background: var(--card); border-radius: .5rem; padding: .8rem 1rem }
h2 { font-size: 1rem; margin: 0 }
p { margin: .2rem 0; color: var(--soft) }
svg { width: 100%; height: auto; display: block }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif }
.bar { fill: var(--bar) }
.mark { stroke: var(--mark); stroke-dasharray: 3 2 }
"""
_WIDTH, _HEIGHT, _LINE = 360, 120, 17


def table(summary: Summary, top: int = 3) -> str:
    """The summary as text, one line per column."""
    lines = [f"{summary.rows:,} rows, {_ctr(summary)}"]
    names = [column.name for column in summary.dense] + [slot.name for slot in summary.slots]
    width = max(map(len, ["dense", *names]))
    if summary.dense:
        heads = ("missing", "least", "median", "mean", "95%", "greatest")
        lines += ["", f"{'dense':{width}}" + "".join(f"{head:>12}" for head in heads)]
    for dense in summary.dense:
        column = dense.to_dict()
        missing = "?" if dense.missing is None else f"{dense.missing / max(summary.rows, 1):.1%}"
        shown = [column[name] for name in ("min", "p50", "mean", "p95", "max")]
        lines.append(
            f"{dense.name:{width}}{missing:>12}" + "".join(f"{'' if x is None else f'{x:.5g}':>12}" for x in shown)
        )
    if summary.slots:
        lines += ["", f"{'slot':{width}}{'missing':>12}{'distinct':>12}  most frequent values"]
    for slot in summary.slots:
        column = slot.to_dict(top)
        frequent = "  ".join(f"{value} {count / slot.values:.1%}" for value, count in column["top"])
        missing = f"{slot.missing / max(summary.rows, 1):.1%}"
        lines.append(f"{slot.name:{width}}{missing:>12}{column['distinct']:>12,}  {frequent}")
    return "\n".join(lines)


def page(summary: Summary, title: str) -> str:
    """The page's text."""
    about = f"{summary.rows:,} rows, {_ctr(summary)}, {len(summary.dense)} dense columns, {len(summary.slots)} slots"
    cards = [_dense_card(column.to_dict(), summary.rows) for column in summary.dense]
    cards += [_slot_card(slot.to_dict(), summary.rows) for slot in summary.slots]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n<p>{about}</p>\n<main>\n"
        + "\n".join(cards)
        + "\n</main>\n</body>\n</html>\n"
    )


def _ctr(summary: Summary) -> str:
    return "no labels" if summary.ctr is None else f"click rate {summary.ctr:.4f}"


def _dense_card(column: dict[str, Any], rows: int) -> str:
    if column["min"] is None:
        return _card(column["name"], "all missing", "")
    missing = "" if column["missing"] is None else f"missing {column['missing'] / rows:.1%}, "
    about = f"{missing}mean {column['mean']:.4g}, median {column['p50']:.4g}, 95th percentile {column['p95']:.4g}"
    return _card(column["name"], about, _histogram(column))


def _histogram(column: dict[str, Any]) -> str:
    """Bars of equal width: the edges are even on a logarithmic scale, and the ends are written below."""
    edges, counts = column["edges"], column["counts"]
    wide, most = _WIDTH / len(counts), max(counts)
    bars = []
    for i, count in enumerate(counts):
        tall = count / most * (_HEIGHT - 24)
        bars.append(
            f'<rect class="bar" x="{i * wide:.1f}" y="{_HEIGHT - 18 - tall:.1f}" '
            f'width="{max(wide - 1, 1):.1f}" height="{tall:.1f}">'
            f"<title>{edges[i]:.4g} to {edges[i + 1]:.4g}: {count:,}</title></rect>"
        )
    place = sum(edge <= column["p95"] for edge in edges[1:-1]) + 0.5
    mark = f'<line class="mark" x1="{place * wide:.1f}" x2="{place * wide:.1f}" y1="4" y2="{_HEIGHT - 18}"/>'
    ends = (
        f'<text x="0" y="{_HEIGHT - 4}">{column["min"]:.4g}</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT - 4}" text-anchor="end">{column["max"]:.4g}</text>'
    )
    label = f"histogram of {escape(column['name'])}; the dashed line is the 95th percentile"
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(bars)}{mark}{ends}</svg>'


def _slot_card(slot: dict[str, Any], rows: int) -> str:
    about = f"missing {slot['missing'] / max(rows, 1):.1%}, about {slot['distinct']:,} values"
    if not slot["top"]:
        return _card(slot["name"], about, "")
    most = slot["top"][0][1]
    lines = []
    for i, (value, count) in enumerate(slot["top"]):
        y = i * _LINE
        shown = value if len(value) <= 20 else value[:19] + "…"
        lines.append(
            f'<text x="0" y="{y + 12}">{escape(shown)}</text>'
            f'<rect class="bar" x="140" y="{y + 2}" width="{max(count / most * 150, 1):.1f}" height="{_LINE - 5}">'
            f"<title>{escape(value)}: {count:,}</title></rect>"
            f'<text x="{_WIDTH}" y="{y + 12}" text-anchor="end">{count / slot["values"]:.2%}</text>'
        )
    label = f"most frequent values of {escape(slot['name'])}"
    tall = len(slot["top"]) * _LINE
    return _card(
        slot["name"],
        about,
        f'<svg viewBox="0 0 {_WIDTH} {tall}" role="img" aria-label="{label}">{"".join(lines)}</svg>',
    )


def _card(name: str, about: str, plot: str) -> str:
    return f"<section><h2>{escape(name)}</h2><p>{about}</p>{plot}</section>"
