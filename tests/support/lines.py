"""Lines that several tests read, and a way to make more of them."""

import random
from pathlib import Path

from clickfleet.data.formats import Format
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Schema

GOLDEN_LINE = (
    "0|1|1|5|0|1382|4|15|2|181|1|2||2|68fd1e64|80e26c9b|fb936136|7b4723c4|25c83c98|7e0ccccf|de7995b8|1f89b562|a73ee510|a8cd5504"
    "|b2cb9c98|37c9c164|2824a5f6|1adce6ef|8ba8b39a|891b62e7|e5ba7672|f54016b9|21ddcdc9|b1252a9d|07b5194c||3a171ecb|c5c50484"
    "|e8b83407|9727dd16"
).replace("|", "\t")
GOLDEN_DENSE = [0.05, 0.00663349917081, 0.05, 0.0, 0.02159375, 0.008, 0.15, 0.04, 0.362, 0.1, 0.2, 0.0, 0.04]
GOLDEN_IDS = [715353, 817085, 851010, 833725, 286835, 948614, 881652, 507110, 27346, 646986, 643076, 200960, 18464]
GOLDEN_IDS += [202774, 532679, 729573, 342789, 562805, 880474, 984402, 666449, 26235, 700326, 452909, 884722, 787527]

MULTISLOT_LINE = " ".join(
    ["13", *("0.0" if x == 0 else f"{x:.12g}" for x in GOLDEN_DENSE), *(f"1 {key}" for key in GOLDEN_IDS), "1 0"]
)
SLOTS_LINE = " ".join(
    ["click:0", *(f"dense_feature:{x}" for x in GOLDEN_DENSE), *(f"{i}:{key}" for i, key in enumerate(GOLDEN_IDS, 1))]
)


def criteo_line(number: int) -> str:
    """A line with gaps, negative counts and few enough categories to repeat; its second count is its number."""
    draw = random.Random(number)
    counts = [draw.choice(["", str(draw.randrange(-3, 5000))]) for _ in range(13)]
    counts[1] = str(number)
    words = [draw.choice(["", f"{draw.randrange(500):08x}"]) for _ in range(26)]
    return "\t".join([str(draw.randrange(2)), *counts, *words])


def criteo_text(rows: int, first: int = 0) -> bytes:
    return "".join(criteo_line(number) + "\n" for number in range(first, first + rows)).encode()


def read(path: Path | str | list[str], form: str | Format | dict[str, object], schema: Schema | None = None, **options):
    """All rows of files as one batch, read without threads unless said otherwise."""
    return list(Reader(path, schema, form, **{"batch_size": 1 << 20, "threads": 0, **options}))
