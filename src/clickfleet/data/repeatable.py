"""Check that a user's reader gives the same rows in every process: two processes read the first lines of a file.

A reader that uses Python's `hash` fails this check: Python salts the hash of text in every process. Its ids would then differ
between two files, two epochs, training and serving.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from clickfleet.config.plugins import Plugin
from clickfleet.data.files import packing
from clickfleet.data.formats import Format, load
from clickfleet.data.schema import Schema
from clickfleet.errors import DataError, HashSeedError

HEAD_LINES = 200
TIME_LIMIT_S = 60.0
HASH_SEED = "PYTHONHASHSEED"
CHECKED = "CLICKFLEET_READER_CHECKED"
"""Environment variable that tells the processes of a run which reader has passed."""


def check_repeatable(plugin: Plugin, form: Format, schema: Schema, path: str) -> None:
    """Raise DataError if a user's reader gives different rows in two processes. Built-in formats always pass."""
    in_process = plugin.name.endswith(".py")
    if "://" in path or not (in_process or form.runs()):
        return
    request = {"name": plugin.name, "settings": dict(plugin.settings), "schema": schema.to_dict()}
    mark = hashlib.blake2b(json.dumps(request, default=str).encode(), digest_size=8).hexdigest()
    if os.environ.get(CHECKED) == mark:
        return
    with TemporaryDirectory(prefix="clickfleet-") as folder:
        request["path"] = _head(path, Path(folder))
        seed = os.environ.get(HASH_SEED, "random")
        salted = in_process and seed == "random"  # `pipe` sets the seed of its command itself
        if _differ(request, ("1", "2") if salted else (seed, seed)):
            if salted and not _differ(request, ("0", "0")):
                raise HashSeedError(
                    f"{plugin.name} gives different ids in every process: it uses hash(), which Python salts anew each time",
                    f"start Python with {HASH_SEED}=0, or replace hash() by zlib.crc32(text.encode())",
                )
            what = plugin.name if in_process else f"the command `{form.runs()}`"
            raise DataError(
                f"{what} gives different rows for the same lines when it runs twice; training could not be repeated or served",
                "remove what changes from run to run: random numbers, the time, the order of a set, hash() of objects",
            )
    os.environ[CHECKED] = mark


def _head(path: str, folder: Path) -> str:
    """Return a file with the first lines of `path`; a compressed file is read as a whole."""
    if packing(path):
        return str(Path(path).absolute())
    head = folder / Path(path).name
    with open(path, "rb") as file:
        head.write_bytes(b"".join(islice(file, HEAD_LINES)))
    return str(head)


def _differ(request: dict[str, Any], seeds: tuple[str, str]) -> bool:
    """Return whether two processes with these hash seeds read different rows. A failure is reported when training reads."""
    readers = [
        subprocess.Popen(
            [sys.executable, "-m", "clickfleet.data.repeatable"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {HASH_SEED: seed, CHECKED: ""},
            text=True,
        )
        for seed in seeds
    ]
    text = json.dumps(request, default=str)
    digests = []
    try:
        for reader in readers:
            assert reader.stdin is not None
            reader.stdin.write(text)
            reader.stdin.close()
            reader.stdin = None
        for reader in readers:
            digest, _ = reader.communicate(timeout=TIME_LIMIT_S)
            if reader.returncode != 0:
                return False
            digests.append(digest.splitlines()[-1:])
    except (subprocess.TimeoutExpired, BrokenPipeError):
        return False
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()  # also closes its output
    return digests[0] != digests[1]


def main() -> None:
    """Print a digest of the rows that the reader described on standard input gives."""
    request = json.load(sys.stdin)
    form = load(Plugin(request["name"], request["settings"]))
    schema, digest = Schema.from_dict(request["schema"]), hashlib.blake2b(digest_size=16)
    for block in form.blocks(request["path"], schema, 0):
        batch = block.parse("all").batch
        for column in (batch.labels, batch.dense, batch.keys, batch.offsets, batch.values):
            digest.update(b"-" if column is None else column.tobytes())
        break
    print(digest.hexdigest())


if __name__ == "__main__":
    main()
