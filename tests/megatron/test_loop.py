"""Schedules of recycle in the training loop of Megatron: gradients and losses equal its own loop, bit for bit."""

from dataclasses import replace

import pytest

from recycle import Schedule, Shape
from recycle.ir.families import one_f_one_b, zb_h1
from recycle.megatron.order import MegatronGrid, schedule_in
from tests.megatron.jobs import Case, Jobs, Result, Timers, build, differing, forward_step, half

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def jobs():
    with Jobs(4) as started:
        yield started


_THEIRS = {}


def theirs(jobs: Jobs, case: Case) -> Result:
    """What megatron-core's own loop gives for a case, kept."""
    megatron_case = replace(case, schedule=None)
    if repr(megatron_case) not in _THEIRS:
        _THEIRS[repr(megatron_case)] = jobs.run(megatron_case)
    return _THEIRS[repr(megatron_case)]


def require_equal(jobs: Jobs, case: Case, count: int) -> Result:
    """Run a case, and hold it against megatron-core's own loop; `count` parameters have gradients, none all 0."""
    result, expected = jobs.run(case), theirs(jobs, case)
    assert differing(result.gradients, expected.gradients) == []
    assert result.kept == expected.kept
    assert result.split == [0] * case.processes
    assert [len(named) for named in result.gradients] == [count] * case.replicas
    assert all(gradient.any() for named in result.gradients for gradient in named.values())
    return result


@pytest.mark.parametrize(("ranks", "replicas"), [pytest.param(2, 1, marks=pytest.mark.soak), (4, 1), (2, 2)])
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("1f1b", 1),
        ("zb-h1", 1),
        pytest.param("zb-h2", 1, marks=pytest.mark.soak),
        ("interleaved", 2),
        ("zb-v", 2),
        pytest.param("dualpipe-v", 2, marks=pytest.mark.soak),
    ],
)
def test_gradients_and_losses_equal_those_of_megatrons_own_loop(jobs, schedule, chunks, ranks, replicas):
    count = 2 * ranks
    result = require_equal(jobs, Case(schedule, ranks, replicas, chunks, count), 12 * ranks * chunks + 5)
    assert [kept["number"] for kept in result.kept[0]] == list(range(count))


@pytest.mark.parametrize(
    ("model", "count"),
    [({"kind": "llama"}, 15), pytest.param({"kind": "mixtral"}, 45, marks=pytest.mark.soak)],
    ids=["llama", "mixtral"],
)
def test_other_model_families_equal_megatrons_loop(jobs, model, count):
    require_equal(jobs, Case("zb-h1", model=model), count)


@pytest.mark.parametrize(
    ("schedule", "config"),
    [
        ("zb-h1", {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        ("zb-h1", {"deallocate_pipeline_outputs": True, "grad_scale_func": half, "timers": Timers()}),
        ("zb-h1", {"hidden_dropout": 0.1}),
        ("1f1b", {"hidden_dropout": 0.1}),
    ],
    ids=["full recomputation", "outputs let go, loss scale, timers", "dropout", "dropout, whole backwards"],
)
def test_features_of_the_config_equal_megatrons_loop(jobs, schedule, config):
    require_equal(jobs, Case(schedule, config=config, model={"layers": 4}), 53)


@pytest.mark.parametrize(
    ("schedule", "chunks", "align"),
    [
        ("zb-h1", 1, False),
        ("interleaved", 2, True),
        pytest.param("1f1b", 1, True, marks=pytest.mark.soak),
        pytest.param("zb-v", 2, False, marks=pytest.mark.soak),
    ],
)
def test_overlapped_reductions_start_after_their_gradients(
    jobs, schedule, chunks, align
):  # From the second iteration on DDP starts a bucket's reduction by what its hooks counted in the first.
    ddp = {"overlap_grad_reduce": True, "bucket_size": 20_000, "align_param_gather": align}
    require_equal(jobs, Case(schedule, 2, 2, chunks, ddp=ddp, iterations=2), 24 * chunks + 5)


def test_a_loss_per_token_is_divided_by_all_tokens(jobs):
    result = require_equal(jobs, Case("zb-h1", 2, 2, mode="tokens"), 29)
    assert {kept["tokens"] for kept in result.kept[0]} == {64, 58, 52, 46}


@pytest.mark.parametrize(
    ("kind", "config", "count"),
    [
        pytest.param("gpt", {}, 29, marks=pytest.mark.soak),
        ("gpt", {"sequence_parallel": True}, 29),
        pytest.param("mixtral", {"sequence_parallel": True}, 45, marks=pytest.mark.soak),
        (
            "mixtral",
            {"sequence_parallel": True, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            29,
        ),
    ],
    ids=["tensors", "sequences", "parts of experts", "experts"],
)
def test_tensor_ranks_split_their_own_parts(jobs, kind, config, count):
    require_equal(jobs, Case("zb-h1", 2, tensor_parallel=2, model={"kind": kind}, config=config), 2 * count)


def test_plain_torch_layers_are_split_along_the_graph(jobs):
    require_equal(jobs, Case("zb-h1", own=True, micro_batches=5), 2 * 7 + 3)


@pytest.mark.parametrize(("schedule", "chunks"), [("zb-h1", 1), ("zb-v", 2), ("interleaved", 2)])
def test_evaluation_runs_forwards_only(jobs, schedule, chunks):
    case = Case(schedule, chunks=chunks, micro_batches=4, mode="evaluate")
    result, expected = jobs.run(case), theirs(jobs, case)
    assert result.kept == expected.kept
    assert len(result.kept[0]) == 4
    assert not any(gradient.any() for gradient in result.gradients[0].values())


def test_evaluation_accepts_another_number_of_micro_batches(jobs):
    case = Case(zb_h1(Shape(1, 2, 4)), micro_batches=3, mode="evaluate")
    assert jobs.run(case).kept == theirs(jobs, case).kept


def test_backward_before_the_last_weight_gradient_starts_no_reduction(jobs):
    schedule = Schedule.from_text(Shape(1, 2, 2), {"0.0": "0F0 0F1 0I0 0B1 0W0", "0.1": "1F0 1I0 1F1 1B1 1W0"})
    ddp = {"overlap_grad_reduce": True, "bucket_size": 20_000}
    case = Case(schedule, 2, 2, micro_batches=2, ddp=ddp, iterations=3)
    # Two addends sum to the same bits in either order.
    require_equal(jobs, case, 29)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            Case(one_f_one_b(Shape(1, 4, 4))),
            r"ScheduleError: the schedule has 4 ranks \(P\), Megatron's parallel_state 2",
        ),
        (Case("zb-v"), r"ScheduleError: zb-v: needs chunks = 2 \(rank r hosts stages r and 2 P - 1 - r\), got 1"),
        (Case(one_f_one_b(Shape(1, 2, 8))), "has 8 micro-batches, the call num_microbatches = 4; a family by its name"),
        (Case(one_f_one_b(Shape(3, 2, 4))), "the schedule has 3 pipelines, the job 1 data-parallel replicas"),
        (
            Case(Schedule.from_text(Shape(1, 2, 1), {"0.0": "0F0", "0.1": "1F0 1B0"}), micro_batches=1),
            "ScheduleError: the schedule does not pass check: .* of stage 0 is missing for micro-batch 0.0",
        ),
        (
            Case(
                Schedule.from_text(Shape(1, 2, 2), {"0.0": "0F1 0F0 0B1 0B0", "0.1": "1F1 1B1 1F0 1B0"}),
                micro_batches=2,
            ),
            "worker 0.0: 0F0.1 comes where 0F0.0 should; data iterators hand out micro-batches in order",
        ),
        (
            Case(
                Schedule.from_text(
                    Shape(2, 2, 1),
                    {"0.0": "0F0.0 0F1.0 0B0.0 0B1.0", "0.1": "1F0.0 1F1.0 1B0.0 1B1.0"},
                    failed=["1.0", "1.1"],
                ),
                2,
                2,
                micro_batches=1,
            ),
            r"the schedule has failed workers \(1.0 1.1\); in Megatron's loop every worker must live",
        ),
        (
            Case("zb-h1", config={"variable_seq_lengths": True}),
            "RunError: config.variable_seq_lengths is set: transfers have one shape; switch it off",
        ),
        (Case("no-such", 2), "schedule no-such: is neither a file nor a family"),
    ],
)
def test_unfit_schedule_is_refused_at_the_first_call(jobs, case, message):
    with pytest.raises(RuntimeError, match=message) as refusal:
        jobs.run(case)
    assert "\n" not in str(refusal.value)


def test_a_schedule_file_may_be_given_as_a_path(tmp_path):
    schedule, path = one_f_one_b(Shape(1, 2, 4)), tmp_path / "own.json"
    path.write_text(schedule.dumps())
    assert schedule_in(path, MegatronGrid(0, 2, 0, 1, 1), 4) == schedule


def _called(case: Case, chunks):
    from recycle.megatron import forward_backward_func

    forward_backward_func("zb-v")(
        forward_step_func=forward_step(case),
        data_iterator=[iter(()), iter(())],
        model=chunks,
        num_microbatches=4,
        seq_length=32,
        micro_batch_size=2,
    )


def _misplaced(case: Case):
    _called(case, build(replace(case, schedule=None))[0])


def _tied(case: Case):
    chunks, _ = build(case)
    for chunk in chunks:
        chunk.module.share_embeddings_and_output_weights = True
    _called(case, chunks)


def test_misplaced_chunks_are_refused(jobs):  # Rank 1 has stages 1 and 2 of the V, and was given the last stage.
    with pytest.raises(RuntimeError, match=r"has post_process = (False|True), expected (True|False); build each chunk"):
        jobs.call(_misplaced, Case("zb-v", chunks=2))


def test_weight_shared_by_two_chunks_of_a_rank_is_refused(jobs):
    with pytest.raises(RuntimeError, match="share a weight and lie in two chunks of one rank"):
        jobs.call(_tied, Case("zb-v", chunks=2))
