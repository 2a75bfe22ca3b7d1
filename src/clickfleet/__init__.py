"""Click-through-rate prediction at any scale: read logs, train, keep training, publish, serve.

>>> import numpy as np, clickfleet
>>> clickfleet.Table(factors=4).pull(np.array([7, 7], np.uint64)).shape
(2, 5)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from clickfleet.table import Table as Table

_HOMES = {
    "Table": "clickfleet.table"
}  # public name -> its module, imported on first use: `import clickfleet` stays quick

__all__ = ["Table", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'clickfleet' has no attribute {name!r}")
