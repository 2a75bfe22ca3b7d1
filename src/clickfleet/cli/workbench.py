"""Commands of the workbench: `compare`, `tune`, `dashboard`."""

from pathlib import Path
from typing import Annotated

import typer

from clickfleet.cli.frame import Result, command, say
from clickfleet.cli.training import given

Settings = Annotated[
    list[str] | None, typer.Argument(help="Settings over the file's, such as train.epochs=3.", metavar="[KEY=VALUE]...")
]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Runs trained at a time, each in its own process (default: as cores allow).")
]


def add(app: typer.Typer) -> None:
    command(app)(compare)
    command(app)(tune)
    command(app)(dashboard)


def compare(
    config: Annotated[str, typer.Argument(help="A YAML file: the data, and all that the runs have in common.")],
    settings: Settings = None,
    models: Annotated[
        str | None, typer.Option(help="Models by commas, own .py files too (default: the configuration's).")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A study of one setting: key=a,b,c. Repeat it for more; each is a table and a plot."
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds by commas; tables hold the means (default: train.seed).")
    ] = None,
    jobs: Jobs = None,
    out: Annotated[Path, typer.Option(help="Folder for runs, compare.csv, compare.md and compare.html.")] = Path(
        "compare"
    ),
) -> Result:
    """Train models and settings on the same data and seeds; tables and curves. Again, it goes on where it stopped."""
    from clickfleet.workbench import outcome
    from clickfleet.workbench.compare import compare as act

    path, overrides = given(config, settings)
    try:
        numbers = [int(text) for text in seeds.split(",")] if seeds else []
    except ValueError:
        raise typer.BadParameter(f"--seeds {seeds} are no whole numbers") from None
    names = models.split(",") if models else []
    found = act(path, *overrides, models=names, sets=set_ or [], seeds=numbers, jobs=jobs, out=out, say=say)
    say(outcome.selection(found).text())
    for table in outcome.studies(found).values():
        say("\n" + table.text())
    if found.failed:
        say(f"\n{len(found.failed)} failed:")
    for name, error in found.failed.items():
        say(f"  {name}: {error}")
    say(f"\n{found.page}")
    if found.signal is not None:
        say("stopped by a signal; the same command goes on")
        raise typer.Exit(128 + found.signal)
    return found.to_dict()


def tune(
    config: Annotated[str, typer.Argument(help="A YAML file whose section tune says what may be tried.")],
    settings: Settings = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Trials in all, those of earlier calls included (default: tune.trials).")
    ] = None,
    jobs: Jobs = None,
    out: Annotated[Path, typer.Option(help="Folder for study.db, trials, best.yaml, tune.csv and tune.html.")] = Path(
        "tune"
    ),
) -> Result:
    """Search for settings with Optuna; bad trials are given up early. Again, it goes on where it stopped."""
    from clickfleet.configuring import configure
    from clickfleet.workbench.search_page import table
    from clickfleet.workbench.tune import tune as act

    path, overrides = given(config, settings)
    wanted = configure(path, overrides)
    found = act(wanted, trials=trials, jobs=jobs, out=out, say=say)
    say(table(found, wanted).text())
    if found.best is not None:
        say(f"\nbest configuration: {found.config} (clickfleet train {found.config})")
    say(str(found.page))
    if found.signal is not None:
        say("stopped by a signal; the same command goes on")
        raise typer.Exit(128 + found.signal)
    return found.to_dict()


def dashboard(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, also online ones; folders of compare and tune.", metavar="RUN...")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")] = 8070,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    open_: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> Result:
    """Follow runs on a local page while they train: curves, table, speed; of online runs entries, lag and freshness."""
    import signal
    import threading

    from clickfleet.workbench.dashboard import Dashboard

    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    with Dashboard(runs, port, every) as page:
        say(f"ready: {page.url}  (Ctrl-C stops)")
        if open_:
            import webbrowser

            webbrowser.open(page.url)
        over.wait()
        return {"url": page.url}
