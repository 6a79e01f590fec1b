"""`recycle.advice`: bounds, spares, and expectations against simulations."""

from dataclasses import replace
from math import exp, inf

import pytest
from msgspec.structs import replace as replace_in

from benchmarks.advice import JOB, compared, effective_share, published
from recycle.advice.advise import Setting, advice_of, advise, first_plan, sensitivity, simulate, with_spares, with_value
from recycle.advice.candidates import Candidate, candidates, job_of, least_period, most_samples, sequences
from recycle.advice.expectation import DeadNodes, FailureModel, expect
from recycle.job import Job
from recycle.systems.failures import ANNOUNCED, FailureTrace, NodeChange
from recycle.systems.scenario import Scenario
from tests import DOCS

FAILURES = FailureModel(rate=20.0, repair_median=10.0, repair_p90=60.0)


def setting(gpus=16, per_node=2, days=30.0) -> Setting:
    return Setting(Job.from_toml(JOB), gpus, per_node, days, FAILURES)


def test_each_candidate_keeps_batch_and_gpus_and_no_first_plan_is_below_its_bound():
    job = Job.from_toml(JOB)
    every, most = list(candidates(job, 16, 4)), most_samples(job)
    assert len(every) == len(set(every)) > 100
    planned = 0
    for candidate in every[::17]:
        shaped = job_of(job, candidate, 4)
        if shaped is None:
            continue
        assert candidate.gpus <= 16
        assert sequences(shaped) == sequences(job)
        period, _ = least_period(shaped)
        if period < inf:
            planned += 1
            assert sequences(job) / period <= most(candidate) * (1 + 1e-9)
            assert first_plan(shaped)[0] >= period * (1 - 1e-9)
    assert planned > 5


def test_activations_go_to_the_host_where_its_link_makes_that_faster_than_recomputing_them():
    given = with_value(with_value(setting(per_node=1), "model.layers", 64), "model.sequence", 8192)
    candidate = Candidate(1, 4, 4, 1, 2, "v", "none", True)
    job = job_of(given.job, candidate, 1)
    assert job.memory.offload == "auto"
    bound, (period, copied) = least_period(job)[0], first_plan(job)
    assert bound <= period < bound * 1.3
    # the fullest worker copies most of its 16 micro-batches of two chunks
    stages = job.prices.per_stage("activation", 8)
    assert 16 * min(stages) < copied < 32 * max(stages)
    for recompute, offload in (("full", "off"), ("none", "off")):
        memory, model = replace_in(job.memory, offload=offload), replace_in(job.model, recompute=recompute)
        other = job.with_sections(memory=memory, model=model)
        assert min(least_period(other)[0], first_plan(other)[0]) > 1.1 * period
    found = advice_of(given, candidate, job, period, given.dead(), copied)
    assert len(sensitivity(given, [found])) == len(sensitivity(given, [replace(found, copied=0.0)])) + 1
    slow = job_of(with_value(given, "memory.host_bandwidth", "1 MB").job, candidate, 1)
    assert slow.memory.offload == "off"


def test_spares_replace_dead_nodes_at_once_and_returned_nodes_become_spares():
    def change(time, failed, joined):
        return NodeChange(time, frozenset(failed), frozenset(joined), dict.fromkeys(failed, "GPU"))

    nodes = frozenset(range(4))
    changes = (
        change(1, {0}, set()),
        change(2, {3}, set()),
        change(3, {1}, set()),
        change(4, set(), {0}),
        change(5, set(), {1}),
    )
    seen = with_spares(FailureTrace("t", 4, nodes, changes, 9.0), 3)
    # 3 replaces 0 and fails in its place, 1 fails without a spare, 0 and then 1 return to the empty places.
    assert [(c.time, set(c.failed), set(c.joined)) for c in seen.changes] == [
        (1, {0}, {0}),
        (2, {0}, set()),
        (3, {1}, set()),
        (4, set(), {0}),
        (5, set(), {1}),
    ]
    assert (seen.nodes, seen.up) == (3, frozenset(range(3)))


@pytest.mark.parametrize("seed", [100, 101, 102])
def test_the_expectation_is_within_two_percent_of_the_simulation(seed):
    result = compared(seed)
    expected = result.advice.expected
    assert expected.effective + sum(expected.lost.values()) == pytest.approx(1)
    assert abs(result.difference) < 0.02


def test_a_single_pipeline_with_enough_spares_has_the_share_of_a_job_that_restarts():
    given = setting(gpus=64)
    job = job_of(given.job, Candidate(1, 2, 1, 1, 1, "loop", "none", False), 2)
    scenario = replace(Scenario.of(job), failure_rate=2e-5)
    dead = DeadNodes((1.0,), *[31 * 2e-5] * 3)
    found = expect(scenario, 10.0, dead, FAILURES, spares=31 - scenario.nodes)
    checkpoints, pauses = scenario.checkpoints(1, 1.0), job.pauses
    copied = scenario.copy_seconds(scenario.state_per_worker)
    pause = pauses.detect + 2 * pauses.rebuild + scenario.restart().restart + 2 * copied
    share = effective_share(2e-5, pause, checkpoints.every, checkpoints.stall)
    assert found.effective == pytest.approx(share, rel=1e-4)


def test_effective_share_counts_pauses_repeated_work_and_checkpoints():
    assert effective_share(0.0, 60.0, 100.0, 1.0) == pytest.approx(100 / 101)
    assert effective_share(0.01, 60.0, 1e-6, 0.0) == pytest.approx(exp(-0.6), rel=1e-6)
    # a failure each second on average: an interval of one second succeeds with probability 1/e
    assert effective_share(1.0, 0.0, 1.0, 0.0) == pytest.approx(1 / (exp(1) - 1))


def test_announced_failures_lose_neither_work_nor_time_to_detect():
    given = setting(days=365.0)
    job = job_of(given.job, Candidate(1, 2, 8, 1, 1, "loop", "none", False), 2)
    given = replace(
        given, failures=FailureModel(rate=50.0, repair_median=1.0, repair_p90=2.0, burst=0.0, announced=1.0)
    )
    advice = advice_of(given, Candidate(1, 2, 8, 1, 1, "loop", "none", False), job, 30.0, given.dead())
    (outcome,) = simulate(given, advice, given.traces([0]))
    assert (outcome.lost["detect"], outcome.lost["redone"]) == (0.0, 0.0)
    assert (advice.expected.lost["detect"], advice.expected.lost["redone"]) == (0.0, 0.0)
    assert outcome.lost["rebuild"] > 0


def test_the_page_has_the_predictions_that_the_command_prints():
    page = DOCS / "advice.md"
    assert published() in page.read_text()


def test_dead_nodes_of_a_trace_are_its_own_and_of_a_model_its_mean():
    changes = (
        NodeChange(25.0, frozenset({1}), frozenset()),
        NodeChange(50.0, frozenset({0}), frozenset({0}), {0: ANNOUNCED}),
    )
    trace = FailureTrace("t", 2, frozenset({0, 1}), changes, 100.0)
    assert DeadNodes.of_trace(trace) == DeadNodes((0.25, 0.75), 0.02, 0.01, 0.02)
    model = FailureModel(rate=10.0, burst=0.0)
    expected = DeadNodes.of_model(model, 500, 60.0)
    mean = sum(k * share for k, share in enumerate(expected.shares))
    seen = [model.generator(60.0, seed).trace(500) for seed in range(8)]
    alive = sum(each.node_seconds() / each.end for each in seen) / len(seen)
    assert 500 - mean == pytest.approx(alive, rel=0.01)
    assert expected.failed == pytest.approx(sum(each.failures / each.end for each in seen) / len(seen), rel=0.1)


def test_advice_is_the_same_for_the_same_seeds_and_ordered_by_what_it_delivers():
    given = setting()
    once, again = (advise(given, 3, seeds=(0,)) for _ in range(2))
    assert once == again
    rates = [each.expected.samples_per_second for each in once]
    assert rates == sorted(rates, reverse=True)
    assert len({each.candidate._replace(micro_batch=0) for each in once}) == 3
    doubled = next(each for each in sensitivity(given, once) if "rate doubles" in each.change)
    assert 0.8 * rates[0] < doubled.samples_per_second < rates[0]
    in_bursts = replace(given, failures=FailureModel(burst=0.8))
    assert len(sensitivity(in_bursts, once)) == len(sensitivity(given, once)) - 1
