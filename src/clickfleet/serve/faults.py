"""Unexpected exceptions: logged with their traceback, without passwords, and not ten times a second."""

import sys
import time
import traceback

from clickfleet.errors import hide

AGAIN_S = 60.0
_logged: dict[str, float] = {}


def log_fault() -> str:
    """Prints the traceback of the exception being handled, once a minute; its last line."""
    text = hide(traceback.format_exc())
    now = time.monotonic()
    if now - _logged.get(text, -AGAIN_S) >= AGAIN_S:
        if len(_logged) > 1000:
            _logged.clear()
        _logged[text] = now
        print(text, end="", file=sys.stderr, flush=True)
    return text.rstrip().rpartition("\n")[2][:500]
