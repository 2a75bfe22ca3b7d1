"""The commands about logs, in process."""

import json
from pathlib import Path

import pytest

from clickfleet.cli import build
from clickfleet.cli.frame import run


def result(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, object]:
    """The `--json` line of a command that succeeds."""
    code = run(build(), [*map(str, argv), "--json"])
    out = capsys.readouterr()
    assert code == 0, out.err
    found: dict[str, object] = json.loads(out.out.splitlines()[-1])
    return found


def test_from_synth_to_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = result(capsys, "synth", tmp_path / "log", "--rows", 3000, "--test-rows", 2000, "--parts", 2, "--seed", 5)
    assert made["rows"] == 3000
    assert 0.2 < made["ctr"] < 0.3  # type: ignore[operator]
    assert 0.8 < made["best_auc"] < 0.88  # type: ignore[operator]
    split = result(capsys, "prepare", tmp_path / "log/train", "--out", tmp_path / "p", "--part-rows", 1000)
    assert (split["rows"], split["train_rows"], split["parts"]) == (3000, 2700, {"train": 3, "test": 1})
    described = result(
        capsys, "stats", tmp_path / "p/train", "--schema", tmp_path / "p/schema.yaml", "--html", tmp_path / "s.html"
    )
    assert described["rows"] == 2700
    assert len(described["columns"]) == 39  # type: ignore[arg-type]
    assert (tmp_path / "s.html").read_text().count("<svg") == 39
    converted = result(
        capsys,
        "convert",
        tmp_path / "p/train",
        "--from",
        "criteo",
        "--to",
        "parquet",
        "--keys",
        "hash64",
        "--out",
        tmp_path / "x",
    )
    assert converted["rows"] == 2700


def test_what_people_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build(), ["synth", str(tmp_path / "log"), "--rows", "500", "--test-rows", "100"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"500 rows and 100 test rows in {tmp_path / 'log'}"
    assert out[1].startswith("click rate 0.2")
    assert run(build(), ["stats", str(tmp_path / "log/train"), "--top", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("500 rows, click rate 0.2")
    assert lines[2].split() == ["dense", "missing", "least", "median", "mean", "95%", "greatest"]
    assert lines[3].split()[0] == "I1"
    assert len(lines) == 3 + 13 + 2 + 26
    assert lines[-1].split()[0] == "C26"


def test_convert_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_text("1" + "\t" * 39 + "\n")
    assert run(build(), ["convert", str(tmp_path / "log"), "--from", "criteo", "--to", "csv", "--out", "-"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1] == "1" + "," * 39
    made = result(
        capsys, "convert", tmp_path / "log", "--from", "criteo", "--to", "slots", "--keys", "py2", "--out", "-"
    )
    assert made["rows"] == 1


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["stats", "nowhere"], 1, "error: there is no file nowhere"),
        (["synth", "x", "--rows", "0"], 1, "error: rows and parts must be at least 1"),
        (["synth", "x", "--format", "tfrecord"], 1, "error: cannot write the format 'tfrecord'"),
        (["fetch", "avazu"], 1, "error: unknown dataset 'avazu'"),
        (["fetch", "criteo", "--url", "http://127.0.0.1:9/a", "--mirror", "http://b"], 1, "exclude each other"),
        (["convert", "x", "--from", "criteo", "--to", "csv"], 2, "--out"),
        (["prepare", "x"], 2, "--out"),
        (["stats", "x", "--bad-lines", "quarantine"], 1, "error:"),
    ],
)
def test_mistakes_have_one_clear_message(
    argv: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if "quarantine" in argv:
        (tmp_path / "x").write_text("")
    assert run(build(), argv) == code
    out = capsys.readouterr()
    assert message in out.err
    assert "Traceback" not in out.err
    assert not (tmp_path / "x/train").exists()
