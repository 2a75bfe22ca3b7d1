"""Models that other tools saved, and what they tell their clients."""

from __future__ import annotations

import gzip
import pickle
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from clickfleet.paddlerec import client_config, dumps, pickles, variables

FOLDER = Path(tempfile.mkdtemp(prefix="clickfleet-fuzz-"))


def pdparams(data: bytes) -> object:
    path = FOLDER / "rec.pdparams"
    path.write_bytes(data)
    return pickles.load(path)


def prototxt(data: bytes) -> object:
    path = FOLDER / client_config.FILE
    path.write_bytes(data)
    return client_config.read(str(FOLDER))


def folder(name: str, file: str, read: Callable[[Path], object], **beside: bytes) -> Callable[[bytes], object]:
    """A dump of one file."""
    place = FOLDER / name
    place.mkdir()
    for other, content in beside.items():
        (place / other.replace("__", ".")).write_bytes(content)

    def run(data: bytes) -> object:
        (place / file).write_bytes(data)
        return read(place)

    return run


ARRAYS = {"a.weight": np.ones((2, 3), np.float32), "b": np.arange(4), "names": {"x": "y"}}
ROW = b"977 3 0 0.5 1 0 0.25 3\n"
FULL = b"978 3 0 0.5 1 0 0.25 3 0.1 0.2 3\n"
BLOCK = b"977\t1\t0\t1\t0.5,0.25\n"
CLIENT = b'feed_var { name: "1" alias_name: "C1" is_lod_tensor: true feed_type: 0 shape: [1, 2] } fetch_var: < name: \'s\' shape: 1 > # x'
META = b"row_names=Param,Moment\nrow_dims=1,1\n"
VARIABLE = struct.pack("<IQIi", 0, 0, 0, 6) + bytes([0x08, 5, 0x10, 2, 0x10, 1]) + np.ones(2, "<f4").tobytes()
PROGRAM = bytes([10, 11, 26, 9, 10, 1]) + b"w" + bytes([18, 2, 8, 7, 24, 1])


def bundle(place: Path) -> object:
    return [
        variables.read_bundle(path, [str(i) for i in range(len(variables.variables(path)))])
        for path in variables.bundles(place)
    ]


TARGETS = [
    ("pdparams", pdparams, [
        *(pickle.dumps(ARRAYS, protocol) for protocol in (2, 4, 5)),
        b"\x80\x04}r\xff\xff\xff\xff.",
        b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"ab.",
        b"cos\nsystem\n(S'true'\ntR.",
    ]),
    ("client-config", prototxt, [CLIENT, CLIENT.replace(b" ", b"\n"), b"feed_var { name: [] }"]),
    ("dump-rows", folder("000", "part-000-00000", lambda place: list(dumps.read_rows(place, 7, 10))), [ROW + FULL, ROW, b"-1 2\n"]),
    ("dump-rows-gz", folder("001", "part-000-00000.gz", lambda place: list(dumps.read_rows(place, 7, 10))), [gzip.compress(ROW + FULL)]),
    ("dump-dense", folder("002", "part-000", dumps.read_dense), [b"0.5 1 2\n0.25 1 2\n", b"1\n1 2\n"]),
    ("dump-block", folder("x.shard", "x.block0.txt", lambda place: list(dumps.read_blocks(place)), x__block0__meta=META), [BLOCK * 2]),
    ("dump-meta", folder("y.shard", "y.block0.meta", lambda place: list(dumps.read_blocks(place)), y__block0__txt=BLOCK), [META]),
    ("dump-variable", folder("dnn_plugin", "w", variables.read_variables), [VARIABLE]),
    ("dump-bundle", folder("bundle", "checkpoint", bundle), [VARIABLE * 3]),
    ("dump-program", folder("program", "__model__", lambda place: variables.program_names(place / "__model__")), [PROGRAM]),
]  # fmt: skip
