"""Click-through-rate prediction at any scale: read logs, train, keep training, publish, serve.

>>> import numpy as np, clickfleet
>>> clickfleet.Table(factors=4).pull(np.array([7, 7], np.uint64)).shape
(2, 5)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from clickfleet.batch import Batch as Batch
    from clickfleet.joint import join as join
    from clickfleet.reader import Reader as Reader
    from clickfleet.run import train as train
    from clickfleet.schema import Schema as Schema
    from clickfleet.table import Table as Table
    from clickfleet.trained import load as load

# public name -> its module, imported on first use: `import clickfleet` stays quick
_HOMES = {
    "Batch": "clickfleet.batch",
    "Reader": "clickfleet.reader",
    "Schema": "clickfleet.schema",
    "Table": "clickfleet.table",
    "join": "clickfleet.joint",
    "load": "clickfleet.trained",
    "train": "clickfleet.run",
}

__all__ = ["Batch", "Reader", "Schema", "Table", "__version__", "join", "load", "train"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'clickfleet' has no attribute {name!r}")
