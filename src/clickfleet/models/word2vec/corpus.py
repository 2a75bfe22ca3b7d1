"""Turn plain text into sentences in part files and a vocabulary, in three passes over the text with little memory.

<out>/train/part-00000.txt …   a sentence per line
<out>/vocabulary.txt           `</s> sentences`, then `word count` by falling count
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clickfleet.data.files import Unpacked, expand
from clickfleet.errors import ConfigError, DataError
from clickfleet.models.word2vec.vocabulary import FILE, SENTENCE, Vocabulary

READ_BYTES = 1 << 20
_OTHER = re.compile(rb"[^a-z\n]+")


@dataclass(frozen=True)
class CorpusOptions:
    min_count: int = 5
    """Omit words that occur less often."""
    max_words: int | None = None
    """Keep at most this many words, the most frequent ones."""
    lower: bool = True
    az: bool = False
    """Treat everything but a–z as a blank, as in text8."""
    sentence_words: int = 1000
    """Split longer lines."""
    parts: int = 4

    def __post_init__(self) -> None:
        for name in ("min_count", "sentence_words", "parts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")


def sentences(files: Iterable[str], options: CorpusOptions) -> Iterator[list[bytes]]:
    """Yield the words of each line in pieces of at most `sentence_words`; skip empty lines."""
    for path in files:
        words: list[bytes] = []
        for text in _pieces(path):
            clean = text.lower() if options.lower or options.az else text
            clean = _OTHER.sub(b" ", clean) if options.az else clean
            *lines, rest = clean.split(b"\n")
            for line in lines:
                words += line.split()
                yield from _cut(words, options.sentence_words)
                words = []
            words += rest.split()
            while len(words) >= options.sentence_words:
                yield words[: options.sentence_words]
                words = words[options.sentence_words :]
        yield from _cut(words, options.sentence_words)


def _cut(words: list[bytes], most: int) -> Iterator[list[bytes]]:
    for first in range(0, len(words), most):
        yield words[first : first + most]


def _pieces(path: str) -> Iterator[bytes]:
    """Yield a file in pieces that end at the end of a word."""
    stream, space, rest = Unpacked(path), bytearray(READ_BYTES), b""
    try:
        while got := stream.readinto(memoryview(space)):
            text = rest + bytes(space[:got])
            end = max(text.rfind(b" "), text.rfind(b"\n"), text.rfind(b"\t")) + 1
            rest = text[end:]
            yield text[:end]
        yield rest
    finally:
        stream.close()


def prepare(
    text: str | Path | Iterable[str | Path], out: str | Path, options: CorpusOptions | None = None
) -> dict[str, int | str]:
    """Count the words, then write the sentences and the vocabulary. Return a summary."""
    options, out, files = options or CorpusOptions(), Path(out), expand(text)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty", "choose a new folder")
    counts: Counter[bytes] = Counter()
    for words in sentences(files, options):
        counts.update(words)
    counts.pop(SENTENCE.encode(), None)
    kept = [(word, n) for word, n in counts.items() if n >= options.min_count]
    kept = sorted(kept, key=lambda item: (-item[1], item[0]))[: options.max_words]
    if not kept:
        raise DataError(
            f"no word occurs {options.min_count} times in a text of {counts.total():,} words",
            "use more text or a lower --min-count",
        )
    known = {word for word, _ in kept}
    total = sum(any(word in known for word in words) for words in sentences(files, options))
    (out / "train").mkdir(parents=True, exist_ok=True)
    each = -(-total // options.parts)
    stream = (words for words in sentences(files, options) if any(word in known for word in words))
    written = 0
    try:
        for part in range(options.parts):
            with (out / "train" / f"part-{part:05d}.txt").open("wb") as file:
                for _ in range(min(each, total - written)):
                    file.write(b" ".join(word for word in next(stream) if word in known) + b"\n")
                    written += 1
        vocabulary = Vocabulary(
            tuple(word.decode(errors="replace") for word, _ in kept), np.array([n for _, n in kept], np.int64), total
        )
        (out / FILE).write_text(vocabulary.text(), encoding="utf-8", newline="\n")
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror or error}") from error
    return {
        "rows": total,
        "words": int(vocabulary.counts.sum()),
        "words_read": counts.total(),
        "vocabulary": len(vocabulary),
        "parts": options.parts,
        "out": str(out),
    }
