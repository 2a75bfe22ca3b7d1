"""Small formats of rows: what rounding changes, what it never changes, and what is refused."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from clickfleet.errors import CheckpointError
from clickfleet.store import row_format
from clickfleet.store.row_format import FORMATS, RowFormat
from clickfleet.store.table import NO_SLOT

SMALL = FORMATS[1:]
NUMBERS = st.floats(-30_000, 30_000, width=32)


def columns(rows: np.ndarray) -> dict[str, np.ndarray]:
    return {"key": np.arange(len(rows)).astype(np.uint64), "embed_w": rows[:, 0], "embedx": rows[:, 1:].reshape(-1)}


def there_and_back(form: RowFormat, rows: np.ndarray) -> np.ndarray:
    width = rows.shape[1] - 1
    return row_format.unpack(form, row_format.pack(form, columns(rows), width), width)


@pytest.mark.parametrize("form", SMALL)
@given(rows=arrays.arrays(np.float32, st.tuples(st.integers(0, 4), st.integers(1, 20)), elements=NUMBERS))
def test_rounding_is_near_and_happens_once(form: RowFormat, rows: np.ndarray) -> None:
    width = rows.shape[1] - 1
    records = row_format.pack(form, columns(rows), width)
    assert records.shape == (len(rows), row_format.record_bytes(form, width))
    found = row_format.unpack(form, records, width)
    np.testing.assert_array_equal(found[:, 0], rows[:, 0].astype(np.float16).astype(np.float32))
    if form == "float16" or not width:
        np.testing.assert_array_equal(found, rows.astype(np.float16).astype(np.float32))
    elif len(rows):
        most = np.abs(rows[:, 1:]).max(axis=1, keepdims=True)
        assert (np.abs(found[:, 1:] - rows[:, 1:]) <= np.maximum(most / 112, 2.0**-24)).all()
    np.testing.assert_array_equal(row_format.pack(form, columns(found), width), records)
    np.testing.assert_array_equal(row_format.round_rows(form, rows.copy()), found)


def test_factors_of_int8_are_bytes_times_a_scale() -> None:
    rows = np.array([[0.5, 127, -64, 0], [-3, 0, 0, 0], [1, 2.0**-30, 0, 0], [0, 1e-3, -5e-4, 2.5e-4]], np.float32)
    found = there_and_back("int8", rows)
    np.testing.assert_array_equal(found[:2], rows[:2])
    assert found[2].tolist() == [1, 0, 0, 0]  # below half of the least scale
    np.testing.assert_allclose(found[3, 1:], rows[3, 1:], rtol=0, atol=1e-3 / 224)
    assert not np.signbit(found[1, 1:]).any()


@pytest.mark.parametrize("form", SMALL)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e6])
@pytest.mark.parametrize("place", [0, 2])
def test_a_number_that_a_format_cannot_hold_is_refused(form: RowFormat, wrong: float, place: int) -> None:
    rows = np.ones((3, 4), np.float32)
    rows[1, place] = wrong
    with pytest.raises(
        CheckpointError, match=rf"the row of key 1 holds {wrong:g}, which {form} cannot hold".replace("+", r"\+")
    ):
        row_format.pack(form, columns(rows), 3)
    with pytest.raises(CheckpointError, match=f"which {form} cannot hold"):
        row_format.round_rows(form, rows)


def test_slots_take_a_byte_where_they_fit() -> None:
    keys, records = np.array([1, 2, 3], np.uint64), np.zeros((3, 13), np.uint8)
    slots = np.array([0, 254, NO_SLOT], np.uint16)
    for known, kind in ((26, pa.uint8()), (255, pa.uint8()), (256, pa.uint16())):
        batch = row_format.record_batch(row_format.schema("int8", 10, known), keys, slots, records)
        assert batch.column("slot").type == kind
        assert batch.nbytes == 3 * row_format.file_bytes("int8", 10, known)
    with pytest.raises(CheckpointError, match="slot 554"):
        row_format.record_batch(row_format.schema("int8", 10, 26), keys, slots + np.uint16(300), records)


def test_files_say_their_format(tmp_path: Path) -> None:
    keys, rows = np.array([5, 9], np.uint64), np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    for form in SMALL:
        schema = row_format.schema(form, 2)
        batch = row_format.record_batch(schema, keys, np.array([1, NO_SLOT]), row_format.pack(form, columns(rows), 2))
        with pa.OSFile(str(tmp_path / form), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(batch)
        assert (row_format.format_of(schema, 2), row_format.format_of(schema, 3)) == (form, None)
        (part,) = row_format.read_records(tmp_path / form, form, 2)
        assert (part.keys.tolist(), part.slots.tolist()) == ([5, 9], [1, NO_SLOT])
        floats = row_format.as_floats(form, part, 2)
        assert floats.schema == row_format.ROWS
        np.testing.assert_allclose(np.array(floats["embedx"].to_pylist()), rows[:, 1:], rtol=1 / 112)
    with pytest.raises(CheckpointError, match="does not hold rows in int8 with 2 factors"):
        list(row_format.read_records(tmp_path / "float16", "int8", 2))
    (tmp_path / "int8").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="is broken"):
        list(row_format.read_records(tmp_path / "int8", "int8", 2))
