"""What the command `read` opens: a configuration, ours or PaddleRec's, and files or standard input."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from clickfleet.cli.migrating import is_paddlerec_config, translation

if TYPE_CHECKING:
    from clickfleet.config.load import Config
    from clickfleet.data.schema import Schema

MOST_BYTES = 64 << 20
"""Bytes of standard input that are read."""


def config_and_schema(
    file: Path | None, options: Sequence[str], form: str | None, schema: Path | None
) -> "tuple[Config, Schema | None]":
    """Return the configuration to read with, and its schema if it is known. The arguments override the file."""
    from clickfleet.config.check import configure
    from clickfleet.data.dataset import with_format
    from clickfleet.data.schema import read_schema

    if is_paddlerec_config(file):
        assert file is not None
        translated = translation(file, options)
        config, found = translated.config, translated.schema
        files = config.data.train or (config.online.dir and [config.online.dir]) or ()
        config = replace(config, data=replace(config.data, train=tuple(files)))
    else:
        extra = [f"data.format.name={form}"] if form is not None and file is None else []
        config, found = configure(None if file is None else str(file), [*extra, *options]), None
    config = with_format(config, form)
    if schema is not None:
        found = read_schema(schema)
    return config, found


def settled(
    config: "Config", schema: "Schema | None", keys: str | None, files: Sequence[str]
) -> "tuple[Config, Schema]":
    """Return the configuration and schema for files, whose format and columns may have to be guessed."""
    from clickfleet.data.dataset import schema_of, settle

    config, guess = settle(config, list(files), schema)
    found = schema or (guess.schema if guess is not None else schema_of(config))
    return config, found if keys is None else found.with_keys(keys)


@contextmanager
def opened(data: Sequence[str]) -> Iterator[list[str]]:
    """Yield the files of the arguments. For `-`, standard input is one of them."""
    from clickfleet.data.files import expand

    if not data:
        raise typer.BadParameter("Missing argument 'DATA...'.")
    if "-" not in data:
        yield expand(list(data))
        return
    with tempfile.TemporaryDirectory(prefix="clickfleet-") as folder:
        content = sys.stdin.buffer.read(MOST_BYTES)
        if len(content) == MOST_BYTES:  # there may be more; keep whole lines
            content = content[: content.rfind(b"\n") + 1]
        stdin = Path(folder) / "stdin"
        stdin.write_bytes(content)
        yield [str(stdin) if path == "-" else path for path in data]
