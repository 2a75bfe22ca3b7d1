"""Read a model that PaddleRec saved, in any of its file formats: rows in pieces, and the parameters of the network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from clickfleet.errors import CheckpointError
from clickfleet.paddlerec import dumps, pickles
from clickfleet.paddlerec.pickles import Arrays
from clickfleet.paddlerec.tensors import Layer, by_position, split_dense
from clickfleet.store.rules import Rule

CHUNK = 100_000
Numbers = Any
PARAMS = ("rec.pdparams", "rec_static.pdparams")


@dataclass
class SavedPiece:
    """Some rows of a table. `embedx` is None if they have no factors yet."""

    keys: Numbers
    embed_w: Numbers
    embed_state: Numbers
    embedx: Numbers | None
    embedx_state: Numbers | None
    show: Numbers
    click: Numbers
    unseen_days: Numbers
    delta_score: Numbers
    slot: Numbers | None = None


@dataclass
class Saved:
    """A model that PaddleRec saved."""

    path: Path
    rows: Iterator[SavedPiece]
    params: Arrays = field(default_factory=dict)
    """Parameters of the network, by position; empty if only a table was saved."""
    moments: dict[str, Arrays] = field(default_factory=dict)
    """Adam's `mean` and `square` of the parameters."""
    steps: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Width:
    """The layout of our rows. `whole` rows have a separate first-order weight (slot_dnn); others have it among the factors."""

    factors: int
    rule: Rule
    embed_rule: Rule
    whole: bool
    has_first: bool
    """Whether the network has first-order weights in a separate table."""


def params_file(path: Path) -> Path | None:
    """Return the .pdparams file of a path; None if there is none."""
    if path.is_file() and path.suffix == ".pdparams":
        return path
    return next((path / name for name in PARAMS if (path / name).is_file()), None)


def is_saved(path: Path) -> bool:
    """Return whether a path holds a model that PaddleRec saved."""
    return params_file(path) is not None or (path.is_dir() and bool(dumps.tables(path) or dumps.blocks(path)))


def open_saved(path: Path, wanted: list[Layer], width: Width) -> Saved:
    """Open the model at a path. Rows are read on demand."""
    file = params_file(path)
    if file is not None:
        return _pickled(file, wanted, width)
    tables, blocks = dumps.tables(path), dumps.blocks(path)
    if tables:
        saved = Saved(path, _dumped(tables, width))
    elif blocks:
        notes: list[str] = []
        saved = Saved(path, _blocked(blocks[-1], width, notes), notes=notes)
        if width.has_first and len(blocks) > 1:
            raise CheckpointError(
                f"{path} contains several tables of releases 2.0 to 2.2",
                "of these releases, only networks with one embedding can be imported",
            )
    else:
        raise CheckpointError(
            f"{path} contains no model of PaddleRec",
            "expected rec.pdparams, 000/part-000-00000, or <var>.shard/<var>.block0.txt with its .meta",
        )
    dense, plugin = dumps.dense_table(path), path / "dnn_plugin"
    if dense is not None:
        values = dumps.read_dense(dense)
        saved.params = split_dense(values[:, 0], wanted, str(dense))
        if values.shape[1] == 3:
            saved.moments = {
                "mean": split_dense(values[:, 1], wanted, str(dense)),
                "square": split_dense(values[:, 2], wanted, str(dense)),
            }
        elif values.shape[1] > 3:
            saved.notes.append("the state of the dense optimizer adam_d2sum does not fit Adam and was not imported")
    elif plugin.is_dir():
        saved.params = by_position(dumps.read_variables(plugin), wanted)
    return saved


def state_size(rule: Rule, n: int) -> int:
    """Return how many floats of state a rule keeps for n weights.

    >>> from clickfleet.store.rules import rule
    >>> state_size(rule("adam"), 8), state_size(rule("adagrad"), 8)
    (18, 1)
    """
    return {"sgd": 0, "adagrad": 1, "adagrad_v2": 1, "std_adagrad": n, "adam": 2 * n + 2, "shared_adam": 4}[rule.name]


def initial_state(rule: Rule, rows: int, n: int) -> Numbers:
    """Return the initial state of rows."""
    state = np.zeros((rows, state_size(rule, n)), np.float32)
    if rule.name in ("adam", "shared_adam"):
        settings = dict(rule.settings)
        state[:, -2], state[:, -1] = settings["beta1"], settings["beta2"]
    return state


def _pickled(file: Path, wanted: list[Layer], width: Width) -> Saved:
    arrays, names = pickles.load(file)
    found = by_position(arrays, wanted)
    tables = [layer.parts[0] for layer in wanted if layer.kind == "embedding"]
    for name in tables:
        if name not in found:
            raise CheckpointError(
                f"{file} has no {name}; it has {', '.join(list(arrays)[:6])} …",
                "check that the file belongs to this network",
            )
    factors = found[tables[-1]]
    if factors.ndim != 2 or factors.shape[1] != width.factors + width.whole:
        raise CheckpointError(
            f"{file}: {tables[-1]} has shape {factors.shape}, but the configuration needs width {width.factors + width.whole}",
            "check sparse_feature_dim",
        )
    optimizer = file.with_suffix(".pdopt")
    kept = pickles.load(optimizer)[0] if optimizer.is_file() else {}
    notes = [] if kept else [f"no {optimizer.name} found: the optimizer starts with an empty state"]
    own = (
        {place: names.get(place, place) for place in found}
        if names
        else {place: static for static, place in _statics(arrays, found)}
    )
    moments = {
        mine: {place: array for place, name in own.items() if (array := kept.get(f"{name}_{theirs}_0")) is not None}
        for mine, theirs in (("mean", "moment1"), ("square", "moment2"), ("sum", "moment"))
    }
    power = {place: kept[f"{name}_beta1_pow_acc_0"] for place, name in own.items() if f"{name}_beta1_pow_acc_0" in kept}
    powers = {
        place: (float(p.ravel()[0]), float(kept[f"{own[place]}_beta2_pow_acc_0"].ravel()[0]))
        for place, p in power.items()
    }
    steps = max((round(np.log(p1) / np.log(0.9)) - 1 for p1, _ in powers.values() if 0 < p1 < 1), default=0)
    params = {place: array for place, array in found.items() if place not in tables}
    rows = _matrix_rows(found, tables, width, moments, powers)
    return Saved(file, rows, params, {k: moments[k] for k in ("mean", "square") if moments[k]}, int(steps), notes)


def _statics(arrays: Arrays, found: Arrays) -> list[tuple[str, str]]:
    """(static name, place) of every array: equal arrays are the same object."""
    by_identity = {id(array): place for place, array in found.items()}
    return [(name, by_identity[id(array)]) for name, array in arrays.items() if id(array) in by_identity]


def _matrix_rows(
    found: Arrays, tables: list[str], width: Width, moments: dict[str, Arrays], powers: Any
) -> Iterator[SavedPiece]:
    factors = found[tables[-1]]
    first = found[tables[0]] if width.has_first else None
    for start in range(0, len(factors), CHUNK):
        part = slice(start, start + CHUNK)
        some = np.ascontiguousarray(factors[part], np.float32)
        rows = len(some)
        zeros = np.zeros(rows, np.float32)
        state = _state(width.rule, tables[-1], moments, powers, part, rows, width.factors + width.whole)
        if width.whole:
            embed_w, embedx = some[:, 0], some[:, 1:]
            embed_state, embedx_state = split_state(width, state)
        else:
            embed_w = zeros if first is None else np.ascontiguousarray(first[part, 0], np.float32)
            embed_state = (
                initial_state(width.embed_rule, rows, 1)
                if first is None
                else _state(width.embed_rule, tables[0], moments, powers, part, rows, 1)
            )
            embedx, embedx_state = some, state
        keys = np.arange(start, start + rows, dtype=np.uint64)
        yield SavedPiece(keys, embed_w, embed_state, embedx, embedx_state, zeros, zeros, zeros, zeros)


def _state(rule: Rule, table: str, moments: dict[str, Arrays], powers: Any, part: slice, rows: int, n: int) -> Numbers:
    state = initial_state(rule, rows, n)
    if rule.name == "adam" and table in moments["mean"] and table in moments["square"] and table in powers:
        state[:, :n], state[:, n : 2 * n] = moments["mean"][table][part], moments["square"][table][part]
        state[:, 2 * n], state[:, 2 * n + 1] = powers[table]
    elif rule.name == "adagrad_v2" and table in moments["sum"]:
        state[:, 0] = moments["sum"][table][part].mean(1)
    return state


def split_state(width: Width, state: Numbers) -> tuple[Numbers, Numbers]:
    """Split the state of 1 + D weights under one rule into that of the first-order weight and that of the factors."""
    n = width.factors + 1
    if width.rule.name != "adam":
        return initial_state(width.embed_rule, len(state), 1), initial_state(width.rule, len(state), width.factors)
    m, v, p = state[:, :n], state[:, n : 2 * n], state[:, 2 * n :]
    return np.concatenate([m[:, :1], v[:, :1], p], 1), np.concatenate([m[:, 1:], v[:, 1:], p], 1)


def join_states(rule: Rule, first: Numbers, rest: Numbers | None, n: int) -> Numbers:
    """Join the states of a first-order weight and of n - 1 factors to that of n weights under one rule."""
    rest = initial_state(rule, len(first), n - 1) if rest is None else rest
    if rule.name == "std_adagrad":
        return np.concatenate([first, rest], 1)
    if rule.name == "adam":
        k = n - 1
        m, v = np.concatenate([first[:, :1], rest[:, :k]], 1), np.concatenate([first[:, 1:2], rest[:, k : 2 * k]], 1)
        return np.concatenate([m, v, first[:, 2:] if k == 0 else np.minimum(first[:, 2:], rest[:, 2 * k :])], 1)
    mean = (first + (n - 1) * rest) / np.float32(n)  # one number for all weights: their mean
    if rule.name == "shared_adam":
        mean[:, 2:] = np.minimum(first[:, 2:], rest[:, 2:])
    return mean


def _dumped(tables: list[Path], width: Width) -> Iterator[SavedPiece]:
    """Yield rows of text dumps. First-order weights, if any, are in the table before that of the factors."""
    if width.has_first:
        if len(tables) < 2:
            raise CheckpointError(
                f"{tables[0].parent} has one table, but the network needs two: first-order weights and factors"
            )
        yield from _pair(tables, width)
        return
    e = state_size(width.embed_rule if width.whole else width.rule, 1)
    d = width.factors if width.whole else width.factors - 1
    x = state_size(width.rule, d)
    for rows in dumps.read_rows(tables[0], 6 + e, 6 + e + d + x):
        yield _piece(rows, e, d, width)


def _piece(rows: dumps.DumpRows, e: int, d: int, width: Width) -> SavedPiece:
    f = rows.fields
    full = f.shape[1] > 6 + e
    embedx = f[:, 6 + e : 6 + e + d] if full else None
    embedx_state = f[:, 6 + e + d :] if full else None
    embed_w, embed_state = f[:, 5], f[:, 6 : 6 + e]
    if not width.whole:  # the embedding of the network consists of the first-order weight and the factors
        factors = np.zeros((len(f), d), np.float32) if embedx is None else embedx
        state = join_states(width.rule, embed_state, embedx_state, width.factors)
        embed_w, embed_state, embedx, embedx_state = (
            np.zeros(len(f), np.float32),
            initial_state(width.embed_rule, len(f), 1),
            np.concatenate([embed_w[:, None], factors], 1),
            state,
        )
    return SavedPiece(
        rows.keys, embed_w, embed_state, embedx, embedx_state, f[:, 3], f[:, 4], f[:, 1], f[:, 2], f[:, 0]
    )


def _pair(tables: list[Path], width: Width) -> Iterator[SavedPiece]:
    e, d = state_size(width.embed_rule, 1), width.factors - 1
    firsts = list(dumps.read_rows(tables[0], 6 + e, 6 + e + state_size(width.embed_rule, 0)))
    keys = np.concatenate([part.keys for part in firsts]) if firsts else np.empty(0, np.uint64)
    values = (
        np.concatenate([part.fields[:, 5 : 6 + e] for part in firsts]) if firsts else np.empty((0, 1 + e), np.float32)
    )
    order = np.argsort(keys, kind="stable")
    keys, values = keys[order], values[order]
    inner = state_size(width.rule, 1)
    for rows in dumps.read_rows(tables[1], 6 + inner, 6 + inner + d + state_size(width.rule, d)):
        piece = _piece(rows, inner, d, width)
        at = np.minimum(np.searchsorted(keys, piece.keys), max(len(keys) - 1, 0))
        known = keys[at] == piece.keys if len(keys) else np.zeros(len(piece.keys), bool)
        piece.embed_w[known] = values[at[known], 0]
        piece.embed_state[known] = values[at[known], 1:]
        yield piece


def _blocked(folder: Path, width: Width, notes: list[str]) -> Iterator[SavedPiece]:
    skipped = 0
    n = width.factors + width.whole
    for block in dumps.read_blocks(folder):
        param, fields = block.fields["Param"], block.fields
        if param.shape[1] != n:
            raise CheckpointError(f"{folder}: rows have width {param.shape[1]}, but the configuration needs {n}")
        skipped += block.not_entered
        rows = len(block.keys)
        state = initial_state(width.rule, rows, n)
        if width.rule.name == "adam" and "Moment1" in fields:
            parts = ("Moment1", "Moment2", "Beta1Pow", "Beta2Pow")
            state = np.concatenate(
                [fields.get(p, state[:, -2:][:, i - 2 : i - 1] if i > 1 else param * 0) for i, p in enumerate(parts)], 1
            )
        zeros = np.zeros(rows, np.float32)
        if width.whole:
            embed_state, state = split_state(width, state)
            yield SavedPiece(
                block.keys, param[:, 0], embed_state, param[:, 1:], state, block.counts, zeros, block.unseen_days, zeros
            )
        else:
            embed_state = initial_state(width.embed_rule, rows, 1)
            yield SavedPiece(
                block.keys, zeros, embed_state, param, state, block.counts, zeros, block.unseen_days, zeros
            )
    if skipped:
        notes.append(f"{skipped:,} rows that were not admitted yet were not imported; they start as new rows")
