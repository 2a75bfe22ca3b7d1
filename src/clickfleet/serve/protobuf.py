"""The messages of inference.proto, built from its compiled form without generated code, so any protobuf version works.

A separate descriptor pool avoids collisions with another client of the same protocol in this process.
"""

from functools import cache
from pathlib import Path
from typing import Any

SERVICE = "inference.GRPCInferenceService"


@cache
def _pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    files = descriptor_pb2.FileDescriptorSet.FromString((Path(__file__).parent / "inference.binpb").read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return pool


@cache
def message(name: str) -> Any:
    """Return the class of a message.

    >>> message("ServerLiveResponse")(live=True).live
    True
    """
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"inference.{name}"))


def methods() -> list[tuple[str, Any, Any]]:
    """Return (name, request class, reply class) of every call."""
    service = _pool().FindServiceByName(SERVICE)
    return [(m.name, message(m.input_type.name), message(m.output_type.name)) for m in service.methods]
