import statistics
import threading

import numpy as np
import pytest

from clickfleet import Table
from clickfleet.errors import ConfigError, TableError
from clickfleet.store.rules import Adagrad, Sgd, rule
from clickfleet.store.table import SlotRows

F = np.float32


def keys(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def ones(n: int, factors: int) -> np.ndarray:
    return np.ones((n, 1 + factors), F)


def test_keys_span_all_64_bits():
    table = Table(factors=2)
    extreme = keys(0, 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1)
    table.push(extreme, ones(6, 2))
    assert len(table) == 6
    assert (table.pull(extreme, training=False)[:, 0] != 0).all()


def test_initial_values_are_frozen():
    """Golden: checkpoints of other machines and shards depend on them."""
    found = {
        init: Table(factors=3, init=init, embed_init=init, seed=7).pull(keys(1, 2**64 - 1)).tolist()
        for init in ("zero", "uniform(-0.5, 1)", "normal(0.1)", "truncated(0.1)")
    }
    expected = {
        "zero": [[0, 0, 0, 0], [0, 0, 0, 0]],
        "uniform(-0.5, 1)": [
            [0.01423204, -0.09195518, -0.39958587, -0.41260764],
            [0.26266372, -0.20799112, 0.56720459, 0.48418242],
        ],
        "normal(0.1)": [
            [-0.04047751, -0.06066852, -0.14989543, -0.15695356],
            [0.00211638, -0.08608054, 0.05576836, 0.04019013],
        ],
        "truncated(0.1)": [
            [-0.03853932, -0.05757188, -0.13616957, -0.1416184],
            [0.00202007, -0.08114102, 0.05297225, 0.03826709],
        ],
    }
    for init, values in expected.items():
        np.testing.assert_allclose(found[init], values, atol=1e-6, err_msg=init)


@pytest.mark.parametrize(
    ("init", "mean", "deviation", "low", "high"),
    [("uniform(-1, 3)", 1, 4 / 12**0.5, -1, 3), ("normal(2)", 0, 2, -12, 12), ("truncated(2)", 0, 2 * 0.8796, -4, 4)],
)
def test_initial_values_have_their_distribution(init, mean, deviation, low, high):
    values = (
        Table(factors=15, init=init, rule=rule("sgd", bounds=(-99, 99)))
        .pull(np.arange(20000, dtype=np.uint64))[:, 1:]
        .ravel()
    )
    assert values.min() >= low
    assert values.max() <= high
    assert abs(values.mean() - mean) < 0.02
    assert abs(values.std() - deviation) < 0.02


def test_normal_initial_values_are_the_quantiles_of_the_standard_library():
    """The same bits as uniform and as normal: the second must be the first's quantile."""
    some = np.arange(500, dtype=np.uint64)
    uniform = Table(factors=4, init="uniform(0, 1)").pull(some)[:, 1:].ravel()
    normal = Table(factors=4, init="normal(1)").pull(some)[:, 1:].ravel()
    bits = 2.0**-24  # uniform keeps 24 bits
    below = [statistics.NormalDist().inv_cdf(max(float(u), 1e-12)) for u in uniform]
    above = [statistics.NormalDist().inv_cdf(min(float(u) + bits, 1 - 1e-12)) for u in uniform]
    assert all(a - 1e-5 <= x <= b + 1e-5 for a, x, b in zip(below, normal, above, strict=True))


def test_initial_values_do_not_depend_on_order_or_neighbours():
    some = np.random.default_rng(1).permutation(np.arange(1000, dtype=np.uint64))
    one, other = Table(factors=3, seed=5), Table(factors=3, seed=5)
    other.push(some[500:], np.zeros((500, 4), F))
    np.testing.assert_array_equal(one.pull(some)[np.argsort(some)], other.pull(np.sort(some)))
    assert (one.pull(some) != Table(factors=3, seed=6).pull(some))[:, 1:].any()


def test_pull_creates_nothing_and_evaluation_reads_zeros():
    table = Table(factors=2, embed_init="uniform(0.1, 0.2)")
    assert (table.pull(keys(5))[0, 0]) > 0
    assert not table.pull(keys(5), training=False).any()
    assert len(table) == 0


def test_short_rows_read_zeros_and_the_admitting_push_does_not_train_factors():
    table = Table(factors=2, admission="count(3)", init="uniform(1, 1)", rule=Sgd(lr=1.0), embed_init="uniform(2, 2)")
    for _ in range(3):
        assert not table.pull(keys(9))[0, 1:].any()
        table.push(keys(9), ones(1, 2))
    assert table.stats()["full_rows"] == 1
    np.testing.assert_array_equal(
        table.pull(keys(9))[0], [-1, 1, 1]
    )  # embed_w from the first push on, factors as they start
    table.push(keys(9), ones(1, 2))
    np.testing.assert_array_equal(table.pull(keys(9))[0], [-2, 0, 0])


def test_admitted_at_birth_the_first_push_trains_the_whole_row():
    table = Table(factors=2, init="uniform(1, 1)", rule=Sgd(lr=1.0))
    np.testing.assert_array_equal(table.pull(keys(9))[0], [0, 1, 1])
    table.push(keys(9), ones(1, 2))
    np.testing.assert_array_equal(table.pull(keys(9))[0], [-1, 0, 0])


def test_online_preset_admits_by_score():
    table = Table(factors=1, preset="online")
    table.push(keys(1, 2), ones(2, 1), show=np.array([99, 9], F), click=np.array([0, 9], F))
    assert table.stats()["full_rows"] == 0  # 9.9 and 9
    table.push(keys(1, 2), ones(2, 1), show=np.array([1, 1], F), click=np.array([0, 1], F))
    assert table.stats()["full_rows"] == 2


def test_probability_admission_counts_shows_however_they_are_spread():
    many = np.arange(20000, dtype=np.uint64)
    at_once, one_by_one = (Table(factors=1, admission="probability(0.1)", seed=3) for _ in range(2))
    at_once.push(many, ones(len(many), 1), show=np.full(len(many), 4, F))
    for _ in range(4):
        one_by_one.push(many, ones(len(many), 1))
    expected = 1 - 0.9**4
    for table in (at_once, one_by_one):
        assert abs(table.stats()["full_rows"] / len(many) - expected) < 0.01


@pytest.mark.parametrize(("scale", "divisor"), [("show", 4), ("batch", 8), ("none", 1)])
def test_gradients_are_scaled(scale, divisor):
    table = Table(factors=1, rule=rule("sgd", lr=1.0, scale=scale), init="zero")
    table.push(keys(1), np.full((1, 2), 8, F), show=np.array([4], F), n=8)
    np.testing.assert_array_equal(table.pull(keys(1))[0], [-8 / divisor] * 2)


@pytest.mark.parametrize("divisor", [0.0, -3.0, float("nan")])
def test_a_divisor_that_is_not_positive_counts_as_one(divisor):
    table = Table(factors=1, rule=rule("adagrad", lr=1.0), init="zero")
    table.push(keys(1), ones(1, 1), show=np.array([divisor], F))
    np.testing.assert_array_equal(table.pull(keys(1))[0], [-1, -1])


def test_embed_and_embedx_have_their_own_rules():
    table = Table(factors=1, rule=Sgd(lr=1.0), embed_rule=Sgd(lr=0.25), init="zero")
    table.push(keys(1), ones(1, 1))
    np.testing.assert_array_equal(table.pull(keys(1))[0], [-0.25, -1])


def test_the_padding_key_reads_zeros_and_is_never_trained():
    table = Table(factors=2, padding_key=0, init="uniform(1, 1)")
    table.push(keys(0, 5, 0), ones(3, 2))
    assert len(table) == 1
    assert not table.pull(keys(0, 5))[0].any()
    many = np.zeros(5000, np.uint64)
    assert not table.pull(many).any()


def test_statistics_count_beyond_2_to_the_24():
    table = Table(factors=0)
    table.push(keys(1), ones(1, 0), show=np.array([2**24], F))
    for _ in range(3):
        table.push(keys(1), ones(1, 0))
    (columns,) = table.snapshot()
    assert columns["show"][0] == 2**24 + 3


def test_slots_are_kept():
    table = Table(factors=0)
    table.push(keys(1, 2), ones(2, 0), slots=np.array([3, 65534], np.uint16))
    table.push(keys(1), ones(1, 0))
    (columns,) = table.snapshot()
    assert dict(zip(columns["key"].tolist(), columns["slot"].tolist(), strict=True)) == {1: 3, 2: 65534}


def test_shrink_decays_then_deletes_by_score_and_age():
    table = Table(factors=1, decay_rate=0.5, delete_threshold=0.2, delete_after_unseen_days=2)
    table.push(keys(1, 2), ones(2, 1), show=np.array([3, 5], F))
    assert table.shrink() == 1  # 0.15 and 0.25
    for _ in range(2):
        table.end_day()
    table.push(keys(3), ones(1, 1), show=np.array([100], F))
    table.push(keys(2), ones(1, 1), show=np.array([100], F))
    table.end_day()
    assert table.shrink() == 0
    for _ in range(2):
        table.end_day()
    assert table.shrink() == 2
    assert len(table) == 0


def test_threads_share_a_table():
    table = Table(factors=3, rule=rule("sgd", lr=1.0, bounds=(-1e9, 1e9)), init="zero")
    some = np.arange(3000, dtype=np.uint64)

    def work() -> None:
        for _ in range(30):
            table.push(some, ones(len(some), 3))
            table.pull(some)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(table.pull(some), np.full((len(some), 4), -120))


def test_zero_copy_out_and_views():
    table = Table(factors=2)
    out = np.full((2, 3), 9, F)
    assert table.pull(keys(1, 2), out=out) is out
    strided = np.arange(10, dtype=np.uint64)[::2]
    np.testing.assert_array_equal(table.pull(strided), table.pull(strided.copy()))
    assert table.pull(keys()).shape == (0, 3)
    table.push(keys(), np.empty((0, 3), F))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.pull([1, 2]), "keys must be a NumPy array"),
        (lambda t: t.pull(np.array([1, 2])), r"keys must be uint64\[n\], not int64"),
        (lambda t: t.pull(np.zeros((2, 2), np.uint64)), r"not \[2, 2\]"),
        (lambda t: t.pull(np.array(["a"])), "keys must be uint64"),
        (lambda t: t.pull(keys(1), out=np.zeros((1, 2), F)), "out must be"),
        (lambda t: t.pull(keys(1), out=np.zeros((1, 3), np.float64)), "out must be"),
        (lambda t: t.push(keys(1), np.zeros((1, 4), F)), r"grads must have shape float32\[1, 3\], not \[1, 4\]"),
        (lambda t: t.push(keys(1, 2), np.zeros((1, 3), F)), "grads must have shape"),
        (lambda t: t.push(keys(1), np.zeros((1, 3))), r"astype\(np.float32\)"),
        (lambda t: t.push(keys(1), np.zeros((1, 3), F), show=np.zeros(2, F)), "show must have shape"),
        (lambda t: t.push(keys(1), np.zeros((1, 3), F), slots=np.zeros(1, np.int64)), "slots must be"),
    ],
)
def test_wrong_arrays_get_a_clear_error(call, message):
    with pytest.raises(TableError, match=message):
        call(Table(factors=2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"factors": -1}, "factors must lie"),
        ({"factors": 1, "preset": "onlin"}, "presets are plain, online"),
        ({"factors": 1, "delete_treshold": 1}, "unknown table setting delete_treshold"),
        ({"factors": 1, "init": "uniform(1)"}, r"uniform\(a, b\)"),
        ({"factors": 1, "init": "gauss(1)"}, "unknown init"),
        ({"factors": 1, "admission": "probability(2)"}, "between 0 and 1"),
        ({"factors": 1, "admission": "score(x)"}, "unknown admission"),
        ({"factors": 1, "decay_rate": 1.5}, "decay_rate"),
        ({"factors": 1, "base_threshold": -1}, "base_threshold"),
        ({"factors": 1, "memory_limit": 1000}, "memory_limit is too small"),
    ],
)
def test_wrong_settings_get_a_clear_error(settings, message):
    with pytest.raises((ConfigError, TableError), match=message):
        Table(**settings)


def test_the_default_rule_is_adagrad():
    assert Table(factors=1).rule == Adagrad()


def test_settings_of_rules_change_and_states_stay():
    """Rows of two widths: after the change both move as in a table that began with the new settings and the old states."""
    key, slots, grads = np.array([3, 4], np.uint64), np.array([0, 1], np.uint16), np.ones((2, 5), np.float32)

    def table(lr: float) -> Table:
        quick = rule("adagrad", lr=lr, scale="none")
        return Table(factors=4, rule=quick, slots={1: SlotRows(2, rule("adagrad", lr=2 * lr, scale="none"))})

    changed, like = table(0.1), table(0.5)
    for each in (changed, like):
        each.push(key, grads, slots=slots)
    changed.set_rules(like.describe())
    assert changed.describe() == like.describe()
    before = changed.pull(key), like.pull(key)
    for each in (changed, like):
        each.push(key, grads, slots=slots)
    assert np.allclose(changed.pull(key) - before[0], like.pull(key) - before[1], atol=1e-7)
    for other in (Table(factors=4), Table(factors=4, rule=rule("adam"), slots={1: SlotRows(2, rule("adam"))})):
        with pytest.raises(TableError, match="state of other rules"):
            changed.set_rules(other.describe())
    assert changed.describe() == like.describe()
