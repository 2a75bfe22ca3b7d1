"""A configuration from whatever names one, and what it comes to on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from clickfleet.config import Config, checked, override
from clickfleet.config import load as load_config
from clickfleet.errors import ConfigError
from clickfleet.find import find
from clickfleet.models import Model
from clickfleet.trained import cores


def configure(config: Config | Mapping[str, Any] | str | Path | None, overrides: Iterable[str] = ()) -> Config:
    """A configuration from whatever names one."""
    if isinstance(config, Config):
        if overrides:
            raise ConfigError("a Config is changed by dataclasses.replace, not by key=value")
        return config
    if isinstance(config, Mapping):
        raw: dict[str, Any] = {key: dict(part) if isinstance(part, Mapping) else part for key, part in config.items()}
        for item in overrides:
            override(raw, item)
        return checked(Config, raw, source="the configuration", base=Path.cwd())
    return load_config(config, overrides, Path.cwd())


def settled(config: Config) -> Config:
    """The configuration with what its model wants where nothing is said: the rows of a step, the rule of the table."""
    kind: type[Model] = find("models", config.model.name, Model)
    size = config.data.batch_size or kind.batch_rows(config)
    table = config.table.with_rule(kind.row_rule) if kind.row_rule else config.table
    return replace(config, data=replace(config.data, batch_size=size), table=table)


def check(config: Config) -> None:
    """Refuses settings that contradict each other, before any work."""
    train = config.train
    if train.deterministic and (train.hogwild or 1) > 1:
        raise ConfigError(f"train.hogwild is {train.hogwild}, and train.deterministic allows one", "remove one of them")
    if config.model.name == "word2vec":
        if config.data.test:
            raise ConfigError(
                "data.test does not go with word2vec",
                "ask analogies after training: clickfleet evaluate RUN questions.txt",
            )
    elif config.data.vocabulary is not None:
        raise ConfigError(f"data.vocabulary is for word2vec, and model.name is {config.model.name}", "remove it")
    if config.data.schema is not None and config.data.preset is not None:
        raise ConfigError("data.schema and data.preset both say what the columns mean", "remove one of them")
    if train.hogwild is not None and train.hogwild > cores(config):
        raise ConfigError(
            f"train.hogwild is {train.hogwild}, more than train.threads ({cores(config)})", "raise threads"
        )


def hogwild(config: Config) -> int:
    """Trainer threads: on few cores, one core each is faster than sharing every operator between them."""
    if config.train.deterministic:
        return 1
    few = min(cores(config), 8) if config.train.device == "cpu" else 1  # an accelerator works on one step at a time
    return config.train.hogwild or few


def cpu_class() -> str:
    """What decides the last bits of a product."""
    return f"{torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}"


def check_arrangement(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """A deterministic run is the same only with the same threads and kind of CPU."""
    if mine["deterministic"] and dict(saved) != dict(mine):
        differences = ", ".join(
            f"{key} {saved[key]} there, {mine[key]} here" for key in mine if saved[key] != mine[key]
        )
        raise ConfigError(
            f"the checkpoint and train.deterministic do not fit: {differences}",
            "resume with the same arrangement, or with train.deterministic=false",
        )
