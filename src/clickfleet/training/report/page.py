"""Build a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from clickfleet.data.files import writing
from clickfleet.training.monitor import PHASES
from clickfleet.training.report.charts import KINDS

STYLE = """
:root{color-scheme:light dark;--page:#fff;--card:#f7f8fa;--text:#1c2430;--soft:#667085;--line:#d9dee6;
--a:#2b6cd4;--b:#d9731a;--c:#18936a;--d:#9aa4b2;--e:#8a5cd6;--f:#c23b5a;--g:#0f8ea8;--h:#8a7a12}
@media (prefers-color-scheme:dark){:root{--page:#12161c;--card:#1a2029;--text:#e6eaf0;--soft:#98a4b5;--line:#313a47;
--a:#6ea2f5;--b:#f0a05a;--c:#4fc79a;--d:#6b7686;--e:#b392f0;--f:#f07a95;--g:#52c4da;--h:#cdbb4a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:15px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0}h2{font-size:19px;margin:38px 0 12px}
p{margin:6px 0}.soft{color:var(--soft)}code,pre{font:13px/1.45 ui-monospace,monospace}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(138px,1fr));gap:10px;margin:20px 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 14px}
.tile b{display:block;font-size:21px;font-weight:600;font-variant-numeric:tabular-nums}.tile span{color:var(--soft);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,460px),1fr));gap:14px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 12px 6px}
figcaption{font-weight:600}svg{display:block;width:100%;height:auto}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;color:var(--soft)}
.key{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:5px}
.grid{stroke:var(--line)}.axis{stroke:var(--soft)}.diagonal{stroke:var(--soft);stroke-dasharray:4 4}
.span{stroke:var(--a);stroke-width:2;opacity:.35}.tick{fill:var(--soft);font-size:11.5px}.name{fill:var(--soft);font-size:12.5px}
.curve{fill:none;stroke-width:2;stroke-linejoin:round}.dot.hidden{opacity:0}.dot:hover{opacity:1}
.bar{opacity:.55}.bar:hover{opacity:.85}
.wide{overflow-x:auto}.charts+.wide,.wide+.charts{margin-top:14px}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:3px 14px 3px 0;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left}th{color:var(--soft);font-weight:500}
.fill{display:inline-block;height:10px;border-radius:2px;background:var(--a);vertical-align:middle}.fill.minus{background:var(--d)}
td.draw{width:200px;text-align:left}.shares{display:flex;height:26px;border-radius:6px;overflow:hidden;max-width:700px}
.shares i{min-width:1px}
details{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px 14px}
summary{cursor:pointer}pre{margin:10px 0 4px;overflow-x:auto}
""" + "".join(
    f".curve.{kind}{{stroke:var(--{kind})}}.dot.{kind},.bar.{kind}{{fill:var(--{kind})}}"
    f".key.{kind},.shares .{kind}{{background:var(--{kind})}}\n"
    for kind in KINDS
)


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def page(title: str, parts: Iterable[str], language: str = "en") -> str:
    """Return a whole document."""
    return (
        f'<!doctype html>\n<html lang="{language}"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n'
        + "\n".join(part for part in parts if part)
        + "\n</main></body></html>\n"
    )


def section(title: str, *content: str) -> str:
    """Return a heading and its content; an empty string without content."""
    body = "".join(content)
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def tiles(numbers: Mapping[str, str | None]) -> str:
    boxes = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in numbers.items()
        if value is not None
    )
    return f'<div class="tiles">{boxes}</div>'


def charts(*figures: str) -> str:
    drawn = "".join(figures)
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def card(title: str, content: str) -> str:
    """Return a box with a title, to place among charts."""
    return f"<figure><figcaption>{escape(title)}</figcaption>{content}</figure>"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table. The cells must be HTML already."""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td{_class(cell)}>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table></div>'


def _class(cell: str) -> str:
    return ' class="draw"' if cell.startswith('<i class="fill') else ""


def fill(share: float) -> str:
    """Return a bar for a table cell; negative values have another colour."""
    kind = "fill minus" if share < 0 else "fill"
    return f'<i class="{kind}" style="width:{max(abs(share) * 180, 1):.0f}px"></i>'


def shares(by_phase: Mapping[str, float]) -> str:
    """Return the shares of the phases as one bar with a legend."""
    bars = keys = ""
    for phase, kind in zip(PHASES, "abced", strict=True):
        if phase in by_phase:
            share = by_phase[phase]
            bars += f'<i class="{kind}" style="width:{share:.2%}" title="{phase} {share:.1%}"></i>'
            keys += f'<span><i class="key {kind}"></i>{phase} {share:.1%}</span>'
    return f'<div class="shares">{bars}</div><div class="legend">{keys}</div>'


def details(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def number(value: Any, digits: int = 4) -> str | None:
    """Format a metric for display."""
    if value is None:
        return None
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}f}"


def write(path: Path, text: str) -> Path:
    """Write a page atomically and return its path."""
    with writing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path
