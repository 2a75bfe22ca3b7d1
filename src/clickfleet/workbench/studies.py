"""Studies of a comparison: which settings vary, and with which values. The studies of PaddleRec's course are ready-made.

>>> [variant.settings for variant in parse(["dense.optimizer+table.rule.name=sgd,[adam,shared_adam]"])[0].variants]
[{'dense.optimizer': 'sgd', 'table.rule.name': 'sgd'}, {'dense.optimizer': 'adam', 'table.rule.name': 'shared_adam'}]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clickfleet.config.load import Config, plain, read
from clickfleet.errors import ConfigError
from clickfleet.workbench.headings import Language, heading


@dataclass(frozen=True)
class Variant:
    """One value of a study: the settings that it changes together."""

    label: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Study:
    """One setting, or several together (`a+b`), and their values."""

    key: str
    variants: tuple[Variant, ...]
    course: bool = False
    """Whether it is one of the course. Such a study is left out if no model has the setting."""

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.key.split("+"))


@dataclass(frozen=True)
class Axis:
    """A table of the course: its title, and the settings that it may be about."""

    title: str
    keys: tuple[str, ...]


EPOCHS = Axis("Epochs", ("train.epochs", "runner.epochs"))
BATCH = Axis("Batch size", ("data.batch_size", "runner.train_batch_size"))
RATE = Axis(
    "Learning rate", ("dense.lr", "table.rule.lr", "table.embed_rule.lr", "hyper_parameters.optimizer.learning_rate")
)
LAYERS = Axis("Layers", ("model.hidden", "model.top", "model.hidden1", "hyper_parameters.fc_sizes"))
OPTIMIZER = Axis(
    "Optimizer of rows and network",
    (
        "dense.optimizer",
        "table.rule",
        "table.rule.name",
        "table.embed_rule",
        "table.embed_rule.name",
        "hyper_parameters.optimizer.class",
    ),
)
AXES = (EPOCHS, BATCH, RATE, LAYERS, OPTIMIZER)

# The values of the course's study of DeepFM.
COURSE_EPOCHS = (1, 4, 10)
COURSE_BATCHES = (256, 512, 1024)
COURSE_RATES = (0.01, 0.001, 0.0001)
COURSE_LAYERS = ([400, 400, 400], [512, 256, 128], [1024, 1024, 1024])
COURSE_OPTIMIZERS = {"SGD": ("sgd", "sgd"), "Adagrad": ("adagrad", "adagrad_v2"), "Adam": ("adam", "adam")}
"""Name -> the optimizer of the network and the rule of the rows."""
COURSE_RATE = 0.001
"""Learning rate of the study of optimizers if the configuration sets none."""


def grid(text: str) -> tuple[str, list[Any]]:
    """Parse a key and its values.

    >>> grid("model.hidden=[400,400],[64]")
    ('model.hidden', [[400, 400], [64]])
    """
    key, equals, values = text.partition("=")
    if not equals or not values.strip():
        raise ConfigError(f"--set {text!r} does not have the form key=a,b,c", "for example --set train.epochs=1,4,10")
    return key, list(read(f"values: [{values}]", f"--set {text!r}")["values"])


def parse(sets: Sequence[str]) -> list[Study]:
    """Parse `key=a,b,c`. Keys joined by + vary together: a value is for all of them, a list has one for each."""
    studies: dict[str, Study] = {}
    for text in sets:
        key, values = grid(text)
        names = key.split("+")
        variants = tuple(_variant(names, value, text) for value in values)
        before = studies[key].variants if key in studies else ()
        studies[key] = Study(key, (*before, *variants))
    return list(studies.values())


def _variant(names: Sequence[str], value: Any, text: str) -> Variant:
    if len(names) == 1:
        return Variant(text_of(value), {names[0]: value})
    if not isinstance(value, list):
        return Variant(text_of(value), dict.fromkeys(names, value))
    if len(value) != len(names):
        raise ConfigError(
            f"--set {text!r}: {text_of(value)} has {len(value)} values for {len(names)} settings",
            "write one value for all of them, or a list with one for each: [sgd, adam]",
        )
    return Variant(", ".join(map(text_of, value)), dict(zip(names, value, strict=True)))


def course(
    base: Config,
    given: Sequence[Study],
    model_settings: Callable[[str], set[str]],
    models: Sequence[str],
    paddlerec: bool = False,
) -> list[Study]:
    """Return the studies of the course in its order. A `given` study of the same axis replaces the ready-made one.

    `paddlerec` studies the keys of a PaddleRec file, where one optimizer with one rate trains rows and network.
    """
    known = set[str]().union(*(model_settings(name) for name in models))
    layers = next((key for key in ("hidden", "top", "hidden1") if key in known), "hidden")
    ready = {
        EPOCHS: _one("runner.epochs" if paddlerec else "train.epochs", COURSE_EPOCHS),
        BATCH: _one("runner.train_batch_size" if paddlerec else "data.batch_size", COURSE_BATCHES),
        RATE: _one("hyper_parameters.optimizer.learning_rate", COURSE_RATES) if paddlerec else _rates(base),
        LAYERS: _one(f"model.{layers}", COURSE_LAYERS),
        OPTIMIZER: _one("hyper_parameters.optimizer.class", list(COURSE_OPTIMIZERS))
        if paddlerec
        else _optimizers(base),
    }
    left, studies = list(given), list[Study]()
    for axis, study in ready.items():
        instead = [one for one in left if axis_of(one) is axis]
        studies += [replace(one, course=True) for one in instead] or [replace(study, course=True)]
        left = [one for one in left if one not in instead]
    return [*studies, *left]


def _one(key: str, values: Sequence[Any]) -> Study:
    return Study(key, tuple(Variant(text_of(value), {key: value}) for value in values))


def _rates(base: Config) -> Study:
    """One rate for the network and the rows. A named rule is also that of the first-order weight."""
    given = base.table.rule.given
    own = base.table.embed_rule is not None or (given is not None and "name" not in given)
    keys = ("dense.lr", "table.rule.lr", *(("table.embed_rule.lr",) if own else ()))
    return Study("+".join(keys), tuple(Variant(text_of(rate), dict.fromkeys(keys, rate)) for rate in COURSE_RATES))


def _optimizers(base: Config) -> Study:
    """One optimizer for the network and the rows, with the rate of the network for both."""
    rate = plain(base)["dense"]["lr"]
    rate = rate if isinstance(rate, int | float) else COURSE_RATE
    variants = []
    for name, (dense, rule) in COURSE_OPTIMIZERS.items():
        rows = {"name": rule, "lr": rate, **({"scale": "batch"} if rule == "adagrad_v2" else {})}
        variants.append(
            Variant(
                name,
                {"dense.optimizer": dense, "dense.lr": rate, "table.rule": rows, "table.embed_rule": None},
            )
        )
    return Study("dense.optimizer+table.rule", tuple(variants))


def axis_of(study: Study) -> Axis | None:
    """Return the table of the course that a study belongs to: the one that knows all its settings."""
    return next((axis for axis in AXES if set(study.keys) <= set(axis.keys)), None)


def title(study: Study, language: Language) -> str:
    """Return the heading of a study: its settings, for the course and in Chinese after a title."""
    axis = axis_of(study)
    if axis is None or (language == "en" and not study.course):
        return study.key
    return f"{heading(axis.title, language)}{'：' if language == 'zh' else ': '}{study.key}"


def text_of(value: Any) -> str:
    """Format a value as a label."""
    if value is None:
        return "default"
    if isinstance(value, dict) and "name" in value:  # a plug-in
        return str(value["name"])
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
