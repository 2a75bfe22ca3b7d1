"""Commands about models: `train`, `evaluate`, `predict`, `inspect`, `report`, `verify`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from clickfleet.cli.frame import Result, command, say

Model = Annotated[
    Path,
    typer.Argument(help="A run folder (its newest checkpoint), RUN/BEST, a checkpoint, a published log or entry."),
]
Inputs = Annotated[list[str], typer.Argument(help="Files, folders, globs or URLs; .gz and .zst are unpacked.")]
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


def add(app: typer.Typer) -> None:
    command(app)(train)
    command(app)(evaluate)
    command(app)(predict)
    command(app)(inspect)
    command(app)(report)
    command(app)(verify)


def train(
    config: Annotated[
        str,
        typer.Argument(
            help="A YAML file; it may be left out: then the first setting, such as data.train=log/train, stands here.",
            metavar="CONFIG",
            show_default=False,
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings over the file's, such as train.epochs=3 model=dcn_v2; docs/reference/config.md lists them.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run folder's newest checkpoint, with the same settings.")
    ] = False,
) -> Result:
    """Train a model; the run folder gets checkpoints, log.txt, metrics.jsonl, config.yaml and report.html."""
    path, overrides = given(config, settings)
    from clickfleet import run
    from clickfleet.cluster import roles

    role = roles.read()
    if role is not None:
        return _train_in_role(role, run.configure(path, overrides), resume)
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
    say(f"{done.rows:,} rows in {done.seconds:.1f} s, {done.rows_per_s:,.0f} rows/s")
    if done.train:
        tested = "" if done.test is None else f", test AUC {done.test['auc']:.4f}"
        say(f"training AUC {done.train['auc']:.4f}{tested}")
    if done.best is not None:
        say(f"best test AUC {done.best_auc:.4f}: {done.best}")
    say(f"checkpoint: {done.path}")


def given(config: str, settings: list[str] | None) -> tuple[str | None, list[str]]:
    """The configuration's file, unless the first argument is a setting already, and the settings."""
    if "=" in config and not Path(config).exists():
        return None, [config, *(settings or [])]
    return config, list(settings or [])


def evaluate(
    model: Model,
    data: Inputs,
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
) -> Result:
    """Measure a model on labelled data: AUC, log loss, accuracy, calibration and more; of word2vec, the share of analogies found."""
    from clickfleet import trained
    from clickfleet.words import vectors

    if vectors.is_words(model):
        if epochs is not None or workers is not None or format is not None:
            raise _no_analogies()
        return _analogies(vectors.load(model).evaluate(data))
    if workers is not None:
        from clickfleet.cluster.scorers import scorers
        from clickfleet.errors import ConfigError
        from clickfleet.files import expand

        if epochs is not None or threads is not None:
            raise ConfigError("--epochs and --threads do not go with --workers")
        with scorers(model, workers, shards, address, form=format, batch_size=batch_size) as fleet:
            results = fleet.evaluate(expand(data, str(Path.cwd())))
        say(_table(results))
        return results
    if epochs is None:
        results = trained.load(model).reading(format, threads).evaluate(data, batch_size)
        say(_table(results))
        return results
    found: list[dict[str, Any]] = []
    for epoch, path in trained.epochs(model, epochs):
        results = trained.load(path).reading(format, threads).evaluate(data, batch_size)
        found.append({"epoch": epoch, **results})
        say(
            f"epoch {epoch}: {results['rows']:,} rows, AUC {results['auc']:.4f}, log loss {_number(results['logloss'])}"
        )
    return {**found[-1], "epochs": found}


def predict(
    model: Model,
    data: Inputs,
    out: Annotated[Path, typer.Option(help="File for the scores: text, one per line, or .parquet or .npy.")],
    format: Format = None,  # noqa: A002
    batch_size: BatchSize = None,
    threads: Threads = None,
    workers: Workers = None,
    shards: Shards = 1,
    address: Address = None,
) -> Result:
    """Score rows: the probability of a click, one per row, in order; labels are not needed."""
    from clickfleet import trained

    if workers is not None:
        from clickfleet.cluster.scorers import scorers
        from clickfleet.errors import ConfigError
        from clickfleet.files import expand

        if threads is not None:
            raise ConfigError("--threads does not go with --workers")
        with scorers(model, workers, shards, address, form=format, batch_size=batch_size) as fleet:
            done = trained.write_parts(fleet.predict(expand(data, str(Path.cwd()))), out)
    else:
        done = trained.write_scores(trained.load(model).reading(format, threads), data, out, batch_size)
    say(f"{done['rows']:,} scores in {out}, {done['rows_per_s']:,.0f} rows/s")
    return done


def inspect(model: Model) -> Result:
    """Show what a model is made of: network, rows and memory, rows per slot."""
    from clickfleet import trained

    facts = trained.describe(model)
    say(f"{facts['checkpoint']}: {facts['model']['name']}, step {facts['step']:,}")
    say(f"dense parameters {facts['parameters']:,}")
    say(
        f"table {facts['rows']:,} rows ({facts['full_rows']:,} with factors), {facts['factors']} factors, {facts['bytes']:,} bytes"
    )
    for name, rows in facts["slots"].items():
        say(f"{rows:>12,}  {name}")
    return facts


def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    data: Annotated[
        list[str] | None, typer.Argument(help="Test data; that of the run's configuration by default.")
    ] = None,
) -> Result:
    """Draw report.html of a run again: curves, ROC, calibration, scores, importance of fields, time."""
    from clickfleet import report as reports

    path = reports.rebuild(run, data or None)
    say(f"{path}: {path.stat().st_size:,} bytes")
    return {"path": str(path), "bytes": path.stat().st_size}


def verify(
    path: Annotated[Path, typer.Argument(help="A run folder, a checkpoint, a published log or entry.")],
) -> Result:
    """Check every byte of a model's files against their checksums."""
    from clickfleet import saving

    found = saving.verify(saving.resolve(path))
    say(f"{found['path']}: {found['files']} files, {found['bytes']:,} bytes, all as they were written")
    return {**found, "ok": True}


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
