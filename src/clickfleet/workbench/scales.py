"""The memory that an engine takes, each weighed in a process of its own.

A process with all libraries loaded and nothing run yet forks once per engine and batch size. The child opens the network and runs it; what
counts is by how much its own memory rose at most: not the code of libraries, which all processes share, nor the inputs. So no figure
depends on what was measured before, and a server's worker takes as much beside its table.

python -m clickfleet.workbench.scales FOLDER    with network.onnx, int8.onnx and order.json; a line of JSON per answer
"""

from __future__ import annotations

import copy
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clickfleet.config import Config, checked, dump, read
from clickfleet.engine import Engine, quantised
from clickfleet.schema import Schema

if TYPE_CHECKING:
    from clickfleet.learner import Learner

RUNS = 3
TIMEOUT_S = 300


@dataclass(frozen=True)
class Way:
    """An engine (None: torch) with its threads, at a batch size."""

    engine: Engine | None
    threads: int
    size: int


def weigh(learner: Learner, network: bytes, ways: Sequence[Way], say: Callable[[str], None]) -> list[int | None]:
    """Bytes per way; None where the system does not tell, or where it fails, which is said."""
    with tempfile.TemporaryDirectory(prefix="clickfleet-scales-") as folder:
        at = Path(folder)
        (at / "network.onnx").write_bytes(network)
        if any(way.engine is not None and way.engine.int8 for way in ways):
            (at / "int8.onnx").write_bytes(quantised(network))
        orders = [
            {"engine": None if w.engine is None else vars(w.engine), "threads": w.threads, "size": w.size} for w in ways
        ]
        schema = learner.schema.to_dict()
        (at / "order.json").write_text(json.dumps({"config": dump(learner.config), "schema": schema, "ways": orders}))
        try:
            done = subprocess.run(
                [sys.executable, "-m", "clickfleet.workbench.scales", folder],
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            )
            found, error = [json.loads(line) for line in done.stdout.splitlines()], done.stderr.decode(errors="replace")
        except subprocess.TimeoutExpired:
            found, error = [], f"no answer within {TIMEOUT_S} s"
    if None in found or len(found) < len(ways):
        say("memory was not weighed everywhere: " + (error.strip().splitlines() or ["this system does not tell"])[-1])
    return found + [None] * (len(ways) - len(found))


def main() -> None:
    import onnxruntime  # noqa: F401
    import torch

    from clickfleet.learner import Learner

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)  # a thread would be lost in the children
    folder = Path(sys.argv[1])
    order = json.loads((folder / "order.json").read_text())
    config = checked(Config, read(order["config"], "the order"), source="the order")
    learner = Learner(config, Schema.from_dict(order["schema"]), device=torch.device("cpu"))
    learner.model.eval()
    graphs = {path.stem: path.read_bytes() for path in folder.glob("*.onnx")}
    for way in order["ways"]:
        answers.write(json.dumps(in_child(learner, graphs, way)) + "\n")
        answers.flush()


def in_child(learner: Learner, graphs: dict[str, bytes], way: dict[str, Any]) -> int | None:
    """What a child of this process says; None if it fails."""
    _give_back()
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(send, json.dumps(_run(learner, graphs, way)).encode())
        finally:
            os._exit(0)  # nothing of the parent's is closed twice
    os.close(send)
    with os.fdopen(receive, "rb") as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return json.loads(said) if said else None


def _run(learner: Learner, graphs: dict[str, bytes], way: dict[str, Any]) -> int | None:
    import torch

    from clickfleet.models import Inputs

    shape, size = learner.shape, way["size"]
    sizes = {"dense": (size, shape.dense), "first": (size, shape.slots), "factors": (size, shape.slots, shape.factors)}
    arrays = {name: np.full(of, 0.01, np.float32) for name, of in sizes.items()}
    before = _status()
    if way["engine"] is None:
        torch.set_num_threads(way["threads"])
        model = copy.deepcopy(learner.model)  # its weights count
        x = Inputs(**{name: torch.from_numpy(array) for name, array in arrays.items()})
        with torch.inference_mode():
            for _ in range(RUNS):
                torch.sigmoid(model(x)).numpy()
    else:
        engine = Engine(**way["engine"])
        session = engine.open(graphs["int8" if engine.int8 else "network"])
        given = {item.name: arrays[item.name] for item in session.get_inputs()}
        for _ in range(RUNS):
            session.run(None, given)
    after = _status()
    if not {"VmHWM", "RssAnon", "RssFile"} <= after.keys():
        return None
    return max(0, after["VmHWM"] - after["RssFile"] - after.get("RssShmem", 0) - before["RssAnon"])


def _give_back() -> None:
    """Free memory goes back to the system, or children would take that first, unseen."""
    import gc

    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def _status() -> dict[str, int]:
    """Resident memory in bytes, by the kernel's names."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    return {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


if __name__ == "__main__":
    main()
