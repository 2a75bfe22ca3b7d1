"""CTR-DNN as its documents run it: the reader in a shell, one machine, a parameter server by roles and by launch."""

import re
from typing import Any

import pytest

from clickfleet.store import checkpoint
from fleet import shows
from ports import free_ports
from scenarios.fleet.conftest import ROWS, TEST_ROWS
from shell import Shell
from soak import in_soak

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("own clusters")]


def auc(text: str, before: str) -> float:
    """The AUC that a line shows after these words."""
    found = re.search(rf"{re.escape(before)} (0\.\d+)", text)
    assert found, text
    return float(found[1])


@pytest.mark.usefixtures("stand_in")
def test_the_reader_prints_its_samples(shell: Shell) -> None:
    lines = shell("cat data/train/part-0 | PYTHONHASHSEED=0 python dnn/dataset_generator.py").splitlines()
    assert len(lines) == ROWS // 4
    for line in lines:
        words = line.split()
        assert words[0] == "13"
        assert words[14::2] == ["1"] * 27  # a block for each of C1 ... C26 and the label
        assert words[-1] in "01"
        assert all(0 <= int(word) < 1000001 for word in words[15:-2:2])
    sample = shell("head -n 1 data/train/part-0 | clickfleet read - -m dnn/config.yaml --json").splitlines()[-1]
    for number, word in enumerate(lines[0].split()[15:-2:2], 1):
        assert re.search(rf'"{number}"[^}}]*\b{word}\b', sample), (number, word, sample)


def test_one_machine(shell: Shell, trained: str) -> None:
    said, steps = trained, ROWS // 20
    assert re.search(rf"epoch 0  step 10  200 rows .*\n(.*\n)*epoch 0 done: step {steps}, {ROWS:,} rows, AUC ", said)
    assert auc(said, "training AUC") > 0.7
    assert auc(said, "test AUC") > 0.75
    assert list(checkpoint.epochs(shell.folder / "output_model_dnn/checkpoints")) == [0]
    tested = shell("clickfleet evaluate -m dnn/config.yaml")
    assert f"epoch 0: {TEST_ROWS} rows, AUC {auc(said, 'test AUC'):.4f}" in tested


ROLES = """
export PADDLE_PSERVERS_IP_PORT_LIST=127.0.0.1:{0},127.0.0.1:{1} PADDLE_TRAINERS_NUM=2 POD_IP=127.0.0.1
export CLICKFLEET_RAY_PORT={2}
TRAINING_ROLE=PSERVER PADDLE_PORT={0} clickfleet train -m dnn/config_bigdata.yaml > server.0 2>&1 & jobs=$!
TRAINING_ROLE=PSERVER PADDLE_PORT={1} clickfleet train -m dnn/config_bigdata.yaml > server.1 2>&1 & jobs="$jobs $!"
TRAINING_ROLE=TRAINER PADDLE_TRAINER_ID=1 clickfleet train -m dnn/config_bigdata.yaml > worker.1 2>&1 & jobs="$jobs $!"
TRAINING_ROLE=TRAINER PADDLE_TRAINER_ID=0 clickfleet train -m dnn/config_bigdata.yaml
for job in $jobs; do wait $job; done
"""


def check_cluster(shell: Shell, said: str, run: str) -> None:
    """Two servers and two workers have learned every row once."""
    assert "2 shards and 2 workers" in said
    assert auc(said, "test AUC") > 0.7
    path: Any = shell.folder / run
    assert shows(path) == ROWS * 26
    for name in ("serverlog.0", "serverlog.1", "workerlog.0", "workerlog.1"):
        kind, number = ("shard" if "server" in name else "worker"), name[-1]
        assert f"{kind} {number} of 2" in (path / "logs" / name).read_text()


def test_two_servers_and_two_workers_by_their_roles(shell: Shell) -> None:
    said = shell(ROLES.format(*free_ports(3)))
    check_cluster(shell, said, "output_model_dnn_all")
    for name in ("server.0", "server.1", "worker.1"):
        assert "the job has ended" in (shell.folder / name).read_text()


@in_soak  # docs/fleet.md and tests/cluster/test_paddlerec.py launch too
def test_two_servers_and_two_workers_by_launch(shell: Shell) -> None:
    more = "-o runner.model_save_path=by_launch cluster.start_timeout=250s"
    said = shell(f"clickfleet launch --server_num 2 --worker_num 2 dnn/config_bigdata.yaml {more}")
    check_cluster(shell, said, "by_launch")
    logs = {path.name for path in (shell.folder / "log").iterdir()}
    assert logs == {"serverlog.0", "serverlog.1", "workerlog.0", "workerlog.1"}
