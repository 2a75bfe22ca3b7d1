"""What a measurement was taken on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import clickfleet


@dataclass(frozen=True)
class Environment:
    """Names and values for people and machines."""

    facts: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        width = max(map(len, self.facts))
        return "\n".join(f"{key:<{width}}  {value}" for key, value in self.facts.items())


def environment(**more: Any) -> Environment:
    """Processor, memory, load, and the versions of what computes."""
    from clickfleet import _core

    versions = {}
    for name in ("torch", "onnxruntime", "numpy", "pyarrow"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    pages, size = (os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_PAGE_SIZE"))
    return Environment(
        {
            "clickfleet": clickfleet.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "core built for": _core.cpu_level(),
            "memory": f"{pages * size / 2**30:.1f} GiB",
            "load": " ".join(f"{x:.2f}" for x in os.getloadavg()),
            **versions,
            **more,
        }
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
