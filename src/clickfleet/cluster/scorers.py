"""A saved model on a cluster, to score with: the shards hold its rows, each worker takes a share of the files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from clickfleet import saving
from clickfleet.cluster.driver import Driver
from clickfleet.cluster.exams import Exams
from clickfleet.cluster.fleet import LostError, StoppedError
from clickfleet.cluster.overview import ClusterWatch
from clickfleet.errors import ClusterError
from clickfleet.formats import load as load_format
from clickfleet.interrupts import leave
from clickfleet.opening import with_format
from clickfleet.sections import Cluster, Plugin


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
) -> Iterator[Exams]:
    """Something whose `evaluate(files)` and `predict(files)` work on all processes; they end with the `with` block."""
    path = saving.resolve(model).absolute()  # processes may stand in other folders
    config = with_format(saving.read_config(path, trust), form)
    data = config.data
    load_format(data.format)  # refused here, before any process starts
    with tempfile.TemporaryDirectory(prefix="clickfleet-") as folder:
        config = replace(
            config,
            data=replace(data, test_batch_size=batch_size or data.test_batch_size),
            mode=Plugin("async"),
            cluster=Cluster(shards=shards, workers=workers, address=address),
            train=replace(config.train, deterministic=False, hogwild=None, eval_every=None),
            run=replace(config.run, dir=folder),
        )
        driver = Driver(config, saving.read_schema(path), [], [], ClusterWatch(None, quiet=True))
        driver.start_from(path)
        with driver.interruptible():
            try:
                driver.start()
                yield driver.exams
            except LostError as loss:
                raise ClusterError(f"lost {loss}", "score again; nothing was written") from None
            except StoppedError:
                assert driver.signal is not None
                leave(driver.signal)
            finally:
                driver.close()
