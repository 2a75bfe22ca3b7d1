"""Environment variables -> who a process is; what is missing or contradictory is named; processes with them train together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from clickfleet.cli import build, frame
from clickfleet.errors import ConfigError
from clickfleet.paddlerec import roles
from fleet import ALL, ROWS, SLOTS, Processes, shows, when_saved
from soak import in_soak

JOB = {
    "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:6170, 10.0.0.2:6170,10.0.0.2:6171",
    "PADDLE_TRAINERS_NUM": "2",
}
SERVER = {**JOB, "TRAINING_ROLE": "PSERVER", "POD_IP": "10.0.0.2", "PADDLE_PORT": "6171"}
WORKER = {**JOB, "TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "0", "POD_IP": "10.0.0.9"}


def test_a_server_is_known_by_its_place_in_the_list() -> None:
    role = roles.read(SERVER)
    assert role is not None
    assert (role.name, role.host, role.workers, role.ray) == ("server 2", "10.0.0.2", 2, "10.0.0.1:6379")
    assert not role.starts_head
    first = roles.read({**SERVER, "POD_IP": "10.0.0.1", "PADDLE_PORT": "6170"})
    assert first is not None
    assert first.starts_head
    assert not first.drives


def test_worker_0_drives() -> None:
    first, second = roles.read({**WORKER, "CPU_NUM": "3"}), roles.read({**WORKER, "PADDLE_TRAINER_ID": "1"})
    assert first is not None
    assert second is not None
    assert (first.drives, first.threads, second.drives, second.threads) == (True, 3, False, None)
    assert not first.starts_head


def test_a_ray_that_is_there_is_joined() -> None:
    first = {**SERVER, "POD_IP": "10.0.0.1", "PADDLE_PORT": "6170"}
    there = roles.read({**first, "RAY_ADDRESS": "10.9.9.9:6400"})
    own = roles.read({**first, "CLICKFLEET_RAY_PORT": "7000"})
    assert there is not None
    assert own is not None
    assert (there.ray, there.starts_head) == ("10.9.9.9:6400", False)
    assert (own.ray, own.starts_head) == ("10.0.0.1:7000", True)


def test_the_address_of_a_worker() -> None:
    listed = {**WORKER, "PADDLE_TRAINER_ENDPOINTS": "10.0.0.9:1,10.0.0.8:1", "PADDLE_TRAINER_ID": "1", "POD_IP": ""}
    by_list = roles.read(listed)
    by_route = roles.read({**WORKER, "PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:6170", "POD_IP": ""})
    assert by_list is not None
    assert by_route is not None
    assert (by_list.host, by_route.host) == ("10.0.0.8", "127.0.0.1")


@pytest.mark.parametrize(
    "environ", [{}, {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "0"}, {"POD_IP": "1.2.3.4", "CPU_NUM": "4"}]
)
def test_without_servers_a_process_is_alone(environ: dict[str, str]) -> None:
    assert roles.read(environ) is None


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"TRAINING_ROLE": "TRAINR"}, "TRAINING_ROLE must be TRAINER or PSERVER, not 'TRAINR'"),
        ({"TRAINING_ROLE": "PSERVER"}, "PADDLE_PSERVERS_IP_PORT_LIST is missing"),
        ({"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINERS_NUM": "2"}, "PADDLE_PSERVERS_IP_PORT_LIST is missing"),
        ({"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "1"}, "PADDLE_PSERVERS_IP_PORT_LIST is missing"),
        (JOB, "TRAINING_ROLE is missing"),
        ({**SERVER, "PADDLE_TRAINERS_NUM": ""}, "PADDLE_TRAINERS_NUM is missing"),
        ({**SERVER, "POD_IP": ""}, "POD_IP is missing"),
        ({**SERVER, "PADDLE_PORT": "no"}, "PADDLE_PORT must be an integer of at least 1, not 'no'"),
        (
            {**SERVER, "PADDLE_PORT": "9"},
            r"POD_IP:PADDLE_PORT is 10.0.0.2:9, but PADDLE_PSERVERS_IP_PORT_LIST does not contain it",
        ),
        ({**WORKER, "PADDLE_TRAINER_ID": " "}, "PADDLE_TRAINER_ID is missing"),
        ({**WORKER, "PADDLE_TRAINER_ID": "2"}, "PADDLE_TRAINER_ID is 2, but PADDLE_TRAINERS_NUM is 2"),
        ({**WORKER, "PADDLE_TRAINERS_NUM": "0"}, "PADDLE_TRAINERS_NUM must be an integer of at least 1, not '0'"),
        ({**WORKER, "PADDLE_TRAINER_ENDPOINTS": "10.0.0.9:1"}, "PADDLE_TRAINER_ENDPOINTS has 1 entries"),
        ({**WORKER, "PADDLE_TRAINER_ENDPOINTS": "10.0.0.3:1,10.0.0.9:1"}, "entry 0 of PADDLE_TRAINER_ENDPOINTS"),
        ({**WORKER, "CPU_NUM": "many"}, "CPU_NUM must be an integer of at least 1, not 'many'"),
        ({**WORKER, "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1"}, "every entry must be ip:port"),
        ({**WORKER, "PADDLE_PSERVERS_IP_PORT_LIST": "a:1,a:1"}, "duplicate entries: a:1"),
        ({**WORKER, "PADDLE_PSERVERS_IP_PORT_LIST": "a:6379"}, "set CLICKFLEET_RAY_PORT"),
        ({**WORKER, "RAY_ADDRESS": "ray://a:1"}, "RAY_ADDRESS must be host:port, not ray://a:1"),
    ],
)
def test_what_is_missing_or_contradictory_is_named(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        roles.read(environ)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("online online.dir=logs", "worker 0 of a cluster, but mode local runs in one process\n  add mode.name=async"),
        ("online mode.name=async", "online learning needs exactly one stream"),
        ("online mode.name=async online.dir=logs train.device=cuda", "train.device is not supported in mode async"),
        ("online online.dir=logs --rewind list", "but `clickfleet online --rewind` is for one process"),
        ("train data.train=logs", "worker 0 of a cluster, but mode local runs in one process\n  add mode.name=async"),
        ("launch config.yaml", "but `clickfleet launch` starts every process itself"),
        ("launch program.py", "or unset PADDLE_PSERVERS_IP_PORT_LIST"),
        ("compare data.train=logs", "but `clickfleet compare` trains every model itself"),
        ("tune data.train=logs", "but `clickfleet tune` trains every trial itself"),
        ("bench modes data.train=logs", "but `clickfleet bench modes` simulates its workers"),
        ("replay online.dir=logs", "but `clickfleet replay` trains its runs one after the other"),
    ],
)
def test_no_command_that_trains_ignores_its_role(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in WORKER.items():
        monkeypatch.setenv(name, value)
    assert frame.run(build(), words.split()) == 1
    assert said in capsys.readouterr().err


def test_every_role_hashes_alike(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Worker 0 alone must not start again when it finds that the reader uses hash(): the others would lose it."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    restarts: list[bool] = []
    words = ["train", "data.train=logs", "data.format.name=./reader.py", "mode.name=async"]
    for environ in (SERVER, WORKER):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        frame.run(build(), words, restart=lambda: restarts.append(True))
        assert "PYTHONHASHSEED=0" in capsys.readouterr().err
    assert restarts == [True, True]


def training(config: dict[str, Any], names: tuple[str, ...] = ALL) -> Processes:
    path = Path(config["run"]["dir"]).parent / "config.yaml"
    path.write_text(yaml.safe_dump({**config, "mode": {"name": "async"}}))
    return Processes("train", str(path), folder=path.parent, names=names)


@in_soak
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("own clusters")
def test_two_servers_and_two_workers_started_by_their_environment_train_a_model(config: dict[str, Any]) -> None:
    """One worker is late, and another one too many."""
    run, processes = Path(config["run"]["dir"]), training(config, ("server 0", "server 1", "worker 0", "worker 2"))
    surplus = processes.running.pop("worker 2")
    try:
        told = surplus.communicate(timeout=300)[0]
    finally:
        surplus.kill()
        processes.start("worker 1")
        said = processes.ends()
    assert surplus.returncode == 1
    assert "error: worker 2 leaves: this run was started with fewer workers" in told
    assert "rejected worker 2: this run has 2 workers" in said["worker 0"]
    assert "waiting for 1 more worker of 2: worker 1 (" in said["worker 0"]
    assert "server 1: waiting for 1 more worker of 2: worker 1 (" in said["server 1"]
    assert "2 shards and 2 workers are ready" in said["worker 0"]
    assert all("the job has ended" in said[name] for name in ("server 0", "server 1", "worker 1"))
    assert shows(run) == ROWS * SLOTS
    assert f"tcp://127.0.0.1:{processes.ports[1]}" in (run / "processes.json").read_text()  # the wire port of the list
    assert "with 2 threads" in (run / "logs" / "workerlog.1").read_text()


@pytest.mark.skipif(not os.environ.get("CLICKFLEET_SOAK"), reason="takes a minute each: CLICKFLEET_SOAK=1")
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("own clusters")
@pytest.mark.parametrize("victim", ["worker 1", "server 1"])
def test_a_killed_process_that_is_started_again_takes_its_place(config: dict[str, Any], victim: str) -> None:
    config["data"]["batch_size"], config["run"]["checkpoint_every_steps"], config["train"] = 20, 100, {"epochs": 3}
    run, processes = Path(config["run"]["dir"]), training(config)
    when_saved(run, lambda: processes.kill(victim)).join(300)
    processes.start(victim)
    said = processes.ends()
    assert f"{victim.replace('server', 'shard')} failed: " in said["worker 0"]
    assert "back to step" in said["worker 0"]
    assert "the job has ended" in said[victim]
    assert shows(run) == 3 * ROWS * SLOTS
