"""The pages of the handbook as programs: each fenced block is run, checked, or says in its first line why not.

| fence | what happens |
| --- | --- |
| `console` | commands after `$`; lines below must be printed, numbers aside; one that ends in `&` stays until the page ends |
| `bash` | one script |
| `python` | one program per page, cut into blocks; a block without language right below is what it prints |
| a first line `# name.py` or `# name.yaml` | the block becomes that file |
| `yaml`, `json` | parsed; sections of a configuration are checked |
| none, `text` | shown only, and may not hold commands |

`# not run by the tests: …` as a block's first line is the only way around. `make`, `pip install` and `python benchmarks/…` are looked up,
not run: the target, the extras and the file must be there.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.config.load import Config, checked
from clickfleet.config.load import read as read_yaml
from ports import free_ports

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"[\d,]*\d(?:\.\d+)?(?:e-?\d+)?")
NOT_RUN = re.compile(r"# not run by the tests: \S.*")
FILE = re.compile(r"# ([\w./-]+\.(?:py|yaml))(?: .*)?$")
COMMAND = re.compile(r"^\s*(?:\$ |clickfleet |curl |pip |python |make )", re.MULTILINE)
SHELL = re.compile(r"[|<>&;$*`]")
PORTS = ("8070", "8080", "8081")


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    line: int
    output: str | None = None

    @property
    def skipped(self) -> bool:
        return bool(NOT_RUN.match(self.text))

    @property
    def file(self) -> str | None:
        found = FILE.match(self.text.partition("\n")[0])
        return found[1] if found else None


def pages() -> list[Path]:
    """README and everything below docs/ that was written by hand, in English and Chinese."""
    docs = sorted(path for path in (ROOT / "docs").rglob("*.md") if "reference" not in path.parts)
    return [ROOT / "README.md", ROOT / "README.zh.md", *docs]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    end = -1
    for fence in FENCE.finditer(text):
        kind, body = fence[1], fence[2]
        if kind == "" and found and found[-1].kind == "python" and fence.start() == end + 1:
            found[-1] = Block("python", found[-1].text, found[-1].line, body)
        else:
            found.append(Block(kind, body, text.count("\n", 0, fence.start()) + 1))
        end = fence.end()
    return found


class Page:
    """One page being read from top to bottom in an empty folder."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.folder = path, folder
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.env = dict(os.environ) | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "120"}
        self.servers: list[subprocess.Popen[str]] = []
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))

    def run(self) -> None:
        with contextlib.chdir(self.folder):
            try:
                for block in blocks(self.path):
                    if not block.skipped:
                        try:
                            getattr(self, f"run_{block.kind or 'text'}")(block)
                        except BaseException as error:
                            error.add_note(f"in {self.path.relative_to(ROOT)}, line {block.line}")
                            raise
            finally:
                for server in self.servers:
                    server.terminate()
                    server.communicate(timeout=120)

    def run_text(self, block: Block) -> None:
        assert not COMMAND.search(block.text), "commands belong into a console or bash block"

    def run_json(self, block: Block) -> None:
        json.loads(block.text)

    def run_yaml(self, block: Block) -> None:
        raw = read_yaml(block.text, str(self.path))
        if raw and set(raw) <= {field.name for field in fields(Config)}:
            checked(Config, raw, source=f"{self.path.name}:{block.line}")
        self.keep(block)

    def keep(self, block: Block) -> bool:
        """Writes a block that is a file, and says whether it is one."""
        if block.file:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text)
        return bool(block.file)

    def run_python(self, block: Block) -> None:
        if self.keep(block):
            return
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(self.here(block.text), f"{self.path.name}:{block.line}", "exec"), self.names)
        if block.output is not None:
            assert printed.getvalue() == block.output

    def run_bash(self, block: Block) -> None:
        self.bash(block.text)

    def run_console(self, block: Block) -> None:
        text = block.text.replace("\\\n", " ")
        for example in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, shown = example.partition("\n")
            printed = self.command(command.partition("  # ")[0].strip())
            missing = set(_masked(shown)) - set(_masked(printed))
            assert not missing, f"{command} does not print {missing}, but:\n{printed}"

    def command(self, command: str) -> str:
        name, *words = command.split()
        if name in ("make", "pip"):
            looked_up(name, words)
            return ""
        if name == "python" and words[0].startswith("benchmarks/"):
            assert (ROOT / words[0]).is_file(), command
            return ""
        if "=" in name:
            variable, _, value = self.here(command).partition("=")
            self.env[variable] = value
            return ""
        if command.endswith("&"):
            return self.background(command)
        words = shlex.split(self.here(command))[1:]
        if name != "clickfleet" or any(map(SHELL.search, words)):
            return self.bash(command)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(build(), words)
        assert code == 0, f"{command} ended with {code}:\n{out.getvalue()}{err.getvalue()}"
        return (out.getvalue() + err.getvalue()).replace(f"{self.folder}/", "")

    def bash(self, script: str) -> str:
        script = f"set -euo pipefail\n{self.here(script)}"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=self.env)
        assert done.returncode == 0, f"{script}\nended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def background(self, command: str) -> str:
        words = shlex.split(self.here(command.rstrip("& ")))
        server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.env)
        self.servers.append(server)
        assert server.stdout is not None
        said = []
        deadline = time.monotonic() + 120
        for line in server.stdout:
            said.append(line)
            if line.startswith("ready:"):
                return "".join(said)
            assert time.monotonic() < deadline, "".join(said)
        raise AssertionError(f"{command} ended:\n{''.join(said)}")

    def here(self, text: str) -> str:
        """The ports of the page are those that are free here."""
        for written, free in self.ports.items():
            text = re.sub(rf"(?<=[ :=]){written}\b", str(free), text)
        return text


def looked_up(name: str, words: list[str]) -> None:
    """`make` and `pip install` of a page: the target, or the extras, must be there."""
    if name == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert not {word for word in words if "=" not in word} - set(targets), words
        return
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words[1:]:
        extras = re.search(r"\[([\w,]+)\]", word)
        assert not extras or set(extras[1].split(",")) <= set(project["optional-dependencies"]), word


def links(page: Path) -> Iterator[str]:
    """Where a page points to, code aside."""
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    yield from re.findall(r"\]\(([^)\s]+)\)", text)
    yield from re.findall(r'(?:src|href)="([^"]+)"', text)


def slug(heading: str) -> str:
    """The anchor of a heading, as MkDocs and GitHub make it."""
    from markdown.extensions.toc import slugify_unicode

    return str(slugify_unicode(re.sub(r"[`*]", "", heading), "-"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {slug(heading) for heading in headings}


def _masked(text: str) -> list[str]:
    return [re.sub(r"\s+", " ", NUMBER.sub("#", line)).strip() for line in text.splitlines() if line.strip()]
