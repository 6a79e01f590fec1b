"""What Bamboo's workers hold."""

from __future__ import annotations

from recycle.systems.bamboo.memory import needed


def test_two_states_and_a_buffer_per_micro_batch() -> None:
    static, activation = [100.0, 200.0, 300.0], [1.0, 2.0, 3.0]
    assert needed(static, activation, 10, stashed=False) == [(310, 330), (520, 550), (430, 440)]
    assert needed(static, activation, 10, stashed=True) == [(330, 330), (550, 550), (430, 440)]


def test_a_single_stage_has_no_copy() -> None:
    assert needed([100.0], [1.0], 10, stashed=True) == [(110, 110)]
