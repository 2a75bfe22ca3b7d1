"""python killed.py CONFIG KILLS SEED [online]: trains in child processes, killing each at a random moment, until one finishes."""

import os
import random
import signal
import sys
import time
from pathlib import Path

from clickfleet import run  # loaded once: the children are forks

if online := "online" in sys.argv:
    from clickfleet.online.learn import learn


def child(config: str) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if online:
                learn(config, quiet=True)
                os._exit(0)
            started = (Path(config).parent / "run/checkpoints/LATEST").exists()
            run.train(config, resume=started, quiet=True)
            code = 0
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
        finally:
            os._exit(code)
    return pid


def main(config: str, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    killed, longest, latest = 0, 0.5, None
    while True:
        pid = child(config)
        deadline = time.monotonic() + (rng.uniform(0.02, longest) if killed < kills else 60)
        status = None
        while status is None and time.monotonic() < deadline:
            done, code = os.waitpid(pid, os.WNOHANG)
            status = code if done else None
            time.sleep(0.002)
        if status is not None:
            print(f"killed {killed}", flush=True)
            sys.exit(os.waitstatus_to_exitcode(status))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        killed += 1
        pointer = Path(config).parent / "run/checkpoints/LATEST"
        found = pointer.read_text() if pointer.exists() else None
        longest = (
            min(longest * 1.3, 20) if found == latest else max(longest * 0.8, 0.3)
        )  # moments of work, however slow it is
        latest = found


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
