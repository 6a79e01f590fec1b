"""Random stories: what a seed draws, what a run of it violates, and the shortest story that violates the same rule."""

from __future__ import annotations

import random
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any

from recycle.job.shape import Worker, place_workers
from tests.exec.explore.cluster import Cluster, Scenario, job_of
from tests.exec.explore.faults import HARMLESS, Fault
from tests.exec.explore.rules import Violation
from tests.exec.explore.script import UserScript

WEIGHTS = {
    "kill worker": 4,
    "stop worker": 2,
    "leave worker": 1,
    "drain worker": 2,
    "kill agent": 2,
    "stop agent": 3,
    "lose node": 2,
    "leave node": 1,
    "end run": 1,
    "cut": 2,
    "isolate": 3,
    "cut from store": 2,
    "fill disk": 1,
    "stall store": 2,
    "stall store reads": 2,
    "slow store": 3,
    "lose answers": 2,
    "lose leases": 1,
    "forge": 1,
    "suspend": 1,
}
"""How often a seed has a kind of fault."""
ENDS = {
    "interrupt agent": 3,
    "interrupt run": 1,
    "leave node": 3,
    "end run": 2,
    "second agent": 2,
    "wipe store": 1,
    "kill worker": 2,
    "stop worker": 1,
    "kill agent": 2,
    "lose leases": 1,
    "stall store": 1,
}
"""How often a run whose agents come late, or are ended, has a kind of fault."""
OF_LAUNCHER = {
    "end run": 3,
    "interrupt run": 1,
    "kill worker": 3,
    "stop worker": 2,
    "leave worker": 1,
    "drain worker": 2,
    "fill disk": 1,
}
"""The same for `recycle train`, whose process is agent 0."""
ARRIVALS = {0.5: 6, 3.0: 3, 20.0: 2, 39.0: 1, 60.0: 1, -1.0: 1}
"""Seconds at which an agent starts, at most; never if negative."""
STORE = {"stall store", "stall store reads", "slow store", "lose answers", "lose leases"}
OF_ALL = {"end run", "interrupt run", "wipe store", "fill disk", "suspend"} | STORE
INSTANT = {"kill worker", "leave worker", "kill agent", "lose node", "leave node", "end run", "lose leases", "forge"}
INSTANT |= {"interrupt run", "wipe store"}
LONGEST_PAUSE = 5.0
"""Seconds, shorter than a lease."""
AIMED = {
    "break": 6,
    "lose leases": 6,
    "forge": 1,
    "suspend": 2,
    "lose answers": 1,
    "stall store": 1,
    "fail to form": 1,
    "kill worker": 2,
    "kill agent": 2,
    "stop agent": 1,
    "isolate": 1,
    "leave node": 1,
    "leave worker": 1,
    "drain worker": 2,
    "drain node": 2,
    "end run": 1,
}
"""How often a fault that is aimed at a moment of the leader has a kind."""
_THREE = Scenario(3, 1, 1, micro_batches=1, steps=4, spared=frozenset({0}))
_TWO = replace(_THREE, pipelines=2, spared=frozenset(), checkpoint_every=2, steps=5)
_FOUR = replace(_THREE, pipelines=2, ranks=2, spared=frozenset())
_LOST = replace(_TWO, planned=("kill:0.0@3", "kill:1.0@3"))
_ALL = frozenset(range(4))
_DRAIN = Fault(3.5, "drain worker", 1)
WORLDS = {
    "calm": replace(_THREE, eval_every=2, checkpoint_every=2),
    "long": replace(_THREE, planned=("slow=6:0.0@1",), restarts=0, steps=12),
    "rejoin": replace(_THREE, planned=("rejoin:1.0@2", "kill:1.0@1"), restarts=0, slow_plans=1.0),
    "rejoin at a checkpoint": replace(
        _THREE, planned=("rejoin:0.0@2", "kill:0.0@1"), checkpoint_every=2, spared=frozenset({1})
    ),
    "rejoin with shards": replace(
        _FOUR, planned=("rejoin:1.1@2", "kill:1.1@1"), sharded=True, spared=frozenset({0, 1})
    ),
    "restart": replace(_THREE, planned=("kill:1.0@1", "slow=6:0.0@2"), eval_every=2, steps=9),
    "late to leave": replace(_THREE, faults=(_DRAIN._replace(seconds=0.3),), planned=("slow=9:2.0@0",), steps=6),
    "leave": replace(_THREE, faults=(Fault(3.5, "leave worker", 1),), checkpoint_every=2, steps=6),
    "leave at a checkpoint": replace(
        _FOUR,
        faults=(_DRAIN._replace(target=3),),
        sharded=True,
        checkpoint_every=1,
        steps=6,
        spared=frozenset(range(4)),
    ),
    "stopped": replace(_THREE, planned=("slow=6:0.0@1",), faults=(Fault(3.0, "end run"),), restarts=0, steps=8),
    "stopped at a checkpoint": replace(
        _FOUR, faults=(Fault(4.0, "end run"),), sharded=True, checkpoint_every=1, steps=6
    ),
    "two leave": replace(_THREE, faults=(_DRAIN, Fault(3.6, "drain worker", 2)), sharded=True, steps=8, spared=_ALL),
    "cut between last hosts": replace(
        _FOUR, planned=("kill:0.1@1", "kill:1.0@1"), faults=(Fault(5.5, "cut", 3, 12.0),), restarts=0, steps=32, seed=2
    ),
    "wrong state": replace(_FOUR, planned=("flip=weight:1.0@3",), digests=1, checkpoint_every=2, steps=5),
    "wrong state and joiner": replace(
        _THREE, digests=3, planned=("rejoin:1.0@4", "kill:1.0@1", "flip=weight:2.0@4"), steps=7
    ),
    "stage lost": _LOST,
    "tensor-parallel stage lost": replace(_LOST, tensor_parallel=2),
    "stage lost before its state is compared": replace(
        _LOST, planned=("kill:0.0@4", "kill:1.0@4"), digests=2, staggered=False, steps=6
    ),
    "slow operation": replace(
        _THREE, planned=("slow=65:2.0@0",), faults=(Fault(11.0, "kill worker", 1),), restarts=0, steps=2
    ),
    "two return": replace(
        _THREE,
        pipelines=4,
        planned=("rejoin:1.0@2", "rejoin:2.0@2", "kill:1.0@1", "kill:2.0@1"),
        look_seconds=0.05,
        restarts=0,
        spared=frozenset({0, 3}),
    ),
    "node away at a return": replace(
        _THREE,
        planned=("rejoin:1.0@2", "kill:1.0@1"),
        faults=(Fault(0.0, "kill agent", 1, 0.0, "ended"),),
        restarts=0,
    ),
    "asked to leave when the next process is ordered": replace(
        _THREE,
        planned=("slow=3:0.0@0",),
        faults=(Fault(4.5, "isolate", 1, 8.5), Fault(0.0, "leave worker", 1, 0.0, "Start", 4)),
        steps=14,
        spared=frozenset({0, 2}),
    ),
    "broken device": replace(
        _THREE, planned=("flip=kernel:1.0@2",), replays=2, restarts=0, steps=6, spared=frozenset({0, 2})
    ),
    "large gradients": replace(_THREE, clip=4.0, surges=(2, 4), copy_seconds=0.05, steps=6),
    "slow worker": replace(_THREE, planned=("slow=4:1.0@1-6",), drift_iterations=2, micro_batches=2, steps=12),
    "slow worker at a death": replace(
        _THREE,
        planned=("slow=4:1.0@1-30", "kill:2.0@5"),
        drift_iterations=2,
        micro_batches=2,
        slow_plans=0.5,
        restarts=0,
        steps=16,
        spared=frozenset({0, 1}),
    ),
    "shard lost": replace(_TWO, sharded=True, optimizer_copies=1, planned=("kill:1.0@3",), restarts=1),
    "places of live workers": replace(
        _FOUR, planned=("kill:0.1@3", "kill:1.1@3"), checkpoint_every=2, restarts=0, steps=5
    ),
    "no device": replace(_THREE, faults=(Fault(0.0, "fail to form", 1, 60.0, "Propose"),), restarts=0, steps=2),
}
"""Runs in which something happens, at whose moments faults are aimed."""
_SCRIPT = replace(_THREE, checkpoint_every=2, eval_every=2, staggered=False, script=UserScript())
_SCRIPT_LOST = replace(_SCRIPT, pipelines=2, spared=frozenset(), steps=5, planned=("kill:0.0@3", "kill:1.0@3"))
SCRIPTS = {
    "script": _SCRIPT,
    "script rejoins": replace(
        _SCRIPT, planned=("rejoin:1.0@2", "kill:1.0@1"), restarts=0, script=UserScript(pauses=True)
    ),
    "script restarts": replace(_SCRIPT, ranks=2, planned=("kill:1.0@1", "slow=4:0.0@2"), steps=6),
    "script leaves": replace(_SCRIPT, faults=(Fault(3.5, "leave worker", 1),), steps=6),
    "script loses a stage": replace(_SCRIPT_LOST, script=UserScript(restarts=1)),
    "script loses a stage twice": replace(
        _SCRIPT_LOST,
        ranks=2,
        planned=("kill:0.1@1", "kill:1.1@1", "kill:0.0@4", "kill:1.0@4"),
        script=UserScript(restarts=2),
    ),
    "script fails": replace(_SCRIPT, script=UserScript(restarts=1, fails_at=3)),
    "script fails at the end": replace(_SCRIPT, steps=3, script=UserScript(fails_at=3)),
    "script fails after its session": replace(_SCRIPT, steps=3, script=UserScript(fails_at=4)),
    "script fails after it has saved all": replace(_SCRIPT, script=UserScript(restarts=2, fails_at=4)),
    "script stops": replace(_SCRIPT, script=UserScript(stops_at=1)),
    "script is stopped": replace(_SCRIPT, faults=(Fault(3.5, "end run"),), steps=8),
    "script is stopped while a worker is stuck": replace(
        _SCRIPT, planned=("stall:1.0@3",), faults=(Fault(4.9, "end run"),), steps=8
    ),
}
"""Such runs of a user's script."""
_LAUNCHED = replace(_THREE, launched=True, checkpoint_every=2, eval_every=2, returns=False, restarts=0)
ENDED = [
    *(WORLDS[name] for name in ("calm", "rejoin", "restart", "two leave")),
    _LAUNCHED,
    replace(_LAUNCHED, planned=("rejoin:1.0@2", "kill:1.0@1"), steps=6),
    replace(_LAUNCHED, pipelines=2, ranks=2, sharded=True),
]
"""Runs that their users end at a moment."""
PLANNED = ["kill", "kill", "drain", "nan", "exception", "stop", "stall", "slow=3"]
PLANNED += ["kill.gather", "kill.commit", "kill.step"]
"""Faults that the worker's own injector strikes."""
LEAST: dict[str, Any] = {
    "micro_batches": 1,
    "checkpoint_every": 0,
    "eval_every": 0,
    "slow_messages": 0.0,
    "staggered": False,
    "tensor_parallel": 1,
    "sharded": False,
    "elastic": False,
    "digests": 0,
    "replays": 0,
    "clip": 9.0,
    "surges": (),
    "copy_seconds": 0.0,
    "look_seconds": 0.0,
    "drift_iterations": 0,
    "optimizer_copies": 2,
}
"""What a shorter story is without."""
MOST_EFFECTS = {"": 60, " writes": 20, " role": 20}
"""Effects of an agent in most runs, and its requests to write to etcd."""
JOBS, ROUNDS = 64, 64
"""Jobs that seeds take in turns, and how often before other jobs: plans and references of a job are computed once."""
SLOW = 0.04
"""Share of seeds whose leader measures slow workers."""
SCRIPT_SHARE = 1 / 6
"""Of seeds with a script of the user's own."""
SINGLE = 0.15
"""Share of the seeds with a sharded optimizer in which each shard has one copy."""
DRAIN = 0.1
"""Share of the seeds with faults of nodes in which one of these is a drain of the node."""
TRIES = 12
"""Seeds with which a shorter story is tried."""
CPU_SECONDS = 20.0
"""Far more than a run takes."""


def _draw_job(number: int) -> Scenario:
    draws = random.Random(f"job {number}")

    def chance(share: float) -> bool:
        return draws.random() < share

    pipelines, ranks = draws.choices([(2, 1), (3, 1), (2, 2), (3, 2)], [6, 3, 3, 1])[0]
    sharded = chance(0.2)
    return Scenario(
        pipelines=pipelines,
        ranks=ranks,
        per_node=draws.choice([1, 1, 2]) if ranks > 1 else 1,
        micro_batches=draws.choice([1, 1, 2]),
        steps=draws.choice([2, 2, 3, 4]),
        checkpoint_every=draws.choice([0, 0, 0, 2]),
        eval_every=draws.choice([0, 0, 2]),
        staggered=chance(0.7),
        tensor_parallel=2 if chance(0.1) else 1,
        sharded=sharded,
        elastic=not sharded and ranks > 1 and chance(0.3),
        digests=draws.choice([0, 0, 0, 1, 2]),
        clip=draws.choice([9.0, 9.0, 4.0, 1.5]),
        surges=draws.choice([(), (), (1,), (2,)]),
        copy_seconds=draws.choice([0.0, 0.0, 0.05]),
        look_seconds=draws.choice([0.0, 0.0, 0.0, 0.05]),
    )


def draw_scenario(seed: int) -> Scenario:
    draws, of_script = random.Random(seed), random.Random(f"script {seed}")
    has_script = of_script.random() < SCRIPT_SHARE

    def chance(share: float) -> bool:
        return draws.random() < share

    if random.Random(f"ends {seed}").random() < 0.1:
        return _begun_and_ended(draws, seed)
    if chance(0.5):
        return _aimed(draws, seed, SCRIPTS if has_script else WORLDS)
    scenario = _draw_job(seed // (JOBS * ROUNDS) * JOBS + seed % JOBS)
    if has_script:
        scenario = _with_script(of_script, scenario)
    scenario = replace(scenario, slow_messages=draws.choice([0.0, 0.0, 0.02]), seed=seed)
    pipelines, steps, sharded = scenario.pipelines, scenario.steps, scenario.sharded
    places = place_workers(job_of(scenario.calm).shape, scenario.per_node)
    homes = {worker: node for node, workers in enumerate(places) for worker in workers}
    workers = list(homes)
    spared = frozenset[int]()
    if chance(0.6):  # all of a pipeline is never struck, or of so many that each shard has a copy there
        safe = draws.sample(range(pipelines), pipelines - 1 if sharded else 1)
        spared = frozenset(number for number, worker in enumerate(workers) if worker.pipeline in safe)
    spared_nodes = {homes[workers[number]] for number in spared}
    nodes = [node for node in set(homes.values()) if node not in spared_nodes]
    others = [number for number in range(len(workers)) if number not in spared and homes[workers[number]] in nodes]
    if scenario.digests and others and chance(0.5):  # hosts of a stage that all live find what is wrong
        flip = f"flip={draws.choice(['weight', 'gradient'])}:{workers[draws.choice(others)]}@{draws.randrange(steps)}"
        return replace(scenario, spared=spared, planned=(flip,))
    planned = list[str]()
    for worker in [workers[draws.choice(others)]] if others and chance(0.3) else ():
        kind, step = draws.choice(PLANNED), draws.randrange(steps)
        if (kind == "kill" and step < steps - 1) and chance(0.5):
            planned.append(f"rejoin:{worker}@{draws.randrange(step + 1, steps)}")
        name, _, phase = kind.partition(".")
        is_late = phase == "gather" and not sharded
        planned.append(f"{name}:{worker}@{step}" + (f".{phase}" if phase and not is_late else ""))
    faults, time = list[Fault](), draws.random() * (steps + 3.0)  # a run without faults takes so long
    for kind in draws.choices(list(WEIGHTS), list(WEIGHTS.values()), k=draws.choice([0, 1, 1, 2, 2, 3, 4])):
        targets = [0] if kind in OF_ALL else others if "worker" in kind else nodes
        if not targets or (kind == "cut" and spared) or (kind == "suspend" and not _may_pause(planned)):
            continue
        seconds = draws.choice([0.5, 2.0, 4.0, 7.0, 15.0]) * (0.5 + draws.random())
        if kind in OF_ALL:  # without an answer for `store_timeout` a run may end
            seconds = min(seconds, LONGEST_PAUSE if kind == "suspend" else 6.0)
        faults.append(Fault(time, kind, draws.choice(targets), 0.0 if kind in INSTANT else seconds))
        if chance(0.25) and targets != [0]:
            faults.append(Fault(time + draws.random() * 5.0, "kill worker", draws.choice(others), 0.0))
        time += draws.choice([0.0, 1.0, 4.0]) * draws.random()
    crashes = frozenset[tuple[str, int]]()
    if nodes and chance(0.3):
        kind = draws.choice(list(MOST_EFFECTS))
        crashes = frozenset({(f"agent {draws.choice(nodes)}{kind}", draws.randrange(1, MOST_EFFECTS[kind]))})
    if {fault.kind for fault in faults} & STORE:  # an agent whose connection is gone would not find its leader
        faults = [fault for fault in faults if fault.kind != "forge"]
    faults.sort()
    scenario = replace(scenario, spared=spared, planned=tuple(planned), faults=tuple(faults), crashes=crashes)
    return _with_rare_parts(scenario, workers, random.Random(f"rare {seed}"))


def _with_rare_parts(scenario: Scenario, workers: Sequence[Worker], draws: random.Random) -> Scenario:
    """Perhaps with slow workers, or a drained node. Drawn apart, so that other seeds stay as they are."""
    kinds = {fault.kind for fault in scenario.faults}
    if draws.random() < SLOW and "suspend" not in kinds and not scenario.tensor_parallel > 1:
        slow = []
        for worker in draws.sample(workers, draws.choice([1, 1, 2])):
            first = draws.randrange(3)
            last = draws.choice([first + 5, first + 9, 99])
            slow.append(f"slow={draws.choice([2, 3, 4])}:{worker}@{first}-{last}")
        faults = tuple(fault._replace(time=2.5 * fault.time) for fault in scenario.faults)
        planned = tuple(text for text in scenario.planned if not text.startswith("slow"))
        scenario = replace(scenario, micro_batches=2, steps=draws.choice([10, 14, 20]), faults=faults)
        scenario = replace(scenario, drift_iterations=2, planned=(*planned, *slow))
    is_struck_by_flip = any(text.startswith("flip") for text in scenario.planned)
    if scenario.sharded and not is_struck_by_flip and draws.random() < SINGLE:  # every death needs a checkpoint
        scenario = replace(scenario, optimizer_copies=1, checkpoint_every=2, spared=frozenset())
    of_nodes = [fault for fault in scenario.faults if fault.kind.endswith((" node", " agent"))]
    if of_nodes and draws.random() < DRAIN:
        replaced = draws.choice(of_nodes)
        drained = replaced._replace(kind="drain node", seconds=draws.choice([0.0, 0.0, 0.5, 5.0]))
        faults = tuple(drained if fault is replaced else fault for fault in scenario.faults)
        scenario = replace(scenario, faults=faults)
    return scenario


def _begun_and_ended(draws: random.Random, seed: int) -> Scenario:
    """A run whose agents come late, twice or never, or that its user ends, also while it starts; or a launcher's."""
    way = draws.choice(["agents", "agents", "launcher", "moment"])
    if way == "moment":
        world = draws.choice(ENDED)
        faults = [
            Fault(0.0, draws.choice(["end run", "end run", "interrupt run"]), 0, 0.0, *draws.choice(_moments(world)[0]))
        ]
        if draws.random() < 0.4:
            moment = draws.choice(_moments(world)[0])
            kind = draws.choice(["break", "lose leases", "leave node", "stop worker", "kill worker"])
            faults.append(Fault(0.0, kind, draws.randrange(world.pipelines * world.ranks), 1.5, *moment))
        return replace(world, seed=seed, faults=tuple(faults), returns=False, spared=frozenset())
    scenario = replace(_draw_job(seed // (JOBS * ROUNDS) * JOBS + seed % JOBS), seed=seed)
    scenario = replace(scenario, launched=way == "launcher", restarts=draws.choice([0, 1, 3]))
    places = place_workers(job_of(scenario.calm).shape, scenario.per_node)
    homes = {worker: node for node, workers in enumerate(places) for worker in workers}
    safe = draws.sample(range(scenario.pipelines), scenario.pipelines - 1 if scenario.sharded else 1)
    spared = frozenset(number for number, worker in enumerate(homes) if worker.pipeline in safe)
    nodes = sorted(set(homes.values()) - {homes[worker] for worker in homes if worker.pipeline in safe})
    others = [number for number, worker in enumerate(homes) if homes[worker] in nodes]
    weights, arrivals = (OF_LAUNCHER, ()) if scenario.launched else (ENDS, _draw_arrivals(draws, len(places)))
    time, faults = draws.random() * (max(arrivals, default=0.0) + scenario.steps + 3.0), list[Fault]()
    for kind in draws.choices(list(weights), list(weights.values()), k=draws.choice([0, 1, 1, 2, 2, 3, 6])):
        targets = [0] if kind in OF_ALL else others if "worker" in kind else nodes
        seconds = 0.0 if kind in INSTANT else draws.choice([0.0, 0.0, 1.0, 4.0, 8.0]) * (0.5 + draws.random())
        if targets:
            faults.append(Fault(time, kind, draws.choice(targets), seconds))
        time += draws.choice([0.0, 0.3, 1.0, 8.0]) * draws.random()
    spared = frozenset() if any(fault.kind == "interrupt run" for fault in faults) else spared
    returns = not scenario.launched and draws.random() < 0.7
    return replace(scenario, spared=spared, arrivals=arrivals, faults=tuple(faults), returns=returns)


def _draw_arrivals(draws: random.Random, nodes: int) -> tuple[float, ...]:
    drawn = draws.choices(list(ARRIVALS), list(ARRIVALS.values()), k=nodes)
    arrivals = tuple(seconds * (1.0 - 0.5 * draws.random()) for seconds in drawn)
    return arrivals if draws.random() < 0.5 and max(arrivals) > 0.0 else ()


def _may_pause(planned: Iterable[str]) -> bool:
    """A slow operation takes a multiple of its time, with pauses, and may count as hung."""
    return not any(text.startswith("slow") for text in planned)


@cache
def _moments(world: Scenario) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """The moments of a world's leader, and its writes that may cost it the role, with their numbers."""
    outcome_of(cluster := Cluster(world))
    moments = {name: most for name, most in cluster.moments.items() if name not in ("Tick", "Line", "Waiting", "Begin")}
    writes = {name: most for name, most in cluster.kernel.effects.items() if name.endswith(" role")}
    return tuple([(name, at + 1) for name in sorted(most) for at in range(most[name])] for most in (moments, writes))


def _with_script(draws: random.Random, scenario: Scenario) -> Scenario:
    steps = scenario.steps
    never = [-1] * 8
    script = UserScript(
        restarts=draws.choice([0, 0, 1, 2]),
        fails_at=draws.choice([*never, steps - 1, steps, steps + 1]),
        stops_at=draws.choice([*never, steps // 2]),
        pauses=draws.random() < 0.2,
    )
    every = draws.choice([0, 1, 2, 2])
    return replace(
        scenario, staggered=False, sharded=False, elastic=False, digests=0, checkpoint_every=every, script=script
    )


def _aimed(draws: random.Random, seed: int, worlds: Mapping[str, Scenario]) -> Scenario:
    """A world, and faults that are aimed at moments of its leader."""
    world = draws.choice(list(worlds.values()))
    workers = world.pipelines * world.ranks
    others = [number for number in range(workers) if world.spared and number not in world.spared]
    kinds = list(AIMED) if others and draws.random() < 0.4 else list(HARMLESS)
    kinds = [kind for kind in kinds if kind != "suspend" or _may_pause(world.planned)]
    moments, writes = _moments(world)
    faults, (moment, number) = list(world.faults), draws.choice(moments)
    for kind in draws.choices(kinds, [AIMED[kind] for kind in kinds], k=draws.choice([1, 1, 2, 3])):
        if draws.random() < 0.3:
            moment, number = draws.choice(moments)
        seconds = draws.choice([0.0, 0.0, 0.5, 1.5]) if kind == "break" else draws.choice([0.5, 1.5, 5.0, 12.0])
        seconds = min(seconds, LONGEST_PAUSE) if kind == "suspend" else seconds
        target = draws.choice(range(workers) if kind in HARMLESS else others)
        faults.append(Fault(0.0, kind, target, seconds, moment, number))
    staggered = world.staggered and draws.random() < 0.7
    return replace(
        world,
        seed=draws.choice([world.seed, seed]),
        faults=tuple(faults),
        staggered=staggered,
        returns=draws.random() < 0.8,
        crashes=frozenset([draws.choice(writes)] if draws.random() < 0.2 else []),
    )


def violation_of(scenario: Scenario, trace: Callable[[str], None] | None = None) -> Violation | None:
    """What a run violates; None if it violates no rule."""
    return outcome_of(Cluster(scenario, trace))


def outcome_of(cluster: Cluster, directory: Path | None = None) -> Violation | None:
    def stop(*_: object) -> None:
        raise Violation("loop", f"more than {CPU_SECONDS:g} s of CPU time: {traceback.format_stack(limit=8)}")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        cluster.run(directory)
    except Violation as violation:
        return violation
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
    return None


def shorter(scenario: Scenario) -> Iterator[Scenario]:
    """What may be left out."""
    for place in range(len(scenario.faults)):
        yield replace(scenario, faults=scenario.faults[:place] + scenario.faults[place + 1 :])
    if scenario.steps > 2:
        yield replace(scenario, steps=scenario.steps - 1)
    if scenario.arrivals:
        yield replace(scenario, arrivals=())
    if scenario.crashes:
        yield replace(scenario, crashes=frozenset())
    for place in range(len(scenario.planned)):  # a rejoin stands before its kill
        yield replace(scenario, planned=scenario.planned[:place] + scenario.planned[place + 1 :])
    for name, least in LEAST.items():
        if getattr(scenario, name) != least:
            yield replace(scenario, **{name: least})
    if scenario.ranks > 1 and not scenario.spared:
        yield replace(scenario, ranks=1, per_node=1)
    if scenario.pipelines > 2 and not scenario.spared:
        yield replace(scenario, pipelines=2)


def shortest(scenario: Scenario, rule: str) -> Scenario:
    """The shortest scenario that still violates the rule."""
    seeds = count(1_000_000_000)
    while True:
        for candidate in shorter(scenario):
            tried = (replace(candidate, seed=seed) for seed in (scenario.seed, *islice(seeds, TRIES)))
            found = next((one for one in tried if _rule_of(one) == rule), None)
            if found is not None:
                scenario = found
                break
        else:
            return scenario


def _rule_of(scenario: Scenario) -> str:
    violation = violation_of(scenario)
    return "" if violation is None else violation.rule
