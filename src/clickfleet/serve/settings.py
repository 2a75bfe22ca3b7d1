"""How a server is set up: made by the command line, handed to its processes as JSON."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clickfleet.engine import Engine

MIB = 1 << 20


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
    poll_ms: float = 100.0
    token_file: str | None = None
    admin_token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    upload_dir: str | None = None
    results_redis: str | None = None
    """Where /upload?re_model=redis puts its results."""

    def write(self) -> None:
        (Path(self.state) / "settings.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, state: Path | str) -> "Settings":
        facts: dict[str, Any] = json.loads((Path(state) / "settings.json").read_text())
        return cls(**{**facts, "engine": Engine(**facts["engine"])})
