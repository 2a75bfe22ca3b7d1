"""How a server is set up: made by the command line, handed to its processes as JSON."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clickfleet.engine import Engine

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Settings:
    model: str
    """A published entry, or a folder with a published log."""
    state: str
    """A folder of the server's own: which version is served, merged layers, counters."""
    host: str = "127.0.0.1"
    port: int = 8080
    grpc_port: int | None = 8081
    workers: int = 1
    rows: str = "mapped"
    """mapped, memory, or the URL of a Redis."""
    name: str | None = None
    engine: Engine = Engine()  # noqa: RUF009  (frozen)
    batching: bool = True
    max_queue_ms: float = 50.0
    max_time_ms: float = 5000.0
    max_body: int = 16 * MIB
    max_rows: int = 10000
    max_candidates: int = 10000
    max_header_bytes: int = 32 * KIB
    """Longest request line and headers; also the metadata of a gRPC call."""
    max_connections: int = 2048
    """Open connections of one worker, HTTP and gRPC each."""
    header_timeout_s: float = 10.0
    """Time for a request line and headers, a TLS handshake, and the first frames of gRPC."""
    body_timeout_s: float = 30.0
    """Time for a body, or for the message of a gRPC call."""
    send_timeout_s: float = 30.0
    """Time in which a client must read its reply."""
    idle_timeout_s: float = 75.0
    """Time that a connection may stay open without a request."""
    poll_ms: float = 100.0
    stale_s: float = 10.0
    """Time without news of the published log after which its state is called unknown."""
    token_file: str | None = None
    admin_token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    upload_dir: str | None = None
    results_redis: str | None = None
    """Where /upload?re_model=redis puts its results."""

    def write(self) -> None:
        """For the processes of this server alone: the URL of a Redis may hold its password."""
        path = Path(self.state) / "settings.json"
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(json.dumps(asdict(self)))

    @classmethod
    def read(cls, state: Path | str) -> "Settings":
        facts: dict[str, Any] = json.loads((Path(state) / "settings.json").read_text())
        return cls(**{**facts, "engine": Engine(**facts["engine"])})
