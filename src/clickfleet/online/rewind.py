"""Back to before a bad pass: an earlier checkpoint becomes the newest one, and consumers get back what they had then.

What is to be done is written into the run folder first, every step can be done twice, and a run that starts finishes what it finds
there: a kill at any moment leaves a run that was rewound or one that will be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clickfleet import checkpoint, mirror, saving, storage
from clickfleet.config import Config
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.home import at_home
from clickfleet.lock import Lock
from clickfleet.online.passes import Plan, parse_day
from clickfleet.online.repair import rollback
from clickfleet.published import Log

INTENT = "rewind.json"
Place = tuple[int, int]
"""Day and pass."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Stop:
    """A kept checkpoint, and how far the stream had been learned then."""

    step: int
    last: Place | None
    """The newest pass that it has learned from, whole or in part."""
    first: Place | None
    """The pass after it, where the run has begun one."""
    sequence: int | None
    """The newest published entry."""

    def is_before(self, place: Place) -> bool:
        return self.last is None or self.last < place

    def to_dict(self) -> dict[str, Any]:
        return {
            "checkpoint": f"step-{self.step:012d}",
            "learned_until": None if self.last is None else text(self.last),
            "rewinds_to": None if self.first is None else text(self.first),
            "sequence": self.sequence,
        }


def text(place: Place) -> str:
    return f"{place[0]}/{place[1]}"


def parse(given: str) -> Place:
    """
    >>> parse("20260102/3")
    (20260102, 3)
    """
    day, _, number = given.partition("/")
    if not (day.isdecimal() and number.isdecimal() and int(number) > 0):
        raise ConfigError(f"--rewind {given} is no pass", "write DAY/PASS, such as 20260102/3, or list")
    parse_day(int(day), "--rewind")
    return int(day), int(number)


def stops(folder: Path) -> list[Stop]:
    """Where a run can be rewound to, oldest first."""
    begun = Plan(folder / "passes.jsonl").places()
    found = []
    for step in checkpoint.steps(folder / "checkpoints"):
        state = saving.read_state(folder / "checkpoints" / f"step-{step:012d}")
        if "online" not in state:
            raise ConfigError(f"{folder} holds a run of `train`", "only a stream has passes to rewind")
        course, head = state["online"], state["published"]["head"]
        at = course["begun"] or course["position"]
        last = None if at is None else (int(at["day"]), int(at["number" if course["begun"] else "pass"]))
        first = next((place for place in begun if last is None or place > last), None)
        found.append(Stop(step, last, first, None if head is None else int(head["sequence"])))
    if not found:
        raise CheckpointError(f"{folder} holds no checkpoint to rewind to")
    return found


def listed(config: Config) -> list[Stop]:
    """Where the run of a configuration can be rewound to."""
    return stops(_folder(config))


def rewind(config: Config, place: Place, skip: int, say: Say) -> dict[str, Any]:
    """Takes a run back to before a pass; the first `skip` passes from there on will be left out."""
    with at_home(_folder(config)) as (folder, _):
        complete(folder, say)
        known = stops(folder)
        found = [stop for stop in known if stop.is_before(place)]
        if not found:
            earliest = "" if known[0].first is None else f", to {text(known[0].first)} at the earliest"
            raise CheckpointError(
                f"no checkpoint from before {text(place)} is kept: the run can be rewound to passes after "
                f"{text(known[0].last or (0, 0))}{earliest}",
                "run.keep says how many checkpoints are kept",
            )
        stop = found[-1]
        _check_skipped(folder, place, skip)
        checkpoint.verify(folder / "checkpoints" / f"step-{stop.step:012d}")
        facts = {"place": list(place), "skip": skip, "step": stop.step, "sequence": stop.sequence}
        storage.replace(folder / INTENT, storage.sealed(facts))
        return {**stop.to_dict(), **complete(folder, say), "skipped": skip}


def _folder(config: Config) -> Path:
    if mirror.url_of(config.run.dir) is not None:
        raise ConfigError(
            "a run at a URL cannot be rewound there: only its newest checkpoint is fetched",
            "copy the folder to this machine, rewind it there and copy it back",
        )
    folder = Path(config.run.dir)
    if not (folder / "checkpoints").is_dir():
        raise CheckpointError(f"{folder} is no run folder with checkpoints in it")
    return folder


def _check_skipped(folder: Path, place: Place, skip: int) -> None:
    planned = [one for one in Plan(folder / "passes.jsonl").places() if one >= place]
    if skip and (skip > len(planned) or planned[0] != place):
        raise ConfigError(
            f"--skip {skip}: the run has begun {len(planned)} passes from {text(place)} on", "only those can be skipped"
        )


def complete(folder: Path, say: Say) -> dict[str, Any]:
    """Finishes a rewind that was begun, if one was."""
    path = folder / INTENT
    try:
        facts = storage.unsealed(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is broken: {error}", "remove it and rewind again") from error
    place, step = (int(facts["place"][0]), int(facts["place"][1])), int(facts["step"])
    checkpoints = folder / "checkpoints"
    Plan(folder / "passes.jsonl").rewind(place, int(facts["skip"]))
    checkpoint.make_latest(checkpoints / f"step-{step:012d}")
    checkpoint.forget_after(checkpoints, step)
    entry = _restore(Log(folder / "published"), facts["sequence"], say)
    path.unlink()
    say(f"rewound to step {step}, before {text(place)}")
    return {"entry": entry}


def _restore(log: Log, sequence: int | None, say: Say) -> str | None:
    """Gives consumers what they had at an entry; the name of the one that does."""
    with Lock(log.folder / ".lock", "publishes", patience_s=60.0):
        head = log.recover()
        if head is None or head.sequence == sequence:
            return None
        if log.entry(head).info.get("rollback_to") == sequence:  # done before a kill
            return head.name
        try:
            if sequence is None:
                raise CheckpointError("nothing had been published then")
            entry = rollback(log, sequence)
        except CheckpointError as error:
            say(f"consumers keep what they have until the run publishes a base: {error}")
            return None
    say(f"published {entry.path.name}: consumers have what entry {sequence} gave them")
    return entry.path.name


def describe(found: list[Stop]) -> str:
    """The kept checkpoints, for people."""
    lines = [f"{'checkpoint':<18} {'learned until':<14} {'rewinds to':<14} entry"]
    for stop in found:
        facts = {key: "-" if value is None else value for key, value in stop.to_dict().items()}
        lines.append(
            f"{facts['checkpoint']:<18} {facts['learned_until']:<14} {facts['rewinds_to']:<14} {facts['sequence']}"
        )
    return "\n".join(lines)
