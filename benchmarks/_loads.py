"""Load generators for servers: wrk with every reply checked, and an open-loop client."""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clickfleet.serve.predictor import Version

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
    """The results of a wrk run."""

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


class Requests:
    """Request bodies for wrk, each with its expected score."""

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
        """Write a wrk script. Every reply must have status 200, end with `tail` and, unless `binary`, contain the expected score."""
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
        """Like `raw`, but without checking the score, for a model that changes."""
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
    before = cpu_of(pid)
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
    cpu = 1e6 * (cpu_of(pid) - before) / max(1, int(total[1]))
    return Load(float(rate[1]), float(found[2]) / 1e3, float(found[3]) / 1e3, int(found[1]), cpu)


def cpu_of(pid: int | None) -> float:
    """Return the CPU seconds used by a process and its group. Other load on the machine affects them least."""
    if pid is None:
        return 0.0
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(path.parent.name) == pid or int(fields[2]) == pid:
                total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> int:
    """Return the resident memory of a process in kB."""
    return int(re.search(r"Rss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text())[1])  # type: ignore[index]


@dataclass
class Open:
    p50_ms: float
    p99_ms: float
    failed: int
    replies: list[list[Any]]
    times_ms: list[float]
    """Latency of every reply, from the time at which its request was due."""
    served_ms: list[float]
    """The same from sending until the reply is in the kernel: without the delays of a client that shares cores with the server."""


def open_loop(url: str, bodies: Path, rate: float, seconds: float, route: str = "/v1/predict") -> Open:
    """Run the open-loop client in a separate process, so that publishing here does not delay its measurements."""
    client = Path(__file__).parent / "_open_loop.py"
    command = [sys.executable, str(client), url, str(bodies), str(rate), str(seconds), route]
    return Open(**json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
