"""Measure the time from an event until a served score has learned it, and where that time goes.

python benchmarks/fresh.py [--source iterable folder kafka] [--rates 100 1000 5000] [--seconds 20] [--pass 0.2] [--json]

A trainer (`learn` with online.pass, DeepFM 400×3 over about a million possible keys, all other settings their defaults) and
a server that follows its log share this machine with the producer of the events and with a client. The trainer has a
session of low priority, as in `clickfleet loop`. Each event carries the
time at which it was produced. The client asks for the same row every 2 ms; the reply names the entry that it was made by.
An event is served when the first reply of an entry that has learned it arrives. Passes hold events in the order in which
they were produced, so the entry of each event is known exactly, and the score must differ from that of the entry before.

    read     from the event until its pass is handed to the trainer: half of online.pass and the work of the source
    train    the pass
    publish  from the end of the pass until the manifest of its entry is complete
    follow   from then until the first reply of that entry

The latency of the client's requests is measured before the first event (the server alone) and during the run.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from _servers import ours
from clickfleet.data.schema import Dense, Schema, Slot, Transform, write_schema
from clickfleet.serve.priority import TRAINER_SESSION, renice_session

DENSE, SLOTS, VALUES = 13, 26, 40_000
SCHEMA = Schema(
    dense=tuple(Dense(f"I{i}", Transform("log1p")) for i in range(1, DENSE + 1)),
    slots=tuple(Slot(f"C{i}") for i in range(1, SLOTS + 1)),
    label="click",
    time="time",
)
COLUMNS = ["click", "time", *(f"I{i}" for i in range(1, DENSE + 1)), *(f"C{i}" for i in range(1, SLOTS + 1))]
TICK_S = 0.02
"""The producer sends the events of this time together."""
FILE_S = 0.1
"""It writes a file this often."""
PROBE_S = 0.002


def rows(count: int, seed: int) -> dict[str, Any]:
    """Return rows as columns; values are Zipf-distributed, and the click depends on two of them."""
    rng = np.random.default_rng(seed)
    table: dict[str, Any] = {f"I{i}": rng.integers(0, 500, count) for i in range(1, DENSE + 1)}
    values = rng.zipf(1.2, (SLOTS, count)) % VALUES
    table |= {f"C{i}": [f"{x:x}" for x in values[i - 1]] for i in range(1, SLOTS + 1)}
    table["click"] = (rng.random(count) < np.where((values[0] + values[1]) % 3 == 0, 0.5, 0.1)).astype(np.float32)
    table["time"] = np.full(count, int(time.time() * 1000))
    return table


def settings(folder: Path, pass_s: float) -> dict[str, Any]:
    return {
        "data": {"schema": str(folder / "schema.yaml")},
        "model": {"name": "deepfm", "hidden": [400, 400, 400]},
        "table": {"dim": 10},
        "train": {"init_from": str(folder / "first")},
        "run": {"dir": str(folder / "run"), "report": False},
        "online": {"pass": {"seconds": pass_s}, "first_base": True},
        "publish": {"keep_chains": 1000, "guard": {"auc_drop": None, "copc": None}},
    }


def prepare(folder: Path) -> None:
    """Train the model that the stream starts from."""
    import clickfleet

    write_schema(SCHEMA, folder / "schema.yaml")
    config = {
        "model": {"name": "deepfm", "hidden": [400, 400, 400]},
        "table": {"dim": 10},
        "data": {"batch_size": 1000},
    }
    overrides = [f"run.dir={folder / 'first'}", f"data.schema={folder / 'schema.yaml'}", "train.epochs=1"]
    clickfleet.train(config, *overrides, data=rows(100_000, 1), quiet=True)


class Paced:
    """Yields chunks of rows at a rate, each with the time of its production, once the file `go` exists."""

    def __init__(self, folder: Path, rate: float, seconds: float, tick_s: float = TICK_S) -> None:
        self.folder, self.rate, self.tick_s = folder, rate, tick_s
        self.ticks = int(seconds / tick_s)
        self.chunks = [rows(max(1, round(rate * tick_s)), 100 + i % 50) for i in range(min(self.ticks, 50))]
        self.sent: list[tuple[float, int]] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while not (self.folder / "go").exists():
            time.sleep(0.01)
        begin = time.time()
        per_tick = self.rate * self.tick_s
        for tick in range(self.ticks):
            if per_tick < 1 and int(tick * per_tick) == int((tick - 1) * per_tick):
                continue
            wait = begin + tick * self.tick_s - time.time()
            if wait > 0:
                time.sleep(wait)
            chunk, now = self.chunks[tick % len(self.chunks)], time.time()
            count = len(chunk["click"])
            self.sent.append((now, count))
            yield {**chunk, "time": np.full(count, int(now * 1000))}
        (self.folder / "sent.json").write_text(json.dumps(self.sent))


def lines_of(chunk: dict[str, Any]) -> list[str]:
    columns = [chunk[name] for name in COLUMNS]
    return [",".join(map(str, row)) for row in zip(*columns, strict=True)]


def train(kind: str, folder: Path, rate: float, seconds: float, pass_s: float) -> None:
    """Run the trainer until it is stopped; with `iterable`, it produces the events too."""
    from clickfleet.online.learn import learn

    config = settings(folder, pass_s)
    day = int(time.strftime("%Y%m%d", time.gmtime()))
    if kind == "iterable":
        paced = Paced(folder, rate, seconds)

        def stream() -> Iterator[tuple[Any, int, int]]:
            for number, chunk in enumerate(paced, 1):
                yield chunk, day, number
            while True:  # idle until it is stopped
                time.sleep(0.1)

        learn(config, source=stream(), quiet=True)
        return
    if kind == "folder":
        config["online"] |= {"dir": str(folder / "log"), "start_day": day, "split_interval": "1d"}
        config["data"]["format"] = "csv"
    else:
        config["online"]["kafka"] = {"brokers": (folder / "brokers").read_text(), "topic": "events", "start": "latest"}
        config["data"]["format"] = {"name": "csv", "columns": COLUMNS}
    learn(config, quiet=True)


def produce(kind: str, folder: Path, paced: Paced, broker: Any) -> None:
    """Send the events of a folder or a topic."""
    if kind == "folder":
        where = folder / "log" / time.strftime("%Y%m%d", time.gmtime()) / "0000"
        where.mkdir(parents=True, exist_ok=True)
        for number, chunk in enumerate(paced):
            hidden = where / f".part-{number:06d}"
            hidden.write_text("\n".join([",".join(COLUMNS), *lines_of(chunk)]) + "\n")
            hidden.rename(where / f"part-{number:06d}.csv")
        return
    for chunk in paced:
        for line in lines_of(chunk):
            broker.produce("events", line.encode(), partition=0)
        broker.poll(0)
    broker.flush(30)


class Probe(threading.Thread):
    """Asks for the score of one row again and again."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        host, port = url.removeprefix("http://").split(":")
        self._http = http.client.HTTPConnection(host, int(port))
        row = {f"I{i}": 3 for i in range(1, DENSE + 1)} | {f"C{i}": "1" for i in range(1, SLOTS + 1)}
        self._body = json.dumps({"rows": [row]})
        self.stopping = False
        self.replies: list[tuple[float, float, int, float]] = []
        """Time of the reply, its latency, sequence and score."""

    def run(self) -> None:
        due = time.perf_counter()
        while not self.stopping:
            due += PROBE_S
            time.sleep(max(0.0, due - time.perf_counter()))
            begin = time.perf_counter()
            self._http.request("POST", "/v1/predict", self._body)
            reply = json.loads(self._http.getresponse().read())
            self.replies.append((time.time(), time.perf_counter() - begin, reply["sequence"], reply["scores"][0]))


def percentiles(values: Any) -> dict[str, float]:
    p50, p99 = np.percentile(np.asarray(values), [50, 99]).tolist()
    return {"p50": round(p50, 4), "p99": round(p99, 4)}


def measure(folder: Path, kind: str, rate: float, seconds: float, pass_s: float) -> dict[str, Any]:
    for name in ("run", "log", "go", "sent.json"):
        subprocess.run(["rm", "-rf", str(folder / name)], check=True)
    broker = None
    if kind == "kafka":
        from confluent_kafka import Producer

        broker = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "", "log_level": 0, "linger.ms": 1})
        (folder / "brokers").write_text(
            ",".join(f"{one.host}:{one.port}" for one in broker.list_topics(timeout=60).brokers.values())
        )
        broker.produce("events", b"", partition=0)
        broker.flush(30)
    arguments = [kind, str(folder), str(rate), str(seconds), str(pass_s)]
    trainer = subprocess.Popen([sys.executable, __file__, "--trainer", *arguments], start_new_session=True)
    renice_session(TRAINER_SESSION, trainer.pid)
    try:
        published = folder / "run/published"
        while not list(published.glob("*-base")) or not (published / "LOG.jsonl").exists():
            assert trainer.poll() is None
            time.sleep(0.1)
        with ours(published) as server:
            probe = Probe(server.url)
            probe.start()
            time.sleep(4)
            alone = [latency for _, latency, *_ in probe.replies[100:]]
            began = len(probe.replies)
            if kind != "iterable":
                paced = Paced(folder, rate, seconds, FILE_S if kind == "folder" else TICK_S)
                sender = threading.Thread(target=produce, args=(kind, folder, paced, broker))
                sender.start()
            (folder / "go").touch()
            while not (folder / "sent.json").exists():
                assert trainer.poll() is None
                time.sleep(0.1)
            time.sleep(pass_s + 2)
            freshness = json.loads(fetch(server.url, "/v1/stats"))["freshness"]
            probe.stopping = True
            probe.join()
    finally:
        trainer.send_signal(signal.SIGTERM)
        trainer.wait(60)
    return summary(folder, probe.replies[began:], alone, freshness)


def fetch(url: str, path: str) -> bytes:
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.request("GET", path)
    return connection.getresponse().read()


def summary(folder: Path, replies: list[Any], alone: list[float], freshness: dict[str, Any]) -> dict[str, Any]:
    from clickfleet.store.published import Log

    sent = json.loads((folder / "sent.json").read_text())
    times = np.repeat([when for when, _ in sent], [count for _, count in sent])
    log = Log(folder / "run/published")
    served: dict[int, float] = {}
    newest = 0
    for when, _, sequence, _ in replies:
        for reached in range(newest + 1, sequence + 1):
            served.setdefault(reached, when)
        newest = max(newest, sequence)
    scores = {sequence: score for _, _, sequence, score in replies}
    ages, stages, at, unchanged = [], [], 0, 0
    for line in log.lines():
        entry = log.entry(line)
        events = entry.info.get("events")
        if events is None or line.sequence not in served:
            at += 0 if events is None else events["rows"]
            continue
        own = times[at : at + events["rows"]]
        at += events["rows"]
        complete = os.stat(entry.path / "manifest.json").st_mtime
        ages.append(served[line.sequence] - own)
        stages.append(
            (entry.info["time"] - own.mean(), complete - entry.info["time"], served[line.sequence] - complete)
        )
        before = scores.get(line.sequence - 1)
        unchanged += before is not None and line.sequence in scores and scores[line.sequence] == before
    assert at == len(times), f"{len(times)} events were sent, and {at} were learned"
    assert not unchanged, f"{unchanged} entries did not change the score"
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    passes = [line for line in lines if line["kind"] == "pass"]
    train_s = sum(line["seconds"] for line in passes) / sum(line["passes"] for line in passes)
    learned, publish, follow = (np.array(part) for part in zip(*stages, strict=True))
    every = np.concatenate(ages)
    return {
        "events": len(every),
        "entries": len(stages),
        **percentiles(every),
        "read": round(float(np.median(learned)) - train_s, 4),
        "train": round(train_s, 4),
        "publish": percentiles(publish),
        "follow": percentiles(follow),
        "server_says": {key: freshness[f"{key}_s"] for key in ("p50", "p99")},
        "request_ms_alone": percentiles(np.array(alone) * 1e3),
        "request_ms": percentiles(np.array([latency for _, latency, *_ in replies]) * 1e3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--source", nargs="+", default=["iterable", "folder", "kafka"])
    parser.add_argument("--rates", nargs="+", type=float, default=[100, 1000, 5000])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--pass", dest="pass_s", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trainer", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trainer:
        kind, folder, *numbers = given.trainer
        train(kind, Path(folder), *map(float, numbers))
        return
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for kind in given.source:
            for rate in given.rates:
                found = [measure(Path(folder), kind, rate, given.seconds, given.pass_s) for _ in range(given.rounds)]
                middle = found[
                    [one["p50"] for one in found].index(statistics.median_low([one["p50"] for one in found]))
                ]
                print(json.dumps({"source": kind, "rate": rate, "pass": given.pass_s, **middle}), flush=True)


if __name__ == "__main__":
    main()
