"""A worker's side of the faults: it notices that a fault's point is reached, claims the fault and strikes itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from recycle.exec.faults.fault import BETWEEN, Fault
from recycle.exec.faults.kinds import KINDS
from recycle.ir.instruction import Instruction

_Numbered = tuple[int, Fault]


class FaultInjector:
    """The faults of one worker process.

    Args:
        faults: those that strike here, each with its number in the run.
        claim: claims a fault by number; True only once per run.
        poison: spoils the gradients that this worker has summed so far.
        wait_for_strike: returns when a fault has been struck from outside.
    """

    def __init__(
        self,
        faults: Sequence[_Numbered] = (),
        claim: Callable[[int], bool] = lambda number: True,
        poison: Callable[[], None] = lambda: None,
        wait_for_strike: Callable[[int], object] = lambda number: None,
    ) -> None:
        self._claim, self.poison, self.wait_for_strike = claim, poison, wait_for_strike
        order = list(KINDS)
        faults = sorted(faults, key=lambda numbered: order.index(numbered[1].kind))
        self._in_program = [(n, fault) for n, fault in faults if fault.phase not in BETWEEN]
        self._between = {(fault.phase, fault.step): (n, fault) for n, fault in faults if fault.phase in BETWEEN}
        self._places: dict[int, list[_Numbered]] = {}
        self._failing: Fault | None = None
        self._factor = 1.0

    def begin(self, program: Sequence[Instruction], step: int) -> None:
        """An iteration begins: find where in its program the faults strike."""
        self._places, self._factor = {}, 1.0
        for number, fault in self._in_program:
            kind = KINDS[fault.kind]
            if kind.ranged:
                if fault.lasts(step):
                    self._claim(number)  # so that the event is written once; it holds in a repeated iteration too
                    self._strike(number, fault)
            elif fault.step == step:
                self._places.setdefault(kind.position(program, fault.phase), []).append((number, fault))

    def at(self, position: int) -> None:
        """The instruction at `position` is next."""
        for number, fault in self._places.pop(position, []):
            self._claim_and_strike(number, fault)

    def at_phase(self, phase: str, step: int) -> None:
        """The worker has come to a phase of iteration `step` that lies between instructions."""
        if (phase, step) in self._between:
            self._claim_and_strike(*self._between.pop((phase, step)))

    def computed(self, seconds: float) -> None:
        """The stage has computed an F, I, W or B in `seconds`; called inside the computation's stack frame."""
        if self._factor > 1.0:
            time.sleep((self._factor - 1.0) * seconds)
        if self._failing is not None:
            raise RuntimeError(f"struck by the fault {self._failing}")

    def slow_down(self, factor: float) -> None:
        """Every computation of this iteration takes `factor` times as long."""
        self._factor *= factor

    def fail_in_stage(self, fault: Fault) -> None:
        """The next computation raises an exception."""
        self._failing = fault

    def _claim_and_strike(self, number: int, fault: Fault) -> None:
        if self._claim(number):
            self._strike(number, fault)

    def _strike(self, number: int, fault: Fault) -> None:
        strike = KINDS[fault.kind].strike
        assert strike is not None, "only faults that strike a worker are given to one"
        strike(self, number, fault)
