"""A test that takes its process down fails, and the run goes on with all others.

pytest-xdist 3.8 gives what a crashed process had done to the others as work without tests, and waits for ever for it to
be done (pytest-dev/pytest-xdist issues 1323 and 1327; mended there, not yet released). It also repeats the test that
crashed, which may crash or hang again.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling

LEAST = 2
"""Tests that a process must have been given to run one: it runs a test when it knows the next one."""


class CrashTolerant(LoadGroupScheduling):
    """Gives groups of tests to processes, and what a crashed one has left, but for the test that crashed it, to others.

    A unit of work is a dictionary of a group's tests: name -> whether it is done.
    """

    def remove_node(self, node: Any) -> str | None:
        """The test during which this process crashed; None if it had nothing left to do."""
        units = {group: tests for group, tests in self.assigned_work.pop(node).items() if not all(tests.values())}
        if not units:
            return None
        tests = next(iter(units.values()))
        crashed: str = next(test for test, done in tests.items() if not done)
        tests[crashed] = True
        self.workqueue.update({group: tests for group, tests in units.items() if not all(tests.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: Any) -> None:
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < LEAST:
            if self.workqueue:
                self._assign_work_unit(node)
            else:
                node.shutdown()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> CrashTolerant | None:
    """Instead of xdist's own where that is asked for."""
    return CrashTolerant(config, log) if config.getoption("dist") == "loadgroup" else None
