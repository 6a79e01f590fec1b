"""The kinds of faults: one row of `KINDS` per kind, with its text, where it strikes and what it does there.

The faults are real ones: signals, exceptions, limits of the process, packets that vanish. Nothing is reported to the
coordinator that a fault by chance would not report. A worker strikes itself when it comes to the fault's point; a kind
with `from_outside` stops there, and whoever started the worker's process strikes it (outside.py). To add a kind, write
its function and its row.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from recycle.exec.faults.fault import PHASES, Fault
from recycle.exec.membership.schema import CutDoneKey, CutEndsKey, StruckKey
from recycle.exec.membership.store import Store
from recycle.exec.transport.connections import connections_of, cut
from recycle.ir.instruction import (
    Backward,
    BackwardInput,
    Compute,
    Forward,
    Instruction,
    OverlappedPair,
    ReduceGradients,
)
from recycle.shape import Worker

_ROOM_BYTES = 64 << 20


class StruckWorker(Protocol):
    """What a fault can do to the process that it strikes, besides what any code can."""

    def poison(self) -> None:
        """Make the gradients that this process has summed so far not-a-number."""

    def slow_down(self, factor: float) -> None:
        """Make every computation of this iteration take `factor` times as long."""

    def fail_in_stage(self, fault: Fault) -> None:
        """Raise an exception inside the next computation."""

    def wait_for_strike(self, number: int) -> object:
        """Return when fault `number` has been struck from outside."""


class StruckProcesses(Protocol):
    """The worker processes that were started by this process."""

    def running(self, worker: Worker) -> bool:
        """Whether the worker has processes here."""

    def pids(self, worker: Worker) -> list[int]:
        """Process ids of the worker's processes."""

    def kill(self, worker: Worker, tensor_rank: int | None = None) -> None:
        """SIGKILL all processes of the worker, or that of a tensor rank."""


@dataclass(frozen=True)
class Argument:
    """The number behind a kind's `=`, from `least` to `most`."""

    meaning: str
    least: float
    most: float
    needed: bool = False


def middle_of_phase(program: Sequence[Instruction], phase: str | None) -> int:
    """Position of the middle one of the instructions of a phase (None: of all compute)."""
    kinds: dict[str | None, tuple[type[Instruction], ...]] = {
        "forward": (Forward, OverlappedPair),
        "backward": (Backward, BackwardInput, OverlappedPair),
        "reduce": (ReduceGradients,),
        None: (Compute, OverlappedPair),
    }
    places = [p for p, instruction in enumerate(program) if isinstance(instruction, kinds[phase])]
    return places[len(places) // 2] if places else 0


def first_reduce(program: Sequence[Instruction], phase: str | None) -> int:
    """Position of the first REDUCE."""
    return next((p for p, instruction in enumerate(program) if isinstance(instruction, ReduceGradients)), 0)


@dataclass(frozen=True, kw_only=True)
class FaultKind:
    """A row of `KINDS`.

    Attributes:
        does: what it does, for `--help` and docs/faults.md.
        example: one as text.
        strike: called in the worker's process at the fault's point, with the fault's number in the run; None for a
            kind that strikes no worker.
        ends: the worker is dead afterwards.
        phases: where it may strike instead of in the middle of the iteration.
        position: position in a program at which a fault of a phase (None for no phase) strikes.
        argument: None for none.
        argument_is_delay: the argument is the seconds from the fault's point to the strike from outside.
        pair: it strikes two workers; the other one stands behind the `=`.
        ranged: it holds from one step to another, and strikes at the beginning of each iteration.
        from_outside: called by each process that started workers until it returns True, which it does when the fault
            has been struck.
    """

    does: str
    example: str
    strike: Callable[[StruckWorker, int, Fault], None] | None
    ends: bool = True
    phases: tuple[str, ...] = PHASES
    position: Callable[[Sequence[Instruction], str | None], int] = middle_of_phase
    argument: Argument | None = None
    argument_is_delay: bool = False
    pair: bool = False
    ranged: bool = False
    from_outside: Callable[[int, Fault, StruckProcesses, Store], bool] | None = None

    @property
    def struck(self) -> bool:
        """Whether a worker comes to the fault's point, and claims the fault there."""
        return self.strike is not None

    def delay(self, fault: Fault) -> float:
        """Seconds from the fault's point to the strike."""
        return fault.argument or 0.0 if self.argument_is_delay else 0.0


def _spoil_gradients(worker: StruckWorker, number: int, fault: Fault) -> None:
    worker.poison()


def _slow_down(worker: StruckWorker, number: int, fault: Fault) -> None:
    worker.slow_down(fault.argument or 1.0)


def _await_kill(worker: StruckWorker, number: int, fault: Fault) -> None:
    if not fault.argument:
        time.sleep(60.0)  # the signal from outside ends this process long before


def _kill(number: int, fault: Fault, processes: StruckProcesses, store: Store) -> bool:
    if processes.running(fault.worker):
        processes.kill(fault.worker, fault.tensor_rank)
    return True


def _stop(worker: StruckWorker, number: int, fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _fail_in_stage(worker: StruckWorker, number: int, fault: Fault) -> None:
    worker.fail_in_stage(fault)


def _read_null(worker: StruckWorker, number: int, fault: Fault) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    ctypes.string_at(0)


def _exhaust_memory(worker: StruckWorker, number: int, fault: Fault) -> None:
    """Ask for all of it in one allocation, which leaves the room below the limit to the code that ends the process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    bytearray(2 * _ROOM_BYTES)


def _hold_the_interpreter(worker: StruckWorker, number: int, fault: Fault) -> None:
    library = ctypes.PyDLL(None)
    while True:
        library.sleep(3600)


def _stall(worker: StruckWorker, number: int, fault: Fault) -> None:
    while True:
        time.sleep(3600.0)


def _await_cut(worker: StruckWorker, number: int, fault: Fault) -> None:
    worker.wait_for_strike(number)


def _cut(number: int, fault: Fault, processes: StruckProcesses, store: Store) -> bool:
    """Each side announces its ends of all connections, then silences those that lead to the other worker.

    The two workers may have been started by two processes, on two machines, so that each silences its own side.
    """
    assert fault.other is not None
    pair = (fault.worker, fault.other)
    for worker in filter(processes.running, pair):
        ends = [str(end) for pid in processes.pids(worker) for end in connections_of(pid)]
        store.set(CutEndsKey(number, worker), ends)
    found = store.read_all([CutEndsKey(number, worker) for worker in pair])
    ends_of = {worker: set(ends) for worker, ends in zip(pair, found, strict=True) if ends is not None}
    if len(ends_of) < 2:
        return False
    for worker, other in (pair, pair[::-1]):
        if processes.running(worker):
            for pid in processes.pids(worker):
                cut(pid, ends_of[other])
            store.set(CutDoneKey(number, worker), True)
    if not store.has_all([CutDoneKey(number, worker) for worker in pair]):
        return False
    store.set(StruckKey(number), True)
    return True


KINDS = {
    "rejoin": FaultKind(
        does="starts the worker again and admits it at the start of that step",
        example="rejoin:1.1@9",
        strike=None,
        ends=False,
        phases=(),
    ),
    "nan": FaultKind(
        does="spoils the worker's gradients just before they are reduced",
        example="nan:1.1@5",
        strike=_spoil_gradients,
        ends=False,
        phases=(),
        position=first_reduce,  # a host alone does not spoil what was summed with peers before
    ),
    "slow": FaultKind(
        does="every F, I, W and B of the worker takes that many times as long, from one step to the other",
        example="slow=3:1.1@4-8",
        strike=_slow_down,
        ends=False,
        phases=(),
        argument=Argument("a factor", 1.0, 1000.0, needed=True),
        ranged=True,
    ),
    "kill": FaultKind(
        does="SIGKILL from the launcher or agent, =SECONDS after the point is reached",
        example="kill:1.1@5",
        strike=_await_kill,
        argument=Argument("a delay in seconds", 0.0, 3600.0),
        argument_is_delay=True,
        from_outside=_kill,
    ),
    "stop": FaultKind(
        does="SIGSTOP: the process is there and does nothing", example="stop:1.1@5.backward", strike=_stop
    ),
    "exception": FaultKind(
        does="a Python exception inside the stage",
        example="exception:1.1@5",
        strike=_fail_in_stage,
        phases=("forward", "backward"),
    ),
    "segfault": FaultKind(does="a null pointer is read: a real SIGSEGV", example="segfault:1.1@5", strike=_read_null),
    "oom": FaultKind(
        does="memory is asked for beyond a limit of the process (RLIMIT_AS): a real MemoryError",
        example="oom:1.1@5",
        strike=_exhaust_memory,
    ),
    "hang": FaultKind(
        does="hangs for ever with the interpreter lock held, so that no thread of it beats",
        example="hang:1.1@5",
        strike=_hold_the_interpreter,
    ),
    "stall": FaultKind(does="hangs for ever while its heartbeat goes on", example="stall:1.1@5", strike=_stall),
    "cut": FaultKind(
        does="every packet between the two workers vanishes, on the connections that they have then",
        example="cut=1.0:1.1@5",
        strike=_await_cut,
        phases=tuple(phase for phase in PHASES if phase not in ("undo", "acknowledge", "form")),
        pair=True,
        from_outside=_cut,
    ),
}
"""By name. What ends a worker comes after what does not: of faults at one point, the later ones strike last."""
