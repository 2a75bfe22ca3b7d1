"""Commands of online learning: `online`, `shrink`, `publish`, `replay`."""

from pathlib import Path
from typing import Annotated

import typer

from clickfleet.cli.frame import Result, command, say
from clickfleet.cli.migrating import ConfigFile, Settings
from clickfleet.cli.training import given

RunFolder = Annotated[Path, typer.Argument(help="A run folder; it must not be training just now.", metavar="RUN")]


def add(app: typer.Typer) -> None:
    command(app)(online)
    command(app)(shrink)
    command(app)(publish)
    command(app)(replay)


def online(
    config: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file, ours or PaddleRec's; or leave it out and give online.dir=…",
            metavar="CONFIG",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="Settings over the file's, such as online.end_day=20260103.", metavar="KEY=VALUE"),
    ] = None,
    config_file: ConfigFile = None,
    option: Settings = None,
) -> Result:
    """Learn from a stream pass by pass and publish as it goes; a stopped run goes on where it was."""
    path, overrides = given(config, settings, config_file, option, "online")
    from clickfleet.online.learn import learn

    done = learn(path, *overrides)
    if done.signal is not None:
        say(f"stopped by a signal after {done.passes:,} passes; the same command goes on")
        raise typer.Exit(128 + done.signal)
    say(f"{done.passes:,} passes, {done.rows:,} rows in {done.seconds:.1f} s, {done.rows_per_s:,.0f} rows/s")
    held = f", {done.held} held back" if done.held else ""
    say(f"last published entry: {done.last_sequence or 'none'}{held}; checkpoint: {done.to_dict()['checkpoint']}")
    return done.to_dict()


def shrink(run: RunFolder) -> Result:
    """Decay the statistics of a run's rows and remove those that are old or rarely seen, as at a day's end."""
    from clickfleet.online.by_hand import shrink as act

    done = act(run)
    say(f"{done['removed']:,} rows removed, {done['rows']:,} stay; checkpoint: {done['checkpoint']}")
    return done


def publish(
    run: RunFolder,
    kind: Annotated[
        str | None,
        typer.Argument(help="base: all rows; delta: what changed since the last entry.", metavar="base|delta"),
    ] = None,
    rollback: Annotated[
        int | None, typer.Option(help="Return readers to what entry N published, by one more entry.", metavar="N")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(help="Also copy entries not there yet to a folder or URL; redis:// gets rows."),
    ] = None,
) -> Result:
    """Append an entry to a run's published log, or take readers back to an earlier one."""
    from clickfleet.online.by_hand import publish as act

    if (kind is None) == (rollback is None) or kind not in (None, "base", "delta"):
        raise typer.BadParameter("say base or delta, or give --rollback N")
    done = act(run, kind, rollback=rollback, to=to)  # type: ignore[arg-type]
    if done["model"] is not None:
        say(f"model: {done['model']}")
    say(f"published {done['entry']}: {done['rows']:,} rows, {done['deleted']:,} deleted")
    return done


def replay(
    config: Annotated[str, typer.Argument(help="The YAML file of an online run over past logs.", metavar="CONFIG")],
    settings: Annotated[list[str] | None, typer.Argument(help="Settings over the file's.", metavar="KEY=VALUE")] = None,
    sync: Annotated[str, typer.Option(help="How often to publish, intervals to compare, by commas.")] = "1d,1h",
    admit: Annotated[str, typer.Option(help="Scores at which rows get their factors, by commas; 0: at birth.")] = "0",
    out: Annotated[Path, typer.Option(help="Folder for the runs, replay.json and replay.svg.")] = Path("replay"),
) -> Result:
    """Learn from past logs again with other settings and compare AUC, rows and bytes of deltas."""
    from clickfleet.configuring import configure
    from clickfleet.online.plots import draw_replay
    from clickfleet.online.replay import replay as act

    try:
        thresholds = [float(text) for text in admit.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--admit {admit} are no numbers") from None
    rows = act(configure(config, settings or ()), out, sync.split(","), thresholds, say)
    say(f"plot: {draw_replay(rows, out / 'replay.svg')}")
    return {"rows": rows, "out": str(out)}
