"""ONNX Runtime sessions: the only place that creates them, and their options.

>>> Engine("int8", threads=2).int8
True
>>> Engine("CUDA", threads=1, graph="most")
Traceback (most recent call last):
    ...
clickfleet.errors.ConfigError: unknown graph optimisation 'most'
  choose off, basic, extended or all
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickfleet.errors import CheckpointError, ConfigError, MissingError, TrustError

CPU = "CPUExecutionProvider"
LEVELS = {
    "off": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}


@dataclass(frozen=True)
class Engine:
    """How to run the ONNX graph of a network."""

    name: str = "onnx"
    """onnx; int8 (with quantised matrices); or an ONNX Runtime provider, such as CUDA or CUDAExecutionProvider."""
    threads: int = 1
    """Threads per run. Use 1 if several threads or processes score at the same time."""
    graph: str = "all"
    """Level of ONNX Runtime's graph optimisation: off, basic, extended or all."""
    arena: bool = True
    """Whether to keep memory for the next run instead of releasing it."""

    def __post_init__(self) -> None:
        if self.graph not in LEVELS:
            raise ConfigError(f"unknown graph optimisation {self.graph!r}", "choose off, basic, extended or all")
        if self.threads < 1:
            raise ConfigError(f"an engine needs at least one thread, not {self.threads}")

    @property
    def int8(self) -> bool:
        return self.name == "int8"

    @property
    def provider(self) -> str:
        """The ONNX Runtime provider. Raise ConfigError if it is not installed."""
        if self.name in ("onnx", "int8"):
            return CPU
        wanted = self.name.lower().removesuffix("executionprovider")
        present: list[str] = _runtime().get_available_providers()
        known = {name.lower().removesuffix("executionprovider"): name for name in present}
        if wanted not in known:
            raise ConfigError(
                f"engine {self.name!r} is not available", f"choose onnx, int8 or one of {', '.join(known.values())}"
            )
        return known[wanted]

    def session(self, graph: bytes) -> Any:
        """Open a session for the graph, quantised if the engine is int8."""
        return self.open(quantised(graph) if self.int8 else graph)

    def open(self, graph: bytes) -> Any:
        """Open a session for the graph as it is. Raise ConfigError if the provider does not start."""
        ort = _runtime()
        provider = self.provider
        options = self.options()
        if any(word in graph for word in _REACHING):
            parse(graph)
        try:
            run = ort.InferenceSession(graph, options, providers=list(dict.fromkeys((provider, CPU))))
        except Exception as error:  # ONNX Runtime's errors have no common base class
            parse(graph)  # tells what is wrong with bytes that are no graph
            reason = str(error).partition("\n")[0][:200]
            raise CheckpointError(
                f"cannot open the network's graph (dense.onnx): {reason}", "export or publish the model again"
            ) from error
        if provider not in run.get_providers():
            raise ConfigError(
                f"{provider} does not start on this machine", "its libraries or its device are missing; see its log"
            )
        return run

    def options(self) -> Any:
        """Return session options. Waiting threads sleep, because spinning would take a core from other processes."""
        ort = _runtime()
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[self.graph])
        options.enable_cpu_mem_arena = self.arena
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.set_denormal_as_zero", "0")
        return options


def providers() -> tuple[list[str], list[str]]:
    """Return the ONNX Runtime providers other than the CPU: the installed ones, and the others."""
    ort = _runtime()
    present = [name for name in ort.get_available_providers() if name != CPU]
    return present, [name for name in ort.get_all_providers() if name not in (*present, CPU)]


def fill_with_nan(session: Any, inputs: Mapping[str, NDArray[Any]], rows: int = 64) -> None:
    """Fill the memory of a new session with NaN. A check that follows then fails if a result depends on old memory.

    The memory of a new session is mostly zeros, so a graph that reads it would pass by luck. `rows` must be several times
    those of the check.
    """
    shapes = {name: (rows, *x.shape[1:]) for name, x in inputs.items()}
    session.run(
        None,
        {
            name: np.full(shapes[name], np.nan, np.float32) if x.dtype == np.float32 else np.resize(x, shapes[name])
            for name, x in inputs.items()
        },
    )


@lru_cache(maxsize=1)
def quantised(graph: bytes) -> bytes:
    """Return the network with 8-bit integer matrices. Inputs are quantised at run time."""
    import logging
    import tempfile

    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = parse(graph)
    del model.graph.value_info[:]  # the shapes of the matrices change
    with tempfile.TemporaryDirectory(prefix="clickfleet-int8-") as folder:
        small = Path(folder) / "int8.onnx"
        logging.disable(logging.WARNING)  # it recommends a preprocessing step that has no effect on these graphs
        try:
            quantize_dynamic(model, small, weight_type=QuantType.QInt8)
        finally:
            logging.disable(logging.NOTSET)
        return small.read_bytes()


_REACHING = (b"location", b"EPContext")
"""A graph without these words cannot read other files or run compiled parts, wherever in it they would stand."""


def parse(graph: bytes) -> Any:
    """Parse an ONNX model. Raise TrustError if it would read other files, for weights or compiled parts."""
    import onnx

    try:
        model = onnx.load_from_string(graph)
    except Exception as error:  # protobuf's error classes differ between versions
        raise CheckpointError(
            f"the network's graph (dense.onnx) is damaged: {error}", "export or publish the model again"
        ) from error
    for part in _parts(model):
        if isinstance(part, onnx.TensorProto) and (part.external_data or part.data_location):
            file = next((entry.value for entry in part.external_data if entry.key == "location"), "another file")
            raise TrustError(f"the network would read its tensor {part.name!r:.80} from {file!r:.200}", _SELF_CONTAINED)
        if isinstance(part, onnx.NodeProto) and part.op_type == "EPContext":
            raise TrustError(f"the network would run the compiled part {part.name!r:.80}", _SELF_CONTAINED)
    return model


_SELF_CONTAINED = "clickfleet's networks contain all their weights: do not use this one, or export it again"


def _parts(message: Any) -> Iterator[Any]:
    """Yield a message and all messages inside it, at any depth: subgraphs, functions, attributes, sparse tensors."""
    waiting = [message]
    while waiting:
        part = waiting.pop()
        yield part
        for field, value in part.ListFields():
            if field.message_type is not None:
                waiting += [value] if hasattr(value, "ListFields") else list(value)


def _runtime() -> Any:
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise MissingError("onnxruntime", "serve") from None
    return onnxruntime
