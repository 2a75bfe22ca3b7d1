"""Measure the cost of the argument checks in the core: compare two builds in alternation.

python benchmarks/core_bounds.py OLD_CORE.so NEW_CORE.so
"""

import importlib.util
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np

BATCH, SLOTS, FACTORS, ROWS = 4096, 26, 10, 60_000
ROUNDS = 4


def calls(path: str) -> dict[str, tuple[Callable[[], object], int]]:
    """Return the calls to measure by name, and how often to repeat each."""
    spec = importlib.util.spec_from_file_location("_core", path)
    assert spec is not None
    assert spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    rng = np.random.default_rng(1)
    n = BATCH * SLOTS
    offsets, where = np.arange(n + 1, dtype=np.int64), rng.integers(0, ROWS, n).astype(np.uint32)
    rows, grads = rng.random((ROWS, FACTORS + 1), np.float32), np.zeros((ROWS, FACTORS + 1), np.float32)
    first, factors = np.empty((BATCH, SLOTS), np.float32), np.empty((BATCH, SLOTS, FACTORS), np.float32)
    shows, clicks, slots = np.zeros(ROWS, np.float32), np.zeros(ROWS, np.float32), np.zeros(ROWS, np.uint16)
    taken = np.empty((n, FACTORS + 1), np.float32)

    keys = np.unique(rng.integers(0, 1 << 62, 200_000).astype(np.uint64))
    hashes = np.empty_like(keys)
    core.mix64(keys, hashes)
    keys = keys[np.argsort(hashes)]
    full = [(keys, np.ones(len(keys), np.float32), np.ones((len(keys), FACTORS), np.float32))]
    frozen = core.FrozenRows((core.FrozenLayer(full, [], np.empty(0, np.uint64), full),), FACTORS)

    def inputs(batch: int) -> Callable[[], object]:
        asked, ends = rng.choice(keys, batch * SLOTS), np.arange(batch * SLOTS + 1, dtype=np.int64)
        out = np.empty((batch, SLOTS), np.float32), np.empty((batch, SLOTS, FACTORS), np.float32)
        return lambda: frozen.inputs(asked, ends, None, None, *out)

    ends, text = np.arange(0, 8 * 20_001, 8, dtype=np.int32), rng.integers(97, 122, 8 * 20_000).astype(np.uint8)
    found = np.empty((20_000, 1), np.uint64)
    layout = core.Layout(core.KeyRule.hash64, 1)
    layout.add_slot("s", False, "s")
    return {
        "pool": (lambda: core.pool(offsets, where, None, None, rows, first, factors), 30),
        "unpool": (lambda: core.unpool(offsets, where, None, None, first, factors, grads), 30),
        "count": (lambda: core.count(offsets, where, SLOTS, None, None, shows, clicks, slots), 60),
        "take_rows": (lambda: core.take_rows(where, rows, taken), 30),
        "inputs, 64 rows": (inputs(64), 300),
        "inputs, 1 row": (inputs(1), 5000),
        "text_keys": (lambda: layout.text_keys(0, ends, text, found), 100),
    }


def measure(path: str) -> dict[str, float]:
    found = {}
    for name, (call, times) in calls(path).items():
        call()
        best = float("inf")
        for _ in range(7):
            start = time.process_time()
            for _ in range(times):
                call()
            best = min(best, (time.process_time() - start) / times)
        found[name] = best
    return found


def main() -> None:
    if len(sys.argv) == 2:
        print(json.dumps(measure(sys.argv[1])))
        return
    if len(sys.argv) != 3:
        print("usage: python benchmarks/core_bounds.py OLD_CORE.so NEW_CORE.so")
        return
    seconds: dict[str, list[list[float]]] = defaultdict(lambda: [[], []])
    for _ in range(ROUNDS):
        for which, path in enumerate(sys.argv[1:3]):
            done = subprocess.run([sys.executable, __file__, path], capture_output=True, check=True)
            for name, value in json.loads(done.stdout).items():
                seconds[name][which].append(value)
    for name, (old, new) in seconds.items():
        print(f"{name}: {1e6 * min(old):.1f} µs before, {1e6 * min(new):.1f} µs after, ratio {min(new) / min(old):.3f}")


if __name__ == "__main__":
    main()
