"""Click-through-rate prediction at any scale: read logs, train, keep training, publish, serve.

>>> import numpy as np, clickfleet
>>> clickfleet.Table(factors=4).pull(np.array([7, 7], np.uint64)).shape
(2, 5)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clickfleet.data.batch import Batch
    from clickfleet.data.reader import Reader
    from clickfleet.data.schema import Schema
    from clickfleet.online.program import join
    from clickfleet.store.table import Table
    from clickfleet.training.model import load
    from clickfleet.training.run import train


__version__ = "0.1.0"

# public name -> its module, which is imported on first use, so that `import clickfleet` stays fast
_MODULES = {
    "Batch": "clickfleet.data.batch",
    "Reader": "clickfleet.data.reader",
    "Schema": "clickfleet.data.schema",
    "Table": "clickfleet.store.table",
    "join": "clickfleet.online.program",
    "load": "clickfleet.training.model",
    "train": "clickfleet.training.run",
}

__all__ = ["Batch", "Reader", "Schema", "Table", "__version__", "join", "load", "train"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'clickfleet' has no attribute {name!r}")
