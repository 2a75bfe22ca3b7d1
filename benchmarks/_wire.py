"""Machines on one machine: network namespaces joined by a wire with a given speed and delay.

Each machine has a TUN device. One process reads the packets of all machines and forwards each to its destination: it occupies the
sender's link for size / rate, travels for the delay, and occupies the receiver's link likewise. The kernel needs no queueing discipline
for this. A link that is more than QUEUE_BYTES behind drops packets, as a switch does.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

NETWORK = "10.78.0"
MTU = 60_000
"""Large packets: the wire process shares the cores with training."""
QUEUE_BYTES = 8 << 20
_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_READY = "the wire is up"


class Link(NamedTuple):
    """The link of every machine to the switch."""

    bits_per_s: float
    delay_s: float
    """One way, from one machine to another."""

    def __str__(self) -> str:
        speed = f"{self.bits_per_s / 1e9:g} Gbit/s" if self.bits_per_s >= 1e9 else f"{self.bits_per_s / 1e6:g} Mbit/s"
        return f"{speed}, {1e3 * self.delay_s:g} ms"


class NoMachinesError(Exception):
    """This machine makes no network namespaces or TUN devices."""


def address(machine: int) -> str:
    return f"{NETWORK}.{machine + 1}"


def name(machine: int) -> str:
    return f"clickfleet-wire-{os.getpid()}-{machine}"


def missing() -> str:
    """Return why this machine cannot make machines; an empty text if it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "nsenter"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (Debian: apt-get install iproute2 util-linux)"
    return "" if os.path.exists("/dev/net/tun") else "there is no /dev/net/tun"


@contextmanager
def machines(count: int, link: Link) -> Iterator[list[str]]:
    """Make machines that are joined by such links; return the names of their namespaces. They end with the block."""
    if reason := missing():
        raise NoMachinesError(reason)
    names = [name(machine) for machine in range(count)]
    with ExitStack() as around:
        tuns = []
        for machine, space in enumerate(names):
            _ip("netns", "add", space)
            around.callback(subprocess.run, ["ip", "netns", "delete", space], capture_output=True)
            device = f"cfw{os.getpid()}-{machine}"[:15]
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            around.callback(os.close, tun)
            fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TUN_WITHOUT_HEADER))
            _ip("link", "set", device, "netns", space)
            _ip("-n", space, "address", "add", f"{address(machine)}/24", "dev", device)
            _ip("-n", space, "link", "set", device, "mtu", str(MTU), "up")
            _ip("-n", space, "link", "set", "lo", "up")
            tuns.append(tun)
        words = [str(link.bits_per_s), str(link.delay_s), *map(str, tuns)]
        wire = subprocess.Popen(
            [sys.executable, __file__, *words], pass_fds=tuns, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        around.callback(_end, wire)
        assert wire.stdout is not None
        if wire.stdout.readline().strip() != _READY:
            raise NoMachinesError("the wire did not start")
        yield names


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise NoMachinesError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _end(process: subprocess.Popen[str]) -> None:
    with process:  # closes its pipe
        process.terminate()


def forward(link: Link, tuns: list[int], ended: threading.Event) -> None:
    """Carry packets between the machines until `ended` is set."""
    by_address = {bytes(map(int, address(machine).split("."))): machine for machine in range(len(tuns))}
    machine_of = {tun: machine for machine, tun in enumerate(tuns)}
    out_free, in_free = [0.0] * len(tuns), [0.0] * len(tuns)
    """When the link of each machine is free again, in each direction."""
    under_way: list[tuple[float, int, int, bytes]] = []
    number = itertools.count()
    limit_s = 8 * QUEUE_BYTES / link.bits_per_s
    while not ended.is_set():
        timeout = min(0.5, max(0.0, under_way[0][0] - time.monotonic())) if under_way else 0.5
        ready, _, _ = select.select(tuns, [], [], timeout)
        now = time.monotonic()
        for tun in ready:
            with suppress(BlockingIOError):
                packet = os.read(tun, MTU + 100)
                target = by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                source, takes = machine_of[tun], 8 * len(packet) / link.bits_per_s
                if target is None or out_free[source] - now > limit_s or in_free[target] - now > limit_s:
                    continue
                out_free[source] = max(now, out_free[source]) + takes
                in_free[target] = max(out_free[source] + link.delay_s, in_free[target] + takes)
                heapq.heappush(under_way, (in_free[target], next(number), target, packet))
        while under_way and under_way[0][0] <= now:
            _, _, target, packet = heapq.heappop(under_way)
            with suppress(OSError):  # the machine has gone, or its queue is full
                os.write(tuns[target], packet)


def main() -> None:
    bits, delay, *tuns = sys.argv[1:]
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    print(_READY, flush=True)
    forward(Link(float(bits), float(delay)), [int(tun) for tun in tuns], ended)


if __name__ == "__main__":
    main()
