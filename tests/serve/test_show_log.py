"""The show log: what was scored is in it as it was sent, once, whatever is killed, full or down; and no reply suffers."""

import json
import os
import signal
import stat
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickfleet import _core
from clickfleet._core import ShowColumns
from clickfleet.data.batch import Batch
from clickfleet.data.events import JOINED, SHOWS, shows_of
from clickfleet.data.formats.joined import JoinedReader
from clickfleet.data.schema import Dense, Schema, Slot, Transform
from clickfleet.errors import ConfigError
from clickfleet.serve import frames, show_log, supervisor
from clickfleet.serve.client import Client, GrpcClient, tensors_of
from clickfleet.serve.features import Fields
from clickfleet.serve.frames import FrameReader, FrameWriter
from clickfleet.serve.open_inference import ListTensor, RawTensor
from clickfleet.serve.recorder import WAITING_FILES, Recorder
from clickfleet.serve.show_log import Scored, batch_of, encode, inputs_of_request, is_sampled, scored_of
from clickfleet.serve.supervisor import Settings
from clickfleet.store.event_log import EventFolder, LogPlace, StreamReader
from mock_cluster import Cluster
from served import FLAT, SCHEMA, Model, Served, features, running, until
from small_disk import small_disk


def shows_in(folder: Path) -> list[dict[str, Any]]:
    """All shows of a log, also those in growing files."""
    log, rows = EventFolder(folder), []
    listed = log.streams()
    for name in listed:
        reader = StreamReader(log, name, SHOWS, LogPlace(), lambda text: None)
        while (read := reader.read(listed)) is not None:
            rows += read.batch.to_pylist()
        reader.close()
    return sorted(rows, key=lambda row: (row["time"], row["request"], row["position"] or 0))


def wait_for(folder: Path, count: int) -> list[dict[str, Any]]:
    until(lambda: len(shows_in(folder)) >= count)
    return shows_in(folder)


def trained(shows: list[dict[str, Any]], schema: Schema) -> Batch:
    """What a trainer makes of logged rows."""
    rows = [
        {
            "kind": "negative",
            "labels": [(schema.label, 0.0)],
            "shown": show["time"],
            "known": show["time"],
            **{name: show[name] for name in ("request", "item", "route", "user", "features")},
        }
        for show in shows
    ]
    parsed = JoinedReader(schema).parse(pa.RecordBatch.from_pylist(rows, JOINED), "all")
    assert not parsed.bad
    return parsed.batch


def entries_in(reader: FrameReader, done: bool = False) -> list[Any]:
    """The entries of new frames, whatever they are."""
    shows, found = ShowColumns(), list[Any]()
    for place in reader.read(shows):
        found += [entry for content in shows.take_others() for entry in msgspec.msgpack.decode(content)]
        if done:
            place.done()
    return found


def frames_in(path: Path) -> int:
    """The bytes of the frames of a file."""
    return int.from_bytes(path.read_bytes()[: frames.FRAMES_BEGIN], "little") - frames.FRAMES_BEGIN


def same_rows(found: Batch, scored: Batch) -> bool:
    """Whether keys and dense values are equal bit for bit."""
    equal = found.dense.tobytes() == scored.dense.tobytes() and found.keys.tobytes() == scored.keys.tobytes()
    values = (None if batch.values is None else batch.values.tobytes() for batch in (found, scored))
    return equal and len({*values}) == 1 and np.array_equal(found.offsets, scored.offsets)


@pytest.fixture(scope="module")
def logging(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """A server that logs everything."""
    folder = tmp_path_factory.mktemp("logging")
    with running(
        artifact, folder / "state", grpc_port=0, workers=2, log=str(folder / "shows"), log_every_s=0.1
    ) as found:
        yield found, folder / "shows"


def logged(logging: tuple[Served, Path], *requests: str) -> list[list[dict[str, Any]]]:
    """The shows of some requests, which must come."""
    shows: dict[str, list[dict[str, Any]]] = {}

    def complete() -> bool:
        shows.clear()
        for show in shows_in(logging[1]):
            shows.setdefault(show["request"], []).append(show)
        return all(request in shows for request in requests)

    until(complete)
    return [shows[request] for request in requests]


def test_rows_are_logged_as_they_were_sent(logging: tuple[Served, Path]) -> None:
    http, rows = logging[0].http, features(1, 3)
    before = time.time()
    named = http.post("/v1/predict", json={"rows": rows, "request": "mine", "items": ["x", 7, "z"]}).json()
    header = http.post("/v1/predict", json={"rows": rows[:1]}, headers={"x-request-id": "by-header"}).json()
    made = http.post("/v1/predict", json={"rows": rows[:1]}).json()
    assert named["request"] == "mine"
    assert header["request"] == "by-header"
    assert len(made["request"]) == 20
    found, by_header, by_server = logged(logging, "mine", "by-header", made["request"])
    assert [json.loads(show["features"]) for show in found] == rows
    assert [show["item"] for show in found] == ["x", "7", "z"]
    assert [show["position"] for show in found] == [1, 2, 3]
    assert np.allclose([show["score"] for show in found], named["scores"], atol=1e-7)
    facts = {(show["model"], show["sequence"], show["route"], show["user"]) for show in found}
    assert facts == {("deepfm", 1, "predict", None)}
    assert before - 1 <= found[0]["time"].timestamp() <= time.time() + 1
    assert [show["item"] for show in by_header + by_server] == ["0", "0"], "rows without ids are numbered"


def test_every_scored_candidate_is_logged_with_its_place_in_the_reply(logging: tuple[Served, Path]) -> None:
    candidates = [{"id": f"c{i}", "ad": f"v{i}", "value": 1 + i % 2} for i in range(6)]
    body = {
        "user": {"user": "v3", "tags": ["v1", "v2"]},
        "candidates": [*candidates, {"id": "c1", "ad": "v9"}, {"id": "out", "ad": "v1"}],
        "exclude": ["out"],
        "top_k": 3,
        "fixed": [{"position": 1, "id": "c4"}],
        "request": 5,
    }
    reply = logging[0].http.post("/v1/rank", json=body).json()
    assert reply["request"] == "5"
    (found,) = logged(logging, "5")
    assert {show["item"] for show in found} == {f"c{i}" for i in range(6)}
    assert {show["item"]: show["position"] for show in found if show["position"]} == {
        item["id"]: place for place, item in enumerate(reply["ranked"], 1)
    }
    assert sum(show["position"] is None for show in found) == 3, "scored, but not returned"
    assert {json.dumps(json.loads(show["user"])) for show in found} == {json.dumps(body["user"])}
    assert {show["item"]: json.loads(show["features"]) for show in found} == {one["id"]: one for one in candidates}
    served = {item["id"]: item["score"] for item in reply["ranked"]}
    assert all(served[show["item"]] == show["score"] for show in found if show["position"])


def test_tensors_are_logged_and_the_id_of_the_protocol_is_the_request(
    logging: tuple[Served, Path], model: Model
) -> None:
    served, _ = logging
    rows = features(8, 2, SCHEMA)
    inputs = [
        {"name": "age", "shape": [2], "datatype": "FP32", "data": [1.5, 2.25]},
        {"name": "n", "shape": [2], "datatype": "INT64", "data": [1, 2]},
        {"name": "user", "shape": [2], "datatype": "BYTES", "data": ["v1", "v2"]},
        {"name": "tags", "shape": [2, 2], "datatype": "BYTES", "data": ["v1", "v2", "v3", ""]},
        {"name": "ad", "shape": [2], "datatype": "BYTES", "data": ["v1", "é"]},
    ]
    named = served.http.post("/v2/models/deepfm/infer", json={"inputs": inputs, "id": "oip"}).json()
    assert named["id"] == "oip"
    made = served.http.post("/v2/models/deepfm/infer", json={"inputs": inputs}).json()
    batch = model.batch(rows)
    with GrpcClient(served.grpc, "deepfm") as calls:
        calls.score(batch)
    (found, again) = logged(logging, "oip", made["id"])
    assert [json.loads(show["features"]) for show in found] == [
        {"age": 1.5, "n": 1, "user": "v1", "tags": ["v1", "v2"], "ad": "v1"},
        {"age": 2.25, "n": 2, "user": "v2", "tags": ["v3", ""], "ad": "é"},
    ]
    assert [show["position"] for show in again] == [1, 2]
    until(lambda: any(show["features"].startswith("[") for show in shows_in(logging[1])))
    encoded = [show for show in shows_in(logging[1]) if show["features"].startswith("[")]
    assert same_rows(trained(encoded, SCHEMA), batch), "encoded by the client, through gRPC"


def test_a_logged_row_is_trained_as_it_was_scored(logging: tuple[Served, Path]) -> None:
    rows, user = features(30, 40), {"user": "v3", "age": 17.5}
    served, fields = logging[0], Fields(SCHEMA)
    served.http.post("/v1/predict", json={"rows": rows, "request": "bits"})
    candidates = [{"id": i, "value": 2, "ad": row.get("ad"), "tags": row["tags"]} for i, row in enumerate(rows)]
    served.http.post("/v1/rank", json={"user": user, "candidates": candidates, "request": "bits of ranks"})
    found, ranked = logged(logging, "bits", "bits of ranks")
    assert same_rows(trained(found, SCHEMA), fields.rows(rows))
    whole = [{**user, "ad": row.get("ad"), "tags": row["tags"]} for row in rows]
    by_item = sorted(ranked, key=lambda show: int(show["item"]))
    assert same_rows(trained(by_item, SCHEMA), fields.rows(whole))


WEIGHTED = Schema(
    dense=(Dense("x", Transform("minmax", 0.0, 3.0)), Dense("y", source="xy"), Dense("z", source="xy")),
    slots=(Slot("a"), Slot("b", multi=True), Slot("c", multi=True)),
    values=True,
)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=5) | st.integers(-(2**63), 2**64 - 1)
NUMBERS = st.floats(-1e30, 1e30) | st.integers(-(2**60), 2**60) | st.none()


def a_row(schema: Schema) -> st.SearchStrategy[dict[str, Any]]:
    columns: dict[str, Any] = {}
    for column in schema.dense:
        columns[column.source_name] = NUMBERS
    for slot in schema.slots:
        columns[slot.source_name] = st.lists(TEXTS, max_size=3) if slot.multi else TEXTS | st.none()
    if schema is WEIGHTED:
        columns |= {"xy": st.lists(NUMBERS, min_size=2, max_size=2), "c": st.dictionaries(TEXTS, st.floats(-9, 9))}
    return st.fixed_dictionaries({}, optional=columns)


@pytest.mark.parametrize("schema", [SCHEMA, FLAT, WEIGHTED], ids=["ragged", "flat", "weighted"])
@given(data=st.data())
def test_any_row_survives_the_log_bit_for_bit(schema: Schema, data: Any) -> None:
    rows = data.draw(st.lists(a_row(schema), min_size=1, max_size=6))
    scored = Fields(schema).rows(json.loads(json.dumps(rows)))  # as the body of a request
    score = np.zeros(len(rows), np.float32).tobytes()
    body = json.dumps(
        {"rows": rows}, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1]))
    )
    entry = Scored("predict", "r", 1, "m", 1, score, body.encode(), None)
    found = trained(shows_of(encode([entry])).to_pylist(), schema)
    assert same_rows(found, scored)


def through_core(entries: list[Scored]) -> tuple[pa.RecordBatch, list[Scored]]:
    """What the core makes of entries, and those that it leaves to Python."""
    shows = ShowColumns()
    for entry in entries:
        content = msgspec.msgpack.encode([entry])
        frame = len(content).to_bytes(4, "little") + _core.frame_hash(content).to_bytes(8, "little") + content
        assert shows.add(frame) == (len(frame), 0, False)
    left = [entry for content in shows.take_others() for entry in scored_of(content)]
    return batch_of(shows), left


IDS = st.text(st.characters(codec="utf-8"), max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(max_size=80),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=40), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def an_entry(draw: Any) -> Scored:
    rows = draw(st.lists(st.dictionaries(st.text(max_size=30), VALUES, max_size=4), min_size=1, max_size=5))
    layout = {"ensure_ascii": draw(st.booleans()), "indent": draw(st.sampled_from([None, 1])), "allow_nan": False}
    more = draw(
        st.dictionaries(st.sampled_from(["request", "rows", "candidates", "top_k", "a\\b"]), VALUES, max_size=2)
    )
    items = draw(st.none() | st.lists(IDS, min_size=len(rows), max_size=len(rows)))
    when, sequence = draw(st.integers(-(2**63), 2**63 - 1)), draw(st.integers(0, 2**63 - 1))
    scores = np.array(
        draw(st.lists(st.floats(width=32, allow_nan=False), min_size=len(rows), max_size=len(rows))), np.float32
    )
    request, model = draw(IDS), draw(IDS)
    if draw(st.booleans()):
        body = json.dumps(more | {"rows": rows}, **layout).encode()
        return Scored("predict", request, when, model, sequence, scores.tobytes(), body, items)
    places = draw(st.permutations(range(len(rows))))[: draw(st.integers(0, len(rows)))]
    user = {"user": draw(VALUES)} if draw(st.booleans()) else {}
    body = json.dumps(more | user | {"candidates": rows}, **layout).encode()
    ids = [f"i{place}" for place in range(len(places))] if items is None else items[: len(places)]
    ranked = ids[: draw(st.integers(0, len(ids)))]
    return Scored("rank", request, when, model, sequence, scores[: len(places)].tobytes(), body, ids, places, ranked)


@given(st.lists(an_entry(), max_size=4))
def test_the_core_writes_what_python_writes(entries: list[Scored]) -> None:
    """Only a name with an escape is left to Python, because it may be that of the rows."""
    batch, left = through_core(entries)
    batch.validate(full=True)
    assert all(b"\\" in entry.content for entry in left)
    rest = [entry for entry in entries if entry not in left]
    assert batch.equals(encode(rest) if rest else batch.slice(0, 0), check_metadata=True)


@pytest.mark.parametrize(
    "body",
    [
        b' {"rows" :[ {"a":"]"} , 5 ,"x",null] } ',
        b'{"rows":[{}],"rows":[[1],{},2,"a\\\\"]}',
        b'{"rows":["' + b"]" * 200 + b'\\\\\\"", [[[]]], "' + b"\\\\" * 64 + b'", 1.5e3]}',
        b'{"rows": [' + b", ".join([b'{"' + b"k" * 61 + b'": ["[", "\\"{"]}'] * 4) + b"]}",
    ],
)
def test_the_core_cuts_rows_as_python_does(body: bytes) -> None:
    entry = Scored("predict", "r", 1, "m", 1, np.zeros(4, np.float32).tobytes(), body, None)
    batch, left = through_core([entry])
    assert not left
    assert batch.equals(encode([entry]))


def test_an_escaped_name_and_tensors_are_left_to_python(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    settings = Settings("none", str(tmp_path / "state"), log=str(tmp_path / "shows"))
    writer, score = FrameWriter(*settings.frames), np.float32(0.5).tobytes()
    tensor = [[("a", 1, "", ["x"])], None]
    writer.write([Scored("predict", "escaped", 1, "m", 1, score, rb'{"r\u006fws": [{"ad": "x"}]}', None)])
    writer.write([Scored("infer", "tensor", 2, "m", 1, score, tensor, None)])
    writer.write([Scored("predict", "plain", 3, "m", 1, score, b'{"rows": [{"ad": "x"}]}', None)])
    writer.write([Scored("predict", "short", 4, "m", 1, score, b'{"rows": []}', None)])
    writer.write([("of another version", 1)])
    writer.close()
    recorder = Recorder(settings)
    assert recorder.poll() == 4
    recorder.close()
    assert [show["request"] for show in shows_in(tmp_path / "shows")] == ["escaped", "tensor", "plain"]
    assert recorder.meter.extra == {"shows_logged": 3, "shows_dropped": 2}


class _Version:
    """What converting tensors needs of a version."""

    def __init__(self, schema: Schema) -> None:
        from clickfleet.serve.aliases import Aliases

        self.schema, self.fields = schema, Fields(schema)
        self.aliases = Aliases(self.fields, ["score"])


@given(
    st.lists(st.binary(max_size=4), min_size=2, max_size=2),
    st.lists(st.floats(width=32, allow_infinity=False), min_size=2, max_size=2),
    st.sampled_from(["FP32", "FP64", "list"]),
)
def test_any_tensor_survives_the_log_bit_for_bit(texts: list[bytes], numbers: list[float], kind: str) -> None:
    """Texts that are no text too: such rows are logged as keys."""
    from clickfleet.serve import open_inference

    schema = Schema(dense=(Dense("x", Transform("log1p")),), slots=(Slot("a"), Slot("b", multi=True)))
    version: Any = _Version(schema)
    packed = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    given = np.array(numbers, np.float64 if kind == "FP64" else np.float32)
    dense: Any = RawTensor("x", kind, [2], given.tobytes())
    if kind == "list":
        dense = ListTensor("x", "FP32", [2], given.tolist())
    tensors = [dense, RawTensor("a", "BYTES", [2, 1], packed), RawTensor("b", "BYTES", [1 * 2, 1], packed)]
    batch = open_inference.batch(tensors, version, 10)
    scores = np.zeros(2, np.float32).tobytes()
    content = msgspec.msgpack.decode(msgspec.msgpack.encode(inputs_of_request(tensors, batch, version)))
    entry = Scored("infer", "r", 1, "m", 1, scores, content, None)
    assert same_rows(trained(shows_of(encode([entry])).to_pylist(), schema), batch)


def test_encoded_rows_of_another_schema_are_bad_rows(model: Model) -> None:
    batch = model.batch(features(3, 2))
    tensors = [RawTensor(name, kind, values.shape, values.tobytes()) for name, values, kind in tensors_of(batch)]
    content = inputs_of_request(tensors, batch, _Version(SCHEMA))  # type: ignore[arg-type]
    entry = Scored("infer", "r", 1, "m", 1, np.zeros(2, np.float32).tobytes(), content, None)
    rows = [
        {**show, "kind": "label", "labels": [("label", 1.0)], "shown": show["time"], "known": show["time"]}
        for show in shows_of(encode([entry])).to_pylist()
    ]
    joined = pa.RecordBatch.from_pylist([{name: row.get(name) for name in JOINED.names} for row in rows], JOINED)
    parsed = JoinedReader(FLAT).parse(joined, "all")
    assert [bad.reason for bad in parsed.bad] == ["the features were encoded by another schema"] * 2
    assert len(JoinedReader(SCHEMA).parse(joined, "all").batch) == 2


def test_ids_of_rows_and_requests_are_checked(logging: tuple[Served, Path]) -> None:
    http = logging[0].http
    for more, message in (
        ({"items": ["a"]}, "items has 1 ids for 2 rows"),
        ({"items": ["a", "a"]}, "appears twice"),
        ({"items": ["a", ""]}, "text of 1 to 1024 characters"),
        ({"items": ["a", "b" * 2000]}, "text of 1 to 1024 characters"),
        ({"request": ""}, "the id of the request"),
        ({"request": "x" * 1025}, "the id of the request"),
        ({"request": 1.5}, "cannot parse"),
    ):
        reply = http.post("/v1/predict", json={"rows": [{}, {}], **more})
        assert (reply.status_code, message in reply.json()["error"]) == (400, True), reply.text
    assert http.post("/v1/predict", json={"rows": [{}]}, headers={"x-request-id": "x" * 2000}).status_code == 400


def test_without_a_log_a_reply_has_only_the_id_that_was_sent(served: Served) -> None:
    assert "request" not in served.http.post("/v1/predict", json={"rows": [{}]}).json()
    assert served.http.post("/v1/predict", json={"rows": [{}], "request": "r"}).json()["request"] == "r"
    assert served.http.post("/v1/feedback", json={}).status_code == 403


def test_files_are_private_and_complete_when_they_are_old_or_large(artifact: Path, tmp_path: Path) -> None:
    log = tmp_path / "shows"
    with running(
        artifact, tmp_path / "state", log=str(log), log_every_s=0.1, log_rotate_bytes=2000, log_rotate_s=1e9
    ) as served:
        for i in range(30):
            served.http.post("/v1/predict", json={"rows": features(i, 20), "request": f"r{i}"})
            wait_for(log, 20 * (i + 1))
        until(lambda: len(list(log.glob("*/*.arrow"))) >= 3)
    files = sorted(log.glob("*/*"))
    assert {path.suffix for path in files} == {".arrow"}, "all are complete when the server has stopped"
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(files[0].parent.stat().st_mode) == 0o700
    assert not list(log.glob("*/.*")), "nothing unfinished is left"
    counted = Counter(row["request"] for path in files for row in pa.ipc.open_file(str(path)).read_all().to_pylist())
    assert counted == {f"r{i}": 20 for i in range(30)}


def test_a_quiet_server_completes_its_file_too(artifact: Path, tmp_path: Path) -> None:
    log = tmp_path / "shows"
    with running(artifact, tmp_path / "state", log=str(log), log_every_s=0.1, log_rotate_s=0.2) as served:
        served.http.post("/v1/predict", json={"rows": [{}]})
        until(lambda: len(list(log.glob("*/*.arrow"))) == 1)
        assert not list(log.glob("*/*.open"))


def test_a_sample_is_chosen_by_the_id_of_the_request(artifact: Path, tmp_path: Path) -> None:
    ids = [f"r{i}" for i in range(200)]
    log = tmp_path / "shows"
    with running(artifact, tmp_path / "state", log=str(log), log_sample=0.25) as served:
        for request in ids:
            served.http.post("/v1/predict", json={"rows": [{}], "request": request})
    kept = {show["request"] for show in shows_in(log)}
    assert kept == {request for request in ids if is_sampled(request, int(0.25 * 2**64))}
    assert 25 <= len(kept) <= 75


def worker_of(served: Served, name: str = "worker 0") -> Any:
    return served.fleet.children[name].process


def counts(served: Served) -> dict[str, float]:
    found: dict[str, float] = served.http.get("/v1/stats").json()["counts"]
    return found


def test_what_was_answered_survives_the_worker_and_the_recorder(artifact: Path, tmp_path: Path) -> None:
    """Killed right after a reply; a recorder may then log a row twice, which the join recognises, but never loses one."""
    log = tmp_path / "shows"
    sent: list[str] = []
    with running(artifact, tmp_path / "state", log=str(log), log_every_s=0.1) as served:
        for number, victim in enumerate(["worker 0", "recorder", "worker 0", "recorder"]):
            for i in range(20):
                request = f"{number}-{i}"
                with httpx.Client(base_url=served.url, timeout=60) as http:
                    assert http.post("/v1/predict", json={"rows": [{}], "request": request}).status_code == 200
                sent.append(request)
            before = worker_of(served, victim)
            os.kill(before.pid, signal.SIGKILL)
            until(lambda victim=victim, before=before: worker_of(served, victim) is not before)
            until(lambda: served.fleet.ready())
        until(lambda: len({show["request"] for show in shows_in(log)}) == len(sent))
    assert {show["request"] for show in shows_in(log)} == set(sent)


def test_the_next_server_takes_over_what_a_killed_one_left(artifact: Path, tmp_path: Path) -> None:
    log = tmp_path / "shows"
    writer = FrameWriter(log / ".frames")
    scores = np.zeros(1, np.float32).tobytes()
    entries = [Scored("predict", f"r{i}", 1, "m", 1, scores, b'{"rows":[{}]}', None) for i in range(5)]
    writer.write(entries)
    writer.close()
    (left,) = (log / ".frames").glob("*.frames")
    end = frames.FRAMES_BEGIN + frames_in(
        left
    )  # the worker was killed while it appended: the next frame does not count
    left.write_bytes(left.read_bytes()[:end] + b"\x99\x00\x00\x00 torn")
    with running(artifact, tmp_path / "state", log=str(log), log_every_s=0.1) as served:
        assert {show["request"] for show in wait_for(log, 5)} == {f"r{i}" for i in range(5)}
        until(lambda: not left.exists())
        assert counts(served)["shows_logged"] == 5


def test_frames_are_read_once_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "FILE_BYTES", 500)
    monkeypatch.setattr(frames, "MAX_FILES", 3)
    writer, reader = FrameWriter(tmp_path), FrameReader(tmp_path)

    def write(number: int) -> None:
        writer.write([("x" * 900, number)])

    def numbers() -> list[int]:
        return [entry[1] for entry in entries_in(reader, done=True)]

    for number in range(3):
        write(number)
    assert [entry[1] for entry in entries_in(reader)] == [0, 1, 2]
    reader.close()
    reader = FrameReader(tmp_path)
    assert numbers() == [0, 1, 2], "nothing was done with them before"
    reader.close()
    reader = FrameReader(tmp_path)
    assert numbers() == []
    write(3)
    assert numbers() == [3]
    assert numbers() == []
    assert len(list(tmp_path.glob("*.frames"))) == 1, "those that were read are gone"
    write(4)
    write(5)
    with pytest.raises(OSError, match="behind"):
        write(6)
    assert numbers() == [4, 5]
    write(7)
    assert numbers() == [7]
    writer.close()
    reader.close()


def test_a_full_disk_costs_shows_and_no_reply(artifact: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        log = disk.folder / "shows"
        with running(artifact, tmp_path / "state", log=str(log), log_every_s=0.1) as served:
            served.http.post("/v1/predict", json={"rows": [{}], "request": "before"})
            wait_for(log, 1)
            disk.leave(0)
            for i in range(50):
                assert served.http.post("/v1/predict", json={"rows": features(i, 50)}).status_code == 200
            until(lambda: counts(served).get("shows_dropped", 0) > 0)
            disk.free()
            served.http.post("/v1/predict", json={"rows": [{}], "request": "after"})
            until(lambda: "after" in {show["request"] for show in shows_in(log)})
            until(lambda: sum(counts(served).get(f"shows_{kind}", 0) for kind in ("logged", "dropped")) == 2502)
            metrics = served.http.get("/metrics").text
            assert "clickfleet_shows_dropped_total" in metrics
            assert "clickfleet_show_log_waiting_bytes" in metrics
        rows = shows_in(log)
        assert {"before", "after"} <= {show["request"] for show in rows}


def test_a_log_that_cannot_be_written_is_refused_at_the_start(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "open/.frames").mkdir(parents=True)
    (tmp_path / "open/.frames").chmod(0o777)
    for settings, message in (
        ({"log": str(tmp_path / "file/x")}, "cannot create the folder"),
        ({"log": "s3://bucket/x"}, "cannot write a log to s3://bucket/x"),
        ({"log": "kafka://broker"}, "names no Kafka topic"),
        ({"log": str(tmp_path), "feedback": str(tmp_path)}, "cannot be in one place"),
        ({"log": str(tmp_path / "x"), "log_sample": 0.0}, "a fraction above 0"),
        ({"log": str(tmp_path / "open")}, "other users have access"),
    ):
        with pytest.raises(Exception, match=message):
            supervisor.create(Settings(str(artifact), str(tmp_path), port=0, grpc_port=None, **settings))  # type: ignore[arg-type]
    assert issubclass(ConfigError, Exception)


# Kafka


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    for topic in ("shows", "feedback"):
        made.create(topic, 1)
    yield made
    made.close()


def messages(cluster: Cluster, topic: str, count: int) -> list[dict[str, Any]]:
    """The events of a topic, when there are so many."""
    kafka = pytest.importorskip("confluent_kafka")
    from clickfleet.data.events import FEEDBACK, read_message

    schema = SHOWS if topic == "shows" else FEEDBACK
    consumer = kafka.Consumer({"bootstrap.servers": cluster.address, "group.id": "test", "log_level": 0})
    consumer.assign([kafka.TopicPartition(topic, 0, 0)])
    rows: list[dict[str, Any]] = []

    def complete() -> bool:
        for message in consumer.consume(100, 0.2):
            if message.error() is None:
                rows.extend(read_message(message.value(), schema, 0).batch.to_pylist())
        return len(rows) >= count

    until(complete)
    consumer.close()
    return rows


def test_a_topic_takes_shows_and_feedback(artifact: Path, tmp_path: Path, cluster: Cluster) -> None:
    urls = {kind: f"kafka://{cluster.address}/{topic}" for kind, topic in (("log", "shows"), ("feedback", "feedback"))}
    with running(artifact, tmp_path / "state", **urls) as served:
        rows = features(2, 30)
        served.http.post("/v1/predict", json={"rows": rows, "request": "r"})
        with Client(served.url) as client:
            assert client.feedback([{"request": "r", "item": i, "label": {"click": 1}} for i in range(3)]) == 3
        assert [json.loads(row["features"]) for row in messages(cluster, "shows", 30)] == rows
        assert [row["item"] for row in messages(cluster, "feedback", 3)] == ["0", "1", "2"]


def test_a_stopped_broker_costs_shows_and_refuses_feedback(artifact: Path, tmp_path: Path, cluster: Cluster) -> None:
    where = f"kafka://{cluster.address}"
    options = {"message.timeout.ms": 500, "reconnect.backoff.max.ms": 100, "queue.buffering.max.kbytes": 64}
    settings = {"log": f"{where}/shows", "feedback": f"{where}/feedback", "kafka_options": options}
    with running(artifact, tmp_path / "state", **settings) as served:
        cluster.set_down(True)
        for i in range(30):
            assert served.http.post("/v1/predict", json={"rows": features(i, 30)}).status_code == 200
        reply = served.http.post("/v1/feedback", json={"request": "r", "label": {"click": 1}})
        assert (reply.status_code, "cannot be stored" in reply.json()["error"]) == (503, True)
        assert reply.headers["retry-after"] == "5"
        until(lambda: counts(served).get("shows_dropped", 0) > 0)
        cluster.set_down(False)
        until(lambda: served.http.post("/v1/feedback", json={"request": "r", "label": {"click": 1}}).status_code == 200)
        assert counts(served)["feedback_refused"] >= 1


def test_shows_are_dropped_and_counted_when_the_recorder_is_far_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "FILE_BYTES", 500)
    monkeypatch.setattr(frames, "MAX_FILES", 3)
    from clickfleet.serve.counters import Meter

    meter = Meter(tmp_path / "m.json")
    log = show_log.ShowLog([tmp_path / "frames"], meter)
    done: Any = _Done()
    for i in range(100):
        log.predict(f"r{i}", b'{"rows": [{}]}', None, done)
    waiting = log.waiting_bytes
    log.close()
    handed = ShowColumns()
    assert list(FrameReader(tmp_path / "frames").read(handed))
    assert 0 < handed.rows < 100
    assert meter.extra["shows_dropped"] == 100 - handed.rows
    assert waiting == sum(frames_in(path) for path in (tmp_path / "frames").glob("*.frames"))


def test_a_plain_request_is_handed_over_like_any_other(tmp_path: Path) -> None:
    writer, shows = FrameWriter(tmp_path), ShowColumns()
    entry = Scored("predict", "rä", 5, "m", 2**40, np.float32(0.25).tobytes(), b'{"rows": [{"ad": "x"}]}', None)
    for _ in range(3):
        writer.write_plain(*entry[:7])
    assert writer.waiting_bytes == sum(map(frames_in, tmp_path.glob("*.frames"))) > 0
    writer.close()
    assert len(list(FrameReader(tmp_path).read(shows))) == 1
    assert batch_of(shows).equals(encode([entry] * 3))
    with pytest.raises(OSError, match="descriptor"):
        ShowColumns().read(-1, 0, 100)
    with pytest.raises(OSError, match="descriptor"):
        _core.FrameAppender(-1, 1 << 20).append_show(*entry[:7])


def test_the_next_file_is_there_before_a_request_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file costs more than the frames of many requests."""
    monkeypatch.setattr(frames, "FILE_BYTES", 500)
    monkeypatch.setattr(frames, "MAX_FILES", 3)
    writer = FrameWriter(tmp_path / "f")
    writer.make_room()
    assert not list(tmp_path.glob("f/*")), "nothing was written yet"
    for number in range(3):
        writer.write([("x" * 600, number)])
        assert len(list(tmp_path.glob("f/*.frames"))) == number + 1
        writer.make_room()
        writer.make_room()
        assert len(list(tmp_path.glob("f/*.frames"))) == min(number + 2, 3)
    with pytest.raises(OSError, match="behind"):
        writer.write([("x", 3)])
    reader = FrameReader(tmp_path / "f")
    assert [number for _, number in entries_in(reader, done=True)] == [0, 1, 2]
    writer.make_room()
    writer.write([("x", 4)])
    writer.close()
    assert [number for _, number in entries_in(reader, done=True)] == [4]


def test_a_worker_with_many_files_does_not_wait_for_a_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder writes before the next poll is due, so nothing is dropped between two polls."""
    monkeypatch.setattr(frames, "FILE_BYTES", 500)
    settings = Settings("none", str(tmp_path / "state"), log=str(tmp_path / "shows"))
    Path(settings.state).mkdir()
    recorder, writer = Recorder(settings), FrameWriter(*settings.frames)
    body = b'{"rows": [{"ad": "%s"}]}' % (b"x" * 600)
    logged: list[int] = []
    for number in range(60):
        writer.write_plain("predict", f"r{number}", 1, "m", 1, np.zeros(1, np.float32).tobytes(), body)
        if recorder.hurries():
            logged.append(recorder.poll())
    assert logged == [WAITING_FILES] + [WAITING_FILES - 1] * 18, "the file that the worker appends to stays"
    recorder.poll()
    writer.close()
    recorder.poll()
    recorder.close()
    assert len(shows_in(tmp_path / "shows")) == 60


def test_a_file_that_was_read_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory costs more than the copy of a frame. A long frame does not keep its memory."""
    monkeypatch.setattr(frames, "FILE_BYTES", 4_000)
    monkeypatch.setattr(frames, "MAPPED_BYTES", 16_384)
    with small_disk(tmp_path / "memory", 1 << 20) as disk:
        for folder in (disk.folder / "f", tmp_path / "f"):
            writer, reader = FrameWriter(folder), FrameReader(folder)
            inodes, found = set(), []
            for number in range(200):
                writer.write([("x" * (50_000 if number == 20 else 900), number)])
                writer.make_room()
                inodes.add(max(folder.glob("*.frames")).stat().st_ino)
                if number % 7 == 0:
                    found += [entry[1] for entry in entries_in(reader, done=True)]
                    assert sum(path.stat().st_size for path in folder.glob("*.spare")) <= 2 * 16_384
            found += [entry[1] for entry in entries_in(reader, done=True)]
            assert found == list(range(200)), "nothing of what a file had before is there again"
            assert len(list(folder.glob("*.frames"))) == 1
            assert 1 <= len(list(folder.glob("*.spare"))) <= 2
            assert len(inodes) < 10, "of 40 files"
            writer.close()
            assert entries_in(reader, done=True) == []
            assert not list(folder.iterdir()), "of a writer that has ended, nothing is left"
            reader.close()


def test_a_recorder_may_die_while_it_leaves_a_file_to_its_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "FILE_BYTES", 500)
    for steps in range(3):
        folder = tmp_path / f"{steps}"
        writer, reader = FrameWriter(folder), FrameReader(folder)
        for number in range(2):
            writer.write([("x" * 600, number)])
        assert [entry[1] for entry in entries_in(reader, done=True)] == [0, 1]
        (spare,) = folder.glob("*.spare")
        assert len(list(folder.glob("*.frames"))) == 1
        first = spare.with_suffix(".frames")
        reader.close()
        if steps < 2:  # it died before the file got its name
            spare.rename(first)
        if steps < 1:  # and before the place was removed
            Path(f"{first}.read").write_bytes((9999).to_bytes(8, "little"))
        reader = FrameReader(folder)
        writer.write([("x" * 600, 2)])
        assert [entry[1] for entry in entries_in(reader, done=True)] == [2]
        writer.write([("x" * 600, 3)])
        writer.close()
        assert [entry[1] for entry in entries_in(reader, done=True)] == [3]
        entries_in(reader)
        assert not list(folder.iterdir())
        reader.close()


def test_a_spare_file_may_be_removed_while_its_writer_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "FILE_BYTES", 500)
    writer, reader = FrameWriter(tmp_path), FrameReader(tmp_path)
    for number in range(2):
        writer.write([("x" * 600, number)])
    assert [entry[1] for entry in entries_in(reader, done=True)] == [0, 1]
    assert len(list(tmp_path.glob("*.spare"))) == 1
    move = frames.move

    def removed(source: Path, target: Path) -> None:
        source.unlink(missing_ok=True)
        move(source, target)

    monkeypatch.setattr(frames, "move", removed)
    writer.write([("x" * 600, 2)])
    assert [entry[1] for entry in entries_in(reader, done=True)] == [2]
    writer.close()
    entries_in(reader)
    assert not list(tmp_path.iterdir())
    reader.close()


def test_a_mapped_file_is_read_like_a_written_one(tmp_path: Path) -> None:
    """Frames that fit the mapping, that end beyond it, and that are longer than it; then the memory is full."""
    rng = np.random.default_rng(3)
    with small_disk(tmp_path / "memory", 1 << 20) as disk:
        folders = {True: disk.folder, False: tmp_path}
        for mapped, folder in folders.items():
            path = folder / "a.frames"
            file = os.open(path, os.O_RDWR | os.O_CREAT)
            appender = _core.FrameAppender(file, 200_000)
            assert appender.mapped == mapped
            contents = [rng.bytes(size) for size in (1, 5, 70_000, 3, 120_000, 9_000, 7_000, 250_000, 11)]
            for content in contents:
                before = appender.end
                appender.make_room()
                assert appender.end == before
                appender.append(content)
                assert appender.end == before + len(content)
                assert path.read_bytes()[frames.FRAMES_BEGIN : appender.end][-len(content) :] == content
                assert _core.frames_end(file) == appender.end
            assert path.read_bytes()[frames.FRAMES_BEGIN : appender.end] == b"".join(contents)
            if mapped:
                for size, free in ((300_000, 200_000), (4_000, 0)):
                    disk.leave(free)
                    with pytest.raises(OSError, match="space"):
                        appender.append(bytes(size))
                    assert path.read_bytes()[frames.FRAMES_BEGIN : appender.end] == b"".join(contents)
                    disk.free()
                fresh = os.open(disk.folder / "b.frames", os.O_RDWR | os.O_CREAT)
                small = _core.FrameAppender(fresh, 1 << 20)
                disk.leave(30_000)
                small.make_room()
                with pytest.raises(OSError, match="space"):
                    small.append(b"x" * 4_000)  # its step does not fit, so no page is touched
                disk.free()
                small.append(b"x" * 4_000)
                assert (disk.folder / "b.frames").read_bytes()[frames.FRAMES_BEGIN : small.end] == b"x" * 4_000
                os.close(fresh)
            os.close(file)


def test_a_folder_without_room_is_passed_over(tmp_path: Path) -> None:
    """Memory may be full, or of a container that has little."""
    with small_disk(tmp_path / "memory", 64 << 10) as disk:
        writer, reader = (
            FrameWriter(disk.folder / "f", tmp_path / "disk"),
            FrameReader(disk.folder / "f", tmp_path / "disk"),
        )
        for number in range(30):
            if number % 2:
                writer.write([("x" * 9000, number)])
            else:
                writer.write_plain("other", "x" * 9000, number, "m", 1, b"", b"")
        assert list((disk.folder / "f").glob("*.frames"))
        assert list((tmp_path / "disk").glob("*.frames"))
        assert [entry[2 if entry[0] == "other" else 1] for entry in entries_in(reader)] == list(range(30))
        writer.close()
        reader.close()


def test_the_files_of_a_new_worker_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is listed when it has changed, and again as long as its time of change may hide another change."""
    monkeypatch.setattr(frames, "RELIST_NS", 20_000_000)
    reader, writers = FrameReader(tmp_path / "f", tmp_path / "g"), []
    for number in range(6):
        folder = tmp_path / ("f" if number < 4 else "g")
        writers.append(FrameWriter(folder))
        writers[-1].write([("x", number)])
        stamp = os.stat(folder).st_mtime_ns
        assert [entry[1] for entry in entries_in(reader)] == [number]
        if number % 2:
            until(lambda: not entries_in(reader) and time.time_ns() > stamp + 40_000_000)  # noqa: B023  (called at once)
        else:  # another worker begins within one tick of the clock of the file system
            assert entries_in(reader) == []
            writers.append(FrameWriter(folder))
            writers[-1].write([("x", -1)])
            os.utime(folder, ns=(stamp, stamp))
            assert [entry[1] for entry in entries_in(reader)] == [-1]
    for writer in writers:
        writer.close()
    reader.close()


def test_frames_of_any_length_are_read(tmp_path: Path) -> None:
    sizes = [1, frames.READ_BYTES - 50, 3, 3 * frames.READ_BYTES, 7, frames.READ_BYTES, 5]
    writer, reader = FrameWriter(tmp_path), FrameReader(tmp_path)
    for size in sizes:
        writer.write([("x" * size,)])
    assert [len(entry[0]) for entry in entries_in(reader)] == sizes
    writer.close()
    reader.close()


def test_a_killed_recorder_delivers_again_what_a_broker_had_not_taken(
    artifact: Path, tmp_path: Path, cluster: Cluster
) -> None:
    options = {"reconnect.backoff.max.ms": 100}
    log = f"kafka://{cluster.address}/shows"
    with running(artifact, tmp_path / "state", log=log, log_every_s=0.1, kafka_options=options) as served:
        served.http.post("/v1/predict", json={"rows": [{}], "request": "before"})
        messages(cluster, "shows", 1)
        cluster.set_down(True)
        for i in range(20):
            assert served.http.post("/v1/predict", json={"rows": [{}], "request": f"r{i}"}).status_code == 200
        until(lambda: counts(served).get("shows_logged", 0) > 1)  # handed to the client of Kafka
        before = worker_of(served, "recorder")
        os.kill(before.pid, signal.SIGKILL)
        until(lambda: worker_of(served, "recorder") is not before)
        cluster.set_down(False)
        wanted = {"before", *(f"r{i}" for i in range(20))}
        found: set[str] = set()

        def complete() -> bool:
            found.update(row["request"] for row in messages(cluster, "shows", 1))
            return wanted <= found

        until(complete)


class _Done:
    """A score."""

    def __init__(self) -> None:
        self.outputs = {"score": np.zeros(1, np.float32)}
        self.version = self
        self.identity = self
        self.name, self.sequence = "m", 1


def test_a_backlog_costs_in_proportion_to_its_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorder that was behind counted all waiting rows again with every request, and could not catch up."""
    (tmp_path / "state").mkdir()
    settings = Settings("none", str(tmp_path / "state"), log=str(tmp_path / "shows"))
    writer = FrameWriter(*settings.frames)
    tensor, score, requests, counted = [[("a", 1, "", ["x"])], None], np.float32(0.5).tobytes(), 300, 0
    for i in range(requests):
        writer.write([Scored("infer", f"r{i}", i, "lr", 1, score, tensor, None)])
    writer.close()

    def rows(entry: Scored) -> int:
        nonlocal counted
        counted += 1
        return len(entry.scores) // 4

    monkeypatch.setattr(Scored, "rows", property(rows))
    recorder = Recorder(settings)
    assert recorder.poll() == requests
    assert counted <= 5 * requests
    recorder.close()
    assert Counter(show["request"] for show in shows_in(tmp_path / "shows")) == {f"r{i}": 1 for i in range(requests)}
