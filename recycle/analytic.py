"""An analytic model of a GPT on GPUs: seconds and bytes of each layer from its shape, nothing measured.

FLOPs of a layer and micro-batch of b samples, s tokens, hidden size h, feed-forward size f: the linear parts take
b s (8 h^2 + 4 h f) forward, the same again for input gradients and for weight gradients; attention's two products take
4 b s^2 h forward and twice that for gradients, none of it for weights; the head 2 b s h V each. With f = 4 h the sum is
that of Narayanan et al. 2021 (arXiv 2104.04473, section 5.1). Every kernel runs at the same achieved share of the GPU's
peak. A tensor-parallel group reduces 2 b s h bytes twice per layer forward and twice in the input gradient.

Bytes of activations: Korthikanti et al. 2022 (arXiv 2205.05198, table 2), with sequence parallelism over the T GPUs
of a worker: b s (18 h + 4 f) / T, which is 34 b s h / T, with attention's products computed again ("selective");
5 a b s^2 / T more where everything is kept; 2 b s h where a layer is computed again from its input ("full"). Bytes of
a parameter: 2 (bf16) + 4 (fp32 gradient) + 12 (fp32 copy, two Adam moments), over T. The optimizer reads and writes 30
bytes of it.

Limits: no kernel is slower for being small, transfers do not share links, and with "full" the profile cannot say that
more is held between I and W than between F and I; each is on the side of the larger model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from recycle.layers import Layer, ring_seconds, stage_profile
from recycle.profile import Profile
from recycle.sections import Sections


@dataclass(frozen=True)
class Gpu:
    """One GPU and its links.

    Attributes:
        flops: dense bf16 operations per second at peak.
        memory_bandwidth: bytes per second of its own memory.
        fast_link: bytes per second to the GPUs of its node, each way.
        link: bytes per second of its share of the network between nodes.
    """

    flops: float
    memory_bandwidth: float
    fast_link: float
    link: float


GPUS = {
    "A100-40GB": Gpu(312e12, 1.555e12, 300e9, 25e9),
    "A100-80GB": Gpu(312e12, 2.039e12, 300e9, 25e9),
    "H100-80GB": Gpu(989e12, 3.35e12, 450e9, 50e9),
}
"""Vendor's data sheets; the network is one 200 Gb/s (A100) or 400 Gb/s (H100) adapter per GPU, as in DGX systems."""
WEIGHT, GRADIENT, OPTIMIZER, TRAFFIC = 2, 4, 12, 30
"""Bytes of a parameter; the last one moved through memory by a step."""


def layers(job: Sections) -> tuple[Layer, ...]:
    """The layers of the job's `[model]`, on a worker of T GPUs, for its micro-batch."""
    model, how = job.model, job.analytic
    gpu, ways = GPUS[how.gpu], job.grid.tensor_parallel
    b, s, h, v = job.data.micro_batch_size, model.sequence, model.hidden, model.vocabulary
    f = model.ffn if model.ffn is not None else 4 * h
    full = how.activations == "full" or model.recompute == "full"
    linear, attention, head = b * s * (8 * h * h + 4 * h * f), 4 * b * s * s * h, 2 * b * s * h * v
    again = linear + attention if full else attention if how.activations == "selective" else 0
    rate = gpu.flops * how.achieved * ways
    group = 2 * ring_seconds(2 * b * s * h, ways, gpu.fast_link)
    kept = 2 * b * s * h if full else b * s * (18 * h + 4 * f) / ways
    if how.activations == "all" and not full:
        kept += 5 * model.heads * b * s * s / ways
    body = (4 * h * h + 2 * h * f + 9 * h + f) / ways
    embedding = (v + s) * h / ways
    found = []
    for number in range(model.layers):
        first, last = number == 0, number == model.layers - 1
        parameters = body + (embedding if first else 0) + (v * h / ways if last else 0)
        products = linear + (head if last else 0)
        found.append(
            Layer(
                forward=(products + attention) / rate + group,
                backward_input=(products + 2 * attention + again) / rate + group * (2 if full else 1),
                backward_weight=products / rate,
                step=parameters * TRAFFIC / gpu.memory_bandwidth,
                static=parameters * (WEIGHT + GRADIENT + OPTIMIZER),
                state=parameters * (WEIGHT + OPTIMIZER),
                gradients=parameters * GRADIENT,
                activation=kept + (b * s * h / ways if first else 0) + (4 * b * s * (h + v) / ways if last else 0),
                message=2 * b * s * h / ways,
            )
        )
    return tuple(found)


def weight_stash(job: Sections) -> float:
    """Share of an activation that W needs: the linear parts' inputs and their outputs' gradients, b s (16 h + 4 f)."""
    model, how = job.model, job.analytic
    if how.activations == "full" or model.recompute == "full":
        return 1.0
    h, f = model.hidden, model.ffn if model.ffn is not None else 4 * model.hidden
    kept = 18 * h + 4 * f + (5 * model.heads * model.sequence if how.activations == "all" else 0)
    return (16 * h + 4 * f) / kept


def link(job: Sections) -> tuple[float, float]:
    """(seconds, bytes per second) of a transfer between two workers; the message of a group is spread over its GPUs."""
    how = job.analytic
    return how.link_latency, GPUS[how.gpu].link if how.link_bandwidth is None else how.link_bandwidth


def profile(job: Sections, stages: Sequence[int]) -> Profile:
    """The profile of a job whose stages have so many layers."""
    every, (latency, bandwidth) = layers(job), link(job)
    cut = [every[first:last] for first, last in pairwise([0, *accumulate(stages)])]
    stash = weight_stash(job)
    return stage_profile(cut, job.shape.pipelines, latency=latency, bandwidth=bandwidth, weight_stash=stash)


def assumptions(job: Sections) -> list[str]:
    """What the figures stand on, one line each."""
    how, gpu = job.analytic, GPUS[job.analytic.gpu]
    seconds, bandwidth = link(job)
    parameters = sum(layer.static for layer in layers(job)) / (WEIGHT + GRADIENT + OPTIMIZER) * job.grid.tensor_parallel
    return [
        f"{parameters / 1e9:.4g} billion parameters, {WEIGHT} + {GRADIENT} + {OPTIMIZER} bytes each",
        f"{how.gpu}: {how.achieved:.0%} of {gpu.flops / 1e12:g} TFLOP/s in every kernel",
        f"activations: {how.activations} recompute (Korthikanti et al. 2022), sequence parallelism over"
        f" T={job.grid.tensor_parallel}",
        f"links: {seconds * 1e6:g} us and {bandwidth / 1e9:g} GB/s per GPU between workers,"
        f" {gpu.fast_link / 1e9:g} GB/s inside one",
    ]
