"""The table and its rules in a few lines of NumPy: what the core must agree with."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clickfleet.store.policy import Policy
from clickfleet.store.rules import Rule
from clickfleet.store.table import Table

F = np.float32


def first_state(rule: Rule, w: np.ndarray) -> np.ndarray:
    p = {name: F(value) for name, value in rule.settings}
    n = len(w)
    match rule.name:
        case "sgd":
            return np.zeros(0, F)
        case "adagrad" | "adagrad_v2":
            return np.zeros(1, F)
        case "std_adagrad":
            return np.zeros(n, F)
        case "adam":
            return np.concatenate([np.zeros(2 * n, F), [p["beta1"], p["beta2"]]]).astype(F)
        case "shared_adam":
            return np.array([0, 0, p["beta1"], p["beta2"]], F)
        case "ftrl":
            return np.concatenate([-w * (p["beta"] / p["lr"] + p["l2"]) - np.sign(w) * p["l1"], np.zeros(n, F)]).astype(
                F
            )
    raise AssertionError(rule.name)


def step(rule: Rule, w: np.ndarray, s: np.ndarray, g: np.ndarray, divisor: float) -> tuple[np.ndarray, np.ndarray]:
    """New weights and state, in float64: the core's float32 must come near."""
    p = dict(rule.settings)
    w, s, g = (x.astype(np.float64) for x in (w, s, g))
    n, g = len(w), g / divisor
    match rule.name:
        case "sgd":
            w = w - p["lr"] * g
        case "adagrad":
            w = w - p["lr"] * g * np.sqrt(p["initial_g2sum"] / (p["initial_g2sum"] + s))
            s = s + np.mean(g**2)
        case "std_adagrad":
            w = w - p["lr"] * g * np.sqrt(p["initial_g2sum"] / (p["initial_g2sum"] + s))
            s = s + g**2
        case "adagrad_v2":
            s = s + np.mean(g**2)
            w = w - p["lr"] * g / (np.sqrt(p["initial_g2sum"] + s) + 1e-8)
        case "adam":
            m, v, (b1, b2) = s[:n], s[n : 2 * n], s[2 * n :]
            m, v = p["beta1"] * m + (1 - p["beta1"]) * g, p["beta2"] * v + (1 - p["beta2"]) * g**2
            w = w - p["lr"] * np.sqrt(1 - b2) / (1 - b1) * m / (np.sqrt(v) + p["epsilon"])
            s = np.concatenate([m, v, [b1 * p["beta1"], b2 * p["beta2"]]])
        case "shared_adam":
            m, v = p["beta1"] * s[0] + (1 - p["beta1"]) * g, p["beta2"] * s[1] + (1 - p["beta2"]) * g**2
            w = w - p["lr"] * np.sqrt(1 - s[3]) / (1 - s[2]) * m / (np.sqrt(v) + p["epsilon"])
            s = np.array([m.mean(), v.mean(), s[2] * p["beta1"], s[3] * p["beta2"]])
        case "ftrl":
            z, q = s[:n], s[n:]
            sigma = (np.sqrt(q + g**2) - np.sqrt(q)) / p["lr"]
            z, q = z + g - sigma * w, q + g**2
            w = -np.sign(z) * np.maximum(np.abs(z) - p["l1"], 0) / ((p["beta"] + np.sqrt(q)) / p["lr"] + p["l2"])
            s = np.concatenate([z, q])
    return np.clip(w, *rule.bounds).astype(F), s.astype(F)


@dataclass
class ModelRow:
    w: np.ndarray
    state: np.ndarray
    x: np.ndarray | None = None
    x_state: np.ndarray | None = None
    show: float = 0.0
    click: float = 0.0
    unseen: int = 0
    slot: int = 0xFFFF


@dataclass
class ModelTable:
    """A plain dictionary of rows with the table's rules of life."""

    table: Table  # for its settings and its initial values
    rows: dict[int, ModelRow] = field(default_factory=dict)

    @property
    def policy(self) -> Policy:
        return self.table.policy

    def score(self, show: float, click: float) -> float:
        return (show - click) * self.policy.nonclick_coeff + click * self.policy.click_coeff

    def initial(self, key: int) -> np.ndarray:
        """A fresh table admits at birth and so tells every initial value."""
        same = {**self.table.describe(), "memory_limit": None, "snapshot_reserve": None, "padding_key": None}
        same["policy"] = {**same["policy"], "admission": "birth"}
        return Table.like(same).pull(np.array([key], np.uint64))[0]

    @property
    def at_birth(self) -> bool:
        admission = self.policy.admission
        return admission.by == "birth" or (admission.by in ("score", "count") and admission.threshold <= 0)

    def pull(self, key: int, training: bool) -> np.ndarray:
        out = np.zeros(1 + self.table.factors, F)
        row = self.rows.get(key)
        if row is None:
            if training and self.at_birth:
                out[:] = self.initial(key)
            elif training:
                out[0] = self.initial(key)[0]
            return out
        out[0] = row.w[0]
        if row.x is not None:
            out[1:] = row.x
        return out

    def push(self, keys: list[int], grads: np.ndarray, show: np.ndarray, click: np.ndarray, n: float) -> None:
        for key in dict.fromkeys(keys):
            at = [i for i, k in enumerate(keys) if k == key]
            g = grads[at[0]].copy()
            for i in at[1:]:
                g += grads[i]
            self._push_one(key, g, float(show[at].sum()), float(click[at].sum()), n)

    def _push_one(self, key: int, g: np.ndarray, show: float, click: float, n: float) -> None:
        row = self.rows.get(key)
        if row is None:
            first = self.initial(key)
            row = self.rows[key] = ModelRow(first[:1].copy(), first_state(self.table.embed_rule, first[:1]))
            if self.at_birth:
                self._admit(row, key)
        row.show, row.click, row.unseen = row.show + show, row.click + click, 0

        def divisor(rule: Rule) -> float:
            by = {"show": show, "batch": n, "none": 1.0}[rule.scale]
            return by if by > 0 else 1.0

        row.w, row.state = step(self.table.embed_rule, row.w, row.state, g[:1], divisor(self.table.embed_rule))
        if row.x is not None and row.x_state is not None:
            if self.table.factors == 0:
                return
            row.x, row.x_state = step(self.table.rule, row.x, row.x_state, g[1:], divisor(self.table.rule))
        elif self._admits(row):
            self._admit(row, key)

    def _admits(self, row: ModelRow) -> bool:
        admission = self.policy.admission
        have = {"score": self.score(row.show, row.click), "count": row.show}[admission.by]
        return have >= admission.threshold

    def _admit(self, row: ModelRow, key: int) -> None:
        row.x = self.initial(key)[1:].copy()
        row.x_state = first_state(self.table.rule, row.x)

    def shrink(self) -> int:
        before = len(self.rows)
        for key, row in list(self.rows.items()):
            row.show, row.click = row.show * self.policy.decay_rate, row.click * self.policy.decay_rate
            if (
                self.score(row.show, row.click) < self.policy.delete_threshold
                or row.unseen > self.policy.delete_after_unseen_days
            ):
                del self.rows[key]
        return before - len(self.rows)

    def end_day(self) -> None:
        for row in self.rows.values():
            row.unseen += 1


def rows_of(batches: Any) -> dict[int, dict[str, Any]]:
    """Rows of a snapshot or of changes by key."""
    found: dict[int, dict[str, Any]] = {}
    for columns in batches:
        size = len(columns["key"])
        for i, key in enumerate(columns["key"].tolist()):
            assert key not in found, "a key came twice"
            found[key] = {
                name: tuple(values.reshape(size, -1)[i].tolist())
                for name, values in columns.items()
                if isinstance(values, np.ndarray)
            }
    return found
