"""Serve a local page that follows runs while they train. Only this machine can reach it, and it loads nothing from the network.


with Dashboard(["run", "other"]) as page:
    print(page.url)
"""

from __future__ import annotations

import hashlib
import json
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import clickfleet
from clickfleet.config.load import load
from clickfleet.data.progress import amount
from clickfleet.errors import ClickfleetError, ConfigError, ServeError
from clickfleet.store.lock import is_held
from clickfleet.store.table import width_facts
from clickfleet.training.metrics import metric_name, of_other_labels
from clickfleet.training.monitor import END
from clickfleet.training.report import charts, page, stream
from clickfleet.training.report.charts import KINDS, Series
from clickfleet.training.report.evidence import curve

Line = dict[str, Any]
Status = Literal["waiting", "running", "finished", "stopped", "failed", "crashed", "unknown"]
"""Unknown: another machine may be training."""
KEPT = 256
"""Bytes kept to recognise a file."""


class MetricsTail:
    """Read complete lines as they are appended. A truncated file (a resumed run) is read from its start again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarts = 0
        """How often the file was truncated, which invalidates the lines read before."""
        self._at = 0
        self._before = b""
        """The bytes before that position, to detect a file that was truncated and grew again."""

    def lines(self) -> list[Line]:
        """Return the lines appended since the last call."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(self._at - len(self._before))
                if size < self._at or file.read(len(self._before)) != self._before:
                    self._at, self._before, self.restarts = 0, b"", self.restarts + 1
                file.seek(self._at)
                content = file.read(size - self._at)
        except FileNotFoundError:
            return []
        whole = content.rfind(b"\n") + 1  # the last line may be incomplete
        self._at += whole
        self._before = (self._before + content[:whole])[-KEPT:]
        return [line for text in content[:whole].splitlines() if (line := _parsed(text)) is not None]


def _parsed(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "kind" in line else None


HOST = "127.0.0.1"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
SCRIPT = """
const runs = document.getElementById('runs'), state = document.getElementById('status'), every = EVERY;
let tag = '';
async function update() {
  try {
    const reply = await fetch('panels', {headers: tag ? {'If-None-Match': tag} : {}, cache: 'no-store'});
    if (reply.status === 200) { tag = reply.headers.get('ETag'); runs.innerHTML = await reply.text(); }
    state.textContent = 'updated at ' + new Date().toLocaleTimeString();
  } catch (problem) { state.textContent = 'the dashboard has stopped'; }
  setTimeout(update, every);
}
update();
"""


MOST_RUNS, DEEPEST = 500, 6
"""How many runs are found in a folder, and how deep below it."""
SCAN_S = 5.0
"""Seconds between two searches for new run folders."""
NOT_RUNS = {
    "checkpoints",
    "published",
    "tensorboard",
    "spool",
    "quarantine",
    "logs",
    "model",
    "join",
    "loop",
    "shows",
    "feedback",
}
"""Folders inside a run."""


def folders(paths: Sequence[str | Path]) -> list[Path]:
    """Return the run folders at and below these folders. A folder without any is taken for a run that has not begun."""
    runs: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            raise ConfigError(f"there is no folder {path}", "give run folders, or a folder that holds runs")
        runs += _runs_in(path) or [path]
    return list(dict.fromkeys(runs))[:MOST_RUNS]


def is_run(folder: Path) -> bool:
    """Return whether training has written to a folder."""
    return any((folder / name).exists() for name in ("metrics.jsonl", ".lock", "checkpoints"))


def _has_not_begun(folder: Path) -> bool:
    return (folder / "config.yaml").exists() or not any(folder.iterdir())


def _runs_in(folder: Path, depth: int = 0) -> list[Path]:
    if is_run(folder):
        return [folder]
    if depth == DEEPEST:
        return []
    try:
        inside = sorted(one for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))
    except OSError:
        return []
    found: list[Path] = []
    for one in inside:
        if one.name not in NOT_RUNS and not one.is_symlink():
            # In a folder of compare or tune, runs that have not begun are shown too.
            unbegun = [one] if folder.name in ("runs", "trials") and _has_not_begun(one) else []
            found += _runs_in(one, depth + 1) or unbegun
        if len(found) >= MOST_RUNS:
            break
    return found


class Dashboard:
    """Serve the page inside a `with` block."""

    def __init__(self, runs: Sequence[str | Path], port: int = 0, every_s: float = 1.0) -> None:
        self.paths, self.every_s = list(runs), every_s
        self._runs: dict[Path, FollowedRun] = {}
        self._reading = threading.Lock()
        self._found, self._scanned = folders(self.paths), time.monotonic()
        try:
            self._server = ThreadingHTTPServer((HOST, port), _handler(self))
        except OSError as error:
            raise ServeError(f"cannot listen on {HOST}:{port}: {error.strerror}", "choose another --port") from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="clickfleet-dashboard", daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/"

    def read(self) -> list[FollowedRun]:
        """Read the new lines of all runs, including runs that started since the last call."""
        if time.monotonic() - self._scanned > SCAN_S:
            with suppress(ConfigError):  # a folder that was removed meanwhile
                self._found = folders(self.paths)
            self._scanned = time.monotonic()
        for folder in self._found:
            self._runs.setdefault(folder, FollowedRun(folder))
        for folder in [folder for folder in self._runs if folder not in self._found]:  # the parent of runs that began
            del self._runs[folder]
        names = [folder.absolute().name for folder in self._runs]
        for folder, run in self._runs.items():
            run.name = folder.absolute().name if names.count(folder.absolute().name) == 1 else str(folder)
            run.read()
        return list(self._runs.values())

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """Return the content type and body for a path; None if there is no such path."""
        if path == "/":
            return "text/html; charset=utf-8", self._shell().encode()
        with self._reading:  # several tabs may ask at once
            if path == "/panels":
                return "text/html; charset=utf-8", draw(self.read()).encode()
            if path == "/data.json":
                return "application/json", json.dumps([run.facts() for run in self.read()]).encode()
        return None

    def _shell(self) -> str:
        script = SCRIPT.replace("EVERY", str(round(self.every_s * 1000)))
        parts = [
            "<h1>Runs</h1>",
            f'<p class="soft"><span id="status" role="status">loading…</span> clickfleet {clickfleet.__version__}</p>',
            '<div id="runs"></div>',
            f"<script>{script}</script>",
        ]
        return page.page("clickfleet dashboard", parts)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(board: Dashboard) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if host not in (HOST, "localhost"):  # DNS rebinding: a foreign page whose name resolves to this machine
                return self._reply(403, "text/plain", b"only reachable from this machine\n")
            answer = board.answer(self.path.partition("?")[0])
            if answer is None:
                return self._reply(404, "text/plain", b"not found; try / or /data.json\n")
            tag = f'"{hashlib.blake2b(answer[1], digest_size=12).hexdigest()}"'
            if self.headers.get("If-None-Match") == tag:
                return self._reply(304, answer[0], b"", tag)
            return self._reply(200, *answer, tag)

        def _reply(self, status: int, kind: str, body: bytes, tag: str = "") -> None:
            self.send_response(status)
            if status != 304:
                self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Security-Policy", POLICY)
            if tag:
                self.send_header("ETag", tag)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            """Log nothing: the page polls every second."""

    return Handler


MOST = 2000
"""Beyond twice as many lines of a kind, only every second of the oldest is kept."""
LIVE_S = 30.0
DRAWN = 12
"""Maximum number of runs with their own charts; the table shows all runs."""


class FollowedRun:
    """A run folder that may still grow."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.absolute().name
        self.lines: dict[str, list[Line]] = {"train": [], "valid": [], "test": [], "epoch": []}
        self._tail = MetricsTail(folder / "metrics.jsonl")
        self._restarts = 0
        self._config: Any = None

    def read(self) -> None:
        """Read the new lines."""
        new = self._tail.lines()
        if self._tail.restarts != self._restarts:  # resumed from a checkpoint: later lines are void
            self._restarts = self._tail.restarts
            self.lines = {"train": [], "valid": [], "test": [], "epoch": []}
        for line in new:
            kept = self.lines.setdefault(line["kind"], [])
            kept.append(line)
            if len(kept) > 2 * MOST:
                kept[:MOST] = kept[:MOST:2]

    @property
    def config(self) -> Any:
        """Return the configuration of the run; None until it is readable."""
        path = self.folder / "config.yaml"
        if self._config is None and path.is_file():
            try:
                self._config = load(path, (), self.folder)
            except ClickfleetError:  # incomplete, or of another version
                return None
        return self._config

    @property
    def last(self) -> Line:
        """Return the newest line of training metrics, with the rows of the end of the run if that is newer."""
        newest = max((kind[-1] for name in ("train", "epoch") if (kind := self.lines[name])), key=_time, default={})
        ended = self.lines.get(END)
        return {**newest, "rows": ended[-1].get("rows", newest.get("rows"))} if ended and newest else newest

    @property
    def silence_s(self) -> float | None:
        """Return the seconds since the last line; None before the first."""
        newest = max((_time(kind[-1]) for kind in self.lines.values() if kind), default=None)
        return None if newest is None else max(0.0, time.time() - newest)

    @property
    def step(self) -> int | None:
        """Return the newest step of any line, as the report does."""
        return max(
            (line["step"] for kind in self.lines.values() if kind and (line := kind[-1]).get("step") is not None),
            default=None,
        )

    @property
    def status(self) -> Status:
        """Return whether the run is running, or how it ended."""
        held = is_held(self.folder / ".lock")
        silence = self.silence_s
        ended = self.lines.get(END)
        if held or (held is None and not ended and silence is not None and silence < LIVE_S):
            return "running"
        if ended:
            return str(ended[-1].get("state"))  # type: ignore[return-value]
        if silence is None and held is None:
            return "waiting"
        return "unknown" if held is None else "crashed"

    @property
    def resume(self) -> str | None:
        """Return the command that resumes the run, if it has not finished."""
        if self.status not in ("crashed", "stopped", "failed"):
            return None
        online = self.config is not None and (
            self.config.online.dir or self.config.online.kafka or self.config.online.join
        )
        path = shlex.quote(str(self.folder / "config.yaml"))
        return f"clickfleet online {path}" if online else f"clickfleet train {path} --resume"

    @property
    def state(self) -> str:
        """Describe the status in a few words."""
        silence, status = self.silence_s, self.status
        quiet = "" if silence is None or silence < LIVE_S else f"quiet for {stream.span(silence)}"
        step = "" if self.step is None else f" at step {self.step:,}"
        if status == "running":
            words = "running" if silence is not None else "running; no metrics yet"
            return f"{words}, {quiet}" if quiet else words
        if status == "waiting":
            return "waiting for its first metrics"
        if status == "unknown":
            return quiet or "unknown"
        if status == "failed":
            return f"failed{step}: {self.lines[END][-1].get('error')}"
        return f"{status}{step}"

    @property
    def seconds_left(self) -> float | None:
        """Return the time left: that of the newest line, less the time since."""
        left = self.last.get("seconds_left")
        if left is None or self.status != "running":
            return None
        return max(0.0, float(left) - max(0.0, time.time() - _time(self.last)))

    def facts(self) -> Line:
        """Return the newest metrics for /data.json."""
        last, valid, test = self.last, self.lines["valid"], self.lines["test"]
        entry = (self.lines.get("published") or [{}])[-1]
        return {
            "run": str(self.folder),
            "status": self.status,
            "state": self.state,
            "resume": self.resume,
            "silence_s": self.silence_s,
            "step": self.step,
            "seconds_left": self.seconds_left,
            **{key: last.get(key) for key in ("rows", "rows_per_s", "auc", "loss", "table_rows", "table_bytes")},
            "valid_auc": valid[-1].get("auc") if valid else None,
            "test_auc": test[-1].get("auc") if test else None,
            "passes": len(self.lines.get("pass", [])),
            **{key: entry.get(key) for key in ("sequence", "entry_kind", "entry_rows", "entry_bytes")},
            **stream.ages(self.lines),
            "lag_s": time.time() - _time(entry) if entry else None,
        }


def draw(runs: Sequence[FollowedRun]) -> str:
    """Render the changing part of the page."""
    drawn = sorted(runs, key=lambda run: run.silence_s or 0.0)[:DRAWN]
    note = f'<p class="soft">Charts below: the {DRAWN} most recently active runs.</p>' if len(runs) > DRAWN else ""
    return "\n".join([_overview(runs), note, *(_run(run) for run in runs if run in drawn)])


def _overview(runs: Sequence[FollowedRun]) -> str:
    if len(runs) < 2:
        return ""
    head = ("run", "state", "step", "rows", "rows/s", "AUC", "validation AUC", "test AUC", "rows in the table")
    cells = []
    for run in runs:
        facts = run.facts()
        speed = facts["rows_per_s"]
        cells.append(
            [
                f'<a href="#{escape(run.name)}">{escape(run.name)}</a>',
                escape(run.state),
                page.number(facts["step"]) or "–",
                page.number(facts["rows"]) or "–",
                "–" if speed is None else f"{speed:,.0f}",
                page.number(facts["auc"]) or "–",
                page.number(facts["valid_auc"]) or "–",
                page.number(facts["test_auc"]) or "–",
                page.number(facts["table_rows"]) or "–",
            ]
        )
    figures = []
    for title, kind, key in (
        ("Validation AUC", "valid", "auc"),
        ("Test AUC", "test", "auc"),
        ("Training AUC", "train", "auc"),
        ("Loss", "train", "loss"),
    ):
        series = [
            Series(run.name, curve(run.lines[kind], key), KINDS[i % len(KINDS)], dots=kind != "train")
            for i, run in enumerate(runs)
        ]
        series = [one for one in series if one.points]
        if series:
            figures.append(charts.lines(f"{title} of all runs", series, "step"))
    return page.section("All runs", page.table(head, cells), page.charts(*figures))


def _tiers(last: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the tiles of a table that keeps rows on disk."""
    if not last.get("table_disk_rows"):
        return {}
    on_disk = last["table_disk_rows"]
    memory = (last["table_bytes"] - last["table_index_bytes"]) / max(last["table_rows"] - on_disk, 1)
    disk, index = (last[f"table_{name}_bytes"] / on_disk for name in ("disk", "index"))
    return {
        "rows on disk": page.number(on_disk),
        "table on disk": amount(int(last["table_disk_bytes"]), "bytes"),
        "bytes per row in memory": f"{memory:.0f}",
        "bytes per row on disk": f"{disk:.0f}, and {index:.1f} of memory",
    }


def _widths(last: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the tiles of a table with rows of several widths."""
    stats = {name.removeprefix("table_"): value for name, value in last.items() if name.startswith("table_width_")}
    tiles: dict[str, str | None] = {}
    for width, facts in width_facts(stats).items():
        rows = facts["rows"] + facts.get("disk_rows", 0)
        disk = f", {facts['disk_bytes_per_row']:.0f} on disk" if facts.get("disk_rows") else ""
        tiles[f"rows with {width} factors"] = f"{page.number(rows)} of {facts['bytes_per_row']:.0f} bytes{disk}"
    return tiles


def _run(run: FollowedRun) -> str:
    last, valid, test = run.last, run.lines["valid"], run.lines["test"]
    speed, loss, left = last.get("rows_per_s"), last.get("loss"), run.seconds_left
    size = last.get("table_bytes")
    entry = run.lines.get("published", [])
    tiles = {
        "step": page.number(run.step),
        "rows trained on": page.number(last.get("rows")),
        "rows per second": None if speed is None else f"{speed:,.0f}",
        "loss": page.number(loss),
        "AUC": page.number(last.get("auc")),
        "validation AUC": page.number(valid[-1].get("auc")) if valid else None,
        "test AUC": page.number(test[-1].get("auc")) if test else None,
        "rows in the table": page.number(last.get("table_rows")),
        "table memory": None if size is None else amount(int(size), "bytes"),
        **_tiers(last),
        **_widths(last),
        "time left": None if left is None else stream.span(left),
        "staleness": page.number(last.get("staleness"), 1),
        "failed processes": page.number(last.get("losses")),
        "age of the last entry": stream.span(time.time() - _time(entry[-1])) if entry else None,
        **stream.numbers(run.lines),
    }
    train = run.lines["train"] or run.lines["epoch"]
    curves = [
        _curves(
            "AUC",
            [
                ("training", train, "auc"),
                ("last batches", train, "sliding_auc"),
                ("validation", valid, "auc"),
                ("test", test, "auc"),
            ],
        ),
        _curves("Loss", [("training", train, "loss"), ("validation", valid, "logloss"), ("test", test, "logloss")]),
        _curves("Rows per second", [("rows/s", train, "rows_per_s")]),
        _curves("Table size, rows", [("rows", train, "table_rows"), ("on disk", train, "table_disk_rows")]),
        _curves("Table size, bytes", [("memory", train, "table_bytes"), ("disk", train, "table_disk_bytes")]),
        _curves("Staleness of rows", [("steps", train, "staleness")]),
    ]
    measured = next((kind[-1] for kind in (test, valid) if kind), {})
    curves += [
        _curves(page.capitalized(metric_name(name)), [("validation", valid, name), ("test", test, name)])
        for name in of_other_labels(measured)
    ]
    config = run.config
    objective = None if config is None else config.publish.freshness_slo
    shown = config.model.name if config is not None else ""
    parts = [
        page.tiles(tiles),
        page.charts(*curves),
        page.charts(*stream.passes(run.lines), *stream.entries(run.lines), *stream.freshness(run.lines, objective)),
        stream.slices(run.lines),
        stream.alarms(run.lines),
        page.shares(last["shares"]) if last.get("shares") else "",
    ]
    state = f'<p class="soft"><b class="state">{escape(run.state)}</b> {escape(str(run.folder))} {escape(shown)}</p>'
    resume = run.resume
    if resume is not None:
        state += f'<p class="soft">resume with <code>{escape(resume)}</code></p>'
    return f'<section class="run" id="{escape(run.name)}"><h2>{escape(run.name)}</h2>{state}{"".join(parts)}</section>'


def _curves(title: str, wanted: Sequence[tuple[str, list[Line], str]]) -> str:
    series = [
        Series(name, points, KINDS[i], dots=name in ("validation", "test"))
        for i, (name, lines, key) in enumerate(wanted)
        if (points := curve(lines, key))
    ]
    return charts.lines(title, series, "step") if series else ""


def _time(line: Line) -> float:
    return float(line.get("time") or 0.0)
