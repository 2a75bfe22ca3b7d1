"""Save the state of a run to checkpoints and load it again. The state is captured between two steps and written in the background."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import numpy as numpy_tensors
from safetensors import torch as torch_tensors
from torch import Tensor

from clickfleet.config import sections
from clickfleet.config.load import Config, dump
from clickfleet.config.machine import free_memory
from clickfleet.config.plugins import Plugin
from clickfleet.data.progress import amount
from clickfleet.data.schema import Schema
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.store import atomic, checkpoint
from clickfleet.store.calibration import Calibration
from clickfleet.store.published import Entry
from clickfleet.store.rules import rule
from clickfleet.store.run_folder import State, at_origin, entries, read_config, read_schema, read_state
from clickfleet.store.table import SlotRows, Table
from clickfleet.training import devices
from clickfleet.training.learner import Learner, model_spec, network_of, slot_widths, table_spec
from clickfleet.training.metrics import Metrics
from clickfleet.training.network import Model
from clickfleet.training.onnx_graph import read_weights

ROW_FILES = 8
FREE = (*checkpoint.MEMORY, *checkpoint.DISK)
"""Settings of the table that may change when a run resumes."""


class Saver:
    """Writes checkpoints into a folder, one at a time, in the background."""

    def __init__(self, folder: Path, keep: int, keep_epochs: bool, warn: Callable[[str], None]) -> None:
        self.folder, self.keep, self.keep_epochs, self.warn = folder, keep, keep_epochs, warn
        self.last: tuple[int, Path] | None = None
        """Step and path of the last checkpoint written."""
        self.written: Callable[[], None] = lambda: None
        """Called after each checkpoint."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self, learner: Learner, metrics: Metrics, state: State, epoch: int | None = None, best: bool = False
    ) -> None:
        """Capture the state, start writing it and return. `epoch` is the epoch that ends here; `best` labels the checkpoint as the best."""
        self.wait()
        epoch = epoch if self.keep_epochs else None
        step = int(state["step"])
        if self.last is not None and self.last[0] == step:  # nothing was learned since
            if epoch is not None:
                checkpoint.label_epoch(self.last[1], epoch)
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
        """Label the last checkpoint written as the best."""
        assert self.last is not None
        checkpoint.label_best(self.last[1])

    def wait(self, last: bool = False) -> None:
        """Wait until the captured state is written. Raise a failure if `last`; otherwise warn, because training can continue."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, CheckpointError) and not last:
            self.warn(f"cannot write a checkpoint: {error}")
        elif error is not None:
            raise error


def capture(learner: Learner, metrics: Metrics, state: State) -> dict[str, bytes]:
    """Return everything but the rows, as files by name."""
    rng = {"rng": _text(torch.get_rng_state())}
    if learner.device.type == "cuda":
        rng["device_rng"] = _text(torch.cuda.get_rng_state(learner.device))
    return {
        "dense.safetensors": torch_tensors.save(learner.dense()),
        "optimizer.safetensors": torch_tensors.save(learner.optimizer_state()),
        "metrics.safetensors": numpy_tensors.save(metrics.state()),
        "state.json": atomic.canonical({**state, **rng}),
        "config.yaml": dump(at_origin(learner.config)).encode(),
        **learner.model.checkpoint_files(learner.config),
    }


def load(path: Path, trust: bool = False, model_class: type[Model] | None = None, run: Config | None = None) -> Learner:
    """Load the model at a resolved path, to score with it or inspect it. `trust` allows code that the model names.

    `model_class` is the class of the network, if it cannot be imported. `run` is the configuration of the run in this process
    that wrote the model; it has the classes and functions that were passed in Python.
    """
    chain = entries(path)
    if chain is not None:
        return load_published(chain, trust, model_class)
    config, schema = read_config(path, trust), read_schema(path)
    config = replace(config, model=replace(config.model, passed=model_class))
    config = config if run is None else with_passed_code(config, run)
    table = checkpoint.load(path, **on_disk(path, config))
    learner = Learner(config, schema, table, devices.or_cpu(config.train.device))
    learner.restore_dense(checkpoint.parsed(path, "dense.safetensors", torch_tensors.load))
    calibrator = read_state(path).get("published", {}).get("calibrator")
    if calibrator is not None:
        with atomic.damage_errors(path / "state.json"):
            learner.calibration = Calibration.from_bytes(calibrator["calibration"].encode(), path / "state.json")
    return learner


def on_disk(path: Path, config: Config) -> dict[str, Any]:
    """Return the changes that load a checkpoint into memory and table.disk, if its run had rows on disk.

    The directory may be missing on another machine. Then the rows are loaded into memory if they fit.
    """
    table = config.table
    if table.disk is None:
        return {}
    if Path(table.disk).parent.is_dir():
        return {"memory_limit": table.memory_limit, "snapshot_reserve": table.snapshot_reserve, "disk": table.disk}
    stored = sum(facts["bytes"] for facts in atomic.read_manifest(path, "checkpoint")["files"].values())
    if stored > free_memory():
        raise CheckpointError(
            f"the rows of {path} take {amount(stored, 'bytes')}, more than the free memory, and the directory "
            f"{table.disk} of table.disk cannot be created here: {Path(table.disk).parent} does not exist",
            "create it, on a local disk with enough space",
        )
    return {}


def with_passed_code(config: Config, run: Config) -> Config:
    """Return a saved configuration with the class and functions that a run was given in Python."""
    loss = replace(config.train.loss, function=run.train.loss.function)
    metrics = replace(config.train.metrics, functions=run.train.metrics.functions)
    model = replace(config.model, passed=run.model.passed)
    return replace(config, model=model, train=replace(config.train, loss=loss, metrics=metrics))


def resume(path: Path, config: Config, schema: Schema, metrics: Metrics) -> tuple[Learner, State]:
    """Return the learner of a checkpoint, under a configuration that must match it, and the state to resume from."""
    table = checkpoint.load(path, **free(path, config, schema))
    learner = Learner(config, schema, table)
    return learner, resume_dense(path, learner, metrics)


def free(path: Path, config: Config, schema: Schema) -> dict[str, Any]:
    """Check that a configuration matches a checkpoint. Return the settings of the table that may differ."""
    read_schema(path).check_same(schema, "the checkpoint", "the data")
    table = table_spec(config, schema)
    manifest = atomic.read_manifest(path, "checkpoint")
    for section, current, saved in (
        ("model", model_spec(config), manifest["model"]),
        ("table", table, manifest["table"]),
    ):
        for key in current.keys() | saved.keys():
            if key not in FREE and _plain(current.get(key)) != saved.get(key):
                raise ConfigError(
                    f"{section}.{key} is {current.get(key)!r}, but the checkpoint has {saved.get(key)!r}",
                    "resume with the settings of the saved run, or start a new run with train.init_from",
                )
    for name, content in network_of(config)[0].checkpoint_files(config).items():
        if checkpoint.read(path, name) != content:
            raise ConfigError(
                f"{name} differs from the one in the checkpoint",
                "resume with the file of the saved run, or start a new run with train.init_from",
            )
    return {key: table[key] for key in FREE if key in table}


def resume_dense(path: Path, learner: Learner, metrics: Metrics) -> State:
    """Load everything but the rows of a checkpoint. Return the state to resume from."""
    learner.restore_dense(checkpoint.parsed(path, "dense.safetensors", torch_tensors.load))
    learner.restore_optimizer(checkpoint.parsed(path, "optimizer.safetensors", torch_tensors.load))
    sums = checkpoint.parsed(path, "metrics.safetensors", numpy_tensors.load)
    with atomic.damage_errors(path / "metrics.safetensors"):
        metrics.restore(sums)
    state = read_state(path)
    with atomic.damage_errors(path / "state.json"):
        torch.set_rng_state(_bytes(state.pop("rng")))
    device_rng = state.pop("device_rng", None)
    if device_rng is not None and learner.device.type == "cuda":
        torch.cuda.set_rng_state(_bytes(device_rng), learner.device)
    return state


def start_from(path: Path, config: Config, schema: Schema) -> tuple[Learner, list[str]]:
    """Return a new learner with the rows and dense tensors of an old model that fit, and a description of each part that does not."""
    changes, misfits = fitting(path, config, schema)
    table = None if changes is None else checkpoint.load(path, **changes)
    learner = Learner(config, schema, table)
    misfits += learner.adopt_dense(checkpoint.parsed(path, "dense.safetensors", torch_tensors.load))
    return learner, misfits


def fitting(path: Path, config: Config, schema: Schema) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the description of the new run's table, or None if the old model's rows do not fit it; and what does not fit."""
    if entries(path) is not None:
        raise ConfigError(
            f"{path} is a published model, which has no optimizer state", "start from a checkpoint of its run"
        )
    table, saved = table_spec(config, schema), atomic.read_manifest(path, "checkpoint")["table"]
    saved_keys = read_schema(path).keys
    if saved_keys != schema.keys:
        raise ConfigError(
            f"the keys of {path} are made by {saved_keys}, those of the data by {schema.keys}",
            "use the key rule of the saved model: the same key must mean the same value",
        )
    before, after = _by_slot(saved, read_schema(path)), _by_slot(table, schema)
    if saved["factors"] != table["factors"]:
        return None, [f"all rows: the old model has {saved['factors']} factors per row, this one {table['factors']}"]
    if before or after:  # a row's slot tells its width, by its number
        if read_schema(path).slots != schema.slots:
            return None, ["all rows: the slots of the old model are others, and some have widths or rules of their own"]
        for slot in sorted(before.keys() | after.keys()):
            widths = [own["factors"] for own in (before.get(slot) or saved, after.get(slot) or table)]
            if widths[0] != widths[1]:
                return None, [
                    f"all rows: slot {slot} has {widths[0]} factors in the old model, {widths[1]} in this one"
                ]
    for slot in ("", *sorted(before.keys() | after.keys())):
        for part in ("rule", "embed_rule"):
            old, new = (own[part]["name"] for own in (before.get(slot) or saved, after.get(slot) or table))
            if old != new:
                setting = f"table.slots.{slot}.{part}" if slot else f"table.{part}"
                raise ConfigError(
                    f"the rows of {path} were trained with {old}, but {setting} is {new}",
                    f"use {setting} of the saved run: the rows carry its state",
                )
    return {**({"slots": {}} if saved.get("slots") else {}), **table}, []


def _by_slot(table: Mapping[str, Any], schema: Schema) -> dict[str, Mapping[str, Any]]:
    """Return the settings of slots from the description of a table, by name."""
    return {schema.slots[int(slot)].name: own for slot, own in table.get("slots", {}).items()}


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def load_published(entries: Sequence[Entry], trust: bool = False, model_class: type[Model] | None = None) -> Learner:
    """Load a base and the deltas after it, with every checksum verified. Code that they name runs only with `trust`."""
    last = entries[-1]
    if "pruned_from" in last.manifest:
        raise CheckpointError(
            f"{last.path} was exported with only some of the inputs and holds its network only as an ONNX graph",
            "score it with clickfleet serve",
        )
    for entry in entries:
        entry.verify()
    settings = dict(last.manifest["model"])
    name, dim, dims = settings.pop("name"), settings.pop("dim"), settings.pop("dims", {})
    origin = "" if trust else str(last.path)
    config = Config(
        data=sections.Data(format=Plugin.parse(last.info["format"], origin)),
        model=Plugin(name, settings, origin, passed=model_class),
        table=sections.TableSettings(dim=dim, dims=dims, rule=Plugin("sgd", {})),
    )
    schema = Schema.from_dict(last.manifest["schema"], str(last.path))
    learner = Learner(config, schema, rows(entries, slot_widths(config, schema)))
    learner.restore_dense(_dense(learner, read_weights(last.graph())))
    learner.calibration = last.calibration()
    return learner


def _dense(learner: Learner, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the network's tensors from a graph. Empty tensors and counters for training are not in it and stay as they are."""
    state = learner.model.state_dict()
    absent = {name for name, tensor in state.items() if name.endswith("num_batches_tracked") or not tensor.numel()}
    return {name: state[name] if name in absent else saved[name] for name in state if name in {*saved, *absent}}


def rows(entries: Sequence[Entry], widths: Sequence[int] | None = None) -> Table:
    """Return a table with the rows of a base and its deltas. They hold weights but no optimizer state. `widths` are those of slots."""
    widths = widths or [int(entries[-1].manifest["factors"])]
    table = Table(widths[0], rule=rule("sgd"), slots={slot: SlotRows(width) for slot, width in enumerate(widths)})
    newer = np.empty(0, np.uint64)  # keys that a later entry sets or deletes
    for entry in reversed(entries):
        batches = list(entry.batches())
        for batch in batches:
            _restore(table, batch, newer)
        keys = [batch.column("key").to_numpy() for batch in batches]
        newer = np.unique(np.concatenate([newer, entry.deleted(), *keys])) if entry is not entries[0] else newer
    return table


def _restore(table: Table, batch: pa.RecordBatch, newer: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
    key = batch.column("key").to_numpy()
    batch = batch.filter(pa.array(~np.isin(key, newer))) if len(newer) else batch
    zeros, none = np.zeros(batch.num_rows), np.empty(0, np.float32)
    columns = {name: batch.column(name).to_numpy() for name in ("key", "slot", "embed_w")}
    columns |= {"embedx": batch.column("embedx").flatten().to_numpy(), "embed_state": none, "embedx_state": none}
    columns |= {"show": zeros, "click": zeros, "unseen_days": zeros.astype(np.uint16)}
    columns |= {"delta_score": zeros.astype(np.float32), "published": zeros.astype(np.uint8)}
    checkpoint.put(table, columns)
