"""The Open Inference Protocol v2: named tensors to Batch, outputs to tensors. REST (JSON, binary tensors) and gRPC share it.

A request has one of two forms. Raw: one tensor per input, [rows] or [rows, values]. An input with any number of values, such as that
of a history, can also be [N], all values one after another, with `NAME.lengths` [rows]; or [rows, values] with `NAME.lengths`, which
leaves out the padding. Encoded, which needs no transform: `dense` FP32 [rows, F] and `keys` UINT64 [rows, C], where C counts the
slots and the inputs of histories. If a column has several keys or none, `keys` is [N] with `offsets` INT64 [rows·C + 1]. If keys have
values, `values` is FP32 [N].

The outputs are those of the network. With several labels, the score of each is one more output, by its name.
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
MAX_VALUES = 65536
"""Maximum of values per row in a tensor [rows, values]."""
LENGTHS = ".lengths"
"""Ends the name of the input with the numbers of values per row of another input."""
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
        flat = self.flat()
        types = set(map(type, flat))
        if not types <= _NUMBER_TYPES:
            raise ServeError(f"{self.name}: the data must be numbers")
        if float in types and np.dtype(kind).kind in "ui" and not all(float(item).is_integer() for item in flat):
            raise ServeError(f"{self.name}: the data does not fit {self.datatype}")
        try:
            return np.array(flat, kind).reshape(self.shape)
        except (OverflowError, ValueError, TypeError):
            raise ServeError(f"{self.name}: the data does not fit {self.datatype}") from None

    def column(self, width: int) -> Any:
        if self.datatype != "BYTES" and self.datatype not in NUMBERS:
            raise _unknown_datatype(self.name, self.datatype)
        return _core.RequestColumn.of_list(self.flat(), width)

    def flat(self) -> list[Any]:
        """Return the values in one list."""
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


AnyTensor = RawTensor | ListTensor


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


def read(body: bytes | memoryview, header_length: int | None) -> tuple[InferRequest, list[AnyTensor]]:
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
    tensors: list[AnyTensor] = []
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


def _is_encoded(by_name: Mapping[str, AnyTensor], version: Version) -> bool:
    """Return whether inputs have the encoded form, which needs no transform."""
    names = version.fields.names
    if "keys" in by_name and all(name in ENCODED for name in by_name) and not set(by_name) <= set(names):
        return True
    return "dense" in by_name and "dense" not in names and not version.schema.slots


def features_of(tensors: Sequence[AnyTensor], version: Version) -> dict[str, AnyTensor] | None:
    """Return the tensors of a valid request by the names of the model's inputs; None if they are encoded, or come with lengths."""
    by_name = {tensor.name: tensor for tensor in tensors}
    if any(name.endswith(LENGTHS) and name not in version.fields.names for name in by_name):
        return None
    return None if _is_encoded(by_name, version) else _by_our_names(by_name, version)


def batch(tensors: Sequence[AnyTensor], version: Version, max_rows: int) -> Batch:
    """Convert the tensors of a request into a batch."""
    by_name = {tensor.name: tensor for tensor in tensors}
    if len(by_name) != len(tensors):
        raise ServeError("an input appears twice")
    if not by_name:
        raise ServeError("the request has no inputs", f"inputs: {', '.join(version.fields.names)}")
    if _is_encoded(by_name, version):
        return _encoded_batch(by_name, version, max_rows)
    lengths = {
        name.removesuffix(LENGTHS): by_name.pop(name)
        for name in list(by_name)
        if name.endswith(LENGTHS) and name not in version.fields.names
    }
    by_name, lengths = _by_our_names(by_name, version), version.aliases.inputs(lengths)
    for name in lengths:
        if name not in version.fields.jagged:
            raise ServeError(f"{name}{LENGTHS}: the model has no input {name!r} with any number of values per row")
        if name not in by_name:
            raise ServeError(f"{name}{LENGTHS}: the request has no input {name!r}")
    columns, rows = {}, -1
    for name, tensor in by_name.items():
        columns[name], found = _column(name, tensor, lengths.get(name), version, max_rows)
        rows = found if rows < 0 else rows
        if found != rows:
            raise ServeError(f"{name}: expected {rows} rows like the other inputs, not {found}")
    return version.fields.columns(columns, rows)


def _column(
    name: str,
    tensor: AnyTensor,
    lengths: AnyTensor | None,
    version: Version,
    max_rows: int,
) -> tuple[Any, int]:
    """Return the values of an input, and the number of rows."""
    shape = tensor.shape
    if not shape or len(shape) > 2:
        raise ServeError(f"{name}: the shape must be [rows] or [rows, values], not {list(shape)}")
    counts = None if lengths is None else _lengths(lengths)
    padded = len(shape) == 2
    rows, width = len(counts) if counts is not None and not padded else shape[0], shape[1] if padded else 1
    check_rows(rows, max_rows)
    least = 0 if name in version.fields.jagged else 1
    if not least <= width <= MAX_VALUES:
        raise ServeError(f"{name}: {width} values per row; from {least} to {MAX_VALUES} are allowed")
    column = tensor.column(width)
    if column.size != tensor.count:
        raise ServeError(f"{name}: {column.size} values do not match the shape {list(shape)}")
    if counts is None and not width:
        counts = np.zeros(rows, np.int64)
    if counts is not None:
        try:
            column.split(counts, padded)
        except ValueError as error:
            raise ServeError(f"{name}{LENGTHS}: {error}") from None
    return column, rows


def _lengths(tensor: AnyTensor) -> NDArray[np.int64]:
    """Return the numbers of values per row."""
    if len(tensor.shape) != 1 or tensor.datatype in ("BYTES", "BOOL"):
        raise ServeError(
            f"{tensor.name}: expected integers of the shape [rows], not {tensor.datatype} {list(tensor.shape)}"
        )
    counts = tensor.array()
    if counts.dtype.kind not in "ui":
        raise ServeError(f"{tensor.name}: expected integers, not {tensor.datatype}")
    if counts.max(initial=0) > MAX_SIZE:
        raise ServeError(f"{tensor.name}: a length exceeds {MAX_SIZE}")
    return np.ascontiguousarray(counts, np.int64)


def _by_our_names(by_name: dict[str, AnyTensor], version: Version) -> dict[str, AnyTensor]:
    """Return the tensors under the names of the model's inputs. One of all dense values may become several."""
    parts: dict[str, AnyTensor] = {}
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


def _encoded_batch(by_name: Mapping[str, AnyTensor], version: Version, max_rows: int) -> Batch:
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
    slots, width = len(version.schema.key_columns), len(version.schema.dense)
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
        return [(name, binary) for name in version.output_names]
    pick_outputs([output.name for output in request.outputs], version)
    return [(output.name, bool(output.parameters.get("binary_data", binary))) for output in request.outputs]


def pick_outputs(names: Sequence[str], version: Version) -> list[str]:
    """Return the requested outputs. Each must be known and named only once, which bounds the reply."""
    known = version.output_names
    names = list(names[: len(known) + 1])
    picked = pick([version.aliases.output(name) for name in names], known, "output")
    if len(set(picked)) < len(picked):
        raise ServeError("an output is requested twice")
    return names


def output_of(name: str, outputs: Outputs, version: Version) -> NDArray[np.float32]:
    """Return the values of a requested output. Clients of Paddle's names expect one column."""
    ours = version.aliases.output(name)
    values = version.output(ours, outputs)
    return values if ours == name else values.reshape(len(values), -1)


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
    optional_inputs: list[TensorMetadata]
    """Lengths of inputs with a different number of values in every row."""
    ready_inputs: list[TensorMetadata]
    key_columns: list[str]
    """What each column of `keys` holds: slots, then the inputs of histories."""


STANDARD = ("name", "versions", "platform", "inputs", "outputs")
"""What the protocol defines of it, and gRPC has a place for."""


def metadata(version: Version) -> ModelMetadata:
    """Return the names, datatypes and shapes of the model's tensors."""
    inputs: list[TensorMetadata] = []
    optional: list[TensorMetadata] = []
    for item in inputs_of(version.schema):
        shape = [-1] if item["values"] == 1 else [-1, -1 if item["values"] == "any" else item["values"]]
        inputs.append(
            {"name": item["name"], "datatype": "FP32" if item["kind"] == "number" else "BYTES", "shape": shape}
        )
        if item["values"] == "any" and (lengths := item["name"] + LENGTHS) not in version.fields.names:
            optional.append({"name": lengths, "datatype": "INT64", "shape": [-1]})
    shapes = {
        item.name: [n if isinstance(n, int) else -1 for n in item.shape] for item in version.session.get_outputs()
    }
    columns = version.schema.key_columns
    ready: list[TensorMetadata] = [
        {"name": "dense", "datatype": "FP32", "shape": [-1, len(version.schema.dense)]},
        {"name": "keys", "datatype": "UINT64", "shape": [-1, len(columns)]},
    ]
    if any(slot.multi for slot in columns):
        ready[1]["shape"] = [-1]
        ready.append({"name": "offsets", "datatype": "INT64", "shape": [-1]})
    if version.schema.values:
        ready.append({"name": "values", "datatype": "FP32", "shape": [-1]})
    return {
        "name": version.identity.name,
        "versions": [version.version],
        "platform": "clickfleet",
        "inputs": inputs,
        "outputs": [
            {"name": name, "datatype": "FP32", "shape": shapes.get(name, [-1])} for name in version.output_names
        ],
        "optional_inputs": optional,
        "ready_inputs": ready,
        "key_columns": [slot.name for slot in columns],
    }
