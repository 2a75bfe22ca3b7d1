"""All exceptions of the package.

ClickfleetError          a problem the user can fix: one clear message, exit code 1
├── ConfigError          a setting is unknown, contradictory or out of range
├── DataError            a line, file or stream does not match its format or schema
│   └── HashSeedError    a user's reader needs a fixed hash seed; the command line starts again with one
├── TableError           keys or gradients have the wrong shape, or the table does not support the operation
├── TrainingError        training cannot continue: the loss is not finite
├── CheckpointError      a saved file is missing, damaged, not ours or too new
├── ClusterError         a worker or shard failed, timed out or does not belong to the run
├── PublishError         published rows cannot be copied to their target
├── ServeError           a request or an artifact cannot be served
├── TrustError           a model, run folder or server refers to code or a file without permission
└── MissingError         an optional dependency is not installed; the message contains the command to install it

Any other exception is a bug in clickfleet: exit code 3.
"""

import re

_PASSWORD = re.compile(r"(?<=://)[^\s/]*@(?=[^\s@])")
_PARAMETER = re.compile(
    r"(?i)([?&;](?:password|passwd|pwd|token|secret|signature|access_key|secret_key|api_key|key)=)[^\s&;'\"<>]+"
)


def hide(text: str) -> str:
    """Return a text with the passwords of its URLs masked. Every error, log line and reply passes through here.

    >>> hide("cannot reach redis://user:hunter2@db:6379/0?password=x&db=1")
    'cannot reach redis://***@db:6379/0?password=***&db=1'
    """
    if "://" not in text:
        return text
    return _PARAMETER.sub(r"\1***", _PASSWORD.sub("***@", text))


class ClickfleetError(Exception):
    """What went wrong and where. An optional second line tells the user what to do. Passwords in URLs are masked."""

    def __init__(self, what: str, todo: str = "") -> None:
        super().__init__(hide(f"{what}\n  {todo}" if todo else what))


class ConfigError(ClickfleetError): ...


class DataError(ClickfleetError): ...


class HashSeedError(DataError): ...


class TableError(ClickfleetError): ...


class TrainingError(ClickfleetError): ...


class CheckpointError(ClickfleetError): ...


class ClusterError(ClickfleetError): ...


class PublishError(ClickfleetError): ...


class ServeError(ClickfleetError): ...


class TrustError(ClickfleetError): ...


class MissingError(ClickfleetError):
    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} is not installed", f'pip install "clickfleet[{extra}]"')
