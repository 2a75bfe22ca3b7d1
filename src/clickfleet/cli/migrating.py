"""Commands for what was made for PaddleRec: `migrate paddlerec`, `migrate table`; and how other commands take its configurations."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clickfleet.cli.frame import Result, command, say

if TYPE_CHECKING:
    from clickfleet.migrate import Translated

ConfigFile = Annotated[
    Path | None,
    typer.Option("-m", "--config", help="The configuration, as the tools of PaddleRec took it.", metavar="CONFIG"),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("-o", "--set", help="A setting over the file's; more may follow as arguments.", metavar="KEY=VALUE"),
]


def add(app: typer.Typer) -> None:
    group = typer.Typer(help="Bring over what was made for PaddleRec.", no_args_is_help=True)
    app.add_typer(group, name="migrate")
    command(group)(paddlerec)
    command(group)(table)


def paddlerec(
    config: Annotated[Path, typer.Argument(help="A PaddleRec configuration; its folder's name picks the model.")],
    settings: Annotated[
        list[str] | None, typer.Argument(help="Settings over the file's, its own or ours.", metavar="[KEY=VALUE]...")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File for our YAML (default: CONFIG.clickfleet.yaml beside it).")
    ] = None,
    purpose: Annotated[
        str | None,
        typer.Option(help="What the YAML is for: train, launch (a cluster) or online (default where it has days)."),
    ] = None,
    native: Annotated[
        bool,
        typer.Option(
            "--native", help="Read the data by our own parser instead of the reader's Python, if rows are equal."
        ),
    ] = False,
) -> Result:
    """Write our own YAML for a PaddleRec configuration, and a report of what each key became."""
    from clickfleet import migrate

    if purpose not in (None, "train", "launch", "online"):
        raise typer.BadParameter("--purpose is train, launch or online")
    translated = translation(config, settings or [], purpose)
    if native:
        from clickfleet.migrate.native import by_own_parser

        translated = by_own_parser(translated)
    written = migrate.write(translated, out or config.with_suffix(".clickfleet.yaml"))
    say(translated.report.text())
    for path in written:
        say(f"wrote {path}")
    return {"path": str(written[0]), **translated.report.counts(), "keys": translated.report.to_dict()}


def table(
    config: Annotated[Path, typer.Argument(help="The PaddleRec configuration that the model was trained with.")],
    source: Annotated[
        Path,
        typer.Argument(
            help="rec.pdparams or its folder, or a folder of table files (000/part-000-00000.gz, var.shard/)."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="A run folder that does not exist yet.", metavar="OUT")],
    settings: Annotated[
        list[str] | None, typer.Argument(help="Settings over the file's, its own or ours.", metavar="[KEY=VALUE]...")
    ] = None,
    delta: Annotated[
        list[Path] | None, typer.Option(help="A delta whose rows replace those of SOURCE; several in their order.")
    ] = None,
) -> Result:
    """Import a saved model or table as a run folder, which evaluate, predict, export and train.init_from take."""
    from clickfleet.migrate.importing import import_model

    done = import_model(translation(config, settings or []), source, out, deltas=delta or [])
    say(done.text())
    return done.to_dict()


def translation(path: Path, settings: Sequence[str], purpose: str | None = None) -> "Translated":
    """A PaddleRec configuration with settings over it: those of its sections as `-o` gave them, others are ours."""
    from clickfleet import migrate
    from clickfleet.errors import ConfigError
    from clickfleet.migrate.original import is_override

    if not migrate.is_paddlerec(path):
        raise ConfigError(f"{path} is no configuration of PaddleRec's: it has neither runner: nor hyper_parameters:")
    theirs = [item for item in settings if is_override(item)]
    mine = [item for item in settings if not is_override(item)]
    return migrate.translate(migrate.read(path, theirs), mine, purpose)  # type: ignore[arg-type]


def is_old(path: str | Path | None) -> bool:
    """Whether an argument names a PaddleRec configuration."""
    if path is None or not str(path).endswith((".yaml", ".yml")):
        return False
    from clickfleet.migrate.original import is_paddlerec

    return is_paddlerec(path)


def configured(path: str | None, overrides: list[str], purpose: str = "train") -> tuple[Any, list[str]]:
    """What to run: the file as it is with its overrides, or, of a PaddleRec file, what it means here."""
    if not is_old(path):
        return path, overrides
    from clickfleet.migrate.models import settle

    if purpose == "train" and os.environ.get("TRAINING_ROLE") and os.environ.get("PADDLE_PSERVERS_IP_PORT_LIST"):
        purpose = "launch"
    translated = translation(Path(str(path)), overrides, purpose)
    counts = translated.report.counts()
    say(
        f"{path}: {counts['mapped'] + counts['used']} keys obeyed, {counts['not applicable']} not applicable, "
        f"{counts['unknown']} unknown; see `clickfleet migrate paddlerec {path}`"
    )
    for line in translated.report.lines:
        if line.kind == "unknown":
            say(f"warning: {line}")
    return settle(translated), []


def of_model(
    model: Path | None, more: Sequence[str], config: Path | None, settings: Sequence[str] | None
) -> "tuple[Translated, list[str]] | None":
    """Where a command that takes MODEL was given a PaddleRec configuration instead: what it means, and the other arguments."""
    named = config or (model if is_old(model) else None)
    if named is None:
        if model is None:
            raise typer.BadParameter("name a model, or a configuration by -m")
        return None
    others = [*([str(model)] if config is not None and model is not None else []), *more]
    given = [*(settings or []), *(item for item in others if "=" in item and not Path(item).exists())]
    return translation(named, given), [item for item in others if item not in given]


def evaluate_old(
    translated: "Translated",
    data: list[str],
    span: str | None,
    batch_size: int | None,
    form: str | None,
    threads: int | None,
    workers: int | None,
    trust: bool = False,
) -> Result:
    """The epochs that a PaddleRec configuration says, on its test data."""
    from clickfleet.cli.training import epoch_line
    from clickfleet.migrate import models

    _one_process(workers)
    rows, found = data or _test_data(translated), []
    if translated.dictionary is not None:
        return _analogies(translated, rows, span)
    for epoch in models.epochs(translated, span):
        with models.found(translated, epoch) as path:
            results = models.opened(translated, path, trust=trust).reading(form, threads).evaluate(rows, batch_size)
        found.append({"epoch": epoch, **results})
        say(epoch_line(epoch, results))
    return {**found[-1], "epochs": found}


def _analogies(translated: "Translated", data: list[str], span: str | None) -> Result:
    """The share of analogies that word2vec's epochs find, vectors added as they are, as the original did."""
    from tempfile import TemporaryDirectory

    from clickfleet.migrate import models, words
    from clickfleet.words import vectors

    assert translated.dictionary is not None
    found: list[Result] = []
    with TemporaryDirectory(prefix="clickfleet-") as folder:
        questions = words.write_questions(translated.dictionary, data, Path(folder) / "questions.txt")
        for epoch in models.epochs(translated, span):
            with models.found(translated, epoch) as path:
                results = vectors.load(path).evaluate([questions], raw=True)
            found.append({"epoch": epoch, **results})
            say(
                f"{'newest' if epoch is None else f'epoch {epoch}'}: {results['right']:,} of {results['known']:,} analogies found"
            )
    return {**found[-1], "epochs": found}


def predict_old(
    translated: "Translated",
    data: list[str],
    out: Path,
    batch_size: int | None,
    form: str | None,
    threads: int | None,
    workers: int | None,
    trust: bool = False,
) -> Result:
    """Scores by the model that a PaddleRec configuration names, of its test data unless others are named."""
    from clickfleet import trained
    from clickfleet.migrate import models

    _one_process(workers)
    with models.found(translated, translated.last_epoch) as path:
        scorer = models.opened(translated, path, inference=True, trust=trust).reading(form, threads)
        done = trained.write_scores(scorer, data or _test_data(translated), out, batch_size)
    say(f"{done['rows']:,} scores in {out}, {done['rows_per_s']:,.0f} rows/s")
    return done


def _one_process(workers: int | None) -> None:
    if workers is not None:
        raise typer.BadParameter("--workers goes with a run folder: name that instead of the PaddleRec configuration")


def _test_data(translated: "Translated") -> list[str]:
    from clickfleet.errors import ConfigError

    if translated.test_data is None:
        raise ConfigError(f"{translated.original.path}: runner.test_data_dir is missing", "name files after it")
    return [translated.test_data]
