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
from clickfleet.outcome import Outcome, distant
from clickfleet.reader import Reader
from clickfleet.report.ending import write_led_report
from clickfleet.report.evidence import Evidence
from clickfleet.session import keeps_best
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
            if not keeps_best(settings) and checkpoint.forget_best(checkpoints):
                watch.log("the best checkpoint is no longer kept: neither train.patience nor run.keep_best asks for it")
        elif settings.train.init_from is not None:
            anew = run.start_from(saving.resolve(settings.train.init_from))
            watch.log(f"starting from {settings.train.init_from}")
            for what in anew:
                watch.log(f"initialised anew: {what}")

    done = driver.run(settings, source.schema, source.files, held_out, watch, prepare)
    rows, progress = done.base.rows - before, done.progress
    best = checkpoint.best(checkpoints)
    kept = best is not None and done.signal is None
    outcome = distant(
        path=best if kept else done.path,
        threads=cores(settings),
        rows=done.base.rows,
        new_rows=rows,
        seconds=done.trained_s + done.last_save_s,
        rows_per_s=rows / done.trained_s if done.trained_s else 0.0,
        train=progress.train or dict(done.base.metrics.results()),
        test=(progress.best_test or progress.test) if kept else progress.test,
        last=done.path,
        signal=done.signal,
        best=best,
        best_auc=progress.best_auc,
    )
    if settings.run.report and rows and done.signal is None:
        evidence = Evidence(results=outcome.test or {})
        write_led_report(folder, outcome, evidence, done, watch)
    return outcome
