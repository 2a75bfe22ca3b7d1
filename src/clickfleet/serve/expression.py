"""Arithmetic over the scores of candidates, for `by` of a ranking request. The parser knows nothing but what is listed here.

    expression  + - * / ** ( ), with the usual precedence; numbers; names; min(a, b, …), max(a, b, …), log(a), exp(a)
    names       the labels and `value`; between backticks, any label: `add to cart`

>>> by = parse("click * buy ** 0.5 + value", ("click", "buy"), ("value",))
>>> by([np.array([1.0, 2.0]), np.array([0.5, 0.5]), np.array([0.0, 0.25])]).tolist()
[1.0, 2.25]
>>> parse("click.real", ("click",))
Traceback (most recent call last):
    ...
clickfleet.errors.ServeError: by: unexpected character '.' at position 6
  write arithmetic over click, such as "click * value"
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickfleet.config.plugins import closest
from clickfleet.errors import ServeError

MAX_LENGTH = 1000
"""Maximum characters of an expression."""
MAX_OPERATIONS = 64
MAX_DEPTH = 32
"""Maximum of parentheses, signs and powers inside each other."""

Numbers = NDArray[np.float64]
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)|(?P<name>[^\W\d]\w*)|`(?P<quoted>[^`]+)`"
    r"|(?P<mark>\*\*|[-+*/(),])|(?P<end>\Z)|(?P<other>.))",
    re.DOTALL,
)
_SUMS = {"+": np.add, "-": np.subtract}
_PRODUCTS = {"*": np.multiply, "/": np.divide}
_FUNCTIONS: dict[str, np.ufunc] = {"min": np.minimum, "max": np.maximum, "log": np.log, "exp": np.exp}


class Token(NamedTuple):
    kind: str
    text: str
    position: int
    """From 1."""

    def __str__(self) -> str:
        return "it ends" if self.kind == "end" else f"found {self.text!r}"


class Expression:
    """A parsed expression: steps for a stack. A number of `columns` or a constant is pushed, an operation takes its arguments."""

    def __init__(self, steps: Sequence[int | float | np.ufunc]) -> None:
        self._steps = tuple(steps)

    def __call__(self, columns: Sequence[Numbers]) -> Numbers:
        """Return the value for every candidate. What is undefined is NaN, and what is too large is infinite."""
        stack: list[Any] = []
        with np.errstate(all="ignore"):
            for step in self._steps:
                if isinstance(step, np.ufunc):
                    arguments = stack[-step.nin :]
                    del stack[-step.nin :]
                    stack.append(step(*arguments))
                else:
                    stack.append(columns[step] if isinstance(step, int) else np.float64(step))
        (result,) = stack
        return np.broadcast_to(result, len(columns[0]))


@lru_cache(maxsize=256)
def parse(text: str, labels: tuple[str, ...], others: tuple[str, ...] = ()) -> Expression:
    """Parse an expression over columns: those named `others`, then the labels. A name of `others` hides a label of that name."""
    if len(text) > MAX_LENGTH:
        raise ServeError(f"by: {len(text):,} characters exceed the limit of {MAX_LENGTH:,}")
    return Expression(_Parser(text, labels, others).steps())


class _Parser:
    def __init__(self, text: str, labels: Sequence[str], others: Sequence[str]) -> None:
        self._text, self._labels, self._others = text, labels, others
        self._steps: list[int | float | np.ufunc] = []
        self._depth = self._operations = 0
        self._next = self._token(0)

    def steps(self) -> list[int | float | np.ufunc]:
        self._sum()
        if self._next.kind != "end":
            raise self._error(f"expected an operator at position {self._next.position}, but {self._next}")
        return self._steps

    def _token(self, at: int) -> Token:
        match = _TOKEN.match(self._text, at)
        assert match is not None, "the last alternative takes any character"
        kind = str(match.lastgroup)
        if kind == "other":
            advice = "; write ** for a power" if match[kind] == "^" else ""
            raise self._error(f"unexpected character {match[kind]!r} at position {match.start(kind) + 1}{advice}")
        self._at = match.end()
        return Token(kind, match[kind], match.start(kind) + 1)

    def _take(self) -> Token:
        token, self._next = self._next, self._token(self._at)
        return token

    def _is_next(self, *signs: str) -> bool:
        return self._next.kind == "mark" and self._next.text in signs

    def _expect(self, sign: str, what: str) -> None:
        if not self._is_next(sign):
            raise self._error(f"expected {what} at position {self._next.position}, but {self._next}")
        self._take()

    def _add(self, operation: np.ufunc) -> None:
        self._operations += 1
        if self._operations > MAX_OPERATIONS:
            raise self._error(f"more than {MAX_OPERATIONS} operations")
        self._steps.append(operation)

    def _sum(self) -> None:
        self._product()
        while self._is_next(*_SUMS):
            operation = _SUMS[self._take().text]
            self._product()
            self._add(operation)

    def _product(self) -> None:
        self._signed()
        while self._is_next(*_PRODUCTS):
            operation = _PRODUCTS[self._take().text]
            self._signed()
            self._add(operation)

    def _signed(self) -> None:
        """Parse a power, perhaps with signs before it, which bind less: -a ** b is -(a ** b)."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} levels at position {self._next.position}")
        if self._is_next("-", "+"):
            negative = self._take().text == "-"
            self._signed()
            if negative:
                self._add(np.negative)
        else:
            self._value()
            if self._is_next("**"):
                self._take()
                self._signed()
                self._add(np.power)
        self._depth -= 1

    def _value(self) -> None:
        token = self._next
        if token.kind == "number":
            number = float(self._take().text)
            if not math.isfinite(number):
                raise self._error(f"the number at position {token.position} is too large")
            self._steps.append(number)
        elif token.kind in ("name", "quoted"):
            self._take()
            if token.kind == "name" and self._is_next("("):
                self._call(token)
            else:
                self._steps.append(self._column(token))
        elif self._is_next("("):
            self._take()
            self._sum()
            self._expect(")", "')'")
        else:
            raise self._error(f"expected a number, a name or '(' at position {token.position}, but {token}")

    def _call(self, token: Token) -> None:
        function = _FUNCTIONS.get(token.text)
        if function is None:
            raise self._error(f"unknown function {token.text!r} at position {token.position}", ", ".join(_FUNCTIONS))
        self._take()
        self._sum()
        if function.nin == 1:
            self._expect(")", "')'")
            self._add(function)
            return
        self._expect(",", "','")
        while True:
            self._sum()
            self._add(function)
            if not self._is_next(","):
                break
            self._take()
        self._expect(")", "',' or ')'")

    def _column(self, token: Token) -> int:
        if token.kind == "name" and token.text in self._others:
            return self._others.index(token.text)
        if token.text in self._labels:
            return len(self._others) + self._labels.index(token.text)
        known = [*self._labels, *self._others]
        raise self._error(f"unknown name {token.text!r} at position {token.position}{closest(token.text, known)}")

    def _error(self, what: str, functions: str = "") -> ServeError:
        names = ", ".join(dict.fromkeys([*self._labels, *self._others]))
        example = f"{self._labels[0]} * value" if self._labels[0].isidentifier() else f"`{self._labels[0]}` * value"
        return ServeError(
            f"by: {what}",
            f"functions: {functions}" if functions else f'write arithmetic over {names}, such as "{example}"',
        )
