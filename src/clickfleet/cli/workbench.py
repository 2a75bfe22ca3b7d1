"""The commands `compare`, `tune`, `dashboard`, `bench modes` and `bench infer`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from clickfleet.cli.cluster import refuse_role
from clickfleet.cli.frame import Result, Trust, command, say
from clickfleet.cli.migrating import ConfigFile, model_and_data, paddlerec_keys
from clickfleet.cli.migrating import Settings as Options
from clickfleet.cli.training import Format, Inputs, ModelOrConfig, RecipeName, resolve_config

Settings = Annotated[
    list[str] | None,
    typer.Argument(help="Override settings of the file, such as train.epochs=3.", metavar="KEY=VALUE"),
]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Runs trained at the same time, each in its own process (default: as cores allow)."),
]


Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Discard the results of earlier calls in the folder and start anew.")
]


def add(app: typer.Typer) -> None:
    command(app)(compare)
    command(app)(tune)
    command(app)(dashboard)
    bench = typer.Typer(help="Compare training modes; measure inference.", no_args_is_help=True)
    app.add_typer(bench, name="bench")
    command(bench)(modes)
    command(bench)(infer)


def compare(
    config: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file, ours or PaddleRec's, with the data and everything the runs share; or the training data itself.",
            metavar="CONFIG|DATA",
            show_default=False,
        ),
    ] = None,
    settings: Settings = None,
    recipe: RecipeName = None,
    models: Annotated[
        str | None,
        typer.Option(help="Models to train; .py files too (default: the model of CONFIG).", metavar="NAME,NAME,..."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Study one setting: train every model with each value. Repeat it for more studies, each with a table and plots. "
            "Settings joined by + vary together: dense.optimizer+table.rule.name=sgd,adam. "
            "For a PaddleRec configuration, its keys work too: runner.epochs=1,2.",
            metavar="KEY=A,B,...",
        ),
    ] = None,
    course: Annotated[
        bool,
        typer.Option(
            "--course",
            help="All tables of PaddleRec's course: epochs, batch size, learning rate, layers, optimizer of rows and network. "
            "A --set of the same setting replaces the values of its table.",
        ),
    ] = False,
    language: Annotated[
        str, typer.Option(help="Language of the headings in compare.md and compare.html.", metavar="en|zh")
    ] = "en",
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Train with each of these seeds; tables show the means (default: train.seed).", metavar="N,N,..."
        ),
    ] = None,
    jobs: Jobs = None,
    overwrite: Overwrite = False,
    out: Annotated[Path, typer.Option(help="Folder for runs, compare.csv, compare.md and compare.html.")] = Path(
        "compare"
    ),
    config_file: ConfigFile = None,
    option: Annotated[
        list[str] | None,
        typer.Option("-o", help="Override a setting of the file for all runs; repeatable.", metavar="KEY=VALUE"),
    ] = None,
) -> Result:
    """Train several models and settings on the same data and seeds, and compare them in tables and curves.

    The same command resumes an interrupted comparison.

    Example: `clickfleet compare config.yaml --models deepfm,dcn_v2 --set dense.lr=0.01,0.001`
    """
    from clickfleet.workbench import compare as comparison

    refuse_role("compare", "trains every model itself")
    path, overrides = resolve_config(config, settings, config_file, option, recipe=recipe)
    first = [*([str(config_file)] if config_file is not None else []), *([config] if config else [])]
    others = paddlerec_keys(first[0], [*(option or []), *first[1:], *(settings or [])]) if first else None
    try:
        numbers = [int(text) for text in seeds.split(",")] if seeds else []
    except ValueError:
        raise typer.BadParameter(f"--seeds {seeds}: expected whole numbers separated by commas") from None
    names = models.split(",") if models else []
    done = comparison.compare(
        path,
        *overrides,
        models=names,
        sets=set_ or [],
        seeds=numbers,
        jobs=jobs,
        overwrite=overwrite,
        out=out,
        say=say,
        other_keys=others,
        course=course,
        language=language,
    )
    say(comparison.model_table(done).text())
    for table in comparison.study_tables(done).values():
        say("\n" + table.text())
    if done.failed:
        say(f"\n{len(done.failed)} failed:")
    for name, error in done.failed.items():
        say(f"  {name}: {error}")
    say(f"\n{done.page}")
    if done.signal is not None:
        say("stopped by a signal; the same command resumes")
        raise typer.Exit(128 + done.signal)
    return done.to_dict()


def tune(
    config: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file, whose section tune may define the search space; or the training data itself.",
            metavar="CONFIG|DATA",
            show_default=False,
        ),
    ] = None,
    settings: Settings = None,
    recipe: RecipeName = None,
    trials: Annotated[
        int | None,
        typer.Option(min=1, help="Total number of trials, including those of earlier calls (default: tune.trials)."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.01, help="End the search after this time, whatever the number of trials.", metavar="MINUTES"
        ),
    ] = None,
    jobs: Jobs = None,
    overwrite: Overwrite = False,
    out: Annotated[Path, typer.Option(help="Folder for study.db, trials, best.yaml, tune.csv and tune.html.")] = Path(
        "tune"
    ),
) -> Result:
    """Search for good settings with Optuna. Trials that are not promising are stopped early.

    Without a search space (tune.space), it tries values around the automatic settings for the data, and tells which settings mattered.
    The same command resumes an interrupted search.

    Example: `clickfleet tune clicks.csv --minutes 2`
    """
    from clickfleet.config.check import configure
    from clickfleet.workbench import tune as search

    refuse_role("tune", "trains every trial itself")
    base = configure(*resolve_config(config, settings, recipe=recipe))
    done = search.tune(base, trials=trials, minutes=minutes, jobs=jobs, overwrite=overwrite, out=out, say=say)
    say(search.trial_table(done).text())
    if done.importances:
        mattered = sorted(done.importances.items(), key=lambda item: -item[1])
        say("what mattered: " + ", ".join(f"{key} {share:.0%}" for key, share in mattered))
    if done.best is not None:
        say(f"\nbest configuration: {done.config} (clickfleet train {done.config})")
    say(str(done.page))
    if done.signal is not None:
        say("stopped by a signal; the same command resumes")
        raise typer.Exit(128 + done.signal)
    return done.to_dict()


def dashboard(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, or folders that hold runs, such as those of compare and tune.", metavar="RUN"
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 selects a free one.")] = 8070,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> Result:
    """Show runs on a local page while they train: curves, table, speed; for online runs also entries, lag and freshness."""
    import signal
    import threading

    from clickfleet.workbench.dashboard import Dashboard

    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with Dashboard(runs, port, every) as page:
        say(f"ready: {page.url}  (Ctrl-C stops)")
        if open_:
            import webbrowser

            webbrowser.open(page.url)
        stopped.wait()
        return {"url": page.url}


def modes(
    config: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file, ours or PaddleRec's, with the model, table and data; or the training data itself.",
            metavar="CONFIG|DATA",
            show_default=False,
        ),
    ] = None,
    settings: Settings = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers to simulate.", metavar="N,N,...")] = "1,4,16",
    rows: Annotated[int, typer.Option(min=1, help="Number of training rows to use.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Seed of the order in which the simulated workers take turns.")] = 0,
    config_file: ConfigFile = None,
    option: Options = None,
) -> Result:
    """Train in every mode with simulated workers; show AUC, staleness and speed, and recommend a mode."""
    from clickfleet.config import check
    from clickfleet.workbench import mode_advisor

    counts = _numbers(workers, "--workers")
    refuse_role("bench modes", "simulates its workers")
    base = check.configure(*resolve_config(config, settings, config_file, option))
    measured = mode_advisor.measure(base, counts, rows, seed, say)
    say(mode_advisor.table(measured))
    advice = mode_advisor.advise(measured)
    for line in advice:
        say(line)
    return {"rows": [asdict(one) for one in measured], "advice": advice}


def infer(
    model: ModelOrConfig = None,
    data: Inputs = None,
    engines: Annotated[
        str | None,
        typer.Option(
            help="Engines: torch, onnx, int8, providers of ONNX Runtime (default: all usable ones).",
            metavar="NAME,NAME,...",
        ),
    ] = None,
    threads: Annotated[str, typer.Option(help="Numbers of threads per run of the network.", metavar="N,N,...")] = "1,2",
    batch_sizes: Annotated[str, typer.Option(help="Rows per batch.", metavar="N,N,...")] = "1,5,100,1000",
    graph: Annotated[
        str,
        typer.Option(help="Levels of graph optimisation: off, basic, extended, all.", metavar="LEVEL,LEVEL,..."),
    ] = "all,off",
    batches: Annotated[int, typer.Option(min=5, help="Batches to score per combination.")] = 100,
    rows: Annotated[int, typer.Option(min=1, help="Rows to read; batches reuse them.")] = 10_000,
    format: Format = None,  # noqa: A002
    out: Annotated[Path, typer.Option(help="Folder for infer.csv, infer.md and infer.html.")] = Path("infer"),
    config_file: ConfigFile = None,
    option: Options = None,
    trust: Trust = False,
) -> Result:
    """Measure how fast a model scores by engine, threads, batch size and graph optimisation, and the drift of its scores."""
    from clickfleet.workbench import inference

    with model_and_data(model, data or [], config_file, option, trust) as (saved, files):
        if not files:
            raise typer.BadParameter("Missing argument 'DATA...'.")
        measured = inference.measure(
            saved,
            files,
            engines=engines.split(",") if engines else [],
            threads=_numbers(threads, "--threads"),
            batch_sizes=_numbers(batch_sizes, "--batch-sizes"),
            graph=graph.split(","),
            batches=batches,
            rows=rows,
            form=format,
            say=say,
            trust=trust,
        )
    say(inference.text(measured))
    say(f"\n{inference.write_all(measured, out)}")
    return {**measured.to_dict(), "out": str(out)}


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{option} {text}: expected whole numbers of at least 1 separated by commas")
    return numbers
