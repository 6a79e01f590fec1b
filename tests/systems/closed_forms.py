"""Closed forms for simulations to be held against: Bamboo's iteration, Oobleck's template, checkpoint intervals."""

from __future__ import annotations

from collections.abc import Sequence


def healthy_seconds(stages: int, micro_batches: int, forward: float, backward: float) -> float:
    """Seconds of S >= 2 balanced stages with redundant forwards, without communication, reduce and step:
    (M + S - 1) (F + B) + max(0, (M - 1) F - B + max(0, B - F)).

    Without redundant forwards 1F1B takes (M + S - 1) c. The last stage has none; the one before it has the most to do,
    M (c + F), starts (S - 2) c later than a pipeline of its own would in all, and waits B for its first gradient, in
    which one redundant forward is hidden. What that comes to above (M + S - 1) c is seen. The stages before it wait
    longer, and hide more.

    With B = 2 F this is (M + S - 1) c + max over s <= S - 2 of max(0, M F - (S - 1 - s) B), the usual form.
    """
    plain = (micro_batches + stages - 1) * (forward + backward)
    if stages == 1:
        return plain
    return plain + max(0.0, (micro_batches - 1) * forward - backward + max(0.0, backward - forward))


def template_seconds(stage_seconds: Sequence[float], micro_batches: int | None = None) -> float:
    """T of stages that take c_i per micro-batch; for N_b = 4 S micro-batches unless said."""
    stages = len(stage_seconds)
    slowest = max(range(stages), key=stage_seconds.__getitem__)
    count = 4 * stages if micro_batches is None else micro_batches
    return sum(stage_seconds) + (count - stages + slowest - 1) * stage_seconds[slowest] + sum(stage_seconds[slowest:])


def efficiency(every: float, write: float, rate: float, restart: float) -> float:
    """Share of time that is progress; 0 where failures come faster than restarts."""
    return max(0.0, (1 - rate * (restart + every / 2)) / (1 + write / every))
