"""Every exception we raise.

ClickfleetError          a user can mend it: one clear message, exit code 1
├── ConfigError          a setting is unknown, contradictory or out of range
├── DataError            a line, file or stream cannot be read as declared
├── TableError           keys or gradients of the wrong shape, a table that cannot do what is asked
├── TrainingError        training cannot go on: the loss is no number
├── CheckpointError      a saved file is missing, broken, foreign or too new
├── ClusterError         a worker or shard is lost, late or foreign
├── PublishError         an entry of the model log does not fit the chain
├── ServeError           a request or an artifact cannot be served
├── TrustError           a model, a run folder or a server names code or a file that it may not reach
└── MissingError         an optional part is not installed; the message holds the command that installs it

Anything else that escapes is a fault of ours: exit code 3.
"""

import re

_PASSWORD = re.compile(r"(?<=://)[^\s/]*@(?=[^\s@])")
_PARAMETER = re.compile(
    r"(?i)([?&;](?:password|passwd|pwd|token|secret|signature|access_key|secret_key|api_key|key)=)[^\s&;'\"<>]+"
)


def hide(text: str) -> str:
    """A text without the passwords of the URLs in it; every error, log line and reply goes through here.

    >>> hide("cannot reach redis://user:hunter2@db:6379/0?password=x&db=1")
    'cannot reach redis://***@db:6379/0?password=***&db=1'
    """
    if "://" not in text:
        return text
    return _PARAMETER.sub(r"\1***", _PASSWORD.sub("***@", text))


class ClickfleetError(Exception):
    """What went wrong and where; an optional second line says what to do next. Passwords in URLs are not shown."""

    def __init__(self, what: str, todo: str = "") -> None:
        super().__init__(hide(f"{what}\n  {todo}" if todo else what))


class ConfigError(ClickfleetError): ...


class DataError(ClickfleetError): ...


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
