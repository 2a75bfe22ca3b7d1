"""The machines of benchmarks/machines.py: namespaces that reach each other over a wire as slow as asked for."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def benchmark(name: str) -> Any:
    """Load a file of the benchmarks. Their folder stays off the path: some of them have the name of a folder of tests."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_wire = benchmark("_wire")

LINK = _wire.Link(bits_per_s=20e6, delay_s=0.03)
SENT = 500_000
SERVER = """
import socket
with socket.create_server(("0.0.0.0", 5000)) as server:
    print("up", flush=True)
    peer, _ = server.accept()
    peer.sendall(peer.recv(1))
    left = int(__import__("sys").argv[1])
    while left:
        left -= len(peer.recv(left))
    peer.sendall(b"e")
"""
CLIENT = """
import json, socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as peer:
    begin = time.monotonic()
    peer.sendall(b"p")
    assert peer.recv(1) == b"p"
    turned = time.monotonic()
    peer.sendall(bytes(int(sys.argv[2])))
    assert peer.recv(1) == b"e"
    print(json.dumps([turned - begin, time.monotonic() - turned]))
"""


def inside(machine: str, code: str, *words: str) -> list[str]:
    return ["ip", "netns", "exec", machine, sys.executable, "-c", code, *words]


def test_a_packet_takes_at_least_the_time_of_its_link() -> None:
    """A busy machine only adds to these times, so they have a lower limit and no upper one."""
    if reason := _wire.missing():
        pytest.skip(f"NOT TESTED: machines with a slow wire. {reason}")
    try:
        with _wire.machines(3, LINK) as names:
            server = subprocess.Popen(inside(names[2], SERVER, str(SENT)), stdout=subprocess.PIPE, text=True)
            with server:
                assert server.stdout is not None
                assert server.stdout.readline() == "up\n"
                said = subprocess.check_output(inside(names[0], CLIENT, _wire.address(2), str(SENT)), text=True)
            turn_s, sent_s = json.loads(said)
    except _wire.NoMachinesError as error:
        pytest.skip(f"NOT TESTED: machines with a slow wire. {error}")
    assert turn_s >= 2 * LINK.delay_s
    assert sent_s >= 2 * LINK.delay_s + 8 * SENT / LINK.bits_per_s
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in left for name in names)
