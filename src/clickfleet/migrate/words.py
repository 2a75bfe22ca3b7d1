"""PaddleRec's word2vec: lines of word numbers -> sentences, its dictionaries -> our vocabulary and questions."""

from __future__ import annotations

from pathlib import Path

from clickfleet.errors import ConfigError, DataError
from clickfleet.files import expand
from clickfleet.migrate.keys import Keys

R, H = "runner.", "hyper_parameters."
NAME = "word2vec"
UNKNOWN = "<UNK>"


def take_words(keys: Keys) -> Path:
    """The sections `model`, `table` and `data.format`; the dictionary of words and counts."""
    keys.set("model.name", NAME)
    keys.set("model.decay", False)
    keys.set("model.sample", 0)  # its preparation has thinned out the text
    for theirs, ours, default in (("window_size", "window", 5), ("neg_num", "negatives", 5)):
        keys.to(H + theirs, f"model.{ours}", keys.whole(H + theirs, default))
    keys.to(H + "sparse_feature_dim", "table.dim", keys.whole(H + "sparse_feature_dim", 300))
    kind = keys.text(H + "optimizer.class", "SGD")
    if kind.lower() != "sgd":
        raise keys.wrong(H + "optimizer.class", "must be SGD for word2vec")
    keys.used(H + "optimizer.class", "table.rule.name=sgd")
    batch, lr = keys.whole(R + "train_batch_size", 100), keys.real(H + "optimizer.learning_rate", 1.0)
    keys.set("table.rule", {"name": "sgd", "lr": lr / batch, "scale": "none"})
    keys.used(
        H + "optimizer.learning_rate",
        f"table.rule.lr={lr / batch:g}",
        f"its share of one pair: the loss was a mean over {batch}",
    )
    keys.used(R + "train_batch_size", "table.rule.lr", "a batch is sentences here, and pairs are learned one by one")
    for name in ("decay_steps", "decay_rate", "optimizer.decay_steps", "optimizer.decay_rate"):
        keys.skip(H + name, "read and never used by the original; model.decay=true lets the rate fall")
    for name in ("with_shuffle_batch", "with_infer_net"):
        keys.skip(H + name, "noise is drawn afresh for every pair")
    for name in ("train_reader_path", "infer_reader_path", "reader_type", "infer_batch_size"):
        keys.used(R + name, "data.format.name=sentences")
    keys.set("data.format", {"name": "sentences"})
    return _dictionary(keys, "word_count_dict_path", "data/dict/word_count_dict.txt")


def _dictionary(keys: Keys, name: str, default: str) -> Path:
    place = next((section + name for section in (R, H) if keys.has(section + name)), R + name)
    path = keys.original.folder / keys.text(place, default)
    keys.used(place, "data.vocabulary", "by the numbers of its words, as the text has them")
    other = next((section + "word_id_dict_path" for section in (R, H) if keys.has(section + "word_id_dict_path")), None)
    if other is not None:
        keys.used(other, "evaluate", "the same numbers: those of the lines of the other dictionary")
    return path


def words_of(dictionary: Path) -> list[tuple[str, int]]:
    """The words and their counts; a word's number is its line's."""
    try:
        lines = dictionary.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(
            f"{dictionary}: {error.strerror}", "set word_count_dict_path to the words and their counts"
        ) from None
    found = []
    for number, line in enumerate(lines, start=1):
        word, _, count = line.strip().rpartition(" ")
        if not word or not count.lstrip("-").isdigit():
            raise DataError(f"{dictionary}:{number}: expected a word and its count, found {line[:80]!r}")
        found.append((word, int(count)))
    return found


def write_vocabulary(dictionary: Path, out: Path) -> Path:
    """Our vocabulary of the same words, by their numbers."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(f"{i} {max(count, 1)}\n" for i, (_, count) in enumerate(words_of(dictionary))))
    return out


def write_questions(dictionary: Path, files: list[str], out: Path) -> Path:
    """Analogies by the numbers of their words, lowered; those with a word that is not known keep it and count as unknown."""
    numbers = {word: str(i) for i, (word, _) in enumerate(words_of(dictionary)) if word != UNKNOWN}
    lines = []
    for path in expand(files):
        for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
            words = line.lower().split()
            lines.append(line if ":" in line else " ".join(numbers.get(word, f"?{word}") for word in words))
    out.write_text("\n".join(lines) + "\n")
    return out
