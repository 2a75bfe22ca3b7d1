"""The page for people in a real Chromium, and the interface fuzzed against its own description."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from served import Model, Served, features


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.fail("Chromium is not installed: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield made
    made.quit()


def test_people_score_rank_and_ask_why(browser: Any, served: Served, model: Model, tmp_path: Path) -> None:
    wait = WebDriverWait(browser, 20)
    browser.get(served.url)
    wait.until(lambda page: page.find_element(By.ID, "sequence").text == "1")
    rows = features(80, 4)
    expected = model.scores(rows)

    def cells() -> list[list[str]]:
        # In one go: the page draws the table anew while it scores.
        found: list[list[str]] = browser.execute_script(
            "return [...document.querySelectorAll('#scores tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
        )
        return found

    box = browser.find_element(By.ID, "rows")
    box.send_keys("\n".join(json.dumps(row) for row in rows))
    browser.find_element(By.ID, "score").click()
    wait.until(lambda page: len(cells()) == 4)
    np.testing.assert_allclose([float(row[1]) for row in cells()], expected, atol=1e-6)
    browser.find_element(By.CSS_SELECTOR, "#scores button").click()
    wait.until(lambda page: page.find_elements(By.CSS_SELECTOR, "#parts tbody tr"))
    assert "Contributions to row 1" in browser.find_element(By.ID, "whyhead").text
    browser.find_element(By.ID, "rank").click()
    wait.until(lambda page: "ranked" in page.find_element(By.ID, "said").text)
    best = (np.argsort(-expected, kind="stable") + 1).tolist()
    assert [int(row[0]) for row in cells()] == best

    lines = tmp_path / "rows.tsv"
    lines.write_text("age\tn\tuser\ttags\tad\n3\t1\tv1\tv2|v3\tv4\n\t2\tv9\t\tv5\n")
    browser.find_element(By.ID, "file").send_keys(str(lines))
    wait.until(lambda page: len(cells()) == 2)
    wanted = model.scores(
        [
            {"age": 3.0, "n": 1.0, "user": "v1", "tags": ["v2", "v3"], "ad": "v4"},
            {"n": 2.0, "user": "v9", "tags": [], "ad": "v5"},
        ]
    )
    np.testing.assert_allclose([float(row[1]) for row in cells()], wanted, atol=1e-6)

    box.clear()
    box.send_keys("1,2")
    browser.find_element(By.ID, "score").click()
    wait.until(lambda page: "5 inputs" in page.find_element(By.ID, "said").text)
    assert not [
        line for line in browser.get_log("browser") if line["level"] == "SEVERE" and "favicon" not in line["message"]
    ]
    for control in browser.find_elements(By.CSS_SELECTOR, "textarea, input, button"):
        assert control.accessible_name  # somebody who hears the page knows what it is
    browser.get(f"{served.url}/docs")
    wait.until(lambda page: "/v1/rank" in page.find_element(By.ID, "all").text)


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
            max_examples=12,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        )
        @given(operation.as_strategy())
        def ask(case: Any) -> None:
            case.call_and_validate(checks=checks, timeout=20)

        ask()
    assert "/v1/predict" in seen
    assert len(seen) >= 15
    assert not served.said
