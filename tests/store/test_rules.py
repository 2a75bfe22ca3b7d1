import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickfleet import _core
from clickfleet.errors import ConfigError
from clickfleet.store.rules import Rule, rule, specs
from reference import first_state, step

F = np.float32
LEVELS = ["base", _core.cpu_level()]


def apply(rule: Rule, w: list[float], state: list[float], g: list[float], divisor: float, level: str = "base") -> tuple:
    weights, kept = np.array(w, F), np.array(state, F)
    _core.apply_rule(rule.name, dict(rule.settings), weights, kept, np.array(g, F), divisor, *rule.bounds, level)
    return weights, kept


GOLDEN = [  # weights (0.1, −0.2), gradients (2, −4): rule, divisor, state -> weights, state
    (rule("sgd"), 2, [], [0.05, -0.1], []),
    (rule("adagrad"), 2, [1], [0.0566987298, -0.1133974596], [3.5]),
    (rule("std_adagrad"), 2, [1, 0], [0.0566987298, -0.1], [2, 4]),
    (rule("adagrad_v2"), 2, [1], [0.0732738760, -0.1465477519], [3.5]),
    (rule("adagrad_v2", initial_g2sum=2.5), 2, [0], [0.0776393202, -0.1552786405], [2.5]),
    (
        rule("adam"),
        1,
        [0, 0, 0, 0, 0.9, 0.999],
        [0.0990000002, -0.1990000001],
        [0.2, -0.4, 0.004, 0.016, 0.81, 0.998001],
    ),
    (rule("shared_adam"), 1, [0.1, 0.2, 0.9, 0.999], [0.0997968598, -0.1997889740], [-0.01, 0.2098, 0.81, 0.998001]),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("rule", "divisor", "state", "w", "after"), GOLDEN, ids=lambda x: getattr(x, "name", None))
def test_golden_values(rule, divisor, state, w, after, level):
    found = apply(rule, [0.1, -0.2], state, [2, -4], divisor, level)
    np.testing.assert_allclose(found[0], w, atol=1e-6)
    np.testing.assert_allclose(found[1], after, atol=1e-6)


floats = st.floats(-3, 3, width=32)


@pytest.mark.parametrize("name", specs())
@given(data=st.data())
def test_agrees_with_numpy(name, data):
    n = data.draw(st.integers(1, 40))
    more = {"ftrl": {"l1": 0.1, "l2": 0.01}, "adagrad_v2": {"initial_g2sum": data.draw(st.sampled_from([0.0, 1.0]))}}
    one = rule(name, lr=data.draw(st.sampled_from([0.001, 0.05, 0.5])), **more.get(name, {}))
    w = data.draw(st.lists(floats, min_size=n, max_size=n))
    state = first_state(one, np.array(w, F))
    np.testing.assert_allclose(_core.rule_state(name, dict(one.settings), np.array(w, F)), state, rtol=1e-6)
    expected, kept = np.array(w, F), state
    for _ in range(4):
        g, divisor = data.draw(st.lists(floats, min_size=n, max_size=n)), data.draw(st.sampled_from([1.0, 2.0, 7.5]))
        found = [apply(one, expected.tolist(), kept.tolist(), g, divisor, level) for level in LEVELS]
        assert all(found[0][i].tobytes() == found[1][i].tobytes() for i in (0, 1)), "CPU levels differ"
        expected, kept = step(one, expected, kept, np.array(g, F), divisor)
        np.testing.assert_allclose(found[0][0], expected, rtol=5e-5, atol=1e-5)
        np.testing.assert_allclose(found[0][1], kept, rtol=5e-5, atol=1e-5)


@pytest.mark.parametrize("name", specs())
def test_weights_stay_in_their_bounds_and_nan_goes_to_the_lower(name):
    one = rule(name, bounds=(-0.5, 0.25))
    state = first_state(one, np.zeros(3, F)).tolist()
    w, _ = apply(one, [0.2, -0.4, 0.0], state, [-1e30, 1e30, float("nan")], 1.0)
    assert ((w >= -0.5) & (w <= 0.25)).all()
    assert w[2] == -0.5


def test_ftrl_starts_from_the_initial_weight_and_l1_makes_zeros():
    one = rule("ftrl", l1=0.0)
    w = np.array([0.3, -0.1], F)
    after, _ = apply(one, w.tolist(), first_state(one, w).tolist(), [1e-6, 1e-6], 1.0)
    np.testing.assert_allclose(after, w, atol=1e-5)
    after, _ = apply(rule("ftrl", l1=5.0), [0.0], [0.0, 0.0], [0.5], 1.0)
    assert after[0] == 0


def test_scale_defaults():
    assert {name: spec.scale for name, spec in specs().items()} == {
        "sgd": "batch",
        "adagrad": "show",
        "std_adagrad": "show",
        "adagrad_v2": "show",
        "adam": "batch",
        "shared_adam": "batch",
        "ftrl": "batch",
    }


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rule("adagard"), "did you mean adagrad"),
        (lambda: rule("adam", betta1=1), "did you mean beta1"),
        (lambda: rule("sgd", lr=-1), "at least 0"),
        (lambda: rule("sgd", lr=float("nan")), "at least 0"),
        (lambda: rule("sgd", scale="shows"), "show, batch, none"),
        (lambda: rule("sgd", bounds=(1, -1)), "ascending"),
    ],
)
def test_wrong_settings_are_named(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
