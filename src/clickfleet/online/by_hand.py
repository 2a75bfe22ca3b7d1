"""What online learning does by itself at its times, done by hand on a run that stands still."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from clickfleet import checkpoint, mirror, saving
from clickfleet.errors import CheckpointError
from clickfleet.feeds import Feed
from clickfleet.home import at_home
from clickfleet.job import Job
from clickfleet.learner import Learner
from clickfleet.lock import Lock
from clickfleet.metrics import Metrics
from clickfleet.online.freshness import Freshness
from clickfleet.online.keeping import copy_to
from clickfleet.online.learn import make_metrics
from clickfleet.online.release import Release
from clickfleet.online.repair import rollback as go_back
from clickfleet.online.session import Course
from clickfleet.published import Entry, Log
from clickfleet.watch import Watch


class Opened:
    """The newest checkpoint of a run, to be changed and saved as another one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        checkpoints = folder / "checkpoints"
        self.path = checkpoint.latest(checkpoints)
        config, schema = saving.read_config(self.path), saving.read_schema(self.path)
        self.metrics: Metrics = make_metrics(config, schema)
        self.learner: Learner
        self.learner, self.state = saving.resume(self.path, config, schema, self.metrics)
        self.watch = Watch(folder, quiet=True)
        self.saver = saving.Saver(checkpoints, config.run.keep, config.run.keep_epochs, self.watch.log)
        self.config = config

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def save(self) -> Path:
        """Counts what was done as one step more."""
        self.state["step"] += 1
        self.saver.save(self.learner, self.metrics, self.state)
        self.saver.wait(last=True)
        assert self.saver.last is not None
        return self.saver.last[1]


@contextmanager
def opened(run: Path | str, alone: bool = False) -> Iterator[Opened]:
    """`alone`: the caller holds the lock of the run."""
    if mirror.url_of(run) is None and not (Path(run) / "checkpoints").is_dir():
        raise CheckpointError(f"{run} is no run folder with checkpoints in it")
    if alone:
        yield Opened(Path(run))
        return
    with at_home(run, resume=True) as (folder, _):
        yield Opened(folder)


def shrink(run: Path | str) -> dict[str, Any]:
    """Decay, and removal of rows by score and age; saved as a new checkpoint."""
    with opened(run) as one:
        removed = one.learner.table.shrink()
        path = one.save()
        return {"removed": removed, "rows": len(one.learner.table), "checkpoint": mirror.origin(path) or str(path)}


def publish(
    run: Path | str,
    kind: Literal["base", "delta"] | None = None,
    *,
    rollback: int | None = None,
    to: str | None = None,
    alone: bool = False,
) -> dict[str, Any]:
    """An entry by hand, which no guard looks at, or the way back to entry `rollback`; `to` is where entries are copied."""
    if rollback is not None and mirror.url_of(run) is not None:
        with at_home(run, resume=True) as (folder, _):
            return publish(folder, rollback=rollback, to=to)
    if rollback is not None:
        log = Log(Path(run) / "published" if (Path(run) / "published").is_dir() else run)
        with Lock(log.folder / ".lock", "publishes", patience_s=60.0):
            entry = go_back(log, rollback)
    else:
        assert kind is not None
        with opened(run, alone) as one:
            entry = _release(one, kind)
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
    }


def _release(one: Opened, kind: Literal["base", "delta"]) -> Entry:
    release = Release(one.config, one.learner, one.folder, one.watch, Freshness(time.time))
    if "published" in one.state:
        release.restore(one.state["published"])
    course = Course(**one.state["online"]) if "online" in one.state else Course()
    if "online" not in one.state:
        release.done = None  # its lines are of days and passes
    job = Job(one.learner, Feed([], one.learner.schema), one.metrics, lambda job: False, lambda job: None)
    job.steps = one.step
    before = release.last_sequence
    release.release(kind, job, course, judged=False)
    if release.last_sequence == before:
        raise CheckpointError(f"nothing was published in {release.log.folder}", release.problem)
    release.judge.forget()
    one.state["published"] = release.state()
    if "online" in one.state:
        one.state["online"] = json.loads(json.dumps(vars(course)))
    one.save()
    return release.log.entry(release.log.lines()[-1])
