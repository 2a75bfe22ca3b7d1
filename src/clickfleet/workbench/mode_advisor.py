"""Recommend a training mode: run one job in all modes with simulated workers and compare the results.

The logical workers take turns in one process. So this measures the effect of staleness on the model, not the cost of the network:
with N equally fast workers in async, about N − 1 pushes of others lie between reading rows and pushing their gradients.
"""

from __future__ import annotations

import math
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

BASELINE, ASYNC = "local", "async"
FIRST_CHOICE = ASYNC
"""What docs/modes.md recommends to start with: of the modes that keep the AUC of one machine, the fastest."""
TRIALS: dict[str, tuple[str, Facts]] = {
    "sync": ("sync", {}),
    "half_async": ("half_async", {}),
    ASYNC: ("async", {}),
    "async, dense gradient": ("async", {"dense": "gradient"}),
    "geo": ("geo", {}),
    "geo, k_steps 100": ("geo", {"k_steps": 100}),
}
"""Name of a trial -> the mode and its settings."""
NOTICEABLE = 0.005
"""A difference of AUC that matters."""
UNCERTAIN = 0.025
"""If test rows are so few that only larger differences of AUC can be seen, there is no advice."""
FEW_STEPS = 300


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
    steps: int = 0
    """Batches trained on, by all workers together."""
    clicks: int = 0
    """Test rows with a click."""
    others: int = 0
    """Test rows without a click."""


def measure(config: Config, workers: Sequence[int], rows: int, seed: int, say: Callable[[str], None]) -> list[Trial]:
    """Run each mode with each number of workers. Every worker trains on whole batches of its share of the rows."""
    config, guess = dataset.settle(config)
    if guess is not None:
        say(guess.text())
    source = dataset.open_source(config, config.data.train, None if guess is None else guess.schema, labels=True)
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
            mode, settings = TRIALS[ASYNC]
            trial = run(f"{ASYNC}, batch {small}", with_mode(config, mode, **settings), split, small)
            say(f"{ASYNC} with batches of {small}, {count} workers: AUC {trial.auc:.4f}")
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
    clicks = sum(int(batch.clicked.sum()) for batch in test if batch.clicked is not None)
    return Trial(
        mode=name,
        workers=len(shares),
        auc=metrics["auc"],
        batch_size=batch_size,
        logloss=metrics["logloss"],
        staleness=cluster.staleness,
        rows_per_s=rows / max(seconds, 1e-9),
        steps=sum(map(len, shares)),
        clicks=clicks,
        others=sum(map(len, test)) - clicks,
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
    """Return a recommendation for each number of workers, or why the results support none.

    >>> from dataclasses import replace
    >>> local = Trial("local", 1, 0.76, steps=400, clicks=9000, others=31000)
    >>> slow = Trial("async", 16, 0.60, staleness=15.0)
    >>> print("\\n".join(advise([local, slow, Trial("half_async", 16, 0.758), Trial("sync", 16, 0.74)])))
    16 workers: use half_async: AUC 0.7580, one machine 0.7600.
    16 workers: more than 0.0050 is lost by async (0.6000; gradients miss 15 pushes of others), sync (0.7400).
    >>> advise([replace(local, clicks=30, others=70), slow])
    ['no advice: 100 test rows with 30 clicks distinguish only AUCs that differ by more than 0.0562; give more test rows']
    >>> advise([replace(local, auc=0.5), slow])[0].partition(";")[0]
    'no advice: the model on one machine has learned nothing after 400 steps (AUC 0.5000)'
    """
    local = next(each for each in trials if each.mode == BASELINE)
    error = standard_error(local.auc, local.clicks, local.others)
    margin = max(NOTICEABLE, error)
    if margin > UNCERTAIN:
        rows = f"{local.clicks + local.others:,} test rows with {local.clicks:,} clicks"
        return [f"no advice: {rows} distinguish only AUCs that differ by more than {margin:.4f}; give more test rows"]
    if local.auc < 0.5 + 3 * margin:
        return [
            f"no advice: the model on one machine has learned nothing after {local.steps:,} steps (AUC {local.auc:.4f}); "
            "use more rows (--rows), smaller batches or another learning rate"
        ]
    advice = []
    for count in sorted({each.workers for each in trials if each.mode != BASELINE}):
        by_name = {each.mode: each for each in trials if each.workers == count and each.mode != BASELINE}
        advice += [f"{count} workers: {line}" for line in _advise(by_name, local, margin)]
    if advice and local.steps < FEW_STEPS:
        advice.append(
            f"only {local.steps:,} steps: staleness costs most in the first few hundred, so a longer run loses less; see --rows."
        )
    return advice


def _advise(trials: dict[str, Trial], local: Trial, margin: float) -> list[str]:
    """Recommend one of the trials: the first choice if it keeps the AUC of one machine, else the best."""
    keep = [each for each in trials.values() if each.auc >= local.auc - margin]
    lose = [each for each in trials.values() if each not in keep]
    best = max(trials.values(), key=lambda each: each.auc)
    choice = trials[FIRST_CHOICE] if trials.get(FIRST_CHOICE) in keep else best
    scores = f"AUC {choice.auc:.4f}, one machine {local.auc:.4f}"
    if not keep:
        return [
            f"no mode keeps the AUC of one machine; the closest is {choice.mode}: {scores}. "
            "Divide data.batch_size by the number of workers, or train on more rows."
        ]
    lines = [f"use {choice.mode}: {scores}."]
    if also := [f"{each.mode} ({each.auc:.4f})" for each in keep if each is not choice]:
        lines.append(
            f"{', '.join(also)} {'keeps' if len(also) == 1 else 'keep'} it too; measure the speed on your cluster."
        )
    if lose:
        plain = trials.get(ASYNC)
        missed = "" if plain is None else f"; gradients miss {plain.staleness:.0f} pushes of others"
        names = ", ".join(f"{each.mode} ({each.auc:.4f}{missed if each is plain else ''})" for each in lose)
        lines.append(f"more than {margin:.4f} is lost by {names}.")
    return lines


def standard_error(auc: float, clicks: int, others: int) -> float:
    """Return the standard error of an AUC (Hanley and McNeil, 1982). It grows as the test rows become few.

    >>> round(standard_error(0.75, 250, 750), 4), standard_error(0.75, 0, 1000)
    (0.0193, inf)
    """
    if not clicks or not others:
        return math.inf
    same_click, same_other = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    spread = auc * (1 - auc) + (clicks - 1) * (same_click - auc**2) + (others - 1) * (same_other - auc**2)
    return math.sqrt(max(spread, 0.0) / (clicks * others))
