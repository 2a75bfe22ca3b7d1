"""A PaddleRec configuration -> ours, with a word on every key."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clickfleet.config import Config, checked, override
from clickfleet.errors import ConfigError
from clickfleet.migrate import words
from clickfleet.migrate.keys import Keys
from clickfleet.migrate.networks import find_network, take_network
from clickfleet.migrate.original import Original
from clickfleet.migrate.readers import take_readers
from clickfleet.migrate.report import Report
from clickfleet.migrate.rows import take_optimizer, take_tables
from clickfleet.schema import PRESETS, Schema, Slot, preset

R = "runner."
Purpose = Literal["train", "launch", "online"]


@dataclass(frozen=True)
class Translated:
    """What a configuration means here."""

    original: Original
    network: str
    """PaddleRec's name of it."""
    raw: dict[str, Any]
    """Our configuration as plain values, every path absolute."""
    config: Config
    schema: Schema
    preset: str | None
    """The schema's name among ours, where it has one."""
    report: Report
    load_path: Path
    """Where evaluation finds the model."""
    epochs: tuple[int, int | None]
    """Evaluation's: first, and the one after the last; None: all there are."""
    test_data: str | None
    """Where evaluation finds rows."""
    inputs: tuple[str, ...]
    """Columns that an export keeps; none: all."""
    dictionary: Path | None = None
    """word2vec: its words and their counts."""

    @property
    def needs_schema(self) -> bool:
        """Whether the schema has to be written down: it is neither a preset nor the format's own."""
        return self.preset is None and self.dictionary is None and self.config.data.schema is None

    @property
    def last_epoch(self) -> int | None:
        """The epoch whose model is exported and scored with; None: the newest."""
        return None if self.epochs[1] is None else self.epochs[1] - 1


def translate(original: Original, ours: Sequence[str] = (), purpose: Purpose | None = None) -> Translated:
    """`ours` are `key=value` settings of our own over what the file becomes; without a purpose, that which the file has."""
    keys = Keys(original)
    purpose = purpose or ("online" if original.is_online else "train")
    wanted = next((item.partition("=")[2] for item in ours if item.startswith("model.name=")), None)
    if (wanted or original.folder.resolve().name) == words.NAME:
        name, own, schema = words.NAME, False, Schema(slots=(Slot("in", multi=True), Slot("out", multi=True)))
        dictionary: Path | None = words.take_words(keys)
    else:
        dictionary = None
        name, network = find_network(original.folder, wanted)
        schema = take_network(keys, name, network)
        take_optimizer(keys, name)
        take_tables(keys, network)
        form, schema, own = take_readers(keys, network, schema)
        keys.set("data.format", form)
    _take_data(keys, purpose, dictionary is not None)
    _take_training(keys, purpose)
    _take_mode(keys, purpose)
    _take_online(keys, purpose)
    load_path, epochs = _take_evaluation(keys)
    inputs = _take_export(keys, schema)
    keys.finish(own)
    for item in ours:
        override(keys.raw, item)
    if dictionary is not None:
        keys.raw["data"].setdefault("vocabulary", str(original.folder / str(keys.raw["run"]["dir"]) / "vocabulary.txt"))
    known = next((key for key in PRESETS if preset(key) == schema), None)
    if known is not None and "schema" not in keys.raw["data"]:
        keys.set("data.preset", known)
    config = checked(Config, keys.raw, source=str(original.path), base=original.folder)
    test = None if not keys.has(R + "test_data_dir") else _beside(original.folder, keys.text(R + "test_data_dir"))
    return Translated(
        original, name, keys.raw, config, schema, known, keys.report, load_path, epochs, test, inputs, dictionary
    )


def here(path: str) -> str:
    """A path of the old tools that is relative to the current folder."""
    return path if "://" in path else str(Path(path).absolute())


def _take_data(keys: Keys, purpose: Purpose, words_: bool) -> None:
    folder, train = keys.original.folder, keys.text(R + "train_data_dir")
    if purpose == "online":
        keys.to(
            R + "train_data_dir",
            "online.dir",
            here(train),
            "relative to the current folder, as in the old online trainer",
        )
        keys.skip(R + "test_data_dir", "each pass is scored before it is trained on (online.validate)")
    else:
        keys.to(R + "train_data_dir", "data.train", _beside(folder, train))
        if words_:
            keys.used(R + "test_data_dir", "evaluate", "a file of analogies")
        elif keys.has(R + "test_data_dir"):
            test = _beside(folder, keys.text(R + "test_data_dir"))
            if "://" in test or os.path.exists(test):
                keys.to(R + "test_data_dir", "data.test", test, "also tested on after each epoch")
            else:
                keys.used(
                    R + "test_data_dir", "evaluate and predict", f"{test} is not there now, so no test after epochs"
                )
    if not words_:
        size = keys.whole(R + "train_batch_size", 1 if purpose == "online" else None)
        keys.to(R + "train_batch_size", "data.batch_size", size)
    if keys.has(R + "infer_batch_size") and not words_:
        keys.to(R + "infer_batch_size", "data.test_batch_size", keys.whole(R + "infer_batch_size"))
    if keys.has(R + "num_workers"):
        keys.to(
            R + "num_workers",
            "data.threads",
            max(keys.whole(R + "num_workers", least=0), 1),
            "threads; each file is read once",
        )
    if keys.has(R + "inference"):
        keys.used(R + "inference", "your reader", "predict sets it")


def _beside(folder: Path, path: str) -> str:
    return path if "://" in path else os.path.normpath(folder / path)


def _take_training(keys: Keys, purpose: Purpose) -> None:
    if purpose == "online":
        keys.skip(R + "epochs", "a pass of the stream is trained on once")
    else:
        if keys.original.is_online and not keys.has(R + "epochs"):
            raise ConfigError(
                f"{keys.original.path} has days and no runner.epochs: it is a configuration for online learning",
                f"clickfleet online -m {keys.original.path.name}, or -o runner.epochs=1",
            )
        keys.to(R + "epochs", "train.epochs", keys.whole(R + "epochs"))
    keys.to(R + "seed", "train.seed", keys.whole(R + "seed", 12345, least=0))
    keys.to(
        R + "model_save_path",
        "run.dir",
        here(keys.text(R + "model_save_path", "model_output")),
        "relative to the current folder",
    )
    if keys.truth(R + "use_gpu", False):
        device = _cuda()
        keys.to(R + "use_gpu", "train.device", device, "" if device == "cuda" else "this machine has no CUDA device")
    else:
        keys.used(R + "use_gpu", "train.device=cpu")
    keys.to(R + "use_auc", "train.metrics.continuous", not keys.truth(R + "use_auc"), "the AUC itself is always there")
    keys.used(R + "use_visual", "tensorboard/ in the run folder", "always written")
    if keys.truth(R + "dataset_debug"):
        keys.to(R + "dataset_debug", "train.profile", True)
    else:
        keys.used(R + "dataset_debug", "train.profile=false")
    threads = R + ("train_thread_num" if purpose == "online" else "thread_num")
    keys.skip(R + ("thread_num" if purpose == "online" else "train_thread_num"), "of another tool")
    if keys.has(threads):
        asked, cores = keys.whole(threads), os.cpu_count() or 1
        note = f"{asked} asked for, and this machine has {cores} cores" if asked > cores else ""
        keys.to(threads, "cluster.threads" if purpose == "launch" else "train.threads", min(asked, cores), note)
    for key in ("model_init_path", "warmup_model_path"):
        if keys.has(R + key) and "init_from" not in keys.raw.get("train", {}):
            keys.to(R + key, "train.init_from", here(keys.text(R + key)), "relative to the current folder")
        elif keys.has(R + key):
            keys.skip(R + key, "runner.model_init_path says where to start from")


def _cuda() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _take_mode(keys: Keys, purpose: Purpose) -> None:
    wanted = keys.text(R + "sync_mode", "sync" if keys.truth(R + "use_fleet") else "async")
    if wanted not in ("sync", "async", "geo", "heter", "gpubox"):
        raise keys.wrong(R + "sync_mode", "must be sync, async or geo")
    mode = "async" if wanted in ("heter", "gpubox") else wanted
    if purpose == "launch":
        note = "" if mode == wanted else f"{wanted} needs other hardware: rows and networks are on CPUs here"
        keys.to(R + "sync_mode", "mode.name", mode, note)
        keys.used(R + "use_fleet", f"mode.name={mode}")
        if mode == "geo":
            keys.to(R + "geo_step", "mode.k_steps", keys.whole(R + "geo_step", 400))
    keys.used(R + "sync_mode", "clickfleet launch", "one process trains without it, as without fleetrun")
    keys.used(R + "use_fleet", "clickfleet launch", "one process trains without it")
    keys.used(R + "geo_step", "clickfleet launch", "where sync_mode is geo")


def _take_online(keys: Keys, purpose: Purpose) -> None:
    whole = {
        "split_per_pass": ("splits_per_pass", 1),
        "checkpoint_per_pass": ("checkpoint_every_passes", 6),
        "save_delta_frequency": ("delta_every_passes", 6),
    }
    names = [
        "start_day",
        "end_day",
        "split_interval",
        "save_first_base",
        "data_donefile",
        "data_sleep_second",
        "prefetch",
        *whole,
    ]
    if purpose != "online":
        for name in names:
            keys.used(R + name, "clickfleet online")
        return
    for name in ("start_day", "end_day"):
        keys.to(R + name, f"online.{name}", keys.whole(R + name))
    minutes, poll = keys.real(R + "split_interval", 5), keys.real(R + "data_sleep_second", 10)
    keys.to(R + "split_interval", "online.split_interval", f"{minutes:g}min")
    keys.to(R + "data_sleep_second", "online.poll", f"{poll:g}s")
    for key, (ours, default) in whole.items():
        keys.to(R + key, f"online.{ours}", keys.whole(R + key, default))
    keys.to(R + "data_donefile", "online.done_file", keys.text(R + "data_donefile", "") or None)
    for key, ours in (("save_first_base", "first_base"), ("prefetch", "prefetch")):
        keys.to(R + key, f"online.{ours}", keys.truth(R + key))
    keys.set("online.validate", "pass")


def _take_evaluation(keys: Keys) -> tuple[Path, tuple[int, int | None]]:
    path = here(keys.text(R + "infer_load_path", keys.text(R + "model_save_path", "model_output")))
    first, last = keys.whole(R + "infer_start_epoch", 0, least=0), keys.whole(R + "infer_end_epoch", 10, least=0)
    if keys.has(R + "infer_end_epoch") and last <= first:
        raise ConfigError(
            f"{keys.original.path}: epochs {first} … {last - 1} are none to evaluate",
            "runner.infer_end_epoch is the one after the last",
        )
    keys.used(R + "infer_load_path", "evaluate, predict and export", "relative to the current folder")
    keys.used(R + "infer_start_epoch", "evaluate")
    keys.used(R + "infer_end_epoch", "evaluate, predict and export", "the one after the last")
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
        if plain in slots:
            names.append(plain)
        elif plain in ("dense_input", "dense_inputs", "dense_feature"):
            names += dense
        elif plain not in ("label", "click"):  # whoever asks for a score does not know it
            raise ConfigError(
                f"{keys.original.path}: runner.save_inference_feed_varnames names {name!r}, which is no input",
                f"inputs are {', '.join(slots[:3])} … {slots[-1]}{' and dense_input' if dense else ''}",
            )
    keys.used(R + "save_inference_feed_varnames", "export", "the columns that requests have")
    keys.used(R + "save_inference_fetch_varnames", "export", "requests get the score and the logit")
    everything = set(names) >= {slot.name for slot in schema.read_slots} | set(dense)
    return () if everything else tuple(names)
