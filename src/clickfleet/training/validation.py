"""Choose the data that a run is validated on: data.valid, or a part of the training rows that is set aside.

Early stopping, the best checkpoint, comparisons and searches look at this data and never at the test data.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from clickfleet.config.load import Config
from clickfleet.data import split as splitting
from clickfleet.data.dataset import Data, Source, for_scoring, open_source
from clickfleet.data.files import filesystem, packing
from clickfleet.data.memory import Feed
from clickfleet.data.reader import Reader
from clickfleet.data.split import RowSplit
from clickfleet.errors import ConfigError

PACKED_RATIO = 4
"""Guess of how much smaller compressed files are, to estimate rows."""


MANY_ROWS = 2_000_000
"""Rows of training data above which the driver of a cluster does not count those that are set aside."""


@dataclass(frozen=True)
class Validation:
    """The validation data of a run."""

    data: Data = None
    """None: the run is not validated."""
    split: RowSplit | None = None
    """The training rows that are set aside, if `data` is a part of them."""
    notes: tuple[str, ...] = ()
    """What to tell the user."""


def keeps_best(config: Config) -> bool:
    """Return whether a run keeps its best checkpoint by train.monitor. If so, the run folder names that model."""
    return config.train.patience is not None if config.run.keep_best is None else config.run.keep_best


def needs_validation(config: Config) -> str | None:
    """Return the setting that needs validation data, if there is one."""
    train = config.train
    needs = {
        "train.patience": train.patience,
        "train.eval_every": train.eval_every,
        "run.keep_best": config.run.keep_best,
    }
    return next((key for key, value in needs.items() if value), None)


def choose(
    config: Config,
    source: Source,
    valid: Data,
    test: Data,
    saved: dict[str, Any] | None = None,
    scores_rows: bool = True,
    local: bool = True,
) -> Validation:
    """Return the validation data of a run, and set the rows aside that it takes from the training data.

    `saved` is the state of the checkpoint that the run resumes from: the same rows stay set aside. `local`: this process
    evaluates the model; otherwise the rows that are set aside are not read here if they are many.
    """
    share, needed = config.data.valid_share, needs_validation(config)
    valid = valid if valid is not None else config.data.valid or None
    if not scores_rows:
        if needed or share or valid is not None:
            raise ConfigError(
                f"model {config.model.name} does not score rows, so it cannot be validated during training",
                f"remove {needed or ('data.valid_share' if share else 'data.valid')}",
            )
        return Validation()
    if valid is not None and share:
        raise ConfigError("data.valid and data.valid_share exclude each other", "remove one of them")
    if saved is not None:
        return _resumed(config, source, valid, RowSplit.from_dict(saved.get("split")), local)
    if valid is not None:
        return Validation(valid)
    if share is None:
        share = default_share(source) if needed or test is None else 0.0
        if share and isinstance(source, Feed) and not source.rereadable:
            share = 0.0
    elif share and isinstance(source, Feed) and not source.rereadable:
        raise ConfigError(
            f"data.valid_share cannot split a {type(source.data).__name__}, which is read once, from its start to its end",
            "pass a frame, a table, a mapping of arrays or a list, or name validation data apart",
        )
    chosen = _split(config, source, share, local) if share else Validation()
    if chosen.data is None and needed:
        raise ConfigError(
            f"{needed} needs validation data" + "".join(f"; {note}" for note in chosen.notes),
            "set data.valid, or data.valid_share above 0",
        )
    return chosen


def _resumed(config: Config, source: Source, valid: Data, split: RowSplit | None, local: bool) -> Validation:
    """Return the validation data of a run that resumes: what was set aside stays so."""
    share, needed = config.data.valid_share, needs_validation(config)
    if share is not None and share != (0.0 if split is None else split.share):
        raise ConfigError(
            f"data.valid_share is {share}, but the run began with {0.0 if split is None else split.share}",
            "resume with the same share; training has seen the other rows",
        )
    source.split = split
    if valid is not None:
        return Validation(valid, split)
    if split is not None:
        aside = _reader(config, source, split)
        return Validation((splitting.count(aside).kept if local else None) or aside, split)
    if needed:
        raise ConfigError(f"{needed} needs validation data, and the run began without", "set data.valid")
    return Validation()


def _split(config: Config, source: Source, share: float, local: bool) -> Validation:
    split = RowSplit(share, config.train.seed, _since(config, source, share))
    aside = _reader(config, source, split)
    if not local and (estimated_rows(source) or 0) > MANY_ROWS:
        source.split = split
        return Validation(aside, split, (splitting.describe(split, None, _time(source)),))
    held_out = splitting.count(aside)
    if not held_out.enough:
        text = (
            f"no validation: {splitting.percent(share)} of the rows would hold {held_out.clicks:,} clicks and "
            f"{held_out.rows - held_out.clicks:,} others; {splitting.LEAST_ROWS} of each are needed"
        )
        return Validation(notes=(text,))
    source.split = split
    note = splitting.describe(split, held_out.rows, _time(source))
    return Validation(held_out.kept if held_out.kept is not None else aside, split, (note,))


def _since(config: Config, source: Source, share: float) -> int | None:
    """Return the time from which on rows are set aside; None to choose them at random."""
    if _time(source) is None:
        return None
    sample = splitting.TimeSample()
    for batch in _reader(config, source, None):
        if batch.times is None:
            return None
        sample.add(batch.times)
    return sample.since(share)


def _time(source: Source) -> str | None:
    """Return the column with the time of a row. Joined rows have one in any case: a correction must not be parted from its show."""
    joined = isinstance(source, Reader) and source.format.corrects
    return source.schema.time or ("known" if joined else None)


def _reader(config: Config, source: Source, split: RowSplit | None) -> Source:
    """Return a source of the training data in its order: all rows, or those that are set aside."""
    if isinstance(source, Feed):
        feed = Feed(source.data, source.schema, source.batch_size, names=source.names)
        feed.split, feed.validation = split, split is not None
        return feed
    assert isinstance(source, Reader)
    reader = open_source(for_scoring(config), source.files, source.schema, labels=True)
    reader.split, reader.validation = split, split is not None
    return reader


def default_share(source: Source) -> float:
    """Return the share of rows to set aside: a tenth, less for large logs."""
    rows = estimated_rows(source)
    return splitting.SHARE if rows is None else min(splitting.SHARE, splitting.MAX_ROWS / max(rows, 1))


def estimated_rows(source: Source) -> int | None:
    """Estimate the rows of the training data from the size of its files; None if it is unknown."""
    if isinstance(source, Feed):
        data = source.data
        first = next(iter(data.values()), ()) if isinstance(data, dict) else data
        return len(first) if hasattr(first, "__len__") else None
    assert isinstance(source, Reader)
    rows = size = 0
    for path in source.files[:1]:
        blocks = source.format.blocks(path, source.schema, 0)
        for block in blocks:
            rows, size = len(block.parse("some").batch), block.size
            if rows:
                break
        source.format.cancel({path})
        getattr(blocks, "close", lambda: None)()
    total = 0
    for path in source.files:
        here = filesystem(path)[0].size(filesystem(path)[1]) if "://" in path else os.path.getsize(path)
        if here is None:
            return None
        total += here * (PACKED_RATIO if packing(path) or path.endswith(".parquet") else 1)
    return int(total * rows / size) if rows and size else None


def required(config: Config) -> Config:
    """Return the configuration of runs that are ranked on validation data: with a share of the rows to set aside, if need be."""
    share = config.data.valid_share
    if config.data.valid or share is not None:
        return config
    share = default_share(open_source(config, config.data.train, None))
    return replace(config, data=replace(config.data, valid_share=share))


def check_enough(config: Config, who: str, local: bool = True) -> None:
    """Refuse training data whose data.valid_share is too small to validate on. `who` needs it."""
    share = config.data.valid_share
    if config.data.valid or not share:
        return
    found = _split(config, open_source(config, config.data.train, None), share, local)
    if found.data is None:
        raise ConfigError(
            f"{who} needs validation data; {found.notes[0]}", "set data.valid, or a larger data.valid_share"
        )


def with_share(config: Config, split: RowSplit | None) -> Config:
    """Return the configuration with the share of rows that is set aside, if there is one."""
    return config if split is None else replace(config, data=replace(config.data, valid_share=split.share))
