"""Serving, measured as ratios inside one run: against gunicorn + Flask + ONNX Runtime (and MLServer where it is installed), against
ONNX Runtime and the table alone in a loop, with and without micro-batches, while the model changes underneath.

    python benchmarks/serve.py                 all of it, a few minutes
    python benchmarks/serve.py one hundred     some parts: one hundred rank batching updates start workers soak
    --seconds 3 --rounds 3 --json

Load comes from wrk (Debian: apt-get install wrk) with every reply checked, the open-loop part from a client of its own.
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clickfleet import exporting, published
from clickfleet.client import Client
from clickfleet.config import Config, checked
from clickfleet.graph import Graph
from clickfleet.learner import Learner
from clickfleet.published import Entry
from clickfleet.schema import preset
from clickfleet.serve import launch
from clickfleet.serve.predictor import Version, open_version
from clickfleet.serve.settings import Settings

VALUES = 40_000  # per slot: 26 × 40,000 keys
CHECK = """
local expected = {expected}
function response(status, headers, body)
  local found = tonumber(string.match(body, '{pattern}'))
  local wrong = {binary} == 0 and (found == nil or math.abs(found - expected) > 2e-6)
  if status ~= 200 or wrong or (#tail > 0 and string.sub(body, -#tail) ~= tail) then bad_replies = bad_replies + 1 end
end
local threads = {{}}
function setup(thread) table.insert(threads, thread) end
function done(summary, latency, requests)
  local sum = summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout
  for _, thread in ipairs(threads) do sum = sum + (thread:get("bad_replies") or 0) end
  print("BAD " .. sum .. " P50 " .. latency:percentile(50) .. " P99 " .. latency:percentile(99))
end
"""


@dataclass
class Load:
    """What wrk saw."""

    rate: float
    p50_ms: float
    p99_ms: float
    bad: int
    cpu_us: float = 0.0


def rows(n: int, seed: int = 1) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {f"I{i}": int(rng.integers(0, 500)) for i in range(1, 14)}
        | {f"C{i}": f"{rng.integers(0, VALUES):08x}" for i in range(1, 27)}
        for _ in range(n)
    ]


def learner(name: str = "deepfm") -> Learner:
    """A network 400×3 over a million rows with random weights."""
    config = checked(
        Config, {"model": {"name": name, "hidden": [400, 400, 400]}, "table": {"dim": 10}}, source="benchmark"
    )
    made = Learner(config, preset("criteo"))
    from clickfleet.serve.fields import Fields

    fields = Fields(made.schema)
    rng = np.random.default_rng(3)
    for start in range(0, VALUES, 5000):
        batch = fields.rows([{f"C{s}": f"{v:08x}" for s in range(1, 27)} for v in range(start, start + 5000)])
        slots = np.tile(np.arange(26, dtype=np.uint16), 5000)
        made.table.push(batch.keys, rng.normal(0, 1, (len(batch.keys), 11)).astype(np.float32), slots=slots)
    return made


class Requests:
    """Bodies for wrk, each with the score it must give."""

    def __init__(self, folder: Path, version: Version) -> None:
        self.folder, self.version = folder, version

    def script(
        self,
        name: str,
        path: str,
        body: bytes,
        headers: dict[str, str],
        expected: float,
        pattern: str,
        binary: bool = False,
        tail: bytes = b"",
    ) -> Path:
        """A load for wrk; every reply must have status 200, end with `tail` and, unless `binary`, name the expected number."""
        (self.folder / f"{name}.body").write_bytes(body)
        (self.folder / f"{name}.tail").write_bytes(tail)
        lines = [
            f'wrk.method = "POST"\nwrk.path = "{path}"',
            *(f'wrk.headers["{k}"] = "{v}"' for k, v in headers.items()),
        ]
        lines += [
            f'local file = io.open("{self.folder / name}.body", "rb")\nwrk.body = file:read("*a")\nfile:close()\nbad_replies = 0',
            f'local file = io.open("{self.folder / name}.tail", "rb")\nlocal tail = file:read("*a")\nfile:close()',
        ]
        check = CHECK.format(expected=repr(expected), pattern=pattern, binary=int(binary))
        (self.folder / f"{name}.lua").write_text("\n".join(lines) + check)
        return self.folder / f"{name}.lua"

    def ready(self, n: int, binary: bool = False, path: str = "/v2/models/deepfm/infer") -> Path:
        batch = self.version.fields.rows(rows(n))
        expected = float(self.version.run(batch)["score"][0])
        tensors = [("keys", "UINT64", batch.keys.reshape(n, 26)), ("dense", "FP32", batch.dense)]
        if not binary:
            inputs = [
                {"name": k, "shape": list(v.shape), "datatype": t, "data": v.reshape(-1).tolist()}
                for k, t, v in tensors
            ]
            body = json.dumps({"inputs": inputs, "outputs": [{"name": "score"}]}).encode()
            return self.script(
                f"json{n}{path.count('/')}",
                path,
                body,
                {"Content-Type": "application/json"},
                expected,
                r'"data":%s*%[([%d%.e%-]+)',
            )
        inputs = [
            {"name": k, "shape": list(v.shape), "datatype": t, "parameters": {"binary_data_size": v.nbytes}}
            for k, t, v in tensors
        ]
        head = json.dumps(
            {"inputs": inputs, "outputs": [{"name": "score", "parameters": {"binary_data": True}}]}
        ).encode()
        headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
        body = head + b"".join(v.tobytes() for _, _, v in tensors)
        tail = self.version.run(batch)["score"].tobytes()
        return self.script(f"binary{n}", path, body, headers, 0.0, "x", binary=True, tail=tail)

    def raw(self) -> Path:
        expected = float(self.version.run(self.version.fields.rows(rows(1)))["score"][0])
        body = json.dumps({"rows": rows(1)}).encode()
        return self.script(
            "raw", "/v1/predict", body, {"Content-Type": "application/json"}, expected, r'"scores":%s*%[([%d%.e%-]+)'
        )

    def raw_any(self) -> Path:
        """The same without a check of the score, for a model that changes."""
        body = json.dumps({"rows": rows(1)}).encode()
        return self.script("raw-any", "/v1/predict", body, {"Content-Type": "application/json"}, 0.0, "x", binary=True)

    def rank(self, n: int) -> Path:
        one = rows(1)[0]
        user = {k: one[k] for k in list(one)[:30]}
        candidates = [{"id": i, **{k: row[k] for k in list(row)[30:]}} for i, row in enumerate(rows(n, 2))]
        batch = self.version.fields.rows([{**user, **{k: v for k, v in c.items() if k != "id"}} for c in candidates])
        expected = float(self.version.run(batch)["score"].max())
        body = json.dumps({"user": user, "candidates": candidates, "top_k": 20}).encode()
        return self.script(
            "rank", "/v1/rank", body, {"Content-Type": "application/json"}, expected, r'"score":%s*([%d%.e%-]+)'
        )


def load(url: str, script: Path, connections: int, seconds: float, pid: int | None = None) -> Load:
    before = _cpu(pid)
    command = [
        "wrk",
        "-t1",
        f"-c{connections}",
        f"-d{seconds:g}s",
        "--timeout",
        "10s",
        "--latency",
        "-s",
        str(script),
        url,
    ]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"BAD (\d+) P50 ([\d.]+) P99 ([\d.]+)", text)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    total = re.search(r"(\d+) requests in", text)
    assert found is not None, text
    assert rate is not None, text
    assert total is not None, text
    cpu = 1e6 * (_cpu(pid) - before) / max(1, int(total[1]))
    return Load(float(rate[1]), float(found[2]) / 1e3, float(found[3]) / 1e3, int(found[1]), cpu)


def _cpu(pid: int | None) -> float:
    """CPU seconds a process and those of its group have used: what a busy neighbour changes least."""
    if pid is None:
        return 0.0
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(path.parent.name) == pid or int(fields[2]) == pid:
                total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


@dataclass
class Server:
    url: str
    pid: int
    fleet: launch.Fleet


@contextmanager
def ours(model: Path, **settings: Any) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as state:
        fleet = launch.fleet(Settings(str(model), state, **{"port": 0, "grpc_port": None, **settings}))
        fleet.start()
        watcher = threading.Thread(target=fleet.watch, args=(print,))
        watcher.start()
        try:
            yield Server(fleet.address, int((Path(state) / "ready-0").read_text()), fleet)
        finally:
            fleet.stopping = True
            fleet.stop()
            watcher.join()


FLASK = """
import os, numpy as np, onnxruntime as ort
from flask import Flask, jsonify, request
from clickfleet.published import Entry
from clickfleet.serve.predictor import open_version
version = open_version(Entry(os.environ["ARTIFACT"]))
app = Flask(__name__)
@app.post("/v2/models/deepfm/infer")
def infer():
    given = {t["name"]: t for t in request.get_json()["inputs"]}
    keys = np.array(given["keys"]["data"], np.uint64).reshape(given["keys"]["shape"])
    dense = np.array(given["dense"]["data"], np.float32).reshape(given["dense"]["shape"])
    scores = version.run(version.fields.ready(dense, keys))["score"]
    output = {"name": "score", "datatype": "FP32", "shape": list(scores.shape), "data": scores.tolist()}
    return jsonify({"model_name": "deepfm", "outputs": [output]})
"""

MLSERVER = """
import os, numpy as np
from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput
import onnxruntime as ort
class Model(MLModel):
    async def load(self):
        options = ort.SessionOptions(); options.intra_op_num_threads = 1
        graph = os.environ["ARTIFACT"] + "/dense.onnx"
        self.session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self.table = np.load(os.environ["TABLE"], mmap_mode="r")
        self.row = {int(k): i for i, k in enumerate(np.load(os.environ["KEYS"]))}
        return True
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        given = {t.name: t for t in payload.inputs}
        keys = np.array(list(given["keys"].data), np.uint64).reshape(given["keys"].shape)
        dense = np.array(list(given["dense"].data), np.float32).reshape(given["dense"].shape)
        rows = self.table[[self.row.get(int(k), 0) for k in keys.reshape(-1)]].reshape(*keys.shape, -1)
        first, factors = np.ascontiguousarray(rows[..., 0]), np.ascontiguousarray(rows[..., 1:])
        scores = self.session.run(["score"], {"dense": dense, "first": first, "factors": factors})[0]
        output = ResponseOutput(name="score", datatype="FP32", shape=list(scores.shape), data=scores.tolist())
        return InferenceResponse(model_name=self.name, outputs=[output])
"""


@contextmanager
def process(command: list[str], url: str, env: dict[str, str], cwd: Path) -> Iterator[int]:
    import urllib.error
    import urllib.request

    log = (cwd / "server.log").open("wb")
    child = subprocess.Popen(
        command, env={**os.environ, **env}, cwd=cwd, stdout=log, stderr=log, start_new_session=True
    )
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(url, timeout=1)
                break
            except urllib.error.HTTPError:
                break
            except OSError:
                if child.poll() is not None:
                    raise RuntimeError((cwd / "server.log").read_text()) from None
                time.sleep(0.1)
        yield child.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        child.wait(20)


def median(values: list[float]) -> float:
    return statistics.median(values)


class Benchmark:
    def __init__(self, folder: Path, seconds: float, rounds: int, mlserver: str | None) -> None:
        self.folder, self.seconds, self.rounds, self.mlserver = folder, seconds, rounds, mlserver
        self.model = learner()
        self.graph = Graph(self.model.model, self.model.shape)
        self.artifact = folder / "artifact"
        exporting.export(self.model, self.artifact, 1)
        self.version = open_version(Entry(self.artifact))
        self.requests = Requests(folder, self.version)
        self.results: dict[str, Any] = {}

    def say(self, name: str, value: float, target: str) -> None:
        self.results[name] = round(value, 4)
        print(f"{name:58s} {value:10.3f}   {target}", flush=True)

    def rounds_of(self, **sides: Callable[[], Load]) -> dict[str, Load]:
        """Sides by turns; the medians of each."""
        found: dict[str, list[Load]] = {name: [] for name in sides}
        for _ in range(self.rounds):
            for name, run in sides.items():
                found[name].append(run())
        for name, loads in found.items():
            bad = sum(one.bad for one in loads)
            if bad and name in ("flask", "mlserver"):
                print(f"{name}: {bad} replies were wrong or missing", flush=True)
            else:
                assert bad == 0, f"{name}: {bad} replies were wrong or missing"
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
        """One candidate, JSON, 16 connections, one worker."""
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
        self.say("one candidate, JSON, 16 connections: requests/s", found["ours"].rate, "")
        self.say("  CPU of the worker per request, µs", found["ours"].cpu_us, "")
        self.say("  p50 ms", found["ours"].p50_ms, "")
        self.say("  p99 ms", found["ours"].p99_ms, "")
        self.say("  over gunicorn + Flask + ONNX Runtime", found["ours"].rate / found["flask"].rate, "≥ 6")
        self.say("    its CPU per request over ours", found["flask"].cpu_us / found["ours"].cpu_us, "")
        if "mlserver" in found:
            self.say("  over MLServer", found["ours"].rate / found["mlserver"].rate, "≥ 5")
            self.say("    its CPU per request over ours", found["mlserver"].cpu_us / found["ours"].cpu_us, "")
        self.say("  one connection: p50 ms", found["idle"].p50_ms, "≤ 0.45")
        self.say("  raw features against ready keys (rate)", found["ours"].rate / found["raw"].rate, "≤ 1.5")
        self.say("  raw features against ready keys (CPU)", found["raw"].cpu_us / found["ours"].cpu_us, "≤ 1.5")

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
        """A hundred candidates as binary tensors, against ONNX Runtime and the table in a loop."""
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
        self.say("100 candidates, binary: requests/s", found["ours"].rate, "")
        self.say("  of ONNX Runtime and the table alone", found["ours"].rate / found["loop"].rate, "≥ 0.7")
        self.say("  one connection: p50 ms", found["idle"].p50_ms, "≤ 2")

    def rank(self) -> None:
        with ours(self.artifact) as server:
            body = self.requests.rank(200)
            found = self.rounds_of(ours=lambda: load(server.url, body, 1, self.seconds))
        self.say("rank 200 candidates, one connection: p50 ms", found["ours"].p50_ms, "")
        self.say("  p99 ms", found["ours"].p99_ms, "≤ 5")

    def batching(self) -> None:
        body = self.requests.ready(1)
        with ours(self.artifact) as merged, ours(self.artifact, batching=False) as alone:
            found = self.rounds_of(
                merged=lambda: load(merged.url, body, 64, self.seconds, merged.pid),
                alone=lambda: load(alone.url, body, 64, self.seconds, alone.pid),
            )
        self.say("64 connections, micro-batches: requests/s", found["merged"].rate, "")
        self.say("  over the same without (rate)", found["merged"].rate / found["alone"].rate, "≥ 2.3")
        self.say("  over the same without (CPU per request)", found["alone"].cpu_us / found["merged"].cpu_us, "")
        self.say("  p99 ms", found["merged"].p99_ms, "≤ 20")

    def workers(self) -> None:
        body = self.requests.ready(1)
        with ours(self.artifact) as one, ours(self.artifact, workers=2) as two:
            found = self.rounds_of(
                one=lambda: load(one.url, body, 32, self.seconds), two=lambda: load(two.url, body, 32, self.seconds)
            )
        self.say("two workers over one, 32 connections", found["two"].rate / found["one"].rate, "≥ 1.2")

    def start(self) -> None:
        """Opening a million rows, and how long a delta of a million takes to be live."""
        for kind in ("mapped", "memory"):
            begin = time.perf_counter()
            open_version(Entry(self.artifact), rows=kind)  # type: ignore[arg-type]
            self.say(
                f"open {self.version.identity.rows:,} rows, {kind}: s",
                time.perf_counter() - begin,
                "≤ 0.5" if kind == "mapped" else "≤ 3",
            )
        log = Deltas(self, self.folder / "start-log")
        begin = time.perf_counter()
        with ours(log.folder) as server:
            self.say("server ready, processes included: s", time.perf_counter() - begin, "")
            with Client(server.url) as client:
                entry = log.publish(1_000_000)
                begin = time.perf_counter()
                while client.model()["sequence"] != entry.sequence:
                    time.sleep(0.01)
                self.say("a delta of 1,000,000 rows live after: s", time.perf_counter() - begin, "≤ 2")

    def updates(self, seconds: float | None = None) -> None:
        """Open loop at 30% of capacity, with and without deltas of 100,000 rows a second."""
        seconds = seconds or max(10.0, 4 * self.seconds)
        log = Deltas(self, self.folder / "log")
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
        self.say(
            f"open loop at 30% of {capacity:.0f}/s: p99 ms without deltas", median([run.p99_ms for run in quiet]), ""
        )
        self.say(
            "  p99 with deltas over without",
            median([b.p99_ms / q.p99_ms for b, q in zip(busy, quiet, strict=True)]),
            "≤ 1.5",
        )
        self.say("  failed replies", sum(run.failed for run in (*quiet, *busy)), "0")
        self.say("  mixed replies", wrong, "0")
        self.say("  sequences seen", len({sequence for sequence, _ in replies}), "")

    def soak(self, seconds: float = 600.0) -> None:
        """80% load for long: memory and errors; a worker killed on the way."""
        body = self.requests.ready(1)
        with ours(self.artifact) as server:
            load(server.url, body, 16, 5)
            memory = _memory(server.pid)
            found = load(server.url, body, 8, seconds, server.pid)
            self.say("soak: requests/s", found.rate, "")
            self.say("  wrong or missing replies", found.bad, "0")
            self.say("  growth of memory", _memory(server.pid) / memory - 1, "≤ 0.02")
        with ours(self.artifact, workers=2) as server:
            mark = Path(server.fleet.settings.state) / "ready-0"
            mark.unlink()
            os.kill(server.pid, signal.SIGKILL)
            begin = time.perf_counter()
            while not mark.exists():
                time.sleep(0.01)
            self.say("a killed worker is back after: s", time.perf_counter() - begin, "≤ 2")


def _memory(pid: int) -> int:
    return int(re.search(r"Rss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text())[1])  # type: ignore[index]


class Deltas:
    """A published log whose deltas hold random rows; remembers what a row must score at every sequence."""

    def __init__(self, benchmark: Benchmark, folder: Path) -> None:
        self.of, self.folder = benchmark, folder
        shutil.rmtree(folder, ignore_errors=True)
        self.log = published.Log(folder)
        self.content = exporting.content(benchmark.model, benchmark.graph, 1)
        changes = benchmark.model.table.cut_changes(base=True)
        try:
            self.log.append(changes, self.content)
        finally:
            changes.abort()
        fields = benchmark.version.fields
        everything = fields.rows([{f"C{s}": f"{v:08x}" for s in range(1, 27)} for v in range(VALUES)])
        self.keys, self.slots = everything.keys, np.tile(np.arange(26, dtype=np.uint16), VALUES)
        hashes = np.empty_like(self.keys)
        from clickfleet import _core

        _core.mix64(self.keys, hashes)
        order = np.argsort(hashes)
        self.keys, self.slots = self.keys[order], self.slots[order]
        self.rng = np.random.default_rng(9)
        self.scores: dict[int, float] = {}

    def publish(self, n: int) -> Entry:
        chosen = np.sort(self.rng.permutation(len(self.keys))[:n])

        class Some:
            base = False
            deleted = np.empty(0, np.uint64)

            def __init__(self, outer: Deltas) -> None:
                self.outer = outer

            def __iter__(self) -> Iterator[dict[str, Any]]:
                weights = self.outer.rng.normal(0, 0.05, (len(chosen), 11)).astype(np.float32)
                yield {
                    "full": True,
                    "key": self.outer.keys[chosen],
                    "slot": self.outer.slots[chosen],
                    "embed_w": np.ascontiguousarray(weights[:, 0]),
                    "embedx": np.ascontiguousarray(weights[:, 1:]).reshape(-1),
                }

        return self.log.append(Some(self), self.content)

    def publish_every(self, period: float, n: int, stop: threading.Event) -> None:
        while not stop.is_set():
            begin = time.monotonic()
            self.publish(n)
            stop.wait(max(0.0, period - (time.monotonic() - begin)))

    def score(self, sequence: int, row: list[dict[str, Any]]) -> float:
        """Offline: the base and the deltas up to a sequence."""
        if sequence not in self.scores:
            lines = [line for line in self.log.lines() if line.sequence <= sequence]
            entries = [self.log.entry(line) for line in lines]
            stack = [str(entry.path) for entry in reversed(entries)]
            version = open_version(entries[-1], stack)
            self.scores[sequence] = float(version.run(version.fields.rows(row))["score"][0])
        return self.scores[sequence]


@dataclass
class Open:
    p50_ms: float
    p99_ms: float
    failed: int
    replies: list[list[Any]]


def open_loop(url: str, body: Path, rate: float, seconds: float) -> Open:
    """From a process of its own: what publishes here must not delay who measures."""
    client = Path(__file__).parent / "_open_loop.py"
    command = [sys.executable, str(client), url, str(body), str(rate), str(seconds)]
    return Open(**json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


PARTS = ("one", "hundred", "rank", "batching", "workers", "start", "updates")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "soak", []], default=[])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--mlserver", default=shutil.which("mlserver"), help="the mlserver program, perhaps of another environment"
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
