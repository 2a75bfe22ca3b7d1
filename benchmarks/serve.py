"""Measure serving as ratios within one run: against gunicorn + Flask + ONNX Runtime (and MLServer if installed), against ONNX Runtime and
the table alone in a loop, with and without micro-batches, and while the model is being updated.

    python benchmarks/serve.py                 everything, a few minutes
    python benchmarks/serve.py one hundred     some parts: one hundred rank batching updates start workers soak
    --seconds 3 --rounds 3 --json

wrk generates the load and checks every reply (Debian: apt-get install wrk). The open-loop part uses its own client.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from _deltas import Deltas, learner
from _loads import Load, Requests, load, memory, open_loop, rows
from _servers import FLASK, MLSERVER, ours, process
from clickfleet.serve.client import Client
from clickfleet.serve.predictor import open_version
from clickfleet.store.published import Entry
from clickfleet.training import export
from clickfleet.training.onnx_graph import Graph


def median(values: list[float]) -> float:
    return statistics.median(values)


class Benchmark:
    def __init__(self, folder: Path, seconds: float, rounds: int, mlserver: str | None) -> None:
        self.folder, self.seconds, self.rounds, self.mlserver = folder, seconds, rounds, mlserver
        self.model = learner()
        self.graph = Graph(self.model.model, self.model.shape)
        self.artifact = folder / "artifact"
        export.export(self.model, self.artifact, 1)
        self.version = open_version(Entry(self.artifact))
        self.requests = Requests(folder, self.version)
        self.results: dict[str, Any] = {}

    def record(self, name: str, value: float, target: str) -> None:
        self.results[name] = round(value, 4)
        print(f"{name:58s} {value:10.3f}   {target}", flush=True)

    def rounds_of(self, **sides: Callable[[], Load]) -> dict[str, Load]:
        """Run the sides in alternation. Return the medians of each."""
        found: dict[str, list[Load]] = {name: [] for name in sides}
        for _ in range(self.rounds):
            for name, run in sides.items():
                found[name].append(run())
        for name, loads in found.items():
            bad = sum(one.bad for one in loads)
            if bad and name in ("flask", "mlserver"):
                print(f"{name}: {bad} wrong or missing replies", flush=True)
            else:
                assert bad == 0, f"{name}: {bad} wrong or missing replies"
        return {
            name: Load(
                median([one.rate for one in loads]),
                median([one.p50_ms for one in loads]),
                median([one.p99_ms for one in loads]),
                0,
                median([one.cpu_us for one in loads]),
            )
            for name, loads in found.items()
        }

    def one(self) -> None:
        """Measure one candidate as JSON: 16 connections, one worker."""
        (self.folder / "flask_app.py").write_text(FLASK)
        port = 18431
        command = [
            sys.executable,
            "-m",
            "gunicorn",
            "-w",
            "1",
            "-k",
            "gthread",
            "--threads",
            "1",
            "-b",
            f"127.0.0.1:{port}",
            "--log-level",
            "warning",
            "flask_app:app",
        ]
        body, raw = self.requests.ready(1), self.requests.raw()
        sides: dict[str, Callable[[], Load]] = {}
        with (
            ours(self.artifact) as server,
            process(command, f"http://127.0.0.1:{port}/", {"ARTIFACT": str(self.artifact)}, self.folder) as flask,
        ):
            sides["ours"] = lambda: load(server.url, body, 16, self.seconds, server.pid)
            sides["raw"] = lambda: load(server.url, raw, 16, self.seconds, server.pid)
            sides["flask"] = lambda: load(f"http://127.0.0.1:{port}", body, 16, self.seconds, flask)
            sides["idle"] = lambda: load(server.url, body, 1, self.seconds)
            with self.other(sides, body):
                found = self.rounds_of(**sides)
        self.record("one candidate, JSON, 16 connections: requests/s", found["ours"].rate, "")
        self.record("  CPU of the worker per request, µs", found["ours"].cpu_us, "")
        self.record("  p50 ms", found["ours"].p50_ms, "")
        self.record("  p99 ms", found["ours"].p99_ms, "")
        self.record("  over gunicorn + Flask + ONNX Runtime", found["ours"].rate / found["flask"].rate, "≥ 6")
        self.record("    its CPU per request over ours", found["flask"].cpu_us / found["ours"].cpu_us, "")
        if "mlserver" in found:
            self.record("  over MLServer", found["ours"].rate / found["mlserver"].rate, "≥ 5")
            self.record("    its CPU per request over ours", found["mlserver"].cpu_us / found["ours"].cpu_us, "")
        self.record("  one connection: p50 ms", found["idle"].p50_ms, "≤ 0.45")
        self.record("  raw features against ready keys (rate)", found["ours"].rate / found["raw"].rate, "≤ 1.5")
        self.record("  raw features against ready keys (CPU)", found["raw"].cpu_us / found["ours"].cpu_us, "≤ 1.5")

    @contextmanager
    def other(self, sides: dict[str, Callable[[], Load]], body: Path) -> Iterator[None]:
        if self.mlserver is None:
            yield
            return
        folder = self.folder / "mlserver"
        folder.mkdir(exist_ok=True)
        keys = self.version.fields.rows(rows(1)).keys
        np.save(folder / "keys.npy", keys)
        np.save(folder / "table.npy", self.version.read(keys))
        (folder / "ours.py").write_text(MLSERVER)
        (folder / "model-settings.json").write_text(
            json.dumps({"name": "deepfm", "implementation": "ours.Model", "parallel_workers": 0})
        )
        (folder / "settings.json").write_text(
            json.dumps(
                {"parallel_workers": 0, "http_port": 18441, "grpc_port": 18442, "metrics_port": 18443, "debug": False}
            )
        )
        env = {
            "ARTIFACT": str(self.artifact),
            "TABLE": str(folder / "table.npy"),
            "KEYS": str(folder / "keys.npy"),
            "PYTHONPATH": str(folder),
        }
        with process([self.mlserver, "start", "."], "http://127.0.0.1:18441/v2/health/ready", env, folder) as other:
            time.sleep(2)
            sides["mlserver"] = lambda: load("http://127.0.0.1:18441", body, 16, self.seconds, other)
            yield

    def hundred(self) -> None:
        """Measure a hundred candidates as binary tensors, against ONNX Runtime and the table in a loop."""
        batch = self.version.fields.rows(rows(100))
        body = self.requests.ready(100, binary=True)

        def loop() -> Load:
            until, n = time.perf_counter() + self.seconds, 0
            while time.perf_counter() < until:
                self.version.run(batch)
                n += 1
            return Load(n / self.seconds, 0, 0, 0)

        with ours(self.artifact) as server:
            found = self.rounds_of(
                loop=loop,
                ours=lambda: load(server.url, body, 4, self.seconds, server.pid),
                idle=lambda: load(server.url, body, 1, self.seconds),
            )
        self.record("100 candidates, binary: requests/s", found["ours"].rate, "")
        self.record("  of ONNX Runtime and the table alone", found["ours"].rate / found["loop"].rate, "≥ 0.7")
        self.record("  one connection: p50 ms", found["idle"].p50_ms, "≤ 2")

    def rank(self) -> None:
        with ours(self.artifact) as server:
            body = self.requests.rank(200)
            found = self.rounds_of(ours=lambda: load(server.url, body, 1, self.seconds))
        self.record("rank 200 candidates, one connection: p50 ms", found["ours"].p50_ms, "")
        self.record("  p99 ms", found["ours"].p99_ms, "≤ 5")

    def batching(self) -> None:
        body = self.requests.ready(1)
        with ours(self.artifact) as merged, ours(self.artifact, batching=False) as alone:
            found = self.rounds_of(
                merged=lambda: load(merged.url, body, 64, self.seconds, merged.pid),
                alone=lambda: load(alone.url, body, 64, self.seconds, alone.pid),
            )
        self.record("64 connections, micro-batches: requests/s", found["merged"].rate, "")
        self.record("  over the same without (rate)", found["merged"].rate / found["alone"].rate, "≥ 2.3")
        self.record("  over the same without (CPU per request)", found["alone"].cpu_us / found["merged"].cpu_us, "")
        self.record("  p99 ms", found["merged"].p99_ms, "≤ 20")

    def workers(self) -> None:
        body = self.requests.ready(1)
        with ours(self.artifact) as one, ours(self.artifact, workers=2) as two:
            found = self.rounds_of(
                one=lambda: load(one.url, body, 32, self.seconds), two=lambda: load(two.url, body, 32, self.seconds)
            )
        self.record("two workers over one, 32 connections", found["two"].rate / found["one"].rate, "≥ 1.2")

    def start(self) -> None:
        """Measure opening a million rows, and the time until a delta of a million rows is live."""
        for kind in ("mapped", "memory"):
            begin = time.perf_counter()
            open_version(Entry(self.artifact), rows=kind)  # type: ignore[arg-type]
            self.record(
                f"open {self.version.identity.rows:,} rows, {kind}: s",
                time.perf_counter() - begin,
                "≤ 0.5" if kind == "mapped" else "≤ 3",
            )
        log = Deltas(self.model, self.graph, self.folder / "start-log")
        begin = time.perf_counter()
        with ours(log.folder) as server:
            self.record("server ready, processes included: s", time.perf_counter() - begin, "")
            with Client(server.url) as client:
                entry = log.publish(1_000_000)
                begin = time.perf_counter()
                while client.model()["sequence"] != entry.sequence:
                    time.sleep(0.01)
                self.record("a delta of 1,000,000 rows live after: s", time.perf_counter() - begin, "≤ 2")

    def updates(self, seconds: float | None = None) -> None:
        """Measure an open loop at 30% of capacity, with and without a delta of 100,000 rows per second."""
        seconds = seconds or max(10.0, 4 * self.seconds)
        log = Deltas(self.model, self.graph, self.folder / "log")
        row = rows(1)
        body = self.folder / "open.json"
        body.write_text(json.dumps({"rows": row}))
        with ours(log.folder, poll_ms=50.0) as server:
            capacity = load(server.url, self.requests.raw_any(), 16, self.seconds).rate
            rate = 0.3 * capacity
            quiet, busy = [], []
            for _ in range(self.rounds):
                quiet.append(open_loop(server.url, body, rate, seconds))
                stop = threading.Event()
                writer = threading.Thread(target=log.publish_every, args=(1.0, 100_000, stop))
                writer.start()
                busy.append(open_loop(server.url, body, rate, seconds))
                stop.set()
                writer.join()
            replies = [one for run in (*quiet, *busy) for one in run.replies]
            wrong = sum(
                abs(score - log.score(sequence, row)) > 1e-6 for sequence, score in {tuple(one) for one in replies}
            )
        self.record(
            f"open loop at 30% of {capacity:.0f}/s: p99 ms without deltas", median([run.p99_ms for run in quiet]), ""
        )
        self.record(
            "  p99 with deltas over without",
            median([b.p99_ms / q.p99_ms for b, q in zip(busy, quiet, strict=True)]),
            "≤ 1.5",
        )
        self.record("  failed replies", sum(run.failed for run in (*quiet, *busy)), "0")
        self.record("  mixed replies", wrong, "0")
        self.record("  sequences seen", len({sequence for sequence, _ in replies}), "")

    def soak(self, seconds: float = 600.0) -> None:
        """Measure memory growth and errors under 80% load for a long time, and the restart of a killed worker."""
        body = self.requests.ready(1)
        with ours(self.artifact) as server:
            load(server.url, body, 16, 5)
            before = memory(server.pid)
            found = load(server.url, body, 8, seconds, server.pid)
            self.record("soak: requests/s", found.rate, "")
            self.record("  wrong or missing replies", found.bad, "0")
            self.record("  growth of memory", memory(server.pid) / before - 1, "≤ 0.02")
        with ours(self.artifact, workers=2) as server:
            mark = Path(server.fleet.settings.state) / "ready-0"
            mark.unlink()
            os.kill(server.pid, signal.SIGKILL)
            begin = time.perf_counter()
            while not mark.exists():
                time.sleep(0.01)
            self.record("a killed worker is back after: s", time.perf_counter() - begin, "≤ 2")


PARTS = ("one", "hundred", "rank", "batching", "workers", "start", "updates")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "soak", []], default=[])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--mlserver", default=shutil.which("mlserver"), help="the mlserver program, possibly from another environment"
    )
    parser.add_argument("--soak-seconds", type=float, default=600.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed: apt-get install wrk")
    with tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(Path(folder), given.seconds, given.rounds, given.mlserver)
        for part in given.parts or PARTS:
            benchmark.soak(given.soak_seconds) if part == "soak" else getattr(benchmark, part)()
        if given.json:
            print(json.dumps(benchmark.results))


if __name__ == "__main__":
    main()
