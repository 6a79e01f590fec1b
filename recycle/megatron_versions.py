"""Names of megatron-core and torch that are private or differ between versions; no other module of recycle uses them.

megatron-core 0.16.1 to 0.19 and torch 2.13 to 2.15 are supported; other versions run with a warning. Importing this
module loads neither torch nor megatron-core. Functions that replace something of megatron-core act on the whole
process.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any, Literal

from recycle.errors import RunError, VersionWarning

if TYPE_CHECKING:
    import torch

SUPPORTED: Mapping[str, tuple[str, str]] = {"megatron-core": ("0.16.1", "0.20"), "torch": ("2.13", "2.16")}
"""Package -> first supported version, and first later version that is not."""
COMPILER, _LINEAR_HOOK = "torch._dynamo", "_forward_impl"  # torch imports the first one to make an optimizer


def installed_versions() -> dict[str, str]:
    """Version by package, of the packages in `SUPPORTED`."""
    import megatron.core
    import torch

    return {"megatron-core": megatron.core.__version__, "torch": torch.__version__}


@cache
def warn_unsupported_versions() -> None:
    """Warn of installed versions outside of `SUPPORTED`, once per process."""
    for package, version in installed_versions().items():
        first, end = SUPPORTED[package]
        if not _numbers(first) <= _numbers(version) < _numbers(end):
            warnings.warn(
                f"{package} {version} was not tested with recycle, {first} up to but not including {end} was; if the"
                f' run fails, install "{package}>={first},<{end}"',
                VersionWarning,
                stacklevel=2,
            )


def installed() -> str:
    """Name and version of the installed megatron-core, for messages."""
    return f"megatron-core {installed_versions()['megatron-core']}"


def _numbers(text: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


# Linear layers ------------------------------------------------------------------------------------------------------


def set_linear_hook(layer: torch.nn.Module, function: Callable[..., torch.Tensor]) -> None:
    """Compute a tensor-parallel linear layer by `function(input=, weight=, bias=, **others)`; see `linear_defaults`.

    Raises RunError if the layers of this megatron-core cannot be hooked.
    """
    kind = type(layer)
    if not callable(getattr(kind, _LINEAR_HOOK, None)):
        raise RunError(
            f"{installed()}: {kind.__name__} has no method {_LINEAR_HOOK}, which the split backward replaces; install a"
            " supported version"
        )
    setattr(layer, _LINEAR_HOOK, function)


def remove_linear_hook(layer: torch.nn.Module) -> None:
    """Compute a layer by megatron-core again."""
    delattr(layer, _LINEAR_HOOK)


@cache
def linear_defaults() -> Mapping[str, Any]:
    """Optional arguments of linear layers' computations, which differ between versions, with their neutral values."""
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

    parameters = inspect.signature(linear_with_grad_accumulation_and_async_allreduce).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


# Process groups -----------------------------------------------------------------------------------------------------


def set_tensor_group(group: Any) -> None:
    """Make `group` the tensor-parallel group of this process."""
    from megatron.core import parallel_state

    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = group
    parallel_state.set_tensor_model_parallel_world_size(group.size())
    parallel_state.set_tensor_model_parallel_rank(group.rank())


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def pipeline_group(change: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Replace the pipeline-parallel group by `change(group)` inside the block."""
    from megatron.core import parallel_state

    name = "_PIPELINE_MODEL_PARALLEL_GROUP"
    return replaced(parallel_state, name, change(getattr(parallel_state, name)))


def parallel_rank(kind: Literal["PIPELINE_MODEL", "DATA"], rank: int) -> AbstractContextManager[None]:
    """Give this process another rank of one kind of parallelism in `parallel_state` inside the block."""
    from megatron.core import parallel_state

    return replaced(parallel_state, f"_MPU_{kind}_PARALLEL_RANK", rank)


def loop_groups() -> Any:
    """The process groups that megatron-core's training loop passes on, from `parallel_state`."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    # From 0.18 on, `finalize_model_grads` asks for these.
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    groups.dp = parallel_state.get_data_parallel_group(with_context_parallel=False, partial_data_parallel=False)
    return groups


def join_world_of_one() -> None:
    """Initialize torch.distributed for this process alone, with torch's fake backend, whose collectives do nothing."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore  # the import registers the backend

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)


def default_group(group: Any) -> AbstractContextManager[None]:
    """Replace torch.distributed's default group inside the block, by one that counts its ranks from 0 on."""
    from torch.distributed.distributed_c10d import _world

    _world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    # A queue of a manager's process, which outlives this one, unless there is a queue already.
    writer: Any = import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    writer._results_queue = Queue()
    return replaced(_world, "default_pg", group)


def use_one_backend() -> None:
    """Give every later process group the backend of torch.distributed's default group, whatever it asks for."""
    import torch

    create = torch.distributed.new_group

    def new_group(*arguments: Any, backend: Any = None, **named: Any) -> Any:
        return create(*arguments, **named)

    torch.distributed.new_group = new_group


def reset_gradients(models: Any) -> None:
    """Zero the gradients of megatron-core's DDP, and forget sums under way, also after an interrupted iteration."""
    for model in models:
        for bucket_group in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
            bucket_group.grad_reduce_handle = None
        model.zero_grad_buffer()


def gradient_buffers(model: Any) -> list[torch.Tensor]:
    """The flat tensors that the `main_grad` of all parameters in megatron-core's DDP are views of."""
    return [buffer.grad_data for buffer in (*model.buffers, *model.expert_parallel_buffers)]


@contextmanager
def without_sync(models: Any, name: Literal["finish_grad_sync", "start_param_sync"]) -> Iterator[None]:
    """Inside the block megatron-core's DDP does not sum gradients, or not gather what its optimizer has stepped."""
    with ExitStack() as stack:
        for model in models:
            setattr(model, name, lambda *arguments, **named: None)  # hides the method
            stack.callback(delattr, model, name)
        yield


def running_timers(config: Any) -> list[Any]:
    """megatron-core's timers in a model's config that have been started and not stopped."""
    return [timer for timer in getattr(config.timers, "_timers", {}).values() if timer._started]


def optimizer_parts(optimizer: Any) -> list[Any]:
    """The optimizers that megatron-core has chained; the optimizer itself if it is another one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def write_model_parameters(optimizer: Any) -> None:
    """Round this process's part of the fp32 parameters of a distributed optimizer to its part of the model's."""
    for part in optimizer_parts(optimizer):
        part._copy_main_params_to_model_params()


@contextmanager
def adam_steps_kept(optimizer: Any) -> Iterator[None]:
    """Inside the block megatron-core's distributed optimizer loads its checkpoints into torch's Adam, too.

    Its state has a step, which a checkpoint has for all parameters at once, and which all would share afterwards.
    """
    name = "_set_main_param_and_optimizer_states"
    parts = [part for part in optimizer_parts(optimizer) if hasattr(part, name)]
    for part in parts:
        setattr(part, name, partial(_load_without_step, getattr(part, name), part))
    yield
    for part in parts:
        delattr(part, name)
        for state in part.optimizer.state.values():
            state.update({"step": state["step"].clone()} if "step" in state else {})


def _load_without_step(load: Callable[..., None], part: Any, parameter: Any, state: Mapping[str, Any]) -> None:
    own = part._get_main_param_and_optimizer_states(parameter)
    load(parameter, {**state, **({"step": own["step"]} if "step" in own else {})})


def describe_group(group: Any, name: str, rank: int) -> None:
    """Add a process group that torch did not create to torch's tables.

    torch looks up the group when a collective fails and when its profiler starts; without an entry, that fails too.
    """
    import torch

    world: Any = torch.distributed.distributed_c10d._world
    world.pg_map[group], world.pg_names[group] = ("recycle", None), name
    world.pg_backend_config[group], world.pg_group_ranks[group] = "recycle", {0: rank}


def share_random_generator(region: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
    """Make all draws come from the current random generator, instead of a generator for each region.

    Regions where tensor ranks draw for different elements run inside `region()`.
    """
    import torch
    from megatron.core.tensor_parallel import random

    class SharedGenerator(random.CudaRNGStatesTracker):  # type: ignore[misc]
        @contextmanager
        def fork(self, name: str = "") -> Iterator[None]:
            with region():
                yield

        def get_states(self) -> dict[str, torch.Tensor]:
            return {"shared": torch.zeros(0)}  # Megatron-LM refuses a checkpoint without states

        def set_states(self, states: object) -> None: ...

    random._CUDA_RNG_STATE_TRACKER = SharedGenerator()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


# Models and megatron-core's loop ------------------------------------------------------------------------------------


@contextmanager
def without_model_notice() -> Iterator[None]:
    """Suppress megatron-core 0.19's notice that GPTModel is deprecated for HybridModel.

    HybridModel needs Transformer Engine for its last norm, has no scaled rotary positions, and numbers attention and
    feed-forward parts as separate layers, which would change the names in checkpoints.
    """
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    with replaced(logger, "disabled", True):
        yield


def without_token_counts(router: type) -> type:
    """Class decorator for a router: no counts of tokens per expert, and no change of type of the expert bias."""
    for name in ("_apply_expert_bias", "_maintain_float32_expert_bias"):
        setattr(router, name, lambda self, *arguments, **named: None)
    return router


class _NoLayer:
    def __add__(self, layers: int) -> None:
        """None: from 0.17 on, routers of multi-token prediction add the model's layers to their number."""


def stop_loss_logs(router: Any) -> None:
    """Keep a router's auxiliary losses out of megatron-core's process-wide log, which is sized for the first model."""
    router.layer_number = _NoLayer() if getattr(router, "is_mtp_layer", False) else None


def gradient_hook(model: Any, parameter: torch.nn.Parameter) -> Callable[[], None] | None:
    """The function that megatron-core's DDP runs after a gradient of `parameter`; None for a model without DDP."""
    make = getattr(model, "_make_backward_post_hook", None)
    return None if make is None else make(parameter)


def run_backward_step(entry: Any, output: Any, gradient: Any, model: Any, config: Any) -> Any:
    """megatron-core's `backward_step`, which took the model's type up to 0.16."""
    from megatron.core.pipeline_parallel.schedules import backward_step
    from megatron.core.utils import get_model_type

    kind = [get_model_type(model)] if "model_type" in inspect.signature(backward_step).parameters else []
    return backward_step(entry, output, gradient, *kind, config)


def forget_gradient_groups(optimizer: Any) -> None:
    """Make the next step of megatron-core's optimizer find out about groups of gradients with separate norms again.

    From 0.19 on that takes a reduction in the first step, which a process that joins later would wait for alone.
    """
    for part in (optimizer, *optimizer_parts(optimizer)):
        if hasattr(part, "_has_grad_norm_group_cache"):
            part._has_grad_norm_group_cache = None


def is_encoder_decoder(model: Any) -> bool:
    """Whether a model passes two tensors between stages, which megatron-core supported up to 0.16."""
    from megatron.core.enums import ModelType
    from megatron.core.utils import get_model_type

    both = getattr(ModelType, "encoder_and_decoder", None)
    return both is not None and get_model_type(model) == both


@contextmanager
def layers_numbered_from(first: int) -> Iterator[None]:
    """Number the layers of models that are built inside the block from `first` + 1, as in a later pipeline stage."""
    from megatron.core.transformer import multi_token_prediction, transformer_block, transformer_layer

    name = "get_transformer_layer_offset"
    with ExitStack() as stack:
        for module in (multi_token_prediction, transformer_block, transformer_layer):
            if hasattr(module, name):
                stack.enter_context(replaced(module, name, lambda *_, **__: first))
        yield


def complete_local_layers() -> None:
    """Make megatron-core's local layers run without Transformer Engine, and on the host where there is no GPU.

    Some modules compare with classes of Transformer Engine that they have not imported. torch's norms refuse sequence
    parallelism, although they need only mark their weights.
    """
    import torch
    from megatron.core.fusions import fused_softmax
    from megatron.core.transformer import multi_latent_attention, torch_norm
    from megatron.core.transformer.moe import moe_utils

    for module, names in (
        (multi_latent_attention, ("Linear", "TELinear", "TEColumnParallelLinear")),
        (moe_utils, ("te_general_gemm",)),
    ):
        for name in names:
            vars(module).setdefault(name, None)
    multi_latent_attention.HAVE_TE &= isinstance(multi_latent_attention.TELinear, type)
    create = torch_norm.WrappedTorchNorm.__new__

    def create_norm(kind: Any, config: Any, *arguments: Any, **named: Any) -> Any:
        plain = copy(config)
        plain.sequence_parallel = False
        norm = create(kind, plain, *arguments, **named)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    torch_norm.WrappedTorchNorm.__new__ = create_norm
    if torch.cuda.is_available():
        return

    def mask(queries: int, keys: int, window: tuple[int, int]) -> torch.Tensor:
        shift = keys - queries
        return ~torch.ones(queries, keys, dtype=torch.bool).triu(shift - window[0]).tril(shift + window[1])

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    fused_softmax.get_sliding_window_causal_mask = mask
    fused_softmax.get_default_causal_mask = lambda length: mask(length, length, (length, 0))


def common_state_path(folder: Path) -> Path:
    """File with the common state (all but tensors) of a `torch_dist` checkpoint; versions after 0.18 only read it."""
    from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

    return folder / str(COMMON_STATE_FNAME)


def stored_common_state(folder: Path) -> bytes | None:
    """The pickle of the common state, which versions after 0.18 store as one object of a list; None without one."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if (path := common_state_path(folder)).is_file():
        return path.read_bytes()
    name = ShardedObject("common_state", None, (1,), (0,)).unique_key
    places: Any = FileSystemReader(folder).read_metadata().storage_data
    for index, place in places.items():
        if index.fqn == name:
            with (folder / str(place.relative_path)).open("rb") as file:
                file.seek(place.offset)
                return file.read(int(place.length))
    return None


# torch --------------------------------------------------------------------------------------------------------------


def use_deterministic_kernels() -> None:
    """Make torch use deterministic kernels, or raise, without importing its compiler."""
    import torch

    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(True)
    else:
        torch.set_deterministic_debug_mode("error")


def content_version(tensor: torch.Tensor) -> int:
    """A number that grows with every change of the tensor's content in place."""
    return int(tensor._version)


def saved_product(node: Any, *, has_addend: bool) -> tuple[torch.Tensor, bool]:
    """The left factor of a node `AddmmBackward0` or `MmBackward0`, and whether it scales the product or the addend.

    Raises RuntimeError if the graph was freed.
    """
    if not has_addend:
        return node._saved_self, False
    return node._saved_mat1, not node._saved_alpha == node._saved_beta == 1


def gloo_group(store: Any, rank: int, size: int, device: Any, timeout: float) -> Any:
    """Form a gloo group on a device; `timeout` in seconds."""
    import torch

    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [device], timedelta(seconds=timeout)
    return gloo(store, rank, size, options)


def nccl_group(store: Any, rank: int, size: int, timeout: float, device: Any, ctas: int | None) -> Any:
    """Form a NCCL group on the current GPU, with one communicator and one high-priority stream for everything.

    `timeout` is in seconds, `ctas` the most thread blocks of an operation, None for NCCL's choice.
    """
    import torch

    nccl: Any = torch.distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout, options.is_high_priority_stream = timedelta(seconds=timeout), True
    if ctas is not None:
        options.config.max_ctas = ctas
    group = nccl(store, rank, size, options)
    group.eager_connect_single_device(device)  # else torch makes a communicator for each pair
    return group


def nccl_has_failed(group: Any) -> bool:
    """Whether torch has seen an asynchronous error of the group."""
    from torch._C import _distributed_c10d

    return bool(group.get_error() != _distributed_c10d.ErrorType.SUCCESS)


def set_timeout(group: Any, seconds: float) -> None:
    """Set the timeout of a group's later operations."""
    group._set_default_timeout(timedelta(seconds=seconds))


@contextmanager
def nccl_batch(group: Any) -> Iterator[None]:
    """Submit the NCCL calls inside the block together."""
    group._group_start()
    yield
    group._group_end()
