"""Measure what the show log costs a reply: latency and CPU of one server with a log and one without, in alternation.

    python benchmarks/showlog.py               one row, 100 candidates
    python benchmarks/showlog.py rank          one of them: predict rank
    --rounds 9 --seconds 4 --share 0.3 --json

The load is an open loop at a fixed share of the capacity, sent by another process. Every round measures both servers, one after the other,
and the order alternates. Ratios are medians over the rounds. Every scored row must be in the log: its files are counted afterwards.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa

from _deltas import learner
from _loads import cpu_of, load, open_loop, rows
from _servers import ours
from clickfleet.training import export

USER = [f"I{i}" for i in range(1, 14)] + [f"C{i}" for i in range(1, 14)]
"""Features of the user in a ranking request; the others are those of candidates."""


def rank_body(candidates: int) -> dict[str, Any]:
    user = {name: value for name, value in rows(1)[0].items() if name in USER}
    some = [{name: value for name, value in row.items() if name not in USER} for row in rows(candidates, 2)]
    return {"user": user, "candidates": [{"id": f"ad-{i}", **row} for i, row in enumerate(some)], "top_k": 20}


def logged(folder: Path) -> int:
    return sum(pa.ipc.open_file(str(path)).read_all().num_rows for path in folder.glob("*/*.arrow"))


def measure(name: str, artifact: Path, folder: Path, given: Any) -> dict[str, float]:
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
    shows = folder / f"shows-{name}"
    results: dict[str, list[Any]] = {"plain": [], "logged": []}
    cpu: dict[str, list[float]] = {"plain": [], "logged": []}
    with ours(artifact) as plain, ours(artifact, log=str(shows)) as logging:
        servers = {"plain": plain, "logged": logging}
        capacity = load(plain.url + route, script, 16, given.seconds).rate
        rate = given.share * capacity
        for server in servers.values():
            open_loop(server.url, body, rate, 1.0, route)
        for number in range(given.rounds):
            for kind in ("plain", "logged") if number % 2 else ("logged", "plain"):
                before = cpu_of(servers[kind].pid)
                run = open_loop(servers[kind].url, body, rate, given.seconds, route)
                assert not run.failed, run.failed
                results[kind].append(run)
                cpu[kind].append(1e6 * (cpu_of(servers[kind].pid) - before) / len(run.replies))
        counts = httpx.get(f"{logging.url}/v1/stats").json()["counts"]
    found = logged(shows)
    median = statistics.median
    ratio = {
        what: median(
            getattr(b, what) / getattr(a, what) for a, b in zip(results["plain"], results["logged"], strict=True)
        )
        for what in ("p50_ms", "p99_ms")
    }
    return {
        "rate": rate,
        "p50_ms": median(run.p50_ms for run in results["plain"]),
        "p99_ms": median(run.p99_ms for run in results["plain"]),
        "p99_logged_ms": median(run.p99_ms for run in results["logged"]),
        "p50_ratio": ratio["p50_ms"],
        "p99_ratio": ratio["p99_ms"],
        "cpu_ratio": median(b / a for a, b in zip(cpu["plain"], cpu["logged"], strict=True)),
        "missing_rows": counts["rows"] - found,
        "bytes_per_row": sum(path.stat().st_size for path in shows.glob("*/*.arrow")) / max(1, found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], help="predict rank")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--share", type=float, default=0.3, help="share of the capacity")
    parser.add_argument("--candidates", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed: apt-get install wrk")
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export.export(learner(), folder / "artifact", 1)
        for part in given.parts or ("predict", "rank"):
            found = results[part] = measure(part, folder / "artifact", folder, given)
            print(
                f"{part:8s} {found['rate']:.0f} requests/s: p50 {found['p50_ms']:.2f} ms, p99 {found['p99_ms']:.2f} ms; "
                f"with the log p50 ×{found['p50_ratio']:.3f}, p99 ×{found['p99_ratio']:.3f}   ≤ 1.05; "
                f"CPU ×{found['cpu_ratio']:.3f}; {found['missing_rows']:.0f} rows missing, "
                f"{found['bytes_per_row']:.0f} bytes per row",
                flush=True,
            )
    if given.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
