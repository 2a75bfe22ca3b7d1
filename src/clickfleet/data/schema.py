"""The schema of a dataset: label, dense columns with their transforms, slots, and the rule that turns values into keys.

>>> schema = preset("criteo")
>>> len(schema.dense), len(schema.slots), str(schema.keys)
(13, 26, 'hash64')
>>> Schema.from_dict(schema.to_dict()) == schema
True
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from clickfleet.config.plugins import closest
from clickfleet.errors import ConfigError, DataError

Pooling = Literal["sum", "mean"]
Keep = Literal["last", "first"]
LossName = Literal["log", "mse", "poisson"]
LateName = Literal["correct", "weight", "none"]
TransformName = Literal["none", "minmax", "log1p", "standard"]
RuleName = Literal["hash64", "py2", "raw"]
SIDES = ("show", "click", "weight", "time", "group")
"""Optional columns with one value per row."""
MOST_LABELS = 64


@dataclass(frozen=True)
class Transform:
    """The transform of a dense value: (x - a) / scale for minmax and standard, sign(x) log1p(|x|) for log1p.

    >>> Transform.parse("minmax(0, 20)")
    Transform(name='minmax', a=0.0, b=20.0)
    """

    name: TransformName = "none"
    a: float = 0.0
    b: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in get_args(TransformName):
            raise ConfigError(f"unknown transform {self.name!r}", f"choose one of {', '.join(get_args(TransformName))}")
        if not (math.isfinite(self.a) and math.isfinite(self.b) and self.scale > 0):
            raise ConfigError(f"transform {self} needs a finite range greater than zero")

    @property
    def scale(self) -> float:
        """The divisor: max - min for minmax, the deviation for standard."""
        return self.b - self.a if self.name == "minmax" else self.b

    @classmethod
    def parse(cls, text: str) -> "Transform":
        match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*([^,()]+?)\s*,\s*([^,()]+?)\s*\))?\s*", text)
        has_limits = match is not None and match[1] in ("minmax", "standard")
        if match is None or has_limits != (match[2] is not None):
            raise ConfigError(
                f"cannot read the transform {text!r}",
                "write none, log1p, minmax(min, max) or standard(mean, deviation)",
            )
        name: Any = match[1]
        try:
            return cls(name, float(match[2]), float(match[3])) if has_limits else cls(name)
        except ValueError:
            raise ConfigError(f"the limits in the transform {text!r} are not numbers") from None

    def __str__(self) -> str:
        return f"{self.name}({self.a!r}, {self.b!r})" if self.name in ("minmax", "standard") else self.name


@dataclass(frozen=True)
class Dense:
    """A numeric column. `source` is its name in the files if that differs; several columns may share one."""

    name: str
    transform: Transform = Transform()
    missing: float = 0.0
    source: str = ""

    @property
    def source_name(self) -> str:
        """The name of the column in the files."""
        return self.source or self.name


@dataclass(frozen=True)
class Bucket:
    """Turns a transformed dense column into a slot: equal buckets in [low, high], or the intervals between `boundaries`.

    With the key rules py2 and raw, the key is `offset` + bucket.
    """

    column: str
    low: float = 0.0
    high: float = 1.0
    buckets: int = 100
    boundaries: tuple[float, ...] = ()
    offset: int = 0


@dataclass(frozen=True)
class Slot:
    """A categorical column. Its `name` is part of every key; with the key rule py2, `prefix` replaces it.

    With `rows_of`, it uses the rows of another slot: equal values have the same key in both.
    """

    name: str
    multi: bool = False
    pooling: Pooling = "sum"
    source: str = ""
    prefix: str = ""
    bucket: Bucket | None = None
    rows_of: str = ""

    @property
    def source_name(self) -> str:
        """The name of the column in the files."""
        return self.source or self.name


@dataclass(frozen=True)
class History:
    """A list of past events of a row. Each event has a value for every one of `slots`, whose rows it uses.

    `columns` are the names of the lists in the files, one per slot; all lists of a row have the same length. A row keeps the last
    (or first) `max` events.

    >>> History("clicked", ("item", "category")).columns
    ('clicked_item', 'clicked_category')
    """

    name: str
    slots: tuple[str, ...]
    columns: tuple[str, ...] = ()
    max: int = 100
    keep: Keep = "last"

    LIMIT: ClassVar[int] = 65_536
    """The largest `max`."""

    def __post_init__(self) -> None:
        for name in ("slots", "columns"):
            given = getattr(self, name)
            given = (given,) if isinstance(given, str) else tuple(given)
            if not all(isinstance(item, str) and item for item in given):
                raise ConfigError(f"history {self.name}: {name} must be a list of names")
            object.__setattr__(self, name, given)
        if not self.columns:
            object.__setattr__(self, "columns", tuple(f"{self.name}_{slot}" for slot in self.slots))
        if not self.slots or len(set(self.slots)) < len(self.slots):
            raise ConfigError(f"history {self.name}: name at least one slot, and each only once")
        if len(self.columns) != len(self.slots) or len(set(self.columns)) < len(self.columns):
            raise ConfigError(f"history {self.name}: name one column for each of its {len(self.slots)} slots")
        if isinstance(self.max, bool) or not isinstance(self.max, int) or not 1 <= self.max <= self.LIMIT:
            raise ConfigError(f"history {self.name}: max must be between 1 and {self.LIMIT}, not {self.max!r}")
        if self.keep not in get_args(Keep):
            raise ConfigError(f"history {self.name}: unknown keep {self.keep!r}", "choose last or first")


@dataclass(frozen=True)
class Label:
    """What a model learns to predict: a column of the files, its loss, and the weight of that loss.

    `log` is for 0 and 1, `mse` for any number, `poisson` for counts. With `given`, the label has a meaning only in rows where that
    other label is 1: a purchase is known only after a click.

    `late` says how a label is learned that came after its row was learned without it. `correct` takes back what the earlier value
    taught. `weight` learns it as one more row, and lets rows without it count less from the start. `none` only learns one more row.
    """

    name: str
    loss: LossName = "log"
    weight: float = 1.0
    given: str = ""
    source: str = ""
    late: LateName = "correct"

    def __post_init__(self) -> None:
        if self.loss not in get_args(LossName):
            raise ConfigError(
                f"label {self.name}: unknown loss {self.loss!r}", f"choose one of {', '.join(get_args(LossName))}"
            )
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float) or not 0 <= self.weight < math.inf:
            raise ConfigError(f"label {self.name}: the weight must be a number of 0 or more, not {self.weight!r}")
        if self.late not in get_args(LateName):
            raise ConfigError(
                f"label {self.name}: unknown late {self.late!r}", f"choose one of {', '.join(get_args(LateName))}"
            )
        if self.late == "weight" and self.loss != "log":
            raise ConfigError(
                f"label {self.name}: late: weight is defined for the loss log, not {self.loss}",
                "choose correct or none",
            )

    @property
    def source_name(self) -> str:
        """The name of the column in the files."""
        return self.source or self.name


@dataclass(frozen=True)
class KeyRule:
    """The rule that turns a slot and a value into a key.

    >>> KeyRule.parse("py2 mod 1000001")
    KeyRule(name='py2', modulus=1000001)
    """

    name: RuleName = "hash64"
    modulus: int = 0

    def __post_init__(self) -> None:
        if self.name not in get_args(RuleName):
            raise ConfigError(f"unknown key rule {self.name!r}", "choose hash64, py2 mod M or raw")
        if self.name == "py2" and not 0 < self.modulus < 2**63:
            raise ConfigError(f"the key rule py2 needs a modulus from 1 to 2^63 - 1, not {self.modulus}")

    @property
    def by_slot(self) -> bool:
        """Whether equal values in different slots have different keys."""
        return self.name == "hash64"

    @classmethod
    def parse(cls, text: str) -> "KeyRule":
        match = re.fullmatch(r"\s*(\w+)(?:\s+mod\s+(\d+))?\s*", text)
        if match is None or (match[1] == "py2") != (match[2] is not None):
            raise ConfigError(f"cannot read the key rule {text!r}", "write hash64, raw or py2 mod 1000001")
        name: Any = match[1]
        return cls(name, int(match[2] or 0))

    def __str__(self) -> str:
        return f"py2 mod {self.modulus}" if self.name == "py2" else self.name


@dataclass(frozen=True)
class Schema:
    """Everything that determines how a line becomes numbers and keys. Data with a different schema is rejected."""

    dense: tuple[Dense, ...] = ()
    slots: tuple[Slot, ...] = ()
    label: str = "label"
    keys: KeyRule = KeyRule()
    show: str | None = None
    click: str | None = None
    weight: str | None = None
    time: str | None = None
    group: str | None = None
    values: bool = False
    """Whether every key has a value that multiplies its row (libffm)."""
    negative: int = 0
    """The label of a row without a click in the files: 0 or -1. That of a click is always 1."""
    histories: tuple[History, ...] = ()
    labels: tuple[Label, ...] = ()
    """Several labels, or one with settings. `label` is then the column of the first."""

    _hash: str = field(default="", init=False, repr=False, compare=False)
    key_columns: tuple[Slot, ...] = field(default=(), init=False, repr=False, compare=False)
    """The columns of keys in a batch: the slots, then the columns of the histories as slots that are pooled by their mean."""
    slot_numbers: tuple[int, ...] = field(default=(), init=False, repr=False, compare=False)
    """For each key column, the number of the slot whose rows it uses."""

    def __post_init__(self) -> None:
        if self.labels:
            self._check_labels()
        if not self.label:
            raise ConfigError("the schema does not name a label column")
        if not self.slots and not self.dense:
            raise ConfigError("the schema needs at least one slot or dense column")
        if self.negative not in (0, -1) or isinstance(self.negative, bool):
            raise ConfigError(f"negative is {self.negative!r}", "labels are 0 and 1, or -1 and 1 with negative: -1")
        columns = (*self.slots, *(column for history in self.histories for column in self._history_columns(history)))
        named: tuple[Dense | Slot | History, ...] = (*self.dense, *columns, *self.histories)
        names = [column.name for column in named]
        for name in names:
            if not name:
                raise ConfigError("a column of the schema has no name")
            if names.count(name) > 1:
                raise ConfigError(f"the schema has two columns named {name!r}")
        for slot in self.slots:
            if slot.pooling not in get_args(Pooling):
                raise ConfigError(f"slot {slot.name}: unknown pooling {slot.pooling!r}", "choose sum or mean")
            if slot.bucket is not None:
                self._check_bucket(slot, slot.bucket)
        numbers = {slot.name: i for i, slot in enumerate(self.slots) if slot.bucket is None and not slot.rows_of}
        for i, slot in enumerate(columns):
            if slot.rows_of and (slot.rows_of not in numbers or slot.bucket is not None):
                what = (
                    f"slot {slot.name}: rows_of" if i < len(self.slots) else f"history {slot.name.partition('.')[0]}:"
                )
                raise ConfigError(
                    f"{what} {slot.rows_of!r} is not a slot with rows of its own{closest(slot.rows_of, numbers)}"
                )
        object.__setattr__(self, "key_columns", columns)
        own = tuple(numbers[slot.rows_of] if slot.rows_of else i for i, slot in enumerate(columns))
        object.__setattr__(self, "slot_numbers", own)

    def _history_columns(self, history: History) -> list[Slot]:
        """Return the columns of a history as slots."""
        return [
            Slot(f"{history.name}.{slot}", multi=True, pooling="mean", source=source, rows_of=slot)
            for slot, source in zip(history.slots, history.columns, strict=True)
        ]

    def _check_labels(self) -> None:
        names: list[str] = []
        for label in self.labels:
            if not label.name or label.name in names:
                raise ConfigError(f"two labels are named {label.name!r}" if label.name else "a label has no name")
            if label.given:
                given = next((other for other in self.labels if other.name == label.given), None)
                if label.given not in names or given is None or given.loss != "log":
                    raise ConfigError(
                        f"label {label.name}: given must name an earlier label with the loss log, not {label.given!r}"
                    )
            names.append(label.name)
        if self.labels[0].loss != "log":
            raise ConfigError(
                f"the first label, {names[0]}, has the loss {self.labels[0].loss}, not log",
                "name the click first: metrics, early stopping and the statistics of rows follow the first label",
            )
        if len(names) > MOST_LABELS:
            raise ConfigError(f"the schema has {len(names)} labels; the limit is {MOST_LABELS}")
        sources = [label.source_name for label in self.labels]
        if len(set(sources)) < len(sources):
            raise ConfigError("two labels have the same column")
        object.__setattr__(self, "label", sources[0])
        if self.labels == (Label(self.labels[0].name),):
            object.__setattr__(self, "labels", ())

    def _check_bucket(self, slot: Slot, bucket: Bucket) -> None:
        if bucket.column not in [column.name for column in self.dense]:
            raise ConfigError(f"slot {slot.name}: unknown dense column {bucket.column!r} in bucket")
        if slot.multi:
            raise ConfigError(f"slot {slot.name}: a bucketed slot cannot be multi-valued")
        if bucket.boundaries:
            if list(bucket.boundaries) != sorted(set(bucket.boundaries)):
                raise ConfigError(f"slot {slot.name}: boundaries must increase")
        elif bucket.buckets < 1 or not bucket.low < bucket.high:
            raise ConfigError(f"slot {slot.name}: needs at least one bucket and low < high")
        if not 0 <= bucket.offset < 2**63:
            raise ConfigError(f"slot {slot.name}: offset must be between 0 and 2^63 - 1")

    @property
    def columns(self) -> tuple[Dense | Slot, ...]:
        """The dense columns, then the slots."""
        return (*self.dense, *self.slots)

    @property
    def tasks(self) -> tuple[Label, ...]:
        """The labels that a model learns, at least one."""
        return self.labels or (Label(self.label),)

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns of the labels in the files."""
        return tuple(label.source_name for label in self.tasks)

    @property
    def sides(self) -> dict[str, str]:
        """The columns for show, click, weight, time and group that the schema has: kind -> name in the files."""
        return {kind: name for kind in SIDES if (name := getattr(self, kind)) is not None}

    @property
    def read_columns(self) -> tuple[Slot, ...]:
        """The key columns stored in files: all except bucketed slots."""
        return tuple(slot for slot in self.key_columns if slot.bucket is None)

    def inputs(self) -> "Schema":
        """Return the schema without show, click, weight, time and group, which a model does not need to score rows."""
        return replace(self, show=None, click=None, weight=None, time=None, group=None) if self.sides else self

    def applied(self) -> "Schema":
        """Return the schema of these rows after transforms, key rule and labels were applied to them."""
        dense = tuple(replace(column, transform=Transform()) for column in self.dense)
        return replace(self, dense=dense, keys=KeyRule("raw"), negative=0)

    def with_keys(self, rule: KeyRule | str) -> "Schema":
        return replace(self, keys=KeyRule.parse(rule) if isinstance(rule, str) else rule)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for YAML and JSON, without defaults."""
        labels = [_plain(label) for label in self.labels]  # a list, because their order counts
        return {
            **({"labels": labels} if labels else {"label": self.label}),
            "keys": str(self.keys),
            **self.sides,
            **({"values": True} if self.values else {}),
            **({"negative": self.negative} if self.negative else {}),
            "dense": [_plain(column, transform=str(column.transform)) for column in self.dense],
            "slots": [_plain(slot, **({"bucket": _plain(slot.bucket)} if slot.bucket else {})) for slot in self.slots],
            **({"histories": [_plain(history) for history in self.histories]} if self.histories else {}),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], where: str = "schema") -> "Schema":
        given = _mapping(plain, where)
        for kind in ("dense", "slots", "histories"):
            if not isinstance(given.get(kind, ()), list | tuple):
                raise ConfigError(f"{where}.{kind}: expected a list of columns, found {type(given[kind]).__name__}")
        rule = given.pop("keys", "hash64")
        dense = tuple(_dense(item, f"{where}.dense[{i}]") for i, item in enumerate(given.pop("dense", ())))
        slots = tuple(_slot(item, f"{where}.slots[{i}]") for i, item in enumerate(given.pop("slots", ())))
        more: dict[str, Any] = {"dense": dense, "slots": slots, "keys": KeyRule.parse(str(rule))}
        if "histories" in given:
            more["histories"] = tuple(
                _build(History, _mapping(item, f"{where}.histories[{i}]"), f"{where}.histories[{i}]")
                for i, item in enumerate(given.pop("histories"))
            )
        if "labels" in given:
            more["labels"] = parse_labels(given.pop("labels"), f"{where}.labels")
            if given.get("label", more["labels"][0].source_name) != more["labels"][0].source_name:
                raise ConfigError(f"{where}: both label and labels are given", "keep one of them")
        schema: Schema = _build(cls, {**given, **more}, where)
        return schema

    @property
    def hash(self) -> str:
        """A hash of the schema's meaning that is equal on all machines and in all versions."""
        if not self._hash:
            text = json.dumps(self._meaning().to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
            object.__setattr__(self, "_hash", hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
        return self._hash

    def _meaning(self) -> "Schema":
        """Return the schema without what does not change the meaning of rows: names in the files, weights of losses, late labels."""
        return replace(
            self,
            dense=tuple(replace(column, source="") for column in self.dense),
            slots=tuple(replace(slot, source="") for slot in self.slots),
            histories=tuple(replace(history, columns=()) for history in self.histories),
            labels=tuple(replace(label, source="", weight=1.0, late="correct") for label in self.labels),
        )

    def diff(self, other: "Schema") -> list[str]:
        """Return one line per difference between two schemas."""
        lines: list[str] = []
        for name in ("label", "keys", *SIDES, "values", "negative"):
            here, there = getattr(self, name), getattr(other, name)
            if here != there:
                lines.append(f"{name}: {here} here, {there} there")
        lines += _diff_columns("dense column", self._meaning().dense, other._meaning().dense)
        lines += _diff_columns("slot", self._meaning().slots, other._meaning().slots)
        lines += _diff_columns("history", self._meaning().histories, other._meaning().histories, "histories")
        if self.labels or other.labels:
            lines += _diff_columns("label", self._meaning().tasks, other._meaning().tasks)
        return lines

    def check_same(self, other: "Schema", here: str, there: str) -> None:
        """Raise DataError if `other` differs. `here` and `there` name the owners of the two schemas."""
        lines = self.diff(other)
        if lines:
            shown = "\n".join(f"  {line}" for line in lines[:12]) + ("\n  …" if len(lines) > 12 else "")
            raise DataError(f"{here} and {there} have different schemas ({len(lines)} differences):\n{shown}")


def _plain(column: Any, **instead: Any) -> Mapping[str, Any]:
    kept = {}
    for item in fields(column):
        value = instead.get(item.name, getattr(column, item.name))
        if value not in (item.default, str(item.default)):
            kept[item.name] = list(value) if isinstance(value, tuple) else value
    return kept


def _build(cls: Callable[..., Any], given: Mapping[str, Any], where: str) -> Any:
    known = [item.name for item in fields(cls) if item.init]  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key}{closest(str(key), known)}")
    try:
        return cls(**given)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from None


def _dense(item: Any, where: str) -> Any:
    if isinstance(item, str):
        return Dense(item)
    given = _mapping(item, where)
    if isinstance(given.get("transform"), str):
        given["transform"] = Transform.parse(given["transform"])
    return _build(Dense, given, where)


def _slot(item: Any, where: str) -> Any:
    if isinstance(item, str):
        return Slot(item)
    given = _mapping(item, where)
    if given.get("bucket") is not None:
        bucket = _mapping(given["bucket"], f"{where}.bucket")
        if "boundaries" in bucket:
            bucket["boundaries"] = tuple(bucket["boundaries"])
        given["bucket"] = _build(Bucket, bucket, f"{where}.bucket")
    return _build(Slot, given, where)


def _mapping(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise ConfigError(f"{where}: expected a name or a mapping, found {type(item).__name__}")
    return dict(item)


def _diff_columns(kind: str, columns_here: Iterable[Any], columns_there: Iterable[Any], plural: str = "") -> list[str]:
    here = {column.name: column for column in columns_here}
    there = {column.name: column for column in columns_there}
    lines = [f"{kind} {name}: only here" for name in here if name not in there]
    lines += [f"{kind} {name}: only there" for name in there if name not in here]
    for name in here:
        if name in there and here[name] != there[name]:
            for item in fields(here[name]):
                value_here, value_there = getattr(here[name], item.name), getattr(there[name], item.name)
                if value_here != value_there:
                    lines.append(f"{kind} {name}: {item.name} {value_here} here, {value_there} there")
    if not lines and list(here) != list(there):
        lines.append(f"{plural or kind + 's'} in different order: {', '.join(here)} here, {', '.join(there)} there")
    return lines


def parse_labels(given: Any, where: str = "labels") -> tuple[Label, ...]:
    """Return labels given by name, each with its settings, or as a list.

    >>> parse_labels({"click": {}, "buy": {"given": "click"}})[1]
    Label(name='buy', loss='log', weight=1.0, given='click', source='', late='correct')
    >>> parse_labels(["click", {"name": "buy"}])[1].name
    'buy'
    """
    items: list[Any] = []
    if isinstance(given, Mapping):
        items = [{"name": name, **_mapping(settings or {}, f"{where}.{name}")} for name, settings in given.items()]
    elif isinstance(given, list | tuple):
        items = [{"name": item} if isinstance(item, str) else item for item in given]
    if not items:
        raise ConfigError(f"{where}: expected labels by name, such as {{click: {{}}, buy: {{given: click}}}}")
    parsed = []
    for i, item in enumerate(items):
        settings = _mapping(item, f"{where}[{i}]")
        if not isinstance(settings.get("name"), str):
            raise ConfigError(f"{where}[{i}]: a label needs a name")
        parsed.append(_build(Label, settings, f"{where}.{settings['name']}"))
    return tuple(parsed)


def read_schema(path: str | Path) -> Schema:
    """Read a schema from a YAML or JSON file."""
    from clickfleet.config import yaml_files

    plain = yaml_files.parse(yaml_files.read_text(path), str(path))
    return Schema.from_dict(_mapping(plain, str(path)), str(path))


def write_schema(schema: Schema, path: str | Path) -> None:
    """Write a schema as YAML for `read_schema`."""
    import yaml

    Path(path).write_text(yaml.safe_dump(schema.to_dict(), sort_keys=False, allow_unicode=True), encoding="utf-8")


_PADDLE_MAX = (20, 600, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50)  # the 95th percentiles of Criteo's counts


def _criteo() -> Schema:
    dense = tuple(Dense(f"I{i}", Transform("log1p")) for i in range(1, 14))
    return Schema(dense, tuple(Slot(f"C{i}") for i in range(1, 27)), label="click")


def _criteo_paddle() -> Schema:
    dense = tuple(
        Dense(f"I{i}", Transform("minmax", -3.0 if i == 2 else 0.0, float(top))) for i, top in enumerate(_PADDLE_MAX, 1)
    )
    slots = tuple(Slot(f"C{i}", prefix=str(13 + i)) for i in range(1, 27))
    return Schema(dense, slots, label="click", keys=KeyRule("py2", 1000001))


def _criteo_slots() -> Schema:
    dense = tuple(Dense(f"I{i}", source="dense_feature") for i in range(1, 14))
    return Schema(dense, tuple(Slot(str(i)) for i in range(1, 27)), label="click", keys=KeyRule("raw"))


def _feasign() -> Schema:
    return Schema(slots=tuple(Slot(str(i), multi=True) for i in range(2, 302)), label="1", keys=KeyRule("raw"))


PRESETS: dict[str, Callable[[], Schema]] = {
    "criteo": _criteo,
    "criteo-paddle": _criteo_paddle,
    "criteo-slots": _criteo_slots,
    "feasign": _feasign,
}


def preset(name: str) -> Schema:
    """Return a built-in schema.

    `criteo` is the raw log. `criteo-paddle` has the scaling and ids of the original system; `criteo-slots` is for files to which
    these were already applied. `feasign` has 300 multi-valued slots of raw keys.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown schema preset {name!r}{closest(name, PRESETS)}")
    return PRESETS[name]()
