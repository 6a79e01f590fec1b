"""The simulator: published figures, refusals and compiled loops."""

import importlib.util
import pickle
import random
import warnings

import pytest
from hypothesis import settings, strategies as st

from recycle import (
    JobError,
    Link,
    Profile,
    Schedule,
    ScheduleError,
    ScheduleWarning,
    Shape,
    Worker,
    check,
    lower,
    simulate,
)
from recycle.ir import compiled
from recycle.ir.dependencies import Cause
from recycle.ir.families import dualpipe_v, gpipe, one_f_one_b, zb_h1
from recycle.ir.instruction import Backward, Forward, OptimizerStep, ReduceGradients
from recycle.ir.operations import incomplete_count
from recycle.ir.simulate import Timeline, timeline_of
from tests import CASES
from tests.ir.random_schedules import random_profile, random_schedule

bounded = settings(max_examples=40)
randoms = st.randoms(use_true_random=False)

# Fault-free rows of ReCycle's worked example, pipeline 0: start slots, counted from 1.
FAULT_FREE = """
F1@1 F2@2 F3@3 F4@4 B1@11 F5@13 B2@14 F6@16 B3@17 B4@20 B5@23 B6@26
F1@2 F2@3 F3@4 B1@9 F4@11 B2@12 F5@14 B3@15 F6@17 B4@18 B5@21 B6@24
F1@3 F2@4 B1@7 F3@9 B2@10 F4@12 B3@13 F5@15 B4@16 F6@18 B5@19 B6@22
F1@4 B1@5 F2@7 B2@8 F3@10 B3@11 F4@13 B4@14 F5@16 B5@17 F6@19 B6@20
""".strip().splitlines()


def start_slots(timeline: Timeline, worker: Worker) -> str:
    """Computes of a worker as `F1@3`, micro-batches and slots counted from 1."""
    schedule = timeline.schedule
    rows = (row for row in range(len(schedule.columns)) if schedule.position(row)[0] == worker)
    computes = ((row, schedule.instruction(row)) for row in rows)
    return " ".join(
        f"{i.token}{i.micro_batch.index + 1}@{timeline.start[row] + 1:g}"
        for row, i in computes
        if isinstance(i, Forward | Backward)
    )


def test_the_worked_example_without_a_fault_starts_in_the_published_slots():
    timeline = simulate(one_f_one_b(Shape(3, 4, 6)))
    assert (timeline.makespan, timeline.period) == (27, 27)
    assert timeline.busy == [18] * 12
    assert timeline.bubble_ratio == pytest.approx(9 / 27)
    for k in range(3):
        assert [start_slots(timeline, Worker(k, r)) for r in range(4)] == FAULT_FREE


def test_the_published_adaptive_schedule_takes_36_slots():
    schedule = Schedule.load(CASES / "adaptive_without_1.2.json")
    timeline = simulate(schedule)
    assert timeline.makespan == 36
    assert check(schedule, limits=[4, 3, 2, 1]) == []
    assert timeline.peak_activations == [4, 3, 2, 1, 4, 3, None, 1, 4, 3, 2, 1]
    assert [start_slots(timeline, Worker(1, r)) for r in (0, 1, 3)] == [FAULT_FREE[r] for r in (0, 1, 3)]


def test_a_slow_worker_stretches_its_own_computes_only():
    timeline = simulate(one_f_one_b(Shape(1, 2, 3)), Profile(speed={"0.1": 2.0}))
    assert timeline.busy == [9, 18]
    assert timeline.makespan == 21  # F of stage 0, then 3 times 2 + 4 on the slow worker, then its last B


def spans(timeline: Timeline, token: str) -> dict[str, tuple[float, float]]:
    """Text -> (start, end) of the instructions with this token."""
    texts = [str(timeline.schedule.instruction(row)) for row in range(len(timeline.start))]
    return {
        text: (float(timeline.start[row]), float(timeline.end[row])) for row, text in enumerate(texts) if token in text
    }


def test_each_directed_pair_has_its_own_link_and_each_boundary_its_own_message():
    profile = Profile(
        latency=1.0,
        links={"0.0>0.1": Link(latency=2.0, bandwidth=10.0), "0.2>0.1": Link(bandwidth=4.0)},
        message=[30.0, 8.0, 99.0],
    )
    timeline = simulate(gpipe(Shape(1, 3, 1)), profile)
    assert spans(timeline, "SEND") == {
        "0SEND_F0.0@0.1": (1, 6),  # 2 + 30 / 10
        "1SEND_F0.0@0.2": (7, 8),  # the default has no bandwidth
        "2SEND_B0.0@0.1": (11, 13),  # 8 / 4, without the default's latency
        "1SEND_B0.0@0.0": (15, 16),
    }


@pytest.mark.filterwarnings("ignore::recycle.ScheduleWarning")
def test_the_row_of_the_peak_is_the_first_that_reaches_it():
    split = "0F0 1F0 1I0 0F1 0I0 1W0 0W0 1F1 1I1 0I1 1W1 0W1"  # 1F1 comes back to the 9 bytes of 1F0, but for rounding
    timeline = simulate(
        Schedule.from_text(Shape(1, 1, 2, 2), {"0.0": split}), Profile(activation=[1.0, 8.0], weight_stash=0.3)
    )
    assert (timeline.peak_bytes, timeline.peak_row) == ([9], [1])
    assert simulate(Schedule.from_text(Shape(1, 1, 1), {}, failed=["0.0"])).peak_row == [None]


def test_each_step_of_the_critical_path_has_its_cause():
    timeline = simulate(gpipe(Shape(1, 2, 2), "barrier"), Profile.uniform(link=2.0, step=0.5))
    schedule = timeline.schedule
    steps = [
        (str(schedule.instruction(row)), cause)
        for row, cause in zip(timeline.critical_path, timeline.critical_causes, strict=True)
    ]
    assert steps == [
        ("0F0.0", None),
        ("0SEND_F0.0@0.1", Cause.DATA),
        ("0SEND_F0.1@0.1", Cause.LANE),
        ("1RECV_F0.1@0.0", Cause.TRANSFER),
        ("1F0.1", Cause.DATA),
        ("1B0.0", Cause.ORDER),
        ("1B0.1", Cause.ORDER),
        ("1SEND_B0.1@0.0", Cause.DATA),
        ("0RECV_B0.1@0.1", Cause.TRANSFER),
        ("0B0.1", Cause.DATA),
        ("0REDUCE_GRAD", Cause.REDUCE),
        ("0STEP", Cause.STEP),
    ]


@pytest.mark.filterwarnings("ignore::recycle.ScheduleWarning")
def test_empty_and_zero_time_schedules_take_no_time():
    assert simulate(Schedule.from_text(Shape(1, 1, 1), {}, failed=["0.0"])).makespan == 0
    still = simulate(one_f_one_b(Shape(2, 2, 2)), Profile(0.0, 0.0, 0.0))
    assert (still.makespan, still.period, still.bubble_ratio) == (0, 0, 0)


def test_compiled_loops_give_the_same_bits_as_plain_python(monkeypatch):
    for seed in range(25):
        rng = random.Random(seed)
        schedule = random_schedule(rng)
        profile = random_profile(rng, schedule)
        results = []
        for compile_from in (10**9, 0):
            monkeypatch.setattr(compiled, "_compiled", {})
            monkeypatch.setattr(compiled, "COMPILE_FROM", compile_from)
            timeline = simulate(schedule, profile)
            results.append((*(a.tobytes() for a in (timeline.start, timeline.end, timeline.last)), timeline.period))
        assert results[0] == results[1]


def test_staggering_lets_early_stages_begin_before_late_ones_have_stepped():
    """ReCycle's third technique: with room left by split backwards, the period is below the makespan."""
    text = {"0.0": "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2", "0.1": "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"}
    staggered = simulate(Schedule.from_text(Shape(1, 2, 3), text))
    barrier = simulate(Schedule.from_text(Shape(1, 2, 3), text, optimizer="barrier"))
    assert (barrier.makespan, barrier.period) == (10, 10)
    assert (staggered.makespan, staggered.period) == (10, 9)


def test_tied_stages_of_one_worker_reduce_as_one():
    text = {"0.0": "0F0 3F0 3B0 0B0", "0.1": "1F0 2F0 2B0 1B0"}
    vee = {"0.0": [0, 3], "0.1": [1, 2]}
    schedule = Schedule.from_text(Shape(1, 2, 1, 2), text, placement=vee, ties=[[0, 3]])
    assert check(schedule) == check(lower(schedule), about_to_run=True) == []
    timeline = simulate(schedule, Profile(reduce=1.0))
    begins = {str(timeline.schedule.instruction(row)): timeline.start[row] for row in range(len(timeline.start))}
    assert begins["3REDUCE_GRAD"] == begins["0F0.0"] + 12  # with the last gradient of stage 0
    assert begins["0REDUCE_GRAD"] == begins["3REDUCE_GRAD"] + 1


def test_a_host_of_tied_stages_that_runs_nothing_reduces_with_its_peers():
    text = {"0.0": "0F0.0 1F0.0 1B0.0 0B0.0 0F1.0 1F1.0 1B1.0 0B1.0", "1.0": ""}
    schedule = Schedule.from_text(Shape(2, 1, 1, 2), text, ties=[[0, 1]])
    assert check(schedule) == check(lower(schedule), about_to_run=True) == []
    timeline = simulate(schedule, Profile(reduce=1.0, step=1.0))
    assert (timeline.makespan, timeline.busy) == (12 + 2 + 2, [16, 4])


@pytest.mark.parametrize("ties", [[], [[0, 1, 2]]])
def test_three_workers_that_reduce_three_stages_in_a_ring_deadlock(ties):
    text = {
        "0.0": "0F0.0 0F1.0 1F0.0 1F2.0 1B0.0 1B2.0 0B0.0 0B1.0 0REDUCE_GRAD 1REDUCE_GRAD 0STEP 1STEP",
        "1.0": "1F1.0 2F1.0 2B1.0 1B1.0 1REDUCE_GRAD 2REDUCE_GRAD 1STEP 2STEP",
        "2.0": "0F2.0 2F0.0 2B0.0 2F2.0 2B2.0 0B2.0 2REDUCE_GRAD 0REDUCE_GRAD 2STEP 0STEP",
    }
    placement = {"0.0": [0, 1], "1.0": [1, 2], "2.0": [0, 2]}
    ring = Schedule.from_text(Shape(3, 1, 1, 3), text, placement=placement, ties=ties)
    assert [finding.rule for finding in check(ring)] == ["deadlock"]
    with pytest.raises(ScheduleError, match="the schedule deadlocks"):
        simulate(ring)
    agreed = {**text, "2.0": text["2.0"].replace("2REDUCE_GRAD 0REDUCE_GRAD", "0REDUCE_GRAD 2REDUCE_GRAD")}
    assert check(Schedule.from_text(Shape(3, 1, 1, 3), agreed, placement=placement, ties=ties)) == []


@pytest.mark.parametrize("seed", range(24))
def test_with_ties_a_schedule_runs_exactly_if_the_checker_finds_nothing(seed):
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    stages = rng.sample(range(schedule.shape.stages), min(schedule.shape.stages, rng.randint(1, 4)))
    programs = {}
    for worker in schedule.live:
        updates = [ReduceGradients(stage) for stage in schedule.stages_of(worker)]
        if rng.random() < 0.5:
            rng.shuffle(updates)
        steps = [OptimizerStep(stage) for stage in schedule.stages_of(worker)]
        programs[worker] = [*schedule.program(worker), *updates, *steps]
    placement = dict(zip(schedule.shape.workers(), schedule.placement, strict=True))
    options = {"placement": placement, "failed": schedule.failed, "optimizer": schedule.optimizer}
    tied = Schedule.build(schedule.shape, programs, ties=[stages], **options)
    if check(tied):
        with pytest.raises(ScheduleError, match="the schedule deadlocks"):
            simulate(tied)
    else:
        assert simulate(tied).makespan >= simulate(schedule).makespan


def test_an_incomplete_schedule_is_timed_with_a_warning():
    shape = Shape(1, 2, 2)
    text = {"0.0": "0F0 0F1 0B0 0I1", "0.1": "1F0 1B0 1B1 1F7"}
    with pytest.warns(ScheduleWarning, match="2 of 4 pairs of stage and micro-batch lack .* recycle.check lists them"):
        timeline = simulate(Schedule.from_text(shape, {**text, "0.1": "1F0 1B0"}))
    assert timeline.makespan == 7
    assert incomplete_count(Schedule.from_text(shape, text)) == 2
    assert incomplete_count(Schedule.from_text(shape, {})) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulate(one_f_one_b(shape))
        simulate(lower(zb_h1(shape)))
        simulate(dualpipe_v(Shape(1, 2, 4, 2)))
        timeline_of(Schedule.from_text(shape, text))


@pytest.mark.filterwarnings("error")
def test_times_whose_sum_overflows_are_refused():
    with pytest.raises(JobError, match=r"the times add up to more than 1e\+100: state them in another unit"):
        simulate(one_f_one_b(Shape(1, 2, 2)), Profile.uniform(forward=1e308))
    assert simulate(one_f_one_b(Shape(1, 2, 2)), Profile.uniform(forward=2.0**300)).makespan == 3 * 2.0**300


MISSING = b"crecycle.ir.compiled\nA name that is gone\n."
"""A pickle of a class that the module does not have."""


@pytest.mark.search
def test_code_with_an_unreadable_cache_index_is_compiled_again(tmp_path):
    source = tmp_path / "doubling.py"
    source.write_text("def doubled(number):\n    return 2 * number\n")
    spec = importlib.util.spec_from_file_location("doubling", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    index = compiled.cache_folder(module.doubled)

    compiled.load(module.doubled)
    assert compiled.run(module.doubled, 1, 3)[0] == 6
    (written,) = index.glob("*.nbi")
    version = pickle.dumps(pickle.loads(written.read_bytes()))
    written.write_bytes(version + MISSING)
    del compiled._compiled[module.doubled]

    compiled.load(module.doubled)
    assert compiled.run(module.doubled, 1, 4)[0] == 8
    assert MISSING not in written.read_bytes()
