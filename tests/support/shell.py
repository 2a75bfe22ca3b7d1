"""A shell in a Python environment of its own, for lines as users type them."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WAIT_S = 280.0


class Shell:
    """Runs lines in a folder. What they install stays in this environment, which finds all packages of ours."""

    def __init__(self, environment: Path, folder: Path) -> None:
        self.folder, binaries = folder, environment / "bin"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
        (packages,) = environment.glob("lib/python*/site-packages")
        ours = sysconfig.get_path("purelib")
        (packages / "parent.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
        script = f"#!{binaries / 'python'}\nimport sys\nfrom clickfleet.cli import main\nsys.exit(main())\n"
        (binaries / "clickfleet").write_text(script)
        (binaries / "clickfleet").chmod(0o755)
        hidden = ("PYTHONHASHSEED", "PYTHONPATH", "CLICKFLEET_READER_CHECKED", "TRAINING_ROLE")
        self.env = {key: value for key, value in os.environ.items() if key not in hidden and not key.startswith("RAY_")}
        self.env["PATH"] = f"{binaries}{os.pathsep}{self.env['PATH']}"

    def __call__(self, lines: str) -> str:
        """Return what lines print, on both streams; each must succeed."""
        done = self.run(lines, merged=True)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def run(self, lines: str, merged: bool = False) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", lines],
            cwd=self.folder,
            env=self.env,
            text=True,
            timeout=WAIT_S,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        )

    @contextmanager
    def background(self, line: str, until: str) -> Iterator[None]:
        """Run a line beside others, from the moment it prints `until`."""
        with subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            cwd=self.folder,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            try:
                said = []
                assert process.stdout is not None
                for text in process.stdout:
                    said.append(text)
                    if until in text:
                        break
                assert said, line
                assert until in said[-1], "".join(said)
                yield
            finally:
                process.terminate()
                process.communicate(timeout=WAIT_S)
