"""Batches that a program hands over one by one: a mode sends, pulls and ships as often as with a stream of them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from clickfleet.config.load import Config
from clickfleet.config.plugins import Plugin
from clickfleet.data.batch import Batch
from clickfleet.data.schema import Schema, Slot
from clickfleet.errors import ClusterError
from clickfleet.training import modes
from clickfleet.training.handed_batches import HandedBatches
from clickfleet.training.learner import Learner
from clickfleet.training.loop import WorkerJob
from clickfleet.training.metrics import make_metrics
from clickfleet.training.run import settled
from clickfleet.training.sharding import Kind, Reply, Request

SCHEMA = Schema(slots=(Slot("city"),))


def batch(seed: int) -> Batch:
    draw = np.random.default_rng(seed)
    keys = draw.integers(0, 9, 4, np.uint64)
    return Batch(np.zeros((4, 0), np.float32), keys, 1, labels=draw.integers(0, 2, 4).astype(np.float32))


class CountingLink:
    """Shards that learn nothing and count what they are asked."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.counts = dict.fromkeys(("pushes", "values", "done"), 0)

    def ask(self, request: Request) -> Any:
        self.counts["pushes"] += request.push is not None
        self.counts["values"] += request.values
        self.counts["done"] += request.kind is Kind.DONE
        none = np.empty(0, np.uint64)
        keys = none if request.pull is None else request.pull
        rows = self.learner.table.pull(keys)
        values = self.learner.flat.values.numpy().copy() if request.values else None
        return AnsweredTicket(Reply(rows, values, keys=none, deleted=none, seen=[0]))


class AnsweredTicket:
    def __init__(self, reply: Reply) -> None:
        self.reply = reply

    def ready(self) -> bool:
        return True

    def wait(self) -> Reply:
        return self.reply


@pytest.mark.parametrize(
    ("mode", "settings", "after_seven", "at_the_end"),
    [
        ("sync", {}, (7, 14, 0), (7, 15, 1)),
        ("half_async", {}, (7, 14, 0), (7, 15, 1)),
        ("async", {"pull_every": 3}, (7, 3, 0), (7, 3, 0)),
        ("async", {}, (7, 1, 0), (7, 2, 0)),
        ("async", {"dense_every": 3}, (7, 3, 0), (7, 4, 0)),
        ("async", {"merge": 3, "wait": 9999}, (2, 1, 0), (3, 2, 0)),
        ("geo", {"k_steps": 5}, (1, 2, 0), (2, 3, 0)),
    ],
)
def test_a_mode_counts_handed_batches_as_usual(
    mode: str, settings: dict[str, Any], after_seven: tuple[int, ...], at_the_end: tuple[int, ...]
) -> None:
    config = settled(Config(mode=Plugin(mode, settings), model=Plugin("fm", {})))
    learner = Learner(config, SCHEMA)
    link, handed = CountingLink(learner), HandedBatches(SCHEMA, 0)
    job = WorkerJob(learner, handed, make_metrics(config, SCHEMA), links=[link])
    job.stop_when, train = lambda: handed.idle, modes.load(config)
    job.trained_before = 1000  # at the beginning of a run, weights are exchanged more often
    for i in range(7):
        handed.put(batch(i))
        train(job)
        assert (job.trained, job.rows, job.epoch_ended) == (i + 1, 4 * (i + 1), False)
    assert tuple(link.counts.values()) == after_seven
    handed.close()
    train(job)
    assert job.epoch_ended
    assert tuple(link.counts.values()) == at_the_end


def test_another_thread_trains_what_is_handed_over() -> None:
    handed, trained = HandedBatches(SCHEMA, 3), []

    def work() -> None:
        source = iter(handed)
        while True:
            handed.wait(lambda: False)
            following = next(source, None)
            if following is None:
                return
            trained.append((following.epoch, following.row))
            handed.finish("it is damaged" if len(trained) == 3 else None)

    worker = threading.Thread(target=work)
    worker.start()
    for i in range(2):
        handed.put_and_wait(batch(i), lambda: False)
        assert len(trained) == i + 1
    with pytest.raises(ClusterError, match="it is damaged"):
        handed.put_and_wait(batch(2), lambda: False)
    handed.close()
    worker.join(timeout=60)
    assert trained == [(3, 0), (3, 4), (3, 8)]
    with pytest.raises(ClusterError, match="was abandoned"):
        HandedBatches(SCHEMA, 0).put_and_wait(batch(0), lambda: True)
    with pytest.raises(ClusterError, match="cannot be resumed in its middle"):
        handed.restore(handed.state())
