"""The sparse table: `pull(keys)` reads rows, `push(keys, grads)` trains them and creates new ones.

>>> import numpy as np
>>> table = Table(factors=2, rule=rule("adagrad", lr=0.05))
>>> keys = np.array([3, 2**64 - 1], np.uint64)
>>> table.push(keys, np.ones((2, 3), np.float32))
>>> len(table), table.pull(keys).shape
(2, (2, 3))
"""

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.errors import ConfigError, TableError
from clickfleet.store.disk_folder import DiskFolder
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


@dataclasses.dataclass(frozen=True)
class SlotRows:
    """What the rows of one slot have of their own. None: as all other rows of the table."""

    factors: int | None = None
    rule: Rule | None = None
    embed_rule: Rule | None = None
    admission: str | Admission | None = None


@dataclasses.dataclass(frozen=True)
class RowClass:
    """Rows of equal width with the same rules and admission."""

    factors: int
    rule: Rule
    embed_rule: Rule
    admission: Admission

    def to_dict(self) -> dict[str, Any]:
        rules = {"rule": self.rule.to_dict(), "embed_rule": self.embed_rule.to_dict()}
        return {"factors": self.factors, **rules, "admission": str(self.admission)}


MAX_CLASSES = 16
"""Most different combinations of width, rules and admission in one table. A look-up without the slot of its key tries each."""


class Table:
    """Rows of 1 + `factors` weights under 64-bit keys, each with statistics and the state of its rule.

    `slots` gives the rows of some slots, by number, another width, rule or admission. All arrays have the width of the widest rows:
    `pull` fills narrower ones with zeros, and `push` ignores what lies beyond a row's own width. `slots` in a push decides the width of
    a new row; an existing row keeps its width.

    `preset` and any field of `Policy` set when rows get their factors, are evicted and published. `memory_limit` bounds all memory of
    the table by evicting the rows with the lowest scores. With a directory `disk`, cold rows move there instead; `disk_limit` bounds
    its files. Any number of threads may use a table at the same time.

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
        disk: str | os.PathLike[str] | None = None,
        disk_limit: int | None = None,
        slots: Mapping[int, SlotRows] | None = None,
        **policy: float,
    ) -> None:
        if preset not in PRESETS:
            raise ConfigError(f"unknown preset {preset!r}", f"presets are {', '.join(PRESETS)}")
        for width in (factors, *(own.factors for own in (slots or {}).values() if own.factors is not None)):
            if not 0 <= width <= 1 << 16:
                raise ConfigError(f"factors must lie between 0 and 65536, not {width}")
        known = {field.name for field in dataclasses.fields(Policy)}
        for name in policy.keys() - known:
            raise ConfigError(f"unknown table setting {name}", f"settings are {', '.join(sorted(known))}")
        changes: dict[str, Any] = dict(policy)
        if admission is not None:
            changes["admission"] = Admission.parse(admission)
        self.rule = rule
        self.embed_rule = embed_rule or rule
        self.init, self.embed_init = Init.parse(init), Init.parse(embed_init)
        self.policy = dataclasses.replace(PRESETS[preset], **changes)
        usual = RowClass(factors, rule, self.embed_rule, self.policy.admission)
        self.classes = [usual]
        """The kinds of rows: first that of every slot without settings of its own."""
        self._slot_class = self._classify({} if slots is None else slots, embed_rule)
        self.factors = max(own.factors for own in self.classes)
        """Factors of the widest rows."""
        self.seed = seed % 2**64
        self.padding_key = padding_key
        self.memory_limit = memory_limit
        self.snapshot_reserve = (
            memory_limit // 10 if memory_limit and snapshot_reserve is None else snapshot_reserve or 0
        )
        if disk is not None and not memory_limit:
            raise ConfigError("table.disk needs table.memory_limit", "set the memory that rows may use, such as 8GiB")
        if disk_limit is not None and disk is None:
            raise ConfigError("table.disk_limit needs table.disk", "set the directory for rows beyond the memory limit")
        self.disk = None if disk is None else str(disk)
        self.disk_limit = disk_limit
        folder = None if disk is None else DiskFolder(disk)  # goes with the core
        self.core = _core.Table(self.core_config("" if folder is None else str(folder.path)), folder)

    def _classify(self, slots: Mapping[int, SlotRows], embed_rule: Rule | None) -> NDArray[np.uint8]:
        """Return the number of the class of every slot, and add the classes."""
        numbers = np.zeros(max(slots, default=-1) + 1, np.uint8)
        usual = self.classes[0]
        for slot, own in sorted(slots.items()):
            if not 0 <= slot < NO_SLOT:
                raise ConfigError(f"slot {slot} is not a number from 0 to {NO_SLOT - 1}")
            row_class = RowClass(
                usual.factors if own.factors is None else own.factors,
                own.rule or usual.rule,
                own.embed_rule or embed_rule or own.rule or usual.rule,
                usual.admission if own.admission is None else Admission.parse(own.admission),
            )
            if row_class not in self.classes:
                self.classes.append(row_class)
            if len(self.classes) > MAX_CLASSES:
                raise ConfigError(
                    f"the slots have more than {MAX_CLASSES} different widths, rules or admissions",
                    "give some slots the same ones: a look-up may try each",
                )
            numbers[slot] = self.classes.index(row_class)
        return numbers if numbers.any() else numbers[:0]

    @property
    def at_birth(self) -> bool:
        """Whether every row has its factors from its first push on."""
        return all(own.admission.by == "birth" for own in self.classes)

    def class_of(self, slots: NDArray[np.uint16]) -> NDArray[np.uint8]:
        """Return the number of the class of rows, in `classes`, of each slot."""
        if not len(self._slot_class):
            return np.zeros(len(slots), np.uint8)
        known = slots < len(self._slot_class)
        return np.where(known, self._slot_class[np.where(known, slots, 0)], np.uint8(0))

    def core_config(self, folder: str) -> dict[str, object]:
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

        def row_class(own: RowClass) -> dict[str, object]:
            return {
                "factors": own.factors,
                "embed": part(own.embed_rule, self.embed_init),
                "embedx": part(own.rule, self.init),
                "admission": own.admission.by,
                "admission_threshold": own.admission.threshold,
            }

        policy = {name: value for name, value in vars(self.policy).items() if name != "admission"}
        return {
            "classes": [row_class(own) for own in self.classes],
            "slot_class": self._slot_class.tolist(),
            "seed": self.seed,
            "padding_key": self.padding_key,
            "memory_limit": self.memory_limit or 0,
            "snapshot_reserve": self.snapshot_reserve,
            "disk": folder,
            "disk_limit": self.disk_limit or 0,
            "disk_ring": not os.environ.get("CLICKFLEET_DISK_THREADS"),
            **policy,
        }

    def describe(self) -> dict[str, Any]:
        """Return the table's settings as plain values for JSON. `Table.like` creates an equal, empty table from them."""
        slots = {str(slot): self.classes[number].to_dict() for slot, number in enumerate(self._slot_class) if number}
        return {
            "factors": self.classes[0].factors,
            **({"slots": slots} if slots else {}),
            "rule": self.rule.to_dict(),
            "embed_rule": self.embed_rule.to_dict(),
            "init": str(self.init),
            "embed_init": str(self.embed_init),
            "policy": self.policy.to_dict(),
            "seed": self.seed,
            "padding_key": self.padding_key,
            "memory_limit": self.memory_limit,
            "snapshot_reserve": self.snapshot_reserve,
            **({} if self.disk is None else {"disk": self.disk, "disk_limit": self.disk_limit}),
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
        slots = {
            int(slot): SlotRows(own["factors"], rule(**own["rule"]), rule(**own["embed_rule"]), own["admission"])
            for slot, own in settings.pop("slots", {}).items()
        }
        return cls(**settings, slots=slots, **policy)

    def __len__(self) -> int:
        return int(self.stats()["rows"])

    def __repr__(self) -> str:
        stats = self.stats()
        return f"Table(factors={self.factors}, rule={self.rule.name}, rows={stats['rows']}, bytes={stats['bytes']})"

    def pull(
        self,
        keys: Keys,
        *,
        training: bool = True,
        out: Floats | None = None,
        slots: NDArray[np.uint16] | None = None,
    ) -> Floats:
        """Return the rows of `keys`, in their order: embed_w, then the factors.

        A key without a row reads its initial value in training and zeros otherwise. `pull` creates no rows. If slots have their own
        widths, it has the initial values of the widest rows; if they have their own admission and not all admit at birth, its factors
        are zeros. Pass the `slots` of the keys if they are known: a table with rows of several widths then finds the row of a key at
        once. The rows are the same without them.

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
        if slots is not None:
            slots = _checked("slots", slots, np.uint16, keys.shape)
        self.core.pull(keys, training, out, slots)
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

    def announce(self, keys: Keys) -> None:
        """Tell which keys will be pulled soon. If the table has rows on disk, it reads these rows ahead; nothing else changes."""
        if self.disk is not None:
            self.core.announce(_checked("keys", keys, np.uint64, (None,)))

    def shrink(self) -> int:
        """Decay every row's statistics and delete rows by score and age. Return the number of deleted rows."""
        return int(self.core.shrink())

    def end_day(self) -> None:
        """Make every row a day older. A push resets the age of its rows."""
        self.core.end_day()

    def set_rules(self, description: Mapping[str, Any]) -> None:
        """Take the settings of the rules from a description. The kinds of the rules must be the same: rows keep their state.

        >>> table = Table(factors=3, rule=rule("adagrad", lr=0.1))
        >>> table.set_rules(Table(factors=3, rule=rule("adagrad", lr=0.2)).describe())
        >>> table.describe()["rule"]["lr"]
        0.2
        """
        like = Table.like(description)
        self.core.set_rules(like.core_config(""))
        self.rule, self.embed_rule, self.classes = like.rule, like.embed_rule, like.classes

    def restore_readers(self, keys: Keys) -> None:
        """Assume nothing about what consumers have of these keys: the next changes set or delete each of them."""
        self.core.restore_readers(_checked("keys", keys, np.uint64, (None,)))

    def stats(self) -> dict[str, int]:
        """Return the numbers of rows and bytes, and counts of events such as admissions and deletions.

        >>> sorted(Table(factors=1).stats())[:4]
        ['admitted', 'bytes', 'changed', 'deleted']
        """
        return dict(self.core.stats())

    @property
    def tracking(self) -> bool:
        """Whether changes are recorded, because something was published."""
        return bool(self.core.tracking)

    def snapshot(self, files: int = 1) -> "Snapshot":
        """Return all rows as they are now, while pushes continue. A table has at most one open snapshot."""
        return Snapshot(_core.Cut(self.core, "snapshot", files))

    def cut_changes(self, *, base: bool = False) -> "Changes":
        """Return what changed since the last commit, for consumers. Return all rows if nothing was committed yet, or with `base`."""
        base = base or not self.core.tracking
        return Changes(_core.Cut(self.core, "base" if base else "changes", 1), base)

    def take_changes(self) -> "TakenChanges":
        """Return a copy of what changed since the last commit, and count it as committed. A snapshot may be open.

        If consumers do not get it after all, pass its keys to `restore_readers`.
        """
        if not self.core.tracking:
            raise TableError("nothing was published yet", "publish a base first: cut_changes(base=True)")
        cut = _core.Cut(self.core, "taken", 1)
        return TakenChanges(list(Snapshot(cut)), np.asarray(cut.deleted_keys(), np.uint64))


def size_facts(stats: Mapping[str, int]) -> dict[str, int]:
    """Return the size of a table for a record: all rows and the memory, what is on disk if it keeps rows there, and the same by width.

    >>> size_facts(Table(factors=1).stats())
    {'table_rows': 0, 'table_bytes': 0}
    """
    on_disk = {f"table_{name}": stats[name] for name in ("disk_rows", "disk_bytes", "index_bytes") if name in stats}
    by_width = {f"table_{name}": value for name, value in stats.items() if _BY_WIDTH.match(name)}
    several = by_width if len(width_facts(stats)) > 1 else {}
    return {"table_rows": stats["rows"], "table_bytes": stats["bytes"], **on_disk, **several}


_BY_WIDTH = re.compile(r"^width_(\d+)_(rows|bytes|disk_rows|disk_bytes)$")


def width_facts(stats: Mapping[str, int]) -> dict[int, dict[str, float]]:
    """Return the rows, bytes and bytes per row of each width, in memory and on disk. Width 0: rows without factors.

    >>> table = Table(factors=2, slots={7: SlotRows(factors=4)})
    >>> table.push(np.array([1, 2], np.uint64), np.ones((2, 5), np.float32), slots=np.array([7, 0], np.uint16))
    >>> {width: facts["rows"] for width, facts in width_facts(table.stats()).items()}
    {2: 1, 4: 1}
    """
    found: dict[int, dict[str, float]] = {}
    for name, value in stats.items():
        if match := _BY_WIDTH.match(name):
            found.setdefault(int(match[1]), {})[match[2]] = value
    for facts in found.values():
        facts["bytes_per_row"] = facts["bytes"] / max(facts["rows"], 1)
        if "disk_rows" in facts:
            facts["disk_bytes_per_row"] = facts["disk_bytes"] / max(facts["disk_rows"], 1)
    return dict(sorted(found.items()))


def tier_facts(stats: Mapping[str, int]) -> dict[str, dict[str, float]] | None:
    """Return rows, bytes and bytes per row in memory and on disk; None if the table keeps all rows in memory.

    The memory of the rows on disk is their index.
    """
    if "disk_rows" not in stats:
        return None
    rows, index = stats["rows"] - stats["disk_rows"], stats["index_bytes"]
    memory, on_disk = stats["bytes"] - index, stats["disk_rows"]
    return {
        "memory": {"rows": rows, "bytes": memory, "bytes_per_row": memory / max(rows, 1)},
        "disk": {
            "rows": on_disk,
            "bytes": stats["disk_bytes"],
            "bytes_per_row": stats["disk_bytes"] / max(on_disk, 1),
            "index_bytes": index,
            "index_bytes_per_row": index / max(on_disk, 1),
        },
    }


class PendingChanges(Protocol):
    """Changes to publish. Read them, then `commit` once they are published, or `abort` to have them in the next changes again."""

    base: bool

    def __iter__(self) -> Iterator[Columns]: ...
    @property
    def deleted(self) -> Keys: ...
    def commit(self) -> None: ...
    def abort(self) -> None: ...


@dataclasses.dataclass
class TakenChanges:
    """Changes that count as published, in memory. They are written while the table changes again.

    >>> table = Table(factors=1)
    >>> table.cut_changes().abort()
    >>> table.restore_readers(np.array([5], np.uint64))
    >>> table.take_changes().keys.tolist()
    [5]
    """

    parts: list[Columns]
    deleted: Keys
    base: bool = False

    def __iter__(self) -> Iterator[Columns]:
        return iter(self.parts)

    @property
    def keys(self) -> Keys:
        """Every key that they set or delete."""
        return np.concatenate([self.deleted, *(part["key"] for part in self.parts)])


class PublishableTable(Protocol):
    """What online learning needs of a table: a `Table` of this process, or the shards of a cluster."""

    def __len__(self) -> int: ...
    def stats(self) -> dict[str, int]: ...
    def shrink(self) -> int: ...
    def end_day(self) -> None: ...
    @property
    def tracking(self) -> bool: ...
    def cut_changes(self, *, base: bool = False) -> PendingChanges: ...
    def take_changes(self) -> TakenChanges: ...
    def restore_readers(self, keys: Keys) -> None: ...


class Snapshot:
    """Rows of one moment, as dictionaries of columns. Each kind of rows is separate and ascends by mix64(key) within a file.

    Kind 2c are the short rows of class c, kind 2c + 1 its full rows. Rows to publish are separate by width only.
    """

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
