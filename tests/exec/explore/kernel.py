"""A machine in which time is a number: its processes, their threads, and what happens next.

virtual.py gives the modules of recycle.exec this clock, these threads (threads.py) and these sockets (network.py) in
place of Python's, so the code that runs is the real one. A thread is a greenlet: it runs until it waits, and then the
kernel runs what is next in virtual time. Every choice is drawn from one generator, so a seed repeats a run to the
message.

Limits: threads change at waits, at locks and at events only, not between any two lines. Sockets have endless buffers.
Files are real, and take no time.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from greenlet import GreenletExit, getcurrent, greenlet

from recycle.job.shape import Worker

if TYPE_CHECKING:
    from tests.exec.explore.network import Socket

BREAK_SECONDS = (5.0, 8.0)
"""Seconds after which a connection without an answer breaks (`links._KEEPALIVE`)."""
Waiting = list[tuple["Thread", "Ticket"]]


class Ticket(NamedTuple):
    """A wait of a thread: where it is registered, and what must be true when it is woken."""

    waiting: Waiting | None = None
    until: Callable[[], Any] | None = None


class Process:
    """A process of a host, perhaps of a worker. `how` says how it ended; a parent's end ends its children."""

    def __init__(
        self,
        kernel: Kernel,
        name: str,
        host: int,
        parent: Process | None = None,
        worker: Worker | None = None,
        incarnation: int = 0,
    ) -> None:
        self.kernel, self.name, self.host, self.parent, self.worker = kernel, name, host, parent, worker
        self.incarnation, self.tensor_rank = incarnation, 0
        self.is_alive, self.is_stopped, self.is_interrupted, self.how, self.lines = True, False, False, "", ""
        self.main: Thread | None = None
        self.began = kernel.now
        self.code: int | None = None
        self.effects = dict[str, int]()
        self.sockets: list[Socket] = []
        self.at_end: list[Callable[[], None]] = []
        self.held: list[Callable[[], None]] = []
        kernel.processes.append(self)

    def run(self, function: Callable[[], Any], delay: float = 0.0) -> None:
        """Run a function in the main thread, and end with it."""

        def main() -> None:
            function()
            self.end("", 0)

        self.main = Thread(main, process=self)
        self.main.start(delay)

    def end(self, how: str, code: int, is_seen: bool = True) -> None:
        """End at once; what it has sent arrives. Its peers see no end if the whole host is gone (`is_seen`)."""
        if not self.is_alive:
            return
        self.is_alive, self.how, self.code = False, how, code
        self.kernel.log(f"{self.name} ends: {how or code}")
        self.kernel.deliver_locally(self)
        for end in list(self.sockets):
            end.close() if is_seen else end.vanish()
        for child in [child for child in self.kernel.processes if child.parent is self and child.is_alive]:
            self.kernel.after(0.0, partial(child.end, "its agent is gone", -9, is_seen))
        for call in list(self.at_end):
            call()
        self.kernel.processes.remove(self)

    def stop(self, seconds: float) -> None:
        """Run nothing for a while, as after SIGSTOP."""
        if self.is_stopped:
            return
        self.is_stopped = True
        self.kernel.after(seconds, self._go_on)

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the main thread, where it waits."""
        if self.is_alive and self.main is not None and self.main.ticket is not None:
            self.is_interrupted = True
            self.kernel.after(0.0, partial(self.kernel._resume, self.main, self.main.ticket, False))

    def _go_on(self) -> None:
        self.is_stopped, held, self.held = False, self.held, []
        for call in held if self.is_alive else ():
            call()


Channel = tuple[str, str]
"""Who sends, and who receives."""
DETOUR_SECONDS = 1.0
"""Longest time for which a message waits for one of another sender."""


class Kernel:
    """What happens next.

    Attributes:
        cuts: pairs of hosts between which nothing arrives.
        detours: numbers of messages that arrive after the next one that their receiver gets on another channel. All
            messages take the same time then. None for drawn times.
        arrivals: (time, number, channel) of messages, in order, if not drawn.
        running: the thread that runs; None between threads.
    """

    def __init__(self, draws: random.Random, trace: Callable[[str], None] | None = None) -> None:
        self.now, self.draws, self.processes = 0.0, draws, list[Process]()
        self.slow_messages = 0.0
        self._trace = trace
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers, self.ports = count(), count(1000)
        self.hub = getcurrent()
        self.threads: set[Thread] = set()
        self.running: Thread | None = None
        self.listeners: dict[object, Socket] = {}
        self.cuts: dict[frozenset[int], int] = {}
        self._heals: dict[frozenset[int], float] = {}
        self._held: dict[frozenset[int], list[Callable[[], None]]] = {}
        self.crashes: set[tuple[str, int]] = set()
        self.detours: frozenset[int] | None = None
        self.arrivals: list[tuple[float, int, Channel]] = []
        self._messages, self._delayed = count(), dict[str, tuple[Channel, list[Callable[[], None]]]]()
        self.effects: dict[str, int] = {}
        self.error: Exception | None = None
        self.is_finished = self.is_over = False

    def count_effect(self, kind: str = "") -> None:
        """A process has done what others can see; it may be its last effect, or its last one of the kind."""
        if self.running is None:
            return
        process = self.running.process
        for name in (process.name, process.name + kind) if kind else (process.name,):
            if self.strikes(process, name):
                process.end("killed by SIGKILL", -9)
                self.park()

    def strikes(self, process: Process, name: str) -> bool:
        """Count an effect of a process by name; whether it is one of `crashes`."""
        process.effects[name] = number = process.effects.get(name, 0) + 1
        self.effects[name] = max(self.effects.get(name, 0), number)
        is_drawn = (name, number) in self.crashes
        self.crashes.discard((name, number))
        return is_drawn

    def log(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.now:9.3f} {text}")

    def draw(self, low: float, high: float) -> float:
        return low + (high - low) * self.draws.random()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), call))

    def run(self, seconds: float) -> None:
        """Go on until `is_finished`, or at most until a time. Raises what a thread raised."""
        events = self._events
        while not self.is_finished and events and events[0][0] <= seconds and self.error is None:
            self.now, _, call = heapq.heappop(events)
            call()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End all threads."""
        self.is_over = True
        for thread in list(self.threads):
            self.running = thread
            with suppress(BaseException):
                if thread.greenlet is not None:
                    thread.greenlet.throw(GreenletExit)
        self.running = None
        self._events.clear()

    def park(
        self,
        waiting: Waiting | None = None,
        seconds: float | None = None,
        until: Callable[[], Any] | None = None,
    ) -> bool:
        """Wait to be woken while `until` is true, or for some seconds at most. Returns whether it was woken."""
        if self.is_over:
            raise GreenletExit
        thread, ticket = current(), Ticket(waiting, until)
        thread.ticket = ticket
        if waiting is not None:
            waiting.append((thread, ticket))
        if seconds is not None:
            self.after(max(0.0, seconds), partial(self._resume, thread, ticket, False))
        is_woken = bool(self.hub.switch())
        if thread.process.is_interrupted and thread is thread.process.main:
            thread.process.is_interrupted = False
            raise KeyboardInterrupt
        return is_woken

    def wake(self, waiting: Waiting, longest: float = 0.001) -> None:
        """Wake threads: half of them at once, the others within `longest` seconds."""
        for thread, ticket in waiting:
            if thread.ticket is not ticket:
                continue
            soon = self.draws.random() if self.detours is None else 0.0
            self.after(0.0 if soon < 0.5 else 2.0 * longest * (soon - 0.5), partial(self._resume, thread, ticket, True))
        waiting.clear()

    def _resume(self, thread: Thread, ticket: Ticket, is_woken: bool) -> None:
        if thread.ticket is not ticket:
            return
        if is_woken and ticket.until is not None and ticket.waiting is not None and not ticket.until():
            ticket.waiting.append((thread, ticket))
            return
        process = thread.process
        if process.is_stopped:
            process.held.append(partial(self._resume, thread, ticket, is_woken))
        elif process.is_alive:
            thread.ticket, self.running = None, thread
            if thread.greenlet is not None:
                thread.greenlet.switch(is_woken)
            else:
                idle = _IDLE[self.hub]
                thread.greenlet = idle.pop() if idle else greenlet(_run_threads, self.hub)
                thread.greenlet.switch(thread)
            self.running = None

    def yield_now(self) -> None:
        """Another thread may run here."""
        if self.running is not None and self.draws.random() < 0.05:
            self.park(seconds=self.draws.random() * 0.001)

    # The network.

    def delay(self, first: int, second: int) -> float:
        if self.detours is not None:
            return 0.002
        if self.draws.random() < self.slow_messages:
            return self.draw(0.2, 3.0)
        return self.draw(0.0002, 0.004)

    def send(
        self, first: int, second: int, seconds: float, call: Callable[[], None], channel: Channel | None = None
    ) -> None:
        """Have something arrive at a host, once nothing is cut."""
        pair = frozenset((first, second))
        if self.detours is not None and channel is not None:
            call = partial(self._arrive, next(self._messages), channel, first == second, call)

        def arrive() -> None:
            if pair in self.cuts:
                self._held.setdefault(pair, []).append(call)
            else:
                call()

        self.after(seconds, arrive)

    def _arrive(self, number: int, channel: Channel, is_local: bool, call: Callable[[], None]) -> None:
        delayed, receiver = self._delayed.get(channel[1]), channel[1]
        if delayed is not None and delayed[0] == channel:
            delayed[1].append(call)
            return
        may_wait = not is_local or any(process.name == channel[0] for process in self.processes)
        if delayed is None and self.detours and number in self.detours and may_wait:
            self._delayed[receiver] = delayed = channel, [call]
            self.after(DETOUR_SECONDS, partial(self._deliver, receiver, delayed))
            return
        self.arrivals.append((self.now, number, channel))
        call()
        if delayed is not None:
            self._deliver(receiver, delayed)

    def _deliver(self, receiver: str, delayed: tuple[Channel, list[Callable[[], None]]]) -> None:
        if self._delayed.get(receiver) is delayed:
            del self._delayed[receiver]
            for call in delayed[1]:
                call()

    def deliver_locally(self, sender: Process) -> None:
        """What a process has sent to another one of its host is there before it ends."""
        for process in self.processes:
            delayed = self._delayed.get(process.name)
            if delayed is not None and process.host == sender.host and delayed[0][0] == sender.name:
                self._deliver(process.name, delayed)

    def races(self) -> Iterator[int]:
        """Numbers of messages that their receiver could get after a later one of another channel.

        Messages to different receivers commute, and one that finds no other in `DETOUR_SECONDS` changes nothing.
        """
        later: dict[str, list[tuple[float, Channel]]] = {}
        for moment, number, channel in reversed(self.arrivals):
            others = later.setdefault(channel[1], [])
            if any(at - moment <= DETOUR_SECONDS and other != channel for at, other in reversed(others[-20:])):
                yield number
            others.append((moment, channel))

    def cut(self, first: int, second: int, seconds: float) -> None:
        pair, number = frozenset((first, second)), next(self._numbers)
        if self._heals.get(pair, 0.0) > self.now + seconds:
            return  # an earlier cut lasts longer
        self.cuts[pair], self._heals[pair] = number, self.now + seconds

        def heal() -> None:
            if self.cuts.get(pair) == number:
                del self.cuts[pair]
                for call in self._held.pop(pair, []):
                    call()

        self.after(seconds, heal)
        for process in self.processes:
            for end in list(process.sockets):
                if end.peer is not None and {process.host, end.peer.process.host} == set(pair):
                    self.after(self.draw(*BREAK_SECONDS), partial(end.break_if, pair, number))

    def are_cut(self, first: int, second: int) -> bool:
        return frozenset((first, second)) in self.cuts


KERNEL: Kernel
"""The one of the run."""


def current() -> Thread:
    thread = KERNEL.running  # noqa: F821
    assert thread is not None, "only threads of processes wait"
    return thread


class Thread:
    """As `threading.Thread`."""

    def __init__(
        self,
        target: Callable[..., Any],
        args: Iterable[Any] = (),
        daemon: bool = True,
        name: str = "",
        process: Process | None = None,
    ) -> None:
        self.process = process or current().process
        self.ticket: Ticket | None = None
        self._target, self._args, self._done = target, args, False
        self._joining: Waiting = []
        self.greenlet: greenlet | None = None

    def start(self, delay: float = 0.0) -> None:
        kernel = self.process.kernel
        kernel.threads.add(self)
        self.ticket = ticket = Ticket()
        kernel.after(delay, partial(kernel._resume, self, ticket, True))

    def run(self) -> None:
        try:
            self._target(*self._args)
        except GreenletExit:
            pass
        except Exception as error:
            if not self.process.kernel.is_over:
                self.process.kernel.error = error
        self._done = True
        self.process.kernel.threads.discard(self)
        self.process.kernel.wake(self._joining)

    def join(self, timeout: float | None = None) -> None:
        if not self._done:
            self.process.kernel.park(self._joining, timeout)


_IDLE = defaultdict[greenlet, list[greenlet]](list)
"""Hub -> those whose threads have ended. The next threads run in them, because the stack of a new one costs more."""


def _run_threads(thread: Thread) -> None:
    hub = thread.process.kernel.hub
    while True:
        thread.run()
        del thread
        _IDLE[hub].append(getcurrent())
        thread = hub.switch()
