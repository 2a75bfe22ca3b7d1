"""Threads that compute with torch, each with its own number of threads inside an operator."""

from __future__ import annotations

import threading

import torch

_one_at_a_time = threading.Lock()


def enter(threads_inside: int) -> None:
    """To be called first in a new thread: how many threads its operators use, and its first matrix product.

    Two new threads were once seen standing still in their first products, so each takes its turn; whether that was the
    cause is not established (docs/LOG.md).
    """
    with _one_at_a_time, torch.no_grad():
        torch.set_num_threads(threads_inside)  # of this thread
        square = torch.ones(256, 256)
        torch.addmm(torch.ones(256), square, square)
