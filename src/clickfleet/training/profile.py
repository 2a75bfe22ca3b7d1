"""`train.profile`: the time per layer of the network as a table, and a trace of some steps for Chrome.

A few steps after the start, torch's profiler records all trainer threads for some steps. The time of a backward
operation counts for the layer whose forward pass recorded it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.autograd.profiler import profile, record_function

from clickfleet.errors import ConfigError
from clickfleet.training.loop import Clock, Job
from clickfleet.training.monitor import PHASES

FIRST, STEPS = 10, 20
"""Steps before the profiler starts, and steps it records."""
MARK = "layer "
ROOT = "(whole model)"
BACKWARD = "autograd::engine::evaluate_function: "


class LayerTime(NamedTuple):
    """Milliseconds per step in one module, including the modules inside it."""

    name: str
    kind: str
    calls: int
    forward_ms: float
    backward_ms: float


class Span(NamedTuple):
    """A phase of one trainer, in nanoseconds of the monotonic clock."""

    phase: str
    begin: int
    end: int
    thread: int


class Profile:
    """Profiles a job after `attach`. `tick` replaces the job's `report`."""

    def __init__(self, report: Callable[[Job], None]) -> None:
        self._report = report
        # not torch.profiler.profile: it imports torch's compiler, which takes seconds
        self._torch: Any = profile(use_kineto=True, record_shapes=True, experimental_config=_all_threads())
        self._handles: list[Any] = []
        self._kinds: dict[str, str] = {}
        self._ticks = 0
        self._first_mark: int | None = None
        self.running = self.done = False
        self.steps = 0
        """Steps that were recorded."""
        self.spans: list[Span] = []
        self.layers: list[LayerTime] = []

    def attach(self, job: Job) -> None:
        """Mark the layers and phases of every trainer. Call it before training begins."""
        self._torch._prepare_trace()  # must run in the main thread
        for trainer in job.trainers:
            trainer.clock = _Traced(self)
            for name, module in trainer.step.model.named_modules():
                self._kinds[name or ROOT] = type(module).__name__
                self._mark(name or ROOT, module)

    def _mark(self, name: str, module: nn.Module) -> None:
        ranges: list[Any] = []

        def begin(*_: Any) -> None:
            if name == ROOT and self.running and self._first_mark is None:
                self._first_mark = time.perf_counter_ns()
            ranges.append(record_function(MARK + name).__enter__())  # type: ignore[no-untyped-call]

        def end(*_: Any) -> None:
            ranges.pop().__exit__(None, None, None)

        self._handles.append(module.register_forward_pre_hook(begin))
        self._handles.append(module.register_forward_hook(end, always_call=True))

    def tick(self, job: Job) -> None:
        """Count a step. Called after every step, by one thread at a time."""
        self._ticks += 1
        if not self.running and not self.done and self._ticks > FIRST:
            self._torch._start_trace()
            self.running = True
        elif self.running:
            self.steps += 1
            if self.steps == STEPS:
                self.stop()
        self._report(job)

    def stop(self) -> None:
        """Stop recording and compute the time per layer."""
        if self.running:
            self._torch.__exit__(None, None, None)
            self.running, self.done = False, True
            self.layers = attribute(self._torch.function_events, self._kinds, max(self.steps, 1))
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def table(self) -> str:
        """Return a line per layer, and the most expensive operations with their shapes."""
        if not self.done:
            return f"no profile: the run ended before step {FIRST + 1}"
        whole = sum(layer.forward_ms + layer.backward_ms for layer in self.layers if layer.name == ROOT) or 1.0
        lines = [
            f"layers, mean of {self.steps} steps",
            f"{'forward ms':>11} {'backward ms':>12} {'share':>6} {'calls':>6}  layer",
        ]
        for layer in self.layers:
            share = (layer.forward_ms + layer.backward_ms) / whole
            depth = 0 if layer.name == ROOT else layer.name.count(".") + 1
            name = f"{'  ' * depth}{layer.name} ({layer.kind})"
            lines.append(
                f"{layer.forward_ms:11.3f} {layer.backward_ms:12.3f} {share:6.1%} {layer.calls / max(self.steps, 1):6g}  {name}"
            )
        sums: dict[str, int] = defaultdict(int)
        for span in self.spans:
            sums[span.phase] += span.end - span.begin
        total = sum(sums.values()) or 1
        lines.append("phases: " + "  ".join(f"{phase} {sums[phase] / total:.1%}" for phase in PHASES))
        lines.append("")
        lines.append(f"{'ms':>8} {'calls':>6}  the heaviest operations of a step, and their input shapes")
        operations = self._torch.key_averages(group_by_input_shape=True)
        for operation in sorted(operations, key=lambda operation: -operation.self_cpu_time_total)[:15]:
            shapes = " ".join("×".join(map(str, shape)) for shape in operation.input_shapes if shape)
            ms = operation.self_cpu_time_total / 1000 / max(self.steps, 1)
            lines.append(f"{ms:8.3f} {operation.count / max(self.steps, 1):6g}  {operation.key}  {shapes}")
        return "\n".join(lines)

    def write(self, folder: Path) -> Path:
        """Write layers.txt and trace.json into the subfolder `profile`. Return the path of the trace."""
        out = folder / "profile"
        out.mkdir(parents=True, exist_ok=True)
        (out / "layers.txt").write_text(self.table() + "\n", encoding="utf-8")
        path = out / "trace.json"
        if self.done:
            self._torch.export_chrome_trace(str(path))
            path.write_text(json.dumps(self._with_phases(json.loads(path.read_text()))))
        return path

    def _with_phases(self, trace: Any) -> Any:
        """Add the phases of the trainers to the trace. The first pass of the model aligns the two clocks."""
        events = trace["traceEvents"]
        marks = [event["ts"] for event in events if event.get("name") == MARK + ROOT]
        if marks and self._first_mark is not None:
            shift = min(marks) - self._first_mark / 1000
            for span in self.spans:
                place = {"pid": os.getpid(), "tid": span.thread, "ph": "X", "cat": "phase", "name": span.phase}
                events.append({**place, "ts": span.begin / 1000 + shift, "dur": (span.end - span.begin) / 1000})
        return trace


class _Traced(Clock):
    """A clock that also records its laps in the profile."""

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        self._profile = profile

    def lap(self, phase: str) -> None:
        begin = self.last
        super().lap(phase)
        if self._profile.running:
            span = Span(phase, int(begin * 1e9), int(self.last * 1e9), threading.get_native_id())
            self._profile.spans.append(span)


def attribute(events: Any, kinds: dict[str, str], steps: int) -> list[LayerTime]:
    """Return the time per layer, in the order of the network, from the profiler's events."""
    forward: dict[str, float] = defaultdict(float)
    backward: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    owners: dict[tuple[int, int], list[str]] = {}
    for event in sorted(events, key=lambda event: event.time_range.start):
        if event.name.startswith(MARK):
            forward[event.name[len(MARK) :]] += event.time_range.elapsed_us() / 1000
            calls[event.name[len(MARK) :]] += 1
        elif event.sequence_nr >= 0 and not event.name.startswith("autograd::"):
            around = _layers_around(event)
            if around:  # the last operation with a number is the one that autograd recorded
                owners[event.thread, event.sequence_nr] = around
    for event in events:
        if event.name.startswith(BACKWARD):
            for name in owners.get((event.fwd_thread or event.thread, event.sequence_nr), ()):
                backward[name] += event.time_range.elapsed_us() / 1000
    return [
        LayerTime(name, kind, calls[name], forward[name] / steps, backward[name] / steps)
        for name, kind in kinds.items()
        if calls[name]
    ]


def _layers_around(event: Any) -> list[str]:
    layers = []
    while event is not None:
        if event.name.startswith(MARK):
            layers.append(event.name[len(MARK) :])
        event = event.cpu_parent
    return layers


def _all_threads() -> Any:
    from torch._C._profiler import _ExperimentalConfig

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it writes to stderr
    try:
        return _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        raise ConfigError(
            "train.profile needs torch 2.7 or later", "upgrade torch, or set train.profile=false"
        ) from None
