"""Markers say what tests cost, a check keeps unmarked tests cheap, the run ends with seconds by folder and marker.

`make quick` runs what has none of the markers in `COSTLY`. A fixture in `FIXTURES` gives its tests a marker. An
unmarked test fails when it starts a process, or takes more than `LIMIT` seconds of the processor (compiling apart).
"""

from __future__ import annotations

import gc
import re
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.nodeid import coerce_node_id

COSTLY = ("process", "browser", "search", "etcd", "slow", "soak")
FIXTURES = {
    **dict.fromkeys(("servers", "profiled", "pair", "runs"), "process"),
    **dict.fromkeys(("etcd", "own_etcd", "locked", "needs_etcd", "network"), "etcd"),
    **{"browser": "browser", "chromium": "browser"},
}
LIMIT = 5.0
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")
PRINTED_FROM = 1.0
_MEASURED = "cost"


def markers_of(item: pytest.Item) -> list[str]:
    """The markers of a test that say what it costs, in the order of `COSTLY`."""
    return [name for name in COSTLY if item.get_closest_marker(name)]


def name_of(nodeid: str) -> str:
    """A test's name without the group that pytest-xdist appends to it."""
    return re.sub(r"@[^\]/]*$", "", nodeid)


def _shares_runs(item: pytest.Item) -> bool:
    """Whether a costly test uses what is made once per file: then the file's tests stay in one process."""
    if not isinstance(item, pytest.Function) or not markers_of(item) or item.get_closest_marker("xdist_group"):
        return False
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return any(found[-1].scope == "module" for found in fixtures)


class _Starts:
    """Counts the processes that this process starts."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        sys.addaudithook(self._hook)
        from multiprocessing.process import BaseProcess

        start = BaseProcess.start

        def counted(process: BaseProcess) -> None:
            self.commands.append(process.name)
            start(process)

        BaseProcess.start = counted  # type: ignore[method-assign]

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in STARTS:
            self.commands.append(str(arguments[1] if len(arguments) > 1 else event))


class Costs:
    """Where tests run: gives markers, measures, and fails unmarked tests that are not cheap."""

    def __init__(self) -> None:
        from numba.core import event

        self._starts = _Starts()
        self._file: Path | None = None
        self._compiling = event.TimingListener()
        event.register("numba:compile", self._compiling)

    def _seconds(self) -> float:
        """Processor seconds of this process but those of compiling, which only the first run after a change has."""
        compiling = self._compiling.duration if self._compiling.done else 0.0
        return time.process_time() - compiling

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            for fixture, marker in FIXTURES.items():
                if fixture in getattr(item, "fixturenames", ()):
                    item.add_marker(marker)
            if item.get_closest_marker("browser") or _shares_runs(item):  # which its file opens and trains once
                item.add_marker(pytest.mark.xdist_group(item.path.name))
        if hasattr(config, "workerinput"):  # what takes long first, so that all processes end at the same time
            items.sort(key=lambda item: not markers_of(item))
            for item in items:
                group = item.get_closest_marker("xdist_group")
                if group and hasattr(item, "_id"):  # where pytest-xdist 3.8 writes it, pytest 9.2 reads it no more
                    item._id = coerce_node_id(f"{item.nodeid}@{group.args[0]}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if item.path != self._file:
            self._file = item.path
            gc.collect()
            gc.freeze()  # what is imported stays; the viewer, which collects often, need not look at it again
        self._starts.commands.clear()
        item.user_properties.append((_MEASURED, markers_of(item)))
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        before = self._seconds()
        outcome = yield
        seconds = self._seconds() - before
        if not markers_of(item):
            started = self._starts.commands
            if started:
                pytest.fail(f"starts a process and has none of the markers {', '.join(COSTLY)}: {started[0]}", False)
            if seconds > LIMIT:
                pytest.fail(f"takes {seconds:.1f} s and has none of the markers {', '.join(COSTLY)}", False)
        return outcome


class Summary:
    """Where reports are collected: prints test seconds by folder and by marker in the end."""

    def __init__(self) -> None:
        self._folders: Counter[str] = Counter()
        self._markers: Counter[str] = Counter()
        self._tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = name_of(report.nodeid).partition("::")[0].rpartition("/")[0]
        markers = next((value for name, value in report.user_properties if name == _MEASURED), None) or ["unmarked"]
        for place, key in ((self._folders, folder), *((self._markers, marker) for marker in markers)):
            place[key] += report.duration
            self._tests[key] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("seconds of tests, by folder and by marker")
        for counted in (self._folders, self._markers):
            for line in self._lines(counted):
                terminalreporter.write_line(line)

    def _lines(self, counted: Counter[str]) -> Iterator[str]:
        shown = [key for key, seconds in counted.most_common() if seconds >= PRINTED_FROM]
        for key in shown:
            yield f"{counted[key]:8.1f} s {self._tests[key]:6} tests  {key}"
        others = [key for key in counted if key not in shown]
        if others:
            seconds, tests = sum(counted[key] for key in others), sum(self._tests[key] for key in others)
            yield f"{seconds:8.1f} s {tests:6} tests  {len(others)} others"


def pytest_configure(config: pytest.Config) -> None:
    for marker, meaning in {
        "process": "starts processes: workers, fork servers, commands",
        "browser": "drives Debian's chromium",
        "search": "lets the planner search for long",
        "etcd": "needs a real etcd",
        "slow": "takes seconds of the processor: trains a real model, or goes through hundreds of large cases",
        "soak": "too long for every change; make soak runs it",
    }.items():
        config.addinivalue_line("markers", f"{marker}: {meaning}")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary(), "recycle-summary")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Costs(), "recycle-costs")
