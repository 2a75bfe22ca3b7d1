"""python killed.py CONFIG KILLS SEED [online]: trains in child processes, each killed at a random moment, until one finishes."""

import os
import random
import signal
import sys
import time
from pathlib import Path

from clickfleet.store import checkpoint
from clickfleet.training import run  # loaded once: the children are forks

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
            started = checkpoint.steps(Path(config).parent / "run/checkpoints")
            run.train(config, resume=bool(started), quiet=True)
            code = 0
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
        finally:
            os._exit(code)
    return pid


def main(config: str, kills: int, seed: int) -> None:
    """Moments are counted in checkpoints and parts of the time between two, so a slow machine sees the same as a fast one."""
    rng = random.Random(seed)
    pointer = Path(config).parent / "run/checkpoints/LATEST"

    def latest() -> str:
        return pointer.read_text() if pointer.exists() else ""

    killed, pace = 0, 0.02
    while True:
        pid, goal, fresh = child(config), rng.randrange(3 if kills < 20 else 2), True
        seen, since, moment = latest(), time.monotonic(), float("inf")
        while True:
            done, code = os.waitpid(pid, os.WNOHANG)
            if done:
                print(f"killed {killed}", flush=True)
                sys.exit(os.waitstatus_to_exitcode(code))
            now, found = time.monotonic(), latest()
            if found != seen:
                if not fresh:  # the first one of a process comes after its start
                    pace = max(0.01, now - since)
                seen, since, goal, fresh = found, now, goal - 1, False
            if goal <= 0 and moment == float("inf"):
                moment = now + rng.uniform(0, 1.5 * pace)
            if killed < kills and now >= moment:
                break
            time.sleep(0.002)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        killed += 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
