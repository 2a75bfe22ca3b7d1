"""Measure reading: text and Parquet to batches, against pyarrow only reading the same file, and against plain Python; rows with histories
against rows without.

python benchmarks/parse.py [--rows 400000] [--rounds 5] [--memory]      one thread unless stated otherwise

Every pair is measured in alternation in this process. Prints medians, and each ratio with its target.
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from clickfleet.data.logs.convert import convert
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Schema, preset, read_schema

COLUMNS = ["click", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
VOCABULARY = (
    1460,
    583,
    10**7,
    2 * 10**6,
    305,
    24,
    12517,
    633,
    3,
    93145,
    5683,
    8 * 10**6,
    3194,
    27,
    14992,
    5 * 10**6,
    10,
)
VOCABULARY += (5652, 2173, 4, 7 * 10**6, 18, 15, 286181, 105, 142572)


def criteo_columns(rows: int, seed: int = 7) -> dict[str, list[str]]:
    """Return text columns with the lengths, missing values and vocabulary sizes of Criteo."""
    random = np.random.default_rng(seed)
    columns = {"click": [str(x) for x in (random.random(rows) < 0.25).astype(int)]}
    for i in range(13):
        counts = np.exp(np.minimum(random.exponential(1.5, rows) * (3 if i == 4 else 1), 15)).astype(np.int64) - 1
        absent = random.random(rows) < (0.45, 0, 0.2, 0.2, 0.03, 0.2, 0.04, 0, 0.04, 0.45, 0.04, 0.76, 0.2)[i]
        columns[f"I{i + 1}"] = ["" if gone else str(x) for x, gone in zip(counts, absent, strict=True)]
    for i, size in enumerate(VOCABULARY):
        ids = np.minimum(random.pareto(0.6, rows), size - 1).astype(np.uint64) * np.uint64(2654435761 + 2 * i)
        absent = random.random(rows) < (0.4 if i in (18, 19, 24, 25) else 0.76 if i == 21 else 0.03)
        columns[f"C{i + 1}"] = [
            "" if gone else f"{int(x) & 0xFFFFFFFF:08x}" for x, gone in zip(ids, absent, strict=True)
        ]
    return columns


def write_files(folder: Path, rows: int) -> dict[str, Path]:
    """Write the same rows as Criteo text, slot text, multislot text and Parquet."""
    distinct = min(rows, 50_000)
    columns = criteo_columns(distinct)
    lines = ["\t".join(row) for row in zip(*columns.values(), strict=True)]
    files = {name: folder / f"train.{name}" for name in ("criteo", "slots", "multislot", "parquet")}
    repeat = -(-rows // distinct)
    files["criteo"].write_text(("\n".join(lines) + "\n") * repeat)
    sample = next(iter(Reader(files["criteo"], preset("criteo-paddle"), batch_size=distinct)))
    slots, multislot = [], []
    assert sample.labels is not None
    for label, dense, keys in zip(sample.labels, sample.dense, sample.keys.reshape(-1, 26), strict=True):
        numbers = [f"{x:.12g}" for x in dense.tolist()]
        named = [f"{i}:{key}" for i, key in enumerate(keys.tolist(), 1)]
        slots.append(" ".join([f"click:{label:.0f}", *(f"dense_feature:{x}" for x in numbers), *named]))
        multislot.append(" ".join(["13", *numbers, *(f"1 {key}" for key in keys.tolist()), f"1 {label:.0f}"]))
    files["slots"].write_text(("\n".join(slots) + "\n") * repeat)
    files["multislot"].write_text(("\n".join(multislot) + "\n") * repeat)
    names = pa.csv.ReadOptions(column_names=COLUMNS)
    types = pa.csv.ConvertOptions(column_types={name: pa.string() for name in COLUMNS if name[0] == "C"})
    table = pa.csv.read_csv(files["criteo"], names, pa.csv.ParseOptions(delimiter="\t"), types)
    pq.write_table(table, files["parquet"])
    return files


def write_histories(folder: Path, rows: int) -> tuple[dict[str, tuple[Path, Path]], Schema, Schema]:
    """Write the visits of a shop without their histories and with them: name -> both files."""
    options = SynthOptions(rows=rows // 8, test_rows=0, histories=True, format="parquet")
    synth(folder / "shop", options, overwrite=True)
    shop = read_schema(folder / "shop" / "schema.yaml")
    plain = replace(shop, histories=())
    (source,) = (folder / "shop" / "train").iterdir()
    files = {}
    for kind in ("csv", "slots", "multislot", "parquet"):
        both = []
        for name, schema in (("plain", plain), ("events", shop)):
            path = folder / f"{name}.{kind}"
            convert(source, path, "parquet", kind, schema=schema, keys=None if kind in ("csv", "parquet") else "hash64")
            both.append(path)
        files[kind] = (both[0], both[1])
    return files, plain, shop


def arrow_csv(path: Path, separator: str) -> None:
    pa.csv.read_csv(
        path,
        pa.csv.ReadOptions(autogenerate_column_names=True, use_threads=False),
        pa.csv.ParseOptions(delimiter=separator),
    )


def plain_python(path: Path, rows: int) -> None:
    """What people write first: split, float, hash, batch by batch into arrays."""
    labels, dense, keys = [], [], []
    with open(path) as file:
        for number, line in enumerate(file, 1):
            fields = line.rstrip("\n").split("\t")
            labels.append(float(fields[0]))
            dense.append([math.log1p(float(x)) if x else 0.0 for x in fields[1:14]])
            keys.append([hash(str(i) + x) for i, x in enumerate(fields[14:], 14)])
            if number % 1000 == 0:
                _ = np.array(labels, np.float32), np.array(dense, np.float32), np.array(keys, np.int64)
                labels, dense, keys = [], [], []
            if number == rows:
                return


def ours(path: Path | list[Path], name: str, schema: Schema, threads: int = 0) -> None:
    for _ in Reader(path, schema, format=name, batch_size=1000, threads=threads):
        pass


def compare(rounds: int, *runs: Callable[[], Any]) -> list[float]:
    """Return the median seconds of each function, run in alternation."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(rounds):
        for run, seconds in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def peak_memory(path: Path) -> int:
    """Return the peak memory, in bytes, of a new process that reads a file with two threads."""
    done = subprocess.run([sys.executable, __file__, "--peak", str(path)], capture_output=True, text=True, check=True)
    return int(done.stdout)


def run(rows: int = 400_000, rounds: int = 5, memory: bool = False) -> dict[str, Any]:
    """Run all measurements: name -> {ratio, target, …}."""
    found: dict[str, dict[str, float]] = {}

    def note(name: str, ratio: float, target: float, **more: float) -> None:
        found[name] = {"ratio": round(ratio, 2), "target": target, **{key: round(x, 2) for key, x in more.items()}}
        extra = "  ".join(f"{key} {x:.2f}" for key, x in more.items())
        print(
            f"{'ok  ' if ratio >= target else 'LOW '} {name:<42} {ratio:6.2f}  target {target:<5} {extra}", flush=True
        )

    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder), rows)
        criteo, slots = preset("criteo"), preset("criteo-slots")
        size = {name: path.stat().st_size / 1e6 for name, path in files.items()}
        some = min(rows, 20_000)
        mine, arrow, python = compare(
            rounds,
            lambda: ours(files["criteo"], "criteo", criteo),
            lambda: arrow_csv(files["criteo"], "\t"),
            lambda: plain_python(files["criteo"], some),
        )
        rate = {"Mrows_s": rows / mine / 1e6, "MB_s": size["criteo"] / mine}
        note("criteo text / pyarrow.csv", arrow / mine, 3, **rate, arrow_MB_s=size["criteo"] / arrow)
        note("criteo text / plain Python", python * rows / some / mine, 25)
        four = [files["criteo"]] * 4  # long enough to hide the start of a thread
        one, two = compare(
            rounds,
            lambda: ours(four, "criteo", criteo),
            lambda: ours(four, "criteo", criteo, threads=1),  # plus the consumer, which parses instead of waiting
        )
        note("criteo text, two threads / one", one / two, 1.8, MB_s=4 * size["criteo"] / two)
        for name in ("slots", "multislot"):
            mine, arrow = compare(
                rounds,
                lambda name=name: ours(files[name], name, slots),  # type: ignore[misc]
                lambda name=name: arrow_csv(files[name], " "),  # type: ignore[misc]
            )
            note(f"{name} text / pyarrow.csv, bytes/s", arrow / mine, 1, MB_s=size[name] / mine)
        mine, arrow = compare(
            rounds,
            lambda: ours(files["parquet"], "parquet", criteo),
            lambda: pq.read_table(files["parquet"], use_threads=False),
        )
        note("parquet / pyarrow's read", arrow / mine, 0.8, Mrows_s=rows / mine / 1e6)
        pairs, plain, shop = write_histories(Path(folder), rows)
        for name, (without, path) in pairs.items():
            read_as = [
                schema if name in ("csv", "parquet") else read_schema(f"{file}.schema.yaml")
                for schema, file in ((plain, without), (shop, path))
            ]
            times = max(1, round(path.stat().st_size / without.stat().st_size))  # about as many bytes
            mine, other = compare(
                rounds,
                lambda name=name, path=path, schema=read_as[1]: ours(path, name, schema),  # type: ignore[misc]
                lambda name=name, path=without, schema=read_as[0], times=times: ours([path] * times, name, schema),  # type: ignore[misc]
            )
            speeds = [path.stat().st_size / mine / 1e6, without.stat().st_size * times / other / 1e6]
            note(
                f"{name} with histories / without, bytes/s",
                speeds[0] / speeds[1],
                0.8,
                MB_s=speeds[0],
                without_MB_s=speeds[1],
            )
        if memory:
            block = files["criteo"].read_bytes()[: 100 << 20]
            peaks = []
            for times in (1, 10):
                path = Path(folder) / "large.tsv"
                with open(path, "wb") as file:
                    for _ in range(times):
                        file.write(block[: block.rindex(b"\n") + 1])
                peaks.append(peak_memory(path))
            note("peak memory, 100 MB file / 1 GB file", peaks[0] / peaks[1], 0.95, MB=peaks[1] / 1e6)
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    arguments.add_argument("--rows", type=int, default=400_000)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--memory", action="store_true", help="also compare peak memory on 100 MB and 1 GB")
    arguments.add_argument("--peak", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.peak:
        ours(Path(given.peak), "criteo", preset("criteo"), threads=2)
        # Not ru_maxrss: a new process inherits it from its parent.
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert peak is not None
        print(int(peak[1]) * 1024)
        return
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print(json.dumps(run(given.rows, given.rounds, given.memory)))


if __name__ == "__main__":
    main()
