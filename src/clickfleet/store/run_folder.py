"""The folder of a run: local and locked, and mirrored if the run is at a URL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from clickfleet.config.load import Config, checked, dump, with_new_names
from clickfleet.config.load import read as read_yaml
from clickfleet.data.names import Names
from clickfleet.data.schema import Schema
from clickfleet.errors import CheckpointError
from clickfleet.store import atomic, checkpoint, mirror, published
from clickfleet.store.lock import Lock
from clickfleet.store.mirror import NAMES, Mirror

State = dict[str, Any]


def resolve(model: str | Path) -> Path:
    """Return the folder that MODEL names: a checkpoint, or a published entry or log.

    A run folder means its best checkpoint if that is kept, else its newest. RUN/LATEST, RUN/BEST and RUN/EPOCH-0000 name one checkpoint.
    """
    if (url := mirror.url_of(model)) is not None:
        run, _, label = url.rpartition("/")
        if checkpoint.is_label(label):
            return resolve(Mirror(run).fetch_model(label) / label)
        return resolve(Mirror(url).fetch_model())
    path = Path(model)
    if (path / atomic.MANIFEST).is_file() or (path / published.LOG).is_file():
        return path
    if checkpoint.is_label(path.name):
        for folder in (path.parent, path.parent / "checkpoints"):
            if (folder / path.name).is_file():
                return checkpoint.labelled(folder, path.name)
    for folder in (path, path / "checkpoints"):
        if (chosen := checkpoint.chosen(folder)) is not None:
            return chosen
    raise CheckpointError(
        f"{model} holds no model" if path.exists() else f"{model} does not exist",
        "name a run folder with a checkpoint, RUN/LATEST, RUN/BEST if it is kept, a checkpoint, or a published log or entry",
    )


def describe(path: Path) -> str:
    """Describe a resolved path for the user: its URL or path, and whether it is the run's best or newest checkpoint."""
    meanings = {checkpoint.BEST: "the best on validation data", checkpoint.LATEST: "the newest"}
    meaning = next((text for label, text in meanings.items() if checkpoint.is_named(path, label)), None)
    return f"{mirror.origin(path) or path}" + (f" ({meaning})" if meaning else "")


def read_config(path: Path, trust: bool = False) -> Config:
    """Read the configuration of the run that wrote a checkpoint. Without `trust`, code that it names is not run."""
    text = checkpoint.parsed(path, "config.yaml", bytes.decode)
    raw = with_new_names(read_yaml(text, str(path)))
    return checked(Config, raw, source=str(path), origin="" if trust else str(path / "config.yaml"))


def read_schema(path: Path) -> Schema:
    manifest = atomic.read_manifest(path, "checkpoint")
    if "schema" not in manifest:
        raise CheckpointError(f"{path} is the checkpoint of a table, not of a training run")
    with atomic.damage_errors(path / atomic.MANIFEST):
        return Schema.from_dict(manifest["schema"], str(path))


def entries(path: Path) -> list[published.Entry] | None:
    """Return the published entries that make up the model at `path`; None if it is a checkpoint."""
    if (path / published.LOG).is_file():
        return published.Log(path).newest()
    if atomic.read_kind(path) != published.KIND:
        return None
    entry = published.Entry(path)
    if entry.base:
        return [entry]
    log = published.Log(path.parent)
    lines = published.since_base([line for line in log.lines() if line.sequence <= entry.sequence])
    if not lines or lines[-1].hash != entry.hash:
        raise CheckpointError(f"{path} is a delta without its base", "leave it in the folder it was published to")
    return [log.entry(line) for line in lines]


def whole(path: Path) -> Path:
    """Return a checkpoint that has its row files; download it if they are only at its URL."""
    return path if any(path.glob("rows-*")) else resolve(mirror.origin(path) or path)


def step(path: Path) -> int:
    """Return the step of the model at a resolved path."""
    chain = entries(path)
    return int(atomic.read_manifest(path, "checkpoint")["step"] if chain is None else chain[-1].manifest["step"])


def read_state(path: Path) -> State:
    """Read the progress of the run from a checkpoint."""
    state: State = checkpoint.parsed(path, "state.json", json.loads)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path / 'state.json'} is damaged: it holds {type(state).__name__}, not an object")
    return state


def write_names(folder: Path, names: Names) -> None:
    """Write the names of a run, sealed with their hash."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_file(folder / NAMES, atomic.seal(names.to_dict()))


def read_names(path: Path, schema: Schema) -> Names | None:
    """Return the names of the run that wrote the model at a resolved path; None if it has none.

    A published log or entry away from its run has those of its last base.
    """
    inside = [path, *path.parents[:2]] if path.parent.name in ("checkpoints", "published") else [path, path.parent]
    for folder in inside:
        if (folder / NAMES).is_file():
            try:
                return Names.from_dict(atomic.unseal((folder / NAMES).read_bytes()), schema)
            except (ValueError, RecursionError) as error:
                raise CheckpointError(
                    f"{folder / NAMES} is damaged: {error}", "remove it; keys are then shown as numbers"
                ) from error
    if (path / published.LOG).is_file() or (path / atomic.MANIFEST).is_file():
        chain = entries(path)
        return None if not chain else published_names(chain[-1], schema)
    return None


def published_names(entry: published.Entry, schema: Schema) -> Names | None:
    """Return the names in the base of an entry, which may be the entry itself; None if it has none."""
    base = entry
    if not entry.base:
        older = [path for number, path in published.directories(entry.path.parent) if number < entry.sequence]
        before = (published.Entry(path) for path in reversed(older) if path.name.endswith("-base"))
        found = next((one for one in before if one.manifest["chain"] == entry.manifest["chain"]), None)
        if found is None:
            return None
        base = found
    plain = base.info.get("names")
    if plain is None:
        return None
    with atomic.damage_errors(base.path / published.INFO):
        return Names.from_dict(plain, schema)


NO_CHECKPOINT = "no checkpoint in {} yet: starting from the beginning"


def local_folder(run: str | Path) -> Path:
    """Return the local folder of a run, which may be at a URL."""
    url = mirror.url_of(run)
    return Path(run).absolute() if url is None else mirror.local_folder(url)


@contextmanager
def open_folder(run: str | Path, resume: bool | None = None, rows: bool = True) -> Iterator[tuple[Path, Mirror | None]]:
    """Lock and yield the local folder of a run, and its mirror if the run is at a URL.

    A run at a URL is downloaded first and uploaded at the end. `resume`: whether there must be a checkpoint (True), must be none (False)
    or either (None). `rows`: whether this machine needs the row files.
    """
    url, folder = mirror.url_of(run), local_folder(run)
    with Lock(folder / ".lock", "trains" if url is None else f"trains {url}"):
        if url is None:
            yield folder, None
            return
        mirror.check_writable(url)
        copy = Mirror(url, folder)
        copy.empty()
        if resume is False and copy.has_checkpoint():
            raise CheckpointError(f"{url} already holds a run", "resume it with --resume, or choose another run.dir")
        if resume is not False:
            copy.fetch(rows, required=resume is True)
        try:
            yield folder, copy
        finally:
            copy.close()


RUN_FILES = (
    *("checkpoints", "config.yaml", "log.txt", "metrics.jsonl", "report.html", "tensorboard", "profile", "logs"),
    *("processes.json", "quarantine.txt", "bad-batch-*.npz", "worker-*", "cluster"),
)
"""What training writes into a run folder."""


def check_replaceable(folder: Path) -> None:
    """Refuse to replace a folder that does not hold a run of ours, or whose published log may be in use."""
    checkpoints = folder / "checkpoints"
    if folder.is_symlink() or checkpoints.is_symlink():
        link = folder if folder.is_symlink() else checkpoints
        raise CheckpointError(f"{link} is a symbolic link, which is not replaced", "choose another run.dir")
    if not any((path / atomic.MANIFEST).is_file() for path in checkpoints.glob("step-*")):
        raise CheckpointError(
            f"{folder} is not replaced: {checkpoints} holds no checkpoint", "choose another run.dir, or remove it first"
        )
    if (folder / "published").exists():
        raise CheckpointError(
            f"{folder} is not replaced: servers may follow the published log in it", "choose another run.dir"
        )


def remove_run(folder: Path) -> None:
    """Remove what training wrote into a folder. Files of others stay."""
    check_replaceable(folder)
    for pattern in RUN_FILES:
        for path in sorted(folder.glob(pattern)):
            atomic.remove(path)


def write_config(folder: Path, config: Config) -> None:
    """Write the configuration into a run folder, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_file(folder / "config.yaml", dump(at_origin(config)).encode())


def at_origin(config: Config) -> Config:
    """Return the configuration with the URL of its run instead of the local folder."""
    url = mirror.origin(config.run.dir)
    return config if url is None else replace(config, run=replace(config.run, dir=url))
