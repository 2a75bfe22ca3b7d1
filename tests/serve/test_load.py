"""Overload is refused at once, TLS covers both protocols, versions without a score say so."""

import shutil
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.errors import ServeError
from clickfleet.serve import protobuf
from clickfleet.serve.client import Client
from served import WAIT_S, Model, features, running


def test_a_full_queue_answers_503_and_says_when_to_come_again(artifact: Path, model: Model, tmp_path: Path) -> None:
    rows = features(3, 50)
    expected = model.scores(rows)
    replies: list[httpx.Response] = []
    with running(artifact, tmp_path / "state", max_queue_ms=0.001) as served:

        def ask() -> None:
            with httpx.Client(base_url=served.url, timeout=WAIT_S) as client:
                replies.extend(client.post("/v1/predict", json={"rows": rows}) for _ in range(60))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        metrics = served.http.get("/metrics").text
    statuses = {reply.status_code for reply in replies}
    assert statuses == {200, 503}
    for reply in replies:
        if reply.status_code == 503:
            assert int(reply.headers["retry-after"]) >= 1
        else:
            np.testing.assert_allclose(reply.json()["scores"], expected, rtol=0, atol=1e-6)
    refused = sum(reply.status_code == 503 for reply in replies)
    assert f"clickfleet_refused_total {float(refused)}" in metrics


def test_tls(artifact: Path, model: Model, tmp_path: Path) -> None:
    certificate, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-keyout",
            key,
            "-out",
            certificate,
            *subject,
        ],
        check=True,
        capture_output=True,
    )
    rows = features(4, 5)
    files = {"tls_cert": certificate, "tls_key": key}
    with running(artifact, tmp_path / "state", grpc_port=0, header_timeout_s=1.0, **files) as served:
        for port in (served.fleet.settings.port, served.fleet.settings.grpc_port):
            with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as silent:
                assert silent.recv(1) == b""  # no handshake: closed
        assert served.url.startswith("https://")
        with Client(served.url, certificate=certificate) as client:
            np.testing.assert_allclose(client.predict(rows), model.scores(rows), rtol=0, atol=1e-6)
        with Client(served.url) as client, pytest.raises(ServeError, match="certificate"):
            client.model()
        trusted = grpc.ssl_channel_credentials(Path(certificate).read_bytes())
        with grpc.secure_channel(served.grpc, trusted) as channel:
            live = channel.unary_unary(f"/{protobuf.SERVICE}/ServerLive")(b"", timeout=WAIT_S)
            assert protobuf.message("ServerLiveResponse").FromString(live).live


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "0", "--tls-cert", "cert.pem"], "TLS needs both"),
        (["--port", "0", "--token-file", "nowhere"], "cannot read"),
        (["--port", "0", "--host", "203.0.113.7"], "cannot listen on"),
    ],
)
def test_a_server_that_cannot_start_says_why(artifact: Path, capfd: Any, options: list[str], message: str) -> None:
    assert run(build(), ["serve", str(artifact), *options]) == 1
    assert message in capfd.readouterr().err


def test_what_is_no_artifact_is_not_served(tmp_path: Path, artifact: Path, capfd: Any) -> None:
    assert run(build(), ["serve", str(tmp_path)]) == 1
    assert "clickfleet export" in capfd.readouterr().err
    broken = tmp_path / "broken"
    shutil.copytree(artifact, broken)
    content = bytearray((broken / "rows.arrow").read_bytes())
    content[len(content) // 2] ^= 1
    (broken / "rows.arrow").write_bytes(content)
    tokens = tmp_path / "tokens"
    tokens.write_text("one\n")
    tokens.chmod(0o644)
    assert run(build(), ["serve", str(broken), "--port", "0", "--grpc-port", "-1", "--token-file", str(tokens)]) == 1
    said = capfd.readouterr()
    assert "its checksum does not match" in said.err
    assert f"warning: other users can read {tokens} (mode 644); chmod 600 {tokens}" in said.out
