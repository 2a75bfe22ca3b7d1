"""Commands about clusters: `launch`, `bench modes`."""

from typing import Annotated

import typer

from clickfleet.cli.frame import Result, command, say

Servers = Annotated[
    int, typer.Option("--server_num", "--shards", min=1, help="Processes that hold rows and dense weights.")
]
Workers = Annotated[int, typer.Option("--worker_num", "--workers", min=1, help="Processes that train.")]


def add(app: typer.Typer) -> None:
    command(app, verbatim=True)(launch)
    bench = typer.Typer(help="Measurements.", no_args_is_help=True)
    app.add_typer(bench, name="bench")
    command(bench)(modes)


def launch(
    program: Annotated[
        str,
        typer.Argument(
            help="A YAML file with one of the modes sync, half_async, async or geo, or a Python program.",
            metavar="CONFIG|PROGRAM.py",
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings over the file's, such as mode.name=geo; or arguments of the program.",
            metavar="[KEY=VALUE|ARGUMENT]...",
        ),
    ] = None,
    server_num: Servers = 2,
    worker_num: Workers = 2,
    log_dir: Annotated[
        str, typer.Option("--log_dir", help="With a program: folder for a log of each process.")
    ] = "log",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run folder's newest checkpoint.")] = False,
) -> Result:
    """Train on a cluster of processes on this machine, or run a program in every role; each writes a log of its own."""
    if program.endswith(".py"):
        return _launch_program(program, settings or [], server_num, worker_num, log_dir, resume)
    from clickfleet import modes as all_modes
    from clickfleet import run
    from clickfleet.cli.training import tell
    from clickfleet.errors import ConfigError

    overrides = [*(settings or []), f"cluster.shards={server_num}", f"cluster.workers={worker_num}"]
    wanted = run.configure(program, overrides)
    if not all_modes.distributed(wanted):
        raise ConfigError(
            f"mode {wanted.mode.name} runs in one process", "add mode.name=async (or sync, half_async, geo)"
        )
    done = run.train(wanted, resume=resume)
    tell(done)
    say(f"logs of the processes: {wanted.run.dir}/logs")
    return done.to_dict()


def _launch_program(
    program: str, arguments: list[str], servers: int, workers: int, folder: str, resume: bool
) -> Result:
    from clickfleet.cluster import launching
    from clickfleet.errors import ClusterError, ConfigError

    if resume:
        raise ConfigError("--resume is for a configuration", "a program says resume=True itself")
    say(f"{servers} servers and {workers} workers run {program}; their logs are in {folder}")
    failed = launching.launch(program, arguments, servers, workers, folder)
    if failed:
        name, code, last = failed
        raise ClusterError(f"{name} ended with exit code {code}: {last}", f"see {folder}")
    return {"servers": servers, "workers": workers, "logs": folder}


def modes(
    config: Annotated[str, typer.Argument(help="A YAML file: its model, table and data are used.")],
    settings: Annotated[
        list[str] | None, typer.Argument(help="Settings over the file's.", metavar="[KEY=VALUE]...")
    ] = None,
    workers: Annotated[str, typer.Option(help="Numbers of logical workers to simulate.")] = "1,4,16",
    rows: Annotated[int, typer.Option(min=1, help="Training rows used.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Of the order in which workers take turns.")] = 0,
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
