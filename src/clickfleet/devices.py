"""Where the network computes: the CPU, or an accelerator that torch knows. Rows always stay with the CPU's table."""

from __future__ import annotations

import torch

from clickfleet.errors import ConfigError

CPU = torch.device("cpu")


def find(name: str) -> torch.device:
    """The device of a setting, once it has been seen to work.

    >>> find("cpu")
    device(type='cpu')
    >>> find("gpu")
    Traceback (most recent call last):
    clickfleet.errors.ConfigError: train.device is 'gpu', which is no device
      use cpu, cuda or cuda:1
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"train.device is {name!r}, which is no device", "use cpu, cuda or cuda:1") from None
    if not works(device):
        raise ConfigError(
            f"train.device is {name!r}, and torch {torch.__version__} can use no such device here",
            "set train.device=cpu, or install a torch built for it (pytorch.org) and its driver",
        )
    return device


def works(device: torch.device) -> bool:
    """Whether this torch can compute there; `meta` cannot."""
    try:
        return torch.ones(2, device=device).sum().item() == 2.0
    except (RuntimeError, AssertionError, NotImplementedError):
        return False


def or_cpu(name: str) -> torch.device:
    """The device of a saved model's setting where it works, else the CPU: a model scores on any machine."""
    try:
        return find(name)
    except ConfigError:
        return CPU
