"""How two workers share the tests of a run: groups first, then one test after the other."""

from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController


class Sharing(LoadGroupScheduling):
    """`--dist loadgroup` that survives the end of a worker process.

    pytest-xdist gives the process that replaces it one test. A worker waits for the test after it before it starts one, so both would
    wait for ever. It would also run the test that ended the process once more, and end the next one.
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
