"""Keys are frozen: a change here breaks every checkpoint there is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickfleet import _core

WORD = (1 << 64) - 1
FIRST, SECOND, THIRD = 0x9E3779B97F4A7C15, 0xB7E151628AED2A6B, 0x3243F6A8885A308D


def fold(a: int, b: int) -> int:
    product = a * b
    return (product & WORD) ^ a ^ (product >> 64) ^ b


def reference(seed: int, value: bytes) -> int:
    """The definition of hash64, in whole numbers."""

    def word(at: int) -> int:
        return int.from_bytes(value[at : at + 8], "little")

    n, mixed = len(value), seed
    if n <= 8:
        a = b = word(0)
    elif n <= 16:
        a, b = word(0), word(n - 8)
    else:
        for at in range(0, n - 16, 16):
            mixed = fold(word(at) ^ FIRST, word(at + 8) ^ mixed)
        a, b = word(n - 16), word(n - 8)
    return fold(fold(a ^ FIRST, b ^ mixed) ^ SECOND, ((n ^ THIRD) + mixed) & WORD)


@pytest.mark.parametrize(
    ("slot", "value", "key"),
    [
        ("C1", b"", 0x2CDEAAA7DA6D75C3),
        ("C1", b"68fd1e64", 0x32A70B4BE2F195E5),
        ("C2", b"68fd1e64", 0x0536D440E11A3472),
        ("user", b"7", 0xCFC29932F1467DBC),
        ("", b"", 0x1CFF13B15E9C2259),
        ("query", b"a sentence of more than sixteen bytes", 0x08CCB6BA83F9B871),
        ("city", "Zürich".encode(), 0x71434EE8C3D79875),
        ("x", b"0123456789abcdef", 0x5322BF3988746649),
    ],
)
def test_hash64_is_frozen(slot: str, value: bytes, key: int) -> None:
    assert _core.hash64(slot, value) == key


@given(st.text(max_size=20), st.binary(max_size=60))
def test_hash64_is_its_definition(slot: str, value: bytes) -> None:
    assert _core.hash64(slot, value) == reference(reference(THIRD, slot.encode()), value)


def test_mix64_is_frozen() -> None:
    keys = np.array([0, 1, 2, 2**64 - 1], np.uint64)
    out = np.empty_like(keys)
    _core.mix64(keys, out)
    assert out.tolist() == [0, 6238072747940578789, 15839785061582574730, 13029008266876403067]


def py2_reference(text: bytes) -> int:
    if not text:
        return 0
    x = text[0] << 7
    for byte in text:
        x = (1000003 * x & WORD) ^ byte
    x ^= len(text)
    x -= (x >> 63) << 64
    return -2 if x == -1 else x


def test_py2_hash_gives_the_published_values() -> None:
    assert _core.py2_hash(b"a") == 12416037344
    assert _core.py2_hash(b"hello") == 840651671246116861
    assert _core.py2_hash(b"") == 0


@given(st.binary(max_size=40))
def test_py2_hash_is_its_definition(text: bytes) -> None:
    assert _core.py2_hash(text) == py2_reference(text)
