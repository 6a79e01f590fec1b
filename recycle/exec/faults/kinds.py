"""Kinds of faults: each row of `KINDS` has its help text, its point and its function.

The faults are real: signals, exceptions, process limits, dropped packets. The leader gets no more reports than from an
accidental fault. A worker strikes itself at the fault's point. To add a kind, write its function and its row.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from recycle.exec.hooks.phases import Phase
from recycle.exec.transport.connections import cut, open_sockets, own_connections
from recycle.exec.transport.outgoing import LOST_SECONDS
from recycle.ir.instruction import (
    Backward,
    BackwardInput,
    Compute,
    Forward,
    Instruction,
    OverlappedPair,
    ReduceBucket,
    ReduceGradients,
)

if TYPE_CHECKING:
    from recycle.exec.faults.faults import Fault
    from recycle.exec.faults.injector import FaultInjector

BETWEEN: tuple[Phase, ...] = get_args(Phase)[1:]
"""Phases between instructions that a fault may name. The first phase of `Phase` is only the `point` of targets."""
PHASES = ("forward", "backward", "reduce", *BETWEEN)
"""Points of faults: in the middle of such instructions, or between instructions."""
_HEADROOM_BYTES = 64 << 20
_BIT = 20


@dataclass(frozen=True)
class Argument:
    """The number after a kind's `=`, from `least` to `most`."""

    meaning: str
    least: float
    most: float
    needed: bool = False


_INSTRUCTIONS: dict[str | None, tuple[type[Instruction], ...]] = {
    "forward": (Forward, OverlappedPair),
    "backward": (Backward, BackwardInput, OverlappedPair),
    "reduce": (ReduceGradients, ReduceBucket),
    None: (Compute, OverlappedPair),
}


@dataclass(frozen=True)
class Target:
    """One of several targets of a kind.

    Attributes:
        point: the phase of the strike; None for a position in the program.
        ends: whether the worker is fenced afterwards, if its stage has three live hosts or more, a majority of which
            can attribute the fault.
        shows_in_state: whether it is fenced once the hosts of the stage compare their states.
    """

    point: Phase | None = None
    ends: bool = False
    shows_in_state: bool = False


@dataclass(frozen=True, kw_only=True)
class FaultKind:
    """A row of `KINDS`.

    Attributes:
        does: description for `--help` and docs/reference/faults.md.
        strike: called in the worker's process at the fault's point, with its injector and the fault's number in the
            run; None for a kind that strikes no worker.
        ends: the worker is dead afterwards.
        announced: the worker announces its end, and the run loses nothing.
        phases: allowed phases, as alternatives to the middle of the iteration.
        strikes_before_sums: it strikes before the first REDUCE, of a bucket or a whole stage.
        default_phase: the phase in whose middle it strikes by default; None for the middle of all computations.
        targets: by name. The name of a target follows the `=`, and the argument follows a comma.
        argument: None for none.
        argument_is_delay: the argument is the seconds from the fault's point to the strike.
        pair: it strikes two workers; the second follows the `=`. `strike` is called in all their processes, in a thread
            if a process does not reach the fault's point.
        on_link: it strikes the link between two workers, separated by a comma. `strike` is called in all their
            processes, at the beginning of each iteration.
        ranged: it has a range of steps, and strikes at the beginning of each iteration.
    """

    does: str
    example: str
    strike: Callable[[FaultInjector, int, Fault], None] | None
    ends: bool = True
    announced: bool = False
    phases: tuple[str, ...] = PHASES
    strikes_before_sums: bool = False
    default_phase: str | None = None
    targets: Mapping[str, Target] = field(default_factory=dict)
    argument: Argument | None = None
    argument_is_delay: bool = False
    pair: bool = False
    on_link: bool = False
    ranged: bool = False

    @property
    def struck(self) -> bool:
        """Whether a worker reaches the fault's point, and claims the fault there."""
        return self.strike is not None

    def position(self, program: Sequence[Instruction], phase: str | None) -> int:
        """Position in a program of a fault with this phase (None for no phase)."""
        instructions = _INSTRUCTIONS["reduce" if self.strikes_before_sums else phase or self.default_phase]
        places = [p for p, instruction in enumerate(program) if isinstance(instruction, instructions)] or [0]
        return places[0 if self.strikes_before_sums else len(places) // 2]

    def point_of(self, target: str | None) -> Phase | None:
        return None if target is None else self.targets[target].point


FLIPPED = {
    "weight": Target(shows_in_state=True),
    "moment": Target(shows_in_state=True),
    "activation": Target(),
    "gradient": Target("reduced", ends=True),
    "input": Target(),
    "kernel": Target(),
}
"""Targets of a `flip`: see docs/reference/faults.md."""


def _slow_down(injector: FaultInjector, number: int, fault: Fault) -> None:
    injector.factor *= fault.argument or 1.0


def _slow_link(injector: FaultInjector, number: int, fault: Fault) -> None:
    assert fault.other is not None
    if injector.links is not None:
        injector.links.slow_down(fault.worker, fault.other, fault.argument or 1.0)


def _flaky_link(injector: FaultInjector, number: int, fault: Fault) -> None:
    assert fault.other is not None
    if injector.links is not None:
        seed = f"{number} {injector.iteration}"
        injector.links.make_flaky(fault.worker, fault.other, fault.argument or 0.0, seed)


def _fail_in_stage(injector: FaultInjector, number: int, fault: Fault) -> None:
    injector.failing = fault


def _flip(injector: FaultInjector, number: int, fault: Fault) -> None:
    assert fault.target is not None
    injector.flip(fault.target, _BIT if fault.argument is None else int(fault.argument))


def _read_null(injector: FaultInjector, number: int, fault: Fault) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    ctypes.string_at(0)


def _exhaust_memory(injector: FaultInjector, number: int, fault: Fault) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _HEADROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    bytearray(2 * _HEADROOM_BYTES)


def _hold_the_interpreter(injector: FaultInjector, number: int, fault: Fault) -> None:
    library = ctypes.PyDLL(None)
    while True:
        library.sleep(3600)


def _stall(injector: FaultInjector, number: int, fault: Fault) -> None:
    while True:
        time.sleep(3600.0)


def _cut(injector: FaultInjector, number: int, fault: Fault) -> None:
    cut(injector.exchange(number, fault, [str(end) for end in own_connections(open_sockets().values())]))


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
        strike=lambda injector, number, fault: injector.poison(),
        ends=False,
        phases=(),
        strikes_before_sums=True,  # a single host does not spoil sums with peers
    ),
    "flip": FaultKind(
        does="flips a bit of a value that the worker computes with: =TARGET or =TARGET,BIT (0 to 63; default 20)",
        example="flip=gradient:1.1@5",
        strike=_flip,
        ends=False,  # its targets may end the worker
        phases=(),
        default_phase="forward",
        targets=FLIPPED,
        argument=Argument("the number of a bit", 0, 63),
    ),
    "slow": FaultKind(
        does="makes every F, I, W and B of the worker take that many times as long, from one step to the other",
        example="slow=3:1.1@4-8",
        strike=_slow_down,
        ends=False,
        phases=(),
        argument=Argument("a factor", 1.0, 1000.0, needed=True),
        ranged=True,
    ),
    "slow-link": FaultKind(
        does="makes every message between the two workers take that many times as long, from one step to the other",
        example="slow-link=4:1.0,1.1@5-20",
        strike=_slow_link,
        ends=False,
        phases=(),
        argument=Argument("a factor", 1.0, 1000.0, needed=True),
        on_link=True,
        ranged=True,
    ),
    "flaky-link": FaultKind(
        does=f"delays a message between the two workers by {LOST_SECONDS:g} s, with that probability",
        example="flaky-link=0.1:1.0,1.1@5-20",
        strike=_flaky_link,
        ends=False,
        phases=(),
        argument=Argument("a probability", 0.0, 1.0, needed=True),
        on_link=True,
        ranged=True,
    ),
    "kill": FaultKind(
        does="sends SIGKILL, =SECONDS after the point is reached",
        example="kill:1.1@5",
        strike=lambda injector, number, fault: os.kill(os.getpid(), signal.SIGKILL),
        argument=Argument("a delay in seconds", 0.0, 3600.0),
        argument_is_delay=True,
    ),
    "drain": FaultKind(
        does="sends SIGTERM, =SECONDS after the point is reached: the worker leaves after that iteration or the next",
        example="drain:1.1@5",
        strike=lambda injector, number, fault: os.kill(os.getpid(), signal.SIGTERM),
        announced=True,
        argument=Argument("a delay in seconds", 0.0, 3600.0),
        argument_is_delay=True,
    ),
    "stop": FaultKind(
        does="sends SIGSTOP: the process exists and does nothing",
        example="stop:1.1@5.backward",
        strike=lambda injector, number, fault: os.kill(os.getpid(), signal.SIGSTOP),
    ),
    "exception": FaultKind(
        does="raises a Python exception inside the stage",
        example="exception:1.1@5",
        strike=_fail_in_stage,
        phases=("forward", "backward"),
    ),
    "segfault": FaultKind(does="reads a null pointer: a real SIGSEGV", example="segfault:1.1@5", strike=_read_null),
    "oom": FaultKind(
        does="allocates memory beyond a limit of the process (RLIMIT_AS): a real MemoryError",
        example="oom:1.1@5",
        strike=_exhaust_memory,
    ),
    "hang": FaultKind(
        does="hangs forever and holds the interpreter lock, so that no heartbeat is sent",
        example="hang:1.1@5",
        strike=_hold_the_interpreter,
    ),
    "stall": FaultKind(does="hangs forever while its heartbeats continue", example="stall:1.1@5", strike=_stall),
    "cut": FaultKind(
        does="drops every packet between the two workers, on the connections that exist then",
        example="cut=1.0:1.1@5",
        strike=_cut,
        phases=tuple(phase for phase in PHASES if phase not in ("undo", "acknowledge", "form")),
        pair=True,
    ),
}
"""By name. Kinds that end a worker come last, because faults at one point strike in this order."""
