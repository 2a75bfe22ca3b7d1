"""Export a network to ONNX once, and replace its weights whenever they change.

Inputs are dense[B, F], first[B, S] and factors[B, S, D]. For each history NAME that the model reads there are also
NAME.factors[U, L, K, D], NAME.length[U] and NAME.row[B], the history of each row. Outputs are `score` and `logit`, [B] or, for
several labels, [B, T], and layers by their name in the model. Every weight is an initializer with its name in torch, so that
`read_weights` can return them.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import inliner, numpy_helper, shape_inference
from torch import Tensor, nn

from clickfleet.errors import CheckpointError, ConfigError, MissingError, TrainingError
from clickfleet.store import atomic
from clickfleet.store.onnx import Engine, fill_with_nan, parse
from clickfleet.training.losses import predictions
from clickfleet.training.network import Events, HistoryShape, Inputs, Model, Shape

OUTPUTS = ("score", "logit")
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16)


class Kept:
    """The dense columns, key columns (`slots`) and histories that stay inputs.

    `fill` replaces the other dense columns, and zeros the other slots. An omitted history has no events.
    """

    def __init__(
        self, dense: Sequence[int], slots: Sequence[int], fill: Sequence[float], histories: Sequence[str] = ()
    ) -> None:
        self.dense, self.slots, self.fill, self.histories = tuple(dense), tuple(slots), tuple(fill), tuple(histories)

    def pooled(self, shape: Shape) -> tuple[int, ...]:
        """Return the key columns that a model sees pooled."""
        return tuple(column for column in self.slots if column < shape.slots)


class Graph:
    """The exported network of a model, to be written with any weights. The file `cache` saves a resumed run the export."""

    def __init__(
        self,
        model: Model,
        shape: Shape,
        outputs: Sequence[str] = OUTPUTS,
        kept: Kept | None = None,
        cache: Path | None = None,
    ) -> None:
        model = copy.deepcopy(model).cpu().eval()
        self.outputs = tuple(outputs)
        known = [*OUTPUTS, *_layers(model, shape)]
        for name in self.outputs:
            if name not in known:
                raise ConfigError(f"the model has no output {name}", f"outputs: {', '.join(known)}")
        if len(set(self.outputs)) < len(self.outputs) or not self.outputs:
            raise ConfigError("name at least one output, and each only once")
        self._module = _Exported(model, shape, self.outputs, kept).eval()
        self._shape, self.reads_histories = shape, model.reads_histories
        cached = None if cache is None else _read(cache)
        if cached is not None:
            self._proto = cached
            try:
                self.bytes(model.state_dict())
                self.check(kept)
            except Exception:  # the cache belongs to another model or version: export again
                cached = None
        if cached is None:
            self._proto = _export(self._module, _example(shape, kept), self.outputs)
            self.check(kept)
            if cache is not None:
                with suppress(CheckpointError):  # the disk is full: the next run exports again
                    atomic.write_file(cache, self._proto.SerializeToString(deterministic=True))

    def bytes(self, weights: Mapping[str, Tensor]) -> bytes:
        """Return the content of the ONNX file with these parameters and buffers."""
        for tensor in self._proto.graph.initializer:
            name = tensor.name.removeprefix("model.")
            if name in weights:
                tensor.CopyFrom(numpy_helper.from_array(weights[name].detach().contiguous().numpy(), tensor.name))
        return bytes(self._proto.SerializeToString(deterministic=True))

    def check(self, kept: Kept | None) -> None:
        """Compare the outputs with torch's if ONNX Runtime is installed, because torch's exporter has had errors."""
        refuse_empty(self._proto)
        try:
            session = Engine().session(self._proto.SerializeToString())
        except MissingError:
            return
        used = [item.name for item in session.get_inputs()]
        fill_with_nan(session, _arrays(_example(self._shape, kept), used))
        for rows in (3, 1, 7):
            example = _example(self._shape, kept, rows)
            computed = session.run(list(self.outputs), _arrays(example, used))
            with torch.inference_mode():
                expected = [out.numpy() for out in self._module(*example.tensors().values())]
            for name, actual, right in zip(self.outputs, computed, expected, strict=True):
                if not np.allclose(actual, right, rtol=1e-4, atol=1e-5):
                    raise TrainingError(
                        f"the ONNX graph computes a different {name} than the model",
                        "please report this together with the file of the model",
                    )

    @torch.inference_mode()
    def run(self, weights: Mapping[str, Tensor], x: Inputs) -> list[NDArray[np.float32]]:
        """Return the outputs of torch for these inputs."""
        self._module.model.load_state_dict(weights)
        return [out.numpy() for out in self._module(*x.tensors().values())]


def read_weights(graph: bytes) -> dict[str, Tensor]:
    """Return the parameters, buffers and constants of an ONNX file, by name."""
    return {
        tensor.name.removeprefix("model."): torch.from_numpy(numpy_helper.to_array(tensor).copy())
        for tensor in parse(graph).graph.initializer
    }


class _Exported(nn.Module):
    """The model with separate tensors as inputs, as in the graph."""

    def __init__(self, model: Model, shape: Shape, outputs: tuple[str, ...], kept: Kept | None) -> None:
        super().__init__()
        self.names = list(_example(shape, kept).tensors())
        self.model, self.shape, self.outputs, self.kept = model, shape, outputs, kept
        self._seen: dict[str, Tensor] = {}
        for name in outputs:
            if name not in OUTPUTS:
                model.get_submodule(name).register_forward_hook(self._keep(name))

    def _keep(self, name: str) -> Any:
        def hook(layer: nn.Module, args: Any, out: Tensor) -> None:
            self._seen[name] = out

        return hook

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        x = Inputs.of(dict(zip(self.names, tensors, strict=True)))
        logit = self.model(x if self.kept is None else self._all_inputs(self.kept, x))
        outputs = {"score": predictions(logit, self.shape.tasks), "logit": logit, **self._seen}
        return tuple(outputs[name] for name in self.outputs)

    def _all_inputs(self, kept: Kept, x: Inputs) -> Inputs:
        """Return the inputs of the model, with the omitted columns filled in."""
        pooled = kept.pooled(self.shape)
        fill = torch.tensor(kept.fill, dtype=x.dense.dtype)
        slots = torch.zeros(self.shape.slots)
        histories = {
            history.name: x.histories.get(history.name, _no_events(history, self.shape.factors, x.dense))
            for history in self.shape.histories
        }
        return Inputs(
            _filled(x.dense, kept.dense, fill),
            _filled(x.first, pooled, slots),
            _filled(x.factors, pooled, slots.unsqueeze(1).expand(-1, self.shape.factors)),
            histories,
        )


def _no_events(history: HistoryShape, factors: int, dense: Tensor) -> Events:
    """Return a history without events for every row."""
    rows = torch.zeros_like(dense[:, :1]).squeeze(1).long() if dense.shape[1] else torch.zeros(len(dense)).long()
    return Events(torch.zeros(1, 1, len(history.slots), factors), torch.zeros(1).long(), rows)


def _filled(given: Tensor, places: Sequence[int], fill: Tensor) -> Tensor:
    """Return `fill` [n, …] for every row, with the columns at `places` replaced by `given` [B, k, …]."""
    if len(places) == len(fill):
        return given
    others = fill.expand(given.shape[0], *fill.shape)
    if not places:
        return others
    picked = [places.index(i) if i in places else len(places) + i for i in range(len(fill))]
    return torch.cat([given, others], 1).index_select(1, torch.tensor(picked))


def _example(shape: Shape, kept: Kept | None = None, rows: int = 3) -> Inputs:
    dense, slots = (shape.dense, shape.slots) if kept is None else (len(kept.dense), len(kept.pooled(shape)))
    generator = torch.Generator().manual_seed(rows)  # leaves the global generator to training
    sizes = (rows, dense), (rows, slots), (rows, slots, shape.factors)
    histories = {}
    for history in shape.histories:
        if kept is not None and history.name not in kept.histories:
            continue
        distinct = (rows + 1) // 2 if rows > 1 else 1  # two rows share a history
        length = torch.arange(distinct) % min(history.max, rows + 1) + (rows > 1)
        most = max(int(length.max()), 2 if rows == 3 else 1)  # the exporter takes an axis of 1 for a constant
        events = torch.rand((distinct, most, len(history.slots), shape.factors), generator=generator)
        events[torch.arange(most) >= length.unsqueeze(1)] = 0.0
        histories[history.name] = Events(events, length, torch.arange(rows) // 2)
    dense_, first, factors = (torch.rand(size, generator=generator) for size in sizes)
    return Inputs(dense_, first, factors, histories)


def refuse_empty(proto: onnx.ModelProto) -> None:
    """Reject a graph with an operator on an empty axis: in ONNX Runtime the result of some is undefined."""
    graph = shape_inference.infer_shapes(inliner.inline_local_functions(proto), data_prop=True).graph
    empty = {tensor.name for tensor in graph.initializer if tensor.data_type in _FLOATS and 0 in tensor.dims}
    for item in (*graph.input, *graph.value_info):
        kind = item.type.tensor_type
        if kind.elem_type in _FLOATS and any(
            axis.HasField("dim_value") and not axis.dim_value for axis in kind.shape.dim
        ):
            empty.add(item.name)
    for node in graph.node:
        touched = empty.intersection((*node.input, *node.output))
        if touched and node.op_type != "Shape":
            raise TrainingError(
                f"the network applies the operator {node.op_type} to {min(touched)}, which is empty; the result is undefined",
                "skip dense columns or slots that the schema does not have in the model's forward()",
            )


def _arrays(inputs: Inputs, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    tensors = inputs.tensors()
    return {name: tensors[name].numpy() for name in names}


def _read(cache: Path) -> onnx.ModelProto | None:
    try:
        return parse(cache.read_bytes())  # type: ignore[no-any-return]
    except Exception:  # missing or truncated
        return None


def _layers(model: Model, shape: Shape) -> list[str]:
    """Return the layers that compute one tensor per row."""
    names: set[str] = set()
    inputs = _example(shape, rows=4)  # with histories, no other axis has this size

    def note(name: str) -> Any:
        def hook(layer: nn.Module, args: Any, out: Any) -> None:
            if isinstance(out, Tensor) and out.ndim and len(out) == len(inputs.dense):
                names.add(name)

        return hook

    hooks = [layer.register_forward_hook(note(name)) for name, layer in model.named_modules() if name]
    with torch.inference_mode():
        model(inputs)
    for hook in hooks:
        hook.remove()
    return sorted(names)


def _export(module: nn.Module, example: Inputs, outputs: tuple[str, ...]) -> onnx.ModelProto:
    tensors, axes = example.tensors(), {"dense": {0: "batch"}, "first": {0: "batch"}, "factors": {0: "batch"}}
    for number, name in enumerate(example.histories):
        distinct, longest = f"histories_{number}", f"events_{number}"
        axes |= {
            f"{name}.factors": {0: distinct, 1: longest},
            f"{name}.length": {0: distinct},
            f"{name}.row": {0: "batch"},
        }
    noisy = logging.getLogger("torch.onnx")
    level = noisy.level
    noisy.setLevel(logging.ERROR)  # it warns that torchvision is missing
    try:
        with warnings.catch_warnings():  # torch's exporter warns about torch's code
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(
                module,
                tuple(tensors.values()),
                dynamo=True,
                verbose=False,
                optimize=False,  # folding would hide the weights
                input_names=list(tensors),
                output_names=outputs,
                dynamic_shapes=(tuple(axes[name] for name in tensors),),
            )
    finally:
        noisy.setLevel(level)
    proto: onnx.ModelProto = program.model_proto
    return _bare(proto)


def _bare(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Remove metadata that names files and versions of this machine."""
    proto.producer_name, proto.producer_version = "clickfleet", ""
    parts: list[Any] = [proto, proto.graph, *proto.functions]
    for part in parts[1:]:
        parts += [
            *part.node,
            *getattr(part, "value_info", ()),
            *getattr(part, "input", ()),
            *getattr(part, "output", ()),
        ]
    for part in parts + list(proto.graph.initializer):
        if hasattr(part, "metadata_props"):
            del part.metadata_props[:]
        if hasattr(part, "doc_string"):
            part.doc_string = ""
    return proto
