"""Rows that correct earlier ones: in a batch, in files for a cluster, and in files of joined rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from clickfleet.data.batch import Batch, concatenate
from clickfleet.data.corrections import Corrections
from clickfleet.data.events import JOINED
from clickfleet.data.feed_files import write_rows
from clickfleet.data.formats.joined import Joined, JoinedReader, on_time_of, with_on_time
from clickfleet.data.memory import Feed
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Label, Schema, Slot
from clickfleet.data.split import RowSplit
from clickfleet.errors import ConfigError, DataError

NAN = np.nan
ONE = Schema(slots=(Slot("ad"),), label="click")
TWO = Schema(slots=(Slot("ad"),), labels=(Label("click"), Label("buy", given="click")))


def floats(*values: Any) -> Any:
    return np.array(values, np.float32)


def batch(labels: Any, previous: Any = None, on_time: Any = None) -> Batch:
    rows = len(labels)
    keys = np.arange(rows, dtype=np.uint64)
    return Batch(np.zeros((rows, 0), np.float32), keys, 1, labels=labels, previous=previous, on_time=on_time)


def joined(*rows: tuple[dict[str, float], dict[str, float] | None], ad: str = "a") -> pa.RecordBatch:
    """Joined rows: labels, and those that they replace."""
    plain = [
        {
            "kind": "label" if previous is None else "correction",
            "request": f"r{i}",
            "item": "0",
            "labels": list(labels.items()),
            "previous": None if previous is None else list(previous.items()),
            "shown": 0,
            "known": 5_000_000,
            "features": f'{{"ad": "{ad}{i}"}}',
        }
        for i, (labels, previous) in enumerate(rows)
    ]
    return pa.RecordBatch.from_pylist(plain, schema=JOINED)


def test_a_correction_is_no_show_and_adds_what_changed() -> None:
    late = Corrections(floats([1, 1], [1, NAN], [0, 0], [1, 1]), floats([0, 0], [NAN, NAN], [1, NAN], [NAN, 1]))
    assert late.rows.tolist() == [True, False, True, True]
    assert late.shows(None).tolist() == [0, 1, 0, 0]
    assert late.shows(floats(3, 4, 5, 6)).tolist() == [0, 4, 0, 0]
    assert late.clicks(None).tolist() == [1, 1, -1, 1], "of an unknown click, nothing was counted"
    assert np.array_equal(late.judged(), floats([NAN, NAN], [1, NAN], [NAN, 0], [1, NAN]), equal_nan=True)


def test_batches_with_and_without_corrections_become_one() -> None:
    plain, late = batch(floats(1, 0)), batch(floats(1), floats(0), floats(0.5))
    both = concatenate([plain, late])
    assert np.array_equal(both.previous, floats(NAN, NAN, 0), equal_nan=True)  # type: ignore[arg-type]
    assert both.on_time is not None
    assert both.on_time.tolist() == [1, 1, 0.5]
    assert [column.tolist() for column in both.statistics() if column is not None] == [[1, 1, 0], [1, 0, 1]]
    assert both[2:].previous.tolist() == [0]  # type: ignore[union-attr]
    assert both.take(np.array([2, 0])).corrections.rows.tolist() == [True, False]  # type: ignore[union-attr]
    assert plain.corrections is None
    assert concatenate([plain, plain]).previous is None, "ordinary batches have no such column"


@pytest.mark.parametrize("labels", [floats(1, 0, 1), floats([1, 1], [0, NAN], [1, 0])])
def test_files_for_a_cluster_keep_corrections(tmp_path: Path, labels: Any) -> None:
    previous = np.full_like(labels, NAN)
    previous[2] = 0
    parts = [batch(labels[:2]), batch(labels[2:], previous[2:], np.ones_like(labels[2:]))]
    read = concatenate(list(write_rows(parts, tmp_path)))
    assert np.array_equal(read.previous, previous, equal_nan=True)  # type: ignore[arg-type]
    assert np.array_equal(read.labels, labels, equal_nan=True)  # type: ignore[arg-type]


def test_a_batch_whose_previous_labels_have_another_shape_is_refused() -> None:
    with pytest.raises(DataError, match="previous of the shape"):
        list(Feed(batch(floats(1, 0), floats([0, 0], [0, 0])), ONE))


def test_joined_rows_name_the_labels_that_they_replace() -> None:
    rows = joined(({"click": 1}, None), ({"click": 1}, {"click": 0}), ({"click": 1, "buy": 0}, {"buy": 1}))
    (one, two) = (JoinedReader(schema).parse(rows, "stop").batch for schema in (ONE, TWO))
    assert np.array_equal(one.previous, floats(NAN, 0, NAN), equal_nan=True)  # type: ignore[arg-type]
    assert one.statistics()[0].tolist() == [1, 0, 1], "the first row with the only label of a schema"  # type: ignore[union-attr]
    assert np.array_equal(two.previous, floats([NAN, NAN], [0, NAN], [NAN, 1]), equal_nan=True)  # type: ignore[arg-type]
    plain = JoinedReader(ONE).parse(joined(({"click": 1}, None)), "stop").batch
    assert plain.previous is None
    assert plain.on_time is None


def test_an_earlier_row_that_was_bad_is_not_replaced() -> None:
    parsed = JoinedReader(ONE).parse(joined(({"click": 7}, None), ({"click": 1}, {"click": 7})), "all")
    assert (len(parsed.batch), parsed.bad_lines) == (1, 1)
    assert parsed.batch.previous is None


def test_a_file_tells_how_many_labels_come_on_time(tmp_path: Path) -> None:
    rows, schema = joined(({"click": 0, "buy": 0}, None)), with_on_time({"click": 0.9, "buy": 0.25})
    with pa.OSFile(str(tmp_path / "part-0.arrow"), "wb") as sink, pa.ipc.new_file(sink, schema) as out:
        out.write_batch(rows)
    weighted = Schema(slots=TWO.slots, labels=(Label("click"), Label("buy", given="click", late="weight")))
    (read,) = Reader(str(tmp_path / "part-0.arrow"), weighted, format="joined")
    assert read.on_time is not None
    assert read.on_time.tolist() == [[1.0, 0.25]], "only of labels that ask for it"
    (read,) = Reader(str(tmp_path / "part-0.arrow"), TWO, format="joined")
    assert read.on_time is None


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b'{"buy": []}', b'{"buy": null}', b"\xff", b'{"buy": 7}', b'{"buy": NaN}']
)
def test_shares_that_cannot_be_are_left_out(text: bytes) -> None:
    found = on_time_of(JOINED.with_metadata({b"on_time": text}))
    assert all(0 <= share <= 1 for share in found.values())


def test_late_is_checked_and_does_not_change_the_meaning_of_rows() -> None:
    with pytest.raises(ConfigError, match="unknown late 'later'"):
        Label("buy", late="later")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="late: weight is defined for the loss log"):
        Label("dwell", loss="mse", late="weight")
    plain = {"label": "click", "slots": ["ad"]}
    late = Schema.from_dict({"labels": {"click": {"late": "none"}}, "slots": ["ad"]})
    assert late.tasks[0].late == "none"
    assert Schema.from_dict(late.to_dict()) == late
    assert late.hash == Schema.from_dict(plain).hash
    assert not late.diff(Schema.from_dict(plain))
    with pytest.raises(ConfigError, match="unknown key late"):
        Schema.from_dict({**plain, "late": "none"})


def test_validation_never_parts_a_correction_from_its_show(tmp_path: Path) -> None:
    late = batch(floats(1, 0), floats(0, NAN))
    with pytest.raises(DataError, match="would part corrections from their shows"):
        RowSplit(0.5, 7).aside("rows.arrow", 0, late)
    late.times = np.array([5, 6])
    assert RowSplit(0.5, 7, since=6).aside("rows.arrow", 0, late).tolist() == [False, True]
    assert Joined.corrects, "so validation of joined rows is by time, even if the schema names none"
