"""An analytic model of a transformer on GPUs: seconds and bytes of each layer from its shape, nothing measured.

FLOPs of a GPT's layer and micro-batch of b samples, s tokens, hidden size h, feed-forward size f: the linear parts take
b s (8 h^2 + 4 h f) forward, the same again for input gradients and for weight gradients; attention's two products take
4 b s^2 h forward and twice that for gradients, none of it for weights; the head 2 b s h V each. With f = 4 h the sum is
that of Narayanan et al. 2021 (arXiv 2104.04473, section 5.1). Every kernel runs at the same achieved share of the GPU's
peak. A tensor-parallel group reduces 2 b s h bytes twice per layer forward and twice in the input gradient.

Bytes of activations are those that the executor's layers keep, in the job's precision of w bytes: w b s (8 h + 2 f),
with f = 4 h the 32 b s h of bf16 that Korthikanti et al. 2022 (arXiv 2205.05198, table 2) count without the two masks
of dropout; over the T GPUs of a worker, with sequence parallelism, and with attention's products computed again
("selective"); 2.5 w a b s^2 / T more where everything is kept; w b s h where a layer is computed again from its input
("full"). With `[model] recompute` a stage as a whole is computed again from its input. The output layer keeps the
softmax, in fp32. Bytes of a parameter are those of `footprint`, over T. The optimizer reads and writes 30 bytes of it;
adding a micro-batch's gradient to an "exact" sum moves more than to a "fast" one, which counts as part of W.

Beside these a worker has, while it runs I, the gradients of one layer's inside; while it runs W, one matrix's gradient
and what rounds it in chunks; the output layer's logits once more; the piece of the mean gradient that it steps with.

Other families (`recycle.job.architecture`) have other matrices: grouped keys and values, a gate beside the feed-forward
part's product, experts of which each token goes through a few. They are counted as if every expert had equally many;
tensor ranks that do not share the experts have and compute all of them. What their attention keeps is said at
`_attention`.

Limits: no kernel is slower for being small, and transfers do not share links; each is on the side of the larger model.
The executor has tensor parallelism without sequence parallelism: with T > 1 it holds more than this.
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
    USABLE,
    Pieces,
    moved_bytes,
    parameter_bytes,
    reducing_bytes,
    shards_held,
    undone_bytes,
)
from recycle.job.layers import Layer, ring_seconds, stage_profile
from recycle.job.profile import Profile
from recycle.job.sections import Sections


@dataclass(frozen=True)
class Gpu:
    """One GPU and its links.

    Attributes:
        flops: dense bf16 operations per second at peak.
        fp32_flops: fp32 operations per second at peak, without tensor cores: torch uses none unless it is told to.
        memory: bytes.
        memory_bandwidth: bytes per second of its own memory.
        fast_link: bytes per second to the GPUs of its node, each way.
        link: bytes per second of its share of the network between nodes.
        host_link: bytes per second to and from the memory of its host.
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
"""Vendor's data sheets; four fifths of PCIe 4.0 or 5.0 with 16 lanes to the host; the network is one 200 Gb/s (A100) or
400 Gb/s (H100) adapter per GPU, as in DGX systems."""
TRAFFIC = 30
"""Bytes of a parameter that a step moves through memory."""
_LOGITS = 4
"""Bytes of an entry of the softmax and of what goes into it, which are fp32 in every precision."""


def layers(job: Sections, pieces: Pieces = ON_GPU) -> tuple[Layer, ...]:
    """The layers of the job's `[model]`, on a worker of T GPUs, for its micro-batch.

    Args:
        pieces: that the device works in.
    """
    model, how = job.model, job.analytic
    gpu, ways, weigh = GPUS[how.gpu], job.grid.tensor_parallel, parameter_bytes(job)
    b, s, h, v = job.data.micro_batch_size, model.sequence, model.hidden, model.vocabulary
    w, bf16, built = PRECISION_BYTES[job.train.precision], job.train.precision == "bf16", Architecture.of(model)
    full = how.activations == "full" or model.recompute in ("full", "layers")
    alone = 1 if built.experts == 1 or job.grid.expert_parallel else ways  # tensor ranks that compute the same experts
    every, chosen = built.experts * built.expert_matrices, built.active * built.expert_matrices
    linear = 2 * b * s * (built.products + (alone - 1) * chosen)
    attention, head = 4 * b * s * s * built.query, 2 * b * s * h * v
    again = linear + attention if full else attention if how.activations == "selective" else 0
    rate = (gpu.flops if bf16 else gpu.fp32_flops) * how.achieved * ways
    group = 2 * ring_seconds(w * b * s * h, ways, gpu.fast_link)
    message = w * b * s * h / ways
    kept = w * b * s * h if full else _kept(job)
    body, embedding = (built.layer + (alone - 1) * every) / ways, (v + built.positions) * h / ways
    how_summed = job.train.precision, job.train.accumulation
    more_moved = moved_bytes(*how_summed) - moved_bytes(how_summed[0], "fast")
    found = []
    for number in range(model.layers):
        first, last = number == 0, number == model.layers - 1
        parameters = body + (embedding if first else 0) + ((v * h + built.final) / ways if last else 0)
        products = linear + (head if last else 0)
        logits = b * s * v / ways if last else 0
        found.append(
            Layer(
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
        )
    return tuple(found)


def model_flops(job: Sections) -> float:
    """Floating-point operations of an iteration that the model asks for: three times those of its forward pass.

    What is computed again counts once, and attention as if no token were masked, as in Narayanan et al. 2021
    (arXiv 2104.04473, section 5.1).
    """
    model = job.model
    b, s, h = job.data.micro_batch_size, model.sequence, model.hidden
    built = Architecture.of(model)
    layer = 2 * b * s * built.products + 4 * b * s * s * built.query
    return 3 * job.shape.global_micro_batches * (model.layers * layer + 2 * b * s * h * model.vocabulary)


def _kept(job: Sections) -> float:
    """Bytes that a layer keeps of a micro-batch from F to I."""
    model, b, w = job.model, job.data.micro_batch_size, PRECISION_BYTES[job.train.precision]
    tokens, built = b * model.sequence / job.grid.tensor_parallel, Architecture.of(model)
    # A gate is kept with and without its function, and what it is multiplied with.
    units = (4 if built.inner == 2 else 2) * built.ffn
    if built.experts > 1:
        # Tokens in the experts' order, on the way in and out, and what experts make of them before it is weighed.
        units += 2 * model.hidden + built.ffn
        units *= 1 if job.grid.expert_parallel else job.grid.tensor_parallel
    kept = w * tokens * (4 * model.hidden + _attention(built, is_rotary(model)) + built.active * units)
    if model.dropout:
        kept += tokens * 2 * model.hidden
    if job.analytic.activations == "all":
        kept += 2.5 * w * tokens * model.heads * model.sequence
    return kept


def _attention(built: Architecture, rotated: bool) -> int:
    """Entries of a token that attention keeps of its inside.

    Of a GPT these are the product that queries, keys and values are views of, and attention's own output. Queries and
    keys that are normed or rotated are tensors of their own beside that product; so are queries of which some, but not
    all, share a key, since their places there do not follow each other.
    """
    copied = built.query if built.key < built.query and built.groups > 1 else 0
    changed = built.query + built.key if rotated or built.normed else copied
    return built.query + 2 * built.key + built.query + changed + (copied if built.normed else 0)


def _workspace(job: Sections, pieces: Pieces, first: bool, last: bool) -> float:
    """Bytes beside static ones and activations while an instruction of a layer runs."""
    model, ways = job.model, job.grid.tensor_parallel
    w, bf16 = PRECISION_BYTES[job.train.precision], job.train.precision == "bf16"
    exact, again = job.train.accumulation == "exact", model.recompute in ("full", "layers")
    tokens, built = job.data.micro_batch_size * model.sequence / ways, Architecture.of(model)
    message, wide = w * tokens * model.hidden, built.inner * built.ffn
    # I: the gradients of the inside of the feed-forward part; computed again, what it is made of too.
    inside = (4 if again else 1) * message + w * tokens * (wide + built.ffn)
    table, matrix = model.hidden * model.vocabulary / ways, model.hidden * wide / ways
    temporary = (4 + pieces.widened if exact else 0) + (4 if bf16 and (exact or pieces.widened) else 0)

    def made(entries: float) -> float:
        """W: a matrix's gradient, where it is not added as it is made, and what becomes of a piece of it."""
        held = entries * (exact or bf16)
        return w * held + min(pieces.added, held) * temporary

    # Beside it, of the two products of the feed-forward part: what B has made in I, less what it has let go of.
    freed = built.ffn * (2 if built.inner == 2 else 1) + wide
    behind = made(matrix / built.inner) + w * tokens * (model.hidden + built.ffn)
    before = made(matrix) + w * tokens * max(model.hidden + wide - freed, -model.hidden - built.ffn)
    added = max(behind, before, (made(table) + 5 * message) * last)
    looked_up = (w * table + min(pieces.added, table) * temporary + message) * first
    # The logits, beside the softmax that is kept; computed again, that too.
    output = tokens * model.vocabulary * ((w if bf16 else 0) + (_LOGITS if again else 0)) * last
    return max(inside, added, looked_up, output) + MESSAGES_UNDER_WAY * message


def weight_stash(job: Sections) -> float:
    """Share of an activation that W needs: the linear parts' inputs and their outputs' gradients; of a GPT,
    w b s (8 h + 2 f)."""
    if job.analytic.activations == "full" or job.model.recompute == "layers":
        return 1.0  # I makes again what an activation does not weigh
    w, tokens = PRECISION_BYTES[job.train.precision], job.data.micro_batch_size * job.model.sequence
    built = Architecture.of(job.model)
    around = 2 * built.hidden + 2 * built.query + 2 * built.key
    shared = 1 if built.experts == 1 or job.grid.expert_parallel else job.grid.tensor_parallel
    needed = around + shared * built.active * (2 * built.hidden + (built.inner + 1) * built.ffn)
    return min(1.0, w * tokens / job.grid.tensor_parallel * needed / _kept(job))


def link(job: Sections) -> tuple[float, float]:
    """(seconds, bytes per second) of a transfer between two workers; the message of a group is spread over its GPUs."""
    how = job.analytic
    return how.link_latency, GPUS[how.gpu].link if how.link_bandwidth is None else how.link_bandwidth


def profile(job: Sections, stages: Sequence[int], pieces: Pieces = ON_GPU) -> Profile:
    """The profile of a job whose stages have so many layers, as recycle runs it: a stage that recomputes does so as a
    whole, and the state before a staggered step is kept.

    Args:
        stages: layers of each.
        pieces: that the device works in.
    """
    every, (latency, bandwidth) = layers(job, pieces), link(job)
    cut = [every[first:last] for first, last in pairwise([0, *accumulate(stages)])]
    plain = stage_profile(
        cut, job.shape.pipelines, latency=latency, bandwidth=bandwidth, weight_stash=weight_stash(job)
    )
    weigh, message = parameter_bytes(job), cut[0][-1].message
    held = [sum(layer.static for layer in stage) for stage in cut]
    step = [MEAN * min(pieces.stepped, each / (weigh.state + weigh.gradient)) for each in held]
    undo = [sum(layer.undo for layer in stage) for stage in cut]
    static = [sum(each) for each in zip(held, step, undo, strict=True)]
    gpu = GPUS[job.analytic.gpu]
    changes: dict[str, Any] = {"static": static, "capacity": USABLE * gpu.memory}
    if job.train.sharded_optimizer:
        plain = with_shards(job, plain, held)
    if job.planner.staggered and job.train.undo == "host":
        # As if nothing of the copy were hidden behind waits.
        each_kept = undone_bytes(job) / weigh.state
        copied = [each_kept * sum(layer.state for layer in stage) / gpu.host_link for stage in cut]
        changes["step"] = [a + b for a, b in zip(plain.per_stage("step", len(cut)), copied, strict=True)]
    if job.model.recompute != "full":
        # A stage keeps its output until its backward; the last one has none.
        outputs = [message] * (len(cut) - 1) + [0.0]
        changes["activation"] = [a + b for a, b in zip(plain.per_stage("activation", len(cut)), outputs, strict=True)]
        return replace(plain, **changes)
    entries = [0.0] + [message] * (len(cut) - 1)
    remade = [_kept(job) * len(stage) for stage in cut]
    remade[-1] += message * (1 + job.model.vocabulary / job.model.hidden)
    if job.planner.decoupled:
        return replace(plain, **changes, activation=remade, recomputed_from=entries)
    workspace = [a + b for a, b in zip(plain.per_stage("workspace", len(cut)), remade, strict=True)]
    return replace(plain, **changes, activation=entries, workspace=workspace)


def with_shards(job: Sections, plain: Profile, held: Sequence[float]) -> Profile:
    """The profile of stages with the sums and gathers of a sharded optimizer: their seconds by what leaves a host, and
    the bytes that a host has beside its sums while it reduces (docs/guides/sharded-optimizer.md).

    Args:
        job: whose number of pipelines is that of the hosts of each stage.
        plain: of the stages, as if nothing were sharded.
        held: bytes of state and gradients of each stage.
    """
    hosts, copies, weigh = job.shape.pipelines, job.train.optimizer_copies, parameter_bytes(job)
    summed, gathered = GRADIENT_BYTES[job.train.accumulation], PRECISION_BYTES[job.train.precision]
    turns = [each / 2 for each in plain.per_stage("reduce_latency", len(held))]  # a ring goes round once, not twice
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
    """What the figures stand on, one line each."""
    how, gpu = job.analytic, GPUS[job.analytic.gpu]
    seconds, bandwidth = link(job)
    weigh, precision = parameter_bytes(job), job.train.precision
    parameters = sum(layer.state for layer in layers(job)) / weigh.state * job.grid.tensor_parallel
    flops = gpu.flops if precision == "bf16" else gpu.fp32_flops
    return [
        f"{parameters / 1e9:.4g} billion parameters in {precision}; {weigh.state:g} bytes of state each,"
        f" {weigh.gradient:g} of gradients ({job.train.accumulation}); {weigh.undo:g} for the state before a staggered"
        " step",
        f"{how.gpu}: {how.achieved:.0%} of {flops / 1e12:g} TFLOP/s in every kernel",
        f"activations: {how.activations} recompute (Korthikanti et al. 2022), sequence parallelism over"
        f" T={job.grid.tensor_parallel}",
        f"links: {seconds * 1e6:g} us and {bandwidth / 1e9:g} GB/s per GPU between workers,"
        f" {gpu.fast_link / 1e9:g} GB/s inside one",
    ]
