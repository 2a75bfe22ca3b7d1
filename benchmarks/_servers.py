"""Servers to compare: ours, and typical hand-written alternatives."""

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clickfleet.serve import supervisor
from clickfleet.serve.supervisor import Settings


@dataclass
class Server:
    url: str
    pid: int
    fleet: supervisor.Supervisor


@contextmanager
def ours(model: Path, **settings: Any) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as state:
        fleet = supervisor.create(Settings(str(model), state, **{"port": 0, "grpc_port": None, **settings}))
        fleet.start()
        watcher = threading.Thread(target=fleet.supervise, args=(print,))
        watcher.start()
        try:
            yield Server(fleet.address, int((Path(state) / "ready-0").read_text()), fleet)
        finally:
            fleet.stopping = True
            fleet.stop()
            watcher.join()


FLASK = """
import os, numpy as np, onnxruntime as ort
from flask import Flask, jsonify, request
from clickfleet.store.published import Entry
from clickfleet.serve.predictor import open_version
version = open_version(Entry(os.environ["ARTIFACT"]))
app = Flask(__name__)
@app.post("/v2/models/deepfm/infer")
def infer():
    given = {t["name"]: t for t in request.get_json()["inputs"]}
    keys = np.array(given["keys"]["data"], np.uint64).reshape(given["keys"]["shape"])
    dense = np.array(given["dense"]["data"], np.float32).reshape(given["dense"]["shape"])
    scores = version.run(version.fields.ready(dense, keys))["score"]
    output = {"name": "score", "datatype": "FP32", "shape": list(scores.shape), "data": scores.tolist()}
    return jsonify({"model_name": "deepfm", "outputs": [output]})
"""

MLSERVER = """
import os, numpy as np
from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput
import onnxruntime as ort
class Model(MLModel):
    async def load(self):
        options = ort.SessionOptions(); options.intra_op_num_threads = 1
        graph = os.environ["ARTIFACT"] + "/dense.onnx"
        self.session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self.table = np.load(os.environ["TABLE"], mmap_mode="r")
        self.row = {int(k): i for i, k in enumerate(np.load(os.environ["KEYS"]))}
        return True
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        given = {t.name: t for t in payload.inputs}
        keys = np.array(list(given["keys"].data), np.uint64).reshape(given["keys"].shape)
        dense = np.array(list(given["dense"].data), np.float32).reshape(given["dense"].shape)
        rows = self.table[[self.row.get(int(k), 0) for k in keys.reshape(-1)]].reshape(*keys.shape, -1)
        first, factors = np.ascontiguousarray(rows[..., 0]), np.ascontiguousarray(rows[..., 1:])
        scores = self.session.run(["score"], {"dense": dense, "first": first, "factors": factors})[0]
        output = ResponseOutput(name="score", datatype="FP32", shape=list(scores.shape), data=scores.tolist())
        return InferenceResponse(model_name=self.name, outputs=[output])
"""


@contextmanager
def process(command: list[str], url: str, env: dict[str, str], cwd: Path) -> Iterator[int]:
    import urllib.error
    import urllib.request

    log = (cwd / "server.log").open("wb")
    child = subprocess.Popen(
        command, env={**os.environ, **env}, cwd=cwd, stdout=log, stderr=log, start_new_session=True
    )
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(url, timeout=1)
                break
            except urllib.error.HTTPError:
                break
            except OSError:
                if child.poll() is not None:
                    raise RuntimeError((cwd / "server.log").read_text()) from None
                time.sleep(0.1)
        yield child.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        child.wait(20)
