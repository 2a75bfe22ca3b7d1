"""Commands about clusters: `launch`, `bench modes`."""

from typing import Annotated

import typer

from clickfleet.cli.frame import Result, command, say

Servers = Annotated[
    int, typer.Option("--server_num", "--shards", min=1, help="Processes that hold rows and dense weights.")
]
Workers = Annotated[int, typer.Option("--worker_num", "--workers", min=1, help="Processes that train.")]


def add(app: typer.Typer) -> None:
    command(app)(launch)
    bench = typer.Typer(help="Measure on your own data: which training mode keeps the AUC.", no_args_is_help=True)
    app.add_typer(bench, name="bench")
    command(bench)(modes)


def launch(
    config: Annotated[str, typer.Argument(help="A YAML file with one of the modes sync, half_async, async or geo.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="Settings over the file's, such as mode.name=geo.", metavar="KEY=VALUE"),
    ] = None,
    server_num: Servers = 2,
    worker_num: Workers = 2,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run folder's newest checkpoint.")] = False,
) -> Result:
    """Train on a cluster of processes on this machine; each writes its own log into the run folder's logs/."""
    from clickfleet import modes as all_modes
    from clickfleet import run
    from clickfleet.cli.training import tell
    from clickfleet.errors import ConfigError

    overrides = [*(settings or []), f"cluster.shards={server_num}", f"cluster.workers={worker_num}"]
    wanted = run.configure(config, overrides)
    if not all_modes.distributed(wanted):
        raise ConfigError(
            f"mode {wanted.mode.name} runs in one process", "add mode.name=async (or sync, half_async, geo)"
        )
    done = run.train(wanted, resume=resume)
    tell(done)
    say(f"logs of the processes: {wanted.run.dir}/logs")
    return done.to_dict()


def modes(
    config: Annotated[str, typer.Argument(help="A YAML file: its model, table and data are used.")],
    settings: Annotated[list[str] | None, typer.Argument(help="Settings over the file's.", metavar="KEY=VALUE")] = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers to simulate, by commas.")] = "1,4,16",
    rows: Annotated[int, typer.Option(min=1, help="Training rows used.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Seed of the order in which simulated workers take turns.")] = 0,
) -> Result:
    """Run one job in all modes with simulated workers: AUC, staleness and speed, and advice which mode to choose."""
    from clickfleet import run
    from clickfleet.cluster import advisor

    found = advisor.measure(
        run.configure(config, settings or []), [int(n) for n in workers.split(",")], rows, seed, say
    )
    say(advisor.table(found))
    advice = advisor.advise(found)
    for line in advice:
        say(line)
    return {"rows": found, "advice": advice}
