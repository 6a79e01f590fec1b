"""Curves of one line."""

from __future__ import annotations

from recycle.cli.terminal import spark


def test_blocks_are_as_high_as_their_values() -> None:
    assert spark([0, 1, 2, 3, 4, 5, 6, 7, 8], 8) == " ▁▂▃▄▅▆▇█"
    assert spark([-1.0, 99.0, 0.4], 8) == " █ "
