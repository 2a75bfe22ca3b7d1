"""What became of every key: obeyed, mapped, or not applicable, with the reason."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["mapped", "used", "not applicable", "unknown"]


@dataclass(frozen=True)
class Line:
    key: str
    value: Any
    kind: Kind
    became: str = ""
    """Our setting, or who obeys it."""
    note: str = ""

    def __str__(self) -> str:
        end = f" ({self.note})" if self.note and self.became else f" {self.note}" if self.note else ""
        arrow = f"-> {self.became}" if self.became else f"{self.kind}:"
        return f"{self.key} = {shown(self.value)} {arrow}{end}"


@dataclass
class Report:
    """A line per key of the file, and what else there is to say."""

    lines: list[Line] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, key: str, value: Any, kind: Kind, became: str = "", note: str = "") -> None:
        self.lines.append(Line(key, value, kind, became, note))

    def counts(self) -> dict[str, int]:
        kinds = [line.kind for line in self.lines]
        return {kind: kinds.count(kind) for kind in ("mapped", "used", "not applicable", "unknown")}

    def text(self) -> str:
        """For a terminal."""
        return "\n".join([*map(str, sorted(self.lines, key=lambda line: line.key)), *self.notes])

    def markdown(self, title: str) -> str:
        """For a file beside the new configuration."""
        rows = [f"# {title}", "", "| key | value | became | remark |", "|---|---|---|---|"]
        for line in sorted(self.lines, key=lambda line: line.key):
            cells = (line.key, f"`{shown(line.value)}`", line.became or line.kind, line.note)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return "\n".join([*rows, "", *(f"* {note}" for note in self.notes), ""])

    def to_dict(self) -> list[dict[str, Any]]:
        return [vars(line) for line in sorted(self.lines, key=lambda line: line.key)]


def shown(value: Any) -> str:
    """A value on one line, not too long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:56]} …"
