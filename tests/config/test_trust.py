"""Code that a model, a run folder or a server names runs only where the user allows it; the refusal shows what would run."""

import json
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import clickfleet
from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.config.load import Config, checked
from clickfleet.config.plugins import Plugin, shown
from clickfleet.data.formats import load as load_format
from clickfleet.errors import ConfigError, TrustError
from clickfleet.store import atomic, published
from clickfleet.training import saving
from lines import criteo_text

RUNS_CODE = re.compile(
    r"\b(exec_module|subprocess\.(Popen|run|call|check_\w+)|os\.(system|popen|exec\w*|spawn\w*)|runpy\.|shell=True|allow_pickle"
    r"|torch\.load|pickle\.\w*[lL]oads?\b|pickle\.Unpickler|register_custom_ops)|(?<![.\w])(eval|exec)\("
)
KNOWN = {
    "cli/__init__.py": "ourselves, with a fixed hash seed",
    "cluster/fork_client.py": "Ray's own command for a worker, if it cannot be forked",
    "cluster/fork_server.py": "ourselves, and Ray's own program for a worker, for the driver alone",
    "cluster/launch.py": "clickfleet launch: ourselves, or the program that the user names",
    "cluster/nodes.py": "ray start",
    "cluster/process_tree.py": "ps, where there is no /proc",
    "config/plugins.py": "the user's own files, if trusted",
    "data/formats/pipe.py": "the user's command, if trusted",
    "data/repeatable.py": "ourselves, to read with a reader that is loaded already",
    "paddlerec/pickles.py": "an unpickler that makes arrays, dictionaries and plain values only",
    "paddlerec/stand_in/paddle/__init__.py": "a paddle that is installed, if a reader imports it",
    "paddlerec/stand_in/paddle_serving_client/__init__.py": "a paddle_serving_client that is installed, if a program imports it",
    "paddlerec/paddle_names.py": "a reader of PaddleRec's, started by the user's command",
    "serve/supervisor.py": "ourselves",
    "workbench/runner.py": "ourselves",
}
"""Every file that runs code or reads a pickle: docs/security.md tells of each."""

MODEL = """
from pathlib import Path
from clickfleet.models.lr import LR as _LR

with (Path(__file__).parent / "imported").open("a") as ran:
    ran.write("x")


class Mine(_LR):
    pass
"""
READER = """
from pathlib import Path
from clickfleet.data.formats.criteo import criteo

with (Path(__file__).parent / "imported").open("a") as ran:
    ran.write("x")
"""


class Made:
    """A run folder whose configuration names code, and what that code leaves behind when it runs."""

    def __init__(self, folder: Path, **sections: Any) -> None:
        self.folder, self.run = folder, folder / "run"
        self.data = folder / "rows.tsv"
        self.data.write_bytes(criteo_text(60))
        self.config = folder / "config.yaml"
        raw = {
            "data": {"train": str(self.data), "batch_size": 20, "preset": "criteo"},
            "model": {"name": "lr"},
            "train": {"threads": 1},
            "run": {"report": False},
        }
        for name, section in sections.items():
            raw[name] |= section
        self.config.write_text(json.dumps(raw))
        assert run(build(), ["train", str(self.config)]) == 0
        self.forget()

    @cached_property
    def artifact(self) -> Path:
        """The same as an artifact for serving."""
        assert run(build(), ["export", str(self.run), str(self.folder / "artifact"), "--trust"]) == 0
        self.forget()
        return self.folder / "artifact"

    def forget(self) -> None:
        """As a new process would begin."""
        for name in [name for name in sys.modules if name.startswith("_clickfleet_")]:
            del sys.modules[name]
        for mark in ("imported", "ran"):
            (self.folder / mark).unlink(missing_ok=True)

    @property
    def has_run(self) -> bool:
        return any((self.folder / mark).exists() for mark in ("imported", "ran"))


@pytest.fixture(scope="module")
def own_model(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(MODEL)
    return Made(folder, model={"name": "./mine.py"})


@pytest.fixture(scope="module")
def own_reader(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("reader")
    (folder / "reader.py").write_text(READER)
    return Made(folder, data={"format": "./reader.py"})


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Criteo lines, printed as multislot blocks by a command."""
    folder = tmp_path_factory.mktemp("piped")
    command = """touch ran; awk -F'\\t' '{print "1 " $3 " 1 " $3 % 7 " 1 " $1}'"""
    (folder / "schema.yaml").write_text("{dense: [n], slots: [a], label: click, keys: raw}")
    form = {"name": "pipe", "command": command, "folder": str(folder)}
    return Made(folder, data={"format": form, "schema": "schema.yaml", "preset": None})


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert run(build(), [*map(str, argv)]) == 1
    said = capsys.readouterr().err
    assert "would run code on this machine without your permission" in said
    assert "add --trust" in said
    return said


def allowed(capsys: pytest.CaptureFixture[str], *argv: object) -> None:
    code = run(build(), [*map(str, argv), "--trust"])
    assert code == 0, capsys.readouterr().err


Commands = Callable[[Made, Path], list[list[object]]]


def with_model(made: Made, out: Path) -> list[list[object]]:
    """Everything that opens a saved model."""
    return [
        ["evaluate", made.run, made.data],
        ["predict", made.run, made.data, "--out", out / "scores"],
        ["inspect", made.run],
        ["inspect", made.run, "--against", made.run],
        ["explain", made.run, made.data],
        ["explain", made.run, "--importance", made.data],
        ["report", made.run],
        ["shrink", made.run],
        ["publish", made.run, "base"],
        ["parity", made.run, made.data, "--artifact", made.artifact],
    ]


def with_data(made: Made, out: Path) -> list[list[object]]:
    """Everything that reads data as a saved model says."""
    return [argv for argv in with_model(made, out) if made.data in argv]


@pytest.mark.parametrize(
    ("name", "commands", "shows"),
    [
        ("own_model", with_model, "import {folder}/mine.py"),
        ("own_reader", with_data, "import {folder}/reader.py"),
        ("piped", with_data, "bash -c 'set -o pipefail; touch ran; awk"),
    ],
)
def test_a_run_folder_runs_no_code_unless_trusted(
    name: str,
    commands: Commands,
    shows: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made: Made = request.getfixturevalue(name)
    for argv in commands(made, tmp_path):
        made.forget()
        assert shows.format(folder=made.folder) in refused(capsys, *argv)
        assert not made.has_run, argv
        allowed(capsys, *argv)
        assert made.has_run, argv


def test_exporting_an_own_model_is_refused_too(
    own_model: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_model.forget()
    refused(capsys, "export", own_model.run, tmp_path / "artifact")
    refused(capsys, "bench", "infer", own_model.run, own_model.data)
    assert not own_model.has_run


@pytest.mark.parametrize("name", ["own_reader", "piped"])
def test_an_artifact_runs_no_code_unless_trusted(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made: Made = request.getfixturevalue(name)
    argv = ["predict", made.artifact, made.data, "--out", tmp_path / "scores"]
    made.forget()
    refused(capsys, *argv)
    assert not made.has_run
    allowed(capsys, *argv)
    assert made.has_run


def test_a_format_on_the_command_line_is_the_users_own(own_reader: Made, capsys: pytest.CaptureFixture[str]) -> None:
    own_reader.forget()
    assert run(build(), ["evaluate", str(own_reader.run), str(own_reader.data), "--format", "criteo"]) == 0
    assert not own_reader.has_run
    reader = str(own_reader.folder / "reader.py")
    assert run(build(), ["evaluate", str(own_reader.run), str(own_reader.data), "--format", reader]) == 0
    assert own_reader.has_run


def test_a_configuration_that_the_user_names_is_trusted(own_model: Made, capsys: pytest.CaptureFixture[str]) -> None:
    own_model.forget()
    assert run(build(), ["train", str(own_model.config), "train.epochs=2", "--resume"]) == 0
    assert own_model.has_run


def test_in_python(own_model: Made, piped: Made) -> None:
    own_model.forget()
    piped.forget()
    with pytest.raises(TrustError, match=r"config\.yaml would run code"):
        clickfleet.load(own_model.run)
    assert not own_model.has_run
    assert len(clickfleet.load(own_model.run, trust=True).predict(str(own_model.data))) == 60
    model = clickfleet.load(piped.run)  # its model is ours: only reading needs the command
    with pytest.raises(TrustError, match="touch ran"):
        model.predict(str(piped.data))
    assert not piped.has_run


def test_scoring_on_a_cluster_is_refused_before_anything_starts(piped: Made) -> None:
    from clickfleet.cluster.run_on_cluster import scorers

    with pytest.raises(TrustError, match="touch ran"), scorers(piped.run, 1):
        pass


@contextmanager
def server(facts: Any) -> Iterator[str]:
    """Anybody's server, which says this of its model."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(facts).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None: ...

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_address[1]}"
    made.shutdown()
    made.server_close()


def test_a_server_runs_nothing_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, ran = tmp_path / "data", tmp_path / "ran"
    data.write_text("1 0.5 1 3 1 1\n")
    (tmp_path / "evil.py").write_text(READER)
    schema = {"dense": ["n"], "slots": ["a"], "label": "click", "keys": "raw"}
    for form in ({"name": "pipe", "command": f"touch {ran}; cat"}, {"name": str(tmp_path / "evil.py")}):
        with server({"name": "m", "schema": schema, "format": form}) as url:
            said = refused(capsys, "score", url, data)
            assert url in said
            assert list(form.values())[-1] in said
            assert not ran.exists()
            assert not (tmp_path / "imported").exists()
    with server({"name": "m", "schema": schema, "format": {"name": "pipe", "command": f"touch {ran}; cat"}}) as url:
        assert run(build(), ["score", url, str(data), "--trust"]) == 1  # it scores nothing, but was believed
    assert ran.exists()


@pytest.mark.parametrize(
    "facts", [{}, [], {"schema": {"slots": ["a"]}}, {"schema": {"slots": ["a"]}, "format": {"name": 3}}]
)
def test_a_server_that_talks_nonsense_is_an_error_not_a_crash(
    facts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").write_text("1 1\n")
    with server(facts) as url:
        assert run(build(), ["score", url, str(tmp_path / "data")]) == 1
    assert "error: " in capsys.readouterr().err


def test_the_mark_stays_with_the_name(tmp_path: Path) -> None:
    config = checked(Config, {"model": "./x.py", "data": {"format": "./y.py"}}, source="x", origin="a model")
    assert (config.model.origin, config.data.format.origin, config.mode.origin) == ("a model", "a model", "")
    assert config.model == Plugin("./x.py")  # equal all the same: it says who, not what
    with pytest.raises(TrustError):
        load_format(config.data.format)
    with pytest.raises(ConfigError, match=r"data\.format\.command must be text"):
        load_format({"name": "pipe", "command": ["rm"]})


def test_what_would_run_cannot_hide() -> None:
    hidden = Plugin("pipe", {"command": "rm -rf ~ #\x1b[2K\rcat \u202e"}, "http://x")
    with pytest.raises(TrustError) as refusal:
        load_format(hidden)
    said = str(refusal.value)
    assert "rm -rf ~ #" in said
    assert not {"\x1b", "\r", "\u202e"} & set(said)
    assert shown("plain text") == "plain text"


def test_model_file_in_a_manifest(piped: Made, tmp_path: Path) -> None:
    """A published manifest that names a Python file as its model."""
    out = shutil.copytree(piped.artifact, tmp_path / "artifact")
    manifest = json.loads((out / atomic.MANIFEST).read_bytes())
    del manifest["hash"], manifest["sealed"]
    (tmp_path / "evil.py").write_text(MODEL)
    manifest["model"]["name"] = str(tmp_path / "evil.py")
    (out / atomic.MANIFEST).write_bytes(atomic.canonical({**manifest, "hash": atomic.digest(manifest)}))
    published.Entry(out)
    with pytest.raises(TrustError, match=r"import .*evil\.py"):
        saving.load(out)
    assert not (tmp_path / "imported").exists()


def test_nothing_else_runs_code() -> None:
    """Whoever adds a way to run code adds it to `KNOWN` and to docs/security.md, with what guards it."""
    package = Path(clickfleet.__file__).parent
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if RUNS_CODE.search(path.read_text(encoding="utf-8"))
    }
    assert not found - KNOWN.keys()
