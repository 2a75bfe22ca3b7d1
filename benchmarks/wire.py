"""Measure what authentication and encryption of the wire cost: bare messages, and async training.

    python benchmarks/wire.py --rounds 3 --before older/src

Messages: one client and one server in two processes exchange what a step of async training sends to one shard. Training: 2 shards and
2 workers in mode async, CTR-DNN 400×3 with dim 10, batches of 1000 rows. On one machine the processes would use Unix sockets, which need
no protection, so training runs over TCP on the loopback. `plain` is the same without protection, which nothing but this benchmark can
switch off. `--before` is the folder `src` of an older version to take for `plain`, with the compiled core in `src/clickfleet`.

Variants alternate within a round. Figures are medians over rounds, and ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
import zmq

from clickfleet.cluster.authentication import ClientGuard, ProcessKey, Rejections, ServerGuard, ShardAddress, new_key
from clickfleet.cluster.process import keep_memory
from clickfleet.cluster.wire import limit, owned, widen
from clickfleet.data.logs.synth import SynthOptions, synth

PUSHED, PULLED, ROWS = 300_000, 40_000, 220_000
"""Bytes of a push, of the keys of a pull, and of its rows: half a step of 1000 rows with 26 slots and dim 10."""
WARM_UP = 20
"""Exchanges before a measurement."""
NETWORK = "tcp"
"""Lets a guard treat any socket as one of the network."""
TCP_ONLY = """
import os
real = os.lstat
def lstat(path, *arguments, **options):
    if "clickfleet-wire-" in str(path) and str(path).endswith("/shard"):
        raise FileNotFoundError(path)
    return real(path, *arguments, **options)
os.lstat = lstat
"""
"""A sitecustomize.py that hides the Unix sockets of shards from workers."""
OPEN = """
import importlib.util, sys
class Opened:
    names = {"clickfleet.cluster.authentication", "clickfleet.cluster.wire"}
    def find_spec(self, name, path=None, target=None):
        if name not in self.names:
            return None
        self.names.remove(name)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            if name.endswith("authentication"):
                module.is_private = lambda address: True
            else:
                widen = module.widen
                module.widen = lambda socket, address: address.startswith("ipc:") and widen(socket, address)
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Opened())
"""
"""A sitecustomize.py that treats all sockets as private: nothing is authenticated or encrypted."""
FROM_SOURCES = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "clickfleet" not in type(each).__module__]
sys.path.insert(0, {folder!r})
"""
"""A sitecustomize.py that imports clickfleet from other sources than the installed ones."""
Keys = tuple[ProcessKey, ProcessKey] | None


def buffers(*sizes: int) -> list[Any]:
    """Return arrays of random bytes, which no transport can shorten."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, size, np.uint8) for size in sizes]


def serve(address: str, keys: Keys, results: Any) -> None:
    keep_memory()
    context = zmq.Context(1)
    socket = context.socket(zmq.ROUTER)
    limit(socket)
    widen(socket, address)
    protection = ServerGuard(keys[0], context, Rejections("refused", print)) if keys else None
    if keys and protection:
        protection.accept([keys[1].shared])
        protection.protect(socket)
    socket.bind(address)
    results.put(bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0"))
    arrays, begin, answered = buffers(31, 0, ROWS), 0.0, 0
    while True:
        connection, *frames = socket.recv_multipart(copy=False)
        if len(frames) == 1:
            break
        answer = [owned(each) for each in arrays]
        if protection:
            _, link = protection.open([frame.buffer for frame in frames], str(frames[0].get("User-Id")))
            answer = link.seal(answer)
        socket.send_multipart([connection, *answer], copy=False)
        answered += 1
        if answered == WARM_UP:
            begin = time.process_time()
    results.put(time.process_time() - begin)
    socket.close()
    context.term()


def exchange(address: str, keys: Keys, messages: int) -> tuple[float, float]:
    """Return milliseconds and CPU milliseconds of both ends for one request and its answer."""
    keep_memory()
    results: Any = multiprocessing.get_context("spawn").Queue()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(address, keys, results))
    server.start()
    endpoint = results.get()
    context = zmq.Context(1)
    socket = context.socket(zmq.DEALER)
    limit(socket)
    widen(socket, endpoint)
    own = ClientGuard(keys[1], ShardAddress([endpoint], keys[0].shared), NETWORK) if keys else None
    if own:
        own.protect(socket)
    socket.connect(endpoint)

    arrays = buffers(92, PUSHED, PULLED)

    def ask() -> None:
        frames = [owned(each) for each in arrays]
        socket.send_multipart(own.seal(frames) if own else frames, copy=False)
        answer = [frame.buffer for frame in socket.recv_multipart(copy=False)]
        if own:
            own.open(answer)

    for _ in range(WARM_UP):
        ask()
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(messages):
        ask()
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    socket.send(b"end")
    cpu += results.get()
    server.join()
    socket.close()
    context.term()
    return 1e3 * seconds / messages, 1e3 * cpu / messages


def measure_messages(rounds: int, messages: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for transport in ("tcp", "ipc"):
        found: dict[str, list[tuple[float, float]]] = {"plain": [], "authenticated": [], "encrypted": []}
        for _ in range(rounds):
            for name in found:
                keys = None if name == "plain" else (new_key(name == "encrypted"), new_key(name == "encrypted"))
                with tempfile.TemporaryDirectory() as folder:
                    address = "tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{folder}/socket"
                    found[name].append(exchange(address, keys, messages))
        for name, times in found.items():
            ms, cpu = (statistics.median(column) for column in zip(*times, strict=True))
            more = statistics.median(b[1] - a[1] for a, b in zip(found["plain"], times, strict=True))
            print(f"{transport} {name:>13}: {ms:.2f} ms, CPU {cpu:.2f} ms per exchange, {more:+.2f} of plain")
            figures[f"{transport}_{name}_cpu_ms"] = cpu
    return figures


def train(changes: str, data: Path, overrides: list[str]) -> dict[str, float]:
    """Return rows per second and CPU milliseconds per step of one run."""
    with tempfile.TemporaryDirectory() as folder:
        run, environ = Path(folder) / "run", dict(os.environ)
        (Path(folder) / "sitecustomize.py").write_text(changes)
        environ["PYTHONPATH"] = folder
        config = {
            "data": {"train": [str(data / "train" / "*")], "batch_size": 1000},
            "model": {"name": "dnn", "hidden": [400, 400, 400]},
            "table": {"dim": 10},
            "train": {"epochs": 1},
            "mode": {"name": "async"},
            "cluster": {"shards": 2, "workers": 2, "start_timeout": "4min"},
            "run": {"dir": str(run), "checkpoint_every": None, "report": False},
        }
        (Path(folder) / "config.yaml").write_text(yaml.safe_dump(config))
        program = "from clickfleet.cli import main; main()"
        command = [sys.executable, "-c", program, "train", f"{folder}/config.yaml", *overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environ)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        last = {line["kind"]: line for line in lines}
        first, end, costs = next(line for line in lines if line["kind"] == "train"), last["epoch"], last["cluster"]
        return {
            "rows_per_s": (end["rows"] - first["rows"]) / (end["time"] - first["time"]),
            "cpu_ms": costs["worker_cpu_ms_per_step"] + costs["shard_cpu_ms_per_step"],
            "wire_bytes_per_row": costs["wire_bytes_per_row"],
        }


def measure_training(arguments: argparse.Namespace) -> dict[str, float]:
    before = FROM_SOURCES.format(folder=str(arguments.before.absolute())) if arguments.before else OPEN
    variants = {
        "plain": (TCP_ONLY + before, list[str]()),
        "authenticated": (TCP_ONLY, ["cluster.encrypt=false"]),
        "encrypted": (TCP_ONLY, ["cluster.encrypt=true"]),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory() as folder:
        data = arguments.data or Path(folder) / "data"
        if not data.exists():
            synth(data, SynthOptions(rows=arguments.rows, test_rows=0, parts=4))
        for _ in range(arguments.rounds):
            for name, (changes, overrides) in variants.items():
                found[name].append(train(changes, data, overrides))
                print(name, f"{found[name][-1]['rows_per_s']:,.0f} rows/s", flush=True)
    first, figures = next(iter(found)), dict[str, float]()
    for name, runs in found.items():
        for key in ("rows_per_s", "cpu_ms"):
            ratios = [b[key] / a[key] for a, b in zip(found[first], runs, strict=True)]
            figures[f"{name}_{key}"] = statistics.median(run[key] for run in runs)
            figures[f"{name}_{key}_of_{first}"] = statistics.median(ratios)
            figures[f"{name}_{key}_of_{first}_min"], figures[f"{name}_{key}_of_{first}_max"] = min(ratios), max(ratios)
        print(
            f"{name:>13}: {figures[f'{name}_rows_per_s']:,.0f} rows/s, {figures[f'{name}_rows_per_s_of_{first}']:.3f} of {first}"
            f" ({figures[f'{name}_rows_per_s_of_{first}_min']:.3f} to {figures[f'{name}_rows_per_s_of_{first}_max']:.3f});"
            f" CPU {figures[f'{name}_cpu_ms']:.1f} ms per step, {figures[f'{name}_cpu_ms_of_{first}']:.3f} of {first};"
            f" {runs[-1]['wire_bytes_per_row']:,.0f} bytes per row"
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=400, help="exchanges per measurement; 0: measure no messages")
    parser.add_argument("--rows", type=int, default=300_000, help="rows to train; 0: measure no training")
    parser.add_argument("--before", type=Path, help="sources of a version without protection, with the compiled core")
    parser.add_argument("--data", type=Path, help="a folder made by `clickfleet synth`")
    arguments = parser.parse_args()
    figures = measure_messages(arguments.rounds, arguments.messages) if arguments.messages else {}
    if arguments.rows:
        figures |= measure_training(arguments)
    print(json.dumps({"benchmark": "wire", **figures}))


if __name__ == "__main__":
    main()
