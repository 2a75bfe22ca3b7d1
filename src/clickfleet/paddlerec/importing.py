"""Import a model that PaddleRec saved into a run folder, and compare the scores."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clickfleet.config.load import Config, dump
from clickfleet.data.batch import Batch
from clickfleet.data.schema import write_schema
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.models.word2vec.vocabulary import Vocabulary
from clickfleet.paddlerec.formulas import score
from clickfleet.paddlerec.networks import NETWORKS
from clickfleet.paddlerec.sources import Saved, SavedPiece, Width, open_saved
from clickfleet.paddlerec.tensors import Layer, check, layers, our_tensors
from clickfleet.paddlerec.translation import Translated
from clickfleet.paddlerec.words import SAMPLE_PAIRS, compare, open_vectors, write_vocabulary
from clickfleet.store import checkpoint
from clickfleet.store.table import NO_SLOT, Columns
from clickfleet.training import saving
from clickfleet.training.learner import Learner
from clickfleet.training.metrics import Metrics
from clickfleet.training.predict import Scorer

Sample = dict[int, tuple[float, Any]]
SAMPLE_ROWS, SAMPLE_KEYS = 64, 512
TOLERANCE = 1e-5
STRUCTURE = (
    "hidden",
    "layers",
    "rank",
    "experts",
    "structure",
    "cin",
    "bottom",
    "top",
    "embedding_gate",
    "hidden_gate",
    "width",
    "heads",
    "dense_hidden",
    "groups",
)
"""Settings of a model that determine its layers."""


@dataclass
class Imported:
    """The result of an import. `max_abs_diff` compares its scores with PaddleRec's formula over the original numbers."""

    path: Path
    source: Path
    rows: int = 0
    full_rows: int = 0
    parameters: int = 0
    compared: int = 0
    max_abs_diff: float | None = None
    anew: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.max_abs_diff is None or self.max_abs_diff <= TOLERANCE

    def text(self) -> str:
        lines = [
            f"{self.path}: {self.rows:,} rows ({self.full_rows:,} with factors), {self.parameters:,} dense parameters"
        ]
        lines += [f"not imported, starts from initial values: {name}" for name in self.anew]
        if self.max_abs_diff is not None:
            verdict = "match" if self.ok else "do NOT match"
            limit = "" if self.ok else f", tolerance {TOLERANCE:g}"
            lines.append(
                f"the scores of {self.compared} rows {verdict} the original formula: "
                f"largest difference {self.max_abs_diff:.1e}{limit}"
            )
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, object]:
        return {**vars(self), "path": str(self.path), "source": str(self.source), "ok": self.ok}


def import_model(
    translated: Translated, source: Path, out: Path, *, deltas: Sequence[Path] = (), again: bool = False
) -> Imported:
    """Write the model at `source`, updated by the rows of `deltas`, as the run folder `out`.

    `again` replaces the result of an earlier import.
    """
    out = out.absolute()
    if translated.dictionary is None and not NETWORKS[translated.network].original:
        raise CheckpointError(
            f"a saved {translated.network} cannot be imported: the formula of this model differs from PaddleRec's",
            "train it again; the configuration, the reader and the data work unchanged",
        )
    if again and (out / "imported.txt").is_file():
        shutil.rmtree(out)
    if checkpoint.steps(out / "checkpoints"):
        raise CheckpointError(f"{out} already contains a run", "choose another folder")
    config = _configured(translated, out)
    if translated.dictionary is not None:
        write_vocabulary(translated.dictionary, Path(str(config.data.vocabulary)))
    learner = Learner(config, translated.schema)
    take = _take_network if translated.dictionary is None else _take_words
    done, steps = take(translated, learner, source, deltas)
    stats = learner.table.stats()
    done.rows, done.full_rows = stats["rows"], stats["full_rows"]
    out.mkdir(parents=True, exist_ok=True)
    if translated.needs_schema:
        write_schema(translated.schema, out / "schema.yaml")
    metrics = Metrics(config.train.metrics.thresholds, config.train.metrics.sliding or None)
    state = {"step": steps, "rows": 0, "epoch": 0, "imported": str(done.source)}
    checkpoint.write(
        learner.table,
        out / "checkpoints",
        steps,
        attached=saving.capture(learner, metrics, state),
        files=saving.ROW_FILES,
        **learner.facts,
    )
    (out / "config.yaml").write_text(dump(config), encoding="utf-8")
    (out / "imported.txt").write_text(done.text() + "\n", encoding="utf-8")
    return done


def _take_words(translated: Translated, learner: Learner, source: Path, deltas: Sequence[Path]) -> tuple[Imported, int]:
    if deltas:
        raise CheckpointError("word2vec has no deltas", "import the model alone")
    known = Vocabulary.read(str(learner.config.data.vocabulary))
    saved = open_vectors(source, known, learner.table)
    _put_rows(learner, saved, {})
    done = Imported(Path(learner.config.run.dir), saved.path, notes=saved.notes, compared=SAMPLE_PAIRS)
    done.max_abs_diff = compare(saved, known, learner.table)
    return done, saved.steps


def _take_network(
    translated: Translated, learner: Learner, source: Path, deltas: Sequence[Path]
) -> tuple[Imported, int]:
    settings = layer_settings(learner)
    wanted = layers(translated.network, settings, learner.shape)
    table = learner.table
    if len(table.classes) > 1:
        raise ConfigError(
            "a saved model of PaddleRec has one width, rule and admission for all slots",
            "remove table.dims and table.slots",
        )
    named = [layer for layer in wanted if layer.kind == "embedding"]
    whole = translated.network == "slot_dnn"
    width = Width(table.factors, table.rule, table.embed_rule, whole, len(named) > 1)
    saved = open_saved(source, wanted, width)
    done = Imported(Path(learner.config.run.dir), saved.path)
    sample: Sample = {}
    _put_rows(learner, saved, sample)
    for delta in deltas:
        later = open_saved(delta, wanted, width)
        _put_rows(learner, later, sample)
        saved.notes += [f"applied the rows of the delta {delta}", *later.notes]
        if later.params:
            saved.params, saved.moments = later.params, later.moments
    if saved.params:
        _put_dense(translated.network, learner, saved, wanted, settings, done)
    else:
        done.anew.append("the network (only a table was saved)")
    if sample and not done.anew:
        done.max_abs_diff = _compare(translated.network, learner, saved, settings, sample, done)
    done.notes += saved.notes
    return done, saved.steps


def _configured(translated: Translated, out: Path) -> Config:
    config = translated.config
    schema = str(out / "schema.yaml") if translated.needs_schema else config.data.schema
    words = None if translated.dictionary is None else str(out / "vocabulary.txt")
    data = replace(config.data, schema=schema, vocabulary=words)
    run, train = replace(config.run, dir=str(out)), replace(config.train, init_from=None)
    return replace(config, data=data, run=run, train=train)


def layer_settings(learner: Learner) -> Mapping[str, Any]:
    """Return the model's settings that determine its layers, including defaults."""
    defaults, given = type(learner.model).Config(), learner.config.model.settings
    return {
        name: given.get(name, getattr(defaults, name, None))
        for name in STRUCTURE
        if name in given or hasattr(defaults, name)
    }


def _put_rows(learner: Learner, saved: Saved, sample: Sample) -> None:
    """Put every row into the table, and the original numbers of some rows into the sample for the comparison."""
    table = learner.table
    names = {slot.name: i for i, slot in enumerate(learner.schema.slots)}
    for piece in saved.rows:
        if table.padding_key is not None:
            keep = piece.keys != table.padding_key
            if not keep.all():
                piece = _select(piece, keep)
        if not len(piece.keys):
            continue
        checkpoint.put(table, _columns(piece, names))
        again = np.flatnonzero(np.isin(piece.keys, np.array(list(sample), np.uint64))).tolist()
        new = range(0, len(piece.keys), max(1, len(piece.keys) // 64))
        for i in [*again, *list(new)[: max(0, SAMPLE_KEYS - len(sample))]]:
            factors = np.zeros(table.factors) if piece.embedx is None else piece.embedx[i].copy()
            sample[int(piece.keys[i])] = (float(piece.embed_w[i]), factors)


def _select(piece: SavedPiece, keep: Any) -> SavedPiece:
    return SavedPiece(**{name: None if value is None else value[keep] for name, value in vars(piece).items()})


def _columns(piece: SavedPiece, names: dict[str, int]) -> Columns:
    rows = len(piece.keys)

    def flat(values: Any) -> Any:
        return np.empty(0, np.float32) if values is None else np.ascontiguousarray(values, np.float32).reshape(-1)

    slots = np.full(rows, NO_SLOT, np.uint16)
    if piece.slot is not None:
        for number in np.unique(piece.slot):
            slots[piece.slot == number] = names.get(str(int(number)), NO_SLOT)
    return {
        "key": np.ascontiguousarray(piece.keys, np.uint64),
        "slot": slots,
        "show": piece.show.astype(np.float64),
        "click": piece.click.astype(np.float64),
        "unseen_days": np.clip(piece.unseen_days, 0, 65535).astype(np.uint16),
        "delta_score": piece.delta_score.astype(np.float32),
        "published": np.zeros(rows, np.uint8),
        "embed_w": np.ascontiguousarray(piece.embed_w, np.float32),
        "embed_state": flat(piece.embed_state),
        "embedx": flat(piece.embedx),
        "embedx_state": flat(piece.embedx_state),
    }


def _put_dense(
    network: str, learner: Learner, saved: Saved, wanted: list[Layer], settings: Mapping[str, Any], done: Imported
) -> None:
    absent = check(saved.params, wanted, str(saved.path))
    if network == "deepfefm" and any("field_embeddings" in name for name in absent):
        done.notes.append(
            "PaddleRec did not save the matrices of pairs (a defect), so the original scores cannot be reproduced"
        )
    initial = learner.model.state_dict()
    imported = our_tensors(network, saved.params, learner.shape, settings)
    frozen = {name for name, p in learner.model.named_parameters() if not p.requires_grad}
    neither = {name for name, tensor in initial.items() if "num_batches" in name or not tensor.numel()}
    done.anew += sorted(initial.keys() - imported.keys() - frozen - neither)
    done.parameters = sum(array.size for array in imported.values())
    tensors = {name: torch.from_numpy(np.array(array, np.float32)) for name, array in imported.items()}
    learner.restore_dense({name: tensors.get(name, initial[name]) for name in initial})
    if learner.config.dense.optimizer in ("adam", "adamw") and {"mean", "square"} <= saved.moments.keys():
        state = learner.optimizer_state()
        for kept, arrays in saved.moments.items():
            for name, array in our_tensors(network, arrays, learner.shape, settings).items():
                if f"{kept}/{name}" in state:
                    state[f"{kept}/{name}"] = torch.from_numpy(np.array(array, np.float32))
        learner.restore_optimizer({**state, "steps": torch.tensor(saved.steps)})


def _compare(
    network: str, learner: Learner, saved: Saved, settings: Mapping[str, Any], sample: Sample, done: Imported
) -> float:
    """Return the largest difference between our scores, through the table, and those of the original formula."""
    rng, shape = np.random.default_rng(0), learner.shape
    done.compared = SAMPLE_ROWS
    keys = rng.choice(np.array(sorted(sample), np.uint64), (SAMPLE_ROWS, shape.slots))
    dense = rng.uniform(0, 1, (SAMPLE_ROWS, shape.dense)).astype(np.float32)
    w = np.array([[sample[int(key)][0] for key in row] for row in keys])
    e = np.array([[sample[int(key)][1] for key in row] for row in keys])
    theirs = score(network, saved.params, settings, shape, w, e, dense)
    batch = Batch(dense, np.ascontiguousarray(keys.reshape(-1)), shape.slots)
    learner.model.eval()
    ours = Scorer(learner).score(batch)
    learner.model.train()
    worst = float(np.max(np.abs(ours - theirs)))
    return worst if math.isfinite(worst) else math.inf
