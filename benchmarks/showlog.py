"""Measure what the show log costs a reply: latency and CPU of one server with a log and one without, in alternation.

    python benchmarks/showlog.py               one row, 100 candidates
    python benchmarks/showlog.py rank          one of them: predict rank
    --rounds 5 --requests 20000 --seconds 20 --shares 0.1 0.2 0.3 --json
    --control                                  neither server has a log: how far two equal servers differ

The load is an open loop at fixed shares of what wrk reaches, sent by another process. wrk's requests are scored in batches; those of an
open loop come one by one and cost twice as much, so at a share of 0.4 the worker is busy nearly all the time. A round sends so many
requests to each server, or as many as fit its seconds, in slices of two seconds: one server, then the other. Ratios are those of a round,
and their median is printed. The figures are p50 and p99 of all replies of a server in a round. Every row of every reply must be in the
log, once.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa

from _deltas import learner
from _loads import cpu_of, load, open_loop, rows
from _servers import Server, ours
from clickfleet.training import export

USER = [f"I{i}" for i in range(1, 14)] + [f"C{i}" for i in range(1, 14)]
"""Features of the user in a ranking request; the others are those of candidates."""
SLICE_S = 2.0
"""How long one server is asked before the other."""


def rank_body(candidates: int) -> dict[str, Any]:
    user = {name: value for name, value in rows(1)[0].items() if name in USER}
    some = [{name: value for name, value in row.items() if name not in USER} for row in rows(candidates, 2)]
    return {"user": user, "candidates": [{"id": f"ad-{i}", **row} for i, row in enumerate(some)], "top_k": 20}


def logged(folder: Path) -> Counter[tuple[str, str]]:
    """Return how often each row is in the log, by request and item."""
    found: Counter[tuple[str, str]] = Counter()
    for path in folder.glob("*/*.arrow"):
        table = pa.ipc.open_file(str(path)).read_all()
        found.update(zip(table["request"].to_pylist(), table["item"].to_pylist(), strict=True))
    return found


class Kind:
    """What was measured of one server: all latencies of each round, and its CPU time."""

    def __init__(self, server: Server, body: Path, route: str) -> None:
        self.server, self.body, self.route = server, body, route
        self.replies = self.failed = 0
        self.rounds: list[list[float]] = []
        self.cpu: list[float] = []
        self._cpu_s = 0.0

    def begin(self) -> None:
        self.rounds.append([])
        self._cpu_s = 0.0

    def run(self, rate: float, seconds: float) -> None:
        before = self._cpu()
        run = open_loop(self.server.url, self.body, rate, seconds, self.route)
        self.failed += run.failed
        self._cpu_s += self._cpu() - before
        self.replies += len(run.replies)
        if self.rounds:
            self.rounds[-1] += run.times_ms

    def _cpu(self) -> float:
        """Return the CPU seconds of all processes of the server, the recorder among them."""
        children = self.server.fleet.children.values()
        return sum(cpu_of(child.process.pid) for child in children if child.process is not None)

    def end(self) -> None:
        self.cpu.append(1e6 * self._cpu_s / len(self.rounds[-1]))

    def percentiles(self, percent: float) -> list[float]:
        return [float(np.percentile(times, percent)) for times in self.rounds]


def measure(name: str, artifact: Path, folder: Path, share: float, given: Any) -> dict[str, float]:
    route = "/v1/predict" if name == "predict" else "/v1/rank"
    body = folder / f"{name}.json"
    body.write_text(json.dumps({"rows": rows(1)} if name == "predict" else rank_body(given.candidates)))
    script = folder / f"{name}.lua"
    text = body.read_text().replace("\\", "\\\\").replace("'", "\\'")
    script.write_text(
        f"wrk.method = 'POST'\nwrk.body = '{text}'\nwrk.headers['Content-Type'] = 'application/json'\n"
        "function done(summary, latency)\n"
        "print('BAD 0 P50 ' .. latency:percentile(50) .. ' P99 ' .. latency:percentile(99))\nend\n"
    )
    shows = folder / f"shows-{name}-{share}"
    with ours(artifact) as without, ours(artifact, **({} if given.control else {"log": str(shows)})) as logging:
        plain, log = Kind(without, body, route), Kind(logging, body, route)
        rate = share * load(without.url + route, script, 16, 2.0).rate
        for kind in (plain, log):
            kind.run(rate, 1.0)
        slices = max(1, round(min(given.requests / rate, given.seconds) / SLICE_S))
        for _ in range(given.rounds):
            for kind in (plain, log):
                kind.begin()
            for number in range(slices):
                for kind in (plain, log) if number % 2 else (log, plain):
                    kind.run(rate, SLICE_S)
            for kind in (plain, log):
                kind.end()
        counts = httpx.get(f"{logging.url}/v1/stats").json()["counts"]
    found = logged(shows)
    expected = 0 if given.control else log.replies * (1 if name == "predict" else given.candidates)

    def ratio(of_plain: list[float], of_log: list[float]) -> list[float]:
        return [b / a for a, b in zip(of_plain, of_log, strict=True)]

    ratios = ratio(plain.percentiles(99), log.percentiles(99))
    median = statistics.median
    return {
        "rate": rate,
        "requests": len(log.rounds[0]),
        "p50_ms": median(plain.percentiles(50)),
        "p99_ms": median(plain.percentiles(99)),
        "p99_logged_ms": median(log.percentiles(99)),
        "p50_ratio": median(ratio(plain.percentiles(50), log.percentiles(50))),
        "p99_ratio": median(ratios),
        "p99_ratio_least": min(ratios),
        "p99_ratio_most": max(ratios),
        "cpu_ratio": median(ratio(plain.cpu, log.cpu)),
        "failed": plain.failed + log.failed,
        "missing_rows": expected - len(found),
        "doubled_rows": found.total() - len(found),
        "dropped_rows": counts.get("shows_dropped", 0),
        "bytes_per_row": sum(path.stat().st_size for path in shows.glob("*/*.arrow")) / max(1, found.total()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], help="predict rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20_000, help="of a round, to each server")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a round at most, for each server")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.1, 0.2, 0.3], help="of what wrk reaches")
    parser.add_argument("--control", action="store_true", help="compare two servers without a log")
    parser.add_argument("--candidates", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed: apt-get install wrk")
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export.export(learner(), folder / "artifact", 1)
        for part, share in product(given.parts or ("predict", "rank"), given.shares):
            found = results[f"{part}_{share:g}"] = measure(part, folder / "artifact", folder, share, given)
            print(
                f"{part:8s} {found['rate']:.0f} requests/s, rounds of {found['requests']:,}: p50 {found['p50_ms']:.2f} ms, "
                f"p99 {found['p99_ms']:.2f} ms; {'again' if given.control else 'with the log'} p50 ×{found['p50_ratio']:.3f}, "
                f"p99 ×{found['p99_ratio']:.3f} ({found['p99_ratio_least']:.3f} to {found['p99_ratio_most']:.3f})   ≤ 1.05; "
                f"CPU ×{found['cpu_ratio']:.3f}; "
                f"{found['failed']} requests failed; rows missing {found['missing_rows']:.0f}, doubled {found['doubled_rows']:.0f}, "
                f"dropped {found['dropped_rows']:.0f}; {found['bytes_per_row']:.0f} bytes per row",
                flush=True,
            )
    if given.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
