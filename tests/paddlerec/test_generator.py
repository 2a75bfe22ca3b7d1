import io
import subprocess
import sys

import psutil
import pytest

from clickfleet.data.schema import Dense, KeyRule, Schema, Slot, preset
from clickfleet.errors import ConfigError, DataError
from clickfleet.paddlerec.generator import Generator, TextGenerator
from lines import GOLDEN_DENSE, GOLDEN_IDS, GOLDEN_LINE, MULTISLOT_LINE, criteo_text, read

SAMPLE = [("words", [1926, 8, 17]), ("label", [1])]


def generator(samples, kind=Generator):
    class Mine(kind):
        def generate_sample(self, line):
            return lambda: iter(samples)

    return Mine()


def test_prints_counted_blocks():
    assert generator([SAMPLE]).print_line("") == "3 1926 8 17 1 1\n"
    assert generator([[("a", ("x", "y"))]], TextGenerator).print_line("") == "2 x y\n"


def test_none_is_dropped_and_one_line_may_give_many():
    assert generator([None, SAMPLE, None, SAMPLE]).print_line("") == "3 1926 8 17 1 1\n" * 2
    assert generator([zip(("a", "b"), ([1], [2]), strict=True)]).print_line("") == "1 1 1 2\n"


def test_samples_may_be_yielded_directly():
    class Mine(Generator):
        def generate_sample(self, line):
            yield [("n", [int(line)])]

    assert Mine().print_line("7") == "1 7\n"


def test_a_fraction_makes_a_slot_float():
    mine = generator([[("a", [1]), ("b", [1])], [("a", [1, 0.5]), ("b", [2])]])
    assert mine.print_line("") == "1 1 1 1\n2 1 0.5 1 2\n"
    assert mine.types == {"a": "float", "b": "uint64"}


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (["text"], "a sample must be a list of (name, values), not str"),
        ([[("a", [1], 2)]], "an entry of a sample must be (name, values)"),
        ([[(3, [1])]], "an entry of a sample must be (name, values)"),
        ([[("a", [])]], "must be a non-empty list"),
        ([[("a", 1)]], "must be a non-empty list"),
        ([[("a", ["x"])]], "values must be integers or floats, not 'x'"),
        ([[("a", [1])], [("b", [1])]], "a sample has the names b, but the first one had a"),
        ([[("a", [1]), ("b", [1])], [("b", [1]), ("a", [1])]], "same names in the same order"),
        ([[("a", [1])], [("a", [1]), ("b", [1])]], "the first one had a"),
        ([[("a", [1]), ("a", [1])]], "duplicate name"),
    ],
)
def test_checks_every_sample(samples, message):
    with pytest.raises(DataError) as refusal:
        generator(samples).print_line("")
    assert message in str(refusal.value)


def test_generate_batch_sees_groups():
    class Mine(Generator):
        def __init__(self):
            super().__init__()
            self.groups = []

        def generate_sample(self, line):
            def samples():
                yield [("n", [int(line)])]

            return samples

        def generate_batch(self, samples):
            self.groups.append(len(samples))

            def reversed_samples():
                yield from reversed(samples)

            return reversed_samples

    mine = Mine()
    mine.set_batch(3)
    out = io.StringIO()
    mine.run(["1", "2", "3", "4", "5"], out)
    assert out.getvalue() == "1 3\n1 2\n1 1\n1 5\n1 4\n"
    assert mine.groups == [3, 2]
    with pytest.raises(ConfigError, match="at least 1"):
        mine.set_batch(0)


def test_samples_without_lines_are_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"(?s)run_from_memory\(\) is not supported.*run_from_stdin\(\)"):
        generator([SAMPLE]).run_from_memory()


def test_generate_sample_must_be_there():
    with pytest.raises(NotImplementedError, match="must define generate_sample"):
        Generator().print_line("")


CRITEO_GENERATOR = """
from clickfleet import _core
from clickfleet.paddlerec.generator import Generator

LOW = [0, -3] + [0] * 11
SPAN = [20, 603, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50]

class Criteo(Generator):
    def generate_sample(self, line):
        def samples():
            fields = line.rstrip("\\n").split("\\t")
            dense = [(float(x) - low) / span if x else 0.0 for x, low, span in zip(fields[1:14], LOW, SPAN)]
            ids = [_core.py2_hash((str(i) + fields[i]).encode()) % 1000001 for i in range(14, 40)]
            named = [(str(i), [key]) for i, key in enumerate(ids, 1)]
            yield [("dense_feature", [float(f"{x:.12g}") for x in dense]), *named, ("click", [int(fields[0])])]
        return samples

if __name__ == "__main__":
    Criteo().run_from_stdin()
"""


@pytest.fixture
def script(write):
    return write("criteo_reader.py", CRITEO_GENERATOR)


def test_a_script_debugged_in_the_shell(script):
    done = subprocess.run([sys.executable, script], input=GOLDEN_LINE, capture_output=True, text=True, check=True)
    assert done.stdout == MULTISLOT_LINE + "\n"


@pytest.mark.parametrize("packed", [False, True])
def test_as_a_pipe_and_as_a_format(script, write, packed):
    import gzip

    text = GOLDEN_LINE.encode() + b"\n" + criteo_text(20)
    data = write("data.gz" if packed else "data", gzip.compress(text) if packed else text)
    pipe = {"name": "pipe", "command": f"{sys.executable} {script}"}
    (piped,) = read(data, pipe)
    (inside,) = read(data, str(script), preset("criteo-slots"), threads=2)
    (ours,) = read(data, "criteo", preset("criteo-paddle"))
    assert piped.keys[:26].tolist() == GOLDEN_IDS
    assert piped.dense[0].tolist() == pytest.approx(GOLDEN_DENSE)
    for batch in (inside, ours):
        assert (batch.keys == piped.keys).all()
        assert batch.dense == pytest.approx(piped.dense, rel=1e-6)
        assert (batch.labels == piped.labels).all()


def test_a_failing_line_of_a_generator_is_a_bad_line(script, write):
    data = write("data", f"{GOLDEN_LINE}\nnonsense\n{GOLDEN_LINE}\n")
    with pytest.raises(DataError, match="data:2: IndexError"):
        read(data, str(script), preset("criteo-slots"))
    (batch,) = read(data, str(script), preset("criteo-slots"), bad_lines="skip", max_bad_fraction=0.5)
    assert len(batch) == 2


SCHEMA = Schema((Dense("d"),), (Slot("s"),), keys=KeyRule("raw"))
LINE = "1 0.5 1 7 1 1"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            f"echo {LINE}; echo oh dear >&2; exit 3",
            "failed with exit status 3; its last output on stderr:\n    oh dear",
        ),
        (f"echo {LINE}; cat nothing-here | cat", "failed with exit status 1"),  # pipefail
        ("no-such-command", "failed with exit status 127"),
        ("kill -9 $$", "was stopped by signal 9"),
        ("cat; echo nonsense", "data:2: dense: 'nonsense' is not a number of values"),
    ],
)
def test_a_failing_command_stops_the_run(write, command, message):
    path = write("data", LINE + "\n")
    with pytest.raises(DataError) as refusal:
        read(path, {"name": "pipe", "command": command}, SCHEMA, bad_lines="error")
    assert message in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_commands_that_read_little_or_print_much(write):
    path = write("data", f"{LINE}\n" * 100_000)
    for command, rows in {"head -n 5": 5, "cat": 100_000, "cat >/dev/null": 0, "sed p": 200_000}.items():
        got = read(path, {"name": "pipe", "command": command}, SCHEMA)
        assert sum(map(len, got)) == rows
    assert (
        sum(map(len, read(path, {"name": "pipe", "command": "yes x >&2 & sleep 0.1; kill $!; cat"}, SCHEMA))) == 100_000
    )


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def test_a_reader_left_early_ends_the_command(write, small_blocks):
    from clickfleet.data.reader import Reader

    path, before = write("data", LINE + "\n"), children()
    reader = Reader(path, SCHEMA, {"name": "pipe", "command": f"yes '{LINE}'"}, batch_size=10, threads=2)
    batches = iter(reader)
    next(batches)
    started = children() - before
    assert started
    batches.close()
    assert psutil.wait_procs(started, timeout=60)[1] == []


def test_a_command_that_hangs_does_not_hang_the_reader(write):
    from clickfleet.data.reader import Reader

    paths, before = [write("data", LINE + "\n"), write("more", "wait\n")], children()
    command = 'read line; echo "$line"; if [ "$line" = wait ]; then sleep 600; fi'
    reader = Reader(paths, SCHEMA, {"name": "pipe", "command": command}, batch_size=1, threads=2)
    batches = iter(reader)
    next(batches)
    started = children() - before
    batches.close()  # waiting for the command would take longer than a test may
    assert psutil.wait_procs(started, timeout=60)[1] == []


def test_the_command_of_a_damaged_file_is_not_blamed(write):
    with pytest.raises(DataError, match="truncated or damaged"):
        read(write("data.gz", b"\x1f\x8b\x08\0"), {"name": "pipe", "command": "cat"}, SCHEMA)


def test_an_empty_command_is_refused(write):
    with pytest.raises(ConfigError, match="command is empty"):
        read(write("data", ""), {"name": "pipe", "command": " "}, SCHEMA)
