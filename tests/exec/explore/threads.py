"""Locks, events, futures, executors and queues of simulated threads, with the interface of Python's."""

from __future__ import annotations

import concurrent.futures
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from tests.exec.explore import kernel as machine
from tests.exec.explore.kernel import Thread, Waiting


class Lock:
    """As `threading.RLock`."""

    def __init__(self) -> None:
        self._owner: Thread | None = None
        self._count = 0
        self._waiting: Waiting = []

    def acquire(self) -> bool:
        kernel = machine.KERNEL
        if (thread := kernel.running) is None:
            return True
        kernel.yield_now()
        while self._owner not in (None, thread):
            kernel.park(self._waiting)
        self._owner, self._count = thread, self._count + 1
        return True

    def release(self) -> None:
        self._count -= 1
        if self._count <= 0:
            self._owner, self._count = None, 0
            if self._waiting:
                machine.KERNEL.wake(self._waiting)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition(Lock):
    """As `threading.Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        assert lock is None
        super().__init__()
        self._notified: Waiting = []

    def wait(self, timeout: float | None = None) -> bool:
        self.release()
        is_woken = machine.KERNEL.park(self._notified, timeout)
        self.acquire()
        return is_woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wakes the thread only when the predicate is true: nothing else sees whether it looked before."""
        kernel = machine.KERNEL
        until = None if timeout is None else kernel.now + timeout
        while not (result := predicate()) and (until is None or kernel.now < until):
            self.release()
            kernel.park(self._notified, None if until is None else until - kernel.now, predicate)
            self.acquire()
        return result

    def notify_all(self) -> None:
        machine.KERNEL.wake(self._notified)

    notify = notify_all


class Event:
    """As `threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: Waiting = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        machine.KERNEL.wake(self._waiting)
        machine.KERNEL.yield_now()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else machine.KERNEL.now + timeout
        while not self._is_set and (until is None or machine.KERNEL.now < until):
            machine.KERNEL.park(self._waiting, None if until is None else until - machine.KERNEL.now)
        return self._is_set


class Future:
    """As `concurrent.futures.Future`."""

    def __init__(self) -> None:
        self._is_done = self._is_cancelled = False
        self._result: Any = None
        self._error: BaseException | None = None
        self.waiting: Waiting = []
        self._calls: list[Callable[[Any], Any]] = []

    def __class_getitem__(cls, _: object) -> type:
        return cls

    def done(self) -> bool:
        return self._is_done

    def cancelled(self) -> bool:
        return self._is_cancelled

    def cancel(self) -> bool:
        if not self._is_done:
            self._is_cancelled = True
            self._finish(None, concurrent.futures.CancelledError())
        return self._is_cancelled

    def _finish(self, result: Any, error: BaseException | None) -> None:
        self._is_done, self._result, self._error = True, result, error
        for call in self._calls:
            call(self)
        machine.KERNEL.wake(self.waiting)

    def set_result(self, result: Any) -> None:
        self._finish(result, None)

    def set_exception(self, error: BaseException) -> None:
        self._finish(None, error)

    def add_done_callback(self, call: Callable[[Any], Any]) -> None:
        call(self) if self._is_done else self._calls.append(call)

    def result(self, timeout: float | None = None) -> Any:
        until = None if timeout is None else machine.KERNEL.now + timeout
        while not self._is_done and (until is None or machine.KERNEL.now < until):
            machine.KERNEL.park(self.waiting, None if until is None else until - machine.KERNEL.now)
        if not self._is_done:
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        with suppress(BaseException):
            self.result(timeout)
        return self._error


class Executor:
    """As `ThreadPoolExecutor` with one thread, whose work may be slow to begin."""

    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "") -> None:
        self._work: list[tuple[Future, Callable[[], Any]]] = []
        self._is_running = False

    def submit(self, call: Callable[..., Any], *args: Any) -> Future:
        future = Future()
        self._work.append((future, partial(call, *args)))
        if not self._is_running:
            self._is_running = True
            Thread(self._run).start()
        return future

    def _run(self) -> None:
        while self._work:
            future, call = self._work.pop(0)
            if future.done():
                continue
            try:
                result = call()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        self._is_running = False

    def map(self, call: Callable[..., Any], items: Iterable[Any]) -> Iterator[Any]:
        for future in [self.submit(call, item) for item in items]:
            yield future.result()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        if cancel_futures:
            for future, _ in self._work:
                future.cancel()
        while wait and self._is_running:
            machine.KERNEL.park(seconds=0.001)

    def shut(self) -> None:
        """As `WaitingThread` does."""
        self.shutdown(wait=False, cancel_futures=True)


def wait_for_futures(futures: Iterable[Future], timeout: float | None = None) -> None:
    until = None if timeout is None else machine.KERNEL.now + timeout
    for future in futures:
        with suppress(BaseException):
            future.result(None if until is None else max(0.0, until - machine.KERNEL.now))


class Queue:
    """As `queue.Queue`."""

    def __init__(self, maxsize: int = 0) -> None:
        self._items, self._most, self._waiting = deque[Any](), maxsize, Waiting()

    def full(self) -> bool:
        return 0 < self._most <= len(self._items)

    def put_nowait(self, item: Any) -> None:
        if self.full():
            raise queue.Full
        self._items.append(item)
        machine.KERNEL.wake(self._waiting)

    def put(self, item: Any, timeout: float | None = None) -> None:
        self.put_nowait(item)

    def get(self) -> Any:
        while not self._items:
            machine.KERNEL.park(self._waiting)
        return self._items.popleft()
