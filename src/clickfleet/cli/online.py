"""The commands `online`, `join`, `loop`, `shrink`, `forget`, `publish` and `replay`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clickfleet.cli.cluster import refuse_role, run_in_role
from clickfleet.cli.frame import Result, Trust, command, say
from clickfleet.cli.migrating import ConfigFile, Settings
from clickfleet.cli.training import resolve_config

if TYPE_CHECKING:
    from clickfleet.online.learn import OnlineResult

RunFolder = Annotated[Path, typer.Argument(help="A run folder; no process may be training in it.", metavar="RUN")]


def add(app: typer.Typer) -> None:
    command(app)(online)
    command(app)(join)
    command(app)(loop)
    command(app)(shrink)
    command(app)(forget)
    command(app)(publish)
    command(app)(replay)


def online(
    config: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file, ours or PaddleRec's. May be omitted if settings give online.dir=…",
            metavar="CONFIG",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="Override settings of the file, such as online.end_day=20260103.", metavar="KEY=VALUE"),
    ] = None,
    config_file: ConfigFile = None,
    option: Settings = None,
    rewind: Annotated[
        str | None,
        typer.Option(
            help="Take a stopped run and its consumers back to before this pass, then exit; list: show the possible passes.",
            metavar="DAY/PASS|list",
        ),
    ] = None,
    skip: Annotated[
        int, typer.Option(min=0, help="With --rewind: skip N passes, starting with that one.", metavar="N")
    ] = 0,
) -> Result:
    """Learn from a stream, pass by pass, and publish while learning. A stopped run resumes where it stopped.

    With TRAINING_ROLE and PADDLE_PSERVERS_IP_PORT_LIST in the environment, it runs as one process of a cluster.

    Example: `clickfleet online config.yaml online.dir=log online.start_day=20260101`
    """
    if skip and rewind in (None, "list"):
        raise typer.BadParameter("--skip needs --rewind DAY/PASS")
    if rewind is not None:
        refuse_role("online --rewind", "is for one process, once, while no run is active")
    path, overrides = resolve_config(config, settings, config_file, option, "online")
    if rewind is not None:
        return _rewind(path, overrides, rewind, skip)
    from clickfleet.config.check import configure
    from clickfleet.online.learn import check_online, learn
    from clickfleet.paddlerec import roles

    role = roles.read()
    if role is None:
        return show_stream(learn(path, *overrides))
    in_role = configure(path, overrides)
    check_online(in_role, has_stream=False)
    return run_in_role(role, in_role, learn, show_stream)


def show_stream(done: "OnlineResult") -> Result:
    """Print and return the result of online learning. If a signal stopped it, exit with the code of the signal."""
    if done.signal is not None:
        say(f"stopped by a signal after {done.passes:,} passes; the same command resumes")
        raise typer.Exit(128 + done.signal)
    say(f"{done.passes:,} passes, {done.rows:,} rows in {done.seconds:.1f} s, {done.rows_per_s:,.0f} rows/s")
    held = f", {done.held} held back" if done.held else ""
    say(f"last published entry: {done.last_sequence or 'none'}{held}; checkpoint: {done.to_dict()['checkpoint']}")
    return done.to_dict()


def _rewind(path: Any, overrides: Any, place: str, skip: int) -> Result:
    from clickfleet.config.check import configure
    from clickfleet.online import rewind as rewinding

    config = configure(path, overrides)
    if place == "list":
        stops = rewinding.listed(config)
        say(rewinding.describe(stops))
        return {"stops": [stop.to_dict() for stop in stops]}
    done = rewinding.rewind(config, rewinding.parse(place), skip, say)
    say("correct or replace the data from that pass on; the same command without --rewind then resumes")
    return done


def join(
    shows: Annotated[
        str,
        typer.Argument(
            help="Show log of `clickfleet serve --log`: a folder, or kafka://BROKERS/TOPIC.", metavar="SHOWS"
        ),
    ],
    feedback: Annotated[
        str,
        typer.Argument(
            help="Feedback of `clickfleet serve --feedback`: a folder, or kafka://BROKERS/TOPIC.", metavar="FEEDBACK"
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the rows and, in .join, the state of the join.")] = Path("rows"),
    wait: Annotated[
        str,
        typer.Option(help="How long a show waits for a label before it counts as negative.", metavar="TIME"),
    ] = "30s",
    window: Annotated[
        str, typer.Option(help="How long after a show its labels may still be corrected.", metavar="TIME")
    ] = "7d",
    label: Annotated[
        str, typer.Option(help="Labels to take from the feedback, the first one first.", metavar="NAME,NAME,...")
    ] = "click",
    split: Annotated[
        str, typer.Option(help="Time per folder of OUT, like online.split_interval.", metavar="TIME")
    ] = "1h",
    every: Annotated[
        str, typer.Option(help="Write a part at this time after its first row, at the latest.", metavar="TIME")
    ] = "10s",
    store_limit: Annotated[
        str,
        typer.Option(
            help="Maximum size of the shows that wait or may be corrected; beyond it, the oldest are decided early.",
            metavar="SIZE",
        ),
    ] = "20GiB",
    no_corrections: Annotated[
        bool, typer.Option("--no-corrections", help="Write no rows for labels that change after the first row.")
    ] = False,
    once: Annotated[
        bool,
        typer.Option("--once", help="Read what there is, decide all shows that still wait, and exit."),
    ] = False,
) -> Result:
    """Join served rows with the feedback that followed them, and write training rows as Arrow files.

    It runs until it is stopped, and continues where it was. The format of the rows is `joined`; the folders are those of online.dir.

    Example: `clickfleet join shows feedback --out rows --wait 30s --window 7d`
    """
    from clickfleet.config.sections import BYTES, SECONDS
    from clickfleet.online import join_folder
    from clickfleet.online.joiner import JoinRules
    from clickfleet.online.row_join import JoinSettings

    def parsed(name: str, text: str, unit: Any) -> float:
        try:
            return float(unit.parse(text))
        except ValueError as error:
            raise typer.BadParameter(f"{name} {text}: {error}") from None

    rules = JoinRules(
        parsed("--wait", wait, SECONDS),
        parsed("--window", window, SECONDS),
        tuple(label.split(",")),
        int(parsed("--store-limit", store_limit, BYTES)),
    )
    done, signal = join_folder.join(
        JoinSettings(shows, feedback, rules, not no_corrections),
        out,
        split_s=round(parsed("--split", split, SECONDS)),
        every_s=parsed("--every", every, SECONDS),
        once=once,
        log=say,
    )
    result = done.to_dict()
    say(f"{result['rows']:,} rows in {done.parts:,} parts: {out}")
    if signal is not None:
        say(f"stopped by a signal; {done.counts['waiting']:,} shows wait, and the same command continues")
        raise typer.Exit(128 + signal)
    return result


def loop(
    config: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file. May be omitted if settings give data.schema=…", metavar="CONFIG", show_default=False
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="Override settings of the file, such as serve.port=8000.", metavar="KEY=VALUE"),
    ] = None,
    demo: Annotated[
        bool,
        typer.Option("--demo", help="Run on synthetic traffic whose tastes drift, and compare AUC with and without."),
    ] = False,
    seconds: Annotated[float, typer.Option(min=10, help="Duration of the demo.", metavar="SECONDS")] = 60.0,
    config_file: ConfigFile = None,
    option: Settings = None,
) -> Result:
    """Serve, log, join, train and publish together: a click changes served scores within a second or so.

    Server and trainer are processes that are restarted when they die. The page /loop on the server's port shows what they do. Stop it with
    Ctrl-C or SIGTERM; the same command continues.

    Example: `clickfleet loop config.yaml serve.port=8080`
    """
    from clickfleet.online import feedback_loop as loops

    def ready(running: loops.FeedbackLoop) -> None:
        say(f"ready: {running.url}  (page: {running.url}/loop; Ctrl-C stops)")
        join = running.config.online.join
        assert join is not None
        say(f"shows: {join.shows}; feedback: {join.feedback}; run: {running.run_folder}")

    refuse_role("loop", "runs on one machine")
    if demo:
        return _demo(config, settings or [], seconds, ready)
    path, overrides = resolve_config(config, settings, config_file, option, "online")
    done = loops.run(path, *overrides, log=say, ready=ready)
    say("stopped; the same command continues")
    return {"run": str(done.run_folder), "url": done.url}


def _demo(config: str | None, settings: list[str], seconds: float, ready: Any) -> Result:
    import signal
    import tempfile

    from clickfleet.online import loop_demo

    overrides = [*([] if config is None else [config]), *settings]
    if wrong := [item for item in overrides if "=" not in item]:
        raise typer.BadParameter(f"--demo has its own configuration, but {wrong[0]} was given")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="clickfleet-loop-") as folder:
        done = loop_demo.run_demo(Path(folder), *overrides, seconds=seconds, log=say, ready=ready)
    if done.with_loop is not None and done.without is not None:
        say(f"AUC with the loop {done.with_loop:.4f}, without {done.without:.4f}")
    if done.freshness_p50_s is not None:
        fresh = f"{done.freshness_p50_s:.2f} s (99%: {done.freshness_p99_s:.2f} s)"
        say(f"from a click to a served score that has learned it: {fresh}")
    return done.to_dict()


def shrink(run: RunFolder, trust: Trust = False) -> Result:
    """Decay the statistics of a run's rows and remove old and rare rows, as at the end of a day."""
    from clickfleet.online import manual

    done = manual.shrink(run, trust)
    say(f"{done['removed']:,} rows removed, {done['rows']:,} left; checkpoint: {done['checkpoint']}")
    return {**done}


def forget(
    run: RunFolder,
    keys: Annotated[
        Path | None,
        typer.Option(
            help="Keys to forget: per line a number, or a slot, a tab and a value. Or a csv, parquet or Arrow file with a column key, or "
            "columns named like slots.",
            metavar="FILE",
        ),
    ] = None,
    value: Annotated[
        list[str] | None,
        typer.Option(help="Forget a value of a slot. May be given several times.", metavar="SLOT=VALUE"),
    ] = None,
    now: Annotated[
        bool,
        typer.Option("--now", help="Publish a base, and remove all older checkpoints and entries at once."),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Change nothing: list what holds any of the keys. Exit with 1 if something does."
        ),
    ] = False,
    trust: Trust = False,
) -> Result:
    """Remove the rows of keys or values from a run, and list the checkpoints and entries that still hold them.

    The next entry deletes them for servers. Older checkpoints and entries remain until retention removes them, unless --now is given.

    Example: `clickfleet forget live --value user_id=123`
    """
    from clickfleet.online import forget as forgetting
    from clickfleet.store.erasure import holds

    if now and verify:
        raise typer.BadParameter("--verify changes nothing; give it without --now")
    values: dict[str, list[str]] = {}
    for pair in value or []:
        slot, equals, text = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"--value {pair}: expected SLOT=VALUE")
        values.setdefault(slot, []).append(text)
    if keys is None and not values:
        raise typer.BadParameter("give --keys FILE or --value SLOT=VALUE")
    done = forgetting.forget(run, keys, values, now=now, verify=verify, trust=trust)
    if not verify:
        say(
            f"{done['removed']:,} rows of {done['keys']:,} keys removed, {done['rows']:,} left; "
            f"checkpoint: {done['checkpoint'] or 'none needed'}"
        )
        for path in [*done["replaced"], *done.get("dropped", [])]:
            say(f"{'replaced' if path in done['replaced'] else 'removed'}: {path}")
        if done.get("entry") is not None:
            say(f"published {done['entry']}")
        elif done["deletions"]:
            say(
                f"the next entry deletes {done['deletions']:,} rows for consumers: let the run continue, or publish a delta"
            )
    for holder in done["holders"]:
        say(forgetting.describe(holder))
    held = sum(map(holds, done["holders"]))
    say(f"{held:,} places still hold some of the keys" if held else "no checkpoint or entry holds any of the keys")
    if done.get("unsearched"):
        say(f"not searched, may hold values of the data: {', '.join(done['unsearched'])}")
    return {**done}


def publish(
    run: RunFolder,
    kind: Annotated[
        str | None,
        typer.Argument(help="base: all rows; delta: the changes since the last entry.", metavar="base|delta"),
    ] = None,
    rollback: Annotated[
        int | None, typer.Option(help="Append an entry that takes consumers back to the state of entry N.", metavar="N")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            help="Also copy missing entries to a folder or URL; a redis:// URL receives the rows.", metavar="FOLDER|URL"
        ),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            help="Format of the entry's rows; int8 has a scale per row (default: publish.rows of the run).",
            metavar="float32|float16|int8",
        ),
    ] = None,
    what_if: Annotated[
        bool,
        typer.Option(
            "--what-if", help="Publish nothing: show what each format of rows takes and how it changes scores."
        ),
    ] = False,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="With --what-if: files to score (default: data.test of the run); repeatable.", metavar="FILE"
        ),
    ] = None,
    trust: Trust = False,
) -> Result:
    """Append an entry to a run's published log, or take consumers back to an earlier entry.

    Example: `clickfleet publish run base --rows int8`
    """
    from clickfleet.online import manual
    from clickfleet.store.row_format import describe

    if what_if:
        if kind is not None or rollback is not None or to is not None or rows is not None:
            raise typer.BadParameter("--what-if publishes nothing: give only RUN and --data")
        return _what_if(run, data, trust)
    if data:
        raise typer.BadParameter("--data needs --what-if")
    if rows not in (None, "float32", "float16", "int8"):
        raise typer.BadParameter("--rows must be float32, float16 or int8")
    if (kind is None) == (rollback is None) or kind not in (None, "base", "delta"):
        raise typer.BadParameter("give base or delta, or --rollback N")
    if rows is not None and rollback is not None:
        raise typer.BadParameter("--rows is for base and delta; a rollback keeps the format of what it restores")
    done = manual.publish(run, kind, rollback=rollback, to=to, trust=trust, rows=rows)  # type: ignore[arg-type]
    if done["model"] is not None:
        say(f"model: {done['model']}")
    say(f"published {done['entry']}: {done['rows']:,} rows, {done['deleted']:,} deleted")
    say(describe(done["row_format"], done["row_bytes"], done["rows"], done["golden_drift"]))
    return {**done}


def _what_if(run: Path, data: list[str] | None, trust: bool) -> Result:
    from clickfleet.training.model import load
    from clickfleet.workbench.tables import Column, TextTable
    from clickfleet.workbench.what_if import what_if

    model = load(run, trust)
    found = what_if(model, list(data or model.config.data.test))
    say(f"{found.rows:,} rows, {found.short_rows:,} of them without factors; scored {found.scored:,} rows of data")
    columns = [
        Column("format", "rows"),
        Column("bytes", "bytes", "{:,}"),
        Column("bytes_per_row", "per row", "{:.1f}"),
        Column("ratio", "of float32", "{:.3f}"),
        Column("memory_per_row", "memory per row", "{:.1f}"),
        Column("drift", "largest drift", "{:.2g}"),
        Column("mean_drift", "mean drift", "{:.2g}"),
        Column("auc", "AUC", "{:.6f}"),
        Column("auc_change", "change", "{:+.6f}"),
        Column("problem"),
    ]
    facts = found.to_dict()
    say(TextTable(columns, facts["formats"]).text())
    return facts


def replay(
    config: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file, ours or PaddleRec's, of an online run over past logs.",
            metavar="CONFIG",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Argument(help="Override settings of the file.", metavar="KEY=VALUE")
    ] = None,
    sync: Annotated[str, typer.Option(help="Publishing intervals to compare.", metavar="TIME,TIME,...")] = "1d,1h",
    admit: Annotated[
        str,
        typer.Option(help="Admission scores to compare, at which rows get factors; 0: at birth.", metavar="X,X,..."),
    ] = "0",
    out: Annotated[Path, typer.Option(help="Folder for the runs, replay.json and replay.svg.")] = Path("replay"),
    config_file: ConfigFile = None,
    option: Settings = None,
) -> Result:
    """Learn from past logs with several publishing intervals and admission scores; compare AUC, rows and bytes of deltas."""
    from clickfleet.config.check import configure
    from clickfleet.online.replay import draw_replay
    from clickfleet.online.replay import replay as run_all

    try:
        thresholds = [float(text) for text in admit.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--admit {admit}: expected numbers separated by commas") from None
    refuse_role("replay", "trains its runs one after the other")
    base = configure(*resolve_config(config, settings, config_file, option, "online"))
    rows = run_all(base, out, sync.split(","), thresholds, say)
    say(f"plot: {draw_replay(rows, out / 'replay.svg')}")
    return {"rows": rows, "out": str(out)}
