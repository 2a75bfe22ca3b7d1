"""Entries of the model log during online learning: judged, appended, compared after a restart, followed by what readers expect."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clickfleet import published
from clickfleet.config import Config
from clickfleet.errors import CheckpointError, ClickfleetError
from clickfleet.exporting import Publisher
from clickfleet.job import Job
from clickfleet.learner import Learner
from clickfleet.lock import Lock
from clickfleet.mirror import Mirror
from clickfleet.online.done_files import DoneFiles
from clickfleet.online.freshness import Freshness
from clickfleet.online.guard import Judge
from clickfleet.online.keeping import copy_to, prune
from clickfleet.online.repair import touched
from clickfleet.published import Entry, Line, Log
from clickfleet.watch import Watch

if TYPE_CHECKING:
    from clickfleet.online.session import Course

Kind = Literal["base", "delta"]


class Release:
    """Publishes a learner as it goes; what fails or is held is part of the next entry."""

    def __init__(self, config: Config, learner: Learner, folder: Path, watch: Watch, fresh: Freshness) -> None:
        self.config, self.learner, self.watch, self.fresh = config, learner, watch, fresh
        self.log = Log(folder / "published")
        of = config.train
        self.judge = Judge(config.publish.guard, of.metrics.thresholds, warm=of.init_from is not None)
        self.publisher = Publisher(learner, self.log.folder, cache=folder / "graph.onnx")
        self.done = DoneFiles(folder / "model", config.online.start_day) if config.publish.done_files else None
        self.copy: Mirror | None = None
        """Where the run folder is also kept."""
        self.head: dict[str, Any] | None = None
        """Sequence and hash of the entry that the table's recorded changes begin after."""
        self.due = False
        """There were passes since the last entry."""
        self.held = 0
        """Entries held since the last one."""
        self.verdict: list[str] = []
        """Why the guard held the last one."""
        self.stale = False
        self.problem = ""
        """Why the last one could not be written."""

    @property
    def last_sequence(self) -> int | None:
        return None if self.head is None else int(self.head["sequence"])

    def prepare(self) -> None:
        """Makes the graph now: exporting it later would hold up the first entry, and torch may not train meanwhile."""
        self.publisher.content(0)

    def refresh(self) -> None:
        """Makes the learner's dense weights those of this moment."""

    def release(self, kind: Kind, job: Job, course: Course, judged: bool = True) -> None:
        """Appends an entry, unless the guard or the disk stands against it."""
        begin = time.monotonic()
        self.refresh()
        stats = self.learner.table.stats()
        changed = stats["changed"] if kind == "delta" and self.head is not None else 0
        if judged and (course.undelivered or not self.verdict):  # without a pass since, what was found last stands
            self.verdict = self.judge.reasons(course.undelivered, changed, stats["rows"])
        if judged and self.verdict:
            self._hold(kind, self.verdict, job.steps)
            course.undelivered.clear()  # the next entry is judged by what comes
            return
        try:
            with Lock(self.log.folder / ".lock", "publishes", patience_s=60.0):
                entry = self._append(kind, job.steps)
        except CheckpointError as error:
            if self.config.train.deterministic:  # its log must come out the same: a restart makes this very entry
                raise
            self.problem = str(error)  # the disk is full: training goes on
            self._hold(kind, [self.problem], job.steps)
            return
        self.head = {"sequence": entry.sequence, "hash": entry.hash}
        self.judge.released(course.undelivered)
        self.due, self.held, self.verdict = False, 0, []
        facts = {"sequence": entry.sequence, "entry_kind": entry.manifest["kind"], "step": job.steps}
        facts |= {"entry_rows": entry.manifest["rows"], "entry_deleted": entry.manifest["deleted"]}
        facts |= {"entry_bytes": sum(file["bytes"] for file in entry.manifest["files"].values())}
        ages = self.fresh.published()
        self.watch.record("published", {**facts, **ages, "seconds": time.monotonic() - begin})
        self.watch.log(
            f"published {entry.path.name}: {facts['entry_rows']:,} rows, {facts['entry_deleted']:,} deleted, "
            f"{facts['entry_bytes']:,} bytes in {time.monotonic() - begin:.2f} s{_words(ages)}"
        )
        self._compare(ages)
        judged_by = course.undelivered[-1] if course.undelivered else None
        course.undelivered.clear()
        self.tell_consumers(lambda done: done.published(entry, course.position, judged_by))
        self._keep()

    def _compare(self, ages: dict[str, float]) -> None:
        """Says when the objective of freshness is missed, and when it is met again."""
        slo, late = self.config.publish.freshness_slo, ages.get("event_to_published_p99")
        if late is not None and (late > slo) != self.stale:
            self.stale = late > slo
            what = "warning: freshness is missed" if self.stale else "freshness is met again"
            self.watch.log(
                f"{what}: 99% of events were published within {late:,.0f} s, publish.freshness_slo is {slo:g} s"
            )

    def _hold(self, kind: Kind, reasons: list[str], step: int) -> None:
        self.held += 1
        self.watch.record("alarm", {"step": step, "entry_kind": kind, "held": self.held, "reasons": reasons})
        for reason in reasons:
            self.watch.log(f"ALARM: a {kind} is held back: {reason}")

    def _append(self, kind: Kind, step: int) -> Entry:
        """The next entry; after a restart behind the log's head, the one that is there already if it is the same."""
        lines = self.log.lines()
        newer = self._newer(lines)
        if newer is None:  # another log than the one before: begin anew
            return self.publisher.publish("base", step)
        if newer and self.config.train.deterministic:
            if (same := self._again(kind, step, newer[0])) is not None:
                return same
            self.watch.log(
                f"warning: {newer[0].name} was published before and this run gives another; repairing the chain"
            )
        if newer:
            kind = self._repair(kind, newer)
        return self.publisher.publish(kind, step)

    def _newer(self, lines: list[Line]) -> list[Line] | None:
        """Lines after the head that this run knows; None where that head is not in the log."""
        if self.head is None:
            return lines
        known = [line.hash for line in lines]
        return lines[known.index(self.head["hash"]) + 1 :] if self.head["hash"] in known else None

    def _again(self, kind: Kind, step: int, line: Line) -> Entry | None:
        """The entry of a line, if this run makes the very same one."""
        changes = self.learner.table.cut_changes(base=kind == "base" or self.head is None)
        aside = self.log.folder / ".again"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            place = {"sequence": line.sequence, "parent": line.parent, "chain": line.chain}
            made = published.write(aside / line.name, changes, self.publisher.content(step), **place)
            if made.hash != line.hash:
                changes.abort()
                return None
            changes.commit()
            made.path = self.log.folder / line.name
            return self.log.entry(line) if made.path.exists() else made  # it may have been removed with its chain
        except BaseException:
            with contextlib.suppress(ClickfleetError):
                changes.abort()
            raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _repair(self, kind: Kind, newer: list[Line]) -> Kind:
        """Makes the next entry bring readers of newer ones to where the table is."""
        self.watch.log(
            f"the published log is {len(newer)} entries ahead of this run: the next entry sets what they changed"
        )
        if self.head is None or any(line.kind == "base" for line in newer):
            return "base"
        for line in newer:
            for keys in touched(self.log.entry(line)):
                self.learner.table.restore_readers(keys)
        return kind

    def _keep(self) -> None:
        """Removes old chains and copies new entries; neither can harm what is published."""
        try:
            prune(self.log, self.config.publish.keep_chains)
            if self.config.publish.to is not None:
                copy_to(self.log, self.config.publish.to)
            if self.copy is not None:
                self.copy.push()
        except (ClickfleetError, OSError) as error:
            self.watch.log(f"warning: {error}")

    def checkpointed(self, course: Course, path: Path) -> None:
        """A checkpoint is being written under that path."""
        if (position := course.position) is not None:
            self.tell_consumers(lambda done: done.checkpointed(position, course.open_day is None, path))

    def tell_consumers(self, act: Callable[[DoneFiles], None]) -> None:
        """Writes done files, where they are wanted; what the disk does not take is written later."""
        if self.done is None:
            return
        try:
            act(self.done)
        except CheckpointError as error:
            if self.config.train.deterministic:
                raise
            self.watch.log(f"warning: {error}")

    def state(self) -> dict[str, Any]:
        return {
            "head": self.head,
            "aucs": list(self.judge.aucs),
            "guard": self.judge.state(),
            "due": self.due,
            "held": self.held,
            "verdict": self.verdict,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.head = state["head"]
        self.judge.restore(state["aucs"], state.get("guard"))
        self.due, self.held, self.verdict = state["due"], state["held"], list(state["verdict"])


def _words(ages: dict[str, float]) -> str:
    if not ages:
        return ""
    return "; events " + ", ".join(
        f"{what} after {ages[f'event_to_{what}_p50']:,.0f} s (99%: {ages[f'event_to_{what}_p99']:,.0f} s)"
        for what in ("trained", "published")
    )
