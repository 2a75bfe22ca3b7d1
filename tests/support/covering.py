"""Settings in pairs: few combinations that hold every value of every setting with every value of every other one."""

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Choice = dict[str, Any]


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 7) -> list[Choice]:
    """Combinations that cover all pairs of values, found greedily; the same for the same seed.

    >>> pairwise({"a": [0, 1], "b": [0, 1], "c": [0, 1]})[0].keys()
    dict_keys(['a', 'b', 'c'])
    >>> found = pairwise({"a": [0, 1], "b": [0, 1], "c": [0, 1]})
    >>> len(found) <= 6, {(choice["a"], choice["c"]) for choice in found} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    (True, True)
    """
    rng = random.Random(seed)
    left = {
        frozenset([(a, i), (b, j)])
        for a, b in combinations(factors, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    found = []
    while left:
        tries = [_grown(factors, left, rng) for _ in range(6)]
        best = max(tries, key=lambda places: len(_covered(places, left)))
        left -= _covered(best, left)
        found.append({name: factors[name][best[name]] for name in factors})
    return found


def _covered(places: Mapping[str, int], left: set[frozenset[tuple[str, int]]]) -> set[frozenset[tuple[str, int]]]:
    return {pair for pair in map(frozenset, combinations(places.items(), 2)) if pair in left}


def _grown(
    factors: Mapping[str, Sequence[Any]], left: set[frozenset[tuple[str, int]]], rng: random.Random
) -> dict[str, int]:
    """One combination around a pair that is not covered yet."""
    places = dict(rng.choice(sorted(map(sorted, left))))
    rest = [name for name in factors if name not in places]
    rng.shuffle(rest)
    for name in rest:
        gains = [
            sum(frozenset([(name, i), other]) in left for other in places.items()) for i in range(len(factors[name]))
        ]
        places[name] = rng.choice([i for i, gain in enumerate(gains) if gain == max(gains)])
    return places
