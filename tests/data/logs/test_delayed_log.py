"""Rows as the logs of a server: the same rows, and labels that come after known delays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from clickfleet.data.batch import concatenate
from clickfleet.data.logs.delayed_log import parse_delays, slowness
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.data.reader import Reader
from clickfleet.data.schema import read_schema
from clickfleet.errors import ConfigError
from clickfleet.online.join_folder import join
from clickfleet.online.joiner import JoinRules
from clickfleet.online.row_join import JoinSettings

ROWS = 3000
DAY_S = 86400.0


@pytest.fixture(scope="module", params=[False, True], ids=["criteo", "histories"])
def log(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("log") / "late"
    options = SynthOptions(
        rows=ROWS,
        test_rows=100,
        labels=("click", "buy"),
        delays={"click": 20.0, "buy": 7200.0},
        histories=request.param,
    )
    synth(out, options)
    return out


def table(log: Path, name: str) -> Any:
    return pa.ipc.open_file(str(log / name / "part-0.arrow")).read_all()


def test_labels_come_after_their_delays_and_in_the_order_of_time(log: Path) -> None:
    shows, feedback = table(log, "shows"), table(log, "feedback")
    assert len(shows) == ROWS
    seconds = {name: feedback.column(name).cast(pa.int64()).to_numpy() / 1e6 for name in ("time", "received")}
    assert (np.diff(seconds["received"]) >= 0).all()
    shown = dict(
        zip(shows.column("request").to_pylist(), shows.column("time").cast(pa.int64()).to_numpy() / 1e6, strict=True)
    )
    first, last = min(shown.values()), max(shown.values())
    assert last - first == pytest.approx(DAY_S, rel=0.01)
    assert seconds["received"].max() <= last
    when: dict[str, dict[str, float]] = {}
    for request, labels, at in zip(
        feedback.column("request").to_pylist(), feedback.column("labels").to_pylist(), seconds["received"], strict=True
    ):
        when.setdefault(request, {})[labels[0][0]] = float(at)
    early = [request for request, at in shown.items() if at < first + DAY_S / 2]
    clicks = [when[request]["click"] - shown[request] for request in early if request in when]
    buys = [when[one]["buy"] - when[one]["click"] for one in early if "buy" in when.get(one, {})]
    assert all(delay >= 0 for delay in (*clicks, *buys))
    assert np.mean(clicks) == pytest.approx(20, rel=0.4)
    assert 1800 < np.mean(buys) < 14400


def test_joined_rows_are_those_of_the_log(log: Path) -> None:
    schema = read_schema(log / "schema.yaml")
    logs = JoinSettings(str(log / "shows"), str(log / "feedback"), JoinRules(3 * DAY_S, 3 * DAY_S, ("click", "buy")))
    join(logs, log / "rows", once=True)
    read = concatenate(list(Reader(f"{log}/rows/2*/*/*.arrow", schema, format="joined")))
    plain = concatenate(list(Reader(f"{log}/train", schema, format="csv")))
    assert plain.labels is not None
    assert read.labels is not None
    first = read.corrections.rows == 0 if read.corrections is not None else np.ones(len(read), bool)
    keys = [np.sort(part.keys[part.offsets[:: part.slots][:-1]]) for part in (read.take(np.flatnonzero(first)), plain)]
    assert np.array_equal(*keys), "the first key of every row, once"
    shows, clicks = read.statistics()
    assert shows is not None
    assert clicks is not None
    assert shows.sum() == ROWS
    missing = plain.labels[:, 0].sum() - clicks.sum()
    assert 0 <= missing <= 5, "clicks that would come after the last show"


def test_a_folder_is_written_again_only_if_asked(log: Path) -> None:
    options = SynthOptions(**json.loads((log / "synth.json").read_text())["options"] | {"labels": ("click", "buy")})
    before = table(log, "feedback")
    synth(log, options, overwrite=True)
    assert table(log, "feedback").equals(before), "the same seed gives the same events"


def test_delays_depend_on_the_values_of_a_row() -> None:
    values = np.random.default_rng(1).integers(0, 50, (4, 5000)).astype(str)
    rows = pa.record_batch({f"C{i}": pa.array(column) for i, column in enumerate(values)})
    found = slowness(rows, [f"C{i}" for i in range(4)], seed=1)
    assert np.array_equal(found, slowness(rows, [f"C{i}" for i in range(4)], seed=1))
    assert abs(found.mean()) < 0.3
    assert 0.7 < found.std() < 1.3
    assert not np.allclose(found, slowness(rows, [f"C{i}" for i in range(4)], seed=2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("buy=2h", "click has no delay"),
        ("click=20s,click=2s,buy=1s", "cannot read the delays"),
        ("click,buy=2h", "cannot read the delays"),
        ("click=soon,buy=2h", "the delay of click"),
        ("click=1s,sale=2h", "cannot read the delays"),
    ],
)
def test_delays_that_cannot_be_read_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_delays(text, ("click", "buy"))
    with pytest.raises(ConfigError, match="name a delay for every label"):
        SynthOptions(delays={"buy": 1.0})
