"""The sections of a configuration file: every key, its default and what it means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BeforeValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from clickfleet.find import Plugin as Plugin

_DURATIONS = {"ms": 0.001, "s": 1, "min": 60, "h": 3600, "d": 86400}
_SIZES = {"B": 1} | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
_SIZES |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}


class Unit:
    """Marks a number that is written with a unit, and says which one it is kept in."""

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


def _beside(value: str, info: ValidationInfo) -> str:
    """A relative path is relative to the configuration file; URLs are left alone."""
    base = (info.context or {}).get("base")
    if base is None or "://" in value or Path(value).is_absolute():
        return value
    return str(Path(base) / value)


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


FilePath = Annotated[str, AfterValidator(_beside)]
FilePaths = Annotated[tuple[FilePath, ...], BeforeValidator(_several)]
Count = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]
Port = Annotated[int, Ge(0), Le(65535)]


def plugin(default: str | Plugin) -> BeforeValidator:
    """Reads `name`, or {name, settings…}. Settings without a name change only themselves in the default."""
    usual = Plugin(default) if isinstance(default, str) else default

    def parse(value: Any, info: ValidationInfo) -> Any:
        given = {"name": value} if isinstance(value, str) else value
        name = given.get("name", usual.name) if isinstance(given, dict) else None
        if not isinstance(name, str):
            raise PydanticCustomError("plugin", "needs a name and, beside it, settings")
        settings = {key: item for key, item in given.items() if key != "name"}
        if isinstance(settings.get("folder"), str) and settings["folder"]:
            settings["folder"] = _beside(settings["folder"], info)
        origin = (info.context or {}).get("origin", "")
        if "name" not in given:
            return Plugin(name, {**usual.settings, **settings}, origin, settings)
        return Plugin(_beside(name, info) if name.endswith(".py") else name, settings, origin)

    return BeforeValidator(parse)


BATCH_ROWS = 1000


@dataclass(frozen=True)
class Data:
    format: Annotated[Plugin, plugin("criteo")] = field(default_factory=lambda: Plugin("criteo"))
    """A file of `formats/`, or {name, settings…}."""
    train: FilePaths = ()
    """Files, folders, patterns or URLs to train on."""
    test: FilePaths = ()
    """The same to evaluate on after each epoch."""
    schema: FilePath | None = None
    """A schema.yaml; the format's own by default."""
    preset: str | None = None
    """A ready schema by name, such as criteo-paddle, instead of a file."""
    vocabulary: FilePath | None = None
    """word2vec: the words and their counts, as `clickfleet words prepare` wrote them."""
    keys: str | None = None
    """Another rule by which values become keys than the schema's: hash64, `py2 mod 1000001` or raw."""
    batch_size: Count | None = None
    """Rows of a step. Default: 1000, and for word2vec as many sentences as hold about 10,000 words."""
    test_batch_size: Count | None = None
    """As batch_size by default."""
    shuffle: Annotated[int, Ge(0)] | Literal["global"] = 0
    """Rows shuffled at a time, or all of them in memory; also shuffles the files."""
    interleave: Count | None = None
    """Files read by turns."""
    threads: Annotated[int, Ge(0)] = 1
    """Threads that parse."""
    bad_lines: Literal["error", "skip", "quarantine"] = "error"
    """What a line that cannot be read does: stop the run, be counted, or be kept in a file."""
    max_bad_fraction: Share = 0.1
    """A larger share of bad lines stops the run in any case."""
    quarantine: FilePath | None = None
    """Where bad lines go with their reason; in the run folder by default."""

    @property
    def batch_rows(self) -> int:
        """Rows of a step."""
        return self.batch_size or BATCH_ROWS


@dataclass(frozen=True)
class TableInit:
    """`zero`, `uniform(a, b)`, `normal(s)` or `truncated(s)`; the model's own by default."""

    embed: str | None = None
    """Of the first-order weight."""
    embedx: str | None = None
    """Of the factors."""


ROW_RULE = Plugin("adagrad_v2", {"lr": 0.05, "initial_g2sum": 0.1, "scale": "show"}, given={})
FIRST_ORDER_RULE = Plugin("adagrad_v2", {"lr": 0.1, "initial_g2sum": 0.1, "scale": "show"}, given={})
"""The default pair, as docs/study.md found it best."""


@dataclass(frozen=True)
class Table:
    dim: Annotated[int, Ge(0), Le(65536)] = 10
    """Factors of one field; 0 only with a model that has none, such as lr."""
    preset: Literal["plain", "online"] = "plain"
    """plain: nothing is filtered or forgotten; online: features must earn their place and are forgotten."""
    rule: Annotated[Plugin, plugin(ROW_RULE)] = ROW_RULE
    """How rows are updated. With a name, the rest has that rule's defaults; settings without a name change only themselves."""
    embed_rule: Annotated[Plugin, plugin(FIRST_ORDER_RULE)] | None = None
    """The same for the first-order weight. Default: `table.rule` where that has a name, else adagrad_v2 with lr 0.1."""
    init: TableInit = field(default_factory=TableInit)
    admission: str | None = None
    """When rows get factors: `birth`, `score(s)`, `count(n)` or `probability(p)`; the preset's by default."""
    memory_limit: Bytes | None = None
    """Bounds every byte of the table; the lowest-scored rows are evicted. None: no limit."""
    snapshot_reserve: Bytes | None = None
    """Kept for writes while a checkpoint is taken; a tenth of the limit by default."""
    padding_key: Annotated[int, Ge(0), Lt(2**64)] | None = None
    """A key whose row is always zero."""
    nonclick_coeff: float | None = None
    """What a show without click adds to a row's score (0.1)."""
    click_coeff: float | None = None
    """What a click adds to a row's score (1)."""
    base_threshold: float | None = None
    """Rows with at least this score are published."""
    delta_threshold: float | None = None
    """A delta leaves a row to a later one until its score grew by this much."""
    delta_keep_days: float | None = None
    """Rows unseen for longer are no longer published."""
    decay_rate: float | None = None
    """A day's end multiplies shows and clicks by this."""
    delete_threshold: float | None = None
    """A day's end deletes rows with a lower score."""
    delete_after_unseen_days: float | None = None
    """A day's end deletes rows unseen for longer."""

    def __post_init__(self) -> None:
        """Settles the rule of the first-order weight; None: `rule` itself."""
        paired = self.rule.given is not None or self.rule == ROW_RULE  # equal: old runs wrote the default pair so
        own = self.embed_rule
        if own is None or own.given == {}:
            own = FIRST_ORDER_RULE if paired else None
        elif own.given is not None:
            base = FIRST_ORDER_RULE if paired else self.rule
            own = Plugin(base.name, {**base.settings, **own.given}, own.origin, own.given)
        object.__setattr__(self, "embed_rule", own)

    def with_rule(self, own: Mapping[str, Any]) -> Table:
        """The table of a model that has a default rule of its own."""
        if self.rule.given is None and self.rule != ROW_RULE:
            return self
        settings = {**own, **(self.rule.given or {})}
        rule = Plugin(settings.pop("name"), settings)
        embed_rule = None if self.embed_rule == FIRST_ORDER_RULE and not self.embed_rule.given else self.embed_rule
        return replace(self, rule=rule, embed_rule=embed_rule)


@dataclass(frozen=True)
class Schedule:
    name: Literal["constant", "step", "cosine", "exponential"] = "constant"
    """How the learning rate changes over the steps."""
    warmup: int = 0
    """Steps over which the rate first rises from 0 in a straight line; any schedule can have them."""
    every: int | None = None
    """step, exponential: steps for one decay."""
    decay: float | None = None
    """step, exponential: the factor of one decay."""
    steps: int | None = None
    """cosine: steps after the warm-up until the floor is reached."""
    floor: float = 0.0
    """cosine: the last factor."""


@dataclass(frozen=True)
class Dense:
    optimizer: Literal["sgd", "adam", "adamw", "adagrad"] = "adam"
    """Of the weights of the network; rows have table.rule."""
    lr: float = 0.001
    """Learning rate."""
    schedule: Schedule = field(default_factory=Schedule)
    clip_norm: float | None = None
    """Gradients are scaled down to this norm, taken over all of them."""
    clip_value: float | None = None
    """Every gradient is cut off at ± this."""
    weight_decay: float | None = None
    """As each optimizer has it: added to the gradient, or in adamw (0.01 by default) to the step."""
    momentum: float | None = None
    """sgd only."""
    betas: tuple[float, float] | None = None
    """adam and adamw only."""
    eps: float | None = None
    """adam, adamw and adagrad only."""
    initial_sum: float | None = None
    """adagrad only: where the sums of squares begin."""


@dataclass(frozen=True)
class Loss:
    reduction: Literal["mean", "sum"] = "mean"
    """How dense gradients are scaled: by Σ weights, or, as in the original CTR-DNN, not at all."""
    epsilon: float | None = None
    """Added inside the logarithms; the model's own by default (1e-4 in the originals, else 0)."""
    negatives_kept: float = 1.0
    """Share of the negatives that down-sampling left in the training data; predictions are corrected for it."""
    l2: float = 0.0
    """L2 on every dense weight matrix."""
    l2_rows: float | None = None
    """L2 on the rows of a batch, added to the gradient that their rule sees; the model's own by default, mostly none."""


@dataclass(frozen=True)
class Metrics:
    thresholds: Count = 4096
    """Buckets of the AUC, less one."""
    sliding: Annotated[int, Ge(0)] = 20
    """Batches of the sliding AUC; 0 for none."""
    continuous: bool = False
    """Training metrics go on over epochs instead of starting anew."""
    slices: str | None = None
    """A slot whose values get metrics of their own in evaluation."""


@dataclass(frozen=True)
class Train:
    epochs: Count = 1
    """Passes over the training data."""
    seed: int = 7
    """Of initial values, shuffling and dropout."""
    threads: Count | None = None
    """Cores used; all by default."""
    hogwild: Count | None = None
    """Trainer threads; by measurement by default."""
    deterministic: bool = False
    """One trainer, pushes in order: the same bytes from every run with the same seed and threads."""
    eval_every: Count | None = None
    """Steps between evaluations besides those after each epoch."""
    patience: Count | None = None
    """Evaluations without a better test AUC before training stops."""
    init_from: FilePath | None = None
    """A model to start from."""
    device: str = "cpu"
    """Where the network computes: cpu, cuda or cuda:1; rows stay with the CPU."""
    profile: bool = False
    """A table of what each layer takes, and a trace of some steps, in the run folder's profile/."""
    loss: Loss = field(default_factory=Loss)
    metrics: Metrics = field(default_factory=Metrics)


@dataclass(frozen=True)
class Cluster:
    shards: Count = 2
    """Processes that hold rows and dense weights."""
    workers: Count = 2
    """Processes that train."""
    threads: Count = 1
    """Trainer threads of each worker."""
    address: str | None = None
    """Of a running Ray cluster; a private one on this machine by default."""
    endpoints: tuple[str, ...] = ()
    """host:port that each shard listens on, as the roles of the environment say; any free ones by default."""
    on_loss: Literal["rollback", "continue"] = "rollback"
    """What follows the loss of a process: all go back to the last cut, or the others go on and the loss is shown."""
    start_timeout: Seconds = 120.0
    """How long to wait for all processes to start."""
    stop_timeout: Seconds = 10.0
    """How long a run that a signal stops may take for its last checkpoint; then it ends without one. Raise it for large tables."""
    heartbeat_timeout: Seconds = 60.0
    """A worker without a sign of life for so long is taken for hung, and replaced."""
    timeout: Seconds = 300.0
    """How long a request waits for its answer."""
    max_losses: Annotated[int, Ge(0)] = 8
    """Losses without a new cut in between before the run gives up."""
    cut_share: Annotated[float, Gt(0), Le(1)] = 0.03
    """Of a core, that each shard uses to write a cut while training goes on; one that somebody waits for takes what it needs."""


@dataclass(frozen=True)
class Run:
    dir: FilePath = "run"
    """The run folder; by default `run` beside the configuration."""
    checkpoint_every: Seconds | None = 300.0
    """Time between checkpoints; none: only at the end of each epoch."""
    checkpoint_every_steps: Count | None = None
    """Steps between checkpoints, besides."""
    keep: Count = 3
    """Checkpoints kept, besides labelled ones."""
    keep_epochs: bool = True
    """Keep those at the end of an epoch, as EPOCH-0000 and so on."""
    keep_best: bool | None = None
    """Keep the one with the best test AUC, as BEST; by default where train.patience is set."""
    report: bool = True
    """Write report.html at the end."""


@dataclass(frozen=True)
class Kafka:
    brokers: str
    """host:port, several with commas."""
    topic: str
    """Where the records are."""
    rows_per_pass: Count | None = None
    """A pass ends after so many rows; give this, interval, or both: then it ends when either is reached."""
    interval: Seconds | None = None
    """A pass ends after so much event time, counted from the start of the day."""
    max_rows_per_pass: Count | None = 100_000
    """While the run is behind, passes grow up to so many rows; none: never."""
    format: Literal["text", "json", "arrow"] = "text"
    """What a message is: lines of data.format, JSON objects (one per line), or an Arrow IPC stream."""
    start: Literal["earliest", "latest"] = "earliest"
    """Where a new run begins to read."""
    idle: Seconds = 60.0
    """A partition with nothing to read holds a pass's or day's end up for so long after that moment has passed."""
    max_clock_skew: Seconds = 3600.0
    """A record stamped later than this ahead of the machine's clock is a bad record."""
    max_gap: Seconds = 172_800.0
    """A record stamped later than this after the open day is a bad record if its partition then goes on with earlier ones."""
    options: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Further settings of librdkafka, such as security.protocol."""


@dataclass(frozen=True)
class Online:
    dir: FilePath | None = None
    """Logs as <dir>/<day>/<HHMM>/; or give kafka."""
    kafka: Kafka | None = None
    """Logs as the records of a topic; or give dir."""
    start_day: int | None = None
    """YYYYMMDD."""
    end_day: int | None = None
    """The last day; none to run for ever."""
    split_interval: Seconds = 3600.0
    """Time between two folders of a day."""
    splits_per_pass: Count = 1
    """Folders that make one pass."""
    done_file: str | None = "_DONE"
    """What must be in a folder before it is read; none: a folder is read once it is quiet."""
    quiet: Seconds = 30.0
    """Without a done file: time without any change of a folder's files after which it counts as complete."""
    poll: Seconds = 10.0
    """Time between two looks for something that is not there yet."""
    prefetch: bool = True
    """The next pass is read while this one is trained on."""
    shuffle: bool = True
    """Shuffles a pass: all its rows, or data.shuffle of them at a time."""
    checkpoint_every_passes: Count = 1
    """Passes between two checkpoints."""
    delta_every_passes: Count = 1
    """Passes between two deltas."""
    first_base: bool = False
    """Publishes a base before the first pass."""
    validate: Literal["pass", "progressive", "none"] = "progressive"
    """What is scored before it is trained on: the whole pass by the model as it was, or each batch in its turn."""
    timezone: str = "UTC"
    """Where days begin."""


@dataclass(frozen=True)
class Guard:
    """An entry of the model log is held back where a number lies outside; none: not looked at."""

    auc_drop: Annotated[float, Gt(0)] | None = 0.02
    """The AUC fell by more below the mean of the windows released before, and by more than chance explains."""
    copc: tuple[float, float] | None = (0.8, 1.25)
    """Actual over predicted clicks lie outside of these, by more than chance explains."""
    nan_share: Share | None = 0.001
    """A larger share of the scores are no numbers."""
    delta_share: Annotated[float, Gt(0)] | None = None
    """A delta has more rows than this share of the table."""
    window: Count = 24
    """Windows released before that the mean AUC is taken of."""
    min_rows: Annotated[int, Ge(0)] = 1000
    """AUC and COPC are judged over a window of the newest passes that have at least so many rows together."""
    warmup_rows: Annotated[int, Ge(0)] = 10_000
    """The first rows of a new model, which AUC and COPC are not judged by; after train.init_from there are none."""


@dataclass(frozen=True)
class Publish:
    guard: Guard = field(default_factory=Guard)
    freshness_slo: Seconds = 60.0
    """A warning says when the slowest percent of events took longer to be published."""
    keep_chains: Count = 2
    """Bases, with their deltas, that are kept; older ones are removed."""
    base_every_deltas: Count | None = 500
    """Deltas after which a base follows also within a day, or earlier once they outweigh the base and 256 MiB; none: only at its end."""
    to: str | None = None
    """A URL where every entry is copied to."""
    done_files: bool = True
    """Also writes base_donefile.txt, patch_donefile.txt and donefile.txt."""


@dataclass(frozen=True)
class Serve:
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: Port = 8080
    """For HTTP; 0 takes a free one."""
    grpc_port: Port | None = 8081
    """For gRPC; none: no gRPC."""
    workers: Count = 1
    """Processes that answer."""
    max_queue_ms: Positive = 50.0
    """Expected wait at which requests are refused with 503."""
    token_file: FilePath | None = None
    """Bearer tokens, one per line."""
    engine: str = "onnx"
    """onnx, int8, or a provider of ONNX Runtime, such as CUDA."""
    threads: Count = 1
    """Threads of one run of the network, in every worker."""
    graph_optimization: Literal["off", "basic", "extended", "all"] = "all"
    arena: bool = True
    """Whether memory is kept from one run to the next."""


@dataclass(frozen=True)
class Dimension:
    """What a setting may be: one of `choices`, or a number from `low` to `high`."""

    low: int | float | None = None
    high: int | float | None = None
    """Both whole numbers: so is what lies between; else write 1.0 for 1."""
    step: int | float | None = None
    log: bool = False
    """Small numbers are tried as often as large ones."""
    choices: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Tune:
    space: dict[str, Dimension] = field(default_factory=dict)
    """Settings to search for, by their keys: {dense.lr: {low: 1e-4, high: 1e-2, log: true}}."""
    trials: Count = 30
    metric: Literal["auc", "logloss"] = "auc"
    """Of the test data."""
    sampler: Literal["tpe", "random"] = "tpe"
    pruner: Literal["median", "halving", "none"] = "median"
    """Which trials are given up early, by their evaluations on the way (train.eval_every)."""
    warmup_trials: Annotated[int, Ge(0)] = 5
    """Trials before the first is given up, and of the sampler's before it looks at results."""
    seed: int = 7
    timeout: Seconds | None = None
    """No trial begins later than this after the search has."""
