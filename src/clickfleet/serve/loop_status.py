"""What a loop does, for its page: the counters of the server beside those that the trainer writes, and alarms in words."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from clickfleet.serve.context import Context
from clickfleet.serve.http import RefusedError
from clickfleet.serve.state_folder import TRAINER, read_json
from clickfleet.store.lock import is_held

METRICS, RECORDS, DEMO = "metrics.prom", "metrics.jsonl", "demo.json"
PREFIX = "clickfleet_online_"
SCORING = ("/v1/predict", "/v1/rank", "/v2/infer", "grpc")
"""Routes whose requests count."""
QUIET_S = 60.0
"""Without a new figure of the trainer for this time while shows wait, it is stuck."""
TAIL_BYTES = 1 << 16
Values = dict[str, float]


def describe(context: Context, now: float | None = None) -> dict[str, Any]:
    """Return the reply of `/v1/loop`. Raise RefusedError if this server is not part of a loop."""
    if context.settings.run is None:
        raise RefusedError(404, "this server is not part of a loop; start one with `clickfleet loop`")
    now = time.time() if now is None else now
    run, state = Path(context.settings.run), Path(context.settings.state)
    stats, totals = context.stats(), context.totals()
    trained, written = _trained(run / METRICS)
    running = is_held(run / ".lock") is True
    alarms = [
        *_server_alarms(context, totals.counts),
        *_trainer_alarms(run, state, running, trained),
        *_stuck(trained, written, now, running),
        *_join_alarms(trained),
        *_freshness_alarms(trained, stats["freshness"]),
    ]
    joined = {kind: trained.get(f"join_rows/{kind}") for kind in ("labels", "negatives", "corrections")}
    return {
        "requests": sum(n for key, n in totals.replies.items() if key.startswith(SCORING) and key.endswith(" 200")),
        "requests_per_s": stats["replies_per_s"],
        "p99_ms": stats["p99_ms"],
        "shows_logged": round(totals.counts.get("shows_logged", 0)),
        "shows_dropped": round(totals.counts.get("shows_dropped", 0)),
        "feedback": round(totals.counts.get("feedback_logged", 0)),
        "shows_joined": trained.get("join_events/shows"),
        **joined,
        "waiting": trained.get("join_waiting/waiting"),
        "labels_open": _by_label(trained, "labels_open"),
        "labels_on_time": _by_label(trained, "labels_on_time"),
        "rows_learned": trained.get("run_rows"),
        "sequence": context.batcher.version.identity.sequence,
        "lag": context.lag,
        "freshness": stats["freshness"],
        "auc": trained.get("auc"),
        "copc": trained.get("copc"),
        "trainer": {"running": running, "deaths": context.deaths.get("trainer", 0)},
        "deaths": context.deaths,
        "demo": read_json(state / DEMO),
        "alarms": alarms,
    }


def _by_label(trained: Values, name: str) -> Values:
    """Return the shares of a metric by label."""
    return {key.removeprefix(f"{name}/"): value for key, value in trained.items() if key.startswith(f"{name}/")}


def _trained(path: Path) -> tuple[Values, float | None]:
    """Return the figures of the trainer and when it wrote them."""
    try:
        facts = path.stat()
        return _parsed(path, facts.st_mtime_ns, facts.st_ino), facts.st_mtime
    except (OSError, ValueError):
        return {}, None


@lru_cache(maxsize=1)
def _parsed(path: Path, changed: int, number: int) -> Values:
    from prometheus_client.parser import text_string_to_metric_families

    values = {}
    for family in text_string_to_metric_families(path.read_text()):
        for sample in family.samples:
            label = "".join(f"/{value}" for value in sample.labels.values())
            values[sample.name.removeprefix(PREFIX) + label] = float(sample.value)
    return values


def _server_alarms(context: Context, counts: Mapping[str, float]) -> list[str]:
    alarms = []
    if (problem := context.reported_problem) is not None:
        alarms.append(f"the server does not serve the newest entry: {problem}")
    if dropped := counts.get("shows_dropped", 0):
        alarms.append(f"{dropped:,.0f} shows are missing in the log: its disk was full, or too slow")
    if refused := counts.get("feedback_refused", 0):
        alarms.append(f"{refused:,.0f} events of feedback were refused, because they could not be stored")
    return alarms


def _trainer_alarms(run: Path, state: Path, running: bool, trained: Values) -> list[str]:
    alarms = []
    if not running:
        told = read_json(state / TRAINER)
        reason = f": {told['error']}" if isinstance(told, dict) and told.get("error") else ""
        alarms.append(f"the trainer is not running{reason}")
    if held := trained.get("held", 0):
        reasons = "; ".join(_last_reasons(run / RECORDS))
        alarms.append(f"{held:,.0f} entries are held back{': ' if reasons else ''}{reasons}")
    return alarms


def _last_reasons(path: Path) -> list[str]:
    """Return why the last entry was held back."""
    with suppress(OSError, ValueError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            if b'"alarm"' in line:
                return [str(reason) for reason in json.loads(line)["reasons"]]
    return []


def _stuck(trained: Values, written: float | None, now: float, running: bool) -> list[str]:
    if running and written is not None and now - written > QUIET_S and trained.get("join_waiting/waiting"):
        return [f"the trainer has learned nothing for {now - written:,.0f} s, although shows wait"]
    return []


def _join_alarms(trained: Values) -> list[str]:
    words = {
        "bad_events": "events of the logs could not be read; log.txt in the run folder names them",
        "lost_feedback": "events of feedback never found their shows, and were dropped",
        "cut_short": "shows were decided early, because online.join.store_limit was reached",
    }
    found = [(trained.get(f"join_events/{kind}", 0), text) for kind, text in words.items()]
    return [f"{count:,.0f} {text}" for count, text in found if count]


def _freshness_alarms(trained: Values, freshness: Any) -> list[str]:
    objective, p99 = trained.get("freshness_objective_seconds"), freshness["p99_s"]
    if objective is None or p99 is None or p99 <= objective:
        return []
    return [f"99% of the events are served after {p99:,.1f} s, more than publish.freshness_slo ({objective:g} s)"]
