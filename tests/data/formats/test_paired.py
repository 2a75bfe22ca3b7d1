"""paired: a file of ids and its neighbour with the labels."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from clickfleet.data.formats.paired import Paired
from clickfleet.data.schema import KeyRule, Schema, Slot
from clickfleet.errors import DataError

SCHEMA = Schema(slots=(Slot("a"), Slot("b")), label="label", keys=KeyRule("raw"))
FORMAT = Paired(columns=("label", "a", "b"))


def batches(path: Path, at: int = 0) -> list[tuple[int, np.ndarray, np.ndarray | None]]:
    found = []
    for block in FORMAT.blocks(str(path), SCHEMA, at):
        batch = block.parse("stop").batch
        found.append((block.end, batch.keys.reshape(-1, 2), batch.labels))
    return found


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_lines_meet_their_labels(end: str, tmp_path: Path) -> None:
    (tmp_path / "day_x.txt").write_bytes(b"1 2\n3 4\n5 6" + end.encode())
    (tmp_path / "day_y.txt").write_bytes(b"0\n1\n1" + end.encode())
    ((_, keys, labels),) = batches(tmp_path / "day_x.txt")
    assert keys.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert labels is not None
    assert labels.tolist() == [0, 1, 1]
    assert not batches(tmp_path / "day_y.txt")


def test_compressed_files_and_a_position_in_the_middle(tmp_path: Path) -> None:
    rows = 400_000
    ids = np.arange(2 * rows).reshape(rows, 2)
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress("".join(f"{a} {b}\n" for a, b in ids).encode(), 1))
    (tmp_path / "y.txt.gz").write_bytes(gzip.compress(("0\n1\n" * (rows // 2)).encode(), 1))
    blocks = batches(tmp_path / "x.txt.gz")
    assert len(blocks) > 1
    assert np.array_equal(np.concatenate([keys for _, keys, _ in blocks]), ids)
    rest = batches(tmp_path / "x.txt.gz", blocks[0][0])
    assert np.array_equal(np.concatenate([keys for _, keys, _ in rest]), ids[len(blocks[0][1]) :])


def test_ids_without_labels_can_be_scored(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("1 2\n")
    ((_, keys, labels),) = batches(tmp_path / "x.txt")
    assert keys.tolist() == [[1, 2]]
    assert labels is None


def test_other_files_and_other_lengths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "part-0").write_text("1 2\n")
    with pytest.raises(DataError, match=r"expected a file of ids"):
        batches(tmp_path / "part-0")
    (tmp_path / "x.txt").write_text("1 2\n3 4\n")
    (tmp_path / "y.txt").write_text("1\n")
    with pytest.raises(DataError, match="different numbers of lines"):
        batches(tmp_path / "x.txt")
