"""Training modes, one file each. A mode decides when a trainer pulls weights and when it pushes gradients.

A mode file has three public names:

    Config  a frozen dataclass; its fields are the settings in the section `mode`
    NEEDS   `Needs(...)`: what the mode requires of the rest of the program
    train   `train(job, config)`, which trains until the job has no more batches for now

A mode with lasting state has a fourth: `unpack(table, files)` returns the `job.lasting` of a worker that joins. `files` are those of
`job.lend`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from clickfleet.config.check import hogwild
from clickfleet.config.load import Config, checked, plain
from clickfleet.config.plugins import extensions, module
from clickfleet.errors import ConfigError
from clickfleet.store.table import Table
from clickfleet.training.loop import Job


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a mode requires. All fields but the first two apply to distributed modes only."""

    distributed: bool
    """Run `train` in every worker of a cluster, with a `WorkerJob`. Otherwise run it in this process, with a `Job`."""
    deterministic: bool = False
    """Equal seeds give equal results, so `train.deterministic` is allowed."""
    stale: bool = False
    """Trainers start from weights that miss steps of others. `train.loss.shared_error` is then below 1 by default."""
    shards_wait: bool = False
    """A shard applies a round only after every worker has sent its part, and then as one batch."""
    link_per_trainer: bool = False
    """Each trainer thread has its own link to the shards. Otherwise the worker has one link for all of them."""
    replicates_rows: bool = False
    """Workers keep copies of rows. The shards track which worker holds which row and send back what others changed."""
    lasting: bool = False
    """Workers keep state in `job.lasting` while other workers or shards come and go. Otherwise they load the files of `job.keep`."""
    marks_checkpoints: bool = False
    """`train` polls `job.wanted()` and marks the checkpoint itself. Otherwise the worker stops the trainers and marks it."""

    def __post_init__(self) -> None:
        extra = [field.name for field in dataclasses.fields(self)[2:] if getattr(self, field.name)]
        if extra and not self.distributed:
            raise ConfigError(
                f"a mode needs {', '.join(extra)}, which only distributed modes have",
                "add distributed=True to its NEEDS",
            )


def load(config: Config) -> Callable[[Job], None]:
    """Return the training function of the configured mode, with its settings bound."""
    mode, settings = _module(config), resolve(config)
    if not mode.NEEDS.distributed:
        check_deterministic(config)
    return lambda job: mode.train(job, settings)


def unpack(config: Config, table: Table, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the lasting state of a worker that joins, from the files that another one lends."""
    lasting: dict[str, Any] = _module(config).unpack(table, files)
    return lasting


def resolve(config: Config) -> Any:
    """Return the settings of the mode. The configuration overrides the environment; the environment overrides defaults."""
    mode = _module(config)
    known = {field.name for field in dataclasses.fields(mode.Config)}
    environment = {key: value for settings in extensions("mode_settings") for key, value in settings(known).items()}
    return checked(mode.Config, {**environment, **config.mode.settings}, "mode", config.mode.name)


def settled(config: Config) -> Config:
    """Return the configuration with every setting of its mode written out, so that no other environment changes it."""
    settings = {key: value for key, value in plain(resolve(config)).items() if value is not None}
    return dataclasses.replace(config, mode=dataclasses.replace(config.mode, settings=settings))


STALE_SHARED_ERROR = {True: 0.05, False: 0.2}
"""The default with stale weights, on a cluster or with several trainers on one machine, whose weights are less stale."""


def with_shared_error(config: Config) -> Config:
    """Return the configuration with its default of `train.loss.shared_error` written out."""
    loss = config.train.loss
    original = config.model.settings.get("paddlerec") or loss.function is not None
    if loss.shared_error is not None or original:
        return config
    on_cluster = distributed(config)
    stale = needs(config).stale if on_cluster else hogwild(config) > 1
    loss = dataclasses.replace(loss, shared_error=STALE_SHARED_ERROR[on_cluster] if stale else 1.0)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, loss=loss))


def needs(config: Config) -> Needs:
    """Return what the configured mode declares."""
    declared: Needs = _module(config).NEEDS
    return declared


def distributed(config: Config) -> bool:
    """Return whether the mode runs on a cluster."""
    return needs(config).distributed


def check_deterministic(config: Config) -> None:
    """Refuse `train.deterministic` in a mode whose results depend on timing."""
    if config.train.deterministic and not needs(config).deterministic:
        raise ConfigError(f"train.deterministic is not supported in mode {config.mode.name}", "use mode sync or local")


def _module(config: Config) -> Any:
    mode: Any = module("modes", config.mode)
    for name, remedy in _CONTRACT.items():
        if not hasattr(mode, name):
            raise ConfigError(f"{mode.__file__}: a mode needs {name}", remedy)
    if not isinstance(mode.NEEDS, Needs):
        raise ConfigError(f"{mode.__file__}: NEEDS is a {type(mode.NEEDS).__name__}", _CONTRACT["NEEDS"])
    if mode.NEEDS.lasting and not hasattr(mode, "unpack"):
        raise ConfigError(
            f"{mode.__file__}: a mode with lasting state needs unpack",
            "add unpack(table, files), which returns the job.lasting of a worker that joins",
        )
    return mode


_CONTRACT = {
    "Config": "add a frozen dataclass Config; its fields are the settings of the mode",
    "NEEDS": "add NEEDS = Needs(distributed=...), with Needs from clickfleet.training.modes",
    "train": "add train(job, config), which trains on the batches of the job",
}
