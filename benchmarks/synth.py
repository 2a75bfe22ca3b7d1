"""Measure synthetic logs: rows generated and written per second, per format, with one thread and with two.

python benchmarks/synth.py [--rows 200000] [--rounds 3]      formats alternate; prints medians
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.data.logs.target import FORMATS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    speeds: dict[tuple[str, int], list[float]] = {(kind, threads): [] for kind in FORMATS for threads in (1, 2)}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.rounds):
            for (kind, threads), measured in speeds.items():
                start = time.perf_counter()
                options = SynthOptions(rows=given.rows, test_rows=0, format=kind)
                synth(Path(folder) / kind, options, overwrite=True, threads=threads)
                measured.append(given.rows / (time.perf_counter() - start))
    print(f"{'format':<10}{'1 thread':>14}{'2 threads':>14}  rows/s, including set-up")
    for kind in FORMATS:
        one, two = (statistics.median(speeds[kind, threads]) for threads in (1, 2))
        print(f"{kind:<10}{one:>14,.0f}{two:>14,.0f}")


if __name__ == "__main__":
    main()
