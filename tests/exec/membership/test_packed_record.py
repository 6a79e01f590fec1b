"""A generation record in the store states the exceptions, and comes back whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from recycle.exec.membership.schema import ProposalKey, RegisterKey
from recycle.exec.protocol import Commit, Copy, GenerationRecord, Verified
from recycle.shape import Worker

COMMIT = Commit(123456, 2.345678901234567, 0.123456789012345, 1.0, "staggered", "staggered", [0.1234567890123456] * 4)


@st.composite
def records(draw: st.DrawFn) -> GenerationRecord:
    every = [Worker(k, r) for k in range(draw(st.integers(1, 12))) for r in range(draw(st.integers(1, 12)))]
    live = [str(w) for w in sorted(set(every) - draw(st.sets(st.sampled_from(every))))]
    roles = dict(zip(live, draw(st.permutations(live)), strict=True))
    joins, copies = live[-1:], [Copy(name, "0.0", 0, 3) for name in live[-1:]]
    more = {"joins": joins, "copies": copies, "held": "before", "holds": "after"}
    more["verified"] = draw(st.sampled_from([None, Verified(-1, None), Verified(5, COMMIT, live[:1])]))
    number = draw(st.integers(0, 99))
    return GenerationRecord(number, live, roles, "plan", 7, COMMIT, mode="staggered", periods={"barrier": 9}, **more)


@given(records())
def test_a_record_comes_back_from_its_text(record: GenerationRecord) -> None:
    for key in (RegisterKey(), ProposalKey(3)):
        assert key.decode(key.encode(record)) == record
        assert key.encode(key.decode(key.encode(record))) == key.encode(record)


def test_a_record_of_2048_workers_has_some_hundred_bytes() -> None:
    workers = [f"{pipeline}.{rank}" for pipeline in range(32) for rank in range(64)]
    live = [name for name in workers if name not in ("1.5", "7.63", "31.63")]
    roles = {name: name for name in live} | {"0.5": "1.5"}
    record = GenerationRecord(9, live, roles, "0123456789abcdef", 123456, COMMIT, [], "staggered", {"barrier": 64.5})
    text = RegisterKey().encode(record)
    assert len(text) < 600
    assert '"missing":["1.5","7.63","31.63"],"moved":{"0.5":"1.5"}' in text
