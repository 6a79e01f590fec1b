"""Markers say what tests cost, and a check keeps unmarked tests cheap.

`make quick` runs what has none of the markers in `COSTLY`. A fixture in `FIXTURES` gives its tests a marker. An
unmarked test fails when it starts a process, or takes more than `LIMIT` seconds of the processor (compiling apart).
"""

import sys
import time
from collections.abc import Generator
from multiprocessing.process import BaseProcess

import pytest
from numba.core import event

COSTLY = {
    "process": "starts processes: workers, fork servers, commands",
    "browser": "drives Debian's chromium",
    "search": "lets the planner search for long",
    "etcd": "needs a real etcd",
    "slow": "takes seconds of the processor: trains a real model, or goes through hundreds of large cases",
    "soak": "too long for every change; make soak runs it",
}
FIXTURES = {
    **dict.fromkeys(("servers", "profiled", "pair", "runs"), "process"),
    **dict.fromkeys(("etcd", "own_etcd", "locked", "needs_etcd", "network"), "etcd"),
    "chromium": "browser",
}
LIMIT = 5.0
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")
_compiling = event.TimingListener()
_started = []
"""The processes that the running test has started."""


def pytest_configure(config: pytest.Config):
    for marker, meaning in COSTLY.items():
        config.addinivalue_line("markers", f"{marker}: {meaning}")
    event.register("numba:compile", _compiling)
    sys.addaudithook(_note_start)
    start = BaseProcess.start

    def noted(process):
        _started.append(process.name)
        start(process)

    BaseProcess.start = noted


def _note_start(name: str, arguments):
    if name in STARTS:
        _started.append(str(arguments[1] if len(arguments) > 1 else name))


def _is_costly(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(marker) for marker in COSTLY)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]):
    """Files with costly tests come first, the longest ones before all, so that all processes end at the same time."""
    for item in items:
        for fixture in FIXTURES.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(FIXTURES[fixture])
    costly = {item.path for item in items if _is_costly(item)}
    items.sort(key=lambda item: (item.path not in costly, item.path.parent.name != "browser"))


def _seconds() -> float:
    """Processor seconds of this process without compiling, which only the first run after a change has."""
    return time.process_time() - (_compiling.duration if _compiling.done else 0.0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol():
    _started.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    before = _seconds()
    outcome = yield
    seconds = _seconds() - before
    if not _is_costly(item):
        if _started:
            pytest.fail(f"starts a process and has none of the markers {', '.join(COSTLY)}: {_started[0]}", False)
        if seconds > LIMIT:
            pytest.fail(f"takes {seconds:.1f} s and has none of the markers {', '.join(COSTLY)}", False)
    return outcome
