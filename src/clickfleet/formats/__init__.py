"""Raw formats, one file each: bytes -> Batch. This is their contract.

A format opens a file as a series of blocks. Each block can be parsed on its own, in any thread, and knows the position
from which the file can be opened again, so that a reader can go on exactly where it stopped. The formats of text share
their loops: a file here is mostly a declaration. A user's own file holds any object with `schema` and
`parse(block: bytes) -> Batch`, where a block is whole lines, a generator class, or a `RecDataset`; an error raised there
is a bad line.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from clickfleet.batch import Batch
from clickfleet.errors import ConfigError
from clickfleet.find import Plugin, build, check_trusted, find, module
from clickfleet.generator import TextGenerator
from clickfleet.schema import Schema

OnBad = Literal["stop", "some", "all"]
"""At a bad line: stop there; go on and remember some of them; go on and remember all."""


@dataclass(frozen=True, slots=True)
class Bad:
    """A line that could not be read; `line` counts from 0 at the start of its block."""

    line: int
    text: bytes
    field: str
    reason: str


@dataclass(slots=True)
class Parsed:
    """The rows of one block, and the lines that became none."""

    batch: Batch
    lines: int
    bad_lines: int = 0
    bad: list[Bad] = field(default_factory=list)


class Block(ABC):
    """Some rows of a file, not yet parsed; opening the file at `at` gives this block again, at `end` the next one."""

    at: int
    end: int
    size: int  # bytes of the file it stands for

    @abstractmethod
    def parse(self, on_bad: OnBad) -> Parsed: ...


class Format(ABC):
    """A way to write rows into files."""

    schema: ClassVar[Schema | None] = None
    """What its data means when no schema is given."""
    header_lines: ClassVar[int] = 0
    """Lines of every file that come before its rows."""

    @abstractmethod
    def blocks(self, path: str, schema: Schema, at: int) -> Iterator[Block]:
        """The blocks of a file from position `at` on, which is 0 or the `at` of an earlier block."""

    def about_no_labels(self, schema: Schema) -> str:
        """What to tell who wants to train on rows without a label."""
        return "rows without a label can be predicted, converted and described"

    def runs(self) -> str:
        """The command that reading starts, for people; empty where no code of a user's runs."""
        return ""

    def cancel(self, paths: Collection[str]) -> None:  # noqa: B027
        """Ends reads of these files that may wait for ever: they are not wanted any more."""


class _HasParse(type):
    def __instancecheck__(cls, item: Any) -> bool:
        return callable(getattr(item, "parse", None)) and isinstance(getattr(item, "schema", None), Schema)

    def __subclasscheck__(cls, item: type) -> bool:
        return callable(getattr(item, "parse", None)) and hasattr(item, "schema")


class Own(metaclass=_HasParse):
    """A user's format: any object with `schema` and `parse(block) -> Batch`."""

    schema: Schema

    def parse(self, block: bytes) -> Batch:
        raise NotImplementedError


def load(name: str | Format | Mapping[str, Any] | Plugin, base: str | Path = ".") -> Format:
    """A format by its name, its name and options, or the path of a user's file."""
    from clickfleet.formats._own import GeneratorLines, OwnLines
    from clickfleet.formats._recdataset import RecDatasetRows

    if isinstance(name, Format):
        return name
    if isinstance(name, Own):
        return OwnLines(name)
    chosen = name if isinstance(name, Plugin) else Plugin(name) if isinstance(name, str) else Plugin.parse(name)
    options = dict(chosen.settings)
    if chosen.name.endswith(".py") and hasattr(home := module("formats", chosen, base), "RecDataset"):
        return RecDatasetRows(home.RecDataset, _reader_config(options))
    item = find("formats", chosen, (Format, Own, TextGenerator), base)
    if isinstance(item, type) and issubclass(item, TextGenerator):
        if hasattr(item, "init"):
            return GeneratorLines(item, _reader_config(options))
        build(item, options, "data.format")  # it has none: refuses any
        return GeneratorLines(item)
    made = build(item, options, "data.format")
    if isinstance(made, Format) and (action := made.runs()):
        check_trusted(chosen, action)
    return made if isinstance(made, Format) else OwnLines(made)


def _reader_config(options: dict[str, Any]) -> dict[str, Any]:
    """What a reader made for PaddleRec is told: one flat dictionary, `data.format.config`."""
    config = options.pop("config", {})
    for key in options:
        raise ConfigError(f"unknown key data.format.{key}; a reader of your own takes config")
    return dict(config)
