"""The frame of every command: its result, the `--json` line, and the exit code of an error.

A command returns its result as a dictionary. With `--json` the frame prints it as the last line of stdout. `say` prints all other
messages: to stderr with `--json`, otherwise to stdout.
"""

import functools
import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from clickfleet.errors import ClickfleetError, HashSeedError, hide
from clickfleet.store.atomic import FULL

USER_ERROR, USAGE_ERROR, INTERNAL_ERROR = 1, 2, 3

Result = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Result | None])

Trust = Annotated[
    bool,
    typer.Option("--trust", help="Allow code named by the model or server to run: Python files and pipe commands."),
]

_json = False


def say(text: str) -> None:
    """Print a message, with passwords hidden."""
    print(hide(text), file=sys.stderr if _json else sys.stdout, flush=True)


def command(app: typer.Typer, name: str | None = None, *, verbatim: bool = False) -> Callable[[F], F]:
    """Register a function as a command that also accepts `--json`.

    The function's docstring is the help, its signature defines the options, and it returns the keys of the `--json` line.
    With `verbatim`, everything after the first argument is passed on unparsed.
    """

    def register(function: F) -> F:
        @functools.wraps(function)
        def run(*args: Any, json: bool = False, **kwargs: Any) -> None:
            global _json
            _json = json
            try:
                result = function(*args, **kwargs)
                if json:
                    print(to_json(result or {}), flush=True)
                if result and result.get("ok") is False:  # a failed check exits like a user error
                    raise typer.Exit(USER_ERROR)
            except BrokenPipeError:  # the consumer closed the pipe, as in `clickfleet inspect run | head`
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

        signature = inspect.signature(function, eval_str=True)
        option = inspect.Parameter(
            "json",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[
                bool, typer.Option("--json", help="Print the result as one line of JSON, the last on stdout.")
            ],
        )
        run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]
        summary = (function.__doc__ or "").strip().partition("\n")[0]  # click would truncate it
        settings = {"allow_interspersed_args": False} if verbatim else {}
        app.command(name or function.__name__.replace("_", "-"), short_help=summary, context_settings=settings)(run)
        return function

    return register


def to_json(result: Result) -> str:
    """Return one line of strict JSON. Non-finite numbers become null, passwords in URLs are hidden."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [clean(item) for item in value]
        if isinstance(value, str):
            return hide(value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(clean(result), ensure_ascii=False, default=lambda value: hide(str(value)))


def run(app: typer.Typer, argv: list[str] | None = None, restart: Callable[[], None] = lambda: None) -> int:
    """Run one command and return its exit code: 0 success, 1 user error, 2 wrong usage, 3 internal error.

    `restart` starts the program again with a fixed hash seed, if a user's reader needs one.
    """
    try:
        app(args=argv, standalone_mode=True)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except HashSeedError as error:
        restart()
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except ClickfleetError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:
            where = f": {error.filename} was not written" if error.filename else ""
            print(f"error: the disk is full{where}\n  free space and try again", file=sys.stderr)
            return USER_ERROR
        print(hide(traceback.format_exc()), file=sys.stderr)
        print("\nThis is a bug in clickfleet: please report it with the lines above.", file=sys.stderr)
        return INTERNAL_ERROR
    return 0
