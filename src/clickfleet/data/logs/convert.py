"""Convert a log to another format."""

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from clickfleet.data.bad_lines import Policy
from clickfleet.data.files import PACKED, expand
from clickfleet.data.formats import load
from clickfleet.data.logs.source import COLUMNAR, LogReport, LogSource, progress_of, recognise
from clickfleet.data.logs.target import ENDINGS, OutputFile, Target
from clickfleet.data.schema import Schema, write_schema


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
) -> LogReport:
    """Write the rows of `inputs` to `out`: one file (`-`: stdout), or one file per input if `out` is a folder (a/).

    `keys` is the rule for keys: `hash64`, `py2` (Criteo's published ids and scaling, or `py2 mod M`), or `raw`, which keeps
    values unchanged. Default: raw between formats of raw columns, else the rule of the schema.
    """
    files = expand(inputs)
    form, read_as, _ = recognise(files, source, schema)
    source = form.name
    raw = source in COLUMNAR and target in COLUMNAR and keys in (None, "raw")
    if keys is not None and not raw:
        _, read_as, _ = recognise(files, form, schema, keys)
    goal = Target(target, read_as, raw, drop_dense)
    log = LogSource(files, form, read_as, bad_lines)
    columns = raw or (source in ("criteo", "csv") and bool(read_as.dense))
    written: list[str] = []
    rows = 0
    with ExitStack() as open_sinks, progress_of(files, "converting") as bar:
        sink: OutputFile | None = None
        for path in files:
            if sink is None or _is_folder(out):
                open_sinks.close()  # complete the previous file
                sink = open_sinks.enter_context(OutputFile(_place(out, path, target), target))
                written.append(sink.path)
            for piece in log.pieces(path, columns=columns, bar=bar):
                sink.write(goal.encode(piece), len(piece), goal.header(piece))
                rows += len(piece)
    result: LogReport = {"rows": rows, "bad_lines": log.counters.bad_lines, "files": written, "schema": None}
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
    for ending in (*PACKED, *ENDINGS.values(), ".tsv", ".txt"):
        name = name.removesuffix(ending)
    return str(Path(out) / (name + ENDINGS.get(target, "")))
