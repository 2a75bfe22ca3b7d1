"""Recommend a training mode: run one job in all modes with simulated workers and compare the results.

The logical workers take turns in one process. So this measures the effect of staleness on the model, not the cost of the network:
with N equally fast workers in async, about N − 1 pushes of others lie between reading rows and pushing their gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from clickfleet.cluster.simulate import SimulatedCluster, with_mode
from clickfleet.config.load import Config
from clickfleet.data import dataset
from clickfleet.data.batch import Batch
from clickfleet.data.memory import Feed
from clickfleet.data.schema import Schema
from clickfleet.errors import ConfigError
from clickfleet.training import predict
from clickfleet.workbench.runner import Facts

BASELINE, RECOMMENDED = "local", "async"
STALE_DENSE = "async, dense every 8"
TRIALS: dict[str, tuple[str, Facts]] = {
    "sync": ("sync", {}),
    "half_async": ("half_async", {}),
    RECOMMENDED: ("async", {"pull_every": 1}),
    STALE_DENSE: ("async", {"pull_every": 8, "independent_recv": True}),
    "geo, k 25": ("geo", {"k_steps": 25}),
}
"""Name of a trial -> the mode and its settings."""
NOTICEABLE = 0.005
"""A difference of AUC that matters."""


@dataclass(frozen=True)
class Trial:
    """The result of one mode with one number of workers."""

    mode: str
    workers: int
    auc: float
    batch_size: int = 0
    logloss: float = float("nan")
    staleness: float = 0.0
    rows_per_s: float = 0.0


def measure(config: Config, workers: Sequence[int], rows: int, seed: int, say: Callable[[str], None]) -> list[Trial]:
    """Run each mode with each number of workers. Every worker trains on whole batches of its share of the rows."""
    source = dataset.open_source(config, config.data.train, None, labels=True)
    size = config.data.batch_rows
    batches = list(islice(iter(source), max(1, rows // size)))
    test = (
        dataset.open_source(dataset.for_scoring(config), config.data.test, source.schema, labels=True)
        if config.data.test
        else None
    )
    held_out = list(islice(iter(test), 100)) if test is not None else []
    if not held_out:
        raise ConfigError("comparing modes by AUC needs test data", "set data.test")
    trials: list[Trial] = []

    def run(name: str, trial_config: Config, shares: list[list[Batch]], batch_size: int) -> Trial:
        trials.append(_run(name, trial_config, source.schema, shares, held_out, batch_size, seed))
        return trials[-1]

    run(BASELINE, with_mode(config, "sync"), [batches], size)
    for count in workers:
        if count == 1:
            continue
        shares = [batches[i::count] for i in range(count)]
        if not all(shares):
            say(f"{count} workers: skipped, there are only {len(batches)} batches")
            continue
        for name, (mode, settings) in TRIALS.items():
            trial = run(name, with_mode(config, mode, **settings), shares, size)
            say(f"{name}, {count} workers: AUC {trial.auc:.4f}, staleness {trial.staleness:.1f}")
        small = max(1, size // count)
        if small < size:
            split = [[batch[i : i + small] for batch in share for i in range(0, len(batch), small)] for share in shares]
            mode, settings = TRIALS[RECOMMENDED]
            trial = run(f"{RECOMMENDED}, batch {small}", with_mode(config, mode, **settings), split, small)
            say(f"{RECOMMENDED} with batches of {small}, {count} workers: AUC {trial.auc:.4f}")
    return trials


def _run(
    name: str,
    config: Config,
    schema: Schema,
    shares: list[list[Batch]],
    test: list[Batch],
    batch_size: int,
    seed: int,
) -> Trial:
    cluster = SimulatedCluster(config, schema, len(shares), seed=seed)
    begin = time.monotonic()
    size = max(len(batch) for share in shares for batch in share)
    model = cluster.train([Feed(share, schema, size) for share in shares])
    seconds = time.monotonic() - begin
    rows = sum(len(batch) for share in shares for batch in share)
    metrics = predict.evaluate(model, test)
    return Trial(
        mode=name,
        workers=len(shares),
        auc=metrics["auc"],
        batch_size=batch_size,
        logloss=metrics["logloss"],
        staleness=cluster.staleness,
        rows_per_s=rows / max(seconds, 1e-9),
    )


def table(trials: Sequence[Trial]) -> str:
    lines = [f"{'mode':>22} {'workers':>8} {'batch':>7} {'AUC':>8} {'log loss':>9} {'staleness':>10} {'rows/s':>9}"]
    lines += [
        f"{each.mode:>22} {each.workers:>8} {each.batch_size:>7} {each.auc:>8.4f} {each.logloss:>9.4f} "
        f"{each.staleness:>10.1f} {each.rows_per_s:>9,.0f}"
        for each in trials
    ]
    return "\n".join(lines)


def advise(trials: Sequence[Trial]) -> list[str]:
    """Return a recommendation for each number of workers.

    >>> local, slow = Trial("local", 1, 0.76), Trial("async", 16, 0.60, staleness=15.0)
    >>> print(advise([local, slow, Trial("async, batch 62", 16, 0.758)])[0])
    16 workers: async collapses (AUC 0.6000, local 0.7600; gradients miss 15 pushes of others). Use async, batch 62 (0.7580).
    >>> advise([local, Trial("async", 2, 0.757), Trial(STALE_DENSE, 2, 0.51)])[1].split(": ")[1]
    'pulling dense weights only every eighth step costs async 0.2470 of AUC (0.5100)'
    """
    local = next(each.auc for each in trials if each.mode == BASELINE)
    advice = []
    for count in sorted({each.workers for each in trials if each.mode != BASELINE}):
        by_name = {each.mode: each for each in trials if each.workers == count and each.mode != BASELINE}
        plain, stale = by_name.get(RECOMMENDED), by_name.pop(STALE_DENSE, None)
        others = [each for each in by_name.values() if each is not plain]
        best = max(others, key=lambda each: each.auc, default=plain)
        if plain is not None and plain.auc < local - NOTICEABLE and best is not None:
            verb = "collapses" if plain.auc < local - 4 * NOTICEABLE else "loses"
            advice.append(
                f"{count} workers: async {verb} (AUC {plain.auc:.4f}, local {local:.4f}; gradients miss "
                f"{plain.staleness:.0f} pushes of others). Use {best.mode} ({best.auc:.4f})."
                if best.auc >= plain.auc + NOTICEABLE
                else f"{count} workers: async {verb} (AUC {plain.auc:.4f}, local {local:.4f}), and so do the other modes. "
                "Use more rows for a reliable comparison."
            )
        else:
            advice.append(f"{count} workers: use async: it loses no AUC here.")
        if plain is not None and stale is not None and stale.auc < plain.auc - NOTICEABLE:
            advice.append(
                f"{count} workers: pulling dense weights only every eighth step costs async {plain.auc - stale.auc:.4f} of AUC "
                f"({stale.auc:.4f}): keep mode.pull_every at 1 or 2 and mode.independent_recv off."
            )
    return advice
