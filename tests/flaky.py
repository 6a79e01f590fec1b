"""A test that failed beside others and passes alone is flaky: the run ends with its failure and its name, remembered.

With `--alone`, what failed runs once more in the end, one after the other in a process of its own. A run whose failures
all pass then succeeds, unless one of them was flaky in another of the last `RUNS` runs it took part in.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.cost import name_of

RUNS = 3
MOST = 20
"""More failures than this are no accident and do not run again."""

_CACHE = "recycle/flaky"


def remembered(history: dict[str, list[bool]], ran: set[str], flaky: set[str]) -> dict[str, list[bool]]:
    """Whether each test was flaky in each of the last `RUNS` runs it took part in, for those which ever were."""
    after = dict(history)
    for name in ran & (history.keys() | flaky):
        after[name] = [*history.get(name, []), name in flaky][-RUNS:]
    return {name: runs for name, runs in after.items() if any(runs)}


class Outcomes:
    """In the process that runs failures alone: writes name -> whether it passed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._passed: dict[str, bool] = json.loads(path.read_text()) if path.exists() else {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._passed[report.nodeid] = self._passed.get(report.nodeid, True) and not report.failed
        self._path.write_text(json.dumps(self._passed))  # after each, lest one takes the process with it


class Alone:
    """Runs failures alone when all else is done, and says which were flaky."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._ran: set[str] = set()
        self._failed: dict[str, str] = {}
        self._flaky: list[str] = []
        self._lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = name_of(report.nodeid)
        self._ran.add(name)
        if report.failed:
            self._failed[name] = report.longreprtext

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        flaky: set[str] = set()
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED and 0 < len(self._failed) <= MOST:
            flaky = self._pass_alone(list(self._failed))
        cache = self._config.cache
        assert cache is not None
        history = remembered(cache.get(_CACHE, {}), self._ran, flaky)
        cache.set(_CACHE, history)
        again = {name for name in flaky if sum(history[name]) > 1}
        self._flaky = sorted(flaky)
        self._lines = [
            f"FLAKY {name}: failed beside others and passed alone"
            + (f", as in another of its last {RUNS} runs: mend it" if name in again else "")
            for name in self._flaky
        ]
        self._count_as_passed(flaky - again)
        if flaky and flaky == set(self._failed) and not again:
            session.exitstatus = pytest.ExitCode.OK

    def _pass_alone(self, names: list[str]) -> set[str]:
        """Which of the tests pass when they run again."""
        root = self._config.rootpath
        with tempfile.TemporaryDirectory() as directory:
            outcomes = Path(directory) / "outcomes.json"
            for name in names:  # a process each, for one that crashes
                options = ("--rootdir", str(root), "--outcomes", str(outcomes), "-q", "-m", "")
                command = [sys.executable, "-m", "pytest", *options, name]
                subprocess.run(command, cwd=root, stdout=subprocess.DEVNULL, check=False)
            passed: dict[str, bool] = json.loads(outcomes.read_text()) if outcomes.exists() else {}
        return {name for name in names if passed.get(name)}

    def _count_as_passed(self, flaky: set[str]) -> None:
        """Move reports of these tests, so that pytest's own summary counts them as passed, and as flaky."""
        stats = self._config.pluginmanager.getplugin("terminalreporter").stats
        for category in ("failed", "error"):
            reports = stats.pop(category, [])
            for report in reports:
                moved = name_of(report.nodeid) in flaky
                for place in ("passed", "flaky") if moved else (category,):
                    stats.setdefault(place, []).append(report)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Generator[None, None, None]:
        yield
        for name in self._flaky:  # counted as passed, so that pytest does not show them
            terminalreporter.section(f"failed beside others: {name}")
            terminalreporter.write_line(self._failed[name])
        for line in self._lines:
            terminalreporter.write_line(line, yellow=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--alone", action="store_true", help="run failures once more, alone, and name those that pass")
    parser.addoption("--outcomes", type=Path, help="write which tests passed to this file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--outcomes"):
        config.pluginmanager.register(Outcomes(config.getoption("--outcomes")), "recycle-outcomes")
    elif config.getoption("--alone") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Alone(config), "recycle-alone")
