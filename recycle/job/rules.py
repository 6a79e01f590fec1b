"""What values of a job are impossible together: each rule raises JobError with the key, the value and the remedy.

Types and single ranges are those of the sections' fields (`sections`); what takes more than one key to tell is here.
"""

from __future__ import annotations

from recycle.errors import JobError, errors_as
from recycle.job.architecture import config_of, is_rotary
from recycle.job.endpoints import parse_endpoints
from recycle.job.named import require_name
from recycle.job.pricing import parse_bytes
from recycle.job.sections import ANALYTIC, AUTO, OF_GPT_DATASET, DataSection, Sections

_MOST_ACTIVATIONS = 2**31


def require_possible(job: Sections) -> None:
    """Raise JobError for values that are well-typed but impossible together."""
    shape = job.shape
    for key in ("forward", "backward_input", "backward_weight", "step", "link"):
        value = getattr(job.times, key)
        values = value if isinstance(value, list) else [value]
        if isinstance(value, list) and len(value) != shape.stages:
            raise JobError(f"[times] {key}: lists {len(value)} stages, the shape has {shape.stages} (P*V)")
        for stage, entry in enumerate(values):
            if not 0 <= entry < float("inf"):
                place = f"stage {stage} " if isinstance(value, list) else ""
                raise JobError(f"[times] {key}: {place}must be finite and at least 0, got {entry}")
    _require_memory(job)
    if job.times.profile == ANALYTIC:
        job.layers_per_stage()
    _require_store(job)
    if job.model.provider is None and job.model.hidden % job.model.heads:
        raise JobError(f"[model] heads: {job.model.heads} heads do not divide hidden = {job.model.hidden}")
    _require_named(job)
    _require_family(job)
    if job.grid.sequence_parallel:
        if job.grid.tensor_parallel == 1:
            raise JobError("[shape] sequence_parallel: needs tensor_parallel of at least 2")
        if job.model.provider is not None or job.model.kind == "emulated":
            raise JobError("[shape] sequence_parallel: is for models that recycle builds; set it to false")
    if job.grid.expert_parallel:
        _require_expert_parallel(job)
    if job.model.kind != "emulated" and job.model.provider is None:
        _require_tensor_parallel(job)
    _require_data(job, job.data)
    if job.evaluation.data is not None:
        with errors_as(JobError, "[eval]"):
            _require_data(job, job.evaluation.data, part=1)
        if job.evaluation.data.micro_batch_size not in (1, job.data.micro_batch_size):
            raise JobError(
                f"[eval] data.micro_batch_size: {job.evaluation.data.micro_batch_size}, but stages hand on"
                f" {job.data.micro_batch_size} rows at a time ([data] micro_batch_size); leave it out"
            )
    elif job.evaluation.every and job.data.kind == "gpt-dataset":
        with errors_as(JobError, "[eval] data"):
            _require_data(job, job.data, part=1)
    _require_train(job)
    _require_integrity(job)


def _require_memory(job: Sections) -> None:
    shape, memory, limit = job.shape, job.memory, job.memory.limit
    for key, written in (("activation", memory.activation), ("static", memory.static)):
        if written is None:
            continue
        if job.times.profile is not None:
            raise JobError(f"[memory] {key}: [times] profile states it too; take out one of them")
        if isinstance(written, list) and len(written) != shape.stages:
            raise JobError(f"[memory] {key}: lists {len(written)} stages, the shape has {shape.stages} (P*V)")
        for text in written if isinstance(written, list) else [written]:
            if not parse_bytes(text, f"[memory] {key}") and key == "activation":
                raise JobError(f"[memory] activation: must be more than 0 bytes, got {text!r}")
    if memory.static is not None and memory.activation is None:
        raise JobError("[memory] static: needs activation, the bytes of an activation of a stage")
    if isinstance(limit, str):
        if limit != AUTO:
            parse_bytes(limit, "[memory] limit")
        if limit == AUTO and job.times.profile is None:
            raise JobError(
                '[memory] limit: "auto" needs [times] profile, which states what the device has; state bytes'
            )
        if job.times.profile is None and memory.activation is None:
            raise JobError(
                "[memory] limit: bytes need the bytes of an activation; state [memory] activation, or [times] profile"
            )
    elif limit is not None:
        limits = limit if isinstance(limit, list) else [limit]
        if isinstance(limit, list) and len(limit) != shape.ranks:
            raise JobError(f"[memory] limit: lists {len(limit)} ranks, the shape has {shape.ranks}")
        if min(limits) < shape.chunks:
            raise JobError(f"[memory] limit: a worker must hold at least {shape.chunks} activation(s), got {limit}")
        if max(limits) > _MOST_ACTIVATIONS:
            raise JobError(f"[memory] limit: at most {_MOST_ACTIVATIONS} activations, got {limit}")


def _require_named(job: Sections) -> None:
    named = {
        "[model] provider": job.model.provider,
        "[data] provider": job.data.provider,
        "[eval] data.provider": None if job.evaluation.data is None else job.evaluation.data.provider,
        "[train] loss": job.train.loss,
    }
    for key, name in named.items():
        if name is None:
            continue
        require_name(name, key)
        if job.model.kind == "emulated":
            raise JobError(f'{key}: kind = "emulated" computes nothing; take out one of them')
    if job.model.weights is not None and job.model.kind == "emulated":
        raise JobError('[model] weights: kind = "emulated" has none; take out one of them')
    if job.model.weights is not None and job.model.provider is not None:
        raise JobError("[model] weights: what [model] provider builds has its own; load them in that function")
    if job.model.config and job.model.kind == "emulated":
        raise JobError('[model.config]: kind = "emulated" has no config; take out one of them')
    recompute = job.model.recompute
    if isinstance(recompute, list) and len(recompute) != job.shape.stages:
        raise JobError(f"[model] recompute: lists {len(recompute)} stages, the shape has {job.shape.stages} (P*V)")
    if isinstance(recompute, list) and job.times.profile == ANALYTIC:
        raise JobError("[model] recompute: the analytic model takes one word for all stages, not a list")
    if job.model.provider is not None and job.times.profile == ANALYTIC:
        raise JobError(
            "[times] profile: the analytic model does not know what [model] provider builds; measure it with"
            " recycle profile JOB -o FILE, and name that file"
        )


def _require_family(job: Sections) -> None:
    model = job.model
    if model.kind == "emulated":
        return
    if model.rotary_scaling is not None and not is_rotary(model):
        raise JobError(f'[model] rotary_scaling: kind = "{model.kind}" has learned positions; leave it out')
    fields = config_of(model)
    for key in ("kv_channels", "num_query_groups", "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk"):
        if not isinstance(fields.get(key, 1), int) or fields.get(key, 1) < 1:
            raise JobError(f"[model.config] {key}: must be a whole number of at least 1, got {fields[key]!r}")
    groups = int(fields.get("num_query_groups", model.heads))
    if model.provider is None and model.heads % groups:
        raise JobError(f"[model.config] num_query_groups: {groups} groups do not divide heads = {model.heads}")


def _require_data(job: Sections, data: DataSection, part: int = 0) -> None:
    """Raise JobError for keys that are impossible together, or that leave nothing in a part of a split."""
    if data.provider is not None and data.kind != "text":
        raise JobError(f'[data] provider: and kind = "{data.kind}" name the data twice; take out one of them')
    if data.kind == "megatron" and data.path is None:
        raise JobError('[data] path: kind = "megatron" needs the path of a .bin and .idx file, without the suffix')
    if data.kind != "gpt-dataset":
        defaults = DataSection()
        for key in OF_GPT_DATASET:
            if getattr(data, key) != getattr(defaults, key):
                raise JobError(f'[data] {key}: needs kind = "gpt-dataset"')
        return
    if (data.path is None) == (data.paths is None):
        raise JobError("[data] path: give the path of a .bin and .idx file without the suffix, or several as paths")
    if data.weights is not None and len(data.weights) != len(data.paths or [data.path]):
        raise JobError(f"[data] weights: {len(data.weights)} for {len(data.paths or [data.path])} paths")
    shares = [float(share) for share in data.split.split(",")]
    if part >= len(shares) or shares[part] <= 0:
        names = "training, the first", "validation, the second"
        raise JobError(f'[data] split: "{data.split}" gives {names[part]} of them, nothing')
    for key in ("mask_loss", "reset_positions"):
        if getattr(data, key) and data.end_of_document is None:
            raise JobError(f"[data] {key}: needs end_of_document, the number of the token that ends a document")
    if data.reset_positions and is_rotary(job.model):
        raise JobError(
            f'[data] reset_positions: kind = "{job.model.kind}" has rotary positions, which megatron-core counts'
            f" through a sample; leave it out"
        )


def _require_expert_parallel(job: Sections) -> None:
    count, experts = job.grid.tensor_parallel, config_of(job.model).get("num_moe_experts")
    if count == 1:
        raise JobError("[shape] expert_parallel: needs tensor_parallel of at least 2")
    if job.model.provider is not None or experts is None:
        raise JobError(
            '[shape] expert_parallel: is for mixtures of experts that recycle builds, such as kind = "mixtral"; set'
            " it to false"
        )
    if int(experts) % count:
        raise JobError(
            f"[model.config] num_moe_experts: {experts} is not divisible by tensor_parallel = {count}, and"
            " [shape] expert_parallel gives each tensor rank as many experts"
        )


def _require_tensor_parallel(job: Sections) -> None:
    model, count = job.model, job.grid.tensor_parallel
    ffn = model.ffn if model.ffn is not None else 4 * model.hidden
    groups = int(config_of(model).get("num_query_groups", model.heads))
    pad = f"pad it to {-(-model.vocabulary // count) * count}" if model.weights is None else "its weights have as many"
    if job.grid.sequence_parallel:
        if "num_moe_experts" in config_of(model):
            raise JobError(
                "[shape] sequence_parallel: the router of a mixture of experts looks at all tokens; set it to false"
            )
        if model.sequence % count:
            raise JobError(
                f"[model] sequence: {model.sequence} is not divisible by tensor_parallel = {count}, and"
                " [shape] sequence_parallel gives each tensor rank as many tokens"
            )
    for key, value, remedy in (
        ("heads", model.heads, "each tensor rank has as many"),
        ("ffn", ffn, "each tensor rank has as many units"),
        ("config num_query_groups", groups, "each tensor rank has as many"),
        ("vocabulary", model.vocabulary, pad),
    ):
        if value % count:
            raise JobError(f"[model] {key}: {value} is not divisible by tensor_parallel = {count}; {remedy}")


def _require_train(job: Sections) -> None:
    train = job.train
    _require_shards(job)
    if train.reduce_buckets > 1 and not job.planner.decoupled:
        raise JobError(
            f"[train] reduce_buckets: {train.reduce_buckets} buckets are summed while W's run, which"
            " [planner] decoupled = false does without; set it to true, or reduce_buckets to 1"
        )
    if train.minimum_learning_rate and train.schedule in (None, "constant"):
        raise JobError('[train] minimum_learning_rate: needs another schedule than "constant"')
    if train.decay is not None and train.schedule != "warmup-stable-decay":
        raise JobError('[train] decay: needs schedule = "warmup-stable-decay"')
    if train.decay is not None and train.decay > train.steps - train.warmup:
        raise JobError(
            f"[train] decay: {train.decay} iterations, but {train.steps - train.warmup} come after the warm-up"
        )
    if train.minimum_learning_rate > train.learning_rate:
        raise JobError(
            f"[train] minimum_learning_rate: {train.minimum_learning_rate:g} is above learning_rate ="
            f" {train.learning_rate:g}"
        )
    if train.schedule is not None and train.warmup >= train.steps:
        raise JobError(f"[train] warmup: {train.warmup} iterations, but steps = {train.steps}; schedule needs less")


def _require_shards(job: Sections) -> None:
    train = job.train
    if not train.sharded_optimizer:
        if train.optimizer_copies != type(train)().optimizer_copies:
            raise JobError("[train] optimizer_copies: needs sharded_optimizer = true")
        if train.copy_bytes is not None:
            raise JobError("[train] copy_bytes: needs sharded_optimizer = true")
        return
    if train.optimizer_copies > job.grid.pipelines:
        raise JobError(
            f"[train] optimizer_copies: {train.optimizer_copies}, but [shape] pipelines gives a stage"
            f" {job.grid.pipelines} host(s), each of which holds a shard once; use fewer"
        )


def _require_integrity(job: Sections) -> None:
    every, digests, kept = job.integrity.every, job.integrity.digests, job.train.checkpoint_every
    if not job.integrity.compares_states:
        return
    if job.grid.pipelines < 2:
        key, compares = "digests", "to compare its state with"
        if every:
            key, compares = "every", "that could run its work again"
        raise JobError(f"[integrity] {key}: with 1 pipeline no worker has a peer {compares}; write 0")
    key, interval = ("digests", digests) if digests else ("every", every)
    if isinstance(interval, int) and kept % interval:
        raise JobError(
            f"[integrity] {key}: {interval} does not divide [train] checkpoint_every = {kept}, so that checkpoints"
            " would be kept that nobody compares; change one of the two"
        )


def _require_store(job: Sections) -> None:
    membership = job.membership
    if membership.store != "launcher":
        try:
            parse_endpoints(membership.store)
        except JobError as error:
            raise JobError(f'[membership] store: {error}; or leave it at "launcher"') from None
    if (membership.etcd_certificate is None) != (membership.etcd_key is None):
        raise JobError("[membership] etcd_certificate and etcd_key: give both or neither")
