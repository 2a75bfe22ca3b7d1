"""Base classes of a user's reader: `generate_sample(line)` in Python, multislot lines on standard output.

>>> class Mine(Generator):
...     def generate_sample(self, line):
...         def samples():
...             label, word = line.split()
...             yield [("word", [int(word)]), ("label", [int(label)])]
...         return samples
>>> Mine().print_line("1 77")
'1 77 1 1\\n'

Call `Mine().run_from_stdin()` at the end of the file. Then `cat file | python mine.py` shows what training will read.
`data.format: {name: pipe, command: "python mine.py"}` reads it.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn, TextIO

from clickfleet.config.plugins import build
from clickfleet.data.batch import Batch
from clickfleet.data.formats.slots import Slots
from clickfleet.data.parsing.user_format import FunctionLines
from clickfleet.data.schema import Schema
from clickfleet.errors import ConfigError, DataError
from clickfleet.paddlerec.original import Values

Sample = Sequence[tuple[str, Sequence[Any]]]
Samples = Callable[[], Iterable[Sample | None]] | Iterable[Sample | None]


def _yielded(samples: Samples) -> Iterable[Sample | None]:
    return samples() if callable(samples) else samples


class TextGenerator:
    """Prints the values without checking them: the fast variant, for values that are already text."""

    def __init__(self) -> None:
        self._batch = 32

    def generate_sample(self, line: str) -> Samples:
        """Return the samples of a line, or a function that yields them. A sample is a list of (name, values); None is skipped."""
        raise NotImplementedError(f"{type(self).__name__} must define generate_sample(line)")

    def generate_batch(self, samples: list[Sample]) -> Samples:
        """Post-process a group of samples. The default returns them unchanged."""

        def unchanged() -> Iterator[Sample]:
            yield from samples

        return unchanged

    def set_batch(self, batch_size: int) -> None:
        """Set how many samples `generate_batch` receives at once."""
        if batch_size < 1:
            raise ConfigError(f"set_batch needs a size of at least 1, not {batch_size}")
        self._batch = batch_size

    def run_from_stdin(self) -> None:
        """Read lines from standard input and print their samples."""
        self.run(sys.stdin, sys.stdout)

    def run_from_memory(self) -> NoReturn:
        """Reject PaddleRec's method for samples that do not come from input lines."""
        raise ConfigError(
            f"{type(self).__name__}.run_from_memory() is not supported: clickfleet reads samples from files",
            "write the data to a file and call run_from_stdin(), or pass arrays to clickfleet.train(data=…)",
        )

    def run(self, lines: Iterable[str], out: TextIO) -> None:
        """Print the samples of `lines` to `out`."""
        for sample in self.samples(lines):
            out.write(self.format(sample))
        out.flush()

    def print_line(self, line: str) -> str:
        """Return what `run` prints for one line."""
        return "".join(self.format(sample) for sample in self.samples([line]))

    def samples(self, lines: Iterable[str]) -> Iterator[Sample]:
        """Yield the samples of lines, after `generate_batch`."""
        group: list[Sample] = []
        for line in lines:
            for sample in _yielded(self.generate_sample(line)):
                if sample is None:
                    continue
                group.append(self.check(sample))
                if len(group) == self._batch:
                    yield from self._processed(group)
                    group = []
        if group:
            yield from self._processed(group)

    def _processed(self, group: list[Sample]) -> Iterator[Sample]:
        for sample in _yielded(self.generate_batch(group)):
            if sample is not None:
                yield self.check(sample)

    def check(self, sample: Any) -> Sample:
        """Return the sample as a list of (name, values); raise `DataError` if it is something else."""
        if isinstance(sample, zip):
            sample = list(sample)
        if not isinstance(sample, list | tuple):
            raise DataError(
                f"a sample must be a list of (name, values), not {type(sample).__name__}",
                'for example [("words", [1926, 8, 17]), ("label", [1])]',
            )
        return sample

    def format(self, sample: Sample) -> str:
        """Format a sample as one line of blocks `n v1 … vn`."""
        return " ".join(f"{len(values)} {' '.join(map(str, values))}" for _, values in sample) + "\n"


class Generator(TextGenerator):
    """Checks every sample: it needs the names of the first sample in the same order, and non-empty lists of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.types: dict[str, str] = {}
        """uint64 or float per name. The first float value makes a name float permanently."""

    def check(self, sample: Any) -> Sample:
        sample = super().check(sample)
        names = [self._name(item) for item in sample]
        if not self.types:
            if len(set(names)) < len(names):
                raise DataError(f"a sample has a duplicate name: {', '.join(names)}")
            self.types = dict.fromkeys(names, "uint64")
        elif names != list(self.types):
            raise DataError(
                f"a sample has the names {', '.join(names)}, but the first one had {', '.join(self.types)}",
                "yield the same names in the same order for every sample; pad missing values",
            )
        for name, values in sample:
            self._check_values(name, values)
        return sample  # type: ignore[no-any-return]

    @staticmethod
    def _name(item: Any) -> str:
        if not isinstance(item, list | tuple) or len(item) != 2 or not isinstance(item[0], str):
            raise DataError(f"an entry of a sample must be (name, values), not {item!r:.80}")
        return item[0]

    def _check_values(self, name: str, values: Any) -> None:
        if not isinstance(values, list | tuple) or not values:
            raise DataError(f"slot {name}: values must be a non-empty list, not {values!r:.80}", "pad with 0")
        for value in values:
            if isinstance(value, float):
                self.types[name] = "float"
            elif not isinstance(value, int) or isinstance(value, bool):
                raise DataError(f"slot {name}: values must be integers or floats, not {value!r:.80}")


class GeneratorLines(FunctionLines):
    """Lines parsed by a user's generator class. Its values are matched to the schema by name."""

    def __init__(self, kind: type[TextGenerator], config: Any = None) -> None:
        self.kind, self.config = kind, config
        self._local = threading.local()  # a generator may keep state between lines, so each thread has one

    def function(self, schema: Schema) -> Callable[[bytes], Batch]:
        labelled = Slots().parser(schema, f"{schema.label}:".encode(), "")
        unlabelled = Slots().parser(schema, b":", "")

        def parse(lines: bytes) -> Batch:
            if not hasattr(self._local, "generator"):
                self._local.generator = self.kind()
                if isinstance(self.config, dict):  # as the last lines of its file do
                    self._local.generator.init(self.config)
            samples = list(self._local.generator.samples(lines.decode().splitlines()))
            text = "".join(" ".join(_tokens(sample)) + "\n" for sample in samples).encode()
            has_label = any(name in schema.label_columns for sample in samples[:1] for name, _ in sample)
            parsed = (labelled if has_label else unlabelled)(text, "stop")
            for bad in parsed.bad:
                raise DataError(f"{bad.field}: {bad.reason}" if bad.field else bad.reason)
            return parsed.batch

        return parse


def _tokens(sample: Sample) -> Iterator[str]:
    for name, values in sample:
        for value in values:
            yield f"{name}:{value}"


def format_of(module: ModuleType, settings: Mapping[str, Any]) -> GeneratorLines | None:
    """Return the format for the one generator class of a user's file. None: the file has none."""
    kinds = [
        item
        for key, item in vars(module).items()
        if not key.startswith("_")
        and isinstance(item, type)
        and issubclass(item, TextGenerator)
        and item.__module__ == module.__name__
    ]
    if not kinds:
        return None
    if len(kinds) > 1:
        raise ConfigError(
            f"{module.__file__}: expected one public generator class, found {len(kinds)}",
            "start the names of helper classes with an underscore",
        )
    if hasattr(kinds[0], "init"):
        return GeneratorLines(kinds[0], reader_config(settings))
    build(kinds[0], dict(settings), "data.format")  # a generator without `init` takes no settings
    return GeneratorLines(kinds[0])


def reader_config(settings: Mapping[str, Any]) -> Values:
    """Return the flat dictionary that a PaddleRec reader receives, `data.format.config`."""
    for key in settings:
        if key != "config":
            raise ConfigError(f"unknown key data.format.{key}", "a reader for PaddleRec accepts only config")
    return dict(settings.get("config", {}))
