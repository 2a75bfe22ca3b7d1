"""Models and settings side by side: trained on the same data and seeds, told as tables, curves and plots.

from clickfleet.workbench.compare import compare

found = compare("config.yaml", models=["dnn", "fm"], sets=["dense.lr=0.01,0.001"], out="compare")
found.rows[0]["test_auc"], found.page
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clickfleet import modes
from clickfleet.config import Config
from clickfleet.configuring import check, configure
from clickfleet.errors import ConfigError
from clickfleet.interrupts import interruptible
from clickfleet.lock import Lock
from clickfleet.report import page
from clickfleet.workbench.crew import Crew, Facts, Order, count, share_cores
from clickfleet.workbench.plan import Line, Plan, fingerprint, mean, plan

RESULT, ORDER = "result.json", "order.json"
MEASURED = ("train_loss", "train_auc", "test_auc", "logloss", "rows_per_s", "parameters", "seconds")


@dataclass
class Comparison:
    """What was found; numbers are means over the seeds."""

    plan: Plan
    out: Path
    rows: list[Facts] = field(default_factory=list)
    """The models as they are configured."""
    studies: dict[str, list[Facts]] = field(default_factory=dict)
    """By setting: the models under each of its values."""
    runs: list[Facts] = field(default_factory=list)
    """Every run that ended well."""
    failed: dict[str, str] = field(default_factory=dict)
    """Runs that did not, with their errors."""
    signal: int | None = None
    """What interrupted it."""

    @property
    def page(self) -> Path:
        return self.out / "compare.html"

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "studies": self.studies,
            "runs": self.runs,
            "failed": self.failed,
            "out": str(self.out),
            "ok": not self.failed,
        }


def compare(
    config: Config | Mapping[str, Any] | str | Path | None,
    *overrides: str,
    models: Sequence[str] = (),
    sets: Sequence[str] = (),
    seeds: Sequence[int] = (),
    jobs: int | None = None,
    out: str | Path = "compare",
    say: Callable[[str], None] = print,
) -> Comparison:
    """Trains every model under every setting and seed, what is done already aside, and writes what was found to `out`.

    `sets` are `key=a,b,c`, one study each: the other settings stay as configured.
    """
    from clickfleet.workbench.outcome import write_all

    folder = Path(out).absolute()
    base = configure(config, overrides)
    check(base)
    found = Comparison(plan(base, models, sets, seeds, folder, say), folder)
    orders = found.plan.orders
    jobs, threads = share_cores(base, len(orders), jobs, modes.distributed(base))
    with Lock(folder / ".lock", "compares"):
        results = {order.name: done for order in orders if (done := finished(order)) is not None}
        waiting = [order for order in orders if order.name not in results]
        before = f", {len(results)} done before" if results else ""
        say(f"{count(len(orders), 'run')}{before}; {jobs} at a time, {count(threads, 'thread')} each")
        _train([_with_threads(order, threads) for order in waiting], jobs, results, found, say)
        found.runs = [{"run": name, **facts} for name, facts in results.items()]
        found.rows = [_row(line, results) for line in found.plan.models]
        found.studies = {key: [_row(line, results) for line in lines] for key, lines in found.plan.studies.items()}
        write_all(found)
    return found


def _train(
    waiting: list[Order], jobs: int, results: dict[str, Facts], found: Comparison, say: Callable[[str], None]
) -> None:
    def stop(number: int) -> None:
        found.signal = number

    with interruptible(stop), Crew(jobs) as crew:
        while (waiting and found.signal is None) or crew.busy:
            if found.signal is not None:
                for order, facts in crew.stop_all():
                    _take(order, facts, results, found, say)
                break
            while waiting and crew.free:
                order = waiting.pop(0)
                page.write(order.folder / ORDER, json.dumps({"fingerprint": fingerprint(order.config)}))
                crew.start(order)
            for order, facts in crew.finished(0.2):
                _take(order, facts, results, found, say)


def _take(order: Order, facts: Facts, results: dict[str, Facts], found: Comparison, say: Callable[[str], None]) -> None:
    """Keeps what a run gave."""
    place = f"{len(results) + len(found.failed) + 1}/{len(found.plan.orders)}"
    if "error" in facts:
        found.failed[order.name] = facts["error"]
        say(f"{place} {order.name} failed: {facts['error']}")
    elif "stopped" in facts:
        if found.signal is None:
            found.failed[order.name] = f"stopped by signal {facts['stopped']}; the same command goes on with it"
        say(f"{order.name} stopped with a checkpoint; the same command goes on with it")
    else:
        results[order.name] = facts
        page.write(order.folder / RESULT, json.dumps(facts))
        auc = "" if facts["test_auc"] is None else f"test AUC {facts['test_auc']:.4f}, "
        say(f"{place} {order.name}: {auc}{facts['seconds']:.1f} s")


def finished(order: Order) -> Facts | None:
    """The result of a run that is done; a run with other settings under the same name, done or begun, is refused."""
    begun, done = order.folder / ORDER, order.folder / RESULT
    if begun.is_file() and json.loads(begun.read_text())["fingerprint"] != fingerprint(order.config):
        raise ConfigError(
            f"{order.folder} holds a run with other settings", "choose another --out, or remove that folder"
        )
    facts: Facts | None = json.loads(done.read_text()) if done.is_file() else None
    return facts


def _with_threads(order: Order, threads: int) -> Order:
    config = order.config
    return Order(order.name, replace(config, train=replace(config.train, threads=threads)))


def _row(line: Line, results: Mapping[str, Facts]) -> Facts:
    """Means over the seeds that ended well; nothing where none did."""
    each = [results[order.name] for order in line.orders if order.name in results]
    aucs = [facts["test_auc"] for facts in each if facts["test_auc"] is not None]
    row: Facts = {"model": line.model}
    if line.setting is not None:
        row |= {"setting": line.setting, "value": line.value}
    row |= {key: mean(facts[key] for facts in each) for key in MEASURED}
    if len(line.orders) > 1:
        row |= {"seeds": len(each), "test_auc_std": statistics.stdev(aucs) if len(aucs) > 1 else None}
    return row
