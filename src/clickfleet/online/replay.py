"""What if: past logs learned from again with other intervals of publishing and other thresholds of admission.

A setting `sync` is scored as readers would have seen it: the events of each interval by the model that was published before it began.
All settings are compared on the same events, those after the first day.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from clickfleet.config import Config
from clickfleet.errors import ConfigError
from clickfleet.online.learn import learn
from clickfleet.sections import SECONDS, Publish, Run

Row = dict[str, Any]


def replay(
    config: Config,
    out: Path | str,
    sync: Iterable[str],
    admit: Iterable[float],
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """One line for each pair of settings; the runs are in folders of `out`, which earlier ones are removed from."""
    online, out = config.online, Path(out)
    if online.dir is None or online.start_day is None or online.end_day is None:
        raise ConfigError("a replay needs past logs", "set online.dir, online.start_day and online.end_day")
    if online.start_day == online.end_day:
        raise ConfigError("a replay compares on the days after the first, and there is one day", "give more days")
    found: list[Row] = []
    graph = Path(config.run.dir) / "graph.onnx"
    for interval, splits in [(text, _splits(text, online.split_interval)) for text in sync]:
        for threshold in admit:
            folder = out / f"{interval}-{threshold:g}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            if graph.exists():
                shutil.copy(graph, folder)  # the network is the same
            admission = "birth" if threshold <= 0 else f"score({threshold:g})"
            settings = replace(
                config,
                table=replace(config.table, admission=admission),
                run=Run(dir=str(folder), checkpoint_every=None, keep=1),
                online=replace(
                    online,
                    splits_per_pass=splits,
                    validate="pass",
                    delta_every_passes=1,
                    checkpoint_every_passes=1 << 30,
                ),
                publish=Publish(guard=replace(config.publish.guard, auc_drop=None, copc=None), done_files=False),
            )
            done = learn(settings, quiet=True)
            graph = folder / "graph.onnx"
            deltas = _entries(folder, "delta")
            row: Row = {
                "sync": interval,
                "admit": threshold,
                "auc": done.validated["auc"],
                "logloss": done.validated["logloss"],
                "rows_scored": done.validated["rows"],
                "table_rows": len(done.learner.table),
                "full_rows": done.learner.table.stats()["full_rows"],
                "table_bytes": done.learner.table.stats()["bytes"],
                "deltas": len(deltas),
                "delta_bytes": sum(line["entry_bytes"] for line in deltas),
                "seconds": done.seconds,
            }
            found.append(row)
            say(
                f"sync {interval:>6}  admit {threshold:<6g} AUC {row['auc']:.4f}  {row['table_rows']:>12,} rows "
                f"({row['full_rows']:,} with factors)  {row['delta_bytes']:>14,} bytes in {row['deltas']} deltas"
            )
    (out / "replay.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def _splits(text: str, split_s: float) -> int:
    """How many folders an interval of publishing spans."""
    try:
        seconds = SECONDS.parse(text)
    except Exception:
        raise ConfigError(f"--sync {text!r} is no interval", "write such as 30min, 1h or 1d") from None
    splits = seconds / split_s
    if splits < 1 or splits != int(splits) or seconds > 86400:
        raise ConfigError(
            f"--sync {text} must be a multiple of online.split_interval ({split_s / 60:g} min), at most a day",
            "events within a folder have no order that a shorter interval could follow",
        )
    return int(splits)


def _entries(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "published" and line["entry_kind"] == kind]
