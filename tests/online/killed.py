"""python killed.py CONFIG KILLS SEED: learns online in child processes, killing each at a random moment, until one finishes."""

import os
import random
import signal
import sys
import time

import yaml

from clickfleet.online.learn import learn  # loaded once: the children are forks


def child(config: dict) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            learn(config, quiet=True)
            code = 0
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
        finally:
            os._exit(code)
    return pid


def main(path: str, kills: int, seed: int) -> None:
    import onnxruntime  # noqa: F401
    import torch

    torch.set_num_threads(1)
    with open(path) as file:
        config = yaml.safe_load(file)
    rng = random.Random(seed)
    killed, longest = 0, 0.4
    while True:
        pid = child(config)
        begin = time.monotonic()
        deadline = begin + (rng.uniform(0.01, longest) if killed < kills else 120)
        status = None
        while status is None and time.monotonic() < deadline:
            done, code = os.waitpid(pid, os.WNOHANG)
            status = code if done else None
            time.sleep(0.001)
        if status is not None:
            print(f"killed {killed}", flush=True)
            sys.exit(os.waitstatus_to_exitcode(status))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        killed += 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
