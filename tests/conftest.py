"""Settings for every test process, which stand before torch is imported, and the fork servers that tests share.

One thread, no chatter about closed sockets, a terminal of one width, Ctrl-C.
"""

from __future__ import annotations

import gc
import os
import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.warm import warm_children

if TYPE_CHECKING:
    from recycle.exec.processes.forkserver import ForkServer

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
os.environ["COLUMNS"] = "120"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ("tests.cost",)

# Machines may be busy, and a run is like the last one.
settings.register_profile("tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


class Servers(dict[str, "ForkServer"]):
    """Fork servers by kind of model, each started when it is first asked for: heavy imports are paid once per set."""

    def __missing__(self, kind: str) -> ForkServer:
        from recycle.exec.processes.forkserver import PRELOADED, ForkServer

        alike = next((other for other in self if PRELOADED[other] == PRELOADED[kind]), None)
        self[kind] = self[alike] if alike else ForkServer(kind)
        return self[kind]


@pytest.fixture(scope="session", autouse=True)
def _warm():
    warm_children()


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    """Freeze imported objects, so that the viewer's frequent collections skip them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def servers():
    started = Servers()
    yield started
    for server in set(started.values()):
        server.close()
