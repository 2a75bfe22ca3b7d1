"""The keys of a PaddleRec configuration, taken one by one: none is left without a word in the report."""

from __future__ import annotations

import difflib
import re
from typing import Any

from clickfleet.errors import ConfigError
from clickfleet.migrate.original import Original
from clickfleet.migrate.reasons import KNOWN, reason
from clickfleet.migrate.report import Report, shown


class Keys:
    """Reads keys in the type they must have and writes our settings beside them."""

    def __init__(self, original: Original) -> None:
        self.original, self.values = original, original.values
        self.report = Report()
        self.raw: dict[str, Any] = {}
        self._left = dict.fromkeys(self.values)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def to(self, key: str, ours: str, value: Any, note: str = "") -> None:
        """The key, or what stands for it where it is not given, becomes a setting of ours."""
        self.set(ours, value)
        self.told(key, "mapped", f"{ours}={shown(value)}", note)

    def set(self, ours: str, value: Any) -> None:
        """A setting of ours that follows from no single key."""
        *parents, last = ours.split(".")
        place = self.raw
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value

    def used(self, key: str, by: str, note: str = "") -> None:
        """The key is obeyed where it matters."""
        self.told(key, "used", by, note)

    def skip(self, key: str, why: str) -> None:
        """The key has no meaning here."""
        self.told(key, "not applicable", "", why)

    def told(self, key: str, kind: Any, became: str = "", note: str = "") -> None:
        if key in self._left:
            del self._left[key]
            self.report.add(key, self.values[key], kind, became, note)

    def whole(self, key: str, default: int | None = None, least: int = 1, most: int = 2**63 - 1) -> int:
        value = self._given(key, default)
        if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]{1,20}\s*", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"must be a whole number of at least {least}")
        if value > most:
            raise self.wrong(key, f"must be at most {most}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._given(key, default)
        try:
            if isinstance(value, bool):
                raise ValueError
            return float(value)  # YAML 1.1 reads 5e-6 as a text
        except (TypeError, ValueError):
            raise self.wrong(key, "must be a number") from None

    def truth(self, key: str, default: bool = False) -> bool:
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
            raise self.wrong(key, "must be a text")
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
            near = difflib.get_close_matches(key, [k for k in self._left if k not in KNOWN], 1, 0.8)
            raise ConfigError(
                f"{self.original.path}: {key} is missing",
                f"is {near[0]} meant for it?" if near else "the tools need it",
            )
        return default

    def wrong(self, key: str, what: str) -> ConfigError:
        return ConfigError(f"{self.original.path}: {key} is {shown(self.values.get(key))}, and {what}")

    def finish(self, has_reader: bool) -> None:
        """Says something of every key that is left."""
        for key in list(self._left):
            why = reason(key)
            if why is not None:
                self.skip(key, why)
                continue
            near = difflib.get_close_matches(key, KNOWN, 1, 0.85)
            if near and not has_reader:
                raise ConfigError(
                    f"{self.original.path}: unknown key {key}; did you mean {near[0]}?", "correct it, or remove it"
                )
            hint = f"; the nearest known one is {near[0]}" if near else ""
            told = "handed to your reader" if has_reader else "nothing reads it"
            self.told(key, "unknown", "", f"{told}{hint}")
        for key in self.original.twice:
            self.report.notes.append(
                f"{key} is given twice in the file: the last one counts, as it did in the old tools"
            )
        for section in self.original.dropped:
            self.report.notes.append(f"section {section}: the old tools never read it, and nothing here does")
