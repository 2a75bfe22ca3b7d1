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


class ClickfleetError(Exception):
    """What went wrong and where; an optional second line says what to do next."""

    def __init__(self, what: str, todo: str = "") -> None:
        super().__init__(f"{what}\n  {todo}" if todo else what)


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
