"""The device on which the network computes. The rows always stay in the table in main memory."""

from __future__ import annotations

import torch

from clickfleet.errors import ConfigError

CPU = torch.device("cpu")


def find(name: str) -> torch.device:
    """Return the device that a setting names. Raise `ConfigError` unless torch can compute on it.

    >>> find("cpu")
    device(type='cpu')
    >>> find("gpu")
    Traceback (most recent call last):
    clickfleet.errors.ConfigError: unknown device 'gpu' in train.device
      use cpu, cuda or cuda:1
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r} in train.device", "use cpu, cuda or cuda:1") from None
    if not _computes(device):
        raise ConfigError(
            f"train.device is {name!r}, but torch {torch.__version__} cannot use this device here",
            "set train.device=cpu, or install the driver and a torch built for it (pytorch.org)",
        )
    return device


def _computes(device: torch.device) -> bool:
    """Return whether torch can compute on a device. It cannot on `meta`."""
    try:
        return torch.ones(2, device=device).sum().item() == 2.0
    except (RuntimeError, AssertionError, NotImplementedError):
        return False


def or_cpu(name: str) -> torch.device:
    """Return the device a saved model names if it works here, else the CPU, so that a model scores on any machine."""
    try:
        return find(name)
    except ConfigError:
        return CPU
