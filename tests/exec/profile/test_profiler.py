"""The profiler: bytes equal closed forms, times have the relations that must hold, and runs plan with the figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from recycle import Job, Link, Profile
from recycle.exec.checkpoint.checkpoint import PART_BYTES
from recycle.exec.model.state.accumulate import ALIGNMENT
from recycle.exec.profile.executed import executed
from recycle.exec.profile.measure import StageFigures
from recycle.exec.profile.memory import allocated_by, capacity, machine_memory
from recycle.exec.profile.profiler import assemble, fit_link, measure
from recycle.ir.families import one_f_one_b
from recycle.job import PricedJob
from recycle.solve.planner import plan
from tests.exec.runs import Run, job

pytestmark = pytest.mark.process

REPEATS = 4
HIDDEN, SEQUENCE, ROWS, VOCABULARY, LAYERS = 32, 16, 2, 256, 2
"""Of the model below: two layers on each of its two stages."""
TOKEN = SEQUENCE * ROWS * 4
"""Bytes of one fp32 feature of all tokens of a micro-batch."""


@pytest.fixture(scope="module")
def gpt() -> PricedJob:
    return job(2, 2, 2, kind="gpt", data={"micro_batch_size": ROWS})


@pytest.fixture(scope="module")
def profile(gpt: Job) -> Profile:
    return measure(gpt, REPEATS)


def test_what_is_held_between_i_and_w_is_input_and_output_gradient_of_each_linear_layer(profile: Profile) -> None:
    """QKV 1 + 3, projection 1 + 1, MLP 1 + 4 and 4 + 1 times the hidden size; the output layer 1 and the vocabulary."""
    layers = LAYERS * 16 * HIDDEN * TOKEN
    assert profile.measured["held_between"] == [layers, layers + (HIDDEN + VOCABULARY) * TOKEN]
    activation = profile.per_stage("activation", 2)
    assert profile.weight_stash == max(a / b for a, b in zip(profile.measured["held_between"], activation, strict=True))
    assert activation[0] >= layers
    assert activation[1] > activation[0]


def test_static_bytes_are_those_of_parameters_gradients_optimizer_and_undo(profile: Profile) -> None:
    """Of n parameters, laid out aligned: 4 n three times, twice for the undo; 8 n exact sums; 4 n of their mean, as a
    stage this small steps in one piece. What is small beside them, such as counts and positions, is in it too."""
    h = HIDDEN
    layer = [3 * h * h, 3 * h, h * h, h, 4 * h * h, 4 * h, 4 * h * h, h, h, h, h, h]
    first = [VOCABULARY * h, SEQUENCE * h, *layer * LAYERS]
    last = [*layer * LAYERS, h, h, VOCABULARY * h]
    for sizes, found in zip((first, last), profile.per_stage("static", 2), strict=True):
        n = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
        least = 2 * (3 * 4 * n + 2 * 4) + 8 * (n + ALIGNMENT) + 4 * n
        assert least <= found < least + 4096
    assert profile.per_stage("message", 2) == [HIDDEN * TOKEN] * 2


def measured_until(holds: Callable[[Profile], bool], found: Profile, of: Job, repeats: int) -> Profile:
    """What is measured when nothing else takes the processor: again, while it shows more than the stages' own times."""
    attempts = 8
    while not holds(found) and (attempts := attempts - 1):
        found = measure(of, repeats)
    return found


def test_a_job_is_planned_limited_in_bytes_and_run_with_what_was_measured(
    gpt: PricedJob, profile: Profile, launch: Run, tmp_path: Path
) -> None:
    file = tmp_path / "measured.json"
    profile.save(file)
    assert Profile.load(file) == profile
    assert Profile.load(file).measured == profile.measured
    static, activation = profile.per_stage("static", 2), profile.per_stage("activation", 2)
    fixed = [profile.fixed_bytes([stage], 2) for stage in range(2)]
    room = int(max(fixed) + 2.5 * max(activation))
    of = gpt.with_sections(
        times=msgspec.structs.replace(gpt.times, profile=str(file)),
        memory=msgspec.structs.replace(gpt.memory, limit=f"{room} B"),
        membership=msgspec.structs.replace(gpt.membership, drift=0.0),
    )
    assert of.activation_limits() == [float((room - s) // a) for s, a in zip(fixed, activation, strict=True)]
    assert all(more > least for more, least in zip(fixed, static, strict=True))
    planned = plan(of, seconds=0.5)
    run = launch(of, 6, directory=tmp_path / "run")
    assert all(line["period"] >= planned.lower_bound * (1 - 1e-9) for line in run.metrics)
    assert run.period_error is not None
    ran = executed(tmp_path / "run")
    assert ran.planned == profile
    assert ran.profile.per_stage("activation", 2) == activation
    assert ran.period is not None
    assert ran.planned_period == pytest.approx(run.metrics[-1]["period"], rel=0.5)
    print(f"executed period {ran.period:.4g} s, simulated {planned.period:.4g} s")


def test_a_run_of_whole_backward_passes_in_no_known_unit_halves_them(gpt: Job, launch: Run, tmp_path: Path) -> None:
    launch(gpt, 4, directory=tmp_path / "run", schedule=one_f_one_b(gpt.shape))
    ran = executed(tmp_path / "run")
    inputs, weights = (ran.profile.per_stage(f"backward_{part}", 2) for part in ("input", "weight"))
    assert inputs == pytest.approx(weights)
    assert min(inputs) > 0


def test_an_emulated_job_measures_as_its_own_profile() -> None:
    times = {"forward": [1.0, 2.0], "backward_input": 1.5, "backward_weight": 0.5, "step": 1.0}
    of = job(1, 2, 2, times=times, model={"seconds_per_unit": 0.01}, memory={"weight_stash": 0.5, "limit": 3})

    def longer(profile: Profile) -> list[float]:
        """Seconds that were measured beyond those of the profile."""
        found = []
        for name, expected in times.items():
            units = expected if isinstance(expected, list) else [expected] * 2
            found += [seconds - 0.01 * unit for seconds, unit in zip(profile.per_stage(name, 2), units, strict=True)]
        return found

    found = measured_until(lambda profile: max(longer(profile)) < 0.02, measure(of, 3), of, 3)
    assert 0 <= min(longer(found)) <= max(longer(found)) < 0.02
    assert found.per_stage("reduce", 2) == [0.0, 0.0]
    assert (found.activation, found.weight_stash, found.static) == ([1.0, 1.0], 0.5, [0.0, 0.0])


def test_a_link_is_fitted_exactly_and_never_negative() -> None:
    sizes = [1 << 10, 1 << 16, 1 << 20]
    found = fit_link(sizes, [1e-4 + size / 1e9 for size in sizes])
    assert found.latency == pytest.approx(1e-4)
    assert found.bandwidth == pytest.approx(1e9)
    assert fit_link(sizes, [3e-4, 2e-4, 1e-4]) == Link(1e-4, None)
    steep = fit_link(sizes, [1e-6, 1e-3, 1e-1])
    assert steep.latency >= 0
    assert steep.bandwidth is not None


def test_more_held_between_i_and_w_than_before_is_said_beside_what_is_held_before(gpt: Job) -> None:
    seconds = {name: [1.0, 3.0, 2.0] for name in ("forward", "backward_input", "backward_weight", "backward", "step")}
    figures = [
        StageFigures(stage, seconds, 8, 100.0, stash, 5.0, 7.0 + stage, ((8, 8),), 9e9 - stage)
        for stage, stash in ((0, 50.0), (1, 120.0))
    ]
    found = assemble(gpt, figures, Link(0.5, 2.0), 3)
    assert (found.recomputed_from, found.workspace, found.capacity) == ([100.0, 100.0], [7.0, 8.0], 9e9 - 1)
    whole = msgspec.structs.replace(gpt, planner=msgspec.structs.replace(gpt.planner, decoupled=False))
    assert assemble(whole, figures, Link(), 3).activation == [100.0, 100.0]
    assert (found.activation, found.weight_stash) == ([100.0, 120.0], 1.0)
    assert (found.forward, found.latency, found.bandwidth) == ([2.0, 2.0], 0.5, 2.0)


def test_what_an_action_allocates_is_what_it_leaves_and_what_it_has_at_most() -> None:
    kept: list[torch.Tensor] = []

    def action() -> None:
        kept.append(torch.zeros(1000))
        kept.append(kept[0].view(10, 100))
        torch.zeros(5000)

    assert allocated_by(action, torch.device("cpu")) == (4000, 24000)
    assert allocated_by(kept.clear, torch.device("cpu")) == (-4000, 0)


def test_a_worker_on_a_cpu_has_its_part_of_the_machine(profile: Profile) -> None:
    """Less what a checkpoint is copied and written from."""
    part = 0.9 * machine_memory() / 4
    assert profile.capacity is not None
    assert 0 < part - profile.capacity < 2 * max(profile.static)
    four = job(2, 2, 2)
    assert capacity(four, 1e6) == part - 2e6
    assert capacity(four, 1e9) == part - 1e9 - PART_BYTES
    assert capacity(job(2, 2, 2, train={"checkpoint_every": 0}), 1e6) == part
