"""Keyword arguments become settings."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clickfleet.config.keywords import as_overrides
from clickfleet.config.load import load
from clickfleet.errors import ConfigError


@pytest.mark.parametrize(
    ("keywords", "key", "value"),
    [
        ({"epochs": 3}, "train.epochs", 3),
        ({"train__epochs": np.int64(3)}, "train.epochs", 3),
        ({"train.epochs": 3}, "train.epochs", 3),
        ({"train": {"epochs": 3, "seed": 1}}, "train.seed", 1),
        ({"lr": 1e-5}, "dense.lr", 1e-5),
        ({"dir": Path("/x/run")}, "run.dir", "/x/run"),
        ({"clip_norm": None}, "dense.clip_norm", None),
        ({"train": {"loss": {"l2": 0.5}}}, "train.loss.l2", 0.5),
        ({"test": ["/a, b.csv", "/c: d.csv"]}, "data.test", ("/a, b.csv", "/c: d.csv")),
    ],
)
def test_a_keyword_is_a_setting(keywords: dict[str, Any], key: str, value: object) -> None:
    config: Any = load(None, as_overrides(keywords))
    for part in key.split("."):
        config = getattr(config, part)
    assert config == value


def test_a_name_replaces_a_plug_in_and_its_settings() -> None:
    first = as_overrides({"model": {"name": "dnn", "hidden": [8], "dropout": 0.5}})
    config = load(None, [*first, *as_overrides({"model": {"name": "deepfm", "hidden": (4, 2)}})])
    assert (config.model.name, config.model.settings) == ("deepfm", {"hidden": [4, 2]})
    config = load(None, [*first, *as_overrides({"model": {"hidden": [4]}})])
    assert (config.model.name, config.model.settings) == ("dnn", {"hidden": [4], "dropout": 0.5})


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"epoch": 3}, "unknown setting epoch; did you mean epochs"),
        ({"threads": 3}, "threads is a setting of data and of train"),
        ({"lr": object()}, r"dense\.lr: a setting cannot hold object"),
        ({"lr": float("nan")}, "a setting cannot hold float"),
    ],
)
def test_other_keywords_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_overrides(keywords)
