"""The few names of paddle that readers derive from, for machines without it: there only while such a file is loaded.

    paddle.io.IterableDataset
    paddle.distributed.fleet, paddle.fluid.incubate.data_generator: MultiSlotDataGenerator, MultiSlotStringDataGenerator

Any other use of paddle is refused with the file, the line and what to write instead. As a program it runs a reader that way:
`python -m clickfleet.paddle_names reader.py arguments…`.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from clickfleet.errors import ClickfleetError, ConfigError
from clickfleet.generator import Generator, TextGenerator

INSTEAD = {
    "paddle.nn": "networks are PyTorch here: see docs/migration.md on porting a model",
    "paddle.static": "networks are PyTorch here: see docs/migration.md on porting a model",
    "paddle.optimizer": "name the optimizer in the configuration: dense.optimizer, table.rule",
    "paddle.metric": "metrics are computed by clickfleet: see docs/training.md",
    "paddle.to_tensor": "give NumPy arrays: np.asarray(…)",
    "paddle.seed": "np.random.seed(…)",
    "paddle.enable_static": "remove the line: there is no static graph",
    "paddle.set_device": "remove the line: train.device says where the network computes",
    "paddle.io.DataLoader": "remove it: clickfleet makes the batches (data.batch_size)",
    "paddle.io.Dataset": "derive from paddle.io.IterableDataset and yield the samples",
    "paddle.io.get_worker_info": "remove it: each reader gets files of its own",
    "paddle.distributed": "remove it: clickfleet splits files over workers and starts the processes (clickfleet launch)",
    "paddle.fluid": "only paddle.fluid.incubate.data_generator is here",
}
_lock = threading.RLock()


class IterableDataset:
    """The base class of a `RecDataset`: it only says that there is an `__iter__`."""

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError(f"{type(self).__name__} must define __iter__")


NAMES: dict[str, dict[str, Any]] = {
    "paddle": {},
    "paddle.io": {"IterableDataset": IterableDataset},
    "paddle.distributed": {},
    "paddle.distributed.fleet": {
        "MultiSlotDataGenerator": Generator,
        "MultiSlotStringDataGenerator": TextGenerator,
    },
    "paddle.fluid": {},
    "paddle.fluid.incubate": {},
    "paddle.fluid.incubate.data_generator": {
        "MultiSlotDataGenerator": Generator,
        "MultiSlotStringDataGenerator": TextGenerator,
    },
}


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        refuse(f"{self.__name__}.{name}")


class _Finder:
    """Answers imports of paddle's modules that are not here."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] == "paddle":
            refuse(name)
        return None


def refuse(name: str) -> NoReturn:
    """Says that paddle has no such name here, and who wanted it."""
    frame: Any = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename.startswith("<frozen") or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}: " if frame is not None else ""
    known = max((key for key in INSTEAD if f"{name}.".startswith(f"{key}.")), key=len, default=None)
    raise ConfigError(
        f"{where}{name} is used, and paddle is not installed; clickfleet stands in for readers' base classes only",
        INSTEAD[known] if known else "remove it, or install paddle beside clickfleet",
    )


def is_installed() -> bool:
    """Whether the real paddle is here; then nothing stands in for it."""
    try:
        return importlib.util.find_spec("paddle") is not None
    except ClickfleetError:  # we stand in for it just now
        return False
    except ValueError:
        return False


def mentions(path: Path) -> bool:
    """Whether a file speaks of paddle at all."""
    try:
        return b"paddle" in path.read_bytes()
    except OSError:
        return False


@contextmanager
def provided(path: Path) -> Iterator[None]:
    """Lets the file at `path`, which is about to be loaded, import paddle's base classes of readers."""
    with _lock:
        if not mentions(path) or "paddle" in sys.modules or is_installed():
            yield
            return
        modules = {name: _StandIn(name) for name in NAMES}
        for name, module in modules.items():
            module.__path__ = []
            vars(module).update(NAMES[name])
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(modules[parent], last, module)
        sys.modules.update(modules)
        finder: Any = _Finder()
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            for name in modules:
                sys.modules.pop(name, None)


def main() -> int:
    """Runs the reader that the arguments name as a program."""
    if len(sys.argv) < 2:
        print("usage: python -m clickfleet.paddle_names READER.py [ARGUMENTS]", file=sys.stderr)
        return 2
    del sys.argv[0]
    path = Path(sys.argv[0])
    sys.path.insert(0, str(path.resolve().parent))
    with provided(path):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except ClickfleetError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
