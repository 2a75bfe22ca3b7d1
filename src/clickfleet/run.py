"""A configuration -> live objects -> train.

import clickfleet

trained = clickfleet.train("config.yaml", "train.epochs=2")
trained.test["auc"], trained.predict("more/*.tsv")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clickfleet import checkpoint, devices, modes, saving, scoring
from clickfleet.batch import ROW_COLUMNS
from clickfleet.config import Config
from clickfleet.configuring import check, check_arrangement, configure, cpu_class, hogwild, settled
from clickfleet.errors import CheckpointError, ConfigError, TrainingError
from clickfleet.home import NO_CHECKPOINT, at_home, home_of, write_config
from clickfleet.job import Job, Source
from clickfleet.learner import Learner
from clickfleet.metrics import Metrics
from clickfleet.mirror import Mirror
from clickfleet.opening import QUARANTINE, Data, open_source, total_bytes
from clickfleet.outcome import Outcome, distant
from clickfleet.profiling import Profile
from clickfleet.report.ending import write_best_report, write_report
from clickfleet.report.evidence import Evidence
from clickfleet.schema import Schema
from clickfleet.sections import Run
from clickfleet.session import Session, keeps_best
from clickfleet.step import NotFiniteError
from clickfleet.trained import Trained, cores
from clickfleet.watch import Watch


def train(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *overrides: str,
    data: Data = None,
    test: Data = None,
    schema: Schema | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> Outcome:
    """Trains as a configuration says: a file, its content, or a Config, with `key=value` over it.

    `data` and `test` may stand in memory instead of files; with `data` in memory and no `run.dir`, nothing is written.
    `resume` goes on from the newest checkpoint of the run folder, or starts from the beginning where there is none yet.
    """
    settings = configure(config, overrides)
    check(settings)
    settings = settled(settings)
    devices.find(settings.train.device)
    in_memory = data is not None and not isinstance(data, str | Path)
    where = None if in_memory and settings.run.dir == Run.dir else settings.run.dir
    folder = None if where is None else home_of(where)
    source = open_source(
        settings, data if data is not None else settings.data.train, schema, labels=True, folder=folder
    )
    work = _train
    if modes.distributed(settings):
        from clickfleet import distant as on_cluster  # with Ray

        work = on_cluster.train
    if where is None:
        return work(settings, source, test, None, resume, quiet, None)
    with at_home(where, None if resume else False, rows=settings.cluster.address is None) as (folder, copy):
        settings = replace(settings, run=replace(settings.run, dir=str(folder)))
        return work(settings, source, test, folder, resume, quiet, copy)


def _train(
    settings: Config, source: Source, test: Data, folder: Path | None, resume: bool, quiet: bool, copy: Mirror | None
) -> Outcome:
    metrics_of = settings.train.metrics
    metrics = Metrics(metrics_of.thresholds, metrics_of.sliding or None, groups=source.schema.group is not None)
    scoring.slice_slot(source.schema, metrics_of.slices)
    threads, trainers = cores(settings), hogwild(settings)
    arrangement = {
        "deterministic": settings.train.deterministic,
        "threads": threads,
        "hogwild": trainers,
        "cpu": cpu_class(),
    }

    state: saving.State | None = None
    notes: list[str] = []
    checkpoints = None if folder is None else folder / "checkpoints"
    if resume and checkpoints is None:
        raise ConfigError("there is no run folder to resume from", "set run.dir")
    if resume and checkpoints is not None and not checkpoint.steps(checkpoints):
        notes.append(NO_CHECKPOINT.format(checkpoints))
        resume = False
    if resume and checkpoints is not None:
        path = checkpoint.latest(checkpoints)
        learner, state = saving.resume(path, settings, source.schema, metrics)
        check_arrangement(state["arrangement"], arrangement)
        checkpoint.forget_after(checkpoints, state["step"])
        notes.append(f"going on from {path}")
        if not keeps_best(settings) and checkpoint.forget_best(checkpoints):
            notes.append("the best checkpoint is no longer kept: neither train.patience nor run.keep_best asks for it")
    else:
        if checkpoints is not None and checkpoint.steps(checkpoints):
            raise CheckpointError(f"{folder} holds a run already", "go on with --resume, or choose another run.dir")
        torch.manual_seed(settings.train.seed)
        if settings.train.init_from is not None:
            learner, anew = saving.start_from(saving.resolve(settings.train.init_from), settings, source.schema)
            notes.append(f"starting from {settings.train.init_from}")
            notes += [f"initialised anew: {what}" for what in anew]
        else:
            learner = Learner(settings, source.schema)

    if folder is not None:
        write_config(folder, settings)
    watch = Watch(folder, total_bytes(source, settings), epochs=settings.train.epochs, quiet=quiet)
    saver = None
    if checkpoints is not None:
        saver = saving.Saver(checkpoints, settings.run.keep, settings.run.keep_epochs, watch.log)
        if copy is not None:
            saver.written = copy.wake
            copy.start(watch.log)
        if state is not None:
            saver.last = (state["step"], path)
    held_out = test if test is not None else settings.data.test or None
    if held_out is None and (settings.train.patience or settings.train.eval_every or settings.run.keep_best):
        raise ConfigError("train.patience, train.eval_every and run.keep_best need test data", "set data.test")
    evaluator, evidence = Trained(learner, threads=threads), Evidence()
    evaluate = None if held_out is None else lambda: evidence.gather(evaluator, held_out)
    session = Session(settings, watch, saver, evaluate, arrangement)
    profile = Profile(watch.tick) if settings.train.profile else None
    report_step = watch.tick if profile is None else profile.tick
    job = Job(learner, source, metrics, session.attend, report_step, trainers=trainers, threads=threads)
    if profile is not None:
        profile.attach(job)
    if state is not None:
        session.restore(job, state)
    else:
        watch.forget_after(0, size=0)  # of a run that ended before its first checkpoint
        if folder is not None:
            (folder / QUARANTINE).unlink(missing_ok=True)  # its bad lines come again
    before = job.rows
    for note in notes:
        watch.log(note)
    try:
        with session.interruptible():
            modes.load(settings)(job)
    except NotFiniteError as problem:
        if saver is not None:
            saver.wait()
        raise not_finite(problem, job.steps, folder, saver) from None
    finally:
        if profile is not None:
            profile.stop()
        job.close()
        watch.close()
    if profile is not None:
        show_profile(profile, folder, watch)
    progress, rows = session.progress, job.rows - before
    last = saver.last[1] if saver is not None and saver.last is not None else None
    best = None if checkpoints is None else checkpoint.best(checkpoints)
    facts: dict[str, Any] = {
        "path": last,
        "threads": threads,
        "rows": job.rows,
        "new_rows": rows,
        "seconds": session.trained_s + session.last_save_s,
        "rows_per_s": rows / session.trained_s if session.trained_s else 0.0,
        "train": progress.train or dict(metrics.results()),
        "test": progress.test,
        "last": last,
        "signal": session.signal,
        "best": best,
        "best_auc": progress.best_auc,
    }
    if best is None or best == last or session.signal is not None:
        done = Outcome(learner, **facts)
    else:
        done = distant(**{**facts, "path": best, "test": progress.best_test or progress.test})
    if folder is not None and settings.run.report and rows and session.signal is None:
        if done.path != last:
            write_best_report(folder, done, held_out, learner.table.stats()["bytes"], watch.log)
        else:
            write_report(folder, evaluator, evidence, watch.log)
    return done


def show_profile(profile: Profile, folder: Path | None, watch: Watch) -> None:
    """What every layer took, for people and as files."""
    watch.log(profile.table())
    if folder is not None:
        path = profile.write(folder)
        watch.log(f"{path}: open it in chrome://tracing or ui.perfetto.dev")


def not_finite(problem: NotFiniteError, step: int, folder: Path | None, saver: saving.Saver | None) -> TrainingError:
    """Saves the batch that gave no number, and says where."""
    saved = ""
    if folder is not None:
        path = folder / f"bad-batch-{step:012d}.npz"
        columns = {name: getattr(problem.batch, name) for name in ("dense", "keys", "offsets", "values", *ROW_COLUMNS)}
        np.savez(path, **{name: column for name, column in columns.items() if column is not None})
        saved = f"; its batch is in {path}"
    last = f", and go on from {saver.last[1]} with --resume" if saver is not None and saver.last is not None else ""
    return TrainingError(
        f"step {step}: {problem}, nothing of it was learned{saved}",
        f"check the dense columns and weights of that batch, lower dense.lr or set dense.clip_norm{last}",
    )
