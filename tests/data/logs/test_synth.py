"""Synthetic logs: what a seed means, what the teacher promises, what lies where."""

from pathlib import Path

import numpy as np
import pytest

from clickfleet.data.logs.synth import BLOCK, CATEGORIES, MISSING, SynthOptions, Teacher, auc, synth
from clickfleet.data.logs.target import FORMATS
from clickfleet.data.reader import Reader
from clickfleet.data.schema import preset, read_schema
from clickfleet.errors import ConfigError, DataError


def text(folder: Path) -> bytes:
    files = [path for path in folder.iterdir() if path.name.startswith("part-")]
    return b"".join(path.read_bytes() for path in sorted(files, key=lambda path: int(path.stem.split("-")[1])))


def test_rows_depend_on_the_seed_alone(tmp_path: Path) -> None:
    rows = BLOCK + 500
    one = synth(tmp_path / "one", SynthOptions(rows=rows, test_rows=700, seed=3), threads=1)
    cut = synth(tmp_path / "cut", SynthOptions(rows=rows, test_rows=700, seed=3, parts=7), threads=3)
    synth(tmp_path / "other", SynthOptions(rows=rows, test_rows=700, seed=4))
    assert text(tmp_path / "one/train") == text(tmp_path / "cut/train")
    assert text(tmp_path / "one/test") == text(tmp_path / "cut/test")
    assert {**one, "out": ""} == {**cut, "out": ""}
    assert text(tmp_path / "one/train") != text(tmp_path / "other/train")
    assert len(list((tmp_path / "cut/train").iterdir())) == 7
    few = synth(tmp_path / "few", SynthOptions(rows=1000, test_rows=0, seed=3))
    assert text(tmp_path / "one/train").startswith(text(tmp_path / "few/train"))
    assert few["rows"] == 1000


@pytest.mark.parametrize("seed", [1, 7, 12])
def test_the_teacher_keeps_its_promises(seed: int) -> None:
    features, labels, probability = zip(*(Teacher(seed).draw(0, block) for block in range(4)), strict=True)
    y, p = np.concatenate(labels), np.concatenate(probability)
    assert abs(y.mean() - 0.25) < 0.02
    assert 0.825 < auc(p, y) < 0.855
    for low, high in ((0.05, 0.15), (0.4, 0.6), (0.7, 0.9)):  # the probabilities mean what they say
        chosen = (p > low) & (p < high)
        assert abs(y[chosen].mean() - p[chosen].mean()) < 0.03
    missing = np.concatenate([f.missing for f in features], axis=1).mean(1)
    np.testing.assert_allclose(missing, MISSING, atol=0.01)
    for slot, category in enumerate(CATEGORIES):
        values, counts = np.unique(np.concatenate([f.values[slot] for f in features]), return_counts=True)
        assert len(values) <= category.size
        assert counts.max() > 5 * counts.mean() or category.size < 30  # heavy-tailed


def test_pairs_matter_and_no_linear_model_sees_them() -> None:
    """With the pairs taken out of the logit, the order of rows is clearly worse."""
    from clickfleet.data.logs import synth as world

    teacher = Teacher(7)
    scores, truth = [], []
    for block in range(3):
        features, labels, _ = teacher.draw(0, block)
        effects = teacher.effects.copy()
        effects[:, :, 0] += 0.5 * np.square(effects[:, :, 1:]).sum(2)
        effects[:, :, 1:] = 0
        scores.append(world.pooled(effects, features) + teacher.dense(features))
        truth.append(labels)
    without = auc(np.concatenate(scores), np.concatenate(truth))
    assert 0.75 < without < 0.82


def test_auc_counts_pairs() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 9, 60).astype(np.float32), rng.integers(0, 2, 60).astype(np.int8)
    ones, zeros = scores[labels == 1][:, None], scores[labels == 0][None]
    assert auc(scores, labels) == pytest.approx(((ones > zeros) + 0.5 * (ones == zeros)).mean())


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_holds_the_same_rows(tmp_path: Path, format: str) -> None:  # noqa: A002
    options = SynthOptions(rows=3000, test_rows=500, format=format, parts=2)
    made = synth(tmp_path / "log", options)
    described = tmp_path / "log/schema.yaml"
    schema = read_schema(described) if described.exists() else preset("criteo")
    batches = list(Reader(tmp_path / "log/train", schema, format, batch_size=1000))
    labels = np.concatenate([batch.labels for batch in batches if batch.labels is not None])
    assert len(labels) == made["rows"] == 3000
    assert labels.mean() == pytest.approx(made["ctr"])
    _, truth, _ = Teacher(7).draw(0, 0)
    assert (labels == truth[:3000]).all()


def test_days_have_timed_folders_with_done_files_and_drift(tmp_path: Path) -> None:
    options = SynthOptions(
        rows=6000, test_rows=1000, days=3, split_interval_min=720, parts=2, start_day="20260130", drift=0.5
    )
    made = synth(tmp_path / "log", options)
    assert made["rows"] == 6000
    folders = sorted(str(path.relative_to(tmp_path / "log")) for path in (tmp_path / "log").glob("2026*/*"))
    assert folders == [f"2026{day}/{time}" for day in ("0130", "0131", "0201") for time in ("0000", "1200")]
    for folder in folders:
        names = sorted(path.name for path in (tmp_path / "log" / folder).iterdir())
        assert names == ["_DONE", "part-0", "part-1"]
        assert (tmp_path / "log" / folder / "_DONE").stat().st_size == 0
    top = [_values(tmp_path / "log" / f"2026{day}", 26) for day in ("0130", "0131", "0201")]
    shared = [len(top[0] & top[day]) / len(top[0]) for day in (1, 2)]
    assert shared[0] > shared[1] + 0.02  # ids die day by day
    still = synth(
        tmp_path / "still", SynthOptions(rows=4000, test_rows=100, days=2, split_interval_min=1440, drift=0.0)
    )
    assert still["rows"] == 4000
    assert 0.2 < made["ctr"] < 0.3


def _values(day: Path, column: int) -> set[bytes]:
    """The values of C13, a column without missing ones and with thousands of ids."""
    return {line.split(b"\t")[column] for path in day.glob("*/part-*") for line in path.read_bytes().splitlines()}


def test_what_is_there_is_not_mixed_with_what_is_new(tmp_path: Path) -> None:
    synth(tmp_path, SynthOptions(rows=300, test_rows=0, parts=3))
    with pytest.raises(DataError, match="is not empty"):
        synth(tmp_path, SynthOptions(rows=100, test_rows=0))
    synth(tmp_path, SynthOptions(rows=100, test_rows=0), overwrite=True)
    assert [path.name for path in (tmp_path / "train").iterdir()] == ["part-0"]
    (tmp_path / "synth.json").unlink()
    with pytest.raises(DataError, match="new or empty"):
        synth(tmp_path, SynthOptions(rows=100, test_rows=0), overwrite=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 0},
        {"drift": 0.1},
        {"drift": 2.0, "days": 1},
        {"start_day": "2026"},
        {"split_interval_min": 0},
        {"parts": 0},
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SynthOptions(**wrong)  # type: ignore[arg-type]


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose one of"):
        synth(tmp_path / "x", SynthOptions(rows=10, format="tfrecord"))
