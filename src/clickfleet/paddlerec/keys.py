"""Read the keys of a PaddleRec configuration one by one. Every key gets a line in the report."""

from __future__ import annotations

import re
from typing import Any

from clickfleet.config.plugins import closest, nearest
from clickfleet.errors import ConfigError
from clickfleet.paddlerec.original import Original
from clickfleet.paddlerec.report import DEVICES, KNOWN, Report, reason, shown

MOST_FILES = 100
NOTHING_ASKED = ("false", "0", "none", "", "cpu", "fp32", "float32")
"""Values of words about devices and precision that ask for what there is."""


class Keys:
    """Reads keys with type checks, builds our configuration in `raw`, and fills the report."""

    def __init__(self, original: Original) -> None:
        self.original, self.values = original, original.values
        self.report = Report()
        self.raw: dict[str, Any] = {}
        self._left = dict.fromkeys(self.values)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def map(self, key: str, ours: str, value: Any, note: str = "") -> None:
        """Map a key, or its default if it is absent, to one of our settings."""
        self.set(ours, value)
        self.record(key, "mapped", f"{ours}={shown(value)}", note)

    def set(self, ours: str, value: Any) -> None:
        """Set one of our settings without a line in the report."""
        *parents, last = ours.split(".")
        place = self.raw
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value

    def used(self, key: str, by: str, note: str = "") -> None:
        """Report that a key takes effect in `by`."""
        self.record(key, "used", by, note)

    def skip(self, key: str, why: str) -> None:
        """Report that a key does not apply."""
        self.record(key, "not applicable", "", why)

    def record(self, key: str, kind: Any, became: str = "", note: str = "") -> None:
        if key in self._left:
            del self._left[key]
            self.report.add(key, self.values[key], kind, became, note)

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = 2**63 - 1) -> int:
        value = self._given(key, default)
        if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]{1,20}\s*", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"must be an integer of at least {least}")
        if value > most:
            raise self.wrong(key, f"must be at most {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._given(key, default)
        try:
            if isinstance(value, bool):
                raise ValueError
            return float(value)  # YAML 1.1 reads 5e-6 as a string
        except (TypeError, ValueError):
            raise self.wrong(key, "must be a number") from None

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self._given(key, default)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            value = value.lower() == "true"
        if value in (0, 1):
            value = bool(value)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._given(key, default)
        if isinstance(value, bool | list | dict):
            raise self.wrong(key, "must be a string")
        return str(value)

    def widths(self, key: str, default: list[int] | None = None) -> list[int]:
        value = self._given(key, default)
        if not isinstance(value, list) or not all(isinstance(v, int) and v > 0 for v in value) or not value:
            raise self.wrong(key, "must be a list of widths such as [512, 256, 128]")
        return value

    def _given(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            near = nearest(key, (k for k in self._left if k not in KNOWN), 0.8)
            raise ConfigError(
                f"{self.original.path}: {key} is missing",
                f"rename {near} in the file to {key}" if near else "add it to the file",
            )
        return default

    def wrong(self, key: str, what: str) -> ConfigError:
        return ConfigError(f"{self.original.path}: {key} is {shown(self.values.get(key))}, but {what}")

    def finish(self, has_reader: bool) -> None:
        """Add the remaining keys to the report: not applicable or unknown."""
        for key in list(self._left):
            why = reason(key)
            if why is not None:
                if key in DEVICES and str(self.values[key]).lower() not in NOTHING_ASKED:
                    self.report.warnings.append(f"{key}={shown(self.values[key])} has no effect: {why}")
                self.skip(key, why)
                continue
            near = nearest(key, KNOWN, 0.85)
            if near and not (has_reader and self._read_by_a_program(key)):
                raise ConfigError(
                    f"{self.original.path}: unknown key {key}{closest(key, [near])}", "correct or remove it"
                )
            hint = f"; the closest known key is {near}" if near else ""
            use = "passed to your reader" if has_reader else "ignored"
            self.record(key, "unknown", "", f"{use}{hint}")
        for key in self.original.twice:
            self.report.notes.append(f"the file sets {key} more than once; the last value counts, as in PaddleRec")
        for section in self.original.dropped:
            self.report.notes.append(f"section {section} is ignored, as in PaddleRec")

    def _read_by_a_program(self, key: str) -> bool:
        """Return whether a Python file beside the configuration names a key. Only then may it resemble a known one."""
        name = re.compile(rf"{re.escape(key)}\b")
        files = list(self.original.folder.glob("*.py"))[:MOST_FILES]
        return any(name.search(file.read_text(encoding="utf-8", errors="replace")) for file in files if file.is_file())
