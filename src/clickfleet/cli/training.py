"""The commands `train`, `evaluate`, `predict`, `report` and `verify`."""

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clickfleet.cli.cluster import ray_ahead, run_in_role
from clickfleet.cli.frame import Result, Trust, command, say
from clickfleet.cli.migrating import (
    ConfigFile,
    Settings,
    evaluate_paddlerec,
    paddlerec_model,
    predict_paddlerec,
    with_translation,
)

if TYPE_CHECKING:
    from clickfleet.store.onnx import Engine
    from clickfleet.training.model import SavedModel, TrainingResult


RUN = "A run folder (its best checkpoint if that is kept, else its newest), RUN/LATEST, RUN/BEST"
Model = Annotated[
    Path,
    typer.Argument(help=f"{RUN}, a checkpoint, a published log or entry.", metavar="MODEL"),
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
        help="Files, folders, globs or URLs; .gz and .zst are decompressed (default for a PaddleRec configuration: its test data).",
        show_default=False,
        metavar="DATA",
    ),
]
Format = Annotated[
    str | None,
    typer.Option("--format", help="Format of the files (default: that of the training data).", metavar="FORMAT"),
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Rows per batch (default: as in training).")]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Score on a cluster with N worker processes, which share the files.", metavar="N"),
]
Shards = Annotated[int, typer.Option(min=1, help="With --workers: number of processes that hold the rows.")]
Address = Annotated[
    str | None,
    typer.Option(help="With --workers: address of a running Ray cluster (default: start one on this machine)."),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Scoring threads (default: as in training).")]
GraphLevel = Annotated[
    str | None,
    typer.Option(
        help="Level of ONNX Runtime's graph optimisation: off, basic, extended or all (default).", metavar="LEVEL"
    ),
]
Arena = Annotated[
    bool | None,
    typer.Option("--arena/--no-arena", help="Let ONNX Runtime keep memory between runs (default), or not."),
]


RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        help="Start from the settings of a recipe instead of a file; see clickfleet recipes.",
        metavar="NAME",
    ),
]


def add(app: typer.Typer) -> None:
    command(app)(train)
    command(app)(recipes)
    command(app)(evaluate)
    command(app)(predict)
    command(app)(report)
    command(app)(verify)


def train(
    config: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file, ours or PaddleRec's; or the training data: files, folders or globs, whose format and schema are guessed.",
            metavar="CONFIG|DATA",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="Override settings of the file, such as train.epochs=3 model=dcn_v2; docs/reference/config.md lists all keys.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Resume from the newest checkpoint of the run folder; without one, start from scratch."
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run in the run folder, once settings and data are checked.")
    ] = False,
    recipe: RecipeName = None,
    config_file: ConfigFile = None,
    option: Settings = None,
) -> Result:
    """Train a model. The run folder receives checkpoints, log.txt, metrics.jsonl, config.yaml and report.html.

    Example: `clickfleet train clicks.csv`, or `clickfleet train config.yaml model=dcn_v2 train.epochs=3`
    """
    path, overrides = resolve_config(config, settings, config_file, option, recipe=recipe)
    from clickfleet.config import check
    from clickfleet.paddlerec import roles

    role = roles.read()
    if role is None:
        with ray_ahead(check.configure(path, overrides)):
            from clickfleet.training import run

            return show_result(run.train(path, *overrides, resume=resume, overwrite=overwrite))
    from clickfleet.training import run

    return run_in_role(
        role,
        check.configure(path, overrides),
        lambda config: run.train(config, resume=resume, overwrite=overwrite),
        show_result,
    )


def show_result(done: "TrainingResult") -> Result:
    """Print and return the result of training. If a signal stopped it, exit with the code of the signal."""
    if done.signal is not None:
        say(f"stopped by a signal after {done.rows:,} rows; --resume continues it")
        raise typer.Exit(128 + done.signal)
    now = "" if done.new_rows == done.rows else f" ({done.new_rows:,} since the resume)"
    say(f"{done.rows:,} rows{now} in {done.seconds:.1f} s, {done.rows_per_s:,.0f} rows/s")
    if done.train:
        named = {"validation": done.valid, "test": done.test}
        others = "".join(f", {name} AUC {part['auc']:.4f}" for name, part in named.items() if part is not None)
        say(f"training AUC {done.train['auc']:.4f}{others}")
    say(f"checkpoint: {done.path}{' (the best on validation data)' if done.path == done.best else ''}")
    if done.last != done.path:
        say(f"newest checkpoint: {done.last}")
    return done.to_dict()


def resolve_config(
    config: str | None,
    settings: list[str] | None,
    file: Path | None = None,
    options: list[str] | None = None,
    purpose: str = "train",
    recipe: str | None = None,
) -> tuple[Any, list[str]]:
    """Separate the configuration file, data and settings, and translate a PaddleRec file. Any of the three may be absent.

    With a recipe, its settings take the place of the file.
    """
    arguments = [*([config] if config is not None else []), *(settings or [])]
    given = [item for item in arguments if not _is_path(item)]
    paths = [item for item in arguments if _is_path(item)]
    if file is None and paths and (purpose == "online" or paths[0].endswith((".yaml", ".yml"))):
        file = Path(paths.pop(0))
    if file is None and not arguments and not options:
        raise typer.BadParameter("Missing argument 'CONFIG'.")
    if paths:
        given.insert(0, f"data.train={json.dumps(paths)}")
    if recipe is not None:
        if file is not None:
            raise typer.BadParameter(f"give CONFIG ({file}) or --recipe {recipe}, not both")
        from clickfleet.config import recipes

        return recipes.find(recipe).settings(), [*(options or []), *given]
    return with_translation(None if file is None else str(file), [*(options or []), *given], purpose)


def _is_path(argument: str) -> bool:
    """Tell a file, folder, glob or URL from a setting. A setting without its value stays one, and is refused as such."""
    if "=" in argument or Path(argument).exists():
        return Path(argument).exists()
    from clickfleet.config.load import Config, inside

    section, _, key = argument.partition(".")
    owner = inside(Config, [section]) if section in {field.name for field in fields(Config)} else None
    return owner is None or key.partition(".")[0] not in {field.name for field in fields(owner)}


def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe.", metavar="NAME", show_default=False)] = None,
) -> Result:
    """List the recipes, each with its model and the AUC to expect; or print one as YAML.

    Example: `clickfleet recipes small > mine.yaml`
    """
    from clickfleet.config import recipes as all_recipes
    from clickfleet.workbench.tables import Column, TextTable

    if name is not None:
        recipe = all_recipes.find(name)
        say(recipe.text.rstrip())
        return {"name": recipe.name, "model": recipe.model, "text": recipe.text}
    rows = [
        {"name": one.name, "model": one.model, "auc": one.auc, "about": one.about, "expected": one.expected}
        for one in all_recipes.every()
    ]
    columns = [Column("name"), Column("model"), Column("auc", "AUC to expect", "{:.3f}"), Column("about", "what for")]
    say(TextTable(columns, rows).text())
    say("\nThe AUC is of one epoch on `clickfleet synth log --rows 100000 --test-rows 20000`.")
    say("Train one with clickfleet train --recipe NAME data.train=…")
    return {"recipes": rows}


def evaluate(
    model: ModelOrConfig = None,
    data: Inputs = None,
    epochs: Annotated[
        str | None,
        typer.Option(
            help="Evaluate the checkpoints at the end of these epochs; 0:4 means 0, 1, 2 and 3.", metavar="FIRST:END"
        ),
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
    """Evaluate a model on labelled data: AUC, log loss, accuracy, calibration and more. For word2vec: the accuracy on analogies.

    Example: `clickfleet evaluate run log/test`
    """
    from clickfleet.errors import ConfigError
    from clickfleet.models.word2vec import vectors
    from clickfleet.training.model import epochs as epoch_paths
    from clickfleet.training.model import load

    translation = paddlerec_model(model, data or [], config_file, option)
    if translation is not None:
        return evaluate_paddlerec(*translation, epochs, batch_size, format, threads, workers, trust)
    model, data = _require(model, data)
    if vectors.is_words(model):
        if epochs is not None or workers is not None or format is not None:
            raise ConfigError(
                "--epochs, --workers and --format do not apply to word2vec",
                "give one checkpoint and a file of analogies",
            )
        return _show_analogies(dict(vectors.load(model).evaluate(data)))
    if workers is not None:
        from clickfleet.cluster.run_on_cluster import scorers
        from clickfleet.data.files import expand
        from clickfleet.store import run_folder

        if epochs is not None or threads is not None:
            raise ConfigError("--epochs and --threads cannot be combined with --workers")
        path = _say_path(run_folder.resolve(model))
        with scorers(path, workers, shards, address, form=format, batch_size=batch_size, trust=trust) as cluster:
            results = cluster.evaluate(expand(data, str(Path.cwd())))
            _say_bad_lines(cluster.bad_lines, "they are not part of the metrics")
        say(_table(results))
        return results
    if epochs is None:
        loaded = _say_model(load(model, trust)).reading(format, threads)
        source = loaded.source(data, batch_size, labels=True)
        results = loaded.evaluate(source, on_batch=evaluation_lines(loaded.config.train.print_every))
        _say_bad_lines(source.counters.bad_lines, "they are not part of the metrics")
        say(_table(results))
        return {**results, "checkpoint": str(loaded.path)}
    per_epoch: list[Result] = []
    for epoch, path in epoch_paths(model, epochs):
        loaded = load(path, trust).reading(format, threads)
        results = loaded.evaluate(data, batch_size, evaluation_lines(loaded.config.train.print_every))
        per_epoch.append({"epoch": epoch, **results})
        say(epoch_line(epoch, results))
    return {**per_epoch[-1], "epochs": per_epoch}


def evaluation_lines(print_every: int | None) -> Any:
    """Return what reports the progress of an evaluation on stderr."""
    from clickfleet.training.monitor import EvaluationLines

    return EvaluationLines(lambda text: print(text, file=sys.stderr, flush=True), print_every)


def epoch_line(epoch: int | None, results: Result) -> str:
    """Format the metrics of an epoch; None is the newest model."""
    from clickfleet.training.loop import summary

    name = "newest" if epoch is None else f"epoch {epoch}"
    return f"{name}: {results['rows']:,} rows, {summary(results)}"


def _require(model: Path | None, data: list[str] | None) -> tuple[Path, list[str]]:
    """Raise a usage error unless both MODEL and DATA are given."""
    if model is None or not data:
        raise typer.BadParameter("Missing argument 'DATA...'.")
    return model, data


def predict(
    out: Annotated[
        Path,
        typer.Option(
            help="File for the scores: .csv, .tsv, .parquet or .npy; any other ending is text with one score per line. "
            "Text may end in .gz too.",
            metavar="FILE",
        ),
    ],
    model: ModelOrConfig = None,
    data: Inputs = None,
    format: Format = None,  # noqa: A002
    keep: Annotated[
        str | None,
        typer.Option(
            help="Columns of the data to copy beside the scores; for csv, jsonl, parquet and arrow files.",
            metavar="NAME,NAME,...",
        ),
    ] = None,
    batch_size: BatchSize = None,
    threads: Threads = None,
    workers: Workers = None,
    shards: Shards = 1,
    address: Address = None,
    config_file: ConfigFile = None,
    option: Settings = None,
    engine: Annotated[
        str,
        typer.Option(
            help="Inference engine: torch, onnx, int8, or a provider of ONNX Runtime such as CUDA.", metavar="NAME"
        ),
    ] = "torch",
    graph_optimization: GraphLevel = None,
    arena: Arena = None,
    trust: Trust = False,
) -> Result:
    """Write the probability of a click for every row, in order. Labels and other columns that are not inputs may be missing.

    Example: `clickfleet predict run rows.csv --out scores.csv --keep user,item`
    """
    from clickfleet.training.model import load
    from clickfleet.training.score_files import ending, score_columns, write_parts, write_scores

    kept = [] if keep is None else keep.split(",")
    ending(out, kept)
    if kept and workers is not None:
        raise typer.BadParameter("--keep cannot be combined with --workers")
    translation = paddlerec_model(model, data or [], config_file, option)
    if translation is not None:
        if engine != "torch" or graph_optimization is not None or arena is not None:
            raise typer.BadParameter("engine options need a MODEL, not a PaddleRec configuration")
        return predict_paddlerec(*translation, out, batch_size, format, threads, workers, trust, kept)
    model, data = _require(model, data)
    if workers is not None:
        from clickfleet.cluster.run_on_cluster import scorers
        from clickfleet.data.files import expand
        from clickfleet.errors import ConfigError
        from clickfleet.store import run_folder

        if threads is not None or engine != "torch" or graph_optimization is not None or arena is not None:
            raise ConfigError("--threads, --engine and the engine options cannot be combined with --workers")
        path = _say_path(run_folder.resolve(model))
        with scorers(path, workers, shards, address, form=format, batch_size=batch_size, trust=trust) as cluster:
            scores = cluster.predict(expand(data, str(Path.cwd())))
            done: Result = {
                **write_parts(scores, out, score_columns(cluster.learner.schema)),
                "bad_lines": cluster.bad_lines,
            }
    else:
        chosen = parse_engine(engine, 1, graph_optimization, arena)  # one run of the network per scoring thread
        loaded = _say_model(load(model, trust)).reading(format, threads, chosen)
        done = {**write_scores(loaded, data, out, batch_size, kept), "checkpoint": str(loaded.path)}
    say(f"{done['rows']:,} scores in {out}, {done['rows_per_s']:,.0f} rows/s")
    meaning = "they have no score, so the line numbers of data and scores differ" if not kept else "they are left out"
    _say_bad_lines(done.get("bad_lines", 0), meaning)
    return done


def _say_model(loaded: "SavedModel") -> "SavedModel":
    """Print which checkpoint was loaded."""
    assert loaded.path is not None
    _say_path(loaded.path)
    return loaded


def _say_path(path: Path) -> Path:
    from clickfleet.store import run_folder

    say(f"model: {run_folder.describe(path)}")
    return path


def _say_bad_lines(count: int, meaning: str) -> None:
    if count:
        say(f"warning: skipped {count:,} bad lines (data.bad_lines): {meaning}")


def parse_engine(name: str, threads: int, graph: str | None, arena: bool | None) -> "Engine | None":
    """Return the engine of ONNX Runtime that the options describe; None for torch."""
    from clickfleet.errors import ConfigError
    from clickfleet.store.onnx import Engine

    if name == "torch":
        if graph is not None or arena is not None:
            raise ConfigError("--graph-optimization and --arena need an engine of ONNX Runtime", "add --engine onnx")
        return None
    return Engine(name, threads, graph or "all", arena is not False)


def report(
    run: Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")],
    data: Annotated[
        list[str] | None,
        typer.Argument(help="Test data (default: data.test of the run).", metavar="DATA", show_default=False),
    ] = None,
    trust: Trust = False,
) -> Result:
    """Rebuild report.html of a run: curves, ROC, calibration, scores, importance of fields, time."""
    from clickfleet.training import report as reports

    path = reports.rebuild(run, data or None, say, trust)
    say(f"{path}: {path.stat().st_size:,} bytes")
    return {"path": str(path), "bytes": path.stat().st_size}


def verify(
    path: Annotated[Path, typer.Argument(help="A run folder, a checkpoint, a published log or entry.", metavar="PATH")],
    repair: Annotated[
        bool, typer.Option("--repair", help="First rebuild a damaged LOG.jsonl from the entries beside it.")
    ] = False,
) -> Result:
    """Verify the files of a model by checksum, and that its entries can be served.

    For a run folder this covers all checkpoints and the published log.
    """
    from clickfleet.serve import verification

    repaired: Result = {}
    if repair:
        done = verification.repair(path)
        repaired = {"repaired": done}
        say(f"{done['path']}: entries {done['first']} to {done['last']}, {done['added']:,} lines added to the log")
        for name in done["outside"]:
            say(f"{name} is not in the log: entries before it are missing")
    facts = verification.verify(path)
    counts = ", ".join(f"{facts[key]:,} {key}" for key in ("checkpoints", "entries") if facts[key])
    say(f"{facts['path']}: {counts}, {facts['files']} files, {facts['bytes']:,} bytes, all intact")
    if not facts["golden"]:
        say('golden requests were not replayed: ONNX Runtime is not installed (pip install "clickfleet[serve]")')
    return {**facts, **repaired, "ok": True}


def _show_analogies(results: Result) -> Result:
    for name, part in results["sections"].items():
        say(
            f"{name or 'questions'}: {part['right']:,} of {part['known']:,} correct, "
            f"{part['questions'] - part['known']:,} with unknown words"
        )
    say(f"accuracy {_number(results['accuracy'])} of {results['known']:,} analogies")
    return results


def _table(results: Result) -> str:
    from clickfleet.config.plugins import shown
    from clickfleet.training.metrics import metric_name
    from clickfleet.training.predict import top_slices

    lines = [f"{key:>14}  {_number(value)}" for key, value in results.items() if key not in ("slices", "tasks")]
    for name, part in results.get("tasks", {}).items():
        shown_metrics = ", ".join(
            f"{metric_name(key)} {_number(part[key])}"
            for key in (*SHOWN, *(f"{key}_given" for key in SHOWN))
            if key in part
        )
        lines.append(f"label {shown(name)}: {part['rows']:,} rows, {shown_metrics}")
    for name, part in top_slices(results):
        auc = "" if part["auc"] is None else f", AUC {part['auc']:.4f}"
        lines.append(f"slice {shown(name)}: {part['rows']:,} rows{auc}, log loss {_number(part['logloss'])}")
    return "\n".join(lines)


SHOWN = ("auc", "gauc", "logloss", "rmse", "mae")
"""Metrics of a label that a line shows."""


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
