"""What Bamboo's redundant forwards cost a balanced pipeline: derived, and exact in simulation.

Without them 1F1B takes (M + S - 1) c. The last stage has none; the one before it has the most to do, M (c + F), starts
(S - 2) c later than a pipeline of its own would in all, and waits B for its first gradient, in which one redundant
forward is hidden. What that comes to above (M + S - 1) c is seen. The stages before it wait longer, and hide more.
"""

from __future__ import annotations


def healthy_seconds(stages: int, micro_batches: int, forward: float, backward: float) -> float:
    """Seconds of an eager iteration of S >= 2 balanced stages, without communication, reduce and step:
    (M + S - 1) (F + B) + max(0, (M - 1) F - B + max(0, B - F)).

    With B = 2 F this is (M + S - 1) c + max over s <= S - 2 of max(0, M F - (S - 1 - s) B), the usual form.
    """
    plain = (micro_batches + stages - 1) * (forward + backward)
    if stages == 1:
        return plain
    return plain + max(0.0, (micro_batches - 1) * forward - backward + max(0.0, backward - forward))


FLAT_SLOWDOWN = 1.5
"""What Bamboo's own simulator takes an iteration to cost after a failure, whoever failed and however deep: a constant
there, to be held against `simulate` of the schedule."""
