"""Verify saved models: every byte is as written, and a server can use every entry.

The serving code opens the rows, ONNX Runtime runs the network, and golden requests must give their expected outputs. So a server
accepts exactly the entries that pass here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clickfleet.errors import CheckpointError, MissingError
from clickfleet.serve import overlays
from clickfleet.serve.predictor import open_version
from clickfleet.store import atomic, checkpoint, mirror, run_folder
from clickfleet.store.lock import Lock
from clickfleet.store.published import HOW_TO_REPAIR, KIND, LOG, Entry, Header, Line, Log, directories, name_of

Facts = dict[str, Any]


def check_rows(entry: Entry) -> overlays.Layer:
    """Check every byte of an entry and every rule about its rows. Return the rows."""
    entry.verify()
    layer = overlays.open_layer(entry.path, int(entry.manifest["factors"]))
    for what, count in (("rows", layer.full_rows + layer.short_rows), ("deleted", layer.deleted)):
        if count != entry.manifest[what]:
            raise CheckpointError(f"{entry.path} has {count:,} {what}, but its manifest says {entry.manifest[what]:,}")
    return layer


def check(chain: Sequence[Entry]) -> bool:
    """Check a base and its deltas one by one, as a server does. Return whether ONNX Runtime was available for golden requests."""
    opened: dict[str, overlays.Layer] = {}
    golden = True
    for i, entry in enumerate(chain):
        opened[str(entry.path)] = check_rows(entry)
        if i and (entry.base or entry.manifest["chain"] != chain[0].manifest["chain"]):
            raise CheckpointError(f"{entry.path} does not belong to the chain of {chain[0].path.name}")
        try:
            open_version(entry, [layer.path for layer in chain[i::-1]], opened=opened)
        except MissingError:
            golden = False
    return golden


def verify(model: str | Path) -> Facts:
    """Check everything at a path: a checkpoint, an entry, a published log, or a run with its checkpoints and its log."""
    path = run_folder.resolve(model) if mirror.url_of(model) is not None else Path(model)
    if (path / LOG).is_file():
        reports = [_log(path)]
    elif (path / atomic.MANIFEST).is_file():
        reports = [_model(path)]
    elif (paths := _checkpoints(path)) or directories(path / "published"):
        reports = [_model(step) for step in paths]
        if (path / "published").is_dir():
            reports.append(_log(path / "published"))
    else:
        reports = [_model(run_folder.resolve(path))]
    sums = {key: sum(facts[key] for facts in reports) for key in ("files", "bytes", "rows", "checkpoints", "entries")}
    return {"path": str(path), **sums, "golden": all(facts["golden"] for facts in reports)}


def _checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints of a run. Raise `CheckpointError` if LATEST is wrong."""
    for folder in (path / "checkpoints", path):
        if steps := checkpoint.steps(folder):
            checkpoint.latest(folder)
            return [checkpoint.step_folder(folder, step) for step in steps]
    return []


def _model(path: Path) -> Facts:
    """Check a checkpoint, or an entry with the entries it needs."""
    if atomic.read_kind(path) != KIND:
        manifest = checkpoint.verify(path)
        return _facts([manifest], manifest["short_rows"] + manifest["full_rows"], checkpoints=1)
    chain = run_folder.entries(path) or []
    golden = check(chain)
    return _facts([chain[-1].manifest], chain[-1].manifest["rows"], entries=1, golden=golden)


def _log(folder: Path) -> Facts:
    """Check a published log chain by chain. A missing entry is an error unless retention removed it."""
    log = Log(folder)
    lines = log.kept()
    last = lines[-1].sequence if lines else 0
    if beyond := [path.name for number, path in directories(folder) if number > last + 1]:
        raise CheckpointError(f"{log.path} ends with entry {last or 'none'}, but {beyond[0]} exists", HOW_TO_REPAIR)
    chains: list[list[Entry]] = []
    for line in lines:
        entry = log.entry(line)
        if entry.base:
            chains.append([])
        elif not chains:
            raise CheckpointError(f"{entry.path} is a delta without its base")
        chains[-1].append(entry)
    golden = [check(chain) for chain in chains]
    manifests = [entry.manifest for chain in chains for entry in chain]
    rows = sum(manifest["rows"] for manifest in manifests)
    return _facts(manifests, rows, entries=len(manifests), golden=all(golden))


def _facts(
    manifests: list[atomic.Manifest], rows: int, checkpoints: int = 0, entries: int = 0, golden: bool = True
) -> Facts:
    sizes = [int(facts["bytes"]) for manifest in manifests for facts in manifest["files"].values()]
    return {
        "files": len(sizes),
        "bytes": sum(sizes),
        "rows": rows,
        "checkpoints": checkpoints,
        "entries": entries,
        "golden": golden,
    }


def repair(model: str | Path) -> Facts:
    """Rebuild a published log from the manifests of its entries, which contain everything its lines contained.

    It starts with the oldest base from which the entries are consecutive, and ends with the newest entry. No file is removed.
    """
    folder = Path(model) / "published" if (Path(model) / "published").is_dir() else Path(model)
    numbered = directories(folder)
    if not numbered:
        raise CheckpointError(f"{folder} has no entries to rebuild a log from")
    with Lock(folder / ".lock", "publishes", patience_s=60.0):
        log = Log(folder)
        try:
            before = log.lines()
        except CheckpointError:
            before = []
        lines = _linked([Entry(path) for _, path in numbered])
        _check_known(log, before, lines)
        first = next((i for i, line in enumerate(lines) if line.kind == "base"), None)
        if first is None:
            raise CheckpointError(
                f"{lines[0].name} has no base: the entry before it is missing",
                "restore the missing entries, or publish a base",
            )
        lines = lines[first:]
        kept = lines[0].sequence
        older = [line for line in before if line.sequence < kept]
        if older and older[-1].hash == lines[0].parent:  # keep the lines of entries that retention removed
            lines = [*older, *lines]
        header = Header(lines[0].sequence, kept, lines[0].parent)
        changed = header != log.header or lines != before
        if changed:
            log.rewrite(header, lines)
    return {
        "path": str(folder),
        "entries": len([line for line in lines if line.sequence >= header.kept]),
        "first": header.kept,
        "last": lines[-1].sequence,
        "added": len({line.hash for line in lines} - {line.hash for line in before}),
        "outside": [path.name for number, path in numbered if number < header.kept],
        "changed": changed,
    }


def _check_known(log: Log, before: list[Line], lines: list[Line]) -> None:
    """Raise `CheckpointError` if an entry differs from what the log already says about it."""
    rebuilt = {line.sequence: line for line in lines}
    for line in before:
        if line.sequence > lines[-1].sequence or rebuilt.get(line.sequence, line) != line:
            raise CheckpointError(
                f"{log.folder / line.name} is missing, or is not the entry that {log.path.name} names",
                "restore it from a copy",
            )


def _linked(entries: list[Entry]) -> list[Line]:
    """Return the lines of the newest consecutive entries."""
    lines: list[Line] = []
    for entry in reversed(entries):
        line = Line.of(entry)
        if line.name != name_of(line.sequence, line.kind):
            raise CheckpointError(
                f"{entry.path} contains entry {line.sequence}, a {line.kind}",
                f"rename it to {name_of(line.sequence, line.kind)}",
            )
        if lines and not lines[0].follows(line):
            break
        lines.insert(0, line)
    return lines
