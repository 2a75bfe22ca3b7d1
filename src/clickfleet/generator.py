"""A user's reader as a class: `generate_sample(line)` in Python, multislot lines on standard output.

>>> class Mine(Generator):
...     def generate_sample(self, line):
...         def samples():
...             label, word = line.split()
...             yield [("word", [int(word)]), ("label", [int(label)])]
...         return samples
>>> Mine().print_line("1 77")
'1 77 1 1\\n'

At the end of the file `Mine().run_from_stdin()`; then `cat file | python mine.py` shows what training will read, and
`data.format: {name: pipe, command: "python mine.py"}` reads it.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

from clickfleet.errors import ConfigError, DataError

Sample = Sequence[tuple[str, Sequence[Any]]]
Samples = Callable[[], Iterable[Sample | None]]


class TextGenerator:
    """Prints the values as they are, without looking at them: the quick variant, for values that are text already."""

    def __init__(self) -> None:
        self._batch = 32

    def generate_sample(self, line: str | None) -> Samples:
        """A function that yields the samples of a line, each a list of (name, values); None for no sample."""
        raise NotImplementedError(f"{type(self).__name__} must define generate_sample(line)")

    def generate_batch(self, samples: list[Sample]) -> Samples:
        """Post-processes a group of samples; as it stands, it changes nothing."""

        def unchanged() -> Iterator[Sample]:
            yield from samples

        return unchanged

    def set_batch(self, batch_size: int) -> None:
        """How many samples `generate_batch` sees at once."""
        if batch_size < 1:
            raise ConfigError(f"a batch needs at least one sample, not {batch_size}")
        self._batch = batch_size

    def run_from_stdin(self) -> None:
        """Reads lines from standard input and prints their samples."""
        self.run(sys.stdin, sys.stdout)

    def run_from_memory(self) -> None:
        """Prints samples that come from no line: `generate_sample(None)` makes them."""
        self._print(self._samples([None]), sys.stdout)

    def run(self, lines: Iterable[str], out: TextIO) -> None:
        """Prints the samples of `lines` to `out`."""
        self._print(self._samples(lines), out)

    def print_line(self, line: str) -> str:
        """What a line becomes."""
        return "".join(self.format(sample) for sample in self._samples([line]))

    def samples(self, lines: Iterable[str]) -> Iterator[Sample]:
        """The samples of lines, grouped and post-processed."""
        yield from self._samples(lines)

    def _samples(self, lines: Iterable[str | None]) -> Iterator[Sample]:
        group: list[Sample] = []
        for line in lines:
            for sample in self.generate_sample(line)():
                if sample is None:
                    continue
                group.append(self.check(sample))
                if len(group) == self._batch:
                    yield from self._processed(group)
                    group = []
        if group:
            yield from self._processed(group)

    def _processed(self, group: list[Sample]) -> Iterator[Sample]:
        for sample in self.generate_batch(group)():
            if sample is not None:
                yield self.check(sample)

    def _print(self, samples: Iterable[Sample], out: TextIO) -> None:
        for sample in samples:
            out.write(self.format(sample))
        out.flush()

    def check(self, sample: Any) -> Sample:
        """The sample as a list of (name, values)."""
        if isinstance(sample, zip):
            sample = list(sample)
        if not isinstance(sample, list | tuple):
            raise DataError(
                f"a sample must be a list of (name, values), not {type(sample).__name__}",
                'such as [("words", [1926, 8, 17]), ("label", [1])]',
            )
        return sample

    def format(self, sample: Sample) -> str:
        """A sample as one line of blocks `n v1 … vn`."""
        return " ".join(f"{len(values)} {' '.join(map(str, values))}" for _, values in sample) + "\n"


class Generator(TextGenerator):
    """Checks every sample: the names of the first one in the same order, and lists of numbers that are not empty."""

    def __init__(self) -> None:
        super().__init__()
        self.types: dict[str, str] = {}
        """uint64 or float of each name; one fraction makes it float for good."""

    def check(self, sample: Any) -> Sample:
        sample = super().check(sample)
        names = [self._name(item) for item in sample]
        if not self.types:
            if len(set(names)) < len(names):
                raise DataError(f"a sample names a slot twice: {', '.join(names)}")
            self.types = dict.fromkeys(names, "uint64")
        elif names != list(self.types):
            raise DataError(
                f"a sample has the names {', '.join(names)}; the first one had {', '.join(self.types)}",
                "every sample must have the same names in the same order: pad what is missing",
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
            raise DataError(f"slot {name}: values must be a list that is not empty, not {values!r:.80}", "pad with 0")
        for value in values:
            if isinstance(value, float):
                self.types[name] = "float"
            elif not isinstance(value, int) or isinstance(value, bool):
                raise DataError(f"slot {name}: {value!r:.80} is neither an integer nor a float")
