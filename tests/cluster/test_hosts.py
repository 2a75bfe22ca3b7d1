"""Two hosts: network namespaces of this machine with a cable between them, each a node of one running Ray cluster that runs join."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from clickfleet import RunningCluster
from clickfleet.errors import ClusterError
from clickfleet.store import checkpoint, run_folder
from fleet import ROWS, SLOTS, TEST_ROWS, shows

pytestmark = pytest.mark.xdist_group("own clusters")
PROGRAMS = Path(sys.executable).parent
HEAD, OTHER = "10.77.0.1", "10.77.0.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """Commands run on one of two hosts; /tmp of each is its own, so no socket file is a short cut between them."""

    def __init__(self) -> None:
        self.names = [f"clickfleet-{os.getpid()}-{i}" for i in range(2)]
        self.tmp = tempfile.mkdtemp(prefix="cf-")  # short: names of socket files are
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "TMPDIR": self.tmp,
            "RAY_TMPDIR": self.tmp,
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_AUTH_MODE": "token",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        }
        self.nodes: list[subprocess.Popen[bytes]] = []

    def connect(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        a, b = self.names
        ip("link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable", "netns", b)
        for name, address in zip(self.names, (HEAD, OTHER), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")

    def start_ray(self) -> None:
        for host in range(2):
            self.start_node(host)
            self._wait_for_head()
        self._wait_for_both()

    def start_node(self, host: int) -> None:
        common = "--block --num-cpus=2 --disable-usage-stats --object-store-memory=100000000"
        head = "--head --port=6379 --ray-client-server-port=10001 --include-dashboard=false"
        address, how = ((HEAD, head), (OTHER, f"--address={HEAD}:6379"))[host]
        ray = f"{PROGRAMS}/ray start {common} --node-ip-address={address} {how}"
        script = f"mount -t tmpfs none {self.tmp} && exec {ray}"
        command = ["ip", "netns", "exec", self.names[host], "sh", "-c", script]
        node = subprocess.Popen(command, env=self.environ, stdout=subprocess.DEVNULL)
        self.nodes[host:] = [node, *self.nodes[host + 1 :]]

    def stop_node(self, host: int) -> None:
        """Take a node away, as the owner of a spot machine does."""
        self.nodes[host].terminate()
        self.nodes[host].wait(timeout=60)

    def _wait_for_both(self) -> None:
        probe = f"import ray; ray.init(address='{HEAD}:6379', logging_level='ERROR'); assert len(ray.nodes()) == 2"
        inside = ["nsenter", f"--target={self.nodes[0].pid}", "--mount", "--net", sys.executable, "-c", probe]
        deadline = time.monotonic() + 120
        while subprocess.run(inside, env=self.environ, capture_output=True).returncode:
            if time.monotonic() > deadline:
                pytest.fail("the other host does not join Ray's head")

    def _wait_for_head(self) -> None:
        probe = f"import socket; socket.create_connection(('{HEAD}', 6379), 1)"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            command = ["ip", "netns", "exec", self.names[1], sys.executable, "-c", probe]
            if subprocess.run(command, capture_output=True).returncode == 0:
                return
        pytest.fail("Ray's head does not answer the other host")

    def command(self, *words: str) -> list[str]:
        """A command of clickfleet on the first host."""
        return ["nsenter", f"--target={self.nodes[0].pid}", "--mount", "--net", str(PROGRAMS / "clickfleet"), *words]

    def run(self, *words: str, tries: int = 1) -> str:
        """What a command says that is run on the first host."""
        inside = self.command(*words)
        for _ in range(tries):
            done = subprocess.run(inside, env=self.environ, capture_output=True, text=True, timeout=400)
            if done.returncode == 0:
                break
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def close(self) -> None:
        for node in self.nodes:
            node.terminate()
        for node in self.nodes:
            try:
                node.wait(timeout=20)
            except subprocess.TimeoutExpired:
                node.kill()
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        shutil.rmtree(self.tmp, ignore_errors=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        pytest.fail("there is no ip or nsenter: run scripts/ground (Debian: apt-get install iproute2 util-linux)")
    found = Hosts()
    try:
        try:
            found.connect()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"NOT TESTED: two hosts. This machine makes no network namespaces: {error.stderr.strip()}")
        found.start_ray()
        yield found
    finally:
        found.close()


def last_line(run: Path, kind: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in reversed(lines) if line["kind"] == kind)


@pytest.mark.timeout(900)
def test_two_hosts_train_together_on_a_ray_that_is_there(hosts: Hosts, config: dict[str, Any]) -> None:
    run = Path(config["run"]["dir"])
    path = run.parent / "config.yaml"
    path.write_text(yaml.safe_dump({**config, "mode": {"name": "async"}}))
    said = hosts.run("train", str(path), f"cluster.address={HEAD}:6379", "--json")
    assert json.loads(said.splitlines()[-1])["rows"] == ROWS
    processes = json.loads((run / "processes.json").read_text())
    assert {facts["address"] for name, facts in processes.items() if name.startswith("shard")} == {HEAD, OTHER}
    assert {facts["address"] for name, facts in processes.items() if name.startswith("worker")} == {HEAD, OTHER}
    assert shows(run) == ROWS * SLOTS
    assert last_line(run, "cluster")["refused_connections"] == 0
    # Messages that are only authenticated.
    run = run.with_name("sealed")
    hosts.run("train", str(path), f"cluster.address={HEAD}:6379", "cluster.encrypt=false", f"run.dir={run}")
    assert shows(run) == ROWS * SLOTS
    assert last_line(run, "cluster")["dropped_messages"] == 0
    # The same cluster found by itself, and through its gate for clients that are no nodes (which gives up early when busy).
    for address in ("auto", f"ray://{HEAD}:10001"):
        test = config["data"]["test"][0]
        said = hosts.run("evaluate", str(run), test, "--workers", "1", "--address", address, "--json", tries=3)
        assert json.loads(said.splitlines()[-1])["rows"] == TEST_ROWS


@pytest.mark.timeout(900)
def test_the_number_of_workers_follows_the_nodes(hosts: Hosts, config: dict[str, Any]) -> None:
    """A node that leaves takes workers with it, and perhaps a shard; one that comes brings room for more."""
    run = Path(config["run"]["dir"])
    config |= {"mode": {"name": "async"}, "train": {"epochs": 100_000}}
    config["cluster"] |= {"address": f"{HEAD}:6379", "shards": 1, "workers": "1..3", "stop_timeout": "60s"}
    config["data"] |= {"test": [], "valid_share": 0}
    config["run"]["checkpoint_every_steps"] = 200
    path, cluster = run.parent / "config.yaml", RunningCluster(run)
    path.write_text(yaml.safe_dump(config))
    with (run.parent / "out.txt").open("wb") as out:
        command = subprocess.Popen(
            hosts.command("train", str(path)), env=hosts.environ, stdout=out, stderr=subprocess.STDOUT
        )

    def trains_with(workers: int) -> bool:
        try:
            status = cluster.status()
        except ClusterError:  # it starts
            return False
        trained = [line["rows"] for line in status["processes"] if line["name"].startswith("worker")]
        return len(trained) == workers and all(trained)

    def wait_for(workers: int) -> None:
        deadline = time.monotonic() + 240
        while not trains_with(workers):
            said = (run.parent / "out.txt").read_text()
            assert command.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.1)

    try:
        wait_for(3)
        assert cluster.status()["range"] == [1, 3]
        with pytest.raises(ClusterError, match=r"cluster.workers is 1..3, so the run uses what there is room for"):
            cluster.add_workers(1)
        hosts.stop_node(1)
        wait_for(1)
        hosts.start_node(1)
        wait_for(3)
        command.terminate()
        command.wait(timeout=120)
    finally:
        command.kill()
    rows = run_folder.read_state(checkpoint.latest(run / "checkpoints"))["rows"]
    assert shows(run) == rows * SLOTS
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    epochs = [line["epoch_rows"] for line in lines if line["kind"] == "epoch"]
    assert epochs == [ROWS] * len(epochs)
    assert rows >= ROWS * len(epochs)
