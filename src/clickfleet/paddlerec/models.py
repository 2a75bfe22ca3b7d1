"""Find the models of a PaddleRec configuration: our run folders at its paths, or files that PaddleRec saved there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from clickfleet.config.load import Config
from clickfleet.data.schema import read_schema, write_schema
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.paddlerec import words
from clickfleet.paddlerec.importing import import_model
from clickfleet.paddlerec.original import is_override, read
from clickfleet.paddlerec.readers import inference_format
from clickfleet.paddlerec.sources import is_saved, locate
from clickfleet.paddlerec.translation import Translated, translate
from clickfleet.store import checkpoint, run_folder
from clickfleet.training import model
from clickfleet.training.model import load
from clickfleet.workbench.compare import OtherKeys


def as_config(path: str | Path, *overrides: str) -> Config:
    """Return the configuration for `clickfleet.train` of a PaddleRec file. `overrides` are `key=value` with its keys or ours."""
    theirs = [item for item in overrides if is_override(item)]
    return write_inputs(translate(read(path, theirs), [item for item in overrides if item not in theirs]))


def write_inputs(translated: Translated) -> Config:
    """Return the configuration after writing what the run needs: its schema, and the imported model it starts from."""
    config = translated.config
    run = Path(config.run.dir)
    if translated.dictionary is not None:
        words.write_vocabulary(translated.dictionary, Path(translated.raw["data"]["vocabulary"]))
    if translated.needs_schema:
        path = run / "schema.yaml"
        if path.is_file() and read_schema(path) != translated.schema:
            raise CheckpointError(
                f"{run} contains a run with a different schema", "choose another runner.model_save_path"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_schema(translated.schema, path)
        config = replace(config, data=replace(config.data, schema=str(path)))
    if config.train.init_from is not None:
        start = Path(config.train.init_from)
        if _is_foreign(start):
            start = import_model(translated, start, run.with_name(f"{run.name}-init"), again=True).path
        config = replace(config, train=replace(config.train, init_from=str(by_epoch(start))))
    return config


def _is_foreign(path: Path) -> bool:
    """Return whether a path holds a model of PaddleRec, itself or in numbered folders, and none of ours."""
    if is_saved(path) or not path.is_dir():
        return is_saved(path)
    with suppress(CheckpointError):
        run_folder.resolve(path)
        return False
    return is_saved(locate(path, []))


def keys_to_vary(path: Path, overrides: Sequence[str]) -> OtherKeys:
    """Return the keys of a configuration that a comparison may vary. `overrides` hold for every run."""
    theirs = [item for item in overrides if is_override(item)]
    ours = [item for item in overrides if item not in theirs]

    def changed(values: Mapping[str, Any]) -> Config:
        items = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]
        translated = translate(read(path, [*theirs, *items]), ours, "train")
        for line in translated.report.lines:
            if line.key in values and line.kind in ("not applicable", "unknown"):
                raise ConfigError(f"{path}: {line.key} has no effect: {line.note or line.kind}", "vary another key")
        return write_inputs(translated)

    return OtherKeys(is_override, read(path, theirs).values.get, changed)


def by_epoch(path: Path) -> Path:
    """Return the checkpoint for `<run>/<epoch>`, PaddleRec's name for the model at the end of an epoch."""
    if not path.exists() and re.fullmatch(r"\d+", path.name):
        kept = checkpoint.epochs(path.parent / "checkpoints")
        if int(path.name) in kept:
            return kept[int(path.name)]
        if kept:
            known = ", ".join(map(str, kept))
            raise CheckpointError(f"{path.parent} has no checkpoint of epoch {path.name}", f"it has {known}")
    return path


@contextmanager
def model_of_epoch(translated: Translated, epoch: int | None) -> Iterator[Path]:
    """Yield the path of the model of an epoch (None: the newest). A model of PaddleRec is imported temporarily."""
    base = Path(translated.config.train.init_from or translated.load_path) if epoch is None else translated.load_path
    saved = base if epoch is None else base / str(epoch)
    if is_saved(saved):
        with TemporaryDirectory(prefix="clickfleet-") as folder:
            yield run_folder.resolve(import_model(translated, saved, Path(folder) / "imported").path)
    else:
        yield run_folder.resolve(by_epoch(saved) if epoch is not None else base)


def epochs(translated: Translated, span: str | None = None) -> Sequence[int | None]:
    """Return the epochs to evaluate: those of the configuration, or of a span such as 0:4. For online learning: None, the newest."""
    if span is None and translated.config.online.start_day is not None:
        return [None]
    first, last = translated.epochs if span is None else model.parse_span(span)
    if last is not None:
        return list(range(first, last))
    ours = checkpoint.epochs(translated.load_path / "checkpoints")
    theirs = [int(p.name) for p in translated.load_path.glob("[0-9]*") if p.name.isdigit() and is_saved(p)]
    available = sorted(epoch for epoch in {*ours, *theirs} if epoch >= first)
    if not available:
        raise CheckpointError(
            f"{translated.load_path} contains no model of an epoch", "train first, or set runner.infer_load_path"
        )
    return available


def open_model(translated: Translated, path: Path, inference: bool = False, trust: bool = False) -> model.SavedModel:
    """Load a model and let it read data as the configuration does. `trust` allows code that only the model names."""
    model = load(path, trust)
    saved, configured = model.config.data.format, translated.config.data.format
    form = inference_format(translated.original, configured if configured.name == saved.name else saved, inference)
    data = replace(model.config.data, format=form, test_batch_size=translated.config.data.test_batch_size)
    model.learner.config = replace(model.config, data=data)
    return model
