"""report.html: what is drawn is right, and a real browser shows it."""

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clickfleet
from clickfleet.cli import build
from clickfleet.cli.frame import run as command
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.errors import CheckpointError, ClickfleetError
from clickfleet.training import report
from clickfleet.training.metrics import Buckets
from clickfleet.training.model import TrainingResult
from clickfleet.training.report import charts
from clickfleet.training.report.charts import Series
from clickfleet.training.report.evidence import calibration, curve, read_lines, roc, scores

NASTY = 'a<b>&"c'
SCHEMA = Schema(dense=(Dense("age"),), slots=(Slot(NASTY), Slot("noise")))


def frame(rows: int = 3000) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    value = rng.integers(0, 20, rows)
    chance = np.where(value % 2 == 0, 0.7, 0.1)
    return {
        "label": (rng.random(rows) < chance).astype(np.int64),
        "age": rng.normal(size=rows),
        NASTY: value,
        "noise": rng.integers(0, 30, rows),
    }


def train(folder: Path, **more: Any) -> TrainingResult:
    config = {
        "model": {"name": "deepfm", "hidden": [8]},
        "table": {"dim": 4},
        "data": {"batch_size": 100},
        "train": {"epochs": 2, "eval_every": 10, "threads": 1},
        "run": {"dir": str(folder), **more},
    }
    return clickfleet.train(config, data=frame(), test=frame(1500), schema=SCHEMA, quiet=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "run"
    train(path)
    return path


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_real_browser_shows_everything(browser: Any, folder: Path, width: int, scheme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    problems: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((folder / "report.html").as_uri())
    text = page.inner_text("body")
    assert [heading.inner_text() for heading in page.query_selector_all("h2")] == [
        "Learning",
        "On test data",
        "Fields",
        "Where the time went",
        "Configuration",
    ]
    names = [caption.inner_text() for caption in page.query_selector_all("figcaption")]
    assert [name.split(",")[0] for name in names] == ["AUC", "Log loss", "ROC", "Calibration", "Scores", "Metrics"]
    for drawing in page.query_selector_all("svg"):
        box = drawing.bounding_box()
        assert box["width"] > 250
        assert box["height"] > 140
        assert drawing.query_selector_all("polyline.curve, rect.bar")
    assert NASTY in text
    assert "test AUC" in text
    rows = [row.inner_text() for row in page.query_selector_all("section:nth-of-type(3) tbody tr")]
    assert len(rows) == 3
    assert rows[0].startswith(NASTY)
    page.click("summary")
    assert "batch_size: 100" in page.inner_text("details pre")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (colour == "rgb(255, 255, 255)") == (scheme == "light")
    assert problems == []
    assert all(url.startswith(("file:", "data:")) for url in asked)
    page.close()


def test_it_is_one_small_file_of_sound_markup(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    assert len(text) < 200_000
    for part in text.split("<svg")[1:]:
        ET.fromstring("<svg" + part.split("</svg>")[0] + "</svg>")


def test_a_failing_report_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ZeroDivisionError("drawn wrongly")

    monkeypatch.setattr(report, "write", fail)
    assert train(tmp_path / "run").path is not None
    assert "no report: ZeroDivisionError: drawn wrongly" in (tmp_path / "run/log.txt").read_text()


def test_it_can_be_left_out(tmp_path: Path) -> None:
    train(tmp_path / "run", report=False)
    assert not (tmp_path / "run/report.html").exists()


def test_the_command_draws_it_again(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "report.html").rename(tmp_path / "old.html")
    assert command(build(), ["report", str(folder)]) == 0  # its test data stood in memory, so no test part
    text = (folder / "report.html").read_text()
    assert "ROC" not in text
    assert "rows</th>" in text
    (tmp_path / "old.html").rename(folder / "report.html")
    assert "bytes" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="is not a run folder"):
        report.rebuild(tmp_path)


def test_curves_keep_their_last_point(tmp_path: Path) -> None:
    lines = [{"step": n, "auc": n / 1000} for n in range(1, 1000)]
    points = curve(lines, "auc", limit=100)
    assert len(points) <= 100
    assert points[-1] == (999.0, 0.999)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\nnonsense\n')
    with pytest.raises(ClickfleetError, match=r"metrics\.jsonl:2"):
        read_lines(tmp_path)


def counted(rows: int = 20000) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    predicted = rng.beta(2, 6, rows).astype(np.float32)
    labels = (rng.random(rows) < predicted).astype(np.float32)
    buckets = Buckets()
    buckets.update(predicted, labels)
    return predicted, labels, *buckets.counts()


def test_the_roc_has_the_area_of_the_auc() -> None:
    from sklearn.metrics import roc_auc_score

    predicted, labels, clicks, others = counted()
    points = np.array(roc(clicks, others))
    assert (points[0] == [0, 0]).all()
    assert (points[-1] == [1, 1]).all()
    assert np.trapezoid(points[:, 1], points[:, 0]) == pytest.approx(roc_auc_score(labels, predicted), abs=2e-3)
    assert roc(clicks, others * 0) == []


def test_calibration_and_scores_hold_every_row() -> None:
    predicted, _, clicks, others = counted()
    points, spans = calibration(clicks, others)
    assert len(points) == len(spans) == 20
    assert all(low <= actual <= high for (_, actual), (_, low, high) in zip(points, spans, strict=True))
    inside = [low <= mean <= high for mean, low, high in spans]
    assert np.mean(inside) > 0.7  # the scores are true probabilities
    assert np.mean([mean for mean, _ in points]) == pytest.approx(predicted.mean(), abs=1e-3)
    edges, other, clicked = scores(clicks, others)
    assert len(edges) == len(other) + 1 == len(clicked) + 1
    for part in (other, clicked):
        assert sum(height for _, height in part) == pytest.approx(1.0)
    assert calibration(clicks * 0, others * 0) == ([], [])
    assert scores(clicks * 0, others * 0) == ([], [], [])


def test_charts_of_one_point_and_of_flat_curves() -> None:
    for points in ([(1.0, 0.5)], [(1.0, 0.5), (2.0, 0.5)], [(0.0, 0.0), (1e7, 0.0)]):
        drawn = charts.lines("t", [Series("s", points, "a")], "x")
        assert "nan" not in drawn
        assert drawn.count("<circle") == len(points)
