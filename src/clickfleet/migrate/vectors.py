"""PaddleRec's word2vec as it was saved -> rows of ours: u of each word in slot `in`, v with its bias in slot `out`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from clickfleet.errors import CheckpointError
from clickfleet.migrate import pickles
from clickfleet.migrate.sources import Piece, Saved, files_of
from clickfleet.table import Table
from clickfleet.words.vocabulary import Vocabulary

NAMES = {
    "u": ("embedding.weight", "emb"),
    "v": ("embedding_w.weight", "emb_w"),
    "bias": ("embedding_b.weight", "emb_b"),
}
"""By layer, as the dynamic graph saved them, and by parameter, as the static one did."""
SAMPLE_PAIRS = 64

Numbers = Any


def open_vectors(source: Path, known: Vocabulary, table: Table) -> Saved:
    """The vectors of the words of a vocabulary; rows beyond it, which no word has, are left out."""
    file = files_of(source)
    if file is None:
        raise CheckpointError(
            f"{source} holds no word2vec of PaddleRec's", "expected rec.pdparams of training on one machine"
        )
    arrays, _ = pickles.load(file)
    found = {name: _matrix(arrays, places, file) for name, places in NAMES.items()}
    notes = []
    for name, width in (("u", table.factors), ("v", table.factors), ("bias", 1)):
        rows, columns = found[name].shape
        if columns != width or rows < len(known):
            raise CheckpointError(
                f"{file}: {NAMES[name][0]} is {rows} × {columns}, and {len(known)} words of width {width} are expected",
                "are sparse_feature_dim and the dictionary those it was trained with?",
            )
        if rows > len(known) and name == "u":
            notes.append(f"{rows - len(known):,} vectors belong to no word of the dictionary and were left out")
    parts = {name: np.asarray(values[: len(known)], np.float32) for name, values in found.items()}
    return Saved(file, _rows(parts, known), parts, notes=notes)


def _matrix(arrays: pickles.Arrays, places: tuple[str, ...], file: Path) -> Numbers:
    name = next((name for name in places if name in arrays), None)
    if name is None:
        raise CheckpointError(
            f"{file} has no {places[0]}; it has {', '.join(list(arrays)[:6])}", "is it a file of word2vec?"
        )
    return arrays[name].reshape(len(arrays[name]), -1)


def _rows(parts: dict[str, Numbers], known: Vocabulary) -> Iterator[Piece]:
    count = len(known)
    nothing, state = np.zeros(count), np.empty((count, 0), np.float32)
    for slot, embed_w, embedx in (("in", nothing, parts["u"]), ("out", parts["bias"][:, 0], parts["v"])):
        yield Piece(known.keys(slot), embed_w, state, embedx, state, nothing, nothing, nothing, nothing)


def compare(saved: Saved, known: Vocabulary, table: Table) -> float:
    """The largest difference of u·v + β between our rows and theirs, over some pairs of words."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, len(known), (2, SAMPLE_PAIRS))
    theirs = (saved.params["u"][a] * saved.params["v"][b]).sum(axis=1) + saved.params["bias"][b, 0]
    u = table.pull(known.keys("in")[a], training=False)
    v = table.pull(known.keys("out")[b], training=False)
    mine = (u[:, 1:] * v[:, 1:]).sum(axis=1) + v[:, 0]
    return float(np.max(np.abs(mine - theirs)))
