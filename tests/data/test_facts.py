import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from clickfleet.config.load import load
from clickfleet.data import facts
from clickfleet.data.facts import LogFacts, measure
from clickfleet.data.schema import Dense, Schema, Slot

SCHEMA = Schema(dense=(Dense("x"),), slots=(Slot("a"), Slot("b")))


def frame(rows: int) -> pd.DataFrame:
    label = (np.arange(rows) % 4 == 0).astype(int)
    return pd.DataFrame({"label": label, "x": 1.5, "a": np.arange(rows) % 10, "b": np.arange(rows) % 3})


def test_a_small_frame_is_measured_exactly() -> None:
    found = measure(load(), frame(400), SCHEMA)
    assert found == LogFacts(400, True, 1, 2, positives=0.25, ids=13, shows_per_id=800 / 13)
    assert found.events == 100


def test_files_of_any_kind_are_measured(tmp_path: Path) -> None:
    rows = frame(3000)
    rows.to_csv(tmp_path / "a.csv", index=False)
    rows.to_parquet(tmp_path / "b.parquet")
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    for name, form in (("a.csv", "csv"), ("b.parquet", "parquet"), ("c.csv.gz", "csv")):
        found = measure(load(None, [f"data.format={form}"]), [str(tmp_path / name)], SCHEMA)
        assert found is not None
        assert (found.rows, found.exact) == (3000, True)


def test_rows_beyond_the_sample_are_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "SAMPLE_ROWS", 2000)
    frame(30_000).to_csv(tmp_path / "a.csv", index=False)
    frame(30_000).to_parquet(tmp_path / "b.parquet")
    in_csv = measure(load(None, ["data.format=csv"]), [str(tmp_path / "a.csv")] * 2, SCHEMA)
    in_parquet = measure(load(None, ["data.format=parquet"]), [str(tmp_path / "b.parquet")], SCHEMA)
    assert in_csv is not None
    assert not in_csv.exact
    assert in_csv.rows == pytest.approx(60_000, rel=0.05)
    assert in_parquet is not None
    assert in_parquet.rows == 30_000
    in_memory = measure(load(), frame(30_000), SCHEMA)
    assert in_memory is not None
    assert in_memory.rows == 30_000


def test_an_iterator_has_no_size() -> None:
    assert measure(load(), iter([{"label": 1, "x": 1.0, "a": 1, "b": 2}]), SCHEMA) is None


def test_an_empty_file_has_no_size(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,x,a,b\n")
    assert measure(load(None, ["data.format=csv"]), [str(tmp_path / "a.csv")], SCHEMA) is None
