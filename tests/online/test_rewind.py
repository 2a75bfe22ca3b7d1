"""A bad pass that was learned is undone: the run goes back, consumers too, and what comes after is learned anew."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from clickfleet import cli
from clickfleet.config.check import configure
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.online import rewind
from clickfleet.online.passes import PassPlan
from clickfleet.serve import verification
from clickfleet.store import atomic, checkpoint, published
from clickfleet.store.published import Log
from online.test_publisher import base_of, state_of

PASSES = ["20260101/1", "20260101/2", "20260102/1", "20260102/2"]


def spoil(folder: Path, day: int = 20260102, split: str = "0000") -> bytes:
    """Everybody clicks."""
    part = folder / f"logs/{day}/{split}/part-0.csv"
    before = part.read_bytes()
    head, *rows = before.decode().splitlines()
    part.write_text("\n".join([head, *("1" + row[1:] for row in rows)]) + "\n")
    return before


def call(capsys, *arguments: str, code: int = 0) -> dict:
    with pytest.raises(SystemExit) as stop:
        cli.main([*arguments, "--json"])
    said = capsys.readouterr()
    assert stop.value.code == code, said.err
    return json.loads(said.out.splitlines()[-1]) if said.out.strip() else {"error": said.err}


@pytest.fixture
def bad(stream, online, tmp_path):
    """A run of two days whose third pass is bad, and the configuration's file; what that pass should have been."""
    config = stream(run={"keep": 9}, publish={"keep_chains": 9})
    good = spoil(tmp_path)
    online(config)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return config, str(path), good


def clean(tmp_path, config, online):
    """The same days without the bad pass."""
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(tmp_path / "run/graph.onnx", other)
    return online(config, f"run.dir={other}")


def test_a_bad_pass_is_undone_and_replaced(bad, online, tmp_path, capsys):
    config, path, good = bad
    log = Log(tmp_path / "run/published")
    before = state_of(log, 3)  # a base and its delta of the first day, and that day's base
    found = call(capsys, "online", path, "--rewind", "list")["stops"]
    assert [stop["learned_until"] for stop in found] == [PASSES[0], PASSES[1], PASSES[2], PASSES[3]]
    assert [stop["rewinds_to"] for stop in found] == [*PASSES[1:], None]
    done = call(capsys, "online", path, "--rewind", PASSES[2])
    assert (done["learned_until"], done["sequence"]) == (PASSES[1], 3)
    assert state_of(log) == before
    assert log.lines()[-1].name == done["entry"]
    assert len(checkpoint.steps(tmp_path / "run/checkpoints")) == 2
    (tmp_path / "logs/20260102/0000/part-0.csv").write_bytes(good)
    again = online(config)
    assert again.passes == 4
    assert state_of(log) == base_of(again.learner.table)
    right = clean(tmp_path, config, online)
    assert base_of(again.learner.table) == base_of(right.learner.table)
    verification.verify(tmp_path / "run")
    told = [
        "/".join(json.loads(line)["input"].split("/")[-3:-1])
        for name in ("base_donefile.txt", "patch_donefile.txt")
        for line in (tmp_path / "run/model" / name).read_text().splitlines()
    ]
    assert "20260102/base-1" in told  # existing consumers hear of the new entries
    assert [told.count(one) for one in ("20260102/delta-2", "20260103/base")] == [2, 2]


def test_copies_are_taken_back_too(stream, online, tmp_path):
    config = stream(run={"keep": 9}, publish={"keep_chains": 9, "to": str(tmp_path / "copies")})
    online(config)
    log, copies = Log(tmp_path / "run/published"), Log(tmp_path / "copies")
    before = state_of(log, 3)
    rewind.rewind(configure(config), (20260102, 1), 0, print)
    assert copies.lines() == log.lines()
    assert state_of(copies) == before


def test_a_bad_pass_is_left_out(bad, online, tmp_path, capsys):
    config, path, _ = bad
    call(capsys, "online", path, "--rewind", PASSES[2], "--skip", "1")
    done = online(config)
    assert done.passes == 4
    log = (tmp_path / "run/log.txt").read_text()
    assert "20260102 pass 1 has no rows" in log
    assert "ALARM" not in log  # its files are not late
    told = [line.split("\t") for line in (tmp_path / "run/model/donefile.txt").read_text().splitlines()]
    again = {(day, number): path for day, _, path, number, _ in told}
    assert all(Path(path).exists() for path in again.values())  # the last line for a pass names the new checkpoint
    (tmp_path / "logs/20260102/0000/part-0.csv").unlink()
    right = clean(tmp_path, config, online)
    assert base_of(done.learner.table) == base_of(right.learner.table)


def test_what_cannot_be_done_is_refused(bad, online, tmp_path, capsys):
    config, path, _ = bad
    settings = configure(config)
    for step in checkpoint.steps(tmp_path / "run/checkpoints")[:2]:
        shutil.rmtree(tmp_path / f"run/checkpoints/step-{step:012d}")
    with pytest.raises(CheckpointError, match=rf"(?s)before {PASSES[1]} is kept.*after {PASSES[2]}, to {PASSES[3]} at"):
        rewind.rewind(settings, (20260101, 2), 0, print)
    assert "run.keep" in call(capsys, "online", path, "--rewind", PASSES[0], code=1)["error"]
    with pytest.raises(ConfigError, match="has begun only 1 passes"):
        rewind.rewind(settings, (20260102, 2), 2, print)
    for wrong in ("monday", "20260199/1", "20260101", "20260101/0"):
        with pytest.raises(ConfigError, match="--rewind"):
            rewind.parse(wrong)
    call(capsys, "online", path, "--skip", "1", code=2)
    with pytest.raises(ConfigError, match="at a URL"):
        rewind.listed(configure(config, ["run.dir=s3://bucket/run"]))
    with pytest.raises(CheckpointError, match="not a run folder"):
        rewind.listed(configure(config, [f"run.dir={tmp_path}/nothing"]))
    broken = tmp_path / f"run/checkpoints/step-{checkpoint.steps(tmp_path / 'run/checkpoints')[0]:012d}/state.json"
    whole = broken.read_bytes()
    broken.write_bytes(whole + b" ")
    with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
        rewind.rewind(settings, (20260102, 2), 0, print)
    assert not (tmp_path / "run" / rewind.INTENT).exists()


STEPS = [
    (PassPlan, "rewind"),
    (checkpoint, "make_latest"),
    (checkpoint, "forget_after"),
    (rewind, "_restore"),
    (published.Log, "append"),
    (Path, "unlink"),
]


@pytest.fixture
def killed(bad, tmp_path, monkeypatch):
    """The run as it was before the rewind, then a rewind that is killed before or after a step."""
    shutil.copytree(tmp_path / "run", tmp_path / "saved", symlinks=True)

    def kill(step, after: bool) -> None:
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "saved", tmp_path / "run", symlinks=True)
        owner, name = step
        real = getattr(owner, name)

        def dying(*args, **kwargs):
            if after:
                real(*args, **kwargs)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, dying)
            with pytest.raises(KeyboardInterrupt):
                rewind.rewind(configure(bad[0]), (20260102, 1), 0, lambda text: None)

    return kill


def test_a_kill_at_any_step_and_the_same_command_again(bad, killed, tmp_path):
    before = state_of(Log(tmp_path / "run/published"), 3)
    for step in STEPS:
        for after in (False, True):
            killed(step, after)
            rewind.rewind(configure(bad[0]), (20260102, 1), 0, lambda text: None)
            log = Log(tmp_path / "run/published")
            assert state_of(log) == before
            assert len(log.lines()) == 7  # one entry takes consumers back, however often it is asked for
            assert [stop.last for stop in rewind.stops(tmp_path / "run")] == [(20260101, 1), (20260101, 2)]
            assert not (tmp_path / "run" / rewind.INTENT).exists()


def test_a_kill_at_any_step_and_a_plain_restart(bad, killed, online, tmp_path):
    config, _, good = bad
    (tmp_path / "logs/20260102/0000/part-0.csv").write_bytes(good)
    wanted = None
    for step in STEPS:
        killed(step, False)
        done = online(config)
        log = Log(tmp_path / "run/published")
        assert (done.passes, state_of(log)) == (4, base_of(done.learner.table))
        wanted = wanted or state_of(log)
        assert state_of(log) == wanted


def test_a_broken_intent_is_named(bad, online, tmp_path):
    config, _, _ = bad
    (tmp_path / "run" / rewind.INTENT).write_bytes(atomic.canonical({"step": 1}))
    with pytest.raises(CheckpointError, match=r"rewind\.json is damaged"):
        online(config)


def test_consumers_get_a_base_where_the_way_back_is_gone(stream, online, tmp_path):
    config = stream(run={"keep": 9}, publish={"keep_chains": 1})
    online(config)
    said: list[str] = []
    rewind.rewind(configure(config), (20260101, 2), 0, said.append)
    assert "until the run publishes a base" in said[0]
    done = online(config)
    log = Log(tmp_path / "run/published")
    assert state_of(log) == base_of(done.learner.table)
    assert log.lines()[-1].kind == "base"
