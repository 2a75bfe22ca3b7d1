"""Which mode to choose: one job in all of them with simulated workers, and what the results say.

Logical workers take turns in one process, so what is measured is what staleness does to the model, not what the wire does to the speed:
N workers of equal speed in async miss about N − 1 pushes of others between reading rows and learning from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from clickfleet import opening, scoring
from clickfleet.batch import Batch
from clickfleet.cluster.simulate import Fleet, with_mode
from clickfleet.config import Config
from clickfleet.errors import ConfigError
from clickfleet.feeds import Feed

Found = list[dict[str, Any]]

OLD_DENSE = "async, dense every 8"
TRIALS: dict[str, tuple[str, dict[str, Any]]] = {
    "sync": ("sync", {}),
    "half_async": ("half_async", {}),
    "async": ("async", {"pull_every": 1}),
    OLD_DENSE: ("async", {"pull_every": 8, "independent_recv": True}),
    "geo, k 25": ("geo", {"k_steps": 25}),
}
NOTICEABLE = 0.005
"""A difference of AUC that matters."""


def measure(config: Config, workers: Sequence[int], rows: int, seed: int, say: Callable[[str], None]) -> Found:
    """Each mode with each number of workers, every worker with whole batches of its own share of the rows."""
    source = opening.open_source(config, config.data.train, None, labels=True)
    size = config.data.batch_size
    batches = list(islice(iter(source), max(1, rows // size)))
    test = (
        opening.open_source(opening.for_scoring(config), config.data.test, source.schema, labels=True)
        if config.data.test
        else None
    )
    held_out = list(islice(iter(test), 100)) if test is not None else []
    if not held_out:
        raise ConfigError("the modes are compared by their AUC on test data", "set data.test")
    found: Found = []
    base = _run(with_mode(config, "sync"), source.schema, [batches], held_out, seed)
    found.append({"mode": "local", "workers": 1, "batch_size": size, **base})
    for count in workers:
        if count == 1:
            continue
        shares = [batches[i::count] for i in range(count)]
        if not all(shares):
            say(f"{count} workers: there are only {len(batches)} batches")
            continue
        for name, (mode, settings) in TRIALS.items():
            result = _run(with_mode(config, mode, **settings), source.schema, shares, held_out, seed)
            found.append({"mode": name, "workers": count, "batch_size": size, **result})
            say(f"{name}, {count} workers: AUC {result['auc']:.4f}, staleness {result['staleness']:.1f}")
        small = max(1, size // count)
        if small < size:
            cut = [[batch[i : i + small] for batch in share for i in range(0, len(batch), small)] for share in shares]
            result = _run(with_mode(config, "async", pull_every=1), source.schema, cut, held_out, seed)
            found.append({"mode": f"async, batch {small}", "workers": count, "batch_size": small, **result})
            say(f"async with batches of {small}, {count} workers: AUC {result['auc']:.4f}")
    return found


def _run(config: Config, schema: Any, shares: list[list[Batch]], test: list[Batch], seed: int) -> dict[str, Any]:
    fleet = Fleet(config, schema, len(shares), seed=seed)
    begin = time.monotonic()
    size = max(len(batch) for share in shares for batch in share)
    model = fleet.train([Feed(share, schema, size) for share in shares])
    seconds = time.monotonic() - begin
    rows = sum(len(batch) for share in shares for batch in share)
    result = scoring.evaluate(model, test)
    return {
        "auc": result["auc"],
        "logloss": result["logloss"],
        "staleness": fleet.staleness,
        "rows_per_s": rows / max(seconds, 1e-9),
    }


def table(found: Found) -> str:
    lines = [f"{'mode':>22} {'workers':>8} {'batch':>7} {'AUC':>8} {'log loss':>9} {'staleness':>10} {'rows/s':>9}"]
    lines += [
        f"{each['mode']:>22} {each['workers']:>8} {each['batch_size']:>7} {each['auc']:>8.4f} {each['logloss']:>9.4f} "
        f"{each['staleness']:>10.1f} {each['rows_per_s']:>9,.0f}"
        for each in found
    ]
    return "\n".join(lines)


def advise(found: Found) -> list[str]:
    """What to choose, in a sentence per number of workers.

    >>> rows = [{"mode": "local", "workers": 1, "auc": 0.76}, {"mode": "async", "workers": 16, "auc": 0.60, "staleness": 15.0},
    ...         {"mode": "async, batch 62", "workers": 16, "auc": 0.758, "staleness": 15.0}]
    >>> print(advise(rows)[0])
    16 workers: async collapses (AUC 0.6000, local 0.7600; gradients miss 15 pushes of others). It holds with async, batch 62 (0.7580).
    >>> rows = [rows[0], {"mode": "async", "workers": 2, "auc": 0.757}, {"mode": OLD_DENSE, "workers": 2, "auc": 0.51}]
    >>> advise(rows)[1].split(": ")[1]
    'dense weights of every eighth step cost async 0.2470 of AUC (0.5100)'
    """
    local = next(each["auc"] for each in found if each["mode"] == "local")
    advice = []
    for count in sorted({each["workers"] for each in found if each["mode"] != "local"}):
        mine = {each["mode"]: each for each in found if each["workers"] == count and each["mode"] != "local"}
        plain, old = mine.get("async"), mine.pop(OLD_DENSE, None)
        best = max(
            (each for each in mine.values() if each is not plain), key=lambda each: float(each["auc"]), default=plain
        )
        if plain is not None and plain["auc"] < local - NOTICEABLE and best is not None:
            word = "collapses" if plain["auc"] < local - 4 * NOTICEABLE else "loses"
            advice.append(
                f"{count} workers: async {word} (AUC {plain['auc']:.4f}, local {local:.4f}; gradients miss "
                f"{plain['staleness']:.0f} pushes of others). It holds with {best['mode']} ({best['auc']:.4f})."
                if best["auc"] >= plain["auc"] + NOTICEABLE
                else f"{count} workers: async {word} (AUC {plain['auc']:.4f}, local {local:.4f}) and so does the rest: "
                "train on more rows before you judge."
            )
        else:
            advice.append(f"{count} workers: choose async, the fastest; it loses nothing here.")
        if plain is not None and old is not None and old["auc"] < plain["auc"] - NOTICEABLE:
            advice.append(
                f"{count} workers: dense weights of every eighth step cost async {plain['auc'] - old['auc']:.4f} of AUC "
                f"({old['auc']:.4f}): keep mode.pull_every at 1 or 2 and mode.independent_recv off."
            )
    return advice
