"""Orders of the families: as in the papers and in torch (of Megatron: test_megatron_table), and refused shapes."""

import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from recycle import Schedule, ScheduleError, Shape, Worker, check, lower, simulate
from recycle.ir.families import FAMILIES
from recycle.ir.instruction import Forward, OverlappedPair
from tests.ir.families import chunks_of

ORDERS = {
    ("gpipe", 2, 2): ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"],
    ("1f1b", 3, 4): [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3", "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ],
    ("looped-bfs", 2, 2): ["0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0", "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0"],
    ("zb-h1", 3, 4): [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3", "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ],
    ("zb-h2", 2, 4): [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3", "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("family", "ranks", "micro_batches"), ORDERS)
def test_each_family_has_the_published_order_in_every_pipeline(family, ranks, micro_batches):
    text = FAMILIES[family](Shape(2, ranks, micro_batches, chunks_of(family))).text()
    for k in range(2):
        programs = [text[f"{k}.{rank}"].replace(f"{k}.", "") for rank in range(ranks)]
        assert programs == ORDERS[family, ranks, micro_batches]


@pytest.mark.parametrize(("family", "name"), [("zb-v", "ScheduleZBVZeroBubble"), ("dualpipe-v", "ScheduleDualPipeV")])
def test_the_order_for_equal_times_is_that_of_torchs_schedule(family, name):
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    for ranks, micro_batches in [(1, 2), (1, 5), (2, 4), (2, 5), (3, 6), (3, 9), (4, 8), (4, 10), (5, 11), (8, 16)]:
        shape = SimpleNamespace(pp_group_size=ranks, _n_microbatches=micro_batches, num_stages=2 * ranks)
        schedule = FAMILIES[family](Shape(1, ranks, micro_batches, 2))
        for rank in range(ranks):
            actions = getattr(torch, name)._calculate_single_rank_operations(shape, rank)
            texts = [str(action).removesuffix("OVERLAP_F_B").removeprefix("-1") for action in actions if action]
            assert [str(action).replace("0.", "") for action in schedule.program(Worker(0, rank))] == texts


REFUSED = [
    *((family, Shape(1, 2, 4, 2), {}, "chunks = 1, got 2") for family in ("gpipe", "1f1b", "zb-h1", "zb-h2")),
    *((family, Shape(1, 2, 4, 3), {}, "chunks = 2") for family in ("zb-v", "v-half", "v-min", "dualpipe-v")),
    ("dualpipe-v", Shape(1, 4, 7, 2), {}, r"micro_batches of at least 2 \* ranks = 8, got 7"),
    ("interleaved", Shape(1, 4, 6, 2), {}, "divisible by ranks = 4 or a group_size, got 6"),
    *(("interleaved", Shape(1, 4, 9, 2), {"group_size": n}, f"micro_batches = 9.*, got {n}") for n in (0, 3, 4, 6, 10)),
    *(
        ("v-half", Shape(1, 2, 4, 2), {"times": times}, "three finite numbers of at least 0")
        for times in ((1, 1), (1, -1, 1), (1, float("nan"), 1), (1, float("inf"), 1))
    ),
]


@pytest.mark.parametrize(("family", "shape", "options", "message"), REFUSED)
def test_a_family_refuses_shapes_that_it_does_not_support(family, shape, options, message):
    with pytest.raises(ScheduleError, match=message):
        FAMILIES[family](shape, **options)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_large_job_is_built_in_a_moment(family):
    shape = Shape(24, 64, 128, chunks_of(family))
    began = time.process_time()
    schedule = FAMILIES[family](shape)
    assert time.process_time() - began < (4 if family in ("v-half", "v-min") else 1)
    forwards = np.isin(schedule.columns.kind, (Forward.kind, OverlappedPair.kind)).sum()
    assert forwards == shape.stages * shape.global_micro_batches


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Shape]:
    """A family and a shape, mostly with a number of chunks that the family takes."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    chunks = draw(st.sampled_from([chunks_of(family)] * 4 + [1, 2, 3]))
    return family, Shape(draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 14)), chunks)


def built(family: str, shape: Shape) -> Schedule | str:
    try:
        return FAMILIES[family](shape)
    except ScheduleError as error:
        return str(error)


@pytest.mark.slow
@settings(max_examples=80)
@given(cases())
def test_a_shape_is_refused_in_one_line_or_gives_valid_schedules_with_equal_pipelines(case):
    family, shape = case
    single = built(family, Shape(1, shape.ranks, shape.micro_batches, shape.chunks))
    several = built(family, shape)
    if isinstance(single, str) or isinstance(several, str):
        assert single == several
        assert re.fullmatch(f"{family}: needs .*", str(several))
        return
    assert several.metadata["family"] == family
    assert check(several) == check(lower(several), about_to_run=True) == []
    one_pipeline, all_pipelines = simulate(single), simulate(several)
    assert (all_pipelines.makespan, all_pipelines.period) == (one_pipeline.makespan, one_pipeline.period)
    assert all_pipelines.inner_bubble == one_pipeline.inner_bubble * shape.pipelines
    assert all_pipelines.peak_activations == one_pipeline.peak_activations * shape.pipelines
