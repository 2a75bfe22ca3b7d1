"""The command line: argv -> one call of the library; one file per group of commands.

Each file of this folder has an `add(app)` that registers its commands; heavy imports stay inside the commands, so that `--help` is quick.
"""

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
    "publishing",
    "serving",
    "inspecting",
    "workbench",
    "bench",
    "words",
    "migrating",
)


def build() -> typer.Typer:
    app = typer.Typer(
        name="clickfleet",
        help="Click-through-rate prediction at any scale: read logs, train, keep training, publish, serve.",
        no_args_is_help=True,
        rich_markup_mode=None,  # help by Rich takes half a second to import
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_version)
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
    sys.exit(frame.run(build(), argv))
