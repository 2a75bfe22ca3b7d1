"""Translate a PaddleRec configuration to ours, with a report on every key."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from clickfleet.config.load import Config, checked, override
from clickfleet.data.schema import PRESETS, Schema, Slot, preset, write_schema
from clickfleet.errors import ConfigError
from clickfleet.paddlerec import words
from clickfleet.paddlerec.keys import Keys
from clickfleet.paddlerec.networks import find_network, take_network, take_optimizer, take_tables
from clickfleet.paddlerec.original import Original
from clickfleet.paddlerec.readers import take_readers
from clickfleet.paddlerec.report import Report
from clickfleet.paddlerec.words import write_vocabulary

PATHS = (
    ("data", "train"),
    ("data", "valid"),
    ("data", "test"),
    ("run", "dir"),
    ("online", "dir"),
    ("train", "init_from"),
)


def write(translated: Translated, out: Path) -> list[Path]:
    """Write OUT, its schema and its report. Paths in them are relative to OUT. Return the files written."""
    out = out.absolute()
    schema, report = out.with_suffix(".schema.yaml"), out.with_suffix(".report.md")
    base = out.parent
    raw = copy.deepcopy(translated.raw)
    for section, key in PATHS:
        if isinstance(raw.get(section), dict) and isinstance(raw[section].get(key), str):
            raw[section][key] = _relative(raw[section][key], base)
    form = raw["data"]["format"]
    if form["name"].endswith(".py"):
        form["name"] = _relative(form["name"], base, here="./")
    if "folder" in form:
        form["folder"] = _relative(form["folder"], base)
    written = [out, report]
    try:
        base.mkdir(parents=True, exist_ok=True)
        if translated.dictionary is not None:
            raw["data"]["vocabulary"] = write_vocabulary(translated.dictionary, out.with_suffix(".vocabulary.txt")).name
            written.insert(1, out.with_suffix(".vocabulary.txt"))
        if translated.needs_schema:
            raw["data"]["schema"] = schema.name
            write_schema(translated.schema, schema)
            written.insert(1, schema)
        head = f"# {translated.network}, migrated from {translated.original.path.name}; report on every key: {report.name}\n"
        out.write_text(head + yaml.safe_dump(raw, sort_keys=False, allow_unicode=True), encoding="utf-8")
        report.write_text(translated.report.markdown(f"Migration of {translated.original.path.name}"), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error
    return written


def _relative(path: Any, base: Path, here: str = "") -> Any:
    if "://" in path:
        return path
    relative = os.path.relpath(path, base)
    return here + relative if here and not relative.startswith("..") else relative


R = "runner."
Purpose = Literal["train", "launch", "online"]


@dataclass(frozen=True)
class Translated:
    """A translated configuration."""

    original: Original
    network: str
    """PaddleRec's name of the network."""
    raw: dict[str, Any]
    """Our configuration as plain values, every path absolute."""
    config: Config
    schema: Schema
    preset: str | None
    """The name of our schema preset that equals the schema, if any."""
    report: Report
    load_path: Path
    """The model to evaluate."""
    epochs: tuple[int, int | None]
    """The first epoch to evaluate, and the one after the last. None: all."""
    test_data: str | None
    """The rows to evaluate on."""
    inputs: tuple[str, ...]
    """Columns that an export keeps. Empty: all."""
    dictionary: Path | None = None
    """word2vec: the file of words and counts."""

    @property
    def needs_schema(self) -> bool:
        """Whether the schema must be written to a file: neither a preset nor the format defines it."""
        return self.preset is None and self.dictionary is None and self.config.data.schema is None

    @property
    def last_epoch(self) -> int | None:
        """The epoch of the model for export and predict. None: the newest."""
        return None if self.epochs[1] is None else self.epochs[1] - 1


def translate(
    original: Original, ours: Sequence[str] = (), purpose: Purpose | None = None, cluster: bool = False
) -> Translated:
    """Translate a configuration. `ours` are `key=value` settings that override the result.

    Purpose `launch` is for a cluster, as `cluster` is for the other purposes. Without one of those, a file with days is for online
    learning.
    """
    keys = Keys(original)
    stream = purpose == "online" or (purpose != "train" and original.is_online)
    cluster = cluster or purpose == "launch"
    wanted = next((item.partition("=")[2] for item in ours if item.startswith("model.name=")), None)
    if (wanted or original.folder.resolve().name) == words.NAME:
        name, own, schema = words.NAME, False, Schema(slots=(Slot("in", multi=True), Slot("out", multi=True)))
        dictionary: Path | None = words.take_words(keys)
    else:
        dictionary = None
        name, network = find_network(original.folder, wanted)
        schema = take_network(keys, name, network)
        take_optimizer(keys, name)
        take_tables(keys, network, schema)
        form, schema, own = take_readers(keys, network, schema)
        keys.set("data.format", form)
    part = f"/{network.files}" if dictionary is None and network.files else ""
    _take_data(keys, stream, dictionary is not None, part)
    _take_training(keys, stream, cluster)
    _take_mode(keys, cluster)
    _take_online(keys, stream)
    load_path, epochs = _take_evaluation(keys)
    inputs = _take_export(keys, schema)
    keys.finish(own)
    keys.set("data.valid_share", 0)  # PaddleRec trains on all rows
    for item in ours:
        override(keys.raw, item, Path.cwd())
    if dictionary is not None:
        keys.raw["data"].setdefault("vocabulary", str(original.folder / str(keys.raw["run"]["dir"]) / "vocabulary.txt"))
    known = next((key for key in PRESETS if preset(key) == schema), None)
    if known is not None and "schema" not in keys.raw["data"]:
        keys.set("data.preset", known)
    config = checked(Config, keys.raw, source=str(original.path), base=original.folder)
    test = (
        None if not keys.has(R + "test_data_dir") else _resolve(original.folder, keys.text(R + "test_data_dir")) + part
    )
    return Translated(
        original, name, keys.raw, config, schema, known, keys.report, load_path, epochs, test, inputs, dictionary
    )


def absolute(path: str) -> str:
    """Return the absolute form of a path that PaddleRec reads relative to the current folder."""
    return path if "://" in path else str(Path(path).absolute())


def _take_data(keys: Keys, stream: bool, words_: bool, part: str) -> None:
    folder, train = keys.original.folder, keys.text(R + "train_data_dir")
    if stream:
        keys.map(
            R + "train_data_dir",
            "online.dir",
            absolute(train),
            "relative to the current folder, as in PaddleRec's online trainer",
        )
        keys.skip(R + "test_data_dir", "each pass is scored before it is trained on (online.validate)")
    else:
        keys.map(R + "train_data_dir", "data.train", _resolve(folder, train) + part)
        if words_:
            keys.used(R + "test_data_dir", "evaluate", "a file of analogies")
        elif keys.has(R + "test_data_dir"):
            test = _resolve(folder, keys.text(R + "test_data_dir"))
            if "://" in test or os.path.exists(test):
                keys.map(R + "test_data_dir", "data.test", test + part, "also used for a test after each epoch")
            else:
                keys.used(
                    R + "test_data_dir",
                    "evaluate and predict",
                    f"{test} does not exist, so training runs without tests",
                )
    if not words_:
        size = keys.integer(R + "train_batch_size", 1 if stream else None)
        keys.map(R + "train_batch_size", "data.batch_size", size)
    if keys.has(R + "infer_batch_size") and not words_:
        keys.map(R + "infer_batch_size", "data.test_batch_size", keys.integer(R + "infer_batch_size"))
    if keys.has(R + "num_workers"):
        keys.map(
            R + "num_workers",
            "data.threads",
            max(keys.integer(R + "num_workers", least=0), 1),
            "threads, not processes; each file is read once",
        )
    if keys.has(R + "inference"):
        keys.used(R + "inference", "your reader", "predict sets it")


def _resolve(folder: Path, path: str) -> str:
    return path if "://" in path else os.path.normpath(folder / path)


def _take_training(keys: Keys, stream: bool, cluster: bool) -> None:
    if stream:
        keys.skip(R + "epochs", "online learning trains on each pass once")
    else:
        if keys.original.is_online and not keys.has(R + "epochs"):
            raise ConfigError(
                f"{keys.original.path} is for online learning: it has runner.start_day but no runner.epochs",
                f"run clickfleet online -m {keys.original.path.name}, or add -o runner.epochs=1",
            )
        keys.map(R + "epochs", "train.epochs", keys.integer(R + "epochs"))
    keys.map(R + "seed", "train.seed", keys.integer(R + "seed", 12345, least=0))
    keys.map(
        R + "model_save_path",
        "run.dir",
        absolute(keys.text(R + "model_save_path", "model_output")),
        "relative to the current folder",
    )
    if keys.boolean(R + "use_gpu", False):
        device = _cuda()
        keys.map(R + "use_gpu", "train.device", device, "" if device == "cuda" else "this machine has no CUDA device")
        if device == "cpu":
            keys.report.warnings.append(
                "runner.use_gpu: torch finds no CUDA device here; the network trains on the CPU"
            )
    else:
        keys.used(R + "use_gpu", "train.device=cpu")
    keys.map(R + "use_auc", "train.metrics.continuous", not keys.boolean(R + "use_auc"), "the AUC is always computed")
    keys.used(R + "use_visual", "tensorboard/ in the run folder", "always written")
    if keys.boolean(R + "dataset_debug"):
        keys.map(R + "dataset_debug", "train.profile", True)
    else:
        keys.used(R + "dataset_debug", "train.profile=false")
    if keys.has(R + "print_interval"):
        keys.map(R + "print_interval", "train.print_every", keys.integer(R + "print_interval"))
    threads = R + ("train_thread_num" if stream else "thread_num")
    keys.skip(
        R + ("thread_num" if stream else "train_thread_num"),
        "applies only to offline training" if stream else "applies only to online learning",
    )
    if keys.has(threads):
        asked, cores = keys.integer(threads), os.cpu_count() or 1
        note = f"reduced from {asked}: this machine has {cores} cores" if asked > cores else ""
        keys.map(threads, "cluster.threads" if cluster else "train.threads", min(asked, cores), note)
        if "command" in keys.raw.get("data", {}).get("format", {}) and not keys.has(R + "num_workers"):
            keys.set("data.threads", min(asked, cores))  # so many pipe commands at once, as in PaddleRec
    for key in ("model_init_path", "warmup_model_path"):
        if keys.has(R + key) and "init_from" not in keys.raw.get("train", {}):
            keys.map(R + key, "train.init_from", absolute(keys.text(R + key)), "relative to the current folder")
        elif keys.has(R + key):
            keys.skip(R + key, "runner.model_init_path takes precedence")


def _cuda() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _take_mode(keys: Keys, cluster: bool) -> None:
    wanted = keys.text(R + "sync_mode", "sync" if keys.boolean(R + "use_fleet") else "async")
    if wanted not in ("sync", "half_async", "async", "geo", "heter", "gpubox"):
        raise keys.wrong(R + "sync_mode", "must be sync, half_async, async or geo")
    mode = "async" if wanted in ("heter", "gpubox") else wanted
    if cluster:
        note = "" if mode == wanted else f"{wanted} is not supported; async is the closest mode"
        keys.map(R + "sync_mode", "mode.name", mode, note)
        keys.used(R + "use_fleet", f"mode.name={mode}")
        if mode == "geo":
            keys.map(R + "geo_step", "mode.k_steps", keys.integer(R + "geo_step", 400))
    keys.used(R + "sync_mode", "clickfleet launch", "no effect on training in one process")
    keys.used(R + "use_fleet", "clickfleet launch", "no effect on training in one process")
    keys.used(R + "geo_step", "clickfleet launch", "if sync_mode is geo")


def _take_online(keys: Keys, stream: bool) -> None:
    whole = {
        "split_per_pass": ("splits_per_pass", 1),
        "checkpoint_per_pass": ("checkpoint_every_passes", 6),
        "save_delta_frequency": ("delta_every_passes", 6),
    }
    others = (
        "start_day",
        "end_day",
        "split_interval",
        "save_first_base",
        "data_donefile",
        "data_sleep_second",
        "prefetch",
    )
    if not stream:
        for name in (*others, *whole):
            keys.used(R + name, "clickfleet online")
        return
    for name in ("start_day", "end_day"):
        keys.map(R + name, f"online.{name}", keys.integer(R + name))
    minutes, poll = keys.number(R + "split_interval", 5), keys.number(R + "data_sleep_second", 10)
    keys.map(R + "split_interval", "online.split_interval", f"{minutes:g}min")
    keys.map(R + "data_sleep_second", "online.poll", f"{poll:g}s")
    for key, (ours, default) in whole.items():
        keys.map(R + key, f"online.{ours}", keys.integer(R + key, default))
    keys.map(R + "data_donefile", "online.done_file", keys.text(R + "data_donefile", "") or None)
    for key, ours in (("save_first_base", "first_base"), ("prefetch", "prefetch")):
        keys.map(R + key, f"online.{ours}", keys.boolean(R + key))
    keys.set("online.validate", "pass")


def _take_evaluation(keys: Keys) -> tuple[Path, tuple[int, int | None]]:
    path = absolute(keys.text(R + "infer_load_path", keys.text(R + "model_save_path", "model_output")))
    first, last = keys.integer(R + "infer_start_epoch", 0, least=0), keys.integer(R + "infer_end_epoch", 10, least=0)
    if keys.has(R + "infer_end_epoch") and last <= first:
        raise ConfigError(
            f"{keys.original.path}: runner.infer_end_epoch ({last}) must be larger than runner.infer_start_epoch ({first})",
            "runner.infer_end_epoch is the epoch after the last one to evaluate",
        )
    keys.used(R + "infer_load_path", "evaluate, predict and export", "relative to the current folder")
    keys.used(R + "infer_start_epoch", "evaluate")
    keys.used(R + "infer_end_epoch", "evaluate, predict and export", "the epoch after the last one")
    return Path(path), (first, last if keys.has(R + "infer_end_epoch") else None)


def _take_export(keys: Keys, schema: Schema) -> tuple[str, ...]:
    keys.used(R + "use_inference", "clickfleet export", "any checkpoint can be exported at any time")
    slots, dense = [slot.name for slot in schema.slots], [column.name for column in schema.dense]
    names: list[str] = []
    wanted = keys.values.get(R + "save_inference_feed_varnames") or []
    if not isinstance(wanted, list):
        raise keys.wrong(R + "save_inference_feed_varnames", "must be a list of names")
    for name in wanted:
        plain = str(name)[1:] if str(name)[:1] == "C" and str(name)[1:] in slots else str(name)
        number = plain.removeprefix("field_")
        if plain in slots:
            names.append(plain)
        elif plain != number and number.isdecimal() and int(number) < len(slots):
            names.append(slots[int(number)])
        elif plain in ("dense_input", "dense_inputs", "dense_feature") or (plain == "input" and dense):
            names += dense
        elif plain not in ("label", "click"):  # a request for a score has no label
            raise ConfigError(
                f"{keys.original.path}: unknown input {name!r} in runner.save_inference_feed_varnames",
                f"inputs are {', '.join([*slots[:3], '…', *slots[-1:], *(['dense_input'] if dense else [])])}",
            )
    keys.used(R + "save_inference_feed_varnames", "export", "the columns of a request")
    keys.used(R + "save_inference_fetch_varnames", "export", "the answer has the score and the logit")
    everything = set(names) >= {slot.name for slot in schema.read_columns} | set(dense)
    return () if everything else tuple(names)
