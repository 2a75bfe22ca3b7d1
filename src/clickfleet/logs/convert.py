"""A log in one format -> the same rows in another."""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from clickfleet.bad_lines import Policy
from clickfleet.files import PACKED, expand
from clickfleet.formats import load
from clickfleet.logs.sink import ENDINGS, Sink
from clickfleet.logs.source import COLUMNAR, Source, schema_for, watched
from clickfleet.logs.target import Target
from clickfleet.schema import Schema, write_schema


def convert(
    inputs: str | Path | Iterable[str | Path],
    out: str | Path,
    source: str,
    target: str,
    *,
    keys: str | None = None,
    schema: Schema | None = None,
    drop_dense: bool = False,
    bad_lines: Policy = "error",
) -> dict[str, Any]:
    """Writes the rows of `inputs` to `out`: one file (`-`: stdout), or one per input where `out` is a folder (a/).

    `keys` is the rule that makes keys: `hash64`, `py2` (Criteo's published ids and scaling, or `py2 mod M`), or `raw`,
    which keeps values as they are. Default: raw between formats of raw columns, else the rule of the schema.
    """
    files = expand(inputs)
    raw = source in COLUMNAR and target in COLUMNAR and keys in (None, "raw")
    read_as = schema_for(source, schema, None if raw else keys)
    goal = Target(target, read_as, raw, drop_dense)
    log = Source(files, source, read_as, bad_lines)
    columns = raw or (source in ("criteo", "csv") and bool(read_as.dense))
    written: list[str] = []
    rows = 0
    with ExitStack() as open_sinks, watched(files, "converting") as bar:
        sink: Sink | None = None
        for path in files:
            if sink is None or _is_folder(out):
                open_sinks.close()  # the file before is whole
                sink = open_sinks.enter_context(Sink(_place(out, path, target), target))
                written.append(sink.path)
            for piece in log.pieces(path, columns=columns, bar=bar):
                sink.write(goal.encode(piece), len(piece), goal.header(piece))
                rows += len(piece)
    result = {"rows": rows, "bad_lines": log.counters.bad_lines, "files": written, "schema": None}
    if not raw and goal.result != load(target).schema and str(out) != "-":
        where = Path(out) / "schema.yaml" if _is_folder(out) else Path(f"{out}.schema.yaml")
        write_schema(goal.result, where)
        result["schema"] = str(where)
    return result


def _is_folder(out: str | Path) -> bool:
    return str(out) != "-" and (str(out).endswith(os.sep) or os.path.isdir(out))


def _place(out: str | Path, path: str, target: str) -> str:
    if not _is_folder(out):
        return str(out)
    name = path.rstrip("/").rsplit("/", 1)[-1]
    for ending in _endings():
        name = name.removesuffix(ending)
    return str(Path(out) / (name + ENDINGS.get(target, "")))


def _endings() -> Iterator[str]:
    yield from PACKED
    yield from (*ENDINGS.values(), ".tsv", ".txt")
