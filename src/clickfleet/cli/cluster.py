"""Commands about clusters: `launch`; `bench modes` is registered in bench.py."""

from pathlib import Path
from typing import Annotated

import typer

from clickfleet.cli.frame import Result, command, say
from clickfleet.cli.migrating import ConfigFile, Settings, is_old

Servers = Annotated[
    int, typer.Option("--server_num", "--shards", min=1, help="Processes that hold rows and dense weights.")
]
Workers = Annotated[int, typer.Option("--worker_num", "--workers", min=1, help="Processes that train.")]


def add(app: typer.Typer) -> None:
    command(app, verbatim=True)(launch)


def launch(
    program: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file with one of the modes sync, half_async, async or geo, or one of PaddleRec's; or a Python program.",
            metavar="CONFIG|PROGRAM.py",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings over the file's, such as mode.name=geo; or arguments of the program.",
            metavar="KEY=VALUE|ARGUMENT",
        ),
    ] = None,
    server_num: Servers = 2,
    worker_num: Workers = 2,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run folder's newest checkpoint.")] = False,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            "--log_dir",
            help="Folder where logs are named serverlog.0 and workerlog.0 on (default with a program or a PaddleRec configuration: log).",
        ),
    ] = None,
    config_file: ConfigFile = None,
    option: Settings = None,
) -> Result:
    """Train on a cluster of processes on this machine, or run a program in every role; each writes a log of its own."""
    if program is not None and program.endswith(".py"):
        if config_file is not None or option:
            raise typer.BadParameter("-m and -o are for a configuration; a program reads its own")
        return _launch_program(program, settings or [], server_num, worker_num, log_dir or Path("log"), resume)
    from clickfleet import configuring, run
    from clickfleet import modes as all_modes
    from clickfleet.cli.training import given, tell
    from clickfleet.errors import ConfigError

    numbers = [f"cluster.shards={server_num}", f"cluster.workers={worker_num}"]
    items = [item for item in settings or [] if item not in ("-o", "--set")]  # what follows CONFIG comes as it is
    path, overrides = given(program, [*items, *numbers], config_file, option, "launch")
    wanted = configuring.configure(path, overrides)
    if log_dir is None and is_old(config_file or program):
        log_dir = Path("log")
    if not all_modes.distributed(wanted):
        raise ConfigError(
            f"mode {wanted.mode.name} runs in one process", "add mode.name=async (or sync, half_async, geo)"
        )
    if log_dir is not None:
        link_logs(log_dir, Path(wanted.run.dir).absolute() / "logs", server_num, worker_num)
    done = run.train(wanted, resume=resume)
    tell(done)
    say(f"logs of the processes: {log_dir or f'{wanted.run.dir}/logs'}")
    return done.to_dict()


def link_logs(folder: Path, logs: Path, servers: int, workers: int) -> None:
    """Names the processes' logs as fleetrun did; they are there once the processes have started."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, mine, count in (("serverlog", "shard", servers), ("workerlog", "worker", workers)):
        for i in range(count):
            link = folder / f"{kind}.{i}"
            link.unlink(missing_ok=True)
            link.symlink_to(logs / f"{mine}-{i}.log")


def _launch_program(
    program: str, arguments: list[str], servers: int, workers: int, folder: Path, resume: bool
) -> Result:
    from clickfleet.cluster import launching
    from clickfleet.errors import ClusterError, ConfigError

    if resume:
        raise ConfigError("--resume is for a configuration", "a program says resume=True itself")
    say(f"{servers} servers and {workers} workers run {program}; their logs are in {folder}")
    failed = launching.launch(program, arguments, servers, workers, str(folder), say)
    if failed:
        name, code, last = failed
        raise ClusterError(f"{name} ended with exit code {code}: {last}", f"see {folder}")
    return {"servers": servers, "workers": workers, "logs": str(folder)}


def modes(
    config: Annotated[str, typer.Argument(help="A YAML file: its model, table and data are used.")],
    settings: Annotated[list[str] | None, typer.Argument(help="Settings over the file's.", metavar="KEY=VALUE")] = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers to simulate, by commas.")] = "1,4,16",
    rows: Annotated[int, typer.Option(min=1, help="Training rows used.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Seed of the order in which simulated workers take turns.")] = 0,
) -> Result:
    """Run one job in all modes with simulated workers: AUC, staleness and speed, and advice which mode to choose."""
    from clickfleet import configuring
    from clickfleet.cluster import advisor

    found = advisor.measure(
        configuring.configure(config, settings or []), [int(n) for n in workers.split(",")], rows, seed, say
    )
    say(advisor.table(found))
    advice = advisor.advise(found)
    for line in advice:
        say(line)
    return {"rows": found, "advice": advice}
