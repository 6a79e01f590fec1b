"""Puts the simulated clock, threads and sockets into the modules of recycle.exec."""

from __future__ import annotations

import concurrent.futures
import multiprocessing.connection
import queue
import random
import select
import selectors
import socket
import sys
import threading
import time
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from recycle.threads import WaitingThread
from tests.exec.explore import kernel as machine
from tests.exec.explore.kernel import Kernel, Thread
from tests.exec.explore.network import (
    Selector,
    Socket,
    create_connection,
    create_server,
    select_sockets,
    wait_for_sockets,
)
from tests.exec.explore.threads import Condition, Event, Executor, Future, Lock, Queue, wait_for_futures

EPOCH = 1.7e9
_ABSENT = object()


def _sleep(seconds: float) -> None:
    machine.KERNEL.park(seconds=seconds)


def stand_in(real: types.ModuleType, **names: Any) -> types.ModuleType:
    """A module with some names replaced."""
    module = types.ModuleType(real.__name__)
    module.__getattr__ = partial(getattr, real)  # type: ignore[method-assign]
    vars(module).update(names)
    return module


_MODULES = {
    time: stand_in(
        time, monotonic=lambda: machine.KERNEL.now + 1000.0, time=lambda: EPOCH + machine.KERNEL.now, sleep=_sleep
    ),
    threading: stand_in(threading, Thread=Thread, Lock=Lock, RLock=Lock, Condition=Condition, Event=Event),
    socket: stand_in(socket, socket=Socket, create_server=create_server, create_connection=create_connection),
    selectors: stand_in(selectors, DefaultSelector=Selector),
    queue: stand_in(queue, Queue=Queue),
    select: stand_in(select, select=select_sockets),
    random: stand_in(random, random=lambda: machine.KERNEL.draws.random()),
}
_NAMES = {
    concurrent.futures.ThreadPoolExecutor: Executor,
    WaitingThread: Executor,
    concurrent.futures.Future: Future,
    concurrent.futures.wait: wait_for_futures,
    multiprocessing.connection.wait: wait_for_sockets,
}


@cache
def _wanted(_: int) -> list[tuple[types.ModuleType, str, Any]]:
    """What is replaced in the modules that are imported now."""
    by_identity = {id(real): stand_in for real, stand_in in (*_MODULES.items(), *_NAMES.items())}
    return [
        (module, name, by_identity[id(value)])
        for path, module in list(sys.modules.items())
        if path.startswith("recycle.exec")
        for name, value in list(vars(module).items())
        if id(value) in by_identity
    ]


@contextmanager
def virtual(kernel: Kernel, others: Iterable[tuple[types.ModuleType, str, Any]]) -> Iterator[None]:
    """Give all modules of recycle.exec this kernel's clock, threads and sockets, and some modules other names."""
    machine.KERNEL, replaced = kernel, list[tuple[types.ModuleType, str, Any]]()
    try:
        for module, name, value in (*_wanted(len(sys.modules)), *others):
            replaced.append((module, name, getattr(module, name, _ABSENT)))
            setattr(module, name, value)
        yield
    finally:
        kernel.close()
        for module, name, value in reversed(replaced):
            delattr(module, name) if value is _ABSENT else setattr(module, name, value)
