"""Synthetic logs: what a seed means, what the teacher promises, what lies where."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from clickfleet.data.logs.interests import CATEGORIES as ITEM_CATEGORIES
from clickfleet.data.logs.interests import InterestTeacher
from clickfleet.data.logs.purchases import PurchaseTeacher
from clickfleet.data.logs.synth import SynthOptions, auc, synth
from clickfleet.data.logs.target import FORMATS
from clickfleet.data.logs.teacher import BLOCK, CATEGORIES, MISSING, Teacher, pooled
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
    teacher = Teacher(7)
    scores, truth = [], []
    for block in range(3):
        features, labels, _ = teacher.draw(0, block)
        effects = teacher.effects.copy()
        effects[:, :, 0] += 0.5 * np.square(effects[:, :, 1:]).sum(2)
        effects[:, :, 1:] = 0
        scores.append(pooled(effects, features) + teacher.dense(features))
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


BOTH = {"histories": True, "labels": ("click", "buy")}


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow", "slots", "multislot", "feasign"])
@pytest.mark.parametrize("histories", [True, False])
def test_histories_and_labels_in_every_format(tmp_path: Path, kind: str, histories: bool) -> None:
    made = synth(
        tmp_path,
        SynthOptions(rows=3000, test_rows=500, format=kind, histories=histories, labels=("click", "buy"), parts=2),
    )
    schema = read_schema(tmp_path / "schema.yaml")
    batches = list(Reader(tmp_path / "train", schema, kind, batch_size=1000))
    labels = np.concatenate([batch.labels for batch in batches])
    teacher = SynthOptions(**BOTH | {"histories": histories}).teacher(0)  # type: ignore[arg-type]
    drawn = teacher.rows(0, 0, 2)
    np.testing.assert_array_equal(labels, drawn.labels[:, :3000].T)
    assert {name: task["rate"] for name, task in made["tasks"].items()} == {
        "click": pytest.approx(labels[:, 0].mean()),
        "buy": pytest.approx(labels[:, 1].mean()),
    }
    if histories:
        (history,) = schema.histories
        places = range(len(schema.slots), len(schema.key_columns))
        counts = np.concatenate([np.diff(batch.offsets).reshape(len(batch), -1) for batch in batches])
        wanted = drawn.columns.column("clicked_item").value_lengths().to_numpy()[:3000]
        assert history.max == 50
        assert all((counts[:, place] == wanted).all() for place in places)
        assert all(batch.groups is not None for batch in batches)


def test_the_default_format_holds_the_columns(tmp_path: Path) -> None:
    assert SynthOptions().format == "criteo"
    assert SynthOptions(histories=True).format == SynthOptions(labels=("click", "buy")).format == "csv"
    with pytest.raises(ConfigError, match="criteo cannot store histories"):
        synth(tmp_path / "a", SynthOptions(rows=10, format="criteo", histories=True))
    with pytest.raises(ConfigError, match="criteo cannot store several labels"):
        synth(tmp_path / "b", SynthOptions(rows=10, format="criteo", labels=("click", "buy")))


@pytest.mark.parametrize("labels", [(), ("buy",), ("click", "sell"), ("buy", "click")])
def test_unknown_labels_are_refused(labels: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="choose click or click,buy"):
        SynthOptions(labels=labels)


@pytest.mark.parametrize("teacher", [InterestTeacher(3), PurchaseTeacher(3)])
def test_a_second_label_changes_nothing_of_the_first(teacher: InterestTeacher) -> None:
    one, two = teacher.rows(0, 1, 1), teacher.rows(0, 1, 2)
    assert one.columns.equals(two.columns)
    np.testing.assert_array_equal(one.labels[0], two.labels[0])


@pytest.mark.parametrize("teacher", [InterestTeacher(1), InterestTeacher(7), PurchaseTeacher(1), PurchaseTeacher(7)])
def test_purchases_have_their_probability_and_a_bias(teacher: InterestTeacher) -> None:
    drawn = [teacher.rows(0, block, 2) for block in range(8)]
    labels, probability = (
        np.concatenate(parts, 1) for parts in ([d.labels for d in drawn], [d.probability for d in drawn])
    )
    click, buy = labels == 1
    assert not (buy & ~click).any()
    assert abs(buy[click].mean() - 0.2) < 0.02
    for low, high in ((0.05, 0.15), (0.3, 0.6)):
        chosen = click & (probability[1] > low) & (probability[1] < high)
        assert abs(buy[chosen].mean() - probability[1, chosen].mean()) < 0.03
    assert abs(probability[1, click].mean() - probability[1].mean()) > 0.02  # clicked rows are not like all rows


def test_what_draws_clicks_puts_buyers_off() -> None:
    drawn = [PurchaseTeacher(7).rows(0, block, 2) for block in range(4)]
    click, buy = np.log(1 / np.concatenate([d.probability for d in drawn], 1) - 1) * -1
    slope, _ = np.polyfit(click, buy, 1)
    assert -1.2 < slope < -0.8
    assert np.corrcoef(click, click + buy)[0, 1] ** 2 < 0.05  # over all rows, it decides next to nothing
    assert drawn[0].columns.schema.names == [*InterestTeacher(7).rows(0, 0).columns.schema.names[:-2]]


def test_interests_are_in_the_history_and_nowhere_else() -> None:
    """Without the past events the best order of rows is much worse; the number of events of the category explains it."""
    teacher = InterestTeacher(7)
    columns = pa.Table.from_batches([teacher.rows(0, block).columns for block in range(4)])
    drawn = [teacher.rows(0, block) for block in range(4)]
    clicks, probability = (
        np.concatenate(parts, 1)[0] for parts in ([d.labels for d in drawn], [d.probability for d in drawn])
    )
    category = columns["category"].to_pylist()
    matches = np.array(
        [past.count(c) for past, c in zip(columns["clicked_category"].to_pylist(), category, strict=True)]
    )
    logit = np.log(probability / (1 - probability))
    interest = 1 - 0.5**matches
    slope, _ = np.polyfit(interest, logit, 1)
    assert 3.5 < slope < 4.5
    assert auc(probability, clicks) > auc((logit - 4.0 * interest).astype(np.float32), clicks) + 0.1
    items = columns["clicked_item"].combine_chunks().flatten().to_numpy()
    assert (items % ITEM_CATEGORIES == columns["clicked_category"].combine_chunks().flatten().to_numpy()).all()
    four = columns.slice(0, 4)  # one visit shows four items to a user with one history
    assert len(set(map(tuple, four["clicked_item"].to_pylist()))) == len(set(four["user"].to_pylist())) == 1


@pytest.mark.parametrize("teacher", [InterestTeacher, PurchaseTeacher])
def test_items_of_a_shop_are_replaced_day_by_day(teacher: type[InterestTeacher]) -> None:
    days = [set(teacher(7, day, 0.3).rows(0, 0).columns.column("item").to_pylist()) for day in range(3)]
    shared = [len(days[0] & days[day]) / len(days[0]) for day in (1, 2)]
    assert 0.9 > shared[0] > shared[1] + 0.1
