"""Names of a worker's processes."""

from __future__ import annotations

from recycle import Worker
from recycle.exec.members import joined_digests, member_name, members_of, split_member


def test_tensor_rank_0_has_the_workers_name_and_every_name_says_whose_it_is() -> None:
    assert members_of([Worker(0, 1), "12.3"], 3) == ["0.1", "0.1t1", "0.1t2", "12.3", "12.3t1", "12.3t2"]
    assert members_of([Worker(0, 1)], 1) == ["0.1"]
    for rank in (0, 1, 17):
        assert split_member(member_name("12.3", rank)) == ("12.3", rank)


def test_a_workers_digest_is_of_all_its_processes_in_their_order() -> None:
    one, other = {0: "aa", 2: "bb"}, {0: "cc", 2: "dd"}
    assert joined_digests([one]) == one
    assert joined_digests([one, other]).keys() == {0, 2}
    assert joined_digests([one, other]) != joined_digests([other, one])
    assert joined_digests([one, {0: "cc", 2: "xx"}])[0] == joined_digests([one, other])[0]
    assert joined_digests([one, {0: "cc", 2: "xx"}])[2] != joined_digests([one, other])[2]
