"""Measure a table that keeps its cold rows on disk: its size, Zipf training against all rows in memory, pulls against RocksDB.

    python benchmarks/disk.py [--rows 30000000] [--memory 800MiB] [--zipf 1.2] [--folder DIR] [--only rows,train,pulls] [--quick]
    python benchmarks/disk.py --large [--folder DIR]

`rows` fills a table of full rows (10 factors, adagrad) and reports bytes per key, the memory of the process and the speed of pulls and
pushes; then it saves a checkpoint and loads it into a new table with the same limit. `--large` does this with 300 million rows and
8 GiB: it needs 60 GB of disk. By default the memory is 8 GiB for every 300 million rows. `train` trains a
DNN of 400×3 on batches of Zipf keys over a table of `--train-rows` rows, in memory and with the same share of memory as above, in
alternation. `pulls` compares pulls with RocksDB (package rocksdict) over `--pull-rows` rows, with as much block cache as the table
has memory; both bypass the page cache. Ratios are ours over theirs, taken in this process. `--quick` uses a tenth of the rows.

A batch pulls each of its keys once. The share of keys in memory counts these pulls, so it is lower than the share of occurrences.
Set CLICKFLEET_DISK_THREADS=1 to measure reads by threads instead of io_uring.
"""

import argparse
import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from clickfleet import Table
from clickfleet.config.load import Config
from clickfleet.config.plugins import Plugin
from clickfleet.config.sections import BYTES, DenseSettings
from clickfleet.data.bad_lines import Counters
from clickfleet.data.batch import Batch
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.store import checkpoint
from clickfleet.training.learner import Learner
from clickfleet.training.loop import Job
from clickfleet.training.modes import local
from clickfleet.training.predict import metrics_of

DIM, SLOTS, DENSE, BATCH_ROWS = 10, 26, 13, 1000
ROW_BYTES = 84
"""Of a full row: key, statistics, weights and their state."""
SPREAD = np.uint64(0x9E3779B97F4A7C15)
rng = np.random.default_rng(7)


class Zipf:
    """The probability of rank r is proportional to r to the power of -exponent."""

    exponent = 1.2


def zipf_keys(rows: int, size: int) -> np.ndarray:
    """Return keys of heavy-tailed ranks."""
    least = float(rows) ** (1 - Zipf.exponent)
    ranks = (1 - rng.random(size) * (1 - least)) ** (1 / (1 - Zipf.exponent))
    return keys_of(np.minimum(ranks.astype(np.uint64), np.uint64(rows)) - np.uint64(1))


def keys_of(ranks: np.ndarray) -> np.ndarray:
    return ranks * SPREAD


def filled(rows: int, report: bool = False, **settings: object) -> Table:
    """Return a table of full rows. The shows of a row are those that Zipf pulls would give it, so that its warmth is known."""
    table = Table(factors=DIM, **settings)  # type: ignore[arg-type]
    size = 200_000
    grads = np.full((size, 1 + DIM), 0.01, np.float32)
    start, told = time.perf_counter(), rows // 10
    order = rng.permutation(-(-rows // size))
    for n, part in enumerate(order):
        ranks = np.arange(part * size, min(rows, (part + 1) * size), dtype=np.uint64)
        shows = ((rows / (ranks + 1.0)) ** Zipf.exponent).astype(np.float32)
        table.push(keys_of(ranks), grads[: len(ranks)], show=shows, distinct=True)
        if report and (n + 1) * size >= told:
            print(f"    {(n + 1) * size / 1e6:5.0f}M rows after {time.perf_counter() - start:6.1f} s", flush=True)
            told += rows // 10
    if report:
        seconds = time.perf_counter() - start
        print(f"    {rows / seconds / 1e6:.2f}M new rows/s")
    return table


def describe(table: Table, limit: int) -> None:
    stats = table.stats()
    memory_rows = stats["rows"] - stats["disk_rows"]
    print(
        f"  {stats['rows'] / 1e6:.0f}M rows, {stats['own_bytes'] / 1e9:.1f} GB of row data;"
        f" {memory_rows / 1e6:.1f}M in memory, {stats['disk_rows'] / 1e6:.1f}M on disk in {stats['segments']} segments"
    )
    print(
        f"  memory {stats['bytes'] / 2**30:.2f} GiB, peak {stats['peak_bytes'] / 2**30:.2f} of {limit / 2**30:.2f} GiB:"
        f" {(stats['bytes'] - stats['index_bytes']) / max(memory_rows, 1):.1f} bytes per key in memory;"
        f" index {stats['index_bytes'] / max(stats['disk_rows'], 1):.2f} and"
        f" files {stats['disk_bytes'] / max(stats['disk_rows'], 1):.1f} bytes per key on disk"
    )


def process_memory() -> str:
    """Return the memory of this process, now and at most, beside what the interpreter and the libraries took at the start."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, most = (int(lines[name].split()[0]) / 2**20 for name in ("VmRSS", "VmHWM"))
    return f"process {now:.2f} GiB, at most {most:.2f} GiB"


class Traffic:
    """The rows of a table that were read from disk since this was made."""

    def __init__(self, table: Table) -> None:
        self.table, self.before = table, table.stats()

    def __str__(self) -> str:
        now = self.table.stats()
        change = {name: now[name] - self.before[name] for name in ("pulled", "disk_reads", "disk_waits")}
        pulled = max(change["pulled"], 1)
        return (
            f"{1 - change['disk_reads'] / pulled:.1%} of the pulled keys in memory,"
            f" {change['disk_waits'] / pulled:.1%} waited for"
        )


def rows(args: argparse.Namespace) -> None:
    print(f"{args.rows / 1e6:.0f} million full rows with {args.memory / 2**30:.2f} GiB")
    table = filled(args.rows, True, memory_limit=args.memory, disk=args.folder)
    describe(table, args.memory)
    print(f"  {process_memory()}", flush=True)
    for what in ("pull", "pull and push"):
        traffic, keys_done, start = Traffic(table), 0, time.perf_counter()
        while (seconds := time.perf_counter() - start) < args.seconds:
            keys = np.unique(zipf_keys(args.rows, SLOTS * BATCH_ROWS))
            pulled = table.pull(keys)
            if what != "pull":
                table.push(keys, pulled, distinct=True)
            keys_done += len(keys)
        print(
            f"  Zipf {what}, one thread, nothing announced: {keys_done / seconds / 1e3:.0f}k keys/s; {traffic}",
            flush=True,
        )
    describe(table, args.memory)
    train_on(table, args)
    print(f"  {process_memory()}", flush=True)
    save_and_load(table, args)


def save_and_load(table: Table, args: argparse.Namespace) -> None:
    """Save the table, free it, and load the checkpoint into a new one."""
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    asked = np.unique(zipf_keys(args.rows, SLOTS * BATCH_ROWS))
    expected = table.pull(asked)
    try:
        start = time.perf_counter()
        path = checkpoint.save(table, folder / "saved")
        seconds = time.perf_counter() - start
        size = sum(file.stat().st_size for file in path.iterdir())
        print(f"  checkpoint of {size / 1e9:.1f} GB saved in {seconds:.0f} s; {process_memory()}", flush=True)
        table.core = None  # frees its memory and its files
        gc.collect()
        start = time.perf_counter()
        limits = {"memory_limit": args.memory, "snapshot_reserve": args.memory // 10}
        loaded = checkpoint.load(path, **limits, disk=args.folder)
        seconds = time.perf_counter() - start
        same = np.array_equal(loaded.pull(asked), expected)
        print(f"  loaded in {seconds:.0f} s, same rows: {same}; {process_memory()}", flush=True)
        describe(loaded, args.memory)
    finally:
        shutil.rmtree(folder)


def network(table: Table) -> Learner:
    schema = Schema(dense=tuple(Dense(f"I{i}") for i in range(DENSE)), slots=tuple(Slot(f"C{i}") for i in range(SLOTS)))
    config = Config(model=Plugin("dnn", {}), dense=replace(DenseSettings(), optimizer="adam"))
    return Learner(config, schema, table)


class Batches:
    """A source of batches that were drawn beforehand."""

    def __init__(self, schema: Schema, rows: int) -> None:
        self.schema, self.rows, self.epoch = schema, rows, 0
        self.counters, self.split, self.validation = Counters(), None, False
        self.drawn: list[Batch] = []

    def draw(self, n: int) -> None:
        for _ in range(n):
            labels = (rng.random(BATCH_ROWS) < 0.25).astype(np.float32)
            dense = rng.random((BATCH_ROWS, DENSE), np.float32)
            self.drawn.append(Batch(dense, zipf_keys(self.rows, SLOTS * BATCH_ROWS), SLOTS, labels=labels))

    def __iter__(self) -> Iterator[Batch]:
        while self.drawn:
            yield self.drawn.pop()
        self.epoch += 1

    def state(self) -> dict[str, object]:
        return {}


class Training:
    """A model that is trained on Zipf batches as `clickfleet train` does it: one trainer thread per core."""

    def __init__(self, table: Table, rows: int) -> None:
        self.table, learner = table, network(table)
        self.source = Batches(learner.schema, rows)
        self.job = Job(learner, self.source, metrics_of(learner), trainers=2, threads=2)  # type: ignore[arg-type]
        self.cpu_ms = 0.0
        """CPU time of all threads per batch, in the last run."""

    def run(self, n: int) -> float:
        """Train n batches. Return rows per second."""
        self.source.draw(n)
        self.job.begin_epoch()
        start, cpu_start = time.perf_counter(), time.process_time()
        local.train(self.job, local.Config())
        self.cpu_ms = (time.process_time() - cpu_start) / n * 1e3
        return n * BATCH_ROWS / (time.perf_counter() - start)


def train_on(table: Table, args: argparse.Namespace) -> None:
    training = Training(table, args.rows)
    training.run(args.batches)
    traffic = Traffic(table)
    print(f"  DNN 400×3 on Zipf keys: {training.run(args.batches):,.0f} rows/s; {traffic}")
    describe(table, args.memory)


def train(args: argparse.Namespace) -> None:
    n, limit = args.train_rows, args.memory * args.train_rows // args.rows
    print(f"Zipf training over {n / 1e6:.0f} million rows: all in memory, and with {limit / 2**30:.2f} GiB")
    both = {
        "memory": Training(filled(n), n),
        "disk": Training(filled(n, memory_limit=limit, disk=args.folder), n),
    }
    for one in both.values():
        one.run(args.batches)
    traffic = Traffic(both["disk"].table)
    speeds: dict[str, list[float]] = {name: [] for name in both}
    cpu: dict[str, list[float]] = {name: [] for name in both}
    for _ in range(args.rounds):
        for name, one in both.items():
            speeds[name].append(one.run(args.batches))
            cpu[name].append(one.cpu_ms)
    memory, disk = (statistics.median(speeds[name]) for name in both)
    ratio = statistics.median(b / a for a, b in zip(*speeds.values(), strict=True))
    print(f"  {memory:,.0f} rows/s in memory, {disk:,.0f} with rows on disk: ratio {ratio:.2f}; {traffic}")
    used = statistics.median(a / b for a, b in zip(*cpu.values(), strict=True))
    print(
        f"  CPU time per batch {statistics.median(cpu['memory']):.1f} and {statistics.median(cpu['disk']):.1f} ms: ratio {used:.2f}"
    )
    describe(both["disk"].table, limit)


def packed(keys: np.ndarray) -> list[bytes]:
    """Return keys for RocksDB, whose order is that of bytes."""
    text = keys.astype(">u8").tobytes()
    return [text[i : i + 8] for i in range(0, len(text), 8)]


def rocks(folder: Path, rows: int, cache: int) -> tuple[object, Callable[[np.ndarray], object]]:
    """Return a RocksDB with the same rows, and a function that pulls some."""
    import rocksdict

    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_use_direct_reads(True)
    options.set_use_direct_io_for_flush_and_compaction(True)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    options.increase_parallelism(2)
    options.prepare_for_bulk_load()
    table = rocksdict.BlockBasedOptions()
    table.set_block_cache(rocksdict.Cache(cache))
    table.set_bloom_filter(10, False)
    table.set_cache_index_and_filter_blocks(False)
    options.set_block_based_table_factory(table)
    store = rocksdict.Rdict(str(folder), options)
    value = b"\0" * ROW_BYTES
    for at in range(0, rows, 100_000):
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key in packed(keys_of(np.arange(at, min(rows, at + 100_000), dtype=np.uint64))):
            batch[key] = value
        store.write(batch)
    store.flush()
    store.compact_range(None, None)

    def pull(keys: np.ndarray) -> object:
        return np.frombuffer(b"".join(store[packed(keys)]), np.float32)

    return store, pull


def pulls(args: argparse.Namespace) -> None:
    n, limit = args.pull_rows, args.memory * args.pull_rows // args.rows
    print(f"pulls over {n / 1e6:.0f} million rows with {limit / 2**20:.0f} MiB, against RocksDB")
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        store, theirs = rocks(folder / "rocks", n, limit)
        table = filled(n, memory_limit=limit, disk=args.folder)
        done: dict[str, list[float]] = {"ours": [], "theirs": []}
        calls = {"ours": table.pull, "theirs": theirs}
        for measured in (False, True):  # the first time fills both caches
            traffic = Traffic(table)
            for _ in range(args.rounds):
                for name, call in calls.items():
                    count, start = 0, time.perf_counter()
                    while (seconds := time.perf_counter() - start) < args.seconds / 2:
                        keys = np.unique(zipf_keys(n, SLOTS * BATCH_ROWS))
                        call(keys)
                        count += len(keys)
                    if measured:
                        done[name].append(count / seconds)
        ours, rocksdb = (statistics.median(done[name]) for name in done)
        ratio = statistics.median(a / b for a, b in zip(*done.values(), strict=True))
        print(f"  {ours / 1e3:.0f}k keys/s, RocksDB {rocksdb / 1e3:.0f}k keys/s: ratio {ratio:.1f}; {traffic}")
        store.close()  # type: ignore[attr-defined]
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=30_000_000)
    parser.add_argument("--train-rows", type=int, default=20_000_000)
    parser.add_argument("--pull-rows", type=int, default=10_000_000)
    parser.add_argument(
        "--memory", type=lambda text: int(BYTES.parse(text)), help="default: 8 GiB per 300 million rows"
    )
    parser.add_argument("--zipf", type=float, default=1.2, help="exponent of the keys' frequencies")
    parser.add_argument("--folder", help="directory of the rows on disk")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="rows,train,pulls")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows")
    parser.add_argument("--large", action="store_true", help="only `rows`, with 300 million rows and 8 GiB")
    args = parser.parse_args()
    Zipf.exponent = args.zipf
    if args.large:
        args.rows, args.only = 300_000_000, "rows"
    if args.quick:
        args.rows, args.train_rows, args.pull_rows = args.rows // 10, args.train_rows // 10, args.pull_rows // 10
        args.seconds /= 4
    args.memory = args.memory or (8 << 30) * args.rows // 300_000_000
    own = None if args.folder else tempfile.TemporaryDirectory()
    args.folder = args.folder or (own.name if own else None)
    for part in args.only.split(","):
        {"rows": rows, "train": train, "pulls": pulls}[part](args)
        gc.collect()


if __name__ == "__main__":
    main()
