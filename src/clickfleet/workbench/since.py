"""Since when a row has its factors. The table spends no bytes per row on it: what the run keeps tells it, checkpoints and published
entries, each of which saw the row with factors or without. The answer is the interval between two of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clickfleet import checkpoint, published, saving, storage
from clickfleet.policy import Policy
from clickfleet.workbench.tail import Tail

Facts = dict[str, Any]


@dataclass(frozen=True)
class Sight:
    """The row at one step of the run."""

    step: int
    where: str
    full: bool
    time: float | None = None


def row_of(batches: Iterable[pa.RecordBatch], key: int) -> Facts | None:
    """The row of a key among those of a file."""
    for batch in batches:
        where = np.flatnonzero(batch.column("key").to_numpy() == np.uint64(key))
        if len(where):
            facts: Facts = {k: v for k, v in batch.slice(int(where[0]), 1).to_pylist()[0].items() if k != "key"}
            facts["full"] = bool(facts["embedx"])
            facts["norm"] = float(np.linalg.norm(facts["embedx"]))
            return facts
    return None


def in_checkpoint(path: Path, key: int) -> Facts | None:
    """The row in the one file of a checkpoint that may have it."""
    return row_of(checkpoint.batches_of(path, key, storage.read_manifest(path, "checkpoint")["row_files"]), key)


def since(path: Path, key: int) -> Facts:
    """Between which two moments the row of the model at a resolved path got its factors, as closely as is known."""
    folder = path.parent
    run = folder.parent if folder.name in ("checkpoints", "published") else folder
    chain = saving.entries(path)
    manifest = storage.read_manifest(path, "checkpoint") if chain is None else chain[-1].manifest
    last = int(manifest.get("step") or 0)
    kept = [step for step in checkpoint.steps(run / "checkpoints") if step <= last]
    policy = _policy(run / "checkpoints", kept)
    factors = manifest["table"]["factors"] if chain is None else manifest["factors"]
    any_row = factors == 0 or (policy is not None and policy.admission.by == "birth")
    steps = _Steps(run)
    sights = [_of_checkpoint(run / "checkpoints", step, key, any_row, steps) for step in kept]
    entries = _entries(run / "published", last)
    sights += _of_entries(entries, key, any_row, policy)
    sights.sort(key=lambda sight: sight.step)
    before = next((i for i in reversed(range(len(sights))) if not sights[i].full), -1)
    by = sights[before + 1] if before + 1 < len(sights) else None
    after = sights[before] if before >= 0 else None
    if after is None and by is not None and kept and _alone(_path(run / "checkpoints", kept[-1])):
        after = Sight(0, "the run's beginning", False)
    first = after.step if after is not None else None
    return {
        "after": None if after is None else vars(after),
        "by": None if by is None else vars(by),
        "passes": steps.passes(first, by.step) if by is not None else None,
        "seen": [vars(sight) for sight in sights],
    }


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:012d}"


def _policy(folder: Path, steps: list[int]) -> Policy | None:
    if not steps:
        return None
    manifest = storage.read_manifest(_path(folder, steps[-1]), "checkpoint")
    return Policy.from_dict(manifest["table"]["policy"])


def _alone(path: Path) -> bool:
    """Whether the run of a checkpoint began with an empty table."""
    return (path / "config.yaml").is_file() and saving.read_config(path).train.init_from is None


def _of_checkpoint(folder: Path, step: int, key: int, any_row: bool, steps: _Steps) -> Sight:
    path = _path(folder, step)
    found = in_checkpoint(path, key)
    when = steps.time(step)
    when = (path / storage.MANIFEST).stat().st_mtime if when is None else when
    return Sight(step, path.name, found is not None and (found["full"] or any_row), when)


def _entries(folder: Path, last: int) -> list[published.Entry]:
    """Those kept, oldest first, without what was published by a course that the run has given up since."""
    log, found = published.Log(folder), list[published.Entry]()
    for line in reversed(log.lines()):
        if (folder / line.name).is_dir():
            entry = log.entry(line)
            if entry.manifest["step"] <= last and "rollback_to" not in entry.info:
                last = entry.manifest["step"]
                found.append(entry)
    return found[::-1]


def _of_entries(entries: list[published.Entry], key: int, any_row: bool, policy: Policy | None) -> Iterator[Sight]:
    """An entry that does not name the row tells something only where no row is left out or put off."""
    everything = policy is not None and policy.base_threshold <= 0 and policy.delta_keep_days == float("inf")
    at_once = policy is not None and policy.delta_threshold <= 0
    full: bool | None = None  # of the row in the chain so far; None: not known
    for entry in entries:
        found = row_of(entry.batches(), key)
        if found is not None:
            full = found["full"] or any_row
        elif entry.base or np.isin(np.uint64(key), entry.deleted()):
            full = False if everything else None
        elif not at_once:
            continue
        if full is not None:
            yield Sight(int(entry.manifest["step"]), entry.path.name, full, entry.info.get("time"))


class _Steps:
    """When a run took which step, by its metrics.jsonl."""

    def __init__(self, run: Path) -> None:
        self._times: list[tuple[int, float]] = []
        self._passes: list[tuple[int, int, int]] = []
        for facts in Tail(run / "metrics.jsonl").lines():
            if "step" in facts:
                self._times.append((facts["step"], facts["time"]))
            if facts["kind"] == "pass":
                self._passes.append((facts["step"], facts["day"], facts["pass"]))

    def time(self, step: int) -> float | None:
        """Of the first line at or after a step; None where there is none."""
        return next((when for other, when in self._times if other >= step), None)

    def passes(self, after: int | None, by: int) -> Facts | None:
        """The first and the last pass that were trained between two steps."""
        ends = [0] + [end for end, _, _ in self._passes]
        found = [
            {"day": day, "pass": number}
            for begin, (end, day, number) in zip(ends, self._passes, strict=False)
            if begin < by and end > (after or 0)
        ]
        return {"first": found[0], "last": found[-1]} if found else None


def words(found: Facts, how: str) -> str:
    """`how` it was admitted, and when."""
    after, by, passes = found["after"], found["by"], found["passes"]
    if by is None:
        return f"{how}; nothing is kept here that tells when"
    when = f"between {_moment(after)} and {_moment(by)}" if after is not None else f"not after {_moment(by)}"
    if passes is not None and after is not None:
        first, last = (f"pass {one['pass']} of {one['day']}" for one in (passes["first"], passes["last"]))
        when += f", in {first}" if first == last else f", from {first} to {last}"
    return f"{how}, {when}"


def _moment(sight: Facts) -> str:
    at = "" if sight["time"] is None else time.strftime(", %Y-%m-%d %H:%M:%S", time.localtime(sight["time"]))
    return f"step {sight['step']} ({sight['where']}{at})"
