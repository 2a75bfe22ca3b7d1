"""The trainer of a loop, as a process.

python -m clickfleet.online.loop_trainer STATE [quiet]
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from clickfleet.errors import ClickfleetError, hide
from clickfleet.serve import parent
from clickfleet.serve.state_folder import TRAINER, write_json

PARENT_S = 0.5
"""Time between two checks whether the supervisor lives."""


def main() -> None:
    state = Path(sys.argv[1])
    threading.Thread(target=_watch, name="clickfleet-parent", daemon=True).start()
    try:
        from clickfleet.online.learn import learn

        learn(json.loads((state / "trainer-config.json").read_text()), quiet="quiet" in sys.argv[2:])
    except ClickfleetError as error:
        _report(state, str(error))
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except Exception as error:
        _report(state, f"{type(error).__name__}: {error}")
        raise


def _report(state: Path, problem: str) -> None:
    """Leave the reason of the end for the page of the loop."""
    try:
        write_json(state / TRAINER, {"error": hide(problem), "time": time.time()})
    except OSError:  # a full disk, perhaps the reason itself
        print(f"trainer: {hide(problem)}", file=sys.stderr, flush=True)


def _watch() -> None:
    """Stop this process when its supervisor is gone: the next one starts a trainer of its own."""
    while not parent.is_gone():
        time.sleep(PARENT_S)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
