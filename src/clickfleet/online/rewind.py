"""Rewind a run to before a bad pass: an earlier checkpoint becomes the newest, and consumers get the model of that time again.

The plan is written into the run folder first, and every step can be repeated. The next start completes an interrupted rewind. So a
kill at any moment leaves a run that was not rewound, was rewound, or will be at the next start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clickfleet.config.load import Config
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.online.calibrator import forget_state
from clickfleet.online.passes import PassPlan, Place, parse_day
from clickfleet.store import atomic, checkpoint, mirror, run_folder
from clickfleet.store.erasure import ForgottenKeys, rewrite
from clickfleet.store.lock import Lock
from clickfleet.store.published import Log
from clickfleet.store.rollback import rollback
from clickfleet.store.run_folder import open_folder

INTENT = "rewind.json"
Report = Callable[[str], None]


@dataclass(frozen=True)
class Stop:
    """A kept checkpoint, and the position in the stream at that time."""

    step: int
    last: Place | None
    """Newest pass trained on, completely or in part."""
    first: Place | None
    """The pass after it, if the run has begun one."""
    sequence: int | None
    """Sequence of the newest published entry."""

    def is_before(self, place: Place) -> bool:
        return self.last is None or self.last < place

    def to_dict(self) -> dict[str, str | int | None]:
        return {
            "checkpoint": f"step-{self.step:012d}",
            "learned_until": None if self.last is None else text(self.last),
            "rewinds_to": None if self.first is None else text(self.first),
            "sequence": self.sequence,
        }


def text(place: Place) -> str:
    return f"{place[0]}/{place[1]}"


def parse(value: str) -> Place:
    """Parse DAY/PASS.

    >>> parse("20260102/3")
    (20260102, 3)
    """
    day, _, number = value.partition("/")
    if not (day.isdecimal() and number.isdecimal() and int(number) > 0):
        raise ConfigError(f"--rewind {value} is not a pass", "write DAY/PASS, such as 20260102/3, or list")
    parse_day(int(day), "--rewind")
    return int(day), int(number)


def stops(folder: Path) -> list[Stop]:
    """Return the checkpoints that a run can be rewound to, oldest first."""
    places = PassPlan(folder / "passes.jsonl").places()
    kept = []
    for step in checkpoint.steps(folder / "checkpoints"):
        state = run_folder.read_state(checkpoint.step_folder(folder / "checkpoints", step))
        if "online" not in state:
            raise ConfigError(f"{folder} holds a run of `train`", "only a stream has passes to rewind")
        course, head = state["online"], state["published"]["head"]
        newest = course["begun"] or course["position"]
        last = None if newest is None else (int(newest["day"]), int(newest["number" if course["begun"] else "pass"]))
        first = next((place for place in places if last is None or place > last), None)
        kept.append(Stop(step, last, first, None if head is None else int(head["sequence"])))
    if not kept:
        raise CheckpointError(f"{folder} holds no checkpoint to rewind to")
    return kept


def listed(config: Config) -> list[Stop]:
    """Return the checkpoints that the run of a configuration can be rewound to."""
    return stops(_folder(config))


def rewind(config: Config, place: Place, skip: int, report: Report) -> dict[str, str | int | None]:
    """Rewind a run to before a pass. The first `skip` passes from there on will be left out."""
    with open_folder(_folder(config)) as (folder, _):
        complete(folder, report)
        known = stops(folder)
        earlier = [stop for stop in known if stop.is_before(place)]
        if not earlier:
            earliest = "" if known[0].first is None else f", to {text(known[0].first)} at the earliest"
            raise CheckpointError(
                f"no checkpoint from before {text(place)} is kept: the run can be rewound to passes after "
                f"{text(known[0].last or (0, 0))}{earliest}",
                "run.keep sets the number of checkpoints to keep",
            )
        stop = earlier[-1]
        _check_skipped(folder, place, skip)
        checkpoint.verify(checkpoint.step_folder(folder / "checkpoints", stop.step))
        facts = {"place": list(place), "skip": skip, "step": stop.step, "sequence": stop.sequence}
        atomic.write_file(folder / INTENT, atomic.seal(facts))
        done = complete(folder, report)
        if done["entry"] is not None and config.publish.to is not None:
            from clickfleet.online.publisher import copy_to  # it needs torch, which --rewind list does not

            copy_to(Log(folder / "published"), config.publish.to)
        return {**stop.to_dict(), **done, "skipped": skip}


def _folder(config: Config) -> Path:
    if mirror.url_of(config.run.dir) is not None:
        raise ConfigError(
            "cannot rewind a run at a URL: only its newest checkpoint is downloaded",
            "copy the folder to this machine, rewind it and copy it back",
        )
    folder = Path(config.run.dir)
    if not (folder / "checkpoints").is_dir():
        raise CheckpointError(f"{folder} is not a run folder with checkpoints")
    return folder


def _check_skipped(folder: Path, place: Place, skip: int) -> None:
    planned = [each for each in PassPlan(folder / "passes.jsonl").places() if each >= place]
    if skip and (skip > len(planned) or planned[0] != place):
        raise ConfigError(
            f"--skip {skip}: the run has begun only {len(planned)} passes from {text(place)} on",
            "skip no more than that",
        )


def complete(folder: Path, report: Report) -> dict[str, str | None]:
    """Complete a rewind that was begun, if there is one."""
    path = folder / INTENT
    try:
        facts = atomic.unseal(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}", "remove it and rewind again") from error
    place, step = (int(facts["place"][0]), int(facts["place"][1])), int(facts["step"])
    checkpoints = folder / "checkpoints"
    PassPlan(folder / "passes.jsonl").rewind(place, int(facts["skip"]))
    forgotten = ForgottenKeys(folder).since(step)
    if len(forgotten):  # what was forgotten since does not come back
        rewrite(checkpoint.step_folder(checkpoints, step), forgotten, edit_state=forget_state)
    checkpoint.make_latest(checkpoint.step_folder(checkpoints, step))
    checkpoint.forget_after(checkpoints, step)
    entry = _restore(Log(folder / "published"), facts["sequence"], report)
    path.unlink()
    report(f"rewound to step {step}, before {text(place)}")
    return {"entry": entry}


def _restore(log: Log, sequence: int | None, report: Report) -> str | None:
    """Publish an entry that gives consumers the model of an earlier entry. Return its name, or None if there is nothing to do."""
    with Lock(log.folder / ".lock", "publishes", patience_s=60.0):
        head = log.recover()
        if head is None or head.sequence == sequence:
            return None
        if log.entry(head).info.get("rollback_to") == sequence:  # published before a kill
            return head.name
        try:
            if sequence is None:
                raise CheckpointError("nothing was published at that time")
            entry = rollback(log, sequence)
        except CheckpointError as error:
            report(f"consumers keep their model until the run publishes a base: {error}")
            return None
    report(f"published {entry.path.name}: consumers get the model of entry {sequence} again")
    return entry.path.name


def describe(known: list[Stop]) -> str:
    """Return the kept checkpoints as a text table."""
    lines = [f"{'checkpoint':<18} {'learned until':<14} {'rewinds to':<14} entry"]
    for stop in known:
        facts = {key: "-" if value is None else value for key, value in stop.to_dict().items()}
        lines.append(
            f"{facts['checkpoint']:<18} {facts['learned_until']:<14} {facts['rewinds_to']:<14} {facts['sequence']}"
        )
    return "\n".join(lines)
