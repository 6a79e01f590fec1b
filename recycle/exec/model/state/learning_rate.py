"""The learning rate schedule of a run."""

from __future__ import annotations

import math
from collections.abc import Callable

from recycle.job.sections import TrainSection

FINAL_SHARE = 0.1
"""Share of the peak learning rate at which the cosine ends."""
DECAY_SHARE = 0.1
"""Share of the steps in which the rate of "warmup-stable-decay" decays (Hu et al., MiniCPM, arXiv 2404.06395)."""
_SHARES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (math.cos(math.pi * progress) + 1.0),
    "exponential": lambda progress: 2.0 * math.pow(0.5, progress) - 1.0,
    "minus-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Progress of the decay -> position between lowest (0) and highest (1) learning rate; megatron-core's formulas."""


def learning_rate(train: TrainSection, iteration: int) -> float:
    """Learning rate of an iteration, counted from 0.

    With a `schedule`, as megatron-core's `OptimizerParamScheduler` after that many iterations. Otherwise the rate rises
    linearly over the first `warmup` iterations to `learning_rate`. It then follows half a cosine down to a tenth at the
    last of `steps`, and stays there. It depends on `steps`, so resuming a run with more steps changes the schedule.
    """
    if train.schedule is not None:
        return _scheduled(train, iteration)
    if iteration < train.warmup:
        return train.learning_rate * (iteration + 1) / train.warmup
    span = max(train.steps - 1 - train.warmup, 1)
    progress = min((iteration - train.warmup) / span, 1.0)
    share = FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))
    return train.learning_rate * share


def _scheduled(train: TrainSection, iteration: int) -> float:
    highest, lowest = train.learning_rate, train.minimum_learning_rate
    if train.warmup > 0 and iteration <= train.warmup:
        return highest * iteration / train.warmup
    if train.schedule == "constant":
        return highest
    if iteration > train.steps:
        return lowest
    shape, begin = str(train.schedule), train.warmup
    if shape == "warmup-stable-decay":
        usual = max(round(DECAY_SHARE * train.steps), 1)
        shape, begin = train.decay_shape, max(train.steps - (train.decay or usual), train.warmup)
        if iteration <= begin:
            return highest
    share = _SHARES[shape]((iteration - begin) / (train.steps - begin))
    return lowest + share * (highest - lowest)
