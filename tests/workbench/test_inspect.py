"""What a model is made of, one row of it, what moved, and what a score is made of."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clickfleet.cli import build
from clickfleet.cli.frame import run as command
from clickfleet.errors import CheckpointError, ConfigError, DataError
from clickfleet.serve.features import Fields
from clickfleet.store import run_folder
from clickfleet.training import saving
from clickfleet.training.predict import Scorer
from clickfleet.workbench.diff import diff
from clickfleet.workbench.explain import explain, explain_rows, explanation_text
from clickfleet.workbench.inspection import describe, key_of, look_up, parse_key, removable, row_text, scores


def result(capsys: pytest.CaptureFixture[str], *argv: object) -> Any:
    assert command(build(), [*map(str, argv), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def rows_of(path: Path) -> dict[int, dict[str, Any]]:
    found = {}
    with saving.load(run_folder.resolve(path)).table.snapshot() as parts:
        for part in parts:
            for i, key in enumerate(part["key"].tolist()):
                found[key] = {name: part[name][i] for name in ("show", "click", "unseen_days", "embed_w", "slot")}
                found[key]["full"] = part["full"]
    return found


def test_what_a_model_is_made_of(stream: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts, rows = result(capsys, "inspect", stream), rows_of(stream)
    assert facts["rows"] == len(rows) == sum(one["rows"] for one in facts["per_slot"].values())
    assert sum(facts["scores"].values()) == len(rows)
    learner = saving.load(run_folder.resolve(stream))
    policy = learner.table.policy
    lost = [removable(policy, scores(policy, r["show"], r["click"]), r["unseen_days"]) for r in rows.values()]
    assert facts["removed_at_next_shrink"] == sum(map(bool, lost)) == learner.table.shrink()
    assert sum(one["full_rows"] for one in facts["per_slot"].values()) == facts["full_rows"] < len(rows)
    assert facts["norms"]["p50"] <= facts["norms"]["p100"]
    shared = result(capsys, "inspect", stream / "published")
    assert shared["scores"] is None  # readers get no statistics
    assert shared["entries"][0]["kind"] == "base"
    assert command(build(), ["inspect", str(stream)]) == 0
    assert "rows by score" in capsys.readouterr().out


def test_a_row_and_what_becomes_of_it(stream: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(stream)
    policy = saving.load(run_folder.resolve(stream)).table.policy
    for key, row in list(rows.items())[:40]:
        facts = look_up(stream, key)
        assert (facts["show"], facts["click"], facts["full"]) == (row["show"], row["click"], bool(row["full"]))
        assert facts["embed_w"] == pytest.approx(float(row["embed_w"]))
        gone = removable(policy, scores(policy, row["show"], row["click"]), row["unseen_days"])
        assert facts["shrink"]["removed"] == bool(gone)
        text = "\n".join(row_text(facts))
        assert ("not admitted yet: its score is" in text) == (not row["full"])
    full = next(key for key, row in rows.items() if row["full"])
    told = look_up(stream, full)
    there = look_up(stream / "published", full)
    assert there["embed_w"] == told["embed_w"]
    assert "hold no statistics" in "\n".join(row_text(there))
    assert not look_up(stream, 12345)["found"]
    by_value = result(capsys, "inspect", stream, "--slot", "ad", "--value", "a4")
    assert by_value["slot"] == "ad"
    assert by_value["show"] > 0
    assert parse_key("0xff") == 255
    with pytest.raises(CheckpointError, match="is not a key"):
        parse_key("-3")
    with pytest.raises(ConfigError, match="no slot town"):
        key_of(saving.load(run_folder.resolve(stream)).schema, "town", "x")


def test_when_a_row_was_first_seen_with_factors(stream: Path, run: Path, tmp_path: Path) -> None:
    checkpoints = sorted((stream / "checkpoints").glob("step-*"))  # one per pass, and one per day
    full = {int(path.name[5:]): {k for k, row in rows_of(path).items() if row["full"]} for path in checkpoints}
    few = shutil.copytree(stream, tmp_path / "few", symlinks=True)
    for path in checkpoints[:-1]:
        shutil.rmtree(few / "checkpoints" / path.name)
    steps = set()
    for key in sorted(full[max(full)])[:40]:
        after = max((step for step in full if key not in full[step]), default=0)  # the last checkpoint without factors
        by = next(step for step in full if step > after)
        facts = look_up(stream, key)
        found = facts["admitted"]
        assert (found["after"] or {"step": 0})["step"] >= after
        assert after < found["by"]["step"] <= by  # an entry may be earlier
        steps.add(found["by"]["step"])
        assert [one["full"] for one in found["seen"]][-1]
        less = look_up(few, key)["admitted"]  # from its entries
        assert less["by"]["step"] > after
        assert look_up(few / "published", key)["admitted"]["by"] == less["by"]
        (text,) = [
            line for line in row_text(facts) if line.startswith("admitted by score(2.0); first seen with factors")
        ]
        assert f"in {found['by']['where']} (step {found['by']['step']}, 20" in text
    assert len(steps) > 1
    key = next(iter(rows_of(run)))
    text = look_up(run, key)["admission"]
    assert text.startswith("rows get factors with their first push; first seen with factors in step-")
    alone = shutil.copytree(run_folder.resolve(run), tmp_path / "alone" / "model")
    assert "no checkpoint or entry here shows when" in look_up(alone, key)["admission"]
    assert look_up(alone, 12345)["admitted"] is None


def test_what_moved_between_two_checkpoints(stream: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *_, last = sorted((stream / "checkpoints").glob("step-*"))
    facts = result(capsys, "inspect", last, "--against", first, "--top", "5")
    now, before = rows_of(last), rows_of(first)
    assert facts["born"] == len(now.keys() - before.keys())
    assert facts["gone"] == len(before.keys() - now.keys())
    assert facts["rows"] == len(now)
    a, b = saving.load(first).table, saving.load(last).table
    both = np.array(sorted(now.keys() & before.keys()), np.uint64)
    far = np.linalg.norm(b.pull(both, training=False) - a.pull(both, training=False), axis=1)
    order = np.argsort(-far)[:5]
    assert [one["key"] for one in facts["movers"]] == both[order].tolist()
    np.testing.assert_allclose([one["moved"] for one in facts["movers"]], far[order], rtol=1e-5)
    assert all(share > 0 for share in facts["dense"].values())
    same = diff(last, last)
    assert (same["moved"], same["born"], same["gone"], same["movers"]) == (0, 0, 0, [])
    entries = sorted((stream / "published").glob("0*"))
    told = diff(stream / "published", entries[0], 3)["movers"]
    assert [one["show"] for one in told] == [None] * 3  # not 0: readers get no statistics


def test_why_a_row_is_scored_so(stream: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"price": 0.5, "user": "u3", "ad": "a4", "site": ["s4", "s0"]}
    facts = result(capsys, "explain", stream, json.dumps(row))
    learner = saving.load(run_folder.resolve(stream))
    fields = Fields(learner.schema)
    names = list(row)
    batch = fields.rows([row, *({k: v for k, v in row.items() if k != name} for name in names)])
    ((_, wanted),) = list(Scorer(learner)([batch]))
    assert facts["score"] == pytest.approx(float(wanted[0]), abs=1e-6)
    found = {part["field"]: part["contribution"] for part in facts["contributions"]}
    for name, without in zip(names, wanted[1:], strict=True):
        assert found[name] == pytest.approx(float(wanted[0] - without), abs=1e-6)
    ad = next(part for part in facts["contributions"] if part["field"] == "ad")
    assert ad["show"] == look_up(stream, ad["keys"][0])["show"]
    data = next((stream.parent / "logs").glob("*/*/part-0.csv"))
    text = data.read_text().splitlines()[2].split(",")
    from_file = explain(stream, str(data), line=2)
    as_json = {"price": float(text[2]), "user": text[3], "ad": text[4], "site": text[5].split("|")}
    assert from_file["score"] == pytest.approx(explain(stream, as_json)["score"], abs=1e-6)
    assert from_file["label"] == float(text[0])
    part = next(part for part in from_file["contributions"] if part["field"] == "ad")
    assert f"ad = {text[4]}  {part['show']:g} shows" in "\n".join(explanation_text(from_file))
    assert {part["field"]: part["value"] for part in from_file["contributions"]} == as_json
    several = explain_rows(stream, str(data), line=2, count=3)
    assert [one["line"] for one in several] == [2, 3, 4]
    assert several[0] == {"line": 2, **from_file}
    found = result(capsys, "explain", stream, str(data), "--line", "2", "--rows", "3")["rows"]
    assert [one["score"] for one in found] == [one["score"] for one in several]
    assert result(capsys, "explain", stream, json.dumps([row, {}]))["rows"][1]["score"] == facts["score_of_nothing"]
    there = explain(stream / "published", row)
    assert {part.get("show") for part in there["contributions"]} == {None}
    assert "shows" not in "\n".join(explanation_text(there))
    with pytest.raises(DataError, match="has only 60 rows"):
        explain(stream, str(data), line=61)


def test_importance_of_fields_and_questions_that_make_no_sense(
    run: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = result(capsys, "explain", run, "--importance", log / "test", "--groups", "C1+C2,I1")["importance"]
    assert sorted(one["name"] for one in found) == ["C1+C2", "I1"]
    for argv in (["--slot", "C1"], ["--key", "3", "--against", "x"]):
        assert command(build(), ["inspect", str(run), *argv]) == 2
    for argv in ([], ["{}", "--groups", "C1"], ["{}", "--importance", "x"]):
        assert command(build(), ["explain", str(run), *argv]) == 2
    for row in ("[" * 100_000, "[]", "[1]", '{"nope": 1}', "{"):
        assert command(build(), ["explain", str(run), row]) == 1
    capsys.readouterr()


def test_a_model_without_factors(tmp_path: Path, config: dict[str, Any]) -> None:
    import clickfleet

    clickfleet.train({**config, "model": "lr", "run": {"dir": str(tmp_path / "lr")}}, quiet=True)
    facts = describe(tmp_path / "lr")
    assert facts["factors"] == 0
    assert diff(tmp_path / "lr", tmp_path / "lr")["moved"] == 0
    key = next(iter(rows_of(tmp_path / "lr")))
    assert look_up(tmp_path / "lr", key)["embed_w"] != 0
