"""A worker's side of the faults: it notices that a fault's point is reached, says so and strikes itself.

Only a kill and a cut come from outside: the worker stands still until the launcher's signal ends it, or until the
launcher has cut its connections. The faults are real ones:
signals, exceptions, limits of the process; nothing is told to the coordinator that a fault by chance would not tell.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from recycle.exec.faults.faults import BETWEEN, KINDS, Fault
from recycle.ir.instruction import (
    Backward,
    BackwardInput,
    Compute,
    Forward,
    Instruction,
    OverlappedPair,
    ReduceGradients,
)

_Numbered = tuple[int, Fault]
_ROOM_BYTES = 64 << 20


class FaultInjector:
    """The faults of one worker.

    Args:
        faults: those that strike here, each with its number in the run.
        claim: claims a fault by number; True only once per run.
        poison: spoils the gradients that this worker has summed so far.
        wait: returns when the launcher has struck a fault.
    """

    def __init__(
        self,
        faults: Sequence[_Numbered],
        claim: Callable[[int], bool],
        poison: Callable[[], None],
        wait: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._claim, self._poison, self._await = claim, poison, wait
        faults = sorted(faults, key=lambda numbered: list(KINDS).index(numbered[1].kind))  # what ends the worker, last
        self._in_program = [(n, fault) for n, fault in faults if fault.phase not in BETWEEN]
        self._between = {(fault.phase, fault.step): (n, fault) for n, fault in faults if fault.phase in BETWEEN}
        self._places: dict[int, list[_Numbered]] = {}
        self._failing: Fault | None = None
        self._factor = 1.0

    def begin(self, program: Sequence[Instruction], step: int) -> None:
        """Where in this iteration's program the faults strike."""
        self._places, self._factor = {}, 1.0
        for number, fault in self._in_program:
            if KINDS[fault.kind].ranged:
                self._slow(number, fault, step)
            elif fault.step == step:
                # What was summed already is held by peers as well, and one host alone does not spoil it.
                place = _first_reduce(program) if fault.kind == "nan" else _place(program, fault.phase)
                self._places.setdefault(place, []).append((number, fault))

    def at(self, position: int) -> None:
        """The instruction at `position` is next."""
        for number, fault in self._places.pop(position, []):
            self._strike(number, fault)

    def at_phase(self, phase: str, step: int) -> None:
        """The worker has come to a phase of iteration `step` that lies between instructions."""
        if (phase, step) in self._between:
            self._strike(*self._between.pop((phase, step)))

    def _slow(self, number: int, fault: Fault, step: int) -> None:
        if fault.lasts(step):
            assert fault.argument is not None
            self._claim(number)  # to be told once; it holds in a repeated iteration too
            self._factor *= fault.argument

    def computed(self, seconds: float) -> None:
        """The stage has computed an F, I, W or B in `seconds`, and still has it in hand."""
        if self._factor > 1.0:
            time.sleep((self._factor - 1.0) * seconds)
        if self._failing is not None:
            raise RuntimeError(f"struck by the fault {self._failing}")

    def _strike(self, number: int, fault: Fault) -> None:
        if self._claim(number):
            _STRIKES[fault.kind](self, number, fault)

    def _await_the_kill(self, _: int, fault: Fault) -> None:
        if not fault.argument:
            time.sleep(60.0)  # the launcher's signal ends this process long before

    def _await_the_cut(self, number: int, _: Fault) -> None:
        self._await(number)

    def _spoil(self, *_: object) -> None:
        self._poison()

    def _stop(self, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _fail(self, _: int, fault: Fault) -> None:
        self._failing = fault

    def _read_null(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        ctypes.string_at(0)

    def _exhaust_memory(self, *_: object) -> None:
        """Ask for it at once, which leaves the room below the limit to whoever else needs some to end."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        bytearray(2 * _ROOM_BYTES)

    def _hold_the_interpreter(self, *_: object) -> None:
        library = ctypes.PyDLL(None)
        while True:
            library.sleep(3600)

    def _stall(self, *_: object) -> None:
        while True:
            time.sleep(3600.0)


_STRIKES: dict[str, Callable[[FaultInjector, int, Fault], None]] = {
    "kill": FaultInjector._await_the_kill,
    "nan": FaultInjector._spoil,
    "stop": FaultInjector._stop,
    "exception": FaultInjector._fail,
    "segfault": FaultInjector._read_null,
    "oom": FaultInjector._exhaust_memory,
    "hang": FaultInjector._hold_the_interpreter,
    "stall": FaultInjector._stall,
    "cut": FaultInjector._await_the_cut,
}


def _first_reduce(program: Sequence[Instruction]) -> int:
    return next((p for p, instruction in enumerate(program) if isinstance(instruction, ReduceGradients)), 0)


def _place(program: Sequence[Instruction], phase: str | None) -> int:
    """Position of the middle one of the instructions of a phase (None: of all compute)."""
    kinds: dict[str | None, tuple[type[Instruction], ...]] = {
        "forward": (Forward, OverlappedPair),
        "backward": (Backward, BackwardInput, OverlappedPair),
        "reduce": (ReduceGradients,),
        None: (Compute, OverlappedPair),
    }
    places = [p for p, instruction in enumerate(program) if isinstance(instruction, kinds[phase])]
    return places[len(places) // 2] if places else 0
