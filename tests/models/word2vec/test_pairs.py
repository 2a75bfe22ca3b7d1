"""What is drawn, and what pairs do to rows, against a few lines of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clickfleet import _core
from clickfleet.models.word2vec.vocabulary import Vocabulary

N, WINDOW, NEGATIVES, DIM = 40, 3, 4, 11
NONE = 2**32 - 1


@pytest.fixture
def words() -> tuple[Vocabulary, Any]:
    known = Vocabulary(tuple(f"w{i}" for i in range(N)), np.arange(N, 0, -1) * 10)
    return known, _core.Words(known.keys("in"), known.keys("out"), known.keep(0), known.noise(0.75))


def drawn(words: tuple[Vocabulary, Any], seed: int, sentences: list[list[int]]) -> Any:
    known, core = words
    pairs = _core.Pairs(core, WINDOW, NEGATIVES)
    keys = known.keys("in")[np.concatenate(sentences)]
    ends = np.cumsum([0, *map(len, sentences)])
    pairs.draw(keys, np.repeat(ends, 2)[1:].astype(np.int64), 2, seed)
    return pairs


def groups(pairs: Any) -> list[tuple[int, list[int]]]:
    centres, ends, targets = pairs.drawn()
    starts = [0, *ends[:-1]]
    step = 1 + NEGATIVES
    return [
        (int(centre), targets[t : t + step].tolist())
        for centre, first, last in zip(centres, starts, ends, strict=True)
        for t in range(first, last, step)
    ]


def test_windows_are_drawn_for_every_word_and_noise_for_every_pair(words):
    sentence = list(range(20))  # a word is its own place
    reach: dict[int, set[int]] = {}
    noise = []
    for seed in range(60):
        found = groups(drawn(words, seed, [sentence]))
        for centre, (neighbour, *others) in found:
            assert 0 < abs(centre - neighbour) <= WINDOW
            assert neighbour not in others
            noise.append(tuple(others))
        widest = {c: max(abs(c - n) for other, (n, *_) in found if other == c) for c in sentence}
        for centre in range(WINDOW, 20 - WINDOW):
            pairs_of = sorted(n for c, (n, *_) in found if c == centre)
            w = widest[centre]
            assert pairs_of == [p for p in range(centre - w, centre + w + 1) if p != centre]  # all within its reach
            reach.setdefault(w, set()).add(centre)
    assert reach.keys() == {1, 2, 3}
    assert len(set(noise)) > 0.99 * len(noise)


def test_a_draw_depends_on_its_seed_alone(words):
    sentences = [[1, 2, 3, 4, 5], [6, 7], [8]]
    assert groups(drawn(words, 5, sentences)) == groups(drawn(words, 5, sentences))
    assert groups(drawn(words, 5, sentences)) != groups(drawn(words, 6, sentences))
    assert not [c for c, _ in groups(drawn(words, 5, sentences)) if c == 8]  # alone in its sentence


def test_frequent_words_are_thinned_out_and_unknown_ones_left_out(words):
    known, _ = words
    keep = known.keep(0.01)
    core = _core.Words(known.keys("in"), known.keys("out"), keep, known.noise(0.75))
    pairs = _core.Pairs(core, 1, 1)
    keys = np.repeat(known.keys("in"), 2000)
    np.random.default_rng(0).shuffle(keys)
    keys = np.concatenate([keys, np.full(500, 99, np.uint64)])
    pairs.draw(keys, np.array([0, len(keys), len(keys)]), 2, 1)
    assert pairs.words == 2000 * N
    seen = np.bincount(pairs.drawn()[0], minlength=N) / 2000
    assert np.abs(seen - keep).max() < 0.05
    assert 0.2 < keep.min() < keep.max() == 1.0


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def gathered(pairs: Any, known: Vocabulary) -> tuple[Any, dict[int, int], dict[int, int]]:
    n = pairs.gather()
    keys, show, slots = np.empty(n, np.uint64), np.empty(n, np.float32), np.empty(n, np.uint16)
    pairs.rows(keys, show, slots)
    assert len(set(keys.tolist())) == n
    place = {int(key): i for i, key in enumerate(keys)}
    ins = {i: place[int(k)] for i, k in enumerate(known.keys("in")) if int(k) in place}
    outs = {i: place[int(k)] for i, k in enumerate(known.keys("out")) if int(k) in place}
    assert all(slots[at] == 0 for at in ins.values())
    assert all(slots[at] == 1 for at in outs.values())
    found = groups(pairs)
    for i, at in ins.items():
        assert show[at] == sum(c == i for c, _ in found)
    for i, at in outs.items():
        assert show[at] == sum(t == i for _, targets in found for t in targets)
    return keys, ins, outs


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dim", [1, 7, DIM, 32])
def test_moves_and_gradients_are_those_of_numpy(words, bias, dim):
    pairs = drawn(words, 3, [list(range(12)), [5, 5, 7, 1, 30]])
    keys, ins, outs = gathered(pairs, words[0])
    rows = np.random.default_rng(1).normal(0, 0.5, (len(keys), 1 + dim)).astype(np.float32)
    moved, grads = rows.astype(np.float64), np.zeros((len(keys), 1 + dim))
    for centre, targets in groups(pairs):
        u, step = ins[centre], np.zeros(dim)
        for k, target in enumerate(targets):
            v = outs[target]
            error = (k == 0) - sigmoid(moved[u, 1:] @ moved[v, 1:] + bias * moved[v, 0])
            step += 0.05 * error * moved[v, 1:]
            moved[v, 1:] += 0.05 * error * moved[u, 1:]
            moved[v, 0] += bias * 0.05 * error
            error = (k == 0) - sigmoid(float(rows[u, 1:] @ rows[v, 1:]) + bias * rows[v, 0])
            grads[u, 1:] -= error * rows[v, 1:]
            grads[v, 1:] -= error * rows[u, 1:]
            grads[v, 0] -= bias * error
        moved[u, 1:] += step
    out = np.empty_like(rows)
    pairs.gradient(rows, bias, out)
    assert np.abs(out - grads).max() < 5e-4  # σ is linear between 513 values
    pairs.move(rows, 0.05, 0.1, bias, (-10.0, 10.0), (-10.0, 10.0), out)
    assert np.abs((rows - 0.1 * out) - moved).max() < 5e-4


def test_weights_stay_within_their_bounds(words):
    pairs = drawn(words, 3, [list(range(12))])
    keys, _, _ = gathered(pairs, words[0])
    rows = np.random.default_rng(1).normal(0, 0.5, (len(keys), 1 + DIM)).astype(np.float32).clip(-0.2, 0.2)
    out = np.empty_like(rows)
    pairs.move(rows, 100.0, 100.0, True, (-0.25, 0.25), (-0.5, 0.5), out)
    moved = rows - np.float32(100) * out
    assert np.abs(moved[:, 1:]).max() == pytest.approx(0.25, abs=1e-4)
    assert np.abs(moved[:, 0]).max() == pytest.approx(0.5, abs=1e-4)
