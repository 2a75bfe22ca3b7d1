"""`verify` and servers refuse the same things: what passes here can be served, and what cannot be served is named here."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from clickfleet import _core
from clickfleet.data.arrow_ipc import batches
from clickfleet.errors import CheckpointError
from clickfleet.serve import verification
from clickfleet.serve.supervisor import Settings
from clickfleet.serve.updater import Updater
from clickfleet.store import atomic, redis_rows
from clickfleet.store.published import DELETED, Entry, Log
from clickfleet.store.row_format import ROWS
from clickfleet.training.export import Publisher
from store.test_published import learner, train

Table = pa.Table


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with short and full rows and a delta that deletes."""
    folder = tmp_path_factory.mktemp("good")
    model = learner(admission="count(2)", delete_threshold=0.2, decay_rate=0.5)
    publisher = Publisher(model, folder)
    train(model, 1)
    publisher.publish("base", step=1)
    train(model, 2)
    assert model.table.shrink() > 0
    assert publisher.publish("delta", step=2).manifest["deleted"] > 0
    return folder


def reseal(entry: Path, facts: Callable[[dict[str, Any]], None] = lambda manifest: None) -> None:
    """Gives changed files the checksums they need, so that only rules are left to refuse them."""
    manifest = Entry(entry).manifest
    for name in manifest["files"]:
        manifest["files"][name] = atomic.checksum((entry / name).read_bytes())
    facts(manifest)
    manifest.pop("sealed", None)
    (entry / "manifest.json").write_bytes(atomic.canonical({**manifest, "hash": atomic.digest(manifest)}))
    (entry / "info.json").write_bytes(b'{"time":1.0,"format":{"name":"criteo"}}')
    (entry.parent / "LOG.jsonl").unlink(missing_ok=True)
    verification.repair(entry.parent)


def write(path: Path, parts: list[pa.RecordBatch], schema: pa.Schema) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for part in parts:
            writer.write_batch(part)


def kinds(path: Path) -> list[pa.RecordBatch]:
    return [pa.RecordBatch.from_pylist(part.to_pylist(), ROWS) for part in batches(path, ROWS)]


def shuffled(entry: Path) -> None:
    parts = kinds(entry / "rows.arrow")
    write(entry / "rows.arrow", [part.take(pa.array(range(part.num_rows)[::-1])) for part in parts], ROWS)


def halved(entry: Path) -> None:
    first, *rest = kinds(entry / "rows.arrow")
    write(entry / "rows.arrow", [first.slice(0, 2), first.slice(2), *rest], ROWS)


def narrowed(entry: Path) -> None:
    rows = [row for part in kinds(entry / "rows.arrow") for row in part.to_pylist() if row["embedx"]]
    rows[0]["embedx"], rows[1]["embedx"] = rows[0]["embedx"][:2], [*rows[1]["embedx"], 0.5]
    write(entry / "rows.arrow", [pa.RecordBatch.from_pylist(rows, ROWS)], ROWS)


def twice(entry: Path) -> None:
    parts = kinds(entry / "rows.arrow")
    full = next(part for part in parts if len(part.column("embedx")[0]))
    short = [{**row, "embedx": []} for row in full.to_pylist()]
    write(entry / "rows.arrow", [full, pa.RecordBatch.from_pylist(short, ROWS)], ROWS)


def set_and_deleted(entry: Path) -> None:
    keys = kinds(entry / "rows.arrow")[0].column("key").slice(0, 1)
    write(entry / "deleted.arrow", [pa.RecordBatch.from_arrays([keys], schema=DELETED)], DELETED)


def deleted_twice(entry: Path) -> None:
    keys = Entry(entry).deleted()
    gone = pa.array(np.concatenate([keys, keys[:1]]))
    write(entry / "deleted.arrow", [pa.RecordBatch.from_arrays([gone], schema=DELETED)], DELETED)


def nulls(entry: Path) -> None:
    schema = pa.schema([field.with_nullable(True) for field in ROWS])
    rows = [row for part in kinds(entry / "rows.arrow") for row in part.to_pylist() if row["embedx"]]
    rows[1]["embed_w"] = None
    batch = pa.RecordBatch.from_pylist(rows, schema)
    write(entry / "rows.arrow", [pa.RecordBatch.from_arrays(batch.columns, schema=ROWS)], ROWS)


def other_columns(entry: Path) -> None:
    write(entry / "rows.arrow", [], pa.schema({"key": pa.uint64()}))


def other_answers(entry: Path) -> None:
    _golden(entry, "score", lambda value: [value[0] + 0.01])


def no_answers(entry: Path) -> None:
    _golden(entry, "score", None)


def fewer_keys(entry: Path) -> None:
    _golden(entry, "keys", lambda keys: keys[1:])


def narrow_requests(entry: Path) -> None:
    _golden(entry, "dense", lambda values: values[1:])


def _golden(entry: Path, name: str, change: Callable[[Any], Any] | None) -> None:
    table = Entry(entry).golden()
    if change is None:
        table = table.drop_columns([name])
    else:
        values = pa.array([change(value) for value in table[name].to_pylist()], table.schema.field(name).type)
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), values)
    with pa.OSFile(str(entry / "golden.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


FAULTS: dict[Callable[[Path], None], str] = {
    shuffled: "not sorted by the hash of their keys",
    halved: "every record batch except the last",
    narrowed: "mixes rows of several widths",
    twice: "both a short row and a full row",
    set_and_deleted: "both set and deleted",
    deleted_twice: "contains a key twice",
    nulls: "a row lacks a value",
    other_columns: "does not have the columns",
    other_answers: "golden requests give a different score",
    no_answers: "does not fit the schema",
    fewer_keys: "does not fit the schema",
    narrow_requests: "does not fit the schema",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_verify_and_a_server_refuse_the_same(good: Path, tmp_path: Path, fault: Callable[[Path], None]) -> None:
    log, entry = tmp_path / "log", tmp_path / "log/000002-delta"
    shutil.copytree(good, log)
    fault(entry)

    def counts(manifest: dict[str, Any]) -> None:
        manifest["rows"] = sum(
            part.num_rows for part in pa.ipc.open_file(str(entry / "rows.arrow")).read_all().to_batches()
        )
        manifest["deleted"] = len(Entry(entry).deleted())

    reseal(entry, counts)
    Entry(entry).verify()  # every byte is covered
    with pytest.raises(CheckpointError, match=FAULTS[fault]):
        verification.verify(log)
    (tmp_path / "state").mkdir()
    updater = Updater(Settings(str(log), str(tmp_path / "state")))
    status = updater.start()
    assert FAULTS[fault] in (status.problem or "")
    assert status.entry.endswith("000001-base")


def test_what_the_manifest_says_is_checked(good: Path, tmp_path: Path) -> None:
    for facts, why in (
        ({"rows": 7}, "has .* rows, but its manifest says 7"),
        ({"deleted": 0}, "deleted, but its manifest says 0"),
        ({"outputs": ["score"]}, "its network returns score, logit"),
    ):
        log = tmp_path / next(iter(facts))
        shutil.copytree(good, log)
        reseal(log / "000002-delta", lambda manifest, facts=facts: manifest.update(facts))
        with pytest.raises(CheckpointError, match=why):
            verification.verify(log)
    shutil.copytree(good / "000001-base", tmp_path / "factors/000001-base")
    reseal(tmp_path / "factors/000001-base", lambda manifest: manifest.update(factors=4))
    with pytest.raises(CheckpointError, match="takes an unknown input"):
        verification.verify(tmp_path / "factors/000001-base")


def test_networks_that_do_not_fit_are_refused(good: Path, tmp_path: Path) -> None:
    import onnx

    whole = (good / "000001-base/dense.onnx").read_bytes()
    wide, named = onnx.load_from_string(whole), onnx.load_from_string(whole)
    wide.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 9
    for node in named.graph.node:
        node.input[:] = ["other" if name == "dense" else name for name in node.input]
    next(one for one in named.graph.input if one.name == "dense").name = "other"
    for content, why in (
        (b"no network", "is damaged"),
        (wide.SerializeToString(), "cannot open|unknown input dense"),
        (named.SerializeToString(), r"unknown input other\[2\]"),
    ):
        entry = tmp_path / "log/000001-base"
        shutil.rmtree(entry.parent, ignore_errors=True)
        shutil.copytree(good / "000001-base", entry)
        (entry / "dense.onnx").write_bytes(content)
        reseal(entry)
        with pytest.raises(CheckpointError, match=why):
            verification.verify(entry)


def test_rows_for_redis_obey_the_same_rules(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(good, tmp_path / "log")
    shuffled(tmp_path / "log/000002-delta")
    reseal(tmp_path / "log/000002-delta")
    held: dict[bytes, bytes] = {}

    class Client:
        get = staticmethod(held.get)
        set = staticmethod(held.__setitem__)
        mset = staticmethod(held.update)

        def scan_iter(self, **_: Any) -> list[bytes]:
            return []

        def delete(self, *names: bytes) -> int:
            return len([held.pop(name) for name in names if name in held])

    monkeypatch.setattr(redis_rows, "connect", lambda url: Client())
    with pytest.raises(CheckpointError, match="not sorted by the hash"):
        redis_rows.fill("redis://here", Log(tmp_path / "log"), check=verification.check_rows)
    found = redis_rows.head(Client())
    assert found is not None
    assert found["sequence"] == 1  # the sound entry before it is there


def test_layers_of_one_key_are_told_apart() -> None:
    keys, w = np.array([5], np.uint64), np.ones(1, np.float32)
    none = np.empty(0, np.uint64)
    with pytest.raises(ValueError, match="both a short row and a full row"):
        _core.FrozenLayer([(keys, w, w.reshape(1, 1))], [(keys, w)], none, None)
    with pytest.raises(ValueError, match="set and deleted"):
        _core.FrozenLayer([], [(keys, w)], keys, None)
