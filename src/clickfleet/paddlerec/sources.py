"""Read a model that PaddleRec saved, in any of its file formats: rows in pieces, and the parameters of the network."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from clickfleet.errors import CheckpointError
from clickfleet.paddlerec import dumps, pickles, variables
from clickfleet.paddlerec.pickles import Arrays
from clickfleet.paddlerec.tensors import Layer, by_position, split_dense, static_names
from clickfleet.store import atomic
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


NUMBERED = re.compile(r"(?:epoch[-_]?)?(\d+)")
"""Folders of epochs, days and passes. The original's own scripts name them 0, epoch_0, 20190720 and so on."""
DEPTH = 3
"""Levels of such folders: days, passes, and one more."""


def params_file(path: Path) -> Path | None:
    """Return the .pdparams file of a path; None if there is none. Refuse several of which none has PaddleRec's name."""
    if path.is_file() and path.suffix == ".pdparams":
        return path
    known = next((path / name for name in PARAMS if (path / name).is_file()), None)
    others = sorted(path.glob("*.pdparams")) if path.is_dir() else []
    if known is None and len(others) > 1:
        raise CheckpointError(
            f"{path} has {len(others)} models: {', '.join(other.name for other in others)}",
            f"name one of the files: {others[0]}",
        )
    return known or next(iter(others), None)


def is_saved(path: Path) -> bool:
    """Return whether a path itself holds a model that PaddleRec saved."""
    if path.is_file():
        return path.suffix == ".pdparams" or bool(variables.variables(path))
    if not path.is_dir():
        return False
    dumped = dumps.tables(path) or dumps.blocks(path)
    return bool(dumped) or any(path.glob("*.pdparams")) or bool(variables.files(path))


def locate(path: Path, notes: list[str], depth: int = DEPTH) -> Path:
    """Return where the model of a path is: the path itself, or the last of its numbered folders, else its base. Note a choice."""
    if is_saved(path) or not path.is_dir() or not depth:
        return path
    found = {sub.name: place for sub in path.iterdir() if is_saved(place := locate(sub, [], depth - 1))}
    numbered = sorted((int(match[1]), name) for name in found if (match := NUMBERED.fullmatch(name)))
    if numbered:
        name = numbered[-1][1]
        if len(found) > 1:
            others = ", ".join([name for _, name in numbered[:-1]] + sorted(found.keys() - {n for _, n in numbered}))
            notes.append(f"{path} has several models: imported {name}, the last number; the others are {others}")
    elif "base" in found:
        name = "base"
        if len(found) > 1:
            notes.append(
                f"{path} has a base and {', '.join(sorted(found.keys() - {'base'}))}: imported the base alone; "
                "add deltas with --delta, oldest first"
            )
    elif found:
        raise CheckpointError(
            f"{path} contains no model of PaddleRec itself, but these folders in it do: {', '.join(sorted(found))}",
            "name one of them",
        )
    else:
        return path
    return locate(path / name, notes, depth - 1)


def open_saved(path: Path, wanted: list[Layer], width: Width) -> Saved:
    """Open the model at a path. Rows are read on demand."""
    notes: list[str] = []
    path = locate(path, notes)
    if path.name in {table.name for table in dumps.tables(path.parent)}:  # done files name the table in a model
        path = path.parent
    if (path / atomic.MANIFEST).is_file() and f"clickfleet/{dumps.KIND}".encode() in (
        path / atomic.MANIFEST
    ).read_bytes():
        atomic.verify_files(path, atomic.read_manifest(path, dumps.KIND))
    saved = _open(path, wanted, width)
    saved.notes[:0] = notes
    return saved


def _open(path: Path, wanted: list[Layer], width: Width) -> Saved:
    tables, blocks = (dumps.tables(path), dumps.blocks(path)) if path.is_dir() else ([], [])
    if not tables and not blocks:
        return _matrices(load_arrays(path, wanted), wanted, width)
    if tables:
        saved = Saved(path, _dumped(tables, width))
    else:
        notes: list[str] = []
        saved = Saved(path, _blocked(blocks[-1], width, notes), notes=notes)
        if width.has_first and len(blocks) > 1:
            raise CheckpointError(
                f"{path} contains several tables of releases 2.0 to 2.2",
                "of these releases, only networks with one embedding can be imported",
            )
    dense = dumps.dense_table(path)
    for folder in (path, path / "dnn_plugin"):
        saved.params |= by_position(variables.read_variables(folder), wanted)
    if dense is not None:
        values = dumps.read_dense(dense)
        saved.params |= split_dense(values[:, 0], wanted, str(dense))
        if values.shape[1] == 3:
            saved.moments = {
                "mean": split_dense(values[:, 1], wanted, str(dense)),
                "square": split_dense(values[:, 2], wanted, str(dense)),
            }
        elif values.shape[1] > 3:
            saved.notes.append("the state of the dense optimizer adam_d2sum does not fit Adam and was not imported")
    return saved


@dataclass
class SavedArrays:
    """All variables of a model, and how its optimizer names them."""

    path: Path
    arrays: Arrays
    kept: Arrays
    """The optimizer's variables."""
    names: dict[str, str] = field(default_factory=dict)
    """The optimizer's name of each parameter. Empty: the same names."""
    notes: list[str] = field(default_factory=list)


def load_arrays(path: Path, wanted: list[Layer]) -> SavedArrays:
    """Load a model of whole matrices: a .pdparams file, a folder of variables, or a file of all variables."""
    file = params_file(path)
    if file is not None:
        arrays, names = pickles.load(file)
        optimizer = file.with_suffix(".pdopt")
        kept = pickles.load(optimizer)[0] if optimizer.is_file() else {}
        notes = [] if kept else [f"no {optimizer.name} found: the optimizer starts with an empty state"]
        if path.is_dir() and len(others := sorted(path.glob("*.pdparams"))) > 1:
            notes.insert(0, f"{path} has {', '.join(other.name for other in others)}: imported {file.name}")
        return SavedArrays(file, arrays, kept, names, notes)
    together = [path] if path.is_file() else variables.bundles(path)
    if len(together) > 1:
        raise CheckpointError(
            f"{path} has {len(together)} files of several variables: {', '.join(one.name for one in together)}",
            f"name one of them: {together[0]}",
        )
    if together and len(variables.variables(together[0])) > 1:
        arrays = _bundle(together[0], wanted)
        return SavedArrays(together[0], arrays, arrays, notes=_without_moments(together[0], arrays))
    arrays = variables.read_variables(path) if path.is_dir() else {}
    if not arrays:
        raise CheckpointError(
            f"{path} contains no model of PaddleRec" if path.exists() else f"{path} does not exist",
            "expected rec.pdparams or another .pdparams file, files of one variable each, 000/part-000-00000, "
            "or <var>.shard/<var>.block0.txt with its .meta; or folders with them that are named by number",
        )
    return SavedArrays(path, arrays, arrays, notes=_without_moments(path, arrays))


def _without_moments(path: Path, arrays: Arrays) -> list[str]:
    found = any(name.endswith("_0") and "_moment" in name for name in arrays)
    return [] if found else [f"no optimizer variables in {path}: the optimizer starts with an empty state"]


STATE = ("beta1_pow_acc_0", "beta2_pow_acc_0", "moment1_0", "moment2_0")
"""Adam's variables of each parameter."""


def _bundle(path: Path, wanted: list[Layer]) -> Arrays:
    """Return the variables of a file that has no names: those of the program beside it, or those that fit the shapes."""
    each = variables.variables(path)
    program = variables.program(path)
    if program is not None:
        names = variables.program_names(program)
        if len(names) != len(each):
            raise CheckpointError(
                f"{path} has {len(each)} variables, but {program.name} names {len(names)}",
                "use the program that was saved with the variables",
            )
        return variables.read_bundle(path, names)
    numbers = [one for one in each if one.kind == variables.FLOAT32]  # buckets of the AUC are integers
    shapes = {name: size for layer in wanted for name, size in layer.shapes.items()}
    for linear in ("linear", "fc"):
        static = static_names(wanted, linear)
        for state in ((), STATE):
            names = sorted(
                [f"{static[place]}{suffix}" for place in static for suffix in ("", *(f"_{one}" for one in state))]
                + (["learning_rate_0"] if state or len(numbers) > len(static) else [])
            )
            sizes = {static[place]: shapes.get(place) for place in static}
            if len(names) == len(numbers) and all(
                _fits(one.shape, name, sizes) for name, one in zip(names, numbers, strict=True)
            ):
                return {name: variables.array(path, one) for name, one in zip(names, numbers, strict=True)}
    raise CheckpointError(
        f"{path} has {len(each)} variables without names, and their shapes do not tell which is which",
        "put __model__ or the .pdmodel file of its program beside it, or save one file per variable (filename=None)",
    )


def _fits(shape: tuple[int, ...], name: str, sizes: dict[str, tuple[int, ...] | None]) -> bool:
    """Return whether a variable of this shape may have that name. The length of an embedding is any."""
    if name == "learning_rate_0" or name.endswith(STATE[:2]):
        return shape == (1,)
    plain = next((name.removesuffix(f"_{one}") for one in STATE if name.endswith(f"_{one}")), name)
    size = sizes[plain]
    return len(shape) == 2 if size is None else shape == size


STATES: dict[str, Callable[[int], int]] = {
    "sgd": lambda n: 0,
    "adagrad": lambda n: 1,
    "adagrad_v2": lambda n: 1,
    "std_adagrad": lambda n: n,
    "adam": lambda n: 2 * n + 2,
    "shared_adam": lambda n: 4,
}
"""How many floats of state each rule keeps for n weights."""


def state_size(rule: Rule, n: int) -> int:
    """Return how many floats of state a rule keeps for n weights.

    >>> from clickfleet.store.rules import rule
    >>> state_size(rule("adam"), 8), state_size(rule("adagrad"), 8)
    (18, 1)
    """
    return STATES[rule.name](n)


def initial_state(rule: Rule, rows: int, n: int) -> Numbers:
    """Return the initial state of rows."""
    state = np.zeros((rows, state_size(rule, n)), np.float32)
    if rule.name in ("adam", "shared_adam"):
        settings = dict(rule.settings)
        state[:, -2], state[:, -1] = settings["beta1"], settings["beta2"]
    return state


def _matrices(loaded: SavedArrays, wanted: list[Layer], width: Width) -> Saved:
    file, arrays, kept, names = loaded.path, loaded.arrays, loaded.kept, loaded.names
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
    kept_moments = {k: moments[k] for k in ("mean", "square") if moments[k]}
    return Saved(file, rows, params, kept_moments, int(steps), loaded.notes)


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
    if width.rule.name != "adam":
        return initial_state(width.embed_rule, len(state), 1), initial_state(width.rule, len(state), width.factors)
    return part_state(width.rule, state, width.factors + 1)


def part_state(rule: Rule, state: Numbers, n: int) -> tuple[Numbers, Numbers]:
    """Part the state of n weights into that of the first one and that of the others. `join_states` does the opposite."""
    if rule.name == "std_adagrad":
        return state[:, :1], state[:, 1:]
    if rule.name == "adam":
        m, v, p = state[:, :n], state[:, n : 2 * n], state[:, 2 * n :]
        return np.concatenate([m[:, :1], v[:, :1], p], 1), np.concatenate([m[:, 1:], v[:, 1:], p], 1)
    return state, state  # one number for all weights


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
