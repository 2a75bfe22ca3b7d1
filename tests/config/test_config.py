from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from clickfleet.config.check import configure
from clickfleet.config.load import Config, checked, dump, load, read
from clickfleet.config.plugins import Plugin
from clickfleet.config.sections import TableSettings
from clickfleet.data.schema import read_schema
from clickfleet.errors import ConfigError
from clickfleet.workbench.compare import changed

EXAMPLE = """
data:   {format: criteo, train: [train/part-*], test: [test/part-*], batch_size: 1000, bad_lines: error}
model:  {name: deepfm, hidden: [400, 400, 400]}
table:  {dim: 10, preset: plain, rule: {name: adagrad, lr: 0.05}, init: {embed: zero, embedx: "uniform(-0.001, 0.001)"}, memory_limit: 8GiB}
dense:  {optimizer: adam, lr: 0.001}
train:  {epochs: 1, seed: 7, threads: 2, deterministic: false, eval_every: null, init_from: null}
mode:   {name: local}
cluster: {shards: 2, workers: 2, threads: 1, address: null, on_failure: rollback}
run:    {dir: runs/deepfm, checkpoint_every: 5min, keep: 3, keep_epochs: true}
online: {dir: logs, start_day: 20260101, end_day: 20260103, split_interval: 60min, splits_per_pass: 6, done_file: _DONE,
         checkpoint_every_passes: 1, delta_every_passes: 1, validate: progressive, timezone: UTC}
publish: {guard: {auc_drop: 0.02, copc: [0.8, 1.25]}, freshness_slo: 60s, keep_chains: 2}
serve:  {host: 127.0.0.1, port: 8080, grpc_port: 8081, workers: 2, max_queue_ms: 50, token_file: null}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    return path


def test_the_documented_example_loads(tmp_path: Path) -> None:
    config = load(write(tmp_path, EXAMPLE))
    assert config.model == Plugin("deepfm", {"hidden": [400, 400, 400]})
    assert config.table.rule == Plugin("adagrad", {"lr": 0.05})
    assert config.table.memory_limit == 8 * 2**30
    assert config.run.checkpoint_every == 300
    assert config.online.split_interval == 3600
    assert config.publish.guard.copc == (0.8, 1.25)
    assert config.data.train == (str(tmp_path / "train/part-*"),)
    assert config.run.dir == str(tmp_path / "runs/deepfm")


def test_paths_in_a_file_are_relative_to_it_and_those_in_arguments_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    text = "data: {train: a.tsv, test: [b, s3://c/d]}\nmodel: ./mine.py\nserve: {token_file: t}"
    file, here = write(tmp_path / "files", text), str(tmp_path / "here")
    config = load(file)
    assert config.data.train == (f"{file.parent}/a.tsv",)
    assert config.data.test == (f"{file.parent}/b", "s3://c/d")
    assert config.model.name == f"{file.parent}/mine.py"
    assert config.run.dir == f"{file.parent}/run"
    changed = load(
        file,
        [
            "data.train=[x.tsv, /y.tsv, gs://z]",
            "data.valid=../v",
            "model.name=./other.py",
            "data.format={name: own.py, folder: f}",
            "run.dir=out",
            "online={dir: days}",
            "serve.token_file=null",
            "data.keys=raw",
        ],
    )
    assert changed.data.train == (f"{here}/x.tsv", "/y.tsv", "gs://z")
    assert changed.data.valid == (f"{here}/../v",)
    assert changed.data.test == config.data.test
    assert changed.model.name == f"{here}/other.py"
    assert changed.data.format == Plugin(f"{here}/own.py", {"folder": f"{here}/f"})
    assert (changed.run.dir, changed.online.dir) == (f"{here}/out", f"{here}/days")
    assert changed.serve.token_file is None
    assert changed.data.keys == "raw"
    assert load(file, ["model=dnn.py", "data.format.folder=g"]).model.name == f"{here}/dnn.py"
    assert load(file, ["data.format.folder=g"]).data.format.settings["folder"] == f"{here}/g"
    with pytest.raises(ConfigError, match=r"unknown key data\.trian"):
        load(file, ["data.trian=x"])


def test_everything_has_a_default() -> None:
    assert load() == Config()
    assert load(None, ["data.train=x.gz"]).data.train == ("x.gz",)


def test_a_given_rule_serves_both_parts_and_the_default_has_one_for_each() -> None:
    assert checked(Config, {}).table.embed_rule == Plugin(
        "adagrad_v2", {"lr": 0.1, "initial_g2sum": 0.1, "scale": "show"}
    )
    assert checked(Config, {"table": {"rule": "adam"}}).table.embed_rule is None
    assert replace(TableSettings(), rule=Plugin("adam")).embed_rule is None
    given = checked(Config, {"table": {"embed_rule": "ftrl"}}).table
    assert (given.rule.name, given.embed_rule) == ("adagrad_v2", Plugin("ftrl"))


ROWS, FIRST = {"lr": 0.05, "initial_g2sum": 0.1, "scale": "show"}, {"lr": 0.1, "initial_g2sum": 0.1, "scale": "show"}


@pytest.mark.parametrize(
    ("items", "rule", "embed_rule"),
    [
        (["table.rule.lr=0.02"], Plugin("adagrad_v2", {**ROWS, "lr": 0.02}), Plugin("adagrad_v2", FIRST)),
        (["table.rule.lr=0.05"], Plugin("adagrad_v2", ROWS), Plugin("adagrad_v2", FIRST)),
        (["table.embed_rule.lr=0.2"], Plugin("adagrad_v2", ROWS), Plugin("adagrad_v2", {**FIRST, "lr": 0.2})),
        (["table.rule.name=adagrad"], Plugin("adagrad"), None),
        (["table.rule=adam", "table.rule.lr=0.01"], Plugin("adam", {"lr": 0.01}), None),
        (["table.rule.lr=0.01", "table.rule.name=adam"], Plugin("adam", {"lr": 0.01}), None),
        (["table.rule=adam", "table.embed_rule.lr=0.01"], Plugin("adam"), Plugin("adam", {"lr": 0.01})),
        (["table.rule.lr=0.02", "table.embed_rule=ftrl"], Plugin("adagrad_v2", {**ROWS, "lr": 0.02}), Plugin("ftrl")),
    ],
)
def test_a_setting_of_a_rule_changes_nothing_else(
    tmp_path: Path, items: list[str], rule: Plugin, embed_rule: Plugin | None
) -> None:
    """The same key means the same to train, to compare and tune, and in a file that was written."""
    config = load(None, items)
    assert (config.table.rule, config.table.embed_rule) == (rule, embed_rule)
    one_by_one = Config()
    for item in items:
        key, _, value = item.partition("=")
        one_by_one = changed(one_by_one, key, read(f"value: {value}", "")["value"])
    assert one_by_one.table == config.table
    assert load(write(tmp_path, dump(config)), base=tmp_path).table == config.table
    assert Config() == load()  # nothing of the defaults was changed on the way


@pytest.mark.parametrize("before", [[], ["table.rule.lr=0.3"], ["table.rule=adam"], ["table.embed_rule=ftrl"]])
@pytest.mark.parametrize("item", ["table.rule.lr=0.02", "table.embed_rule.lr=0.02"])
def test_a_setting_of_a_rule_means_the_same_after_a_run_wrote_it(tmp_path: Path, before: list[str], item: str) -> None:
    """train takes it from an argument, compare from --set, tune from its space; with a new or a written configuration."""
    from clickfleet.workbench.tune import with_settings

    new = load(None, [*before, item]).table
    written = write(tmp_path, dump(load(None, before)))
    key, _, value = item.partition("=")
    for table in (
        load(written, [item]).table,
        changed(load(written), key, float(value)).table,
        with_settings(load(written), {key: float(value)}).table,
        with_settings(load(None, before), {key: float(value)}).table,
    ):
        assert table == new
    old = load(None, before).table
    assert new.rule.name == old.rule.name
    assert new.embed_rule is None or new.embed_rule.name == (old.embed_rule or old.rule).name


def test_the_rule_of_a_model_keeps_its_name_too() -> None:
    own = {"name": "sgd", "lr": 0.025, "scale": "none"}
    table = load(None, ["table.rule.lr=0.05"]).table.with_rule(own)
    assert (table.rule, table.embed_rule) == (Plugin("sgd", {"lr": 0.05, "scale": "none"}), None)
    assert TableSettings().with_rule(own).rule == Plugin("sgd", {"lr": 0.025, "scale": "none"})
    named = load(None, ["table.rule=adam"]).table
    assert named.with_rule(own) == named


def test_other_plug_ins_keep_their_names_as_well() -> None:
    config = load(None, ["model.hidden=[8]", "mode.k_steps=9", "data.format.separator=;"])
    assert (config.model.name, config.mode.name, config.data.format.name) == ("deepfm", "local", "auto")


def test_a_written_configuration_loads_to_an_equal_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(
        write(tmp_path, EXAMPLE), ["model=./mine.py", "online.kafka={brokers: b, topic: t, rows_per_pass: 9}"]
    )
    (tmp_path / "elsewhere").mkdir()
    again = tmp_path / "elsewhere" / "config.yaml"
    again.write_text(dump(config))
    assert load(again) == config
    assert config.model.name == str(tmp_path / "mine.py")


def test_paths_are_relative_to_the_file_unless_absolute_or_urls(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {train: [a, /b, s3://c/d]}\nserve: {token_file: t}")
    config = load(path)
    assert config.data.train == (str(tmp_path / "a"), "/b", "s3://c/d")
    assert config.serve.token_file == str(tmp_path / "t")


def test_arguments_win_and_are_read_as_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, "model: dnn\ntrain: {epochs: 2}")
    config = load(
        path, ["train.epochs=5", "model.hidden=[8]", "dense.lr=5e-6", "run.checkpoint_every=null", "data.format=slots"]
    )
    assert config.train.epochs == 5
    assert config.model == Plugin("dnn", {"hidden": [8]})
    assert config.dense.lr == 5e-6
    assert config.run.checkpoint_every is None
    assert config.data.format == Plugin("slots")


def test_arguments_leave_a_given_mapping_unchanged() -> None:
    given = {"train": {"epochs": 1}, "table": {"rule": {"name": "adam"}}}
    assert configure(given, ["table.rule.lr=0.3", "train.epochs=2"]).table.rule.settings == {"lr": 0.3}
    assert given == {"train": {"epochs": 1}, "table": {"rule": {"name": "adam"}}}


@pytest.mark.parametrize(
    ("text", "value"), [("250ms", 0.25), ("90s", 90), ("5min", 300), ("1.5h", 5400), ("2 d", 172800)]
)
def test_durations(text: str, value: float) -> None:
    assert load(None, [f"publish.freshness_slo={text}"]).publish.freshness_slo == value


@pytest.mark.parametrize(("text", "value"), [("100B", 100), ("1KB", 1000), ("1KiB", 1024), ("1.5GiB", 3 * 2**29)])
def test_sizes(text: str, value: int) -> None:
    assert load(None, [f"table.memory_limit={text}"]).table.memory_limit == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trian: {}", "a.yaml: unknown key trian; did you mean train?"),
        ("train: {epoch: 3}", "a.yaml: unknown key train.epoch; did you mean epochs?"),
        (
            "cluster: {zzz: 3}",
            "a.yaml: unknown key cluster.zzz; choose from shards, workers, threads, address, endpoints",
        ),
        ("publish: {guard: {auc_dorp: 0.1}}", "a.yaml: unknown key publish.guard.auc_dorp; did you mean auc_drop?"),
        (
            "online: {kafka: {brokerz: b, topic: t, rows_per_pass: 1}}",
            "unknown key online.kafka.brokerz; did you mean brokers?",
        ),
        ("online: {kafka: {topic: t, rows_per_pass: 1}}", "a.yaml: online.kafka.brokers is missing"),
        ('train: {epochs: "3"}', 'a.yaml: train.epochs: input should be a valid integer, found "3"'),
        ("train: {epochs: true}", "a.yaml: train.epochs: input should be a valid integer, found true"),
        ("train: {epochs: 0}", "a.yaml: train.epochs: input should be greater than or equal to 1, found 0"),
        ("data: {shuffle: -1}", "a.yaml: data.shuffle: input should be greater than or equal to 0, found -1"),
        (
            "data: {bad_lines: drop}",
            "a.yaml: data.bad_lines: input should be 'error', 'skip' or 'quarantine', found \"drop\"",
        ),
        (
            "run: {checkpoint_every: 5}",
            "a.yaml: run.checkpoint_every: needs a number and a unit of ms, s, min, h, d, such as 5min",
        ),
        ("table: {memory_limit: 8 GB RAM}", "a.yaml: table.memory_limit: needs a number and a unit"),
        (
            "table: {embed_rule: {name: 3}}",
            "a.yaml: table.embed_rule: needs a name, or a mapping with a name and settings",
        ),
        ("train: 3", "a.yaml: train: input should be"),
        ("data: {train: 3}", "a.yaml: data.train: input should be"),
        ("train: {epochs: 1, epochs: 2}", "a.yaml:1: duplicate key epochs"),
        ("train: {epochs: 1", "a.yaml:1: "),
        ("- 3", "a.yaml: expected sections such as data: and model:, found list"),
        ("online: {start_day: 2026-01-01}", "unsupported YAML value"),
    ],
)
def test_errors_say_where_what_and_what_to_do(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(write(tmp_path, text))
    assert message in str(error.value)
    assert "Traceback" not in str(error.value)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(write(tmp_path, "train: {epochz: 1, seed: x}\nserve: {port: 99999}"))
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize("item", ["epochs", "=3", "train.=3", "train epochs=3"])
def test_arguments_of_another_form_are_refused(item: str) -> None:
    with pytest.raises(ConfigError, match="does not have the form"):
        load(None, [item])


def test_a_value_is_no_section() -> None:
    with pytest.raises(ConfigError, match="epochs is a value, not a section"):
        load(None, ["train.epochs=3", "train.epochs.more=4"])


def test_a_missing_file_is_an_error_of_the_users() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load("nowhere.yaml")


def test_settings_of_a_plug_in_are_checked_alike() -> None:
    @dataclass(frozen=True)
    class Settings:
        hidden: tuple[int, ...] = (4,)
        dropout: float = 0.0
        rank: int | None = None

    def check(**settings: Any) -> Settings:
        return checked(Settings, settings, "model", "a.yaml")

    assert check(hidden=[8, 8], dropout=1) == Settings((8, 8), 1.0)
    with pytest.raises(ConfigError, match=r"a.yaml: unknown key model.hiden; did you mean hidden\?"):
        check(hiden=[8])
    with pytest.raises(ConfigError, match=r'a.yaml: model.hidden.1: input should be a valid integer, found "x"'):
        check(hidden=[8, "x"])


def test_every_model_takes_its_settings_from_a_file() -> None:
    from clickfleet.models.dcn_v2 import DCNv2

    config = load(None, ["model.name=dcn_v2", "model.rank=8", "model.structure=stacked"])
    assert checked(DCNv2.Config, config.model.settings, "model") == DCNv2.Config(rank=8, structure="stacked")
    with pytest.raises(ConfigError, match=r"model\.structure: input should be 'parallel' or 'stacked'"):
        checked(DCNv2.Config, {"structure": "both"}, "model")


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        (bomb(9), 4, "aliases repeat more than 10000 values"),
        ("m0: &m0 {a: 1, b: 2}\n" + "\n".join(
            f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 20)}]}}" for i in range(1, 9)
        ), 4, "aliases repeat"),
        ("a: &a [*a]", 1, "an alias refers to the value that contains it"),
        ("a: " + "[" * 5000, 1, "more than 64 levels"),
        ("a: 1\nb: " + "9" * 5000, 2, "is not a valid int"),
        ("a: 1\n\nb: 2026-13-45", 3, "is not a valid timestamp"),
        ("a: !!int word", 1, "is not a valid int"),
        ("a: !!timestamp word", 1, "is not a valid timestamp"),
        ("[a, b]: 1", 1, "cannot be a key"),
        ("a: 1\n? {b: 1}\n: 2", 2, "cannot be a key"),
        ("yes: 1", 1, "the key True is not text"),
        ("a: {x: 1,\n x: 2}", 2, "duplicate key x"),
        ("a: \x00", 1, "not a text file"),
        ("a: !!python/object/apply:os.system [ls]", 1, "could not determine a constructor"),
    ],
)  # fmt: skip
def test_yaml_that_cannot_be_meant_is_refused_by_line(tmp_path: Path, text: str, line: int, reason: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    for parse in (load, read_schema):
        with pytest.raises(ConfigError) as error:
            parse(path)
        assert str(error.value).startswith(f"{path}:{line}: ")
        assert reason in str(error.value)


def test_yaml_may_use_a_few_aliases_and_merges() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a, *a]"
    assert read(text, "x")["b"] == {"x": 1, "y": 3}
    assert read(text, "x")["c"] == [{"x": 1, "y": 2}] * 2


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match=r"x\.yaml is not a text file: byte 3"):
        load(tmp_path / "x.yaml")


def test_a_saved_configuration_may_hold_removed_settings(tmp_path: Path) -> None:
    """Resuming an old run with its own config.yaml works; in a file of the user the same keys are errors."""
    path = tmp_path / "config.yaml"
    path.write_text("mode: {name: async, fake_send: false, io_threads: 1, merge: 2}\ncluster: {max_losses: 3}\n")
    with pytest.raises(ConfigError, match=r"cluster\.max_losses; it is now"):
        load(path)
    (tmp_path / "checkpoints").mkdir()
    assert load(path).mode.settings == {"merge": 2}
    assert load(path).cluster.max_failures == 3
    path.write_text("mode: {name: sync, queue_size: 2, merge: 2, reduce: mean}\n")
    assert load(path).mode.settings == {"reduce": "mean"}
