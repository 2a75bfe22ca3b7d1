"""A page on this machine that follows runs while they train; it needs no network, and shows nothing to others.

from clickfleet.workbench.dashboard import Dashboard

with Dashboard(["run", "other"]) as page:
    print(page.url)
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import clickfleet
from clickfleet.errors import ConfigError, ServeError
from clickfleet.report import page
from clickfleet.workbench.panels import Followed, draw

HOST = "127.0.0.1"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
SCRIPT = """
const runs = document.getElementById('runs'), said = document.getElementById('said'), every = EVERY;
let tag = '';
async function look() {
  try {
    const reply = await fetch('panels', {headers: tag ? {'If-None-Match': tag} : {}, cache: 'no-store'});
    if (reply.status === 200) { tag = reply.headers.get('ETag'); runs.innerHTML = await reply.text(); }
    said.textContent = 'looked at ' + new Date().toLocaleTimeString();
  } catch (problem) { said.textContent = 'the dashboard does not answer any more'; }
  setTimeout(look, every);
}
look();
"""


def folders(paths: Sequence[str | Path]) -> list[Path]:
    """Run folders; of a comparison or a search, all of its runs."""
    found: list[Path] = []
    for path in map(Path, paths):
        inside = [one for name in ("runs", "trials") for one in sorted((path / name).glob("*")) if one.is_dir()]
        if inside:
            found += inside
        elif path.is_dir():
            found.append(path)
        else:
            raise ConfigError(f"there is no folder {path}", "name run folders; one that is about to train may be empty")
    return found


class Dashboard:
    """Serves the page inside a `with` block, or until `wait` is interrupted."""

    def __init__(self, runs: Sequence[str | Path], port: int = 0, every_s: float = 1.0) -> None:
        self.paths, self.every_s = list(runs), every_s
        self._runs: dict[Path, Followed] = {}
        self._looking = threading.Lock()
        folders(self.paths)
        try:
            self._server = ThreadingHTTPServer((HOST, port), _handler(self))
        except OSError as error:
            raise ServeError(f"cannot listen on {HOST}:{port}: {error.strerror}", "choose another --port") from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="clickfleet-dashboard", daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/"

    def look(self) -> list[Followed]:
        """All runs as they are now; those that were begun since are there too."""
        for folder in folders(self.paths):
            self._runs.setdefault(folder, Followed(folder))
        names = [folder.absolute().name for folder in self._runs]
        for folder, run in self._runs.items():
            run.name = folder.absolute().name if names.count(folder.absolute().name) == 1 else str(folder)
            run.look()
        return list(self._runs.values())

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """The kind and the bytes of a reply."""
        if path == "/":
            return "text/html; charset=utf-8", self._shell().encode()
        with self._looking:  # several tabs ask at once
            if path == "/panels":
                return "text/html; charset=utf-8", draw(self.look()).encode()
            if path == "/data.json":
                return "application/json", json.dumps([run.facts() for run in self.look()]).encode()
        return None

    def _shell(self) -> str:
        script = SCRIPT.replace("EVERY", str(round(self.every_s * 1000)))
        parts = [
            "<h1>Runs</h1>",
            f'<p class="soft"><span id="said" role="status">looking…</span> clickfleet {clickfleet.__version__}</p>',
            '<div id="runs"></div>',
            f"<script>{script}</script>",
        ]
        return page.page("clickfleet dashboard", parts)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def wait(self) -> None:
        self._thread.join()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(board: Dashboard) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if host not in (HOST, "localhost"):  # a page of somebody else that was pointed at us
                return self._reply(403, "text/plain", b"only for this machine\n")
            answer = board.answer(self.path.partition("?")[0])
            if answer is None:
                return self._reply(404, "text/plain", b"there is / and /data.json\n")
            tag = f'"{hashlib.blake2b(answer[1], digest_size=12).hexdigest()}"'
            if self.headers.get("If-None-Match") == tag:
                return self._reply(304, answer[0], b"", tag)
            return self._reply(200, *answer, tag)

        def _reply(self, status: int, kind: str, body: bytes, tag: str = "") -> None:
            self.send_response(status)
            if status != 304:
                self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Security-Policy", POLICY)
            if tag:
                self.send_header("ETag", tag)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            """Nobody wants a line per second."""

    return Handler
