"""Hosts that hold or make different numbers: who is odd, now and before."""

from __future__ import annotations

import math

import msgspec
import pytest
from msgspec.structs import replace

from recycle import Worker
from recycle.exec.checksums import PARAMETERS, BitPlace, Checksum, MicroBatchChecksums
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
from recycle.exec.protocol import Report
from recycle.ir.replays import Checked
from recycle.job.shape import MicroBatch


def report(*norms: float, checksum: int = 1, loss: float | None = None, common: float | None = None) -> Report:
    """Of a host of stage 0."""
    replicated = {} if common is None else {0: [common]}
    return Report({0: list(norms)}, loss, replicated=replicated, checksums={0: checksum})


def disagreement(**reports: Report) -> Disagreement:
    """What a comparison of these reports raises; w0_1t1 stands for 0.1t1."""
    named = {name.removeprefix("w").replace("_", "."): report for name, report in reports.items()}
    with pytest.raises(Disagreement) as raised:
        compare(4, named)
    return raised.value


def test_hosts_that_hold_the_same_bits_agree_whatever_else_they_report() -> None:
    compare(4, {"0.0": report(1.0, loss=2.0), "1.0": report(1.0, loss=3.0), "1.1": Report({1: [2.0]}, None)})
    compare(4, {"0.0": report(math.nan, checksum=1), "1.0": report(math.inf, 1.0, checksum=2)})


def test_the_one_that_differs_from_most_hosts_is_odd() -> None:
    found = disagreement(w0_0=report(1.0), w1_0=report(math.nextafter(1.0, 2.0)), w2_0=report(1.0))
    assert found.odd == {"1.0": "it holds another gradient of stage 0 than workers 0.0 and 2.0"}
    assert str(found) == "step 4: worker 1.0 holds another gradient of stage 0 than workers 0.0 and 2.0"
    assert found.held == {
        "0.0": "stage 0: norm 1.0, checksum 0000000000000001",
        "1.0": "stage 0: norm 1.0, checksum 0000000000000001",
        "2.0": "stage 0: norm 1.0, checksum 0000000000000001",
    }


def test_bits_that_do_not_show_in_the_norm_count() -> None:
    assert list(disagreement(w0_0=report(1.0), w1_0=report(1.0, checksum=2), w2_0=report(1.0)).odd) == ["1.0"]


def test_one_that_is_not_finite_alone_is_odd() -> None:
    assert list(disagreement(w0_0=report(1.0), w1_0=report(1.0), w2_0=report(math.nan)).odd) == ["2.0"]


def test_nobody_is_odd_of_two_or_where_no_group_is_more_than_half() -> None:
    found = disagreement(w0_0=report(1.0), w1_0=report(2.0))
    assert (found.odd, found.what) == ({}, "workers 0.0 and 1.0 hold different gradients of stage 0")
    assert set(found.held) == {"0.0", "1.0"}
    assert not disagreement(w0_0=report(1.0), w1_0=report(2.0), w2_0=report(3.0)).odd
    assert not disagreement(w0_0=report(1.0), w1_0=report(2.0), w2_0=report(1.0), w3_0=report(2.0)).odd


def test_each_stage_is_voted_on_by_its_own_hosts() -> None:
    of_both = {0: [1.0], 1: [1.0]}
    reports = {f"{k}.0": Report(of_both, None, checksums={0: 1, 1: 7 if k == 1 else 1}) for k in range(3)}
    with pytest.raises(Disagreement, match=r"worker 1\.0 holds another gradient of stage 1"):
        compare(0, reports)


def test_a_worker_whose_own_tensor_ranks_disagree_is_odd_even_of_two_hosts() -> None:
    ranks = {"w0_0": report(9.0, loss=3.0, common=4.0), "w0_0t1": report(1.0, loss=3.0, common=4.0)}
    peers = {"w1_0": ranks["w0_0"], "w1_0t1": ranks["w0_0t1"]}
    for one, what in (
        (report(1.0, loss=3.5, common=4.0), "losses"),
        (report(1.0, loss=3.0, common=4.5), "gradients of stage 0"),
    ):
        found = disagreement(**ranks | peers | {"w1_0t1": one})
        assert found.odd == {"1.0": f"its tensor ranks hold different {what}"}
    assert not disagreement(**ranks | peers | {"w1_0t1": report(1.5, loss=3.0, common=4.0)}).odd


def test_what_is_not_finite_on_one_tensor_rank_of_all_hosts_is_no_disagreement() -> None:
    spoilt = report(math.nan, loss=math.nan, common=math.nan)
    compare(4, {name: spoilt if name.endswith("t1") else report(1.0) for name in ("0.0", "0.0t1", "1.0", "1.0t1")})
    whole = report(1.0, loss=2.0, common=4.0)
    compare(4, {name: spoilt if name.endswith("t1") else whole for name in ("0.0", "0.0t1", "1.0", "1.0t1")})


def with_states(**states: tuple[int, int]) -> dict[str, Report]:
    return {name: replace(report(1.0), states={0: state}) for name, state in states.items()}


def test_who_holds_another_state_than_most_is_odd_and_the_bit_is_found() -> None:
    """The 20th bit of word 1000 is set in one of them."""
    found = disagreement(**with_states(w0_0=(7, 9), w1_0=(7 + (1 << 20), 9 + 1000 * (1 << 20)), w2_0=(7, 9)))
    assert found.odd == {"1.0": "it holds another state of stage 0 than workers 0.0 and 2.0"}
    assert (found.is_of_state, found.bits) == (True, [Bit("1.0", 0, 0, BitPlace(1000, 20))])
    assert found.held["1.0"].endswith("state 000000000010000700000000" + f"{9 + 1000 * (1 << 20):08x}")
    both = disagreement(**with_states(w0_0=(7, 9), w1_0=(8, 9)))
    assert (both.odd, both.what) == ({}, "workers 0.0 and 1.0 hold different states of stage 0")
    assert both.bits == [Bit("1.0", 0, 0, BitPlace(0, 0))]
    unexplained = disagreement(**with_states(w0_0=(7, 9), w1_0=(7, 10), w2_0=(7, 9)))
    assert (list(unexplained.odd), unexplained.bits) == (["1.0"], [])


def test_what_has_spread_to_the_tensor_ranks_of_all_hosts_accuses_them_all_unless_a_state_is_wrong() -> None:
    names = [f"{k}.0{rank}" for k in range(3) for rank in ("", "t1")]
    spread = {name: report(1.0, common=4.5 if name.endswith("t1") else 4.0) for name in names}
    with pytest.raises(Disagreement) as raised:
        compare(4, spread)
    assert (list(raised.value.odd), raised.value.ranks) == (["0.0", "1.0", "2.0"], [0])
    states = {name: replace(one, states={0: (8 if name == "1.0" else 7, 9)}) for name, one in spread.items()}
    with pytest.raises(Disagreement) as raised:
        compare(4, states)
    assert (list(raised.value.odd), raised.value.ranks, raised.value.is_of_state) == (["1.0"], [], True)


def test_a_state_is_odd_also_where_the_gradients_of_all_are_not_finite() -> None:
    told = with_states(w0_0=(7, 9), w1_0=(8, 9), w2_0=(7, 9))
    found = disagreement(**{name: replace(one, norms={0: [math.nan]}) for name, one in told.items()})
    assert list(found.odd) == ["1.0"]


def of_shards(*, holds: bool, state: int = 1, parameters: int = 1) -> Report:
    """Of a host of stage 0 that holds its only shard, or does not."""
    norms, states = {PARAMETERS: list[float]()}, {PARAMETERS: (parameters, 0)}
    return Report(norms | ({0: [1.0]} if holds else {}), None, states=states | ({0: (state, 0)} if holds else {}))


def test_live_parameters_accuse_whoever_differs_from_most_hosts() -> None:
    holders = {"w0_0": of_shards(holds=True), "w1_0": of_shards(holds=True)}
    found = disagreement(**holders, w2_0=of_shards(holds=False, parameters=2))
    assert found.is_of_state
    assert found.odd == {"2.0": "it holds another parameter of stage 0 than workers 0.0 and 1.0"}


def test_live_parameters_that_a_wrong_state_has_spread_to_accuse_nobody() -> None:
    """The first holder's parameters are everywhere but on the second holder, who is right."""
    wrong = {"w0_0": of_shards(holds=True, state=2, parameters=2), "w2_0": of_shards(holds=False, parameters=2)}
    found = disagreement(**wrong, w1_0=of_shards(holds=True))
    assert found.is_of_state
    assert found.odd == {}


def test_a_shard_that_is_still_copied_is_not_compared() -> None:
    copying = replace(of_shards(holds=True), states={PARAMETERS: (1, 0)})
    compare(4, {"0.0": of_shards(holds=True), "1.0": of_shards(holds=True), "2.0": copying})
    columns = ReportColumns.of({"0.0": of_shards(holds=True), "2.0": copying})
    assert columns.has_states
    assert columns.states() == {Worker(0, 0): {0, PARAMETERS}, Worker(2, 0): {PARAMETERS}}


CHECKED = Checked(1, MicroBatch(2, 3))
WORK = Voted(CHECKED)


def made(activation: int, gradient: int = 5, weights: int = 7) -> MicroBatchChecksums:
    return MicroBatchChecksums(Checksum(activation, 0), Checksum(gradient, 0), Checksum(weights, 0))


RIGHT, WRONG = made(10), made(11, 6, 8)


def votes(**of_pipelines: MicroBatchChecksums) -> Votes:
    return {WORK: {f"{name[1:]}.1": value for name, value in of_pipelines.items()}}


def test_all_that_agree_are_right() -> None:
    assert count_votes(4, votes(k2=RIGHT, k0=RIGHT)) is None
    assert count_votes(4, {}) is None


def test_of_two_nobody_can_say_and_it_is_disputed() -> None:
    found = count_votes(4, votes(k2=RIGHT, k0=WRONG))
    assert found is not None
    assert (found.odd, found.disputed) == ({}, [CHECKED])
    what = "workers 2.1 and 0.1 made different things of micro-batch 2.3 at stage 1"
    assert found.what == f"{what} (activation, input gradient, weight gradient)"
    assert set(found.held) == {"0.1", "2.1"}


def test_a_third_one_decides() -> None:
    found = count_votes(4, votes(k2=WRONG, k0=RIGHT, k1=RIGHT), votes(k2=WRONG, k0=RIGHT))
    assert found is not None
    assert (list(found.odd), found.disputed) == (["2.1"], [])
    assert "than workers 0.1 and 1.1" in found.odd["2.1"]
    assert [part["tensor"] for part in found.parts] == ["activation", "input gradient", "weight gradient"]
    # A lowest bit that differs explains all three: the word at place 0.
    assert [(part.get("index"), part.get("bit")) for part in found.parts[:1]] == [(0, 0)]
    found = count_votes(4, votes(k2=RIGHT, k0=WRONG, k1=RIGHT))
    assert found is not None
    assert list(found.odd) == ["0.1"]


def test_three_that_all_differ_are_disputed_again() -> None:
    found = count_votes(4, votes(k2=WRONG, k0=RIGHT, k1=made(12)), votes(k2=WRONG, k0=RIGHT))
    assert found is not None
    assert (found.odd, found.disputed) == ({}, [CHECKED])


def test_a_fault_that_has_passed_is_found_by_what_was_said_before() -> None:
    for wrong in ("2", "0"):
        before = votes(**{f"k{k}": WRONG if k == wrong else RIGHT for k in "20"})
        found = count_votes(4, votes(k2=RIGHT, k0=RIGHT), before)
        assert found is not None
        assert list(found.odd) == [f"{wrong}.1"]


def test_what_was_made_of_a_wrong_output_later_accuses_nobody() -> None:
    """The wrong output came back as another gradient, of which the right host made other things than now, too."""
    before = votes(k2=made(11, 60, 80), k0=made(10, 61, 81))
    found = count_votes(4, votes(k2=RIGHT, k0=RIGHT, k1=RIGHT), before)
    assert found is not None
    assert list(found.odd) == ["2.1"]


def test_of_hosts_that_had_other_inputs_before_nobody_is_odd() -> None:
    assert count_votes(4, votes(k2=RIGHT, k0=RIGHT), votes(k2=made(11), k0=made(12))) is None
    other = {Voted(Checked(0, MicroBatch(2, 3))): {"2.0": WRONG, "0.0": RIGHT}}
    assert count_votes(4, votes(k2=RIGHT, k0=RIGHT), other) is None


def test_reports_carry_them_to_the_bit_and_columns_bring_them_together() -> None:
    large = MicroBatchChecksums(Checksum((1 << 64) - 1, 1 << 63), Checksum(3, 4), Checksum(0, 0))
    other = CHECKED._replace(stage=0)
    home = Report({1: [1.0]}, None, replayed=[replayed_as(CHECKED, large, True)])
    peer = Report({1: [1.0]}, None, replayed=[replayed_as(CHECKED, RIGHT, False), replayed_as(other, large, True)])
    packed = [msgspec.msgpack.encode(report) for report in (home, peer)]
    assert [msgspec.msgpack.decode(body, type=Report) for body in packed] == [home, peer]
    columns = ReportColumns.of({"0.1": peer, "1.1": Report({1: [1.0]}, None), "2.1": home})
    assert columns.agree
    found = votes_of(columns.replayed)
    assert found == {WORK: {"2.1": large, "0.1": RIGHT}}
    assert list(found[WORK]) == ["2.1", "0.1"]


def test_tensor_ranks_vote_with_the_same_rank_of_other_workers() -> None:
    said = [("2.1", RIGHT), ("2.1t1", WRONG), ("0.1", RIGHT), ("0.1t1", WRONG), ("1.1", RIGHT), ("1.1t1", RIGHT)]
    found = count_votes(4, votes_of([(name, replayed_as(CHECKED, its, name.startswith("2"))) for name, its in said]))
    assert found is not None
    assert list(found.odd) == ["1.1"]
    assert {part["worker"] for part in found.parts} == {"1.1t1"}
    assert "of micro-batch 2.3 at stage 1 in tensor rank 1 than workers 2.1 and 0.1" in found.what
    assert (
        count_votes(4, votes_of([(name, replayed_as(CHECKED, its, name == "2.1")) for name, its in said[:4]])) is None
    )
