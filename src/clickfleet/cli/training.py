"""Commands about models: `train`, `evaluate`, `predict`, `report`, `verify`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clickfleet.cli.frame import Result, Trust, command, say
from clickfleet.cli.migrating import ConfigFile, Settings, configured, evaluate_old, of_model, predict_old

if TYPE_CHECKING:
    from clickfleet.engine import Engine
    from clickfleet.trained import Trained

RUN = "A run folder (its best checkpoint where that is kept, else its newest), RUN/LATEST, RUN/BEST"
Model = Annotated[
    Path,
    typer.Argument(help=f"{RUN}, a checkpoint, a published log or entry."),
]
ModelOrConfig = Annotated[
    Path | None,
    typer.Argument(
        help=f"{RUN}, a checkpoint, a published log or entry; or a PaddleRec configuration.",
        show_default=False,
        metavar="MODEL",
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Argument(
        help="Files, folders, globs or URLs; .gz and .zst are unpacked. A PaddleRec configuration names its own.",
        show_default=False,
        metavar="DATA...",
    ),
]
Format = Annotated[
    str | None, typer.Option("--format", help="Format of the files (default: that of the training data).")
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Rows scored at a time (default: as in training).")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Score on a cluster: worker processes, each with a share of the files.")
]
Shards = Annotated[int, typer.Option(min=1, help="With --workers: processes that hold the rows.")]
Address = Annotated[
    str | None, typer.Option(help="With --workers: a running Ray cluster (default: one on this machine).")
]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads that score (default: as in training).")]
GraphLevel = Annotated[
    str | None, typer.Option(help="How far ONNX Runtime rewrites the graph: off, basic, extended or all (default).")
]
Arena = Annotated[
    bool | None,
    typer.Option("--arena/--no-arena", help="ONNX Runtime keeps memory for the next run (default: it does)."),
]


def add(app: typer.Typer) -> None:
    command(app)(train)
    command(app)(evaluate)
    command(app)(predict)
    command(app)(report)
    command(app)(verify)


def train(
    config: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file, ours or PaddleRec's; or leave it out and give data.train=…",
            metavar="CONFIG",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings over the file's, such as train.epochs=3 model=dcn_v2; docs/reference/config.md lists them.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run folder's newest checkpoint; without one yet, start.")
    ] = False,
    config_file: ConfigFile = None,
    option: Settings = None,
) -> Result:
    """Train a model; the run folder gets checkpoints, log.txt, metrics.jsonl, config.yaml and report.html."""
    path, overrides = given(config, settings, config_file, option)
    from clickfleet import configuring, run
    from clickfleet.cluster import roles

    role = roles.read()
    if role is not None:
        return _train_in_role(role, configuring.configure(path, overrides), resume)
    done = run.train(path, *overrides, resume=resume)
    tell(done)
    return done.to_dict()


def _train_in_role(role: Any, config: Any, resume: bool) -> Result:
    """One process of a job: worker 0 trains with all of them, the others are there for it."""
    from clickfleet import modes, run
    from clickfleet.cluster import joining, roles
    from clickfleet.errors import ConfigError

    if not modes.distributed(config):
        raise ConfigError(
            f"{roles.ROLE} makes this process {role.name} of a cluster, and mode {config.mode.name} runs in one process",
            f"add mode.name=async (or sync, half_async, geo), or unset {roles.SERVERS}",
        )
    config = joining.settled(config, role)
    if not role.drives:
        joining.serve(role, config, say)
        return {"role": role.name}
    with joining.driving(role, config, say):
        done = run.train(config, resume=resume)
    tell(done)
    return {"role": role.name, **done.to_dict()}


def tell(done: Any) -> None:
    """Says what training made; a signal that stopped it decides the exit code."""
    if done.signal is not None:
        say(f"stopped by a signal after {done.rows:,} rows; go on with --resume")
        raise typer.Exit(128 + done.signal)
    now = "" if done.new_rows == done.rows else f" ({done.new_rows:,} of them since the resume)"
    say(f"{done.rows:,} rows{now} in {done.seconds:.1f} s, {done.rows_per_s:,.0f} rows/s")
    if done.train:
        tested = "" if done.test is None else f", test AUC {done.test['auc']:.4f}"
        say(f"training AUC {done.train['auc']:.4f}{tested}")
    say(f"checkpoint: {done.path}{' (the best test AUC)' if done.path == done.best else ''}")
    if done.last != done.path:
        say(f"newest checkpoint: {done.last}")


def given(
    config: str | None,
    settings: list[str] | None,
    file: Path | None = None,
    options: list[str] | None = None,
    purpose: str = "train",
) -> tuple[Any, list[str]]:
    """The configuration's file, unless the first argument is a setting already, and the settings; of a PaddleRec file, what it means."""
    arguments = [*([config] if config is not None else []), *(settings or [])]
    if file is None and arguments and ("=" not in arguments[0] or Path(arguments[0]).exists()):
        file = Path(arguments.pop(0))
    if file is None and not arguments and not options:
        raise typer.BadParameter("Missing argument 'CONFIG'.")
    return configured(None if file is None else str(file), [*(options or []), *arguments], purpose)


def evaluate(
    model: ModelOrConfig = None,
    data: Inputs = None,
    epochs: Annotated[
        str | None,
        typer.Option(help="Evaluate the checkpoints at the end of these epochs instead: 0:4 means 0, 1, 2 and 3."),
    ] = None,
    format: Format = None,  # noqa: A002
    batch_size: BatchSize = None,
    threads: Threads = None,
    workers: Workers = None,
    shards: Shards = 1,
    address: Address = None,
    config_file: ConfigFile = None,
    option: Settings = None,
    trust: Trust = False,
) -> Result:
    """Measure a model on labelled data: AUC, log loss, accuracy, calibration and more; of word2vec, the share of analogies found."""
    from clickfleet import trained
    from clickfleet.words import vectors

    old = of_model(model, data or [], config_file, option)
    if old is not None:
        return evaluate_old(*old, epochs, batch_size, format, threads, workers, trust)
    model, data = _both(model, data)
    if vectors.is_words(model):
        if epochs is not None or workers is not None or format is not None:
            raise _no_analogies()
        return _analogies(vectors.load(model).evaluate(data))
    if workers is not None:
        from clickfleet import saving
        from clickfleet.cluster.scorers import scorers
        from clickfleet.errors import ConfigError
        from clickfleet.files import expand

        if epochs is not None or threads is not None:
            raise ConfigError("--epochs and --threads do not go with --workers")
        path = _say_path(saving.resolve(model))
        with scorers(path, workers, shards, address, form=format, batch_size=batch_size, trust=trust) as fleet:
            results = fleet.evaluate(expand(data, str(Path.cwd())))
            _say_bad_lines(fleet.bad_lines, "they count in no metric")
        say(_table(results))
        return results
    if epochs is None:
        loaded = _say_model(trained.load(model, trust)).reading(format, threads)
        source = loaded.source(data, batch_size, labels=True)
        results = loaded.evaluate(source)
        _say_bad_lines(source.counters.bad_lines, "they count in no metric")
        say(_table(results))
        return {**results, "checkpoint": str(loaded.path)}
    found: list[dict[str, Any]] = []
    for epoch, path in trained.epochs(model, epochs):
        results = trained.load(path, trust).reading(format, threads).evaluate(data, batch_size)
        found.append({"epoch": epoch, **results})
        say(epoch_line(epoch, results))
    return {**found[-1], "epochs": found}


def epoch_line(epoch: int | None, results: Result) -> str:
    """The metrics of an epoch, or of the newest model, for people."""
    name = "newest" if epoch is None else f"epoch {epoch}"
    return f"{name}: {results['rows']:,} rows, AUC {results['auc']:.4f}, log loss {_number(results['logloss'])}"


def _both(model: Path | None, data: list[str] | None) -> tuple[Path, list[str]]:
    """MODEL and DATA, which both must be there."""
    if model is None or not data:
        raise typer.BadParameter("Missing argument 'DATA...'.")
    return model, data


def predict(
    out: Annotated[Path, typer.Option(help="File for the scores: text, one per line, or .parquet or .npy.")],
    model: ModelOrConfig = None,
    data: Inputs = None,
    format: Format = None,  # noqa: A002
    batch_size: BatchSize = None,
    threads: Threads = None,
    workers: Workers = None,
    shards: Shards = 1,
    address: Address = None,
    config_file: ConfigFile = None,
    option: Settings = None,
    engine: Annotated[
        str, typer.Option(help="What computes: torch, onnx, int8, or a provider of ONNX Runtime such as CUDA.")
    ] = "torch",
    graph_optimization: GraphLevel = None,
    arena: Arena = None,
    trust: Trust = False,
) -> Result:
    """Score rows: the probability of a click, one per row, in order; labels are not needed."""
    from clickfleet import trained

    old = of_model(model, data or [], config_file, option)
    if old is not None:
        if engine != "torch" or graph_optimization is not None or arena is not None:
            raise typer.BadParameter("engine options go with a MODEL, not with a PaddleRec configuration")
        return predict_old(*old, out, batch_size, format, threads, workers, trust)
    model, data = _both(model, data)
    if workers is not None:
        from clickfleet import saving
        from clickfleet.cluster.scorers import scorers
        from clickfleet.errors import ConfigError
        from clickfleet.files import expand

        if threads is not None or engine != "torch" or graph_optimization is not None or arena is not None:
            raise ConfigError("--threads, --engine and its options do not go with --workers")
        path = _say_path(saving.resolve(model))
        with scorers(path, workers, shards, address, form=format, batch_size=batch_size, trust=trust) as fleet:
            scores = fleet.predict(expand(data, str(Path.cwd())))
            done = {**trained.write_parts(scores, out), "bad_lines": fleet.bad_lines}
    else:
        how = engine_of(engine, 1, graph_optimization, arena)  # --threads score, each with a run of its own
        loaded = _say_model(trained.load(model, trust)).reading(format, threads, how)
        done = {**trained.write_scores(loaded, data, out, batch_size), "checkpoint": str(loaded.path)}
    say(f"{done['rows']:,} scores in {out}, {done['rows_per_s']:,.0f} rows/s")
    _say_bad_lines(done.get("bad_lines", 0), "they have no score, so line numbers of the data and the scores differ")
    return done


def _say_model(loaded: "Trained") -> "Trained":
    """Says which checkpoint a run folder stands for."""
    assert loaded.path is not None
    _say_path(loaded.path)
    return loaded


def _say_path(path: Path) -> Path:
    from clickfleet import saving

    say(f"model: {saving.describe(path)}")
    return path


def _say_bad_lines(count: int, meaning: str) -> None:
    if count:
        say(f"warning: skipped {count:,} bad lines (data.bad_lines): {meaning}")


def engine_of(name: str, threads: int, graph: str | None, arena: bool | None) -> "Engine | None":
    """The engine that options describe; None for torch, which has none of them."""
    from clickfleet.engine import Engine
    from clickfleet.errors import ConfigError

    if name == "torch":
        if graph is not None or arena is not None:
            raise ConfigError("--graph-optimization and --arena are ONNX Runtime's", "add --engine onnx")
        return None
    return Engine(name, threads, graph or "all", arena is not False)


def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    data: Annotated[
        list[str] | None, typer.Argument(help="Test data; that of the run's configuration by default.")
    ] = None,
    trust: Trust = False,
) -> Result:
    """Draw report.html of a run again: curves, ROC, calibration, scores, importance of fields, time."""
    from clickfleet import report as reports

    path = reports.rebuild(run, data or None, say, trust)
    say(f"{path}: {path.stat().st_size:,} bytes")
    return {"path": str(path), "bytes": path.stat().st_size}


def verify(
    path: Annotated[Path, typer.Argument(help="A run folder, a checkpoint, a published log or entry.")],
    repair: Annotated[
        bool, typer.Option("--repair", help="First make a damaged LOG.jsonl anew from the entries beside it.")
    ] = False,
) -> Result:
    """Check every byte of a model's files, and that its entries can be served; of a run, all checkpoints and its log."""
    from clickfleet import verification

    made: Result = {}
    if repair:
        made = {"repaired": verification.repair(path)}
        done = made["repaired"]
        say(f"{done['path']}: entries {done['first']} to {done['last']}, {done['added']:,} lines added to the log")
        for name in done["outside"]:
            say(f"{name} is not part of it: entries between it and the others are missing")
    found = verification.verify(path)
    what = ", ".join(f"{found[key]:,} {key}" for key in ("checkpoints", "entries") if found[key])
    say(f"{found['path']}: {what}, {found['files']} files, {found['bytes']:,} bytes, all as they were written")
    if not found["golden"]:
        say('golden requests were not tried: ONNX Runtime is not installed (pip install "clickfleet[serve]")')
    return {**found, **made, "ok": True}


def _analogies(results: Result) -> Result:
    for name, part in results["sections"].items():
        say(
            f"{name or 'questions'}: {part['right']:,} of {part['known']:,} found, {part['questions'] - part['known']:,} not known"
        )
    say(f"accuracy {_number(results['accuracy'])} of {results['known']:,} analogies")
    return results


def _no_analogies() -> Exception:
    from clickfleet.errors import ConfigError

    return ConfigError(
        "--epochs, --workers and --format do not go with word2vec", "name one checkpoint and a file of analogies"
    )


def _table(results: Result) -> str:
    lines = [f"{key:>14}  {_number(value)}" for key, value in results.items() if key != "slices"]
    for key, part in results.get("slices", {}).items():
        lines.append(f"slice {key}: {part['rows']:,} rows, AUC {part['auc']:.4f}, log loss {_number(part['logloss'])}")
    return "\n".join(lines)


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
