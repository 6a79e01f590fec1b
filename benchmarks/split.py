"""The split of a plain PyTorch model along its graph: CPU time of I + W, of B, and of torch's own backward.

    python -W ignore -m benchmarks.split [--hidden 512] [--layers 4] [--tokens 512] [--repeats 15]

One stage of `torch.nn` layers in the middle of a model, one thread. Each round runs all three variants in turn; figures
are the medians of the rounds' ratios. Torch's backward leaves gradients in `.grad`; the others add them to sums
("fast").
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

from recycle import Job, MicroBatch
from recycle.exec.model.build import build_stages
from recycle.exec.model.providers import Providers
from recycle.job.sections import DataSection, ModelSection, ShapeSection, TrainSection

ONE = MicroBatch(0, 0)


class Stack(nn.Module):
    """Layers of a norm and two linear layers each."""

    def __init__(self, job: Job, first: int, last: int, pre_process: bool, post_process: bool) -> None:
        super().__init__()
        hidden = job.model.hidden
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
            for _ in range(first, last)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = inputs + layer(inputs)
        return inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("hidden", 512), ("layers", 4), ("tokens", 512), ("repeats", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    job = Job(
        grid=ShapeSection(1, 3, 1),
        model=ModelSection(layers=3 * given.layers, hidden=given.hidden, sequence=given.tokens),
        data=DataSection(),
        train=TrainSection(accumulation="fast"),
    )
    stage = build_stages(job, [1], torch.device("cpu"), providers=Providers(Stack))[1]
    plain = Stack(job, 0, given.layers, False, False)
    shape, _ = stage.message_spec()
    entry, gradient = torch.randn(shape), torch.randn(shape)

    def timed(action: Callable[[], object]) -> float:
        began = time.process_time()
        action()
        return time.process_time() - began

    def whole() -> float:
        stage.forward(ONE, entry)
        return timed(lambda: stage.backward(ONE, gradient))

    def halves() -> float:
        stage.forward(ONE, entry)
        return timed(lambda: (stage.backward_input(ONE, gradient), stage.backward_weight(ONE)))

    def torchs() -> float:
        plain.zero_grad(set_to_none=False)
        output = plain(entry.clone().requires_grad_())
        return timed(lambda: output.backward(gradient))

    stage.begin_iteration(0)
    rounds = [(halves(), whole(), torchs()) for _ in range(given.repeats + 3)][3:]
    print(f"hidden {given.hidden}, {given.layers} layers, {given.tokens} tokens, {given.repeats} rounds")
    print(f"B                    {1e3 * median(b for _, b, _ in rounds):8.1f} ms")
    print(f"I + W / B            {median(split / b for split, b, _ in rounds):8.3f}")
    print(f"B / torch's backward {median(b / own for _, b, own in rounds):8.3f}")


if __name__ == "__main__":
    main()
