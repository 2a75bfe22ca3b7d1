"""A trained model behind the services of the course: the old web client, the old RPC client, and file uploads."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from ports import free_ports
from scenarios.fleet.conftest import TEST_ROWS
from shell import Shell

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("own clusters")]
READ = "cat data/test/part-0 | PYTHONHASHSEED=0 python dnn/dataset_generator.py"
ROWS = TEST_ROWS // 4


@dataclass(frozen=True)
class Service:
    address: str
    scores: np.ndarray
    """Of the rows of part-0, as `predict` gives them."""


@pytest.fixture(scope="module")
def service(shell: Shell, stand_in: None, trained: str) -> Iterator[Service]:
    shell("clickfleet predict -m dnn/config.yaml data/test/part-0 --out scores.txt")
    shell("clickfleet export -m dnn/config.yaml artifact")
    said = shell("clickfleet migrate client-config artifact serving_client")
    assert f"feed: {', '.join(f'C{i}' for i in range(1, 27))}, dense_input\n" in said
    assert "fetch: sigmoid_0.tmp_0, logit\n" in said
    lines = []
    for line in shell(READ).splitlines():
        words = line.split()
        dense = [f"dense_feature:{value}" for value in words[1:14]]
        lines.append(" ".join([f"click:{words[-1]}", *dense, *(f"{i + 1}:{words[15 + 2 * i]}" for i in range(26))]))
    (shell.folder / "slots").mkdir()
    (shell.folder / "slots/part-0").write_text("\n".join(lines) + "\n")
    port, calls = free_ports(2)
    with shell.background(f"clickfleet serve artifact --port {port} --grpc-port {calls}", until="ready: "):
        yield Service(f"127.0.0.1:{port}", np.loadtxt(shell.folder / "scores.txt", usecols=-1))


def test_the_old_web_client(shell: Shell, service: Service) -> None:
    scores = list(map(float, shell(f"{READ} | python web_client.py {service.address}").split()))
    np.testing.assert_allclose(scores, service.scores, atol=1e-6)


def test_the_old_rpc_client(shell: Shell, service: Service) -> None:
    done = shell.run(f"{READ} | python rpc_client.py {service.address}")
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(list(map(float, done.stdout.split())), service.scores, atol=1e-6)
    lines = done.stderr.splitlines()
    assert len(lines) == ROWS // 5
    assert re.fullmatch(r"logid=0,client_cost=[\d.]+ms,server_cost=[\d.]+ms", lines[0])


@pytest.mark.parametrize("mode", ["rpc", "web"])
def test_rec_client(shell: Shell, service: Service, mode: str) -> None:
    done = shell.run(
        "python -m clickfleet.paddlerec.rec_client --client_config=serving_client/serving_client_conf.prototxt "
        f"--connect={service.address} --use_gpu=false --data_dir=slots --reader_file=dnn/criteo_reader.py --batchsize=5 "
        f"--client_mode={mode} --seconds=0"
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout.replace("\n ", " ").splitlines()
    assert len(text) == ROWS // 5
    begin = "{'sigmoid_0.tmp_0': array([[0." if mode == "rpc" else "{'result': {'sigmoid_0.tmp_0': [[0."
    assert all(line.startswith(begin) for line in text)
    scores = [
        float(number) for line in text for number in re.findall(r"0\.\d+(?:e-\d+)?", line.partition("'logit'")[0][20:])
    ]
    np.testing.assert_allclose(scores, service.scores, atol=1e-6)


def test_the_upload_client(shell: Shell, service: Service) -> None:
    url = f"http://{service.address}/upload?user_id=11"
    reply = json.loads(shell(f"curl -sS -F file=@slots/part-0 '{url}'"))
    assert (reply["code"], reply["dtype"], reply["user_id"]) == (200, "float32", "11")
    np.testing.assert_allclose(np.ravel(reply["data"]), service.scores, atol=1e-6)
    full = json.loads(shell(f"curl -sS -F file=@slots/part-0 '{url}&full=true'"))["data"]
    assert [len(batch) for batch in full] == [5] * (ROWS // 5)
    np.testing.assert_allclose(np.ravel(full), service.scores, atol=1e-6)
