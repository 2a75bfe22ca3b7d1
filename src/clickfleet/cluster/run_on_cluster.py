"""Train and score on a cluster."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from clickfleet.cluster.driver import Driver, train_on_cluster
from clickfleet.cluster.evaluate import Evaluations
from clickfleet.cluster.processes import ProcessFailedError, StoppedError
from clickfleet.cluster.status import ClusterMonitor
from clickfleet.config.check import cores
from clickfleet.config.plugins import Plugin
from clickfleet.config.sections import Cluster
from clickfleet.data.dataset import Data, Source, with_format
from clickfleet.data.files import expand
from clickfleet.data.formats import load as load_format
from clickfleet.data.reader import Reader
from clickfleet.errors import ClusterError, ConfigError
from clickfleet.store import checkpoint, run_folder
from clickfleet.training.loop import leave
from clickfleet.training.model import TrainingResult
from clickfleet.training.report import write_report
from clickfleet.training.report.evidence import Evidence
from clickfleet.training.run import OpenRun, check_test_data


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
            cluster=Cluster(shards=shards, workers=workers, address=address),
            train=replace(config.train, deterministic=False, hogwild=None, eval_every=None),
            run=replace(config.run, dir=folder),
        )
        driver = Driver(config, run_folder.read_schema(path), [], [], ClusterMonitor(None, quiet=True))
        driver.start_from(path)
        with driver.interruptible():
            try:
                driver.start()
                yield driver.evaluations
            except ProcessFailedError as failure:
                raise ClusterError(str(failure), "score again; nothing was written") from None
            except StoppedError:
                assert driver.signal is not None
                leave(driver.signal)
            finally:
                driver.close()


def train(run: OpenRun[ClusterMonitor], source: Source, test: Data) -> TrainingResult:
    """Train a run on a cluster, in the mode of its configuration."""
    settings, folder = run.settings, run.folder
    if not isinstance(source, Reader) or folder is None:
        raise ConfigError(f"mode {settings.mode.name} reads files", "give paths, or use mode local for data in memory")
    test = test if test is not None else settings.data.test
    held_out = expand(test) if test else []
    check_test_data(settings, bool(held_out))
    driver = Driver(settings, source.schema, source.files, held_out, run.monitor)
    driver.mirror = run.mirror
    run.begin(driver)
    before = driver.start_state.rows
    train_on_cluster(driver)
    rows, progress = driver.start_state.rows - before, driver.progress
    best = checkpoint.best(run.checkpoints)
    kept = best is not None and driver.signal is None
    result = TrainingResult(
        None,
        best if kept else driver.path,
        cores(settings),
        rows=driver.start_state.rows,
        new_rows=rows,
        seconds=driver.trained_s + driver.last_save_s,
        rows_per_s=rows / driver.trained_s if driver.trained_s else 0.0,
        train=progress.train or dict(driver.start_state.metrics.results()),
        test=(progress.best_test or progress.test) if kept else progress.test,
        last=driver.path,
        signal=driver.signal,
        best=best,
        best_auc=progress.best_auc,
    )
    if settings.run.report and rows and driver.signal is None:
        evidence = Evidence(results=result.test or {})
        table_bytes = driver.overview.table_stats()["bytes"]
        write_report(folder, result, evidence, run.monitor.log, table_bytes=table_bytes)
    return result
