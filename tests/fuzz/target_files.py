"""Data files: every format, whole files of bytes."""

from __future__ import annotations

import gzip
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from clickfleet.data.formats import Format
from clickfleet.data.formats.arrow import Arrow
from clickfleet.data.formats.criteo import criteo
from clickfleet.data.formats.csv import Csv
from clickfleet.data.formats.feasign import Feasign
from clickfleet.data.formats.jsonl import Jsonl
from clickfleet.data.formats.libffm import Libffm
from clickfleet.data.formats.libsvm import Libsvm
from clickfleet.data.formats.multislot import Multislot
from clickfleet.data.formats.parquet import Parquet
from clickfleet.data.formats.sentences import Sentences
from clickfleet.data.formats.slots import Slots
from clickfleet.data.formats.vw import Vw
from clickfleet.data.guess import guess
from clickfleet.data.schema import Bucket, Dense, Schema, Slot, preset

FOLDER = Path(tempfile.mkdtemp(prefix="clickfleet-fuzz-"))

WIDE = Schema(
    dense=(Dense("x"), Dense("f0", source="fl"), Dense("f1", source="fl")),
    slots=(
        Slot("s"), Slot("m", multi=True), Slot("d"), Slot("i"), Slot("l"), Slot("v"), Slot("b"), Slot("w", multi=True),
        Slot("x_bucket", bucket=Bucket("x")),
    ),
    label="click", time="t", group="s", weight="x", values=True,
)  # fmt: skip


def wide_table() -> pa.Table:
    n = 10
    return pa.table(
        {
            "click": pa.array([0.0, 1.0, 0.0, 1.0] * n, pa.float32()),
            "x": pa.array([1.5, None, 2.5, 3.0] * n),
            "fl": pa.array([[1.0, 2.0]] * 4 * n, pa.list_(pa.float32(), 2)),
            "s": pa.array(["a", "bb", None, "dddd"] * n),
            "m": pa.array([["a", "b"], [], None, ["cc"]] * n),
            "d": pa.array(["u", "v", "u", "w"] * n).dictionary_encode(),
            "i": pa.array([1, 2, 3, 4] * n, pa.int64()),
            "l": pa.array(["a", "bb", None, "q"] * n, pa.large_string()),
            "v": pa.array(["a" * 20, "bb", None, "q"] * n, pa.string()).cast(pa.string_view()),
            "b": pa.array([True, False, None, True] * n),
            "w": pa.array([[("k", 1.0)], [], None, [("l", 2.0), ("k", 1.5)]] * n, pa.map_(pa.string(), pa.float32())),
            "t": pa.array([1, 2, 3, 4] * n, pa.timestamp("s")),
        }
    )


def arrow_file(*, stream: bool = False, packed: str | None = None) -> bytes:
    out, table = io.BytesIO(), wide_table()
    opened = pa.ipc.new_stream if stream else pa.ipc.new_file
    with opened(out, table.schema, options=pa.ipc.IpcWriteOptions(compression=packed)) as writer:
        writer.write_table(table, max_chunksize=25)
    return out.getvalue()


def parquet_file() -> bytes:
    out = io.BytesIO()
    pq.write_table(wide_table().set_column(8, "v", wide_table()["l"].cast(pa.string())), out, row_group_size=25)
    return out.getvalue()


def reads(form: Format, schema: Schema, name: str) -> Callable[[bytes], object]:
    """Writes the bytes to a file and parses all of it."""
    path = FOLDER / name

    def read(data: bytes) -> int:
        path.write_bytes(data)
        return sum(len(block.parse("all").batch) for block in form.blocks(os.fspath(path), schema, 0))

    return read


def recognises(name: str) -> Callable[[bytes], object]:
    """Writes the bytes to a file and guesses its format and schema."""
    path = FOLDER / name

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return guess(os.fspath(path)).text()

    return read


NAMED = Schema(
    dense=(Dense("x"), Dense("y0", source="y"), Dense("y1", source="y")),
    slots=(Slot("a"), Slot("b", multi=True), Slot("xb", bucket=Bucket("x", boundaries=(0.5, 2.0)))),
    label="click",
)
CRITEO = (
    b"1\t5\t"
    + b"\t".join(b"%d" % i for i in range(12))
    + b"\t"
    + b"\t".join(b"68fd1e6%x" % (i % 16) for i in range(26))
    + b"\n"
)
WORDS = Schema(slots=(Slot("in", multi=True), Slot("out", multi=True)))
BLOCKS = b"3 1.5 2 3 1 77 2 8 9 1 0\n"

TARGETS = [
    ("criteo", reads(criteo, preset("criteo"), "criteo"), [CRITEO * 3, CRITEO[2:], b"\n\n", b"\t" * 39 + b"\n"]),
    ("criteo-gz", reads(criteo, preset("criteo"), "criteo.gz"), [gzip.compress(CRITEO * 3), gzip.compress(CRITEO) * 2]),
    ("criteo-zst", reads(criteo, preset("criteo"), "criteo.zst"), [pa.compress(CRITEO * 3, "zstd", asbytes=True)]),
    (
        "csv",
        reads(Csv(list_separator="|"), Schema(dense=(Dense("x"),), slots=(Slot("a"), Slot("b", multi=True)), label="click"), "csv"),
        [b'click,x,a,b\n1,2.5,"q,""r",u|v\n0,,w,\n', b"x,a,b\n1,2,3\n", b'click,x,a,b\n1,1e400,"open\n'],
    ),
    ("slots", reads(Slots(), NAMED, "slots"), [b"click:1 x:2.5 a:7 b:8 b:9 y:1 y:2\nclick:0 a:1\n", b"a:1:2 :: click:1\n"]),
    ("feasign", reads(Feasign(), NAMED, "feasign"), [b"id1\t1:click 2.5:x 7:a 8:b 1:y 2:y\n", b"7:a 0:click\n"]),
    ("libffm", reads(Libffm(), Schema(slots=(Slot("0"), Slot("1", multi=True)), label="click", values=True), "libffm"),
     [b"1 0:7:1 1:8:0.5 1:9:2\n0 0:1:1\n", b"0:7:1 1:8:1\n"]),
    ("libsvm", reads(Libsvm(), Schema(slots=(Slot("features", multi=True),), label="click", values=True, group="qid"), "libsvm"),
     [b"1 qid:3 5:0.5 7:2 # text\n0 8:1\n", b"5:1 7:1\n"]),
    ("libsvm-positions", reads(Libsvm(positions=True), Schema(slots=(Slot("a"), Slot("b")), negative=-1), "libfm"),
     [b"-1 5:1 7:1\n+1 6:1 7:1\n", b"5:1 7:1\n"]),
    ("vw", reads(Vw(), Schema(slots=(Slot("features", multi=True), Slot("ad", multi=True)), weight="w", values=True), "vw"),
     [b"1 0.5 'tag | x y:2 |ad:3 a3 price:0.5\n0 |ad z\n", b"|ad x\n"]),
    ("jsonl", reads(Jsonl(), Schema((Dense("x"),), (Slot("a"), Slot("b", multi=True)), time="t", group="a", label="click"), "jsonl"),
     [b'{"click": 1, "x": 2.5, "a": "q", "b": ["u", 3], "t": "2026-01-31"}\n{"click": 0, "a": {"x": 1}, "t": 5}\n',
      b'{"a": 1e400, "t": 1}\n']),
    ("recognition", recognises("anything"), [
        CRITEO * 3, b'click,x,a,b\n1,2.5,"q,""r",u|v\n0,,w,\n', b"1 5:0.5 7:2\n-1 8:1\n", b"1 |a x |b y:2\n", b"1 0:7:1\n",
        b'{"click": 1, "a": ["x"], "t": "2026-01-31"}\n', b"a\tb\n1\t2\n", arrow_file(), parquet_file(),
    ]),
    ("multislot", reads(Multislot(), NAMED, "multislot"), [BLOCKS, BLOCKS * 2, b"9" * 5000 + b" 1\n", b"3 1 2 3 1 7 99999999999 8 1 0\n"]),
    ("sentences", reads(Sentences(), WORDS, "sentences"), [b"the cat sat\non the mat\n", b" \t\r\n\n"]),
    ("arrow", reads(Arrow(), WIDE, "arrow"), [
        arrow_file(), arrow_file(packed="zstd"), arrow_file(stream=True), arrow_file(stream=True, packed="lz4"),
    ]),
    ("parquet", reads(Parquet(), WIDE, "parquet"), [parquet_file()]),
]  # fmt: skip
