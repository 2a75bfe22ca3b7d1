"""The client of PaddleRec's tools with the same options: send a reader's batches to a server and print the replies.

    python -m clickfleet.paddlerec.rec_client --client_config=serving_client/serving_client_conf.prototxt \\
        --connect=127.0.0.1:9393 --use_gpu=false --data_dir=data/test --reader_file=reader.py --batchsize=5 --client_mode=rpc
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from clickfleet.config import plugins
from clickfleet.data.files import expand
from clickfleet.errors import ClickfleetError, ConfigError, DataError
from clickfleet.paddlerec import original
from clickfleet.paddlerec.recdataset import RecDatasetRows
from clickfleet.paddlerec.serving_client import ServingClient, columns_of
from clickfleet.serve.client import Client

WEB_S = 30.0
"""Time for which the web client repeats the data, as the original does."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m clickfleet.paddlerec.rec_client", description="Send a reader's batches to a server."
    )
    parser.add_argument("--client_config", required=True, help="serving_client_conf.prototxt, or its folder")
    parser.add_argument("--connect", required=True, help="address of the server, host:port")
    parser.add_argument("--data_dir", required=True, help="folder of the data files")
    parser.add_argument("--reader_file", required=True, help="Python file with a RecDataset")
    parser.add_argument("--batchsize", type=int, default=5, help="rows per request (default: 5)")
    parser.add_argument("--client_mode", choices=("rpc", "web"), default="rpc", help="binary tensors, or JSON (web)")
    parser.add_argument("--use_gpu", default="false", help="must be false: the server chooses its engine")
    parser.add_argument("-m", "--config", help="PaddleRec configuration for a reader that needs one")
    parser.add_argument(
        "--seconds", type=float, default=WEB_S, help="repeat the data so long in web mode (default: 30)"
    )
    given = parser.parse_args(argv)
    try:
        if given.use_gpu.lower() in ("true", "t", "1"):
            raise ConfigError(
                "the client has no use for a GPU", "choose the engine of the server: clickfleet serve --engine"
            )
        if given.batchsize < 1:
            raise ConfigError(f"--batchsize must be at least 1, not {given.batchsize}")
        client = ServingClient()
        client.load_client_config(given.client_config)
        client.connect([given.connect])
        if given.client_mode == "rpc":
            for number, feed in enumerate(batches(given, client.feed_names_)):
                print(client.predict(feed, client.fetch_names_, batch=True, log_id=number), flush=True)
        else:
            run_web(given, client)
    except ClickfleetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run_web(given: argparse.Namespace, client: ServingClient) -> None:
    """Send the data as JSON until the time is over, and print each reply."""
    begin = time.monotonic()
    with Client(given.connect, os.environ.get("CLICKFLEET_TOKEN") or None) as server:
        while True:
            for feed in batches(given, client.feed_names_):
                columns = columns_of(client.config, feed, batch=True)
                lists = {
                    name: rows.tolist() if isinstance(rows, np.ndarray) else rows for name, rows in columns.items()
                }
                outputs = server.feed(lists, client.fetch_names_).outputs
                # As text first: the numbers of the reply have the digits of 32-bit floats.
                result = {name: values.astype(str).astype(float).tolist() for name, values in outputs.items()}
                print({"result": result}, flush=True)
            if time.monotonic() - begin >= given.seconds:
                return


def batches(given: argparse.Namespace, names: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
    """Yield the values of each input for so many rows, in the order in which the reader yields them; the last batch may be smaller."""
    rows = samples(given, len(names))
    while batch := list(islice(rows, given.batchsize)):
        yield {name: [row[i] for row in batch] for i, name in enumerate(names)}


def samples(given: argparse.Namespace, count: int) -> Iterator[list[list[Any]]]:
    """Yield the samples of a reader without their label."""
    module = plugins.module("formats", str(Path(given.reader_file).absolute()))
    if not hasattr(module, "RecDataset"):
        raise ConfigError(f"{given.reader_file} has no class RecDataset", "give the file of the reader")
    config = original.read(given.config).for_readers | {"runner.inference": True} if given.config else None
    reader = RecDatasetRows(module.RecDataset, config)
    for file in expand([given.data_dir]):
        for sample in reader.samples(file):
            if len(sample) not in (count, count + 1):
                raise DataError(
                    f"{given.reader_file} yields {len(sample)} arrays per sample, but the client configuration has {count} inputs",
                    f"the reader must yield the inputs in this order, with or without a label before them: {given.client_config}",
                )
            yield [np.ravel(values).tolist() for values in sample[len(sample) - count :]]


if __name__ == "__main__":
    sys.exit(main())
