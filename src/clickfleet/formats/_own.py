"""A user's format: `parse(block)` of their object or their generator, and each line alone where it refuses a block."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

from clickfleet.batch import Batch, concatenate
from clickfleet.errors import ConfigError, DataError
from clickfleet.formats import Bad, OnBad, Own, Parsed
from clickfleet.formats._lines import Lines, Parser, Text
from clickfleet.formats._native import nothing
from clickfleet.formats.slots import Slots
from clickfleet.generator import Sample, TextGenerator
from clickfleet.schema import Schema


class OwnLines(Lines):
    """Lines parsed by a user's object."""

    def __init__(self, own: Own) -> None:
        self.own = own
        self.schema = own.schema  # type: ignore[misc]

    def function(self, schema: Schema) -> Callable[[bytes], Batch]:
        """What turns whole lines into rows, or raises."""
        return self.own.parse

    def parser(self, schema: Schema, first_line: bytes, path: str) -> Parser:
        function = self.function(schema)

        def parse(text: Text, on_bad: OnBad) -> Parsed:
            lines = bytes(text)
            if not lines:
                return Parsed(nothing(schema), 0)
            count = lines.count(b"\n")
            try:
                return Parsed(self._check(function(lines), schema), count)
            except ConfigError:
                raise
            except Exception as error:
                if count == 1:
                    return Parsed(nothing(schema), 1, 1, [Bad(0, lines[:-1], "", _text(error))])
            return self._one_by_one(lines, schema, parse, on_bad)

        return parse

    def _one_by_one(self, lines: bytes, schema: Schema, parse: Parser, on_bad: OnBad) -> Parsed:
        good: list[Batch] = []
        bad: list[Bad] = []
        seen = 0
        for line in _split(lines):
            parsed = parse(line, on_bad)
            good += [parsed.batch] if len(parsed.batch) else []
            bad += [Bad(seen, item.text, item.field, item.reason) for item in parsed.bad]
            seen += 1
            if bad and on_bad == "stop":
                break
        return Parsed(concatenate(good) if good else nothing(schema), seen, len(bad), bad)

    @staticmethod
    def _check(batch: Batch, schema: Schema) -> Batch:
        if not isinstance(batch, Batch):
            raise ConfigError(f"parse returned {type(batch).__name__}, not a Batch")
        if batch.dense.shape[1] != len(schema.dense) or batch.slots != len(schema.slots):
            raise ConfigError(
                f"parse returned {batch.dense.shape[1]} dense columns and {batch.slots} slots, "
                f"its schema has {len(schema.dense)} and {len(schema.slots)}"
            )
        batch.check_rows()
        return batch


class GeneratorLines(OwnLines):
    """Lines read by a user's generator class, its values matched to the schema by name."""

    def __init__(self, kind: type[TextGenerator], config: Any = None) -> None:
        self.kind, self.config = kind, config
        self._mine = threading.local()  # a generator may keep state between lines, so each thread has its own

    def function(self, schema: Schema) -> Callable[[bytes], Batch]:
        labelled = Slots().parser(schema, f"{schema.label}:".encode(), "")
        unlabelled = Slots().parser(schema, b":", "")

        def parse(lines: bytes) -> Batch:
            if not hasattr(self._mine, "generator"):
                self._mine.generator = self.kind()
                if isinstance(self.config, dict):  # as its own last lines would do
                    self._mine.generator.init(self.config)
            samples = list(self._mine.generator.samples(lines.decode().splitlines()))
            text = "".join(" ".join(_tokens(sample)) + "\n" for sample in samples).encode()
            has_label = any(name == schema.label for sample in samples[:1] for name, _ in sample)
            parsed = (labelled if has_label else unlabelled)(text, "stop")
            for bad in parsed.bad:
                raise DataError(f"{bad.field}: {bad.reason}" if bad.field else bad.reason)
            return parsed.batch

        return parse


def _tokens(sample: Sample) -> Iterator[str]:
    for name, values in sample:
        for value in values:
            yield f"{name}:{value}"


def _split(lines: bytes) -> Iterator[bytes]:
    start = 0
    while (end := lines.find(b"\n", start)) >= 0:
        yield lines[start : end + 1]
        start = end + 1


def _text(error: Exception) -> str:
    if isinstance(error, DataError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
