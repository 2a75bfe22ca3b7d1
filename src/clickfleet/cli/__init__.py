"""The command line: each command parses its arguments and makes one call to the library. One file per group of commands.

The `add(app)` of each file registers its commands. Heavy imports stay inside the commands, so that `--help` is fast.
"""

import os
import sys
from importlib import import_module
from typing import Annotated

import typer

import clickfleet
from clickfleet.cli import frame

GROUPS = (
    "about",
    "logs",
    "training",
    "cluster",
    "online",
    "serving",
    "inspecting",
    "workbench",
    "words",
    "migrating",
)


def build() -> typer.Typer:
    app = typer.Typer(
        name="clickfleet",
        help="Click-through-rate prediction at any scale: read logs, train, learn online, publish, serve.",
        no_args_is_help=True,
        rich_markup_mode=None,  # importing Rich for help takes half a second
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)
        ] = False,
    ) -> None: ...

    for group in GROUPS:
        import_module(f"clickfleet.cli.{group}").add(app)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        print(f"clickfleet {clickfleet.__version__}")
        raise typer.Exit


def main(argv: list[str] | None = None) -> None:
    sys.exit(frame.run(build(), argv, restart=_with_hash_seed))


def _with_hash_seed() -> None:
    """Start the same command again with the hash seed that `pipe` gives to its commands."""
    print(
        "note: so that hash() gives a reader the same ids in every process, this command starts again with PYTHONHASHSEED=0",
        file=sys.stderr,
        flush=True,
    )
    os.execve(sys.executable, sys.orig_argv, os.environ | {"PYTHONHASHSEED": "0"})
