"""One row of a model: its weights and statistics, how it was admitted, and what the next shrink would do to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from clickfleet import published, saving, storage
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.policy import Policy
from clickfleet.schema import Schema
from clickfleet.workbench.crew import count
from clickfleet.workbench.inspection import Facts, removable, scores
from clickfleet.workbench.since import in_checkpoint, row_of, since
from clickfleet.workbench.since import words as when


def key_of(schema: Schema, slot: str, value: str) -> int:
    """The key of a value, as files and requests have it."""
    from clickfleet.serve.fields import Fields

    names = [one.name for one in schema.slots]
    if slot not in names:
        raise ConfigError(f"the model has no slot {slot}", f"slots: {', '.join(names)}")
    one = schema.slots[names.index(slot)]
    if one.bucket is not None:
        raise ConfigError(f"slot {slot} is made from the column {one.bucket.column}", "give --key")
    batch = Fields(schema).rows([{one.source or one.name: [value] if one.multi else value}])
    place = names.index(slot)
    return int(batch.keys[batch.offsets[place]])


def schema_of(path: Path) -> Schema:
    """The schema of the model at a resolved path."""
    chain = saving.entries(path)
    return saving.read_schema(path) if chain is None else Schema.from_dict(chain[-1].manifest["schema"])


def look_up(model: str | Path, key: int) -> Facts:
    """The row of a key, and what becomes of it."""
    path = saving.resolve(model)
    schema = schema_of(path)
    chain = saving.entries(path)
    found = in_checkpoint(path, key) if chain is None else in_entries(chain, key)
    facts: Facts = {"model": str(path), "key": key, "found": found is not None}
    if found is not None:
        slot = found.pop("slot")
        facts |= {"slot": schema.slots[slot].name if slot < len(schema.slots) else None, **found}
    facts["admitted"] = since(path, key) if found is not None else None
    if chain is None:
        policy = Policy.from_dict(storage.read_manifest(path, "checkpoint")["table"]["policy"])
        facts["admission"] = admission(policy, facts)
        if found is not None:
            facts["score"] = float(scores(policy, facts["show"], facts["click"]))
            facts["shrink"] = shrink(policy, facts)
    return facts


def in_entries(chain: list[published.Entry], key: int) -> Facts | None:
    """The row as the newest entry that says anything about it has it."""
    for entry in reversed(chain):
        found = row_of(entry.batches(), key)
        if found is not None:
            return found
        if np.isin(np.uint64(key), entry.deleted()):
            return None
    return None


def admission(policy: Policy, facts: Facts) -> str:
    """How and when the row came to its factors, or what it lacks."""
    rule = policy.admission
    if not facts["found"]:
        return "" if rule.by == "birth" else f"rows get factors by {rule}"
    if rule.by == "birth":
        return when(facts["admitted"], "rows are made whole by their first push: this one came")
    if facts["full"]:
        return when(facts["admitted"], f"admitted by {rule}")
    has = {"score": scores(policy, facts["show"], facts["click"]), "count": facts["show"]}.get(rule.by)
    if has is None:
        return f"not admitted yet: every show admits it with {rule}"
    return (
        f"not admitted yet: its {'score' if rule.by == 'score' else 'number of shows'} is {has:g} of {rule.threshold:g}"
    )


def shrink(policy: Policy, facts: Facts) -> Facts:
    """Whether the next shrink removes the row, and why."""
    after, days = facts["score"] * policy.decay_rate, facts["unseen_days"]
    reasons = []
    if after < policy.delete_threshold:
        reasons.append(f"its score falls to {after:.4g}, below delete_threshold {policy.delete_threshold:g}")
    if days > policy.delete_after_unseen_days:
        reasons.append(f"it was not seen for {days} days, more than {policy.delete_after_unseen_days:g}")
    gone = bool(removable(policy, np.float64(facts["score"]), np.int64(days)))
    assert gone == bool(reasons)
    if not gone:
        limit = policy.delete_after_unseen_days
        left = "" if limit == float("inf") else f", unseen for {days} of {limit:g} days"
        reasons.append(f"its score falls to {after:.4g}, not below {policy.delete_threshold:g}{left}")
    return {"removed": gone, "score_after": float(after), "reasons": reasons}


def words(facts: Facts) -> list[str]:
    """The same for people."""
    if not facts["found"]:
        lines = [f"key {facts['key']} has no row: it counts as zeros"]
    else:
        kind = "with factors" if facts["full"] else "short: without factors"
        lines = [f"key {facts['key']}, slot {facts['slot']}, {kind}", f"weight {facts['embed_w']:.6g}"]
        if facts["full"]:
            lines.append(f"factors (norm {facts['norm']:.4g}) {' '.join(f'{x:.4g}' for x in facts['embedx'])}")
        if "score" in facts:
            lines.append(
                f"{facts['show']:g} shows, {facts['click']:g} clicks, score {facts['score']:.4g}, "
                f"unseen for {count(facts['unseen_days'], 'day')}, {'published' if facts['published'] else 'not published'}"
            )
        else:
            lines.append("published entries hold no statistics: look at the run's checkpoint for them")
    if facts.get("admission"):
        lines.append(facts["admission"])
    elif facts["found"] and facts["full"]:
        lines.append(when(facts["admitted"], "with factors"))
    if "shrink" in facts:
        what = "the next shrink removes it" if facts["shrink"]["removed"] else "the next shrink keeps it"
        lines.append(f"{what}: {'; '.join(facts['shrink']['reasons'])}")
    return lines


def check_key(text: str) -> int:
    """A key as people write it: decimal, or 0x…"""
    try:
        key = int(text, 0)
    except ValueError:
        key = -1
    if not 0 <= key < 2**64:
        raise CheckpointError(f"{text} is no key: a whole number from 0 to 2^64 - 1, or 0x…")
    return key
