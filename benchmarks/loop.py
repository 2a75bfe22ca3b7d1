"""Follow clicks from the moment of feedback to the first served reply whose score has learned them, through a whole loop.

python benchmarks/loop.py [--rates 1000 5000] [--seconds 20] [--pass 0.2] [--wait 5] [--picture FILE.svg] [--json]

`clickfleet loop` (DeepFM 400×3, 13 dense columns, 26 slots with about a million possible keys, all other settings their defaults), a
client that ranks ten candidates per request and sends clicks as feedback, and a probe share this machine. An event is a show or a click.
A fifth of the shows is clicked, after half a second on average; the others are learned as negatives after `wait`.

Each click is followed on its own. The rows of every pass are kept, so the entry that has learned a click is known exactly. The probe asks
for one row every 5 ms, and the reply names its entry. The click is served when the first reply of that entry, or a later one, arrives,
and the score of the probe must differ from that of the entry before.

    join     from the moment the client sends the click until its row is in a complete pass: the feedback log, the join, half of a pass
    train    until the pass is trained on; it waits for the pass before it
    publish  until the manifest of the entry is complete
    follow   until the first reply of that entry

Shows must neither be lost nor learned twice, or there is no figure.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clickfleet.data.schema import Dense, Schema, Slot, Transform, write_schema
from clickfleet.online.feedback_loop import PASS_S, FeedbackLoop

DENSE, SLOTS, VALUES, USER_SLOTS = 13, 26, 40_000, 13
SCHEMA = Schema(
    dense=tuple(Dense(f"I{i}", Transform("log1p")) for i in range(1, DENSE + 1)),
    slots=tuple(Slot(f"C{i}") for i in range(1, SLOTS + 1)),
    label="click",
)
CANDIDATES, CLICK_SHARE, DELAY_S = 10, 0.2, 0.5
PROBE_S = 0.005
CONNECTIONS = 8
STAGES = ("join", "train", "publish", "follow")


def settings(folder: Path, pass_s: float, wait_s: float) -> dict[str, Any]:
    write_schema(SCHEMA, folder / "schema.yaml")
    join = {"shows": str(folder / "shows"), "feedback": str(folder / "feedback"), "wait": f"{wait_s}s"}
    return {
        "data": {"schema": str(folder / "schema.yaml")},
        "model": {"name": "deepfm", "hidden": [400, 400, 400]},
        "table": {"dim": 10},
        "run": {"dir": str(folder / "run"), "report": False},
        "online": {"pass": {"seconds": pass_s}, "join": join},
        "publish": {"keep_chains": 1000, "guard": {"auc_drop": None, "copc": None}},
        "serve": {"port": 0, "grpc_port": None},
    }


class Sender:
    """Ranks and clicks at a rate of events, from a process of its own. Writes what it did to a file."""

    def __init__(self, url: str, rate: float, seconds: float) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._address = host, int(port)
        self._clicks = http.client.HTTPConnection(*self._address)
        self.per_s = rate / (CANDIDATES * (1 + CLICK_SHARE))
        self.seconds = seconds
        rng = np.random.default_rng(5)
        values = rng.zipf(1.2, (500, CANDIDATES, SLOTS)) % VALUES
        self._users = [
            json.dumps(
                {f"I{i}": int(x) for i, x in enumerate(rng.integers(0, 500, DENSE), 1)}
                | {f"C{i + 1}": f"{values[k, 0, i]:x}" for i in range(USER_SLOTS)}
            )
            for k in range(len(values))
        ]
        self._candidates = [
            json.dumps(
                [
                    {"id": j} | {f"C{i + 1}": f"{values[k, j, i]:x}" for i in range(USER_SLOTS, SLOTS)}
                    for j in range(CANDIDATES)
                ]
            )
            for k in range(len(values))
        ]
        self._rng = rng
        self.clicks: dict[str, float] = {}
        self.shows = 0
        self.latencies: list[float] = []
        self._pending: list[tuple[float, str, int]] = []
        self._lock = threading.Lock()

    def run(self) -> dict[str, Any]:
        begin = time.perf_counter()
        threads = [threading.Thread(target=self._rank_every, args=(begin, first)) for first in range(CONNECTIONS)]
        threads.append(threading.Thread(target=self._send_clicks, args=(begin,)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {
            "clicks": self.clicks,
            "shows": self.shows,
            "latencies": self.latencies,
            "events_per_s": (self.shows + len(self.clicks)) / self.seconds,
        }

    def _rank_every(self, begin: float, first: int) -> None:
        """Send every so many-th request at its time, from `first` on."""
        connection, number = http.client.HTTPConnection(*self._address), first
        while (due := number / self.per_s) < self.seconds and time.perf_counter() - begin < self.seconds:
            time.sleep(max(0.0, due - (time.perf_counter() - begin)))
            self._rank(connection, number, begin)
            number += CONNECTIONS

    def _rank(self, connection: http.client.HTTPConnection, number: int, begin: float) -> None:
        k = number % len(self._users)
        body = f'{{"request":"load-{number}","user":{self._users[k]},"candidates":{self._candidates[k]}}}'
        asked = time.perf_counter()
        connection.request("POST", "/v1/rank", body)
        reply = connection.getresponse()
        reply.read()
        assert reply.status == 200, reply.status
        now = time.perf_counter()
        with self._lock:
            self.latencies.append(now - asked)
            self.shows += CANDIDATES
            for item in np.flatnonzero(self._rng.random(CANDIDATES) < CLICK_SHARE).tolist():
                later = now - begin + float(self._rng.exponential(DELAY_S))
                heapq.heappush(self._pending, (later, f"load-{number}", item))

    def _send_clicks(self, begin: float) -> None:
        while True:
            now, due = time.perf_counter() - begin, []
            with self._lock:
                while self._pending and (self._pending[0][0] <= now):
                    due.append(heapq.heappop(self._pending))
            if due:
                sent = time.time()
                events = [
                    {"request": request, "item": item, "label": {"click": 1}, "event": f"{request}/{item}"}
                    for _, request, item in due
                ]
                self._clicks.request("POST", "/v1/feedback", json.dumps({"events": events}))
                reply = self._clicks.getresponse()
                assert json.loads(reply.read())["accepted"] == len(due), reply.status
                self.clicks |= {f"{request}/{item}": sent for _, request, item in due}
            elif now > self.seconds + 0.1:
                return  # clicks that would come later never do
            time.sleep(0.005)


class Probe(threading.Thread):
    """Asks for the score of one row again and again. Its shows are logged and learned like all others."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        host, port = url.removeprefix("http://").split(":")
        self._http = http.client.HTTPConnection(host, int(port))
        row = {f"I{i}": 3 for i in range(1, DENSE + 1)} | {f"C{i}": "1" for i in range(1, SLOTS + 1)}
        self._body = json.dumps({"rows": [row]})
        self.stopping = False
        self.replies: list[tuple[float, int, float]] = []
        """Time of the reply, its sequence and score."""

    def run(self) -> None:
        due = time.perf_counter()
        while not self.stopping:
            due = max(due + PROBE_S, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
            self._http.request("POST", "/v1/predict", self._body)
            reply = json.loads(self._http.getresponse().read())
            self.replies.append((time.time(), reply["sequence"], reply["scores"][0]))


class KeptPasses(threading.Thread):
    """Links the rows of every pass to a folder, because the run removes those that it no longer needs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.spool, self.kept = folder / "run/spool", folder / "kept"
        self.kept.mkdir()
        self.stopping = False

    def run(self) -> None:
        while not self.stopping:
            for path in self.spool.glob("[!.]*.arrow"):
                with suppress(FileExistsError, FileNotFoundError):
                    os.link(path, self.kept / path.name)
            time.sleep(0.1)


def measure(rate: float, seconds: float, pass_s: float, wait_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        passes = KeptPasses(folder)
        with FeedbackLoop(settings(folder, pass_s, wait_s), log=print, quiet=True) as loop:
            passes.start()
            probe = Probe(loop.url)
            probe.start()
            sender = [sys.executable, __file__, "--sender", loop.url, str(rate), str(wait_s + seconds)]
            sent = json.loads(subprocess.run(sender, stdout=subprocess.PIPE, check=True, text=True).stdout)
            status = loop_status(loop.url)
            probe.stopping = True
            probe.join()
            settle(loop.url, wait_s)
        passes.stopping = True
        passes.join()
        return summary(folder, sent, probe.replies, status, wait_s)


def loop_status(url: str) -> dict[str, Any]:
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.request("GET", "/v1/loop")
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return found


def settle(url: str, wait_s: float) -> None:
    """Wait until every show is learned."""
    time.sleep(wait_s)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = loop_status(url)
        joined = sum(found[kind] or 0 for kind in ("labels", "negatives", "corrections"))
        if found["waiting"] == 0 and found["rows_learned"] == joined and found["shows_joined"] == found["shows_logged"]:
            return
        time.sleep(0.5)
    raise SystemExit(f"the loop does not settle: {found}")


def summary(
    folder: Path, sent: dict[str, Any], replies: list[tuple[float, int, float]], status: dict[str, Any], wait_s: float
) -> dict[str, Any]:
    from clickfleet.store.published import Log

    files, ends, rows = [], [], 0
    row_of: dict[str, int] = {}
    learned: Counter[str] = Counter()
    for path in sorted((folder / "kept").glob("*.arrow")):
        table = pa.ipc.open_file(str(path)).read_all().select(["request", "item", "kind"]).to_pydict()
        for i, (request, item, kind) in enumerate(zip(*table.values(), strict=True)):
            if kind == "label":
                row_of[f"{request}/{item}"] = rows + i
            if kind != "correction":
                learned[f"{request}/{item}"] += 1
        rows += len(table["request"])
        files.append(path)
        ends.append(rows)
    ours = {key: count for key, count in learned.items() if key.startswith("load-")}
    assert set(ours.values()) == {1}, "a show was learned twice"
    assert len(ours) == sent["shows"], f"{sent['shows']} shows were sent, and {len(ours)} were learned"
    log = Log(folder / "run/published")
    entries: list[tuple[int, int, float, float]] = []  # rows up to it, sequence, end of training, manifest complete
    at = 0
    for line in log.lines():
        entry = log.entry(line)
        if (events := entry.info.get("events")) is not None:
            at += events["rows"]
            complete = os.stat(entry.path / "manifest.json").st_mtime
            entries.append((at, line.sequence, entry.info["time"], complete))
    assert at in ends, f"{at} rows are in entries, which is not the end of a pass"  # the last passes may be unpublished
    times, reached = [], 0
    sequences: list[int] = []
    scores: dict[int, float] = {}
    for when, sequence, score in replies:
        scores[sequence] = score
        if sequence > reached:
            reached = sequence
            times.append(when)
            sequences.append(sequence)
    unchanged = [s for a, s in pairwise(sequences) if scores[a] == scores[s]]
    first = min(sent["clicks"].values()) + wait_s
    ages, stages = [], []
    for key, clicked in sent["clicks"].items():
        if clicked < first or key not in row_of:
            continue  # before negatives arrive too; or so late that the show had become a negative
        row = row_of[key]
        joined = files[bisect.bisect_right(ends, row)].stat().st_mtime
        which = bisect.bisect_right([entry[0] for entry in entries], row)
        if which == len(entries):
            continue
        _, sequence, trained, complete = entries[which]
        place = bisect.bisect_left(sequences, sequence)
        if place == len(sequences):
            continue  # served after the probe ended
        ages.append(times[place] - clicked)
        stages.append((joined - clicked, trained - joined, complete - trained, times[place] - complete))
    parts = dict(zip(STAGES, np.array(stages).T, strict=True))
    return {
        "events_per_s": round(sent["events_per_s"]),
        "clicks": len(ages),
        "entries": len(entries),
        **percentiles(ages),
        "stages": {name: round(float(part.mean()), 4) for name, part in parts.items()},
        "stages_p99": {name: percentiles(part)["p99"] for name, part in parts.items()},
        "unchanged_entries": len(unchanged),
        "server_says": status["freshness"],
        "request_ms": percentiles(np.array(sent["latencies"]) * 1e3),
    }


def percentiles(values: Any) -> dict[str, float]:
    p50, p99 = np.percentile(np.asarray(values), [50, 99]).tolist()
    return {"p50": round(p50, 4), "p99": round(p99, 4)}


def picture(results: list[dict[str, Any]]) -> str:
    """Return the mean stages of each rate as stacked bars."""
    colours = {"join": "#4c78a8", "train": "#f58518", "publish": "#54a24b", "follow": "#b279a2"}
    widest = max(sum(one["stages"].values()) for one in results)
    scale = 560 / widest
    parts = []
    for i, one in enumerate(results):
        x, y = 130.0, 40 + 46 * i
        parts.append(f'<text x="120" y="{y + 20}" text-anchor="end">{one["rate"]:,.0f} events/s</text>')
        for name in STAGES:
            width = one["stages"][name] * scale
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="30" fill="{colours[name]}"/>')
            words = f"{one['stages'][name] * 1e3:.0f} ms"
            if width > 9 * len(words):
                parts.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + 20}" text-anchor="middle" fill="#fff">{words}</text>'
                )
            x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 20}">{one["p50"]:.2f} s, 99%: {one["p99"]:.2f} s</text>')
    for i, name in enumerate(STAGES):
        parts.append(f'<rect x="{130 + 110 * i}" y="10" width="14" height="14" fill="{colours[name]}"/>')
        parts.append(f'<text x="{150 + 110 * i}" y="22">{name}</text>')
    height = 50 + 46 * len(results)
    style = "font:13px system-ui,sans-serif;background:#fff"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" style="{style}" role="img" '
        f'aria-label="Where the time from a click to a served score goes">{"".join(parts)}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rates", nargs="+", type=float, default=[1000, 5000])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--pass", dest="pass_s", type=float, default=PASS_S)
    parser.add_argument("--wait", type=float, default=5.0)
    parser.add_argument("--picture")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sender", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.sender:
        url, rate, seconds = given.sender
        print(json.dumps(Sender(url, float(rate), float(seconds)).run()))
        return
    results = []
    for rate in given.rates:
        results.append({"rate": rate, "pass": given.pass_s, **measure(rate, given.seconds, given.pass_s, given.wait)})
        if given.json:
            print(json.dumps(results[-1]), flush=True)
        else:
            one = results[-1]
            where = ", ".join(f"{name} {one['stages'][name]:.3f} s" for name in STAGES)
            print(
                f"{rate:,.0f} events/s: {one['clicks']:,} clicks followed, p50 {one['p50']:.3f} s, p99 {one['p99']:.3f} s; {where}; "
                f"requests p99 {one['request_ms']['p99']:.1f} ms; {one['entries']} entries",
                flush=True,
            )
    if given.picture:
        Path(given.picture).write_text(picture(results))


if __name__ == "__main__":
    main()
