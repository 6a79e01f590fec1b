"""Rules for values of a job that are impossible together; each rule yields messages with key, value and remedy.

Types and ranges of single keys belong to the fields in `sections`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

from recycle.errors import JobError
from recycle.job.architecture import config_of, is_rotary
from recycle.job.endpoints import parse_endpoints, parse_listening
from recycle.job.named import require_name
from recycle.job.pricing import parse_bytes
from recycle.job.sections import (
    ANALYTIC,
    AUTO,
    OF_DOCUMENTS,
    OF_GPT_DATASET,
    OPTIMIZERS,
    DataSection,
    ModelSection,
    RotaryScaling,
    Sections,
)

_MOST_ACTIVATIONS = 2**31


def require_possible(job: Sections) -> None:
    for problem in chain.from_iterable(rule(job) for rule in _RULES):
        raise JobError(problem)


def _times(job: Sections) -> Iterator[str]:
    shape = job.shape
    for key in ("forward", "backward_input", "backward_weight", "step", "link"):
        value = getattr(job.times, key)
        values = value if isinstance(value, list) else [value]
        if isinstance(value, list) and len(value) != shape.stages:
            yield f"[times] {key}: lists {len(value)} stages, the shape has {shape.stages} (P*V)"
        for stage, entry in enumerate(values):
            if not 0 <= entry < float("inf"):
                place = f"stage {stage} " if isinstance(value, list) else ""
                yield f"[times] {key}: {place}must be finite and at least 0, got {entry}"


def _placement(job: Sections) -> Iterator[str]:
    grid = job.grid
    if grid.placement != "loop" and grid.chunks != 2:
        yield f'[shape] placement: "{grid.placement}" needs chunks = 2, not {grid.chunks}'
    if grid.placement != "loop" and job.planner.layout == "elastic":
        yield f'[planner] layout: "elastic" needs [shape] placement = "loop", not "{grid.placement}"'


def _memory(job: Sections) -> Iterator[str]:
    shape, memory, limit = job.shape, job.memory, job.memory.limit
    for key, written in (("activation", memory.activation), ("static", memory.static)):
        if written is None:
            continue
        if job.times.profile is not None:
            yield f"[memory] {key}: [times] profile also states it; remove one of them"
        if isinstance(written, list) and len(written) != shape.stages:
            yield f"[memory] {key}: lists {len(written)} stages, the shape has {shape.stages} (P*V)"
        for text in written if isinstance(written, list) else [written]:
            if not parse_bytes(text, f"[memory] {key}") and key == "activation":
                yield f"[memory] activation: must be more than 0 bytes, got {text!r}"
    if memory.static is not None and memory.activation is None:
        yield "[memory] static: needs activation, the bytes of an activation of a stage"
    rate = memory.host_bandwidth
    if isinstance(rate, str) and not parse_bytes(rate, "[memory] host_bandwidth"):
        yield f"[memory] host_bandwidth: must be more than 0 bytes per second, got {rate!r}"
    impossible = {
        'needs [planner] layout = "fixed"': job.planner.layout == "elastic",
        'has nothing to offload with [model] recompute = "full"': "full" in map(job.recompute_of, range(shape.stages)),
        "needs host_bandwidth, the bytes per second to the host": rate is None and job.times.profile is None,
    }
    if memory.offload == AUTO:
        yield from (f'[memory] offload: "auto" {why}' for why, holds in impossible.items() if holds)
    if isinstance(limit, str):
        if limit != AUTO:
            parse_bytes(limit, "[memory] limit")
        elif job.times.profile is None:
            yield '[memory] limit: "auto" needs [times] profile, which states the memory of the device; or state bytes'
        if job.times.profile is None and memory.activation is None:
            needs = "bytes need the bytes of an activation; state [memory] activation, or [times] profile"
            yield f"[memory] limit: {needs}"
    elif limit is not None:
        limits = limit if isinstance(limit, list) else [limit]
        if isinstance(limit, list) and len(limit) != shape.ranks:
            yield f"[memory] limit: lists {len(limit)} ranks, the shape has {shape.ranks}"
        if min(limits) < shape.chunks:
            yield f"[memory] limit: a worker must hold at least {shape.chunks} activation(s), got {limit}"
        if max(limits) > _MOST_ACTIVATIONS:
            yield f"[memory] limit: at most {_MOST_ACTIVATIONS} activations, got {limit}"


def _store(job: Sections) -> Iterator[str]:
    membership = job.membership
    if membership.store != "launcher":
        try:
            parse_endpoints(membership.store)
        except JobError as error:
            yield f'[membership] store: {error}; or leave it at "launcher"'
    if (membership.etcd_certificate is None) != (membership.etcd_key is None):
        yield "[membership] etcd_certificate and etcd_key: give both or neither"
    if membership.ports is not None and membership.ports[0] > membership.ports[1]:
        yield f"[membership] ports: the first, {membership.ports[0]}, is above the last, {membership.ports[1]}"


def _metrics(job: Sections) -> Iterator[str]:
    if job.logging.prometheus is not None:
        try:
            parse_listening(job.logging.prometheus)
        except JobError as error:
            yield f"[logging] prometheus: {error}"
    otlp = job.logging.otlp
    if otlp is not None and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", otlp):
        yield f'[logging] otlp: {otlp!r} is not the URL of a collector, such as "http://localhost:4318"'


def _model(job: Sections) -> Iterator[str]:
    model, is_emulated = job.model, job.model.kind == "emulated"
    if job.times.profile == ANALYTIC and 0 in (layers := job.layers_per_stage()):
        yield f"[model] split: stage {layers.index(0)} has no layer; the analytic model needs one in each stage"
    if model.provider is None and model.hidden % model.heads:
        yield f"[model] heads: {model.heads} heads do not divide hidden = {model.hidden}"
    for key, name in job.named_functions().items():
        if ":" not in name and "optimizer" in key:
            yield f'{key}: "{name}" is none of {", ".join(OPTIMIZERS)}; or write a class, as "package.module:Class"'
        require_name(name, key)
        if is_emulated:
            yield f'{key}: kind = "emulated" computes nothing; remove one of them'
    if model.weights is not None and is_emulated:
        yield '[model] weights: kind = "emulated" has none; remove one of them'
    if model.weights is not None and model.provider is not None:
        yield "[model] weights: the model of [model] provider has its own; load them in that function"
    if model.config and is_emulated:
        yield '[model.config]: kind = "emulated" has no config; remove one of them'
    if isinstance(model.recompute, list) and len(model.recompute) != job.shape.stages:
        yield f"[model] recompute: lists {len(model.recompute)} stages, the shape has {job.shape.stages} (P*V)"
    if isinstance(model.recompute, list) and job.times.profile == ANALYTIC:
        yield "[model] recompute: the analytic model takes one word for all stages, not a list"
    if model.provider is not None and job.times.profile == ANALYTIC:
        yield (
            "[times] profile: the analytic model does not know the model of [model] provider; measure it with"
            " recycle profile JOB -o FILE, and name that file"
        )


def _family(job: Sections) -> Iterator[str]:
    model = job.model
    if model.kind == "emulated":
        return
    defaults = ModelSection()
    for key in ("rotary_scaling", "rotary_percent", "local_rotary_base"):
        if getattr(model, key) != getattr(defaults, key) and not is_rotary(model):
            yield f'[model] {key}: kind = "{model.kind}" has learned positions; leave it out'
    scaling = model.rotary_scaling
    if isinstance(scaling, RotaryScaling) and scaling.low_freq_factor >= scaling.high_freq_factor:
        yield "[model] rotary_scaling: low_freq_factor must be below high_freq_factor"
    fields = config_of(model)
    for key in ("kv_channels", "num_query_groups", "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk"):
        if not isinstance(fields.get(key, 1), int) or fields.get(key, 1) < 1:
            yield f"[model.config] {key}: must be a whole number of at least 1, got {fields[key]!r}"
    groups = int(fields.get("num_query_groups", model.heads))
    if model.provider is None and model.heads % groups:
        yield f"[model.config] num_query_groups: {groups} groups do not divide heads = {model.heads}"


def _parallel(job: Sections) -> Iterator[str]:
    grid, model, count = job.grid, job.model, job.grid.tensor_parallel
    is_built, fields = model.provider is None and model.kind != "emulated", config_of(model)
    experts = int(fields.get("num_moe_experts", 0))
    for key in ("sequence_parallel", "expert_parallel"):
        if getattr(grid, key) and count == 1:
            yield f"[shape] {key}: needs tensor_parallel of at least 2"
    if grid.sequence_parallel and not is_built:
        yield "[shape] sequence_parallel: is for models that recycle builds; set it to false"
    if grid.expert_parallel and (model.provider is not None or not experts):
        yield (
            '[shape] expert_parallel: is for mixtures of experts that recycle builds, such as kind = "mixtral"; set'
            " it to false"
        )
    if grid.expert_parallel and experts % count:
        yield (
            f"[model.config] num_moe_experts: {experts} is not divisible by tensor_parallel = {count}, but"
            " with [shape] expert_parallel all tensor ranks hold equally many"
        )
    if not is_built:
        return
    if grid.sequence_parallel and model.sequence % count:
        yield (
            f"[model] sequence: {model.sequence} is not divisible by tensor_parallel = {count}, but"
            " with [shape] sequence_parallel all tensor ranks hold equally many tokens"
        )
    pad = (
        f"pad it to {-(-model.vocabulary // count) * count}" if model.weights is None else "its weights have that many"
    )
    equal = "all tensor ranks hold equally many"
    for key, value, remedy in (
        ("heads", model.heads, equal),
        ("ffn", 4 * model.hidden if model.ffn is None else model.ffn, f"{equal} units"),
        ("config num_query_groups", int(fields.get("num_query_groups", model.heads)), equal),
        ("vocabulary", model.vocabulary, pad),
    ):
        if value % count:
            yield f"[model] {key}: {value} is not divisible by tensor_parallel = {count}; {remedy}"


def _data(job: Sections) -> Iterator[str]:
    data, others = job.data, job.evaluation.data
    yield from _data_of(job, data)
    if others is not None:
        yield from (f"[eval]: {problem}" for problem in _data_of(job, others, part=1))
        if others.micro_batch_size not in (1, data.micro_batch_size):
            yield (
                f"[eval] data.micro_batch_size: {others.micro_batch_size}, but stages pass on"
                f" {data.micro_batch_size} rows at a time ([data] micro_batch_size); leave it out"
            )
    elif job.evaluation.every and data.kind == "gpt-dataset":
        yield from (f"[eval] data: {problem}" for problem in _data_of(job, data, part=1))


def _data_of(job: Sections, data: DataSection, part: int = 0) -> Iterator[str]:
    if data.provider is not None and data.kind != "text":
        yield f'[data] provider: kind = "{data.kind}" also names the data; remove one of them'
    if data.kind == "megatron" and data.path is None:
        yield '[data] path: kind = "megatron" needs the path of a .bin and .idx file, without the suffix'
    if data.kind != "gpt-dataset":
        defaults = DataSection()
        for key in OF_GPT_DATASET:
            if getattr(data, key) != getattr(defaults, key):
                yield f'[data] {key}: needs kind = "gpt-dataset"'
        if data.reset_attention and data.provider is None:
            yield '[data] reset_attention: needs kind = "gpt-dataset" or a provider'
        return
    if (data.path is None) == (data.paths is None):
        yield "[data] path: give the path of a .bin and .idx file without the suffix, or several as paths"
    count = len(data.paths) if data.paths is not None else 1
    if data.weights is not None and len(data.weights) != count:
        yield f"[data] weights: {len(data.weights)} for {count} paths"
    shares = [float(share) for share in data.split.split(",")]
    if part >= len(shares) or shares[part] <= 0:
        names = "training, the first", "validation, the second"
        yield f'[data] split: "{data.split}" gives no share to {names[part]} part'
    for key in OF_DOCUMENTS:
        if getattr(data, key) and data.end_of_document is None:
            yield f"[data] {key}: needs end_of_document, the number of the token that ends a document"
    if data.reset_positions and is_rotary(job.model):
        yield (
            f'[data] reset_positions: kind = "{job.model.kind}" has rotary positions, which megatron-core counts'
            f" through a sample; leave it out"
        )


def _train(job: Sections) -> Iterator[str]:
    train, pipelines = job.train, job.grid.pipelines
    if not train.sharded_optimizer:
        for key in ("optimizer_copies", "copy_bytes"):
            if getattr(train, key) != getattr(type(train)(), key):
                yield f"[train] {key}: needs sharded_optimizer = true"
    elif train.optimizer_copies > pipelines:
        yield (
            f"[train] optimizer_copies: {train.optimizer_copies}, but [shape] pipelines gives a stage"
            f" {pipelines} host(s), each of which holds a shard once; use fewer"
        )
    if train.reduce_buckets > 1 and not job.planner.decoupled:
        yield (
            f"[train] reduce_buckets: {train.reduce_buckets} buckets are summed while W's run, which"
            " [planner] decoupled = false does without; set it to true, or reduce_buckets to 1"
        )
    if train.rampup_batch_size is not None:
        key, whole = "[train] rampup_batch_size", job.shape.global_micro_batches * job.data.micro_batch_size
        start, increment, _ = train.rampup_batch_size
        unit = pipelines * job.data.micro_batch_size
        if start % unit or increment % unit:
            yield f"{key}: {start} and {increment} must be multiples of {unit}, one micro-batch of each pipeline"
        if start > whole or (whole - start) % increment:
            yield f"{key}: no number of increments of {increment} leads from {start} to the batch of {whole}"
    if train.minimum_learning_rate and train.schedule in (None, "constant"):
        yield '[train] minimum_learning_rate: needs a schedule other than "constant"'
    if train.decay is not None and train.schedule != "warmup-stable-decay":
        yield '[train] decay: needs schedule = "warmup-stable-decay"'
    if train.decay is not None and train.decay > train.steps - train.warmup:
        yield f"[train] decay: {train.decay} iterations, but {train.steps - train.warmup} come after the warm-up"
    if train.minimum_learning_rate > train.learning_rate:
        above = f"{train.minimum_learning_rate:g} is above learning_rate = {train.learning_rate:g}"
        yield f"[train] minimum_learning_rate: {above}"
    if train.schedule is not None and train.warmup >= train.steps:
        yield f"[train] warmup: {train.warmup} iterations, but steps = {train.steps}; schedule needs less"


def _integrity(job: Sections) -> Iterator[str]:
    every, digests, kept = job.integrity.every, job.integrity.digests, job.train.checkpoint_every
    if not job.integrity.compares_states:
        return
    if job.grid.pipelines < 2:
        key, compares = "digests", "to compare its state with"
        if every:
            key, compares = "every", "that could run its work again"
        yield f"[integrity] {key}: with 1 pipeline no worker has a peer {compares}; write 0"
    key, interval = ("digests", digests) if digests else ("every", every)
    if isinstance(interval, int) and kept % interval:
        yield (
            f"[integrity] {key}: {interval} does not divide [train] checkpoint_every = {kept}, so"
            " some checkpoints would not be compared; change one of the two"
        )


_RULES = (_times, _placement, _memory, _store, _metrics, _model, _family, _parallel, _data, _train, _integrity)
