"""A process of a crew: reads runs to train from its input, one JSON line each, and answers each with a line.

python -m clickfleet.workbench.trainee
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from clickfleet.config import Config, checked, read
from clickfleet.errors import ClickfleetError
from clickfleet.lock import Lock

WATCH_S = 0.5
LOCK_S = 60.0
"""How long to wait for a process of a comparison that was killed, which still writes its last checkpoint."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a model prints is not an answer
    signal.signal(signal.SIGTERM, lambda *_: None)  # only training can be stopped; the end of the input ends us
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    for line in sys.stdin:
        config = checked(Config, read(json.loads(line)["config"], "the order"), source="the order")
        answers.write(json.dumps(attempt(config)) + "\n")
        answers.flush()


def _follow(parent: int) -> None:
    """Stops training, with a checkpoint, when nobody waits for it any more."""
    while True:
        time.sleep(WATCH_S)
        if os.getppid() != parent:  # again and again, as a run that only starts does not listen yet
            os.kill(os.getpid(), signal.SIGTERM)


def attempt(config: Config) -> dict[str, Any]:
    """What a run gave, or the error that ended it."""
    folder = Path(config.run.dir)
    try:
        with Lock(folder / ".lock", "trains", patience_s=LOCK_S):
            pass  # nobody else trains there any more
        return train(config, folder)
    except ClickfleetError as error:
        return {"error": str(error)}
    except Exception as error:
        (folder / "error.txt").write_text(traceback.format_exc())
        return {"error": f"{type(error).__name__}: {error}; see {folder / 'error.txt'}"}


def train(config: Config, folder: Path) -> dict[str, Any]:
    from clickfleet import checkpoint, run
    from clickfleet.report.evidence import read_lines

    checkpoints = folder / "checkpoints"
    resume = (checkpoints / checkpoint.LATEST).is_file()
    if not resume:
        shutil.rmtree(checkpoints, ignore_errors=True)  # of a run killed before its first was whole
    done = run.train(config, resume=resume, quiet=True)
    if done.signal is not None:
        return {"stopped": int(done.signal)}
    epochs = read_lines(folder)["epoch"]
    speed = done.rows_per_s or (epochs[-1]["rows_per_s"] if epochs else None)
    rows = done.rows
    table = done.learner.table
    stats = table.stats()
    dense = sum(p.numel() for p in done.learner.model.parameters())
    full = stats["full_rows"]
    return {
        "train_loss": done.train.get("logloss"),
        "train_auc": done.train.get("auc"),
        "test_auc": None if done.test is None else done.test["auc"],
        "logloss": None if done.test is None else done.test["logloss"],
        "rows_per_s": speed,
        "parameters": dense + stats["rows"] + full * table.factors,
        "dense_parameters": dense,
        "table_rows": stats["rows"],
        # A run that went on after a stop is told as if it had gone at its last speed throughout.
        "seconds": rows / speed if resume and speed else done.seconds,
        "rows": rows,
        "resumed": resume,
        "checkpoint": None if done.path is None else str(done.path),
    }


if __name__ == "__main__":
    main()
