"""The calls of `paddle_serving_client` for programs written for Paddle Serving; a clickfleet server answers them over HTTP.

    from paddle_serving_client import Client

    client = Client()
    client.load_client_config("serving_client/serving_client_conf.prototxt")
    client.connect(["127.0.0.1:9393"])
    client.predict(feed={"C1": …, "dense_input": …}, fetch=["sigmoid_0.tmp_0"], batch=True)

`clickfleet migrate stand-in` provides the module. It needs no torch. Environment: CLICKFLEET_TOKEN is the token of the server.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickfleet.errors import ConfigError, DataError, ServeError
from clickfleet.paddlerec import client_config
from clickfleet.paddlerec.client_config import FLOAT, TEXT, ClientConfig, Variable
from clickfleet.serve.aliases import SCORES
from clickfleet.serve.client import Client, InferReply, UnreachableError

LOD = ".lod"
Rows = NDArray[Any] | list[list[Any]]
"""The values of an input: [rows, values], or a list per row if their numbers differ or they are texts."""


@dataclass
class TrafficVariant:
    """Servers that have the same model. A request goes to the next of them."""

    tag: str
    servers: list[Client]
    weight: float
    names: dict[str, str] = field(default_factory=dict)
    """The name of each variable at these servers."""
    turn: int = 0


class ServingClient:
    """The class `Client` of paddle_serving_client."""

    def __init__(self) -> None:
        self._connected: list[TrafficVariant] = []
        self.feed_names_: list[str] = []
        self.fetch_names_: list[str] = []
        self.rpc_timeout_ms = 200_000
        self._config: ClientConfig | None = None
        self._variants: list[tuple[str, list[str], float]] = []

    def load_client_config(self, model_config_path_list: str | Sequence[str]) -> None:
        """Read `serving_client_conf.prototxt`, or the one in a folder."""
        self._config = client_config.read(model_config_path_list)
        self.feed_names_ = [one.alias for one in self._config.feeds]
        self.fetch_names_ = [one.alias for one in self._config.fetches]

    def get_feed_names(self) -> list[str]:
        return self.feed_names_

    def get_fetch_names(self) -> list[str]:
        return self.fetch_names_

    def set_rpc_timeout_ms(self, rpc_timeout: int) -> None:
        if not isinstance(rpc_timeout, int) or rpc_timeout < 1:
            raise ConfigError(f"rpc_timeout must be a number of milliseconds, not {rpc_timeout!r}")
        self.rpc_timeout_ms = rpc_timeout

    def use_key(self, key_filename: str) -> None:
        raise ConfigError(
            "encrypted models are not supported", "serve with --tls-cert and connect to https://host:port"
        )

    def add_variant(self, tag: str, cluster: Sequence[str], variant_weight: float) -> None:
        """Add servers that receive a share of the requests, in proportion to their weight."""
        if float(variant_weight) <= 0:
            raise ConfigError(f"the weight of variant {tag!r} must be positive, not {variant_weight}")
        self._variants.append((tag, list(cluster), float(variant_weight)))

    def connect(self, endpoints: Sequence[str] | None = None, encryption: bool = False) -> None:
        """Connect to servers, and compare their inputs and outputs with the client configuration."""
        config = self.config
        if encryption:
            self.use_key("")
        if isinstance(endpoints, str):
            endpoints = [endpoints]
        if endpoints and self._variants:
            raise ConfigError("connect() has endpoints, and add_variant() was called", "use one of them")
        variants = self._variants or [("default", list(endpoints or []), 1.0)]
        if not all(places for _, places, _ in variants):
            raise ConfigError("there is no address to connect to", 'give connect(["host:port"])')
        self.release()
        self._connected = [TrafficVariant(tag, list(map(self._server, at)), weight) for tag, at, weight in variants]
        for variant in self._connected:
            variant.names = server_names(config, self._ask(variant, Client.model), variant.servers[0].url)

    def _server(self, address: str) -> Client:
        return Client(address, os.environ.get("CLICKFLEET_TOKEN") or None, self.rpc_timeout_ms / 1e3)

    def predict(
        self,
        feed: Mapping[str, Any] | Sequence[Any] | None = None,
        fetch: str | Sequence[str] | None = None,
        batch: bool = False,
        need_variant_tag: bool = False,
        log_id: int = 0,
    ) -> Any:
        """Return {output: array [rows, 1]} for a feed {input: values}; with `need_variant_tag`, also the tag.

        Without `batch` the values are those of one row. `<input>.lod` holds the offsets of rows with different numbers of values.
        """
        reply, variant = self._reply(feed, fetch, batch, log_id)
        outputs = {name: values.reshape(len(values), -1) for name, values in reply.outputs.items()}
        return [outputs, variant.tag] if need_variant_tag else outputs

    def release(self) -> None:
        """Close the connections."""
        for variant in self._connected:
            for server in variant.servers:
                server.connection.close()
        self._connected = []

    def __del__(self) -> None:  # old programs do not call release()
        self.release()

    @property
    def config(self) -> ClientConfig:
        """Return what `load_client_config` read."""
        if self._config is None:
            raise ConfigError("no client configuration is loaded", "call load_client_config() first")
        return self._config

    def _reply(
        self, feed: Mapping[str, Any] | Sequence[Any] | None, fetch: Any, batch: bool, log_id: int
    ) -> tuple[InferReply, TrafficVariant]:
        """Return the outputs under the names of the client, and the variant that answered."""
        config = self.config
        if not self._connected:
            raise ConfigError("the client is not connected", "call connect() first")
        if feed is None or fetch is None:
            raise ConfigError("predict() needs feed and fetch")
        wanted = self._wanted(fetch)
        columns = columns_of(config, feed, batch)
        (variant,) = random.choices(self._connected, [one.weight for one in self._connected])
        inputs = {variant.names[name]: rows for name, rows in columns.items()}
        outputs = [variant.names[name] for name in wanted]
        reply = self._ask(variant, lambda server: send(server, inputs, outputs))
        costs = f"client_cost={reply.client_ms:.3f}ms,server_cost={reply.server_ms:.3f}ms"
        print(f"logid={log_id},{costs}", file=sys.stderr)
        found = {name: reply.outputs[ours] for name, ours in zip(wanted, outputs, strict=True)}
        return replace(reply, outputs=found), variant

    def _wanted(self, fetch: Any) -> list[str]:
        names = [fetch] if isinstance(fetch, str) else list(fetch)
        for name in names:
            if name not in self.fetch_names_:
                raise ConfigError(
                    f"fetch: the client configuration has no output {name!r}",
                    f"outputs: {', '.join(self.fetch_names_)}",
                )
        if not names:
            raise ConfigError("fetch is empty", f"outputs: {', '.join(self.fetch_names_)}")
        return names

    @staticmethod
    def _ask(variant: TrafficVariant, ask: Callable[[Client], Any]) -> Any:
        """Ask the next server of a variant, and the others if it cannot be reached."""
        problem: UnreachableError | None = None
        for _ in variant.servers:
            server = variant.servers[variant.turn % len(variant.servers)]
            variant.turn += 1
            try:
                return ask(server)
            except UnreachableError as error:
                problem = problem or error
        assert problem is not None
        raise problem


class HttpServingClient(ServingClient):
    """The class `HttpClient` of paddle_serving_client. Its replies have the form of Paddle Serving's JSON."""

    SERVICE = "/GeneralModelService/inference"

    def __init__(self, ip: str = "0.0.0.0", port: str | int = "9393", service_name: str = SERVICE) -> None:
        super().__init__()
        if service_name != self.SERVICE:
            raise ConfigError(f"unknown service {service_name!r}", "a server has one model: omit service_name")
        self.ip, self.port = ip, str(port)
        self._compress = (False, False)

    def set_http_timeout_ms(self, http_timeout_ms: int) -> None:
        self.set_rpc_timeout_ms(http_timeout_ms)

    def set_request_compress(self, try_request_gzip: bool) -> None:
        self._compress = (try_request_gzip, self._compress[1])

    def set_response_compress(self, try_response_gzip: bool) -> None:
        self._compress = (self._compress[0], try_response_gzip)

    def connect(self, endpoints: Any = None, encryption: bool = False) -> None:
        """Connect; `predict` does it by itself."""
        address = f"{'127.0.0.1' if self.ip == '0.0.0.0' else self.ip}:{self.port}"
        super().connect(endpoints or [address], encryption)

    def predict(
        self,
        feed: Mapping[str, Any] | Sequence[Any] | None = None,
        fetch: str | Sequence[str] | None = None,
        batch: bool = False,
        need_variant_tag: bool = False,
        log_id: int = 0,
    ) -> Any:
        """Return {"outputs": [{"tensor": [{"float_data": …, "shape": …, "alias_name": …}, …]}]}."""
        if need_variant_tag:
            raise ConfigError("HttpClient has no variants", "use Client.add_variant")
        if not self._connected:
            self.connect()
        for server in self._connected[0].servers:
            server.compress_requests, server.compress_replies = self._compress
        reply, variant = self._reply(feed, fetch, batch, log_id)
        tensors = [
            {
                "float_data": values.reshape(-1).tolist(),
                "elem_type": FLOAT,
                "shape": list(values.reshape(len(values), -1).shape),
                "name": variant.names[name],
                "alias_name": name,
            }
            for name, values in reply.outputs.items()
        ]
        return {"outputs": [{"tensor": tensors, "engine_name": "clickfleet"}], "err_no": 0, "err_msg": ""}


def send(server: Client, inputs: Mapping[str, Rows], outputs: Sequence[str]) -> InferReply:
    """Send arrays as binary tensors, and rows with different numbers of values as lists."""
    arrays = {name: rows for name, rows in inputs.items() if isinstance(rows, np.ndarray)}
    if len(arrays) == len(inputs):
        reply = server.infer(arrays, outputs)
    else:
        lists = {name: rows.tolist() if isinstance(rows, np.ndarray) else rows for name, rows in inputs.items()}
        reply = server.feed(lists, outputs)
    rows = len(next(iter(inputs.values())))
    for name, values in reply.outputs.items():
        if values.shape[:1] != (rows,):
            raise ServeError(f"{server.url}: output {name!r} has the shape {list(values.shape)} for {rows} rows")
    return reply


def server_names(config: ClientConfig, served: Mapping[str, Any], url: str) -> dict[str, str]:
    """Return the server's name of each variable. Raise if it has no such input or output."""
    if not isinstance(served.get("inputs"), list) or not isinstance(served.get("outputs"), list):
        raise ServeError(f"{url} is not a clickfleet server", "check the address: clickfleet serve MODEL --port PORT")
    aliases, outputs = dict(served.get("aliases") or {}), list(served["outputs"])
    inputs = [one["name"] for one in served["inputs"]]
    names: dict[str, str] = {}
    for one in config.feeds:
        names[one.alias] = _known(
            one, {*inputs, *aliases} - {*outputs}, f"{url}: the model has no input", inputs, aliases
        )
    for one in config.fetches:
        other = {name for name in (one.alias, one.name) if "score" in outputs and SCORES.fullmatch(name)}
        names[one.alias] = _known(one, {*outputs, *other}, f"{url}: the model has no output", outputs, {})
    return names


def _known(one: Variable, known: set[str], problem: str, names: Sequence[str], aliases: Mapping[str, str]) -> str:
    for name in (one.alias, one.name):
        if name in known:
            return name
    others = f"; also {', '.join(aliases)}" if aliases else ""
    raise ConfigError(
        f"{problem} {one.alias!r}, which the client configuration names",
        f"it has {', '.join(names)}{others}; write a new client configuration: clickfleet migrate client-config",
    )


def columns_of(config: ClientConfig, feed: Mapping[str, Any] | Sequence[Any], batch: bool) -> dict[str, Rows]:
    """Return the rows of each input, all of the same number.

    >>> variables = (Variable("1", "C1", client_config.INTEGER, (1,), True),)
    >>> columns_of(ClientConfig(variables, ()), {"C1": [[3], [5], [8]], "C1.lod": [0, 1, 3]}, batch=True)
    {'C1': [[3], [5, 8]]}
    """
    names = [one.alias for one in config.feeds]
    samples = _samples(feed, names)
    if len(samples) > 1:
        parts = [columns_of(config, sample, False) for sample in samples]
        return {name: _stacked([part[name] for part in parts]) for name in names}
    (given,) = samples
    for name in given:
        if name not in names and name.removesuffix(LOD) not in names:
            raise ConfigError(f"feed: the client configuration has no input {name!r}", f"inputs: {', '.join(names)}")
    columns: dict[str, Rows] = {}
    for one in config.feeds:
        if one.alias not in given:
            raise ConfigError(f"feed: input {one.alias!r} is missing", f"inputs: {', '.join(names)}")
        columns[one.alias] = _rows(one, given[one.alias], given.get(one.alias + LOD), batch)
    counts = {name: len(rows) for name, rows in columns.items()}
    if len(set(counts.values())) > 1:
        first = next(iter(counts))
        other = next(name for name in counts if counts[name] != counts[first])
        raise DataError(
            f"feed: {first} has {counts[first]} rows, but {other} has {counts[other]}",
            "set batch=True if the arrays hold several rows, and give .lod for inputs with several values per row",
        )
    return columns


def _samples(feed: Mapping[str, Any] | Sequence[Any], names: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the feed as one mapping, or as one per row."""
    if isinstance(feed, Mapping):
        return [feed]
    items = list(feed)
    if items and all(isinstance(item, Mapping) for item in items):
        return items
    if len(names) != 1 or not items:
        raise ConfigError("feed must be a mapping from inputs to values", f"inputs: {', '.join(names)}")
    return [{names[0]: feed}]


def _rows(one: Variable, values: Any, lod: Any, batch: bool) -> Rows:
    """Return the values of an input by row."""
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different lengths
        array = np.empty(0, object)
    if array.dtype == object and batch and lod is None and isinstance(values, list | tuple | np.ndarray):
        return [_flat(one, row).tolist() for row in values]
    flat = _flat(one, values)
    if lod is not None and np.size(lod):
        offsets = np.asarray(lod).reshape(-1)
        length = len(array) if array.ndim else 1
        if offsets.dtype.kind not in "iu" or offsets[0] != 0 or offsets[-1] != length or (np.diff(offsets) < 0).any():
            raise DataError(f"{one.alias}{LOD} must hold ascending offsets from 0 to {length}, the number of values")
        wide = flat.reshape(length, -1)
        return _stacked([wide[begin:end].reshape(1, -1) for begin, end in pairwise(offsets.tolist())])
    if batch and not array.ndim:
        raise DataError(f"{one.alias}: with batch=True the values must have a dimension for rows")
    rows = len(array) if batch else 1
    table = flat.reshape(rows, -1) if rows else flat.reshape(0, 1)
    return table.tolist() if one.type == TEXT else np.ascontiguousarray(table)


def _flat(one: Variable, values: Any) -> NDArray[Any]:
    """Return all values of an input in the type of its variable."""
    array = np.asarray(values).reshape(-1)
    if one.type == TEXT:
        return np.array([item.decode() if isinstance(item, bytes) else str(item) for item in array.tolist()], object)
    if array.dtype.kind not in "iufb":
        raise DataError(f"{one.alias}: expected numbers, not {array.dtype}")
    if one.type == FLOAT:
        return array.astype(np.float32)
    if array.dtype == np.uint64:
        return array
    integers = array.astype(np.int64)
    if not (integers == array).all():
        raise DataError(f"{one.alias}: expected integers", "the client configuration gives it an integer type")
    return integers


def _stacked(parts: Sequence[Rows]) -> Rows:
    """Return rows one below the other, as an array if all have the same number of values."""
    widths = {np.shape(row)[-1] if len(row) else 0 for part in parts for row in part}
    if len(widths) == 1 and 0 not in widths and all(isinstance(p, np.ndarray) and p.dtype != object for p in parts):
        return np.concatenate([np.asarray(part) for part in parts])
    return [list(row.tolist() if isinstance(row, np.ndarray) else row) for part in parts for row in part]
