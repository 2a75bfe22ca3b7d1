"""The plain routes: the same scores as offline, refusals by name, ranking."""

import gzip
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clickfleet.training import export
from served import Model, Served, features, running, until


def close(a: Any, b: Any) -> bool:
    return np.allclose(a, b, rtol=0, atol=1e-6)


def test_serving_needs_no_torch() -> None:
    code = (
        "import sys, clickfleet.serve.server, clickfleet.serve.grpc, clickfleet.serve.updater, clickfleet.serve.supervisor\n"
        "print([name for name in ('torch', 'pandas', 'onnx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_scores_are_those_of_the_model(served: Served, model: Model) -> None:
    rows = features(50, 40)
    reply = served.http.post("/v1/predict", json={"rows": rows}).json()
    assert close(reply["scores"], model.scores(rows))
    assert reply["sequence"] == 1
    assert reply["server_ms"] >= 0
    one = served.http.post("/v1/predict", json={"rows": rows[:1], "outputs": ["logit"]}).json()
    assert close(1 / (1 + np.exp(-np.array(one["outputs"]["logit"]))), one["scores"])


def test_what_comes_as_text_or_number_has_one_key(served: Served, model: Model) -> None:
    a, b = ({"user": value, "tags": [value], "ad": "v1", "age": 3} for value in (17, "17"))
    assert np.ptp(served.http.post("/v1/predict", json={"rows": [a, b]}).json()["scores"]) == 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"usr": 1}, "no input 'usr'"),
        ({"label": 1}, "no input 'label'"),
        ({"age": "old"}, "row 0: age: expected a number"),
        ({"age": [1, 2]}, "row 0: age: expected one number"),
        ({"age": 1e300, "n": 1e300}, "n: the number is out of range"),
        ({"user": 1.5}, "row 0: user: expected text or integers"),
        ({"user": ["a", "b"]}, "user: expected one value, found several"),
        ({"user": {"a": "b"}}, "the weight of a value must be a number"),
        ({"user": [["a"]]}, "user: expected text or integers"),
        (7, "expected a mapping"),
    ],
)
def test_rows_are_refused_by_name(served: Served, row: Any, message: str) -> None:
    reply = served.http.post("/v1/predict", json={"rows": [row]})
    assert reply.status_code == 400
    assert message in reply.json()["error"]


def test_requests_that_are_none(served: Served) -> None:
    http = served.http
    for body in (b"", b"{", b"[]", b'{"rows": 1}', b'{"rows": []}', b'{"rows": [{}], "more": 1}', b"\xff\xfe"):
        assert http.post("/v1/predict", content=body).status_code == 400
    assert http.post("/v1/predict", json={"rows": [{}], "outputs": ["x"]}).status_code == 400
    assert "outputs: score, logit" in http.post("/v1/predict", json={"rows": [{}], "outputs": ["x"]}).json()["error"]
    assert http.post("/v1/predict", json={"rows": [{}] * 2001}).status_code == 400
    assert http.post("/v1/predict", content=b" " * (2 << 20)).status_code == 413
    assert http.get("/v1/predict").status_code == 405
    assert http.post("/health").status_code == 405
    assert http.get("/../../etc/passwd").status_code == 404
    assert http.get("/v2/models/other").status_code == 404


def test_packed_bodies(served: Served, model: Model) -> None:
    import orjson

    rows = features(51, 3)
    body = orjson.dumps({"rows": rows})
    reply = served.http.post("/v1/predict", content=gzip.compress(body), headers={"content-encoding": "gzip"})
    assert close(reply.json()["scores"], model.scores(rows))
    bomb = gzip.compress(b"0" * (64 << 20))
    assert served.http.post("/v1/predict", content=bomb, headers={"content-encoding": "gzip"}).status_code == 413
    assert served.http.post("/v1/predict", content=body, headers={"content-encoding": "gzip"}).status_code == 400
    assert served.http.post("/v1/predict", content=body[:9], headers={"content-encoding": "br"}).status_code == 415


def test_ranking(served: Served, model: Model) -> None:
    user = {"user": "v3", "age": 30, "tags": ["v1", "v2"]}
    ads = [f"v{i}" for i in range(12)]
    scores = dict(zip(ads, model.scores([{**user, "ad": ad, "n": 2.0} for ad in ads]), strict=True))
    candidates = [{"id": ad, "ad": ad, "n": 2.0} for ad in ads]

    def rank(**more: Any) -> Any:
        reply = served.http.post("/v1/rank", json={"user": user, "candidates": candidates, **more})
        assert reply.status_code == 200, reply.text
        return reply.json()

    best = sorted(ads, key=lambda ad: -scores[ad])
    found = rank()
    assert [item["id"] for item in found["ranked"]] == best
    assert close([item["score"] for item in found["ranked"]], [scores[ad] for ad in best])
    assert [item["id"] for item in rank(top_k=3)["ranked"]] == best[:3]
    assert [item["id"] for item in rank(exclude=[best[0]])["ranked"]] == best[1:]
    assert rank(exclude=[best[0]])["excluded"] == 1
    middle = float(np.median(list(scores.values())))
    assert {item["id"] for item in rank(min_score=middle)["ranked"]} == {a for a in ads if scores[a] >= middle}
    candidates += [candidates[0]]
    assert rank()["repeated"] == 1
    assert len(rank()["ranked"]) == 12
    candidates.pop()
    placed = rank(fixed=[{"position": 2, "id": "promo"}, {"position": 1, "id": best[5]}], top_k=4)["ranked"]
    assert [item["id"] for item in placed] == [best[5], "promo", best[0], best[1]]
    assert placed[1]["score"] is None
    for ad in candidates:
        ad["value"] = 100.0 if ad["id"] == best[-1] else 1.0
    assert rank()["ranked"][0]["id"] == best[-1]
    for wrong in (
        {"top_k": 0},
        {"candidates": [{"ad": "v1"}]},
        {"candidates": [{"id": 1, "user": "v1"}]},
        {"user": {"x": 1}},
    ):
        assert served.http.post("/v1/rank", json={"user": user, "candidates": candidates, **wrong}).status_code == 400
    assert rank(candidates=[])["ranked"] == []


def test_contributions_are_what_leaving_out_takes_away(served: Served, model: Model) -> None:
    row = {"user": "v3", "age": 30, "ad": "v5", "tags": ["v1"]}
    reply = served.http.post("/v1/explain", json={"rows": [row]}).json()
    whole = model.scores([row])[0]
    for item in reply["contributions"]:
        rest = {k: v for k, v in row.items() if k != item["feature"]}
        assert close(item["contribution"], whole - model.scores([rest])[0])
    assert len(reply["contributions"]) == 4


def test_what_is_served(served: Served) -> None:
    found = served.http.get("/v1/model").json()
    assert (found["sequence"], found["lag"], found["problem"]) == (1, 0, None)
    assert [item["name"] for item in found["inputs"]] == ["age", "n", "user", "tags", "ad"]
    assert served.http.get("/ready").status_code == served.http.get("/health").status_code == 200
    served.http.post("/v1/predict", json={"rows": [{}]})
    text = served.http.get("/metrics").text
    assert 'clickfleet_replies_total{route="/v1/predict",status="200"}' in text
    assert "clickfleet_model_sequence 1.0" in text
    assert served.http.get("/v1/stats").json()["workers"] == 1


def test_deadlines(served: Served) -> None:
    reply = served.http.post("/v1/predict", json={"rows": [{}]}, headers={"x-timeout-ms": "0.0001"})
    assert reply.status_code == 504
    assert served.http.post("/v1/predict", json={"rows": [{}]}, headers={"x-timeout-ms": "x"}).status_code == 400


def test_uploads(served: Served, model: Model) -> None:
    rows = features(60, 13)
    text = ""
    for row in rows:
        tokens = [f"{name}:{row[name]}" for name in ("age", "n", "user", "ad") if name in row]
        text += " ".join([*tokens, *(f"tags:{tag}" for tag in row["tags"])]) + "\n"
    files = {"file": ("../../name.txt", text.encode())}
    flat = served.http.post("/upload", params={"user_id": "11"}, files=files).json()
    assert (flat["code"], flat["dtype"], flat["user_id"]) == (200, "float32", "11")
    assert close(np.array(flat["data"])[:, 0], model.scores(rows))
    whole = served.http.post("/upload", params={"user_id": "11", "full": "True", "save": "true"}, files=files).json()
    assert [len(part) for part in whole["data"]] == [5, 5, 3]
    (kept,) = Path(served.fleet.settings.upload_dir or "").iterdir()
    assert kept.read_text() == text
    assert "name" not in kept.name
    assert served.http.post("/upload", files=files).status_code == 400
    assert served.http.post("/upload", params={"user_id": "11"}).status_code in (400, 411)
    assert served.http.post("/upload", params={"user_id": "1", "re_model": "redis"}, files=files).status_code == 400
    for size in ("0", "100001", "9" * 5000, "²"):
        reply = served.http.post("/upload", params={"user_id": "1", "batch_size": size}, files=files)
        assert (reply.status_code, reply.json()["error"][:10]) == (400, "batch_size")
    bad = {"file": ("a", b"age:old user:1\n")}
    reply = served.http.post("/upload", params={"user_id": "1"}, files=bad)
    assert reply.status_code == 400
    assert "line 1" in reply.json()["error"]
    assert served.http.get("/upload").status_code == 405


def test_feed_and_fetch(served: Served, model: Model) -> None:
    rows = [
        {"age": 3.0, "n": 1.0, "user": "v1", "tags": ["v2"], "ad": "v3"},
        {"age": 1, "user": "9", "tags": [], "ad": "v"},
    ]
    feed = {name: [row.get(name) for row in rows] for name in ("age", "n", "user", "tags", "ad")}
    reply = served.http.post("/rec/prediction", json={"feed": [feed], "fetch": ["score"]})
    assert close(np.array(reply.json()["result"]["score"])[:, 0], model.scores(rows))
    assert float(reply.headers["server-timing"].removeprefix("total;dur=")) > 0
    for wrong in (
        {"feed": [feed]},
        {"fetch": ["score"]},
        {"feed": [feed], "fetch": ["x"]},
        {"feed": [{"user": 1}], "fetch": ["score"]},
    ):
        assert served.http.post("/rec/prediction", json=wrong).status_code == 400
    assert served.http.post("/rec/prediction", content=b"no").status_code == 400


def test_tokens_tls_and_admin_are_asked_for(artifact: Path, tmp_path: Path) -> None:
    tokens, admin = tmp_path / "tokens", tmp_path / "admin"
    tokens.write_text("one  # ours\n")
    admin.write_text("boss\n")
    with running(artifact, tmp_path / "state", token_file=str(tokens), admin_token_file=str(admin)) as served:
        http = served.http
        assert http.get("/health").status_code == 200
        assert http.post("/v1/predict", json={"rows": [{}]}).status_code == 401
        assert http.get("/openapi.json").status_code == 401
        mine = {"authorization": "Bearer one"}
        assert http.post("/v1/predict", json={"rows": [{}]}, headers=mine).status_code == 200
        assert http.post("/admin/follow", headers=mine).status_code == 401
        assert (
            http.post("/admin/follow", headers={"authorization": "Bearer boss"}).status_code == 409
        )  # one entry, no log
        tokens.write_text("two\n")
        until(lambda: http.get("/v1/model", headers=mine).status_code == 401)
        assert http.get("/v1/model", headers={"authorization": "Bearer two"}).status_code == 200


def test_pruned_artifacts_say_what_they_take(model: Model, tmp_path: Path) -> None:
    from clickfleet.serve.predictor import open_version
    from clickfleet.store.published import Entry

    export.export(model.learner, tmp_path / "some", 6, ["age", "user"], ["logit"])
    version = open_version(Entry(tmp_path / "some"))
    assert version.fields.names == ["age", "user"]
    assert list(version.run(version.fields.rows([{"age": 3, "user": "v1"}]))) == ["logit"]
