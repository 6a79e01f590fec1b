"""Hosts compare sums, states and replayed work: faulty workers are found, and the bits are the calm run's."""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import pytest

from recycle import RunError
from recycle.exec.checkpoint.checkpoint import folder_of, verify
from recycle.exec.launch.launcher import RunResult
from recycle.ir.families import one_f_one_b
from recycle.job import PricedJob
from recycle.job.sections import IntegritySection
from tests.exec.runs import Run, calm_run, figures, job, kinds, of_kind, only, varied
from tests.exec.sharded import sharded

STEPS = 10
ELASTIC = {"planner": {"layout": "elastic", "move_when": "always", "seconds": 0.2}, "model": {"layers": 6}}
BF16 = {"train": {"precision": "bf16"}, "model": {"layers": 2}}
TWO_PROCESSES = {"shape": {"tensor_parallel": 2}}
EVERY_OTHER = {"train": {"checkpoint_every": 2}}


@dataclass(frozen=True)
class Scenario:
    """A job with faults, and what its events say.

    Attributes:
        pipelines, kind: of the job.
        integrity: its section.
        faults: with spaces between them.
        corrupt: steps and accused workers of the events `corrupt`.
        copies: of the optimizer's shards; 0 where it is not sharded.
        sections: further ones.
        back: the step that is repeated last.
        restored: steps that a checkpoint may be gone back to; empty where none is.
        tensor, bit: of the bits that are named.
        warned: part of all warnings.
        has_own_schedule: 1F1B, not a planned one.
    """

    pipelines: int
    kind: str
    integrity: dict[str, Any]
    faults: str
    corrupt: tuple[tuple[Collection[int], str], ...] = ()
    copies: int = 0
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    back: Collection[int] = ()
    restored: Collection[int] = ()
    tensor: str = ""
    bit: int | None = None
    warned: str = ""
    has_own_schedule: bool = False

    @property
    def job(self) -> PricedJob:
        return compared(self.pipelines, self.kind, self.integrity, self.copies, **self.sections)


def compared(pipelines: int, kind: str, integrity, copies=0, **sections) -> PricedJob:
    train = {"clip": 1e9, "checkpoint_every": 0} | sections.pop("train", {})
    sections = {"planner": {"seconds": 0.2}} | sections
    config = job(pipelines, 2, 2, kind, integrity=integrity, train=train, **sections)
    return sharded(config, copies) if copies else config


def calm_of(config: PricedJob, launch: Run) -> RunResult:
    """The run without faults and comparisons."""
    plain = config.with_sections(integrity=IntegritySection())
    return calm_run(varied(plain, train={"checkpoint_every": 0}), launch, STEPS)


def final_states(run: RunResult) -> set[tuple[int, str]]:
    """The final states of all stages or shards."""
    return {item for stages in run.digests.values() for item in stages.items()}


def row(name: str, *given, soak=False, **more):
    return pytest.param(Scenario(*given, **more), id=name, marks=[pytest.mark.soak] * soak)


def at(step: int, workers="") -> tuple[Collection[int], str]:
    return (step,), workers


def between(first: int, end: int, workers="") -> tuple[Collection[int], str]:
    return range(first, end), workers


ROWS = [
    # The lowest bit of an fp64 does not show in its square. The flip at step 4 is in what iteration 6 begins with,
    # whose commit compares that; iteration 3 did before.
    *(
        row(
            *(f"sum and {target} of {kind}", 3, kind, {"digests": 3}),
            *(f"flip=gradient,0:1.1@1 rejoin:1.1@2 flip={target}:0.{rank}@4 rejoin:0.{rank}@8",),
            *((at(1, "1.1"), at(6, f"0.{rank}")),),
            back=(3,),
            tensor=tensor,
            bit=bit,
            soak=kind == "gpt",
        )
        for kind, target, rank, tensor, bit in (
            ("emulated", "weight,40", 1, "layers.3.parameters", 40),
            ("gpt", "weight,20", 0, "decoder.layers.1", 20),
        )
    ),
    # The evaluation after step 7 lies behind the state gone back to, and is of what the flip has spoiled. A moment has
    # been through two steps by step 9, and one bit does not explain what has become of it.
    row(
        *("of two", 2, "emulated", {"digests": 3}, "flip=gradient:1.1@3 flip=moment:1.1@7", (at(3), at(9))),
        sections={"eval": {"every": 4}},
        back=(6,),
    ),
    row(
        *("coming and going", 3, "emulated", {"digests": 1, "every": 2}),
        "kill:1.1@1 nan:0.0@3 rejoin:1.1@4 kill:0.0@6.step kill:2.1@7.reduce rejoin:0.0@8",
    ),
    # The iteration is repeated; now all agree, and the struck one differs from that in what it had reported.
    *(
        row(
            *(f"{fault} of {pipelines} {kind}", pipelines, kind, {"every": 1}, f"flip={fault}:1.1@4", (at(4, "1.1"),)),
            tensor="activation",
            soak=True,
        )
        for pipelines, kind, fault in ((2, "emulated", "input"), (3, "gpt", "activation,22"))
    ),
    # Two of three hosts agree; training goes back to the state before the last round in which nothing differed.
    row(
        *("stuck unit of a gpt", 3, "gpt", {"every": 3}, "flip=kernel:1.1@4", (between(4, 7, "1.1"),)),
        soak=True,
    ),
    # Between two hosts the fault cannot be attributed until new processes start from a checkpoint.
    row(
        *("stuck unit of two", 2, "emulated", {"every": 2}, "flip=kernel:1.1@5", (between(0, STEPS),) * 2),
        sections=EVERY_OTHER,
        restored=(2,),
    ),
    # The plan without the worker has no gap that holds a replay; states are compared as often as checkpoints are made.
    row(
        *("in gaps", 3, "emulated", {"every": "gaps"}, "flip=kernel:1.1@2 flip=weight,40:0.1@6"),
        *((between(2, 6, "1.1"), between(6, STEPS)),),
        sections=EVERY_OTHER,
        has_own_schedule=True,
        warned="states are compared every 2 iterations",
    ),
    # What one tensor rank makes wrong, the sums of that rank have on all hosts; the replays say where it came from.
    *(
        row(
            *(f"{fault} of two processes", 3, "gpt", {"every": every}, f"flip={fault}:1.1@4"),
            *((between(4, STEPS, "1.1"),),),
            sections=TWO_PROCESSES,
            soak=True,
        )
        for fault, every in (("input", 1), ("kernel", 3))
    ),
    # The flip at step 7 shows where step 8 begins; all go back to the state since which everything was replayed.
    row(
        *("states more often", 3, "emulated", {"every": 4, "digests": 2}, "flip=weight,40:1.1@7", (at(8, "1.1"),)),
        back=(4,),
        soak=True,
    ),
    # Between two holders of a shard the fault cannot be attributed; of three the odd one is fenced.
    row(
        *("three copies", 3, "emulated", {"digests": 3}, "flip=moment,40:1.1@4", (between(4, 8, "1.1"),), 3),
        tensor="layers.3.count",
        soak=True,
    ),
    row(
        *("two copies", 3, "emulated", {"every": 1}, "flip=activation:1.1@4", (at(4, "1.1"),), 2),
        tensor="activation",
    ),
    row(
        *("gpt", 3, "gpt", {"digests": 3, "every": 1}),
        "flip=activation,22:1.1@2 rejoin:1.1@4 flip=moment,20:0.1@6",
        *((at(2, "1.1"), between(6, STEPS)), 2),
        sections=BF16,
    ),
    *(
        row(
            *(f"{kind} {list(sections)}", 3, kind, integrity, f"kill:0.0@1 rejoin:0.0@3 flip={fault}:1.1@5"),
            *((between(5, STEPS),), 2),
            sections=sections,
            soak=True,
        )
        for kind, integrity, sections, fault in (
            ("gpt", {"digests": 2}, TWO_PROCESSES, "moment,20"),
            ("emulated", {"digests": 1, "every": 4}, ELASTIC, "moment,40"),
        )
    ),
    # What is struck lies in a shard that others hold, whose gather has not come yet.
    row("live parameters", 3, "emulated", {"digests": 2}, "flip=weight:1.1@0", (between(0, 3, "1.1"),), 2),
    # Only first iterations of generations compare. All go back to where the joiner had its copies.
    row(
        *("where the joiner copied", 3, "emulated", {"digests": 100}),
        "kill:0.1@2 rejoin:0.1@5 flip=moment,40:1.1@6 kill:2.0@8 rejoin:2.0@9",
        *((between(7, STEPS),), 2),
        back=(5,),
    ),
    # The joiner was not there when the state was kept, and copies its shards from the holders that have kept them.
    row(
        *("joiner without it", 3, "emulated", {"digests": 1, "every": 6}),
        *("kill:0.1@2 rejoin:0.1@3 flip=moment,40:1.1@5", (between(5, 8),), 2),
        back=(0,),
        tensor="layers.3.count",
    ),
    # A holder of the kept state is dead: its copies are made again from the other holder.
    row(
        *("holder is dead", 3, "emulated", {"digests": 2, "every": 6}, "kill:0.1@3 flip=moment,40:1.1@5"),
        *((between(5, 8),), 2),
        back=(0,),
        soak=True,
    ),
    # 0.1 and 1.1 hold shard 0 in the state that counts; others have copied it since, and it is wrong by now.
    row(
        *("all holders are dead", 4, "emulated", {"digests": 2, "every": 2}),
        *("kill:0.1@4 kill:1.1@6 flip=moment,40:2.1@6", (between(6, 8),), 2),
        sections=EVERY_OTHER,
        restored=(2, 4),
    ),
]


@pytest.mark.parametrize("scenario", ROWS)
def test_faulty_worker_is_found_and_its_effects_are_rolled_back(scenario, launch):
    config, faults = scenario.job, scenario.faults.split()
    own = {"schedule": one_f_one_b(config.shape)} if scenario.has_own_schedule else {}
    run, calm = launch(config, STEPS, *faults, **own), calm_of(config, launch)
    assert figures(run) == figures(calm)
    assert run.evaluations == calm.evaluations
    if not (scenario.copies and scenario.restored):
        assert final_states(run) == final_states(calm)
    events = {kind: of_kind(run, kind) for kind in kinds(run)}
    corrupt = events.get("corrupt", [])
    for event, (steps, workers) in zip(corrupt, scenario.corrupt, strict=True):
        assert (event["step"] in steps, event["workers"]) == (True, workers.split())
    accused = {worker for _, workers in scenario.corrupt for worker in workers.split()}
    killed = {fault[5:8] for fault in faults if fault.startswith("kill:")}
    assert {event["worker"] for event in events.get("detected", [])} == accused | killed
    holders = {fault[7:10] for fault in faults if fault.startswith("rejoin:")}
    if not scenario.restored:
        assert not run.digests.keys() & (accused | killed) - holders
    assert [event["step"] in scenario.restored for event in events.get("restored", [])] == [True] * bool(
        scenario.restored
    )
    if scenario.back:
        assert events["undone"][-1]["step"] in scenario.back
    warnings = [event["message"] for event in events.get("warning", [])]
    # Whether a checkpoint with the wrong state is complete by then, and skipped, depends on the time.
    warnings = [message for message in warnings if "skipped, because the states" not in message]
    assert bool(warnings) == bool(scenario.warned)
    assert all(scenario.warned in message for message in warnings)
    bits = [result for event in corrupt for result in event.get("bits", [])]
    assert bits or scenario.bit is None
    struck = re.findall(r"flip=.*?:\d\.(\d)", scenario.faults)
    for result in bits[:1] if scenario.tensor else ():  # others follow from the first
        assert result["stage"] == int(struck[-1])
        assert scenario.tensor in result["tensor"]
    for result in bits if scenario.bit is not None else ():
        assert (result["worker"] in accused, result["bit"]) == (True, scenario.bit)


def test_checkpoints_of_discarded_steps_are_rewritten(launch, tmp_path):
    """That after step 5 is written with what the flip has made of the others' gradients; iteration 6 finds it."""
    config = compared(3, "emulated", {"digests": 6}, train={"checkpoint_every": 6})
    run = launch(config, STEPS, "flip=activation:0.0@1", "flip=weight:1.1@4", directory=tmp_path)
    assert (only(run, "corrupt")["step"], only(run, "undone")["step"]) == (6, 0)
    assert figures(run) == figures(calm_of(config, launch))
    assert verify(folder_of(tmp_path / "checkpoints", 9)).manifest.commit.loss == run.losses[9]


def test_differing_final_states_are_rolled_back_and_fail_the_run(launch, tmp_path):
    config = compared(3, "emulated", {"digests": 3}, train={"checkpoint_every": 3})
    says = "workers 0.1 and 1.1 and 2.1 end with different states of stage 1; the steps after step 8"
    with pytest.raises(RunError, match=says):
        launch(config, STEPS + 1, "flip=weight:1.1@10", directory=tmp_path)
    run = launch(config, STEPS + 1, resume=True, directory=tmp_path)
    assert figures(run)[:STEPS] == figures(calm_of(config, launch))
    assert len(final_states(run)) == 2


def test_two_hosts_that_differ_again_and_again_end_the_run(launch):
    config = compared(2, "emulated", {}, train={"checkpoint_every": 2})
    says = "step 5: .* hold different gradients of stage 1, also when repeated and from a checkpoint"
    with pytest.raises(RunError, match=says):
        launch(config, STEPS, *["flip=gradient:1.1@5"] * 4)


def test_with_one_copy_only_parameters_have_something_to_be_compared_with(launch):
    """A worker that is stuck is known, and cannot go, as its shards would be lost: new processes begin again."""
    config = compared(3, "emulated", {"every": 2}, 1, **EVERY_OTHER)
    run = launch(config, STEPS, "flip=kernel:1.1@5")
    assert figures(run) == figures(calm_run(config, launch, STEPS))
    warnings = [event["message"] for event in of_kind(run, "warning")]
    assert sum("only parameters are compared" in text for text in warnings) == 1
    assert {tuple(event["workers"]) for event in of_kind(run, "corrupt")} == {("1.1",)}
    assert "restored" in kinds(run)
