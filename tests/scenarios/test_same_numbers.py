"""Check that fixed seeds still give the stored numbers. `scripts/same-numbers` compares two builds in more detail.

Results of the C++ core do not depend on the processor, so this file stores digests of them. Results of torch do, in the last bits:
they are compared with a tolerance, mostly by log loss, which changes smoothly. If a change is meant to change numbers, store new ones.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clickfleet
from clickfleet import cli

ROUNDING = 1e-6
"""Between AVX2 and AVX-512 the log losses below differ by 2e-8 at most, the scores by 2e-7."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("same")
    run("synth", folder / "log", "--rows", 2000, "--test-rows", 500, "--parts", 2, "--seed", 5)
    run("synth", folder / "days", "--rows", 1200, "--test-rows", 0, "--days", 2, "--split-interval", 720, "--seed", 5)
    return folder


def run(*argv: object) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in argv])
    assert not stop.value.code


def result(capsys: pytest.CaptureFixture[str], *argv: object) -> Any:
    capsys.readouterr()
    run(*argv, "--json")
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def digest(*paths: Path) -> str:
    found = hashlib.sha256()
    for path in paths:
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def settings(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    return {
        "data": {"train": str(folder / "log" / "train"), "test": str(folder / "log" / "test"), "batch_size": 50},
        "table": {"dim": 4, **sections.pop("table", {})},
        "train": {"threads": 1, "deterministic": True},
        "run": {"dir": str(folder / name), "report": False},
        **sections,
    }


def lines(path: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


MODES = {
    "local": (0.560300628, 0.529760),
    "sync": (0.619249390, 0.531346),
    "half_async": (0.632069967, 0.537646),
    "async": (0.631725160, 0.525522),
    "async, dense gradient": (0.630531686, 0.541004),
    "geo": (0.63149859, 0.527178),
    "geo, k_steps 100": (0.63149859, 0.527178),
    "async, batch 25": (0.582380752, 0.549260),
}
"""Log loss and AUC on the test data."""


def test_every_mode(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run each mode with simulated workers, whose order a seed decides."""
    config = folder / "modes.yaml"
    config.write_text(json.dumps(settings(folder, "modes", model={"name": "dnn", "hidden": [16, 8]})))
    found = result(capsys, "bench", "modes", config, "--rows", 2000, "--workers", 2, "--seed", 5)["rows"]
    assert {row["mode"].partition(",")[0] for row in found} == {"local", "sync", "half_async", "async", "geo"}
    assert {row["mode"]: row["logloss"] for row in found} == pytest.approx(
        {k: v for k, (v, _) in MODES.items()}, rel=ROUNDING
    )
    assert {row["mode"]: row["auc"] for row in found} == pytest.approx({k: v for k, (_, v) in MODES.items()}, abs=1e-4)


MODELS = {
    "lr": [0.562081772, 0.545663568, 0.380209208, 0.369681418],
    "fm": [0.568990933, 0.552306134, 0.336847633, 0.475532264],
    "deepfm": [0.561741185, 0.546777734, 0.376450628, 0.372480750],
    "dcn_v2": [0.586704105, 0.521751266, 0.176309600, 0.494575113],
}
"""Log loss of training and of the test data, the first and the last score."""


@pytest.mark.parametrize("model", MODELS)
def test_models(model: str, folder: Path) -> None:
    extra = {"hidden": [16, 8]} if model in ("deepfm", "dcn_v2") else {}
    trained = clickfleet.train(settings(folder, model, model={"name": model, **extra}), quiet=True)
    scores = trained.predict(str(folder / "log" / "test"))
    assert trained.test is not None
    found = [trained.train["logloss"], trained.test["logloss"], float(scores[0]), float(scores[-1])]
    assert found == pytest.approx(MODELS[model], rel=ROUNDING)


RULES = {
    "sgd": 0.523084705,
    "adagrad": 0.527406914,
    "std_adagrad": 0.527132630,
    "adagrad_v2": 0.540987046,
    "adam": 0.527495496,
    "shared_adam": 0.528542704,
    "ftrl": 0.524181485,
}
"""Log loss on the test data."""


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule: str, folder: Path) -> None:
    config = settings(folder, f"rule-{rule}", model={"name": "fm"}, table={"rule": {"name": rule}})
    trained = clickfleet.train(config, quiet=True)
    assert trained.test is not None
    assert trained.test["logloss"] == pytest.approx(RULES[rule], rel=ROUNDING)


PASSES = [0.560583053, 0.580744408, 0.503162066, 0.516492367]
"""Log loss of each pass, scored before it is trained on."""


def test_online(folder: Path) -> None:
    span = ["online.start_day=20260101", "online.end_day=20260102", "online.split_interval=12h"]
    own = ["model=fm", "table.dim=4", "data.batch_size=50", "train.deterministic=true", "run.report=false"]
    run("online", f"online.dir={folder / 'days'}", *span, *own, f"run.dir={folder / 'live'}")
    found = [line["validation_logloss"] for line in lines(folder / "live" / "metrics.jsonl", "pass")]
    assert found == pytest.approx(PASSES, rel=ROUNDING)


def test_synth(folder: Path) -> None:
    assert digest(*sorted((folder / "log").rglob("part-*"))) == "354213b426323385"
    assert digest(*sorted((folder / "days").rglob("part-*"))) == "3b6b8667a8e76fc9"


def test_keys(folder: Path) -> None:
    """Parsing, hashing and shuffling."""
    found = hashlib.sha256()
    for batch in clickfleet.Reader(str(folder / "log" / "train"), batch_size=77, shuffle=500, seed=3):
        for part in (batch.keys, batch.offsets, batch.dense, batch.labels):
            found.update(np.ascontiguousarray(part).tobytes())
    assert found.hexdigest()[:16] == "cee9804ee47bd938"


def test_table() -> None:
    table, rng = clickfleet.Table(factors=4), np.random.default_rng(1)
    for _ in range(20):
        keys = np.unique(rng.integers(0, 500, 100).astype(np.uint64))
        table.push(keys, rng.integers(-8, 9, (len(keys), 5)).astype(np.float32) / 16)
    rows = table.pull(np.arange(500, dtype=np.uint64))
    assert hashlib.sha256(rows.tobytes()).hexdigest()[:16] == "ffa88aa04ba4f896"


def test_words(tmp_path: Path) -> None:
    run("words", "synth", tmp_path / "made", "--words", 20_000, "--vocabulary", 120, "--topics", 6, "--entities", 6)
    run("words", "prepare", tmp_path / "made" / "text.txt", "--out", tmp_path / "corpus", "--min-count", 2)
    files = [f"data.train={tmp_path / 'corpus/train'}", f"data.vocabulary={tmp_path / 'corpus/vocabulary.txt'}"]
    own = ["data.format=sentences", "model.name=word2vec", "table.dim=8", "train.threads=1", "run.report=false"]
    digests = {}
    for name, setting in {"in place": "train.hogwild=1", "pulled": "train.deterministic=true"}.items():
        run("train", *own, *files, setting, f"run.dir={tmp_path / name}")
        run("words", "export", tmp_path / name, tmp_path / f"{name}.txt")
        digests[name] = digest(tmp_path / f"{name}.txt")
    assert digests == {"in place": "833954b102678ac1", "pulled": "b51e4583d7f2c5f7"}
