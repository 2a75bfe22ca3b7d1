"""The command `doctor`."""

import importlib.metadata
import os
import platform
import shutil
import sys

import typer

import clickfleet
from clickfleet.cli.frame import Result, command, say

# part -> (the extra that installs it, the distributions it needs)
PARTS = {
    "training": ("", ("numpy", "pyarrow", "torch", "safetensors")),
    "remote files": ("", ("fsspec",)),
    "cluster": ("cluster", ("ray", "pyzmq")),
    "serving": ("serve", ("onnxruntime", "uvicorn", "starlette", "msgspec", "orjson", "grpcio", "prometheus-client")),
    "rows in Redis": ("redis", ("redis",)),
    "Kafka topics": ("kafka", ("confluent-kafka",)),
    "hyperparameter search": ("tune", ("optuna",)),
}
PROGRAMS: dict[str, str] = {"wrk": "benchmarks/serve.py"}  # program -> what uses it


def add(app: typer.Typer) -> None:
    @command(app)
    def doctor() -> Result:
        """Show the installed components, the missing ones, and how to install them."""
        from clickfleet import _core

        parts = {part: _versions(names) for part, (_, names) in PARTS.items()}
        missing = {part: [name for name, version in found.items() if version is None] for part, found in parts.items()}
        say(f"clickfleet {clickfleet.__version__}  python {platform.python_version()}  {platform.platform()}")
        say(f"cores {os.cpu_count()}  core built for {_core.cpu_level()}  executable {sys.executable}")
        for part, found in parts.items():
            versions = "  ".join(f"{name} {version or '(missing)'}" for name, version in found.items())
            say(f"{'missing' if missing[part] else 'ok':>8}  {part}: {versions}")
            if missing[part]:
                extra = PARTS[part][0]
                say(f'          pip install "clickfleet{f"[{extra}]" if extra else ""}"')
        for program, use in PROGRAMS.items():
            say(f"{'ok' if shutil.which(program) else 'missing':>8}  {program}: {use}")
        return {
            "version": clickfleet.__version__,
            "python": platform.python_version(),
            "cpu_level": _core.cpu_level(),
            "parts": parts,
            "ok": not any(missing[part] for part, (extra, _) in PARTS.items() if not extra),
        }


def _versions(names: tuple[str, ...]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
