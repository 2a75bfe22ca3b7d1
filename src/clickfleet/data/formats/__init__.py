"""The file formats, one plug-in per file, and their contract.

A format opens a file as a series of blocks. Blocks can be parsed independently, in any thread. Each knows the position at which
to reopen the file, so that a reader can resume exactly. Text formats share the parsers in `clickfleet.data.parsing`.

A user's file defines an object with `schema` and `parse(block: bytes) -> Batch`, where a block is whole lines. It may also
define a generator class or a `RecDataset`. An exception raised there marks a bad line.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from clickfleet.config.plugins import Plugin, build, check_trusted, extensions, find, module
from clickfleet.data.batch import Batch
from clickfleet.data.schema import Schema

OnBad = Literal["stop", "some", "all"]
"""What to do at a bad line: stop; continue and keep some bad lines; continue and keep all."""


@dataclass(frozen=True, slots=True)
class Bad:
    """A bad line. `line` counts from 0 at the start of its block."""

    line: int
    text: bytes
    field: str
    reason: str


@dataclass(slots=True)
class Parsed:
    """The rows and the bad lines of one block."""

    batch: Batch
    lines: int
    bad_lines: int = 0
    bad: list[Bad] = field(default_factory=list)


@dataclass(slots=True)
class Block(ABC):
    """Some rows of a file, not yet parsed. Opening the file at `at` yields this block again, at `end` the next one."""

    at: int
    end: int
    size: int  # bytes in the file

    @abstractmethod
    def parse(self, on_bad: OnBad) -> Parsed: ...


class Format(ABC):
    """A file format."""

    schema: ClassVar[Schema | None] = None
    """The default schema."""
    header_lines: ClassVar[int] = 0
    """Number of lines before the first row of every file."""
    named_columns: ClassVar[bool] = False
    """Whether columns are found by name, so that files may lack those that nobody asks for."""
    corrects: ClassVar[bool] = False
    """Whether rows may correct earlier ones. Every row then has a time, and validation data is chosen by it."""

    @abstractmethod
    def blocks(self, path: str, schema: Schema, at: int) -> Iterator[Block]:
        """Yield the blocks of a file from position `at`, which is 0 or the `at` of a block."""

    def about_no_labels(self, schema: Schema) -> str:
        """Return advice for the error that rows to train on have no label."""
        about = "rows without a label can only be predicted, converted and described"
        if len(schema.tasks) == 1:
            return about
        return (
            f"every file needs the columns {', '.join(schema.label_columns)}, of which a row may lack values; {about}"
        )

    def runs(self) -> str:
        """Return the command that reading a file runs, for messages. Empty: no user code runs."""
        return ""

    def cancel(self, paths: Collection[str]) -> None:  # noqa: B027
        """Cancel reads of these files, which may otherwise block forever."""


class _HasParse(type):
    def __instancecheck__(cls, item: Any) -> bool:
        return callable(getattr(item, "parse", None)) and isinstance(getattr(item, "schema", None), Schema)

    def __subclasscheck__(cls, item: type) -> bool:
        return callable(getattr(item, "parse", None)) and hasattr(item, "schema")


class UserFormat(metaclass=_HasParse):
    """A user's format: any object with `schema` and `parse(block) -> Batch`."""

    schema: Schema

    def parse(self, block: bytes) -> Batch:
        raise NotImplementedError


def load(name: str | Format | Mapping[str, Any] | Plugin, base: str | Path = ".") -> Format:
    """Return the format with a name, a name and settings, or the path of a user's file."""
    from clickfleet.data.parsing.user_format import UserFormatLines

    if isinstance(name, Format):
        return name
    if isinstance(name, UserFormat):
        return UserFormatLines(name)
    chosen = name if isinstance(name, Plugin) else Plugin(name) if isinstance(name, str) else Plugin.parse(name)
    if chosen.automatic:  # there are no files yet to recognise a format from
        chosen = Plugin("criteo", chosen.settings)
    options = dict(chosen.settings)
    if chosen.name.endswith(".py"):
        file = module("formats", chosen, base)
        for user_format in extensions("user_format"):
            other: Format | None = user_format(file, options)
            if other is not None:
                return other
    form = build(find("formats", chosen, (Format, UserFormat), base), options, "data.format")
    if isinstance(form, Format) and (action := form.runs()):
        check_trusted(chosen, action)
    return form if isinstance(form, Format) else UserFormatLines(form)
