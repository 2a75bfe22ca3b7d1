"""Cuts: the parts that shards and workers made of one instant become one checkpoint in the ordinary format."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from clickfleet import checkpoint, saving, storage
from clickfleet.cluster.base import Base, adopt_buffers, join_dense, kept_name, more_of
from clickfleet.config import Config, dump
from clickfleet.learner import Learner
from clickfleet.metrics import Metrics
from clickfleet.session import keeps_best


@dataclass
class Cutting:
    """A cut under way: the calls that make its parts, and those that are there."""

    number: int
    writer: storage.Writer
    calls: dict[str, Any]
    epoch: int | None
    """The epoch that ends with it, if one does."""
    exam: bool = False
    """Whether the model is still to be evaluated at that instant."""
    speed: float = 0.0
    """Rows per second before it began."""
    done: dict[str, Any] = field(default_factory=dict)
    begin: float = field(default_factory=time.monotonic)

    @property
    def reports(self) -> dict[str, Any]:
        """What the workers said."""
        return {name: found for name, found in self.done.items() if name.startswith("worker")}

    def drop(self) -> None:
        """Leaves nothing behind."""
        self.writer.__exit__(RuntimeError, RuntimeError("dropped"), None)


def begin(number: int, folder: Path, epoch: int | None, exam: bool = False) -> Cutting:
    writer = storage.write(folder / f"cut-{number}", "checkpoint")
    writer.__enter__()
    return Cutting(number, writer, {}, epoch, exam)


def finish(
    work: Cutting,
    shards: list[str],
    config: Config,
    learner: Learner,
    metrics: Metrics,
    base: Base,
    state: dict[str, Any],
    row_files: int,
    table: dict[str, Any],
) -> Base:
    """Writes what is not written yet and gives the checkpoint its name; the state it stands for."""
    parts = [work.done[name] for name in shards]
    dense = join_dense([part["dense"] for part in parts])
    learner.flat.values.copy_(dense["values"])
    learner.optimizer.restore({key: value for key, value in dense.items() if key != "values"})
    buffers = work.reports.get("worker 0", {}).get("buffers", b"") or base.buffers
    adopt_buffers(learner, buffers)
    kept = {int(name.split()[1]): report["keep"] for name, report in work.reports.items() if report["keep"]}
    state = {
        **state,
        "batches": parts[0]["batches"],
        "arrangement": {"mode": config.mode.name, **vars(config.cluster)},
        "keep": {str(worker): sorted(files) for worker, files in kept.items()},
    }
    attached = saving.capture(learner, metrics, state)
    attached["config.yaml"] = dump(saving.at_origin(config)).encode()
    for worker, files in kept.items():
        attached |= {kept_name(worker, name): content for name, content in files.items()}
    out = work.writer
    final = out.path.parent / f"step-{state['step']:012d}"
    out.path = final
    for name, content in attached.items():
        out.put(name, content)
    for part in parts:
        for name, facts in part["files"].items():
            out.adopt(name, facts)
    checkpoint.write_changed(out, *(np.concatenate([part[key] for part in parts]) for key in ("changed", "deleted")))
    out.facts = {
        "table": table,
        "short_rows": sum(part["counts"][0] for part in parts),
        "full_rows": sum(part["counts"][1] for part in parts),
        "row_files": row_files,
        "tracking": any(part["tracking"] for part in parts),
        **checkpoint.memory_facts([part["memory"] for part in parts]),
        "step": state["step"],
        **learner.facts,
    }
    if final.exists():  # the same batches with other progress: an epoch has ended since
        storage.remove(final)
    out.__exit__(None, None, None)
    epoch = work.epoch if config.run.keep_epochs else None
    best = keeps_best(config) and state["progress"]["best_step"] == state["step"]
    checkpoint.register(final, config.run.keep, epoch, best)
    return Base(
        str(final),
        {key: table[key] for key in saving.FREE},
        dense,
        metrics,
        state["step"],
        state["rows"],
        state["batches"],
        state["reader"],
        kept,
        buffers,
        state["progress"],
        {name: report["steps"] for name, report in work.reports.items()},
        more_of(state),
    )
