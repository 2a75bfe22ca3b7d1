"""The report at the end of a run, which is done and saved by then: that it cannot be written is only told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from clickfleet import report
from clickfleet.machine import free_memory
from clickfleet.opening import Data
from clickfleet.progress import amount
from clickfleet.report.evidence import Evidence
from clickfleet.trained import Trained
from clickfleet.watch import Watch

if TYPE_CHECKING:
    from clickfleet.cluster.driver import Driver


def write_report(folder: Path, model: Trained, evidence: Evidence, log: Callable[[str], None]) -> None:
    """The page at the end; a failure is only told, as the run is done and saved."""
    try:
        report.write(folder, model, evidence)
    except Exception as error:
        log(f"no report: {type(error).__name__}: {error}; try again with clickfleet report {folder}")


def write_best_report(folder: Path, model: Trained, test: Data, table_bytes: int, log: Callable[[str], None]) -> None:
    """The page of the best model, which is read from its checkpoint beside the one in memory."""
    if not _fits(folder, table_bytes, log):
        return
    try:
        evidence = Evidence()
        evidence.gather(model, test)
        report.write(folder, model, evidence)
    except Exception as error:
        log(f"no report: {type(error).__name__}: {error}; try again with clickfleet report {folder}")


def write_led_report(folder: Path, model: Trained, evidence: Evidence, driver: Driver, watch: Watch) -> None:
    """The same after a run on a cluster, where this machine has memory for the whole table."""
    if _fits(folder, driver.overview.table.stats()["bytes"], watch.log):
        write_report(folder, model, evidence, watch.log)


def _fits(folder: Path, table_bytes: int, log: Callable[[str], None]) -> bool:
    """Whether this machine has memory for a table."""
    if table_bytes <= free_memory() / 2:
        return True
    log(f"no report: the table takes {amount(table_bytes, 'bytes')}; clickfleet report {folder} writes it elsewhere")
    return False
