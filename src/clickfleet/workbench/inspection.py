"""Describe a saved model: rows per slot, memory, scores, norms, one row in detail, and the entries of a published log."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clickfleet.config.plugins import shown
from clickfleet.data.names import Names
from clickfleet.data.schema import Schema
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.store import atomic, checkpoint, published, run_folder
from clickfleet.store.policy import Admission, Policy
from clickfleet.store.table import NO_SLOT, tier_facts, width_facts
from clickfleet.training import saving
from clickfleet.training.learner import Learner
from clickfleet.training.model import facts
from clickfleet.workbench.runner import Facts, count

TOP_ROWS = 20
SCORE_EDGES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, float("inf"))


def scores(policy: Policy, show: Any, click: Any) -> Any:
    """Return the score that decides whether rows are admitted, published and evicted."""
    return (show - click) * policy.nonclick_coeff + click * policy.click_coeff


def removable(policy: Policy, score: Any, unseen_days: Any) -> Any:
    """Return whether the next shrink removes a row. A shrink first decays the score."""
    return (score * policy.decay_rate < policy.delete_threshold) | (unseen_days > policy.delete_after_unseen_days)


@dataclass
class _Survey:
    """Statistics gathered in one pass over all rows."""

    slots: int
    rows: NDArray[np.int64] = field(init=False)
    full: NDArray[np.int64] = field(init=False)
    weights: NDArray[np.float64] = field(init=False)
    norms: NDArray[np.float64] = field(init=False)
    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(SCORE_EDGES) - 1, np.int64))
    removable: int = 0
    published: int = 0
    shown: float = 0.0
    sampled: list[Any] = field(default_factory=list)
    top: list[tuple[float, Facts]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows, self.full = np.zeros(self.slots, np.int64), np.zeros(self.slots, np.int64)
        self.weights, self.norms = np.zeros(self.slots), np.zeros(self.slots)

    def add(self, columns: Any, policy: Policy) -> None:
        slot, size = columns["slot"].astype(np.int64), len(columns["key"])
        slot = np.where(slot < self.slots, slot, 0)
        self.rows += np.bincount(slot, minlength=self.slots)
        self.weights += np.bincount(slot, np.abs(columns["embed_w"]), self.slots)
        if columns["full"]:
            norm = np.linalg.norm(columns["embedx"].reshape(size, -1), axis=1)
            self.full += np.bincount(slot, minlength=self.slots)
            self.norms += np.bincount(slot, norm, self.slots)
            self.sampled.append(norm[:: max(1, size // 10_000)])
        score = scores(policy, columns["show"], columns["click"])
        self.histogram += np.histogram(score, SCORE_EDGES)[0]
        self.removable += int(removable(policy, score, columns["unseen_days"]).sum())
        self.published += int((columns["published"] != 0).sum())
        self.shown += float(columns["show"].sum())
        rank = columns["show"] if columns["show"].any() else np.abs(columns["embed_w"])  # published rows have no shows
        for i in np.argsort(-rank, kind="stable")[:TOP_ROWS]:
            facts = {name: float(columns[name][i]) for name in ("show", "click", "embed_w")}
            self.top.append((float(rank[i]), {"key": int(columns["key"][i]), "slot": int(columns["slot"][i]), **facts}))
        self.top = sorted(self.top, key=lambda item: -item[0])[:TOP_ROWS]

    def largest(self, schema: Schema, names: Names | None) -> list[Facts]:
        """Return the rows with the most shows, or the largest weights if there are no shows, and the values behind them."""
        slots = [slot.name for slot in schema.slots]
        rows = []
        for _, row in self.top:
            slot = slots[row["slot"]] if row["slot"] < len(slots) else None
            value = None if names is None or slot is None else names.name(slot, row["key"])
            counts = {name: row[name] if self.shown > 0 else None for name in ("show", "click")}
            rows.append({"key": row["key"], "slot": slot, "value": value, **counts, "embed_w": row["embed_w"]})
        return rows


def describe(model: str | Path, trust: bool = False) -> Facts:
    """Return the facts of a saved model. `trust` allows code named by the model to run."""
    path = run_folder.resolve(model)
    learner = saving.load(path, trust)
    names = run_folder.read_names(path, learner.schema)
    return {**facts(path, learner), "findings": learner.model.findings(), **survey(learner, names), **entries(path)}


def survey(learner: Learner, names: Names | None = None) -> Facts:
    """Return statistics of the rows. Scores are None for a published model: its entries hold no shows and clicks."""
    schema, policy = learner.schema, learner.table.policy
    found = _Survey(max(len(schema.slots), 1))
    with learner.table.snapshot() as rows:
        for columns in rows:
            found.add(columns, policy)
    norms = np.concatenate(found.sampled) if found.sampled else np.empty(0)
    stats = learner.table.stats()
    slots = {
        slot.name: {
            "rows": int(found.rows[i]),
            "full_rows": int(found.full[i]),
            "mean_abs_weight": float(found.weights[i] / max(found.rows[i], 1)),
            "mean_norm": float(found.norms[i] / max(found.full[i], 1)),
        }
        for i, slot in enumerate(schema.slots)
    }
    known = found.shown > 0
    return {
        "per_slot": slots,
        "bytes_per_row": stats["bytes"] / max(stats["rows"], 1),
        "top_rows": found.largest(schema, names),
        "norms": {f"p{p}": float(np.percentile(norms, p)) for p in (50, 90, 99, 100)} if len(norms) else None,
        "scores": {_bin(i): int(n) for i, n in enumerate(found.histogram)} if known else None,
        "removed_at_next_shrink": found.removable if known else None,
        "published_rows": found.published if known else None,
        "policy": policy.to_dict(),
        "memory_limit": learner.table.memory_limit,
        "tiers": tier_facts(stats),
        "widths": {str(width): facts for width, facts in width_facts(stats).items()},
    }


def _bin(place: int) -> str:
    low, high = SCORE_EDGES[place : place + 2]
    return f"{low:g}…{high:g}" if high < float("inf") else f"{low:g} and more"


def entries(path: Path) -> Facts:
    """Return the entries of a published model, oldest first; an empty dictionary for a checkpoint."""
    chain = run_folder.entries(path)
    if chain is None:
        return {}
    return {
        "entries": [
            {
                "sequence": entry.sequence,
                "kind": entry.manifest["kind"],
                "rows": entry.manifest["rows"],
                "deleted": entry.manifest["deleted"],
                "bytes": entry.size,
                "row_format": entry.row_format,
                "bytes_per_row": entry.row_bytes / max(1, entry.manifest["rows"]),
                "time": entry.info.get("time"),
            }
            for entry in chain
        ]
    }


def key_of(schema: Schema, slot: str, value: str) -> int:
    """Return the key of a value as it appears in files and requests."""
    from clickfleet.serve.features import Fields

    names = [one.name for one in schema.slots]
    if slot not in names:
        raise ConfigError(f"the model has no slot {slot}", f"slots: {', '.join(names)}")
    one = schema.slots[names.index(slot)]
    if one.bucket is not None:
        raise ConfigError(f"slot {slot} holds buckets of the column {one.bucket.column}", "use --key instead")
    batch = Fields(schema).rows([{one.source or one.name: [value] if one.multi else value}])
    place = names.index(slot)
    return int(batch.keys[batch.offsets[place]])


def schema_of(path: Path) -> Schema:
    """Return the schema of the model at a resolved path."""
    chain = run_folder.entries(path)
    return run_folder.read_schema(path) if chain is None else Schema.from_dict(chain[-1].manifest["schema"])


def look_up(model: str | Path, key: int) -> Facts:
    """Return the row of a key, when it got its factors, and whether the next shrink removes it."""
    path = run_folder.resolve(model)
    schema = schema_of(path)
    chain = run_folder.entries(path)
    row = row_in_checkpoint(path, key) if chain is None else row_in_entries(chain, key)
    slot = NO_SLOT if row is None else row.pop("slot")
    facts: Facts = {"model": str(path), "key": key, "found": row is not None}
    if row is not None:
        name = schema.slots[slot].name if slot < len(schema.slots) else None
        known = None if name is None else run_folder.read_names(path, schema)
        facts |= {"slot": name, "value": None if known is None or name is None else known.name(name, key), **row}
    facts["admitted"] = first_seen(path, key) if row is not None else None
    if chain is None:
        policy = _policy(atomic.read_manifest(path, "checkpoint")["table"], slot)
        facts["admission"] = admission(policy, facts)
        if row is not None:
            facts["score"] = float(scores(policy, facts["show"], facts["click"]))
            facts["shrink"] = shrink(policy, facts)
    return facts


def _policy(table: Facts, slot: int) -> Policy:
    """Return the policy of the rows of a slot from the description of a table."""
    policy, own = Policy.from_dict(table["policy"]), table.get("slots", {}).get(str(slot))
    return policy if own is None else replace(policy, admission=Admission.parse(own["admission"]))


def find_row(batches: Iterable[pa.RecordBatch], key: int) -> Facts | None:
    """Return the row of a key from the batches of a file."""
    for batch in batches:
        where = np.flatnonzero(batch.column("key").to_numpy() == np.uint64(key))
        if len(where):
            facts: Facts = {k: v for k, v in batch.slice(int(where[0]), 1).to_pylist()[0].items() if k != "key"}
            facts["full"] = bool(facts["embedx"])
            facts["norm"] = float(np.linalg.norm(facts["embedx"]))
            return facts
    return None


def row_in_checkpoint(path: Path, key: int) -> Facts | None:
    """Read the row from the one file of a checkpoint that can hold the key."""
    return find_row(checkpoint.batches_of(path, key, atomic.read_manifest(path, "checkpoint")["row_files"]), key)


def row_in_entries(chain: list[published.Entry], key: int) -> Facts | None:
    """Return the row from the newest entry that holds or deletes it."""
    for entry in reversed(chain):
        row = find_row(entry.batches(), key)
        if row is not None:
            return row
        if np.isin(np.uint64(key), entry.deleted()):
            return None
    return None


@dataclass(frozen=True)
class Sighting:
    """A row in one checkpoint or published entry of its run."""

    step: int
    where: str
    full: bool
    time: float | None


def first_seen(path: Path, key: int) -> Facts:
    """Find the first kept checkpoint or entry (`by`) that holds the row with factors, and the last one without (`after`)."""
    folder = path.parent
    run = folder.parent if folder.name in ("checkpoints", "published") else folder
    chain = run_folder.entries(path)
    manifest = atomic.read_manifest(path, "checkpoint") if chain is None else chain[-1].manifest
    last = int(manifest.get("step") or 0)
    seen = [_in_checkpoint(run / "checkpoints", step, key) for step in checkpoint.steps(run / "checkpoints")]
    log = published.Log(run / "published")
    for entry in (log.entry(line) for line in log.lines() if (log.folder / line.name).is_dir()):
        row = find_row(entry.batches(), key)
        if row is not None:  # an entry without the row proves nothing: thresholds leave rows out
            seen.append(Sighting(int(entry.manifest["step"]), entry.path.name, row["full"], entry.info.get("time")))
    seen = sorted((one for one in seen if one.step <= last), key=lambda one: one.step)
    without = max((place for place, one in enumerate(seen) if not one.full), default=-1)
    return {
        "after": asdict(seen[without]) if without >= 0 else None,
        "by": asdict(seen[without + 1]) if without + 1 < len(seen) else None,
        "seen": [asdict(one) for one in seen],
    }


def _in_checkpoint(folder: Path, step: int, key: int) -> Sighting:
    path = checkpoint.step_folder(folder, step)
    row = row_in_checkpoint(path, key)
    return Sighting(step, path.name, row is not None and row["full"], (path / atomic.MANIFEST).stat().st_mtime)


def _first_seen_text(admitted: Facts) -> str:
    first = admitted["by"]
    if first is None:
        return "no checkpoint or entry here shows when it got its factors"
    when = "" if first["time"] is None else time.strftime(", %Y-%m-%d %H:%M:%S", time.localtime(first["time"]))
    return f"first seen with factors in {first['where']} (step {first['step']}{when})"


def admission(policy: Policy, facts: Facts) -> str:
    """Describe how and when the row got its factors, or what it lacks."""
    rule = policy.admission
    if not facts["found"]:
        return "" if rule.by == "birth" else f"rows get factors by {rule}"
    if facts["full"]:
        how = "rows get factors with their first push" if rule.by == "birth" else f"admitted by {rule}"
        return f"{how}; {_first_seen_text(facts['admitted'])}"
    if rule.by == "birth":  # a table without factors
        return ""
    has = {"score": scores(policy, facts["show"], facts["click"]), "count": facts["show"]}.get(rule.by)
    if has is None:
        return f"not admitted yet: {rule} may admit it at any show"
    return (
        f"not admitted yet: its {'score' if rule.by == 'score' else 'number of shows'} is {has:g} of {rule.threshold:g}"
    )


def shrink(policy: Policy, facts: Facts) -> Facts:
    """Return whether the next shrink removes the row, and why."""
    after, days = facts["score"] * policy.decay_rate, facts["unseen_days"]
    reasons = []
    if after < policy.delete_threshold:
        reasons.append(f"its score falls to {after:.4g}, below delete_threshold {policy.delete_threshold:g}")
    if days > policy.delete_after_unseen_days:
        reasons.append(f"it was not seen for {days} days, more than {policy.delete_after_unseen_days:g}")
    removed = bool(reasons)
    if not removed:
        limit = policy.delete_after_unseen_days
        left = "" if limit == float("inf") else f", unseen for {days} of {limit:g} days"
        reasons.append(f"its score falls to {after:.4g}, not below {policy.delete_threshold:g}{left}")
    return {"removed": removed, "score_after": float(after), "reasons": reasons}


def row_text(facts: Facts) -> list[str]:
    """Format the result of `look_up` as lines of text."""
    if not facts["found"]:
        lines = [f"key {facts['key']} has no row: it counts as zeros"]
    else:
        kind = "with factors" if facts["full"] else "without factors"
        value = "" if facts["value"] is None else f" = {shown(facts['value'])}"
        lines = [f"key {facts['key']}, slot {facts['slot']}{value}, {kind}", f"weight {facts['embed_w']:.6g}"]
        if facts["full"]:
            lines.append(f"factors (norm {facts['norm']:.4g}) {' '.join(f'{x:.4g}' for x in facts['embedx'])}")
        if "score" in facts:
            lines.append(
                f"{facts['show']:g} shows, {facts['click']:g} clicks, score {facts['score']:.4g}, "
                f"unseen for {count(facts['unseen_days'], 'day')}, {'published' if facts['published'] else 'not published'}"
            )
        else:
            lines.append("published entries hold no statistics; the run's checkpoints do")
    if facts.get("admission"):
        lines.append(facts["admission"])
    elif facts["found"] and facts["full"]:
        lines.append(_first_seen_text(facts["admitted"]))
    if "shrink" in facts:
        verb = "removes" if facts["shrink"]["removed"] else "keeps"
        lines.append(f"the next shrink {verb} it: {'; '.join(facts['shrink']['reasons'])}")
    return lines


def parse_key(text: str) -> int:
    """Parse a key, decimal or hexadecimal (0x…)."""
    try:
        key = int(text, 0)
    except ValueError:
        key = -1
    if not 0 <= key < 2**64:
        raise CheckpointError(f"{text!r} is not a key", "a key is a whole number from 0 to 2^64 - 1, decimal or 0x…")
    return key
