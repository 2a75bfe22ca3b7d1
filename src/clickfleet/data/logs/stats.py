"""Describe a log: rows, labels, and per column the missing values, the distinct values and the frequent ones.

Of a history it tells how many events rows have, and describes the values of the events like those of a slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.config.plugins import AUTO, closest
from clickfleet.data.bad_lines import Policy
from clickfleet.data.batch import Keys, concatenate
from clickfleet.data.files import expand
from clickfleet.data.histories import history_columns
from clickfleet.data.logs.sketch import Distinct, Frequent, Quantiles
from clickfleet.data.logs.source import COLUMNAR, LogPiece, LogReport, LogSource, numbers, progress_of, recognise
from clickfleet.data.logs.target import slot_keys
from clickfleet.data.schema import History, Schema, Slot
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
    slots = [*summary.slots, *(column for history in summary.histories for column in history.columns)]
    names = [label.name for label in summary.labels] + [dense.name for dense in summary.dense]
    names += [slot.name for slot in slots]
    width = max(map(len, ["history", *names]))
    if len(summary.labels) > 1:
        lines += ["", f"{'label':{width}}{'missing':>12}{'mean':>12}{'if given':>12}"]
        for label in summary.labels:
            shown = [None if not summary.rows else label.missing / summary.rows, label.mean, label.mean_given]
            cells = (f"{shown[0]:.1%}" if shown[0] is not None else "", *(_mean(x) for x in shown[1:]))
            note = f"  given {label.given}" if label.given else ""
            lines.append(f"{label.name:{width}}" + "".join(f"{cell:>12}" for cell in cells) + note)
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
    if summary.histories:
        heads = ("empty", "median", "mean", "95%", "greatest", "over max")
        lines += ["", f"{'history':{width}}" + "".join(f"{head:>12}" for head in heads) + "  events per row"]
    for history in summary.histories:
        about = history.to_dict()
        rates = [f"{about[name] / max(summary.rows, 1):.1%}" for name in ("empty", "cut")]
        middle = ["" if about[name] is None else f"{about[name]:.5g}" for name in ("p50", "mean", "p95", "max")]
        lines.append(f"{history.name:{width}}" + "".join(f"{cell:>12}" for cell in (rates[0], *middle, rates[1])))
    if slots:
        lines += ["", f"{'slot':{width}}{'missing':>12}{'distinct':>12}  most frequent values"]
    for slot in slots:
        column = slot.to_dict(top)
        frequent = "  ".join(f"{value} {count / slot.values:.1%}" for value, count in column["top"])
        missing = f"{slot.missing / max(slot.entries or summary.rows, 1):.1%}"
        lines.append(f"{slot.name:{width}}{missing:>12}{column['distinct']:>12,}  {frequent}")
    return "\n".join(lines)


def page(summary: Summary, title: str) -> str:
    """Return the summary as an HTML page."""
    about = f"{summary.rows:,} rows, {_ctr(summary)}, {len(summary.dense)} dense columns, {len(summary.slots)} slots"
    about += f", {len(summary.histories)} histories" if summary.histories else ""
    cards = [_label_card(label, summary.rows) for label in summary.labels if len(summary.labels) > 1]
    cards += [_dense_card(column.to_dict(), summary.rows) for column in summary.dense]
    cards += [_slot_card(slot.to_dict(), summary.rows) for slot in summary.slots]
    for history in summary.histories:
        cards.append(_history_card(history.to_dict(), summary.rows))
        cards += [_slot_card(column.to_dict(), column.entries) for column in history.columns]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n<p>{about}</p>\n<main>\n"
        + "\n".join(cards)
        + "\n</main>\n</body>\n</html>\n"
    )


def _ctr(summary: Summary) -> str:
    return "no labels" if summary.ctr is None else f"click rate {summary.ctr:.4f}"


def _mean(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _label_card(label: LabelColumn, rows: int) -> str:
    about = f"label, missing {label.missing / max(rows, 1):.1%}, mean {_mean(label.mean) or 'unknown'}"
    if label.given:
        about += f", {_mean(label.mean_given) or 'unknown'} where {escape(label.given)} is 1"
    return _card(label.name, about, "")


def _history_card(history: LogReport, rows: int) -> str:
    about = f"events per row: empty {history['empty'] / max(rows, 1):.1%}"
    if history["max"] is None:
        return _card(history["name"], about, "")
    about += f", median {history['p50']:.4g}, mean {history['mean']:.4g}, over max {history['cut'] / max(rows, 1):.1%}"
    return _card(history["name"], about, _histogram(history))


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
class LabelColumn:
    """A label: the rows that have it, and its mean over them. That of a label with loss log is the share of positives."""

    name: str
    given: str = ""
    missing: int = 0
    known: int = 0
    total: float = 0.0
    known_given: int = 0
    total_given: float = 0.0

    def add(self, values: NDArray[Any], given: NDArray[np.bool_] | None) -> None:
        present = ~np.isnan(values)
        self.missing += len(values) - int(present.sum())
        self.known += int(present.sum())
        self.total += float(values[present].sum())
        if given is not None:
            present &= given
            self.known_given += int(present.sum())
            self.total_given += float(values[present].sum())

    @property
    def mean(self) -> float | None:
        return self.total / self.known if self.known else None

    @property
    def mean_given(self) -> float | None:
        """The mean over rows where the label `given` is 1."""
        return self.total_given / self.known_given if self.known_given else None

    def to_dict(self) -> LogReport:
        about: LogReport = {"name": self.name, "missing": self.missing, "mean": self.mean}
        return about | ({"given": self.given, "mean_given": self.mean_given} if self.given else {})


@dataclass
class SlotColumn:
    name: str
    missing: int = 0
    values: int = 0
    distinct: Distinct = field(default_factory=Distinct)
    frequent: Frequent = field(default_factory=Frequent)
    entries: int = 0
    """Of a column of a history: the number of events."""

    def count(self, values: Keys, texts: list[bytes], counts: NDArray[Any]) -> None:
        """Add distinct values: their hashes, their texts and how often each occurs."""
        self.values += int(counts.sum())
        self.distinct.add(values)
        self.frequent.add(texts, counts)

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
class HistoryColumns:
    """A history: how many events rows have, and the values of the events by slot."""

    name: str
    limit: int
    columns: list[SlotColumn]
    empty: int = 0
    cut: int = 0
    """Rows with more events than the schema keeps."""
    lengths: Quantiles = field(default_factory=Quantiles)

    def add(self, lengths: NDArray[Any]) -> None:
        self.empty += int((lengths == 0).sum())
        self.cut += int((lengths > self.limit).sum())
        self.lengths.add(lengths.astype(np.float64))

    def to_dict(self) -> LogReport:
        about = DenseColumn(self.name, 0, self.lengths).to_dict()
        del about["missing"]
        columns = [column.to_dict() for column in self.columns]
        return about | {"kind": "history", "empty": self.empty, "cut": self.cut, "columns": columns}


@dataclass
class Summary:
    """Statistics of a log, updated with every piece."""

    schema: Schema
    rows: int = 0

    def __post_init__(self) -> None:
        self.labels = [LabelColumn(task.name, task.given) for task in self.schema.tasks]
        self.dense = [DenseColumn(column.name) for column in self.schema.dense]
        self.slots = [SlotColumn(slot.name) for slot in self.schema.slots if slot.bucket is None]
        self.histories = [
            HistoryColumns(history.name, history.max, [SlotColumn(f"{history.name}.{slot}") for slot in history.slots])
            for history in self.schema.histories
        ]

    def add(self, piece: LogPiece) -> None:
        self.rows += len(piece)
        if piece.columns is not None:
            self._add_columns(piece.columns)
        else:
            self._add_batch(piece)

    def _add_columns(self, columns: Any) -> None:
        import pyarrow as pa

        names = set(columns.column_names)
        if all(name in names for name in self.schema.label_columns):
            labels = np.stack([numbers(columns.column(name)) for name in self.schema.label_columns], axis=1)
            for i, task in enumerate(self.schema.tasks):
                if task.loss == "log":
                    labels[:, i] = np.where(np.isnan(labels[:, i]), np.nan, labels[:, i] > 0)
            self._add_labels(labels)
        for dense, column in zip(self.dense, self.schema.dense, strict=True):
            values = _pick(columns, column.source_name, names)
            dense.missing = (dense.missing or 0) + values.null_count
            dense.spread.add(values.cast(pa.float64()).drop_null().to_numpy())
        for slot, described in zip(self.slots, self.schema.read_columns, strict=False):
            values, missing = _texts(_pick(columns, described.source_name, names))
            slot.missing += missing
            _count_texts(slot, values)
        for history, source in zip(self.histories, self.schema.histories, strict=True):
            for i, (events_of, name) in enumerate(zip(history.columns, source.columns, strict=True)):
                lists = _pick(columns, name, names)
                if i == 0:
                    history.add(_lengths(lists))
                events = _events(lists)
                values, missing = _texts(events)
                events_of.entries += len(events)
                events_of.missing += missing
                _count_texts(events_of, values)

    def _add_batch(self, piece: LogPiece) -> None:
        batch = piece.batch
        assert batch is not None
        if batch.labels is not None:
            self._add_labels(batch.labels.reshape(len(batch), -1))
        for i, dense in enumerate(self.dense):
            dense.missing = None
            dense.spread.add(batch.dense[:, i])
        places = [i for i, slot in enumerate(self.schema.slots) if slot.bucket is None]
        for place, slot, described in zip(places, self.slots, self.schema.read_columns, strict=False):
            keys, starts, _ = slot_keys(batch, place)
            absent = missing_key(self.schema, described)
            if described.multi:
                slot.missing += int((np.diff(starts) == 0).sum())
            else:
                slot.missing += int((keys == absent).sum())
                keys = keys[keys != absent]
            _count_keys(slot, keys)
        owners = {slot.name: slot for slot in self.schema.slots}
        for history, (source, first) in zip(self.histories, history_columns(self.schema), strict=True):
            for i, (column, name) in enumerate(zip(history.columns, source.slots, strict=True)):
                keys, starts, _ = slot_keys(batch, first + i)
                if i == 0:
                    history.add(np.diff(starts))
                present = keys[keys != missing_key(self.schema, owners[name])]
                column.entries += len(keys)
                column.missing += len(keys) - len(present)
                _count_keys(column, present)

    def _add_labels(self, labels: NDArray[Any]) -> None:
        """Add labels [B, T], with NaN for missing ones."""
        names = [label.name for label in self.labels]
        for i, label in enumerate(self.labels):
            given = labels[:, names.index(label.given)] == 1 if label.given else None
            label.add(labels[:, i], given)

    @property
    def ctr(self) -> float | None:
        """The mean of the first label."""
        return self.labels[0].mean

    def to_dict(self) -> LogReport:
        columns = [column.to_dict() for column in self.dense] + [slot.to_dict() for slot in self.slots]
        result: LogReport = {"rows": self.rows, "ctr": self.ctr, "columns": columns}
        if len(self.labels) > 1:
            result["labels"] = [label.to_dict() for label in self.labels]
        if self.histories:
            result["histories"] = [history.to_dict() for history in self.histories]
        return result


def stats(
    inputs: str | Path | Iterable[str | Path],
    format: str = AUTO,  # noqa: A002
    schema: Schema | None = None,
    bad_lines: Policy = "error",
) -> Summary:
    """Summarize all rows of `inputs` in bounded memory."""
    files = expand(inputs)
    form, read_as, _ = recognise(files, format, schema)
    unlimited = tuple(replace(history, max=History.LIMIT) for history in read_as.histories)
    log = LogSource(files, form, replace(read_as, histories=unlimited), bad_lines)
    summary = Summary(read_as)
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


def _count_texts(slot: SlotColumn, values: Any) -> None:
    counted = values.value_counts()
    texts = counted.field("values").to_pylist()
    hashes = np.fromiter((_core.hash64("", text) for text in texts), np.uint64, len(texts))
    slot.count(hashes, texts, counted.field("counts").to_numpy())


def _count_keys(slot: SlotColumn, keys: Keys) -> None:
    values, counts = np.unique(keys, return_counts=True)
    slot.count(values, [b"%d" % key for key in values.tolist()], counts)


def _lengths(lists: Any) -> NDArray[Any]:
    import pyarrow.compute as pc

    lengths: NDArray[Any] = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return lengths


def _events(lists: Any) -> Any:
    import pyarrow.compute as pc

    return pc.list_flatten(lists)


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
