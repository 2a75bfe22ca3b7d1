"""Replace the base classes of paddle's readers on machines without paddle, while a file that imports them is loaded.

    paddle.io.IterableDataset, paddle.io.Dataset
    paddle.distributed.fleet, paddle.distributed.fleet.data_generator and paddle.fluid.incubate.data_generator:
        MultiSlotDataGenerator, MultiSlotStringDataGenerator

Any other use of paddle raises an error with the file, the line and a replacement. This module can also run a reader as
a program: `python -m clickfleet.paddlerec.paddle_names reader.py arguments…`. The folder stand_in does the same for
programs that import paddle themselves.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from clickfleet.errors import ClickfleetError, ConfigError
from clickfleet.paddlerec.generator import Generator, TextGenerator
from clickfleet.store.atomic import write_file

INSTEAD = {
    "paddle.nn": "write networks in PyTorch: see docs/migration.md on porting a model",
    "paddle.static": "write networks in PyTorch: see docs/migration.md on porting a model",
    "paddle.optimizer": "name the optimizer in the configuration: dense.optimizer, table.rule",
    "paddle.metric": "remove it: clickfleet computes metrics, see docs/training.md",
    "paddle.to_tensor": "use NumPy arrays: np.asarray(…)",
    "paddle.seed": "use np.random.seed(…)",
    "paddle.enable_static": "remove the line: there is no static graph",
    "paddle.set_device": "remove the line: train.device sets the device of the network",
    "paddle.io.DataLoader": "remove it: clickfleet builds the batches (data.batch_size)",
    "paddle.io.get_worker_info": "remove it: each reader receives its own files",
    "paddle.distributed": "remove it: clickfleet splits files over workers and starts the processes (clickfleet launch)",
    "paddle.fluid": "only paddle.fluid.incubate.data_generator is available",
}
STAND_IN = Path(__file__).parent / "stand_in"
"""A folder with a module `paddle` for programs that import it. A real paddle takes precedence."""
_lock = threading.RLock()


class IterableDataset:
    """The base class of a `RecDataset`. It only requires `__iter__`."""

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError(f"{type(self).__name__} must define __iter__")


class NumberedDataset:
    """The base class of a `RecDataset` whose samples have numbers."""

    def __getitem__(self, number: int) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define __getitem__")

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define __len__")

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))


GENERATORS: dict[str, type] = {"MultiSlotDataGenerator": Generator, "MultiSlotStringDataGenerator": TextGenerator}
NAMES: dict[str, dict[str, type]] = {
    "paddle": {},
    "paddle.io": {"IterableDataset": IterableDataset, "Dataset": NumberedDataset},
    "paddle.distributed": {},
    "paddle.distributed.fleet": GENERATORS,
    "paddle.distributed.fleet.data_generator": GENERATORS,
    "paddle.fluid": {},
    "paddle.fluid.incubate": {},
    "paddle.fluid.incubate.data_generator": GENERATORS,
}


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        refuse(f"{self.__name__}.{name}")


class _Finder:
    """Rejects imports of other modules of paddle."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] == "paddle":
            refuse(name)
        return None


def refuse(name: str) -> NoReturn:
    """Raise an error for a name of paddle that is not available, with the place that uses it."""
    frame: Any = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename.startswith("<frozen") or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}: " if frame is not None else ""
    known = max((key for key in INSTEAD if f"{name}.".startswith(f"{key}.")), key=len, default=None)
    raise ConfigError(
        f"{where}{name} needs paddle, which is not installed; clickfleet replaces only the base classes of readers",
        INSTEAD[known] if known else "remove it, or install paddle",
    )


def is_installed() -> bool:
    """Return whether the real paddle is installed; then nothing replaces it."""
    try:
        spec = importlib.util.find_spec("paddle")
        return spec is not None and not str(spec.origin).startswith(str(STAND_IN))
    except ClickfleetError:  # our replacement is active
        return False
    except ValueError:
        return False


def mentions(path: Path) -> bool:
    """Return whether a file mentions paddle."""
    try:
        return b"paddle" in path.read_bytes()
    except OSError:
        return False


@contextmanager
def provided(path: Path) -> Iterator[None]:
    """Let the file at `path`, which is about to be loaded, import paddle's base classes of readers."""
    with _lock:
        if not mentions(path) or "paddle" in sys.modules or is_installed():
            yield
            return
        finder = stand_in()
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            for name in NAMES:
                sys.modules.pop(name, None)


def stand_in() -> Any:
    """Put the replacements among the imported modules. Return the finder that refuses other modules of paddle."""
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
    return finder


def install() -> Path:
    """Add the folder stand_in at the end of this environment's module path. Return the file that does so."""
    path = _path_file()
    write_file(path, f"{STAND_IN}\n".encode())
    return path


def remove() -> Path:
    """Undo `install`."""
    path = _path_file()
    path.unlink(missing_ok=True)
    return path


def _path_file() -> Path:
    return Path(sysconfig.get_path("purelib")) / "clickfleet_paddle.pth"


def main() -> int:
    """Run the reader that the arguments name as a program."""
    if len(sys.argv) < 2:
        print("usage: python -m clickfleet.paddlerec.paddle_names READER.py [ARGUMENTS]", file=sys.stderr)
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
