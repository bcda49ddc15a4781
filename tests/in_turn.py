"""In which order several workers (`-n`, pytest-xdist) run the test files; conftest.py hands it to xdist.

Three kinds of tests:

* *light* ones (`tests/static`, `tests/unit`): any worker, file by file. They mostly wait.
* *heavy* ones (`HEAVY`): real servers, notebooks and torch, judged neither by the clock nor by the
  machine's memory. At most `AT_ONCE` files at a time, the longest first.
* everything else, so also what nobody has entered here, is *alone*: judged by a clock or by the whole
  machine's memory, or a look at what is left behind. It runs last, in the order of collection, in one
  worker, when every other worker has ended.

Within a file the order is that of collection and one worker runs it, so module fixtures are made once.
Without `-n` none of this is in use: pytest runs what it is given, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

LIGHT = ("tests/static/", "tests/unit/")
HEAVY = (
    "tests/notebooks/test_suite_run.py",
    "tests/server/test_lifecycle.py",
    "tests/server/test_reference.py",
    "tests/server/test_proof_real.py",
    "tests/notebooks/test_suite_stopped.py",
    "tests/test_engine.py",
    "tests/server/test_eval_real.py",
    "tests/server/test_memory_real.py",
    "tests/server/test_turns_real.py",
    "tests/server/test_sparklet_recording.py",
    "tests/server/test_trap_real.py",
    "tests/notebooks/test_nbval.py",
    "tests/notebooks/test_weights_spark.py",
    "tests/notebooks/test_appendix_cost_model.py",
    "tests/notebooks/test_appendix_kernel_shapes.py",
)
ALONE = (
    "tests/unit/test_client_rate.py",  # rates to 1 %
    "tests/unit/test_memwatch.py",  # a hog of real memory
)
# Light files that take longest: started first, so that no worker is left with one at the end.
LONG = tuple(
    f"tests/unit/test_{name}.py"
    for name in ("suite", "environments", "keeper", "server", "env_spark", "scripts", "report")
)
AT_ONCE = 2


def kind(scope: str) -> str:
    """light, heavy or alone, of a test file."""
    if scope in HEAVY:
        return "heavy"
    return "light" if scope.startswith(LIGHT) and scope not in ALONE else "alone"


def ordered(scopes: Iterable[str]) -> list[str]:
    """The test files (in order of collection) as they are begun."""
    first = (*HEAVY, *LONG)
    rank = {scope: i for i, scope in enumerate(first)}
    place = {"heavy": 0, "light": 1, "alone": 2}
    return sorted(scopes, key=lambda s: (place[kind(s)], rank.get(s, len(first))))


class InTurn(LoadScopeScheduling):
    """Gives the workers their files; `workqueue` is what no worker has yet.

    A worker begins a test only when it knows the next one or that there is none. So the worker that
    stays for the lonely tests is told the first of them while others still run, which lets it end
    the test before, and the rest of them when the others are gone.
    """

    held: tuple[WorkerController, list[int]] | None = None

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]

    def schedule(self) -> None:
        if self.collection is None:
            if not self._check_nodes_have_same_collection():
                return
            self.collection = list(next(iter(self.registered_collections.values())))
            units: dict[str, dict[str, bool]] = {}
            for nodeid in self.collection:
                units.setdefault(self._split_scope(nodeid), {})[nodeid] = False
            self.workqueue.update((scope, units[scope]) for scope in ordered(units))
        for node in self.nodes:
            self._reschedule(node)
        for node in self.nodes:  # a second file, or a worker with one test could not begin it
            self._reschedule(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """The test in which the worker ended, if it had not done all of its own."""
        if self.held is not None and self.held[0] is node:
            self.held = None
        units = self.assigned_work.pop(node)
        undone = [name for unit in units.values() for name, done in unit.items() if not done]
        crashed = undone[0] if undone else None
        for scope, unit in units.items():
            unit.pop(crashed, None)  # it is reported as failed and not tried again
            if not all(unit.values()):
                self.workqueue[scope] = unit
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def _heavy(self, node: WorkerController) -> bool:
        units = self.assigned_work[node].items()
        return any(kind(scope) == "heavy" and not all(unit.values()) for scope, unit in units)

    def _next(self, node: WorkerController) -> str | None:
        """The file that this worker is to have next, of those that need not run alone."""
        others = sum(self._heavy(other) for other in self.nodes if other is not node)
        for scope in self.workqueue:
            what = kind(scope)
            if what == "light" or (what == "heavy" and others < AT_ONCE):
                return scope
        return None

    def _send(self, node: WorkerController, scope: str, *, only_first: bool = False) -> None:
        unit = self.workqueue.pop(scope)
        self.assigned_work[node][scope] = unit
        known = self.registered_collections[node]
        indexes = [known.index(nodeid) for nodeid, done in unit.items() if not done]
        if only_first:
            self.held = node, indexes[1:]
            indexes = indexes[:1]
        node.send_runtest_some(indexes)

    def _reschedule(self, node: WorkerController) -> None:
        if node.shutting_down or node not in self.registered_collections:
            return
        alone = self.nodes == [node]
        if self.held is not None:
            if self.held[0] is not node:
                node.shutdown()  # it came late, for one that died, and the other waits until it is gone
                return
            if not alone:
                return
            node.send_runtest_some(self.held[1])
            self.held = None
        waiting = self._pending_of(self.assigned_work[node])
        scope = self._next(node)
        if scope is not None:
            if waiting <= 2:
                self._send(node, scope)
            return
        if any(other is not node and not other.shutting_down for other in self.nodes):
            node.shutdown()  # what is left is for another one
        elif alone:
            for scope in list(self.workqueue):
                self._send(node, scope)
            node.shutdown()
        elif self.workqueue and waiting <= 1:
            self._send(node, next(iter(self.workqueue)), only_first=True)
        elif not self.workqueue:
            node.shutdown()
