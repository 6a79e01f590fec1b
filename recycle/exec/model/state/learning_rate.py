"""The course of the learning rate over a run."""

from __future__ import annotations

import math
from collections.abc import Callable

from recycle.job.sections import TrainSection

FINAL_SHARE = 0.1
"""Share of the peak learning rate at which the cosine ends."""
DECAY_SHARE = 0.1
"""Of the steps, in which the rate of "warmup-stable-decay" goes down (Hu et al., MiniCPM, arXiv 2404.06395)."""
_SHARES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (math.cos(math.pi * progress) + 1.0),
    "exponential": lambda progress: 2.0 * math.pow(0.5, progress) - 1.0,
    "minus-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""From the highest to the lowest learning rate, by how much of the way is behind; megatron-core's."""


def learning_rate(train: TrainSection, iteration: int) -> float:
    """Learning rate of an iteration, counted from 0.

    With a `schedule`, what megatron-core's `OptimizerParamScheduler` gives after that many iterations. Without, it
    rises linearly over the first `warmup` iterations to `learning_rate`, then follows half a cosine down to a tenth of
    it at the last of `steps`, and stays there. Depends on `steps`, so a run resumed with more steps has another course.
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
