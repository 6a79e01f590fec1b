"""The sections of a job file: every key with its type, its limits and its default, and what it means."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from recycle.errors import JobError
from recycle.profile import PerStage
from recycle.shape import MOST_BUCKETS, Shape

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Meta(ge=0)]
DeadlineSeconds = Annotated[float, Meta(gt=0, le=1e6)]
"""Seconds, up to 11 days: more than that no wait of the operating system takes."""
Share = Annotated[float, Meta(ge=0, le=1)]
ConfigValue = bool | int | float | str | list[bool | int | float | str]
"""Of a field of megatron-core's TransformerConfig, as a job file can state it."""
ANALYTIC = "analytic"
"""In place of a profile's file."""
AUTO = "auto"
"""In place of bytes: what the device has."""


Recompute = Literal["none", "full", "layers", "selective"]
"""What of a stage is run again in its backward: nothing, all of it, each layer by itself, or parts of each layer."""


class ShapeSection(Struct, frozen=True, forbid_unknown_fields=True):
    """`[shape]`: size of the job.

    With `tensor_parallel` T a worker is T processes, each with a T-th of its stages' attention heads, feed-forward
    units and vocabulary, which T must divide. They fail as one: see docs/tensor-parallel.md. With `sequence_parallel`
    each also holds a T-th of every sequence wherever a layer does not need the whole. With `expert_parallel` each has a
    T-th of the experts of every layer, whole; else each has all of them.
    """

    pipelines: Positive
    ranks: Positive
    micro_batches: Positive
    chunks: Positive = 1
    tensor_parallel: Positive = 1
    sequence_parallel: bool = False
    expert_parallel: bool = False


class TimesSection(Struct, frozen=True, forbid_unknown_fields=True):
    """`[times]`: seconds (or any one unit) of each instruction; or the file that `recycle profile` wrote.

    `profile = "analytic"` computes seconds and bytes from `[model]` and `[analytic]` (see `recycle.analytic`).
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    link: Seconds = 0.0
    step: PerStage = 0.0
    profile: str | None = None


class MemorySection(Struct, frozen=True, forbid_unknown_fields=True):
    """`[memory]`: what a worker may hold. A number or a list per rank, in activations; or text such as "20 GiB".

    `limit = "auto"` is what a worker's device has, as the profile says: with a measured one what was free on the GPU
    that it was measured on, or on a CPU the machine's memory in equal parts for the workers that the job starts on a
    machine; with the analytic one the GPU's memory. A tenth is left to what is not counted.

    `state_limit` is what a worker of an elastic layout may hold of parameters and optimizer state, over what the
    largest fault-free stage has; without bytes in the profile that counts units of the model. A worker takes on whole
    layers: with L layers per worker, layers move from 1 + 1/L on.
    """

    limit: int | list[int] | str | None = None
    activation: str | list[str] | None = None
    static: str | list[str] | None = None
    weight_stash: Share = 1.0
    state_limit: Annotated[float, Meta(ge=1.0)] = 1.25


class PlannerSection(Struct, frozen=True, forbid_unknown_fields=True):
    """`[planner]`: effort per plan, and which of the three techniques may be used.

    `ahead` failures are planned for while training runs; a set of dead workers beyond that is planned when it happens.

    With `move` a live worker may change stage where that pays: what it gains per iteration, times
    `iterations_between_changes`, must exceed the seconds of copying the stage. A change every 1,000 iterations is what
    large jobs see: 419 unexpected interruptions in 54 days (Llama 3, arXiv 2407.21783) are one in three hours, at some
    ten seconds an iteration.

    With `layout = "elastic"` live workers host other layers where that is faster than re-routing alone
    (docs/elastic.md). While a job trains layers move when that is "worth" its pause by the same rule, or with
    `move_when = "always"` whenever there is a faster layout.
    """

    seconds: Annotated[float, Meta(ge=0.01)] = 30.0
    steps: Positive | None = None
    seed: int = 0
    decoupled: bool = True
    staggered: bool = True
    reroute: bool = True
    ahead: Count = 2
    move: bool = False
    layout: Literal["fixed", "elastic"] = "fixed"
    move_when: Literal["worth", "always"] = "worth"
    iterations_between_changes: Annotated[float, Meta(gt=0)] = 1000.0


class ModelSection(Struct, frozen=True, forbid_unknown_fields=True):
    """`[model]`: a GPT, or a model of another family. `split` lists the layers of each stage; else they divide evenly.

    With `split = "auto"` the slowest stage is as fast as can be: with a profile, measured or analytic, by the analytic
    model's seconds, which put the embedding on the first layer and the head on the last; else all layers are alike.
    A job's file in the run directory has the list that this came to.

    With `tied` the output layer uses the embedding's weight: first and last stage hold it and reduce together.
    `dropout` is that of the embedding and the residual stream, `attention_dropout` (the same when left out) that of the
    attention's weights. With `recompute = "full"` a stage keeps only its input between F and I, which runs the forward
    again: an activation then weighs a message, and I takes F's time on top. What W needs is held from I on as ever, so
    `[planner] decoupled = false` goes with it where memory is short. With "layers" each layer is run again by itself,
    with "selective" parts of it (`[model.config] recompute_modules`); a list states it for each stage.

    `kind = "emulated"` computes nothing and takes `seconds_per_unit` for each unit of `[times]`.

    Of the families (`recycle.architecture`, docs/models.md) "gpt" has learned positions, the others rotary ones, whose
    angles fall from 1 to 1 / `rotary_base`; `rotary_scaling` is the factor by which Llama 3.1 slows the slow ones down.

    `provider = "package.module:function"` builds the stages in place of recycle (docs/models.md); it is looked for in
    the folders `import_from`, that of the job file when left out, and then on Python's path. `[model.config]` has
    further fields of megatron-core's TransformerConfig.

    `weights` is a checkpoint that training starts from, one of a run or one that `recycle import-hf` made; the model's
    sizes are then those of its weights and can be left out.
    """

    kind: Literal["gpt", "llama", "qwen", "mixtral", "emulated"] = "gpt"
    provider: str | None = None
    weights: str | None = None
    import_from: list[str] | None = None
    config: dict[str, ConfigValue] = field(default_factory=dict)
    seconds_per_unit: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    layers: Positive = 4
    hidden: Positive = 64
    heads: Positive = 4
    sequence: Positive = 64
    vocabulary: Positive = 256
    ffn: Positive | None = None
    split: list[Annotated[int, Meta(ge=0)]] | Literal["auto"] | None = None
    tied: bool = False
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    attention_dropout: Annotated[float, Meta(ge=0, lt=1)] | None = None
    rotary_base: Annotated[float, Meta(gt=0)] = 10000.0
    rotary_scaling: Annotated[float, Meta(ge=1)] | None = None
    recompute: Recompute | list[Recompute] = "none"
    seed: int = 1234


OF_GPT_DATASET = ("paths", "weights", "split", "samples", "cache", "end_of_document", "mask_loss", "reset_positions")
"""Keys of `[data]` that only its kind "gpt-dataset" has."""


class DataSection(Struct, frozen=True, forbid_unknown_fields=True):
    """`[data]`: a text file or a folder of text; without `path`, the source code of Python's standard library.

    With `kind = "megatron"`, Megatron-LM's token files `<path>.bin` and `<path>.idx`, which `recycle tokenize` makes.
    With `kind = "gpt-dataset"` the samples of megatron-core's GPTDataset in the order of Megatron-LM's own loop, of one
    such file (`path`) or a blend of several (`paths`, by `weights`; by their sizes when left out). `split` has the
    shares of the documents for training, validation and test. The order is that of a run of
    `samples`, as many as `[train] steps` needs when left out. `mask_loss` leaves tokens that end a document
    (`end_of_document`, its number) out of the loss; with `reset_positions` positions begin anew behind them.

    With `provider = "package.module:function"`, batches of one's own (docs/models.md).
    """

    kind: Literal["text", "megatron", "gpt-dataset"] = "text"
    provider: str | None = None
    path: str | None = None
    micro_batch_size: Positive = 1
    seed: int = 0
    paths: Annotated[list[str], Meta(min_length=1)] | None = None
    weights: list[Annotated[float, Meta(gt=0)]] | None = None
    split: Annotated[str, Meta(pattern=r"^[0-9.]+(,[0-9.]+){0,2}$")] = "969,30,1"
    samples: Positive | None = None
    cache: str | None = None
    end_of_document: Count | None = None
    mask_loss: bool = False
    reset_positions: bool = False


class EvalSection(Struct, frozen=True, forbid_unknown_fields=True):
    """`[eval]`: after which steps the loss on other data is computed, and on how many of them (docs/data.md).

    After every `every` steps, 0 for never, and after the last one. `batches` counts as iterations do: each is as many
    micro-batches as an iteration has. They are the same ones each time, and dropout is off.

    `data` has the keys of `[data]`. Left out, it is the validation part of the `split` of a "gpt-dataset"; of any other
    kind, whose data have no part that is not trained on, `[data]` itself with the next `seed`. A "gpt-dataset" that is
    named here also gives its validation part: `split = "0,1"` takes all of it. Rows per micro-batch are those of
    `[data]`.
    """

    every: Count = 0
    batches: Positive = 1
    data: DataSection | None = None


class TrainSection(Struct, frozen=True, forbid_unknown_fields=True):
    """`[train]`: the loss, the optimizer (AdamW), how gradients are summed, and how often the state is kept.

    `loss = "package.module:function"` gives a micro-batch's sum and count of losses (docs/models.md); without it, that
    is the cross entropy of the labels, over the tokens that the batch's `loss_mask`, if any, has.

    With `schedule` the learning rate is Megatron-LM's: from 0 over `warmup` iterations to `learning_rate`, then
    constant, or down a line or half a cosine to `minimum_learning_rate` at iteration `steps`; "warmup-stable-decay" is
    constant until the last `decay` of `steps` (a tenth of them when left out), in which it goes down as `decay_shape`
    says. Without `schedule`, from `learning_rate` / `warmup` on and down half a cosine to a tenth of it in the last of
    `steps`.

    With `precision = "bf16"` weights, activations and messages are bf16; gradients are summed, and the weights updated,
    from fp32 copies.

    With `sharded_optimizer` the hosts of a stage share its optimizer state, and each part of it is held by
    `optimizer_copies` of them: so many deaths but one lose nothing (docs/zero1.md). After a death copies are made while
    training goes on; `copy_bytes` is the most that one worker sends another for that in an iteration, as many as fit
    beside it when left out.

    A staggered step may have to be taken back, so the state before it is kept, 12 bytes per parameter or 14 in bf16:
    with `undo = "host"` in pinned memory of the host, to which it is copied while the worker waits for others.

    With `reduce_buckets` = N the gradients of a stage are summed over its hosts in N buckets, each as soon as the last
    W's have computed it, while they go on with the next (docs/write-a-schedule.md). The bits are those of one bucket.

    A checkpoint is written every `checkpoint_every` iterations, 0 for never, and at the end of a run that has as many;
    the last `checkpoint_keep` stay. By Young's rule (CACM 17(9), 1974) the best interval is sqrt(2 C T) for a stall of
    C and a loss every T: with iterations of 10 s, a stall of 1 s and all hosts of a stage, or the launcher, lost once
    in five days it is 93 iterations. One that is not complete after `checkpoint_deadline` seconds is given up.

    `trace` says of which iterations the executed instructions are logged: "all", every so many, or "off". A worker's
    log that has grown by 256 MiB keeps every second iteration from there on, and again after each 256 MiB more.
    """

    steps: Positive = 30
    learning_rate: Annotated[float, Meta(gt=0)] = 1e-3
    warmup: Count = 10
    schedule: Literal["constant", "linear", "cosine", "warmup-stable-decay"] | None = None
    minimum_learning_rate: Annotated[float, Meta(ge=0)] = 0.0
    decay: Positive | None = None
    decay_shape: Literal["linear", "cosine", "exponential", "minus-sqrt"] = "linear"
    weight_decay: Annotated[float, Meta(ge=0)] = 0.01
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    epsilon: Annotated[float, Meta(gt=0)] = 1e-8
    clip: Annotated[float, Meta(gt=0)] = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    sharded_optimizer: bool = False
    optimizer_copies: Positive = 2
    copy_bytes: Positive | None = None
    accumulation: Literal["exact", "fast"] = "exact"
    reduce_buckets: Annotated[int, Meta(ge=1, le=MOST_BUCKETS)] = 1
    undo: Literal["device", "host"] = "device"
    gradient_exponent: Annotated[int, Meta(ge=-20, le=30)] = 6
    non_finite: Literal["skip", "fatal"] = "fatal"
    threads: Positive = 1
    checkpoint_every: Count = 100
    checkpoint_keep: Positive = 2
    checkpoint_deadline: DeadlineSeconds = 600.0
    trace: Positive | Literal["all", "off"] = "all"
    loss: str | None = None


class MembershipSection(Struct, frozen=True, forbid_unknown_fields=True):
    """`[membership]`: who counts as alive, in seconds; and as slow; and the store that knows it.

    `dead_after` without a heartbeat, or without an answer on a connection, a worker is dead or cut off. It hangs when
    an operation takes longer than `hung_after` and than `hung_factor` times the longest of its kind lately; the first
    of its kind may take `warm_up`. Each is argued in docs/faults.md.

    A worker that takes longer than its peers by more than the share `drift` in most of `drift_iterations` iterations,
    or a stage that does than its profile says, is planned for anew while training goes on; 0 switches that off.

    `transport` moves tensors: "gloo", "nccl", or "package.module:Class" of another plug-in; "auto" is NCCL where stages
    compute on GPUs, gloo elsewhere (docs/transports.md).

    `store` is "launcher", or "etcd://host:port[,host:port...]" (`etcds://` for TLS). A store that is reached over the
    network wants `etcd_user` with a password, from `etcd_password_file` or the environment (RECYCLE_ETCD_PASSWORD), or
    `etcd_certificate` and `etcd_key`, unless `insecure` says that the network keeps strangers out. `etcd_ca` names the
    authority that signed the servers. An etcd that does not answer for `store_timeout` seconds is gone for good. An
    agent's presence there has a term of `lease` seconds: three elections of etcd's defaults, which take up to two each.

    A run or an agent that is told to end by a signal has ended after `grace` seconds, with a checkpoint of the last
    committed step if no further step was committed by then. Set it to what the scheduler waits before it kills.
    """

    transport: str = "auto"
    store: str = "launcher"
    store_timeout: DeadlineSeconds = 20.0
    lease: Annotated[int, Meta(ge=2, le=3600)] = 6
    etcd_user: str | None = None
    etcd_password_file: str | None = None
    etcd_ca: str | None = None
    etcd_certificate: str | None = None
    etcd_key: str | None = None
    insecure: bool = False
    heartbeat: DeadlineSeconds = 0.25
    dead_after: DeadlineSeconds = 4.0
    hung_after: DeadlineSeconds = 4.0
    hung_factor: Annotated[float, Meta(ge=1)] = 10.0
    warm_up: DeadlineSeconds = 60.0
    form_timeout: DeadlineSeconds = 20.0
    transport_timeout: DeadlineSeconds = 300.0
    start_deadline: DeadlineSeconds = 180.0
    rejoin_deadline: DeadlineSeconds = 120.0
    grace: DeadlineSeconds = 120.0
    drift: Annotated[float, Meta(ge=0)] = 0.15
    drift_iterations: Positive = 8


class ClusterSection(Struct, frozen=True, forbid_unknown_fields=True):
    """`[cluster]`: how workers lie on nodes, and how often one that died is started again by its node's agent.

    `restarts` counts all processes of a worker after its first. A worker that fails more often stays out.
    """

    workers_per_node: Positive = 1
    restarts: Count = 3


class IntegritySection(Struct, frozen=True, forbid_unknown_fields=True):
    """`[integrity]`: whether hosts that should hold the same are compared, so that nothing wrong goes unnoticed.

    With `digests` = N the hosts of each stage compare their parameters and optimizer state every N iterations, and in
    the first iteration of each generation; 0 for never. The last state on which all agreed is kept in memory, twice the
    state beside it, and training goes back to it where they do not (docs/faults.md). N must divide `[train]
    checkpoint_every`, so that no checkpoint is gone back to that was not compared.

    With `every` = N each micro-batch of each stage is run again by a peer once in N iterations, and what comes of it is
    compared; states are compared every N iterations, too. "gaps" does so where the schedule has room for it, one of
    each worker in an iteration, and 0 never.
    """

    digests: Count = 0
    every: Count | Literal["gaps"] = 0

    @property
    def compares_states(self) -> bool:
        """Whether hosts compare their states, and keep them."""
        return bool(self.digests or self.every)


class DialsSection(Struct, frozen=True, forbid_unknown_fields=True):
    """`[dials]`: where the curves of a run are shown beside its run directory; see docs/dials.md.

    `tensorboard` writes its files to `tensorboard/` in the run directory. `wandb` is a project of Weights & Biases;
    with `wandb_mode = "offline"` what is logged stays in `wandb/` there until `wandb sync`. `peak_flops` is what one
    process's device computes per second at most, for the share of it that the model uses (MFU); that of the first GPU
    where it is a known one and this is left out.
    """

    tensorboard: bool = False
    wandb: str | None = None
    wandb_mode: Literal["online", "offline"] = "online"
    peak_flops: Annotated[float, Meta(gt=0)] | None = None


class AnalyticSection(Struct, frozen=True, forbid_unknown_fields=True):
    """`[analytic]`: the GPUs of the analytic model, with `[times] profile = "analytic"`.

    `achieved` is the share of the GPU's peak that every kernel reaches: 44 to 52 % for GPTs of 18 to 1,000 billion
    parameters on A100 (Narayanan et al. 2021). `activations` says what is kept between F and I: "all", all but
    attention's products ("selective"), or the layer's input ("full"). `link_bandwidth` is in bytes per second of one
    GPU between nodes; the GPU's usual network if left out.
    """

    gpu: Literal["A100-40GB", "A100-80GB", "H100-80GB"] = "A100-80GB"
    achieved: Annotated[float, Meta(gt=0, le=1)] = 0.5
    activations: Literal["all", "selective", "full"] = "selective"
    link_bandwidth: Annotated[float, Meta(gt=0)] | None = None
    link_latency: Seconds = 10e-6


class PausesSection(Struct, frozen=True, forbid_unknown_fields=True):
    """`[pauses]`: what a change of the live nodes costs whichever system makes it, in seconds, for `recycle compare`.

    A failure is noticed after `detect`; `plan` passes until it is known what runs next, `rebuild` until groups of
    workers can talk again. A node that came (back) can be used after `start`. A `restart` of all processes takes so
    long before they read a checkpoint, each its part at `storage_bandwidth` bytes per second. Training stops for
    `snapshot` and while workers copy their state to the host at `snapshot_bandwidth`; storage is written behind that.
    """

    detect: Seconds = 5.0
    plan: Seconds = 0.0
    rebuild: Seconds = 2.0
    start: Seconds = 45.0
    restart: Seconds = 60.0
    storage_bandwidth: Annotated[float, Meta(gt=0)] = 1e9
    snapshot: Seconds = 1.0
    snapshot_bandwidth: Annotated[float, Meta(gt=0)] = 10e9


class Sections(Struct, frozen=True, forbid_unknown_fields=True):
    """All sections of a job file, and what follows from their sizes alone.

    Attributes:
        grid: the `[shape]` section as written; `shape` gives the `Shape`.
        evaluation: the `[eval]` section.
    """

    grid: ShapeSection = field(name="shape")
    times: TimesSection = TimesSection()
    memory: MemorySection = MemorySection()
    planner: PlannerSection = PlannerSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    evaluation: EvalSection = field(name="eval", default=EvalSection())
    membership: MembershipSection = MembershipSection()
    cluster: ClusterSection = ClusterSection()
    integrity: IntegritySection = IntegritySection()
    dials: DialsSection = DialsSection()
    analytic: AnalyticSection = AnalyticSection()
    pauses: PausesSection = PausesSection()

    @property
    def shape(self) -> Shape:
        grid = self.grid
        return Shape(grid.pipelines, grid.ranks, grid.micro_batches, grid.chunks)

    @property
    def evaluation_data(self) -> DataSection:
        """What evaluations read: `[eval] data`, or what it stands for when left out."""
        data = self.evaluation.data
        if data is not None:
            return replace(data, micro_batch_size=self.data.micro_batch_size)
        if self.data.kind == "gpt-dataset":
            return replace(self.data, samples=None)
        return replace(self.data, seed=self.data.seed + 1)

    def is_evaluated(self, step: int, is_last: bool) -> bool:
        """Whether an evaluation follows this step."""
        every = self.evaluation.every
        return every > 0 and (is_last or (step + 1) % every == 0)

    @property
    def ties(self) -> tuple[tuple[int, ...], ...]:
        """Groups of stages that share a weight, and so reduce together."""
        return self.ties_among(self.shape.stages)

    def ties_among(self, stages: int) -> tuple[tuple[int, ...], ...]:
        """`ties` where the model is cut into so many stages."""
        return ((0, stages - 1),) if self.model.tied and stages > 1 else ()

    def recompute_of(self, stage: int) -> Recompute:
        """What of a stage is run again in its backward."""
        recompute = self.model.recompute
        return recompute[stage] if isinstance(recompute, list) else recompute

    def layers_per_stage(self) -> list[int]:
        """Transformer layers of each stage, first to last. Raises JobError when they neither divide nor are stated."""
        stages, model = self.shape.stages, self.model
        if isinstance(model.split, str):
            raise JobError('[model] split: "auto" is resolved where a job is read: use Job.load or Job.from_toml')
        if model.split is not None:
            if len(model.split) != stages or sum(model.split) != model.layers:
                raise JobError(
                    f"[model] split: {model.split} must list {stages} stages (P*V) that sum to layers = {model.layers}"
                )
            return list(model.split)
        if model.layers % stages:
            raise JobError(
                f"[model] layers: {model.layers} layers do not divide over {stages} stages (P*V);"
                f" change layers or state split = [...] with {stages} numbers that sum to {model.layers}"
            )
        return [model.layers // stages] * stages
