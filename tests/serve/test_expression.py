"""The arithmetic of `by`: the numbers of Python's own for what is allowed, and a clear refusal of everything else."""

import contextlib
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickfleet.errors import ServeError
from clickfleet.serve.expression import MAX_DEPTH, MAX_LENGTH, MAX_OPERATIONS, parse

LABELS = ("click", "buy", "add to cart")
VALUES = {"value": 2.5, "click": 0.25, "buy": 0.5, "add to cart": 3.0}


def value(text: str) -> float:
    columns = [np.array([number, number]) for number in VALUES.values()]
    first, second = parse(text, LABELS, ("value",))(columns).tolist()
    assert first == second or (math.isnan(first) and math.isnan(second))
    return float(first)


NUMBERS = st.one_of(
    st.sampled_from(["click", "buy", "value", "`add to cart`", "0", "3", ".5", "2.", "1e-3", "4E+2"]),
    st.floats(0, 1e6).map(repr),
)


def grown(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    spaces = st.sampled_from(["", " ", "\t ", "\n"])
    return st.one_of(
        st.builds(lambda a, op, b, s: f"{a}{s}{op}{s}{b}", parts, st.sampled_from("+-*/"), parts, spaces),
        st.builds("{}**{}".format, parts, st.sampled_from(["2", ".5", "-1", "(1 + buy)"])),
        parts.map("({})".format),
        parts.map("- {}".format),
        parts.map("+{}".format),
        parts.map("exp({})".format),
        st.builds("min({}, {},{})".format, parts, parts, parts),
        st.builds("max({},{})".format, parts, parts),
    )


@given(st.recursive(NUMBERS, grown, max_leaves=8))
def test_the_numbers_are_those_of_python(text: str) -> None:
    names = {"click": np.float64(0.25), "buy": np.float64(0.5), "value": np.float64(2.5), "cart": np.float64(3.0)}
    plain = text.replace("`add to cart`", "cart").replace("\n", " ")
    functions = {"min": lambda *a: np.minimum.reduce(a), "max": lambda *a: np.maximum.reduce(a), "exp": np.exp}
    numbers = "".join(f"np.float64({t})" if t[:1] in ".0123456789" and t else t for t in _split(plain))
    with np.errstate(all="ignore"):
        wanted = float(eval(numbers, {"np": np, **names, **functions}))
    assert value(text) == pytest.approx(wanted, rel=1e-12, nan_ok=True)


def _split(text: str) -> list[str]:
    """Numbers apart from everything else."""
    return re.split(r"((?<![\w.])(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)", text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2 + 3 * 4", 14),
        ("-2 ** 2", -4),
        ("2 ** 3 ** 2", 512),
        ("2 ** -1", 0.5),
        ("8 / 2 / 2", 2),
        ("8 - 2 - 2", 4),
        ("--3", 3),
        ("value", 2.5),
        ("click*buy*value", 0.3125),
        ("max(1, 2, 3) + min(4, 5)", 7),
        ("`add to cart` * `click`", 0.75),
    ],
)
def test_precedence(text: str, wanted: float) -> None:
    assert value(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"), [("1 / 0", math.inf), ("0 / 0", math.nan), ("log(0)", -math.inf), ("9 ** 9 ** 9", math.inf)]
)
def test_what_is_undefined_is_a_number_too(text: str, wanted: float) -> None:
    assert value(text) == pytest.approx(wanted, nan_ok=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"expected a number, a name or '\(' at position 1, but it ends"),
        ("click *", "at position 8, but it ends"),
        ("click buy", "expected an operator at position 7, but found 'buy'"),
        ("(click", r"expected '\)' at position 7"),
        ("click)", "expected an operator at position 6"),
        ("click ^ 2", r"unexpected character '\^' at position 7; write \*\* for a power"),
        ("click % 2", "unexpected character '%' at position 7"),
        ("click // 2", "expected a number, a name or"),
        ("clik * 2", "unknown name 'clik' at position 1; did you mean click"),
        ("__import__('os')", "unknown function '__import__' at position 1"),
        ("click.__class__", "unexpected character '.' at position 6"),
        ("click[0]", r"unexpected character '\[' at position 6"),
        ("lambda: 0", "unexpected character ':' at position 7"),
        ("'a'", "unexpected character"),
        ("1 if click else 2", "expected an operator at position 3"),
        ("click == 1", "unexpected character '='"),
        ("sqrt(click)", "unknown function 'sqrt'"),
        ("min(1)", "expected ',' at position 6"),
        ("log(1, 2)", r"expected '\)' at position 6"),
        ("1e999", "the number at position 1 is too large"),
        ("`", "unexpected character '`'"),
        ("click\x00", "unexpected character"),
        ("１ + 1", "unexpected character"),
        ("-" * (MAX_DEPTH + 1) + "1", "levels at position"),
        ("(" * 900 + "1" + ")" * 90, "levels at position"),
        ("+".join("1" * (MAX_OPERATIONS + 2)), f"more than {MAX_OPERATIONS} operations"),
        ("1" + " " * MAX_LENGTH, "1,001 characters exceed the limit of 1,000"),
        ("2**" * 40 + "2", "levels at position"),
    ],
)
def test_everything_else_is_refused_with_its_position(text: str, message: str) -> None:
    with pytest.raises(ServeError, match=message):
        value(text)


@given(st.text(max_size=60) | st.text("click buy()+-*/.,`0123456789eE^", max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(ServeError):  # and nothing else
        assert isinstance(value(text), float)
