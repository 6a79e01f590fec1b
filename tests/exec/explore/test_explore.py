"""Whole runs under a virtual clock: random ones, and stories that violated a rule."""

from __future__ import annotations

import fcntl
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from recycle.cli.planner import plan_for_training
from recycle.exec.launch.agent import AgentExit
from recycle.exec.launch.run_directory import lock_directory
from recycle.exec.launch.standalone import LocalRun
from recycle.ir.lower import with_barrier
from recycle.plans import Plan, failure_vector
from tests.exec.explore.cluster import Cluster, Scenario, job_of, reference
from tests.exec.explore.faults import Fault
from tests.exec.explore.script import UserScript
from tests.exec.explore.small import SMALL, crash_points
from tests.exec.explore.stories import SCRIPTS, WORLDS, draw_scenario, violation_of

ALL_WORLDS = {**WORLDS, **SCRIPTS}


@pytest.mark.parametrize("first", range(0, 60, 5))
def test_no_seed_violates_a_rule(first: int) -> None:
    for seed in range(first, first + 5):
        assert violation_of(draw_scenario(seed)) is None, seed
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("seed", [7, 300019, 300081])  # a script; an agent with many connections resigns
def test_a_seed_repeats_a_run_to_the_message(seed: int) -> None:
    stories = [list[str](), list[str](), list[str]()]
    for story in stories:
        assert violation_of(draw_scenario(seed), story.append) is None
    assert len(stories[0]) > 10
    first, *others = (re.sub(r"recycle-explore-\w+", "RUN", "\n".join(story)) for story in stories)
    assert others == [first, first]


@pytest.mark.slow
def test_simulated_run_has_the_bits_of_one_in_this_process() -> None:
    config = job_of(Scenario())
    text = plan_for_training(config, failure_vector(config.shape, ()), True)
    real = LocalRun(with_barrier(Plan.from_text(text, "plan").schedule), config).run(4)
    simulated = reference(Scenario().course)
    for line, expected in zip(simulated.metrics, real.metrics, strict=True):
        assert (line["loss"], line["grad_norm"]) == (expected["loss"], expected["grad_norm"])
    assert all({digest} == simulated.digests[int(s)] for of in real.digests.values() for s, digest in of.items())


def story(seed: int, *faults: Fault, **more: Any) -> Scenario:
    return Scenario(**{"ranks": 1, "seed": seed, "faults": faults, **more})


STORIES = {
    **{
        f"agent that is away at the end does not start the run again, {moment}": story(
            1, Fault(4.4, "lose node", 1), Fault(moment, "isolate", 1, 8.0), spared=frozenset({0})
        )
        for moment in (5.5, 6.5, 7.0, 8.0)
    },
    **{
        f"late write of the register changes nothing, {seed}": story(
            seed, Fault(2.0, "slow store", seconds=60.0), steps=8
        )
        for seed in range(4)
    },
    **{
        f"agents pass heartbeats on while etcd does not answer, {seed}": story(
            seed, Fault(4.0, "lose answers", seconds=20.0), Fault(5.0, "stall store", seconds=4.0), ranks=2, steps=6
        )
        for seed in (1, 2, 3, 5)
    },
    **{
        f"other agents continue without node {node}, whose fork server ends": story(
            1, Fault(4.0, "lose fork server", node), spared=frozenset({1 - node}), steps=6
        )
        for node in (0, 1)
    },
    "death after the last commit lets peers end": story(
        0, ranks=2, sharded=True, steps=3, planned=("kill:0.1@2.gather",), spared=frozenset({2, 3})
    ),
    "leader that was cut off gives nobody up": story(
        1, Fault(4.288, "isolate", 0, 5.611), sharded=True, steps=2, spared=frozenset({1})
    ),
    "leader that was cut off fences nobody whom its workers cannot reach": story(
        101849, Fault(2.631301512510894, "isolate", 0, 5.08713068169908), steps=4, spared=frozenset({1})
    ),
    "workers that were cut off under the last leader form again": story(
        723837,
        Fault(5.572, "isolate", 1, 5.618),
        ranks=2,
        micro_batches=1,
        steps=3,
        eval_every=2,
        spared=frozenset({3}),
    ),
    "agents of last hosts hear late of the next leader": story(
        1000000006,
        Fault(8.711574089981792, "lose leases", 0),
        Fault(8.711574089981792, "slow store", 0, 6.0),
        Fault(8.859485264997675, "kill worker", 2),
        ranks=2,
        micro_batches=1,
        steps=3,
        digests=2,
        slow_messages=0.02,
        spared=frozenset({0, 1}),
    ),
    "role that is written after the run was erased": story(
        1000000215,
        Fault(7.410574325756832, "cut from store", 0, 4.723562770867485),
        Fault(7.4, "slow store", 0, 6.0),
        micro_batches=1,
        steps=2,
        tensor_parallel=2,
        digests=1,
        slow_messages=0.02,
        spared=frozenset({1}),
        crashes=frozenset({("agent 0 role", 4)}),
    ),
    "end of a run whose cause etcd answers late": story(
        56,
        micro_batches=1,
        steps=2,
        digests=2,
        slow_messages=0.1,
        planned=("flip=weight:0.0@0",),
        spared=frozenset({1}),
    ),
    "worker that was asked to leave dies while its agent is stopped": story(
        795753,
        Fault(2.999, "stop agent", 0, 5.8),
        Fault(3.443, "kill worker", 1),
        Fault(3.443, "leave worker", 0),
        Fault(6.366, "kill worker", 0),
        ranks=2,
        per_node=2,
        micro_batches=1,
        steps=2,
        spared=frozenset({2, 3}),
    ),
    "drain whose agent ends meanwhile": story(
        3,
        Fault(4.5, "drain worker", 1),
        pipelines=3,
        steps=4,
        crashes=frozenset({("agent 0", 57)}),
        spared=frozenset({2}),
    ),
    "all agents learn that a worker refuses the job": story(
        0, Fault(2.0, "refuse job", 1), pipelines=3, spared=frozenset({0, 2}), returns=False
    ),
    "leader without etcd leaves the end of the run to the next one": story(
        1, Fault(1.0, "cut from store", 0, 20.0), Fault(1.5, "kill worker", 0), pipelines=3, spared=frozenset({1})
    ),
    "late answer of etcd does not cost the reason for the end": story(
        720375,
        planned=("flip=weight:0.0@0",),
        spared=frozenset({1}),
        steps=2,
        checkpoint_every=2,
        eval_every=2,
        staggered=False,
        digests=1,
        micro_batches=1,
        slow_messages=0.02,
    ),
    "first agent dies while etcd writes its description of the run": story(
        781207,
        Fault(0.305, "slow store", 0, 6.0),
        Fault(0.737, "kill agent", 1),
        ranks=2,
        per_node=2,
        steps=2,
        slow_messages=0.02,
        spared=frozenset(),
    ),
    "agent hears late of the next leader at the end of a run": story(
        778302,
        Fault(5.474, "stall store", 0, 0.67),
        Fault(5.474, "stall store reads", 0, 6.0),
        micro_batches=1,
        steps=3,
        clip=1.5,
        spared=frozenset({0}),
        crashes=frozenset({("agent 1 role", 7)}),
    ),
    "run that was stopped continues without restarts": story(
        1,
        Fault(3.0, "end run"),
        pipelines=3,
        steps=8,
        restarts=0,
        planned=("slow=6:0.0@1",),
        spared=frozenset({0}),
    ),
    "run is stopped after an agent died": story(
        1, Fault(2.9, "kill agent", 1), Fault(3.17, "end run"), pipelines=3, steps=6
    ),
    "all agents leave after the last step": story(
        14, Fault(0.0, "end run", moment="Committed", number=6), pipelines=3, steps=6
    ),
    "worker that starts again leaves": story(
        0, Fault(4.8, "kill worker", 2), Fault(5.3, "end run"), Fault(5.4, "slow store", 2, 6.0), ranks=2, steps=6
    ),
    "worker that was asked to leave again before a restore is not started": story(
        837044,
        Fault(4.387, "cut", 0, 10.027),
        Fault(5.606, "lose node", 0),
        Fault(8.836, "kill worker", 0),
        Fault(9.761, "kill worker", 1),
        pipelines=3,
        steps=2,
        checkpoint_every=2,
        eval_every=2,
        sharded=True,
        clip=1.5,
        planned=("drain:2.0@1",),
        spared=frozenset(),
        crashes=frozenset({("agent 1 role", 11)}),
    ),
    "agent of the other host of a silent worker's stage hears late of the next leader": story(
        5,
        Fault(5.0, "stop worker", 0, 30.0),
        Fault(5.5, "cut from store", 1, 6.5),
        Fault(5.6, "lose leases"),
        micro_batches=1,
        steps=6,
        restarts=0,
        spared=frozenset({1}),
    ),
    "agent of the other host of a stuck worker's stage hears late of the next leader": story(
        1,
        Fault(5.8, "cut from store", 1, 6.5),
        Fault(5.9, "lose leases"),
        micro_batches=1,
        steps=6,
        planned=("stall:0.0@3",),
        restarts=0,
        spared=frozenset({1}),
    ),
    "tensor ranks of a worker that was cut off are one witness": story(
        910133,
        Fault(4.185615442283352, "isolate", 1, 6.176357772485723),
        micro_batches=1,
        steps=3,
        tensor_parallel=2,
        look_seconds=0.05,
        spared=frozenset({0}),
    ),
    "slow worker is well again after a change of leader": story(
        11,
        Fault(0.0, "lose leases", moment="Committed", number=11),
        drift_iterations=2,
        steps=28,
        restarts=0,
        planned=("slow=3:1.0@2-8",),
    ),
    "worker dies when the plan for a slow one is ready": story(
        7,
        Fault(0.0, "kill worker", 2, moment="running", number=7),
        pipelines=3,
        drift_iterations=2,
        steps=28,
        planned=("slow=3:1.0@2-28",),
        spared=frozenset({0}),
    ),
    **{
        f"node is drained whose worker has died, {time}": story(
            0, Fault(4.5, "kill worker", 1), Fault(time, "drain node", 1), pipelines=3, steps=8, spared=frozenset({0})
        )
        for time in (4.55, 5.2)
    },
    **{
        f"leader ends before it writes that a drained worker has left, {leader}": story(
            0,
            Fault(5.0, "drain node", 1),
            Fault(0.0, "kill agent", leader, moment="drained", number=1),
            pipelines=3,
            steps=24,
            restarts=0,
        )
        for leader in (0, 2)
    },
    "leader loses its role when a drained worker starts": story(
        380,
        Fault(0.0, "lose leases", moment="Leave", number=1),
        Fault(4.309, "kill worker", 2),
        Fault(6.751, "drain node", 1, 5.0),
        ranks=2,
        per_node=2,
        micro_batches=1,
        steps=14,
        spared=frozenset({0, 1}),
    ),
    "agents are asked to end while workers start, and one of them has left": story(
        292,
        Fault(0.9517574236849236, "leave node", 0),
        Fault(3.4654785294772035, "end run"),
        steps=4,
        staggered=False,
        surges=(1,),
        look_seconds=0.05,
        returns=False,
    ),
    "all agents are asked to end, and the next leader has not heard them": story(
        51,
        Fault(0.6360505122356122, "break", 0, 0.5791427314590398),
        Fault(1.7508245706094296, "end run"),
        pipelines=3,
        ranks=2,
        micro_batches=1,
        steps=3,
        returns=False,
    ),
    "run that its user ends loses its last host, without a checkpoint": story(
        414,
        Fault(2.528, "kill worker", 0),
        Fault(3.86, "stop worker", 1, 20.0),
        Fault(5.991, "end run"),
        micro_batches=1,
        checkpoint_every=2,
        launched=True,
        returns=False,
    ),
    "second agent of a node does not take its place under the next leader": story(
        8, Fault(3.5, "second agent", 1), Fault(4.0, "lose leases"), steps=8, spared=frozenset({0})
    ),
    "leader that was stopped removes no line of the next one": story(
        1135,
        Fault(0.0, "stop agent", 1, 8.0, "restored"),
        ranks=2,
        micro_batches=1,
        steps=8,
        checkpoint_every=2,
        tensor_parallel=2,
        planned=("kill:0.1@3", "kill:1.1@3"),
        restarts=0,
    ),
    "run that ended before its evaluation has the step's line when it continues": story(
        1000000040,
        Fault(5.635, "cut from store", 0, 9.26),
        Fault(5.635, "end run"),
        Fault(5.635, "stop agent", 1, 5.123),
        ranks=2,
        steps=3,
        eval_every=2,
        staggered=False,
        tensor_parallel=2,
        sharded=True,
        slow_messages=0.02,
        spared=frozenset({2, 3}),
    ),
    "worker that returns is asked to leave": story(
        1000000134,
        Fault(0.0, "end run", moment="Committed", number=2),
        micro_batches=1,
        steps=3,
        staggered=False,
        planned=("rejoin:1.0@2", "kill:1.0@1"),
        restarts=0,
        returns=False,
        slow_plans=1.0,
    ),
    "agent that connects again after the end is told the outcome": Scenario(
        micro_batches=1,
        steps=3,
        returns=False,
        faults=(
            Fault(4.0, "end run"),
            Fault(0.0, "break", 1, 1.5, "Hello", 8),
            Fault(0.0, "break", 2, 0.0, "Hello", 8),
        ),
    ),
    "agent that has lost its role does not end the run": story(
        0, Fault(1.14, "isolate", 1, 8.52), Fault(5.13, "kill worker", 1), steps=2, spared=frozenset({0})
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_story_that_violated_a_rule(name: str) -> None:
    assert violation_of(STORIES[name]) is None


@pytest.mark.parametrize("name", ALL_WORLDS)
def test_world_holds_the_rules(name: str) -> None:
    for seed in range(2):
        assert violation_of(replace(ALL_WORLDS[name], seed=ALL_WORLDS[name].seed + seed)) is None, seed


_SPARED = frozenset({0})
ENDINGS = [
    (story(1, arrivals=(0.2, 30.0), spared=_SPARED), ["DONE"], ["DONE"]),
    (story(1, arrivals=(0.2, -1.0), spared=_SPARED), ["RunError"], []),
    (story(1, Fault(5.0, "interrupt run"), steps=6, checkpoint_every=2), *[["KeyboardInterrupt", "DONE"]] * 2),
    (story(1, Fault(5.0, "interrupt agent", 1), steps=30, spared=_SPARED), ["DONE"], ["KeyboardInterrupt", "DONE"]),
    (story(1, Fault(4.0, "second agent", 1), steps=30, spared=_SPARED), ["DONE"], ["JobError", "DONE"]),
    (story(1, Fault(4.0, "second agent", 1, 1.0), spared=_SPARED), ["DONE"], ["DONE"]),
    (story(1, Fault(4.5, "wipe store"), steps=8, spared=_SPARED), ["RunError"], ["RunError"]),
]
"""Runs, and how the agents of their nodes end."""


@pytest.mark.parametrize("number", range(len(ENDINGS)))
def test_agents_say_how_a_run_has_ended(number: int) -> None:
    scenario, *expected = ENDINGS[number]
    exits = Cluster(scenario).run().values()
    assert [
        [e.name if isinstance(e, AgentExit) else type(e).__name__ for e in of_node] for of_node in exits
    ] == expected


def test_run_whose_store_has_lost_its_data_is_resumed() -> None:
    (cluster := Cluster(story(1, Fault(6.0, "wipe store"), steps=8, checkpoint_every=2, spared=_SPARED))).run()
    assert cluster.is_resumed
    assert all(exits == [AgentExit.DONE] for exits in cluster.exits.values())


def aimed(world: str, *faults: Fault, **more: Any) -> Scenario:
    return replace(ALL_WORLDS[world], faults=(*ALL_WORLDS[world].faults, *faults), **more)


def at(moment: str, number: int, kind: str, target: int = 0, seconds: float = 0.0) -> Fault:
    return Fault(0.0, kind, target, seconds, moment, number)


_KILL_AND_SLOW = "kill:1.0@1", "slow=27:0.0@2"
AIMED = [
    aimed("rejoin", at("Stop", 1, "break", 2)),
    aimed("rejoin", at("Propose", 3, "lose leases")),
    aimed("rejoin", at("running", 4, "lose node", 1), returns=False),
    aimed("rejoin", crashes=frozenset({("agent 2 role", 11)})),
    aimed("calm", at("running", 5, "lose leases")),
    aimed("calm", at("running", 2, "forge", 1)),
    aimed("calm", at("StepReport", 3, "suspend", 0, 4.5)),
    aimed("calm", crashes=frozenset({("agent 2 role", 4)})),
    aimed("long", at("Committed", 7, "break", 1, 1.5)),
    aimed("long", at("running", 3, "kill agent", 1)),
    aimed("long", at("running", 3, "isolate", 2, 12.0)),
    aimed("long", at("running", 4, "lose answers", 0, 1.5)),
    aimed("long", at("running", 5, "stall store", 0, 1.6), at("StepReport", 10, "lose leases")),
    aimed(
        "long",
        at("Acknowledged", 2, "lose leases"),
        at("Acknowledged", 2, "kill worker", 1, 0.5),
        at("Acknowledged", 2, "drain worker", 1, 12.0),
        crashes=frozenset({("agent 2 role", 3)}),
    ),
    aimed(
        "long",
        at("Committed", 8, "isolate", 2, 5.0),
        crashes=frozenset({("agent 2 role", 11)}),
        staggered=False,
        seed=400426,
    ),
    aimed("long", at("running", 8, "break", 0), at("running", 8, "stop agent", 2, 12.0)),
    aimed("stage lost", at("Start", 4, "break", 1)),
    aimed("restart", at("rejoined", 1, "lose leases")),
    aimed("restart", at("Permit run", 3, "kill agent", 2), at("Permit run", 3, "lose leases")),
    aimed("restart", Fault(4.9, "stop worker", 1, 16.9), at("Kill", 1, "break", 1, 2.5), planned=_KILL_AND_SLOW),
    aimed("restart", at("rejoined", 1, "break", 1, 0.5), at("rejoined", 1, "kill worker", 2, 1.5)),
    aimed(
        "rejoin with shards",
        at("Acknowledged", 7, "break", 1, 1.5),
        at("Acknowledged", 7, "lose answers", 3, 5.0),
        returns=False,
    ),
    aimed("late to leave", at("Kill", 1, "break", 1)),
    aimed("late to leave", at("Kill", 1, "break", 1), at("Acknowledged", 4, "lose leases")),
    aimed("wrong state and joiner", at("Kill", 1, "break", 2, 1.5), at("proposed", 3, "lose leases")),
    aimed("no device", at("Ask", 1, "break", 2)),
    aimed(
        "stage lost before its state is compared",
        at("Permit run", 1, "lose leases"),
        at("Formed", 4, "break", 0, 1.5),
        crashes=frozenset({("agent 1 role", 20)}),
    ),
    aimed(
        "stage lost before its state is compared",
        at("SavedPart", 2, "break", 1),
        at("SavedPart", 4, "break", 0, 1.5),
        at("SavedPart", 4, "lose leases", 1),
    ),
    aimed("node away at a return", crashes=frozenset({("agent 2 role", 11)})),
    aimed("leave", at("Leaving", 1, "kill worker", 1)),
    aimed("leave", at("drained", 1, "lose leases")),
    aimed("leave", at("Leave", 1, "lose leases"), seed=5),
    aimed("leave", at("running", 5, "lose leases")),
    aimed("leave", at("StepReport", 11, "lose leases")),
    aimed("leave", crashes=frozenset({("agent 2 role", 7)})),
    aimed("leave at a checkpoint", crashes=frozenset({("agent 3 role", 11)})),
    aimed(
        "leave at a checkpoint",
        at("running", 4, "break", 1, 0.5),
        at("running", 4, "break", 0),
        at("StepReport", 8, "lose leases", 1),
    ),
    replace(
        WORLDS["leave at a checkpoint"],
        faults=(Fault(2.6, "drain worker", 3),),
        crashes=frozenset({("agent 3 role", 7)}),
    ),
    aimed("script rejoins", at("Committed", 2, "break", 0, 1.5)),
    aimed("script stops", crashes=frozenset({("agent 0", 20)})),
    *(aimed("script fails", crashes=frozenset({("agent 2", number)})) for number in (116, 117)),
]


@pytest.mark.parametrize("number", range(len(AIMED)))
def test_faults_at_moments_of_the_leader(number: int) -> None:
    (cluster := Cluster(AIMED[number])).run()
    assert all(cluster.moments[fault.moment] >= fault.number for fault in AIMED[number].faults if fault.moment)


@pytest.mark.parametrize(("seed", "leader"), [(0, 2), (9, 0)])
def test_agents_leave_a_leader_that_says_nothing(seed: int, leader: int) -> None:
    """Its connections stand."""
    faults = (Fault(5.0, "stop agent", leader, 90.0),)
    (cluster := Cluster(Scenario(3, 1, steps=6, faults=faults, seed=seed))).run()
    assert cluster.rules.result.metrics[-1]["time"] < 60


@pytest.mark.parametrize("first", range(2))
def test_another_agent_leads_on_wherever_the_leader_ends(first: int) -> None:
    """A worker dies and comes back meanwhile."""
    planned = "kill:1.0@1", "rejoin:1.0@2"
    whole = Scenario(3, 1, steps=3, checkpoint_every=2, eval_every=2, planned=planned, spared=frozenset({2}))
    (cluster := Cluster(whole)).run()
    points = crash_points(cluster, lambda name: name in ("agent 0", "agent 1"))
    assert len(points) > 50
    for point in points[first::9]:
        assert violation_of(replace(whole, crashes=frozenset({point}))) is None, point


def test_deviation_swaps_two_messages_of_different_senders() -> None:
    (usual := Cluster(SMALL[0])).run()
    races = sorted(usual.kernel.races())
    assert len(races) > 50
    swapped = list[bool]()
    for number in races[::8]:
        cluster = Cluster(replace(SMALL[0], detours=frozenset({number})))
        cluster.run()
        before, after = ([at for _, at, _ in kernel.arrivals] for kernel in (usual.kernel, cluster.kernel))
        place = before.index(number)
        assert after[:place] == before[:place]
        swapped.append(after[place] != number)
    assert sum(swapped) > 0.7 * len(swapped)  # else the later message is a consequence of the earlier one


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3, 0.6])
def test_leaving_worker_stays_if_it_became_the_last_host(seconds: float) -> None:
    faults = Fault(5.0, "kill worker", 0), Fault(5.0 + seconds, "drain worker", 1)
    scenario = Scenario(ranks=1, steps=8, faults=faults)
    assert violation_of(scenario) is None
    exits = Cluster(scenario).run()
    assert {exit for of_node in exits.values() for exit in of_node} == {AgentExit.DONE}


def test_all_agents_end_with_the_code_of_the_reason() -> None:
    faults = Fault(5.0, "kill worker", 0), Fault(5.0, "kill worker", 1)
    exits = Cluster(Scenario(ranks=1, steps=8, faults=faults, returns=False)).run()
    assert {node: [getattr(exit, "code", exit) for exit in of_node] for node, of_node in exits.items()} == {
        node: ["stage-lost"] for node in exits
    }


def test_script_whose_processes_make_different_collectives_ends() -> None:
    scenario, said = replace(SCRIPTS["script"], script=UserScript(skips_at=1)), list[str]()
    assert violation_of(scenario, said.append) is None
    reason = next(line for line in said if "RunError" in line)
    assert "gave up after 5 attempts with the same workers: all workers have waited for" in reason
    assert "; do all processes of the script make the same collectives?" in reason


def test_agents_wait_for_those_of_a_run_that_has_ended(tmp_path: Path) -> None:
    cluster = Cluster(Scenario(ranks=1, steps=2))
    lock = lock_directory(tmp_path, fcntl.LOCK_SH)
    assert lock is not None
    cluster.kernel.after(3.0, partial(os.close, lock))
    assert all(exits == [AgentExit.DONE] for exits in cluster.run(tmp_path).values())
