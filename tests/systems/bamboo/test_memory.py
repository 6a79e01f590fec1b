"""What Bamboo's workers hold."""

from __future__ import annotations

from recycle.systems.bamboo.memory import buffers, needed

STATIC, ACTIVATION = [100.0, 200.0, 300.0], [1.0, 2.0, 3.0]


def test_a_buffer_per_micro_batch_or_what_1f1b_holds() -> None:
    assert buffers(3, 10, per_micro_batch=True) == [10, 10, 10]
    assert buffers(3, 10, per_micro_batch=False) == [3, 2, 1]
    assert buffers(3, 2, per_micro_batch=False) == [2, 2, 1]


def test_two_states_and_the_buffers_of_both_stages() -> None:
    held = buffers(3, 10, per_micro_batch=True)
    assert needed(STATIC, ACTIVATION, held) == [(310, 330), (520, 550), (430, 440)]
    assert needed(STATIC, ACTIVATION, held, stash=10) == [(330, 330), (550, 550), (430, 440)]
    lean = buffers(3, 10, per_micro_batch=False)
    assert needed(STATIC, ACTIVATION, lean, stash=1) == [(305, 307), (507, 507), (403, 406)]


def test_a_single_stage_has_no_copy() -> None:
    assert needed([100.0], [1.0], [10], stash=1) == [(110, 110)]
