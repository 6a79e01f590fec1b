"""The sections of a job file: type, limits, default and meaning of every key.

`recycle train JOB --explain` and docs/reference/job.md print the lines below "Attributes:" of each section, in the form
`key (unit): meaning` (`recycle.job.reference`).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from itertools import accumulate
from typing import Annotated, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from recycle.errors import JobError
from recycle.job.profile import PerStage
from recycle.job.shape import MOST_BUCKETS, Placing, Shape

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
NotNegative = Annotated[float, Meta(ge=0)]
AboveZero = Annotated[float, Meta(gt=0)]
AtLeastOne = Annotated[float, Meta(ge=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
Seconds = NotNegative
DeadlineSeconds = Annotated[float, Meta(gt=0, le=1e6)]
"""Seconds, up to 11 days, the longest wait of the operating system."""
Share = Annotated[float, Meta(ge=0, le=1)]
ConfigValue = bool | int | float | str | list[bool | int | float | str]
"""Value of a field of megatron-core's TransformerConfig in a job file."""
ANALYTIC = "analytic"
"""`[times] profile` that selects the analytic model."""
AUTO = "auto"
"""Value of a size that stands for the device's memory."""


COMPARED_EVERY = 100
"""Iterations between comparisons of states, if neither job nor plan determines them."""


Recompute = Literal["none", "full", "layers", "selective"]
"""Recomputation of a stage in its backward: nothing, all of it, each layer by itself, or parts of each layer."""


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the sections: frozen, and unknown keys are refused."""


class ShapeSection(Section, frozen=True):
    """`[shape]`: size of the job.

    A worker consists of `tensor_parallel` processes, which fail as one (docs/guides/tensor-parallel.md).

    Attributes:
        pipelines: data-parallel replicas of the model, D.
        ranks: workers of a pipeline, P.
        micro_batches: micro-batches of each pipeline in an iteration, m; the most with `[train] rampup_batch_size`.
        chunks: stages of a worker, V; the model has P·V stages.
        placement: ranks that host the stages. "loop": rank r hosts stages r, r + P, and so on. "v", with two chunks:
            rank r hosts stages r and 2P - 1 - r, which needs less memory for the same speed. "auto": the one with the
            shorter period; a library or a run takes the one for the fault-free plan.
        tensor_parallel: processes of a worker, T. Each has a T-th of the attention heads, feed-forward units and
            vocabulary, which T must divide.
        sequence_parallel: whether each of the T processes holds a T-th of every sequence where a layer does not need
            the whole.
        expert_parallel: whether each of the T processes has a T-th of the experts of every layer; else all of them.
    """

    pipelines: Positive
    ranks: Positive
    micro_batches: Positive
    chunks: Positive = 1
    placement: Placing | Literal["auto"] = "loop"
    tensor_parallel: Positive = 1
    sequence_parallel: bool = False
    expert_parallel: bool = False


class TimesSection(Section, frozen=True):
    """`[times]`: times of each instruction, or the file that `recycle profile` wrote.

    All times are in one unit, which may be any: numbers are for planning alone.

    Attributes:
        forward (seconds or any unit): F of one micro-batch in a stage.
        backward_input (seconds or any unit): I of one micro-batch, the gradient of its input.
        backward_weight (seconds or any unit): W of one micro-batch, the gradients of the weights. B takes I + W.
        link (seconds or any unit): a transfer between two workers.
        step (seconds or any unit): reduction and optimizer step of a stage.
        profile: path of a profile file (docs/reference/profile-file.md), instead of the other keys; or "analytic",
            which computes seconds and bytes from `[model]` and `[analytic]`.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    link: Seconds = 0.0
    step: PerStage = 0.0
    profile: str | None = None


class MemorySection(Section, frozen=True):
    """`[memory]`: what a worker may hold.

    Attributes:
        limit: activations that a worker may hold, for all workers or per rank; or bytes, such as "20 GiB"; or "auto",
            the device's memory by the profile (docs/guides/memory.md). No limit when left out.
        activation: bytes of a micro-batch's activation in a stage, such as "2 GiB", for times written by hand.
        static: bytes of a stage's parameters, gradients and optimizer state, such as "30 GiB", for times written by
            hand; 0 when left out.
        weight_stash: share of an activation that is still held between I and W.
        offload: whether plans may copy activations to the host and back, to keep the limit ("auto")
            (docs/guides/memory.md).
        host_bandwidth: bytes per second that a worker copies to the host and, at the same time, back, such as "20 GiB";
            without `activation`, activations per unit of time. That of the profile when left out.
        state_limit: parameters and optimizer state that a worker of an elastic layout may hold, as a multiple of the
            largest fault-free stage; in bytes, or in units without a profile. With L layers per worker, layers move
            from 1 + 1/L on.
    """

    limit: int | list[int] | str | None = None
    activation: str | list[str] | None = None
    static: str | list[str] | None = None
    weight_stash: Share = 1.0
    offload: Literal["off", "auto"] = "off"
    host_bandwidth: AboveZero | str | None = None
    state_limit: AtLeastOne = 1.25


class PlannerSection(Section, frozen=True):
    """`[planner]`: effort per plan, and the techniques that plans may use.

    Attributes:
        seconds (seconds): longest search for a plan.
        steps: steps of the search, instead of seconds; the result then depends only on them and the seed.
        seed: seed of the search.
        decoupled: whether a backward may be split into I and W.
        staggered: whether each stage steps by itself; if false, all step together after a barrier.
        reroute: whether peers may run micro-batches of dead workers.
        ahead: failures that are planned for in advance; plans for other sets of dead workers are made when they are
            needed.
        move: whether a live worker may change its stage, if the gain over `iterations_between_changes` exceeds the time
            of copying the stage.
        layout: "elastic" if live workers may host other layers (docs/guides/elastic.md).
        move_when: whether layers move in a run only if the gain is worth the pause, or always.
        iterations_between_changes (iterations): expected iterations between failures. The default is three hours of
            iterations of ten seconds, as in Llama 3's training (arXiv 2407.21783).
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
    iterations_between_changes: AboveZero = 1000.0


class RotaryScaling(Section, frozen=True):
    """`[model] rotary_scaling` as a table, with the keys of a `config.json` of Hugging Face.

    Attributes:
        factor: ratio of the longest sequence to `original_max_position_embeddings`.
        rope_type: "linear" slows all angles down, "llama3" the slow ones, "yarn" the slow ones (arXiv 2309.00071).
        original_max_position_embeddings (tokens): length of the sequences before the extension.
        low_freq_factor, high_freq_factor: of "llama3", periods in the original length below which an angle is slowed
            down by the whole factor, and above which it is not.
        beta_slow, beta_fast: the same of "yarn".
        truncate: whether "yarn" rounds these limits to whole channels.
        attention_factor: factor of cosines and sines with "yarn"; 0.1 ln `factor` + 1 when left out.
    """

    factor: AtLeastOne
    rope_type: Literal["linear", "llama3", "yarn"] = "llama3"
    original_max_position_embeddings: Positive = 8192
    low_freq_factor: AboveZero = 1.0
    high_freq_factor: AboveZero = 4.0
    beta_slow: AboveZero = 1.0
    beta_fast: AboveZero = 32.0
    truncate: bool = True
    attention_factor: AboveZero | None = None


class ModelSection(Section, frozen=True):
    """`[model]`: a built-in model, or a model that a function builds (docs/guides/models.md).

    Attributes:
        kind: family of the model. "emulated" computes nothing and takes the times of the profile.
        provider: function that builds the stages, as "package.module:function".
        weights: path of a checkpoint to start from, of a run or an import; it also gives the sizes of the model.
        import_from: folders in which modules are looked for before Python's path; the folder of the job file when left
            out.
        config: further fields of megatron-core's TransformerConfig.
        seconds_per_unit (seconds): duration of one unit of `[times]`, for kind "emulated".
        layers: transformer layers.
        hidden: width of the model.
        heads: attention heads; they must divide `hidden`.
        sequence (tokens): length of a sequence.
        vocabulary (tokens): size of the vocabulary.
        ffn: width of the feed-forward part; 4 times `hidden` when left out.
        split: layers of each stage, divided evenly when left out. "auto" chooses them by the first plan within the
            memory limit, if the profile is "analytic" (docs/guides/plan.md#choose-the-split).
        tied: whether the output layer uses the weight of the embedding.
        dropout: dropout of the embedding and the residual stream.
        attention_dropout: dropout of the attention's weights; `dropout` when left out.
        rotary_base: base of rotary positions; not for kind "gpt".
        rotary_scaling: factor by which Llama 3.1 slows the slow rotary angles down, or a table with the parameters of
            another scaling (docs/guides/models.md); not for kind "gpt".
        rotary_percent: share of a head's channels that rotary positions turn.
        local_rotary_base: base of rotary positions in layers with a window; as in other layers when left out.
        recompute: what a stage runs again in its backward: nothing, everything ("full"), each layer by itself
            ("layers"), or parts of each layer ("selective"); one value, or one per stage.
        seed: seed of the initial weights.
    """

    kind: Literal["gpt", "llama", "mistral", "qwen", "qwen_moe", "mixtral", "gemma", "emulated"] = "gpt"
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
    dropout: BelowOne = 0.0
    attention_dropout: BelowOne | None = None
    rotary_base: AboveZero = 10000.0
    rotary_scaling: AtLeastOne | RotaryScaling | None = None
    rotary_percent: Annotated[float, Meta(gt=0, le=1)] = 1.0
    local_rotary_base: AboveZero | None = None
    recompute: Recompute | list[Recompute] = "none"
    seed: int = 1234


OF_GPT_DATASET = ("paths", "weights", "split", "samples", "cache", "end_of_document", "mask_loss", "reset_positions")
OF_DOCUMENTS = ("mask_loss", "reset_positions", "reset_attention")
"""Keys of `[data]` about the ends of documents."""
"""Keys of `[data]` that only its kind "gpt-dataset" has."""


class DataSection(Section, frozen=True):
    """`[data]`: what micro-batches hold (docs/guides/data.md).

    Attributes:
        kind: "text" is bytes of text, "megatron" Megatron-LM's token files, "gpt-dataset" the samples of
            megatron-core's GPTDataset in the order of Megatron-LM's own loop.
        provider: function that gives batches, as "package.module:function".
        path: a text file or folder; of token files the path without `.bin` and `.idx`. Python's standard library when
            left out.
        micro_batch_size (sequences): sequences of a micro-batch.
        seed: seed of the order.
        paths: several token files of a "gpt-dataset", without suffix.
        weights: weight of each of `paths`; by size when left out.
        split: shares of the documents of a "gpt-dataset" for training, validation and test.
        samples (sequences): samples for which the order of a "gpt-dataset" is made; as many as `[train] steps` needs
            when left out.
        cache: folder of the index of a "gpt-dataset"; next to the first file when left out.
        end_of_document: number of the token that ends a document.
        mask_loss: whether tokens that end a document are left out of the loss.
        reset_positions: whether positions start again after each document.
        reset_attention: whether a token attends only tokens of its document. A `provider` then gives batches with an
            `attention_mask` (docs/guides/models.md).
    """

    kind: Literal["text", "megatron", "gpt-dataset"] = "text"
    provider: str | None = None
    path: str | None = None
    micro_batch_size: Positive = 1
    seed: int = 0
    paths: Annotated[list[str], Meta(min_length=1)] | None = None
    weights: list[AboveZero] | None = None
    split: Annotated[str, Meta(pattern=r"^[0-9.]+(,[0-9.]+){0,2}$")] = "969,30,1"
    samples: Positive | None = None
    cache: str | None = None
    end_of_document: Count | None = None
    mask_loss: bool = False
    reset_positions: bool = False
    reset_attention: bool = False


class EvalSection(Section, frozen=True):
    """`[eval]`: evaluation on other data (docs/guides/data.md).

    Attributes:
        every (iterations): interval of evaluations, also after the last iteration; 0 for never.
        batches: batches of an evaluation, each as large as an iteration and always the same.
        data: data of the evaluation, with the keys of `[data]`; when left out, the validation part of a "gpt-dataset",
            or `[data]` with the next seed. `split = "0,1"` takes all of a "gpt-dataset".
    """

    every: Count = 0
    batches: Positive = 1
    data: DataSection | None = None


class GroupSection(Section, frozen=True):
    """`[[train.groups]]`: settings of some parameters; `weight_decay` and `optimizer` are those of `[train]` if None.

    Attributes:
        parameters: patterns of names in checkpoints, with `*`, `?` and `[...]`.
        learning_rate_scale: factor of the learning rate.
    """

    parameters: Annotated[list[str], Meta(min_length=1)]
    learning_rate_scale: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    weight_decay: NotNegative | None = None
    optimizer: str | None = None

    def has(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.parameters)


OPTIMIZERS = ("adamw", "muon", "sgd")
"""Optimizers that a job may name, besides classes."""


class TrainSection(Section, frozen=True):
    """`[train]`: the loss, the optimizer, the sum of gradients, and checkpoints.

    Attributes:
        steps (iterations): length of the run.
        rampup_batch_size (sequences): Megatron's ramp of the batch, as [first batch, increment, length of the ramp];
            the whole batch from the start when left out (docs/guides/data.md).
        learning_rate: highest learning rate.
        warmup (iterations): length of the linear warm-up.
        schedule: Megatron-LM's learning rate: from 0 to `learning_rate` in the warm-up, then to
            `minimum_learning_rate`. When left out, from `learning_rate` / `warmup` to `learning_rate`, then down half a
            cosine to a tenth of it.
        minimum_learning_rate: learning rate at the end of `schedule`.
        decay (iterations): length of the last part of "warmup-stable-decay"; a tenth of `steps` when left out.
        decay_shape: shape of that part.
        optimizer: "adamw", "muon" (AdamW for all but the matrices of layers), "sgd", or a class as
            "package.module:Class" (docs/guides/optimizers.md).
        groups: tables `[[train.groups]]` of parameters with their own `learning_rate_scale`, `weight_decay` and
            `optimizer`; the first table counts of which a pattern in `parameters` matches the name
            (docs/guides/optimizers.md).
        weight_decay: weight decay of matrices; norms and biases have none unless a group gives it to them.
        momentum: decay of the momentum of "muon" and "sgd".
        beta1: AdamW's decay of the first moment.
        beta2: AdamW's decay of the second moment.
        epsilon: AdamW's term in the denominator.
        clip: largest norm of the gradient; a larger one is scaled down.
        precision: type of weights, activations and messages. With "bf16" gradients are summed, and weights updated, in
            fp32.
        sharded_optimizer: whether the hosts of a stage share its optimizer state (docs/guides/sharded-optimizer.md).
        optimizer_copies: hosts that hold each part of a sharded optimizer state; all but one may die without loss.
        copy_bytes (bytes): most bytes that a worker sends another per iteration for copies of a sharded state;
            64 MiB when left out.
        accumulation: "exact" sums gradients to the same bits in any order; "fast" sums in fp32.
        reduce_buckets: parts in which a stage's gradients are summed over its hosts, each as soon as it is complete.
        undo: where the state before a staggered step is kept: on the device, or in pinned memory of the host.
        gradient_exponent: exponent e of the bound 2^e on the absolute gradient of a micro-batch, for "exact" sums.
        non_finite: whether the run ends, or skips the step, if a gradient is not finite in the repeated iteration, too.
        threads: threads that torch uses in a process.
        checkpoint_every (iterations): interval of checkpoints, also after the last iteration of a run of at least as
            many; 0 for never (docs/guides/checkpoints.md).
        checkpoint_keep: checkpoints that are kept.
        checkpoint_deadline (seconds): time after which a checkpoint that is not complete is given up.
        trace (iterations): iterations whose executed instructions are logged: all, every so many, or none. After each
            256 MiB of a worker's log, only every second one.
        loss: function that computes the loss of a micro-batch, as "package.module:function"; cross entropy when left
            out.
        per_token_loss: whether every token of an iteration has the same weight in the loss, as with Megatron-LM's
            `calculate_per_token_loss`. Otherwise every micro-batch has, whatever its mask.
    """

    steps: Positive = 30
    rampup_batch_size: Annotated[list[Positive], Meta(min_length=3, max_length=3)] | None = None
    learning_rate: AboveZero = 1e-3
    warmup: Count = 10
    schedule: Literal["constant", "linear", "cosine", "warmup-stable-decay"] | None = None
    minimum_learning_rate: NotNegative = 0.0
    decay: Positive | None = None
    decay_shape: Literal["linear", "cosine", "exponential", "minus-sqrt"] = "linear"
    optimizer: str = "adamw"
    groups: list[GroupSection] = field(default_factory=list)
    weight_decay: NotNegative = 0.01
    momentum: BelowOne = 0.95
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    epsilon: AboveZero = 1e-8
    clip: AboveZero = 1.0
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
    per_token_loss: bool = False

    def optimizers(self) -> dict[str, str]:
        """Return the optimizers that the section states, by key."""
        stated = {f"[train] groups[{place}].optimizer": group.optimizer for place, group in enumerate(self.groups)}
        return {"[train] optimizer": self.optimizer} | {key: text for key, text in stated.items() if text is not None}


class MembershipSection(Section, frozen=True):
    """`[membership]`: when a worker counts as dead, hung or slow, and where agents find the leader.

    The deadlines are explained in docs/explanations/recovery.md.

    Attributes:
        transport: what moves tensors: "gloo", "nccl", "staged", the name of an entry point, or
            "package.module:Class"; "auto" is NCCL on GPUs, else gloo (docs/guides/transports.md).
        store: where agents find their leader: "etcd://host:port[,host:port...]", with `etcds://` for TLS
            (docs/guides/cluster.md). "launcher" is a run on one machine; `recycle train` ignores an etcd.
        store_timeout (seconds): time without an answer after which etcd counts as lost.
        lease (seconds): term of the leader's role in etcd; an agent may lose its connection for half of it.
        etcd_user: user of etcd; an etcd on the network needs a user or a certificate.
        etcd_password_file: file with the password of that user; the environment variable RECYCLE_ETCD_PASSWORD when
            left out.
        etcd_ca: file with the authority that signed the certificates of etcd's servers.
        etcd_certificate: file with the certificate for etcd.
        etcd_key: file with the key of that certificate.
        insecure: whether an etcd on the network may be used without user and certificate.
        ports: first and last of the ports on which agents and workers listen (docs/guides/cluster.md); any free port
            when left out.
        heartbeat (seconds): interval of a process's heartbeats.
        dead_after (seconds): time without a heartbeat, or without an answer on a connection, after which a worker is
            dead.
        hung_after (seconds): time without progress after which a worker hangs.
        hung_factor: a worker hangs only after this multiple of the longest recent operation of its kind, too.
        warm_up (seconds): time that the first operation of each kind may take.
        form_timeout (seconds): time in which the groups of a generation must form.
        transport_timeout (seconds): time after which a wait of the transport fails.
        script_timeout (seconds): time that a script of yours may take between two calls of its session while other
            workers wait for it, such as for a checkpoint.
        start_deadline (seconds): time in which all workers must have started; a script of yours, imports, datasets and
            checkpoint included.
        rejoin_deadline (seconds): time that a run waits for a worker that comes back, or for missing agents.
        grace (seconds): time in which a run or an agent ends after a signal, with a checkpoint; set it to what the
            scheduler waits before it kills.
        drift: share by which a worker's times may differ from its peers', or a stage's from the profile, before a new
            plan is made; 0 for never (docs/guides/profile.md).
        drift_iterations (iterations): window of which more than half must show the difference.
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
    ports: tuple[Port, Port] | None = None
    heartbeat: DeadlineSeconds = 0.25
    dead_after: DeadlineSeconds = 4.0
    hung_after: DeadlineSeconds = 4.0
    hung_factor: AtLeastOne = 10.0
    warm_up: DeadlineSeconds = 60.0
    form_timeout: DeadlineSeconds = 20.0
    transport_timeout: DeadlineSeconds = 300.0
    script_timeout: DeadlineSeconds = 600.0
    start_deadline: DeadlineSeconds = 600.0
    rejoin_deadline: DeadlineSeconds = 120.0
    grace: DeadlineSeconds = 120.0
    drift: NotNegative = 0.15
    drift_iterations: Positive = 8


class ClusterSection(Section, frozen=True):
    """`[cluster]`: how workers are placed on nodes, and how often one is started again.

    Attributes:
        workers_per_node: workers of a node. Peers of a stage are never all on one node.
        restarts: processes of a worker after its first; a worker that fails more often stays out.
        gpu_checks (seconds): interval in which NVML is asked for the health of the GPUs, if nvidia-ml-py is installed
            (docs/guides/transports.md); 0 for never.
    """

    workers_per_node: Positive = 1
    restarts: Count = 3
    gpu_checks: Seconds = 30.0


class IntegritySection(Section, frozen=True):
    """`[integrity]`: comparisons that find wrong bits in parameters, optimizer state and results.

    `digests` must divide `[train] checkpoint_every`, so that every checkpoint was compared. Without `digests`, `every`
    compares states once everything was replayed; "gaps" in a plan without room, every `[train] checkpoint_every`
    iterations (100 without checkpoints). See docs/explanations/recovery.md.

    Attributes:
        digests (iterations): interval of comparisons of states; 0 leaves it to `every`.
        every (iterations): interval in which a peer runs each micro-batch again once; "gaps": one per worker and
            iteration, where the schedule has room; 0 for never.
    """

    digests: Count = 0
    every: Count | Literal["gaps"] = 0

    @property
    def compares_states(self) -> bool:
        return bool(self.digests or self.every)


class LoggingSection(Section, frozen=True):
    """`[logging]`: experiment trackers that show the curves of a run (docs/guides/logging.md).

    Attributes:
        tensorboard: whether TensorBoard's files are written to `tensorboard/` in the run directory.
        wandb: project at Weights & Biases.
        wandb_mode: "offline" keeps what is logged in the run directory until `wandb sync`.
        peak_flops (operations per second): the most that the device of a process computes, for the model's share of it
            (MFU); that of the first GPU when left out and known.
        prometheus: where the run's metrics are served to Prometheus (docs/guides/monitoring.md): a port of the loopback
            interface, or "ADDRESS:PORT".
        otlp: URL of an OpenTelemetry collector that gets the run's metrics over HTTP, "http://host:4318".
    """

    tensorboard: bool = False
    wandb: str | None = None
    wandb_mode: Literal["online", "offline"] = "online"
    prometheus: int | str | None = None
    otlp: str | None = None
    peak_flops: AboveZero | None = None


class AnalyticSection(Section, frozen=True):
    """`[analytic]`: the GPUs of the analytic model, for `[times] profile = "analytic"`.

    Attributes:
        gpu: model of the GPU.
        achieved: share of the GPU's peak that kernels reach: 0.44 to 0.52 for GPTs of 18 to 1,000 billion parameters on
            A100 (Narayanan et al. 2021).
        activations: what is kept between F and I: all, all but the products of attention ("selective"), or the input of
            the layer ("full").
        link_bandwidth (bytes per second): bandwidth of one GPU between nodes; of the GPU's usual network when left out.
        link_latency (seconds): latency of a transfer between nodes.
    """

    gpu: Literal["A100-40GB", "A100-80GB", "H100-80GB"] = "A100-80GB"
    achieved: Annotated[float, Meta(gt=0, le=1)] = 0.5
    activations: Literal["all", "selective", "full"] = "selective"
    link_bandwidth: AboveZero | None = None
    link_latency: Seconds = 10e-6


class PausesSection(Section, frozen=True):
    """`[pauses]`: what a change of the live nodes costs in `recycle compare`, whatever the system.

    Attributes:
        detect (seconds): time until a failure is noticed.
        plan (seconds): time until it is known what runs next.
        rebuild (seconds): time until groups of workers can communicate again.
        start (seconds): time until a node that came back can be used.
        restart (seconds): time of a restart of all processes before they read a checkpoint.
        storage_bandwidth (bytes per second): rate at which a process reads its part of a checkpoint.
        snapshot (seconds): time that training stops for a checkpoint, besides copying the state.
        snapshot_bandwidth (bytes per second): rate at which a worker copies its state to the host.
        notice (seconds): time until wrong results are noticed if nothing compares them, such as by a NaN.
    """

    detect: Seconds = 5.0
    plan: Seconds = 0.0
    rebuild: Seconds = 2.0
    start: Seconds = 45.0
    restart: Seconds = 60.0
    storage_bandwidth: AboveZero = 1e9
    snapshot: Seconds = 1.0
    snapshot_bandwidth: AboveZero = 10e9
    notice: Seconds = 4320.0


@cache
def _ramp(start: int, increment: int, samples: int, whole: int) -> list[int]:
    """Return the sequences before each iteration, up to and including the first of the whole batch.

    As with Megatron's `--rampup-batch-size`: the batch of an iteration is `start`, plus `increment` for each full share
    of `samples` before it, where all increments have equal shares.
    """
    share, batches, consumed = samples / max((whole - start) // increment, 1), list[int](), 0
    while (batch := start + int(consumed / share) * increment) < whole:
        batches.append(batch)
        consumed += batch
    return list(accumulate(batches, initial=0))


class Sections(Struct, frozen=True, forbid_unknown_fields=True):
    """All sections of a job file, and values derived from them.

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
    logging: LoggingSection = LoggingSection()
    analytic: AnalyticSection = AnalyticSection()
    pauses: PausesSection = PausesSection()

    @property
    def shape(self) -> Shape:
        grid = self.grid
        placement: Placing = "v" if grid.placement == "v" else "loop"
        return Shape(grid.pipelines, grid.ranks, grid.micro_batches, grid.chunks, placement=placement)

    def named_functions(self) -> dict[str, str]:
        """Return the user's functions and classes that the job names, by key."""
        others = self.evaluation.data
        stated = {
            "[model] provider": self.model.provider,
            "[data] provider": self.data.provider,
            "[eval] data.provider": None if others is None else others.provider,
            "[train] loss": self.train.loss,
            **{key: name for key, name in self.train.optimizers().items() if name not in OPTIMIZERS},
        }
        return {key: name for key, name in stated.items() if name is not None}

    def sequences_before(self, iteration: int) -> int:
        """Return the sequences that training has used before an iteration."""
        whole = self.shape.global_micro_batches * self.data.micro_batch_size
        ramp = self.train.rampup_batch_size
        before = [0] if ramp is None else _ramp(*ramp, whole)
        return before[min(iteration, len(before) - 1)] + max(0, iteration + 1 - len(before)) * whole

    def sequences_in(self, iteration: int) -> int:
        return self.sequences_before(iteration + 1) - self.sequences_before(iteration)

    def micro_batches_in(self, iteration: int) -> int:
        """Return the micro-batches of each pipeline in an iteration."""
        return self.sequences_in(iteration) // (self.data.micro_batch_size * self.shape.pipelines)

    @property
    def evaluation_data(self) -> DataSection:
        """Data of evaluations: `[eval] data`, or its default."""
        data = self.evaluation.data
        if data is not None:
            return replace(data, micro_batch_size=self.data.micro_batch_size)
        if self.data.kind == "gpt-dataset":
            return replace(self.data, samples=None)
        return replace(self.data, seed=self.data.seed + 1)

    def is_evaluated(self, step: int, is_last: bool) -> bool:
        every = self.evaluation.every
        return every > 0 and (is_last or (step + 1) % every == 0)

    def compared_every(self, rounds: int) -> int:
        """Return the iterations between comparisons of the hosts' states; 0 for never.

        Args:
            rounds: iterations in which the plan replays everything once; 0 if it replays nothing.
        """
        if not self.integrity.compares_states:
            return 0
        return self.integrity.digests or rounds or self.train.checkpoint_every or COMPARED_EVERY

    @property
    def ties(self) -> tuple[tuple[int, ...], ...]:
        """Groups of stages that share a weight and reduce it together."""
        return self.ties_among(self.shape.stages)

    def ties_among(self, stages: int) -> tuple[tuple[int, ...], ...]:
        return ((0, stages - 1),) if self.model.tied and stages > 1 else ()

    def recompute_of(self, stage: int) -> Recompute:
        recompute = self.model.recompute
        return recompute[stage] if isinstance(recompute, list) else recompute

    def layers_per_stage(self) -> list[int]:
        """Return the transformer layers of each stage. Raises JobError when they neither divide nor are stated."""
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
