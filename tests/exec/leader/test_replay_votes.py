"""Who computed wrong, by what hosts made of the same micro-batch, now and before."""

from __future__ import annotations

import msgspec

from recycle.exec.checksums import Checksum, MicroBatchChecksums
from recycle.exec.leader.commit import ReportColumns
from recycle.exec.leader.disagreement import Voted, Votes, count_votes, replayed_as, votes_of
from recycle.exec.protocol import Report
from recycle.ir.replays import Checked
from recycle.job.shape import MicroBatch

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
