"""Several stages per worker, and stages that share the embedding: the bits of one process that holds the model."""

import pytest
import torch

from recycle import Job, Schedule, check
from recycle.exec import run
from recycle.exec.data.batches import load_corpus
from recycle.exec.model.gpt import build_part
from recycle.exec.model.weights import global_names
from recycle.ir.families import FAMILIES, one_f_one_b
from tests.exec.drive import (
    build_pipeline,
    differing,
    gradients_by_name,
    mean_gradients,
    norm_squared_of,
    run_pipelines,
    small_job,
)
from tests.exec.runs import figures, job, live_workers

pytestmark = pytest.mark.slow

STEPS = 5
SHARED = "embedding.word_embeddings.weight"


def tied(pipelines: int, ranks: int, micro_batches: int, chunks=1, placement="loop", **train) -> Job:
    return job(
        pipelines,
        ranks,
        micro_batches,
        kind="gpt",
        shape={"chunks": chunks, "placement": placement},
        memory={"limit": 8 * chunks},
        model={"layers": 4, "tied": True},
        train=train,
    )


@pytest.fixture(scope="module")
def whole():
    single = tied(1, 1, 6)
    return run(one_f_one_b(single.shape), single, steps=STEPS)


@pytest.mark.parametrize("accumulation", ["exact", "fast"])
def test_shared_weight_has_the_gradients_of_both_uses(accumulation):
    results = []
    for ranks in (1, 2, 4):
        tested_job = small_job(ranks=ranks, model={"tied": True}, train={"accumulation": accumulation})
        stages = build_pipeline(tested_job)
        assert [SHARED in stage.parameters for stage in stages] == [s in (0, ranks - 1) for s in range(ranks)]
        loss = run_pipelines([stages], step=2, count=4)
        gradients = gradients_by_name(stages)
        assert mean_gradients(stages[-1])[SHARED].equal(gradients[SHARED])
        assert len(gradients) == 52
        results.append((loss, gradients, norm_squared_of(stages)))
    for other_loss, gradients, norm_squared in results[1:]:
        assert other_loss == results[0][0]
        different = differing(results[0][1], gradients)
        assert different == ([] if accumulation == "exact" else different and [SHARED])
        if accumulation == "exact":
            assert norm_squared == results[0][2]
    untied = build_pipeline(small_job(ranks=1))
    run_pipelines([untied], step=2, count=4)
    assert not mean_gradients(untied[0])[SHARED].equal(results[0][1][SHARED])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_gradients_equal_autograd_on_megatrons_model(is_tied, precision):
    tested_job = small_job(1, 1, 1, model={"tied": is_tied}, train={"precision": precision})
    (stage,) = build_pipeline(tested_job)
    loss = run_pipelines([[stage]], step=0, count=1)
    plain = build_part(tested_job, 0)
    if precision == "bf16":
        plain.bfloat16()
    tokens, labels = load_corpus(tested_job).batch(0, 0).values()
    mean = plain(
        input_ids=tokens, position_ids=torch.arange(32).expand(1, 32), attention_mask=None, labels=labels
    ).mean()
    mean.backward()
    assert float(mean) == pytest.approx(loss, rel=1e-12)
    expected = global_names(plain, 0)
    gradients = mean_gradients(stage)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        if name == SHARED and is_tied:
            # autograd adds the two uses in the weight's type, we in fp64
            error = (gradient - expected[name].grad.float()).norm() / gradient.norm()
            assert error < (4e-3 if precision == "bf16" else 1e-7)
        else:
            torch.testing.assert_close(gradient, expected[name].grad.float(), rtol=0, atol=2.0**-44)


@pytest.mark.parametrize(
    ("family", "ranks", "chunks"),
    [
        ("gpipe", 2, 1),
        ("1f1b", 2, 1),
        ("zb-h1", 4, 1),
        *((family, 2, 2) for family in ("interleaved", "looped-bfs", "zb-v", "v-half", "v-min", "dualpipe-v")),
    ],
)
def test_every_family_trains_to_the_bits_of_one_process(family, ranks, chunks, whole):
    job = tied(1, ranks, 6, chunks)
    assert figures(run(FAMILIES[family](job.shape), job, steps=3)) == figures(whole)[:3]


@pytest.mark.parametrize(
    ("family", "chunks", "victim", "phase"),
    [
        ("1f1b", 1, "1.0", ""),
        pytest.param("1f1b", 1, "1.1", "", marks=pytest.mark.soak),
        pytest.param("v-half", 2, "1.0", ".reduce", marks=pytest.mark.soak),
        (None, 2, "1.0", ".reduce"),  # the planner's own, on a V
    ],
)
def test_any_worker_may_die_and_rejoin_with_the_same_bits(family, chunks, victim, phase, whole, launch):
    job = tied(2, 2, 3, chunks, placement="loop" if family else "v")
    given = FAMILIES[family](job.shape) if family else None
    result = launch(job, STEPS, f"kill:{victim}@1{phase}", f"rejoin:{victim}@3", schedule=given)
    assert figures(result) == figures(whole)
    assert live_workers(result) == [4, 3, 3, 4, 4]
    schedule = given or FAMILIES["v-half"](job.shape)  # hosts the same stages
    assert result.digests == run(schedule, job, steps=STEPS).digests
    for digest in {line["plan"] for line in result.metrics}:
        plan = Schedule.load(result.directory / "plans" / f"{digest}.json")
        assert plan.ties == ((0, job.shape.stages - 1),)
        assert check(plan, limits=job.activation_limits()) == []
        assert all(plan.stages_of(worker) == schedule.stages_of(worker) for worker in plan.live)
