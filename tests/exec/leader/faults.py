"""What strikes the simulated world from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from recycle.exec.leader.actions import DepartureAsked, EndEarly
from recycle.exec.protocol import FromWorker, Leaving
from recycle.job.shape import Worker
from tests.exec.leader.process import KILLED

if TYPE_CHECKING:
    from tests.exec.leader.process import Process
    from tests.exec.leader.world import World


def strike(world: World, kind: str, worker: Worker | None) -> None:
    """Have a fault strike a worker's process, if it has one; any process when it is left out."""
    process = world.random.choice(world.running or [None]) if worker is None else world.process(worker)
    if process is None:
        return
    world.log(f"{kind} strikes {process}")
    world.figures.disturbed = world.now
    process.is_blameless = False
    FAULTS[kind][1](world, process)


def _kill(world: World, process: Process) -> None:
    process.end(KILLED)


def _kill_rank(world: World, process: Process) -> None:
    for peer in list(world.running):
        if peer.worker.rank == process.worker.rank:
            world.after(world.draw(0.0, 1.0), partial(peer.end, KILLED))


def _hang(world: World, process: Process) -> None:
    process.hangs_next = True
    world.miss(process)


def _freeze(world: World, process: Process) -> None:
    process.is_hung = process.is_silent = True
    world.miss(process)


def _slow(world: World, process: Process) -> None:
    process.slowness = world.draw(2.0, 6.0)


def _cut(world: World, process: Process) -> None:
    others = [peer for peer in world.running if peer is not process]
    if not others:
        return
    peer = world.random.choice(others)
    peer.is_blameless = False
    pair = frozenset((process, peer))
    world.cuts.add(pair)
    world.after(world.draw(5.0, 60.0), partial(world.cuts.discard, pair))
    if process.is_open and peer.is_open and process.generation == peer.generation:
        world.cut_off(process, peer, process.generation)
        world.cut_off(peer, process, process.generation)


def _break(world: World, process: Process) -> None:
    if process.is_open:
        process.broken.setdefault(process.generation, "its connection was reset")
        process.poke()


def _fail_to_form(world: World, process: Process) -> None:
    process.failures_to_form = world.random.choice([1, 1, 2, 3])


def _make_nan(world: World, process: Process) -> None:
    world.nans = world.random.choice([1, 1, 2])


def _change_sums(world: World, process: Process) -> None:
    process.odd_sums = world.random.choice([1, 1, 2, 3])


def _change_state(world: World, process: Process) -> None:
    process.state = replace(process.state, is_wrong=True)


def _ask_to_leave(world: World, process: Process) -> None:
    world.give(DepartureAsked([process.worker], world.random.choice([None, 1.0, 10.0])))


def _tell_to_leave(world: World, process: Process) -> None:
    world.may_end_early = True  # all live workers may be asked
    if process.has_joined:
        process.agent.hear(FromWorker(process.name, Leaving(process.incarnation)))


def _tell_all_to_leave(world: World, process: Process) -> None:
    for peer in list(world.running):
        _tell_to_leave(world, peer)


def _end_early(world: World, process: Process) -> None:
    world.may_end_early = world.is_ending = True
    world.give(EndEarly())


def _lose_node(world: World, process: Process) -> None:
    world.lose_node(process.agent.node)


def _leave_node(world: World, process: Process) -> None:
    world.may_end_early = True
    world.leave_node(process.agent.node)


def _lose_connection(world: World, process: Process) -> None:
    seconds = world.draw(0.0, 2.0) if world.random.random() < 0.6 else world.draw(2.0, 20.0)
    process.agent.lose_connection(seconds)


def _stall(world: World, process: Process) -> None:
    world.stalls_until, world.has_stalled = world.now + world.draw(1.0, 8.0), True


FAULTS: dict[str, tuple[float, Callable[[World, Process], None]]] = {
    "kill": (8, _kill),
    "kill rank": (1, _kill_rank),
    "hang": (1.5, _hang),
    "freeze": (1.5, _freeze),
    "slow": (1, _slow),
    "cut": (2, _cut),
    "trouble": (1.5, _break),
    "form": (2, _fail_to_form),
    "nan": (1, _make_nan),
    "odd sums": (1, _change_sums),
    "wrong state": (1, _change_state),
    "drain": (1.5, _ask_to_leave),
    "notice": (1, _tell_to_leave),
    "notice all": (0.5, _tell_all_to_leave),
    "end early": (1, _end_early),
    "node": (1.5, _lose_node),
    "node leaves": (1, _leave_node),
    "away": (3, _lose_connection),
    "stall": (1, _stall),
}
"""How often a seed has it, and what it does."""
WRONG = {"nan", "odd sums", "wrong state"}
"""Those after which a run may fail because what workers compute is wrong."""
