"""`train` in a mode of the cluster: from a run folder to its outcome."""

from __future__ import annotations

from pathlib import Path

from clickfleet import checkpoint, saving
from clickfleet.cluster import driver
from clickfleet.cluster.overview import ClusterWatch
from clickfleet.config import Config
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.files import expand
from clickfleet.home import write_config
from clickfleet.job import Source
from clickfleet.mirror import Mirror
from clickfleet.opening import Data, total_bytes
from clickfleet.outcome import Distant, Outcome
from clickfleet.reader import Reader
from clickfleet.report.ending import write_led_report
from clickfleet.report.evidence import Evidence
from clickfleet.trained import cores


def train(
    settings: Config,
    source: Source,
    test: Data,
    folder: Path | None,
    resume: bool,
    quiet: bool,
    copy: Mirror | None,
) -> Outcome:
    if not isinstance(source, Reader) or folder is None:
        raise ConfigError(f"mode {settings.mode.name} reads files", "give paths, or use mode local for data in memory")
    test = test if test is not None else settings.data.test
    held_out = expand(test) if test else []
    if not held_out and (settings.train.patience or settings.train.eval_every or settings.run.keep_best):
        raise ConfigError("train.patience, train.eval_every and run.keep_best need test data", "set data.test")
    checkpoints = folder / "checkpoints"
    if not resume and checkpoint.steps(checkpoints):
        raise CheckpointError(f"{folder} holds a run already", "go on with --resume, or choose another run.dir")
    checkpoints.mkdir(parents=True, exist_ok=True)
    write_config(folder, settings)
    watch = ClusterWatch(folder, total_bytes(source, settings), epochs=settings.train.epochs, quiet=quiet)
    if copy is not None:
        copy.start(watch.log, apart=settings.cluster.address is not None)
    before = 0

    def prepare(run: driver.Driver) -> None:
        nonlocal before
        run.copy = copy
        if resume:
            path = checkpoint.latest(checkpoints)
            run.resume(path)
            checkpoint.forget_after(checkpoints, run.base.steps)
            before = run.base.rows
            watch.log(f"going on from {path}")
        elif settings.train.init_from is not None:
            anew = run.start_from(saving.resolve(settings.train.init_from))
            watch.log(f"starting from {settings.train.init_from}")
            for what in anew:
                watch.log(f"initialised anew: {what}")

    done = driver.run(settings, source.schema, source.files, held_out, watch, prepare)
    outcome = Distant.__new__(Distant)
    rows = done.base.rows - before
    vars(outcome).update(
        path=done.path,
        threads=cores(settings),
        rows=rows,
        seconds=done.trained_s + done.last_save_s,
        rows_per_s=rows / done.trained_s if done.trained_s else 0.0,
        train=done.progress.train or dict(done.base.metrics.results()),
        test=done.progress.test,
        signal=done.signal,
        best=checkpoint.best(checkpoints),
        best_auc=done.progress.best_auc,
    )
    if settings.run.report and rows and done.signal is None:
        evidence = Evidence(results=done.progress.test or {})
        write_led_report(folder, outcome, evidence, done, watch)
    return outcome
