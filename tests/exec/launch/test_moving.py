"""Layers move in a running job: at a death first re-routed, then cut anew; losses and states are the calm run's."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from shutil import copytree
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file

from recycle import Worker
from recycle.cli.planner import plan_for_training
from recycle.exec.faults.faults import parse_fault, punish
from recycle.exec.launch.dials import Observer
from recycle.exec.launch.launcher import RunResult, train
from recycle.job import PricedJob
from recycle.job.sections import IntegritySection
from recycle.solve.planner import plan
from tests.exec.accelerator.struck import named
from tests.exec.accelerator.transport import Simulated
from tests.exec.runs import Run, calm_run, figures, job, kinds, processes_writing_below
from tests.exec.sharded import require_equal, sharded, stored

pytestmark = pytest.mark.process

STEPS = 24
BACK = STEPS - 4
CHUNKS = pytest.mark.parametrize("chunks", [1, 2])
INSTANTS = ("forward", "backward", "reduce", "commit", "step", "stepped")
OF_LAST_LAYERS = {"layer 4", "layer 5", "layer 6", "layer 7", "the head"}


def elastic(
    pipelines: int,
    ranks: int,
    kind: str = "emulated",
    steps: int = STEPS,
    every: int | None = None,
    chunks: int = 1,
    **model: Any,
) -> PricedJob:
    """A job of eight layers, slow enough for a layout to be planned while it trains."""
    more = {"seconds_per_unit": 0.01} if kind == "emulated" else {"hidden": 32, "heads": 2, "sequence": 16}
    return job(
        pipelines,
        ranks,
        4,
        kind,
        shape={"chunks": chunks},
        model={"layers": 8, **more, **model},
        memory={"limit": 16 * chunks, "state_limit": 1.5},
        planner={"layout": "elastic", "move_when": "always", "steps": 60},
        train={"checkpoint_every": every or steps, "warmup": 2},
    )


class AwaitsLayout(Observer):
    """Behind the first death it holds the run until the planner has answered which layout is to follow.

    Attributes:
        stop: is set once a worker stands still.
    """

    def __init__(self) -> None:
        self._pause = 0.0
        self.stop = threading.Event()

    def event(self, event: dict[str, Any]) -> None:
        if event["kind"] == "detected":
            self._pause = 0.25
        elif event["kind"] == "layout":
            self._pause = 0.0
        elif event["kind"] == "fault" and event.get("fault", "").startswith("stall"):
            self.stop.set()

    def committed(self, line: dict[str, Any]) -> None:
        """The answer is taken up with a commit, so each of them waits a little longer for it; a minute in all."""
        time.sleep(self._pause)
        self._pause = min(8.0, 2 * self._pause)


class KillsWhenLayersMove(Observer):
    """Kills a worker as soon as the decision to move is told: it stops, acknowledges, forms its groups, or copies."""

    def __init__(self, directory: Path, victim: str) -> None:
        self._log, self._is_done = f"{directory}/logs/{victim}.log", False

    def event(self, event: dict[str, Any]) -> None:
        if event["kind"] == "layout" and event["moves"] and not self._is_done:
            self._is_done = True
            for pid in processes_writing_below(self._log):
                os.kill(pid, signal.SIGKILL)


def last_folder(result: RunResult) -> Path:
    assert result.directory is not None
    folder = max((result.directory / "checkpoints").glob("step-*"))
    assert (folder / "manifest.json").is_file()
    return folder


def final_state(result: RunResult) -> dict[str, bytes]:
    """What the last checkpoint of a run holds whose hosts have all of their stages, by name."""
    files = sorted(last_folder(result).glob("*.safetensors"))
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    return {name: tensor.contiguous().view(-1).numpy().tobytes() for name, tensor in tensors.items()}


def assert_same(struck: RunResult, calm: RunResult) -> None:
    assert figures(struck) == figures(calm)
    assert final_state(struck) == final_state(calm)


def calm_of(of: PricedJob, launch: Run, steps: int | None = None) -> RunResult:
    """The run in which every host has all, layers stay where they are, and nobody fails; to the first checkpoint if
    nothing else is said."""
    train = msgspec.structs.replace(of.train, sharded_optimizer=False, optimizer_copies=2)
    planner = msgspec.structs.replace(of.planner, layout="fixed", move=False)
    membership = msgspec.structs.replace(of.membership, transport="auto")
    still = of.with_sections(train=train, planner=planner, membership=membership)
    return calm_run(still, launch, steps or of.train.checkpoint_every)


def require_as_calm(found: RunResult, of: PricedJob, launch: Run, steps: int | None = None) -> None:
    calm = calm_of(of, launch, steps)
    if not of.train.sharded_optimizer:
        assert_same(found, calm)
        return
    assert figures(found) == figures(calm)
    if of.grid.tensor_parallel == 1:
        require_equal(stored(last_folder(found)), stored(last_folder(calm)))


def moved(result: RunResult) -> list[int]:
    """Steps with which layers moved, each once."""
    return sorted({event["step"] for event in result.events if event["kind"] == "moved"})


def layouts(result: RunResult) -> list[dict[str, Any]]:
    return [event for event in result.events if event["kind"] == "layout"]


def is_of_units(result: RunResult, step: int) -> bool:
    """Whether all shards that were copied for the generation that began with a step are of units."""
    events = (event for event in result.events if event["kind"] == "moved" and event["step"] == step)
    return all(" of layer " in name or " of the " in name for event in events for name in event["shards"])


@dataclass(frozen=True)
class Scenario:
    """A job with faults, while whose layers move.

    Attributes:
        of: the job, whose optimizer is not sharded.
        faults: with spaces between them.
        away: between which steps layers move first.
        back: the step with which the given stages come back; 0 where they do not.
        decided: the failed workers of each event `layout`, if they are told.
        sections: replaced keys, by section.
    """

    of: PricedJob
    faults: str
    away: tuple[int, int] = (0, STEPS)
    back: int = 0
    decided: tuple[str, ...] | None = None
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)

    def job(self, is_sharded: bool) -> PricedJob:
        changed = {name: msgspec.structs.replace(getattr(self.of, name), **to) for name, to in self.sections.items()}
        of = self.of.with_sections(**changed)
        return sharded(of) if is_sharded else of


def rows() -> Iterator[Any]:
    """(scenario, whether the optimizer is sharded)."""

    def row(name: str, *given: Any, both: bool = True, only: bool = False, runs: bool = False, **more: Any) -> Any:
        for is_sharded in (True,) if only else (False, True) if both else (False,):
            soak = [] if runs else [pytest.mark.soak]
            label = f"{name}, sharded" if is_sharded else name
            yield pytest.param(Scenario(*given, **more), is_sharded, id=label, marks=[*soak, pytest.mark.slow])

    there = f"kill:1.1@3.forward rejoin:1.1@{BACK}"
    yield from row("two chunks", elastic(3, 2, chunks=2), there, (4, BACK), BACK, only=True)
    wide = {"steps": 24, "hidden": 64}
    tied = elastic(3, 2, "gpt", **wide, tied=True)
    once = "kill:1.1@2.forward rejoin:1.1@20"
    in_bf16 = {"train": {"precision": "bf16"}}
    yield from row("tied bf16", tied, once, (3, 20), 20, only=True, runs=True, sections=in_bf16)
    yield from row("tied", tied, once, (3, 20), 20)
    yield from row("tied in chunks", elastic(3, 2, "gpt", 24, chunks=2, tied=True), once, (3, 20), 20, both=False)
    yield from row("gpt", elastic(3, 2, "gpt", **wide), once, (3, 20), 20)
    yield from row("gpt in chunks", elastic(3, 2, "gpt", 24, chunks=2), once, (3, 20), 20, both=False)
    for kind in ("emulated", "gpt"):
        devices = {"membership": {"transport": named(Simulated)}}
        yield from row(f"{kind} on devices", elastic(3, 2, kind), there, (4, BACK), BACK, sections=devices)
    two = {"grid": {"tensor_parallel": 2}}
    yield from row(
        "two processes", elastic(3, 2, "gpt"), f"kill:1.1t1@3 rejoin:1.1@{BACK}", (4, BACK), BACK, sections=two
    )
    # 1.0 hosts the middle of a chain: it sends layers and gets others. 0.0 only sends, and 2.1 sends to who joins. With
    # two chunks only 2.0 has got any.
    for victim, phase in product(("0.0", "1.0", "2.1"), ("acknowledge", "form", "copy")):
        yield from row(f"{victim} dies in {phase}", elastic(3, 2), f"{there} kill:{victim}@{BACK}.{phase}", both=False)
        of, faults = elastic(3, 2, "gpt", **wide), f"kill:1.1@2.forward rejoin:1.1@18 kill:{victim}@18.{phase}"
        yield from row(f"{victim} dies in {phase}", of, faults, only=True)
    for victim in ("0.0", "2.0", "2.1"):
        faults = f"{there} kill:{victim}@{BACK}.copy"
        yield from row(f"{victim} dies in a copy of chunks", elastic(3, 2, chunks=2), faults, both=False)
    for instant in ("reduce", "commit", "step", "stepped", "gather"):
        faults = f"kill:1.1@2.forward kill:2.0@21.{instant}"
        of = elastic(3, 2, "gpt", **wide)
        yield from row(f"{instant} is taken back", of, faults, (3, 21), only=True, sections=in_bf16)
    # The plan of the given stages has nobody for them then; that of the layout goes on without any copy.
    both_of_a_rank = f"kill:1.1@2.forward kill:0.1@{STEPS - 6}.forward"
    yield from row("both of a rank die", elastic(2, 4), both_of_a_rank, (3, STEPS - 6), both=False)
    given = {"planner": {"layout": "fixed", "move": True}}
    faults = f"kill:1.1@2.forward kill:2.1@3.forward rejoin:1.1@{BACK}"
    yield from row("another stage", elastic(4, 2), faults, (4, BACK), both=False, sections=given)
    faults = f"kill:1.1@2.forward kill:2.1@6.forward rejoin:1.1@{BACK}"
    yield from row("another stage", elastic(4, 2), faults, (7, BACK), only=True, sections=given)
    for chunks in (1, 2):
        of, faults = elastic(4, 2, chunks=chunks), "kill:1.1@3.forward kill:2.0@20.forward"
        yield from row(f"further death, {chunks} chunks", of, faults, (4, 20), both=False, decided=("1.1", "1.1 2.0"))
    victims = [((3, 2), victim) for victim in ("0.0", "1.1", "2.0", "2.1") * 3]
    shapes = [*zip(victims, INSTANTS * 2, strict=False)]
    shapes += [(((2, 4), victim), instant) for victim, instant in zip(("0.0", "1.1", "0.2", "1.3"), INSTANTS)]  # noqa: B905
    shapes += [(((2, 4), "1.0"), instant) for instant in ("forward", "commit", "stepped", "backward")]
    for kind, ((shape, victim), instant) in product(("gpt", "llama"), shapes):
        faults = f"kill:{victim}@2.{instant} rejoin:{victim}@20"
        yield from row(f"{kind} {shape} {victim} {instant}", elastic(*shape, kind, 24), faults, (2, 20), 20, both=False)


@pytest.mark.parametrize(("scenario", "is_sharded"), rows())
def test_layers_move_and_no_bit_changes(scenario: Scenario, is_sharded: bool, launch: Run) -> None:
    of = scenario.job(is_sharded)
    faults, steps = scenario.faults.split(), of.train.checkpoint_every
    found = launch(of, steps, *faults, observer=AwaitsLayout())
    require_as_calm(found, of, launch)
    assert "restored" not in kinds(found)
    dead = {fault.split(":")[1].split("@")[0].partition("t")[0] for fault in faults if fault.startswith("kill")}
    assert {event["worker"] for event in found.events if event["kind"] == "detected"} <= dead
    moves = [event["step"] for event in layouts(found) if event["moves"]]
    first, last = scenario.away
    assert first <= moves[0] <= last
    assert set(moves) <= set(moved(found))
    if scenario.decided is not None:
        assert [" ".join(event["failed"]) for event in layouts(found)] == list(scenario.decided)
    if scenario.back:
        assert is_sharded or moved(found)[-1] == scenario.back
        assert [event["step"] for event in found.events if event["kind"] == "rejoined"] == [scenario.back]
    if is_sharded:
        assert is_of_units(found, moves[0])
        told = [set(event["further_deaths"]) for event in found.events if event["kind"] == "shards"]
        assert not scenario.back or (told[0], told[-1]) == ({1}, {1})
    elif len(dead) == 2 and not scenario.back and "rejoin" not in scenario.faults:  # re-routed without any copy
        second = [event["step"] for event in found.events if event["kind"] == "detected"][1]
        assert second not in moved(found)


@pytest.mark.parametrize("chunks", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_killed_re_routed_moved_re_joined_and_moved_back(launch: Run, chunks: int) -> None:
    """With two chunks a worker has the layers 0, 1, 4 and 5, or the others, and layers move between such workers."""
    of = elastic(3, 2, chunks=chunks)
    struck = launch(of, STEPS, "kill:1.1@3.forward", f"rejoin:1.1@{BACK}", observer=AwaitsLayout())
    require_as_calm(struck, of, launch)
    there, back = moved(struck)
    assert 3 < there < back == BACK
    found = [kind for kind in kinds(struck) if kind not in ("moved", "undone", "checkpoint")]
    told = "generation fault detected generation recovered layout generation layout generation rejoined"
    assert found == told.split()
    layout, returns = layouts(struck)
    assert layout["moves"]
    assert (returns["moves"], returns["returned"], returns["step"]) == (True, ["1.1"], back)
    periods = {line["step"]: line["period"] for line in struck.metrics}
    assert layout["period"] <= periods[back - 1] < layout["period_before"]  # with the barrier it is a little longer
    event = next(event for event in struck.events if event["kind"] == "moved")
    assert event["bytes"] == 8 * 9 * (event["units"][1] - event["units"][0])


@pytest.mark.soak
@CHUNKS
def test_a_schedule_whose_workers_host_unlike_layers_trains(launch: Run, chunks: int) -> None:
    of = elastic(3, 2, chunks=chunks)
    own = plan(of, [Worker(1, 1)], seconds=3.0).schedule
    assert len({own.stages_of(worker) for worker in own.live}) >= (5 if chunks == 1 else 3)
    require_as_calm(launch(of, STEPS, schedule=own), of, launch)


@pytest.mark.soak
def test_where_moving_does_not_pay_its_pause_layers_stay(launch: Run) -> None:
    of = elastic(3, 2)
    section = msgspec.structs.replace(of.planner, move_when="worth", iterations_between_changes=2.0)
    struck = launch(of.with_sections(planner=section), STEPS, "kill:1.1@3.forward")
    (layout,) = layouts(struck)
    saved = (layout["period_before"] - layout["period"]) / layout["period_before"] * layout["until_change"]
    assert 0 < saved < layout["pause"]
    assert (layout["moves"], moved(struck)) == (False, [])


@pytest.mark.soak
@pytest.mark.parametrize(("victim", "is_sharded"), product(("0.1", "1.0"), (False, True)))
def test_who_dies_while_layers_move_away_makes_the_layout_useless(
    victim: str, is_sharded: bool, launch: Run, tmp_path: Path
) -> None:
    of, directory = sharded(elastic(3, 2)) if is_sharded else elastic(3, 2), tmp_path / "run"
    observer = KillsWhenLayersMove(directory, victim)
    struck = launch(of, STEPS, "kill:1.1@3.forward", directory=directory, observer=observer)
    assert {event["worker"] for event in struck.events if event["kind"] == "detected"} == {"1.1", victim}
    assert layouts(struck)[0]["failed"] == ["1.1"]
    require_as_calm(struck, of, launch)


@pytest.mark.soak
def test_a_worker_that_changes_its_stage_hosts_all_of_another_one(launch: Run) -> None:
    of = elastic(4, 2)
    of = of.with_sections(planner=msgspec.structs.replace(of.planner, layout="fixed", move=True))
    faults = ("kill:1.1@2.forward", "kill:2.1@6.forward", f"rejoin:1.1@{BACK}")
    for each in (of, sharded(of)):
        found = launch(each, STEPS, *faults, observer=AwaitsLayout())
        (layout,) = (event for event in layouts(found) if event["moves"])
        events = [event for event in found.events if event["kind"] == "moved" and event["step"] == layout["step"]]
        if each is of:
            (event,) = events
            assert (event["units"], Worker.parse(event["worker"]).rank) == ((4, 8), 0)
        else:
            names = {name for event in events for name in event["shards"]}
            assert {name.rpartition(" of ")[2] for name in names} >= OF_LAST_LAYERS


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["emulated", "gpt"])
def test_hosts_that_differ_go_back_to_a_state_from_before_layers_moved(launch: Run, kind: str) -> None:
    """Not all was replayed when what is flipped at 13 shows, in the first iteration of a generation. So all are back
    where the run began, and host the given layers there; what the layout at hand has them host is copied anew. Nobody
    is fenced: layer 0 has two hosts in that layout."""
    of = elastic(3, 2, kind, 24).with_sections(integrity=IntegritySection(every=12))
    faults = ("kill:1.1@3.forward", "flip=weight,20:0.0@13", "nan:2.0@16")
    struck = launch(of, 24, *faults, observer=AwaitsLayout())
    require_as_calm(struck, of, launch)
    assert {step for step in moved(struck) if step < 13} > {0}
    (corrupt,) = (event for event in struck.events if event["kind"] == "corrupt")
    assert (corrupt["workers"], corrupt["step"], corrupt["bits"][0]["bit"]) == ([], 16, 20)
    assert "all are back behind step -1" in [event for event in struck.events if event["kind"] == "undone"][-1]["cause"]


@pytest.mark.soak
@CHUNKS
def test_a_checkpoint_of_one_layout_is_read_into_another(launch: Run, tmp_path: Path, chunks: int) -> None:
    of = elastic(3, 2, chunks=chunks)
    own = plan(of, [Worker(1, 1)], seconds=3.0).schedule
    twice = launch(of, 2 * STEPS)
    launch(of, STEPS, schedule=own, directory=tmp_path / "away")
    on = train(of, tmp_path / "away", steps=2 * STEPS, planner=plan_for_training, resume=True)
    assert_same(on, twice)
    launch(of, STEPS, directory=tmp_path / "back")
    assert_same(train(of, tmp_path / "back", steps=2 * STEPS, schedule=own, resume=True), twice)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["emulated", "gpt"])
def test_shards_of_a_moved_layout_are_read_into_any_other(kind: str, launch: Run, tmp_path: Path) -> None:
    steps = STEPS if kind == "emulated" else 12
    of = elastic(3, 2, kind, steps)
    twice = launch(of, 2 * steps)
    own = plan(of, [Worker(1, 1)], seconds=3.0).schedule
    launch(sharded(of), steps, schedule=own, directory=tmp_path / "away")
    for name, after, schedule in (("all", of, None), ("shards", sharded(of), None), ("moved", sharded(of, 3), own)):
        folder = tmp_path / name
        copytree(tmp_path / "away", folder)
        on = train(after, folder, steps=2 * steps, planner=plan_for_training, schedule=schedule, resume=True)
        assert figures(on)[-steps:] == figures(twice)[-steps:]


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
    observer = AwaitsLayout()
    found = train(
        of.with_sections(membership=patient, train=seldom),
        tmp_path / "run",
        steps=24,
        faults=[parse_fault(fault) for fault in faults],
        planner=plan_for_training,
        observer=observer,
        stop=observer.stop,
    )
    assert "corrupt" not in kinds(found)
    assert (found.events[-1]["kind"], found.events[-1]["checkpoint"]) == ("stopped", "step-00000019")
    assert final_state(found) == final_state(calm)


@pytest.mark.soak
def test_a_worker_that_gets_slow_in_a_layout_is_given_less(launch: Run) -> None:
    steps = 60
    of = elastic(4, 2, steps=steps)
    of = of.with_sections(membership=msgspec.structs.replace(of.membership, drift=0.5, drift_iterations=8))
    struck = launch(of, steps, "kill:1.1@3.forward", f"slow=3:2.1@12-{steps - 1}", observer=AwaitsLayout())
    require_as_calm(struck, of, launch)
    told = next(event for event in struck.events if event["kind"] == "replanned")
    assert "worker 2.1" in told["cause"]
    assert moved(struck)[0] < told["step"]
    assert told["period"] < told["period_before"]


@pytest.mark.soak
def test_two_hundred_iterations_with_deaths_at_random_leave_nothing_behind(launch: Run, tmp_path: Path) -> None:
    """A death may take the last host of a layer along; then a checkpoint is gone back to."""
    of = elastic(3, 2, steps=200, every=10)
    faults = [str(fault) for fault in punish(of.shape, 200, 12.0, 7)]
    struck = launch(of, 200, *faults, directory=tmp_path / "run")
    require_as_calm(struck, of, launch, 200)
    assert moved(struck)
    assert processes_writing_below(str(tmp_path)) == []
