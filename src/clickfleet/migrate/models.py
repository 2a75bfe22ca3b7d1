"""Where a PaddleRec configuration's models are: our run folders under its paths, or files of the original's there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from clickfleet import checkpoint, saving, trained
from clickfleet.config import Config
from clickfleet.errors import CheckpointError
from clickfleet.migrate import words
from clickfleet.migrate.importing import import_model, is_saved
from clickfleet.migrate.readers import inference_format
from clickfleet.migrate.translate import Translated
from clickfleet.schema import read_schema, write_schema


def settle(translated: Translated) -> Config:
    """The configuration with all that a run needs on disk: its schema, and the model it starts from as one of ours."""
    config = translated.config
    run = Path(config.run.dir)
    if translated.dictionary is not None:
        words.write_vocabulary(translated.dictionary, Path(translated.raw["data"]["vocabulary"]))
    if translated.needs_schema:
        path = run / "schema.yaml"
        if path.is_file() and read_schema(path) != translated.schema:
            raise CheckpointError(f"{run} holds a run of another schema", "choose another runner.model_save_path")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_schema(translated.schema, path)
        config = replace(config, data=replace(config.data, schema=str(path)))
    if config.train.init_from is not None:
        start = Path(config.train.init_from)
        if is_saved(start):
            start = import_model(translated, start, run.with_name(f"{run.name}-init"), again=True).path
        config = replace(config, train=replace(config.train, init_from=str(by_epoch(start))))
    return config


def by_epoch(path: Path) -> Path:
    """`<run>/<epoch>`, as the old tools named models, as the checkpoint of that epoch's end."""
    if not path.exists() and re.fullmatch(r"\d+", path.name):
        kept = checkpoint.epochs(path.parent / "checkpoints")
        if int(path.name) in kept:
            return kept[int(path.name)]
        if kept:
            known = ", ".join(map(str, kept))
            raise CheckpointError(f"{path.parent} has no checkpoint of epoch {path.name}", f"kept: {known}")
    return path


@contextmanager
def found(translated: Translated, epoch: int | None) -> Iterator[Path]:
    """The model of an epoch (None: the newest): ours, or the original's, imported for as long as it is needed."""
    base = Path(translated.config.train.init_from or translated.load_path) if epoch is None else translated.load_path
    saved = base if epoch is None else base / str(epoch)
    if is_saved(saved):
        with TemporaryDirectory(prefix="clickfleet-") as folder:
            yield saving.resolve(import_model(translated, saved, Path(folder) / "imported").path)
    else:
        yield saving.resolve(by_epoch(saved) if epoch is not None else base)


def epochs(translated: Translated, span: str | None = None) -> Sequence[int | None]:
    """The epochs to evaluate: those of the configuration, or a span such as 0:4; of a model that learns online, the newest (None)."""
    if span is None and translated.config.online.start_day is not None:
        return [None]
    first, last = translated.epochs if span is None else trained.parse_span(span)
    if last is not None:
        return list(range(first, last))
    ours = checkpoint.epochs(translated.load_path / "checkpoints")
    theirs = [int(p.name) for p in translated.load_path.glob("[0-9]*") if p.name.isdigit() and is_saved(p)]
    there = sorted(epoch for epoch in {*ours, *theirs} if epoch >= first)
    if not there:
        raise CheckpointError(
            f"{translated.load_path} holds no model of an epoch", "train first, or set runner.infer_load_path"
        )
    return there


def opened(translated: Translated, path: Path, inference: bool = False, trust: bool = False) -> trained.Trained:
    """A model that reads data as the configuration says; `trust` allows code that only the model names to run."""
    model = trained.load(path, trust)
    saved, mine = model.config.data.format, translated.config.data.format
    form = inference_format(translated.original, mine if mine.name == saved.name else saved, inference)
    data = replace(model.config.data, format=form, test_batch_size=translated.config.data.test_batch_size)
    model.learner.config = replace(model.config, data=data)
    return model
