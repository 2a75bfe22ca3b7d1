"""Parse lines with a user's `parse(block)`. If it rejects a block, parse line by line to find the bad lines."""

from abc import abstractmethod
from collections.abc import Callable

from clickfleet.data.batch import Batch, concatenate
from clickfleet.data.formats import Bad, OnBad, Parsed, UserFormat
from clickfleet.data.histories import keep_events
from clickfleet.data.parsing.layout import nothing
from clickfleet.data.parsing.lines import Lines, Parser, Text
from clickfleet.data.schema import Schema
from clickfleet.errors import ConfigError, DataError


class FunctionLines(Lines):
    """Lines parsed by a Python function."""

    @abstractmethod
    def function(self, schema: Schema) -> Callable[[bytes], Batch]:
        """Return the function that converts whole lines to rows, or raises."""

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
        for line in lines.split(b"\n")[:-1]:
            parsed = parse(line + b"\n", on_bad)
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
        if batch.dense.shape[1] != len(schema.dense) or batch.slots != len(schema.key_columns):
            raise ConfigError(
                f"parse returned {batch.dense.shape[1]} dense columns and {batch.slots} slots, "
                f"the schema has {len(schema.dense)} and {len(schema.key_columns)}"
                + (" with the columns of its histories" if schema.histories else "")
            )
        batch.check_rows(schema)
        return keep_events(batch, schema)


class UserFormatLines(FunctionLines):
    """Lines parsed by a user's object."""

    def __init__(self, user_format: UserFormat) -> None:
        self.user_format = user_format
        self.schema = user_format.schema  # type: ignore[misc]

    def function(self, schema: Schema) -> Callable[[bytes], Batch]:
        return self.user_format.parse


def _text(error: Exception) -> str:
    if isinstance(error, DataError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
