"""Let a reader import the base classes of paddle without paddle. A paddle that is installed takes precedence.

The folder above is on the module path of a `pipe` command, and of every program after `clickfleet migrate stand-in`.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_here = Path(__file__).resolve().parent.parent
_others = [place for place in sys.path if Path(place or ".").resolve() != _here]
_real = PathFinder.find_spec("paddle", _others)
if _real is not None and _real.loader is not None:
    sys.modules["paddle"] = importlib.util.module_from_spec(_real)
    _real.loader.exec_module(sys.modules["paddle"])
else:
    try:
        from clickfleet.paddlerec.paddle_names import stand_in
    except ImportError as error:
        raise ImportError(f"{sys.executable} has neither paddle nor clickfleet: {error}") from None
    stand_in()
