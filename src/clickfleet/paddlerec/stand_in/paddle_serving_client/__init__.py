"""Let a program import the clients of Paddle Serving without it. A paddle_serving_client that is installed takes precedence.

The folder above is on the module path of every program after `clickfleet migrate stand-in`.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_here = Path(__file__).resolve().parent.parent
_others = [place for place in sys.path if Path(place or ".").resolve() != _here]
_real = PathFinder.find_spec("paddle_serving_client", _others)
if _real is not None and _real.loader is not None:
    sys.modules["paddle_serving_client"] = importlib.util.module_from_spec(_real)
    _real.loader.exec_module(sys.modules["paddle_serving_client"])
else:
    try:
        from clickfleet.paddlerec.serving_client import HttpServingClient as HttpClient
        from clickfleet.paddlerec.serving_client import ServingClient as Client
    except ImportError as error:
        raise ImportError(f"{sys.executable} has neither paddle_serving_client nor clickfleet: {error}") from None
    __all__ = ["Client", "HttpClient"]
