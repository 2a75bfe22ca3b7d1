from pathlib import Path

import pytest

from clickfleet.config.plugins import closest, find, names
from clickfleet.data import formats
from clickfleet.data.formats import Format, load
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.errors import ConfigError, DataError
from lines import read

HEADER = """
import numpy as np
from clickfleet.data.batch import Batch
from clickfleet.data.schema import Dense, Schema, Slot
"""


def test_every_file_of_a_folder_is_a_plug_in():
    files = {path.stem for path in Path(formats.__path__[0]).glob("*.py")}
    assert names("formats") == sorted(name for name in files if not name.startswith("_"))
    assert {"criteo", "csv", "parquet"} <= files


@pytest.mark.parametrize("name", names("formats"))
def test_each_has_one_public_object(name):
    assert isinstance(load(name), Format)


def test_a_wrong_name_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"unknown format 'parket'; did you mean parquet\?"):
        find("formats", "parket", Format)
    assert closest("zzz", ["a", "b"]) == "; choose from a, b"


def test_a_users_file(write):
    path = write(
        "mine.py",
        HEADER
        + """
import helper_beside_it

class Words:
    schema = Schema(slots=(Slot("length"),))

    def parse(self, block):
        lines = block.splitlines()
        if any(b"?" in line for line in lines):
            raise ValueError("a question")
        lengths = [helper_beside_it.measure(line) for line in lines]
        return Batch(np.zeros((len(lines), 0), np.float32), np.array(lengths, np.uint64), 1)
""",
    )
    write("helper_beside_it.py", "def measure(line): return len(line)\n")
    data = write("data", "abc\nwhat?\nde\n")
    with pytest.raises(DataError, match="data:2: ValueError: a question"):
        read(data, str(path))
    (batch,) = read(data, str(path), bad_lines="skip", max_bad_fraction=0.5)
    assert batch.keys.tolist() == [3, 2]
    (batch,) = read(data, {"name": "mine.py"}, bad_lines="skip", max_bad_fraction=1, base=path.parent)
    assert len(batch) == 2


def test_a_users_format_has_its_own_schema(write):
    path = write(
        "mine.py", HEADER + "class Mine:\n    schema = Schema(slots=(Slot('a'),))\n    def parse(self, block): ...\n"
    )
    with pytest.raises(DataError, match="the given schema and the format's own have different schemas"):
        read(write("data", "x\n"), str(path), Schema(slots=(Slot("b"),)))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n", "expected one public format, found none"),
        ("from clickfleet.data.formats.criteo import criteo as a\nb = a\n", "found 2"),
        ("import nothing_of_that_name\n", "mine.py: ModuleNotFoundError"),
        ("def (\n", "mine.py: SyntaxError"),
    ],
)
def test_a_users_file_that_does_not_work(write, source, message):
    with pytest.raises(ConfigError) as refusal:
        load(str(write("mine.py", source)))
    assert message in str(refusal.value)


def test_a_users_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        load("./nothing.py", tmp_path)


def test_a_users_format_must_keep_to_its_schema(write):
    body = """
class Mine:
    schema = Schema(slots=(Slot("a"), Slot("b")))

    def parse(self, block):
        return RESULT
"""
    for result, message in {
        "Batch(np.zeros((1, 0), np.float32), np.zeros(1, np.uint64), 1)": "0 dense columns and 1 slots",
        "[1]": "parse returned list, not a Batch",
    }.items():
        path = write(f"mine{len(result)}.py", HEADER + body.replace("RESULT", result))
        with pytest.raises(ConfigError, match=message):
            read(write("data", "x\n"), str(path))


def test_a_declaration_of_ours_in_a_users_file(write):
    path = write(
        "mine.py",
        """
from dataclasses import replace
from clickfleet.data.formats.csv import Csv
mine = Csv(separator=";", columns=("label", "a", "n"))
""",
    )
    (batch,) = read(write("data", "1;x;5\n"), str(path), Schema((Dense("n"),), (Slot("a"),)))
    assert batch.dense.tolist() == [[5]]
