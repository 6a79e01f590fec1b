"""Hosts with different numbers: the odd workers, and the leader's decisions."""

import math

import pytest
from msgspec.structs import replace

from recycle import MicroBatch, RunError, Worker
from recycle.exec.checksums import PARAMETERS, BitPlace, Checksum, MicroBatchChecksums
from recycle.exec.leader.actions import Begin
from recycle.exec.leader.commit import ReportColumns
from recycle.exec.leader.disagreement import (
    Bit,
    Disagreement,
    Voted,
    Votes,
    compare,
    count_votes,
    replayed_as,
    votes_of,
)
from recycle.exec.protocol import Commit, Cursor, GenerationRecord, Report, StepReport, Verified
from recycle.ir.replays import Checked
from recycle.job import PricedJob
from tests.exec.leader.driver import LeaderDriver
from tests.exec.runs import job


def report(*norms: float, checksum=1, loss: float | None = None, common: float | None = None) -> Report:
    """Of a host of stage 0."""
    replicated = {} if common is None else {0: [common]}
    return Report({0: list(norms)}, loss, replicated=replicated, checksums={0: checksum})


def with_states(**states: tuple[int, int]) -> dict[str, Report]:
    return {name: replace(report(1.0), states={0: state}) for name, state in states.items()}


ONE, NEXT = report(1.0), report(math.nextafter(1.0, 2.0))
WHOLE, PART = report(9.0, loss=3.0, common=4.0), report(1.0, loss=3.0, common=4.0)
RANKS = {"0.0": WHOLE, "0.0t1": PART, "1.0": WHOLE, "1.0t1": PART}
SPOILT = report(math.nan, loss=math.nan, common=math.nan)


@pytest.mark.parametrize(
    ("reports", "odd", "what"),
    [
        ({"0.0": report(1.0, loss=2.0), "1.0": report(1.0, loss=3.0), "1.1": Report({1: [2.0]}, None)}, None, ""),
        ({"0.0": report(math.nan, checksum=1), "1.0": report(math.inf, 1.0, checksum=2)}, None, ""),
        ({"0.0": ONE, "1.0": NEXT, "2.0": ONE}, ["1.0"], "worker 1.0 holds a different gradient of stage 0"),
        ({"0.0": ONE, "1.0": report(1.0, checksum=2), "2.0": ONE}, ["1.0"], "a different gradient"),
        ({"0.0": ONE, "1.0": ONE, "2.0": report(math.nan)}, ["2.0"], "a different gradient"),
        ({"0.0": ONE, "1.0": NEXT}, [], "workers 0.0 and 1.0 hold different gradients of stage 0"),
        ({"0.0": ONE, "1.0": NEXT, "2.0": report(3.0)}, [], "different gradients"),
        ({"0.0": ONE, "1.0": NEXT, "2.0": ONE, "3.0": NEXT}, [], "different gradients"),
        (RANKS | {"1.0t1": report(1.0, loss=3.5, common=4.0)}, ["1.0"], "different losses"),
        (RANKS | {"1.0t1": report(1.0, loss=3.0, common=4.5)}, ["1.0"], "different gradients of stage 0"),
        (RANKS | {"1.0t1": report(1.5, loss=3.0, common=4.0)}, [], "different gradients of stage 0"),
        (RANKS | {"0.0t1": SPOILT, "1.0t1": SPOILT}, None, ""),
        # What has spread to the tensor ranks of all hosts accuses them all.
        ({name: replace(r, replicated={0: [4.0 + (r is PART)]}) for name, r in RANKS.items()}, ["0.0", "1.0"], ""),
        # With gradients that are not finite, states still show the odd worker.
        (
            {name: replace(report(math.nan), states={0: (7 + (name == "1.0"), 9)}) for name in ("0.0", "1.0", "2.0")},
            ["1.0"],
            "a different state",
        ),
    ],
)
def test_host_that_differs_from_the_majority_is_odd(reports, odd, what):
    if odd is None:
        compare(4, reports)
        return
    with pytest.raises(Disagreement) as raised:
        compare(4, reports)
    assert (list(raised.value.odd), raised.value.step) == (odd, 4)
    assert what in raised.value.description


def disagreement(**reports: Report) -> Disagreement:
    """What a comparison of these reports raises; w0_1t1 stands for 0.1t1."""
    named = {name.removeprefix("w").replace("_", "."): report for name, report in reports.items()}
    with pytest.raises(Disagreement) as raised:
        compare(4, named)
    return raised.value


def test_minority_state_is_odd_and_its_bit_is_found():
    """The 20th bit of word 1000 is set in one of them."""
    result = disagreement(**with_states(w0_0=(7, 9), w1_0=(7 + (1 << 20), 9 + 1000 * (1 << 20)), w2_0=(7, 9)))
    assert result.odd == {"1.0": "it holds a different state of stage 0 than workers 0.0 and 2.0"}
    assert (result.is_of_state, result.bits) == (True, [Bit("1.0", 0, 0, BitPlace(1000, 20))])
    assert result.held["1.0"].endswith("state 000000000010000700000000" + f"{9 + 1000 * (1 << 20):08x}")
    both = disagreement(**with_states(w0_0=(7, 9), w1_0=(8, 9)))
    assert (both.odd, both.description) == ({}, "workers 0.0 and 1.0 hold different states of stage 0")
    assert both.bits == [Bit("1.0", 0, 0, BitPlace(0, 0))]
    unexplained = disagreement(**with_states(w0_0=(7, 9), w1_0=(7, 10), w2_0=(7, 9)))
    assert (list(unexplained.odd), unexplained.bits) == (["1.0"], [])


def of_shards(*, holds: bool, state=1, parameters=1) -> Report:
    """Of a host of stage 0 that holds its only shard, or does not."""
    norms, states = {PARAMETERS: []}, {PARAMETERS: (parameters, 0)}
    return Report(norms | ({0: [1.0]} if holds else {}), None, states=states | ({0: (state, 0)} if holds else {}))


def test_minority_parameters_accuse_their_worker():
    holders = {"w0_0": of_shards(holds=True), "w1_0": of_shards(holds=True)}
    result = disagreement(**holders, w2_0=of_shards(holds=False, parameters=2))
    assert result.is_of_state
    assert result.odd == {"2.0": "it holds a different parameter of stage 0 than workers 0.0 and 1.0"}


def test_parameters_derived_from_a_wrong_state_accuse_no_worker():
    """All workers but the second holder have the first holder's wrong parameters."""
    wrong = {"w0_0": of_shards(holds=True, state=2, parameters=2), "w2_0": of_shards(holds=False, parameters=2)}
    result = disagreement(**wrong, w1_0=of_shards(holds=True))
    assert result.is_of_state
    assert result.odd == {}


def test_a_shard_that_is_still_copied_is_not_compared():
    copying = replace(of_shards(holds=True), states={PARAMETERS: (1, 0)})
    compare(4, {"0.0": of_shards(holds=True), "1.0": of_shards(holds=True), "2.0": copying})
    columns = ReportColumns.from_reports({"0.0": of_shards(holds=True), "2.0": copying})
    assert columns.has_states
    assert columns.states() == {Worker(0, 0): {0, PARAMETERS}, Worker(2, 0): {PARAMETERS}}


CHECKED = Checked(1, MicroBatch(2, 3))


WORK = Voted(CHECKED)


def made(activation: int, gradient=5, weights=7) -> MicroBatchChecksums:
    return MicroBatchChecksums(Checksum(activation, 0), Checksum(gradient, 0), Checksum(weights, 0))


RIGHT, WRONG = made(10), made(11, 6, 8)


def votes(**of_pipelines: MicroBatchChecksums) -> Votes:
    return {WORK: {f"{name[1:]}.1": value for name, value in of_pipelines.items()}}


@pytest.mark.parametrize(
    ("now", "before", "odd", "disputed"),
    [
        ({"k2": WRONG, "k0": RIGHT}, {}, [], True),  # two hosts
        ({"k2": WRONG, "k0": RIGHT, "k1": RIGHT}, {"k2": WRONG, "k0": RIGHT}, ["2.1"], False),
        ({"k2": RIGHT, "k0": WRONG, "k1": RIGHT}, {}, ["0.1"], False),
        ({"k2": WRONG, "k0": RIGHT, "k1": made(12)}, {"k2": WRONG, "k0": RIGHT}, [], True),
        ({"k2": RIGHT, "k0": RIGHT}, {"k2": WRONG, "k0": RIGHT}, ["2.1"], False),  # a fault that has passed
        ({"k2": RIGHT, "k0": RIGHT}, {"k2": RIGHT, "k0": WRONG}, ["0.1"], False),
        # The wrong output came back as another gradient, of which the right host made other things than now, too.
        ({"k2": RIGHT, "k0": RIGHT, "k1": RIGHT}, {"k2": made(11, 60, 80), "k0": made(10, 61, 81)}, ["2.1"], False),
        ({"k2": RIGHT, "k0": RIGHT}, {"k2": made(11), "k0": made(12)}, None, False),  # they had other inputs
        ({"k2": RIGHT, "k0": RIGHT}, {}, None, False),
    ],
)
def test_host_with_a_result_contradicted_by_the_majority_is_odd(now, before, odd, disputed):
    result = count_votes(4, votes(**now), votes(**before))
    assert (None if result is None else list(result.odd)) == odd
    assert result is None or result.disputed == [CHECKED] * disputed


def test_tensor_ranks_vote_with_the_same_rank_of_other_workers():
    messages = [("2.1", RIGHT), ("2.1t1", WRONG), ("0.1", RIGHT), ("0.1t1", WRONG), ("1.1", RIGHT), ("1.1t1", RIGHT)]
    result = count_votes(
        4, votes_of([(name, replayed_as(CHECKED, values, name.startswith("2"))) for name, values in messages])
    )
    assert list(result.odd) == ["1.1"]
    assert {part["worker"] for part in result.parts} == {"1.1t1"}
    assert "for micro-batch 2.3 at stage 1 in tensor rank 1 than workers 2.1 and 0.1" in result.description
    assert (
        count_votes(4, votes_of([(name, replayed_as(CHECKED, values, name == "2.1")) for name, values in messages[:4]]))
        is None
    )


def judged(config: PricedJob, verified: Verified | None, reports: dict[str, Report]) -> LeaderDriver:
    """A leader whose workers have reported the iteration after the seventh."""
    live = list(reports)
    roles = {name: name for name in live}
    commit = Commit(7, 2.0, 0.5, 1.0)
    record = GenerationRecord(3, live, roles, "plan", periods={"barrier": 9.0}, committed=7, commit=commit)
    record = replace(record, verified=verified)
    cursor = Cursor(3, "running", **record.progress())
    driver = LeaderDriver(config, 100, begin=Begin(record=record, cursor=cursor), running=live)
    for member, values in reports.items():
        driver.say(member, StepReport(8, values))
    driver.tick()
    return driver


def corrupt(driver: LeaderDriver) -> list[tuple[int, list[str]]]:
    return [(event["step"], event["workers"]) for event in driver.events("corrupt")]


def states_of(*states: int) -> dict[str, Report]:
    """Of one stage, whose hosts began with these states."""
    return {f"{k}.0": replace(report(1.0, loss=1.0), states={0: (state, 0)}) for k, state in enumerate(states)}


OF_THREE, OF_TWO = job(3, 1, 2, train={"checkpoint_every": 0}), job(2, 1, 2, train={"checkpoint_every": 0})
AGREED = Verified(4, Commit(4, 2.0, 0.5, 1.0))


@pytest.mark.parametrize(
    ("verified", "states", "fenced", "committed"),
    [
        (AGREED, (5, 6, 5), ["1.0"], 4),
        (replace(AGREED, step=7), (5, 6, 5), ["1.0"], 7),  # the present state: no rollback
        (None, (5, 6, 5), ["1.0"], 7),
        (AGREED, (5, 6, 7), [], 4),
    ],
)
def test_odd_host_is_fenced_and_the_agreed_state_restored(verified, states, fenced, committed):
    driver = judged(OF_THREE, verified, states_of(*states))
    assert [name for name, _ in driver.detected] == fenced
    assert (driver.record.committed, corrupt(driver)) == (committed, [(8, fenced)])


def test_two_differing_hosts_roll_back_or_need_a_checkpoint():
    driver = judged(OF_TWO, AGREED, states_of(5, 6))
    assert (driver.record.committed, driver.detected) == (4, [])
    with pytest.raises(RunError, match="also when repeated, and the run has no complete checkpoint") as raised:
        judged(OF_TWO, replace(AGREED, step=7), states_of(5, 6)).count_time(1)
    assert raised.value.code == "states-differ"
