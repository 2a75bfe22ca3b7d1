"""A translated configuration as files of ours: YAML, the schema where it is no preset, and the report."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import yaml

from clickfleet.errors import ConfigError
from clickfleet.migrate.translate import Translated
from clickfleet.migrate.words import write_vocabulary
from clickfleet.schema import write_schema

PATHS = (("data", "train"), ("data", "test"), ("run", "dir"), ("online", "dir"), ("train", "init_from"))


def write(translated: Translated, out: Path) -> list[Path]:
    """Writes OUT, OUT's schema and OUT's report; the files written. Paths in it are relative to it."""
    out = out.absolute()
    schema, report = out.with_suffix(".schema.yaml"), out.with_suffix(".report.md")
    base = out.parent
    raw = copy.deepcopy(translated.raw)
    for section, key in PATHS:
        if isinstance(raw.get(section), dict) and isinstance(raw[section].get(key), str):
            raw[section][key] = _relative(raw[section][key], base)
    form = raw["data"]["format"]
    if form["name"].endswith(".py"):
        form["name"] = _relative(form["name"], base, here="./")
    if "folder" in form:
        form["folder"] = _relative(form["folder"], base)
    written = [out, report]
    try:
        base.mkdir(parents=True, exist_ok=True)
        if translated.dictionary is not None:
            raw["data"]["vocabulary"] = write_vocabulary(translated.dictionary, out.with_suffix(".vocabulary.txt")).name
            written.insert(1, out.with_suffix(".vocabulary.txt"))
        if translated.needs_schema:
            raw["data"]["schema"] = schema.name
            write_schema(translated.schema, schema)
            written.insert(1, schema)
        head = f"# {translated.network} of {translated.original.path.name}; what became of every key: {report.name}\n"
        out.write_text(head + yaml.safe_dump(raw, sort_keys=False, allow_unicode=True), encoding="utf-8")
        report.write_text(
            translated.report.markdown(f"What became of {translated.original.path.name}"), encoding="utf-8"
        )
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from error
    return written


def _relative(path: Any, base: Path, here: str = "") -> Any:
    if "://" in path:
        return path
    found = os.path.relpath(path, base)
    return here + found if here and not found.startswith("..") else found
