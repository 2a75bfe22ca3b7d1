"""The updater as a process of its own, at low priority: python -m clickfleet.serve.updater STATE"""

import os
import signal
import sys
import time
import traceback

from clickfleet.errors import ClickfleetError
from clickfleet.serve.follow import Updater
from clickfleet.serve.settings import Settings


def main() -> None:
    settings = Settings.read(sys.argv[1])
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    parent = os.getppid()
    updater = Updater(settings)
    try:
        updater.start()
    except ClickfleetError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    os.nice(10)  # from here on, requests come first
    told = None
    while not stopped and os.getppid() == parent:
        try:
            updater.turn()
        except Exception:  # whatever it is, the last good version goes on
            traceback.print_exc(file=sys.stderr)
        problem = updater.status.problem if updater.status else None
        if problem != told and problem is not None:
            print(f"updater: {problem}", file=sys.stderr, flush=True)
        told = problem
        time.sleep(settings.poll_ms / 1e3)


if __name__ == "__main__":
    main()
