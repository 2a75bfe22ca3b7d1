"""Commands about click logs: `synth`, `fetch`, `prepare`, `schema`, `stats`, `read`, `convert`."""

from pathlib import Path
from typing import Annotated

import typer

from clickfleet.cli.frame import Result, command, say
from clickfleet.cli.migrating import ConfigFile, Settings

Inputs = Annotated[
    list[str],
    typer.Argument(help="Files, folders, globs or URLs; .gz and .zst are decompressed.", metavar="DATA"),
]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        help="Format of the files: auto, criteo, csv, parquet, arrow, jsonl, libsvm, libffm, vw, slots, feasign or multislot.",
        metavar="FORMAT",
    ),
]
SchemaFile = Annotated[
    Path | None,
    typer.Option("--schema", help="YAML file with the columns (default: the columns of the format, else guessed)."),
]
BadLines = Annotated[
    str,
    typer.Option(
        "--bad-lines", help="On a line that cannot be parsed: stop (error) or drop it (skip).", metavar="error|skip"
    ),
]
Keys = Annotated[
    str | None,
    typer.Option(
        "--keys",
        help="How values become keys: hash64, py2, 'py2 mod M' or raw (default: the schema's rule).",
        metavar="RULE",
    ),
]


def add(app: typer.Typer) -> None:
    command(app)(synth)
    command(app)(fetch)
    command(app)(prepare)
    command(app)(schema)
    command(app)(stats)
    command(app)(read)
    command(app)(convert)


def synth(
    out: Annotated[
        Path, typer.Argument(help="Folder for the log: train/ and test/, or one folder per day.", metavar="OUT")
    ],
    rows: Annotated[int, typer.Option(help="Total number of training rows.")] = 500_000,
    test_rows: Annotated[int, typer.Option(help="Number of test rows.")] = 50_000,
    histories: Annotated[
        bool,
        typer.Option(
            "--histories", help="Draw visits of a shop: rows with past events of the user, on which the click depends."
        ),
    ] = False,
    labels: Annotated[
        str,
        typer.Option(
            help="Labels of a row: click, or click,buy for purchases, which are known only after a click.",
            metavar="click|click,buy",
        ),
    ] = "click",
    delays: Annotated[
        str,
        typer.Option(
            help="Also write the rows as shows/ and feedback/, the logs of a server, where each label comes after this time on "
            "average: click=20s,buy=2h. The delay of a row depends on its values.",
            metavar="LABEL=TIME,...",
        ),
    ] = "",
    format: Annotated[  # noqa: A002
        str,
        typer.Option(
            help="Format to write: criteo, csv, parquet, arrow (raw values); slots, multislot, feasign, libffm (keys). "
            "Default: criteo, or csv with --histories, two labels or --delays.",
            metavar="FORMAT",
        ),
    ] = "",
    parts: Annotated[int, typer.Option(help="Files per folder.")] = 1,
    days: Annotated[
        int, typer.Option(help="Write folders <day>/<HHMM>/ with done files for so many days, for online learning.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed; the same seed gives the same rows.")] = 7,
    drift: Annotated[
        float | None,
        typer.Option(help="Fraction of ids replaced, and of effects changed, each day (default with --days: 0.1)."),
    ] = None,
    start_day: Annotated[str, typer.Option(help="First day.", metavar="YYYYMMDD")] = "20260101",
    split_interval: Annotated[int, typer.Option(help="Minutes per folder, with --days.")] = 60,
    done_file: Annotated[str, typer.Option(help="Name of the file that marks a folder as complete.")] = "_DONE",
    threads: Annotated[
        int | None, typer.Option(help="Threads that generate rows (default: one per core, up to 4).")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output of an earlier synth.")] = False,
) -> Result:
    """Generate a click log from a known model, so that the best possible AUC of every label is known.

    Rows have the shape of Criteo's log or, with --histories or two labels, are visits of a shop.

    Example: `clickfleet synth log --rows 100000`
    Example: `clickfleet synth shop --histories --labels click,buy`
    Example: `clickfleet synth late --labels click,buy --delays click=20s,buy=2h`
    """
    from clickfleet.data.logs.delayed_log import parse_delays
    from clickfleet.data.logs.synth import SynthOptions
    from clickfleet.data.logs.synth import synth as generate

    names = tuple(name.strip() for name in labels.split(","))
    options = SynthOptions(
        *(rows, test_rows, format, parts, days, seed, drift, start_day, split_interval, done_file),
        histories=histories,
        labels=names,
        delays=parse_delays(delays, names) if delays else {},
    )
    result = generate(out, options, overwrite=overwrite, threads=threads)
    say(f"{result['rows']:,} rows and {result['test_rows']:,} test rows in {out}")
    say(f"click rate {result['ctr']:.4f}, best possible AUC {result['best_auc']:.4f}")
    if buy := result.get("tasks", {}).get("buy"):
        say(
            f"buy rate {buy['rate']:.4f}, best possible AUC {buy['best_auc']:.4f} over all rows, "
            f"{buy['best_auc_given']:.4f} after a click"
        )
    if "events" in result:
        say(f"shows in {result['shows']}, {result['events']:,} events in {result['feedback']}")
    if "schema" in result:
        say(f"columns in {result['schema']}")
    return result


def fetch(
    name: Annotated[
        str,
        typer.Argument(
            help="Dataset: criteo (raw text, 4 GB), criteo-slots (slot text, scaled and hashed; PaddleRec's folder names) "
            "or one-billion-words (plain text for word2vec, 1.8 GB).",
            metavar="NAME",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for the data (default: the name of the dataset).")] = None,
    url: Annotated[
        list[str] | None, typer.Option(help="Download from this URL instead; repeat it once per archive.")
    ] = None,
    mirror: Annotated[str, typer.Option(help="Base URL of a mirror of the same archives.")] = "",
    clean: Annotated[bool, typer.Option("--clean", help="Delete the archives and the data instead.")] = False,
) -> Result:
    """Download a public data set, check and unpack it. Click logs also get small folders for a quick run.

    An interrupted download resumes.

    Example: `clickfleet fetch criteo-slots --out datasets/criteo`
    """
    from clickfleet.data.logs.fetch import clean as remove
    from clickfleet.data.logs.fetch import dataset
    from clickfleet.data.logs.fetch import fetch as get

    data = dataset(name, url or (), mirror)
    where = out or Path(name)
    return remove(data, where, say) if clean else get(data, where, say)


def prepare(
    raw: Inputs,
    out: Annotated[Path, typer.Option(help="New folder for train/, test/ and schema.yaml.")],
    format: Format = "auto",  # noqa: A002
    schema: SchemaFile = None,
    transform: Annotated[
        str | None,
        typer.Option(
            help="Transform fitted to the dense columns: minmax (up to the 95th percentile), standard, log1p or none "
            "(default: minmax, or those of the guessed schema).",
            metavar="NAME",
        ),
    ] = None,
    keys: Keys = None,
    test_share: Annotated[float, typer.Option(help="Fraction of the rows, the last ones, for test/.")] = 0.1,
    part_rows: Annotated[int, typer.Option(help="Rows per part file.")] = 200_000,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Shuffle all rows first, on disk.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the shuffle.")] = 7,
    bad_lines: BadLines = "error",
) -> Result:
    """Split raw logs into part files for training and test, and fit the transforms of the dense columns."""
    from clickfleet.data.logs.prepare import PrepareOptions
    from clickfleet.data.logs.prepare import prepare as split
    from clickfleet.data.schema import read_schema

    options = PrepareOptions(format, transform, test_share, part_rows, shuffle, seed, keys, bad_lines)  # type: ignore[arg-type]
    result = split(raw, out, options, read_schema(schema) if schema else None)
    for name in ("train", "test"):
        say(f"{name}: {result[f'{name}_rows']:,} rows in {result['parts'][name]} files in {out / name}")
    say(f"schema: {result['schema']}")
    return result


def schema(
    data: Inputs,
    label: Annotated[
        str | None,
        typer.Option(help="Name of the label column (default: guessed from names and values).", metavar="NAME"),
    ] = None,
    format: Annotated[  # noqa: A002
        str | None, typer.Option("--format", help="Format of the files (default: recognised from the first).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the schema to this file, for editing and data.schema.", metavar="FILE")
    ] = None,
) -> Result:
    """Print the format of files, and the guessed role of every column with the reason. Training guesses the same.

    Example: `clickfleet schema clicks.csv --out schema.yaml`
    """
    from clickfleet.data.guess import guess

    found = guess(data, label, format)
    say(found.text())
    if out is not None:
        found.write(out)
        say(f"schema: {out}")
    return {**found.to_dict(), "out": None if out is None else str(out)}


def stats(
    data: Inputs,
    format: Format = "auto",  # noqa: A002
    schema: SchemaFile = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write an HTML page with one plot per column.", metavar="FILE")
    ] = None,
    top: Annotated[int, typer.Option(help="Frequent values shown per slot.")] = 3,
    bad_lines: BadLines = "error",
) -> Result:
    """Describe logs: rows, click rate, and for each column the missing, distinct and most frequent values."""
    from clickfleet.data.logs.stats import page, table
    from clickfleet.data.logs.stats import stats as describe
    from clickfleet.data.schema import read_schema

    summary = describe(data, format, read_schema(schema) if schema else None, bad_lines)  # type: ignore[arg-type]
    say(table(summary, top))
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(page(summary, ", ".join(data)), encoding="utf-8")
        say(f"page: {html}")
    return summary.to_dict()


def read(
    data: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files, folders, globs or URLs; - reads standard input (default with -m: the training data of CONFIG).",
            metavar="DATA",
            show_default=False,
        ),
    ] = None,
    format: Annotated[  # noqa: A002
        str | None,
        typer.Option(
            "--format",
            help="Format of the files, or a reader.py (default: that of CONFIG, else guessed).",
            metavar="FORMAT",
        ),
    ] = None,
    schema: SchemaFile = None,
    keys: Keys = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of samples to show.")] = 3,
    config_file: ConfigFile = None,
    option: Settings = None,
) -> Result:
    """Show samples as training sees them: names, values of the file, transformed values and keys. Bad lines show the reason.

    This is the way to debug a reader: formats, `pipe` commands, PaddleRec configurations (-m) and readers in Python all work.

    Example: `head -n 3 part-0 | clickfleet read - --format slots`
    """
    from clickfleet.cli.reading import config_and_schema, opened, settled
    from clickfleet.data.logs.samples import read_samples, text_of

    config, known = config_and_schema(config_file, option or [], format, schema)
    with opened(data or config.data.train) as files:
        config, wanted = settled(config, known, keys, files)
        samples = list(read_samples(files, config.data.format, wanted, rows))
        names = dict(zip(files, data or files, strict=False)) if "-" in (data or ()) else {}
    for sample in samples:
        sample.file = names.get(sample.file, sample.file)
        say(text_of(sample, wanted))
    if not samples:
        say("the data has no rows")
    return {"samples": [sample.to_dict() for sample in samples], "format": config.data.format.name}


def convert(
    inputs: Inputs,
    target: Annotated[str, typer.Option("--to", help="Format to write.", metavar="FORMAT")],
    out: Annotated[
        str,
        typer.Option(
            help="File (.gz and .zst compress it), folder ending in / for one file per input, or - for stdout.",
            metavar="OUT",
        ),
    ],
    source: Annotated[
        str, typer.Option("--from", help="Format of the files; auto recognises it.", metavar="FORMAT")
    ] = "auto",
    keys: Keys = None,
    schema: SchemaFile = None,
    drop_dense: Annotated[
        bool, typer.Option("--drop-dense", help="Drop dense columns if the target format cannot hold them.")
    ] = False,
    bad_lines: BadLines = "error",
) -> Result:
    """Convert logs to another format. Values stay raw if both formats hold raw values; otherwise they become keys."""
    from clickfleet.data.logs.convert import convert as rewrite
    from clickfleet.data.schema import read_schema

    result = rewrite(
        inputs,
        out,
        source,
        target,
        keys=keys,
        schema=read_schema(schema) if schema else None,
        drop_dense=drop_dense,
        bad_lines=bad_lines,  # type: ignore[arg-type]
    )
    if out != "-":
        say(f"{result['rows']:,} rows in {', '.join(result['files'])}")
        if result["schema"]:
            say(f"schema: {result['schema']}")
    return result
