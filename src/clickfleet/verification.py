"""Whether what is on disk is what was written, and whether every consumer can use it.

Rows are opened by the code that serves them, networks are run by ONNX Runtime, golden requests must give their answers: an entry that
passes here is taken by a server, and one that a server would refuse is refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clickfleet import checkpoint, mirror, saving, storage
from clickfleet.errors import CheckpointError, MissingError
from clickfleet.lock import Lock
from clickfleet.published import HOW_TO_REPAIR, KIND, LOG, Entry, Header, Line, Log, directories, name_of
from clickfleet.serve import layers
from clickfleet.serve.predictor import open_version

Facts = dict[str, Any]


def check_rows(entry: Entry) -> layers.Layer:
    """Every byte of an entry and every rule about its rows; the rows."""
    entry.verify()
    layer = layers.open_layer(entry.path, int(entry.manifest["factors"]))
    for what, found in (("rows", layer.full_rows + layer.short_rows), ("deleted", layer.deleted)):
        if found != entry.manifest[what]:
            raise CheckpointError(f"{entry.path} has {found:,} {what}, and its manifest says {entry.manifest[what]:,}")
    return layer


def check(chain: Sequence[Entry]) -> bool:
    """A base and its deltas, as a server takes them one by one; whether golden requests were tried, which needs ONNX Runtime."""
    opened: dict[str, Any] = {}
    golden = True
    for i, entry in enumerate(chain):
        opened[str(entry.path)] = check_rows(entry)
        if i and (entry.base or entry.manifest["chain"] != chain[0].manifest["chain"]):
            raise CheckpointError(f"{entry.path} does not belong to the chain of {chain[0].path.name}")
        try:
            open_version(entry, [one.path for one in chain[i::-1]], opened=opened)
        except MissingError:
            golden = False
    return golden


def verify(model: str | Path) -> Facts:
    """Everything at a path: a checkpoint, an entry, a published log, or a run with its checkpoints and its log."""
    path = saving.resolve(model) if mirror.url_of(model) is not None else Path(model)
    if (path / LOG).is_file():
        found = [_log(path)]
    elif (path / storage.MANIFEST).is_file():
        found = [_one(path)]
    elif (folder := _checkpoints(path)) is not None or directories(path / "published"):
        found = [] if folder is None else [_one(one) for one in _steps(folder)]
        if (path / "published").is_dir():
            found.append(_log(path / "published"))
    else:
        found = [_one(saving.resolve(path))]
    total = {key: sum(one[key] for one in found) for key in ("files", "bytes", "rows", "checkpoints", "entries")}
    return {"path": str(path), **total, "golden": all(one["golden"] for one in found)}


def _checkpoints(path: Path) -> Path | None:
    return next((one for one in (path / "checkpoints", path) if checkpoint.steps(one)), None)


def _steps(folder: Path) -> list[Path]:
    """All checkpoints of a folder, whose names and pointers must be right."""
    checkpoint.latest(folder)
    return [folder / f"step-{step:012d}" for step in checkpoint.steps(folder)]


def _one(path: Path) -> Facts:
    if storage.read_kind(path) != KIND:
        manifest = checkpoint.verify(path)
        return _facts([manifest], manifest["short_rows"] + manifest["full_rows"], checkpoints=1)
    chain = saving.entries(path) or []
    golden = check(chain)
    return _facts([chain[-1].manifest], chain[-1].manifest["rows"], entries=1, golden=golden)


def _log(folder: Path) -> Facts:
    """All that a published log holds, chain by chain; an entry that is not there is an error unless retention removed it."""
    log = Log(folder)
    lines = log.kept()
    last = lines[-1].sequence if lines else 0
    if beyond := [path.name for number, path in directories(folder) if number > last + 1]:
        raise CheckpointError(f"{log.path} ends with entry {last or 'none'}, and {beyond[0]} is there", HOW_TO_REPAIR)
    chains: list[list[Entry]] = []
    for line in lines:
        entry = log.entry(line)
        if entry.base:
            chains.append([])
        elif not chains:
            raise CheckpointError(f"{entry.path} is a delta without its base")
        chains[-1].append(entry)
    tried = [check(chain) for chain in chains]
    manifests = [entry.manifest for chain in chains for entry in chain]
    return _facts(manifests, sum(one["rows"] for one in manifests), entries=len(manifests), golden=all(tried))


def _facts(
    manifests: list[storage.Manifest], rows: int, checkpoints: int = 0, entries: int = 0, golden: bool = True
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
    """Makes a published log anew from the manifests of its entries, which say exactly what its lines said.

    It ends with the newest entry and begins with the oldest base from which all of them follow each other. Nothing is removed.
    """
    folder = Path(model) / "published" if (Path(model) / "published").is_dir() else Path(model)
    there = directories(folder)
    if not there:
        raise CheckpointError(f"{folder} holds no entries to make a log of")
    with Lock(folder / ".lock", "publishes", patience_s=60.0):
        log = Log(folder)
        try:
            before = log.lines()
        except CheckpointError:
            before = []
        lines = _linked([Entry(path) for _, path in there])
        _check_known(log, before, lines)
        first = next((i for i, line in enumerate(lines) if line.kind == "base"), None)
        if first is None:
            raise CheckpointError(
                f"no base leads to {lines[0].name}, and the entry before it is missing",
                "restore the entries between, or publish a base",
            )
        lines = lines[first:]
        kept = lines[0].sequence
        older = [line for line in before if line.sequence < kept]
        if older and older[-1].hash == lines[0].parent:  # lines of entries that retention removed stay
            lines = [*older, *lines]
        header = Header(lines[0].sequence, kept, lines[0].parent)
        changed = header != log.header or lines != before
        if changed:
            log.rewrite(header, lines)
    outside = [path.name for number, path in there if number < header.kept]
    return {
        "path": str(folder),
        "entries": len([line for line in lines if line.sequence >= header.kept]),
        "first": header.kept,
        "last": lines[-1].sequence,
        "added": len({line.hash for line in lines} - {line.hash for line in before}),
        "outside": outside,
        "changed": changed,
    }


def _check_known(log: Log, before: list[Line], lines: list[Line]) -> None:
    """What the log says already must be what the entries say."""
    found = {line.sequence: line for line in lines}
    for line in before:
        if line.sequence > lines[-1].sequence or found.get(line.sequence, line) != line:
            raise CheckpointError(
                f"{log.folder / line.name}, which {log.path.name} names, is missing or another one",
                "restore it from a copy",
            )


def _linked(entries: list[Entry]) -> list[Line]:
    """Lines of the newest entries that follow each other."""
    lines: list[Line] = []
    for entry in reversed(entries):
        line = Line.of(entry)
        if line.name != name_of(line.sequence, line.kind):
            raise CheckpointError(
                f"{entry.path} holds entry {line.sequence}, a {line.kind}", "give it its own name back"
            )
        if lines and not lines[0].follows(line):
            break
        lines.insert(0, line)
    return lines
