"""What was saved: checkpoints, published entries and their log, networks. A stranger may write any of it with hashes that fit."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from clickfleet.config.load import Config, checked
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.serve import overlays
from clickfleet.store import atomic, checkpoint, published, redis_rows, row_format, run_folder
from clickfleet.store.onnx import Engine
from clickfleet.store.rules import rule
from clickfleet.store.table import Table, sort_by_hash
from clickfleet.training import saving
from clickfleet.training.learner import Learner
from clickfleet.training.metrics import Metrics

FOLDER = Path(tempfile.mkdtemp(prefix="clickfleet-fuzz-"))
KEYS = np.arange(1, 41, dtype=np.uint64) * np.uint64(977)


@cache
def learner() -> Learner:
    config = checked(Config, {"model": {"name": "deepfm", "hidden": [4]}, "table": {"dim": 2}}, source="fuzz")
    return Learner(config, Schema((Dense("x"),), (Slot("a"), Slot("b", multi=True)), label="click"))


@cache
def saved() -> Path:
    """A checkpoint with everything in it."""
    table = Table(factors=2, rule=rule("adagrad"))
    table.push(KEYS, np.ones((len(KEYS), 3), np.float32))
    path, made = FOLDER / "checkpoint", learner()
    attached = saving.capture(made, Metrics(), {"step": 3})
    checkpoint.save(table, path, files=1, attached=attached, step=3, **made.facts)
    return path


def sealed(path: Path, name: str, content: bytes) -> None:
    """Puts a file in and writes the manifest that fits it."""
    import xxhash

    (path / name).write_bytes(content)
    manifest = json.loads((path / atomic.MANIFEST).read_bytes())
    manifest.pop("hash")
    manifest["files"][name] = {"bytes": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}
    (path / atomic.MANIFEST).write_bytes(atomic.canonical({**manifest, "hash": atomic.digest(manifest)}))


def file_of(name: str, use: Callable[[Path], object]) -> Callable[[bytes], object]:
    """One file of a checkpoint is what the fuzzer makes, with a checksum that fits."""

    def run(data: bytes) -> object:
        path = FOLDER / f"one-{name}"
        if not path.exists():
            shutil.copytree(saved(), path)
        sealed(path, name, data)
        return use(path)

    return run


def manifest_of(data: bytes) -> object:
    """The manifest is what the fuzzer makes, its hash fits."""
    path = FOLDER / "manifest"
    if not path.exists():
        shutil.copytree(saved(), path)
    try:
        facts = json.loads(data)
        facts.pop("hash", None)
        text = atomic.canonical({**facts, "hash": atomic.digest(facts)})
    except (ValueError, AttributeError, RecursionError, TypeError):
        text = data
    (path / atomic.MANIFEST).write_bytes(text)
    run_folder.read_schema(path)
    return checkpoint.load(path)


def resume(path: Path) -> object:
    made = learner()
    return saving.resume_dense(path, made, Metrics())


def layer(name: str) -> Callable[[bytes], object]:
    """A file of a published entry, as the server opens it."""

    def run(data: bytes) -> object:
        folder = FOLDER / f"layer-{name}"
        folder.mkdir(exist_ok=True)
        for other, content in rows().items():
            (folder / other).write_bytes(data if other == name else content)
        found = [overlays.open_layer(folder, 2, how) for how in ("mapped", "memory")]
        shutil.rmtree(FOLDER / "merged", ignore_errors=True)
        overlays.write_merged(found, 2, FOLDER / "merged", True)
        return [overlays.size(each) for each in found]

    return run


@cache
def rows() -> dict[str, bytes]:
    table = Table(factors=2, rule=rule("sgd"))
    table.push(KEYS, np.ones((len(KEYS), 3), np.float32))
    folder = FOLDER / "rows"
    folder.mkdir(exist_ok=True)
    full = [(columns["key"], columns["embed_w"], columns["embedx"].reshape(-1, 2)) for columns in table.snapshot()]
    made = [overlays._core.FrozenLayer(full, [], np.empty(0, np.uint64), full)]
    shutil.rmtree(folder / "all", ignore_errors=True)
    overlays.write_merged(made, 2, folder / "all", True)
    return {name: (folder / "all" / name).read_bytes() for name in ("rows.arrow", "deleted.arrow")}


def small_rows() -> bytes:
    """The rows of an entry in int8."""
    keys = sort_by_hash(np.array(KEYS, np.uint64))
    schema = row_format.schema("int8", 2)
    batch = row_format.record_batch(schema, keys, np.zeros(len(keys), np.uint16), np.ones((len(keys), 5), np.uint8))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def log_lines(data: bytes) -> object:
    """Lines whose hashes fit, as far as they are JSON."""
    folder = FOLDER / "log"
    folder.mkdir(exist_ok=True)
    lines = []
    for text in data.split(b"\n"):
        try:
            facts = json.loads(text)
            facts.pop("line", None)
            lines.append(atomic.canonical({**facts, "line": atomic.digest(facts)}))
        except (ValueError, AttributeError, RecursionError, TypeError):
            lines.append(text)
    (folder / published.LOG).write_bytes(b"\n".join(lines))
    return published.Log(folder).newest()


def rows_in_redis(data: bytes) -> object:
    """What Redis may answer: a head, and rows."""
    head, _, rest = data.partition(b"\n")

    class Client:
        def get(self, name: bytes) -> bytes:
            return head

        def mget(self, names: list[bytes]) -> list[bytes | None]:
            parts = rest.split(b"|")
            return [parts[i] if i < len(parts) and parts[i] else None for i in range(len(names))]

    facts = redis_rows.head(Client())
    if facts is None:
        return None
    return redis_rows.read(Client(), str(facts.get("prefix")), KEYS[:8], 2)


def network(data: bytes) -> object:
    return Engine(graph="off").open(data)


@cache
def graph() -> bytes:
    """A small network, without the time that exporting takes."""
    from onnx import TensorProto, helper

    weight = helper.make_tensor("w", TensorProto.FLOAT, [2, 1], [0.5, 0.25])
    value = helper.make_tensor_value_info
    made = helper.make_graph(
        [helper.make_node("MatMul", ["dense", "w"], ["z"]), helper.make_node("Sigmoid", ["z"], ["score"])],
        "g", [value("dense", TensorProto.FLOAT, [None, 2])], [value("score", TensorProto.FLOAT, [None, 1])], [weight],
    )  # fmt: skip
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    content: bytes = model.SerializeToString()
    return content


def attached(name: str) -> bytes:
    return (saved() / name).read_bytes()


LINE = {"sequence": 1, "kind": "base", "name": "000001-base", "hash": "ab", "parent": None, "chain": "c"}
NEXT = {**LINE, "sequence": 2, "kind": "delta", "name": "000002-delta", "hash": "cd", "parent": "ab"}
LOG = b"\n".join(atomic.canonical(line) for line in (LINE, NEXT)) + b"\n"

TARGETS = [
    ("manifest", manifest_of, [attached("manifest.json"), b"[" * 3000, b'{"format":"clickfleet/checkpoint","files":{}}']),
    ("checkpoint-rows", file_of("rows-00000-of-00001.arrow", checkpoint.load), [attached("rows-00000-of-00001.arrow")]),
    ("checkpoint-changed", file_of("changed.arrow", checkpoint.load), [attached("changed.arrow")]),
    ("checkpoint-dense", file_of("dense.safetensors", resume), [attached("dense.safetensors")]),
    ("checkpoint-optimizer", file_of("optimizer.safetensors", resume), [attached("optimizer.safetensors")]),
    ("checkpoint-metrics", file_of("metrics.safetensors", resume), [attached("metrics.safetensors")]),
    ("checkpoint-state", file_of("state.json", resume), [attached("state.json"), b"[" * 3000]),
    ("checkpoint-config", file_of("config.yaml", run_folder.read_config), [attached("config.yaml")]),
    ("published-rows", layer("rows.arrow"), [rows()["rows.arrow"], small_rows()]),
    ("published-deleted", layer("deleted.arrow"), [rows()["deleted.arrow"]]),
    ("published-log", log_lines, [LOG, b'{"sequence":"1"}\n', b"[1]\n" + b"[" * 3000 + b"\n"]),
    ("redis", rows_in_redis, [b'{"prefix":"p","factors":2}\n' + b"\x00\x00\x80\x3f|" * 3, b"[]\n", b"{}\n" + b"\x01" * 12 + b"|abc"]),
    ("onnx", network, [graph()]),
]  # fmt: skip
