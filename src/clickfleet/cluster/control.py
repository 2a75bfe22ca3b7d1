"""Show and change a run on a cluster from another process, by files in `cluster/` of its run folder.

    status.json          what the run is doing, rewritten every second
    request-<id>.json    a change that another process asks for
    answer-<id>.json     what became of it

Requests are served one after the other, in the order in which they were made. Whoever may write to the run folder may change the run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from clickfleet.cluster.process import ProcessFacts
from clickfleet.data.files import replacing
from clickfleet.errors import ClusterError
from clickfleet.store import atomic, mirror
from clickfleet.store.lock import is_held

POLL_S = 0.2
STALE_S = 600.0
"""Age of a status after which a run on another host counts as ended."""
TIMEOUT_S = 300.0
"""Time limit for a change, unless the caller sets another."""
STATUS, REQUEST, ANSWER = "status.json", "request-", "answer-"
Kind = Literal["add-workers", "remove-workers", "shards"]


@dataclass(frozen=True)
class SizeRequest:
    """A change of the size of a cluster that somebody asks for."""

    kind: Kind
    number: int
    """How many workers to add or remove, or how many shards there are to be."""

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"


class ChangeFacts(TypedDict):
    """What a change has done."""

    change: str
    workers: int
    shards: int
    seconds: float
    """From the request to the first batch after the change."""
    stopped_s: float
    """How long nothing was trained."""
    time: float


class ProcessStatus(TypedDict):
    """One process of a run."""

    name: str
    host: str
    pid: int
    rows: int
    """Rows trained since the last change or failure, or rows that a shard holds."""
    steps: int
    """Batches since then, or pushes of a shard."""
    streams: NotRequired[int]
    """Streams that a worker has left in this epoch."""
    staleness: NotRequired[float]


class ClusterStatus(TypedDict):
    """What a run on a cluster is doing."""

    time: float
    mode: str
    epoch: int
    step: int
    rows: int
    generation: int
    failures: int
    workers: int
    shards: int
    range: list[int] | None
    """The smallest and largest number of workers, if the run chooses it by the room in the Ray cluster."""
    processes: list[ProcessStatus]
    change: str | None
    """The change in progress."""
    waiting: list[str]
    """Changes asked for that have not begun."""
    last_change: ChangeFacts | None


class ChangeAnswer(TypedDict):
    error: NotRequired[str]
    remedy: NotRequired[str]
    done: NotRequired[ChangeFacts]


class ControlFolder:
    """The driver's side: requests come from files, status and answers go to files."""

    def __init__(self, run: Path) -> None:
        self.folder = run / mirror.CONTROL

    def open(self) -> None:
        """Remove what an earlier run has left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.close()

    def requests(self) -> dict[str, SizeRequest]:
        """Return the requests that have no answer yet, oldest first."""
        found: dict[str, SizeRequest] = {}
        with suppress(OSError):
            for path in sorted(self.folder.glob(f"{REQUEST}*.json")):
                name = path.stem.removeprefix(REQUEST)
                try:
                    content = json.loads(path.read_text())
                    found[name] = SizeRequest(content["kind"], int(content["number"]))
                except FileNotFoundError:  # withdrawn meanwhile
                    continue
                except (OSError, ValueError, TypeError, KeyError):
                    self.answer(name, {"error": f"{path} is not a request", "remedy": "use `clickfleet cluster`"})
        return found

    def answer(self, name: str, answer: ChangeAnswer) -> None:
        with suppress(OSError):
            atomic.write_file(self.folder / f"{ANSWER}{name}.json", json.dumps(answer).encode())
            (self.folder / f"{REQUEST}{name}.json").unlink(missing_ok=True)

    def write(self, status: ClusterStatus) -> None:
        """Write the status. Not durably, because the next one follows soon."""
        with suppress(OSError), replacing(self.folder / STATUS) as temporary:
            temporary.write_text(json.dumps(status))

    def close(self, reason: str = "") -> None:
        """Remove the status and, with a reason, answer everybody who still waits: first, because without both a run has died."""
        with suppress(OSError):
            for path in self.folder.glob(f"{REQUEST}*.json"):
                if reason:
                    self.answer(path.stem.removeprefix(REQUEST), {"error": reason})
                path.unlink(missing_ok=True)
            for path in () if reason else self.folder.glob(f"{ANSWER}*.json"):
                path.unlink(missing_ok=True)
            (self.folder / STATUS).unlink(missing_ok=True)


class RunningCluster:
    """A run on a cluster that another process drives, addressed by its run folder: `RunningCluster("run").add_workers(2)`."""

    def __init__(self, run: str | Path) -> None:
        url = mirror.url_of(run)
        self.run = str(run)
        self.folder = Path(run) if url is None else mirror.local_folder(url)
        self._control = self.folder / mirror.CONTROL

    def status(self) -> ClusterStatus:
        """Return what the run is doing. Raise ClusterError if no run on a cluster is alive in the folder."""
        alive = is_held(self.folder / ".lock")
        try:
            status: ClusterStatus | None = json.loads((self._control / STATUS).read_text())
        except (OSError, ValueError):
            status = None
        if alive is None and status is not None:  # its driver may be on another host
            alive = time.time() - status["time"] < STALE_S
        if not alive:
            if mirror.url_of(self.run) is not None:
                raise ClusterError(f"no run of {self.run} is alive on this machine", "ask on the machine of its driver")
            raise ClusterError(f"no run is alive in {self.run}", "give the run folder (run.dir) of a run that trains")
        if status is None:
            raise ClusterError(
                f"the run in {self.run} has no cluster that trains",
                "wait until its processes have started; a run of mode local has none",
            )
        return status

    def add_workers(
        self, number: int = 1, timeout_s: float = TIMEOUT_S, log: Callable[[str], None] = lambda text: None
    ) -> ChangeFacts:
        """Add workers and wait until they train. `log` is called with what the change is waiting for."""
        return self._ask(SizeRequest("add-workers", number), timeout_s, log)

    def remove_workers(
        self, number: int = 1, timeout_s: float = TIMEOUT_S, log: Callable[[str], None] = lambda text: None
    ) -> ChangeFacts:
        """Remove workers and wait until the others have their files."""
        return self._ask(SizeRequest("remove-workers", number), timeout_s, log)

    def set_shards(
        self, number: int, timeout_s: float = TIMEOUT_S, log: Callable[[str], None] = lambda text: None
    ) -> ChangeFacts:
        """Change the number of shards, and wait until the rows are divided among them."""
        return self._ask(SizeRequest("shards", number), timeout_s, log)

    def _ask(self, request: SizeRequest, timeout_s: float, log: Callable[[str], None]) -> ChangeFacts:
        self.status()  # raises if no run is alive
        name = f"{time.time_ns():020d}-{os.getpid()}"
        path, answered = self._control / f"{REQUEST}{name}.json", self._control / f"{ANSWER}{name}.json"
        atomic.write_file(path, json.dumps(asdict(request)).encode())
        begin, shown = time.monotonic(), ""
        while True:
            answer: ChangeAnswer | None = None
            with suppress(OSError, ValueError):
                answer = json.loads(answered.read_text())
                answered.unlink(missing_ok=True)
            if answer is not None:
                if "done" not in answer:
                    raise ClusterError(answer.get("error", "the change failed"), answer.get("remedy", ""))
                return answer["done"]
            try:
                status = self.status()
            except ClusterError:
                if answered.exists():
                    continue
                path.unlink(missing_ok=True)
                raise ClusterError(f"the run in {self.run} ended before it could {request}") from None
            text = f"{status['change']} …" if status["change"] else "waiting for the next assignment …"
            if text != shown:
                shown = text
                log(text)
            if time.monotonic() - begin > timeout_s:
                path.unlink(missing_ok=True)
                begun = status["change"] is not None
                raise ClusterError(
                    f"the run did not {request} within {timeout_s:.0f} s",
                    "the change may still take place; see `clickfleet cluster status`"
                    if begun
                    else "the request is withdrawn; a run changes while it trains, not while it waits for data or evaluates",
                )
            time.sleep(POLL_S)


def table(status: ClusterStatus) -> str:
    """Return the status as text: a line for the run, and one for each process."""
    limits = status["range"]
    chosen = f" (of {limits[0]} to {limits[1]})" if limits else ""
    lines = [
        f"mode {status['mode']}  epoch {status['epoch']}  step {status['step']:,}  {status['rows']:,} rows  "
        f"{status['workers']} workers{chosen}  {status['shards']} shards  generation {status['generation']}  "
        f"{status['failures']} failures",
        f"{'process':>10}  {'host':<16} {'pid':>7} {'rows':>12} {'steps':>9} {'streams':>8} {'staleness':>9}",
    ]
    for each in status["processes"]:
        streams = each.get("streams", "")
        late = f"{each['staleness']:.2f}" if "staleness" in each else ""
        lines.append(
            f"{each['name']:>10}  {each['host']:<16} {each['pid']:>7} {each['rows']:>12,} {each['steps']:>9,} "
            f"{streams:>8} {late:>9}"
        )
    if status["change"]:
        lines.append(f"changing: {status['change']}")
    lines += [f"waiting: {text}" for text in status["waiting"]]
    if (last := status["last_change"]) is not None:
        lines.append(f"last change: {describe(last)}, {max(0.0, status['time'] - last['time']):.0f} s ago")
    return "\n".join(lines)


def describe(facts: ChangeFacts) -> str:
    """Return a change in one line."""
    return (
        f"{facts['change']}: {facts['workers']} workers and {facts['shards']} shards after {facts['seconds']:.1f} s, "
        f"{facts['stopped_s']:.1f} s without progress"
    )


def process_status(name: str, facts: ProcessFacts | None, counts: dict[str, Any]) -> ProcessStatus:
    """Return one line of the status from what a process has reported."""
    line: ProcessStatus = {
        "name": name,
        "host": "?" if facts is None else facts["host"],
        "pid": 0 if facts is None else facts["pid"],
        "rows": int(counts.get("rows", 0)),
        "steps": int(counts.get("steps", counts.get("pushes", 0))),
    }
    if "streams" in counts:
        line["streams"] = counts["streams"]
    if "staleness" in counts:
        line["staleness"] = counts["staleness"]
    return line
