"""Measure what the show log costs a reply: latency and CPU of a server with a log and of two without one, in alternation.

    python benchmarks/showlog.py               one row, 100 candidates
    python benchmarks/showlog.py rank          one of them: predict rank
    --seconds 60 --starts 3 --shares 0.1 0.2 0.3 --candidates 100 --every 0.1 --json

The load is an open loop at fixed shares of what wrk reaches. Its client has a core of its own, and all processes of the servers have the
others: what the recorder does is not at the expense of a client that would be on another machine. Latency counts from the call that sends a
request until its reply is in the kernel (`served_ms` in _open_loop.py).

wrk's requests are scored in batches; those of an open loop come one by one and cost twice as much, so at a share of 0.4 the worker is busy
nearly all the time.

The servers are asked in slices of a second or more, in turn. p50 and p99 are those of a slice, and their median over the slices is given:
a disturbance from outside costs some slices and not the figure. The p99 of all requests is given too: it has what happens in few slices.
Two equal servers may differ by a tenth for as long as they live, so all are started several times. Ratios have an interval of 90% (slices
drawn anew, 2000 times). The ratio of the two servers without a log shows what such a figure is worth. Every row of every reply must be in
the log, once.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa

from _deltas import learner
from _loads import cpu_of, load, open_loop, rows
from _servers import Server, ours
from clickfleet.serve.supervisor import LOG_EVERY_S
from clickfleet.training import export

USER = [f"I{i}" for i in range(1, 14)] + [f"C{i}" for i in range(1, 14)]
"""Features of the user in a ranking request; the others are those of candidates."""
BODIES = 200
"""Different requests: a log of equal ones would be easy to compress."""
SLICE_S, SLICE_REQUESTS = 1.0, 200
"""How long one server is asked before the next, and for how many requests at least."""
DRAWS = 2000


def predict_body(number: int) -> dict[str, Any]:
    return {"rows": rows(1, number)}


def rank_body(number: int, candidates: int) -> dict[str, Any]:
    user = {name: value for name, value in rows(1, number)[0].items() if name in USER}
    some = [
        {name: value for name, value in row.items() if name not in USER} for row in rows(candidates, BODIES + number)
    ]
    return {"user": user, "candidates": [{"id": f"ad-{i}", **row} for i, row in enumerate(some)], "top_k": 20}


def logged(folder: Path) -> Counter[tuple[str, str]]:
    """Return how often each row is in the log, by request and item."""
    found: Counter[tuple[str, str]] = Counter()
    for path in folder.glob("*/*.arrow"):
        table = pa.ipc.open_file(str(path)).read_all()
        found.update(zip(table["request"].to_pylist(), table["item"].to_pylist(), strict=True))
    return found


@contextmanager
def servers_apart() -> Iterator[None]:
    """Start processes on all cores but one, which is that of the clients afterwards. A single core is shared."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:-1] or cores)
    yield
    os.sched_setaffinity(0, cores[-1:])


class Kind:
    """What was measured of one server: p50 and p99 of each slice, and its CPU time."""

    server: Server
    """The one that is running now."""

    def __init__(self, bodies: Path, route: str) -> None:
        self.bodies, self.route = bodies, route
        self.replies = self.failed = 0
        self.slices: list[list[float]] = []
        self._served_ms: list[float] = []
        self._cpu_s = 0.0

    def run(self, rate: float, seconds: float, warm_up: bool = False) -> None:
        before = self._cpu()
        run = open_loop(self.server.url, self.bodies, rate, seconds, self.route)
        self.failed += run.failed
        self.replies += len(run.replies)
        if not warm_up:
            self._cpu_s += self._cpu() - before
            self._served_ms += run.served_ms
            self.slices.append([float(value) for value in np.percentile(run.served_ms, [50, 99])])

    def _cpu(self) -> float:
        """Return the CPU seconds of all processes of the server, the recorder among them."""
        children = self.server.fleet.children.values()
        return sum(cpu_of(child.process.pid) for child in children if child.process is not None)

    def against(self, other: "Kind") -> dict[str, float]:
        """Return the ratios of this server's figures to those of another one."""
        own, base = np.array(self.slices), np.array(other.slices)
        rng = np.random.default_rng(0)
        drawn = [rng.integers(0, len(own), len(own)) for _ in range(DRAWS)]
        of_p99 = [np.median(own[some, 1]) / np.median(base[some, 1]) for some in drawn]
        p50, p99 = (np.median(own, 0) / np.median(base, 0)).tolist()
        least, most = np.percentile(of_p99, [5, 95]).tolist()
        p99_all = float(np.percentile(self._served_ms, 99) / np.percentile(other._served_ms, 99))
        interval = {"p99_least": least, "p99_most": most}
        return {"p50": p50, "p99": p99, **interval, "p99_all": p99_all, "cpu": self._cpu_s / other._cpu_s}


def text_of(ratios: dict[str, float]) -> str:
    interval = f"{ratios['p99_least']:.3f} to {ratios['p99_most']:.3f}"
    return f"p50 ×{ratios['p50']:.3f}, p99 ×{ratios['p99']:.3f} ({interval}), of all requests ×{ratios['p99_all']:.3f}"


def measure(name: str, artifact: Path, folder: Path, share: float, given: Any) -> dict[str, Any]:
    route = "/v1/predict" if name == "predict" else "/v1/rank"
    made = [predict_body(i) if name == "predict" else rank_body(i, given.candidates) for i in range(BODIES)]
    bodies = folder / f"{name}.jsonl"
    bodies.write_text("".join(f"{json.dumps(body)}\n" for body in made))
    script = folder / f"{name}.lua"
    text = json.dumps(made[0]).replace("\\", "\\\\").replace("'", "\\'")
    script.write_text(
        f"wrk.method = 'POST'\nwrk.body = '{text}'\nwrk.headers['Content-Type'] = 'application/json'\n"
        "function done(summary, latency)\n"
        "print('BAD 0 P50 ' .. latency:percentile(50) .. ' P99 ' .. latency:percentile(99))\nend\n"
    )
    cores = os.sched_getaffinity(0)
    plain, again, log = kinds = [Kind(bodies, route) for _ in range(3)]
    found, rate, dropped, size = Counter[tuple[str, str]](), 0.0, 0, 0
    for start in range(given.starts):
        shows = folder / f"shows-{name}-{share}-{start}"
        try:
            with ExitStack() as stack:
                with servers_apart():
                    settings: list[dict[str, Any]] = [{}, {}, {"log": str(shows), "log_every_s": given.every}]
                    for kind, some in zip(kinds, settings, strict=True):
                        kind.server = stack.enter_context(ours(artifact, **some))
                rate = rate or share * load(plain.server.url + route, script, 16, 2.0).rate
                seconds = max(SLICE_S, SLICE_REQUESTS / rate)
                for kind in kinds:
                    kind.run(rate, seconds, warm_up=True)
                for number in range(max(5, round(given.seconds / given.starts / seconds))):
                    for place in range(3):
                        kinds[(number + place) % 3].run(rate, seconds)
                counts = httpx.get(f"{log.server.url}/v1/stats").json()["counts"]
        finally:
            os.sched_setaffinity(0, cores)
        dropped += counts.get("shows_dropped", 0)
        size += sum(path.stat().st_size for path in shows.glob("*/*.arrow"))
        found += logged(shows)
    expected = log.replies * (1 if name == "predict" else given.candidates)
    p50, p99 = np.median(np.array(plain.slices), 0).tolist()
    return {
        "rate": rate,
        "slices": len(plain.slices),
        "p50_ms": p50,
        "p99_ms": p99,
        "again": again.against(plain),
        "log": log.against(plain),
        "failed": sum(kind.failed for kind in kinds),
        "missing_rows": expected - len(found),
        "doubled_rows": found.total() - len(found),
        "dropped_rows": dropped,
        "bytes_per_row": size / max(1, found.total()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], help="predict rank")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load, for each server")
    parser.add_argument("--starts", type=int, default=3, help="of the servers, for each load")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.1, 0.2, 0.3], help="of what wrk reaches")
    parser.add_argument("--candidates", type=int, default=100)
    parser.add_argument("--every", type=float, default=LOG_EVERY_S, help="seconds between two writes of the log")
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
                f"{part:8s} {found['rate']:.0f} requests/s, {found['slices']} slices: p50 {found['p50_ms']:.2f} ms, p99 "
                f"{found['p99_ms']:.2f} ms; with the log {text_of(found['log'])}   ≤ 1.05; CPU ×{found['log']['cpu']:.3f}; "
                f"another server without it {text_of(found['again'])}; {found['failed']} requests failed; rows missing "
                f"{found['missing_rows']:.0f}, doubled {found['doubled_rows']:.0f}, dropped {found['dropped_rows']:.0f}; "
                f"{found['bytes_per_row']:.0f} bytes per row",
                flush=True,
            )
    if given.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
