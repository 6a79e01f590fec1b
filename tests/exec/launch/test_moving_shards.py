"""Layers move in a running job whose optimizer state is sharded: losses and states are those of hosts that have all."""

from __future__ import annotations

import threading
from pathlib import Path
from shutil import copytree
from typing import Any

import msgspec
import pytest

from recycle import Worker
from recycle.cli.planner import plan_for_training
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.launcher import RunResult, train
from recycle.job import PricedJob
from recycle.solve.planner import plan
from tests.exec.accelerator.struck import named
from tests.exec.accelerator.transport import Simulated
from tests.exec.launch.test_moving import STEPS, AwaitsLayout, KillsWhenLayersMove, elastic, final_state, moved
from tests.exec.runs import Run
from tests.exec.sharded import bits, require_equal, sharded, stored

pytestmark = [pytest.mark.process, pytest.mark.slow]

_CALM: dict[str, RunResult] = {}


def require_as_calm(found: RunResult, of: PricedJob, launch: Run) -> None:
    """The bits of the run in which every host has all, layers stay where they are, and nobody fails."""
    steps = of.train.checkpoint_every
    fixed = of.with_sections(planner=msgspec.structs.replace(of.planner, layout="fixed", move=False))
    key = fixed.to_toml()
    if key not in _CALM:
        _CALM[key] = launch(fixed, steps)
    wanted = _CALM[key]
    assert bits(found) == bits(wanted)
    folders = [Path(str(result.directory)) / f"checkpoints/step-{steps - 1:08d}" for result in (found, wanted)]
    require_equal(stored(folders[0]), stored(folders[1]))


def gpt(precision: str, tied: bool = False, chunks: int = 1) -> PricedJob:
    """Matrices of several blocks, so that shards of a layer end inside of it."""
    of = elastic(3, 2, "gpt", 24, chunks=chunks, hidden=64, tied=tied)
    return of.with_sections(train=msgspec.structs.replace(of.train, precision=precision))


def shards_of_units(result: RunResult, step: int) -> set[str]:
    """The shards that were copied for the generation that began with a step."""
    events = (event for event in result.events if event["kind"] == "moved" and event["step"] == step)
    return {name for event in events for name in event["shards"]}


@pytest.mark.parametrize(
    ("precision", "tied"),
    [("bf16", True), *(pytest.param(*each, marks=pytest.mark.soak) for each in (("fp32", False), ("fp32", True)))],
)
def test_layers_take_their_shards_along_and_back(precision: str, tied: bool, launch: Run) -> None:
    of = gpt(precision, tied)
    found = launch(sharded(of), 24, "kill:1.1@2.forward", "rejoin:1.1@20", observer=AwaitsLayout())
    require_as_calm(found, of, launch)
    there = min(step for step in moved(found) if step > 2)
    assert there < 20
    assert [event["step"] for event in found.events if event["kind"] == "rejoined"] == [20]
    assert all(" of layer " in name or " of the " in name for name in shards_of_units(found, there))
    assert "restored" not in {event["kind"] for event in found.events}
    told = [event["further_deaths"] for event in found.events if event["kind"] == "shards"]
    assert told[0] == told[-1] == [1, 1]
    assert [1, 0] in told, "until who is left has copied what it owns more"


@pytest.mark.soak
@pytest.mark.parametrize("chunks", [1, 2])
def test_emulated_layers_do_too(chunks: int, launch: Run) -> None:
    of = elastic(3, 2, chunks=chunks)
    found = launch(sharded(of), STEPS, "kill:1.1@3.forward", f"rejoin:1.1@{STEPS - 4}", observer=AwaitsLayout())
    require_as_calm(found, of, launch)
    assert moved(found)[-1] == STEPS - 4, "the given stages come back"


@pytest.mark.soak
@pytest.mark.parametrize("phase", ["acknowledge", "form", "copy"])
@pytest.mark.parametrize("victim", ["0.0", "1.0", "2.1"])
def test_who_dies_while_shards_are_copied_takes_nothing_along(victim: str, phase: str, launch: Run) -> None:
    """Everybody but the dead holds what it held before, in the stages that it hosted before."""
    of, back = gpt("fp32"), 18
    faults = ("kill:1.1@2.forward", f"rejoin:1.1@{back}", f"kill:{victim}@{back}.{phase}")
    found = launch(sharded(of), 24, *faults, observer=AwaitsLayout())
    require_as_calm(found, of, launch)
    assert {event["worker"] for event in found.events if event["kind"] == "detected"} >= {"1.1"}


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["0.1", "1.0"])
def test_who_dies_while_layers_move_away_makes_the_layout_useless(victim: str, launch: Run, tmp_path: Path) -> None:
    of, directory = elastic(3, 2), tmp_path / "run"
    observer: Any = KillsWhenLayersMove(directory, victim)
    found = launch(sharded(of), STEPS, "kill:1.1@3.forward", directory=directory, observer=observer)
    assert {event["worker"] for event in found.events if event["kind"] == "detected"} == {"1.1", victim}
    require_as_calm(found, of, launch)


@pytest.mark.soak
def test_a_worker_changes_its_stage_where_the_given_stages_stay(launch: Run) -> None:
    of = elastic(4, 2)
    of = of.with_sections(planner=msgspec.structs.replace(of.planner, layout="fixed", move=True))
    found = launch(sharded(of), STEPS, "kill:1.1@2.forward", "kill:2.1@6.forward", f"rejoin:1.1@{STEPS - 4}")
    require_as_calm(found, of, launch)
    (layout,) = (event for event in found.events if event["kind"] == "layout" and event["moves"])
    names = shards_of_units(found, layout["step"])
    assert {name.rpartition(" of ")[2] for name in names} >= {"layer 4", "layer 5", "layer 6", "layer 7", "the head"}


@pytest.mark.soak
@pytest.mark.parametrize("instant", ["reduce", "commit", "step", "stepped", "gather"])
def test_a_step_is_taken_back_in_the_moved_layout(instant: str, launch: Run) -> None:
    of = gpt("bf16")
    faults = ("kill:1.1@2.forward", f"kill:2.0@21.{instant}")
    found = launch(sharded(of), 24, *faults, observer=AwaitsLayout())
    assert 2 < min(step for step in moved(found) if step > 2) < 21
    require_as_calm(found, of, launch)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["emulated", "gpt"])
def test_a_checkpoint_of_a_moved_layout_is_read_into_any_other(kind: str, launch: Run, tmp_path: Path) -> None:
    steps = STEPS if kind == "emulated" else 12
    of = elastic(3, 2, kind, steps)
    twice = launch(of, 2 * steps)
    own = plan(of, [Worker(1, 1)], seconds=3.0).schedule
    launch(sharded(of), steps, schedule=own, directory=tmp_path / "away")
    for name, after, schedule in (("all", of, None), ("shards", sharded(of), None), ("moved", sharded(of, 3), own)):
        folder = tmp_path / name
        copytree(tmp_path / "away", folder)
        on = train(after, folder, steps=2 * steps, planner=plan_for_training, schedule=schedule, resume=True)
        assert bits(on)[-steps:] == bits(twice)[-steps:]


@pytest.mark.soak
def test_shards_of_tensor_ranks_move(launch: Run) -> None:
    of = elastic(3, 2, "gpt")
    of = of.with_sections(grid=msgspec.structs.replace(of.grid, tensor_parallel=2))
    found = launch(sharded(of), STEPS, "kill:1.1t1@3", f"rejoin:1.1@{STEPS - 4}", observer=AwaitsLayout())
    calm = launch(of, STEPS)
    assert bits(found) == bits(calm)
    assert 3 < min(step for step in moved(found) if step > 3) < STEPS - 4


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["emulated", "gpt"])
def test_shards_move_over_simulated_accelerators(launch: Run, kind: str) -> None:
    of = elastic(3, 2, kind, 24)
    on_devices = of.with_sections(membership=msgspec.structs.replace(of.membership, transport=named(Simulated)))
    found = launch(sharded(on_devices), 24, "kill:1.1@2", "rejoin:1.1@20", observer=AwaitsLayout())
    require_as_calm(found, of, launch)
    assert 2 < min(step for step in moved(found) if step > 2) < 20


class EndsWhenOneStalls(AwaitsLayout):
    """Has the run end once a worker stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = threading.Event()

    def event(self, event: dict[str, Any]) -> None:
        super().event(event)
        if event["kind"] == "fault" and event["fault"].startswith("stall"):
            self.stop.set()


@pytest.mark.soak
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_run_that_is_to_end_while_layers_move_keeps_the_state_where_it_was_before(
    is_sharded: bool, launch: Run, tmp_path: Path
) -> None:
    """They move back at step 20, and a worker that is to send some of it stands still there."""
    of = sharded(elastic(3, 2, every=20)) if is_sharded else elastic(3, 2, every=20)
    calm = launch(of, 20)
    patient = msgspec.structs.replace(of.membership, hung_after=100.0, warm_up=100.0, form_timeout=100.0, grace=24.0)
    seldom = msgspec.structs.replace(of.train, checkpoint_every=100)
    faults = ("kill:1.1@2.forward", "rejoin:1.1@20", "stall:2.0@20.copy")
    observer = EndsWhenOneStalls()
    found = train(
        of.with_sections(membership=patient, train=seldom),
        tmp_path / "run",
        steps=24,
        faults=[parse_fault(fault) for fault in faults],
        planner=plan_for_training,
        observer=observer,
        stop=observer.stop,
    )
    assert "corrupt" not in {event["kind"] for event in found.events}
    assert found.events[-1]["kind"] == "stopped"
    assert found.events[-1]["checkpoint"] == "step-00000019"
    assert final_state(found) == final_state(calm)
