"""What must be true of every model on real batches: missing, multi-valued and unseen values, from training to scores."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import clickfleet
from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.data.schema import Dense, History, Label, Schema, Slot
from models.test_models import SMALL, VARIANTS, find

SCHEMA = Schema(
    dense=(Dense("age"), Dense("price")),
    slots=(Slot("city"), Slot("tags", multi=True), Slot("seen", multi=True, pooling="mean"), Slot("shop")),
)


def table(rows: int = 1500, seed: int = 3) -> pa.Table:
    """Tag 1 is clicked; a fifth of everything is missing."""
    rng = np.random.default_rng(seed)
    tags = [rng.choice(8, n, replace=False) for n in rng.integers(0, 4, rows)]
    chance = np.array([0.95 if 1 in some else 0.05 for some in tags])
    holes = rng.random((4, rows)) < 0.2
    seen = [
        None if hole else rng.integers(0, 30, n) for hole, n in zip(holes[0], rng.integers(0, 5, rows), strict=True)
    ]
    return pa.table(
        {
            "label": (rng.random(rows) < chance).astype(np.int64),
            "age": pa.array(rng.normal(size=rows), mask=holes[1]),
            "price": pa.array(rng.random(rows)),
            "city": pa.array(rng.integers(0, 40, rows), mask=holes[2]),
            "tags": pa.array(tags),
            "seen": pa.array(seen, type=pa.list_(pa.int64())),
            "shop": pa.array(rng.integers(0, 10, rows), mask=holes[3]),
        }
    )


def with_label(given: pa.Table) -> pa.Table:
    return given.append_column("again", given["label"])


def rows(**columns: Any) -> pa.Table:
    usual: dict[str, Any] = {"age": 0.1, "price": 0.5, "city": 3, "tags": [2], "seen": [4, 5], "shop": 1}
    size = len(next(iter(columns.values())))
    kinds = {"age": pa.float64(), "price": pa.float64(), "tags": pa.list_(pa.int64()), "seen": pa.list_(pa.int64())}
    given = {name: columns.get(name, [value] * size) for name, value in usual.items()}
    return pa.table({name: pa.array(values, type=kinds.get(name, pa.int64())) for name, values in given.items()})


@pytest.mark.parametrize(("name", "paddlerec"), VARIANTS)
def test_missing_multi_valued_and_unseen_values(name: str, paddlerec: bool) -> None:
    kind, _, wide = name.partition("+")
    fields = find(name).Config.__dataclass_fields__
    settings = {
        key: list(value) if isinstance(value, tuple) else value for key, value in SMALL.items() if key in fields
    }
    config = {
        "model": {
            "name": kind,
            **settings,
            **({"paddlerec": True} if paddlerec else {}),
            **({"wide": True} if wide else {}),
        },
        "table": {"dim": 4, "rule": {"name": "adam", "lr": 0.02}},
        "dense": {"lr": 0.01},
        "data": {"batch_size": 50},
        "train": {"epochs": 3, "threads": 1, "deterministic": True},
    }
    schema = SCHEMA
    if find(name).needs_history:  # the events are shops; their column is also a slot
        schema = replace(SCHEMA, histories=(History("past", ("shop",), ("seen",)),))
    both = find(name).least_labels > 1
    if both:  # the second label is the first, seen through another column
        schema = replace(schema, labels=(Label("label"), Label("again", given="label" if kind == "esmm" else "")))
    train, test = (with_label(table(*some)) for some in ((), (800, 4)))
    done = clickfleet.train(config, data=train, schema=schema, quiet=True)
    assert done.evaluate(test)["auc"] > 0.85  # 0.95 is the best possible

    def predict(some: pa.Table) -> np.ndarray:
        scores = done.predict(some)
        return scores[:, 0] if both else scores

    before = len(done.learner.table)
    missing = predict(rows(city=[None], tags=[None], seen=[None], shop=[None], age=[None]))
    assert np.isfinite(missing).all()
    # a key nobody has seen is zeros, as is a slot without keys
    none, empty, unseen, several = predict(rows(tags=[None, [], [10**6], [10**6, 10**6 + 1]]))
    np.testing.assert_allclose([none, unseen, several], empty, rtol=1e-5)
    known, diluted = predict(rows(tags=[[1], [1, 10**6]]))
    assert known == pytest.approx(diluted, rel=1e-5)  # pooled by sum
    assert known > empty
    assert np.isfinite(predict(rows(city=[10**9, 10**9 + 1], shop=[10**9, None]))).all()
    assert len(done.learner.table) == before  # scoring makes no rows


def interacting(rows: int, seed: int) -> pa.Table:
    """Five slots; two of them decide together, and none alone."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 6, (rows, 5))
    chance = np.where((values[:, 0] + values[:, 3]) % 2 == 0, 0.9, 0.1)
    return pa.table(
        {"label": (rng.random(rows) < chance).astype(np.int64), **{f"s{i}": values[:, i] for i in range(5)}}
    )


def test_autofis_finds_the_pair_that_matters_and_inspect_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = Schema(slots=tuple(Slot(f"s{i}") for i in range(5)))
    config: dict[str, Any] = {
        "model": {"name": "autofis", "hidden": [8], "l1": 0.01},
        "table": {"dim": 4, "rule": {"name": "adam", "lr": 0.01}},
        "dense": {"lr": 0.003},
        "data": {"batch_size": 100},
        "train": {"epochs": 10, "threads": 1, "deterministic": True},
        "run": {"dir": str(tmp_path / "search"), "report": False},
    }
    searched = clickfleet.train(config, data=interacting(5000, 1), schema=schema, quiet=True)
    assert list(searched.learner.model.findings()) == ["s0*s3"]
    assert run(build(), ["inspect", str(tmp_path / "search")]) == 0
    assert "found by training, 1 in all: s0*s3" in capsys.readouterr().out
    config |= {"model": {"name": "autofis", "hidden": [8], "pairs": ["s0*s3"]}, "run": {"dir": str(tmp_path / "final")}}
    final = clickfleet.train(config, data=interacting(5000, 1), schema=schema, quiet=True)
    assert final.evaluate(interacting(2000, 2))["auc"] > 0.85  # 0.9 is the best possible


def test_a_last_batch_of_one_row_has_no_variance_but_trains() -> None:
    schema = Schema(slots=tuple(Slot(f"s{i}") for i in range(5)))
    config = {"model": {"name": "autofis", "hidden": [4]}, "table": {"dim": 4}, "data": {"batch_size": 10}}
    done = clickfleet.train(config, data=interacting(31, 1), schema=schema, quiet=True)
    assert done.rows == 31
