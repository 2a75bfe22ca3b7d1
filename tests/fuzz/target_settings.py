"""What people write: configurations, schemas, overrides, durations, rules and schedules."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from clickfleet.config import load
from clickfleet.config.load import Config, checked
from clickfleet.config.sections import Schedule
from clickfleet.data.schema import KeyRule, Schema, Transform, read_schema
from clickfleet.errors import ClickfleetError, ConfigError
from clickfleet.models.word2vec.vocabulary import Vocabulary
from clickfleet.paddlerec import original, translation
from clickfleet.store import rules
from clickfleet.store.policy import Admission, Init
from clickfleet.store.table import Table
from clickfleet.training import optimizer

FOLDER = Path(tempfile.mkdtemp(prefix="clickfleet-fuzz-"))

CONFIG = b"""
data:   {format: criteo, train: [train/part-*], batch_size: 1000, bad_lines: error}
model:  {name: deepfm, hidden: [400, 400]}
table:  {dim: 10, preset: plain, rule: {name: adagrad, lr: 0.05}, init: {embed: zero, embedx: "uniform(-0.001, 0.001)"}, memory_limit: 8GiB}
dense:  {optimizer: adam, lr: 0.001, schedule: {name: cosine, steps: 100, warmup: 5}}
train:  {epochs: 1, seed: 7, threads: 2, deterministic: false}
run:    {dir: runs/deepfm, checkpoint_every: 5min, keep: 3}
online: {dir: logs, start_day: 20260101, end_day: 20260103, split_interval: 60min, timezone: UTC}
serve:  {host: 127.0.0.1, port: 8080, max_queue_ms: 50}
"""
BOMB = b"a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 9)
)
SCHEMA = b"""
label: click
keys: hash64
dense: [{name: x, transform: log1p}, {name: y, transform: "minmax(0, 5)", missing: 1.5, source: z}]
slots: [{name: a}, {name: b, multi: true, pooling: mean}, {name: xb, bucket: {column: x, low: 0, high: 1, buckets: 10}}]
time: t
group: a
"""
PADDLE = b"""
workspace: "models/rank/dnn"
runner: {train_data_dir: "data/sample_data/train", train_reader_path: "reader", use_gpu: False, train_batch_size: 2, epochs: 3,
  print_interval: 2, model_save_path: "output", test_data_dir: "data", infer_batch_size: 2, thread_num: 1}
hyper_parameters: {optimizer: {class: Adam, learning_rate: 0.001, strategy: async}, sparse_inputs_slots: 27,
  sparse_feature_number: 1000001, sparse_feature_dim: 9, dense_input_dim: 13, fc_sizes: [512, 256, 128, 32], distributed_embedding: 0}
"""


def written(name: str, data: bytes) -> Path:
    path = FOLDER / name
    path.write_bytes(data)
    return path


def load_config(data: bytes) -> object:
    return load.dump(load.load(written("config.yaml", data)))


def load_schema(data: bytes) -> object:
    return read_schema(written("schema.yaml", data)).to_dict()


def override(data: bytes) -> object:
    raw: dict[str, Any] = {}
    for item in data.decode("utf-8", "replace").split("\n"):
        load.override(raw, item)
    return checked(Config, raw, source="arguments")


def translate(data: bytes) -> object:
    folder = FOLDER / "models" / "rank" / "dnn"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_bytes(data)
    return translation.translate(original.read(path)) if original.is_paddlerec(path) else None


def short_texts(data: bytes) -> object:
    """Everything that is a language of one line."""
    text = data.decode("utf-8", "replace")
    found = []
    for parse in (KeyRule.parse, Transform.parse, Admission.parse, Init.parse):
        try:
            found.append(parse(text))
        except ClickfleetError as error:
            found.append(error)
    for name in ("run.checkpoint_every", "table.memory_limit", "online.split_interval", "publish.freshness_slo"):
        try:
            section, _, key = name.partition(".")
            found.append(checked(Config, {section: {key: text}}, source="text"))
        except ConfigError as error:
            found.append(error)
    return found


def rule(data: bytes) -> object:
    name, _, rest = data.decode("utf-8", "replace").partition(" ")
    settings = rest.split()
    given = dict(item.partition("=")[::2] for item in settings)
    try:
        numbers = {key: float(value) for key, value in given.items()}
    except ValueError:
        raise ConfigError("no number") from None
    return Table(factors=2, rule=rules.rule(name, **numbers))


def schedule(data: bytes) -> object:
    raw = load.read(data.decode("utf-8", "replace"), "schedule")
    made = checked(Schedule, raw, source="schedule")
    optimizer.check_schedule(made)
    return [optimizer.factor(made, step) for step in (0, 1, 10, 10**6)]


def vocabulary(data: bytes) -> object:
    found = Vocabulary.parse(data, "vocabulary.txt")
    return found.keep(1e-4), found.noise(0.75), found.keys("in")


def from_json(data: bytes) -> object:
    import json

    try:
        facts = json.loads(data)
    except (ValueError, RecursionError):
        raise ConfigError("no JSON") from None
    return Schema.from_dict(facts, "manifest.json")


os.environ.setdefault("CLICKFLEET_HOME", str(FOLDER))
LINES = b"py2 mod 1000001|minmax(0, 5)|standard(nan, 1)|count(10)|uniform(-0.001, 0.001)|5min|8GiB|" + b"9" * 400
RATES = (
    b"{name: cosine, steps: 100, warmup: 5, floor: 0.1}",
    b"{name: exponential, every: 10, decay: 0.5}",
    b"{name: step, every: 1, decay: 1e300}",
)
JSON = b'{"dense":[{"name":"x","transform":"log1p"}],"slots":[{"name":"a","multi":true}],"label":"click","keys":"raw"}'
TARGETS = [
    (
        "config",
        load_config,
        [CONFIG, BOMB, b"a: " + b"[" * 200, b"yes: 1", b"a: &a [*a]", b"data: 2026-13-45", b"x: \xff"],
    ),
    ("schema", load_schema, [SCHEMA, BOMB, b"preset: criteo", b"slots: 5", b"dense: [{name: [1]}]"]),
    ("schema-json", from_json, [JSON]),
    ("overrides", override, [b"train.epochs=3\ntable.rule.lr=0.05", b"model=deepfm\nmodel.hidden=[1, 2]", b"a.b=: :"]),
    ("paddlerec", translate, [PADDLE, BOMB + b"runner: {a: 1}", b"runner: [1]\ntrainer: x"]),
    ("texts", short_texts, LINES.split(b"|")),
    ("rules", rule, [b"adagrad lr=0.05 initial_g2sum=3", b"adam lr=0.1 beta1=0.9", b"ftrl lr=nan", b"sgd lr=1e400"]),
    ("schedules", schedule, RATES),
    ("vocabulary", vocabulary, [b"</s> 10\nthe 60\nfleet 40\n", b"a 99999999999999999999\n", b"a \xe0\xb9\x90\n"]),
]
