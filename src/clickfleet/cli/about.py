"""The command `doctor`."""

import importlib.metadata
import os
import platform
import shutil
import sys
from contextlib import suppress

import typer

import clickfleet
from clickfleet.cli.frame import Result, command, say

# part -> (the extra that installs it, the distributions it needs)
PARTS = {
    "training": ("", ("numpy", "pyarrow", "torch", "safetensors")),
    "remote files": ("", ("fsspec",)),
    "cluster": ("cluster", ("ray", "pyzmq", "cryptography")),
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
        missing = {part for part, versions in parts.items() if None in versions.values()}
        say(f"clickfleet {clickfleet.__version__}  python {platform.python_version()}  {platform.platform()}")
        say(f"cores {os.cpu_count()}  core built for {_core.cpu_level()}  executable {sys.executable}")
        for part, versions in parts.items():
            listed = "  ".join(f"{name} {version or '(missing)'}" for name, version in versions.items())
            say(f"{'missing' if part in missing else 'ok':>8}  {part}: {listed}")
            if part in missing:
                extra = PARTS[part][0]
                say(f'          pip install "clickfleet{f"[{extra}]" if extra else ""}"')
        for program, use in PROGRAMS.items():
            say(f"{'ok' if shutil.which(program) else 'missing':>8}  {program}: {use}")
        return {
            "version": clickfleet.__version__,
            "python": platform.python_version(),
            "cpu_level": _core.cpu_level(),
            "parts": parts,
            "ok": not any(part in missing for part, (extra, _) in PARTS.items() if not extra),
        }


def _versions(names: tuple[str, ...]) -> dict[str, str | None]:
    versions: dict[str, str | None] = dict.fromkeys(names)
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
