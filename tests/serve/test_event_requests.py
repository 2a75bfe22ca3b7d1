"""Requests with histories, and replies with the scores of several labels; hostile ones are refused in plain words."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clickfleet.serve.client import Client
from clickfleet.serve.json_api import logits_of
from clickfleet.training import export
from served import EVENTS, Model, Served, features, running

ROWS = features(70, 12, EVENTS)
FEW = [{**row, "ads": row["ads"][:3], "users": row["users"][:3]} for row in ROWS]
"""Without events beyond the limit of the history."""


@pytest.fixture(scope="module")
def din() -> Model:
    made = Model(EVENTS, "din")
    for seed in range(4):
        made.train(seed)
    return made


@pytest.fixture(scope="module")
def shop(din: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("events")
    export.export(din.learner, folder / "artifact", 1)
    with running(folder / "artifact", folder / "state", grpc_port=0, max_rows=2000, max_body=8 << 20) as found:
        yield found


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0, atol=2e-6)


def ranked(shop: Served, **request: Any) -> list[dict[str, Any]]:
    reply = shop.http.post("/v1/rank", json=request)
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = reply.json()["ranked"]
    return found


def test_a_reply_names_the_labels(shop: Served, din: Model) -> None:
    wanted = din.scores(ROWS)
    reply = shop.http.post("/v1/predict", json={"rows": ROWS, "outputs": ["buy", "logit"]}).json()
    close(reply["scores"]["click"], wanted[:, 0])
    close(reply["scores"]["buy"], wanted[:, 1])
    close(reply["outputs"]["buy"], wanted[:, 1])
    logits = logits_of(wanted.astype(np.float64), EVENTS.tasks)
    np.testing.assert_allclose(reply["outputs"]["logit"]["buy"], logits[:, 1], atol=2e-5)
    facts = shop.http.get("/v1/model").json()
    assert [label["name"] for label in facts["labels"]] == ["click", "buy"]
    assert facts["labels"][1]["given"] == "click"
    assert {one["name"]: one.get("history") for one in facts["inputs"]}["ads"] == "past"
    with Client(shop.url) as client:
        scores = client.predict(ROWS)
        assert isinstance(scores, dict)
        close(scores["buy"], wanted[:, 1])


def test_the_history_of_a_user_stands_once(shop: Served, din: Model) -> None:
    user = {"user": "v3", "ads": ["v1", "v2", "v1"], "users": ["v3", "v3", "v4"]}
    candidates = [{"id": i, "ad": f"v{i}", "tags": ["v1"] * (i % 3), "value": 1 + i / 7} for i in range(40)]
    rows = [{**user, **{k: v for k, v in one.items() if k not in ("id", "value")}} for one in candidates]
    wanted, value = din.scores(rows).astype(np.float64), np.array([one["value"] for one in candidates])
    first = ranked(shop, user=user, candidates=candidates)
    assert [item["id"] for item in first] == np.argsort(-wanted[:, 0] * value, kind="stable").tolist()
    for item in first:
        close(list(item["score"].values()), wanted[item["id"]])
    keys = wanted[:, 0] * wanted[:, 1] ** 0.5 * value - 0.1
    by = ranked(shop, user=user, candidates=candidates, by="click * buy ** .5 * value - 0.1", top_k=7)
    assert [item["id"] for item in by] == np.argsort(-keys, kind="stable")[:7].tolist()
    close([item["by"] for item in by], np.sort(keys)[::-1][:7])
    least = float(np.sort(wanted[:, 1])[20])
    some = ranked(shop, user=user, candidates=candidates, min_score={"buy": least})
    assert len(some) == 20
    assert min(item["score"]["buy"] for item in some) >= np.float32(least)
    fixed = ranked(shop, user=user, candidates=candidates, by="buy", fixed=[{"position": 1, "id": 3}], top_k=2)
    assert (fixed[0]["id"], fixed[0]["fixed"]) == (3, True)
    close(fixed[0]["by"], wanted[3, 1])


def test_candidates_whose_order_is_undefined_come_last(shop: Served) -> None:
    candidates = [{"id": "a", "value": 0}, {"id": "b", "value": 2}, {"id": "c", "value": -1}]
    found = ranked(shop, candidates=candidates, by="log(value)")
    assert found[0]["id"] == "b"
    assert [item["by"] for item in found][1:] == [None, None]  # -inf and NaN


def test_a_history_is_one_feature(shop: Served, din: Model) -> None:
    facts = shop.http.post("/v1/explain", json={"rows": FEW[:1]}).json()
    parts = {part["feature"]: part for part in facts["contributions"]}
    assert set(parts) <= {"age", "n", "user", "tags", "ad", "past"}
    row = next(row for row in FEW if row["ads"])
    facts = shop.http.post("/v1/explain", json={"rows": [row]}).json()
    part = next(part for part in facts["contributions"] if part["feature"] == "past")
    assert part["value"] == {"ads": row["ads"], "users": row["users"]}
    without = {name: value for name, value in row.items() if name not in ("ads", "users")}
    both = din.scores([row, without]).astype(np.float64)
    close(list(part["contribution"].values()), both[0] - both[1])


def tensor(name: str, values: list[Any], shape: list[int] | None = None, kind: str = "BYTES") -> dict[str, Any]:
    return {"name": name, "datatype": kind, "shape": shape or [len(values)], "data": values}


def lengths(name: str, *counts: Any, kind: str = "INT64") -> dict[str, Any]:
    return tensor(f"{name}.lengths", list(counts), kind=kind)


def infer(shop: Served, *inputs: dict[str, Any], rows: int = 1) -> Any:
    """Send some inputs; those without a history are missing in every row."""
    none = [tensor(name, [""] * rows) for name in ("user", "tags", "ad")]
    none += [tensor(name, [None] * rows, kind="FP32") for name in ("age", "n")]
    given = {one["name"] for one in inputs}
    return shop.http.post(
        "/v2/models/din/infer", json={"inputs": [*inputs, *(n for n in none if n["name"] not in given)]}
    )


def test_events_one_after_another_or_padded(shop: Served, din: Model) -> None:
    wanted = din.scores([{"ads": ["a", "b"], "users": ["v1", ""]}, {}, {"ads": ["c"], "users": ["v2"]}])
    flat = infer(
        shop,
        tensor("ads", ["a", "b", "c"]),
        lengths("ads", 2, 0, 1),
        tensor("users", ["v1", "", "v2"]),
        lengths("users", 2, 0, 1),
        rows=3,
    )
    padded = infer(
        shop,
        tensor("ads", ["a", "b", "?", "?", "c", "?"], [3, 2]),
        lengths("ads", 2, 0, 1, kind="UINT32"),
        tensor("users", ["v1", "", "?", "?", "v2", "?"], [3, 2]),
        lengths("users", 2, 0, 1),
        rows=3,
    )
    for reply in (flat, padded):
        assert reply.status_code == 200, reply.text
        found = {item["name"]: item for item in reply.json()["outputs"]}
        assert found["score"]["shape"] == [3, 2]
        close(np.reshape(found["score"]["data"], (3, 2)), wanted)
        close(found["buy"]["data"], wanted[:, 1])
    arrays = {"ads": np.array(["a", "b", "c"]), "ads.lengths": np.array([2, 0, 1])}
    arrays |= {"users": np.array(["v1", "", "v2"]), "users.lengths": np.array([2, 0, 1])}
    arrays |= {"user": np.array([""] * 3), "tags": np.array([[""]] * 3), "ad": np.array([""] * 3)}
    arrays |= {name: np.full(3, np.nan, np.float32) for name in ("age", "n")}
    with Client(shop.url) as client:
        close(client.infer(arrays, ["click"]).outputs["click"], wanted[:, 0])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([tensor("ads", ["a"]), lengths("ads", 2)], "length of row 0 is 2"),
        ([tensor("ads", ["a"]), lengths("ads", -1, 2)], "length of row 0 is -1"),
        ([tensor("ads", ["a", "b"]), lengths("ads", 1)], "add up to 1, but there are 2"),
        ([tensor("ads", ["a"]), lengths("ads", 2**40)], "exceeds"),
        ([tensor("ads", ["a"]), lengths("ads", 2**63 - 1, 2**63 - 1, 2**63 - 1)], "exceeds"),
        ([tensor("ads", ["a"]), lengths("ads", 2**64)], "ads.lengths"),
        ([tensor("ads", ["a"]), lengths("ads", 1.5)], "ads.lengths"),
        ([tensor("ads", ["a"]), lengths("ads", "1", kind="BYTES")], "expected integers"),
        ([tensor("ads", ["a", "b"], [1, 2]), lengths("ads", 3)], "a row has 2 values"),
        ([tensor("ads", ["a", "b"], [1, 2]), lengths("ads", 1, 1)], "expected lengths of 1 rows, not 2"),
        ([tensor("ads", ["a"]), lengths("ads", 1)], "input 'users' is missing"),
        (
            [tensor("ads", ["a"]), lengths("ads", 1), tensor("users", ["a", "b"]), lengths("users", 2)],
            "one per event of ads",
        ),
        ([tensor("user", ["a"]), lengths("user", 1)], "no input 'user' with any number of values"),
        ([lengths("ads", 1)], "no input 'ads'"),
        ([tensor("ads", ["a"]), lengths("ads", *[0] * 3000)], "2,000|2000"),
        ([tensor("ads", [], [2**31, 0])], "rows"),
    ],
)
def test_wrong_lengths_are_refused(shop: Served, inputs: list[dict[str, Any]], message: str) -> None:
    reply = infer(shop, *inputs)
    assert reply.status_code == 400, reply.text
    assert any(part in reply.json()["error"] for part in message.split("|")), reply.text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"ads": ["a"], "users": []}, "expected 1 values, one per event of ads, found 0"),
        ({"ads": ["a", "b"]}, "expected 2 values, one per event of ads, found 0"),
        ({"ads": [["a"]], "users": [["b"]]}, "ads"),
        ({"ads": {"a": {"b": 1}}, "users": {"a": 1}}, "ads"),
        ({"ads": [{}], "users": [1]}, "ads"),
    ],
)
def test_wrong_histories_are_refused(shop: Served, row: dict[str, Any], message: str) -> None:
    for path, body in (("/v1/predict", {"rows": [{}, row]}), ("/v1/rank", {"user": row, "candidates": [{"id": 1}]})):
        reply = shop.http.post(path, json=body)
        assert reply.status_code == 400, reply.text
        assert message in reply.json()["error"]


def test_deep_nesting_is_refused(shop: Served) -> None:
    body = b'{"rows":[{"ads":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}"
    reply = shop.http.post("/v1/predict", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400


def test_long_histories_are_cut_and_cost_little(shop: Served, din: Model) -> None:
    """100,000 events of a user, of which the schema keeps 5; and 2,000 rows."""
    many = [f"v{i % 40}" for i in range(100_000)]
    user = {"ads": many, "users": many}
    (item,) = ranked(shop, user=user, candidates=[{"id": 1, "ad": "v1"}])
    close(list(item["score"].values()), din.scores([{"ad": "v1", "ads": many[-5:], "users": many[-5:]}])[0])
    reply = shop.http.post("/v1/predict", json={"rows": [{"ads": ["v1"] * 9, "users": ["v2"] * 9}] * 2000})
    assert len(set(reply.json()["scores"]["buy"])) == 1


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("clik", "did you mean click"),
        ("click *", "position 8"),
        ("__import__('os')", "unknown function"),
        ("1" * 1001, "limit"),
    ],
)
def test_expressions_are_checked(shop: Served, by: str, message: str) -> None:
    reply = shop.http.post("/v1/rank", json={"candidates": [{"id": 1}], "by": by})
    assert reply.status_code == 400
    assert message in reply.json()["error"]
    reply = shop.http.post("/v1/rank", json={"candidates": [{"id": 1}], "min_score": {"bye": 1}})
    assert (reply.status_code, "no label 'bye'" in reply.json()["error"]) == (400, True)


def test_the_page_and_the_description_know_them(shop: Served, browser: Any) -> None:
    from playwright.sync_api import expect

    example = shop.http.get("/v1/example").json()
    assert {one["name"]: one.get("slot") for one in example["inputs"]}["users"] == "user"
    document = shop.http.get("/openapi.json").json()
    for path in ("/v1/predict", "/v1/explain", "/v1/rank"):
        asked = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
        assert shop.http.post(path, json=asked).status_code == 200
    page = browser.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(shop.url)
    expect(page.locator("#onescore")).to_contain_text("buy 0.")
    page.fill("#rows", '{"ads": ["v1", "v2"], "users": ["v3", "v4"], "ad": "v1"}')
    page.click("#score")
    expect(page.locator("#scores tbody")).to_contain_text("buy 0.")
    page.click("#scores button >> nth=0")
    expect(page.locator("#parts tbody")).to_contain_text("ads: v1|v2; users: v3|v4")
    page.click("#rank")
    expect(page.locator("#status")).to_contain_text("ranked")
    page.close()
    assert not problems
