"""What people see of a model trained on their own log: an example row, fields, contributions, and the interface with its features."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import expect

import clickfleet
from clickfleet.cli import build
from clickfleet.cli.frame import run as command
from clickfleet.data.schema import Dense, Schema, Slot, write_schema
from clickfleet.errors import ServeError
from clickfleet.serve.client import Client
from clickfleet.training.model import SavedModel, load
from clickfleet.workbench.explain import explain
from served import WAIT_S, Publication, Served, features, running, until

SHOPS = ("<script>window.pwned=1</script>", 'a "quoted", shop', "小店", "<img src=x onerror=window.pwned=1>", "x&y")
SLOTS = (Slot("shop"), Slot("user"), Slot("<b>odd</b>"), Slot("tags", multi=True))


def rows(n: int = 400) -> list[dict[str, Any]]:
    rng = np.random.default_rng(3)
    return [
        {
            "clicked": int(rng.random() < 0.2 + 0.15 * (i % 5)),
            "shop": SHOPS[i % 5],
            "user": f"user-{rng.integers(30)}",
            "<b>odd</b>": "yes" if i % 3 else "no",
            "tags": "|".join(f"t{t}" for t in rng.integers(0, 6, i % 3)),
            "age": int(rng.integers(18, 90)),
        }
        for i in range(n)
    ]


def trained(folder: Path, dense: bool, **run: Any) -> Path:
    """Train on a stranger's csv file and export the model; return the artifact."""
    data = rows()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(data[0]))
        writer.writeheader()
        writer.writerows(data)
    schema = Schema(dense=(Dense("age"),) if dense else (), slots=SLOTS, label="clicked")
    write_schema(schema, folder / "schema.yaml")
    config = {
        "model": "fm",
        "data": {
            "train": str(folder / "log.csv"),
            "schema": str(folder / "schema.yaml"),
            "format": "csv",
            "batch_size": 50,
        },
        "run": {"dir": str(folder / "run"), "report": False, **run},
    }
    clickfleet.train(config, quiet=True)
    assert command(build(), ["export", str(folder / "run"), str(folder / "artifact")]) == 0
    return folder / "artifact"


@pytest.fixture(scope="module", params=[True, False], ids=["dense", "slots only"])
def shop(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, SavedModel]]:
    folder = tmp_path_factory.mktemp("shop")
    artifact = trained(folder, request.param)
    with running(artifact, folder / "state", max_rows=200) as served:
        yield served, load(folder / "run")


def opened(browser: Any, url: str) -> tuple[Any, list[str]]:
    page = browser.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(url)
    return page, problems


def test_the_example_is_a_row_of_known_values(shop: tuple[Served, SavedModel]) -> None:
    served, _ = shop
    found = served.http.get("/v1/example").json()
    example, inputs = found["example"], {one["name"]: one for one in found["inputs"]}
    assert set(example) == set(inputs)
    assert example["shop"] in SHOPS
    assert example["user"].startswith("user-")
    assert set(inputs["shop"]["frequent"]) == set(SHOPS)
    if "age" in inputs:
        assert 18 <= inputs["age"]["low"] < example["age"] < inputs["age"]["high"] <= 90
        assert inputs["age"]["whole"]
    assert served.http.post("/v1/predict", json={"rows": [example]}).status_code == 200


def test_people_see_an_example_and_change_it(browser: Any, shop: tuple[Served, SavedModel]) -> None:
    served, model = shop
    example = served.http.get("/v1/example").json()["example"]
    page, problems = opened(browser, served.url)

    def shows(row: dict[str, Any]) -> None:
        """Its score is on the page, rounded there; both are right that round to different digits."""
        close = "wanted => Math.abs(parseFloat(document.querySelector('#onescore').textContent) - wanted) < 2e-6"
        page.wait_for_function(close, arg=explain(model, row)["score"], timeout=1e3 * WAIT_S)

    shows(example)
    bars = page.locator("#bars tbody tr")
    expect(bars).to_have_count(len([value for value in example.values() if value not in ("", [])]))
    page.get_by_label("shop", exact=True).fill("小店")
    shows({**example, "shop": "小店"})
    expect(bars.filter(has_text="小店")).to_have_count(1)
    changed = {**example, "shop": SHOPS[0]}
    page.get_by_label("shop", exact=True).fill(SHOPS[0])
    shows(changed)
    if "age" in example:
        slider = page.locator("#fields input[type=range]")
        expect(slider).to_have_count(1)
        slider.fill("40")
        shows({**changed, "age": 40})
        assert page.get_by_label("age", exact=True).input_value() == "40"
    page.locator("#live").uncheck()
    page.get_by_label("tags").fill("t1|t2")
    page.click("#scoreone")
    latest = {**changed, "tags": ["t1", "t2"], **({"age": 40} if "age" in example else {})}
    shows(latest)
    parts = {part["field"]: part["contribution"] for part in explain(model, latest)["contributions"]}
    for name, _, _, number in page.evaluate(
        "[...document.querySelectorAll('#bars tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    ):
        assert float(number) == pytest.approx(parts[name], abs=1e-5)
    page.click("#reset")
    shows(example)
    assert page.evaluate("window.pwned") is None  # values of the log are text, never code
    for control in page.query_selector_all("textarea, input, button"):
        named = "e => e.getAttribute('aria-label') || e.innerText.trim() || [...(e.labels || [])].map(l => l.innerText).join('')"
        assert page.evaluate(named, control)
    assert problems == []
    page.close()


def test_the_interface_names_the_features_and_can_be_tried(browser: Any, shop: tuple[Served, SavedModel]) -> None:
    served, model = shop
    document = served.http.get("/openapi.json").json()
    body = document["paths"]["/v1/predict"]["post"]["requestBody"]["content"]["application/json"]
    assert set(body["schema"]["properties"]["rows"]["items"]["properties"]) == {
        one["name"] for one in served.http.get("/v1/example").json()["inputs"]
    }
    for path in ("/v1/predict", "/v1/explain", "/v1/rank"):
        example = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
        assert served.http.post(path, json=example).status_code == 200
    page, problems = opened(browser, f"{served.url}/docs")
    page.get_by_label("Send POST /v1/predict").click()
    reply = page.locator("section:has(h2:has-text('/v1/predict')) pre[aria-live]")
    expect(reply).to_contain_text("200")
    expect(reply).to_contain_text(f"{explain(model, body['example']['rows'][0])['score']:.8f}"[:6])
    page.get_by_label("body of /v1/predict").fill('{"rows": [{"nonsense": 1}]}')
    page.get_by_label("Send POST /v1/predict").click()
    expect(reply).to_contain_text("400")
    page.locator("section:has(h2:has-text('/v1/predict')) summary >> nth=0").click()
    expect(page.locator("section:has(h2:has-text('/v1/predict')) table")).to_contain_text(SHOPS[0])
    assert page.evaluate("window.pwned") is None
    assert [text for text in problems if "status of 400" not in text] == []
    page.close()


def test_several_rows_are_explained_as_the_workbench_does(shop: tuple[Served, SavedModel]) -> None:
    served, model = shop
    schema = {*served.http.get("/v1/example").json()["example"]}
    asked = [{k: v.split("|") if k == "tags" else v for k, v in row.items() if k in schema} for row in rows(20)]
    with Client(served.url) as client:
        found, scores = client.explain(asked), client.predict(asked)
        assert len(found) == 20
        for row, facts, score in zip(asked, found, scores, strict=True):
            wanted = explain(model, row)
            # Another batch, another rounding: of products of ages, which are thousands.
            assert facts["score"] == pytest.approx(wanted["score"], abs=5e-6)
            assert facts["score"] == pytest.approx(float(score), abs=5e-6)
            parts = {part["field"]: part for part in wanted["contributions"]}
            for part in facts["contributions"]:
                assert part["contribution"] == pytest.approx(parts[part["feature"]]["contribution"], abs=1e-5)
                assert part["logit"] == pytest.approx(parts[part["feature"]]["logit"], abs=4e-5)
                assert part["value"] == row[part["feature"]]
        single = served.http.post("/v1/explain", json={"rows": asked[:1]}).json()
        assert {k: single[k] for k in ("score", "logit", "contributions")} == single["explanations"][0]
        with pytest.raises(ServeError, match="limit of 200 rows"):
            client.explain(asked * 5)
        with pytest.raises(ServeError, match="exceed"):
            client.explain(asked * 50)
        with pytest.raises(ServeError, match="no rows"):
            client.explain([])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'{"rows": {}}',
        b'{"rows": [1, null, "x"]}',
        b'{"rows": [{"shop": {"a": {"b": {}}}}]}',
        b'{"rows": [{"shop": true, "nope": 1}]}',
        b'{"rows": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"rows": [{"tags": ' + json.dumps(["t"] * 200_000).encode() + b', "shop": [["x"]]}]}',
        b'{"rows": [{"shop": "\\ud800"}]}',
    ],
)
def test_hostile_requests_are_refused(shop: tuple[Served, SavedModel], body: bytes) -> None:
    served, _ = shop
    reply = served.http.post("/v1/explain", content=body)
    assert 400 <= reply.status_code < 500, reply.text
    assert reply.json()["error"]
    assert not served.said


def test_pages_ask_for_the_token(browser: Any, tmp_path: Path) -> None:
    artifact = trained(tmp_path, dense=True)
    (tmp_path / "tokens").write_text("secret\n")
    with running(artifact, tmp_path / "state", token_file=str(tmp_path / "tokens")) as served:
        for path in ("/v1/example", "/openapi.json"):
            assert httpx.get(served.url + path, timeout=WAIT_S).status_code == 401
        page, _ = opened(browser, served.url)
        expect(page.locator("#status")).to_contain_text("requires a bearer token")
        page.fill("#token", "secret")
        expect(page.locator("#onescore")).to_contain_text("0.")
        expect(page.locator("#status")).to_have_text("")
        page.goto(f"{served.url}/docs")
        expect(page.locator("#status")).to_contain_text("token")
        page.fill("#token", "secret")
        page.get_by_label("Send POST /v1/explain").click()
        expect(page.locator("section:has(h2:has-text('/v1/explain')) pre[aria-live]")).to_contain_text("200")
        page.close()


def test_a_model_without_names_still_has_a_form(browser: Any, served: Served, tmp_path: Path) -> None:
    found = served.http.get("/v1/example").json()
    assert {"age", "n"} <= set(found["example"])
    assert all("frequent" not in one for one in found["inputs"])
    page, problems = opened(browser, served.url)
    expect(page.locator("#onescore")).to_contain_text("0.")
    assert problems == []
    page.close()
    artifact = trained(tmp_path, dense=True, names=False)
    assert not (tmp_path / "run" / "names.json").exists()
    for file in artifact.iterdir():
        assert "小店".encode() not in file.read_bytes()  # no raw value leaves the run


def test_a_delta_is_served_with_the_names_of_its_base(tmp_path: Path) -> None:
    from clickfleet.data.memory import Feed
    from clickfleet.data.names import collect

    log = Publication(tmp_path / "published")
    log.publisher.names = lambda: collect(Feed([{"label": 0, **row} for row in features(1)], log.model.schema))
    log.publish("base")
    log.publish("delta")
    with running(tmp_path / "published", tmp_path / "state") as served:
        until(lambda: served.http.get("/v1/model").json()["sequence"] == 2)
        assert served.http.get("/v1/example").json()["example"]["user"].startswith("v")
