"""The commands `migrate paddlerec`, `table`, `client-config` and `stand-in`, and PaddleRec configurations as input of other commands."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clickfleet.cli.frame import Result, command, say

if TYPE_CHECKING:
    from clickfleet.paddlerec.translation import Translated
    from clickfleet.training.model import SavedModel
    from clickfleet.workbench.compare import OtherKeys


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "-m", "--config", help="The configuration file, as an option like in PaddleRec's tools.", metavar="CONFIG"
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        "--set",
        help="Override a setting of the file; repeatable, and more may follow as arguments.",
        metavar="KEY=VALUE",
    ),
]


def add(app: typer.Typer) -> None:
    group = typer.Typer(help="Convert PaddleRec configurations, models and tables.", no_args_is_help=True)
    app.add_typer(group, name="migrate")
    command(group)(paddlerec)
    command(group)(table)
    command(group)(client_config)
    command(group)(stand_in)


def paddlerec(
    config: Annotated[
        Path,
        typer.Argument(help="A PaddleRec configuration; the name of its folder selects the model.", metavar="CONFIG"),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="Override settings of the file, with PaddleRec's keys or ours.", metavar="KEY=VALUE"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write (default: CONFIG.clickfleet.yaml beside CONFIG).")
    ] = None,
    purpose: Annotated[
        str | None,
        typer.Option(
            help="Purpose of the YAML: train, online, or launch, which is either of them on a cluster. By default and with launch, "
            "a CONFIG with days is for online learning.",
            metavar="train|online|launch",
        ),
    ] = None,
    native: Annotated[
        bool,
        typer.Option(
            "--native", help="Use our parser instead of the Python reader, after checking that both give equal rows."
        ),
    ] = False,
) -> Result:
    """Translate a PaddleRec configuration to our YAML, with a report on every key.

    Example: `clickfleet migrate paddlerec models/rank/deepfm/config.yaml`
    """
    from clickfleet.paddlerec.translation import write

    if purpose not in (None, "train", "online", "launch"):
        raise typer.BadParameter("--purpose must be train, online or launch")
    translated = translation(config, settings or [], purpose)
    if native:
        from clickfleet.paddlerec.native import use_native_parser

        translated = use_native_parser(translated)
    written = write(translated, out or config.with_suffix(".clickfleet.yaml"))
    say(translated.report.text())
    for path in written:
        say(f"wrote {path}")
    return {"path": str(written[0]), **translated.report.counts(), "keys": translated.report.to_dict()}


def table(
    config: Annotated[
        Path, typer.Argument(help="The PaddleRec configuration the model was trained with.", metavar="CONFIG")
    ],
    source: Annotated[
        Path,
        typer.Argument(
            help="A folder of .pdparams, of one file per variable, or of table files (000/part-000-00000, var.shard/); "
            "of numbered folders, the last.",
            metavar="SOURCE",
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Run folder to create.", metavar="OUT")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="Override settings of the file, with PaddleRec's keys or ours.", metavar="KEY=VALUE"),
    ] = None,
    delta: Annotated[
        list[Path] | None,
        typer.Option(help="A delta whose rows replace those of SOURCE; repeat it for more, oldest first."),
    ] = None,
) -> Result:
    """Import a saved model or table as a run folder for evaluate, predict, export and train.init_from."""
    from clickfleet.paddlerec.importing import import_model

    imported = import_model(translation(config, settings or []), source, out, deltas=delta or [])
    say(imported.text())
    return imported.to_dict()


def client_config(
    model: Annotated[
        Path,
        typer.Argument(
            help="An artifact of `clickfleet export`, a published log, or a run folder with one.", metavar="MODEL"
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Folder for serving_client_conf.prototxt.", metavar="OUT")] = Path(
        "serving_client"
    ),
) -> Result:
    """Write the file that tells clients of Paddle Serving the inputs and outputs of a model, by Paddle's names.

    Example: `clickfleet migrate client-config artifact serving_client`
    """
    from clickfleet.cli.serving import find_model
    from clickfleet.data.schema import Schema
    from clickfleet.paddlerec import client_config as configs
    from clickfleet.store.published import LOG, Entry, Log

    path = find_model(model)
    manifest = (Log(path).newest()[-1] if (path / LOG).is_file() else Entry(path)).manifest
    config = configs.describe(Schema.from_dict(manifest["schema"]), manifest["outputs"])
    written = configs.write(config, out)
    names = {"feed": [one.alias for one in config.feeds], "fetch": [one.alias for one in config.fetches]}
    say(f"feed: {', '.join(names['feed'])}")
    say(f"fetch: {', '.join(names['fetch'])}")
    say(f"wrote {written}")
    return {"path": str(written), **names}


def stand_in(
    remove: Annotated[bool, typer.Option("--remove", help="Remove it again.")] = False,
) -> Result:
    """Let every program of this environment import what clickfleet replaces of paddle, without paddle.

    These are the base classes of readers (`cat part-0 | python reader.py`), and the clients of Paddle Serving
    (`paddle_serving_client`), which a clickfleet server answers. What is installed takes precedence. `pipe` commands of
    clickfleet need no stand-in.
    """
    from clickfleet.paddlerec import paddle_names

    path = paddle_names.remove() if remove else paddle_names.install()
    say(f"{'removed' if remove else 'wrote'} {path}")
    return {"path": str(path), "installed": not remove}


def translation(path: Path, settings: Sequence[str], purpose: str | None = None, cluster: bool = False) -> "Translated":
    """Translate a PaddleRec configuration. Settings with keys of its sections override those; the others are ours."""
    from clickfleet.errors import ConfigError
    from clickfleet.paddlerec import original
    from clickfleet.paddlerec.translation import translate

    if not original.is_paddlerec(path):
        raise ConfigError(f"{path} is not a PaddleRec configuration: it has neither runner: nor hyper_parameters:")
    theirs = [item for item in settings if original.is_override(item)]
    ours = [item for item in settings if item not in theirs]
    return translate(original.read(path, theirs), ours, purpose, cluster)  # type: ignore[arg-type]


def is_paddlerec_config(path: str | Path | None) -> bool:
    """Return whether an argument names a PaddleRec configuration."""
    if path is None or not str(path).endswith((".yaml", ".yml")):
        return False
    from clickfleet.paddlerec.original import is_paddlerec

    return is_paddlerec(path)


def with_translation(path: str | None, overrides: list[str], purpose: str = "train") -> tuple[Any, list[str]]:
    """Return the file and its overrides; for a PaddleRec file, its translation and no overrides."""
    if not is_paddlerec_config(path):
        return path, overrides
    from clickfleet.paddlerec import roles
    from clickfleet.paddlerec.models import write_inputs

    role = roles.read()
    translated = translation(Path(str(path)), overrides, purpose, cluster=role is not None)
    counts = translated.report.counts()
    say(
        f"{path}: {counts['mapped'] + counts['used']} keys used, {counts['not applicable']} not applicable, "
        f"{counts['unknown']} unknown; see `clickfleet migrate paddlerec {path}`"
    )
    for text in [*translated.report.warnings, *(str(one) for one in translated.report.lines if one.kind == "unknown")]:
        say(f"warning: {text}")
    if role is not None and not role.drives:  # worker 0 reads the inputs of the run
        return translated.config, []
    return write_inputs(translated), []


def paddlerec_keys(path: str | None, overrides: Sequence[str]) -> "OtherKeys | None":
    """Return the keys of a PaddleRec configuration that a comparison may vary; None for another file."""
    if not is_paddlerec_config(path):
        return None
    from clickfleet.paddlerec.models import keys_to_vary

    return keys_to_vary(Path(str(path)), overrides)


def paddlerec_model(
    model: Path | None, more: Sequence[str], config: Path | None, settings: Sequence[str] | None
) -> "tuple[Translated, list[str]] | None":
    """If a PaddleRec configuration is given instead of MODEL, return its translation and the remaining arguments."""
    path = config or (model if is_paddlerec_config(model) else None)
    if path is None:
        if model is None:
            raise typer.BadParameter("give a MODEL, or a PaddleRec configuration with -m")
        return None
    others = [*([str(model)] if config is not None and model is not None else []), *more]
    given = [*(settings or []), *(item for item in others if "=" in item and not Path(item).exists())]
    return translation(path, given), [item for item in others if item not in given]


@contextmanager
def model_and_data(
    model: Path | None, data: list[str], config_file: Path | None, option: list[str] | None, trust: bool
) -> "Iterator[tuple[SavedModel, list[str]]]":
    """Yield a loaded model and the data to score; for a PaddleRec configuration, those that it names."""
    from clickfleet.training.model import load

    translation = paddlerec_model(model, data, config_file, option)
    if translation is None:
        assert model is not None
        yield load(model, trust), data
        return
    from clickfleet.paddlerec import models

    translated, others = translation
    with models.model_of_epoch(translated, translated.last_epoch) as path:
        saved = models.open_model(translated, path, inference=True, trust=trust)
        yield saved, others or ([translated.test_data] if translated.test_data else [])


def evaluate_paddlerec(
    translated: "Translated",
    data: list[str],
    span: str | None,
    batch_size: int | None,
    form: str | None,
    threads: int | None,
    workers: int | None,
    trust: bool = False,
) -> Result:
    """Evaluate the epochs named by a PaddleRec configuration, by default on its test data."""
    from clickfleet.cli.training import epoch_line, evaluation_lines
    from clickfleet.paddlerec import models

    _refuse_workers(workers)
    rows, per_epoch = data or _test_data(translated), []
    if translated.dictionary is not None:
        return _analogies(translated, rows, span)
    for epoch in models.epochs(translated, span):
        with models.model_of_epoch(translated, epoch) as path:
            model = models.open_model(translated, path, trust=trust).reading(form, threads)
            results = model.evaluate(rows, batch_size, evaluation_lines(translated.config.train.print_every))
        per_epoch.append({"epoch": epoch, **results})
        say(epoch_line(epoch, results))
    return {**per_epoch[-1], "epochs": per_epoch}


def _analogies(translated: "Translated", data: list[str], span: str | None) -> Result:
    """Evaluate word2vec's epochs on analogies. Like the original, add the vectors without normalising them."""
    from tempfile import TemporaryDirectory

    from clickfleet.models.word2vec import vectors
    from clickfleet.paddlerec import models, words

    assert translated.dictionary is not None
    per_epoch: list[Result] = []
    with TemporaryDirectory(prefix="clickfleet-") as folder:
        questions = words.write_questions(translated.dictionary, data, Path(folder) / "questions.txt")
        for epoch in models.epochs(translated, span):
            with models.model_of_epoch(translated, epoch) as path:
                results = vectors.load(path).evaluate([questions], raw=True)
            per_epoch.append({"epoch": epoch, **results})
            say(
                f"{'newest' if epoch is None else f'epoch {epoch}'}: {results['right']:,} of {results['known']:,} analogies found"
            )
    return {**per_epoch[-1], "epochs": per_epoch}


def predict_paddlerec(
    translated: "Translated",
    data: list[str],
    out: Path,
    batch_size: int | None,
    form: str | None,
    threads: int | None,
    workers: int | None,
    trust: bool = False,
    keep: list[str] | None = None,
) -> Result:
    """Write the scores of the model named by a PaddleRec configuration, by default of its test data."""
    from clickfleet.paddlerec import models
    from clickfleet.training import score_files

    _refuse_workers(workers)
    with models.model_of_epoch(translated, translated.last_epoch) as path:
        scorer = models.open_model(translated, path, inference=True, trust=trust).reading(form, threads)
        done = score_files.write_scores(scorer, data or _test_data(translated), out, batch_size, keep or [])
    say(f"{done['rows']:,} scores in {out}, {done['rows_per_s']:,.0f} rows/s")
    return {**done}


def _refuse_workers(workers: int | None) -> None:
    if workers is not None:
        raise typer.BadParameter("--workers needs a run folder; give that instead of the PaddleRec configuration")


def _test_data(translated: "Translated") -> list[str]:
    from clickfleet.errors import ConfigError

    if translated.test_data is None:
        raise ConfigError(f"{translated.original.path}: runner.test_data_dir is missing", "give the files as arguments")
    return [translated.test_data]
