"""PaddleRec's networks over histories and with several labels: their data is read, they train, and ours gives the same bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from clickfleet.data.reader import Reader
from clickfleet.errors import ConfigError, DataError
from clickfleet.paddlerec import original, translation
from clickfleet.paddlerec.recdataset import SampleOrder
from clickfleet.paddlerec.task_networks import ALI_CCP
from clickfleet.training.learner import Learner
from originals import rows_of
from paddlerec.test_field_networks import SAME, result
from soak import SOAK

ROWS = 40
USER = 8
"""Slots of a user in the data of Alimama, without the user's own id."""

HEAD = """
import os
import numpy as np
import pandas as pd
from paddle.io import IterableDataset, Dataset


def lines(files):
    for file in files:
        with open(file) as opened:
            yield from opened

"""
CENSUS = (
    HEAD
    + """
class RecDataset(IterableDataset):
    def __init__(self, file_list, config):
        self.file_list = file_list

    def __iter__(self):
        for line in lines(self.file_list):
            numbers = [float(part) for part in line.split(",")]
            yield [np.array(numbers[2:], np.float32), np.array([int(numbers[1])]), np.array([int(numbers[0])])]
"""
)
ALI = (
    HEAD
    + f"""
FIELDS = {list(ALI_CCP)!r}


class RecDataset(IterableDataset):
    def __init__(self, file_list, config):
        self.file_list, self.most = file_list, config.get("hyper_parameters.max_len", 3)

    def __iter__(self):
        for line in lines(self.file_list):
            parts = line.strip().split(",")
            found = dict((field, []) for field in FIELDS)
            for part in parts[3:]:
                field, _, value = part.partition(":")
                found[field].append(int(value))
            padded = [(values + [0] * self.most)[: self.most] for values in found.values()]
            yield [*map(np.array, padded), np.array([int(parts[1])]), np.array([int(parts[2])])]
"""
)
NUMBERED = (
    HEAD
    + """
class RecDataset(Dataset):
    def __init__(self, file_list, config):
        self.data = [[int(part) for part in line.split(",")] for line in lines(file_list)][1:]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, number):
        row = self.data[number]
        return row[0], row[1], row[2:]
"""
)
ALIMAMA = (
    HEAD
    + """
class RecDataset(IterableDataset):
    def __init__(self, file_list, config):
        self.file_list = file_list

    def __iter__(self):
        for line in lines(self.file_list):
            yield [np.array([part or "0" for part in line.strip().split(",")]).astype("float32")]
"""
)
SESSIONS = (
    HEAD
    + """
class RecDataset(IterableDataset):
    def __init__(self, file_list, config):
        stem = file_list[0][: -len("label.pkl")]
        self.parts = [pd.read_pickle(stem + name + ".pkl") for name in ("feat", "price", "sess_input", "count", "label")]

    def __iter__(self):
        yield from map(list, zip(*self.parts))
"""
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def project(
    folder: Path, network: str, hyper: dict[str, Any], write: Callable[[Path, Any], None], reader: str | None = None
) -> Path:
    home = folder / network
    for part, seed in (("train", 1), ("test", 2)):
        (home / "data" / part).mkdir(parents=True)
        write(home / "data" / part, np.random.default_rng(seed))
    runner = {
        "train_data_dir": "data/train",
        "test_data_dir": "data/test",
        "train_batch_size": 10,
        "epochs": 1,
        "model_save_path": "output",
        "infer_load_path": "output",
        "infer_start_epoch": 0,
        "infer_end_epoch": 1,
        "train_reader_path": "own_reader",
        "infer_reader_path": "own_reader",
    }
    path = home / "config.yaml"
    optimizer = {"optimizer": {"class": "Adam", "learning_rate": 0.01}}
    path.write_text(yaml.safe_dump({"runner": runner, "hyper_parameters": optimizer | hyper}))
    if reader is not None:
        (home / "own_reader.py").write_text(reader)
    return path


def interests(rng: Any) -> list[tuple[list[int], list[int], int, int, int]]:
    """Rows of past items, their categories, an item and its category, which is clicked if the past has the category."""
    rows = []
    for _ in range(ROWS):
        items = rng.integers(1, 50, rng.integers(1, 7)).tolist()
        item = int(rng.integers(1, 50))
        past = [item % 5 + 1 for item in items]
        rows.append((items, past, item, item % 5 + 1, int(item % 5 + 1 in past)))
    return rows


def _joined(values: list[int]) -> str:
    return " ".join(map(str, values))


def din(folder: Path, network: str = "din", **hyper: Any) -> Path:
    def write(part: Path, rng: Any) -> None:
        lines = [f"{_joined(i)};{_joined(c)};{item};{cat};{y}" for i, c, item, cat, y in interests(rng)]
        (part / "part.txt").write_text("\n".join(lines) + "\n")

    usual = {"item_emb_size": 8, "cat_emb_size": 8, "item_count": 50, "cat_count": 6, "act": "sigmoid"}
    usual |= {"optimizer": {"class": "SGD", "learning_rate_base_lr": 0.85, "strategy": "async"}, "use_DataLoader": True}
    return project(folder, network, usual | hyper, write)


def dien(folder: Path) -> Path:
    return din(folder, "dien")


def bst(folder: Path, **hyper: Any) -> Path:
    def write(part: Path, rng: Any) -> None:
        lines = []
        for items, cats, item, cat, y in interests(rng):
            tokens = [f"{name}:{v}" for name, values in (("history", items), ("cate", cats)) for v in values]
            tokens += [f"position:{at}" for at in range(len(items))]
            lines.append(
                " ".join(
                    [*tokens, "userid:3", f"target:{item}", f"target_cate:{cat}", "target_position:0", f"label:{y}"]
                )
            )
        (part / "part.txt").write_text("\n".join(lines) + "\n")

    usual = {"item_emb_size": 8, "cat_emb_size": 8, "position_emb_size": 8, "n_encoder_layers": 1, "n_head": 2}
    usual |= {"d_model": 24, "d_key": 12, "d_value": 12, "d_inner_hid": 16, "dropout_rate": 0.0, "fc_sizes": [16, 8]}
    return project(folder, "bst", usual | hyper, write)


def dmr(folder: Path) -> Path:
    def write(part: Path, rng: Any) -> None:
        lines = []
        for items, cats, item, cat, y in interests(rng):
            rest = [0] * (50 - len(items))
            past = [[1] * len(items) + rest, cats + rest, items + rest, [1] * len(items) + rest, rest + rest]
            row = [*(number for column in past for number in column[:50]), 7, *[2] * USER]
            lines.append(",".join(map(str, [*row, 5, cat, 11, 12, item, 9.5, 1, y])))
        (part / "part.txt").write_text("\n".join(lines) + "\n")

    return project(
        folder, "dmr", {"main_embedding_size": 8, "other_embedding_size": 4, "user_size": 10}, write, ALIMAMA
    )


def dsin(folder: Path) -> Path:
    def write(part: Path, rng: Any) -> None:
        rows = interests(rng)
        sessions = np.zeros((ROWS, 10, 10), np.int64)
        for row, (items, cats, *_) in enumerate(rows):
            sessions[row, 0, : len(cats)], sessions[row, 1, : len(items)] = cats, items
            sessions[row, 2, 0], sessions[row, 3, 0] = cats[0], items[0]  # a second session
        slots = [[3, 5, 0, *[1] * USER, 4, 6, cat, item] for _, _, item, cat, _ in rows]
        parts = {"feat": np.array(slots), "price": np.full(ROWS, 0.5, np.float32), "sess_input": sessions}
        parts |= {"count": np.full(ROWS, 2), "label": np.array([row[-1] for row in rows])}
        for name, values in parts.items():
            pd.to_pickle(values, part / f"sample_{name}.pkl")

    return project(folder, "dsin", {"feat_embed_size": 8}, write, SESSIONS)


def census(folder: Path, network: str, hyper: dict[str, Any], reader: bool = True) -> Path:
    def write(part: Path, rng: Any) -> None:
        numbers = rng.normal(0, 1, (ROWS, 6)).round(3)
        labels = (numbers[:, :2] > 0).astype(int)
        lines = [",".join(map(str, [*y, *x])) for x, y in zip(numbers.tolist(), labels.tolist(), strict=True)]
        (part / "part.txt").write_text("\n".join(lines) + "\n")

    path = project(folder, network, {"feature_size": 6, "tower_size": 8, **hyper}, write, CENSUS if reader else None)
    if not reader:
        path.write_text(path.read_text().replace("own_reader", "reader"))
    return path


def share_bottom(folder: Path, reader: bool = True) -> Path:
    return census(folder, "share_bottom", {"task_num": 2, "bottom_size": 16}, reader)


def mmoe(folder: Path, **hyper: Any) -> Path:
    return census(folder, "mmoe", {"gate_num": 2, "expert_num": 3, "expert_size": 8} | hyper)


def ple(folder: Path) -> Path:
    hyper = {"task_num": 2, "exp_per_task": 2, "shared_num": 1, "level_number": 1, "expert_size": 8}
    return census(folder, "ple", hyper)


def esmm(folder: Path, **hyper: Any) -> Path:
    def write(part: Path, rng: Any) -> None:
        lines = []
        for number in range(ROWS):
            values = rng.integers(1, 9, 5).tolist()
            click = int(values[0] > 4)
            buy = click * int(values[1] > 4)
            tokens = [f"101:{values[0]}", f"121:{10 + values[1]}", *(f"150_14:{20 + v}" for v in values)]
            lines.append(",".join([str(number), str(click), str(buy), *tokens]))
        (part / "part.txt").write_text("\n".join(lines) + "\n")

    usual = {"sparse_feature_dim": 4, "num_field": len(ALI_CCP), "ctr_fc_sizes": [8], "cvr_fc_sizes": [8]}
    return project(folder, "esmm", usual | {"sparse_feature_number": 40} | hyper, write, ALI)


def aitm(folder: Path, **hyper: Any) -> Path:
    def write(part: Path, rng: Any) -> None:
        ids = rng.integers(0, 9, (ROWS + 1, 3))
        rows = np.column_stack([ids[:, 0] > 3, (ids[:, 0] > 3) & (ids[:, 1] > 3), ids]).astype(int)
        (part / "part.csv").write_text("\n".join(",".join(map(str, row)) for row in rows.tolist()) + "\n")

    usual = {"embedding_size": 4, "dims": [8, 8], "drop_prob": [0.1, 0.3]}
    usual |= {"feature_vocabulary": [["101", 9], ["121", 9], ["122", 9]]}
    return project(folder, "aitm", usual | hyper, write, NUMBERED)


PAST = {"din": din, "dien": dien, "bst": bst, "dmr": dmr, "dsin": dsin}
SEVERAL = {"share_bottom": share_bottom, "mmoe": mmoe, "ple": ple, "esmm": esmm, "aitm": aitm}


@pytest.mark.parametrize("network", [*PAST, *SEVERAL])
def test_it_trains_evaluates_and_its_own_yaml_gives_the_same_bytes(
    network: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = (PAST | SEVERAL)[network](tmp_path)
    direct = result(capsys, "train", "-m", path, *SAME)
    assert direct["rows"] == ROWS
    evaluated = result(capsys, "evaluate", "-m", path)
    assert evaluated["auc"] == direct["test_auc"]
    assert len(evaluated.get("tasks", {})) == (2 if network in SEVERAL else 0)
    assert result(capsys, "predict", "-m", path, "--out", "scores.npy")["rows"] == ROWS
    if SOAK or network in ("din", "esmm"):  # tests/models exports every network
        result(capsys, "export", path, "artifact")
    done = result(capsys, "migrate", "paddlerec", path)
    assert done["unknown"] == 0
    again = result(capsys, "train", done["path"], f"run.dir={tmp_path}/again", *SAME)
    assert again["train_auc"] == direct["train_auc"]
    assert rows_of(tmp_path / "output") == rows_of(tmp_path / "again")


def events(path: Path) -> tuple[list[list[int]], list[float]]:
    """Return the number of events of every row, for the last two columns of the history, and the labels."""
    translated = translation.translate(original.read(path))
    data = translated.config.data
    (batch,) = Reader(data.train, translated.schema, data.format, 1000)
    counts = np.diff(batch.offsets).reshape(len(batch), batch.slots)
    assert batch.clicked is not None
    return counts[:, -2:].T.tolist(), batch.clicked.tolist()


@pytest.mark.parametrize("network", PAST)
def test_padding_is_not_an_event(network: str, tmp_path: Path) -> None:
    rows = interests(np.random.default_rng(1))
    counts, clicks = events(PAST[network](tmp_path))
    second = network == "dsin"
    assert counts[0] == counts[1] == [len(items) + second for items, *_ in rows]
    assert clicks == [row[-1] for row in rows]


def test_census_reads_the_same_with_its_reader_and_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, reader in (("a", True), ("b", False)):
        path = share_bottom(tmp_path / name, reader)
        done = result(capsys, "train", path, f"run.dir={tmp_path}/run-{name}", *SAME)
        if reader:
            first = done
    assert done["tasks"] == first["tasks"]


@pytest.mark.parametrize(
    ("make", "hyper", "message"),
    [
        (din, {"cat_emb_size": 0}, "cat_emb_size"),
        (mmoe, {"gate_num": 3}, "two labels"),
        (esmm, {"num_field": 5}, "must be 23"),
        (esmm, {"cvr_fc_sizes": [4]}, "same widths"),
        (aitm, {"feature_vocabulary": ["101"]}, "numbers of values"),
        (aitm, {"drop_prob": [2]}, "from 0 to below 1"),
    ],
)
def test_wrong_values_are_refused_by_name(make: Any, hyper: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        translation.translate(original.read(make(tmp_path, **hyper)))
    assert next(iter(hyper)) in str(error.value)


@pytest.mark.parametrize(
    ("make", "hyper", "dims"),
    [
        (din, {"cat_emb_size": 4}, {"cat": 4}),
        (bst, {"position_emb_size": 4, "cat_emb_size": 3}, {"target_cate": 3, "target_position": 4}),
    ],
)
def test_an_embedding_of_another_size_is_a_width_of_its_slot(
    make: Any, hyper: dict[str, Any], dims: dict[str, int], tmp_path: Path
) -> None:
    translated = translation.translate(original.read(make(tmp_path, **hyper)))
    assert translated.config.table.dims == dims
    learner = Learner(translated.config, translated.schema)
    names = [slot.name for slot in translated.schema.slots]
    assert {name: width for name, width in zip(names, learner.shape.widths or (), strict=True) if name in dims} == dims


def test_ids_that_a_reader_gives_as_floats_are_whole_numbers(tmp_path: Path) -> None:
    translated = translation.translate(original.read(dmr(tmp_path)))
    assert set(translated.config.table.dims.values()) == {4}
    assert {"pid", "occupation"} <= translated.config.table.dims.keys()
    schema = translated.schema
    order = SampleOrder([["cate", "price"], schema.label], schema, "part", 2)
    label, cate, price = order.of([np.array([8998, 9.5], np.float32), np.array([1.0])])
    assert cate.tolist() == [8998]
    assert cate.dtype.kind == "i"
    assert (label.tolist(), price.tolist()) == ([1.0], [9.5])


def test_a_sample_of_another_shape_is_refused(tmp_path: Path) -> None:
    translated = translation.translate(original.read(dmr(tmp_path)))
    assert set(translated.config.table.dims.values()) == {4}
    assert {"pid", "occupation"} <= translated.config.table.dims.keys()
    schema = translated.schema
    order = SampleOrder([["cate", "brand"], schema.label], schema, "part", 2)
    with pytest.raises(DataError, match=r"2 arrays of \[3, 1\] elements, expected 2 of \[2, 1\]"):
        order.of([np.arange(3), np.array([1])])
