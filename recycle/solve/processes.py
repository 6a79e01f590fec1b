"""A function over many tasks, several processes at a time, which end at any moment and leave nothing behind.

The standard pools either wait for what is running when they are stopped, or hang when a child is killed. Here each
child has one pipe, whose end tells that the child has died, and a child ends with its parent.
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
"""Time between two calls of `watch`."""


def map_unordered(
    function: Callable[..., Result],
    tasks: Iterator[tuple[Any, ...]],
    processes: int,
    watch: Callable[[], None] | None = None,
) -> Generator[tuple[tuple[Any, ...], Result], None, None]:
    """(task, `function(*task)`) for every task, as they are done.

    Args:
        function: a module-level function; it and what it takes and gives can be pickled.
        tasks: asked for the next task only when a process is free for it.
        processes: with fewer than two all is done here.
        watch: called about every `WATCH_SECONDS` while several processes work.

    Raises:
        PlanError: a child was killed, for want of memory most likely.
        RecycleError: what `function` raised.
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
                    with _uninterrupted():  # before the child is noted here a Ctrl-C would leave it behind
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
    """Ctrl-C waits until the end of the block; a process that is started in it has it blocked at first.

    The mask is of this thread: another one may take the signal, and the handler still runs in the main thread.
    """
    came: list[int] = []
    usual = signal.getsignal(signal.SIGINT)
    is_ours = callable(usual) and threading.current_thread() is threading.main_thread()
    if is_ours:
        signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_ours:
            signal.signal(signal.SIGINT, usual)
        if came:
            signal.raise_signal(signal.SIGINT)


def _work(connection: Connection, function: Callable[..., Any]) -> None:
    """The child: one task after the other."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
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
