"""A run's state <-> its checkpoints: what is captured between two steps is written while training goes on."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import numpy as numpy_tensors
from safetensors import torch as torch_tensors

from clickfleet import checkpoint, devices, mirror, published, republished, storage
from clickfleet.config import Config, checked, dump
from clickfleet.config import read as read_yaml
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.learner import Learner
from clickfleet.metrics import Metrics
from clickfleet.schema import Schema

State = dict[str, Any]
ROW_FILES = 8
FREE = checkpoint.MEMORY
"""What a table may change on resuming."""


class Saver:
    """Writes checkpoints into a folder, one at a time, in the background."""

    def __init__(self, folder: Path, keep: int, keep_epochs: bool, warn: Callable[[str], None]) -> None:
        self.folder, self.keep, self.keep_epochs, self.warn = folder, keep, keep_epochs, warn
        self.last: tuple[int, Path] | None = None
        """Step and path of the last one written."""
        self.written: Callable[[], None] = lambda: None
        """Called after each one."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self, learner: Learner, metrics: Metrics, state: State, epoch: int | None = None, best: bool = False
    ) -> None:
        """Captures everything now and returns; `epoch` is the one that ends here, `best` keeps it as the best."""
        self.wait()
        epoch = epoch if self.keep_epochs else None
        step = int(state["step"])
        if self.last is not None and self.last[0] == step:  # nothing was learned since
            if epoch is not None:
                checkpoint.label_epoch(self.folder, epoch, self.last[1])
            if best:
                self.label_best()
            return
        attached = capture(learner, metrics, state)
        snapshot = learner.table.snapshot(ROW_FILES)
        facts = learner.facts

        def write() -> None:
            try:
                with snapshot:
                    path = checkpoint.write(
                        learner.table,
                        self.folder,
                        step,
                        keep=self.keep,
                        epoch=epoch,
                        best=best,
                        attached=attached,
                        snapshot=snapshot,
                        files=ROW_FILES,
                        **facts,
                    )
                self.last = (step, path)
                self.written()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=write, name="clickfleet-checkpoint")
        self._thread.start()

    def label_best(self) -> None:
        """Keeps the last one written as the best."""
        assert self.last is not None
        checkpoint.label_best(self.folder, self.last[1])

    def wait(self, last: bool = False) -> None:
        """Until what was captured is written; a failure is a warning, as training can go on, unless it was the last."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, CheckpointError) and not last:
            self.warn(f"no checkpoint: {error}")
        elif error is not None:
            raise error


def at_origin(config: Config) -> Config:
    """The configuration with the URL of its run in the place of the folder that is kept the same there."""
    url = mirror.origin(config.run.dir)
    return config if url is None else replace(config, run=replace(config.run, dir=url))


def capture(learner: Learner, metrics: Metrics, state: State) -> dict[str, bytes]:
    """Everything but the rows, as files."""
    rng = {"rng": _text(torch.get_rng_state())}
    if learner.device.type == "cuda":
        rng["device_rng"] = _text(torch.cuda.get_rng_state(learner.device))
    return {
        "dense.safetensors": torch_tensors.save(learner.dense()),
        "optimizer.safetensors": torch_tensors.save(learner.optimizer_state()),
        "metrics.safetensors": numpy_tensors.save(metrics.state()),
        "state.json": storage.canonical({**state, **rng}),
        "config.yaml": dump(at_origin(learner.config)).encode(),
        **learner.model.attached(learner.config),
    }


def resolve(model: str | Path) -> Path:
    """What MODEL names: a checkpoint, a published entry or log, or a run folder.

    A run folder stands for its best checkpoint where that is kept, else for its newest; RUN/LATEST, RUN/BEST and RUN/EPOCH-0000 name one.
    """
    if (url := mirror.url_of(model)) is not None:
        there, _, label = url.rpartition("/")
        if checkpoint.is_label(label):
            return resolve(mirror.Mirror(there).fetch_model(label) / label)
        return resolve(mirror.Mirror(url).fetch_model())
    path = Path(model)
    if (path / storage.MANIFEST).is_file() or (path / published.LOG).is_file():
        return path
    if checkpoint.is_label(path.name):
        for folder in (path.parent, path.parent / "checkpoints"):
            if (folder / path.name).is_file():
                return checkpoint.labelled(folder, path.name)
    for folder in (path, path / "checkpoints"):
        if (found := checkpoint.chosen(folder)) is not None:
            return found
    raise CheckpointError(
        f"{model} holds no model" if path.exists() else f"there is no {model}",
        "a model is a run folder with a checkpoint in it, RUN/LATEST, RUN/BEST where the best is kept, a checkpoint, a published log or entry",
    )


def describe(path: Path) -> str:
    """A resolved path for people: which checkpoint of its run it is."""
    labels = {checkpoint.BEST: "the best test AUC", checkpoint.LATEST: "the newest"}
    named = next((words for label, words in labels.items() if checkpoint.is_named(path, label)), None)
    return f"{mirror.origin(path) or path}" + (f" ({named})" if named else "")


def read_config(path: Path) -> Config:
    """The configuration of the run that wrote a checkpoint."""
    return checked(Config, read_yaml(checkpoint.read(path, "config.yaml").decode(), str(path)), source=str(path))


def read_schema(path: Path) -> Schema:
    manifest = storage.read_manifest(path, "checkpoint")
    if "schema" not in manifest:
        raise CheckpointError(f"{path} is the checkpoint of a table alone, not of a training run")
    return Schema.from_dict(manifest["schema"], str(path))


def entries(path: Path) -> list[published.Entry] | None:
    """The published entries that make the model at `path`; None if it is a checkpoint."""
    if (path / published.LOG).is_file():
        return published.Log(path).newest()
    if storage.read_kind(path) != published.KIND:
        return None
    entry = published.Entry(path)
    if entry.base:
        return [entry]
    log = published.Log(path.parent)
    before = [other for other in log.lines() if other.sequence <= entry.sequence]
    bases = [i for i, other in enumerate(before) if other.kind == "base"]
    if not bases or before[-1].hash != entry.hash:
        raise CheckpointError(f"{path} is a delta without its base", "keep it in the folder it was published to")
    return [log.entry(other) for other in before[bases[-1] :]]


def load(path: Path) -> Learner:
    """The model at a resolved path, to score with or to look at."""
    chain = entries(path)
    if chain is not None:
        return republished.load(chain)
    config, schema = read_config(path), read_schema(path)
    learner = Learner(config, schema, checkpoint.load(path), devices.or_cpu(config.train.device))
    learner.restore_dense(torch_tensors.load(checkpoint.read(path, "dense.safetensors")))
    return learner


def verify(path: Path) -> dict[str, Any]:
    """Reads every byte of the model at a resolved path; of a published log, all that it holds."""
    if (path / published.LOG).is_file():
        log = published.Log(path)
        manifests = [entry.verify() for entry in map(log.entry, log.lines())]
    else:
        kind = storage.read_kind(path)
        manifests = [published.Entry(path).verify() if kind == published.KIND else checkpoint.verify(path)]
    sizes = [facts["bytes"] for manifest in manifests for facts in manifest["files"].values()]
    rows = sum(m["rows"] if "rows" in m else m["short_rows"] + m["full_rows"] for m in manifests)
    return {"path": str(path), "files": len(sizes), "bytes": sum(sizes), "rows": rows}


def whole(path: Path) -> Path:
    """A checkpoint with its rows, which are fetched where they are only at its URL."""
    return path if any(path.glob("rows-*")) else resolve(mirror.origin(path) or path)


def kept(model: str | Path) -> list[Path]:
    """What MODEL names, and of a run folder also the newest checkpoint, from which it would go on."""
    found = [resolve(model)]
    newest = Path(model) / "checkpoints" / checkpoint.LATEST
    return found if not newest.is_file() else list(dict.fromkeys([*found, resolve(newest)]))


def step(path: Path) -> int:
    """The step of the model at a resolved path."""
    chain = entries(path)
    return int(storage.read_manifest(path, "checkpoint")["step"] if chain is None else chain[-1].manifest["step"])


def resume(path: Path, config: Config, schema: Schema, metrics: Metrics) -> tuple[Learner, State]:
    """The learner of a checkpoint under a configuration that must say the same, and the state to go on from."""
    table = checkpoint.load(path, **free(path, config, schema))
    learner = Learner(config, schema, table)
    return learner, resume_dense(path, learner, metrics)


def free(path: Path, config: Config, schema: Schema) -> dict[str, Any]:
    """What the saved table may be changed in, once it is known that the rest is the same."""
    read_schema(path).check_same(schema, "the checkpoint", "the data")
    wanted = Learner(config, schema)
    manifest = storage.read_manifest(path, "checkpoint")
    for what, mine, saved in (
        ("model", wanted.facts["model"], manifest["model"]),
        ("table", wanted.table.describe(), manifest["table"]),
    ):
        for key in mine.keys() | saved.keys():
            if key not in FREE and _plain(mine.get(key)) != saved.get(key):
                raise ConfigError(
                    f"{what}.{key} is {mine.get(key)!r}, and the checkpoint has {saved.get(key)!r}",
                    "resume with the settings of the saved run, or start a new run with train.init_from",
                )
    for name, content in wanted.model.attached(config).items():
        if checkpoint.read(path, name) != content:
            raise ConfigError(
                f"{name} is another one than the checkpoint has",
                "resume with that of the saved run, or start a new run with train.init_from",
            )
    return {key: wanted.table.describe()[key] for key in FREE}


def read_state(path: Path) -> State:
    """How far the run of a checkpoint had come."""
    state: State = json.loads(checkpoint.read(path, "state.json"))
    return state


def resume_dense(path: Path, learner: Learner, metrics: Metrics) -> State:
    """Puts everything but the rows of a checkpoint in; the state to go on from."""
    learner.restore_dense(torch_tensors.load(checkpoint.read(path, "dense.safetensors")))
    learner.restore_optimizer(torch_tensors.load(checkpoint.read(path, "optimizer.safetensors")))
    metrics.restore(numpy_tensors.load(checkpoint.read(path, "metrics.safetensors")))
    state = read_state(path)
    torch.set_rng_state(_bytes(state.pop("rng")))
    device_rng = state.pop("device_rng", None)
    if device_rng is not None and learner.device.type == "cuda":
        torch.cuda.set_rng_state(_bytes(device_rng), learner.device)
    return state


def start_from(path: Path, config: Config, schema: Schema) -> tuple[Learner, list[str]]:
    """A new learner with the rows and dense tensors of an old model that fit it, and what did not fit, in words."""
    changes, anew = fitting(path, config, schema)
    table = None if changes is None else checkpoint.load(path, **changes)
    learner = Learner(config, schema, table)
    anew += learner.adopt_dense(torch_tensors.load(checkpoint.read(path, "dense.safetensors")))
    return learner, anew


def fitting(path: Path, config: Config, schema: Schema) -> tuple[dict[str, Any] | None, list[str]]:
    """How the table of an old model is to be described in a new run, or None if its rows do not fit; what does not, in words."""
    if entries(path) is not None:
        raise ConfigError(
            f"{path} is published, without what training keeps beside the weights", "start from a checkpoint of its run"
        )
    mine = Learner(config, schema).table.describe()
    old, before = storage.read_manifest(path, "checkpoint"), read_schema(path)
    if before.keys != schema.keys:
        raise ConfigError(
            f"{path} has keys by {before.keys} and the data by {schema.keys}", "its rows would mean others"
        )
    if old["table"]["factors"] != mine["factors"]:
        return None, [f"all rows: they have {old['table']['factors']} factors there and {mine['factors']} here"]
    for part in ("rule", "embed_rule"):
        if old["table"][part]["name"] != mine[part]["name"]:
            raise ConfigError(
                f"the rows of {path} were trained by {old['table'][part]['name']} and table.{part} is {mine[part]['name']}",
                f"keep table.{part} of that run: the rows carry its state",
            )
    return mine, []


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))
