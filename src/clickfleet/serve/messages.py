"""The messages of inference.proto, made from its compiled form: no generated code, any version of protobuf.

They live in a pool of their own, so that a client of the same protocol in this process does not collide with them.
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
    """The class of a message.

    >>> message("ServerLiveResponse")(live=True).live
    True
    """
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"inference.{name}"))


def methods() -> list[tuple[str, Any, Any]]:
    """(name, class of the request, class of the reply) of every call."""
    service = _pool().FindServiceByName(SERVICE)
    return [(m.name, message(m.input_type.name), message(m.output_type.name)) for m in service.methods]
