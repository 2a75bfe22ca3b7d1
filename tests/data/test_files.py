import os
from pathlib import Path

import fsspec
import pytest

from clickfleet.data.files import expand
from clickfleet.data.reader import Reader
from clickfleet.errors import ConfigError, DataError
from lines import criteo_text, read


@pytest.fixture
def folder(write, tmp_path) -> Path:
    for name in ("b", "a", ".DS_Store", "_SUCCESS", "deeper/c"):
        write(f"data/{name}", "x\n")
    return tmp_path / "data"


def names(paths: list[str]) -> list[str]:
    return [os.path.basename(path) for path in paths]


def test_a_folder_stands_for_its_files(folder):
    assert names(expand(folder)) == ["a", "b"]


def test_globs_are_sorted_and_order_is_kept(folder):
    assert names(expand([f"{folder}/[ab]", f"{folder}/a"])) == ["a", "b", "a"]
    assert names(expand(f"{folder}/**/*")) == ["a", "b", "c"]
    assert names(expand(f"{folder}/_SUCCESS")) == ["_SUCCESS"]  # named itself
    assert names(expand("data/a", base=str(folder.parent))) == ["a"]


def test_what_is_not_there(folder):
    os.makedirs(folder / "empty")
    for path, message in {
        f"{folder}/empty": "the folder contains no data files",
        f"{folder}/nothing": "there is no file",
        f"{folder}/x*": "no file matches",
    }.items():
        with pytest.raises(DataError, match=message):
            expand(path)
    with pytest.raises(ConfigError, match="no data files given"):
        expand([])
    with pytest.raises(ConfigError, match="nosuch://a"):
        expand("nosuch://a")


def test_fsspec_memory():
    with fsspec.open("memory://logs/part-0", "wb") as file:
        file.write(criteo_text(5))
    with fsspec.open("memory://logs/part-1.gz", "wb", compression="gzip") as file:
        file.write(criteo_text(4, 5))
    with fsspec.open("memory://logs/_SUCCESS", "wb"):
        pass
    for paths in ("memory://logs", "memory://logs/part-*", ["memory://logs/part-0", "memory://logs/part-1.gz"]):
        assert sum(map(len, read(paths, "criteo"))) == 9
    with pytest.raises(DataError, match="memory://logs/nothing: cannot be read"):
        read("memory://logs/nothing", "criteo")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_s3(s3):
    s3.mkdir("logs")
    s3.pipe("logs/day/part-0", criteo_text(50))
    s3.pipe("logs/day/part-1", criteo_text(30, 50))
    reader = Reader("s3://logs/day/part-*", batch_size=20)
    seen, states = [], []
    for batch in reader:
        seen.append(batch.keys.tolist())
        states.append(reader.state())
    assert reader.counters.rows == 80
    again = Reader("s3://logs/day/", batch_size=20)
    again.restore(states[1])
    assert [batch.keys.tolist() for batch in again] == seen[2:]
    with pytest.raises(DataError, match="s3://logs/nothing"):
        read("s3://logs/nothing", "criteo")
