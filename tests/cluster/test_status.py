"""What the table at the end of a run shows of its shards."""

from __future__ import annotations

from typing import Any

from clickfleet.cluster.status import ClusterProgress, closing_facts, closing_table


def test_rejected_messages_and_connections_are_shown() -> None:
    overview = ClusterProgress(100)
    shard: Any = {"rows": 5, "pushes": 2, "staleness": 0.5, "staleness_most": 1, "dropped": 0, "refused": 0}
    overview.shards = {"shard 0": shard, "shard 1": {**shard, "dropped": 3, "refused": 1200}}
    _, first, second = closing_table(overview, {}, 1.0).splitlines()
    assert first.endswith("staleness 0.50, at most 1")
    assert second.endswith("at most 1, 3 foreign messages dropped, 1,200 connections refused")
    facts = closing_facts(overview, 1.0)
    assert (facts["dropped_messages"], facts["refused_connections"]) == (3, 1200)
