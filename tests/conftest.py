import gc
import hashlib
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from clickfleet.data.parsing import lines

settings.register_profile(  # the same examples in every run; `make soak` looks for others
    "quick", max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("soak", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("soak" if os.environ.get("CLICKFLEET_SOAK") else "quick")


def pytest_configure() -> None:
    """Handle SIGINT as in a terminal: a shell starts background jobs with it ignored, and so would be what tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """One thread for torch: the inputs are tiny, and waiting for a second thread is all that two would do."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _every_log_is_large() -> Iterator[None]:
    """Train one epoch with the usual settings, as on large logs. A test of the settings for small logs asks for `small_logs`."""
    from clickfleet.training import defaults

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defaults, "LARGE_ROWS", 0)
        yield


@pytest.fixture(autouse=True, scope="session")
def _power_never_fails() -> Iterator[None]:
    """Do not wait for the disk: no test looks at what a power failure leaves, and a busy disk needs a second for each file."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda file: None, raising=False)
        yield


@pytest.fixture
def small_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose settings by the size of the data, as users do."""
    from clickfleet.training import defaults

    monkeypatch.setattr(defaults, "LARGE_ROWS", 400_000)


def pytest_collection_finish() -> None:
    """What is imported now stays: no collection of garbage has to look at it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_unconfigure() -> None:
    """Let the interpreter collect everything at its end. Otherwise the core would report every object as leaked."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share tests in a way that survives the end of a worker process."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from sharing import Sharing

    return Sharing(config, log)


def pytest_runtest_setup() -> None:
    """Give every test the same random numbers, whichever tests ran before it in this process."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run have, and no other run."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(autouse=True, scope="session")
def _networks_exported_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Export every network once for all tests, which takes two seconds; later it comes from the cache of `Graph`.

    A `Graph` compares what it finds there with torch, batch by batch, and exports anew if they differ.
    """
    from clickfleet.training.onnx_graph import Graph

    folder = shared_folder(tmp_path_factory) / "graphs"
    folder.mkdir(exist_ok=True)
    make = Graph.__init__

    def init(self: Graph, model: Any, shape: Any, *more: Any, **options: Any) -> None:
        if len(more) < 3 and options.get("cache") is None:
            kept = (more[1:] or [options.get("kept")])[0]
            facts = (type(model), model, shape, more[:1], options.get("outputs"), kept and vars(kept))
            name = hashlib.sha256(repr(facts).encode()).hexdigest()
            options["cache"] = folder / f"{name}.onnx"
        make(self, model, shape, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graph, "__init__", init)
        with suppress(ImportError, AttributeError):  # of torch's own; without it every export takes half a second more
            from torch.onnx._internal.exporter._registration import ONNXRegistry

            patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
        yield


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file and gives its path."""

    def write(name: str, content: bytes | str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few lines, so that small files have many."""
    monkeypatch.setattr(lines, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(lines, "SPACE", 2001)
    monkeypatch.setattr(lines, "HEAD_BYTES", 500)
    monkeypatch.setattr(lines, "spare", [])


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A real Chromium without a window, driven by playwright; every page of it is a new profile."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=120_000)  # five seconds are too few beside other tests
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, headless=True, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """S3 on this machine."""
    import fsspec
    from moto.server import ThreadedMotoServer

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    yield fsspec.filesystem("s3", endpoint_url=f"http://{host}:{port}")
    server.stop()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture
def bucket(s3: Any) -> Any:
    """The same, with a bucket `models`."""
    s3.makedirs("models", exist_ok=True)
    return s3


@pytest.fixture(scope="session")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported network of the streams' model, made once for all tests: exporting takes seconds."""
    import streams
    from clickfleet.online.learn import learn
    from clickfleet.store.lock import Lock

    shared = shared_folder(tmp_path_factory)
    made = shared / "graph.onnx"
    with Lock(shared / "graph.lock", "exports", patience_s=240):
        if not made.exists():
            folder = tmp_path_factory.mktemp("graph")
            streams.write_days(folder, days=1, splits=1, rows=4)
            learn(streams.settings(folder, splits=1, online={"end_day": 20260101}), quiet=True)
            shutil.copy(folder / "run" / "graph.onnx", made)
    return made
