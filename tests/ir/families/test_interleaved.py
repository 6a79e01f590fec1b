"""Interleaved 1F1B: order against Megatron-LM's own table, figures in closed form, group sizes."""

from types import SimpleNamespace

import pytest

from recycle import Profile, ScheduleError, Shape, Worker, check, lower, simulate
from recycle.ir.families import FAMILIES, interleaved
from recycle.ir.instruction import Backward, Forward

GRID = [
    (ranks, chunks, rounds * ranks)
    for ranks, chunks in [(1, 2), (2, 2), (3, 3), (4, 1), (4, 2)]
    for rounds in (1, 2, 4)
]
GROUPED = [(2, 2, 5, 3), (2, 3, 7, 5), (3, 2, 7, 4), (3, 3, 8, 5), (4, 2, 9, 5), (4, 2, 10, 5), (4, 3, 6, 6)]


def test_units_walk_through_the_chunks_in_groups_and_mirror_in_the_backwards() -> None:
    assert interleaved(Shape(1, 2, 4, 2)).text() == {
        "0.0": "0F0.0 0F0.1 2F0.0 2F0.1 0F0.2 2B0.0 0F0.3 2B0.1 2F0.2 0B0.0 2F0.3 0B0.1 2B0.2 2B0.3 0B0.2 0B0.3",
        "0.1": "1F0.0 1F0.1 3F0.0 3B0.0 3F0.1 3B0.1 1F0.2 1B0.0 1F0.3 1B0.1 3F0.2 3B0.2 3F0.3 3B0.3 1B0.2 1B0.3",
    }


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), GRID)
def test_makespan_bubbles_and_peak_follow_the_formulas(ranks: int, chunks: int, micro_batches: int) -> None:
    for times in [(1, 1, 1), (2, 3, 1), (1, 2, 3)]:
        timeline = simulate(interleaved(Shape(1, ranks, micro_batches, chunks)), Profile.uniform(*times))
        f, b = times[0], times[1] + times[2]
        assert timeline.makespan == (micro_batches * chunks + ranks - 1) * (f + b)
        assert timeline.bubble == [(ranks - 1) * (f + b)] * ranks
        assert timeline.inner_bubble == [(ranks - 1 - r) * (f + b) for r in range(ranks)]
        assert timeline.peak_activations == [
            min(micro_batches * chunks, (chunks - 1) * ranks + 2 * (ranks - 1 - r) + 1) for r in range(ranks)
        ]


def test_golden_figures_of_the_reference() -> None:
    timeline = simulate(interleaved(Shape(1, 4, 8, 2)))
    assert (timeline.makespan, timeline.bubble) == (57, [9] * 4)
    assert timeline.peak_activations == [11, 9, 7, 5]


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches", "size"), GROUPED)
def test_any_m_keeps_the_bubble_with_groups_of_at_least_p(
    ranks: int, chunks: int, micro_batches: int, size: int
) -> None:
    schedule = interleaved(Shape(1, ranks, micro_batches, chunks), group_size=size)
    timeline = simulate(schedule, Profile.uniform(2, 3, 1))
    assert check(lower(schedule)) == []
    assert timeline.bubble == [(ranks - 1) * 6] * ranks
    assert timeline.peak_activations == [
        min(micro_batches * chunks, (chunks - 1) * size + 2 * (ranks - 1 - r) + 1) for r in range(ranks)
    ]
    assert schedule.metadata == {"family": "interleaved", "group_size": size}


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [(2, 2, 1), (4, 2, 3), (4, 3, 2), (4, 1, 2)])
def test_one_group_below_p_waits_for_the_way_round(ranks: int, chunks: int, micro_batches: int) -> None:
    schedule = interleaved(Shape(1, ranks, micro_batches, chunks), group_size=micro_batches)
    assert check(lower(schedule)) == []
    extra = (chunks - 1) * (ranks - micro_batches)
    assert simulate(schedule).bubble == [(ranks - 1 + extra) * 3] * ranks


def test_every_schedule_is_valid() -> None:
    for ranks, chunks, micro_batches in GRID:
        assert check(lower(interleaved(Shape(2, ranks, micro_batches, chunks)))) == []


@pytest.mark.filterwarnings("ignore")
def test_the_order_is_that_of_megatrons_schedule_table() -> None:
    megatron = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    cases = [(ranks, chunks, m, ranks) for ranks, chunks, m in GRID if ranks > 1 and chunks > 1]
    for ranks, chunks, micro_batches, size in cases + GROUPED:
        schedule = interleaved(Shape(1, ranks, micro_batches, chunks), group_size=size)
        table = megatron.get_schedule_table(micro_batches, chunks, size)
        for rank in range(ranks):
            group = SimpleNamespace(size=lambda ranks=ranks: ranks, rank=lambda rank=rank: rank)
            here = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=chunks)
            counts = megatron.get_pp_rank_microbatches(micro_batches, chunks, size, p2p_communicator=here)
            warm_up = counts[2]
            forwards = [(Forward, chunk * ranks + rank, j) for j, chunk in table]
            backwards = [(Backward, (chunks - 1 - chunk) * ranks + rank, j) for j, chunk in table]
            expected = forwards[:warm_up]
            for k in range(len(table)):
                expected += forwards[warm_up + k : warm_up + k + 1] + backwards[k : k + 1]
            program = schedule.program(Worker(0, rank))
            assert [(type(i), i.stage, i.micro_batch.index) for i in program] == expected


def test_pipelines_are_copies_of_each_other() -> None:
    one, three = interleaved(Shape(1, 2, 4, 2)).text(), interleaved(Shape(3, 2, 4, 2)).text()
    for rank in range(2):
        assert three[f"2.{rank}"] == one[f"0.{rank}"].replace("F0.", "F2.").replace("B0.", "B2.")


def test_impossible_groups_are_refused_and_the_family_is_registered() -> None:
    assert FAMILIES["interleaved"] is interleaved
    with pytest.raises(ScheduleError, match="needs micro_batches divisible by ranks = 4 or a group_size, got 6"):
        interleaved(Shape(1, 4, 6, 2))
    for size in (0, 3, 4, 6, 10):
        with pytest.raises(ScheduleError, match=f"must be micro_batches = 9, or at least ranks = 4 .*, got {size}"):
            interleaved(Shape(1, 4, 9, 2), group_size=size)
