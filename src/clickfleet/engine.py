"""What computes a network: the one place where a session of ONNX Runtime is made, and what may be chosen about it.

>>> Engine("int8", threads=2).int8
True
>>> Engine("CUDA", threads=1, graph="most")
Traceback (most recent call last):
    ...
clickfleet.errors.ConfigError: graph optimisation 'most' is not known
  choose off, basic, extended or all
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

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
GraphLevel = Literal["off", "basic", "extended", "all"]


@dataclass(frozen=True)
class Engine:
    """A way to run the ONNX graph of a network."""

    name: str = "onnx"
    """onnx; int8: its matrices quantised; or a provider of ONNX Runtime, such as CUDA or CUDAExecutionProvider."""
    threads: int = 1
    """Threads of one run. Who scores by several threads or processes at once wants one."""
    graph: str = "all"
    """How far ONNX Runtime rewrites the graph: off, basic, extended or all."""
    arena: bool = True
    """Whether memory is kept for the next run, instead of given back."""

    def __post_init__(self) -> None:
        if self.graph not in LEVELS:
            raise ConfigError(f"graph optimisation {self.graph!r} is not known", "choose off, basic, extended or all")
        if self.threads < 1:
            raise ConfigError(f"an engine needs at least one thread, not {self.threads}")

    @property
    def int8(self) -> bool:
        return self.name == "int8"

    @property
    def provider(self) -> str:
        """The provider of ONNX Runtime; one that is not there is refused by name."""
        if self.name in ("onnx", "int8"):
            return CPU
        wanted = self.name.lower().removesuffix("executionprovider")
        present: list[str] = _runtime().get_available_providers()
        known = {name.lower().removesuffix("executionprovider"): name for name in present}
        if wanted not in known:
            raise ConfigError(
                f"there is no engine {self.name!r} here", f"choose onnx, int8 or one of {', '.join(known.values())}"
            )
        return known[wanted]

    def session(self, graph: bytes) -> Any:
        """The graph, ready to run; what runs it is what was asked for."""
        return self.open(quantised(graph) if self.int8 else graph)

    def open(self, graph: bytes) -> Any:
        """The same for a graph that is quantised already, where that is wanted."""
        ort = _runtime()
        provider = self.provider
        options = self.options()
        parse(graph)
        try:
            run = ort.InferenceSession(graph, options, providers=_order(provider))
        except Exception as error:  # its errors have no common class
            reason = str(error).partition("\n")[0][:200]
            raise CheckpointError(
                f"the network's graph (dense.onnx) cannot be opened: {reason}", "export or publish the model again"
            ) from error
        if provider not in run.get_providers():
            raise ConfigError(
                f"{provider} does not start here", "its libraries are missing or there is no such device; see its log"
            )
        return run

    def options(self) -> Any:
        """Of a session: threads sleep while they wait, as a spinning one would steal a core from its neighbours."""
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
    """Providers of ONNX Runtime besides the CPU: those that are installed, and those that are not."""
    ort = _runtime()
    present = [name for name in ort.get_available_providers() if name != CPU]
    return present, [name for name in ort.get_all_providers() if name not in (*present, CPU)]


def soil(session: Any, given: Mapping[str, NDArray[np.float32]], rows: int = 64) -> None:
    """Fill the memory of a new session with NaN, so that a result which depends on old memory fails the check after it.

    A new session's memory is mostly zeros, and a graph that reads it would pass by luck. `rows` must be several times
    those of the check.
    """
    session.run(None, {name: np.full((rows, *x.shape[1:]), np.nan, np.float32) for name, x in given.items()})


@lru_cache(maxsize=1)
def quantised(graph: bytes) -> bytes:
    """The network with its matrices as 8-bit integers; inputs are quantised as they come."""
    import logging
    import tempfile

    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = parse(graph)
    del model.graph.value_info[:]  # the shapes of the matrices change
    with tempfile.TemporaryDirectory(prefix="clickfleet-int8-") as folder:
        small = Path(folder) / "int8.onnx"
        logging.disable(logging.WARNING)  # it recommends a preparation that changes nothing here
        try:
            quantize_dynamic(model, small, weight_type=QuantType.QInt8)
        finally:
            logging.disable(logging.NOTSET)
        return small.read_bytes()


def parse(graph: bytes) -> Any:
    """The ONNX model in these bytes. One that wants to read other files, for weights or compiled parts, is refused."""
    import onnx

    try:
        model = onnx.load_from_string(graph)
    except Exception as error:  # protobuf's own kinds, which differ between its versions
        raise CheckpointError(
            f"the network's graph (dense.onnx) is broken: {error}", "export or publish the model again"
        ) from error
    for part in _parts(model):
        if isinstance(part, onnx.TensorProto) and (part.external_data or part.data_location):
            where = next((one.value for one in part.external_data if one.key == "location"), "another file")
            raise TrustError(f"the network wants to read its tensor {part.name!r:.80} from {where!r:.200}", _ALONE)
        if isinstance(part, onnx.NodeProto) and part.op_type == "EPContext":
            raise TrustError(f"the network wants to run the compiled part {part.name!r:.80}", _ALONE)
    return model


_ALONE = "a network of ours holds all of its weights: do not use this one, or export it again"


def _parts(message: Any) -> Iterator[Any]:
    """Every message inside one, at any depth: subgraphs, functions, attributes, sparse tensors."""
    waiting = [message]
    while waiting:
        one = waiting.pop()
        yield one
        for field, value in one.ListFields():
            if field.message_type is not None:
                waiting += [value] if hasattr(value, "ListFields") else list(value)


def _order(provider: str) -> list[str]:
    return [provider] if provider == CPU else [provider, CPU]


def _runtime() -> Any:
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise MissingError("onnxruntime", "serve") from None
    return onnxruntime
