"""The map from a network's scores to served ones: strictly increasing within a slice, finite, and read as it was written."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickfleet.data.batch import Batch
from clickfleet.data.schema import Schema, Slot
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.store.calibration import Calibration, slice_keys, slot_places

numbers = st.floats(-10, 10).map(lambda x: round(x, 4))


@st.composite
def calibrations(draw: st.DrawFn) -> Calibration:
    count = draw(st.integers(1, 6))
    x = sorted(draw(st.sets(numbers, min_size=count, max_size=count)))
    y = sorted(draw(st.sets(numbers, min_size=count, max_size=count)))
    keys = draw(st.sets(st.integers(0, 2**64 - 1), max_size=5))
    return Calibration(("ad",), tuple(zip(x, y, strict=True)), {key: draw(numbers) for key in keys})


def rows(count: int, key: int) -> Batch:
    return Batch(np.zeros((count, 0), np.float32), np.full(count, key, np.uint64), 1)


@given(calibration=calibrations(), key=st.integers(0, 2**64 - 1))
def test_a_map_is_monotone_and_finite_and_survives_its_file(calibration: Calibration, key: int) -> None:
    raw = np.concatenate([[0.0], np.sort(np.random.default_rng(key % 100).random(50)), [1.0]]).astype(np.float32)
    for one in [key, *(calibration.shifts or {})]:
        scores = calibration.apply(raw, rows(len(raw), one), (0,))
        assert np.isfinite(scores).all()
        assert ((scores >= 0) & (scores <= 1)).all()
        assert (np.diff(scores) >= 0).all()
    again = Calibration.from_bytes(calibration.to_bytes(), "here")
    assert np.array_equal(
        again.apply(raw, rows(len(raw), key), (0,)), calibration.apply(raw, rows(len(raw), key), (0,))
    )
    assert again.to_bytes() == calibration.to_bytes()


def test_a_score_that_is_no_number_stays_none() -> None:
    found = Calibration((), ((0.0, 0.1),)).apply(np.array([np.nan, 0.5], np.float32), rows(2, 1), None)
    assert np.isnan(found).tolist() == [True, False]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{}", b'{"slots": [], "curve": [], "slices": {}}',
        b'{"slots": [], "curve": [[0, 0], [0, 1]], "slices": {}}',
        b'{"slots": [], "curve": [[0, 1], [1, 0]], "slices": {}}',
        b'{"slots": [], "curve": [[0, NaN]], "slices": {}}',
        b'{"slots": [], "curve": [[0, 0]], "slices": {"x": 1}}',
        b'{"slots": [], "curve": [[0, 0]], "slices": {"-1": 1}}',
        b'{"slots": [], "curve": [[0, 0]], "slices": {"7": Infinity}}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_map_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="is not a calibration"):
        Calibration.from_bytes(content, "calibration.json")


def test_slices_are_values_or_combinations_of_them() -> None:
    ragged = Batch(
        np.zeros((3, 0), np.float32), np.array([7, 8, 8, 9], np.uint64), 2, offsets=np.array([0, 1, 2, 2, 3, 4, 4])
    )
    assert slice_keys(ragged, (0,)).tolist() == [7, 0, 9]  # the second row has no value
    pairs = slice_keys(ragged, (0, 1))
    assert len(set(pairs.tolist())) == 3
    assert slice_keys(ragged, (1, 0)).tolist() != pairs.tolist()


def test_slots_to_calibrate_by_must_exist_and_have_one_value() -> None:
    schema = Schema(slots=(Slot("ad"), Slot("tags", multi=True)))
    assert slot_places(schema, ["ad"]) == (0,)
    for name, words in {"adv": "unknown slot 'adv'", "tags": "several values"}.items():
        with pytest.raises(ConfigError, match=words):
            slot_places(schema, [name])
