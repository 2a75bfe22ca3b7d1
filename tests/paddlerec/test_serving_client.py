"""Programs written for Paddle Serving run as they are: its clients are there on request, and a clickfleet server answers."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.errors import ConfigError, DataError, ServeError
from clickfleet.paddlerec import client_config, rec_client
from clickfleet.paddlerec.client_config import FLOAT, INTEGER, TEXT, ClientConfig, Variable
from clickfleet.paddlerec.paddle_names import STAND_IN
from clickfleet.paddlerec.serving_client import HttpServingClient, ServingClient, columns_of
from clickfleet.serve.client import InferReply
from clickfleet.training import export
from originals import DENSE, READER, SLOTS, project, slot_lines
from ports import free_ports
from served import Model, Served, features, running

SCORE = "sigmoid_0.tmp_0"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a PaddleRec project, its artifact, and the client configuration of the artifact."""
    folder = tmp_path_factory.mktemp("old")
    path = project(folder, "deepfm")
    (path.parent / "reader.py").write_text(READER)
    more = ["-o", f"runner.model_save_path={folder / 'run'}", "-o", f"runner.infer_load_path={folder / 'run'}"]
    assert run(build(), ["train", "-m", str(path), "-o", "runner.epochs=1", *more]) == 0
    assert run(build(), ["export", str(folder / "run"), str(folder / "artifact"), "--trust"]) == 0
    assert run(build(), ["migrate", "client-config", str(folder / "artifact"), str(folder / "serving_client")]) == 0
    test = path.parent / "data" / "test"
    assert (
        run(build(), ["predict", str(folder / "run"), str(test), "--out", str(folder / "scores.npy"), "--trust"]) == 0
    )
    return folder


@pytest.fixture(scope="module")
def server(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with running(old / "artifact", tmp_path_factory.mktemp("state")) as served:
        yield served


def address(served: Served) -> str:
    return served.url.removeprefix("http://")


def feed_of(lines: str) -> dict[str, Any]:
    """The rows of slot text as a client feeds them."""
    rows: list[dict[str, list[str]]] = []
    for line in lines.splitlines():
        rows.append({})
        for token in line.split():
            name, _, value = token.partition(":")
            rows[-1].setdefault(name, []).append(value)
    feed: dict[str, Any] = {f"C{i}": np.array([[int(row[str(i)][0])] for row in rows]) for i in range(1, SLOTS + 1)}
    feed["dense_input"] = np.array([row["dense_feature"] for row in rows], np.float32)
    return feed


def connected(old: Path, served: Served) -> ServingClient:
    client = ServingClient()
    client.load_client_config(str(old / "serving_client"))
    client.connect([address(served)])
    return client


def printed(text: str) -> list[Any]:
    """The objects that print(…) wrote, one after the other, arrays among them."""
    scope = {"array": np.array, "float32": np.float32}
    return [eval(one, scope) for one in text.replace("\n ", " ").splitlines()]


PROGRAM = """
import sys
import numpy as np
from paddle_serving_client import Client

client = Client()
client.load_client_config("serving_client/serving_client_conf.prototxt")
client.connect([sys.argv[1]])
feed = {"dense_input": np.array(%(dense)s, "float32")}
for name, ids in zip(client.feed_names_, %(ids)s):
    feed[name] = np.array(ids).reshape([-1, 1])
fetch_map = client.predict(feed=feed, fetch=["sigmoid_0.tmp_0"], batch=True, log_id=7)
print(fetch_map)
assert "torch" not in sys.modules
"""


def test_an_old_program_runs_unchanged(old: Path, server: Served) -> None:
    lines = (old / "deepfm/data/test/part-0").read_text().splitlines(keepends=True)[:5]
    feed = feed_of("".join(lines))
    ids = [feed[f"C{i}"].ravel().tolist() for i in range(1, SLOTS + 1)]
    program = PROGRAM % {"dense": feed["dense_input"].tolist(), "ids": ids}
    env = os.environ | {"PYTHONPATH": str(STAND_IN)}
    argv = [sys.executable, "-c", program, address(server)]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd=old)
    assert done.returncode == 0, done.stderr
    ((name, scores),) = printed(done.stdout)[0].items()
    assert (name, scores.dtype, scores.shape) == (SCORE, np.float32, (5, 1))
    np.testing.assert_allclose(scores[:, 0], np.load(old / "scores.npy")[:5], atol=1e-6)
    assert done.stderr.startswith("logid=7,client_cost=")
    assert "ms,server_cost=" in done.stderr


def test_a_real_client_takes_precedence_over_the_stand_in(tmp_path: Path) -> None:
    real = tmp_path / "paddle_serving_client"
    real.mkdir()
    (real / "__init__.py").write_text("Client = 'real'\n")
    (real / "io.py").write_text("name = __name__\n")
    program = "import paddle_serving_client.io as io; from paddle_serving_client import Client; print(Client, io.name)"
    env = os.environ | {"PYTHONPATH": f"{STAND_IN}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert done.stdout == "real paddle_serving_client.io\n", done.stderr


def test_the_written_client_configuration(old: Path) -> None:
    config = client_config.read(str(old / "serving_client" / "serving_client_conf.prototxt"))
    slots = [Variable(str(i), f"C{i}", INTEGER, (1,), config.feeds[0].lod) for i in range(1, SLOTS + 1)]
    assert list(config.feeds) == [*slots, Variable("dense_feature", "dense_input", FLOAT, (DENSE,))]
    assert [one.alias for one in config.fetches] == [SCORE, "logit"]
    names = Variable('a "b"\\', "shape", TEXT, (), True)
    again = client_config.write(ClientConfig((names,), config.fetches), old / "other")
    assert client_config.read([str(again)]) == ClientConfig((names,), config.fetches)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no inputs or no outputs"),
        ("layers { }", "expected feed_var or fetch_var, not 'layers'"),
        ('feed_var { name: "a"', "a variable has no end"),
        ("feed_var { shape: 1 }", "a variable has no name"),
        ('feed_var { name "a" }', "expected ':' after 'name'"),
        ('feed_var { name: "a" feed_type: 9 }', "a has a type or shape"),
        ('feed_var { name: "a" shape: [1, x] }', "a has a type or shape"),
        ("feed_var {\n  name: ?", "conf:2: unexpected character '\\?'"),
    ],
)
def test_a_damaged_client_configuration_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        client_config.parse(text, "conf")


def test_client_configurations_in_other_spellings() -> None:
    text = "feed_var: < name: 'x' feed_type: 1 shape: [2, 3], is_lod_tensor: 1 > # a comment\nfetch_var { name: \"y\" }"
    config = client_config.parse(text, "conf")
    assert config == ClientConfig((Variable("x", "x", FLOAT, (2, 3), True),), (Variable("y", "y", INTEGER),))
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        client_config.read("nowhere")


def test_one_row_lists_and_samples(old: Path, server: Served) -> None:
    client = connected(old, server)
    feed, expected = feed_of((old / "deepfm/data/test/part-0").read_text()), np.load(old / "scores.npy")
    one = {name: values[0] for name, values in feed.items()}
    np.testing.assert_allclose(client.predict(one, SCORE)[SCORE], expected[:1, None], atol=1e-6)
    lists = {name: values.tolist() for name, values in feed.items()}
    np.testing.assert_allclose(client.predict(lists, [SCORE], batch=True)[SCORE], expected[:, None], atol=1e-6)
    samples = [{name: values[i] for name, values in feed.items()} for i in range(3)]
    both = client.predict(samples, [SCORE, "logit"])
    np.testing.assert_allclose(both[SCORE], expected[:3, None], atol=1e-6)
    np.testing.assert_allclose(1 / (1 + np.exp(-both["logit"])), both[SCORE], atol=1e-6)
    assert client.get_feed_names()[0] == "C1"
    assert client.get_fetch_names()[0] == SCORE


def test_variants_servers_and_their_tags(old: Path, server: Served) -> None:
    (closed,) = free_ports(1)
    client = ServingClient()
    client.load_client_config([str(old / "serving_client")])
    client.set_rpc_timeout_ms(30_000)
    client.add_variant("a", [f"127.0.0.1:{closed}", address(server)], 50)
    client.add_variant("b", [address(server)], 50)
    client.connect()
    feed = {name: values[:1] for name, values in feed_of(slot_lines(1)).items()}
    tags = {client.predict(feed, SCORE, batch=True, need_variant_tag=True)[1] for _ in range(40)}
    assert tags == {"a", "b"}
    with pytest.raises(ConfigError, match=r"add_variant\(\) was called"):
        client.connect(["127.0.0.1:1"])
    client.release()
    with pytest.raises(ConfigError, match="not connected"):
        client.predict(feed, SCORE, batch=True)


def test_http_client(old: Path, server: Served) -> None:
    host, _, port = address(server).rpartition(":")
    client = HttpServingClient(ip=host, port=port)
    client.load_client_config(str(old / "serving_client"))
    client.set_request_compress(True)
    client.set_response_compress(True)
    feed, expected = feed_of((old / "deepfm/data/test/part-0").read_text()), np.load(old / "scores.npy")
    many = {name: np.concatenate([values] * 50) for name, values in feed.items()}
    (tensor,) = client.predict(many, [SCORE], batch=True)["outputs"][0]["tensor"]
    assert (tensor["alias_name"], tensor["shape"]) == (SCORE, [2000, 1])
    np.testing.assert_allclose(tensor["float_data"][:40], expected, atol=1e-6)
    with pytest.raises(ConfigError, match="unknown service"):
        HttpServingClient(service_name="/other")


def test_what_the_server_does_not_have_is_named(old: Path, server: Served, tmp_path: Path) -> None:
    client, (closed,) = ServingClient(), free_ports(1)
    with pytest.raises(ConfigError, match=r"call load_client_config\(\) first"):
        client.connect(["127.0.0.1:1"])
    text = (old / "serving_client/serving_client_conf.prototxt").read_text()
    (tmp_path / "conf").write_text(text.replace('"2"', '"x"').replace('"C2"', '"words"'))
    client.load_client_config(str(tmp_path / "conf"))
    with pytest.raises(ConfigError, match=r"the model has no input 'words'.*\n.*C1.*migrate client-config"):
        client.connect([address(server)])
    (tmp_path / "conf").write_text(text.replace('"logit"', '"fc_3.tmp_1"'))
    client.load_client_config(str(tmp_path / "conf"))
    with pytest.raises(ConfigError, match=r"the model has no output 'fc_3.tmp_1'.*\n.*score, logit"):
        client.connect([address(server)])
    with pytest.raises(ServeError, match="clickfleet serve"):
        client.connect([f"127.0.0.1:{closed}"])
    with pytest.raises(ConfigError, match="no address"):
        client.connect([])
    for setting in (lambda: client.use_key("key"), lambda: client.connect(["a:1"], encryption=True)):
        with pytest.raises(ConfigError, match="encrypted models are not supported"):
            setting()


def test_wrong_feeds_are_named(old: Path, server: Served) -> None:
    client = connected(old, server)
    feed = feed_of(slot_lines(2))
    for wrong, said in (
        ({**feed, "C9": feed["C1"]}, "no input 'C9'"),
        ({name: values for name, values in feed.items() if name != "C3"}, "input 'C3' is missing"),
        ({**feed, "C3": feed["C3"][:1]}, "C1 has 2 rows, but C3 has 1"),
        ({**feed, "C3": [["a"], ["b"]]}, "C3: expected numbers"),
        ({**feed, "C3": [[1.5], [2.0]]}, "C3: expected integers"),
        ({**feed, "C3.lod": [0, 3]}, r"C3.lod must hold ascending offsets from 0 to 2"),
        ({**feed, "C3": 3}, "C3: with batch=True"),
        ([1, 2], "feed must be a mapping"),
        (None, "needs feed and fetch"),
    ):
        with pytest.raises((ConfigError, DataError), match=said):
            client.predict(wrong, SCORE, batch=True)
    with pytest.raises(ConfigError, match="no output 'softmax'"):
        client.predict(feed, ["softmax"], batch=True)
    with pytest.raises(ServeError, match="dense_feature"):
        client.predict({**feed, "dense_input": feed["dense_input"][:, :2]}, SCORE, batch=True)


def test_slots_with_several_values_come_as_lod(tmp_path: Path) -> None:
    """The slot `tags` has any number of values per row, and all values are texts."""
    model = Model()
    model.train(1)
    export.export(model.learner, tmp_path / "artifact", 1)
    assert run(build(), ["migrate", "client-config", str(tmp_path / "artifact"), str(tmp_path / "client")]) == 0
    config = client_config.read(str(tmp_path / "client"))
    assert {one.alias: (one.type, one.lod) for one in config.feeds} == {
        "user": (TEXT, False),
        "tags": (TEXT, True),
        "ad": (TEXT, False),
        "dense_input": (FLOAT, False),
    }
    rows = features(5, 8)
    for row in rows:
        row |= {name: row.get(name, other) for name, other in (("age", 1.0), ("n", 2.0), ("user", "v1"), ("ad", "v2"))}
    feed: dict[str, Any] = {name: [[row[name]] for row in rows] for name in ("user", "ad")}
    feed["dense_input"] = np.array([[row["age"], row["n"]] for row in rows])
    feed["tags"] = np.array([[tag] for row in rows for tag in row["tags"]])
    feed["tags.lod"] = np.cumsum([0, *(len(row["tags"]) for row in rows)])
    with running(tmp_path / "artifact", tmp_path / "state") as served:
        client = ServingClient()
        client.load_client_config(str(tmp_path / "client"))
        client.connect([address(served)])
        scores = client.predict(feed, SCORE, batch=True)[SCORE]
        np.testing.assert_allclose(scores[:, 0], model.scores(rows), atol=1e-6)
        ragged = {**feed, "tags": [row["tags"] for row in rows]}
        del ragged["tags.lod"]
        np.testing.assert_array_equal(client.predict(ragged, SCORE, batch=True)[SCORE], scores)


def test_numbers_with_lod() -> None:
    config = ClientConfig((Variable("1", "C1", INTEGER, (1,), True),), ())
    even = columns_of(config, {"C1": np.arange(6)[:, None], "C1.lod": [0, 2, 4, 6]}, True)["C1"]
    assert isinstance(even, np.ndarray)
    assert even.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert columns_of(config, {"C1": np.arange(3), "C1.lod": [[0, 0, 1, 3]]}, False)["C1"] == [[], [0], [1, 2]]
    assert columns_of(config, [{"C1": [1, 2]}, {"C1": [3]}], False)["C1"] == [[1, 2], [3]]
    (large,) = columns_of(config, {"C1": np.array([2**64 - 1], np.uint64)}, True)["C1"]
    assert large == [2**64 - 1]


def arguments(old: Path, server: Served, *more: str) -> list[str]:
    data = [f"--data_dir={old / 'deepfm/data/test'}", f"--reader_file={old / 'deepfm/reader.py'}"]
    config = [f"--client_config={old / 'serving_client'}", f"--connect={address(server)}", "--use_gpu=false"]
    return [*config, *data, "-m", str(old / "deepfm/config.yaml"), "--batchsize=7", *more]


def test_rec_client(old: Path, server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    expected = np.load(old / "scores.npy")
    assert rec_client.main(arguments(old, server, "--client_mode=rpc")) == 0
    out, err = capsys.readouterr()
    batches = [one[SCORE] for one in printed(out)]
    assert [len(batch) for batch in batches] == [7] * 5 + [5]
    np.testing.assert_allclose(np.concatenate(batches)[:, 0], expected, atol=1e-6)
    assert [line.partition(",")[0] for line in err.splitlines()] == [f"logid={i}" for i in range(6)]
    assert rec_client.main(arguments(old, server, "--client_mode=web", "--seconds=0")) == 0
    replies = [one["result"][SCORE] for one in printed(capsys.readouterr().out)]
    np.testing.assert_allclose(np.concatenate(replies)[:, 0], expected, atol=1e-6)


def test_rec_client_names_what_is_wrong(
    old: Path, server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rec_client.main(arguments(old, server, "--use_gpu=true")) == 1
    assert "clickfleet serve --engine" in capsys.readouterr().err
    assert rec_client.main(arguments(old, server, "--batchsize=0")) == 1
    assert "at least 1" in capsys.readouterr().err
    (tmp_path / "reader.py").write_text("x = 1\n")
    assert rec_client.main(arguments(old, server, f"--reader_file={tmp_path / 'reader.py'}")) == 1
    assert "has no class RecDataset" in capsys.readouterr().err
    (tmp_path / "short.py").write_text(READER.replace("out + [np.array(", "out[2:] + [np.array("))
    assert rec_client.main(arguments(old, server, f"--reader_file={tmp_path / 'short.py'}")) == 1
    assert (
        f"yields {SLOTS - 1} arrays per sample, but the client configuration has {SLOTS + 1}" in capsys.readouterr().err
    )


def test_a_client_configuration_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / client_config.FILE).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read"):
        client_config.read(str(tmp_path))


def test_a_reply_of_another_number_of_rows_is_refused(
    old: Path, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, feed = connected(old, server), feed_of(slot_lines(2))
    short = InferReply({SCORE: np.zeros(1, np.float32)}, 1.0, 1.0, "1")
    monkeypatch.setattr("clickfleet.serve.client.Client.infer", lambda *given: short)
    with pytest.raises(ServeError, match=r"has the shape \[1\] for 2 rows"):
        client.predict(feed, SCORE, batch=True)
