"""Settings that several modes share, and the names the original gave them in its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from clickfleet.errors import ConfigError

FLAG = "FLAGS_communicator_"
FLAGS = {
    "send_queue_size": "queue_size",
    "max_merge_var_num": "merge",
    "send_wait_times": "wait",
    "thread_pool_size": "io_threads",
    "independent_recv_thread": "independent_recv",
    "min_send_grad_num_before_recv": "pull_every",
    "is_sgd_optimizer": "reduce",
    "merge_sparse_grad": "merge_sparse",
    "fake_rpc": "fake_send",
    "k_steps": "k_steps",
}
_TRUTH = {"1": True, "true": True, "0": False, "false": False}


def from_environment(known: set[str], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The settings that `FLAGS_communicator_*` give; those a mode does not know are left to other modes.

    >>> from_environment({"merge", "reduce"}, {"FLAGS_communicator_max_merge_var_num": "4", "FLAGS_communicator_is_sgd_optimizer": "0"})
    {'merge': 4, 'reduce': 'mean'}
    """
    environ = os.environ if environ is None else environ
    found: dict[str, Any] = {}
    for name, text in sorted(environ.items()):
        if not name.startswith(FLAG):
            continue
        key = FLAGS.get(name.removeprefix(FLAG))
        if key is None:
            raise ConfigError(f"the environment has {name}, which no mode knows", f"known: {', '.join(FLAGS)}")
        if key in known:
            found[key] = _value(name, key, text)
    return dict(sorted(found.items()))


def _value(name: str, key: str, text: str) -> Any:
    if key in ("independent_recv", "merge_sparse", "fake_send", "reduce"):
        if text.lower() not in _TRUTH:
            raise ConfigError(f"{name} is {text!r}, and must be 0 or 1")
        truth = _TRUTH[text.lower()]
        return truth if key != "reduce" else "sum" if truth else "mean"
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}, and must be a whole number") from None
