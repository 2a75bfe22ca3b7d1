"""The hooks through which other packages use PaddleRec's conventions. `config.plugins.EXTENSIONS` names this file.

stand_ins       base classes of paddle, while a user's file that imports them is loaded
reader_modules  a folder with the same base classes, for the command of a pipe
user_format     a user's generator class or RecDataset as a format
mode_settings   FLAGS_communicator_* of the environment as settings of a mode
role            TRAINING_ROLE and PADDLE_* of the environment as the role of this process
done_files      done files for the consumers of a published log, and its entries in PaddleRec's layout
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clickfleet.cluster import Role
    from clickfleet.data.formats import Format
    from clickfleet.paddlerec.done_files import DoneFiles
    from clickfleet.training.learner import Learner


def stand_ins(path: Path) -> AbstractContextManager[None]:
    """Let the file at `path` import the base classes of paddle's readers, even without paddle."""
    from clickfleet.paddlerec.paddle_names import provided

    return provided(path)


def reader_modules() -> Path:
    """Return the folder of the module `paddle` that a command can import, even without paddle."""
    from clickfleet.paddlerec.paddle_names import STAND_IN

    return STAND_IN


def user_format(module: ModuleType, settings: Mapping[str, Any]) -> Format | None:
    """Return the format for a RecDataset or a generator class in a user's file. None: the file has neither."""
    from clickfleet.paddlerec.generator import format_of, reader_config
    from clickfleet.paddlerec.recdataset import RecDatasetRows

    if hasattr(module, "RecDataset"):
        config = reader_config({key: value for key, value in settings.items() if key != "arrays"})
        return RecDatasetRows(module.RecDataset, config, settings.get("arrays"))
    return format_of(module, settings)


def mode_settings(known: set[str]) -> dict[str, int | str]:
    """Return the settings in `known` that FLAGS_communicator_* give."""
    from clickfleet.paddlerec.roles import from_environment, without_effect

    if ignored := without_effect(known):
        _report_once(f"no effect in this mode: {', '.join(ignored)}")
    return from_environment(known)


@cache
def _report_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def role() -> Role | None:
    """Return the role that the environment gives this process."""
    from clickfleet.paddlerec.roles import read

    return read()


def done_files(folder: Path, learner: Learner) -> DoneFiles:
    """Return the writer of done files in `folder`, for the entries and checkpoints of a learner."""
    from clickfleet.paddlerec.done_files import DoneFiles
    from clickfleet.paddlerec.exporting import TextLayout

    parts = learner.config.publish.text_parts
    return DoneFiles(folder, learner.config.online.start_day, None if parts is None else TextLayout(learner, parts))
