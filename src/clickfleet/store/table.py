"""The sparse table: `pull(keys)` reads rows, `push(keys, grads)` trains them and creates new ones.

>>> import numpy as np
>>> table = Table(factors=2, rule=rule("adagrad", lr=0.05))
>>> keys = np.array([3, 2**64 - 1], np.uint64)
>>> table.push(keys, np.ones((2, 3), np.float32))
>>> len(table), table.pull(keys).shape
(2, (2, 3))
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.errors import ConfigError, TableError
from clickfleet.store.policy import PRESETS, Admission, Init, Policy
from clickfleet.store.rules import Rule, rule

Keys = NDArray[np.uint64]
Floats = NDArray[np.float32]
Columns = dict[str, Any]

NO_SLOT = 0xFFFF


def mix64(keys: Keys) -> Keys:
    """Return the hash of every key. Row files are sorted by it, and it decides a row's shard."""
    hashes = np.empty(len(keys), np.uint64)
    _core.mix64(np.ascontiguousarray(keys), hashes)
    return hashes


def sort_by_hash(keys: Keys) -> Keys:
    """Return keys in the order of row files."""
    return keys[np.argsort(mix64(keys), kind="stable")]


class Table:
    """Rows of 1 + `factors` weights under 64-bit keys, each with statistics and the state of its rule.

    `preset` and any field of `Policy` set when rows get their factors, are evicted and published. `memory_limit` bounds all memory of
    the table by evicting the rows with the lowest scores. Any number of threads may use a table at the same time.

    >>> Table(factors=8, preset="online", delete_threshold=0.5).policy.delete_threshold
    0.5
    """

    def __init__(
        self,
        factors: int,
        *,
        rule: Rule = rule("adagrad"),  # noqa: B008  (frozen)
        embed_rule: Rule | None = None,
        init: str | Init = "uniform(-0.0001, 0.0001)",
        embed_init: str | Init = "zero",
        preset: str = "plain",
        admission: str | Admission | None = None,
        seed: int = 0,
        padding_key: int | None = None,
        memory_limit: int | None = None,
        snapshot_reserve: int | None = None,
        **policy: float,
    ) -> None:
        if preset not in PRESETS:
            raise ConfigError(f"unknown preset {preset!r}", f"presets are {', '.join(PRESETS)}")
        if not 0 <= factors <= 1 << 16:
            raise ConfigError(f"factors must lie between 0 and 65536, not {factors}")
        known = {field.name for field in dataclasses.fields(Policy)}
        for name in policy.keys() - known:
            raise ConfigError(f"unknown table setting {name}", f"settings are {', '.join(sorted(known))}")
        changes: dict[str, Any] = dict(policy)
        if admission is not None:
            changes["admission"] = Admission.parse(admission)
        self.factors = factors
        self.rule = rule
        self.embed_rule = embed_rule or rule
        self.init, self.embed_init = Init.parse(init), Init.parse(embed_init)
        self.policy = dataclasses.replace(PRESETS[preset], **changes)
        self.seed = seed % 2**64
        self.padding_key = padding_key
        self.memory_limit = memory_limit
        self.snapshot_reserve = (
            memory_limit // 10 if memory_limit and snapshot_reserve is None else snapshot_reserve or 0
        )
        self.core = _core.Table(self.core_config())

    def core_config(self) -> dict[str, object]:
        def part(rule: Rule, init: Init) -> dict[str, object]:
            lower, upper = rule.bounds
            return {
                "rule": rule.name,
                "settings": dict(rule.settings),
                "scale": rule.scale,
                "lower": lower,
                "upper": upper,
                "init": init.kind,
                "a": init.a,
                "b": init.b,
            }

        policy = dict(vars(self.policy))
        admission = policy.pop("admission")
        return {
            "factors": self.factors,
            "embed": part(self.embed_rule, self.embed_init),
            "embedx": part(self.rule, self.init),
            "seed": self.seed,
            "admission": admission.by,
            "admission_threshold": admission.threshold,
            "padding_key": self.padding_key,
            "memory_limit": self.memory_limit or 0,
            "snapshot_reserve": self.snapshot_reserve,
            **policy,
        }

    def describe(self) -> dict[str, Any]:
        """Return the table's settings as plain values for JSON. `Table.like` creates an equal, empty table from them."""
        return {
            "factors": self.factors,
            "rule": self.rule.to_dict(),
            "embed_rule": self.embed_rule.to_dict(),
            "init": str(self.init),
            "embed_init": str(self.embed_init),
            "policy": self.policy.to_dict(),
            "seed": self.seed,
            "padding_key": self.padding_key,
            "memory_limit": self.memory_limit,
            "snapshot_reserve": self.snapshot_reserve,
        }

    @classmethod
    def like(cls, description: Mapping[str, Any]) -> Self:
        """Create an empty table from a description.

        >>> Table.like(Table(factors=3, seed=9).describe()).seed
        9
        """
        settings = dict(description)
        policy = vars(Policy.from_dict(settings.pop("policy")))
        for name in ("rule", "embed_rule"):
            settings[name] = rule(**settings[name])
        return cls(**settings, **policy)

    def __len__(self) -> int:
        return int(self.stats()["rows"])

    def __repr__(self) -> str:
        stats = self.stats()
        return f"Table(factors={self.factors}, rule={self.rule.name}, rows={stats['rows']}, bytes={stats['bytes']})"

    def pull(self, keys: Keys, *, training: bool = True, out: Floats | None = None) -> Floats:
        """Return the rows of `keys`, in their order: embed_w, then the factors.

        A key without a row reads its initial value in training and zeros otherwise. `pull` creates no rows.

        >>> Table(factors=4).pull(np.array([7, 7], np.uint64)).shape
        (2, 5)
        """
        keys = _checked("keys", keys, np.uint64, (None,))
        width = 1 + self.factors
        if out is None:
            out = np.empty((len(keys), width), np.float32)
        elif (
            out.dtype != np.float32
            or out.shape != (len(keys), width)
            or not out.flags.c_contiguous
            or not out.flags.writeable
        ):
            raise TableError(f"out must be a writable, contiguous float32 array of shape {(len(keys), width)}")
        self.core.pull(keys, training, out)
        return out

    def push(
        self,
        keys: Keys,
        grads: Floats,
        *,
        show: Floats | None = None,
        click: Floats | None = None,
        slots: NDArray[np.uint16] | None = None,
        n: float = 1.0,
        distinct: bool = False,
    ) -> None:
        """Train the rows of `keys` and create missing ones. The gradients and counts of duplicate keys are summed.

        `grads` are gradients of the summed loss. `show` (default 1) and `click` (default 0) count the key's occurrences. `n` is the sum
        of the batch's weights. Pass `distinct=True` if the keys are unique; this skips the duplicate check.
        """
        keys = _checked("keys", keys, np.uint64, (None,))
        size = len(keys)
        grads = _checked("grads", grads, np.float32, (size, 1 + self.factors))
        show = None if show is None else _checked("show", show, np.float32, (size,))
        click = None if click is None else _checked("click", click, np.float32, (size,))
        slots = None if slots is None else _checked("slots", slots, np.uint16, (size,))
        self.core.push(keys, grads, show, click, slots, n, distinct)

    def move(self, keys: Keys, rows: Floats, *, add: bool, show: Floats | None = None, click: Floats | None = None,
             slots: NDArray[np.uint16] | None = None, distinct: bool = False) -> None:  # fmt: skip
        """Add `rows` to the weights, or replace the weights by them. The rule is not applied, and its state does not change.

        A key without a row starts from its initial value. `show` and `click` (default 0) are added to its statistics. `distinct` is as
        in `push`.

        >>> table = Table(factors=1)
        >>> table.move(np.array([5], np.uint64), np.array([[1, 2]], np.float32), add=False)
        >>> table.pull(np.array([5], np.uint64)).tolist()
        [[1.0, 2.0]]
        """
        keys = _checked("keys", keys, np.uint64, (None,))
        rows = _checked("rows", rows, np.float32, (len(keys), 1 + self.factors))
        show = np.zeros(len(keys), np.float32) if show is None else _checked("show", show, np.float32, (len(keys),))
        click = None if click is None else _checked("click", click, np.float32, (len(keys),))
        slots = None if slots is None else _checked("slots", slots, np.uint16, (len(keys),))
        self.core.push(keys, rows, show, click, slots, 1.0, distinct, 1 if add else 2)

    def known(self, keys: Keys) -> NDArray[np.bool_]:
        """Return a mask of the keys that have a row."""
        keys = _checked("keys", keys, np.uint64, (None,))
        out = np.empty(len(keys), np.uint8)
        self.core.known(keys, out)
        return out.view(np.bool_)

    def shrink(self) -> int:
        """Decay every row's statistics and delete rows by score and age. Return the number of deleted rows."""
        return int(self.core.shrink())

    def end_day(self) -> None:
        """Make every row a day older. A push resets the age of its rows."""
        self.core.end_day()

    def restore_readers(self, keys: Keys) -> None:
        """Assume nothing about what consumers have of these keys: the next changes set or delete each of them."""
        self.core.restore_readers(_checked("keys", keys, np.uint64, (None,)))

    def stats(self) -> dict[str, int]:
        """Return the numbers of rows and bytes, and counts of events such as admissions and deletions.

        >>> sorted(Table(factors=1).stats())[:4]
        ['admitted', 'bytes', 'changed', 'deleted']
        """
        return dict(self.core.stats())

    def snapshot(self, files: int = 1) -> "Snapshot":
        """Return all rows as they are now, while pushes continue. A table has at most one open snapshot."""
        return Snapshot(_core.Cut(self.core, "snapshot", files))

    def cut_changes(self, *, base: bool = False) -> "Changes":
        """Return what changed since the last commit, for consumers. Return all rows if nothing was committed yet, or with `base`."""
        base = base or not self.core.tracking
        return Changes(_core.Cut(self.core, "base" if base else "changes", 1), base)


class PendingChanges(Protocol):
    """Changes to publish. Read them, then `commit` once they are published, or `abort` to have them in the next changes again."""

    base: bool

    def __iter__(self) -> Iterator[Columns]: ...
    @property
    def deleted(self) -> Keys: ...
    def commit(self) -> None: ...
    def abort(self) -> None: ...


class PublishableTable(Protocol):
    """What online learning needs of a table: a `Table` of this process, or the shards of a cluster."""

    def __len__(self) -> int: ...
    def stats(self) -> dict[str, int]: ...
    def shrink(self) -> int: ...
    def end_day(self) -> None: ...
    def cut_changes(self, *, base: bool = False) -> PendingChanges: ...
    def restore_readers(self, keys: Keys) -> None: ...


class Snapshot:
    """Rows of one moment, as dictionaries of columns. Short and full rows are separate; both ascend by mix64(key) within a file."""

    def __init__(self, cut: "_core.Cut") -> None:
        self._cut = cut

    def __iter__(self) -> Iterator[Columns]:
        while (columns := self._cut.next()) is not None:
            yield columns

    @property
    def tracking(self) -> bool:
        """Whether changes were recorded, because something had been published."""
        return bool(self._cut.tracking)

    @property
    def changed(self) -> Keys:
        """Keys changed since the last publication; available after the last rows."""
        return np.asarray(self._cut.changed_keys(), np.uint64)

    @property
    def deleted(self) -> Keys:
        """Keys that consumers must delete; available after the last rows."""
        return np.asarray(self._cut.deleted_keys(), np.uint64)

    @property
    def memory(self) -> list[int] | None:
        """How a table with a memory limit used its memory. This depends on its history and decides when it evicts."""
        return np.asarray(self._cut.memory()).tolist() or None

    def close(self) -> None:
        self._cut.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Changes(Snapshot):
    """Rows to publish. After reading them, call `commit` when consumers have them, or `abort` to include them in the next changes.

    >>> table = Table(factors=1)
    >>> table.push(np.array([5], np.uint64), np.ones((1, 2), np.float32))
    >>> changes = table.cut_changes()
    >>> [rows["key"].tolist() for rows in changes], changes.base
    ([[5]], True)
    >>> changes.commit()
    >>> list(table.cut_changes())
    []
    """

    def __init__(self, cut: "_core.Cut", base: bool) -> None:
        super().__init__(cut)
        self.base = base

    def commit(self) -> None:
        self._cut.commit()

    def abort(self) -> None:
        self._cut.abort()


def _checked(name: str, array: Any, dtype: type[np.generic], shape: tuple[int | None, ...]) -> Any:
    """Return `array` as a contiguous array. Raise TableError if its type or shape is wrong."""
    if (
        isinstance(array, np.ndarray)
        and array.dtype == dtype
        and array.ndim == len(shape)
        and all(size is None or size == actual for size, actual in zip(shape, array.shape, strict=True))
    ):
        return np.ascontiguousarray(array)
    wanted = f"{np.dtype(dtype).name}[{', '.join('n' if size is None else str(size) for size in shape)}]"
    if not isinstance(array, np.ndarray):
        raise TableError(f"{name} must be a NumPy array {wanted}, not {type(array).__name__}")
    if array.dtype != dtype:
        raise TableError(
            f"{name} must be {wanted}, not {array.dtype}", f"convert with {name}.astype(np.{np.dtype(dtype).name})"
        )
    raise TableError(f"{name} must have shape {wanted}, not {list(array.shape)}")
