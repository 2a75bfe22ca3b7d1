"""HDFS on this machine: a name node and a data node that speak WebHDFS over a local folder.

The name node answers questions and redirects reading and writing to the data node. As in HDFS, a plain RENAME does not replace a file,
and a file is created empty and then appended to.
"""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

PREFIX = "/webhdfs/v1"


class RemoteError(Exception):
    """An error that the client learns of by the name of a Java exception."""

    def __init__(self, status: int, name: str, message: str) -> None:
        super().__init__(message)
        self.status, self.name = status, name


@dataclass
class Hdfs:
    """What is stored, who asked, and which files were written in which way."""

    root: Path
    url: str = ""
    """Of the root: webhdfs://USER@HOST:PORT."""
    users: set[str] = field(default_factory=set)
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Operations and the paths that they wrote to."""
    overwrites: bool = True
    """Whether RENAME knows renameoptions, as a name node does and an older gateway does not."""
    fails: str = ""
    """The name of an exception that every call ends with."""


def status_of(path: Path, suffix: str) -> dict[str, Any]:
    facts = path.stat()
    kind = "DIRECTORY" if path.is_dir() else "FILE"
    return {
        "pathSuffix": suffix,
        "type": kind,
        "length": 0 if path.is_dir() else facts.st_size,
        "modificationTime": int(facts.st_mtime * 1000),
        "owner": "clicks",
        "permission": "755",
    }


class _Handler(BaseHTTPRequestHandler):
    """What both nodes have in common."""

    protocol_version = "HTTP/1.1"
    hdfs: Hdfs

    def _run(self) -> None:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        name = unquote(parts.path).removeprefix(PREFIX)
        body = self._body()
        try:
            if self.hdfs.fails:
                raise RemoteError(403, self.hdfs.fails, "Operation category READ is not supported in state standby")
            self.answer(query.get("op", "").upper(), name, query, body)
        except RemoteError as error:
            reply = {"RemoteException": {"exception": error.name, "message": str(error)}}
            self.send(error.status, json.dumps(reply).encode())

    def do_GET(self) -> None:
        self._run()

    def do_PUT(self) -> None:
        self._run()

    def do_POST(self) -> None:
        self._run()

    def do_DELETE(self) -> None:
        self._run()

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, op: str, name: str, query: dict[str, str], body: bytes) -> None:
        raise NotImplementedError

    def local(self, name: str) -> Path:
        assert ".." not in name.split("/")
        return self.hdfs.root / name.strip("/")

    def existing(self, name: str) -> Path:
        path = self.local(name)
        if not path.exists():
            raise RemoteError(404, "FileNotFoundException", f"File does not exist: {name}")
        return path

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


class NameNode(_Handler):
    data_node = ""

    def answer(self, op: str, name: str, query: dict[str, str], body: bytes) -> None:
        self.hdfs.users.add(query.get("user.name", ""))
        if op in ("OPEN", "CREATE", "APPEND"):
            if op != "CREATE":
                self.existing(name)
            assert not body  # data goes to the data node only
            target = f"{self.data_node}{PREFIX}{quote(name)}?{urlsplit(self.path).query}"
            self.send(307, Location=target)
        elif op == "GETFILESTATUS":
            self.send(200, json.dumps({"FileStatus": status_of(self.existing(name), "")}).encode())
        elif op == "LISTSTATUS":
            path = self.existing(name)
            inner = [(one, one.name) for one in sorted(path.iterdir())] if path.is_dir() else [(path, "")]
            found = [status_of(one, suffix) for one, suffix in inner]
            self.send(200, json.dumps({"FileStatuses": {"FileStatus": found}}).encode())
        elif op == "MKDIRS":
            self.local(name).mkdir(parents=True, exist_ok=True)
            self.truth(True)
        elif op == "RENAME":
            self.rename(name, query["destination"], query.get("renameoptions", "") if self.hdfs.overwrites else "")
        elif op == "DELETE":
            self.delete(name, query.get("recursive") == "true")
        else:
            raise RemoteError(400, "UnsupportedOperationException", f"{op} is not supported")

    def truth(self, value: bool) -> None:
        self.send(200, json.dumps({"boolean": value}).encode())

    def rename(self, name: str, to: str, options: str) -> None:
        source, target = self.existing(name), self.local(to)
        self.hdfs.calls.append(("RENAME", to))
        if options == "OVERWRITE":
            source.replace(target)
            self.send(200)
        elif target.exists():
            self.truth(False)
        else:
            source.rename(target)
            self.truth(True)

    def delete(self, name: str, recursive: bool) -> None:
        path = self.local(name)
        if path.is_dir() and not recursive and any(path.iterdir()):
            raise RemoteError(403, "PathIsNotEmptyDirectoryException", f"{name} is non empty")
        there = path.exists()
        if there:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.truth(there)


class DataNode(_Handler):
    def answer(self, op: str, name: str, query: dict[str, str], body: bytes) -> None:
        if op == "OPEN":
            start = int(query.get("offset", 0))
            data = self.existing(name).read_bytes()[start:]
            self.send(200, data[: int(query["length"])] if "length" in query else data)
            return
        self.hdfs.calls.append((op, name))
        path = self.local(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb" if op == "CREATE" else "ab") as file:
            file.write(body)
        self.send(201 if op == "CREATE" else 200)


@contextmanager
def running(root: Path, user: str = "clicks") -> Iterator[Hdfs]:
    """Run both nodes over a folder."""
    hdfs = Hdfs(root)
    data_node = ThreadingHTTPServer(("127.0.0.1", 0), type("Data", (DataNode,), {"hdfs": hdfs}))
    where = f"http://127.0.0.1:{data_node.server_port}"
    name_node = ThreadingHTTPServer(("127.0.0.1", 0), type("Name", (NameNode,), {"hdfs": hdfs, "data_node": where}))
    hdfs.url = f"webhdfs://{user}@127.0.0.1:{name_node.server_port}"
    nodes = (name_node, data_node)
    threads = [threading.Thread(target=node.serve_forever, args=(0.02,), daemon=True) for node in nodes]
    for thread in threads:
        thread.start()
    try:
        yield hdfs
    finally:
        for node, thread in zip(nodes, threads, strict=True):
            node.shutdown()
            node.server_close()
            thread.join()
