"""Compare the sparse table with PyTorch's embeddings, with itself on two threads, and with the disk.

    python benchmarks/table.py [--rows 20000000] [--quick] [--large] [--only PART]

Everything is measured in this process, in alternation. Figures are medians; ratios are ours over theirs. `--quick` uses a twentieth of
the rows, `--large` adds a table of 100 million short rows.
"""

import argparse
import gc
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from clickfleet import Table
from clickfleet.store import checkpoint

BATCH = 26_000
DIM = 10
rng = np.random.default_rng(7)


def alternate(repeats: int, **calls: Callable[[int], object]) -> dict[str, float]:
    """Return the median seconds of each call, made in alternation."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call(i)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def filled(keys: np.ndarray, factors: int = DIM, report: bool = False, **settings: object) -> Table:
    table = Table(factors=factors, **settings)  # type: ignore[arg-type]
    grads = np.full((100_000, 1 + factors), 0.01, np.float32)
    worst, shown, start = 0.0, 1_000_000, time.perf_counter()
    for at in range(0, len(keys), 100_000):
        some = keys[at : at + 100_000]
        table.push(some, grads[: len(some)])
        if at >= 1_000_000:
            stats = table.stats()
            worst = max(worst, stats["bytes"] / stats["own_bytes"])
            if report and stats["rows"] >= shown:
                seconds = time.perf_counter() - start
                print(
                    f"  {stats['rows'] / 1e6:5.0f}M rows after {seconds:6.1f} s, {stats['bytes'] / stats['rows']:.1f} bytes per row"
                )
                shown *= 2
    if report:
        stats = table.stats()
        print(
            f"  {len(table) / 1e6:.0f}M rows: {stats['bytes'] / stats['rows']:.1f} bytes per key,"
            f" {stats['bytes'] / stats['own_bytes']:.2f}× the row data;"
            f" worst while growing {worst:.2f}×, peak {stats['peak_bytes'] / stats['own_bytes']:.2f}×"
        )
    return table


def zipf(n: int, size: int) -> np.ndarray:
    """Return heavy-tailed row numbers: the probability of rank r is proportional to 1/r."""
    return np.minimum((n ** rng.random(size)).astype(np.int64), n - 1)


def pull(keys: np.ndarray, table: Table, what: str, draw: Callable[[int, int], np.ndarray]) -> None:
    dense = torch.full((len(keys), table.factors), 0.5)
    rows = [draw(len(keys), BATCH) for _ in range(60)]
    asked = [keys[r] for r in rows]
    known = [torch.from_numpy(r) for r in rows]
    out = np.empty((BATCH, 1 + table.factors), np.float32)
    seconds = alternate(
        60,
        ours=lambda i: table.pull(asked[i], out=out),
        torch=lambda i: torch.nn.functional.embedding(known[i], dense),
    )
    print(
        f"  {what}: {BATCH / seconds['ours'] / 1e6:.1f}M keys/s, F.embedding {BATCH / seconds['torch'] / 1e6:.1f}M rows/s,"
        f" ratio {seconds['torch'] / seconds['ours']:.2f}"
    )


def uniform(n: int, size: int) -> np.ndarray:
    return rng.integers(0, n, size)


def train_step(n: int) -> None:
    """Compare pull and push of a batch with adagrad to the embeddings of PyTorch."""
    keys = rng.integers(0, 2**64, n, dtype=np.uint64)
    table = filled(keys)
    rows = [uniform(n, BATCH) for _ in range(15)]
    grad = torch.full((BATCH, DIM), 0.01)
    sparse = torch.nn.Embedding(n, DIM, sparse=True)
    sparse_adam = torch.optim.SparseAdam(sparse.parameters(), lr=0.001)
    bag = torch.nn.EmbeddingBag(n, DIM, mode="sum")
    adagrad = torch.optim.Adagrad(bag.parameters(), lr=0.05)
    offsets = torch.arange(BATCH)

    grads = np.full((BATCH, 1 + DIM), 0.01, np.float32)
    asked = [keys[some] for some in rows]

    def ours(i: int) -> None:
        table.pull(asked[i])
        table.push(asked[i], grads)  # merges duplicate keys

    def embedding(i: int) -> None:
        sparse_adam.zero_grad()
        sparse(torch.from_numpy(rows[i])).backward(grad)
        sparse_adam.step()

    def embedding_bag(i: int) -> None:
        adagrad.zero_grad()
        bag(torch.from_numpy(rows[i]), offsets).backward(grad)
        adagrad.step()

    seconds = alternate(15, ours=ours, embedding=embedding, bag=embedding_bag)
    print(
        f"  pull+push of {BATCH} keys, 1M rows: {seconds['ours'] * 1e3:.2f} ms; Embedding(sparse)+SparseAdam"
        f" {seconds['embedding'] / seconds['ours']:.1f}×"
        f" as long, EmbeddingBag+Adagrad {seconds['bag'] / seconds['ours']:.1f}×"
    )


def threads(keys: np.ndarray, table: Table) -> None:
    grads = np.full((BATCH, 1 + DIM), 0.01, np.float32)
    asked = [[keys[uniform(len(keys), BATCH)] for _ in range(20)] for _ in range(2)]

    def run(workers: int, work: Callable[[np.ndarray], object]) -> None:
        running = [threading.Thread(target=lambda t=t: [work(some) for some in asked[t]]) for t in range(workers)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    def push(some: np.ndarray) -> None:
        table.push(some, grads)

    for what, work in (("pull", table.pull), ("push", push)):
        seconds = alternate(7, one=lambda i, work=work: run(1, work), two=lambda i, work=work: run(2, work))  # type: ignore[misc]
        print(f"  two threads on {what}: {2 * seconds['one'] / seconds['two']:.2f}× one thread")


def snapshot(keys: np.ndarray, table: Table, what: str, draw: Callable[[int, int], np.ndarray]) -> None:
    """Measure the pushes of one thread before and while another thread saves."""
    grads = np.full((BATCH, 1 + DIM), 0.01, np.float32)
    asked = [keys[draw(len(keys), BATCH)] for _ in range(200)]
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("BENCH_DIR")))
    ratios = []
    try:
        for n in range(3):

            def rate(until: Callable[[int, float], bool]) -> float:
                done, start = 0, time.perf_counter()
                while not until(done, time.perf_counter() - start):
                    table.push(asked[done % len(asked)], grads)
                    done += 1
                return done / (time.perf_counter() - start)

            before = rate(lambda _, seconds: seconds > 2)
            saver = threading.Thread(target=checkpoint.save, args=(table, folder / str(n)))
            saver.start()
            during = rate(lambda _, seconds, saver=saver: not saver.is_alive())  # type: ignore[misc]
            saver.join()
            shutil.rmtree(folder / str(n))
            ratios.append(during / before)
    finally:
        shutil.rmtree(folder)
    print(
        f"  pushes during a save of {len(table) / 1e6:.0f}M rows, {what} keys: {statistics.median(ratios):.2f}× the speed before"
    )


def disk(table: Table) -> None:
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("BENCH_DIR")))
    try:
        saves, loads, plain_out, plain_in = [], [], [], []
        for n in range(3):
            start = time.perf_counter()
            path = checkpoint.save(table, folder / str(n))
            saves.append(time.perf_counter() - start)
            size = sum(file.stat().st_size for file in path.iterdir())
            start = time.perf_counter()
            subprocess.run(
                ["dd", "if=/dev/zero", f"of={folder}/plain", "bs=1M", f"count={size >> 20}", "conv=fsync"],
                check=True,
                capture_output=True,
            )
            plain_out.append(time.perf_counter() - start)
            start = time.perf_counter()
            again = checkpoint.load(path)
            loads.append(time.perf_counter() - start)
            del again
            gc.collect()
            start = time.perf_counter()
            subprocess.run(["dd", f"if={folder}/plain", "of=/dev/null", "bs=1M"], check=True, capture_output=True)
            plain_in.append(time.perf_counter() - start)
            shutil.rmtree(path)
        out, back = statistics.median(saves), statistics.median(loads)
        print(
            f"  save {len(table) / 1e6:.0f}M rows, {size / 1e6:.0f} MB: {out:.2f} s,"
            f" {statistics.median(plain_out) / out:.2f}× the speed of dd conv=fsync;"
            f" load {back:.2f} s, {statistics.median(plain_out) / back:.2f}× that speed"
            f" ({statistics.median(plain_in) / back:.2f}× dd reading from the page cache)"
        )
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--only", help="one part: pull, step, snapshot, short or large")
    options = parser.parse_args()
    torch.set_num_threads(1)
    n = options.rows // (20 if options.quick else 1)

    keys = rng.integers(0, 2**64, n, dtype=np.uint64)
    parts = {
        "pull": lambda: pulls(keys),
        "step": lambda: train_step(min(n, 1_000_000)),
        "snapshot": lambda: snapshots(keys[: n // 2]),
        "short": lambda: filled(keys, report=True, admission="count(1000000)"),
    }
    if options.large:
        parts["large"] = large
    for name, part in parts.items():
        if options.only in (None, name):
            print(name)
            part()
            gc.collect()


def pulls(keys: np.ndarray) -> None:
    n = len(keys)
    table = filled(keys, report=True)
    pull(keys, table, f"pull, {n / 1e6:.0f}M rows, uniform", uniform)
    pull(keys, table, f"pull, {n / 1e6:.0f}M rows, Zipf", zipf)
    threads(keys, table)
    del table
    for dim in (DIM, 1, 8, 16, 64):
        some = keys[:1_000_000]
        pull(some, filled(some, dim), f"pull, 1M rows, dim {dim}, uniform", uniform)


def snapshots(keys: np.ndarray) -> None:
    table = filled(keys)
    snapshot(keys, table, "uniform", uniform)
    snapshot(keys, table, "Zipf", zipf)
    disk(table)


def large() -> None:
    many = rng.integers(0, 2**64, 100_000_000, dtype=np.uint64)
    table = filled(many, report=True, admission="count(1000000)")
    out = np.empty((BATCH, 1 + DIM), np.float32)
    asked = [many[uniform(len(many), BATCH)] for _ in range(60)]
    seconds = alternate(60, ours=lambda i: table.pull(asked[i], out=out))
    print(f"  pull, 100M short rows, uniform: {BATCH / seconds['ours'] / 1e6:.1f}M keys/s")


if __name__ == "__main__":
    main()
