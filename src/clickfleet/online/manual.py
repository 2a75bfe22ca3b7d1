"""Shrink and publish by hand a run that is not training."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypedDict

from clickfleet.errors import CheckpointError
from clickfleet.online.freshness import Freshness
from clickfleet.online.publisher import PassPublisher, copy_to
from clickfleet.online.session import OnlinePosition
from clickfleet.store import checkpoint, mirror, run_folder
from clickfleet.store.lock import Lock
from clickfleet.store.published import Entry, Log
from clickfleet.store.rollback import rollback as roll_back
from clickfleet.store.row_format import RowFormat
from clickfleet.store.run_folder import open_folder
from clickfleet.training import saving
from clickfleet.training.metrics import make_metrics
from clickfleet.training.monitor import Monitor


class StoredRun:
    """The newest checkpoint of a run, to change and save as a new one; or the best checkpoint, only to read."""

    def __init__(self, folder: Path, best: bool = False, trust: bool = False) -> None:
        self.folder = folder
        checkpoints = folder / "checkpoints"
        self.newest = checkpoint.latest(checkpoints)
        chosen = checkpoint.best(checkpoints) if best else None
        self.path = self.newest if chosen is None else run_folder.whole(chosen)
        config, schema = run_folder.read_config(self.path, trust), run_folder.read_schema(self.path)
        self.metrics = make_metrics(config, schema)
        self.learner, self.state = saving.resume(self.path, config, schema, self.metrics)
        self.monitor = Monitor(folder, quiet=True)
        self.saver = saving.Saver(checkpoints, config.run.keep, config.run.keep_epochs, self.monitor.log)
        self.config = config

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def save(self) -> Path:
        """Save the changed model as a checkpoint one step later; return its path."""
        self.state["step"] += 1
        self.saver.save(self.learner, self.metrics, self.state)
        self.saver.wait(last=True)
        assert self.saver.last is not None
        return self.saver.last[1]


@contextmanager
def open_stored_run(
    run: Path | str, locked: bool = False, best: bool = False, trust: bool = False
) -> Iterator[StoredRun]:
    """Open a run that is not training. `locked`: the caller holds its lock. `best`: open the checkpoint that the run folder names.

    `trust` allows the run's own code to run.
    """
    if mirror.url_of(run) is None and not (Path(run) / "checkpoints").is_dir():
        raise CheckpointError(f"{run} is not a run folder with checkpoints")
    if locked:
        yield StoredRun(Path(run), best, trust)
        return
    with open_folder(run, resume=True) as (folder, _):
        yield StoredRun(folder, best, trust)


class ShrinkResult(TypedDict):
    """What `shrink` did."""

    removed: int
    rows: int
    checkpoint: str


class PublishResult(TypedDict):
    """What `publish` did. `model` describes the checkpoint that was published; None after a rollback."""

    sequence: int
    kind: str
    entry: str
    rows: int
    deleted: int
    copied: int
    model: str | None
    row_format: RowFormat
    row_bytes: int
    """Size of the rows in bytes."""
    golden_drift: float | None
    """Largest change of a golden score by a small format of rows; None in float32."""


def shrink(run: Path | str, trust: bool = False) -> ShrinkResult:
    """Decay the statistics of the rows, remove rows by score and age, and save a new checkpoint."""
    with open_stored_run(run, trust=trust) as stored:
        removed = stored.learner.table.shrink()
        path = stored.save()
        return {"removed": removed, "rows": len(stored.learner.table), "checkpoint": mirror.origin(path) or str(path)}


def publish(
    run: Path | str,
    kind: Literal["base", "delta"] | None = None,
    *,
    rollback: int | None = None,
    to: str | None = None,
    locked: bool = False,
    trust: bool = False,
    rows: RowFormat | None = None,
) -> PublishResult:
    """Publish an entry without asking the guard, or roll back to entry `rollback`. Copy the entries to `to`.

    The entry holds the checkpoint that the run folder names. `rows` is the format of its rows; by default, publish.rows of the run.
    """
    if rollback is not None and mirror.url_of(run) is not None:
        with open_folder(run, resume=True) as (folder, _):
            return publish(folder, rollback=rollback, to=to)
    if rollback is not None:
        log = Log(Path(run) / "published" if (Path(run) / "published").is_dir() else run)
        with Lock(log.folder / ".lock", "publishes", patience_s=60.0):
            entry, model = roll_back(log, rollback), None
    else:
        assert kind is not None
        with open_stored_run(run, locked, best=True, trust=trust) as stored:
            entry = _release(stored, kind, rows)
            model = run_folder.describe(stored.path)
            log = Log(entry.path.parent)
    copied = 0 if to is None else copy_to(log, to)
    facts = entry.manifest
    return {
        "sequence": entry.sequence,
        "kind": facts["kind"],
        "entry": mirror.origin(entry.path) or str(entry.path),
        "rows": facts["rows"],
        "deleted": facts["deleted"],
        "copied": copied,
        "model": model,
        "row_format": entry.row_format,
        "row_bytes": entry.row_bytes,
        "golden_drift": entry.info.get("golden_drift"),
    }


def _release(stored: StoredRun, kind: Literal["base", "delta"], rows: RowFormat | None) -> Entry:
    publisher = PassPublisher(stored.config, stored.learner, stored.folder, stored.monitor, Freshness(time.time))
    publisher.publisher.rows = rows or stored.config.publish.rows
    if "published" in stored.state:
        publisher.restore(stored.state["published"])
    course = OnlinePosition(**stored.state["online"]) if "online" in stored.state else OnlinePosition()
    if "online" not in stored.state:
        publisher.done = None  # lines of done files name days and passes
    before = publisher.last_sequence
    publisher.release(kind, stored.step, course, judged=False, day_over=course.open_day is None)
    if publisher.last_sequence == before:
        raise CheckpointError(f"nothing was published in {publisher.log.folder}", publisher.problem)
    publisher.guard.forget()
    stored.state["published"] = publisher.state()
    if "online" in stored.state:
        stored.state["online"] = json.loads(json.dumps(vars(course)))
    if stored.path == stored.newest:  # a resume starts from the newest, so the best stays as it is
        stored.save()
    return publisher.log.entry(publisher.log.lines()[-1])
