"""A published log that grows, read line by line as they come."""

from pathlib import Path

from clickfleet.published import Line, Log


class Tail:
    """The lines of a log that grows: each is read and checked once."""

    def __init__(self, folder: Path) -> None:
        self.log = Log(folder)
        self.lines: list[Line] = []

    def refresh(self) -> bool:
        """Whether there is something new; a log whose past changed is read again from its start."""
        if not self.log.refresh():
            return False
        self.lines = self.log.lines()
        return True
