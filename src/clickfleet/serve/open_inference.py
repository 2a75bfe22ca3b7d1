"""The Open Inference Protocol v2: named tensors to Batch, outputs to tensors. REST (JSON, binary tensors) and gRPC share it.

A request has one of two forms. Raw: one tensor per input, [rows] or [rows, values]. Encoded, which needs no transform: `dense` FP32
[rows, F] and `keys` UINT64 [rows, S]. If a slot has several keys or none, `keys` is [N] with `offsets` INT64 [rows·S + 1].
If keys have values, `values` is FP32 [N].
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.data.batch import Batch
from clickfleet.errors import ServeError
from clickfleet.serve.features import inputs_of, pick
from clickfleet.serve.predictor import Outputs, Version

NUMBERS: dict[str, type[np.number[Any]]] = {
    "BOOL": np.uint8,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}
ENCODED = {"dense": (2,), "keys": (1, 2), "offsets": (1, 2), "values": (1, 2)}
"""Inputs of the encoded form, with the number of dimensions each may have."""
MAX_INPUTS = 10_000
MAX_DIMENSIONS = 8
MAX_SIZE = 1 << 31
"""Maximum of one dimension. The bytes of a body bound the product of all."""
MAX_TEXT = 1024
"""Maximum characters of a name, datatype or id."""
_NUMBER_TYPES = {int, float, bool}


Parameters = dict[str, Any]


class Output(msgspec.Struct):
    name: str
    parameters: Parameters = {}


class Tensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | None = None
    parameters: Parameters = {}


class InferRequest(msgspec.Struct):
    inputs: list[Tensor]
    id: str = ""
    outputs: list[Output] | None = None
    parameters: Parameters = {}


_decoder = msgspec.json.Decoder(InferRequest)


class RawTensor:
    """A tensor given as bytes."""

    __slots__ = ("content", "count", "datatype", "name", "shape")

    def __init__(self, name: str, datatype: str, shape: Sequence[int], content: bytes | memoryview) -> None:
        self.name, self.datatype, self.shape, self.content = name, datatype, shape, content
        self.count = _count(name, datatype, shape)

    def array(self) -> NDArray[Any]:
        kind = NUMBERS.get(self.datatype)
        if kind is None:
            raise _unknown_datatype(self.name, self.datatype)
        if len(self.content) != self.count * np.dtype(kind).itemsize:
            raise ServeError(f"{self.name}: {len(self.content)} bytes do not match the shape {list(self.shape)}")
        return np.frombuffer(self.content, kind).reshape(self.shape)

    def column(self, width: int) -> Any:
        if self.datatype == "BYTES":
            try:
                return _core.RequestColumn.of_texts(bytes(self.content), width)
            except ValueError as error:
                raise ServeError(f"{self.name}: {error}") from None
        return _number_column(self.array(), width)


class ListTensor:
    """A tensor given as a flat or nested list."""

    __slots__ = ("count", "data", "datatype", "name", "shape")

    def __init__(self, name: str, datatype: str, shape: Sequence[int], data: Sequence[Any]) -> None:
        self.name, self.datatype, self.shape, self.data = name, datatype, shape, data
        self.count = _count(name, datatype, shape)

    def array(self) -> NDArray[Any]:
        kind = NUMBERS.get(self.datatype)
        if kind is None:
            raise _unknown_datatype(self.name, self.datatype)
        flat = self._flat()
        if not set(map(type, flat)) <= _NUMBER_TYPES:
            raise ServeError(f"{self.name}: the data must be numbers")
        try:
            return np.array(flat, kind).reshape(self.shape)
        except (OverflowError, ValueError, TypeError):
            raise ServeError(f"{self.name}: the data does not fit {self.datatype}") from None

    def column(self, width: int) -> Any:
        if self.datatype != "BYTES" and self.datatype not in NUMBERS:
            raise _unknown_datatype(self.name, self.datatype)
        return _core.RequestColumn.of_list(self._flat(), width)

    def _flat(self) -> list[Any]:
        flat = list(self.data)
        for _ in self.shape:
            if not flat or not isinstance(flat[0], list):
                break
            if not all(isinstance(part, list) for part in flat):
                raise ServeError(f"{self.name}: the data is nested unevenly")
            flat = [item for part in flat for item in part]
        if len(flat) != self.count:
            raise ServeError(f"{self.name}: {len(flat)} values do not match the shape {list(self.shape)}")
        return flat


def _number_column(array: NDArray[Any], width: int) -> Any:
    flat = array.reshape(-1)
    if flat.dtype.kind == "f":
        flat = flat if flat.dtype in (np.float32, np.float64) else flat.astype(np.float32)
    elif flat.dtype != np.uint64:
        flat = flat.astype(np.int64, copy=False)
    return _core.RequestColumn.of_numbers(np.ascontiguousarray(flat), width)


def _unknown_datatype(name: str, datatype: str) -> ServeError:
    return ServeError(f"{name}: unsupported datatype {datatype!r}", f"datatypes: BYTES, {', '.join(NUMBERS)}")


def _count(name: str, datatype: str, shape: Sequence[int]) -> int:
    """Return the number of values of a shape. Check every bound before multiplying or printing."""
    if len(name) > MAX_TEXT or len(datatype) > MAX_TEXT:
        raise ServeError(f"a tensor's name or datatype exceeds {MAX_TEXT} characters")
    if len(shape) > MAX_DIMENSIONS:
        raise ServeError(f"{name}: the shape has {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
    count = 1
    for n in shape:
        if not 0 <= n <= MAX_SIZE:
            raise ServeError(f"{name}: the shape has a dimension that is negative or larger than {MAX_SIZE}")
        count *= n
    return count


def read(body: bytes | memoryview, header_length: int | None) -> tuple[InferRequest, list[RawTensor | ListTensor]]:
    """Return the envelope of a REST request and its tensors."""
    view = memoryview(body)
    if header_length is not None and not 0 <= header_length <= len(view):
        raise ServeError("Inference-Header-Content-Length is longer than the body")
    try:
        request = _decoder.decode(view if header_length is None else view[:header_length])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ServeError(f"cannot parse the request: {error}") from None
    check_size(len(request.inputs), request.id)
    at = len(view) if header_length is None else header_length
    tensors: list[RawTensor | ListTensor] = []
    for item in request.inputs:
        size = item.parameters.get("binary_data_size")
        if size is None:
            if item.data is None:
                raise ServeError(f"{item.name}: the tensor has no data")
            tensors.append(ListTensor(item.name, item.datatype, item.shape, item.data))
            continue
        if type(size) is not int or not 0 <= size <= len(view) - at:
            raise ServeError(f"{item.name}: binary_data_size exceeds the body")
        tensors.append(RawTensor(item.name, item.datatype, item.shape, view[at : at + size]))
        at += size
    if at != len(view):
        raise ServeError(f"the body has {len(view) - at} bytes after the last tensor")
    return request, tensors


def check_size(inputs: int, request_id: str) -> None:
    if inputs > MAX_INPUTS:
        raise ServeError(f"{inputs} inputs exceed the server's limit of {MAX_INPUTS}")
    if len(request_id) > MAX_TEXT:
        raise ServeError(f"the id of the request exceeds {MAX_TEXT} characters")


def batch(tensors: Sequence[RawTensor | ListTensor], version: Version, max_rows: int) -> Batch:
    """Convert the tensors of a request into a batch."""
    by_name = {tensor.name: tensor for tensor in tensors}
    if len(by_name) != len(tensors):
        raise ServeError("an input appears twice")
    if not by_name:
        raise ServeError("the request has no inputs", f"inputs: {', '.join(version.fields.names)}")
    if "keys" in by_name and all(name in ENCODED for name in by_name) and not set(by_name) <= set(version.fields.names):
        return _encoded_batch(by_name, version, max_rows)
    if "dense" in by_name and "dense" not in version.fields.names and not version.schema.slots:
        return _encoded_batch(by_name, version, max_rows)
    by_name = _by_our_names(by_name, version)
    rows = 0
    columns = {}
    for name, tensor in by_name.items():
        if not tensor.shape or len(tensor.shape) > 2:
            raise ServeError(f"{name}: the shape must be [rows] or [rows, values], not {list(tensor.shape)}")
        rows, width = tensor.shape[0], tensor.shape[1] if len(tensor.shape) == 2 else 1
        check_rows(rows, max_rows)
        if width < 1 or width > 65536:
            raise ServeError(f"{name}: {width} values per row; from 1 to 65536 are allowed")
        columns[name] = tensor.column(width)
    for name, tensor in by_name.items():
        if tensor.shape[0] != rows or columns[name].size != tensor.count:
            raise ServeError(f"{name}: expected {rows} rows like the other inputs")
    return version.fields.columns(columns, rows)


def _by_our_names(by_name: dict[str, RawTensor | ListTensor], version: Version) -> dict[str, RawTensor | ListTensor]:
    """Return the tensors under the names of the model's inputs. One of all dense values may become several."""
    parts: dict[str, RawTensor | ListTensor] = {}
    for name, tensor in by_name.items():
        if not version.aliases.is_split(name):
            parts[name] = tensor
            continue
        if len(tensor.shape) != 2:
            raise ServeError(f"{name}: the shape must be [rows, values], not {list(tensor.shape)}")
        values = tensor.array()
        for group, first, end in version.aliases.parts(name, tensor.shape[1]):
            some = values[:, first:end].reshape(-1).tolist()
            parts[group] = ListTensor(group, "FP32", [tensor.shape[0], end - first], some)
    return version.aliases.inputs(parts)


def _encoded_batch(by_name: Mapping[str, RawTensor | ListTensor], version: Version, max_rows: int) -> Batch:
    for name, tensor in by_name.items():
        if name not in ENCODED:
            raise version.fields.unknown(name)
        if len(tensor.shape) not in ENCODED[name]:
            raise ServeError(f"{name}: invalid shape {list(tensor.shape)}")
    arrays = {name: tensor.array() for name, tensor in by_name.items()}
    keys = arrays.get("keys", np.empty((len(arrays.get("dense", ())), 0), np.uint64))
    if keys.dtype.kind not in "ui":
        raise ServeError("keys must be UINT64")
    offsets = arrays.get("offsets")
    if offsets is not None:
        if offsets.dtype.kind not in "ui":
            raise ServeError("offsets must be INT64")
        offsets = np.ascontiguousarray(offsets.reshape(-1), np.int64)
    slots, width = len(version.schema.slots), len(version.schema.dense)
    if "dense" in arrays:
        dense = arrays["dense"]
        check_rows(len(dense), max_rows)
    else:
        if width:
            raise ServeError("input 'dense' is missing", f"its shape is [rows, {width}]")
        rows = len(keys) if offsets is None else (len(offsets) - 1) // max(slots, 1)
        check_rows(rows, max_rows)
        dense = np.empty((rows, 0), np.float32)
    values = arrays.get("values")
    with np.errstate(over="ignore"):
        return version.fields.encoded(
            np.ascontiguousarray(dense, np.float32),
            np.ascontiguousarray(keys).astype(np.uint64, copy=False),
            offsets,
            None if values is None else np.ascontiguousarray(values.reshape(-1), np.float32),
        )


def check_rows(rows: int, max_rows: int) -> None:
    if rows < 1:
        raise ServeError("the request has no rows")
    if rows > max_rows:
        raise ServeError(f"{rows} rows exceed the server's limit of {max_rows}", "send several smaller requests")


def requested_outputs(request: InferRequest, version: Version) -> list[tuple[str, bool]]:
    """Return the requested outputs (default: all), each with whether it is sent as binary."""
    binary = bool(request.parameters.get("binary_data_output", False))
    if not request.outputs:
        return [(name, binary) for name in version.outputs]
    pick_outputs([output.name for output in request.outputs], version)
    return [(output.name, bool(output.parameters.get("binary_data", binary))) for output in request.outputs]


def pick_outputs(names: Sequence[str], version: Version) -> list[str]:
    """Return the requested outputs. Each must be known and named only once, which bounds the reply."""
    known = version.outputs
    names = list(names[: len(known) + 1])
    picked = pick([version.aliases.output(name) for name in names], known, "output")
    if len(set(picked)) < len(picked):
        raise ServeError("an output is requested twice")
    return names


def output_of(name: str, outputs: Outputs, version: Version) -> NDArray[np.float32]:
    """Return the values of a requested output. Clients of Paddle's names expect one column."""
    ours = version.aliases.output(name)
    return outputs[ours] if ours == name else outputs[ours].reshape(len(outputs[ours]), -1)


def reply(
    request_id: str, version: Version, outputs: Outputs, names: Sequence[tuple[str, bool]]
) -> tuple[bytes, int | None]:
    """Return the body, and the length of its JSON part if binary tensors follow."""
    tensors, tail = [], []
    for name, binary in names:
        values = output_of(name, outputs, version)
        tensor: dict[str, object] = {"name": name, "datatype": "FP32", "shape": values.shape}
        if binary:
            tensor["parameters"] = {"binary_data_size": values.nbytes}
            tail.append(values.tobytes())
        else:
            tensor["data"] = np.ascontiguousarray(values.reshape(-1))
        tensors.append(tensor)
    head: dict[str, object] = {
        "model_name": version.identity.name,
        "model_version": version.version,
        "outputs": tensors,
    }
    if request_id:
        head["id"] = request_id
    text = orjson.dumps(head, option=orjson.OPT_SERIALIZE_NUMPY)
    return (text + b"".join(tail), len(text)) if tail else (text, None)


class TensorMetadata(TypedDict):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(TypedDict):
    """The reply of `/v2/models/NAME`. A request uses either `inputs` or `ready_inputs`, the encoded form."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    ready_inputs: list[TensorMetadata]


def metadata(version: Version) -> ModelMetadata:
    """Return the names, datatypes and shapes of the model's tensors."""
    inputs: list[TensorMetadata] = []
    for item in inputs_of(version.schema):
        shape = [-1] if item["values"] == 1 else [-1, -1 if item["values"] == "any" else item["values"]]
        inputs.append(
            {"name": item["name"], "datatype": "FP32" if item["kind"] == "number" else "BYTES", "shape": shape}
        )
    return {
        "name": version.identity.name,
        "versions": [version.version],
        "platform": "clickfleet",
        "inputs": inputs,
        "outputs": [{"name": name, "datatype": "FP32", "shape": [-1]} for name in version.outputs],
        "ready_inputs": [
            {"name": "dense", "datatype": "FP32", "shape": [-1, len(version.schema.dense)]},
            {"name": "keys", "datatype": "UINT64", "shape": [-1, len(version.schema.slots)]},
        ],
    }
