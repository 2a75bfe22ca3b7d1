"""sentences: plain text for word2vec, one sentence per line, words separated by spaces."""

from dataclasses import dataclass

import numpy as np

from clickfleet import _core
from clickfleet.data.batch import Batch
from clickfleet.data.formats import OnBad, Parsed
from clickfleet.data.parsing.lines import Lines, Parser, Text
from clickfleet.data.schema import Schema, Slot


@dataclass(frozen=True)
class Sentences(Lines):
    """A row is a sentence. Its words are the keys of slot `in`; slot `out`, for context words, is never stored in a file."""

    schema = Schema(slots=(Slot("in", multi=True), Slot("out", multi=True)))

    def parser(self, schema: Schema, first_line: bytes, path: str) -> Parser:
        assert self.schema is not None
        self.schema.check_same(schema, "the format sentences", "the given schema")

        def parse(lines: Text, on_bad: OnBad) -> Parsed:
            keys, offsets = _core.parse_sentences(bytes(lines), "in")
            rows = (len(offsets) - 1) // 2
            # The core's 64-bit integers are C's long long, which torch cannot convert.
            batch = Batch(
                np.empty((rows, 0), np.float32),
                keys.view(np.uint64),
                2,
                offsets.view(np.int64),
                labels=np.ones(rows, np.float32),
            )
            return Parsed(batch, rows)

        return parse
