"""Who strikes the faults.

A worker notices that a fault's point is reached, claims the fault and strikes itself (`FaultInjector`). Of a fault that
is struck from outside it claims the point and stops there; the coordinator writes the event and asks for the strike in
the store (`StrikeKey`); whoever started the worker's processes, the launcher or the agent of the worker's node, strikes
(`OutsideStrikes`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from recycle.exec.faults.fault import BETWEEN, Fault
from recycle.exec.faults.kinds import KINDS, StruckProcesses
from recycle.exec.membership.schema import StrikeKey
from recycle.exec.membership.store import Store
from recycle.ir.instruction import Instruction

_Numbered = tuple[int, Fault]


class FaultInjector:
    """The faults of one worker process.

    Args:
        faults: those that strike here, each with its number in the run.
        claim: claims a fault by number; True only once per run. claim_in_thread: likewise, from another thread.
        poison: spoils the gradients that this worker has summed so far.
        wait_for_strike: returns when a fault has been struck from outside.
    """

    def __init__(
        self,
        faults: Sequence[_Numbered] = (),
        claim: Callable[[int], bool] = lambda number: True,
        poison: Callable[[], None] = lambda: None,
        wait_for_strike: Callable[[int], object] = lambda number: None,
        claim_in_thread: Callable[[int], bool] = lambda number: True,
    ) -> None:
        self._claim, self._claim_in_thread = claim, claim_in_thread
        self.poison, self.wait_for_strike = poison, wait_for_strike
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
            self._reach(number, fault)

    def at_phase(self, phase: str, step: int) -> None:
        """The worker has come to a phase of iteration `step` that lies between instructions."""
        if (phase, step) in self._between:
            self._reach(*self._between.pop((phase, step)))

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

    def _reach(self, number: int, fault: Fault) -> None:
        """Claim the fault and strike, at once or after its delay."""
        if KINDS[fault.kind].argument_is_delay and fault.argument:
            threading.Thread(target=self._strike_later, args=(number, fault, fault.argument), daemon=True).start()
        elif self._claim(number):
            self._strike(number, fault)

    def _strike_later(self, number: int, fault: Fault, delay: float) -> None:
        time.sleep(delay)
        if self._claim_in_thread(number):
            self._strike(number, fault)

    def _strike(self, number: int, fault: Fault) -> None:
        strike = KINDS[fault.kind].strike
        assert strike is not None, "only faults that strike a worker are given to one"
        strike(self, number, fault)


class OutsideStrikes:
    """Strikes the faults of a run at the processes that this process started.

    Strikes that were asked for before are not made: they were for processes of an earlier agent.

    Args:
        faults: all faults of the run.
        processes: that this process started.
        store: of the run.
    """

    def __init__(self, faults: Sequence[Fault], processes: StruckProcesses, store: Store) -> None:
        self._processes, self._store = processes, store
        self._open = {
            number: fault
            for number, fault in enumerate(faults)
            if KINDS[fault.kind].from_outside is not None and not store.has_all([StrikeKey(number)])
        }

    def tick(self) -> None:
        """Strike what has been asked for since the last call."""
        for number, fault in list(self._open.items()):
            strike = KINDS[fault.kind].from_outside
            assert strike is not None
            asked = self._store.has_all([StrikeKey(number)])
            if asked and strike(number, fault, self._processes, self._store):
                del self._open[number]
