"""Forget keys in a run that is not training, and tell where they still are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

from clickfleet.config.load import Config
from clickfleet.data.batch import Keys
from clickfleet.data.schema import Schema
from clickfleet.errors import CheckpointError
from clickfleet.online.calibrator import forget_state
from clickfleet.store import atomic, checkpoint, disk_folder, erasure, mirror, published, run_folder
from clickfleet.store.erasure import ForgottenKeys, Holder, KeySearch, Values, WantedKeys, holds
from clickfleet.store.lock import Lock
from clickfleet.store.published import Log

REDIS = ("redis://", "rediss://")
UNSEARCHED = (
    *("quarantine.txt", "quarantine", "bad-batch-*.npz", "spool", "feed", "shows", "feedback"),
    *("report.html", "metrics.jsonl", "log.txt", "tensorboard", "model"),
)
"""Parts of a run folder that may hold raw values of the data, or rows as text (`model`, of publish.done_files)."""
VOCABULARY = "vocabulary.txt"


class ForgetResult(TypedDict):
    """What `forget` did, and the places that still hold some of the keys."""

    keys: int
    """Distinct keys that were given."""
    holders: list[Holder]
    ok: NotRequired[bool]
    """With `verify` or `now`: whether no place holds any of the keys."""
    removed: NotRequired[int]
    """Rows that the newest checkpoint had of them."""
    rows: NotRequired[int]
    """Rows that are left in it."""
    deletions: NotRequired[int]
    """Keys that the next entry deletes for consumers."""
    names: NotRequired[int]
    """Values removed from names.json."""
    checkpoint: NotRequired[str | None]
    """The new checkpoint; None if the newest one had none of the keys."""
    replaced: list[str]
    """Checkpoints that are kept as the best, or as those of epochs, and were written again."""
    unsearched: NotRequired[list[str]]
    """What else is in the run folder and may hold raw values."""
    dropped: NotRequired[list[str]]
    """With `now`: the checkpoints and entries that were removed."""
    entry: NotRequired[str | None]
    """With `now`: the base that was published."""


def forget(
    run: str | Path,
    keys: str | Path | Sequence[int] | Keys | None = None,
    values: Values | None = None,
    *,
    now: bool = False,
    verify: bool = False,
    trust: bool = False,
) -> ForgetResult:
    """Remove the rows of keys, and of `values` by slot, from a run that is not training. Tell where they still are.

    `keys` are numbers, or a file: per line a key, or a slot, a tab and a value; or a table with a column `key` or columns named like
    slots. A new checkpoint is written, and the next entry deletes the rows for consumers. Older checkpoints and entries remain until
    retention removes them. With `now`, a base is published and all of them are removed. With `verify`, nothing changes.
    """
    url = mirror.url_of(run)
    if verify:
        return _verified(url or str(Path(run).absolute()), keys, values)
    if url is not None:
        raise CheckpointError(
            f"cannot forget in a run at a URL: only the newest checkpoint of {url} is downloaded",
            "copy the folder to this machine, forget there and copy it back; --verify reads a URL",
        )
    folder = Path(run).absolute()
    if not (folder / "checkpoints").is_dir():
        raise CheckpointError(f"{run} is not a run folder with checkpoints")
    with run_folder.open_folder(folder):
        checkpoints = folder / "checkpoints"
        newest = checkpoint.latest(checkpoints)
        schema = run_folder.read_schema(newest)
        wanted = erasure.read_keys(schema, keys, values)
        if (newest / VOCABULARY).exists():
            raise CheckpointError(
                f"{folder} holds word vectors, whose vocabulary is part of every checkpoint",
                "prepare the corpus again without the words, and train anew",
            )
        checkpoint.forget_after(
            checkpoints, run_folder.step(newest)
        )  # a killed run wrote them and did not register them
        return _forget(folder, newest, wanted, schema, now, trust)


def _forget(folder: Path, newest: Path, keys: WantedKeys, schema: Schema, now: bool, trust: bool) -> ForgetResult:
    checkpoints, log, config = newest.parent, Log(folder / "published"), run_folder.read_config(newest)
    step = run_folder.step(newest)
    _clean(folder, config)
    ForgottenKeys(folder).add(keys, step + 1, _oldest(folder, log))
    search = KeySearch(str(checkpoints), keys, schema)
    before = search.checkpoint(newest.name)
    result: ForgetResult = {
        "keys": len(keys),
        "removed": 0,
        "rows": _rows(newest),
        "deletions": before["marks"],
        "names": 0,
        "checkpoint": None,
        "replaced": [],
        "holders": [],
        "unsearched": [path.name for pattern in UNSEARCHED for path in sorted(folder.glob(pattern))],
    }
    if holds(before):
        done = erasure.rewrite(newest, keys, step=step + 1, edit_state=forget_state)
        checkpoint.register(done.path, config.run.keep)
        result |= {
            "removed": done.removed,
            "rows": done.rows,
            "deletions": done.deletions,
            "checkpoint": str(done.path),
        }
    for path in sorted({*checkpoint.epochs(checkpoints).values(), checkpoint.best(checkpoints)} - {None}):  # type: ignore[type-var]
        assert path is not None
        if holds(search.checkpoint(path.name)):  # retention never removes it
            erasure.rewrite(path, keys, edit_state=forget_state)
            result["replaced"].append(str(path))
    result["names"] = erasure.forget_names(folder, schema, keys)
    if now:
        result["dropped"], result["entry"] = _drop_older(folder, config, log, trust)
    result["holders"] = _holders(str(folder), config, keys, schema)
    if now:
        result["ok"] = not any(map(holds, result["holders"]))
    return result


def _rows(path: Path) -> int:
    manifest = atomic.read_manifest(path, "checkpoint")
    return int(manifest["short_rows"] + manifest["full_rows"])


def _clean(folder: Path, config: Config) -> None:
    """Remove what killed processes left: parts of checkpoints and entries, and rows in the directory of table.disk."""
    erasure.remove_leftovers(folder / "checkpoints")
    if (folder / "published").is_dir():
        with Lock(folder / "published" / ".lock", "publishes", patience_s=60.0):
            erasure.remove_leftovers(folder / "published")
    if config.table.disk is not None:
        disk_folder.remove_unused(config.table.disk)


def _oldest(folder: Path, log: Log) -> int:
    """Return the step of the oldest checkpoint or entry that is kept."""
    kept = [log.folder / line.name for line in log.kept()] if log.path.is_file() else []
    entries = [int(published.Entry(path).manifest["step"]) for path in kept if path.is_dir()]
    return min([*checkpoint.steps(folder / "checkpoints"), *entries])


def _drop_older(folder: Path, config: Config, log: Log, trust: bool) -> tuple[list[str], str | None]:
    """Remove older checkpoints, publish a base if there is a log, and remove the entries before it, also from copies."""
    from clickfleet.online.manual import publish  # it needs torch

    checkpoints = folder / "checkpoints"
    entry = None
    if log.path.is_file():
        entry = publish(folder, "base", locked=True, trust=trust)["entry"]
    dropped = [str(checkpoint.step_folder(checkpoints, step)) for step in checkpoint.prune(checkpoints, 1)]
    if entry is not None:
        with Lock(log.folder / ".lock", "publishes", patience_s=60.0):
            dropped += [str(log.folder / name) for name in published.prune(log, 1)]
        to = config.publish.to
        if to is not None and not to.startswith(REDIS):
            from clickfleet.online.publisher import copy_to

            copy_to(log, to)
            kept = log.kept()[0].sequence
            dropped += [f"{to.rstrip('/')}/{name}" for name in erasure.remove_old_entries(to, kept)]
    return dropped, entry


def _verified(run: str, keys: str | Path | Sequence[int] | Keys | None, values: Values | None) -> ForgetResult:
    schema = erasure.schema_at(run)
    wanted = erasure.read_keys(schema, keys, values)
    folder, config = Path(run), None
    if mirror.url_of(run) is None and (folder / "checkpoints").is_dir():
        config = run_folder.read_config(checkpoint.latest(folder / "checkpoints"))
    holders = _holders(run, config, wanted, schema)
    return {"keys": len(wanted), "replaced": [], "holders": holders, "ok": not any(map(holds, holders))}


def _holders(run: str, config: Config | None, keys: WantedKeys, schema: Schema) -> list[Holder]:
    """Return every place that holds or names one of the keys: the run, copies of its log, and folders of table.disk."""
    out = list(KeySearch(run, keys, schema).holders())
    if config is None:
        return out
    to = config.publish.to
    if to is not None and to.startswith(REDIS):
        found = erasure.held_in_redis(to, keys)
        out += [] if found is None else [found]
    elif to is not None:
        out += KeySearch(to, keys, schema).holders()
    for path in disk_folder.unused_folders(config.table.disk) if config.table.disk is not None else ():
        out.append(erasure.leftover(str(path)))
    return out


def describe(holder: Holder) -> str:
    """Return a line about a place that holds keys."""
    if holder["rows"] is None:
        return f"{holder['place']}: left by a killed process, may hold rows"
    parts = {
        "rows": holder["rows"],
        "keys in golden requests": holder["golden"],
        "names": holder["names"],
        "slices": holder["slices"],
        "keys named as deleted": holder["marks"],
    }
    return f"{holder['place']}: " + ", ".join(f"{count:,} {what}" for what, count in parts.items() if count)
