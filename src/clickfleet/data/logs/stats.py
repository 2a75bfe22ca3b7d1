"""Describe a log: rows, click rate, and per column the missing values, the distinct values and the frequent ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.config.plugins import AUTO, closest
from clickfleet.data.bad_lines import Policy
from clickfleet.data.batch import concatenate
from clickfleet.data.files import expand
from clickfleet.data.logs.sketch import Distinct, Frequent, Quantiles
from clickfleet.data.logs.source import COLUMNAR, LogPiece, LogReport, LogSource, progress_of, recognise
from clickfleet.data.logs.target import slot_keys
from clickfleet.data.schema import Schema, Slot
from clickfleet.errors import DataError

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
    """Return the summary as text, one line per column."""
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
    """Return the summary as an HTML page."""
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


def _dense_card(column: LogReport, rows: int) -> str:
    if column["min"] is None:
        return _card(column["name"], "all missing", "")
    missing = "" if column["missing"] is None else f"missing {column['missing'] / rows:.1%}, "
    about = f"{missing}mean {column['mean']:.4g}, median {column['p50']:.4g}, 95th percentile {column['p95']:.4g}"
    return _card(column["name"], about, _histogram(column))


def _histogram(column: LogReport) -> str:
    """Return bars of equal width. The edges are equidistant on a logarithmic scale; the axis shows both ends."""
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


def _slot_card(slot: LogReport, rows: int) -> str:
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


_GATHER = 16384  # rows per update of the sketches: blocks may be much smaller


@dataclass
class DenseColumn:
    name: str
    missing: int | None = 0
    """None if the format does not distinguish a missing value from its replacement."""
    spread: Quantiles = field(default_factory=Quantiles)

    def to_dict(self) -> LogReport:
        edges, counts = self.spread.histogram()
        quantiles = {
            f"p{round(100 * share)}": self.spread.quantile(share) for share in (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
        }
        return {
            "name": self.name,
            "kind": "dense",
            "missing": self.missing,
            "min": self.spread.low if self.spread.count else None,
            "max": self.spread.high if self.spread.count else None,
            "mean": self.spread.mean if self.spread.count else None,
            "deviation": self.spread.deviation,
            **quantiles,
            "edges": edges.tolist(),
            "counts": counts.tolist(),
        }


@dataclass
class SlotColumn:
    name: str
    missing: int = 0
    values: int = 0
    distinct: Distinct = field(default_factory=Distinct)
    frequent: Frequent = field(default_factory=Frequent)

    def to_dict(self, top: int = 10) -> LogReport:
        return {
            "name": self.name,
            "kind": "slot",
            "missing": self.missing,
            "values": self.values,
            "distinct": self.distinct.estimate(),
            "top": [[value.decode("utf-8", "backslashreplace"), count] for value, count in self.frequent.top(top)],
            "slack": self.frequent.slack,
        }


@dataclass
class Summary:
    """Statistics of a log, updated with every piece."""

    schema: Schema
    rows: int = 0
    labelled: int = 0
    clicks: float = 0.0

    def __post_init__(self) -> None:
        self.dense = [DenseColumn(column.name) for column in self.schema.dense]
        self.slots = [SlotColumn(slot.name) for slot in self.schema.slots if slot.bucket is None]

    def add(self, piece: LogPiece) -> None:
        self.rows += len(piece)
        if piece.columns is not None:
            self._add_columns(piece.columns)
        else:
            self._add_batch(piece)

    def _add_columns(self, columns: Any) -> None:
        import pyarrow as pa

        names = set(columns.column_names)
        if self.schema.label in names:
            labels = columns.column(self.schema.label).cast(pa.float64()).drop_null().to_numpy()
            self._add_labels(labels)
        for dense, column in zip(self.dense, self.schema.dense, strict=True):
            values = _pick(columns, column.source_name, names)
            dense.missing = (dense.missing or 0) + values.null_count
            dense.spread.add(values.cast(pa.float64()).drop_null().to_numpy())
        for slot, described in zip(self.slots, self.schema.read_slots, strict=True):
            values, missing = _texts(_pick(columns, described.source_name, names))
            slot.missing += missing
            counted = values.value_counts()
            texts = counted.field("values").to_pylist()
            counts = counted.field("counts").to_numpy()
            slot.values += int(counts.sum())
            slot.distinct.add(np.fromiter((_core.hash64("", text) for text in texts), np.uint64, len(texts)))
            slot.frequent.add(texts, counts)

    def _add_batch(self, piece: LogPiece) -> None:
        batch = piece.batch
        assert batch is not None
        if batch.labels is not None:
            self._add_labels(batch.labels)
        for i, dense in enumerate(self.dense):
            dense.missing = None
            dense.spread.add(batch.dense[:, i])
        places = [i for i, slot in enumerate(self.schema.slots) if slot.bucket is None]
        for place, slot, described in zip(places, self.slots, self.schema.read_slots, strict=True):
            keys, starts, _ = slot_keys(batch, place)
            absent = missing_key(self.schema, described)
            if described.multi:
                slot.missing += int((np.diff(starts) == 0).sum())
            else:
                slot.missing += int((keys == absent).sum())
                keys = keys[keys != absent]
            slot.values += len(keys)
            values, counts = np.unique(keys, return_counts=True)
            slot.distinct.add(values)
            slot.frequent.add([b"%d" % key for key in values.tolist()], counts)

    def _add_labels(self, labels: NDArray[Any]) -> None:
        self.labelled += len(labels)
        self.clicks += float((labels > 0).sum())

    @property
    def ctr(self) -> float | None:
        return self.clicks / self.labelled if self.labelled else None

    def to_dict(self) -> LogReport:
        columns = [column.to_dict() for column in self.dense] + [slot.to_dict() for slot in self.slots]
        return {"rows": self.rows, "ctr": self.ctr, "columns": columns}


def stats(
    inputs: str | Path | Iterable[str | Path],
    format: str = AUTO,  # noqa: A002
    schema: Schema | None = None,
    bad_lines: Policy = "error",
) -> Summary:
    """Summarize all rows of `inputs` in bounded memory."""
    files = expand(inputs)
    form, read_as, _ = recognise(files, format, schema)
    log = LogSource(files, form, read_as, bad_lines)
    summary = Summary(log.schema)
    with progress_of(files, "reading") as bar:
        for path in files:
            for piece in _gathered(log.pieces(path, columns=log.format in COLUMNAR, bar=bar)):
                summary.add(piece)
    return summary


def missing_key(schema: Schema, slot: Slot) -> int:
    """Return the key of a missing value in a single-valued slot."""
    if schema.keys.name == "hash64":
        return int(_core.hash64(slot.name, b""))
    if schema.keys.name == "py2":
        return int(_core.py2_hash((slot.prefix or slot.name).encode())) % schema.keys.modulus
    return 0


def _gathered(pieces: Iterator[LogPiece]) -> Iterator[LogPiece]:
    waiting: list[LogPiece] = []
    for piece in pieces:
        waiting.append(piece)
        if sum(map(len, waiting)) >= _GATHER:
            yield _joined(waiting)
            waiting = []
    if waiting:
        yield _joined(waiting)


def _joined(pieces: list[LogPiece]) -> LogPiece:
    import pyarrow as pa

    if pieces[0].columns is not None:
        return LogPiece(
            None, pa.Table.from_batches([piece.columns for piece in pieces]).combine_chunks().to_batches()[0]
        )
    return LogPiece(concatenate([piece.batch for piece in pieces if piece.batch is not None]))


def _pick(columns: Any, name: str, names: set[str]) -> Any:
    if name not in names:
        raise DataError(f"the data has no column {name!r}{closest(name, names)}", "describe its columns with --schema")
    return columns.column(name)


def _texts(column: Any) -> tuple[Any, int]:
    """Return the values of a slot as bytes, and the number of rows without a value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths = pc.fill_null(pc.list_value_length(column), 0)
        return _texts(pc.list_flatten(column))[0], int(pc.sum(pc.equal(lengths, 0)).as_py() or 0)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not pa.types.is_binary(column.type):
        column = column.cast(pa.string()).cast(pa.binary())
    present = column.drop_null()
    present = present.filter(pc.not_equal(pc.binary_length(present), 0))
    return present, len(column) - len(present)
