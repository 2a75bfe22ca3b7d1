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
        common = "--block --num-cpus=2 --disable-usage-stats --object-store-memory=100000000"
        for name, address, how in (
            (self.names[0], HEAD, "--head --port=6379 --ray-client-server-port=10001 --include-dashboard=false"),
            (self.names[1], OTHER, f"--address={HEAD}:6379"),
        ):
            ray = f"{PROGRAMS}/ray start {common} --node-ip-address={address} {how}"
            script = f"mount -t tmpfs none {self.tmp} && exec {ray}"
            command = ["ip", "netns", "exec", name, "sh", "-c", script]
            self.nodes.append(subprocess.Popen(command, env=self.environ, stdout=subprocess.DEVNULL))
            self._wait_for_head()
        self._wait_for_both()

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

    def run(self, *words: str, tries: int = 1) -> str:
        """What a command says that is run on the first host."""
        inside = ["nsenter", f"--target={self.nodes[0].pid}", "--mount", "--net", str(PROGRAMS / "clickfleet"), *words]
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


@pytest.fixture
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
