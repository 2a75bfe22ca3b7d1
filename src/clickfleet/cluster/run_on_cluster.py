"""Train and score on a cluster."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

from clickfleet.cluster.assignments import Share
from clickfleet.cluster.driver import Driver, train_on_cluster
from clickfleet.cluster.evaluate import Evaluations, HeldOutFiles
from clickfleet.cluster.feed_folder import FeedFolder
from clickfleet.cluster.processes import ProcessFailedError, StoppedError
from clickfleet.cluster.status import ClusterMonitor
from clickfleet.config.check import cores
from clickfleet.config.load import Config
from clickfleet.config.plugins import Plugin
from clickfleet.config.sections import Cluster
from clickfleet.data.dataset import Data, Source, for_scoring, open_source, with_format
from clickfleet.data.files import expand
from clickfleet.data.formats import load as load_format
from clickfleet.data.guess import is_files
from clickfleet.data.memory import Feed, is_rereadable
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Schema
from clickfleet.errors import ClusterError
from clickfleet.store import checkpoint, run_folder
from clickfleet.training.callbacks import Callbacks
from clickfleet.training.loop import record
from clickfleet.training.model import TrainingResult
from clickfleet.training.predict import Results
from clickfleet.training.report import too_large, write_report
from clickfleet.training.report.evidence import Evidence
from clickfleet.training.run import OpenRun
from clickfleet.training.signals import leave


@contextmanager
def scorers(
    model: str | Path,
    workers: int,
    shards: int = 1,
    address: str | None = None,
    *,
    form: str | None = None,
    batch_size: int | None = None,
    trust: bool = False,
) -> Iterator[Evaluations]:
    """Start processes that evaluate and score files with a saved model. They stop when the block ends."""
    path = run_folder.resolve(model).absolute()  # processes may have other working directories
    config = with_format(run_folder.read_config(path, trust), form)
    data = config.data
    load_format(data.format)  # check it before any process starts
    with tempfile.TemporaryDirectory(prefix="clickfleet-") as folder:
        config = replace(
            config,
            data=replace(data, test_batch_size=batch_size or data.test_batch_size),
            mode=Plugin("async"),
            cluster=Cluster(shards=shards, workers=workers, address=address, encrypt=config.cluster.encrypt),
            train=replace(config.train, deterministic=False, hogwild=None, eval_every=None),
            run=replace(config.run, dir=folder),
        )
        driver = Driver(config, run_folder.read_schema(path), [], ClusterMonitor(None, quiet=True))
        driver.start_from(path)
        with driver.interruptible():
            try:
                driver.start()
                if config.run.names:
                    driver.evaluations.find_names = lambda: run_folder.read_names(path, driver.learner.schema)
                yield driver.evaluations
            except ProcessFailedError as failure:
                raise ClusterError(str(failure), "score again; nothing was written") from None
            except StoppedError:
                assert driver.signal is not None
                leave(driver.signal)
            finally:
                driver.close()


def train(
    run: OpenRun[ClusterMonitor], source: Source, valid: Data, test: Data, callbacks: Callbacks
) -> TrainingResult:
    """Train a run on a cluster, in the mode of its configuration. Data in memory reaches the workers as files."""
    assert run.folder is not None
    with FeedFolder(run.folder, run.settings, reached=run.mirror is None) as feeds:
        return _train(run, feeds, source, valid, test, callbacks)


def _train(
    run: OpenRun[ClusterMonitor], feeds: FeedFolder, source: Source, valid: Data, test: Data, callbacks: Callbacks
) -> TrainingResult:
    folder, schema = run.folder, source.schema
    assert folder is not None
    test = test if test is not None else run.settings.data.test or None
    valid = valid if valid is not None else run.settings.data.valid or None
    chosen = run.choose_validation(source, valid, test, local=isinstance(source, Feed))
    settings = run.settings
    if isinstance(source, Reader):
        data: Share = source.files
        aside = valid is None and chosen is not None
        held_out = source.files if aside else _held_out(feeds, "valid", valid, settings, schema)
    else:
        assert isinstance(source, Feed)
        data, aside = feeds.write("train", source.parts()), False
        held_out = _held_out(feeds, "valid", chosen, settings, schema)
    held = HeldOutFiles(held_out, _held_out(feeds, "test", test, settings, schema), source.split if aside else None)
    driver = Driver(settings, schema, data, run.monitor, held, source.split)
    driver.mirror = run.mirror
    run.begin(driver)
    run.monitor.listen = callbacks.listen
    callbacks.start(driver.overview, driver.stop_early)
    sampled = [open_source(for_scoring(settings), each, schema) for each in (valid, test) if each is not None]
    driver.evaluations.find_names = lambda: run.collect_names(source, *sampled)
    before = driver.start_state.rows
    train_on_cluster(driver)
    if driver.signal is None:
        driver.evaluations.collect_names()
    run.signal = driver.signal
    rows, progress = driver.start_state.rows - before, driver.progress
    best = checkpoint.best(run.checkpoints)
    kept = best is not None and driver.signal is None
    result = TrainingResult(
        None,
        best if kept else driver.path,
        cores(settings),
        rows=driver.start_state.rows,
        steps=driver.start_state.steps,
        new_rows=rows,
        seconds=driver.trained_s + driver.last_save_s,
        rows_per_s=rows / driver.trained_s if driver.trained_s else 0.0,
        train=progress.train or dict(driver.start_state.metrics.results()),
        valid=(progress.best_valid or progress.valid) if kept else progress.valid,
        test=progress.test,
        last=driver.path,
        signal=driver.signal,
        best=best,
        records=callbacks.history,
        run=settings,
    )
    if driver.signal is not None:
        return result
    table_bytes = driver.overview.table_stats()["bytes"]
    if kept and best != driver.path and test is not None:
        result.test = _test_best(result, test, held.test, settings, table_bytes)
        record(run.monitor, "test", result.test, progress.epoch - 1, progress.best_step or driver.start_state.steps)
    if settings.run.report and rows:
        of = "validation" if result.test is None and result.valid is not None else "test"
        evidence = Evidence(results=result.test or result.valid or {}, of=of)
        write_report(folder, result, evidence, run.monitor.log, table_bytes=table_bytes)
    return result


def _held_out(feeds: FeedFolder, name: str, data: Data, settings: Config, schema: Schema) -> Share:
    """Return data to evaluate on as files."""
    if data is None:
        return ()
    if is_files(data):
        return expand(data)
    source = open_source(for_scoring(settings), data, schema, labels=True)
    return source.files if isinstance(source, Reader) else feeds.write(name, cast(Feed, source).parts())


def _test_best(result: TrainingResult, test: Data, files: Share, settings: Config, table_bytes: int) -> Results:
    """Return the metrics of the best checkpoint on the test data. A table that is too large for this process is spread again."""
    if not too_large(table_bytes):
        return result.evaluate(test if not is_files(test) and is_rereadable(test) else files)
    assert result.path is not None
    cluster = settings.cluster
    with scorers(result.path, cluster.workers, cluster.shards, cluster.address, trust=True) as evaluations:
        return evaluations.evaluate(files)
