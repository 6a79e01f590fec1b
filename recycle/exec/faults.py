"""Faults to strike on purpose: `KIND[=ARGUMENT]:WORKER@STEP[-STEP][.PHASE]`, for example `kill:1.1@10`.

`kill` sends SIGKILL to the worker's process in the middle of that iteration, or at the given phase; `kill=0.05`
strikes that many seconds after the point is reached. `rejoin` starts the worker again and admits it at the start of
that step. The worker says that it has reached the point, the launcher strikes; each fault strikes once per run.
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
PHASES = ("forward", "backward", "reduce", "commit", "step")
KINDS = ("kill", "rejoin")


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
    for fault in sorted(faults, key=lambda f: (f.step, f.kind != "rejoin")):
        shape.require(fault.worker, f"fault {fault}")
        if fault.step >= steps:
            raise JobError(f"fault {fault}: the run ends after step {steps - 1}; steps count from 0")
        if fault.kind == "kill" and not alive[fault.worker]:
            raise JobError(f"fault {fault}: worker {fault.worker} is already dead at step {fault.step}")
        if fault.kind == "rejoin" and alive[fault.worker]:
            raise JobError(f"fault {fault}: worker {fault.worker} is alive at step {fault.step}; kill it before")
        alive[fault.worker] = fault.kind == "rejoin"


class Striker:
    """A worker's side: notices that a point is reached, says so, and stands still until it is struck.

    Args:
        faults: this worker's kills, each with its number in the run.
        claim: claims a fault by number; True only once per run.
    """

    def __init__(self, faults: Sequence[tuple[int, Fault]], claim: Callable[[int], bool]) -> None:
        self._faults, self._claim = list(faults), claim
        self._places: dict[int, tuple[int, Fault]] = {}
        self._late: dict[str, tuple[int, Fault]] = {}

    def begin(self, program: Sequence[Instruction], step: int) -> None:
        """Where in this iteration's program the faults strike."""
        self._places, self._late = {}, {}
        for number, fault in self._faults:
            if fault.step != step:
                continue
            if fault.phase in ("commit", "step"):
                self._late[fault.phase] = (number, fault)
            else:
                self._places[_place(program, fault.phase)] = (number, fault)

    def at(self, position: int) -> None:
        """The instruction at `position` is next."""
        if position in self._places:
            self._strike(*self._places.pop(position))

    def at_phase(self, phase: str) -> None:
        """The worker is in the commit (it has reported) or the step (the commit is there)."""
        if phase in self._late:
            self._strike(*self._late.pop(phase))

    def _strike(self, number: int, fault: Fault) -> None:
        if self._claim(number) and not fault.delay:
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
