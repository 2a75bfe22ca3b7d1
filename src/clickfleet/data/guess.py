"""Guess the format and the schema of a click log from a sample of its rows. docs/data.md lists the rules.

>>> clicks = {"clicked": [0, 1] * 20, "city": ["Bern", "Oslo", "Rome", "Oslo"] * 10, "price": [i + 0.5 for i in range(40)]}
>>> [(column.name, column.role) for column in guess(clicks).columns]
[('clicked', 'label'), ('city', 'slot'), ('price', 'dense')]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.config.plugins import AUTO, Plugin, closest
from clickfleet.data.files import expand
from clickfleet.data.recognition import (
    HEAD_ROWS,
    LABEL_NAMES,
    OUTCOME_NAMES,
    PIECE_ROWS,
    PIECES,
    LogSample,
    plain_name,
    sample,
)
from clickfleet.data.schema import Bucket, Dense, History, Label, Schema, Slot, Transform, preset
from clickfleet.errors import ConfigError

Role = Literal["label", "dense", "slot", "list", "history", "user", "time", "ignored"]

FEW_VALUES = 32
"""Integers with at most so many distinct values are categories."""
MOST_BUCKETS, LEAST_BUCKETS = 32, 5
EVENTS_PER_BUCKET = 100
"""A dense column also becomes a slot of buckets: up to 32, one for every 100 rows of the rarer label; none if that makes fewer than 5.
More would teach a small log by heart."""
MOST_VALUES, ROWS_PER_VALUE = 128, 8
"""Integers are used both as amounts and as categories if each value has on average so many rows of the sample, and if they
have at most 128 values or no long tail: they may be codes, and one value may mean much."""
LEAST_IN_BUCKET = 20
"""Rows of the sample in a bucket, unless one value alone fills it."""
UNIQUE_ROWS = 20
"""A column without two equal values is useless. Fewer rows are no proof."""

_USERS = (
    "user_id",
    "user",
    "uid",
    "userid",
    "user_key",
    "member_id",
    "visitor_id",
    "customer_id",
    "client_id",
    "viewer_id",
)
_TIMES = ("timestamp", "event_time", "time", "ts", "datetime", "date_time", "hour", "date", "created_at", "day", "dt")
_TIME_WORDS = frozenset(("time", "timestamp", "ts", "datetime", "date", "at"))
_IDS = re.compile(
    r"(^|_)(ids?|code|zip|zipcode|postcode|hash|key|isbn|sku|asin|ip|uuid|guid|phone|category|cat|type|class|kind|brand"
    r"|city|region|country|state|gender|sex|os|browser|model|domain|channel|campaign|creative|site|app|publisher"
    r"|advertiser|item|ad|product|movie|video|song|artist|banner|page|store|shop|query|keyword|device|network|carrier"
    r"|placement|segment|cluster|group|version|slot|position|pos|weekday|month|hour|language|lang)$|[a-z]{3,}id$"
)
_AMOUNTS = re.compile(
    r"(^|_)(count|cnt|num|n|total|sum|avg|mean|price|cost|amount|amnt|amt|limit|util|debt|fee|charge|tenure|age|days|hours|minutes|seconds|duration|length|len|rate"
    r"|ratio|score|clicks|views|shows|impressions|freq|frequency|quantity|qty|size|width|height|distance|salary|income"
    r"|balance|weight|bid|floor|paid|revenue|value|percent|pct|prob|recency|year|lat|lon|temperature)s?($|_)"
)
_PAST = frozenset(
    (
        *("hist", "history", "past", "clicked", "click", "viewed", "view", "seen", "bought", "recent", "last", "seq"),
        *("sequence", "watched", "visited", "rated", "liked", "events"),
    )
)
"""Words that say that a list is of past values of a slot: clicked_item, past_categories, item_history."""
_LATER = frozenset(
    (
        *("conversion", "converted", "is_conversion", "purchase", "purchased", "is_purchase", "bought", "buy", "order"),
        *("install", "installed", "is_attributed", "attributed", "ordered", "add_to_cart"),
    )
)
"""Names of what follows a click."""
_NOT_IDS = (
    "paid",
    "valid",
    "invalid",
    "android",
    "grid",
    "avoid",
    "covid",
    "liquid",
    "solid",
    "fluid",
    "hybrid",
    "rapid",
)


@dataclass(frozen=True)
class ColumnGuess:
    """What a column is, and why."""

    name: str
    role: Role
    type: str
    distinct: int
    missing: int
    example: str
    why: str


@dataclass(frozen=True)
class Guess:
    """The format and schema of some data."""

    format: Plugin
    schema: Schema
    columns: tuple[ColumnGuess, ...] = ()
    rows: int = 0
    """Rows of the sample."""
    notes: tuple[str, ...] = ()

    @property
    def of_format(self) -> bool:
        """Whether the schema is that of the format, as for Criteo's own lines."""
        return not self.columns

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "format": {"name": self.format.name, **self.format.settings},
            "schema": self.schema.to_dict(),
            "columns": [asdict(column) for column in self.columns],
            "rows": self.rows,
            "notes": list(self.notes),
        }

    def text(self) -> str:
        """Return the guess as a table with one line per column."""
        settings = " ".join(f"{key}={_short(item, 60)}" for key, item in self.format.settings.items())
        form = "" if self.format.automatic else f"format {self.format.name}{settings and ' ' + settings}, "
        if self.of_format:
            lines = [f"{form}its own schema: {len(self.schema.dense)} dense columns and {len(self.schema.slots)} slots"]
            return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])
        heads = ("column", "role", "type", "distinct", "missing", "example", "why")
        cells = [
            (
                _short(column.name, 28),
                column.role,
                column.type,
                f"{column.distinct:,}",
                f"{column.missing / max(self.rows, 1):.1%}" if column.missing else "-",
                _short(column.example, 24),
                column.why,
            )
            for column in self.columns
        ]
        widths = [max(len(row[i]) for row in (heads, *cells)) for i in range(len(heads))]
        lines = [f"{form}schema guessed from {self.rows:,} rows"]
        for row in (heads, *cells):
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def yaml(self) -> str:
        """Return schema.yaml: the schema, with the ignored columns as comments."""
        import yaml

        lines = [f"# Guessed from {self.rows:,} rows. Edit it, and set data.schema to this file."]
        lines += [
            f"# ignored: {_short(column.name, 60)} ({column.why})"
            for column in self.columns
            if column.role == "ignored"
        ]
        return "\n".join(lines) + "\n" + yaml.safe_dump(self.schema.to_dict(), sort_keys=False, allow_unicode=True)

    def write(self, path: Path) -> None:
        """Write schema.yaml, atomically."""
        from clickfleet.data.files import writing

        with writing(path) as temporary:
            temporary.write_text(self.yaml(), encoding="utf-8")


def _short(value: Any, most: int) -> str:
    text = (
        value
        if isinstance(value, str)
        else ",".join(map(str, value))
        if isinstance(value, list | tuple)
        else str(value)
    )
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= most else text[: most - 1] + "…"


def guess(
    data: Any,
    label: str | None = None,
    format: str | Plugin | Mapping[str, Any] | None = None,  # noqa: A002
    *,
    need_label: bool = True,
) -> Guess:
    """Guess the format and schema of files, or the schema of a frame, an Arrow table or a mapping of arrays.

    Raise ConfigError where only the user can decide, and name the columns to choose from. `label` names the label.
    Without `need_label`, data in which no column can be the label is accepted too.
    """
    form = (
        format
        if isinstance(format, Plugin)
        else Plugin(format or AUTO)
        if not isinstance(format, Mapping)
        else Plugin.parse(format)
    )
    found = _sample_of(data, form)
    if found.table is None:
        assert found.schema is not None
        if label is not None and label != found.schema.label:
            raise ConfigError(f"the label of the format {found.format.name} is {found.schema.label!r}, not {label!r}")
        return Guess(found.format, found.schema, notes=tuple(found.notes))
    return _Guesser(found, label, need_label).guess()


def is_frame(data: Any) -> bool:
    """Tell whether `data` is a frame, a table or a mapping of arrays, whose columns can be sampled more than once."""
    if isinstance(data, pa.RecordBatchReader):
        return False
    return isinstance(data, Mapping) or (hasattr(data, "__arrow_c_stream__") and hasattr(data, "__len__"))


def is_files(data: Any) -> bool:
    """Tell whether `data` names files."""
    if isinstance(data, str | Path):
        return True
    return isinstance(data, list | tuple) and bool(data) and all(isinstance(item, str | Path) for item in data)


def _sample_of(data: Any, form: Plugin) -> LogSample:
    if is_files(data):
        return sample(expand(data), form)
    if not is_frame(data):
        raise ConfigError(
            f"cannot guess the schema of {type(data).__name__}", "pass schema=Schema(…), or a frame, a table or files"
        )
    if isinstance(data, Mapping):
        from clickfleet.data.memory import table_of

        table = table_of(data, "the data")
        rows = table.num_rows
        parts = [table.slice(start, count) for start, count in _spans(rows)]
    else:
        rows = len(data)
        parts = [_slice(data, start, count) for start, count in _spans(rows)]
    if not rows:
        raise ConfigError("the data has no rows to guess a schema from", "pass schema=Schema(…)")
    table = pa.concat_tables(parts, promote_options="permissive")
    return LogSample(Plugin(AUTO), table, whole=table.num_rows == rows)


def _spans(rows: int) -> Iterator[tuple[int, int]]:
    """Yield the start and length of the pieces of a frame to look at."""
    yield 0, min(rows, HEAD_ROWS)
    rest = rows - HEAD_ROWS
    for i in range(PIECES if rest > 0 else 0):
        start = HEAD_ROWS + i * rest // PIECES
        yield start, min(PIECE_ROWS, rows - start, rest // PIECES + 1)


def _slice(frame: Any, start: int, count: int) -> Any:
    if hasattr(frame, "iloc"):
        part = frame.iloc[start : start + count]
        return pa.Table.from_pandas(part, preserve_index=False)
    return pa.table(frame.slice(start, count))


@dataclass
class _Column:
    """A column of the sample with its statistics."""

    name: str
    values: Any
    rows: int
    kind: str = ""
    """integer, number, text, boolean, list, time or other."""
    missing: int = 0
    distinct: int = 0
    example: str = ""
    numbers: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """The values that are not missing, if they are numbers."""
    zeros: bool = False
    """A value starts with a zero that a number would lose."""
    plain: str = ""

    def __post_init__(self) -> None:
        self.plain = plain_name(self.name)
        column = self.values
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        kind = column.type
        if pa.types.is_string_view(kind) or pa.types.is_large_string(kind):
            column = column.cast(pa.string()) if column.nbytes < 1 << 31 else column
        if pa.types.is_floating(kind):
            column = pc.if_else(pc.is_nan(column), None, column)
        self.values = column
        present = column.drop_null()
        self.kind = self._kind(present)
        if self.kind in ("text", "integer", "number") and pa.types.is_string(column.type):
            present = present.filter(pc.not_equal(pc.utf8_length(present), 0))
        self.missing = self.rows - len(present)
        if self.kind == "list":
            flat = present.flatten() if not pa.types.is_map(present.type) else present.keys
            self.distinct = _distinct(flat)
        elif self.kind != "other":
            self.distinct = _distinct(present)
        self.example = str(present[0].as_py()) if len(present) else ""

    def _kind(self, present: Any) -> str:
        kind = present.type
        if pa.types.is_boolean(kind):
            return "boolean"
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            self.numbers = present.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            return "integer" if bool((self.numbers == np.floor(self.numbers)).all()) else "number"
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
            return "time"
        if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            inner = kind.value_type
            return "other" if pa.types.is_nested(inner) else "list"
        if pa.types.is_null(kind):
            return "text"
        if pa.types.is_string(kind):
            return self._kind_of_text(present)
        return "text" if pa.types.is_binary(kind) or pa.types.is_large_string(kind) else "other"

    def _kind_of_text(self, present: Any) -> str:
        first = present[:1000].to_pylist()
        if not first or not all(_NUMBER.fullmatch(text) for text in first if text):
            return "text"
        try:
            numbers = present.cast(pa.float64()).to_numpy(zero_copy_only=False)
        except pa.ArrowInvalid:
            return "text"
        if not np.isfinite(numbers).all():
            return "text"
        self.numbers = numbers
        self.zeros = bool(pc.any(pc.match_substring_regex(present, r"^0\d")).as_py())
        return "integer" if bool((numbers == np.floor(numbers)).all()) else "number"

    def texts(self) -> Any:
        """Return the values that are not missing, as text."""
        present = self.values.drop_null()
        return present if pa.types.is_string(present.type) else present.cast(pa.string())

    def shown(self) -> str:
        """Return some values for a message, the smallest or first ones."""
        values = pc.unique(self.values.drop_null())
        if len(self.numbers):
            listed = [f"{x:g}" for x in np.unique(self.numbers)[:6]]
        else:
            listed = [_short(str(value.as_py()), 20) for value in values[:6]]
        return ", ".join(listed) + (" …" if len(values) > 6 else "")


def _distinct(values: Any) -> int:
    """Return the number of distinct values of any type."""
    try:
        return int(pc.count_distinct(values).as_py())
    except pa.ArrowNotImplementedError:
        return len(set(map(str, values.to_pylist())))


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class _Guesser:
    """Decides the role of every column of a sample."""

    def __init__(self, found: LogSample, label: str | None, need_label: bool = True) -> None:
        self.sample, self.given, self.need_label = found, label, need_label
        self.rows = found.table.num_rows
        names = found.table.column_names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"two columns are named {twice!r}", "rename one of them")
        self.columns = [_Column(name, found.table[name], self.rows) for name in names]
        self.by_name = {column.name: column for column in self.columns}
        self.notes = list(found.notes)
        self.dense: list[Dense] = []
        self.slots: list[Slot] = []
        self.buckets: list[Slot] = []
        self.histories: list[History] = []
        self.settings = dict(found.format.settings)
        self.time: str | None = None
        self.user: str | None = None
        self.most_buckets = MOST_BUCKETS

    def _buckets(self, label: _Column | None, negative: int) -> int:
        """Return how many buckets a dense column may have. A sample of a larger log does not limit them."""
        if label is None or not self.sample.whole:
            return MOST_BUCKETS
        values = label.numbers if len(label.numbers) else label.values.cast(pa.float64()).to_numpy(zero_copy_only=False)
        clicks = int(np.count_nonzero(values != negative))
        buckets = min(clicks, len(values) - clicks) // EVENTS_PER_BUCKET
        return min(buckets, MOST_BUCKETS) if buckets >= LEAST_BUCKETS else 0

    def guess(self) -> Guess:
        criteo = preset("criteo")
        names = [column.name for column in criteo.columns]
        if self.sample.table.column_names in ([criteo.label, *names], *([names] if not self.need_label else [])):
            return Guess(self.sample.format, criteo, self._criteo_columns(), self.rows, tuple(self.notes))
        label, negative, why = self._label()
        if negative:
            self.notes.append("labels -1 and 1 are read as 0 and 1 (negative: -1 in the schema)")
        self.most_buckets = self._buckets(label, negative)
        self.user = self._user(label)
        self.time = self._time(label)
        separator = self._list_separator(label)
        later = self._later(label, negative)
        columns = []
        for column in self.columns:
            if column is label:
                role, reason = "label", why
            elif column in later:
                role, reason = "label", f"known only where {label.name if label else ''} is 1"
            else:
                role, reason = self._role(column, label, separator)
            columns.append(
                ColumnGuess(column.name, role, column.kind, column.distinct, column.missing, column.example, reason)  # type: ignore[arg-type]
            )
        if not self.slots and not self.dense:
            raise ConfigError(
                f"no column can be used to predict {label.name if label else 'anything'!r}: "
                + "; ".join(f"{one.name}: {one.why}" for one in columns if one.role == "ignored"),
                "describe the columns in a schema: data.schema (--schema)",
            )
        past = self._find_histories(separator)
        columns = [replace(one, role="history", why=past[one.name]) if one.name in past else one for one in columns]
        name = label.name if label is not None else Schema.label
        schema = Schema(
            tuple(self.dense),
            (*self.slots, *self.buckets),
            name,
            time=self.time,
            group=self.user,
            values=self.sample.values,
            negative=negative,
            histories=tuple(self.histories),
            labels=(Label(name), *(Label(column.name, given=name) for column in later)) if later else (),
        )
        form = replace(self.sample.format, settings=self.settings)
        return Guess(form, schema, tuple(columns), self.rows, tuple(self.notes))

    def _criteo_columns(self) -> tuple[ColumnGuess, ...]:
        criteo = preset("criteo")
        roles: dict[str, Role] = {criteo.label: "label", **{column.name: "dense" for column in criteo.dense}}
        return tuple(
            ColumnGuess(
                column.name,
                roles.get(column.name, "slot"),
                column.kind,
                column.distinct,
                column.missing,
                column.example,
                "a column of Criteo's log",
            )
            for column in self.columns
        )

    def _label(self) -> tuple[_Column | None, int, str]:
        if self.given is not None:
            if self.given not in self.by_name:
                raise ConfigError(f"there is no column {self.given!r} for the label{closest(self.given, self.by_name)}")
            column = self.by_name[self.given]
            return column, self._negative(column), "given as the label"
        fixed = [name for name, role in self.sample.roles.items() if role == "label"]
        if fixed:
            column = self.by_name[fixed[0]]
            return column, self._negative(column), "the first entry of a line"
        for names in (LABEL_NAMES, OUTCOME_NAMES):
            named = [column for column in self.columns if column.plain in names]
            binary = [column for column in named if _negative_of(column) is not None]
            if len(binary) > 1:
                raise self._ask(binary)
            if binary:
                return binary[0], self._negative(binary[0]), "named like a label"
            if named and names is LABEL_NAMES:
                self._negative(named[0])  # raises
        binary = [column for column in self.columns if _negative_of(column) is not None and not column.missing]
        binary = [column for column in binary if column.distinct == 2]
        if binary and binary[0] is self.columns[0] and not self.sample.has_header:
            return binary[0], self._negative(binary[0]), "the first column, with two values"
        if not binary and not self.need_label:
            return None, 0, ""
        if len(binary) == 1:
            return binary[0], self._negative(binary[0]), "the only column with the values 0 and 1"
        raise self._ask(binary)

    def _ask(self, candidates: Sequence[_Column]) -> ConfigError:
        if not candidates:
            names = ", ".join(column.name for column in self.columns[:12]) + (" …" if len(self.columns) > 12 else "")
            return ConfigError(
                f"which column is the label? No column has the values 0 and 1, or -1 and 1; the columns are {names}",
                "add a column of 0 and 1, for example rating >= 4, and name it: data.label=NAME (label=… in Python)",
            )
        names = ", ".join(column.name for column in candidates[:12])
        return ConfigError(
            f"which column is the label? candidates: {names}",
            f"give it: data.label={candidates[0].name} (label=… in Python, --label for the command schema)",
        )

    def _negative(self, column: _Column) -> int:
        negative = _negative_of(column)
        if negative is None:
            raise ConfigError(
                f"the label {column.name!r} has the values {column.shown() or 'nothing'}; "
                "expected 0 and 1, or -1 and 1",
                "make a column of 0 and 1, for example rating >= 4, and name it: data.label=NAME (label=… in Python)",
            )
        return negative

    def _later(self, label: _Column | None, negative: int) -> list[_Column]:
        """Return columns that say what followed a click. They are labels too: as features they would tell the click."""
        if label is None or self.sample.roles:
            return []
        clicked = _as_bits(label, negative)
        found = []
        for column in self.columns:
            if column is label or column.plain not in _LATER or _negative_of(column) != negative:
                continue
            after = _as_bits(column, negative)
            if after.any() and not (after & ~clicked).any():
                found.append(column)
                self.notes.append(
                    f"{column.name} is 1 only where {label.name} is 1, so it is a second label: as a feature it would leak"
                )
        return found

    def _find_histories(self, separator: str | None) -> dict[str, str]:
        """Turn lists of past values of a slot into histories: column -> why. Columns of equal length are one history."""
        slots = {_singular(plain_name(slot.name)): slot.name for slot in self.slots if not slot.multi}
        groups: dict[tuple[str, bytes], list[tuple[str, str]]] = {}
        for slot in [slot for slot in self.slots if slot.multi and not self.sample.roles]:
            words = plain_name(slot.name).split("_")
            affix = "_".join(word for word in words if word in _PAST)
            base = slots.get(_singular("_".join(word for word in words if word not in _PAST)))
            if affix and base is not None:
                lengths = _list_lengths(self.by_name[slot.name].values, separator)
                groups.setdefault((affix, lengths.tobytes()), []).append((base, slot.name))
        why: dict[str, str] = {}
        for (affix, _), pairs in groups.items():
            bases = dict(pairs)  # a slot once
            taken = {*self.by_name, *(history.name for history in self.histories)} - {*bases.values()}
            name = affix
            while name in taken:
                name += "_"
            self.histories.append(History(name, tuple(bases), tuple(bases.values())))
            why |= {column: f"named like past values of {base}; history {name}" for base, column in bases.items()}
        self.slots = [slot for slot in self.slots if slot.name not in why]
        return why

    def _user(self, label: _Column | None) -> str | None:
        if self.sample.roles:
            return None
        for name in _USERS:
            for column in self.columns:
                if column.plain == name and column is not label and column.kind in ("text", "integer"):
                    return None if self._is_unique(column) or column.distinct < 2 else column.name
        return None

    def _time(self, label: _Column | None) -> str | None:
        """Return the name of the column that orders the rows."""
        if self.sample.roles:
            return None

        def rank(column: _Column) -> int:
            return _TIMES.index(column.plain) if column.plain in _TIMES else len(_TIMES)

        moments = [column for column in self.columns if column is not label and _is_time(column)]
        usable = [column for column in moments if not column.missing and column.distinct > 1]
        return min(usable, key=rank).name if usable else None

    def _list_separator(self, label: _Column | None) -> str | None:
        """Return the separator of lists in delimited text: that of most columns."""
        if not self.sample.format.settings and not _is_text_table(self.sample):
            return None
        given = self.settings.get("list_separator")
        counts: dict[str, int] = {}
        own = self.settings.get("separator", ",")
        for column in self.columns:
            if column is label or column.kind != "text":
                continue
            for separator in (given,) if given else ("|", ";", ",", " ", "^"):
                if separator != own and _holds_lists(column, separator):
                    counts[separator] = counts.get(separator, 0) + 1
                    break
        if not counts:
            return None
        best = max(counts, key=lambda separator: counts[separator])
        if best != "|":
            self.settings["list_separator"] = {" ": "space", ",": "comma"}.get(best, best)
        return best

    def _is_unique(self, column: _Column) -> bool:
        """Tell whether every row has its own value, so that nothing can be learned from it."""
        if column.kind in ("list", "number") or column.rows - column.missing != column.distinct:
            return False
        enough = UNIQUE_ROWS if self.sample.whole or _IDS.search(column.plain) else 10_000
        return column.distinct >= enough

    def _is_past(self, column: _Column, separator: str | None) -> bool:
        """Tell whether a column of text lists past values. Long lists hardly repeat, but their values do."""
        named = not _PAST.isdisjoint(column.plain.split("_"))
        return named and column.kind == "text" and separator is not None and _holds_lists(column, separator)

    def _role(self, column: _Column, label: _Column | None, separator: str | None) -> tuple[str, str]:
        fixed = self.sample.roles.get(column.name)
        if fixed is not None:
            multi = fixed == "list" and (column.name == "features" or _most_values(column) > 1 or self.sample.values)
            self.slots.append(Slot(column.name, multi=multi))
            return ("list" if multi else "slot"), "one key per line" if not multi else "several keys per line"
        if not column.name:
            return "ignored", "it has no name"
        if column.kind == "other":
            return "ignored", f"columns of type {column.values.type} are not supported"
        if column.distinct == 0 or (column.distinct == 1 and not column.missing):
            return "ignored", "all rows have the same value" if column.distinct else "all values are missing"
        if column.name == self.time:
            return "time", "a moment in time; it orders the rows"
        if _is_time(column):
            return "ignored", "a moment in time, which does not come back"
        if self._is_unique(column) and not self._is_past(column, separator):
            return "ignored", "every row has its own value"
        if label is not None and _mirrors(column, label):
            self.notes.append(
                f"{column.name} says the same as the label {label.name}, so it is ignored: it would leak the answer"
            )
            return "ignored", "the same as the label"
        if column.name == self.user:
            return self._slot(column, "user", "named like a user; the group of the metric gauc")
        if column.kind == "boolean":
            return self._slot(column, "slot", "true or false")
        if column.kind == "list":
            if pa.types.is_floating(column.values.type.value_type):
                return "ignored", "lists of numbers are not supported"
            self.slots.append(Slot(column.name, multi=True))
            return "list", "lists"
        if column.kind == "text":
            if separator is not None and _holds_lists(column, separator):
                self.slots.append(Slot(column.name, multi=True))
                return "list", f"values separated by {separator!r}"
            if _is_prose(column):
                return "ignored", "free text that hardly repeats"
            return self._slot(column, "slot", "text")
        return self._numeric(column)

    def _slot(self, column: _Column, role: str, why: str) -> tuple[str, str]:
        self.slots.append(Slot(column.name))
        return role, why

    def _numeric(self, column: _Column) -> tuple[str, str]:
        hint = re.search(r":(token|float)$", column.name)
        if column.kind == "integer":
            if hint is not None and hint[1] == "token":
                return self._slot(column, "slot", "its header says token")
            if column.zeros:
                return self._slot(column, "slot", "numbers with leading zeros are codes")
            if _IDS.search(column.plain) and column.plain not in _NOT_IDS:
                return self._slot(column, "slot", "named like an id or category")
            if column.distinct <= FEW_VALUES:
                if column.distinct > 2 and hint is None:
                    self._dense(column)
                    return self._slot(column, "slot", f"integers with at most {FEW_VALUES} values; also dense")
                return self._slot(column, "slot", f"integers with at most {FEW_VALUES} values")
            if np.abs(column.numbers).max() >= 2**31:
                return self._slot(column, "slot", "integers as large as a hash")
            if _AMOUNTS.search(column.plain):
                return self._number(column, "named like an amount")
            if hint is None and not _is_ordered(column.numbers):
                return self._slot(column, "slot", "integers without the shape of an amount")
            role, why = self._number(column, "integers with the shape of an amount")
            few = column.distinct <= MOST_VALUES or not _has_long_tail(column.numbers)
            if hint is None and few and column.distinct <= self.rows / ROWS_PER_VALUE:
                self.buckets.append(Slot(self._new_name(column, "value"), source=column.name))
                why += "; also a slot"
            return role, why
        return self._number(column, "numbers with fractions")

    def _new_name(self, column: _Column, kind: str) -> str:
        """Return a name for a slot that is made from a column."""
        name = f"{column.name}_{kind}"
        while name in self.by_name:
            name += "_"
        return name

    def _dense(self, column: _Column) -> Dense:
        """Add a dense column."""
        transform = _transform(column.numbers)
        missing = 0.0
        if column.missing and transform.name == "log1p" and column.numbers.min() >= 0:
            missing = -1.0  # apart from the zeros
        is_slot = column.distinct <= FEW_VALUES and column.kind == "integer"
        name = self._new_name(column, "number") if is_slot else column.name
        self.dense.append(Dense(name, transform, missing, source=column.name if is_slot else ""))
        return self.dense[-1]

    def _number(self, column: _Column, why: str) -> tuple[str, str]:
        dense = self._dense(column)
        transform, missing = dense.transform, dense.missing
        boundaries = boundaries_of(column.numbers, transform, missing if column.missing else None, self.most_buckets)
        if boundaries:
            name = self._new_name(column, "bucket")
            self.buckets.append(Slot(name, bucket=Bucket(dense.name, boundaries=boundaries)))
            why += f"; also {len(boundaries) + 1} buckets"
        return "dense", why


def _is_text_table(found: LogSample) -> bool:
    return (
        not found.format.automatic and not found.roles and all(pa.types.is_string(f.type) for f in found.table.schema)
    )


def _negative_of(column: _Column) -> int | None:
    """Return the label of a row without a click, 0 or -1; None if the column cannot be a label."""
    if column.kind == "boolean":
        return 0
    if column.kind not in ("integer", "number") or not len(column.numbers):
        return None
    values = set(np.unique(column.numbers).tolist())
    if values <= {0.0, 1.0}:
        return 0
    return -1 if values <= {-1.0, 1.0} else None


def _as_bits(column: _Column, negative: int) -> NDArray[np.bool_]:
    """Return which rows have the label 1; a missing one has not."""
    values = (
        column.values.cast(pa.float64())
        if not pa.types.is_boolean(column.values.type)
        else column.values.cast(pa.int8())
    )
    return np.asarray(values.fill_null(negative).to_numpy(zero_copy_only=False) == 1)


def _singular(name: str) -> str:
    """Return a name as it is written for one thing.

    >>> _singular("categories"), _singular("item_ids"), _singular("class")
    ('category', 'item_id', 'class')
    """
    if name.endswith("ies"):
        return name[:-3] + "y"
    return name[:-1] if name.endswith("s") and not name.endswith("ss") else name


def _list_lengths(column: Any, separator: str | None) -> NDArray[np.int64]:
    if pa.types.is_string(column.type):
        empty = pc.equal(pc.utf8_length(column.fill_null("")), 0)
        column = pc.if_else(empty, None, pc.split_pattern(column, separator or "|"))
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)


def _most_values(column: _Column) -> int:
    if not pa.types.is_list(column.values.type):
        return 1
    return int(pc.max(column.values.value_lengths()).as_py() or 0)


def _is_time(column: _Column) -> bool:
    """Tell whether a column holds moments: by its type, or by its name and values."""
    if column.kind == "time":
        return True
    words = set(column.plain.split("_"))
    named = column.plain in _TIMES or bool(words & _TIME_WORDS)
    if column.kind in ("integer", "number") and len(column.numbers) and named:
        return _are_moments(column.numbers)
    if column.kind != "text" or column.distinct < 2:
        return False
    texts = column.texts()[:1000]
    if not len(texts) or not all(re.match(r"\d{4}-\d\d-\d\d", text or "") for text in texts.to_pylist()):
        return False
    offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)
    return bool(_core.text_times(offsets, data, np.zeros(len(texts), np.int64)) == len(texts))


def _are_moments(numbers: NDArray[np.float64]) -> bool:
    """Tell whether all numbers are seconds, milliseconds or microseconds since 1970, or dates such as 20260131 or 14102100."""
    low, high = numbers.min(), numbers.max()
    for unit in (1.0, 1e3, 1e6):
        if 5e8 * unit <= low and high <= 4.2e9 * unit:  # from 1985 to 2103
            return True
    whole = np.unique(numbers[:5000]).astype(np.int64)
    return any(
        _are_dates(whole, shape) for shape in ("YYYYMMDD", "YYYYMMDDHH", "YYMMDDHH", "YYYYMMDDHHMMSS", "YYYYMMDDHHMM")
    )


def _are_dates(numbers: NDArray[np.int64], shape: str) -> bool:
    if not (len(str(numbers.min())) == len(str(numbers.max())) == len(shape)):
        return False
    limits = {"Y": (1970, 2100) if shape.startswith("YYYY") else (0, 99), "M": (1, 12), "D": (1, 31), "H": (0, 23)}
    at = 0
    for match in re.finditer(r"Y+|MM|DD|HH|SS", shape):
        part = match[0]
        digits = numbers // 10 ** (len(shape) - match.end()) % 10 ** len(part)
        low, high = limits.get(part[0], (0, 60)) if at < 8 or part != "MM" else (0, 59)
        if digits.min() < low or digits.max() > high:
            return False
        at = match.end()
    return True


def _holds_lists(column: _Column, separator: str) -> bool:
    """Tell whether the values of a text column are lists: many hold the separator, and their parts repeat more than they do."""
    if separator == " " and not column.name.endswith("_seq"):
        return False
    texts = column.texts()[:20_000]
    if not len(texts):
        return False
    if separator == " ":
        return True
    several = pc.mean(pc.match_substring(texts, separator)).as_py()
    if several < 0.05:
        return False
    parts = pc.split_pattern(texts, separator)
    flat = parts.flatten()
    if pc.mean(pc.equal(pc.utf8_length(flat), 0)).as_py() > 0.2 or pc.mean(pc.starts_with(flat, " ")).as_py() > 0.05:
        return False
    distinct = pc.count_distinct(flat).as_py()
    if separator == "|":  # hardly used inside a value
        return bool(distinct < 0.5 * len(flat))
    return bool(distinct < 0.8 * pc.count_distinct(texts).as_py() or (len(texts) < 50 and distinct < len(flat)))


def _is_prose(column: _Column) -> bool:
    if column.distinct < 0.9 * (column.rows - column.missing) or column.rows < UNIQUE_ROWS:
        return False
    return bool(pc.mean(pc.count_substring(column.texts()[:5000], " ")).as_py() >= 3)


def _mirrors(column: _Column, label: _Column) -> bool:
    """Tell whether a column has two values that say exactly what the label says."""
    if column.distinct != 2 or column.missing or label.missing or label.distinct != 2 or column.rows < UNIQUE_ROWS:
        return False
    if column.kind == "list":
        return False
    codes = [pc.dictionary_encode(one.values).indices.to_numpy(zero_copy_only=False) for one in (column, label)]
    same = codes[0] == codes[1]
    return bool(same.all())


def _is_ordered(numbers: NDArray[np.float64]) -> bool:
    """Tell whether integers look like an amount: a long tail, or neighbouring values that are about equally frequent."""
    if _has_long_tail(numbers):
        return True
    values, counts = np.unique(numbers, return_counts=True)
    if len(numbers) < 2 * len(values):  # too few repeats to compare frequencies: equal-width bins instead
        counts, _ = np.histogram(numbers, 50)
    logs = np.log1p(counts.astype(np.float64))
    if len(logs) < 8 or logs.std() < 0.25:  # ids are often equally frequent
        return False
    return bool(np.corrcoef(logs[:-1], logs[1:])[0, 1] > 0.5)


def _has_long_tail(numbers: NDArray[np.float64]) -> bool:
    """Tell whether integers look like counts: most rows have one of the smallest values, and some have much larger ones."""
    low, middle, high = np.percentile(numbers, (1, 50, 99))
    if low < 0 or high - middle <= 4 * max(middle - low, 1):
        return False
    values, counts = np.unique(numbers, return_counts=True)
    return bool(counts[: max(len(values) // 10, 3)].sum() > 0.3 * len(numbers))


def _transform(numbers: NDArray[np.float64]) -> Transform:
    """Return log1p for a long tail, else the standardisation by mean and deviation."""
    low, middle, high = np.percentile(numbers, (1, 50, 99))
    long_tail = high > 10 and high - middle > 4 * max(middle - low, 1.0) and low > -high / 10
    deviation = float(numbers.std())
    if long_tail or deviation == 0 or not np.isfinite(deviation):
        return Transform("log1p")
    return Transform("standard", float(f"{numbers.mean():.6g}"), float(f"{deviation:.6g}"))


def boundaries_of(
    numbers: NDArray[np.float64], transform: Transform, missing: float | None, buckets: int
) -> tuple[float, ...]:
    """Return the limits of buckets with about equally many rows, and limits around the value that replaces a missing one.

    A value that would fill a bucket gets its own, such as the zeros of an amount. The others share what is left.

    >>> boundaries_of(np.array([0.0] * 60 + [1.0, 2.0, 3.0, 4.0] * 10), Transform(), None, 3)
    (0.5, 2.5)
    """
    if buckets < 2:
        return ()
    if transform.name == "log1p":
        changed = np.sign(numbers) * np.log1p(np.abs(numbers))
    else:
        changed = (numbers - transform.a) / transform.scale
    values, counts = np.unique(changed.astype(np.float32), return_counts=True)
    heavy = counts >= len(numbers) / buckets
    share = max(counts[~heavy].sum() / max(buckets - heavy.sum(), 1), LEAST_IN_BUCKET)
    limits, size = set[float](), 0
    for i in range(len(values) - 1):
        size += int(counts[i])
        if heavy[i] or size >= share or (heavy[i + 1] and size >= LEAST_IN_BUCKET):
            limits.add(float(f"{(float(values[i]) + float(values[i + 1])) / 2:.6g}"))
            size = 0
    if missing is not None:
        limits |= {missing - 1e-6, missing + 1e-6}
    return tuple(sorted(limits))
