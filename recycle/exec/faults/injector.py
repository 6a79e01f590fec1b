"""Faults on a worker: detects that a fault's point is reached, claims the fault and strikes its own process.

For a fault on a pair of workers, the leader's answer (`Strike`) makes their other processes strike too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from recycle.exec.faults.faults import Fault, parse_fault
from recycle.exec.faults.kinds import BETWEEN, KINDS
from recycle.exec.hooks.hook import IterationHook
from recycle.exec.hooks.phases import Phase
from recycle.exec.members import member_name, members_of, split_member
from recycle.exec.transport.formation import FormingStore
from recycle.exec.transport.outgoing import PacedLinks
from recycle.ir.instruction import Instruction

EXCHANGE_SECONDS = 10.0
"""How long a process waits for the connections of the other worker of a fault."""
_Numbered = tuple[int, Fault]


class FaultInjector(IterationHook):
    """The faults of one worker process.

    Args:
        claim: claims a fault by number; True only once per run. From any thread.
        exchange: exchanges connection ends with the other worker of a fault; takes this process's, returns the other's.

    Attributes:
        factor: slow-down of every computation in this iteration.
        failing: the fault for which the next computation raises an exception.
    """

    def __init__(
        self,
        faults: Sequence[_Numbered] = (),
        claim: Callable[[int], bool] = lambda number: True,
        poison: Callable[[], None] = lambda: None,
        exchange: Callable[[int, Fault, Sequence[str]], list[str]] = lambda number, fault, ends: [],
        flip: Callable[[str, int], None] = lambda target, bit: None,
        links: PacedLinks | None = None,
    ) -> None:
        self._claim = claim
        self._claimed: set[int] = set()
        self.poison: Callable[[], None] = poison
        self.flip: Callable[[str, int], None] = flip
        self.exchange, self.links = exchange, links
        order = list(KINDS)
        faults = sorted(faults, key=lambda numbered: order.index(numbered[1].kind))
        self._in_program: list[_Numbered] = []
        self._between_instructions: dict[tuple[str, int], list[_Numbered]] = {}
        for number, fault in faults:
            phase = KINDS[fault.kind].point_of(fault.target) or fault.phase
            if phase in (*BETWEEN, "reduced"):
                self._between_instructions.setdefault((phase, fault.step), []).append((number, fault))
            else:
                self._in_program.append((number, fault))
        self._positions: dict[int, list[_Numbered]] = {}
        self.failing: Fault | None = None
        self.factor, self.iteration = 1.0, -1

    def begin_iteration(self, iteration: int, program: Sequence[Instruction]) -> None:
        self._positions, self.factor, self.iteration = {}, 1.0, iteration
        if self.links is not None:
            self.links.begin_iteration()
        for number, fault in self._in_program:
            kind = KINDS[fault.kind]
            if kind.ranged:
                if fault.holds_at(iteration):
                    if number not in self._claimed:
                        self._claim(number)  # claimed once, for one event; holds in a repeated iteration too
                        self._claimed.add(number)
                    self.strike(number, fault)
            elif fault.step == iteration:
                self._positions.setdefault(kind.position(program, fault.phase), []).append((number, fault))

    def before_instruction(self, position: int, instruction: Instruction) -> None:
        for number, fault in self._positions.pop(position, []):
            self._reach(number, fault)

    def reach(self, phase: Phase, step: int) -> None:
        """Strike the first fault in this phase that has not struck yet."""
        faults = self._between_instructions.get((phase, step), [])
        while faults and not self._reach(*faults.pop(0)):
            pass

    def computed(self, seconds: float) -> None:
        if self.factor > 1.0:
            time.sleep((self.factor - 1.0) * seconds)
        if self.failing is not None:
            raise RuntimeError(f"struck by the fault {self.failing}")

    def _reach(self, number: int, fault: Fault) -> bool:
        if KINDS[fault.kind].argument_is_delay and fault.argument:
            threading.Thread(target=self._strike_later, args=(number, fault, fault.argument), daemon=True).start()
        elif self._claim(number):
            self.strike(number, fault)
        else:
            return False
        return True

    def _strike_later(self, number: int, fault: Fault, delay: float) -> None:
        time.sleep(delay)
        if self._claim(number):
            self.strike(number, fault)

    def strike(self, number: int, fault: Fault) -> None:
        strike = KINDS[fault.kind].strike
        assert strike is not None, "only faults that strike a worker are given to one"
        strike(self, number, fault)


class StruckMember(Protocol):
    """The part of `recycle.exec.worker.member.Member` that faults use."""

    name: str

    @property
    def live(self) -> Collection[str]: ...

    def claim(self, fault: int) -> bool: ...

    def await_strike(self, fault: int) -> bool: ...


def start_injector(
    faults: Sequence[str],
    tensor_parallel: int,
    member: StruckMember,
    open_store: Callable[[], FormingStore],
    poison: Callable[[], None],
    flip: Callable[[str, int], None],
    links: PacedLinks | None = None,
) -> FaultInjector:
    """Create the injector of a process, with threads for faults that another process of a pair reaches."""
    worker, _ = split_member(member.name)
    exchange = partial(_exchange, member, open_store, tensor_parallel)
    own: list[_Numbered] = []
    for number, fault in enumerate(map(parse_fault, faults)):
        is_of_pair = fault.other is not None and worker in (str(fault.worker), str(fault.other))
        if KINDS[fault.kind].on_link:
            if worker in (str(fault.worker), str(fault.other)):
                own.append((number, fault))
        elif KINDS[fault.kind].struck and member_name(fault.worker, fault.tensor_rank) == member.name:
            own.append((number, fault))
        elif is_of_pair:
            injector = FaultInjector(exchange=exchange)
            threading.Thread(target=_await_and_strike, args=(number, fault, injector, member), daemon=True).start()
    return FaultInjector(own, member.claim, poison, exchange, flip, links)


def _await_and_strike(number: int, fault: Fault, injector: FaultInjector, member: StruckMember) -> None:
    if member.await_strike(number):
        injector.strike(number, fault)


def _exchange(
    member: StruckMember,
    open_store: Callable[[], FormingStore],
    tensor_parallel: int,
    number: int,
    fault: Fault,
    own_ends: Sequence[str],
) -> list[str]:
    other = fault.other if split_member(member.name)[0] == str(fault.worker) else fault.worker
    assert other is not None
    ends: list[str] = []
    store = open_store()
    if str(other) in member.live:
        store.set(_ends_key(number, member.name), " ".join(own_ends))
        with suppress(RuntimeError):  # the generation is over, or the keys are late
            for peer in members_of([other], tensor_parallel):
                ends += store.get(_ends_key(number, peer)).decode().split()
    return ends


def _ends_key(number: int, member: str) -> str:
    return f"fault{number}/ends/{member}"
