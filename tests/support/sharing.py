"""How the workers of a run share its tests: groups first, then one test after the other."""

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

MARK = re.compile(r"^(?:pytestmark = .*|    pytest\.mark\.)xdist_group\(\"([^\"]+)\"\)", re.MULTILINE)


class Sharing(LoadGroupScheduling):
    """`--dist loadgroup` without three faults of pytest-xdist 3.8.

    * It marks the tests of a group by their names, which pytest 9.2 does not let it change. Here the file says it: `pytestmark`.
      Tests of a file with fixtures for the whole file are a group too, so that these are made once.
    * It gives the process that replaces an ended worker one test, and a worker starts none before it has the next one.
    * It runs the test in which a worker ended once more, and ends the next worker.
    """

    def schedule(self) -> None:
        super().schedule()
        for node in self.nodes:
            self._reschedule(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test in which the process ended. It has failed; the other tests of the process are free again."""
        units = self.assigned_work.pop(node)
        left = [(unit, name) for unit in units.values() for name, done in unit.items() if not done]
        if not left:
            return None
        unit, failed = left[0]
        unit[failed] = True
        self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
        for other in self.nodes:
            self._reschedule(other)
        return failed

    def _reschedule(self, node: WorkerController) -> None:
        if node in self.registered_collections:  # a new process first finds its tests
            super()._reschedule(node)

    def _split_scope(self, nodeid: str) -> str:
        name = nodeid.partition("::")[0]
        return group_of(self.config.rootpath / name) or nodeid


@cache
def group_of(file: Path) -> str | None:
    """Return the group that all tests of a file belong to."""
    text = file.read_text(encoding="utf-8") if file.suffix == ".py" and file.is_file() else ""
    if (found := MARK.search(text)) is not None:
        return found[1]
    return str(file) if 'scope="module"' in text else None
