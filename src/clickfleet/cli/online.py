"""The commands `online`, `shrink`, `publish` and `replay`."""

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
    command(app)(shrink)
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


def shrink(run: RunFolder, trust: Trust = False) -> Result:
    """Decay the statistics of a run's rows and remove old and rare rows, as at the end of a day."""
    from clickfleet.online import manual

    done = manual.shrink(run, trust)
    say(f"{done['removed']:,} rows removed, {done['rows']:,} left; checkpoint: {done['checkpoint']}")
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
    trust: Trust = False,
) -> Result:
    """Append an entry to a run's published log, or take consumers back to an earlier entry."""
    from clickfleet.online import manual

    if (kind is None) == (rollback is None) or kind not in (None, "base", "delta"):
        raise typer.BadParameter("give base or delta, or --rollback N")
    done = manual.publish(run, kind, rollback=rollback, to=to, trust=trust)  # type: ignore[arg-type]
    if done["model"] is not None:
        say(f"model: {done['model']}")
    say(f"published {done['entry']}: {done['rows']:,} rows, {done['deleted']:,} deleted")
    return {**done}


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
