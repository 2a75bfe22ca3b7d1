"""A loop on synthetic traffic, in a world whose tastes drift: its AUC beside that of a model that stopped learning.

Every item has a popularity that rises and falls, each in its own phase. Users click by it. A model that learns from the clicks of the last
seconds follows; one that was published earlier and never again knows what was popular then.
"""

from __future__ import annotations

import heapq
import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickfleet.data.logs.synth import auc
from clickfleet.data.schema import Schema, Slot, write_schema
from clickfleet.errors import ServeError
from clickfleet.online.feedback_loop import FeedbackLoop
from clickfleet.serve.client import Client, UnreachableError
from clickfleet.serve.loop_status import DEMO
from clickfleet.serve.overlays import Stack
from clickfleet.serve.predictor import Version, open_version
from clickfleet.serve.state_folder import write_json
from clickfleet.store.published import LOG, Log

SCHEMA = Schema(slots=(Slot("user"), Slot("item")), label="click")
CANDIDATES = 10
REQUESTS_PER_S = 50.0
WINDOW_S = 10.0
"""AUCs are over the shows of this time."""
REPORT_S = 2.0
LEARN_SHARE = 0.3
"""Fraction of the time after which the model for comparison stops learning."""
FEWEST = 200
"""Shows that an AUC needs."""


class DriftingWorld:
    """Users, items, and how likely a user clicks an item at a time.

    >>> world = DriftingWorld(period_s=60.0)
    >>> bool(abs(world.click_rate(0, 3, 0.0) - world.click_rate(0, 3, 30.0)) > 0.02)
    True
    """

    def __init__(self, users: int = 300, items: int = 60, period_s: float = 60.0, seed: int = 7) -> None:
        rng = np.random.default_rng(seed)
        self.users, self.items, self.period_s = users, items, period_s
        self._phase = rng.random(items)
        self._mood = rng.normal(0.0, 0.4, users)

    def click_rate(self, user: int, item: int, at_s: float) -> float:
        popularity = 2.0 * math.sin(2 * math.pi * (at_s / self.period_s + self._phase[item]))
        return 1 / (1 + math.exp(1.5 - popularity - self._mood[user]))


@dataclass(frozen=True)
class SeenShow:
    """A show and what followed it."""

    at: float
    user: int
    item: int
    score: float
    clicked: bool


@dataclass(frozen=True)
class DemoResult:
    """What a demonstration found; AUCs are over all shows after the comparison began."""

    requests: int
    shows: int
    clicks: int
    with_loop: float | None
    without: float | None
    freshness_p50_s: float | None
    freshness_p99_s: float | None

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def demo_config(folder: Path) -> dict[str, Any]:
    """Return the settings of the demonstration, and write its schema."""
    folder.mkdir(parents=True, exist_ok=True)
    write_schema(SCHEMA, folder / "schema.yaml")
    return {
        "data": {"schema": str(folder / "schema.yaml"), "batch_size": 64},
        "model": {"name": "lr"},
        "table": {"rule": {"name": "adam", "lr": 0.1}},
        "run": {"dir": str(folder / "run"), "report": False},
        "online": {"join": {"shows": str(folder / "shows"), "feedback": str(folder / "feedback"), "wait": "1s"}},
        "serve": {"grpc_port": None},
        "publish": {"guard": {"auc_drop": None, "copc": None}},
    }


class Traffic:
    """Ranks candidates for users who click by the world, and sends their clicks, each a moment after its show."""

    def __init__(self, url: str, world: DriftingWorld, seed: int = 3) -> None:
        self.world, self._rng = world, np.random.default_rng(seed)
        self._client = Client(url)
        self._clicks: list[tuple[float, str, str]] = []
        self.recent: deque[SeenShow] = deque()
        self.requests = self.shows = self.clicks = 0
        self._begin = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begin

    def run(self, until_s: float, per_s: float = REQUESTS_PER_S) -> None:
        """Send requests at a rate until a time. A server that restarts is asked again."""
        while (now := self.elapsed_s) < until_s:
            self._send_clicks(now)
            if self.requests >= now * per_s:
                time.sleep(min(0.01, 1 / per_s))
            else:
                self._ask(now)

    def _ask(self, now: float) -> None:
        user = int(self._rng.integers(self.world.users))
        items = self._rng.choice(self.world.items, CANDIDATES, replace=False).tolist()
        self.requests += 1
        try:
            reply = self._client.rank([{"id": item, "item": f"i{item}"} for item in items], {"user": f"u{user}"})
        except UnreachableError:
            return
        for ranked in reply["ranked"]:
            clicked = bool(self._rng.random() < self.world.click_rate(user, int(ranked["id"]), now))
            self.recent.append(SeenShow(now, user, int(ranked["id"]), float(ranked["score"]), clicked))
            self.shows += 1
            if clicked:
                delay = float(self._rng.exponential(0.2))
                heapq.heappush(self._clicks, (now + min(delay, 0.8), reply["request"], str(ranked["id"])))

    def _send_clicks(self, now: float) -> None:
        due = []
        while self._clicks and self._clicks[0][0] <= now:
            due.append(heapq.heappop(self._clicks))
        if due:
            try:
                self.clicks += self._client.feedback(
                    [{"request": request, "item": item, "label": {"click": 1}} for _, request, item in due]
                )
            except UnreachableError:
                for one in due:
                    heapq.heappush(self._clicks, one)

    def close(self) -> None:
        self._client.connection.close()

    def forget(self, before_s: float) -> list[SeenShow]:
        """Remove and return the shows before a time."""
        old = []
        while self.recent and self.recent[0].at < before_s:
            old.append(self.recent.popleft())
        return old


class FrozenModel:
    """The model of a published log at this moment, in a folder of its own. It never changes."""

    def __init__(self, published: Path, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(published / LOG, folder / LOG)  # first: what it names is complete
        log = Log(folder)
        log.refresh()
        self._stack = Stack(folder)
        entry = None
        for line in log.chain():
            shutil.copytree(published / line.name, folder / line.name)
            entry = log.entry(line)
            (self._stack.start if entry.base else self._stack.push)(entry, "mapped")
            self._stack.tidy(int(entry.manifest["factors"]), "mapped")
        if entry is None:
            raise ServeError(f"{published} has no published base")
        self.version: Version = open_version(entry, self._stack.folders)

    def scores(self, shows: list[SeenShow]) -> NDArray[np.float32]:
        rows = [{"user": f"u{show.user}", "item": f"i{show.item}"} for show in shows]
        return self.version.run(self.version.fields.rows(rows))["score"].reshape(-1)

    def close(self) -> None:
        self._stack.close()


class _Comparison:
    """Labels and both scores of shows."""

    def __init__(self) -> None:
        self._labels: list[NDArray[np.int8]] = []
        self._loop: list[NDArray[np.float32]] = []
        self._frozen: list[NDArray[np.float32]] = []

    def add(self, shows: list[SeenShow], frozen: FrozenModel | None) -> None:
        if shows:
            self._labels.append(np.array([show.clicked for show in shows], np.int8))
            self._loop.append(np.array([show.score for show in shows], np.float32))
            self._frozen.append(np.zeros(0, np.float32) if frozen is None else frozen.scores(shows))

    def aucs(self) -> tuple[float | None, float | None]:
        """Return the AUC with the loop and without."""
        if sum(map(len, self._labels)) < FEWEST:
            return None, None
        labels, loop, frozen = np.concatenate(self._labels), np.concatenate(self._loop), np.concatenate(self._frozen)
        return auc(loop, labels), auc(frozen, labels) if len(frozen) == len(labels) else None


def run_demo(
    folder: Path,
    *overrides: str,
    seconds: float = 60.0,
    log: Callable[[str], None] = print,
    ready: Callable[[FeedbackLoop], None] = lambda loop: None,
    settings: Mapping[str, Any] | None = None,
) -> DemoResult:
    """Run a loop on synthetic traffic for a time. `ready` is called when the server answers."""
    world = DriftingWorld(period_s=1.6 * seconds)  # so that what was popular does not return before the end
    config = {**demo_config(folder), **(settings or {})}
    with FeedbackLoop(config, *overrides, log=log, quiet=True) as loop:
        ready(loop)
        traffic, frozen, whole = Traffic(loop.url, world), None, _Comparison()
        try:
            while traffic.elapsed_s < seconds and not loop.stopping:
                traffic.run(min(seconds, traffic.elapsed_s + REPORT_S))
                now = traffic.elapsed_s
                if frozen is None and now >= LEARN_SHARE * seconds:
                    frozen = FrozenModel(loop.run_folder / "published", folder / "frozen")
                    traffic.forget(now)
                    log(f"from now on the served model is compared with entry {frozen.version.identity.sequence}")
                else:
                    whole = _report(loop, traffic, frozen, whole, log)
            whole.add(list(traffic.recent) if frozen is not None else [], frozen)
            with Client(loop.url) as client:
                fresh = client.loop()["freshness"]
        finally:
            traffic.close()
            if frozen is not None:
                frozen.close()
    best = whole.aucs()
    return DemoResult(traffic.requests, traffic.shows, traffic.clicks, *best, fresh["p50_s"], fresh["p99_s"])


def _report(
    loop: FeedbackLoop, traffic: Traffic, frozen: FrozenModel | None, whole: _Comparison, log: Callable[[str], None]
) -> _Comparison:
    """Print and store the AUCs of the last seconds."""
    old = traffic.forget(traffic.elapsed_s - WINDOW_S)
    if frozen is not None:
        whole.add(old, frozen)
    recent = _Comparison()
    recent.add(list(traffic.recent), frozen)
    with_loop, without = recent.aucs()
    write_json(loop.state / DEMO, {"with_loop": with_loop, "without": without})
    if with_loop is not None:
        words = "" if without is None else f", without {without:.4f}"
        log(
            f"{traffic.elapsed_s:4.0f} s: {traffic.shows:,} shows, {traffic.clicks:,} clicks; AUC with the loop {with_loop:.4f}{words}"
        )
    return whole
