"""Ports for servers that are started later."""

import random
import socket
from contextlib import ExitStack
from pathlib import Path

LOWEST, HIGHEST = 20_000, 32_000
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on and that the kernel does not hand out, so they stay free until they are used."""
    highest = min(HIGHEST, int(RANGE.read_text().split()[0])) if RANGE.exists() else HIGHEST
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            one = held.enter_context(socket.socket())
            port = random.SystemRandom().randrange(LOWEST, highest)
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
    return found
