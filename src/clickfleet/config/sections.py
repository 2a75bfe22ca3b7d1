"""Define the sections of a configuration file: every key, its type, its default and its help text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BeforeValidator, ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from clickfleet.config.plugins import AUTO, Plugin, is_file
from clickfleet.errors import ConfigError

_DURATIONS = {"ms": 0.001, "s": 1, "min": 60, "h": 3600, "d": 86400}
_SIZES = {"B": 1} | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
_SIZES |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}


class Unit:
    """Marks a number that is written with a unit. `base` is the unit in which the value is stored."""

    def __init__(self, base: str, units: dict[str, float], example: str) -> None:
        self.base, self.units, self.example = base, units, example

    def parse(self, value: Any) -> float:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", value) if isinstance(value, str) else None
        if match is None or match[2] not in self.units:
            raise PydanticCustomError(
                "unit",
                "needs a number and a unit of {units}, such as {example}",
                {"units": ", ".join(self.units), "example": self.example},
            )
        number = float(match[1]) * self.units[match[2]]
        if number >= 2**63:
            raise PydanticCustomError("unit", "is too large")
        return number

    def text(self, value: float) -> str:
        return f"{value:.15g}{self.base}"


SECONDS = Unit("s", _DURATIONS, "5min")
BYTES = Unit("B", _SIZES, "8GiB")
Seconds = Annotated[float, BeforeValidator(SECONDS.parse), SECONDS]
Bytes = Annotated[int, BeforeValidator(lambda value: int(BYTES.parse(value))), BYTES]


def beside(value: str, base: Path | None) -> str:
    """Resolve a relative path against a folder. Leave URLs unchanged."""
    return value if base is None or "://" in value or Path(value).is_absolute() else str(Path(base) / value)


def plugin_path(key: str, value: Any, base: Path | None) -> Any:
    """Resolve the settings of a plug-in that are paths: the name of a user's .py file, and `folder`."""
    is_path = (key == "name" and is_file(str(value))) or (key == "folder" and value)
    return beside(value, base) if is_path and isinstance(value, str) else value


def _beside(value: str, info: ValidationInfo) -> str:
    """Resolve a relative path against the folder of the configuration file."""
    return beside(value, (info.context or {}).get("base"))


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


PATH = AfterValidator(_beside)
FilePath = Annotated[str, PATH]
FilePaths = Annotated[tuple[FilePath, ...], BeforeValidator(_several)]
Count = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]
Port = Annotated[int, Ge(0), Le(65535)]


class AutoInt(int):
    """A setting to be chosen by the data. It is a number, and stays so, where nothing chooses: for large logs and for streams."""


class AutoFloat(float):
    """Like `AutoInt`."""


class WorkerRange(int):
    """From `least` to `most` workers, as many as the Ray cluster has room for. Where one number is needed, it is the least.

    >>> WorkerRange.parse("2..8"), WorkerRange(2, 8) + 1, WorkerRange(2, 8) == 2
    (WorkerRange(2, 8), 3, False)
    """

    most: int

    def __new__(cls, least: int, most: int) -> WorkerRange:
        made = super().__new__(cls, least)
        made.most = most
        return made

    @classmethod
    def parse(cls, text: str) -> WorkerRange:
        match = re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise PydanticCustomError("range", "needs a number, or a range such as 2..8")
        return cls(int(match[1]), int(match[2]))

    def __reduce__(self) -> tuple[type[WorkerRange], tuple[int, int]]:
        return WorkerRange, (int(self), self.most)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkerRange) and (int(self), self.most) == (int(other), other.most)

    def __hash__(self) -> int:
        return hash((int(self), self.most))

    def __repr__(self) -> str:
        return f"WorkerRange({int(self)}, {self.most})"

    def __str__(self) -> str:
        return f"{int(self)}..{self.most}"


def _worker_range(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    return WorkerRange.parse(value) if isinstance(value, str) else handler(value)


def auto(usual: AutoInt | AutoFloat | None) -> WrapValidator:
    """Return a validator that accepts `auto`. The setting then has its default value, `usual`."""

    def parse(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        return usual if isinstance(value, str) and value == AUTO else handler(value)

    return WrapValidator(parse)


ONE_EPOCH, IN_ORDER, DENSE_RATE = AutoInt(1), AutoInt(0), AutoFloat(0.001)


def plugin(default: str | Plugin) -> BeforeValidator:
    """Return a validator for `name` or {name, settings…}. Settings without a name override single settings of the default."""
    usual = Plugin(default) if isinstance(default, str) else default

    def parse(value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str) and value == AUTO:
            return usual
        given = {"name": value} if isinstance(value, str) else value
        name = given.get("name", usual.name) if isinstance(given, dict) else None
        if not isinstance(name, str):
            raise PydanticCustomError("plugin", "needs a name, or a mapping with a name and settings")
        base, origin = ((info.context or {}).get(key) for key in ("base", "origin"))
        chosen = {key: item for key, item in given.items() if key != "name" and item != AUTO}
        settings = {key: plugin_path(key, item, base) for key, item in chosen.items()}
        if "name" not in given:
            return Plugin(name, {**usual.settings, **settings}, origin or "", settings)
        return Plugin(plugin_path("name", name, base), settings, origin or "")

    return BeforeValidator(parse)


BATCH_ROWS = 1000


@dataclass(frozen=True)
class Data:
    format: Annotated[Plugin, plugin(AUTO)] = field(default_factory=lambda: Plugin(AUTO))
    """Format of the files: a name, the path of your own .py file, or {name, settings…}. Default: recognised from the first file."""
    train: FilePaths = ()
    """Training data: files, folders, patterns or URLs."""
    valid: FilePaths = ()
    """Validation data, evaluated after each epoch: files, folders, patterns or URLs. Early stopping and BEST look at it."""
    valid_share: Annotated[float, Ge(0), Lt(1)] | None = None
    """Share of the training rows to set aside if data.valid is not given: the newest by the time column, or random ones. 0: none.
    Default: 0.1, at most about 100,000 rows, if there is no data.test or something needs validation; else 0."""
    test: FilePaths = ()
    """Test data: files, folders, patterns or URLs. Evaluated once at the end, or after each epoch if there is no validation data."""
    schema: FilePath | None = None
    """Path of a schema.yaml. Default: the schema of the format, or one guessed from the training data."""
    label: str | None = None
    """Name of the label column, if the schema is guessed. Default: a column named like a label, or the only one of 0 and 1."""
    preset: str | None = None
    """Name of a built-in schema, such as criteo-paddle. Use it instead of data.schema."""
    vocabulary: FilePath | None = None
    """word2vec: the vocabulary file that `clickfleet words prepare` writes."""
    keys: str | None = None
    """Rule that turns values into keys: hash64, `py2 mod 1000001` or raw. Default: the rule of the schema."""
    batch_size: Annotated[Count | None, auto(None)] = None
    """Rows per step. Default: auto, 64 to 1000 by the rows of the data; for word2vec, as many sentences as contain about 10,000 words."""
    test_batch_size: Count | None = None
    """Rows per batch in evaluation. Default: data.batch_size."""
    shuffle: Annotated[Annotated[int, Ge(0)] | Literal["global"], auto(IN_ORDER)] = IN_ORDER
    """Number of rows to shuffle at a time; `global` shuffles all rows in memory. Any value but 0 also shuffles the files.
    Default: auto, `global` for fewer than 400,000 rows on one machine, else 0.
    Data in memory is shuffled as a whole, anew in every epoch."""
    interleave: Count | None = None
    """Number of files to read in turn. Default: 1, or 4 with data.shuffle; with a pipe at least data.threads."""
    threads: Annotated[int, Ge(0)] = 1
    """Number of threads that parse files; 0 parses in the training thread. With a pipe, so many commands run at once."""
    bad_lines: Literal["error", "skip", "quarantine"] = "error"
    """What to do with a bad line: stop the run, skip and count it, or store it in the quarantine file."""
    max_bad_fraction: Share = 0.1
    """Stop the run if more than this fraction of all lines is bad."""
    quarantine: FilePath | None = None
    """File that stores bad lines, each with its reason. Default: a file in the run folder."""

    @property
    def batch_rows(self) -> int:
        """Rows per step."""
        return self.batch_size or BATCH_ROWS


@dataclass(frozen=True)
class TableInitSettings:
    """Initial values of a row: `zero`, `uniform(a, b)`, `normal(s)` or `truncated(s)`. Default: those of the model."""

    embed: str | None = None
    """Initial value of the first-order weight."""
    embedx: str | None = None
    """Initial values of the factors."""


ROW_RULE = Plugin("adagrad_v2", {"lr": 0.05, "initial_g2sum": 0.1, "scale": "show"}, given={})
FIRST_ORDER_RULE = Plugin("adagrad_v2", {"lr": 0.1, "initial_g2sum": 0.1, "scale": "show"}, given={})
"""The default pair of rules; docs/study.md compares it with others."""


Width = Annotated[int, Ge(0), Le(65536)]


@dataclass(frozen=True)
class SlotSettings:
    """The rows of one slot. A setting that is not given is that of the whole table."""

    dim: Width | None = None
    """Number of factors per row."""
    rule: Annotated[Plugin, plugin("")] | None = None
    """Optimizer of the rows. Without a name, its settings override those of `table.rule`."""
    embed_rule: Annotated[Plugin, plugin("")] | None = None
    """Optimizer of the first-order weight. Without a name, its settings override those of `table.embed_rule`."""
    admission: str | None = None
    """When a row gets factors: `birth`, `score(s)`, `count(n)` or `probability(p)`."""


@dataclass(frozen=True)
class TableSettings:
    dim: Width = 10
    """Number of factors per row. 0 is for models without factors, such as lr."""
    dims: dict[str, Width] = field(default_factory=dict)
    """Factors per row by slot, such as {user_id: 32, default: 10}. `default` is for all other slots. Default: table.dim for all."""
    slots: dict[str, SlotSettings] = field(default_factory=dict)
    """Settings of the rows of single slots, by slot: dim, rule, embed_rule, admission. Default: those of the table."""
    preset: Literal["plain", "online"] = "plain"
    """Defaults for the life of a row. plain: admit and keep every row. online: admit frequent rows, decay and delete old ones."""
    rule: Annotated[Plugin, plugin(ROW_RULE)] = ROW_RULE
    """Optimizer of the rows. With a name, other settings default to that rule's; without one, they override the default rule.
    Default: auto, adagrad_v2 with a learning rate by the rows and slots of the data, 0.05 for 200,000 rows and more."""
    embed_rule: Annotated[Plugin, plugin(FIRST_ORDER_RULE)] | None = None
    """Optimizer of the first-order weight. Default: `table.rule` if that has a name, else auto; adagrad_v2 with lr 0.1 for large logs."""
    init: TableInitSettings = field(default_factory=TableInitSettings)
    admission: str | None = None
    """When a row gets factors: `birth`, `score(s)`, `count(n)` or `probability(p)`. Default: that of the preset."""
    memory_limit: Bytes | None = None
    """Memory limit of the whole table. At the limit, cold rows move to table.disk; without it, the lowest-scored rows are evicted.
    On a cluster, the limit of each shard. Default: no limit."""
    snapshot_reserve: Bytes | None = None
    """Part of the memory limit reserved for writes during a checkpoint. Default: a tenth of the limit."""
    disk: FilePath | None = None
    """Directory for rows that do not fit into table.memory_limit; a local SSD is best. Its files are scratch: a checkpoint holds all
    rows. Results are the same as without a limit. On a cluster, every node needs the directory. Default: such rows are evicted."""
    disk_limit: Bytes | None = None
    """Limit of the files in table.disk, per table and per shard. At the limit, the lowest-scored rows of memory and disk are evicted.
    Default: no limit."""
    padding_key: Annotated[int, Ge(0), Lt(2**64)] | None = None
    """Key whose row is always zero."""
    nonclick_coeff: float | None = None
    """Score that a show without a click adds to a row. Default: 0.1."""
    click_coeff: float | None = None
    """Score that a click adds to a row. Default: 1."""
    base_threshold: float | None = None
    """Minimum score of a row to be published."""
    delta_threshold: float | None = None
    """A delta omits a row until its score has grown by this much."""
    delta_keep_days: float | None = None
    """Stop publishing a row after this many days without a show."""
    decay_rate: float | None = None
    """Factor for the shows and clicks of every row at the end of a day."""
    delete_threshold: float | None = None
    """At the end of a day, delete rows with a lower score."""
    delete_after_unseen_days: float | None = None
    """At the end of a day, delete rows not seen for more days than this."""

    def __post_init__(self) -> None:
        """Derive the width of most slots, and the rule of the first-order weight. None means that `rule` applies."""
        usual = self.dims.get("default", self.dim)
        if self.dim not in (usual, TableSettings.dim):
            raise ConfigError(
                f"table.dim is {self.dim}, but table.dims.default is {usual}", "remove one of them: they mean the same"
            )
        object.__setattr__(self, "dim", usual)
        for slot, own in self.slots.items():
            if own.dim is not None and self.dims.get(slot, own.dim) != own.dim and slot != "default":
                raise ConfigError(
                    f"table.dims.{slot} is {self.dims[slot]}, but table.slots.{slot}.dim is {own.dim}",
                    "remove one of them: they mean the same",
                )
        paired = self.rule.given is not None or self.rule == ROW_RULE  # older runs saved the default pair in full
        rule = self.embed_rule
        if rule is None or rule.given == {}:
            rule = FIRST_ORDER_RULE if paired else None
        elif rule.given is not None:
            base = FIRST_ORDER_RULE if paired else self.rule
            rule = Plugin(base.name, {**base.settings, **rule.given}, rule.origin, rule.given)
        object.__setattr__(self, "embed_rule", rule)

    def width(self, slot: str) -> int:
        """Return the number of factors per row of a slot, as it is configured."""
        own = self.slots.get(slot)
        if own is not None and own.dim is not None:
            return own.dim
        return self.dim if slot == "default" else self.dims.get(slot, self.dim)

    @property
    def named_slots(self) -> dict[str, str]:
        """The slots that have settings of their own, each with the setting that names it."""
        return {slot: "table.dims" for slot in self.dims if slot != "default"} | dict.fromkeys(
            self.slots, "table.slots"
        )

    def with_rule(self, default: Mapping[str, Any]) -> TableSettings:
        """Return these settings with the default rule of a model, unless the user named a rule."""
        if self.rule.given is None and self.rule != ROW_RULE:
            return self
        settings = {**default, **(self.rule.given or {})}
        rule = Plugin(settings.pop("name"), settings)
        embed_rule = None if self.embed_rule == FIRST_ORDER_RULE and not self.embed_rule.given else self.embed_rule
        return replace(self, rule=rule, embed_rule=embed_rule)


@dataclass(frozen=True)
class Schedule:
    name: Literal["constant", "step", "cosine", "exponential"] = "constant"
    """Schedule of the learning rate."""
    warmup: int = 0
    """Number of steps in which the rate first rises linearly from 0. Valid with every schedule."""
    every: int | None = None
    """step, exponential: number of steps per decay."""
    decay: float | None = None
    """step, exponential: factor of one decay."""
    steps: int | None = None
    """cosine: number of steps from the end of the warm-up to the floor."""
    floor: float = 0.0
    """cosine: final rate, as a fraction of the initial rate."""


@dataclass(frozen=True)
class DenseSettings:
    optimizer: Literal["sgd", "adam", "adamw", "adagrad"] = "adam"
    """Optimizer of the dense weights. Rows use table.rule."""
    lr: Annotated[float, auto(DENSE_RATE)] = DENSE_RATE
    """Learning rate. Default: auto, by the rows of the data; 0.001 for large logs."""
    schedule: Schedule = field(default_factory=Schedule)
    clip_norm: float | None = None
    """Maximum norm over all gradients together; larger gradients are scaled down."""
    clip_value: float | None = None
    """Clip every gradient to the range ± this value."""
    weight_decay: float | None = None
    """Weight decay, added to the gradient; adamw adds it to the step. Default: 0; adamw: 0.01."""
    momentum: float | None = None
    """sgd only: momentum."""
    betas: tuple[float, float] | None = None
    """adam and adamw only: decay rates of the two moments."""
    eps: float | None = None
    """adam, adamw and adagrad only: term added to the denominator."""
    initial_sum: float | None = None
    """adagrad only: initial value of the sums of squares."""


@dataclass(frozen=True)
class LossSettings:
    reduction: Literal["mean", "sum"] = "mean"
    """Scale of dense gradients. mean: divide by the sum of the weights. sum: do not scale, as in the original CTR-DNN."""
    epsilon: float | None = None
    """Term added inside the logarithms. Default: that of the model (1e-4 in PaddleRec's, else 0)."""
    negatives_kept: float = 1.0
    """Fraction of the negatives that down-sampling kept in the training data. Predictions are corrected for it."""
    l2: float = 0.0
    """L2 coefficient of every dense weight matrix."""
    l2_rows: Annotated[float | None, auto(None)] = None
    """L2 coefficient of the rows of a batch, added to their gradient. Default: auto, up to 1 for very small logs; for others that of
    the model, in most models 0."""
    l2_table: Annotated[float | None, auto(None)] = None
    """L2 coefficient of every row of the table, on the scale of the mean loss. It acts in the steps in which a key occurs, and more
    on rare keys, so that it is the same for all keys over an epoch. Default: auto, 10 / rows for small logs, else 0."""
    shared_error: Annotated[float, Gt(0), Le(1)] | None = None
    """Fraction that a step corrects of the error that all rows of a batch share: their mean score minus their click rate. All weights
    correct it at once, so with stale weights they overshoot. Default: 0.05 in mode half_async, async and geo, 0.2 with several
    trainers in mode local, else 1, the plain log loss."""
    function: Annotated[Plugin, plugin("")] | None = None
    """Your own loss instead of the log loss: ./my_loss.py, ./my_loss.py:name or package.module:name, or {name, arguments…}."""


@dataclass(frozen=True)
class MetricsSettings:
    thresholds: Count = 4096
    """Number of thresholds of the AUC; it uses one bucket more."""
    sliding: Annotated[int, Ge(0)] = 20
    """Number of batches in the sliding AUC; 0 turns it off."""
    continuous: bool = False
    """Continue the training metrics across epochs instead of resetting them."""
    slices: str | None = None
    """Slot by which evaluation also groups its metrics: one set per value."""
    functions: dict[str, Annotated[Plugin, plugin("")]] = field(default_factory=dict)
    """Your own metrics of an evaluation: the name of each, and its function, written as in train.loss.function."""


@dataclass(frozen=True)
class Train:
    epochs: Annotated[Count, auto(ONE_EPOCH)] = ONE_EPOCH
    """Number of passes over the training data. Default: auto, 1 for 400,000 rows and more; more for fewer, with early stopping."""
    seed: int = 7
    """Seed of initial values, shuffling and dropout."""
    threads: Count | None = None
    """Number of cores to use. Default: all."""
    hogwild: Count | None = None
    """Number of lock-free trainer threads. Default: one per core, up to 8; one with a GPU."""
    deterministic: bool = False
    """Use one trainer and ordered pushes. Runs with the same seed and threads then write identical bytes."""
    print_every: Count | None = None
    """Number of batches between progress lines, in training and evaluation. Default: a line every 10 seconds."""
    eval_every: Count | None = None
    """Number of steps between evaluations on validation data, in addition to the one after each epoch."""
    monitor: str = "auc"
    """Metric on validation data that tells which model is best: auc, gauc, logloss, ne, accuracy, calibration (closest to 1) and others."""
    patience: Annotated[Count | None, auto(None)] = None
    """Stop training after this many evaluations on validation data without a better train.monitor. Default: chosen along with
    train.epochs if that is auto, else no early stopping."""
    average: Annotated[bool | None, auto(None)] = None
    """After the last epoch, average the weights of several epochs and keep the average as BEST if it is better on validation data.
    Default: auto, true for fewer than 200,000 rows if the epochs are chosen too."""
    init_from: FilePath | None = None
    """Model to start from: a run folder, a checkpoint or a published log."""
    device: str = "cpu"
    """Device of the network: cpu, cuda or cuda:1. Rows stay in CPU memory."""
    profile: bool = False
    """Write the time of each layer and a trace of some steps to profile/ in the run folder."""
    loss: LossSettings = field(default_factory=LossSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)


@dataclass(frozen=True)
class Cluster:
    shards: Count = 2
    """Number of processes that hold rows and dense weights."""
    workers: Annotated[Count, WrapValidator(_worker_range)] = 2
    """Number of processes that train. A range such as 2..8: as many of them as the Ray cluster has room for, at any time."""
    threads: Count = 1
    """Number of trainer threads per worker."""
    address: str | None = None
    """Address of a running Ray cluster. Default: a private one on this machine."""
    endpoints: tuple[str, ...] = ()
    """host:port of each shard, as set by the roles in the environment. Default: free ports."""
    encrypt: bool = True
    """Encrypt rows and gradients between hosts. false: messages are only authenticated, and anyone in the network can read them."""
    on_failure: Literal["rollback", "continue"] = "rollback"
    """After a failure: return all processes to the last checkpoint, or only the failed one and log what is lost."""
    start_timeout: Seconds = 120.0
    """Time limit for all processes to start."""
    stop_timeout: Seconds = 10.0
    """Time limit for the last checkpoint after a signal; the run then ends without it. Raise it for large tables."""
    heartbeat_timeout: Seconds = 60.0
    """Replace a worker that sends no heartbeat for this long."""
    timeout: Seconds = 300.0
    """Time limit for the reply to a request."""
    max_failures: Annotated[int, Ge(0)] = 8
    """Stop the run after more failures than this without a new checkpoint in between."""
    checkpoint_cpu: Annotated[float, Gt(0), Le(1)] = 0.03
    """Fraction of a core each shard may use to write a checkpoint in the background. No limit applies while a caller waits for it."""


@dataclass(frozen=True)
class Run:
    dir: FilePath = "run"
    """Run folder. Default: `run`, next to the configuration file."""
    checkpoint_every: Seconds | None = 300.0
    """Time between checkpoints. null: only at the end of each epoch."""
    checkpoint_every_steps: Count | None = None
    """Number of steps between checkpoints, in addition to checkpoint_every."""
    keep: Count = 3
    """Number of checkpoints to keep, in addition to labelled ones."""
    keep_epochs: bool = True
    """Keep the checkpoint at the end of each epoch, labelled EPOCH-0000 and so on."""
    keep_best: bool | None = None
    """Keep the checkpoint with the best train.monitor on validation data, labelled BEST. Default: true if train.patience is set."""
    report: bool = True
    """Write report.html at the end of the run."""
    names: bool = True
    """Keep frequent values of each slot in names.json and published bases, to show values instead of keys. false: no raw values."""


@dataclass(frozen=True)
class Kafka:
    brokers: str
    """Brokers as host:port, separated by commas."""
    topic: str
    """Topic that holds the records."""
    rows_per_pass: Count | None = None
    """Number of rows per pass. Set this, interval, or both; with both, the first limit reached ends the pass."""
    interval: Seconds | None = None
    """Event time per pass, counted from the start of the day."""
    max_rows_per_pass: Count | None = 100_000
    """Maximum rows of a pass while the run catches up. null: passes never grow."""
    format: Literal["text", "json", "arrow"] = "text"
    """Content of a message: lines of data.format, JSON objects (one per line), or an Arrow IPC stream."""
    start: Literal["earliest", "latest"] = "earliest"
    """Offset at which a new run starts."""
    idle: Seconds = 60.0
    """How long a pass or day waits past its end for a partition without new records."""
    max_clock_skew: Seconds = 3600.0
    """A record is bad if its timestamp is further than this ahead of the machine's clock."""
    max_gap: Seconds = 172_800.0
    """A record is bad if its timestamp is further than this after the current day and later records of its partition are earlier."""
    options: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Additional librdkafka settings, such as security.protocol."""


def _plain_seconds(value: Any) -> Any:
    return SECONDS.parse(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class PassLimits:
    """When a pass ends: after a time, after a number of rows, or with both, at whichever comes first."""

    seconds: Annotated[float, BeforeValidator(_plain_seconds), Ge(0.01)] | None = None
    """Seconds from the arrival of the first row of a pass to its end: 1, or 250ms."""
    rows: Count | None = None
    """Number of rows of a pass. Folders: whole files, until they have as many."""


def _pass_limits(value: Any) -> Any:
    """Accept `1s` for {seconds: 1}."""
    return {"seconds": value} if isinstance(value, str) else value


@dataclass(frozen=True)
class Join:
    shows: FilePath
    """Show log: the folder or kafka://BROKERS/TOPIC that `clickfleet serve --log` writes."""
    feedback: FilePath
    """Feedback: the folder or kafka://BROKERS/TOPIC that `clickfleet serve --feedback` writes."""
    wait: Seconds = 30.0
    """How long a show waits for a label before it counts as negative, by the clock of the server that logged it."""
    window: Seconds = 604_800.0
    """How long after a show its labels may still change. A change after `wait` becomes a correction."""
    corrections: Literal["learn", "drop"] = "learn"
    """What becomes of a correction of a row that was learned: it is learned, as the label's `late` in the schema says, or dropped."""
    rows_per_pass: Count | None = None
    """Number of rows at which a pass ends. Default: 20,000."""
    interval: Seconds | None = None
    """A pass ends at this time after its first row, even if it has fewer. Default: 10s."""
    store_limit: Bytes = 20 << 30
    """Maximum size of the files of shows that wait or may be corrected. Beyond it, the oldest are decided early and forgotten."""
    kafka_options: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Additional librdkafka settings for logs in Kafka, such as security.protocol."""


@dataclass(frozen=True)
class Online:
    dir: FilePath | None = None
    """Folder of the logs, laid out as <dir>/<day>/<HHMM>/. Set this, online.kafka or online.join."""
    kafka: Kafka | None = None
    """Kafka topic of the logs. Set this, online.dir or online.join."""
    join: Join | None = None
    """Show log and feedback that are joined while the run trains. Set this, online.dir or online.kafka."""
    start_day: int | None = None
    """First day, as YYYYMMDD."""
    start_pass: Count = 1
    """First pass of start_day that is read. With hourly folders, 9 begins at 0800. Needs online.dir."""
    end_day: int | None = None
    """Last day, as YYYYMMDD. null: run until stopped."""
    split_interval: Seconds = 3600.0
    """Time between two folders of a day."""
    splits_per_pass: Count = 1
    """Number of folders per pass."""
    pass_: Annotated[PassLimits | None, BeforeValidator(_pass_limits)] = None
    """Micro-passes: a pass ends after a time (`1s`) or a number of rows. null: as the folders, the topic or the stream divide it."""
    done_file: str | None = "_DONE"
    """File that marks a folder as complete. null: a folder is complete when online.quiet has elapsed."""
    quiet: Seconds = 30.0
    """Without a done file: a folder is complete after this time without changes to its files."""
    poll: Seconds = 10.0
    """Time between two checks for new data."""
    prefetch: bool = True
    """Read the next pass while training on the current one."""
    shuffle: bool = True
    """Shuffle each pass: all its rows, or data.shuffle rows at a time."""
    checkpoint_every_passes: Count | None = None
    """Number of passes between checkpoints. Default: 1; with online.pass, only run.checkpoint_every decides."""
    delta_every_passes: Count = 1
    """Number of passes between deltas."""
    first_base: bool = False
    """Publish a base before the first pass."""
    validate: Literal["pass", "progressive", "none"] = "progressive"
    """What to score before training on it. pass: the whole pass with the previous model. progressive: each batch in turn."""
    timezone: str = "UTC"
    """Time zone in which a day begins."""


@dataclass(frozen=True)
class Guard:
    """Limits beyond which an entry of the published log is held back. null turns a check off."""

    monitor: str = "auc"
    """What AUC and COPC are judged by: auc, or the AUC of one of several labels, such as buy.auc or buy.auc_given."""
    auc_drop: Annotated[float, Gt(0)] | None = 0.02
    """Hold back if the AUC is this far below the mean of earlier released windows, and the drop is statistically significant."""
    copc: tuple[float, float] | None = (0.8, 1.25)
    """Hold back if actual / predicted clicks leave this range by a statistically significant amount."""
    nan_share: Share | None = 0.001
    """Hold back if more than this fraction of the scores is NaN."""
    delta_share: Annotated[float, Gt(0)] | None = None
    """Hold back a delta with more rows than this fraction of the table."""
    window: Count = 24
    """Number of earlier released windows over which the mean AUC is taken."""
    min_rows: Annotated[int, Ge(0)] = 1000
    """Minimum rows of a window. AUC and COPC are judged over the newest passes that together have as many."""
    warmup_rows: Annotated[int, Ge(0)] = 10_000
    """Number of first rows of a new model for which AUC and COPC are not judged. 0 after train.init_from."""


@dataclass(frozen=True)
class Calibrate:
    """Calibrate published scores: as many clicks are predicted as there are, at every score and in every slice."""

    by: tuple[str, ...] = ()
    """Slots whose values are calibrated each by itself. Several: each combination of their values. Default: one curve for all rows."""
    method: Literal["isotonic", "shift"] = "isotonic"
    """isotonic: an increasing curve. shift: one shift of the log-odds for all scores. Each slice has a shift of its own besides."""
    half_life: Annotated[Seconds, Gt(0)] = 21_600.0
    """Stream time after which a click counts half. Where the stream has changed since, less of the past is used."""


@dataclass(frozen=True)
class Publish:
    rows: Literal["float32", "float16", "int8"] = "float32"
    """Format of published rows. int8 has a scale per row and takes 0.4 of the bytes with 10 factors; training stays in float32."""
    guard: Guard = field(default_factory=Guard)
    calibrate: Calibrate | None = None
    """Calibrate scores by what was clicked: calibrate={}, or with slots to calibrate by. null: publish the scores of the network."""
    freshness_slo: Seconds = 60.0
    """Warn if the 99th percentile of the time from event to publication exceeds this."""
    keep_chains: Count = 2
    """Number of bases to keep, each with its deltas. Older ones are deleted."""
    base_every_deltas: Count | None = 500
    """Publish a base after this many deltas, or once they exceed the base and 256 MiB in size. null: only at the end of a day."""
    to: str | None = None
    """URL to which every entry is copied."""
    done_files: bool | None = None
    """Also write base_donefile.txt, patch_donefile.txt and donefile.txt. Default: true, but false with online.pass."""
    text_parts: Annotated[int, Ge(1), Le(100_000)] | None = None
    """Write each base and delta that done files name in PaddleRec's text layout, in this many files per table. null: name our entries."""


@dataclass(frozen=True)
class Serve:
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 means all addresses."""
    port: Port = 8080
    """HTTP port; 0 picks a free one."""
    grpc_port: Port | None = 8081
    """gRPC port. null turns gRPC off."""
    workers: Count = 1
    """Number of processes that answer requests."""
    max_queue_ms: Positive = 50.0
    """Expected wait above which requests are rejected with status 503."""
    token_file: FilePath | None = None
    """File of bearer tokens, one per line."""
    engine: str = "onnx"
    """Engine of the network: onnx, int8, or an ONNX Runtime provider such as CUDA."""
    threads: Count = 1
    """Number of threads per evaluation of the network, in each worker."""
    graph_optimization: Literal["off", "basic", "extended", "all"] = "all"
    """Level of graph optimization in ONNX Runtime."""
    arena: bool = True
    """Keep ONNX Runtime's memory arena between evaluations."""
    log: FilePath | None = None
    """Show log: a folder, or kafka://BROKERS/TOPIC, for every scored row with its features. null: none is written."""
    log_sample: Annotated[float, Gt(0), Le(1)] = 1.0
    """Fraction of the requests in the show log, chosen by the hash of the request's id."""
    log_every: Annotated[Seconds, Gt(0)] | None = None
    """Time between two writes of the show log. Replies wait less if it is longer. Default: 5 s, or 0.1 s if the server takes
    feedback."""
    feedback: FilePath | None = None
    """Folder, or kafka://BROKERS/TOPIC, for the events of POST /v1/feedback. null: the route is disabled."""
    log_rotate_size: Bytes = 64 << 20
    """Size at which a file of the show log or of the feedback is completed."""
    log_rotate_every: Seconds = 300.0
    """Age at which a file of the show log or of the feedback is completed."""
    kafka_options: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Additional librdkafka settings for logs in Kafka, such as security.protocol."""


@dataclass(frozen=True)
class Dimension:
    """Values to try for a setting: one of `choices`, or a number from `low` to `high`."""

    low: int | float | None = None
    """Smallest number."""
    high: int | float | None = None
    """Largest number. If both ends are integers, only integers are tried: write 1.0 for other numbers."""
    step: int | float | None = None
    """Distance between two numbers to try."""
    log: bool = False
    """Sample on a logarithmic scale."""
    choices: tuple[Any, ...] | None = None
    """List of values to choose from."""


@dataclass(frozen=True)
class Tune:
    space: dict[str, Dimension] = field(default_factory=dict)
    """Settings to search, by key: {dense.lr: {low: 1e-4, high: 1e-2, log: true}}."""
    trials: Count = 30
    """Number of trials."""
    metric: str | None = None
    """Metric to optimize, measured on validation data. Default: train.monitor."""
    sampler: Literal["tpe", "random"] = "tpe"
    """How to choose the settings of the next trial."""
    pruner: Literal["median", "halving", "none"] = "median"
    """How to stop bad trials early, based on their evaluations during training (train.eval_every)."""
    warmup_trials: Annotated[int, Ge(0)] = 5
    """Number of random trials before the sampler uses results and the pruner stops any."""
    seed: int = 7
    """Seed of the sampler."""
    timeout: Seconds | None = None
    """Start no new trial after this time."""
