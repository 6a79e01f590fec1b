"""Layers move in a running job: at a death first re-routed, then cut anew; losses and states are the calm run's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file

from recycle import Worker
from recycle.cli.planner import plan_for_training
from recycle.exec.faults.punisher import punish
from recycle.exec.launch.dials import Observer
from recycle.exec.launch.launcher import RunResult, train
from recycle.job import PricedJob
from recycle.job.sections import IntegritySection
from recycle.solve.planner import plan
from tests.exec.accelerator.struck import named
from tests.exec.accelerator.transport import Simulated
from tests.exec.runs import Run, job, kinds, processes_writing_below

pytestmark = pytest.mark.process

STEPS = 24
CHUNKS = pytest.mark.parametrize("chunks", [1, 2])


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
    """Behind the first death it holds the run until the planner has answered which layout is to follow."""

    def __init__(self) -> None:
        self._pause = 0.0

    def event(self, event: dict[str, Any]) -> None:
        if event["kind"] == "detected":
            self._pause = 0.25
        elif event["kind"] == "layout":
            self._pause = 0.0

    def committed(self, line: dict[str, Any]) -> None:
        """The answer is taken up with a commit, so each of them waits a little longer for it; a minute in all."""
        time.sleep(self._pause)
        self._pause = min(8.0, 2 * self._pause)


def final_state(result: RunResult) -> dict[str, bytes]:
    """What the last checkpoint holds, by name."""
    assert result.directory is not None
    folder = max((result.directory / "checkpoints").glob("step-*"))
    assert (folder / "manifest.json").is_file()
    tensors = {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}
    return {name: tensor.contiguous().view(-1).numpy().tobytes() for name, tensor in tensors.items()}


def assert_same(struck: RunResult, calm: RunResult) -> None:
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in struck.metrics] == [line[key] for line in calm.metrics]
    assert final_state(struck) == final_state(calm)


Calm = Callable[..., RunResult]


@pytest.fixture(scope="module")
def runs() -> dict[str, RunResult]:
    return {}


@pytest.fixture
def calm(launch: Run, runs: dict[str, RunResult]) -> Calm:
    """The run of a job in which nobody fails, to its first checkpoint if nothing else is said; once for all tests that
    ask for it."""

    def run(of: PricedJob, steps: int | None = None) -> RunResult:
        text = of.to_toml()
        if text not in runs:
            runs[text] = launch(of, steps or of.train.checkpoint_every)
        return runs[text]

    return run


def moved(result: RunResult) -> list[int]:
    """Steps with which layers moved, each once."""
    return sorted({event["step"] for event in result.events if event["kind"] == "moved"})


@pytest.mark.parametrize("chunks", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_killed_re_routed_moved_re_joined_and_moved_back(launch: Run, calm: Calm, chunks: int) -> None:
    """With two chunks a worker has the layers 0, 1, 4 and 5, or the others, and layers move between such workers."""
    of = elastic(3, 2, chunks=chunks)
    struck = launch(of, STEPS, "kill:1.1@3.forward", f"rejoin:1.1@{STEPS - 4}", observer=AwaitsLayout())
    assert_same(struck, calm(of))
    there, back = moved(struck)
    assert 3 < there < back == STEPS - 4
    found = [kind for kind in kinds(struck) if kind not in ("moved", "undone", "checkpoint")]
    told = "generation fault detected generation recovered layout generation layout generation rejoined"
    assert found == told.split()
    layout, returns = (event for event in struck.events if event["kind"] == "layout")
    assert layout["moves"]
    assert (returns["moves"], returns["returned"], returns["step"]) == (True, ["1.1"], back)
    assert layout["period"] < layout["period_before"]
    periods = {line["step"]: line["period"] for line in struck.metrics}
    assert layout["period"] <= periods[back - 1] < layout["period_before"]  # with the barrier it is a little longer
    event = next(event for event in struck.events if event["kind"] == "moved")
    assert event["bytes"] == 8 * 9 * (event["units"][1] - event["units"][0])


@pytest.mark.soak
@CHUNKS
def test_a_schedule_whose_workers_host_unlike_layers_trains(launch: Run, calm: Calm, chunks: int) -> None:
    of = elastic(3, 2, chunks=chunks)
    own = plan(of, [Worker(1, 1)], seconds=3.0).schedule
    assert len({own.stages_of(worker) for worker in own.live}) >= (5 if chunks == 1 else 3)
    assert_same(launch(of, STEPS, schedule=own), calm(of))


@pytest.mark.soak
def test_where_moving_does_not_pay_its_pause_layers_stay(launch: Run) -> None:
    of = elastic(3, 2)
    section = msgspec.structs.replace(of.planner, move_when="worth", iterations_between_changes=2.0)
    struck = launch(msgspec.structs.replace(of, planner=section), STEPS, "kill:1.1@3.forward")
    (layout,) = (event for event in struck.events if event["kind"] == "layout")
    saved = (layout["period_before"] - layout["period"]) / layout["period_before"] * layout["until_change"]
    assert 0 < saved < layout["pause"]
    assert not layout["moves"]
    assert moved(struck) == []


@pytest.mark.soak
@pytest.mark.parametrize(
    ("victim", "phase", "chunks"),
    [(*each, 1) for each in product(("0.0", "1.0", "2.1"), ("acknowledge", "form", "copy"))]
    + [(victim, "copy", 2) for victim in ("0.0", "2.0", "2.1")],
)
def test_who_dies_while_layers_move_back_takes_nothing_along(
    launch: Run, calm: Calm, victim: str, phase: str, chunks: int
) -> None:
    """1.0 hosts the middle of a chain: it sends layers and gets others. 0.0 only sends, and 2.1 sends to who joins.
    With two chunks only 2.0 has got any."""
    of = elastic(3, 2, chunks=chunks)
    back = STEPS - 4
    faults = ("kill:1.1@3.forward", f"rejoin:1.1@{back}", f"kill:{victim}@{back}.{phase}")
    struck = launch(of, STEPS, *faults, observer=AwaitsLayout())
    assert {event["worker"] for event in struck.events if event["kind"] == "detected"} >= {"1.1"}
    assert_same(struck, calm(of))


class KillsWhenLayersMove(Observer):
    """Kills a worker as soon as the decision to move is told: it stops, acknowledges, forms its groups, or copies."""

    def __init__(self, directory: Path, victim: str) -> None:
        self._log, self._is_done = f"{directory}/logs/{victim}.log", False

    def event(self, event: dict[str, Any]) -> None:
        if event["kind"] == "layout" and event["moves"] and not self._is_done:
            self._is_done = True
            for pid in processes_writing_below(self._log):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["0.1", "1.0"])
def test_who_dies_while_layers_move_away_makes_the_layout_useless(
    launch: Run, calm: Calm, tmp_path: Path, victim: str
) -> None:
    of = elastic(3, 2)
    directory = tmp_path / "run"
    struck = launch(
        of,
        STEPS,
        "kill:1.1@3.forward",
        directory=directory,
        observer=KillsWhenLayersMove(directory, victim),
    )
    assert {event["worker"] for event in struck.events if event["kind"] == "detected"} == {"1.1", victim}
    assert next(event["failed"] for event in struck.events if event["kind"] == "layout") == ["1.1"]
    assert_same(struck, calm(of))


@pytest.mark.soak
def test_both_workers_of_a_rank_may_die_once_others_hold_their_layers(launch: Run, calm: Calm) -> None:
    """The plan of the given stages has nobody for them then; that of the layout goes on without any copy."""
    of = elastic(2, 4)
    struck = launch(of, STEPS, "kill:1.1@2.forward", f"kill:0.1@{STEPS - 6}.forward", observer=AwaitsLayout())
    assert_same(struck, calm(of))
    assert struck.metrics[-1]["live_workers"] == 6
    first, second = (event for event in struck.events if event["kind"] == "detected")
    there, *later = moved(struck)
    assert first["step"] < there < second["step"]
    assert second["step"] not in later


@pytest.mark.soak
def test_a_worker_changes_its_stage_where_the_given_stages_stay(launch: Run, calm: Calm) -> None:
    of = elastic(4, 2)
    section = msgspec.structs.replace(of.planner, layout="fixed", move=True)
    of = msgspec.structs.replace(of, planner=section)
    struck = launch(of, STEPS, "kill:1.1@2.forward", "kill:2.1@3.forward", f"rejoin:1.1@{STEPS - 4}")
    (event,) = (event for event in struck.events if event["kind"] == "moved" and event["step"] < STEPS - 4)
    assert event["units"] == (4, 8)
    assert Worker.parse(event["worker"]).rank == 0
    assert_same(struck, calm(of))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["emulated", "gpt"])
def test_hosts_that_differ_go_back_to_a_state_from_before_layers_moved(launch: Run, calm: Calm, kind: str) -> None:
    """Not all was replayed when what is flipped at 13 shows, in the first iteration of a generation. So all are back
    where the run began, and host the given layers there; what the layout at hand has them host is copied anew. Nobody
    is fenced: layer 0 has two hosts in that layout."""
    of = elastic(3, 2, kind, 24).with_sections(integrity=IntegritySection(every=12))
    faults = ("kill:1.1@3.forward", "flip=weight,20:0.0@13", "nan:2.0@16")
    struck = launch(of, 24, *faults, observer=AwaitsLayout())
    assert_same(struck, calm(of))
    assert {step for step in moved(struck) if step < 13} > {0}
    (corrupt,) = (event for event in struck.events if event["kind"] == "corrupt")
    assert (corrupt["what"][:19], corrupt["step"], corrupt["bits"][0]["bit"]) == ("workers 0.0 and 2.0", 16, 20)
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
@CHUNKS
def test_layers_of_a_gpt_move_there_and_back(launch: Run, calm: Calm, chunks: int) -> None:
    of = elastic(3, 2, "gpt", 24, chunks=chunks)
    struck = launch(of, 24, "kill:1.1@2.forward", "rejoin:1.1@20", observer=AwaitsLayout())
    assert moved(struck)[-1] == 20
    assert len(moved(struck)) == 2
    assert_same(struck, calm(of))


@pytest.mark.soak
def test_layers_of_workers_of_two_processes_move(launch: Run, calm: Calm) -> None:
    of = elastic(3, 2, "gpt")
    of = of.with_sections(grid=msgspec.structs.replace(of.grid, tensor_parallel=2))
    struck = launch(of, STEPS, "kill:1.1t1@3", f"rejoin:1.1@{STEPS - 4}", observer=AwaitsLayout())
    assert_same(struck, calm(of))
    assert 3 < moved(struck)[0] < moved(struck)[-1] == STEPS - 4


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["emulated", "gpt"])
def test_layers_move_over_simulated_accelerators(launch: Run, calm: Calm, kind: str) -> None:
    of = elastic(3, 2, kind)
    on_devices = of.with_sections(membership=msgspec.structs.replace(of.membership, transport=named(Simulated)))
    struck = launch(on_devices, STEPS, "kill:1.1@3", f"rejoin:1.1@{STEPS - 4}", observer=AwaitsLayout())
    assert_same(struck, calm(of))
    assert 3 < moved(struck)[0] < moved(struck)[-1] == STEPS - 4


@pytest.mark.slow
@pytest.mark.soak
@CHUNKS
def test_layers_of_a_gpt_whose_ends_share_a_weight_move_too(launch: Run, calm: Calm, chunks: int) -> None:
    of = elastic(3, 2, "gpt", 24, chunks=chunks, tied=True)
    struck = launch(of, 24, "kill:1.1@2.forward", "rejoin:1.1@20", observer=AwaitsLayout())
    assert 2 < moved(struck)[0] < 20
    assert_same(struck, calm(of))


INSTANTS = ("forward", "backward", "reduce", "commit", "step", "stepped")


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize(
    ("shape", "victim", "instant"),
    [
        pytest.param((3, 2), victim, instant)
        for victim, instant in zip(("0.0", "1.1", "2.0", "2.1") * 3, INSTANTS * 2, strict=False)
    ]
    + [
        pytest.param((2, 4), victim, instant)
        for victim, instant in zip(("0.0", "1.1", "0.2", "1.3"), INSTANTS, strict=False)
    ]
    + [pytest.param((2, 4), "1.0", instant) for instant in ("forward", "commit", "stepped", "backward")],
)
def test_whoever_dies_whenever(
    launch: Run, calm: Calm, kind: str, shape: tuple[int, int], victim: str, instant: str
) -> None:
    of = elastic(*shape, kind, 24)
    struck = launch(of, 24, f"kill:{victim}@2.{instant}", f"rejoin:{victim}@20", observer=AwaitsLayout())
    assert_same(struck, calm(of))
    assert 2 <= moved(struck)[0] < 20
    assert [event["step"] for event in struck.events if event["kind"] == "rejoined"] == [20]


@pytest.mark.soak
@CHUNKS
def test_a_further_death_in_a_layout_re_routes_in_it_and_then_the_model_is_cut_anew(
    launch: Run, calm: Calm, chunks: int
) -> None:
    of = elastic(4, 2, chunks=chunks)
    struck = launch(of, STEPS, "kill:1.1@3.forward", "kill:2.0@20.forward", observer=AwaitsLayout())
    assert_same(struck, calm(of))
    _, second = (event["step"] for event in struck.events if event["kind"] == "detected")
    there, *later = moved(struck)
    assert 3 < there < second
    assert second not in later
    layouts = [event for event in struck.events if event["kind"] == "layout"]
    assert [event["failed"] for event in layouts] == [["1.1"], ["1.1", "2.0"]]
    re_routed = struck.metrics[second]
    assert layouts[1]["period_before"] <= re_routed["period"]


@pytest.mark.soak
def test_a_worker_that_gets_slow_in_a_layout_is_given_less(launch: Run, calm: Calm) -> None:
    steps = 60
    of = elastic(4, 2, steps=steps)
    drift = msgspec.structs.replace(of.membership, drift=0.5, drift_iterations=8)
    of = msgspec.structs.replace(of, membership=drift)
    struck = launch(of, steps, "kill:1.1@3.forward", f"slow=3:2.1@12-{steps - 1}", observer=AwaitsLayout())
    assert_same(struck, calm(of))
    told = next(event for event in struck.events if event["kind"] == "replanned")
    assert "worker 2.1" in told["cause"]
    assert moved(struck)[0] < told["step"]
    assert told["period"] < told["period_before"]


@pytest.mark.soak
def test_two_hundred_iterations_with_deaths_at_random_leave_nothing_behind(
    launch: Run, calm: Calm, tmp_path: Path
) -> None:
    """A death may take the last host of a layer along; then a checkpoint is gone back to."""
    of = elastic(3, 2, steps=200, every=10)
    faults = [str(fault) for fault in punish(of.shape, 200, 12.0, 7)]
    struck = launch(of, 200, *faults, directory=tmp_path / "run")
    assert_same(struck, calm(of, 200))
    assert moved(struck)
    assert processes_writing_below(str(tmp_path)) == []
