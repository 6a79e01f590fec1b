"""Several stages per worker, and stages that share the embedding: the bits of one process that holds the model."""

from __future__ import annotations

import pytest
import torch

from recycle import Job, Schedule, check
from recycle.exec import run
from recycle.exec.data.batches import load_corpus
from recycle.exec.launch.launcher import RunResult
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
from tests.exec.runs import Run, figures, job

pytestmark = pytest.mark.slow

STEPS = 5
SHARED = "embedding.word_embeddings.weight"


def tied(pipelines: int, ranks: int, micro_batches: int, chunks: int = 1, **train: object) -> Job:
    return job(
        pipelines,
        ranks,
        micro_batches,
        kind="gpt",
        shape={"chunks": chunks},
        memory={"limit": 8 * chunks},
        model={"layers": 4, "tied": True},
        train=train,
    )


@pytest.fixture(scope="module")
def whole() -> RunResult:
    one = tied(1, 1, 6)
    return run(one_f_one_b(one.shape), one, steps=STEPS)


@pytest.mark.parametrize("accumulation", ["exact", "fast"])
def test_the_shared_weight_has_the_sum_of_both_uses_gradients_however_the_model_is_split(accumulation: str) -> None:
    results = []
    for ranks in (1, 2, 4):
        of = small_job(ranks=ranks, model={"tied": True}, train={"accumulation": accumulation})
        stages = build_pipeline(of)
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
def test_gradients_are_those_of_megatron_cores_own_model_by_plain_autograd(is_tied: bool, precision: str) -> None:
    of = small_job(1, 1, 1, model={"tied": is_tied}, train={"precision": precision})
    (stage,) = build_pipeline(of)
    loss = run_pipelines([[stage]], step=0, count=1)
    plain = build_part(of, 0)
    if precision == "bf16":
        plain.bfloat16()
    tokens, labels = load_corpus(of).batch(0, 0).values()
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


@pytest.mark.parametrize(("ranks", "chunks", "family"), [(2, 1, "1f1b"), (4, 1, "zb-h1"), (2, 2, "interleaved")])
def test_the_bits_do_not_depend_on_where_first_and_last_stage_lie(
    ranks: int, chunks: int, family: str, whole: RunResult
) -> None:
    of = tied(1, ranks, 6, chunks)
    assert figures(run(FAMILIES[family](of.shape), of, steps=STEPS)) == figures(whole)


def test_first_and_last_stage_on_one_worker(whole: RunResult) -> None:
    vee = tied(1, 2, 6, 2)
    schedule = FAMILIES["zb-v"](vee.shape)
    assert schedule.stages_of(schedule.live[0]) == (0, 3)
    assert figures(run(schedule, vee, steps=STEPS)) == figures(whole)
    both = tied(1, 1, 6, 2)
    text = " ".join(f"0F0.{j} 1F0.{j} 1I0.{j} 0I0.{j} 0W0.{j} 1W0.{j}" for j in range(6))
    assert figures(run(Schedule.from_text(both.shape, {"0.0": text}), both, steps=STEPS)) == figures(whole)


@pytest.mark.parametrize("victim", ["1.0", pytest.param("1.1", marks=pytest.mark.soak)])
def test_a_worker_of_the_first_or_the_last_stage_may_die_and_come_back(
    victim: str, whole: RunResult, launch: Run
) -> None:
    of = tied(2, 2, 3)
    result = launch(of, STEPS, f"kill:{victim}@1", f"rejoin:{victim}@3")
    assert figures(result) == figures(whole)
    assert [line["live_workers"] for line in result.metrics] == [4, 3, 3, 4, 4]
    assert result.digests["0.0"] == result.digests["1.0"]
    assert result.digests["0.1"] == result.digests["1.1"]
    assert result.directory is not None
    for digest in {line["plan"] for line in result.metrics}:
        assert Schedule.load(result.directory / "plans" / f"{digest}.json").ties == ((0, 1),)


def test_a_worker_that_hosts_both_may_die_in_its_reduces_and_come_back(launch: Run) -> None:
    of = tied(2, 2, 3, 2)
    schedule = FAMILIES["v-half"](of.shape)
    result = launch(of, STEPS, "kill:1.0@1.reduce", "rejoin:1.0@3", schedule=schedule)
    one = tied(1, 1, 6)
    assert figures(result) == figures(run(one_f_one_b(one.shape), one, steps=STEPS))
    assert result.digests["0.0"] == result.digests["1.0"]


def two_chunks(ahead: int = 2, **train: float) -> Job:
    return job(2, 2, 4, kind="gpt", shape={"chunks": 2}, memory={"limit": 8}, train=train, planner={"ahead": ahead})


@pytest.fixture(scope="module")
def gpt() -> Job:
    return two_chunks()


def alone(**train: float) -> RunResult:
    """The same model and micro-batches in one stage, 1F1B."""
    in_one_stage = job(1, 1, 8, kind="gpt", memory={"limit": 8}, model={"layers": 4}, train=train)
    return run(one_f_one_b(in_one_stage.shape), in_one_stage, steps=STEPS)


@pytest.fixture(scope="module")
def in_one_stage() -> RunResult:
    return alone()


def by_stage(result: RunResult) -> dict[int, str]:
    """Final state of each stage, which all of its hosts must agree on."""
    found: dict[int, set[str]] = {}
    for stages in result.digests.values():
        for stage, digest in stages.items():
            found.setdefault(stage, set()).add(digest)
    assert all(len(digests) == 1 for digests in found.values())
    return {stage: digests.pop() for stage, digests in sorted(found.items())}


@pytest.mark.parametrize("family", ["interleaved", "looped-bfs", "zb-v", "v-half", "v-min", "dualpipe-v"])
def test_every_family_trains_to_the_bits_of_one_process(family: str, gpt: Job, in_one_stage: RunResult) -> None:
    result = run(FAMILIES[family](gpt.shape), gpt, steps=STEPS)
    assert figures(result) == figures(in_one_stage)
    assert sorted(by_stage(result)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "family", ["zb-v", *(pytest.param(each, marks=pytest.mark.soak) for each in ("interleaved", "dualpipe-v"))]
)
def test_processes_train_through_a_kill_and_a_rejoin_to_the_same_bits(
    family: str, gpt: Job, in_one_stage: RunResult, launch: Run
) -> None:
    schedule = FAMILIES[family](gpt.shape)
    of = two_chunks(ahead=1)
    result = launch(of, STEPS, "kill:1.1@1", "rejoin:1.1@3", schedule=schedule)
    assert figures(result) == figures(in_one_stage)
    assert [line["live_workers"] for line in result.metrics] == [4, 3, 3, 4, 4]
    assert result.digests == run(schedule, gpt, steps=STEPS).digests
    assert result.directory is not None
    for digest in {line["plan"] for line in result.metrics}:
        ran = Schedule.load(result.directory / "plans" / f"{digest}.json")
        assert check(ran, limits=of.activation_limits()) == []
        assert all(ran.stages_of(worker) == schedule.stages_of(worker) for worker in ran.live)
