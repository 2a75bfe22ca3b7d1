"""Train a DeepFM of the same size in plain PyTorch and in other packages: raw Criteo text in, test AUC and seconds out.

Each package gets the text as its users would provide it: pandas reads the text and numbers the values of every
category; FuxiCTR does both itself. All use log1p of the counts unless stated otherwise, train one epoch with Adam 1e-3
and keep their other defaults. The seconds cover reading and encoding the training rows and the epoch. The test is
excluded, as it is in ours.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

COUNTS = [f"I{i}" for i in range(1, 14)]
CATEGORIES = [f"C{i}" for i in range(1, 27)]
HIDDEN = (400, 400, 400)
DIM = 10


clock: Callable[[], float] = time.monotonic
"""The clock: wall-clock time, or CPU time if set to `time.process_time` for a busy machine."""


class Outcome(NamedTuple):
    prepare_s: float
    train_s: float
    auc: float


class Rows(NamedTuple):
    """Encoded rows. Code 0 of a category stands for values that the training rows lack."""

    labels: Any
    dense: Any  # float32 [n, 13]
    codes: Any  # int64 [n, 26]


def frame(files: list[Path]) -> Any:
    import pandas as pd

    kinds = {"click": np.float32} | dict.fromkeys(COUNTS, np.float32) | dict.fromkeys(CATEGORIES, str)
    parts = [pd.read_csv(file, sep="\t", header=None, names=list(kinds), dtype=kinds) for file in files]
    return pd.concat(parts, ignore_index=True)


def encode(train: list[Path], test: list[Path], log1p: bool) -> tuple[Rows, Rows, list[int], float]:
    """Return training rows, test rows, the number of codes per category, and the seconds for the training rows."""
    import pandas as pd

    begin = clock()
    table = frame(train)
    codes, uniques = zip(*(pd.factorize(table[name].fillna("")) for name in CATEGORIES), strict=True)
    mine = Rows(table["click"].to_numpy(copy=True), numbers(table, log1p), np.stack(codes, 1) + 1)
    seconds = clock() - begin
    table = frame(test)
    found = [pd.Index(u).get_indexer(table[name].fillna("")) for name, u in zip(CATEGORIES, uniques, strict=True)]
    theirs = Rows(table["click"].to_numpy(copy=True), numbers(table, log1p), np.stack(found, 1) + 1)
    return mine, theirs, [len(u) + 1 for u in uniques], seconds


def encode_by_line(train: list[Path], test: list[Path], log1p: bool) -> tuple[Rows, Rows, list[int], float]:
    """Like `encode`, but as a reader written in Python: line by line, with one dictionary per category."""
    numbered: list[dict[str, int]] = [{} for _ in CATEGORIES]

    def rows(files: list[Path], growing: bool) -> Rows:
        labels, dense, codes = [], [], []
        for file in files:
            with file.open() as lines:
                for line in lines:
                    fields = line.rstrip("\n").split("\t")
                    labels.append(float(fields[0]))
                    dense.append([float(field) if field else 0.0 for field in fields[1:14]])
                    if growing:
                        codes.append([c.setdefault(f, len(c) + 1) for c, f in zip(numbered, fields[14:], strict=True)])
                    else:
                        codes.append([c.get(f, 0) for c, f in zip(numbered, fields[14:], strict=True)])
        values = np.array(dense, np.float32)
        return Rows(np.array(labels, np.float32), scaled(values, log1p), np.array(codes, np.int64))

    begin = clock()
    mine = rows(train, growing=True)
    seconds = clock() - begin
    return mine, rows(test, growing=False), [len(c) + 1 for c in numbered], seconds


def numbers(table: Any, log1p: bool) -> Any:
    return scaled(table[COUNTS].fillna(0).to_numpy(np.float32), log1p)


def scaled(values: Any, log1p: bool) -> Any:
    return np.sign(values) * np.log1p(np.abs(values)) if log1p else values


def auc(labels: Any, scores: Any) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels, scores))


class PlainDeepFM(nn.Module):
    """A straightforward implementation: one sparse embedding for all slots, nn.Sequential for the MLP."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        starts = np.cumsum([0, *sizes[:-1]])
        self.register_buffer("starts", torch.from_numpy(starts))
        self.factors = nn.Embedding(sum(sizes), DIM, sparse=True)
        self.first = nn.Embedding(sum(sizes), 1, sparse=True)
        nn.init.normal_(self.factors.weight, std=0.01)
        nn.init.zeros_(self.first.weight)
        self.linear = nn.Linear(len(COUNTS), 1)
        widths = (len(sizes) * DIM + len(COUNTS), *HIDDEN)
        layers: list[nn.Module] = []
        for a, b in zip(widths, HIDDEN, strict=False):
            layers += [nn.Linear(a, b), nn.ReLU()]
        self.deep = nn.Sequential(*layers, nn.Linear(HIDDEN[-1], 1))

    def forward(self, dense: Tensor, codes: Tensor) -> Tensor:
        codes = codes + self.starts
        e = self.factors(codes)
        pairs = (e.sum(1).square() - e.square().sum(1)).sum(1) / 2
        wide = self.first(codes).sum((1, 2)) + self.linear(dense).squeeze(1) + pairs
        out: Tensor = wide + self.deep(torch.cat([e.flatten(1), dense], 1)).squeeze(1)
        return out


def plain(
    train: list[Path], test: list[Path], batch: int, log1p: bool = True, seed: int = 7, by_line: bool = False
) -> Outcome:
    torch.manual_seed(seed)
    mine, theirs, sizes, prepare_s = (encode_by_line if by_line else encode)(train, test, log1p)
    model = PlainDeepFM(sizes)
    sparse = [model.factors.weight, model.first.weight]
    rest = [p for name, p in model.named_parameters() if not name.startswith(("factors", "first"))]
    optimizers = [torch.optim.SparseAdam(sparse, lr=1e-3), torch.optim.Adam(rest, lr=1e-3, fused=True)]
    columns = tensors(mine)
    begin = clock()
    for start in range(0, len(columns[0]), batch):
        labels, dense, codes = (column[start : start + batch] for column in columns)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(dense, codes), labels).backward()
        for optimizer in optimizers:
            optimizer.step()
    train_s = clock() - begin
    with torch.no_grad():
        _, dense, codes = tensors(theirs)
        scores = torch.cat([model(*part) for part in zip(dense.split(10_000), codes.split(10_000), strict=True)])
    return Outcome(prepare_s, train_s, auc(theirs.labels, scores.numpy()))


def tensors(rows: Rows) -> list[Tensor]:
    return [torch.from_numpy(np.array(column)) for column in rows]  # copies: the arrays of pandas are read-only


def by_name(rows: Rows) -> dict[str, Any]:
    columns = {name: np.ascontiguousarray(rows.dense[:, i]) for i, name in enumerate(COUNTS)}
    return columns | {name: np.ascontiguousarray(rows.codes[:, i]) for i, name in enumerate(CATEGORIES)}


def deepctr_torch(train: list[Path], test: list[Path], batch: int) -> Outcome:
    from deepctr_torch.inputs import DenseFeat, SparseFeat
    from deepctr_torch.models import DeepFM

    mine, theirs, sizes, prepare_s = encode(train, test, log1p=True)
    columns = [SparseFeat(name, size, DIM) for name, size in zip(CATEGORIES, sizes, strict=True)]
    columns += [DenseFeat(name, 1) for name in COUNTS]
    model = DeepFM(columns, columns, dnn_hidden_units=HIDDEN, device="cpu")
    model.compile("adam", "binary_crossentropy")
    begin = clock()
    model.fit(by_name(mine), mine.labels, batch_size=batch, epochs=1, verbose=0)
    train_s = clock() - begin
    return Outcome(prepare_s, train_s, auc(theirs.labels, model.predict(by_name(theirs), 10_000)))


def torch_rechub(train: list[Path], test: list[Path], batch: int) -> Outcome:
    from torch_rechub.basic.features import DenseFeature, SparseFeature
    from torch_rechub.models.ranking import DeepFM
    from torch_rechub.trainers import CTRTrainer
    from torch_rechub.utils.data import DataGenerator

    mine, theirs, sizes, prepare_s = encode(train, test, log1p=True)
    slots = [SparseFeature(name, vocab_size=n, embed_dim=DIM) for name, n in zip(CATEGORIES, sizes, strict=True)]
    dense = [DenseFeature(name) for name in COUNTS]
    with tempfile.TemporaryDirectory() as folder:
        begin = clock()
        data = DataGenerator(by_name(mine), mine.labels)
        reader, _, tester = data.generate_dataloader(
            x_val=by_name(theirs), y_val=theirs.labels, x_test=by_name(theirs), y_test=theirs.labels, batch_size=batch
        )
        model = DeepFM(slots + dense, slots, {"dims": list(HIDDEN), "dropout": 0.0, "activation": "relu"})
        trainer = CTRTrainer(
            model, optimizer_params={"lr": 1e-3, "weight_decay": 0.0}, n_epoch=1, device="cpu", model_path=folder
        )
        trainer.fit(reader)
        train_s = clock() - begin
        return Outcome(prepare_s, train_s, float(trainer.evaluate(trainer.model, tester)))


def fuxictr(train: list[Path], test: list[Path], batch: int) -> Outcome:
    """Train FuxiCTR. Its wheel lacks the model zoo, so the DeepFM is built here from its layers."""
    from fuxictr.preprocess import FeatureProcessor, build_dataset
    from fuxictr.pytorch.dataloaders import RankDataLoader
    from fuxictr.pytorch.layers import FactorizationMachine, FeatureEmbedding, MLP_Block
    from fuxictr.pytorch.models import BaseModel

    class DeepFM(BaseModel):  # type: ignore[misc]
        def __init__(self, features: Any, **settings: Any) -> None:
            super().__init__(features, model_id="DeepFM", **settings)
            self.embedding = FeatureEmbedding(features, DIM)
            self.fm = FactorizationMachine(features)
            self.mlp = MLP_Block(
                input_dim=features.sum_emb_out_dim(), output_dim=1, hidden_units=list(HIDDEN), hidden_activations="ReLU"
            )
            self.compile("adam", "binary_crossentropy", 1e-3)
            self.reset_parameters()
            self.model_to_device()

        def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            x = self.get_inputs(inputs)
            e = self.embedding(x)
            return {"y_pred": self.output_activation(self.fm(x, e) + self.mlp(e.flatten(1)))}

    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder)
        names = {"train": train, "test": test}
        header = ("\t".join(["click", *COUNTS, *CATEGORIES]) + "\n").encode()
        for name, files in names.items():  # FuxiCTR needs a header; writing it is not timed
            (raw / f"{name}.csv").write_bytes(header + b"".join(file.read_bytes() for file in files))
        counts = {"name": COUNTS, "active": True, "dtype": "float", "type": "numeric", "fill_na": 0}
        values = {"name": CATEGORIES, "active": True, "dtype": "str", "type": "categorical", "fill_na": ""}
        counts["normalizer"] = "StandardScaler"
        start_ray()
        begin = clock()
        processor = FeatureProcessor(
            [counts, values], {"name": "click", "dtype": "float"}, dataset_id="criteo", data_root=folder
        )
        paths = build_dataset(processor, str(raw / "train.csv"), None, str(raw / "test.csv"), sep="\t")
        prepare_s = clock() - begin
        features = processor.feature_map
        features.default_emb_dim = DIM
        model = DeepFM(features, verbose=0, metrics=["AUC"], model_root=folder, save_best_only=False)
        reader, _, tester = RankDataLoader(
            features, train_data=paths[0], test_data=paths[2], batch_size=batch, data_format="parquet"
        )
        begin = clock()
        one_epoch(model, reader)
        train_s = clock() - begin
        return Outcome(prepare_s, train_s, float(model.evaluate(tester)["AUC"]))


def one_epoch(model: Any, reader: Any) -> None:
    """Run `fit` without its evaluation, which is not timed for the other packages either."""
    model._max_gradient_norm, model._total_steps, model._eval_steps, model._stop_training = 10.0, 0, 1 << 60, False
    model.train_epoch(reader)


def start_ray() -> None:
    """Start Ray, which FuxiCTR uses for preparation. Its start is not timed."""
    from fuxictr.preprocess.build_dataset import init_ray

    init_ray()


PEERS: dict[str, tuple[str, Callable[..., Outcome]]] = {
    "DeepCTR-Torch": ("deepctr_torch", deepctr_torch),
    "Torch-RecHub": ("torch_rechub", torch_rechub),
    "FuxiCTR": ("fuxictr", fuxictr),
}
"""Name -> the module it needs, and the function that runs it."""


def installed() -> tuple[list[str], list[str]]:
    """Return the peers that can be imported, and those that cannot."""
    there = [name for name, (module, _) in PEERS.items() if importlib.util.find_spec(module) is not None]
    return there, [name for name in PEERS if name not in there]


def run(name: str, train: list[Path], test: list[Path], batch: int) -> Outcome:
    """Run a peer and suppress its output."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return PEERS[name][1](train, test, batch)
