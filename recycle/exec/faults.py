"""Faults to strike on purpose: `KIND[=ARGUMENT]:WORKER@STEP[-STEP][.PHASE]`, for example `kill:1.1@10`.

`kill` sends SIGKILL to the worker's process in the middle of that iteration, or at the given phase; `kill=0.05`
strikes that many seconds after the point is reached. The worker says that it has reached the point, the launcher
strikes. `nan` spoils the worker's gradients just before they are reduced. `rejoin` starts the worker again and admits
it at the start of that step. Each fault strikes once per run; a kill in the `undo` of a step only if there is one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recycle.errors import JobError
from recycle.ir.instruction import (
    Backward,
    BackwardInput,
    Compute,
    Forward,
    Instruction,
    OverlappedPair,
    ReduceGradients,
)
from recycle.shape import Shape, Worker

_FAULT = re.compile(r"([a-z]+)(?:=([^:@]*))?:([0-9]+\.[0-9]+)@([0-9]+)(?:-([0-9]+))?(?:\.([a-z]+))?")
PHASES = ("forward", "backward", "reduce", "commit", "step", "stepped", "undo")
"""Where a kill strikes: in the middle of such instructions; when the worker has reported; when it is about to step;
when it has; when it is about to take the step back."""
_BETWEEN = ("commit", "step", "stepped", "undo")
KINDS = ("kill", "nan", "rejoin")
STRUCK = ("kill", "nan")
"""Kinds that a worker tells the launcher of when it reaches their point."""


@dataclass(frozen=True)
class Fault:
    """One fault. `delay` is in seconds; `phase` None means the middle of the iteration."""

    kind: str
    worker: Worker
    step: int
    phase: str | None = None
    delay: float = 0.0

    def __str__(self) -> str:
        delay = f"={self.delay:g}" if self.delay else ""
        return f"{self.kind}{delay}:{self.worker}@{self.step}" + (f".{self.phase}" if self.phase else "")


def parse_fault(text: str) -> Fault:
    """The fault that `text` writes. Raises JobError that says what is wrong."""
    match = _FAULT.fullmatch(text)
    if match is None:
        raise JobError(
            f"fault {text!r}: expected KIND[=ARGUMENT]:WORKER@STEP[.PHASE], for example kill:1.1@10 or rejoin:1.1@20"
        )
    kind, argument, worker, step, last, phase = match.groups()
    if kind not in KINDS:
        raise JobError(f"fault {text!r}: unknown kind {kind!r}; known are {', '.join(KINDS)}")
    if phase is not None and (kind != "kill" or phase not in PHASES):
        raise JobError(f"fault {text!r}: unknown phase {phase!r}; kill takes one of {', '.join(PHASES)}")
    if last is not None:
        raise JobError(f"fault {text!r}: {kind} strikes at one step, not in a range")
    delay = 0.0
    if argument is not None:
        try:
            delay = float(argument)
        except ValueError:
            delay = -1.0
        if kind != "kill" or not 0 <= delay < 3600:
            raise JobError(f"fault {text!r}: the argument of kill is a delay in seconds, other kinds take none")
    return Fault(kind, Worker.parse(worker), int(step), phase, delay)


def check_faults(faults: Sequence[Fault], shape: Shape, steps: int, absent: frozenset[Worker] = frozenset()) -> None:
    """Raise JobError for a fault that can never strike: outside the grid, past the end, on a worker in no such state.

    Args:
        absent: workers that the job starts without.
    """
    alive = {worker: worker not in absent for worker in shape.workers()}
    for fault in sorted(faults, key=lambda f: (f.step, KINDS[::-1].index(f.kind))):
        shape.require(fault.worker, f"fault {fault}")
        if fault.step >= steps:
            raise JobError(f"fault {fault}: the run ends after step {steps - 1}; steps count from 0")
        if fault.kind in STRUCK and not alive[fault.worker]:
            raise JobError(f"fault {fault}: worker {fault.worker} is already dead at step {fault.step}")
        if fault.kind == "rejoin" and alive[fault.worker]:
            raise JobError(f"fault {fault}: worker {fault.worker} is alive at step {fault.step}; kill it before")
        alive[fault.worker] = fault.kind != "kill"


class Striker:
    """A worker's side: notices that a point is reached, says so, and for a kill stands still until it is struck.

    Args:
        faults: this worker's kills and nans, each with its number in the run.
        claim: claims a fault by number; True only once per run.
        poison: spoils the gradients that this worker has summed so far.
    """

    def __init__(
        self, faults: Sequence[tuple[int, Fault]], claim: Callable[[int], bool], poison: Callable[[], None]
    ) -> None:
        self._claim, self._poison = claim, poison
        self._in_program = [(n, fault) for n, fault in faults if fault.phase not in _BETWEEN]
        self._between = {(fault.phase, fault.step): (n, fault) for n, fault in faults if fault.phase in _BETWEEN}
        self._places: dict[int, tuple[int, Fault]] = {}

    def begin(self, program: Sequence[Instruction], step: int) -> None:
        """Where in this iteration's program the faults strike."""
        self._places = {
            _place(program, "reduce" if fault.kind == "nan" else fault.phase): (number, fault)
            for number, fault in self._in_program
            if fault.step == step
        }

    def at(self, position: int) -> None:
        """The instruction at `position` is next."""
        if position in self._places:
            self._strike(*self._places.pop(position))

    def at_phase(self, phase: str, step: int) -> None:
        """The worker has come to a phase of iteration `step` that lies between instructions."""
        if (phase, step) in self._between:
            self._strike(*self._between.pop((phase, step)))

    def _strike(self, number: int, fault: Fault) -> None:
        if not self._claim(number):
            return
        if fault.kind == "nan":
            self._poison()
        elif not fault.delay:
            time.sleep(60.0)  # the launcher's signal ends this process long before


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
