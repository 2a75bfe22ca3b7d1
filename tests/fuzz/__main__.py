"""python -m fuzz [TARGET or area ...] --runs N [--seed S]: gives parsers wrong inputs (from the folder `tests`).

Every target returns or raises ClickfleetError; anything else, a crash, more than 2 GiB or more than 10 s is a finding. Its input is kept
under `--keep` (default: build/fuzz) and belongs into the target's seeds together with the fix.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import pkgutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))  # what tests share

import fuzz
from fuzz.engine import Finding, Target, explore

MEMORY = 2 << 30
"""Beyond what the process has when it starts."""


def areas() -> list[str]:
    """What every `target_*.py` is about."""
    names = [found.name for found in pkgutil.iter_modules(fuzz.__path__)]
    return [name.removeprefix("target_") for name in names if name.startswith("target_")]


def targets_of(area: str) -> list[Target]:
    found: list[Target] = importlib.import_module(f"fuzz.target_{area}").TARGETS
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("names", nargs="*", help="targets or areas; default: all")
    parser.add_argument("--runs", type=int, default=1000, help="inputs per target")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other inputs")
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="folder for inputs of findings")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is None:
        return monitor(options.keep)
    return work(options.names, options.runs, options.seed, options.keep, options.inside)


def monitor(keep: Path) -> int:
    """Runs the targets in a process of their own and says which input ended it."""
    keep.mkdir(parents=True, exist_ok=True)
    current = keep / "current"
    current.write_bytes(b"")
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "fuzz", *sys.argv[1:], "--inside", str(current)]
    )
    if ended.returncode in (0, 1):
        current.unlink(missing_ok=True)
        return ended.returncode
    name, _, data = current.read_bytes().partition(b"\n")
    path = save(keep, Finding(name.decode(), "", "", data))
    print(f"{name.decode()}: the process ended with {ended.returncode}: {path}")
    return 2


def save(keep: Path, finding: Finding) -> Path:
    path = keep / f"{finding.target}-{hashlib.sha1(finding.data).hexdigest()[:12]}"
    path.write_bytes(finding.data)
    return path


def work(names: list[str], runs: int, seed: int, keep: Path, current: Path) -> int:
    single = {*names} - {*areas()}
    known = {area: targets_of(area) for area in areas() if not names or single or area in names}
    targets = [target for area, some in known.items() for target in some if not names or {area, target[0]} & {*names}]
    if unknown := single - {target[0] for target in targets}:
        print(f"there is no target {', '.join(sorted(unknown))}; areas are {', '.join(areas())}")
        return 1
    limit_memory()
    bad = 0
    with current.open("r+b", buffering=0) as file:
        for target in targets:
            name, start = target[0].encode(), time.perf_counter()

            def note(data: bytes, name: bytes = name) -> None:
                file.seek(0)
                file.truncate()
                file.write(name + b"\n" + data)

            outcome = explore(target, runs, seed, note)
            took = time.perf_counter() - start
            print(
                f"{outcome.name}: {outcome.runs} inputs in {took:.1f} s, {outcome.returned} read, {outcome.refused} refused, "
                f"{outcome.kept} kept, {outcome.lines} pairs of lines, {len(outcome.findings)} findings",
                flush=True,
            )
            for finding in outcome.findings.values():
                print(f"  {finding.where}: {finding.what}: {save(keep, finding)}", flush=True)
            bad += len(outcome.findings)
    return 1 if bad else 0


def limit_memory() -> None:
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 1 << 20
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    sys.exit(main())
