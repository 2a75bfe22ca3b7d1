"""Names that others chose lead nowhere but into their folder, and temporary folders belong to one user."""

import io
import json
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from clickfleet.data import files
from clickfleet.data.logs.fetch import Archive, Dataset, fetch
from clickfleet.errors import CheckpointError, TrustError
from clickfleet.store import atomic, checkpoint, mirror, published, run_folder
from clickfleet.store.onnx import Engine, parse
from clickfleet.store.table import Table

OUTSIDE = ["../x", "a/../../x", "/etc/passwd", "a//b", ".", "", "..\\x", "\\x", "C:x", "c:/x", "a\0b", None, 3]


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_that_lead_outside(name: Any, tmp_path: Path) -> None:
    with pytest.raises(TrustError, match="which is not a relative path inside it"):
        files.inside(tmp_path, name)


@pytest.mark.parametrize(
    "name", ["a", "a/b.arrow", "..a", "a..", "checkpoints/step-000000000001/rows-00000-of-00008.arrow", "中"]
)
def test_names_that_stay(name: str, tmp_path: Path) -> None:
    assert files.inside(tmp_path, name) == tmp_path / name


def test_links_may_stay_inside_but_not_lead_out(tmp_path: Path) -> None:
    folder, secret = tmp_path / "model", tmp_path / "secret"
    (folder / "deep").mkdir(parents=True)
    secret.write_text("x")
    (folder / "here").write_text("y")
    (folder / "fine").symlink_to("here")
    (folder / "deep/out").symlink_to(secret)
    (folder / "up").symlink_to(tmp_path)
    assert files.inside(folder, "fine").read_text() == "y"
    for name in ("deep/out", "up/secret", "up"):
        with pytest.raises(TrustError, match="is a link to"):
            files.inside(folder, name)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    table = Table(factors=2)
    table.push(np.arange(1, 9, dtype=np.uint64), np.ones((8, 3), np.float32))
    return checkpoint.write(table, tmp_path / "checkpoints", 1, keep=1)


def rewritten(path: Path, **changes: Any) -> None:
    """A manifest whose own hash is right: whoever can write files can compute it."""
    manifest = json.loads((path / atomic.MANIFEST).read_bytes())
    del manifest["hash"]
    manifest |= changes
    (path / atomic.MANIFEST).write_bytes(atomic.canonical({**manifest, "hash": atomic.digest(manifest)}))


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname"])
def test_a_manifest_names_only_its_own_files(name: str, saved: Path) -> None:
    rewritten(saved, files={name: {"bytes": 3, "xxh3_128": "0" * 32}})
    for read in (checkpoint.verify, checkpoint.load, atomic.read_kind):
        with pytest.raises(TrustError, match="which is not a relative path inside it"):
            read(saved)


def test_a_file_of_a_model_is_no_link_to_elsewhere(saved: Path, tmp_path: Path) -> None:
    name = "changed.arrow"
    (saved / name).rename(tmp_path / "elsewhere")
    (saved / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TrustError, match="is a link to"):
        checkpoint.load(saved)
    (saved / name).unlink()
    os.link(tmp_path / "elsewhere", saved / name)  # a second name for the same file: whoever made it could read it
    assert len(checkpoint.load(saved)) == 8


def test_a_manifest_without_files(saved: Path) -> None:
    rewritten(saved, files=None)
    with pytest.raises(CheckpointError, match="it lists no files"):
        checkpoint.load(saved)


@pytest.mark.parametrize("name", ["../../victim", "/tmp/victim", "000001-base/.."])
def test_a_line_of_a_published_log_names_a_folder_of_it(name: str, tmp_path: Path) -> None:
    """Old entries are removed by the names in the log."""
    line = published.Line(1, "base", name, "h", None, "c")
    (tmp_path / published.LOG).write_bytes(line.text())
    with pytest.raises(CheckpointError, match="is not a name of entry 1"):
        published.Log(tmp_path).lines()


def test_keys_of_an_object_store_stay_in_the_run_folder(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("checkpoints/LATEST", "log.txt", "spool/../../../../escaped"):
        bucket.pipe_file(f"models/run/{name}", b"step-000000000001 h")
    assert any(".." in name for name in bucket.find("models/run")), "the store keeps the key as it is"
    with pytest.raises(TrustError, match=r"s3://models/run names the file '.*escaped'"):
        run_folder.resolve("s3://models/run")
    with pytest.raises(TrustError, match="escaped"), run_folder.open_folder("s3://models/run"):
        pass
    assert not list(tmp_path.rglob("escaped"))


@pytest.mark.parametrize("label", ["", "../x", "/etc", ".", "..", "a/b", "step-000000000002"])
def test_a_label_at_a_url_names_a_checkpoint_beside_it(label: str, tmp_path: Path) -> None:
    saved = tmp_path / "run/checkpoints/step-000000000001"
    saved.mkdir(parents=True)
    (saved / atomic.MANIFEST).write_text("{}")
    (tmp_path / "run/checkpoints/LATEST").write_text(f"{label} h")
    with pytest.raises(CheckpointError, match=r"run/checkpoints/LATEST is damaged: it names no valid checkpoint"):
        run_folder.resolve(f"file://{tmp_path}/run")


def test_a_run_at_a_url_is_written_in_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = mirror.local_folder("s3://bucket/run")
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert mirror.local_folder("s3://bucket/run/") == folder
    files.make(folder / "deep")
    assert (folder / "deep").is_dir()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners there")
@pytest.mark.parametrize("kind", ["mode", "link", "file", "owner"])
def test_a_temporary_folder_that_is_not_ours_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    planted = tmp_path / f"clickfleet-{os.getuid()}"
    if kind == "mode":
        planted.mkdir(mode=0o755)
        planted.chmod(0o755)
    elif kind == "link":
        (tmp_path / "precious").mkdir(mode=0o700)
        planted.symlink_to(tmp_path / "precious")
    elif kind == "file":
        planted.write_text("")
    else:
        mine = os.getuid()
        (tmp_path / f"clickfleet-{mine + 1}").mkdir(mode=0o700)  # as another user made it
        monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(TrustError, match="is not safe for temporary files"):
        mirror.local_folder("s3://bucket/run")
    with pytest.raises(TrustError, match="set TMPDIR"):
        files.make(tmp_path / f"clickfleet-{os.getuid()}" / "run-1")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners there")
@pytest.mark.parametrize(
    ("mode", "said"), [(0o600, ""), (0o440, ""), (0o604, "read"), (0o620, "change"), (0o666, "change")]
)
def test_a_secret_that_others_can_see(mode: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("x")
    (tmp_path / "tokens").chmod(mode)
    assert files.exposed(tmp_path / "tokens")[: len(f"other users can {said}")] == (said and f"other users can {said}")


def test_an_archive_unpacks_only_below_its_folder(tmp_path: Path) -> None:
    where = tmp_path / "out" / "data.tar"
    where.parent.mkdir()
    with tarfile.open(where, "w") as tar:
        member = tarfile.TarInfo("raw_data/C:evil")
        member.size = 2
        tar.addfile(member, io.BytesIO(b"x\n"))
    data = Dataset("d", "d", (Archive("http://localhost/data.tar", {"raw_data": "train"}),), {})
    with pytest.raises(TrustError, match="which is not a relative path inside it"):
        fetch(data, tmp_path / "out")
    assert not list(tmp_path.rglob("*evil"))


def external(where: str) -> onnx.ModelProto:
    """A network with one tensor in another file, in the place that is named."""
    tensor = TensorProto(name="w", data_type=1, dims=[2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../../etc/passwd")
    out = helper.make_tensor_value_info("y", 1, [2])
    inner = helper.make_graph([helper.make_node("Constant", [], ["y"], value=tensor)], "inner", [], [out])
    plain = helper.make_tensor("c", TensorProto.BOOL, [], [True])
    node = {
        "initializer": lambda: helper.make_node("Identity", ["w"], ["y"]),
        "attribute": lambda: helper.make_node("Constant", [], ["y"], value=tensor),
        "subgraph": lambda: helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner),
        "function": lambda: helper.make_node("f", [], ["y"], domain="own"),
        "sparse": lambda: helper.make_node("Identity", ["w"], ["y"]),
        "compiled": lambda: helper.make_node("EPContext", [], ["y"], domain="com.microsoft", name="part"),
    }[where]()
    graph = helper.make_graph([node], "g", [], [out], [tensor] if where == "initializer" else [plain])
    if where == "sparse":
        graph.sparse_initializer.add().values.CopyFrom(tensor)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, opset_imports=opsets)
    if where == "function":
        model.functions.append(helper.make_function("own", "f", [], ["y"], list(inner.node), opsets[:1]))
    return model


@pytest.mark.parametrize("where", ["initializer", "attribute", "subgraph", "function", "sparse", "compiled"])
def test_a_network_reads_no_other_files(where: str) -> None:
    graph = external(where).SerializeToString()
    for use in (parse, Engine().session, Engine("int8").session):
        with pytest.raises(TrustError, match="the network would"):
            use(graph)


def test_a_broken_network_is_named_as_such() -> None:
    with pytest.raises(CheckpointError, match=r"graph \(dense.onnx\) is damaged"):
        Engine().session(b"\x08\xff\xff")
