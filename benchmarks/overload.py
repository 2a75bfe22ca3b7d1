"""Measure overload: successful replies per second at the best number of connections, and at four times as many.

    python benchmarks/overload.py              JSON rows, ready keys as JSON, ready keys as binary tensors
    python benchmarks/overload.py rows         one of them: rows json binary
    --rows 500 --seconds 3 --rounds 3 --queue-ms 50 --json

wrk runs in a separate process and retries immediately when a request is rejected, like the worst clients. Goodput counts only correct
replies. All ratios come from one run.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _deltas import learner
from _loads import Requests, rows
from _servers import ours
from clickfleet.serve.predictor import open_version
from clickfleet.store.published import Entry
from clickfleet.training import export

CONNECTIONS = (4, 16)
TIMES = 4


def goodput(url: str, script: Path, connections: int, seconds: float) -> tuple[float, float]:
    """Return correct replies and rejections per second."""
    command = [
        "wrk",
        "-t1",
        f"-c{connections}",
        f"-d{seconds:g}s",
        "--timeout",
        "20s",
        "--latency",
        "-s",
        str(script),
        url,
    ]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    total, took = re.search(r"(\d+) requests in ([\d.]+)s", text), re.search(r"BAD (\d+)", text)
    assert total is not None, text
    assert took is not None, text
    asked, bad, span = int(total[1]), int(took[1]), float(total[2])
    return max(0, asked - bad) / span, min(asked, bad) / span


def scripts(requests: Requests, n: int) -> dict[str, Path]:
    body = json.dumps({"rows": rows(n)}).encode()
    batch = requests.version.fields.rows(rows(n))
    expected = float(requests.version.run(batch)["score"][0])
    pattern = r'"scores":%s*%[([%d%.e%-]+)'
    return {
        "rows": requests.script("many", "/v1/predict", body, {"Content-Type": "application/json"}, expected, pattern),
        "json": requests.ready(n),
        "binary": requests.ready(n, binary=True),
    }


def measure(artifact: Path, script: Path, given: Any) -> dict[str, float]:
    """Alternate between several numbers of connections and four times the largest of them."""
    peaks: dict[int, list[float]] = {n: [] for n in CONNECTIONS}
    over: list[tuple[float, float]] = []
    with ours(artifact, max_queue_ms=given.queue_ms) as server:
        for _ in range(given.rounds):
            for n in CONNECTIONS:
                peaks[n].append(goodput(server.url, script, n, given.seconds)[0])
            over.append(goodput(server.url, script, TIMES * max(CONNECTIONS), given.seconds))
    best = {n: statistics.median(found) for n, found in peaks.items()}
    peak, good = max(best.values()), statistics.median(one[0] for one in over)
    return {"peak": peak, "over": good, "refused": statistics.median(one[1] for one in over), "ratio": good / peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], help="rows json binary")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--queue-ms", type=float, default=50.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed: apt-get install wrk")
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export.export(learner(), folder / "artifact", 1)
        made = scripts(Requests(folder, open_version(Entry(folder / "artifact"))), given.rows)
        for part in given.parts or made:
            found = results[part] = measure(folder / "artifact", made[part], given)
            text = f"{found['peak']:.0f} replies/s at the peak, {found['over']:.0f} at {TIMES} × 16 connections"
            print(f"{part:8s} {text}, {found['refused']:.0f} rejections/s: {found['ratio']:.2f}   ≥ 0.8", flush=True)
    if given.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
