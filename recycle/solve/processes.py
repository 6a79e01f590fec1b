"""Run a function over many tasks in several processes, which can end at any moment without leftovers.

Each child has one pipe, whose end signals the death of the child. A child ends with its parent.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from recycle.child import die_with_parent
from recycle.errors import PlanError, RecycleError

Result = TypeVar("Result")
WATCH_SECONDS = 0.1
"""Seconds between calls of `watch`."""


def map_unordered(
    function: Callable[..., Result],
    tasks: Iterator[tuple[Any, ...]],
    processes: int,
    watch: Callable[[], None] | None = None,
) -> Generator[tuple[tuple[Any, ...], Result], None, None]:
    """Yield (task, `function(*task)`) for every task, in the order of completion.

    Args:
        function: a module-level function; its arguments and result must be picklable.
        tasks: the next task is taken only when a process is free.
        processes: below two, all tasks run in this process.
        watch: called about every `WATCH_SECONDS` while several processes run.

    Raises:
        PlanError: a child was killed, probably for lack of memory.
        RecycleError: raised by `function`.
    """
    if processes < 2:
        for task in tasks:
            yield task, function(*task)
        return
    context = multiprocessing.get_context("spawn")
    children: dict[Connection, SpawnProcess] = {}
    busy: dict[Connection, tuple[Any, ...]] = {}
    try:
        idle: list[Connection] = []
        while True:
            while len(busy) < processes:
                try:
                    task = next(tasks)
                except StopIteration:
                    break
                if not idle:
                    ours, theirs = context.Pipe()
                    child = context.Process(target=_work, args=(theirs, function), daemon=True)
                    with _uninterrupted():  # a Ctrl-C before the child is recorded would leave it running
                        child.start()
                        children[ours] = child
                    theirs.close()
                    idle.append(ours)
                connection = idle.pop()
                connection.send(task)
                busy[connection] = task
            if not busy:
                return
            done = wait(list(busy), WATCH_SECONDS)
            if watch:
                watch()
            for ready in done:
                assert isinstance(ready, Connection)
                try:
                    outcome = ready.recv()
                except EOFError:
                    children[ready].join()
                    raise PlanError(
                        f"a planning process ended with {children[ready].exitcode}; is there enough memory for"
                        f" {processes} processes?"
                    ) from None
                task = busy.pop(ready)
                idle.append(ready)
                if isinstance(outcome, RecycleError):
                    raise outcome
                yield task, outcome
    finally:
        for child in children.values():
            child.kill()
        for connection, child in children.items():
            child.join()
            connection.close()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C until the end of the block; processes started inside begin with it blocked.

    The mask belongs to this thread. Another thread may take the signal, and the handler still runs in the main thread.
    """
    signals: list[int] = []
    usual = signal.getsignal(signal.SIGINT)
    is_ours = callable(usual) and threading.current_thread() is threading.main_thread()
    if is_ours:
        signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_ours:
            signal.signal(signal.SIGINT, usual)
        if signals:
            signal.raise_signal(signal.SIGINT)


def _work(connection: Connection, function: Callable[..., Any]) -> None:
    parent = multiprocessing.parent_process()
    assert parent
    assert parent.pid
    die_with_parent(parent.pid)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            outcome = function(*task)
        except RecycleError as error:
            outcome = error
        connection.send(outcome)
