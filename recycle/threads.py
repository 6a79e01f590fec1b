"""A thread for waits that may never end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

_Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class WaitingThread:
    """Runs calls one after the other. Unlike for a `ThreadPoolExecutor`, Python does not wait for it when it ends."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._is_started = self._is_shut = False

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queue a call. The future gets its result or exception. Raises RuntimeError after `shut`."""
        if self._is_shut:
            raise RuntimeError("the thread is shut")
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=self._run, daemon=True).start()
        future: Future[Any] = Future()
        self._calls.put((future, function, arguments))
        return future

    def shut(self) -> None:
        """Cancel the calls that have not begun, and let the thread end; returns at once."""
        self._is_shut = True
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._execute(*call)
            del call  # it refers to process groups

    def _execute(self, future: Future[Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if self._is_shut:
            future.cancel()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)
            del future  # the error refers to this frame
