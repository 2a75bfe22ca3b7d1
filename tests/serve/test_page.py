"""The page for people in a real Chromium, and the interface fuzzed against its own description."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from playwright.sync_api import expect

from clickfleet.serve.admin import openapi_json
from served import WAIT_S, Model, Served, features

NAME_OF = """e => e.getAttribute('aria-label') || e.getAttribute('title') || e.innerText.trim()
  || [...(e.labels || [])].map(l => l.innerText.trim()).join('') || e.getAttribute('placeholder')"""
"""What a control is called."""


def test_people_score_rank_and_ask_why(browser: Any, served: Served, model: Model, tmp_path: Path) -> None:
    page = browser.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(served.url)
    expect(page.locator("#sequence")).to_have_text("1")
    rows = features(80, 4)
    expected = model.scores(rows)

    def cells(count: int) -> list[list[str]]:
        expect(page.locator("#scores tbody tr")).to_have_count(count)
        # In one go: the page draws the table anew while it scores.
        found: list[list[str]] = page.evaluate(
            "[...document.querySelectorAll('#scores tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
        )
        return found

    def said(text: str) -> None:
        expect(page.locator("#status")).to_contain_text(text)

    page.fill("#rows", "\n".join(json.dumps(row) for row in rows))
    page.click("#score")
    np.testing.assert_allclose([float(row[1]) for row in cells(4)], expected, atol=1e-6)
    page.click("#scores button >> nth=0")
    page.wait_for_selector("#parts tbody tr")
    assert "Contributions to row 1" in page.inner_text("#whyhead")
    page.click("#rank")
    said("ranked")
    best = (np.argsort(-expected, kind="stable") + 1).tolist()
    assert [int(row[0]) for row in cells(4)] == best

    lines = tmp_path / "rows.tsv"
    lines.write_text("age\tn\tuser\ttags\tad\n3\t1\tv1\tv2|v3\tv4\n\t2\tv9\t\tv5\n")
    page.set_input_files("#file", lines)
    wanted = model.scores(
        [
            {"age": 3.0, "n": 1.0, "user": "v1", "tags": ["v2", "v3"], "ad": "v4"},
            {"n": 2.0, "user": "v9", "tags": [], "ad": "v5"},
        ]
    )
    np.testing.assert_allclose([float(row[1]) for row in cells(2)], wanted, atol=1e-6)

    page.fill("#rows", "1,2")
    page.click("#score")
    said("5 inputs")
    assert [text for text in problems if "status of 4" not in text] == []  # the refusal of "1,2" is meant
    for control in page.query_selector_all("textarea, input, button"):
        described = page.evaluate(NAME_OF, control)
        assert described  # somebody who hears the page knows what it is
    page.goto(f"{served.url}/docs")
    expect(page.locator("#all")).to_contain_text("/v1/rank")
    page.close()


def test_the_description_differs_only_in_the_name_of_the_model() -> None:
    """Everything else is data; `x-shared` holds parts that the paths include."""
    one, other = (json.loads(openapi_json(name)) for name in ("deepfm", "an other/{name}"))
    assert json.loads(json.dumps(one).replace("deepfm", "an other/{name}")) == other
    assert set(one) == {"openapi", "info", "components", "security", "paths"}
    assert "/v2/models/deepfm/infer" in one["paths"]
    for path, item in one["paths"].items():
        for operation in item.values():
            assert {"200", "400", "401", "405", "503", "504"} <= set(operation["responses"]), path


def test_the_interface_is_what_it_says(served: Served) -> None:
    """Requests made from the description, right and wrong ones: no failure, no status or body it does not name."""
    description = served.http.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(description)
    schema.config.update(base_url=served.url)
    checks = [
        schemathesis.checks.CHECKS.get_one(name)
        for name in (
            "not_a_server_error",
            "status_code_conformance",
            "content_type_conformance",
            "response_schema_conformance",
        )
    ]
    seen = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        seen.add(operation.path)

        @settings(
            max_examples=1000 if os.environ.get("CLICKFLEET_SOAK") else 12,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        )
        @given(operation.as_strategy())
        def ask(case: Any) -> None:
            case.call_and_validate(checks=checks, timeout=WAIT_S)

        ask()
    assert "/v1/predict" in seen
    assert len(seen) >= 15
    assert not served.said


def test_a_server_alone_has_no_loop(served: Served) -> None:
    reply = served.http.get("/v1/loop")
    assert reply.status_code == 404
    assert "clickfleet loop" in reply.json()["error"]
