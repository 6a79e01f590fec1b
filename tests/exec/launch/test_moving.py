"""Layers move in a running job: micro-batches are re-routed at once, layers move later; all bits stay the same."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from recycle import Worker
from recycle.cli.planner import plan_for_training
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.launcher import RunResult, train
from recycle.exec.launch.trackers import Observer
from recycle.job import PricedJob
from recycle.job.sections import IntegritySection
from recycle.solve.planner import plan
from tests.exec.accelerator.struck import named
from tests.exec.accelerator.transport import Simulated
from tests.exec.runs import Run, calm_run, figures, job, kinds, of_kind, only, varied
from tests.exec.sharded import last_checkpoint, require_calm, require_equal, require_same_run, sharded

STEPS = 24
BACK = STEPS - 4


def elastic(
    pipelines: int,
    ranks: int,
    kind="emulated",
    steps: int = STEPS,
    every: int | None = None,
    chunks=1,
    **model,
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
    """Holds the run after the first death until the planner has answered which layout follows.

    Attributes:
        stop: is set once a worker stands still.
    """

    def __init__(self):
        self._pause = 0.0
        self.stop = threading.Event()

    def event(self, event):
        if event["kind"] == "detected":
            self._pause = 0.25
        elif event["kind"] == "layout":
            self._pause = 0.0
        elif event["kind"] == "fault" and event.get("fault", "").startswith("stall"):
            self.stop.set()

    def committed(self, line):
        """The answer is taken up with a commit, so each of them waits a little longer for it; a minute in all."""
        time.sleep(self._pause)
        self._pause = min(8.0, 2 * self._pause)


def require_as_calm(result: RunResult, config: PricedJob, launch: Run):
    """A run equals the one without moves, shards and faults."""
    still = varied(
        config,
        train={"sharded_optimizer": False, "optimizer_copies": 2},
        planner={"layout": "fixed", "move": False},
        membership={"transport": "auto"},
    )
    if config.grid.tensor_parallel == 1:
        require_calm(result, still)
        return
    calm = calm_run(still, launch, config.train.checkpoint_every)
    if config.train.sharded_optimizer:
        assert figures(result) == figures(calm)
    else:
        require_same_run(result, calm)


def moved(result: RunResult) -> list[int]:
    """Steps with which layers moved, each once."""
    return sorted({event["step"] for event in of_kind(result, "moved")})


def layouts(result: RunResult):
    return of_kind(result, "layout")


def is_of_units(result: RunResult, step: int) -> bool:
    """Whether all shards that were copied for the generation that began with a step are of units."""
    events = (event for event in of_kind(result, "moved") if event["step"] == step)
    return all(" of layer " in name or " of the " in name for event in events for name in event["shards"])


@dataclass(frozen=True)
class Scenario:
    """A job with faults, while whose layers move.

    Attributes:
        of: the job, whose optimizer is not sharded.
        faults: with spaces between them.
        away: between which steps layers move first.
        back: the step with which the given stages come back; 0 where they do not.
        sections: replaced keys, by section.
    """

    of: PricedJob
    faults: str
    away: tuple[int, int] = (0, STEPS)
    back: int = 0
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)

    def job(self, is_sharded: bool) -> PricedJob:
        config = varied(self.of, **self.sections)
        return sharded(config) if is_sharded else config


def row(name: str, *given, states="whole sharded", runs=False, **more):
    """A parameter (scenario, whether the optimizer is sharded) for each of these states."""
    marks = [pytest.mark.slow] if runs else [pytest.mark.slow, pytest.mark.soak]
    return [
        pytest.param(Scenario(*given, **more), state == "sharded", id=f"{name}, {state}", marks=marks)
        for state in states.split()
    ]


ONCE, WIDE = "kill:1.1@2.forward rejoin:1.1@{}", {"hidden": 64}
AWAY_AND_BACK = f"kill:1.1@3.forward rejoin:1.1@{BACK}"
TIED = elastic(3, 2, "gpt", 13, **WIDE, tied=True, layers=6)
BF16 = {"train": {"precision": "bf16"}, "grid": {"micro_batches": 2}}
GPT = elastic(3, 2, "gpt", **WIDE)
DEVICES, TENSOR = {"membership": {"transport": named(Simulated)}}, {"grid": {"tensor_parallel": 2}}
ROWS = [
    row("two chunks", elastic(3, 2, chunks=2), AWAY_AND_BACK, (4, BACK), BACK, states="sharded"),
    row("tied bf16", TIED, ONCE.format(10), (3, 10), 10, states="sharded", runs=True, sections=BF16),
    row("gpt", GPT, ONCE.format(20), (3, 20), 20),
    row("gpt on devices", elastic(3, 2, "gpt"), AWAY_AND_BACK, (4, BACK), BACK, sections=DEVICES),
    row(
        "two processes",
        elastic(3, 2, "gpt"),
        f"kill:1.1t1@3 rejoin:1.1@{BACK}",
        (4, BACK),
        BACK,
        sections=TENSOR,
    ),
    # 1.0 hosts the middle of a chain: it sends layers and gets others. 0.0 only sends, and 2.1 sends to the joiner.
    *(
        row(f"{victim} dies in {phase}", elastic(3, 2), f"{AWAY_AND_BACK} kill:{victim}@{BACK}.{phase}", states="whole")
        for victim, phase in (("0.0", "acknowledge"), ("2.1", "form"), ("1.0", "copy"))
    ),
    row("dies in copy", GPT, "kill:1.1@2.forward rejoin:1.1@18 kill:1.0@18.copy", states="sharded"),
    row("gather is repeated", GPT, "kill:1.1@2.forward kill:2.0@21.gather", states="sharded"),
    # The plan of the given stages has no host for them; the plan of the layout needs no copies.
    row("both of a rank die", elastic(2, 4), f"kill:1.1@2.forward kill:0.1@{STEPS - 6}.forward", states="whole"),
    row(
        "another stage",
        elastic(4, 2),
        f"kill:1.1@2.forward kill:2.1@6.forward rejoin:1.1@{BACK}",
        (3, BACK),
        sections={"planner": {"layout": "fixed", "move": True}},
    ),
    row("further death", elastic(4, 2), "kill:1.1@3.forward kill:2.0@20.forward", (4, 20), states="whole"),
    row("llama", elastic(2, 4, "llama", 24), "kill:1.3@2.commit rejoin:1.3@20", (2, 20), 20, states="whole"),
]


@pytest.mark.parametrize(("scenario", "is_sharded"), [parameter for rows in ROWS for parameter in rows])
def test_layers_move_and_no_bit_changes(scenario, is_sharded, launch):
    config = scenario.job(is_sharded)
    faults, steps = scenario.faults.split(), config.train.checkpoint_every
    result = launch(config, steps, *faults, observer=AwaitsLayout())
    require_as_calm(result, config, launch)
    assert "restored" not in kinds(result)
    dead = {fault.split(":")[1].split("@")[0].partition("t")[0] for fault in faults if fault.startswith("kill")}
    assert {event["worker"] for event in of_kind(result, "detected")} <= dead
    moves = [event["step"] for event in layouts(result) if event["moves"]]
    first, last = scenario.away
    assert first <= moves[0] <= last
    assert set(moves) <= set(moved(result))
    if scenario.back:
        assert is_sharded or moved(result)[-1] == scenario.back
        assert [event["step"] for event in of_kind(result, "rejoined")] == [scenario.back]
    if is_sharded:
        assert is_of_units(result, moves[0])
        reported = [set(event["further_deaths"]) for event in of_kind(result, "shards")]
        assert not scenario.back or (reported[0], reported[-1]) == ({1}, {1})
    elif len(dead) == 2 and not scenario.back and "rejoin" not in scenario.faults:  # re-routed without any copy
        second = [event["step"] for event in of_kind(result, "detected")][1]
        assert second not in moved(result)


def test_killed_re_routed_moved_re_joined_and_moved_back(launch):
    """A worker has the layers 0, 1, 4 and 5, or the others, and layers move between such workers."""
    steps, rejoin = 16, 12
    config = elastic(3, 2, steps=steps, chunks=2)
    struck = launch(config, steps, "kill:1.1@3.forward", f"rejoin:1.1@{rejoin}", observer=AwaitsLayout())
    require_as_calm(struck, config, launch)
    holders, back = moved(struck)
    assert 3 < holders < back == rejoin
    result = [kind for kind in kinds(struck) if kind not in ("moved", "undone", "checkpoint")]
    reported = "generation fault detected generation recovered layout generation layout generation rejoined"
    assert result == reported.split()
    layout, returns = layouts(struck)
    assert layout["moves"]
    assert (returns["moves"], returns["returned"], returns["step"]) == (True, ["1.1"], back)
    periods = {line["step"]: line["period"] for line in struck.metrics}
    assert layout["period"] <= periods[back - 1] < layout["period_before"]  # with the barrier it is a little longer
    event = of_kind(struck, "moved")[0]
    assert event["bytes"] == 8 * 9 * (event["units"][1] - event["units"][0])


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["emulated", "gpt"])
def test_differing_hosts_restore_a_state_from_before_a_move(launch, kind):
    """The flip at 13 shows before everything was replayed, so the initial state and layout are restored.

    No worker is fenced: layer 0 has two hosts in the present layout.
    """
    config = elastic(3, 2, kind, 24).with_sections(integrity=IntegritySection(every=12))
    faults = ("kill:1.1@3.forward", "flip=weight,20:0.0@13", "nan:2.0@16")
    struck = launch(config, 24, *faults, observer=AwaitsLayout())
    require_as_calm(struck, config, launch)
    assert {step for step in moved(struck) if step < 13} > {0}
    corrupt = only(struck, "corrupt")
    assert (corrupt["workers"], corrupt["step"], corrupt["bits"][0]["bit"]) == ([], 16, 20)
    assert "restored the state after step -1" in of_kind(struck, "undone")[-1]["cause"]


@pytest.mark.soak
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_checkpoint_of_one_layout_is_read_into_another(launch, tmp_path, chunks):
    config = elastic(3, 2, chunks=chunks)
    own = plan(config, [Worker(1, 1)], seconds=3.0).schedule
    twice = launch(config, 2 * STEPS)
    launch(config, STEPS, schedule=own, directory=tmp_path / "away")
    on = train(config, tmp_path / "away", steps=2 * STEPS, planner=plan_for_training, resume=True)
    require_same_run(on, twice)
    launch(config, STEPS, directory=tmp_path / "back")
    require_same_run(train(config, tmp_path / "back", steps=2 * STEPS, schedule=own, resume=True), twice)


@pytest.mark.soak
@pytest.mark.parametrize("is_sharded", [False, True])
def test_early_end_during_a_move_keeps_the_state_before_the_move(is_sharded, launch, tmp_path):
    """Layers move back at step 20, where a worker that sends some of them stalls."""
    config = sharded(elastic(3, 2, every=20)) if is_sharded else elastic(3, 2, every=20)
    calm = launch(config, 20)
    patient = {"hung_after": 100.0, "warm_up": 100.0, "form_timeout": 100.0, "grace": 24.0}
    faults = ("kill:1.1@2.forward", "rejoin:1.1@20", "stall:2.0@20.copy")
    observer = AwaitsLayout()
    result = train(
        varied(config, membership=patient, train={"checkpoint_every": 100}),
        tmp_path / "run",
        steps=24,
        faults=[parse_fault(fault) for fault in faults],
        planner=plan_for_training,
        observer=observer,
        stop=observer.stop,
    )
    assert "corrupt" not in kinds(result)
    assert (result.events[-1]["kind"], result.events[-1]["checkpoint"]) == ("stopped", "step-00000019")
    require_equal(last_checkpoint(result), last_checkpoint(calm))
