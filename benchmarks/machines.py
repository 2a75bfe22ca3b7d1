"""Compare the modes on four machines with a slow network: AUC, rows per second and bytes per row.

    python benchmarks/machines.py                # both links, all modes; prints a table in Markdown
    python benchmarks/machines.py --links slow --modes async,geo --rounds 3

The machines are network namespaces of this one, each with a Ray node and its own /tmp, joined by a wire with a given speed and delay
(benchmarks/_wire.py): `fast` is 1 Gbit/s and 1 ms one way, `slow` is 100 Mbit/s and 20 ms. Four shards and four workers are spread
over them. The machines share the cores of this one. The model is therefore small (a `dnn` of one layer of 16) and the batches are
large (2000 rows): rows and gradients on the wire cost more time than the computation, at least on the slow link. Compare the ratios
within a link; a real machine has its own cores. `local` trains in one process without any wire, for reference.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from _wire import Link, NoMachinesError, address, machines, missing
from clickfleet.data.logs.synth import SynthOptions, synth

PROGRAMS = Path(sys.executable).parent
LINKS = {"fast": Link(1e9, 0.001), "slow": Link(1e8, 0.02)}
MODES = ("sync", "half_async", "async", "geo")
COUNT = 4
START_S = 180.0
Found = dict[str, Any]


class Fleet:
    """Ray on four machines, and commands on the first of them."""

    def __init__(self, names: list[str], tmp: str) -> None:
        self.names, self.tmp = names, tmp
        self.environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
            "TMPDIR": tmp,
            "RAY_TMPDIR": tmp,
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_AUTH_MODE": "token",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        }
        self.nodes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        common = "--block --num-cpus=2 --disable-usage-stats --object-store-memory=100000000"
        for machine, name in enumerate(self.names):
            head = "--head --port=6379 --include-dashboard=false"
            how = head if machine == 0 else f"--address={address(0)}:6379"
            script = f"mount -t tmpfs none {self.tmp} && exec {PROGRAMS}/ray start {common} --node-ip-address={address(machine)} {how}"
            self.nodes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, "sh", "-c", script],
                    env=self.environ,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
            self._wait_for(machine + 1)

    def _wait_for(self, count: int) -> None:
        """Wait until this many nodes have joined."""
        probe = (
            f"import ray; ray.init(address='{address(0)}:6379', logging_level='ERROR');"
            f"assert sum(node['Alive'] for node in ray.nodes()) == {count}"
        )
        deadline = time.monotonic() + START_S
        while self._inside([sys.executable, "-c", probe]).returncode:
            if time.monotonic() > deadline:
                raise SystemExit(f"machine {count - 1} has not joined Ray within {START_S:.0f} s")

    def _inside(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        inside = ["nsenter", f"--target={self.nodes[0].pid}", "--mount", "--net", *command]
        return subprocess.run(inside, env=self.environ, capture_output=True, text=True)

    def train(self, config: Path) -> None:
        done = self._inside([str(PROGRAMS / "clickfleet"), "train", str(config), f"cluster.address={address(0)}:6379"])
        if done.returncode:
            raise SystemExit(f"training failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")

    def close(self) -> None:
        for node in reversed(self.nodes):
            node.terminate()
        for node in self.nodes:
            try:
                node.wait(timeout=20)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait()


@contextmanager
def fleet(link: Link) -> Iterator[Fleet]:
    with ExitStack() as around:
        tmp = tempfile.mkdtemp(prefix="cf-")  # short: names of socket files are
        around.callback(shutil.rmtree, tmp, ignore_errors=True)
        found = Fleet(around.enter_context(machines(COUNT, link)), tmp)
        around.callback(found.close)
        found.start()
        yield found


def settings(data: Path, run: Path, mode: str, k_steps: int | None) -> Found:
    return {
        "data": {"train": [str(data / "train" / "*")], "test": [str(data / "test" / "*")], "batch_size": 2000},
        "model": {"name": "dnn", "hidden": [16]},
        "table": {"dim": 8},
        "train": {"epochs": 1, "threads": 1},
        "mode": {"name": mode, **({"k_steps": k_steps} if mode == "geo" else {})},
        "cluster": {"shards": COUNT, "workers": COUNT, "start_timeout": "300s"},
        "run": {"dir": str(run), "checkpoint_every": None, "keep_epochs": False, "report": False, "names": False},
    }


def read(run: Path) -> Found:
    """Return the figures of a run. Its speed is that between its first and its last progress line."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    by_kind = {kind: [line for line in lines if line["kind"] == kind] for kind in ("train", "epoch", "test", "cluster")}
    first, last = by_kind["train"][0], by_kind["epoch"][-1]
    whole = by_kind["cluster"][0] if by_kind["cluster"] else {}
    return {
        "rows_per_s": (last["rows"] - first["rows"]) / (last["time"] - first["time"]),
        "auc": by_kind["test"][-1]["auc"],
        "bytes_per_row": whole.get("wire_bytes_per_row", 0.0),
    }


def table(found: dict[str, dict[str, list[Found]]], alone: list[Found]) -> str:
    """Return the figures as a table in Markdown: medians, and speeds as ratios to async on the same link."""
    rows = ["| link | mode | AUC | rows/s | of async | bytes per row |", "|---|---|---|---|---|---|"]

    def median(runs: list[Found], key: str) -> float:
        return statistics.median(run[key] for run in runs)

    rows += [f"| none | local | {median(alone, 'auc'):.4f} | {median(alone, 'rows_per_s'):,.0f} | | |"] if alone else []
    for link, by_mode in found.items():
        base = by_mode.get("async")
        for mode, runs in by_mode.items():
            # Ratios within a round: both runs saw the same load on the machine.
            pairs = zip(runs, base, strict=True) if base else ()
            ratios = [one["rows_per_s"] / other["rows_per_s"] for one, other in pairs]
            of = f"{statistics.median(ratios):.2f}" if ratios else ""
            speed, size = median(runs, "rows_per_s"), median(runs, "bytes_per_row")
            rows.append(f"| {LINKS[link]} | {mode} | {median(runs, 'auc'):.4f} | {speed:,.0f} | {of} | {size:,.0f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--k-steps", type=int, help="steps between two shipments of geo, instead of its default")
    arguments = parser.parse_args()
    if reason := missing():
        print(f"not measured: {reason}")
        return
    modes, links = arguments.modes.split(","), arguments.links.split(",")
    found: dict[str, dict[str, list[Found]]] = {link: {mode: [] for mode in modes} for link in links}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # not in /tmp, of which each machine has its own
        data = Path(folder) / "data"
        synth(data, SynthOptions(rows=arguments.rows, test_rows=20_000, parts=2 * COUNT))

        def one(mode: str, name: str, train: Any) -> Found:
            run, config = Path(folder) / name, Path(folder) / f"{name}.yaml"
            config.write_text(yaml.safe_dump(settings(data, run, mode, arguments.k_steps)))
            train(config)
            figures = read(run)
            print(name, json.dumps(figures), f"load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
            return figures

        def train_here(config: Path) -> None:
            subprocess.run([PROGRAMS / "clickfleet", "train", config], check=True, capture_output=True)

        alone = [one("local", f"local-{turn}", train_here) for turn in range(arguments.rounds)]
        for link in links:
            try:
                with fleet(LINKS[link]) as hosts:
                    for turn in range(arguments.rounds):
                        for mode in modes:
                            found[link][mode].append(one(mode, f"{link}-{mode}-{turn}", hosts.train))
            except NoMachinesError as error:
                print(f"not measured: {error}")
                return
    print(table(found, alone))
    print(json.dumps({"benchmark": "machines", "local": alone, **found}))


if __name__ == "__main__":
    main()
