"""Migrate PaddleRec's word2vec: lines of word numbers to sentences, its dictionaries to our vocabulary and questions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from clickfleet.data.files import expand
from clickfleet.errors import CheckpointError, ConfigError, DataError
from clickfleet.models.word2vec.vocabulary import Vocabulary
from clickfleet.paddlerec import pickles
from clickfleet.paddlerec.keys import Keys
from clickfleet.paddlerec.sources import Saved, SavedPiece, load_arrays, locate
from clickfleet.store.table import Table

NAMES = {
    "u": ("embedding.weight", "emb"),
    "v": ("embedding_w.weight", "emb_w"),
    "bias": ("embedding_b.weight", "emb_b"),
}
"""Names in files of the dynamic graph (layers) and of the static graph (parameters)."""
SAMPLE_PAIRS = 64
Numbers = Any


def open_vectors(source: Path, known: Vocabulary, table: Table) -> Saved:
    """Return the vectors of the words of a vocabulary. Omit the rows beyond it, which belong to no word."""
    notes: list[str] = []
    loaded = load_arrays(locate(source, notes), [])
    file, arrays = loaded.path, loaded.arrays
    matrices = {name: _matrix(arrays, places, file) for name, places in NAMES.items()}
    for name, width in (("u", table.factors), ("v", table.factors), ("bias", 1)):
        rows, columns = matrices[name].shape
        if columns != width or rows < len(known):
            raise CheckpointError(
                f"{file}: {NAMES[name][0]} has shape {rows} × {columns}, expected at least {len(known)} × {width}",
                "use the sparse_feature_dim and the dictionary of its training",
            )
        if rows > len(known) and name == "u":
            notes.append(f"{rows - len(known):,} vectors belong to no word of the dictionary and were not imported")
    parts = {name: np.asarray(values[: len(known)], np.float32) for name, values in matrices.items()}
    return Saved(file, _rows(parts, known), parts, notes=notes)


def _matrix(arrays: pickles.Arrays, places: tuple[str, ...], file: Path) -> Numbers:
    name = next((name for name in places if name in arrays), None)
    if name is None:
        raise CheckpointError(
            f"{file} has no {places[0]}; it has {', '.join(list(arrays)[:6])}", "check that it is a word2vec model"
        )
    return arrays[name].reshape(len(arrays[name]), -1)


def _rows(parts: dict[str, Numbers], known: Vocabulary) -> Iterator[SavedPiece]:
    count = len(known)
    nothing, state = np.zeros(count), np.empty((count, 0), np.float32)
    for slot, embed_w, embedx in (("in", nothing, parts["u"]), ("out", parts["bias"][:, 0], parts["v"])):
        yield SavedPiece(known.keys(slot), embed_w, state, embedx, state, nothing, nothing, nothing, nothing)


def compare(saved: Saved, known: Vocabulary, table: Table) -> float:
    """Return the largest difference of u·v + β between our rows and the original numbers, over some pairs of words."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, len(known), (2, SAMPLE_PAIRS))
    theirs = (saved.params["u"][a] * saved.params["v"][b]).sum(axis=1) + saved.params["bias"][b, 0]
    u = table.pull(known.keys("in")[a], training=False)
    v = table.pull(known.keys("out")[b], training=False)
    ours = (u[:, 1:] * v[:, 1:]).sum(axis=1) + v[:, 0]
    return float(np.max(np.abs(ours - theirs)))


R, H = "runner.", "hyper_parameters."
NAME = "word2vec"
UNKNOWN = "<UNK>"


def take_words(keys: Keys) -> Path:
    """Translate the sections `model`, `table` and `data.format`. Return the path of the dictionary of words and counts."""
    keys.set("model.name", NAME)
    keys.set("model.decay", False)
    keys.set("model.sample", 0)  # PaddleRec's preparation has already subsampled the text
    for theirs, ours, default in (("window_size", "window", 5), ("neg_num", "negatives", 5)):
        keys.map(H + theirs, f"model.{ours}", keys.integer(H + theirs, default))
    keys.map(H + "sparse_feature_dim", "table.dim", keys.integer(H + "sparse_feature_dim", 300))
    kind = keys.text(H + "optimizer.class", "SGD")
    if kind.lower() != "sgd":
        raise keys.wrong(H + "optimizer.class", "must be SGD for word2vec")
    keys.used(H + "optimizer.class", "table.rule.name=sgd")
    batch, lr = keys.integer(R + "train_batch_size", 100), keys.number(H + "optimizer.learning_rate", 1.0)
    keys.set("table.rule", {"name": "sgd", "lr": lr / batch, "scale": "none"})
    keys.used(
        H + "optimizer.learning_rate",
        f"table.rule.lr={lr / batch:g}",
        f"per pair of words: PaddleRec's loss is a mean over {batch}",
    )
    keys.used(R + "train_batch_size", "table.rule.lr", "batches consist of sentences; pairs are trained one by one")
    for name in ("decay_steps", "decay_rate", "optimizer.decay_steps", "optimizer.decay_rate"):
        keys.skip(H + name, "PaddleRec reads but never uses it; model.decay=true lowers the learning rate linearly")
    for name in ("with_shuffle_batch", "with_infer_net"):
        keys.skip(H + name, "noise words are drawn for every pair")
    for name in ("train_reader_path", "infer_reader_path", "reader_type", "infer_batch_size"):
        keys.used(R + name, "data.format.name=sentences")
    keys.set("data.format", {"name": "sentences"})
    return _dictionary(keys, "word_count_dict_path", "data/dict/word_count_dict.txt")


def _dictionary(keys: Keys, name: str, default: str) -> Path:
    place = next((section + name for section in (R, H) if keys.has(section + name)), R + name)
    path = keys.original.folder / keys.text(place, default)
    keys.used(place, "data.vocabulary", "words are named by number, as in the text")
    other = next((section + "word_id_dict_path" for section in (R, H) if keys.has(section + "word_id_dict_path")), None)
    if other is not None:
        keys.used(other, "evaluate", "the numbers are the line numbers of word_count_dict_path")
    return path


def words_of(dictionary: Path) -> list[tuple[str, int]]:
    """Return the words and their counts. The number of a word is its line number."""
    try:
        lines = dictionary.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(
            f"cannot read {dictionary}: {error.strerror}",
            "set word_count_dict_path to the file of words and counts",
        ) from None
    words = []
    for number, line in enumerate(lines, start=1):
        word, _, count = line.strip().rpartition(" ")
        if not word or not re.fullmatch("-?[0-9]{1,18}", count):
            raise DataError(f"{dictionary}:{number}: expected a word and its count, found {line[:80]!r}")
        words.append((word, int(count)))
    return words


def write_vocabulary(dictionary: Path, out: Path) -> Path:
    """Write our vocabulary of the same words, named by number."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(f"{i} {max(count, 1)}\n" for i, (_, count) in enumerate(words_of(dictionary))))
    return out


def write_questions(dictionary: Path, files: list[str], out: Path) -> Path:
    """Write analogies with words in lower case replaced by their numbers. Unknown words get the prefix `?`."""
    numbers = {word: str(i) for i, (word, _) in enumerate(words_of(dictionary)) if word != UNKNOWN}
    lines = []
    for path in expand(files):
        for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
            words = line.lower().split()
            lines.append(line if ":" in line else " ".join(numbers.get(word, f"?{word}") for word in words))
    out.write_text("\n".join(lines) + "\n")
    return out
