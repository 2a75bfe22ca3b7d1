"""The commands `launch` and `cluster`, and the role of a process that a job manager started."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from clickfleet.cli.frame import Result, command, say
from clickfleet.cli.migrating import ConfigFile, Settings, is_paddlerec_config

if TYPE_CHECKING:
    from clickfleet.cluster import Role
    from clickfleet.cluster.control import ChangeFacts, RunningCluster
    from clickfleet.config.load import Config

T = TypeVar("T")
Servers = Annotated[
    int,
    typer.Option(
        "--server_num", "--shards", min=1, help="Number of shard processes, which hold rows and dense weights."
    ),
]
Workers = Annotated[
    int, typer.Option("--worker_num", "--workers", min=1, help="Number of worker processes, which train.")
]


RunFolder = Annotated[
    str, typer.Argument(help="The run folder (run.dir) of a run that trains on a cluster.", metavar="RUN")
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=1.0, help="Seconds to wait for the change.", metavar="SECONDS")
]
WorkerNumber = Annotated[int, typer.Argument(min=1, help="Number of workers.", metavar="N")]
ShardNumber = Annotated[int, typer.Argument(min=1, help="Number of shards that there are to be.", metavar="N")]


def add(app: typer.Typer) -> None:
    command(app, verbatim=True)(launch)
    group = typer.Typer(help="Show and resize a run on a cluster.", no_args_is_help=True)
    app.add_typer(group, name="cluster")
    for function in (status, add_workers, remove_workers, shards):
        command(group)(function)


def status(run: RunFolder) -> Result:
    """Show the processes of a running job, and changes of its size.

    Example: `clickfleet cluster status run`
    """
    from clickfleet.cluster.control import RunningCluster, table

    found = RunningCluster(run).status()
    say(table(found))
    return {**found}


def add_workers(run: RunFolder, number: WorkerNumber, timeout: Timeout = 300.0) -> Result:
    """Add N workers to a running job. They start while the others train, and then share what is left of the epoch.

    Example: `clickfleet cluster add-workers run 2`
    """
    return _change(run, lambda cluster: cluster.add_workers(number, timeout, say))


def remove_workers(run: RunFolder, number: WorkerNumber, timeout: Timeout = 300.0) -> Result:
    """Remove N workers from a running job. The others take what these have not read.

    Example: `clickfleet cluster remove-workers run 1`
    """
    return _change(run, lambda cluster: cluster.remove_workers(number, timeout, say))


def shards(run: RunFolder, number: ShardNumber, timeout: Timeout = 300.0) -> Result:
    """Divide the rows of a running job among N shards. Training pauses while a checkpoint is written and loaded.

    Example: `clickfleet cluster shards run 4`
    """
    return _change(run, lambda cluster: cluster.set_shards(number, timeout, say))


def _change(run: str, ask: Callable[["RunningCluster"], "ChangeFacts"]) -> Result:
    from clickfleet.cluster.control import RunningCluster, describe

    done = ask(RunningCluster(run))
    say(describe(done))
    return {**done}


def launch(
    program: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file whose mode is sync, half_async, async or geo; a PaddleRec configuration; or a Python program.",
            metavar="CONFIG|PROGRAM.py",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="Override settings of the file, such as mode.name=geo; or arguments of the program.",
            metavar="KEY=VALUE|ARGUMENT",
        ),
    ] = None,
    server_num: Servers = 2,
    worker_num: Workers = 2,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Resume from the newest checkpoint of the run folder; without one, start from scratch."
        ),
    ] = False,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            "--log_dir",
            help="Folder for the logs serverlog.0, workerlog.0 and so on (default for a program or a PaddleRec configuration: log; "
            "otherwise: RUN/logs).",
            metavar="FOLDER",
        ),
    ] = None,
    config_file: ConfigFile = None,
    option: Settings = None,
) -> Result:
    """Train or learn online on a cluster of processes on this machine, or run a program once per role. Each process writes its own log.

    A file with online.dir, online.kafka or online.join, or a PaddleRec configuration with days, is for online learning.

    Example: `clickfleet launch --shards 2 --workers 4 config.yaml mode.name=async`
    """
    refuse_role("launch", "starts every process itself")
    if program is not None and program.endswith(".py"):
        if config_file is not None or option:
            raise typer.BadParameter("-m and -o need a configuration, not a program")
        return _launch_program(program, settings or [], server_num, worker_num, log_dir or Path("log"), resume)
    from clickfleet.cli.online import show_stream
    from clickfleet.cli.training import resolve_config, show_result
    from clickfleet.config import check
    from clickfleet.errors import ConfigError
    from clickfleet.training import modes

    numbers = [f"cluster.shards={server_num}", f"cluster.workers={worker_num}"]
    items = [item for item in settings or [] if item not in ("-o", "--set")]  # arguments after CONFIG arrive unparsed
    path, overrides = resolve_config(program, [*items, *numbers], config_file, option, "launch")
    config = check.configure(path, overrides)
    if log_dir is None and is_paddlerec_config(config_file or program):
        log_dir = Path("log")
    if not modes.distributed(config):
        raise ConfigError(
            f"mode {config.mode.name} runs in one process", "add mode.name=async (or sync, half_async, geo)"
        )
    if log_dir is not None:
        link_logs(log_dir, Path(config.run.dir).absolute() / "logs", server_num, worker_num)
    if any(one is not None for one in (config.online.dir, config.online.kafka, config.online.join)):
        from clickfleet.online.learn import learn

        done = show_stream(learn(config))
    else:
        from clickfleet.training import run

        done = show_result(run.train(config, resume=resume))
    say(f"logs of the processes: {log_dir or f'{config.run.dir}/logs'}")
    return done


def run_in_role(role: "Role", config: "Config", drive: Callable[["Config"], T], show: Callable[[T], Result]) -> Result:
    """Run one process of a cluster: worker 0 drives the training, the others serve it. Show the result when all have ended."""
    from clickfleet import cluster
    from clickfleet.cluster import nodes
    from clickfleet.data.repeatable import HASH_SEED
    from clickfleet.errors import ConfigError, HashSeedError
    from clickfleet.paddlerec import roles
    from clickfleet.training import modes

    if not modes.distributed(config):
        raise ConfigError(
            f"{roles.ROLE} makes this process {role.name} of a cluster, but mode {config.mode.name} runs in one process",
            f"add mode.name=async (or sync, half_async, geo), or unset {roles.SERVERS}",
        )
    if config.data.format.name.endswith(".py") and os.environ.get(HASH_SEED, "random") == "random":
        raise HashSeedError(
            f"{config.data.format.name} may use hash(), which must be the same in all processes of a cluster",
            f"set {HASH_SEED}=0 for each of them",
        )
    config = nodes.settled(config, role)
    cluster.check(config)
    if not role.drives:
        nodes.serve(role, config, say)
        return {"role": role.name}
    with nodes.driving(role, config, say):
        done = drive(config)
    return {"role": role.name, **show(done)}


def ray_ahead(config: "Config") -> AbstractContextManager[None]:
    """Start the private Ray of a run while this command imports torch and reads the data.

    Whether a mode needs a cluster is known only after these imports. A mode other than the default nearly always does.
    """
    from clickfleet.config.load import Config

    if config.mode == Config().mode:
        return nullcontext()
    from clickfleet.cluster import ray_start

    return ray_start.ahead(config.cluster)


def refuse_role(name: str, why: str) -> None:
    """Raise ConfigError if this process is part of a cluster, for a command that is not."""
    from clickfleet.errors import ConfigError
    from clickfleet.paddlerec import roles

    role = roles.read()
    if role is not None:
        raise ConfigError(
            f"{roles.ROLE} makes this process {role.name} of a cluster, but `clickfleet {name}` {why}",
            f"start `clickfleet train` or `clickfleet online` in every role, or unset {roles.SERVERS}",
        )


def link_logs(folder: Path, logs: Path, servers: int, workers: int) -> None:
    """Link the processes' logs in `folder`. The targets appear when the processes start."""
    from clickfleet.cluster.process import log_name

    folder.mkdir(parents=True, exist_ok=True)
    for process, count in (("shard", servers), ("worker", workers)):
        for i in range(count):
            name = log_name(f"{process} {i}")
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(logs / name)


def _launch_program(
    program: str, arguments: list[str], servers: int, workers: int, folder: Path, resume: bool
) -> Result:
    from clickfleet.cluster.launch import launch
    from clickfleet.errors import ClusterError, ConfigError
    from clickfleet.paddlerec.roles import environments

    if resume:
        raise ConfigError("--resume needs a configuration", "a program passes resume=True itself")
    say(f"{servers} servers and {workers} workers run {program}; their logs are in {folder}")
    failed = launch(program, arguments, environments(servers, workers), str(folder), say)
    if failed:
        name, code, last = failed
        ported = "; docs/fleet.md shows how to port a Fleet program" if "No module named 'paddle'" in last else ""
        raise ClusterError(f"{name} ended with exit code {code}: {last}", f"see {folder}{ported}")
    return {"servers": servers, "workers": workers, "logs": str(folder)}
