"""Any bytes are rows or bad records; files of a pass have the same number of rows, and know which record each line is of."""

import io
import json
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickfleet.config.check import configure
from clickfleet.data.bad_lines import BadLines, Counters, Origins, RecordOrigin, write_origins
from clickfleet.data.formats import Bad, Parsed
from clickfleet.errors import DataError
from clickfleet.online.sources.broker import Record
from clickfleet.online.sources.messages import Spool, columns_of, fits_of, read_arrow, read_json, split_evenly
from streams import HEADER, SCHEMA, lines, settings

COLUMNS = columns_of(SCHEMA)
FITS = fits_of(COLUMNS)
ROW = {"click": 1, "time": 5, "price": 0.5, "user": "u", "ad": "a", "site": ["s"]}


def arrow(rows: list[dict], columns: pa.Schema = COLUMNS, **options) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, columns, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(pa.Table.from_pylist(rows, columns))
    return sink.getvalue()


def record(value: bytes, offset: int = 0, partition: int = 0) -> Record:
    return Record("clicks", partition, offset, 1.0, value)


def spool(folder: Path, kind: str = "json", bad_lines: str = "error", workers: int = 1, batch_size: int = 1) -> Spool:
    config = settings(folder, online={"dir": None, "kafka": {"brokers": "b", "topic": "clicks", "interval": "1h"}})
    config["online"]["kafka"]["format"] = kind
    config["data"] |= {"bad_lines": bad_lines, "batch_size": batch_size}
    return Spool(folder / "run/spool", configure(config), workers)


def with_field(name: str, text: str) -> bytes:
    return json.dumps({**ROW, name: "@"}).replace('"@"', text).encode()


BAD_JSON = {
    "lone surrogate": (with_field("user", r'"\ud800"'), "half a surrogate pair"),
    "lone surrogate in a list": (with_field("site", r'["\udfff"]'), "half a surrogate pair"),
    "deep nesting": (b"[" * 200_000, "nested too deeply"),
    "deep field": (with_field("other", '{"a":' * 100_000 + "1" + "}" * 100_000), "nested too deeply"),
    "400 digits": (with_field("price", "9" * 400), "is out of range"),
    "5000 digits": (with_field("price", "9" * 5000), "digits"),
    "1e999": (with_field("price", "1e999"), "is out of range"),
    "NaN": (with_field("price", "NaN"), "NaN is not a JSON number"),
    "Infinity": (with_field("click", "-Infinity"), "-Infinity is not a JSON number"),
    "NaN as text": (with_field("price", '"nan"'), "is not a number"),
    "underscores": (with_field("price", '"1_0"'), "is not a number"),
    "other digits": (with_field("time", '"٣"'), "is not an integer"),
    "huge integer": (with_field("time", str(2**64)), "is out of range"),
    "half a second": (with_field("time", "1.5"), "is not an integer"),
    "twice": (b'{"click": 1, "click": 0}', "the key 'click' occurs twice"),
    "no UTF-8": (b'{"user": "\xff"}', "byte 10 is not UTF-8"),
    "UTF-16": ('{"click": 1}'.encode("utf-16"), "not UTF-8"),
    "no object": (b"[1]", "it is not an object"),
    "cut off": (b'{"click": ', "Expecting value"),
    "empty": (b"", "the line is empty"),
    "an object as id": (with_field("user", "{}"), "is neither text nor an integer"),
    "a float as id": (with_field("user", "1.5"), "is neither text nor an integer"),
    "true as time": (with_field("time", "true"), "True is not an integer"),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_json_that_is_no_row(name, tmp_path):
    value, reason = BAD_JSON[name]
    with pytest.raises(ValueError, match=reason):
        read_json(value, FITS)
    records = {3: [record(json.dumps(ROW).encode(), 6, 3), record(value, 7, 3), record(json.dumps(ROW).encode(), 8, 3)]}
    with pytest.raises(
        DataError, match=rf"clicks partition 3 offset 7: .*{reason}[\s\S]*set data.bad_lines=quarantine"
    ):
        spool(tmp_path).write("20260101-0001", records)
    done = spool(tmp_path, bad_lines="skip").write("20260101-0001", records)
    assert (len(done.bad), pa.ipc.open_stream(Path(done.files[0]).read_bytes()).read_all().num_rows) == (1, 2)
    kept = spool(tmp_path, bad_lines="quarantine").write("20260101-0001", records)
    assert kept.quarantine == str(tmp_path / "run/quarantine/20260101-0001.records.txt")
    (line,) = map(json.loads, Path(kept.quarantine).read_text().splitlines())
    assert (line["topic"], line["partition"], line["offset"]) == ("clicks", 3, 7)
    assert raw(line) == value


def raw(line: dict) -> bytes:
    """The bytes of a quarantined record."""
    import base64

    return line["text"].encode() if "text" in line else base64.b64decode(line["base64"])


GOOD_ARROW = arrow([ROW, ROW])
BAD_ARROW = {
    "empty": (b"", "the record is empty"),
    "cut off": (GOOD_ARROW[: len(GOOD_ARROW) // 2], "not an Arrow stream"),
    "text": (b"1,2,3", "not an Arrow stream"),
    "other columns": (arrow([{"click": 1}], pa.schema([("click", pa.float64())])), "it has no column 'time'"),
    "a column twice": (arrow([], pa.schema([*COLUMNS, ("user", pa.string())])), "more than one column 'user'"),
    "two streams": (GOOD_ARROW + GOOD_ARROW, "bytes follow the end"),
    "wrong types": (arrow([], pa.schema([(name, pa.struct([("a", pa.int8())])) for name in COLUMNS.names])), "cast"),
    "text for a number": (
        arrow([{**ROW, "price": "x"}], COLUMNS.set(2, pa.field("price", pa.string()))),
        "not an Arrow stream of the schema",
    ),
}


@pytest.mark.parametrize("name", BAD_ARROW)
def test_arrow_that_is_no_rows(name, tmp_path):
    value, reason = BAD_ARROW[name]
    with pytest.raises(ValueError, match=reason):
        read_arrow(value, COLUMNS)
    records = {1: [record(value, 4, 1), record(GOOD_ARROW, 5, 1)]}
    with pytest.raises(DataError, match=rf"clicks partition 1 offset 4: .*{reason}"):
        spool(tmp_path, "arrow").write("20260101-0001", records)
    kept = spool(tmp_path, "arrow", "quarantine").write("20260101-0001", records)
    assert pa.ipc.open_stream(Path(kept.files[0]).read_bytes()).read_all().num_rows == 2
    (line,) = map(json.loads, Path(kept.quarantine).read_text().splitlines())
    assert raw(line) == value


def test_rows_that_no_bytes_stand_for_are_not_believed(tmp_path):
    nothing = pa.schema([(name, pa.null()) for name in COLUMNS.names])
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, nothing) as writer:
        writer.write_table(pa.table({name: pa.nulls(1 << 30) for name in COLUMNS.names}))
    with pytest.raises(ValueError, match="it claims 1,073,741,824 rows"):
        read_arrow(sink.getvalue(), COLUMNS)
    assert spool(tmp_path, "arrow").rows_of(record(sink.getvalue())) == 1


values = st.binary(max_size=200) | st.builds(
    lambda at, byte, zipped: _changed(arrow([ROW] * 3, compression="zstd" if zipped else None), at, byte),
    st.integers(0, 10_000),
    st.integers(0, 255),
    st.booleans(),
)


def _changed(value: bytes, at: int, byte: int) -> bytes:
    at %= len(value)
    return value[:at] + bytes([byte]) + value[at + 1 :]


@given(value=values)
def test_any_bytes_are_arrow_rows_or_a_reason(value):
    with suppress(ValueError):
        assert read_arrow(value, COLUMNS).schema == COLUMNS


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.text(st.characters(codec=None))
objects = st.dictionaries(st.sampled_from(COLUMNS.names), st.recursive(plain, st.lists, max_leaves=5))


@given(line=st.binary(max_size=100) | objects.map(lambda row: json.dumps(row).encode()))
def test_any_bytes_are_a_json_row_or_a_reason(line):
    row = None
    with suppress(ValueError):
        row = read_json(line, FITS)
    if row is not None:
        table = pa.Table.from_pylist([row], COLUMNS)
        table.validate(full=True)
        assert table.num_rows == 1


def test_a_pass_is_split_into_files_with_the_same_number_of_rows(tmp_path):
    texts = [b"a\nb\nc\nd", b"e\n", b"", b"f\ng", b"h", b"i", b"j"]
    records = {0: [record(text, n) for n, text in enumerate(texts)]}
    one = spool(tmp_path, "text").write("20260101-0001", records)
    assert [Path(path).name for path in one.files] == ["20260101-0001.txt"]
    assert Path(one.files[0]).read_bytes() == b"a\nb\nc\nd\ne\n\nf\ng\nh\ni\nj\n"
    several = spool(tmp_path, "text", workers=4, batch_size=3).write("20260101-0002", records)
    parts = [Path(path).read_bytes() for path in several.files]
    assert b"".join(parts) == Path(one.files[0]).read_bytes()
    assert [part.count(b"\n") for part in parts] == [3, 3, 3, 2]
    offsets = [Origins(path).of(line).offset for path, part in zip(several.files, parts, strict=True)
               for line in range(1, part.count(b"\n") + 1)]  # fmt: skip
    assert offsets == [0, 0, 0, 0, 1, 2, 3, 3, 4, 5, 6]
    rows = [json.dumps({**ROW, "time": n}).encode() for n in range(11)]
    made = spool(tmp_path, "json", workers=4, batch_size=3).write(
        "20260101-0003", {0: [record(row, n) for n, row in enumerate(rows)]}
    )
    tables = [pa.ipc.open_stream(Path(path).read_bytes()).read_all() for path in made.files]
    assert [len(table) for table in tables] == [3, 3, 3, 2]
    assert pa.concat_tables(tables).column("time").to_pylist() == list(range(11))


def test_files_have_a_batch_of_rows_but_no_worker_has_none(tmp_path):
    records = {0: [record(b"row", n) for n in range(45)]}
    made = spool(tmp_path, "text", workers=2, batch_size=10).write("20260101-0001", records)
    assert [Path(path).read_bytes().count(b"\n") for path in made.files] == [12, 11, 11, 11]
    small = spool(tmp_path, "text", workers=2, batch_size=100).write("20260101-0002", records)
    assert [Path(path).read_bytes().count(b"\n") for path in small.files] == [23, 22]


@given(rows=st.integers(0, 1000), parts=st.integers(1, 20))
def test_shares_are_even(rows, parts):
    shares = split_evenly(rows, parts)
    assert (sum(shares), len(shares)) == (rows, parts)
    assert max(shares) - min(shares) <= 1


@given(counts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(1, 3)), max_size=30))
def test_every_line_finds_its_record(counts, tmp_path_factory):
    path, offset, records = tmp_path_factory.mktemp("spool") / "x.txt", 0, []
    for partition, step, rows in counts:
        offset += step
        records.append((partition, offset, rows))
    write_origins(path, "clicks", records)
    expected = [RecordOrigin("clicks", partition, offset) for partition, offset, rows in records for _ in range(rows)]
    assert [Origins(str(path)).of(line + 1) for line in range(len(expected))] == expected


def test_old_passes_are_pruned_by_number(tmp_path):
    one = spool(tmp_path, "text", workers=2)
    for number in (9999, 10_000, 10_001):
        one.write(f"20260101-{number:04d}", {0: [record(b"a"), record(b"b", 1)]})
    one.prune(2)
    assert sorted(path.name for path in one.folder.iterdir()) == sorted(
        f"{hidden}20260101-{number}.00{part}.txt{end}"
        for number in (10_000, 10_001)
        for part in (0, 1)
        for hidden, end in (("", ""), (".", ".places"))
    )


def test_a_bad_line_names_its_record(tmp_path):
    path = tmp_path / "x.txt"
    write_origins(path, "clicks", [(2, 40, 1), (2, 41, 1)])
    parsed = Parsed(None, 2, 1, [Bad(1, b"b\xffd", "price", "is no number")])  # type: ignore[arg-type]
    with pytest.raises(DataError, match="clicks partition 2 offset 41: price: is no number"):
        BadLines("error", 0.1, None).handle(str(path), 0, parsed, Counters(), "csv")
    kept = BadLines("quarantine", 1.0, str(tmp_path / "aside.txt"))
    kept.handle(str(path), 0, parsed, Counters(), "csv")
    kept.close()
    line = json.loads((tmp_path / "aside.txt").read_text())
    assert (line["topic"], line["partition"], line["offset"], raw(line)) == ("clicks", 2, 41, b"b\xffd")


def test_lines_of_the_schema_are_rows():
    row = dict(zip(HEADER.split(","), lines(1, 1)[0].split(","), strict=True))
    assert read_json(json.dumps(row).encode(), FITS)["click"] in (0.0, 1.0)
