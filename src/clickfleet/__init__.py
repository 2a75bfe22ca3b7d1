"""Click-through-rate prediction at any scale: read logs, train, keep training, publish, serve.

>>> import numpy as np, clickfleet
>>> clickfleet.Table(factors=4).pull(np.array([7, 7], np.uint64)).shape
(2, 5)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clickfleet.cluster.control import RunningCluster
    from clickfleet.data.batch import Batch
    from clickfleet.data.reader import Reader
    from clickfleet.data.schema import Dense, Schema, Slot, Transform
    from clickfleet.errors import ClickfleetError
    from clickfleet.online.forget import forget
    from clickfleet.online.program import join
    from clickfleet.store.table import Table
    from clickfleet.training.callbacks import Callback, StepProgress
    from clickfleet.training.estimator import ClickClassifier
    from clickfleet.training.model import SavedModel, TrainingResult, load
    from clickfleet.training.network import Inputs, Model, Shape
    from clickfleet.training.run import fit, train


__version__ = "0.1.0"

# public name -> its module, which is imported on first use, so that `import clickfleet` stays fast
_MODULES = {
    "Batch": "clickfleet.data.batch",
    "Callback": "clickfleet.training.callbacks",
    "ClickClassifier": "clickfleet.training.estimator",
    "ClickfleetError": "clickfleet.errors",
    "Dense": "clickfleet.data.schema",
    "Inputs": "clickfleet.training.network",
    "Model": "clickfleet.training.network",
    "Reader": "clickfleet.data.reader",
    "RunningCluster": "clickfleet.cluster.control",
    "SavedModel": "clickfleet.training.model",
    "Schema": "clickfleet.data.schema",
    "Shape": "clickfleet.training.network",
    "Slot": "clickfleet.data.schema",
    "StepProgress": "clickfleet.training.callbacks",
    "Table": "clickfleet.store.table",
    "TrainingResult": "clickfleet.training.model",
    "Transform": "clickfleet.data.schema",
    "fit": "clickfleet.training.run",
    "forget": "clickfleet.online.forget",
    "join": "clickfleet.online.program",
    "load": "clickfleet.training.model",
    "train": "clickfleet.training.run",
}

__all__ = [
    "Batch",
    "Callback",
    "ClickClassifier",
    "ClickfleetError",
    "Dense",
    "Inputs",
    "Model",
    "Reader",
    "RunningCluster",
    "SavedModel",
    "Schema",
    "Shape",
    "Slot",
    "StepProgress",
    "Table",
    "TrainingResult",
    "Transform",
    "__version__",
    "fit",
    "forget",
    "join",
    "load",
    "train",
]


if not TYPE_CHECKING:  # type checkers know the names from the imports above, and report any other

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return getattr(import_module(_MODULES[name]), name)
        raise AttributeError(f"module 'clickfleet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
