"""Choose the settings that are `auto`: batch size, epochs, rates and regularisation by the size of the data.

A log of 500,000 rows teaches a model in one epoch of large batches. With fewer rows, a model needs smaller batches for enough
steps, several epochs, and protection against learning single rows by heart: early stopping, small steps of rare values, L2 on
the rows and a smaller MLP. docs/study.md describes how the function was found.

Settings that the user gives are never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clickfleet.config.load import Config
from clickfleet.config.plugins import Plugin, find
from clickfleet.config.sections import FIRST_ORDER_RULE, ROW_RULE, AutoFloat, AutoInt
from clickfleet.data.dataset import Data
from clickfleet.data.facts import LogFacts, measure
from clickfleet.data.schema import Schema
from clickfleet.data.split import LEAST_ROWS, SHARE
from clickfleet.errors import CheckpointError, ClickfleetError
from clickfleet.store import checkpoint, run_folder
from clickfleet.store.mirror import url_of
from clickfleet.training import modes
from clickfleet.training.averaging import admits_all
from clickfleet.training.network import Model

LARGE_ROWS = 400_000
"""From this many rows on, every setting keeps its usual value: one epoch of batches of 1000, in the order of the files."""
SMALL_ROWS = 200_000
"""Below this many rows, rates, regularisation and the MLP differ from the usual ones."""
RARE_SHOWS = 30
"""Where values of many slots occur less often than this on average, their factors learn in smaller steps."""
TABLE_L2 = 10.0
"""L2 of the sum of all losses: that of a logistic regression with C = 0.1."""
FEW_STEPS = 200
"""In fewer steps, the careful rates would learn too little."""


@dataclass(frozen=True)
class AutoSettings:
    """The settings for a log of a certain size. None: the usual value."""

    batch_size: int | None = None
    epochs: int = 1
    patience: int | None = None
    shuffle: bool = False
    rate: float | None = None
    """Learning rate of the factors."""
    first_order_rate: float | None = None
    l2_rows: float | None = None
    l2_table: float | None = None
    dense_rate: float | None = None
    """Learning rate of the network."""
    wide: bool = False
    small: bool = False
    """Whether models use their settings for small logs, such as a narrower MLP."""


def settings_for(facts: LogFacts) -> AutoSettings:
    """Return the settings for a log. They change with the number of rows and slots alone."""
    rows, slots = facts.rows, max(facts.slots, 1)
    if rows >= LARGE_ROWS:
        return AutoSettings()
    if rows >= SMALL_ROWS:
        return AutoSettings(epochs=5, patience=1, shuffle=True, wide=True)
    care = min(max((rows / 40_000) ** 0.5, 0.5), 1.0)  # of few rows, each says little: smaller steps
    rare = 0.5 if facts.shows_per_id < RARE_SHOWS and slots >= 20 else 1.0
    return AutoSettings(
        batch_size=_batch_size(rows),
        epochs=20 if rows < 100_000 else 10,
        patience=4 if rows < 20_000 else 2,
        shuffle=True,
        rate=_short(min(0.1, 0.8 / slots * care) * rare),  # the logit is a sum over slots, so its step grows with them
        first_order_rate=_short(min(0.1, 4.0 / slots * care)),
        l2_rows=_fading(rows),
        l2_table=_short(TABLE_L2 / rows),
        dense_rate=0.002
        if facts.dense and rows < 40_000
        else None,  # numbers reach the logit through the network alone
        wide=True,
        small=True,
    )


def _fading(rows: int) -> float | None:
    """Return the L2 of the rows of a batch: 1 for very few rows, none for 30,000. It also holds back frequent values and the MLP.

    >>> [_fading(rows) for rows in (8_000, 14_000, 23_000, 60_000)]
    [1.0, 0.19, 0.016, None]
    """
    strength = _short(min(1.0, (10_000 / rows) ** 5))
    return strength if strength >= 0.01 else None


def _batch_size(rows: int) -> int:
    """Return the rows per step: a power of two that makes about a hundred steps per epoch or more.

    >>> [_batch_size(rows) for rows in (500, 8_000, 14_000, 57_722, 150_000)]
    [16, 64, 128, 256, 512]
    """
    if rows >= 20_000:
        return 256 if rows < 100_000 else 512
    least = 16 if rows < 2_000 else 64
    return max(least, min(256, 1 << (max(rows // 80, 1).bit_length() - 1)))


def _short(value: float) -> float:
    return float(f"{value:.2g}")


@dataclass(frozen=True)
class Chosen:
    """A configuration without `auto`, and what was chosen, in words."""

    config: Config
    notes: list[str] = field(default_factory=list)


def choose(
    config: Config,
    data: Data = None,
    valid: Data = None,
    schema: Schema | None = None,
    resumed: Config | None = None,
) -> Chosen:
    """Replace each `auto` by a number. `resumed` is the configuration of the run to resume: its numbers stay."""
    kind: type[Model] = find("models", config.model, Model)
    if resumed is not None:
        return Chosen(_as_resumed(config, resumed))
    config = _with_started_model(config)
    if not kind.scores_rows or config.model.settings.get("paddlerec"):
        return Chosen(config)
    if not _undecided(config):
        return Chosen(config)
    facts = measure(config, config.data.train if data is None else data, schema)
    if facts is None:
        return Chosen(config)
    can_stop = (
        valid is not None
        or bool(config.data.valid)
        or (config.data.valid_share != 0 and facts.events * (config.data.valid_share or SHARE) >= 3 * LEAST_ROWS)
    )
    return auto_settings(config, facts, can_stop)


def auto_settings(config: Config, facts: LogFacts, can_stop: bool = True) -> Chosen:
    """Return the configuration for a log. `can_stop`: there is validation data, so that training can stop early."""
    kind: type[Model] = find("models", config.model, Model)
    best, data, train = settings_for(facts), config.data, config.train
    local = not modes.distributed(config)
    explicit_epochs = not isinstance(train.epochs, AutoInt)
    batch_size = data.batch_size or best.batch_size or kind.batch_rows(config)
    epochs, patience = int(train.epochs), train.patience
    if not explicit_epochs:
        stops = can_stop and best.patience is not None
        epochs = best.epochs if stops or patience is not None else min(best.epochs, 3)
        patience = best.patience if stops and patience is None else patience
    shuffle: Any = ("global" if best.shuffle and local else 0) if isinstance(data.shuffle, AutoInt) else data.shuffle
    steps = facts.rows * epochs // batch_size
    table, model, loss = config.table, config.model, train.loss
    # The small rates need many steps, and were found with one trainer at a time.
    careful = best.rate is not None and local and steps >= FEW_STEPS
    if careful and not kind.row_rule:
        table = replace(
            table,
            rule=_rule(table.rule, ROW_RULE, {"lr": best.rate, "initial_g2sum": 1.0, "scale": "none"}),
            embed_rule=_rule(
                table.embed_rule, FIRST_ORDER_RULE, {"lr": best.first_order_rate, "initial_g2sum": 4.0, "scale": "none"}
            )
            if table.rule.given is not None
            else table.embed_rule,
        )
    if careful and not kind.row_rule:
        loss = replace(
            loss,
            l2_rows=best.l2_rows if loss.l2_rows is None else loss.l2_rows,
            l2_table=best.l2_table if loss.l2_table is None else loss.l2_table,
        )
    dense = config.dense
    if careful and best.dense_rate is not None and isinstance(dense.lr, AutoFloat):
        dense = replace(dense, lr=best.dense_rate)
    given = model.settings
    chosen: dict[str, Any] = {}
    lacks_wide = not kind.has_wide and not model.is_user_code  # the formula of a user stays as it is
    if best.wide and lacks_wide and "wide" not in given and config.train.init_from is None:
        chosen["wide"] = True
    if best.small and careful and config.train.init_from is None:
        chosen |= {key: value for key, value in kind.small.items() if key not in given}
    hogwild = 1 if careful and train.hogwild is None and table is not config.table else train.hogwild
    average = train.average
    if average is None and careful and not explicit_epochs and patience is not None:
        average = config.run.keep_epochs and config.run.keep_best is not False and admits_all(config)
    settled = replace(
        config,
        data=replace(data, batch_size=batch_size, shuffle=shuffle),
        table=table,
        dense=dense,
        model=replace(model, settings={**given, **chosen}) if chosen else model,
        train=replace(
            train,
            epochs=epochs,
            patience=patience,
            average=average,
            hogwild=hogwild,
            loss=loss,
        ),
    )
    return Chosen(settled, _notes(config, settled, facts, chosen))


def _rule(given: Plugin | None, usual: Plugin, best: Mapping[str, Any]) -> Plugin:
    """Return the rule with the chosen settings, unless the user named a rule. Single settings of the user stay."""
    if given is not None and given.given is None and given != usual:
        return given
    return Plugin(usual.name, {**usual.settings, **best, **((given and given.given) or {})})


def _undecided(config: Config) -> bool:
    """Return whether a setting is left to be chosen."""
    return (
        config.data.batch_size is None
        or isinstance(config.data.shuffle, AutoInt)
        or isinstance(config.train.epochs, AutoInt)
        or config.table.rule.given is not None
    )


def _notes(before: Config, after: Config, facts: LogFacts, model: Mapping[str, Any]) -> list[str]:
    """Describe what was chosen, one line per subject."""
    rows = f"{'' if facts.exact else 'about '}{facts.rows:,} rows"
    parts = []
    if before.data.batch_size is None:
        parts.append(f"batches of {after.data.batch_size}")
    if isinstance(before.train.epochs, AutoInt):
        epochs = after.train.epochs
        averaged = ", averaged" if after.train.average and not before.train.average else ""
        stop = f" with early stopping{averaged}" if after.train.patience is not None else ""
        parts.append(f"{'up to ' if stop else ''}{epochs} epoch{'s' * (epochs > 1)}{stop}")
    if isinstance(before.data.shuffle, AutoInt):
        parts.append("shuffled" if after.data.shuffle else "in the order of the files")
    notes = [f"{rows}: {', '.join(parts)}"] if parts else []
    if after.table.rule != before.table.rule:
        assert after.table.embed_rule is not None
        rates = f"{after.table.rule.settings['lr']:g} and {after.table.embed_rule.settings['lr']:g} (first order)"
        loss = after.train.loss
        l2 = f", L2 {loss.l2_table:g}" if loss.l2_table is not None else ""
        l2 += f" and {loss.l2_rows:g} on the rows of a batch" if l2 and loss.l2_rows is not None else ""
        notes.append(f"{facts.slots} slot{'s' * (facts.slots != 1)}, {facts.ids:,} ids: row rates {rates}{l2}")
    if after.dense.lr != before.dense.lr:
        notes.append(f"{facts.dense} dense column{'s' * (facts.dense != 1)}: rate of the network {after.dense.lr:g}")
    if model:
        notes.append(f"few rows: {', '.join(f'model.{key} {_text(value)}' for key, value in model.items())}")
    return notes


def _text(value: Any) -> str:
    return str(list(value) if isinstance(value, tuple) else value).lower()


def _as_resumed(config: Config, saved: Config) -> Config:
    """Return the configuration with the numbers of the run to resume wherever it leaves them to be chosen."""
    data, train, table, model = config.data, config.train, config.table, config.model
    if data.batch_size is None:
        data = replace(data, batch_size=saved.data.batch_size)
    if isinstance(data.shuffle, AutoInt):
        data = replace(data, shuffle=saved.data.shuffle)
    if isinstance(train.epochs, AutoInt):
        train = replace(train, epochs=saved.train.epochs, patience=train.patience or saved.train.patience)
    if train.loss.l2_rows is None:
        train = replace(train, loss=replace(train.loss, l2_rows=saved.train.loss.l2_rows))
    if train.loss.l2_table is None:
        train = replace(train, loss=replace(train.loss, l2_table=saved.train.loss.l2_table))
    if train.hogwild is None:
        train = replace(train, hogwild=saved.train.hogwild)
    run = config.run
    if train.average is None and run.keep_best is not False:
        train = replace(train, average=saved.train.average)
        if train.average and train.patience is None:  # given epochs: the average needs the best, which patience kept
            run = replace(run, keep_best=True)
    dense = config.dense
    if isinstance(dense.lr, AutoFloat):
        dense = replace(dense, lr=saved.dense.lr)
    if table.rule.given is not None and saved.model.name == model.name:
        rule = Plugin(saved.table.rule.name, {**saved.table.rule.settings, **table.rule.given})
        table = replace(table, rule=rule, embed_rule=saved.table.embed_rule)
    if saved.model.name == model.name:
        model = replace(model, settings={**saved.model.settings, **model.settings})
    return replace(config, data=data, train=train, table=table, model=model, dense=dense, run=run)


def _with_started_model(config: Config) -> Config:
    """With train.init_from, return the configuration with the model settings of that model, so that its weights fit."""
    if config.train.init_from is None:
        return config
    try:
        saved = run_folder.read_config(run_folder.resolve(config.train.init_from))
    except ClickfleetError:  # a published log, or nothing: loading it says more
        return config
    if saved.model.name != config.model.name:
        return config
    return replace(config, model=replace(config.model, settings={**saved.model.settings, **config.model.settings}))


def saved_config(where: str) -> Config | None:
    """Return the configuration of the run in a folder, as its newest checkpoint has it; None if there is none yet."""
    try:
        if url_of(where) is None:
            path = checkpoint.latest(Path(where) / "checkpoints")  # also one that LATEST does not name yet
        else:
            path = run_folder.resolve(f"{where}/LATEST")
        return run_folder.read_config(path, trust=True)
    except CheckpointError:
        return None


def fixed(config: Config) -> Config:
    """Return the configuration with plain numbers: what is still to be chosen keeps its usual value."""
    data, train, dense = config.data, config.train, config.dense
    if isinstance(data.shuffle, AutoInt):
        data = replace(data, shuffle=0)
    if isinstance(train.epochs, AutoInt):
        train = replace(train, epochs=int(train.epochs))
    if isinstance(dense.lr, AutoFloat):
        dense = replace(dense, lr=float(dense.lr))
    return replace(config, data=data, train=train, dense=dense)
