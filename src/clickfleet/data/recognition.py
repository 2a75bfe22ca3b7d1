"""Recognise the format of files by their ending and content, and read a bounded sample of their rows as an Arrow table."""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from clickfleet.config.plugins import Plugin
from clickfleet.data.arrow_ipc import open_ipc
from clickfleet.data.events import VERSION
from clickfleet.data.files import PACKED, Unpacked, open_bytes, packing, reading
from clickfleet.data.formats import load
from clickfleet.data.formats.csv import Csv
from clickfleet.data.parsing.delimited import SEPARATORS
from clickfleet.data.schema import Schema, preset
from clickfleet.errors import ConfigError, DataError

HEAD_BYTES = 8 << 20
PIECE_BYTES = 2 << 20
PIECES = 8
"""A sample is the start of the first file, and up to 8 pieces of the rest: of other files, or later parts of the only one."""
HEAD_ROWS = 50_000
PIECE_ROWS = 6_000
_LOOK = 200  # lines that decide the format
_ENDINGS = {
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather", ".ipc", ".arrows"),
    "jsonl": (".jsonl", ".ndjson"),
    "libffm": (".ffm", ".libffm"),
    "libsvm": (".svm", ".libsvm", ".libfm", ".svmlight"),
    "vw": (".vw",),
}
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_number = re.compile(_NUMBER, re.ASCII)
_MISSING = frozenset(("", "NA", "N/A", "NaN", "nan", "NULL", "null", "None", "\\N", "?"))
LABEL_NAMES = (
    *(
        "label",
        "labels",
        "target",
        "y",
        "click",
        "clicked",
        "is_click",
        "is_clicked",
        "isclick",
        "click_label",
        "ctr_label",
    ),
    *("is_label", "clk", "class_label"),
)
OUTCOME_NAMES = (
    *("conversion", "converted", "is_conversion", "purchase", "purchased", "is_purchase", "bought", "buy", "install"),
    *("installed", "subscribed", "like", "liked", "is_like", "response", "outcome", "is_attributed", "attributed"),
    *("signup", "signed_up", "churn", "churned", "positive", "is_positive", "class", "income", "survived", "default"),
)
"""Names of a label, in the order of their rank."""


def plain_name(name: str) -> str:
    """Return the name of a column in lower case with underscores, without RecBole's type.

    >>> plain_name("userId"), plain_name("item_id:token"), plain_name("Is Click")
    ('user_id', 'item_id', 'is_click')
    """
    name = re.sub(r":(token|float)(_seq)?$", "", name.strip())
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"[\s.-]+", "_", name).lower().strip("_")


@dataclass
class LogSample:
    """Some rows of files, and the format that reads them."""

    format: Plugin
    table: Any = None
    """The columns: text for delimited lines, typed for all others. None if the schema is known without them."""
    whole: bool = True
    """The sample holds every row."""
    schema: Schema | None = None
    """The schema of the format, if the rows have exactly its shape."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """What the format itself says about columns: slot, list, dense or label."""
    values: bool = False
    """Keys have values."""
    has_header: bool = True
    notes: list[str] = field(default_factory=list)


def sample(files: Sequence[str], given: Plugin, known: Schema | None = None) -> LogSample:
    """Recognise the format of `files` and read a sample. `given` is the format if it is known, or auto with its settings.

    `known` is the schema, if there is one: then only the format is wanted.
    """
    files = [path for path in files if _size(path) != 0] or list(files)
    if not given.automatic:
        name = given.name
    else:
        name = "csv" if given.settings else _by_content(files[0])
    if name == "joined":
        if known is None:
            raise ConfigError(
                f"{files[0]} has joined rows, whose schema is that of the model that scored them",
                "set data.schema or data.preset; schema.yaml is in the run folder of the model",
            )
        return LogSample(Plugin(name))
    if name in _TABLES:
        table, whole = _tables(files, name)
        return LogSample(given if not given.automatic else Plugin(name), table, whole)
    if packing(files[0]) is None:
        _check_text(files[0])
    pieces, whole = _lines(files)
    lines = pieces[0]
    if not lines:
        notes = [f"{files[0]} is empty: its format is taken to be Criteo's"]
        return LogSample(Plugin("criteo"), schema=preset("criteo"), notes=notes)
    if not name:
        name = _by_lines(lines[:_LOOK], files[0], known)
    form = Plugin(name, given.settings) if given.automatic else given
    read: Callable[..., LogSample] | None = _READERS.get(name)
    if read is None:
        own = load(form).schema
        if own is None:
            raise ConfigError(
                f"cannot guess the schema of files in the format {name}", "set data.schema or data.preset"
            )
        return LogSample(form, schema=own)
    found = read(pieces, form, files[0], known)
    found.whole = whole
    return found


def _size(path: str) -> int | None:
    return None if "://" in path else os.path.getsize(path) if os.path.exists(path) else None


def _stem(path: str) -> str:
    for ending in PACKED:
        path = path.removesuffix(ending)
    return path.lower()


def _by_content(path: str) -> str:
    """Return the format of a binary file, or one that its ending names; empty if the lines must decide."""
    with open_bytes(path) as raw, reading(path):
        start = raw.read(8) or b""
    if start.startswith(b"PAR1"):
        return "parquet"
    if start.startswith(b"ARROW1") or (start.startswith(b"\xff\xff\xff\xff") and len(start) == 8):
        return "joined" if _is_joined(path) else "arrow"
    if start.startswith(b"\x1f\x8b") and packing(path) != "gzip":
        raise DataError(f"{path} is compressed with gzip, but its name does not end in .gz", "rename it")
    if start.startswith(b"\x28\xb5\x2f\xfd") and packing(path) != "zstd":
        raise DataError(f"{path} is compressed with zstd, but its name does not end in .zst", "rename it")
    if start.startswith((b"PK\x03\x04", b"BZh", b"\xfd7zXZ")):
        raise DataError(
            f"{path} is an archive or compressed in a way that cannot be read", "unpack it, or use .gz or .zst"
        )
    stem = _stem(path)
    name = next((name for name, endings in _ENDINGS.items() if stem.endswith(endings)), "")
    if name in _TABLES and start:
        raise DataError(f"{path} is not a file of the format {name}, as its name says", "rename it, or set data.format")
    return name


def _is_joined(path: str) -> bool:
    """Return whether an Arrow file holds joined rows."""
    with open_bytes(path) as raw, reading(path):
        return bytes((open_ipc(raw).schema.metadata or {}).get(VERSION, b"")).startswith(b"joined/")


def _check_text(path: str) -> None:
    with open_bytes(path) as raw, reading(path):
        start = raw.read(4096) or b""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path} is text in UTF-16", "convert it to UTF-8: iconv -f UTF-16 -t UTF-8")
    if b"\0" in start:
        raise DataError(f"{path} is not a text file, and its format is unknown", "set data.format")


def _tables(files: Sequence[str], name: str) -> tuple[Any, bool]:
    parts: list[Any] = []
    whole = len(files) <= 1 + PIECES
    for i, path in enumerate([files[0], *_spread(files[1:], PIECES)]):
        left = HEAD_ROWS if i == 0 else PIECE_ROWS
        with open_bytes(path) as raw, reading(path):
            for batch in _TABLES[name](raw):
                parts.append(pa.Table.from_batches([batch.slice(0, left)]))
                whole = whole and len(batch) <= left
                left -= len(parts[-1])
                if left <= 0:
                    whole = False
                    break
    if not parts:
        raise DataError(f"{files[0]} has no rows")
    kept = [part for part in parts if part.schema.equals(parts[0].schema)]
    return pa.concat_tables(kept), whole


def _parquet_batches(raw: Any) -> Iterator[Any]:
    import pyarrow.parquet as pq

    yield from pq.ParquetFile(raw).iter_batches(16384, use_threads=False)


_TABLES: dict[str, Callable[[Any], Iterable[Any]]] = {"parquet": _parquet_batches, "arrow": open_ipc}
"""Formats of binary tables, and what yields their record batches."""


def _spread(items: Sequence[str], count: int) -> list[str]:
    return [items[i * len(items) // count] for i in range(count)] if len(items) > count else list(items)


def _lines(files: Sequence[str]) -> tuple[list[list[str]], bool]:
    """Return the lines of the start of the first file, then of the other pieces; and whether these are all lines."""
    pieces: list[list[str]] = []
    whole = len(files) <= 1 + PIECES
    size = _size(files[0]) or 0
    for i, path in enumerate([files[0], *_spread(files[1:], PIECES)]):
        lines, complete = _head(path, *((HEAD_BYTES, HEAD_ROWS) if i == 0 else (PIECE_BYTES, PIECE_ROWS)))
        pieces.append(lines)
        whole = whole and complete
    if len(files) == 1 and packing(files[0]) is None and size > HEAD_BYTES + PIECES * PIECE_BYTES:
        step = (size - HEAD_BYTES) // PIECES
        pieces += [_part(files[0], HEAD_BYTES + i * step) for i in range(PIECES)]
    return pieces, whole


def _head(path: str, most_bytes: int, most_rows: int) -> tuple[list[str], bool]:
    stream = Unpacked(path)
    try:
        space = bytearray(most_bytes)
        with memoryview(space) as view:
            filled = stream.readinto(view)
        content, complete = bytes(space[:filled]), filled < most_bytes
    finally:
        stream.close()
    if not complete and b"\n" not in content:
        raise DataError(f"{path}: the first line is longer than {most_bytes >> 20} MiB", "set data.format")
    lines = _texts(content if complete else content[: content.rfind(b"\n") + 1], most_rows)
    return lines[:most_rows], complete and len(lines) <= most_rows


def _part(path: str, at: int) -> list[str]:
    with open_bytes(path) as raw, reading(path):
        raw.seek(at)
        content = raw.read(PIECE_BYTES) or b""
    return _texts(content[content.find(b"\n") + 1 : content.rfind(b"\n") + 1], PIECE_ROWS)[:PIECE_ROWS]


def _texts(content: bytes, most: int) -> list[str]:
    """Return the first lines that are not empty, and one more than `most` if there are."""
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n", most + 1)[: most + 1]
    texts = b"\n".join(lines).decode("utf-8", "replace").split("\n")
    return [line.removesuffix("\r") for line in texts if line and line != "\r"]


_token2 = re.compile(rf"[^\s:]+:{_NUMBER}", re.ASCII)
_token3 = re.compile(rf"[^\s:]+:[^\s:]+:{_NUMBER}", re.ASCII)
_vw_head = re.compile(rf"(?:{_NUMBER}\s+){{0,3}}(?:'?\S+)?\s*", re.ASCII)


def _by_lines(lines: Sequence[str], path: str, known: Schema | None) -> str:
    """Return the format that these lines have."""
    if lines[0].lstrip().startswith("["):
        raise DataError(
            f"{path} is a JSON array", "write one JSON object per line (.jsonl), for example with jq -c '.[]'"
        )
    for name, fits in _SHAPES.items():
        good = [fits(line) for line in lines]
        is_header = not good[0] and len(lines) > 1 and lines[0].count("\t") == lines[1].count("\t") > 0
        if sum(good) >= 0.9 * len(lines) and not is_header:  # a few lines may be bad
            return name
    return "csv"


def _is_json(line: str) -> bool:
    return line.lstrip().startswith("{") and line.rstrip().endswith("}") and '"' in line


def _is_criteo(line: str) -> bool:
    fields = line.split("\t")
    if len(fields) not in (39, 40):
        return False
    if len(fields) == 40 and fields[0] not in ("0", "1"):
        return False
    numbers, words = fields[-39:-26], fields[-26:]
    if any("." in text for text in words):
        return False
    return all(not text.strip(" ") or _number.fullmatch(text) for text in numbers)  # blank is missing


def _is_vw(line: str) -> bool:
    head, bar, rest = line.partition("|")
    if not bar or not _vw_head.fullmatch(head) or (head and not head[-1].isspace() and "'" not in head):
        return False
    return " " in rest or not rest


def _is_libffm(line: str) -> bool:
    label, *tokens = line.split() or [""]
    return bool(tokens and _number.fullmatch(label)) and all(map(_token3.fullmatch, tokens[:50]))


def _is_libsvm(line: str) -> bool:
    label, *tokens = line.partition("#")[0].split() or [""]
    return bool(tokens and _number.fullmatch(label)) and all(map(_token2.fullmatch, tokens[:50]))


def _is_feasign(line: str) -> bool:
    first, *tokens = line.rpartition("\t")[2].split(" ") or [""]
    return first in ("0:1", "1:1") and all(re.fullmatch(r"\d+:\d{1,5}", token) for token in tokens[:50])


def _is_slots(line: str) -> bool:
    tokens = line.strip().split(" ")
    pairs = [token.partition(":") for token in tokens]
    return (
        len(tokens) > 1
        and all(name and colon for name, colon, _ in pairs)
        and any(plain_name(name) in LABEL_NAMES for name, _, _ in pairs)
    )


def _is_multislot(line: str) -> bool:
    """Tell whether a line has the 28 blocks of Criteo's columns. Other numbers of blocks are no proof."""
    tokens = line.split()
    return len(tokens) == 68 and tokens[0] == "13" and tokens[14:66:2] == ["1"] * 26 and tokens[-2] == "1"


_SHAPES: dict[str, Callable[[str], bool]] = {
    "jsonl": _is_json,
    "criteo": _is_criteo,
    "vw": _is_vw,
    "libffm": _is_libffm,
    "libsvm": _is_libsvm,
    "feasign": _is_feasign,
    "slots": _is_slots,
    "multislot": _is_multislot,
}


def _criteo(pieces: list[list[str]], form: Plugin, path: str, known: Schema | None) -> LogSample:
    return LogSample(form, schema=preset("criteo"))


def _jsonl(pieces: list[list[str]], form: Plugin, path: str, known: Schema | None) -> LogSample:
    rows: list[dict[str, Any]] = []
    for line in _all([piece[: HEAD_ROWS // 5] for piece in pieces]):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the reader reports it with its place
        if isinstance(row, dict):
            rows.append(row)
    if not rows:
        raise DataError(f"{path} has no JSON objects, one per line")
    names = list(dict.fromkeys(name for row in rows for name in row))
    return LogSample(form, pa.table({name: _column([row.get(name) for row in rows]) for name in names}))


def _column(values: list[Any]) -> Any:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        lists = any(isinstance(value, list) for value in values)
        plain = [None if value is None else _text_of(value, lists) for value in values]
        return pa.array(plain)


def _text_of(value: Any, as_list: bool) -> Any:
    if as_list:
        return [str(item) for item in (value if isinstance(value, list) else [value])]
    return str(value)


def _all(pieces: Iterable[list[str]]) -> Iterator[str]:
    for piece in pieces:
        yield from piece


_TOKEN_ROWS = 5_000  # lines of tokens are split in Python
_MOST_NAMES = 2_000  # more names of slots than any log has: the lines have another format


def _check_names(names: Sequence[str], form: Plugin, path: str) -> None:
    if len(names) > _MOST_NAMES:
        raise _unlike(form, path, f"its lines name more than {_MOST_NAMES:,} slots")


def _unlike(form: Plugin, path: str, why: str) -> ConfigError:
    return ConfigError(
        f"{path} does not look like {form.name}: {why}",
        "check data.format, or describe the columns in a schema: data.schema (--schema)",
    )


def _libsvm(pieces: list[list[str]], form: Plugin, path: str, known: Schema | None) -> LogSample:
    labels: list[str | None] = []
    rows: list[list[str]] = []
    ones, widths = True, Counter[int]()
    for line in _some(pieces):
        label, *tokens = line.partition("#")[0].split() or [""]
        if ":" in label:
            label, tokens = "", [label, *tokens]
        pairs = [token.partition(":") for token in tokens if not token.startswith("qid:")]
        if len(rows) < _LOOK and not all(colon for _, colon, _ in pairs):
            raise _unlike(form, path, f"{line!r:.42} is not a line of entries index:value")
        ones = ones and all(_is_one(value) for _, _, value in pairs)
        widths[len(pairs)] += 1
        labels.append(label or None)
        rows.append([name for name, _, _ in pairs])
    positions = form.settings.get("positions", ones and len(widths) == 1 and 0 < next(iter(widths)) <= 1000)
    columns: dict[str, Any] = {"label": labels}
    if positions:
        width = max(widths)
        columns |= {f"f{i + 1}": [row[i] if i < len(row) else None for row in rows] for i in range(width)}
        notes = [f"every line has {width} entries of value 1: the first is slot f1, the last is slot f{width}"]
        chosen = Plugin(form.name, {**form.settings, "positions": True})
        return LogSample(chosen, pa.table(columns), roles=_roles(columns, "slot"), notes=notes)
    columns["features"] = rows
    return LogSample(form, pa.table(columns), roles=_roles(columns, "list"), values=True)


def _roles(columns: Mapping[str, Any], role: str) -> dict[str, str]:
    return {name: "label" if name == "label" else role for name in columns}


def _is_one(text: str) -> bool:
    try:
        return float(text) == 1
    except ValueError:
        return False


def _some(pieces: list[list[str]]) -> Iterator[str]:
    for i, piece in enumerate(pieces):
        yield from piece[: _TOKEN_ROWS if i == 0 else _TOKEN_ROWS // PIECES]


def _libffm(pieces: list[list[str]], form: Plugin, path: str, known: Schema | None) -> LogSample:
    labels: list[str | None] = []
    rows: list[dict[str, list[str]]] = []
    for line in _some(pieces):
        label, *tokens = line.split() or [""]
        if ":" in label:
            label, tokens = "", [label, *tokens]
        row: dict[str, list[str]] = {}
        for token in tokens:
            name, _, rest = token.partition(":")
            feature, colon, _ = rest.partition(":")
            if not colon and len(rows) < _LOOK:
                raise _unlike(form, path, f"{token!r:.42} is not field:feature:value")
            row.setdefault(name, []).append(feature)
        labels.append(label or None)
        rows.append(row)
    names = sorted({name for row in rows for name in row}, key=lambda name: (not name.isdigit(), len(name), name))
    _check_names(names, form, path)
    if all(name.isdigit() for name in names) and names and int(names[-1]) < 300:
        names = [str(i) for i in range(int(names[-1]) + 1)]  # a field may be absent from the sample
    columns: dict[str, Any] = {"label": labels}
    columns |= {name: pa.array([row.get(name, []) for row in rows], pa.list_(pa.string())) for name in names}
    return LogSample(form, pa.table(columns), roles=_roles(columns, "list"), values=True)


def _vw(pieces: list[list[str]], form: Plugin, path: str, known: Schema | None) -> LogSample:
    unnamed = str(form.settings.get("unnamed", "features"))
    labels: list[str | None] = []
    rows: list[dict[str, list[str]]] = []
    valued = False
    for line in _some(pieces):
        head, *spaces = line.split("|")
        words = head.split()
        if words and (not head[-1].isspace() or words[-1].startswith("'")):
            words.pop()
        row: dict[str, list[str]] = {}
        for space in spaces:
            name, *tokens = space.split() if space[:1].strip() else ["", *space.split()]
            name, colon, scale = name.partition(":")
            valued = valued or (colon != "" and not _is_one(scale))
            pairs = [token.partition(":") for token in tokens]
            valued = valued or any(colon and not _is_one(value) for _, colon, value in pairs)
            row.setdefault(name or unnamed, []).extend(feature for feature, _, _ in pairs)
        labels.append(words[0] if words else None)
        rows.append(row)
    names = list(dict.fromkeys(name for row in rows for name in row))
    _check_names(names, form, path)
    columns: dict[str, Any] = {"label": labels}
    columns |= {
        name: pa.array([row.get(name, []) for row in rows], pa.list_(pa.string())) for name in names if name != "label"
    }
    return LogSample(form, pa.table(columns), roles=_roles(columns, "list"), values=valued)


def _slots(pieces: list[list[str]], form: Plugin, path: str, known: Schema | None) -> LogSample:
    rows: list[dict[str, list[str]]] = []
    for line in _some(pieces):
        row: dict[str, list[str]] = {}
        for token in line.strip().split(" "):
            name, _, value = token.partition(":")
            row.setdefault(name, []).append(value.partition(":")[0])
        rows.append(row)
    names = list(dict.fromkeys(name for row in rows for name in row))
    _check_names(names, form, path)
    own = preset("criteo-slots")
    if set(names) <= {own.label, "dense_feature", *(slot.name for slot in own.slots)} and "dense_feature" in names:
        return LogSample(form, schema=own)
    columns: dict[str, Any] = {}
    for name in names:
        lists = [row.get(name, []) for row in rows]
        single = all(len(items) <= 1 for items in lists)
        columns[name] = pa.array(
            [items[0] if items else None for items in lists] if single else lists,
            pa.string() if single else pa.list_(pa.string()),
        )
    return LogSample(form, pa.table(columns))


def _delimited(pieces: list[list[str]], form: Plugin, path: str, known: Schema | None) -> LogSample:
    settings = dict(form.settings)
    lines = pieces[0][:_LOOK]
    separator = settings.get("separator")
    separator = SEPARATORS.get(separator, separator) if isinstance(separator, str) else _separator(lines, path)
    rows = [_split(line, separator) for line in lines]
    columns: Any = settings.get("columns") or ()
    names = tuple(columns.split(",") if isinstance(columns, str) else columns)
    has_header = not names and _has_header(rows)
    notes = []
    if has_header:
        names = tuple(rows[0])
    elif not names:
        names = tuple(f"c{i + 1}" for i in range(len(rows[0])))
        settings["columns"] = list(names)
        notes.append(f"the first line is no header: the columns are named c1 to c{len(names)}")
    if separator != Csv.separator:
        settings["separator"] = {"\t": "tab", " ": "space"}.get(separator, separator)
    if known is None and len(names) < 2:
        raise ConfigError(f"{path} has a single column, {names[0]!r}", "set data.format.separator")
    header = pieces[0][0] if has_header else None
    kept = [line for line in _all(pieces) if line != header]
    if not kept:
        raise DataError(f"{path} has a header line but no rows")
    table = _text_table(kept, names, separator, bool(settings.get("quotes", True)))
    chosen = Plugin(form.name if form.name != "auto" else "csv", settings)
    if separator == settings.get("list_separator", Csv.list_separator):
        chosen = Plugin(chosen.name, {**settings, "list_separator": ";"})
    return LogSample(chosen, table, has_header=has_header, notes=notes)


def _separator(lines: Sequence[str], path: str) -> str:
    """Return the separator that gives all lines the same number of fields: the one that gives the most."""
    best, most = "", 1
    for separator in ("\t", "\x01", ";", "|", ",", " "):
        counts = [len(_split(line, separator)) for line in lines]
        common = Counter(counts).most_common(1)[0]
        if counts[0] == common[0] and common[1] >= 0.9 * len(lines) and common[0] > most:
            best, most = separator, common[0]
    if not best:
        pairs = lines[0].count("::")
        raise ConfigError(
            f"cannot recognise the format of {path}; it starts with {lines[0]!r:.80}",
            "the separator :: must be one character: sed 's/::/\\t/g'"
            if pairs and all(line.count("::") == pairs for line in lines)
            else "set data.format, and data.format.separator for delimited text",
        )
    return best


def _split(line: str, separator: str) -> list[str]:
    if '"' not in line:
        return line.split(separator)
    try:
        return next(csv.reader([line], delimiter=separator))
    except (csv.Error, StopIteration):
        return line.split(separator)


def _has_header(rows: list[list[str]]) -> bool:
    """Tell whether the first line names the columns: it has no numbers, and a name of a label or a column of numbers below it."""
    first, rest = rows[0], [row for row in rows[1:] if len(row) == len(rows[0])]
    names = [text.strip() for text in first]
    if any(_number.fullmatch(name) or (name in _MISSING and name) for name in names) or len(set(names)) < len(names):
        return False
    if sum(not name for name in names) > 1:
        return False
    if not rest or any(plain_name(name) in (*LABEL_NAMES, *OUTCOME_NAMES) for name in names):
        return True
    below = [[row[i] for row in rest] for i in range(len(names))]
    if any(all(text in _MISSING or _number.fullmatch(text) for text in column) for column in below):
        return True
    return all(name not in column for name, column in zip(names, below, strict=True))


def _text_table(lines: list[str], names: Sequence[str], separator: str, quotes: bool) -> Any:
    from pyarrow import csv as arrow_csv

    content = ("\n".join(lines) + "\n").encode()
    return arrow_csv.read_csv(
        pa.BufferReader(content),
        arrow_csv.ReadOptions(block_size=len(content) + 1, column_names=list(names), use_threads=True),
        arrow_csv.ParseOptions(
            delimiter=separator, quote_char='"' if quotes else False, invalid_row_handler=lambda row: "skip"
        ),
        arrow_csv.ConvertOptions(
            column_types={name: pa.string() for name in names},
            null_values=sorted(_MISSING),
            strings_can_be_null=True,
            quoted_strings_can_be_null=True,
        ),
    )


_READERS: dict[str, Callable[..., LogSample]] = {
    "criteo": _criteo,
    "jsonl": _jsonl,
    "libsvm": _libsvm,
    "libffm": _libffm,
    "vw": _vw,
    "slots": _slots,
    "csv": _delimited,
}
