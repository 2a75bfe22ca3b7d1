"""Published entries: what readers get is the model, whole, in order, or nothing."""

import json
import shutil
import threading
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

import clickfleet
from clickfleet import _core
from clickfleet.config.load import Config, checked
from clickfleet.data.batch import Batch
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.data.schema import Bucket, Dense, KeyRule, Schema, Slot
from clickfleet.errors import CheckpointError, ConfigError, TrainingError
from clickfleet.serve import verification
from clickfleet.serve.predictor import open_version
from clickfleet.store import atomic, published, run_folder
from clickfleet.store.published import Entry, Header, Line, Log, prune
from clickfleet.store.rollback import rollback
from clickfleet.training import export, saving
from clickfleet.training.embedding import Embedding
from clickfleet.training.export import Publisher
from clickfleet.training.learner import Learner
from clickfleet.training.network import Inputs, Model, Shape
from clickfleet.training.onnx_graph import Graph
from clickfleet.training.predict import Scorer
from clickfleet.workbench.parity import prune as prune_batch
from training.test_training import SMALL

SCHEMA = Schema(
    dense=(Dense("age", missing=0.5), Dense("n")), slots=(Slot("user"), Slot("tags", multi=True), Slot("ad"))
)


def learner(name: str = "deepfm", **table: Any) -> Learner:
    raw = {"model": {"name": name}, "table": {"dim": 3, **table}}
    return Learner(checked(Config, raw, source="test"), SCHEMA)


def batch(seed: int, rows: int = 40, ids: int = 50) -> Batch:
    rng = np.random.default_rng(seed)
    counts = np.ones((rows, 3), np.int64)
    counts[:, 1] = rng.integers(0, 4, rows)
    offsets = np.concatenate([[0], counts.reshape(-1).cumsum()])
    keys = rng.integers(0, ids, offsets[-1]).astype(np.uint64) * np.uint64(2**40 + 7)
    return Batch(
        rng.random((rows, 2), np.float32), keys, 3, offsets, labels=rng.integers(0, 2, rows).astype(np.float32)
    )


def train(model: Learner, seed: int) -> None:
    """A step."""
    step, data = model.steps(1)[0], batch(seed)
    result = step(data, model.table.pull(step.embedding.unique(data)))
    model.optimizer.step(step.flat.grads, result.dense_scale)
    model.table.push(**result.push._asdict())


def push(model: Learner, seed: int) -> None:
    """Changes rows and leaves the network as it is."""
    keys = np.unique(batch(seed).keys)
    model.table.push(keys, np.ones((len(keys), 1 + model.table.factors), np.float32))


def scores(model: Learner, data: Batch) -> Any:
    ((_, found),) = list(Scorer(model)([data]))
    return found


def answers(entry: Entry, golden: Any, known: dict[int, Any]) -> dict[str, Any]:
    """What ONNX Runtime and the rows of entries give for golden requests."""
    keys, counts = golden["keys"].to_pylist(), np.array(golden["counts"].to_pylist())
    dense = np.array(golden["dense"].to_pylist(), np.float32).reshape(len(keys), -1)
    offsets = np.concatenate([[0], counts.reshape(-1).cumsum()])
    schema = Schema.from_dict(entry.manifest["schema"])
    data = Batch(dense, np.array(list(chain.from_iterable(keys)), np.uint64), len(schema.slots), offsets)
    embedding = Embedding(schema, entry.manifest["factors"])
    rows = np.zeros((len(embedding.unique(data)), 1 + entry.manifest["factors"]), np.float32)
    for place, key in enumerate(embedding.unique(data).tolist()):
        rows[place] = known.get(key, rows[place])
    x = embedding.inputs(data, rows, training=False)
    session = onnxruntime.InferenceSession(entry.graph(), providers=["CPUExecutionProvider"])
    names = entry.manifest["outputs"]
    return dict(zip(names, session.run(names, {k: v.numpy() for k, v in x.tensors().items()}), strict=True))


def contents(entries: list[Entry]) -> dict[int, Any]:
    """The rows of a base after its deltas, as a reader would keep them."""
    known: dict[int, Any] = {}
    for entry in entries:
        for key in entry.deleted().tolist():
            del known[key]
        for part in entry.batches():
            for row in part.to_pylist():
                known[row["key"]] = np.pad(np.float32([row["embed_w"], *row["embedx"]]), (0, 3 - len(row["embedx"])))
    return known


@pytest.mark.parametrize("name", ["deepfm", "dnn"])
def test_base_and_deltas_are_the_model(name: str, tmp_path: Path) -> None:
    model = learner(name)
    publisher = Publisher(model, tmp_path)
    for seed in range(5):
        train(model, seed)
        entry = publisher.publish("delta", step=seed)
        assert entry.manifest["kind"] == ("base" if seed == 0 else "delta")
    entries = Log(tmp_path).newest()
    assert [e.sequence for e in entries] == [1, 2, 3, 4, 5]
    assert [e.manifest["parent"] for e in entries[1:]] == [e.hash for e in entries[:-1]]
    again = saving.load(run_folder.resolve(tmp_path))
    data = batch(99)
    np.testing.assert_array_equal(scores(again, data), scores(model, data))
    np.testing.assert_array_equal(scores(saving.load(tmp_path / "000005-delta"), data), scores(model, data))
    assert len(again.table) == len(model.table)
    for i, entry in enumerate(entries):
        golden = entry.golden()
        found = answers(entry, golden, contents(entries[: i + 1]))
        for output in ("score", "logit"):
            np.testing.assert_allclose(found[output], np.array(golden[output].to_pylist())[:, 0], atol=2e-6)
    base = publisher.publish("base", step=5)
    whole, parts = contents([base]), contents(entries)
    assert whole.keys() == parts.keys()
    assert all(np.array_equal(whole[key], parts[key]) for key in whole)


def test_short_rows_and_deletions_reach_readers(tmp_path: Path) -> None:
    model = learner(admission="count(2)", delete_threshold=0.2, decay_rate=0.5, base_threshold=0)
    publisher = Publisher(model, tmp_path)
    train(model, 1)
    publisher.publish("base", step=1)
    train(model, 2)
    assert model.table.shrink() > 0
    entry = publisher.publish("delta", step=2)
    assert len(entry.deleted()) > 0
    widths = {len(row["embedx"]) for e in Log(tmp_path).newest() for b in e.batches() for row in b.to_pylist()}
    assert widths == {0, 3}
    data = batch(7)
    np.testing.assert_array_equal(scores(saving.load(tmp_path), data), scores(model, data))
    golden = entry.golden()
    expected = np.array(golden["score"].to_pylist())[:, 0]
    np.testing.assert_allclose(answers(entry, golden, contents(Log(tmp_path).newest()))["score"], expected, atol=2e-6)


def test_rows_come_in_batches_of_known_size_ascending_by_mixed_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "BATCH_ROWS", 16)
    model = learner(admission="count(4)")
    for seed in range(3):
        train(model, seed)
    entry = Publisher(model, tmp_path).publish("base", step=1)
    kinds: dict[bool, list[Any]] = {True: [], False: []}
    for part in entry.batches():
        kinds[len(part.column("embedx").flatten()) > 0].append(part.column("key").to_numpy())
    assert sum(map(len, kinds[True])) + sum(map(len, kinds[False])) == len(model.table) == entry.manifest["rows"]
    for parts in kinds.values():
        assert [len(part) for part in parts[:-1]] == [16] * (len(parts) - 1)
        keys = np.concatenate(parts)
        mixed = np.empty_like(keys)
        _core.mix64(keys, mixed)
        assert (np.diff(mixed.astype(object)) > 0).all()


def test_equal_models_give_equal_hashes(tmp_path: Path) -> None:
    hashes = []
    for place in ("a", "b"):
        model = learner()
        train(model, 3)
        hashes.append(export.Publisher(model, tmp_path / place).publish("base", step=1).hash)
    assert hashes[0] == hashes[1]
    assert b"/" + b"clickfleet/" not in Entry(tmp_path / "a/000001-base").graph()  # no path of a source file


def test_what_a_killed_writer_left_is_taken_into_the_log(tmp_path: Path) -> None:
    model = learner()
    publisher = Publisher(model, tmp_path)
    train(model, 1)
    publisher.publish("base", step=1)
    before = (tmp_path / "LOG.jsonl").read_bytes()
    train(model, 2)
    second = publisher.publish("delta", step=2)
    whole = (tmp_path / "LOG.jsonl").read_bytes()
    (tmp_path / "LOG.jsonl").write_bytes(before + whole[len(before) : -20])  # killed while the line was written
    assert [e.sequence for e in Log(tmp_path).newest()] == [1]
    train(model, 3)
    third = publisher.publish("delta", step=3)
    assert (tmp_path / "LOG.jsonl").read_bytes().startswith(whole)
    assert (third.manifest["parent"], third.manifest["kind"]) == (second.hash, "base")  # consumers may have the second
    np.testing.assert_array_equal(scores(saving.load(tmp_path), batch(9)), scores(model, batch(9)))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of a base, a delta, a base and a delta."""
    folder = tmp_path_factory.mktemp("four")
    model = learner()
    publisher = Publisher(model, folder)
    for seed in range(4):
        train(model, seed)
        publisher.publish("base" if seed == 2 else "delta", step=seed)
    return folder


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_a_log_that_was_cut_off_is_refused_and_made_anew_from_its_entries(
    four: Path, tmp_path: Path, left: int
) -> None:
    shutil.copytree(four, tmp_path / "log")
    path = tmp_path / "log/LOG.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:left]))
    model = learner()
    train(model, 9)
    with pytest.raises(CheckpointError, match=r"(?s)was truncated.*--repair"):
        export.Publisher(model, tmp_path / "log").publish("base", step=9)
    with pytest.raises(CheckpointError, match="--repair"):
        verification.verify(tmp_path / "log")
    assert len(list((tmp_path / "log").glob("0*"))) == 4  # nothing was removed
    done = verification.repair(tmp_path / "log")
    assert (done["first"], done["last"], done["added"]) == (1, 4, 4 - max(left - 1, 0))
    assert path.read_bytes() == whole
    assert not verification.repair(tmp_path / "log")["changed"]
    assert verification.verify(tmp_path / "log")["entries"] == 4


def test_a_repair_leaves_out_what_does_not_hang_together_and_refuses_what_is_missing(
    four: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    shutil.copytree(four, log)
    shutil.rmtree(log / "000002-delta")
    with pytest.raises(CheckpointError, match="000002-delta"):
        verification.verify(log)
    (log / "LOG.jsonl").write_bytes(b"")
    done = verification.repair(log)
    assert (done["first"], done["last"], done["outside"]) == (3, 4, ["000001-base"])
    assert verification.verify(log)["entries"] == 2
    shutil.rmtree(log / "000004-delta")
    with pytest.raises(CheckpointError, match=r"000004-delta is missing, or is not the entry that LOG\.jsonl names"):
        verification.repair(log)
    with pytest.raises(CheckpointError, match="has no entries"):
        verification.repair(tmp_path / "nothing")


def test_info_is_covered_by_a_checksum_and_old_entries_are_read(four: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    shutil.copytree(four, log)
    info = log / "000004-delta/info.json"
    good = info.read_bytes()
    assert Entry(info.parent).info["time"] > 0
    other = (log / "000003-base/info.json").read_bytes()
    for bad, why in (
        (good.replace(b'"time":1', b'"time":2'), "hash"),
        (good[:-9], ""),
        (good + b"\n", "hash"),
        (b"{}", "hash"),
        (other, "another"),
    ):
        info.write_bytes(bad)
        with pytest.raises(CheckpointError, match=rf"000004-delta/info\.json is damaged: .*{why}"):
            verification.verify(log)
    info.unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*info\.json"):
        verification.verify(log)
    manifest = json.loads((log / "000001-base/manifest.json").read_bytes())  # as versions before wrote it
    del manifest["sealed"], manifest["hash"]
    old = tmp_path / "000001-base"
    shutil.copytree(log / "000001-base", old)
    (old / "manifest.json").write_bytes(atomic.canonical({**manifest, "hash": atomic.digest(manifest)}))
    (old / "info.json").write_bytes(b'{"format":{"name":"criteo"},"time":3.0}')
    assert Entry(old).info["time"] == 3.0
    assert verification.verify(old)["entries"] == 1
    (old / "info.json").write_bytes(b"{")
    with pytest.raises(CheckpointError, match="is damaged"):
        verification.verify(old)


def test_a_log_without_a_header_is_read_and_gets_one(four: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    shutil.copytree(four, log)
    lines = (log / "LOG.jsonl").read_bytes().splitlines(keepends=True)
    (log / "LOG.jsonl").write_bytes(b"".join(lines[1:]))  # as versions before wrote it
    assert verification.verify(log)["entries"] == 4
    shutil.rmtree(log / "000001-base")  # and as they pruned it
    shutil.rmtree(log / "000002-delta")
    assert verification.verify(log)["entries"] == 2
    prune(Log(log), 1)
    assert Log(log).lines()[0].sequence == 1
    assert Header.parse((log / "LOG.jsonl").read_bytes().splitlines()[0], log) == Header(1, 3, None)
    assert verification.verify(log)["entries"] == 2
    shutil.rmtree(log / "000003-base")
    with pytest.raises(CheckpointError, match="000003-base"):
        verification.verify(log)
    (log / "LOG.jsonl").write_bytes(b"".join(lines[2:]))
    with pytest.raises(CheckpointError, match="does not begin with entry 1"):
        Log(log).lines()


def test_a_line_names_its_entry_and_nothing_else(four: Path, tmp_path: Path) -> None:
    line = Log(four).lines()[0]
    for changed in ({"name": "../000001-base"}, {"name": "000002-base"}, {"kind": "bose"}, {"sequence": "1"}):
        with pytest.raises(CheckpointError, match="damaged line"):
            Line.parse(replace(line, **changed).text(), tmp_path)
    far = replace(line, sequence=1_234_567, name="1234567-base")
    assert Line.parse(far.text(), tmp_path) == far


def test_threads_share_a_log(tmp_path: Path) -> None:
    """A trainer looks for newer entries while another thread appends them. Neither may meet the other's half-read lines."""
    path, begin = tmp_path / "LOG.jsonl", Header()
    lines, parent = [], None
    for sequence in range(1, 401):
        kind = "base" if sequence == 1 else "delta"
        line = Line(sequence, kind, published.name_of(sequence, kind), f"{sequence:064x}", parent, "0" * 64)
        lines.append(line)
        parent = line.hash
    log, problems, done = Log(tmp_path), [], threading.Event()
    path.write_bytes(begin.text() + lines[0].text())

    def look() -> None:
        try:
            while not done.is_set():
                log.refresh()
                assert log.chain()[0] == lines[0]
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for line in lines[1:]:
            atomic.append(path, line.text())
            log.refresh()
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert problems == []
    assert log.lines() == lines


def test_each_line_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = learner()
    publisher = Publisher(model, tmp_path)
    read: list[bytes] = []
    real = Line.parse
    monkeypatch.setattr(Line, "parse", lambda text, path: read.append(text) or real(text, path))
    for seed in range(6):
        train(model, seed)
        publisher.publish("delta", step=seed)
    assert len(publisher.log.lines()) == 6
    assert len(read) == 6


def test_a_delta_leaves_out_a_network_that_did_not_change(tmp_path: Path) -> None:
    model = learner()
    publisher = Publisher(model, tmp_path / "log")
    for seed in (1, 2, 3):
        push(model, seed)
        publisher.publish("delta", step=seed)
    base, second, third = Log(tmp_path / "log").newest()
    assert not (third.path / "dense.onnx").exists()
    assert third.graph() == second.graph() == base.graph()
    assert third.dense()["entry"] == "000001-base"
    np.testing.assert_array_equal(scores(saving.load(tmp_path / "log"), batch(9)), scores(model, batch(9)))
    assert verification.verify(tmp_path / "log")["golden"]
    push(model, 5)
    assert (publisher.publish("base", step=5).path / "dense.onnx").exists()
    graph = base.path / "dense.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"000001-base/dense\.onnx is damaged"):
        third.verify()
    shutil.copytree(third.path, tmp_path / "alone/000003-delta")
    with pytest.raises(CheckpointError, match="leave entries in the folder"):
        Entry(tmp_path / "alone/000003-delta").graph()


def test_a_delta_keeps_how_a_large_network_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = learner()
    publisher = Publisher(model, tmp_path / "log")
    for seed in (1, 2, 3):
        train(model, seed)
        publisher.publish("delta", step=seed)
    base, second, third = Log(tmp_path / "log").newest()
    sizes = {
        entry.path.name: {name: file["bytes"] for name, file in entry.manifest["files"].items()}
        for entry in (base, third)
    }
    assert "dense.onnx" not in sizes["000003-delta"]
    assert sizes["000003-delta"]["dense.xor"] < 0.85 * sizes["000001-base"]["dense.onnx"]
    assert len({base.graph(), second.graph(), third.graph()}) == 3
    np.testing.assert_array_equal(scores(saving.load(tmp_path / "log"), batch(9)), scores(model, batch(9)))
    assert verification.verify(tmp_path / "log")["golden"]
    assert rollback(publisher.log, 2).graph() == second.graph()
    with torch.no_grad():  # all is new: a difference would be as large as the whole
        for weights in model.model.parameters():
            weights.copy_(torch.randn(weights.shape))
    fifth = publisher.publish("delta", step=5)
    assert "dense.onnx" in fifth.manifest["files"]
    train(model, 6)
    assert publisher.publish("delta", step=6).dense()["entry"] == fifth.path.name
    for content in (
        b"",
        b"no difference",
        (second.path / "dense.xor").read_bytes()[:-9],
        (second.path / "dense.xor").read_bytes(),
    ):
        (third.path / "dense.xor").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"000003-delta/dense\.xor is damaged"):
            third.graph()


def test_a_failed_entry_loses_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = learner()
    publisher = Publisher(model, tmp_path)
    train(model, 1)
    publisher.publish("base", step=1)
    train(model, 2)
    with monkeypatch.context() as patch:
        patch.setattr(published, "write_table", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(CheckpointError, match="disk is full"):
            publisher.publish("delta", step=2)
    train(model, 3)
    publisher.publish("delta", step=3)
    np.testing.assert_array_equal(scores(saving.load(tmp_path), batch(9)), scores(model, batch(9)))


def test_broken_forked_and_foreign_entries_are_refused_by_name(tmp_path: Path) -> None:
    model = learner()
    publisher = Publisher(model, tmp_path / "log")
    for seed in (1, 2, 3):
        train(model, seed)
        publisher.publish("delta", step=seed)

    def damaged(name: str) -> Path:
        shutil.copytree(tmp_path / "log", tmp_path / name)
        return tmp_path / name

    broken = damaged("broken")
    file = broken / "000002-delta/rows.arrow"
    file.write_bytes(file.read_bytes()[:-9] + b"\0" + file.read_bytes()[-8:])
    with pytest.raises(CheckpointError, match=r"000002-delta/rows\.arrow is damaged"):
        saving.load(broken)
    gap = damaged("gap")
    lines = (gap / "LOG.jsonl").read_bytes().splitlines(keepends=True)
    (gap / "LOG.jsonl").write_bytes(lines[0] + lines[1] + lines[3])
    with pytest.raises(CheckpointError, match="entry 3 does not follow entry 1"):
        saving.load(gap)
    fork = damaged("fork")
    shutil.rmtree(fork / "000003-delta")
    shutil.copytree(fork / "000002-delta", fork / "000003-delta")
    with pytest.raises(CheckpointError, match="is not the entry"):
        saving.load(fork)
    line = damaged("line")
    (line / "LOG.jsonl").write_bytes(lines[0] + lines[1].replace(b'"base"', b'"bose"') + lines[2])
    with pytest.raises(CheckpointError, match="damaged line"):
        saving.load(line)
    shutil.copytree(tmp_path / "log/000002-delta", tmp_path / "alone/000002-delta")
    with pytest.raises(CheckpointError, match="delta without its base"):
        saving.load(tmp_path / "alone/000002-delta")
    wider = Learner(replace(model.config, table=replace(model.config.table, dim=4)), SCHEMA)
    train(wider, 1)
    wide = export.Publisher(wider, tmp_path / "log")
    changes = wider.table.cut_changes(base=True)
    list(changes)
    changes.commit()
    with pytest.raises(CheckpointError, match="schema, model or width differs"):
        wide.publish("delta", step=4)
    assert wide.publish("base", step=4).manifest["chain"] != Log(tmp_path / "log").lines()[0].chain
    with pytest.raises(ConfigError, match="start from a checkpoint"):
        saving.start_from(tmp_path / "log", model.config, SCHEMA)


def test_an_export_with_fewer_inputs_takes_the_others_as_missing(tmp_path: Path) -> None:
    model = learner()
    for seed in range(4):
        train(model, seed)
    model.model.eval()
    entry = export.export(model, tmp_path / "few", 4, inputs=["n", "ad"], outputs=["score", "deep"])
    assert [slot["name"] for slot in entry.manifest["schema"]["slots"]] == ["ad"]
    assert {slot for part in entry.batches() for slot in part.column("slot").to_pylist()} == {0}
    assert 0 < entry.manifest["rows"] < len(model.table)
    data = batch(5)
    alone = Batch(np.stack([np.full(len(data), 0.5, np.float32), data.dense[:, 1]], 1), data.keys, 3, data.offsets)
    embedding = Embedding(SCHEMA, 3)
    x = embedding.inputs(alone, model.table.pull(embedding.unique(alone), training=False), training=False)
    x.first[:, :2] = 0
    x.factors[:, :2] = 0
    session = onnxruntime.InferenceSession(entry.graph(), providers=["CPUExecutionProvider"])
    given = {"dense": data.dense[:, 1:], "first": x.first[:, 2:].numpy(), "factors": x.factors[:, 2:].numpy()}
    score, deep = session.run(["score", "deep"], given)
    np.testing.assert_allclose(score, model.model(x).sigmoid().detach().numpy(), atol=1e-6)
    assert len(deep) == len(data)
    golden = entry.golden()
    found = answers(entry, golden, contents([entry]))
    np.testing.assert_allclose(found["deep"].reshape(16, -1), np.array(golden["deep"].to_pylist()), atol=1e-5)
    with pytest.raises(CheckpointError, match="score it with clickfleet serve"):
        saving.load(tmp_path / "few")
    with pytest.raises(ConfigError, match=r"(?s)no input gender.*age, n, user, tags, ad"):
        export.export(model, tmp_path / "x", 4, inputs=["gender"])
    with pytest.raises(ConfigError, match=r"(?s)no output depth.*score, logit"):
        export.export(model, tmp_path / "x", 4, outputs=["depth"])


@pytest.mark.parametrize("inputs", [["age", "n"], ["user", "tags"]])
def test_an_export_may_keep_no_slot_or_no_dense_column(inputs: list[str], tmp_path: Path) -> None:
    schema = replace(SCHEMA, keys=KeyRule("raw"))  # a key may stand in several slots
    model = Learner(checked(Config, {"model": {"name": "deepfm"}, "table": {"dim": 3}}, source="test"), schema)
    train(model, 0)
    entry = export.export(model, tmp_path / "few", 1, inputs=inputs)
    data = batch(5)
    kept = export.kept_inputs(SCHEMA, inputs)
    whole, part = prune_batch(data, SCHEMA, list(kept.dense), list(kept.slots))
    np.testing.assert_allclose(open_version(entry).run(part)["score"], scores(model, whole), atol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "dense", "slots"),
    [
        (["age"], ["age"], ["years", "age group"]),
        (["years", "n"], ["n"], ["years"]),
        (["pair"], ["p1", "p2"], []),
        (["p2", "city"], ["p2"], ["city"]),
    ],
)
def test_an_export_keeps_every_use_of_an_input(inputs: list[str], dense: list[str], slots: list[str]) -> None:
    schema = Schema(
        dense=(Dense("age"), Dense("n"), Dense("p1", source="pair"), Dense("p2", source="pair")),
        slots=(Slot("years", source="age"), Slot("age group", bucket=Bucket("age", boundaries=(3.0,))), Slot("city")),
    )
    kept = export.pruned(schema, export.kept_inputs(schema, inputs))
    assert [column.name for column in kept.dense] == dense
    assert [slot.name for slot in kept.slots] == slots
    with pytest.raises(ConfigError, match=r"(?s)no input age group.*inputs: age, n, pair, p1, p2, years, city"):
        export.kept_inputs(schema, ["age group"])


class Careless(Model):
    """Multiplies dense values that are not there."""

    def __init__(self, config: Any, shape: Shape) -> None:
        super().__init__(config, shape)
        self.weight = torch.nn.Parameter(torch.zeros(shape.dense))

    def forward(self, x: Inputs) -> torch.Tensor:
        return x.first.sum(1) + x.dense @ self.weight


def test_a_graph_with_an_operator_on_an_empty_axis_is_refused() -> None:
    shape = Shape(0, 3, 2, 2)
    with pytest.raises(TrainingError, match=r"operator MatMul to dense, which is empty.*\n.*skip dense columns"):
        Graph(Careless(None, shape), shape)
    Graph(Careless(None, Shape(1, 3, 2, 2)), Shape(1, 3, 2, 2))


def test_golden_requests_find_results_that_depend_on_what_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `lr` was once exported from a schema without dense columns; a server that just started computes it right by luck."""
    schema = Schema(slots=(Slot("user"), Slot("tags", multi=True), Slot("ad")))
    model = Learner(checked(Config, {"model": {"name": "lr"}}, source="test"), schema)
    shape = model.shape
    monkeypatch.setattr("clickfleet.training.onnx_graph.refuse_empty", lambda proto: None)
    monkeypatch.setattr(Graph, "check", lambda self, kept: None)
    careless = Graph(Careless(None, shape), shape).bytes({})
    changes = model.table.cut_changes(base=True)
    facts = replace(export.content(model, Graph(model.model, shape), 1), graph=careless)
    place = {"sequence": 1, "parent": None, "chain": published.chain(facts, 1)}
    entry = published.write(tmp_path / "careless", changes, facts, **place)
    for _ in range(10):
        with pytest.raises(CheckpointError, match="golden requests give a different"):
            open_version(entry)


def test_export_verify_evaluate_and_predict_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from clickfleet import cli

    synth(tmp_path / "log", SynthOptions(rows=600, test_rows=200, parts=1, seed=5))
    raw: dict[str, Any] = {**SMALL, "run": {"dir": str(tmp_path / "run")}}
    raw["data"] = {"train": str(tmp_path / "log/train"), "batch_size": 100}
    clickfleet.train(raw, quiet=True)

    def call(*arguments: str) -> dict[str, Any]:
        with pytest.raises(SystemExit) as stop:
            cli.main([*arguments, "--json"])
        assert stop.value.code == 0
        answer: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return answer

    run, test, out = str(tmp_path / "run"), str(tmp_path / "log/test"), str(tmp_path / "artifact")
    made = call("export", run, out)
    assert made["outputs"] == ["score", "logit"]
    assert len(made["inputs"]) == 39
    assert call("verify", out)["ok"]
    online, offline = (call("evaluate", model, test, "--batch-size", "50") for model in (out, run))
    assert online.pop("checkpoint") == out
    assert offline.pop("checkpoint").startswith(run)
    assert online == offline
    assert call("inspect", out)["rows"] == made["rows"]
    call("predict", out, test, "--batch-size", "50", "--out", str(tmp_path / "a.npy"))
    call("predict", run, test, "--batch-size", "50", "--out", str(tmp_path / "b.npy"))
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy"))
