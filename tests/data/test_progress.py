"""Bars on a terminal, lines elsewhere."""

import io
import re

from clickfleet.data.progress import amount, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_per_interval_without_a_terminal() -> None:
    out = io.StringIO()
    with progress("reading", total=200, stream=out, interval_s=0.0) as bar:
        bar.advance(50)
        bar.advance(100)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"reading: 50 rows \(25%\), [\d,]+ rows/s", lines[0])
    assert "(75%)" in lines[1]


def test_short_work_prints_nothing() -> None:
    out = io.StringIO()
    with progress("reading", stream=out) as bar:
        bar.advance(5)
    assert (out.getvalue(), bar.done) == ("", 5)


def test_an_unknown_total_has_no_percentage() -> None:
    out = io.StringIO()
    with progress("fetching", unit="bytes", stream=out, interval_s=0.0) as bar:
        bar.advance(2_500_000)
        bar.expect(5_000_000)
        bar.advance(1)
    first, second = out.getvalue().splitlines()
    assert first.startswith("fetching: 2.5 MB, ")
    assert "(50%)" in second


def test_a_terminal_gets_a_bar() -> None:
    for unit in ("bytes", "rows"):
        out = Terminal()
        with progress("reading", total=10, unit=unit, stream=out) as bar:
            bar.advance(4)
            bar.expect(8)
            bar.rich.refresh()  # type: ignore[attr-defined]
        assert "reading" in out.getvalue()
        assert bar.done == 4


def test_amounts() -> None:
    assert [amount(n, "bytes") for n in (0, 999, 1000, 2_000_000, 4_041_125_592, 5 * 10**15)] == [
        "0 bytes",
        "999 bytes",
        "1 kB",
        "2 MB",
        "4.04 GB",
        "5e+03 TB",
    ]
