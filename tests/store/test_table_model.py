"""The table against a plain dictionary, over random sequences of everything it can do."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from clickfleet import Table
from clickfleet.store import checkpoint
from clickfleet.store.rules import rule as update_rule
from clickfleet.store.rules import specs
from reference import ModelTable, rows_of

KEYS = [0, 1, 2, 3, 5, 8, 2**63, 2**64 - 1, *range(100, 140)]
F = np.float32
batches = st.lists(
    st.tuples(st.sampled_from(KEYS), st.floats(-2, 2, width=32), st.integers(0, 3), st.integers(0, 2)),
    min_size=1,
    max_size=60,
)


class Life(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.saves = 0

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize(
        name=st.sampled_from(list(specs())),
        embed=st.sampled_from(list(specs())),
        factors=st.sampled_from([0, 1, 3, 9]),
        admission=st.sampled_from(["birth", "count(3)", "score(0.6)", "count(0)"]),
        decay=st.sampled_from([1.0, 0.75]),
        days=st.sampled_from([2, float("inf")]),
    )
    def start(self, name, embed, factors, admission, decay, days):
        self.table = Table(
            factors=factors,
            rule=update_rule(name, lr=0.01),
            embed_rule=update_rule(embed, lr=0.01),
            init="uniform(-0.5, 0.5)",
            embed_init="normal(0.1)",
            admission=admission if factors else "birth",
            decay_rate=decay,
            delete_threshold=0.1,
            delete_after_unseen_days=days,
            seed=11,
        )
        self.model = ModelTable(self.table)

    @rule(batch=batches, n=st.sampled_from([1.0, 5.0]))
    def push(self, batch, n):
        keys = [key for key, *_ in batch]
        grads = np.array([[g * (1 + column % 3) for column in range(1 + self.table.factors)] for _, g, *_ in batch], F)
        show, click = (np.array([row[column] for row in batch], F) for column in (2, 3))
        self.table.push(np.array(keys, np.uint64), grads, show=show, click=click, n=n)
        self.model.push(keys, grads, show, click, n)

    @rule(training=st.booleans())
    def pull(self, training):
        found = self.table.pull(np.array(KEYS, np.uint64), training=training)
        expected = np.array([self.model.pull(key, training) for key in KEYS])
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)

    @rule()
    def shrink(self):
        assert self.table.shrink() == self.model.shrink()

    @rule()
    def end_day(self):
        self.table.end_day()
        self.model.end_day()

    @rule(shards=st.integers(1, 5))
    def save_and_load(self, shards):
        self.saves += 1
        path = checkpoint.save(self.table, self.folder / str(self.saves), files=2)
        parts = [checkpoint.load(path, shard=i, shards=shards) for i in range(shards)]
        rows = [rows_of(part.snapshot()) for part in parts]
        assert sum(map(len, rows)) == len(self.model.rows)
        if shards == 1:
            self.table = parts[0]
            self.model.table = self.table

    @rule()
    def snapshot(self):
        rows = rows_of(self.table.snapshot())
        assert rows.keys() == self.model.rows.keys()
        for key, row in rows.items():
            expected = self.model.rows[key]
            assert (row["show"][0], row["click"][0]) == (expected.show, expected.click)
            assert row["unseen_days"] == (expected.unseen,)
            assert bool(row["embedx"]) == (expected.x is not None and self.table.factors > 0)
            np.testing.assert_allclose(row["embed_state"], expected.state, rtol=1e-3, atol=1e-4)

    @invariant()
    def sizes_agree(self):
        if hasattr(self, "model"):
            assert len(self.table) == len(self.model.rows)


TestLife = Life.TestCase
TestLife.settings = settings(settings.default, stateful_step_count=30)
