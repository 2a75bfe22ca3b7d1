"""The loop: server, join and trainer together, as processes that are killed, and its page in a real Chromium."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
import yaml
from playwright.sync_api import expect

from clickfleet.config.check import configure
from clickfleet.errors import CheckpointError, ConfigError, ServeError
from clickfleet.online import feedback_loop
from clickfleet.online.feedback_loop import FeedbackLoop, loop_config
from clickfleet.online.loop_demo import run_demo
from clickfleet.serve.supervisor import Settings
from clickfleet.store.lock import Lock
from clickfleet.store.published import Content, Entry, Log
from looped import KeptRows, LoopTraffic, learned_once, loop_settings
from mock_cluster import Cluster
from served import WAIT_S, until
from small_disk import Disk, small_disk
from soak import SOAK

pytestmark = pytest.mark.xdist_group("loop")  # one loop for most of these tests


def test_what_is_not_set_follows_from_the_rest(tmp_path: Path) -> None:
    config = loop_config(configure({"run": {"dir": str(tmp_path / "run")}}))
    join = config.online.join
    assert join is not None
    assert join.shows == config.serve.log == str(tmp_path / "run/shows")
    assert join.feedback == config.serve.feedback == str(tmp_path / "run/feedback")
    assert config.online.first_base
    server = Settings.of_section(config.serve, tmp_path, tmp_path)
    assert server.write_every_s == 0.1, "a click waits for its show"
    server = Settings.of_section(loop_config(configure({}, ["serve.log_every=2s"])).serve, tmp_path, tmp_path)
    assert server.write_every_s == 2.0
    assert Settings("m", "s", log="shows").write_every_s == 5.0
    assert config.online.pass_ is not None
    given = {"online": {"join": {"shows": "a", "feedback": "kafka://b:1/f", "rows_per_pass": 70}}}
    config = loop_config(configure(given))
    assert config.serve.feedback == "kafka://b:1/f"
    assert config.serve.log == str(Path("a").resolve())
    assert config.online.pass_ is None, "the join says how long a pass is"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["online.dir=logs"], "learns from its own show log"),
        (["online.kafka={brokers: b, topic: t}"], "learns from its own show log"),
        (["online.end_day=20260101"], "runs until it is stopped"),
        (["run.dir=s3://bucket/run"], "needs a run folder on this machine"),
        (["serve.log=a", "online.join={shows: b, feedback: c}"], "remove one of them"),
        (["serve.log_sample=0.5"], "learns from every show"),
    ],
)
def test_settings_that_contradict_a_loop_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loop_config(configure({}, overrides))


@pytest.fixture(autouse=True, scope="module")
def _trainers_wait_for_nobody() -> Iterator[None]:
    """Let trainers have their share of the cores. With the low priority of a loop they would wait for all tests beside these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feedback_loop, "TRAINER_SESSION", 0)
        yield


RUN_BYTES = 256 << 20


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk | None]:
    """The disk of the run folder, which can be filled; None where none can be mounted."""
    with ExitStack() as stack:
        try:
            yield stack.enter_context(small_disk(tmp_path_factory.mktemp("loop") / "disk", RUN_BYTES))
        except pytest.skip.Exception:
            yield None


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory, disk: Disk | None) -> Iterator[FeedbackLoop]:
    settings = loop_settings(tmp_path_factory.mktemp("loop"))
    if disk is not None:
        settings["run"]["dir"] = str(disk.folder / "run")
    settings["publish"]["base_every_deltas"] = 40
    with FeedbackLoop(settings, log=lambda text: None, quiet=True) as running:
        yield running


@pytest.fixture(scope="module")
def kept(loop: FeedbackLoop) -> Iterator[KeptRows]:
    with KeptRows(loop.run_folder) as rows:
        yield rows


def differs(traffic: LoopTraffic) -> Callable[[], bool]:
    return lambda: traffic.scores.get("good", 0.0) > traffic.scores.get("bad", 1.0) + 0.1


def test_clicks_change_scores_and_the_page_shows_it(loop: FeedbackLoop, kept: KeptRows, browser: Any) -> None:
    with LoopTraffic(loop.url, seed=1) as traffic:
        until(differs(traffic))
        page = browser.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(f"{loop.url}/loop")
        expect(page.locator("#status")).to_contain_text("updated at", timeout=1e3 * WAIT_S)
        expect(page.locator("#trainer")).to_contain_text("running")
        expect(page.locator("#p99")).to_contain_text(" s", timeout=1e3 * WAIT_S)
        expect(page.locator("#fresh polyline")).to_have_count(2)
        expect(page.locator("#learned")).not_to_contain_text("–", timeout=1e3 * WAIT_S)
        expect(page.locator("#joined")).to_contain_text("labels")
        expect(page.locator("#alarms")).to_have_text("none")

        def requests() -> int:
            return int(page.inner_text("#requests").split("\n")[0].replace(",", ""))

        before = requests()
        until(lambda: requests() > before)
        assert not problems
        page.close()
    learned_once(kept, traffic)
    found = traffic.status()
    assert found["shows_logged"] >= len(traffic.shows)
    assert found["freshness"]["p50_s"] < WAIT_S
    assert found["demo"] is None


def test_each_part_may_be_killed(loop: FeedbackLoop, kept: KeptRows) -> None:
    """Nothing is lost or doubled, and every request is answered meanwhile."""
    with LoopTraffic(loop.url, seed=2) as traffic:
        for name in ("updater", "recorder", "worker 0", "trainer"):
            until(differs(traffic))
            kill(loop, name)
            before = len(traffic.shows)
            until(lambda before=before: len(traffic.shows) > before + 10)  # type: ignore[misc]
            served = traffic.status()["sequence"]
            until(lambda served=served: traffic.status()["sequence"] > served, 2 * WAIT_S)  # type: ignore[misc]
    learned_once(kept, traffic)
    deaths = traffic.status()["deaths"]
    assert {"updater", "recorder", "worker 0", "trainer"} <= set(deaths)


def kill(loop: FeedbackLoop, name: str) -> None:
    """Kill a part of the loop, and wait until it is there again."""
    until(lambda: name in loop.processes)
    before = loop.processes[name]
    os.kill(before, signal.SIGKILL)
    until(lambda: loop.processes.get(name, before) != before)


class Faults:
    """What may happen to a loop."""

    def __init__(
        self,
        loop: FeedbackLoop,
        traffic: LoopTraffic,
        seed: int,
        disk: Disk | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self.loop, self.traffic, self.disk, self.cluster = loop, traffic, disk, cluster
        self._rng = random.Random(seed)
        self.faults = [self.kill, self.bad_model]
        self.faults += [] if disk is None else [self.full_disk]
        self.faults += [self.garbage_files] if cluster is None else [self.kafka_stops, self.garbage_messages]
        self.faults += [self.garbage, self.replay, self.skew, self.pause]

    def run(self, number: int | None = None) -> None:
        """Let a random fault happen, or the one with a number: even few sequences begin with each of them."""
        fault = self._rng.choice(self.faults) if number is None else self.faults[number % len(self.faults)]
        fault()

    def kill(self) -> None:
        kill(self.loop, self._rng.choice(["updater", "recorder", "worker 0", "trainer"]))

    def answers(self) -> None:
        """A request of another client is answered now."""
        body = {"user": {}, "candidates": [{"id": "good", "ad": "good"}], "request": f"now-{self._rng.random()}"}
        with suppress(httpx.TransportError):  # a worker may have just been killed
            assert httpx.post(f"{self.loop.url}/v1/rank", json=body, timeout=WAIT_S).status_code == 200

    def told(self, *words: str) -> None:
        """Wait until the page says what is wrong."""
        until(lambda: any(word in alarm for alarm in self.traffic.status()["alarms"] for word in words))

    def bad_model(self) -> None:
        """Somebody appends an entry whose scores are not those that it promises: no server takes it, and the trainer repairs the log."""
        log = Log(self.loop.run_folder / "published")
        until(lambda: "trainer" in self.loop.processes)
        trainer = self.loop.processes["trainer"]
        with Lock(log.folder / ".lock", "publishes", patience_s=WAIT_S):  # so the trainer does not hold it
            os.kill(trainer, signal.SIGSTOP)
            try:
                bad = append_bad(log, self._rng.choice([True, False])).sequence
                self.told("does not serve the newest entry")
                self.answers()
            finally:
                os.kill(trainer, signal.SIGCONT)
        until(lambda: self.traffic.status()["sequence"] > bad, 2 * WAIT_S)
        self.traffic.refused.add(bad)

    def full_disk(self) -> None:
        """The disk of the run folder is full: entries and checkpoints wait, the trainer may end. It continues when there is space."""
        assert self.disk is not None
        with suppress(OSError):  # others write meanwhile
            self.disk.leave(0)
        self.told("held back", "the trainer is not running", "does not serve")
        for _ in range(5):
            self.answers()
        self.disk.free()
        served = self.traffic.status()["sequence"]
        until(lambda: self.traffic.status()["sequence"] > served, 2 * WAIT_S)

    def kafka_stops(self) -> None:
        """Feedback is refused, shows wait, and every request is answered."""
        assert self.cluster is not None
        self.cluster.set_down(True)
        event = {"request": "never shown", "label": {"click": 1}, "event": f"e-{self._rng.random()}"}
        with suppress(httpx.TransportError):
            assert httpx.post(f"{self.loop.url}/v1/feedback", json=event, timeout=WAIT_S).status_code == 503
            self.told("feedback were refused")
        self.answers()
        self.cluster.set_down(False)

    def garbage_messages(self) -> None:
        """Messages of another program in the topics."""
        assert self.cluster is not None
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.cluster.address, "log_level": 0})
        for topic in ("shows", "feedback"):
            producer.produce(topic, self._rng.randbytes(300))
        producer.flush(WAIT_S)

    def garbage(self) -> None:
        """Requests that no client of ours sends."""
        for body in (
            b"",
            b"{",
            b"[]",
            b'{"request": 1}',
            b'{"request": "x", "label": {"click": "yes"}}',
            os.urandom(99),
        ):
            try:
                reply = httpx.post(f"{self.loop.url}/v1/feedback", content=body, timeout=WAIT_S)
                assert reply.status_code == 400, reply.text
            except httpx.TransportError:  # the worker has just been killed
                continue

    def garbage_files(self) -> None:
        """Files in the folder of the feedback that another program wrote badly."""
        assert self.loop.config.serve.feedback is not None
        name = f"zz-{self._rng.randrange(1 << 30)}"
        folder = Path(self.loop.config.serve.feedback)
        (folder / f"{name}.arrow").write_bytes(self._rng.randbytes(500))
        (folder / f"{name}.jsonl").write_bytes(b'{"request": "never shown", "label": {"click": 1}}\n{nonsense\n')

    def replay(self) -> None:
        """The same feedback again, some of it for the third time."""
        for event in self._rng.sample(self.traffic.events, min(20, len(self.traffic.events))):
            self.traffic.post("/v1/feedback", event)

    def skew(self) -> None:
        """A sender whose clock is an hour ahead or behind."""
        self.traffic.skew_s = self._rng.choice([-3600.0, 3600.0, 0.0])

    def pause(self) -> None:
        """A part that stands still for a moment."""
        process = self.loop.processes.get(self._rng.choice(["updater", "recorder", "trainer"]))
        if process is not None:
            os.kill(process, signal.SIGSTOP)
            time.sleep(0.3)
            os.kill(process, signal.SIGCONT)


class WrongRows:
    """A base, or a delta, without rows."""

    deleted = np.empty(0, np.uint64)

    def __init__(self, base: bool) -> None:
        self.base = base

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def append_bad(log: Log, base: bool) -> Entry:
    """Append an entry of another model than its golden requests are from."""
    log.recover()
    last = log.entry(log.lines()[-1])
    facts, golden = last.manifest, last.golden()
    place = golden.column_names.index("score")
    wrong = pa.array(
        [[(score + 0.3) % 1 for score in row] for row in golden["score"].to_pylist()], golden.schema.field(place).type
    )
    content = Content(
        schema=facts["schema"],
        model=facts["model"],
        factors=facts["factors"],
        step=facts["step"],
        graph=last.graph(),
        golden=lambda sample: golden.set_column(place, golden.schema.field(place), wrong),
        outputs=tuple(facts["outputs"]),
    )
    return log.append(WrongRows(base), content)


def suffer(loop: FeedbackLoop, kept: KeptRows, seed: int, **parts: Any) -> None:
    """Run a random sequence of faults under traffic."""
    with LoopTraffic(loop.url, seed=1000 + seed) as traffic:
        until(lambda: len(traffic.events) > 5)
        faults = Faults(loop, traffic, seed, **parts)
        for turn in range(4 if SOAK else 1):
            faults.run(None if turn else seed)
            before = len(traffic.shows)
            until(lambda before=before: len(traffic.shows) > before + 5)  # type: ignore[misc]
    learned_once(kept, traffic)
    assert not traffic.sequences & traffic.refused, "a bad model was served"


@pytest.mark.parametrize("seed", range(70 if SOAK else 7))
def test_random_faults_lose_and_double_nothing(
    loop: FeedbackLoop, kept: KeptRows, disk: Disk | None, seed: int
) -> None:
    suffer(loop, kept, seed, disk=disk)


def test_random_faults_of_a_loop_over_kafka(tmp_path: Path) -> None:
    cluster = Cluster()
    settings = loop_settings(tmp_path)
    where, options = f"kafka://{cluster.address}", {"reconnect.backoff.max.ms": 200}
    for topic in ("shows", "feedback"):
        cluster.create(topic, 1)
        settings["online"]["join"][topic] = f"{where}/{topic}"
    settings["online"]["join"]["kafka_options"] = settings["serve"]["kafka_options"] = options
    settings["publish"]["base_every_deltas"] = 40
    try:
        with FeedbackLoop(settings, log=lambda text: None, quiet=True) as loop, KeptRows(loop.run_folder) as kept:
            for seed in range(30 if SOAK else 3):
                suffer(loop, kept, seed, cluster=cluster)
    finally:
        cluster.close()


def test_a_loop_that_was_killed_or_stopped_continues(tmp_path: Path) -> None:
    """The command: a second one is refused, kill -9 leaves no process behind, SIGTERM stops cleanly, and nothing is lost."""
    settings = loop_settings(tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    command = [str(Path(sys.executable).parent / "clickfleet"), "loop", str(tmp_path / "config.yaml")]
    traffic, kept = None, KeptRows(tmp_path / "run")
    kept.__enter__()
    for end in (signal.SIGKILL, signal.SIGTERM):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        url = next(line.split()[1] for line in process.stdout if line.startswith("ready: "))
        loop = FeedbackLoop(settings)
        with pytest.raises(CheckpointError, match="runs a loop there"), loop:
            pass
        fresh = LoopTraffic(url, seed=50 + end)
        if traffic is not None:
            fresh.shows |= traffic.shows
        traffic = fresh
        with traffic:
            until(differs(traffic))
        if end == signal.SIGTERM:
            learned_once(kept, traffic)
        process.send_signal(end)
        with process.stdout as stdout:
            output = stdout.read()
        assert process.wait(WAIT_S) == (-end if end == signal.SIGKILL else 0)
        # All parts are gone, so that the next loop can have the run folder and the port.
        until(lambda: not held(tmp_path / "run"))
    kept.__exit__()
    assert "the same command continues" in output


def held(run: Path) -> bool:
    from clickfleet.store.lock import is_held

    return is_held(run / ".lock") is True


def test_a_full_disk_is_told_and_costs_no_reply(tmp_path: Path) -> None:
    """Shows are dropped and counted, feedback is refused, the trainer ends; all of it goes on when there is space."""
    with small_disk(tmp_path / "disk", 48 << 20) as disk:
        settings = loop_settings(tmp_path)
        settings["online"]["join"] |= {"shows": str(disk.folder / "shows"), "feedback": str(disk.folder / "feedback")}
        with FeedbackLoop(settings, log=lambda text: None, quiet=True) as loop, KeptRows(loop.run_folder) as kept:
            traffic = LoopTraffic(loop.url, seed=7)
            with httpx.Client(base_url=loop.url, timeout=WAIT_S) as client:

                def ask(request: str) -> None:
                    body = {"user": {}, "candidates": [{"id": "good", "ad": "good"}], "request": request}
                    assert client.post("/v1/rank", json=body).status_code == 200

                ask("before")
                with suppress(OSError):  # others write meanwhile
                    disk.leave(0)
                asked = 0

                def dropped() -> bool:
                    nonlocal asked
                    asked += 1
                    ask(f"full {asked}")
                    return bool(traffic.status()["shows_dropped"])

                until(dropped)
                event = {"request": "before", "item": "good", "label": {"click": 1}, "event": "e"}
                assert client.post("/v1/feedback", json=event).status_code == 503
                alarms = traffic.status()["alarms"]
                assert any("shows are missing in the log" in alarm for alarm in alarms)
                until(lambda: any("feedback were refused" in alarm for alarm in traffic.status()["alarms"]))
                disk.free()
                traffic.post("/v1/feedback", event)
            with traffic:
                until(differs(traffic))
            learned_once(kept, traffic)


def test_a_trainer_that_cannot_start_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(ServeError, match=r"the trainer did not start: .*nowhere"),
        FeedbackLoop(loop_settings(tmp_path), "data.schema=nowhere.yaml", log=lambda text: None, quiet=True),
    ):
        pass


def test_the_demonstration_learns(tmp_path: Path) -> None:
    said: list[str] = []
    done = run_demo(tmp_path, "serve.port=0", seconds=12.0, log=said.append)
    assert done.with_loop is not None
    assert done.without is not None
    assert done.without + 0.03 < done.with_loop <= 1.0, "whatever else the machine does, it follows the world a little"
    assert done.clicks > 100
    assert json.dumps(done.to_dict())
    assert any("compared with entry" in text for text in said)
