"""The updater as a process of its own, at low priority: python -m clickfleet.serve.updater STATE"""

import os
import signal
import sys
import time

from clickfleet.errors import ClickfleetError
from clickfleet.serve import versions
from clickfleet.serve.faults import log_fault
from clickfleet.serve.follow import Updater
from clickfleet.serve.settings import Settings

BEAT_S = 0.5
LONGEST_PAUSE_S = 5.0


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
    shown, beaten, pause = None, 0.0, settings.poll_ms / 1e3
    while not stopped and os.getppid() == parent:
        try:
            updater.turn()
            pause = settings.poll_ms / 1e3
        except Exception:  # whatever it is, the last good version goes on
            updater.complain(f"the updater failed: {log_fault()}", lost=True)
            pause = min(LONGEST_PAUSE_S, 2 * pause)
        if updater.looked > beaten + BEAT_S:
            beaten = updater.looked
            versions.beat(updater.state)
        problem = updater.status.problem if updater.status else None
        if problem != shown and problem is not None:
            print(f"updater: {problem}", file=sys.stderr, flush=True)
        shown = problem
        time.sleep(pause)


if __name__ == "__main__":
    main()
