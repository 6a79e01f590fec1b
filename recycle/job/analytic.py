"""Analytic model of a transformer on GPUs: seconds and bytes of each layer, computed from the layer's shape.

FLOPs of a GPT layer for a micro-batch of b samples, s tokens, hidden size h and feed-forward size f. Linear layers take
4 b s (8 h^2 + 4 h f) forward, and as many each for input gradients and for weight gradients. Attention's two products
take 4 b s^2 h forward and twice that for input gradients. The head takes 2 b s h V for each of the three. With f = 4 h
the sum is that of Narayanan et al. 2021 (arXiv 2104.04473, section 5.1). All kernels reach the same share of the GPU's
peak. A tensor-parallel group reduces 2 b s h bytes twice per layer forward and twice for the input gradient.

Bytes of activations, with w bytes per entry: w b s (8 h + 2 f). With f = 4 h these are the 32 b s h of bf16 that
Korthikanti et al. 2022 (arXiv 2205.05198, table 2) count without the two dropout masks. They are divided by the T GPUs
of a worker (sequence parallelism). Attention's products are recomputed ("selective"); keeping them takes another
2.5 w a b s^2 / T. A layer recomputed from its input ("full") keeps w b s h. The output layer keeps the softmax in fp32.
Bytes per parameter come from `footprint`, divided by T. The optimizer moves 30 bytes per parameter.

Limits: windows count as full attention; every expert receives equally many tokens, and tensor ranks that do not share
the experts hold and compute all. Small kernels are not slower, and transfers do not share links; both favor large
models. The executor's tensor parallelism works without sequence parallelism, so with T > 1 it holds more than computed
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from recycle.job.architecture import Architecture, is_rotary
from recycle.job.footprint import (
    GRADIENT_BYTES,
    MEAN,
    MESSAGES_UNDER_WAY,
    ON_GPU,
    PRECISION_BYTES,
    Pieces,
    moved_bytes,
    parameter_bytes,
    reducing_bytes,
    shards_held,
    undone_bytes,
    usable_bytes,
)
from recycle.job.layers import Layer, ring_seconds, stage_profile, stage_sums
from recycle.job.profile import Profile
from recycle.job.sections import Sections


@dataclass(frozen=True)
class Gpu:
    """One GPU and its links.

    Attributes:
        flops: dense bf16 operations per second at peak.
        fp32_flops: fp32 operations per second at peak, without tensor cores, as in torch by default.
        memory_bandwidth: bytes per second of the GPU's memory.
        fast_link: bytes per second to the GPUs of the same node, each way.
        link: bytes per second of the GPU's share of the network between nodes.
        host_link: bytes per second to and from the memory of the host.
    """

    flops: float
    fp32_flops: float
    memory: float
    memory_bandwidth: float
    fast_link: float
    link: float
    host_link: float


GPUS = {
    "A100-40GB": Gpu(312e12, 19.5e12, 40e9, 1.555e12, 300e9, 25e9, 25e9),
    "A100-80GB": Gpu(312e12, 19.5e12, 80e9, 2.039e12, 300e9, 25e9, 25e9),
    "H100-80GB": Gpu(989e12, 67e12, 80e9, 3.35e12, 450e9, 50e9, 50e9),
}
"""GPU -> figures of the vendor's data sheets.

Host links: four fifths of PCIe 4.0 or 5.0 with 16 lanes. Network: one adapter of 200 Gb/s (A100) or 400 Gb/s (H100) per
GPU, as in DGX systems.
"""
TRAFFIC = 30
"""Bytes of memory traffic per parameter in an optimizer step."""
_LOGITS = 4
"""Bytes per entry of the softmax and of its inputs, which are fp32 in every precision."""


def layers(job: Sections, pieces: Pieces = ON_GPU) -> tuple[Layer, ...]:
    model, options = job.model, job.analytic
    gpu, ways, weigh = GPUS[options.gpu], job.grid.tensor_parallel, parameter_bytes(job)
    b, s, h, v = job.data.micro_batch_size, model.sequence, model.hidden, model.vocabulary
    w, bf16, built = PRECISION_BYTES[job.train.precision], job.train.precision == "bf16", Architecture.of(model)
    full = options.activations == "full" or model.recompute in ("full", "layers")
    alone = 1 if built.experts == 1 or job.grid.expert_parallel else ways  # tensor ranks that compute the same experts
    every, chosen = built.experts * built.expert_matrices, built.active * built.expert_matrices
    linear = 2 * b * s * (built.products + (alone - 1) * chosen)
    attention, head = 4 * b * s * s * built.query, 2 * b * s * h * v
    again = linear + attention if full else attention if options.activations == "selective" else 0
    rate = (gpu.flops if bf16 else gpu.fp32_flops) * options.achieved * ways
    group = 2 * ring_seconds(w * b * s * h, ways, gpu.fast_link)
    message = w * b * s * h / ways
    kept = w * b * s * h if full else _kept(job)
    body, embedding = (built.layer + (alone - 1) * every) / ways, (v + built.positions) * h / ways
    how_summed = job.train.precision, job.train.accumulation
    more_moved = moved_bytes(*how_summed) - moved_bytes(how_summed[0], "fast")

    def layer(first: bool, last: bool) -> Layer:
        parameters = body + (embedding if first else 0) + ((v * h + built.final) / ways if last else 0)
        products = linear + (head if last else 0)
        logits = b * s * v / ways if last else 0
        return Layer(
            forward=(products + attention) / rate + group,
            backward_input=(products + 2 * attention + again) / rate + group * (2 if full else 1),
            backward_weight=products / rate + parameters * more_moved / gpu.memory_bandwidth,
            step=parameters * TRAFFIC * shards_held(job) / gpu.memory_bandwidth,
            static=parameters * (weigh.state + weigh.gradient),
            undo=parameters * weigh.undo,
            state=parameters * weigh.state,
            gradients=parameters * weigh.gradient,
            activation=kept + (2 * message + _LOGITS * logits if last else 0),
            workspace=_workspace(job, pieces, first, last),
            message=message,
        )

    if model.layers == 1:
        return (layer(first=True, last=True),)
    inner = layer(first=False, last=False)
    return layer(first=True, last=False), *[inner] * (model.layers - 2), layer(first=False, last=True)


def model_flops(job: Sections, iteration: int) -> float:
    """Return the floating-point operations of an iteration that the model needs: three times its forward pass.

    Recomputation does not count; attention counts as if no token were masked, as in Narayanan et al. 2021.
    """
    model = job.model
    b, s, h = job.sequences_in(iteration), model.sequence, model.hidden
    built = Architecture.of(model)
    layer = 2 * b * s * built.products + 4 * b * s * s * built.query
    return 3 * (model.layers * layer + 2 * b * s * h * model.vocabulary)


def _kept(job: Sections) -> float:
    model, b, w = job.model, job.data.micro_batch_size, PRECISION_BYTES[job.train.precision]
    tokens, built = b * model.sequence / job.grid.tensor_parallel, Architecture.of(model)
    # The gate is kept before and after its activation function, and so is the other factor.
    units = (4 if built.inner == 2 else 2) * built.ffn
    if built.experts > 1:
        # Tokens in the experts' order, before and after the experts, and the experts' outputs before they are weighted.
        units += 2 * model.hidden + built.ffn
        units *= 1 if job.grid.expert_parallel else job.grid.tensor_parallel
    kept = w * tokens * (4 * model.hidden + _attention(built, is_rotary(model)) + built.active * units)
    if model.dropout:
        kept += tokens * 2 * model.hidden
    if job.analytic.activations == "all":
        kept += 2.5 * w * tokens * model.heads * model.sequence
    return kept


def _attention(built: Architecture, rotated: bool) -> int:
    copied = built.query if built.key < built.query and built.groups > 1 else 0
    changed = built.query + built.key if rotated or built.normed else copied
    return built.query + 2 * built.key + built.query + changed + (copied if built.normed else 0)


def _workspace(job: Sections, pieces: Pieces, first: bool, last: bool) -> float:
    model, ways = job.model, job.grid.tensor_parallel
    w, bf16 = PRECISION_BYTES[job.train.precision], job.train.precision == "bf16"
    exact, again = job.train.accumulation == "exact", model.recompute in ("full", "layers")
    tokens, built = job.data.micro_batch_size * model.sequence / ways, Architecture.of(model)
    message, wide = w * tokens * model.hidden, built.inner * built.ffn
    # I: gradients inside the feed-forward part; with recomputation also the values inside that part.
    inside = (4 if again else 1) * message + w * tokens * (wide + built.ffn)
    table, matrix = model.hidden * model.vocabulary / ways, model.hidden * wide / ways
    temporary = (4 + pieces.widened if exact else 0) + (4 if bf16 and (exact or pieces.widened) else 0)

    def gradient_bytes(entries: float) -> float:
        held = entries * (exact or bf16)
        return w * held + min(pieces.added, held) * temporary

    # In a whole backward (B), W also holds what I made for both products of the feed-forward part, less what B freed.
    freed = built.ffn * (2 if built.inner == 2 else 1) + wide
    second_product = gradient_bytes(matrix / built.inner) + w * tokens * (model.hidden + built.ffn)
    both_products = gradient_bytes(matrix) + w * tokens * max(model.hidden + wide - freed, -model.hidden - built.ffn)
    added = max(second_product, both_products, (gradient_bytes(table) + 5 * message) * last)
    looked_up = (w * table + min(pieces.added, table) * temporary + message) * first
    # The logits, in addition to the kept softmax; with recomputation, the softmax too.
    output = tokens * model.vocabulary * ((w if bf16 else 0) + (_LOGITS if again else 0)) * last
    return max(inside, added, looked_up, output) + MESSAGES_UNDER_WAY * message


def weight_stash(job: Sections) -> float:
    """Return the share of an activation that W needs: linear layers' inputs and output gradients.

    For a GPT these are w b s (8 h + 2 f) bytes.
    """
    if job.analytic.activations == "full" or job.model.recompute == "layers":
        return 1.0  # I recomputes tensors that an activation does not count
    w, tokens = PRECISION_BYTES[job.train.precision], job.data.micro_batch_size * job.model.sequence
    built = Architecture.of(job.model)
    around = 2 * built.hidden + 2 * built.query + 2 * built.key
    shared = 1 if built.experts == 1 or job.grid.expert_parallel else job.grid.tensor_parallel
    needed = around + shared * built.active * (2 * built.hidden + (built.inner + 1) * built.ffn)
    return min(1.0, w * tokens / job.grid.tensor_parallel * needed / _kept(job))


def link(job: Sections) -> tuple[float, float]:
    """Return (latency in seconds, bytes per second) of a transfer between workers, whose GPUs share the bytes."""
    how = job.analytic
    return how.link_latency, GPUS[how.gpu].link if how.link_bandwidth is None else how.link_bandwidth


def profile(job: Sections, stages: Sequence[int], pieces: Pieces = ON_GPU) -> Profile:
    """Return the profile of a job with these numbers of layers per stage, as the executor runs the job.

    A stage that recomputes does so as a whole. The state before a staggered step is kept.
    """
    every, (latency, bandwidth) = layers(job, pieces), link(job)
    cut = [every[first:last] for first, last in pairwise([0, *accumulate(stages)])]
    plain = stage_profile(
        cut, job.shape.pipelines, latency=latency, bandwidth=bandwidth, weight_stash=weight_stash(job)
    )
    weigh, message = parameter_bytes(job), cut[0][-1].message
    held = stage_sums(cut, "static")
    step = [MEAN * min(pieces.stepped, each / (weigh.state + weigh.gradient)) for each in held]
    static = [sum(each) for each in zip(held, step, stage_sums(cut, "undo"), strict=True)]
    gpu = GPUS[job.analytic.gpu]
    changes: dict[str, Any] = {"static": static, "capacity": usable_bytes(gpu.memory), "host_bandwidth": gpu.host_link}
    if job.train.sharded_optimizer:
        plain = with_shards(job, plain, held)

    def increased(name: str, amounts: Sequence[float]) -> list[float]:
        return [a + b for a, b in zip(plain.per_stage(name, len(cut)), amounts, strict=True)]

    if job.planner.staggered and job.train.undo == "host":
        # Assume that no wait hides any part of the copy.
        each_kept = undone_bytes(job) / weigh.state
        changes["step"] = increased("step", [each_kept * state / gpu.host_link for state in stage_sums(cut, "state")])
    if job.model.recompute != "full":
        # A stage keeps its output until its backward; the last one has none.
        return replace(plain, **changes, activation=increased("activation", [message] * (len(cut) - 1) + [0.0]))
    entries = [0.0] + [message] * (len(cut) - 1)
    remade = [_kept(job) * len(stage) for stage in cut]
    remade[-1] += message * (1 + job.model.vocabulary / job.model.hidden)
    if job.planner.decoupled:
        return replace(plain, **changes, activation=remade, recomputed_from=entries)
    return replace(plain, **changes, activation=entries, workspace=increased("workspace", remade))


def with_shards(job: Sections, plain: Profile, held: Sequence[float]) -> Profile:
    """Add a sharded optimizer's sums and gathers to a profile (docs/guides/sharded-optimizer.md).

    Seconds follow from the bytes that leave a host; the workspace includes the buffers of the reduction.

    Args:
        job: its number of pipelines is the number of hosts of each stage.
        plain: profile of the stages without sharding.
        held: bytes of state and gradients of each stage.
    """
    hosts, copies, weigh = job.shape.pipelines, job.train.optimizer_copies, parameter_bytes(job)
    summed, gathered = GRADIENT_BYTES[job.train.accumulation], PRECISION_BYTES[job.train.precision]
    turns = [each / 2 for each in plain.per_stage("reduce_latency", len(held))]  # a ring makes one round, not two
    reduce, gather = summed * (hosts + copies - 2) / hosts, gathered * (hosts - copies) / hosts
    parameters = [each / (weigh.state + weigh.gradient) for each in held]
    workspace = plain.per_stage("workspace", len(held))

    def seconds(amount: float) -> float:
        return 0.0 if plain.bandwidth is None else amount / plain.bandwidth

    return replace(
        plain,
        reduce=[late + seconds(each * reduce) for late, each in zip(turns, parameters, strict=True)],
        reduce_latency=turns,
        gather=[late + seconds(each * gather) for late, each in zip(turns, parameters, strict=True)],
        workspace=[max(most, reducing_bytes(job, each)) for most, each in zip(workspace, parameters, strict=True)],
    )


def assumptions(job: Sections) -> list[str]:
    """Return the assumptions behind the figures, one line each."""
    how, gpu = job.analytic, GPUS[job.analytic.gpu]
    seconds, bandwidth = link(job)
    weigh, precision = parameter_bytes(job), job.train.precision
    parameters = sum(layer.state for layer in layers(job)) / weigh.state * job.grid.tensor_parallel
    flops = gpu.flops if precision == "bf16" else gpu.fp32_flops
    return [
        f"{parameters / 1e9:.4g} billion parameters in {precision}; {weigh.state:g} bytes of state each,"
        f" {weigh.gradient:g} of gradients ({job.train.accumulation}); {weigh.undo:g} bytes each for the state before"
        " a staggered step",
        f"{how.gpu}: {how.achieved:.0%} of {flops / 1e12:g} TFLOP/s in every kernel",
        f"activations: {how.activations} recompute (Korthikanti et al. 2022), sequence parallelism over"
        f" T={job.grid.tensor_parallel}",
        f"links: {seconds * 1e6:g} us and {bandwidth / 1e9:g} GB/s per GPU between workers,"
        f" {gpu.fast_link / 1e9:g} GB/s inside one",
    ]
