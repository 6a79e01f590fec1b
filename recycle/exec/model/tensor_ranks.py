"""What the tensor ranks of a worker share: sequences, experts, and megatron-core's process groups.

Sequence parallelism (Korthikanti et al., arXiv 2205.05198): between attention and feed-forward parts a tensor rank
holds a T-th of each sequence, so that norms, dropout, residual sums and messages between stages are cut as well. Where
a part needs whole sequences it gathers them, and where partial sums leave it each rank gets its T-th of the sum:
together they move what the all-reduce moves that stands there without. Both are made of the worker's exchange and add
in the order of tensor ranks, like `TensorGroup`, so the bits are the same in every generation. megatron-core's own ones
make their tensors on the current GPU; for a `TensorGroup` these take their place, and no other group is touched.

Expert parallelism: each tensor rank has a T-th of the experts of every layer, whole. All tensor ranks have all tokens
of a micro-batch and route them alike, so no token has to travel: each rank runs its own experts on the tokens that
chose them, and the outputs are summed over the ranks, like those of a matrix that is cut by rows. In the backward the
gradients of tokens and of their weights for each expert, of which a rank has its experts' share, are summed likewise.
No token is dropped. Megatron's own dispatchers move tokens between ranks of which each has other tokens; it refuses
expert with tensor parallelism where sequences are not cut.

Limits: sequences are cut in dense models that recycle builds. A mixture's router and auxiliary loss look at all tokens
of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import mappings, random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

from recycle.errors import RunError
from recycle.exec.model.tensor_group import TensorExchange, TensorGroup


def groups_with_shared_experts() -> ProcessGroupCollection:
    """The process groups that a part is built with whose experts the tensor ranks share; `parallel_state` stands."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.ep = groups.tp
    return groups


def prepare_mixtures(part: torch.nn.Module) -> None:
    """Have each mixture of experts of a part run on tensor ranks that all have all tokens."""
    for module in part.modules():
        if isinstance(module, MoELayer):
            # It would refuse tensor ranks that have all tokens, and asks this group alone how many there are.
            module.attn_tp_group = module.token_dispatcher.tp_group
            if module.ep_group.size() > 1:
                module.token_dispatcher.__class__ = _RanksExperts


def own_experts(part: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Parameters that this tensor rank alone has, of experts that no other one runs."""
    layers = [module for module in part.modules() if isinstance(module, BaseMoELayer) and module.ep_group.size() > 1]
    return {parameter for layer in layers for parameter in layer.experts.parameters()}


def first_expert(part: torch.nn.Module) -> int:
    """The number in its layer of the first expert that each mixture of a part has."""
    return next((module.local_expert_indices[0] for module in part.modules() if isinstance(module, BaseMoELayer)), 0)


class _RanksExperts(MoEAllGatherTokenDispatcher):  # type: ignore[misc]
    """Hands each rank's experts the tokens that chose them, and adds up what they return."""

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        return (
            copy_to_tensor_model_parallel_region(hidden_states, self.ep_group),
            copy_to_tensor_model_parallel_region(probs, self.ep_group),
        )

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.to(self.local_probs.dtype)
        summed: torch.Tensor = reduce_from_tensor_model_parallel_region(wide, self.ep_group)
        return summed.to(hidden_states.dtype)


def cut_sequences(part: Any) -> None:
    """Have a part of megatron-core's GPTModel compute with sequence parallelism.

    The part is built without, since the norms that it then has are the same, and megatron-core refuses to build them.
    """
    part.config.sequence_parallel = True
    for module in part.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.sequence_parallel = True
        if isinstance(module, ColumnParallelLinear):
            module.allreduce_dgrad = False


def partly_computed(part: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Parameters that all tensor ranks have and each uses on its part of the sequences: all but positions'.

    A rank's gradient of them is its tokens' share; the gradient is the sum over the ranks. Positions are added to whole
    sequences, before these are cut.
    """
    positions = {
        parameter
        for module in part.modules()
        if isinstance(module, LanguageModelEmbedding) and module.add_position_embedding
        for parameter in module.position_embeddings.parameters()
    }
    return set(part.parameters()) - positions


def gathered(tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """The whole sequences, of which each rank has a part: [sequence / T, ...] to [sequence, ...]."""
    return torch.cat(_exchange(group)(tensor.detach().contiguous())())


def begin_reduce_scatter(tensor: torch.Tensor, group: TensorGroup) -> Callable[[], torch.Tensor]:
    """Start to sum the tensors of all ranks; the call returned waits, and gives this rank's part of the sequences.

    [sequence, ...] to [sequence / T, ...].
    """
    pending, rank, size = _exchange(group)(tensor.detach().contiguous()), group.rank(), group.size()
    return lambda: reduce(torch.add, [whole.chunk(size)[rank] for whole in pending()])


def install() -> None:
    """Have megatron-core move parts of sequences in a `TensorGroup` by these, and draw from the part's own generator.

    Its own generators for regions that are cut are a GPU's; `DropoutSeeds` seeds the one that is used here.
    """
    random._CUDA_RNG_STATE_TRACKER = _OneGenerator()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    for name, ours in (
        ("_gather_along_first_dim", gathered),
        ("_reduce_scatter_along_first_dim", lambda tensor, group: begin_reduce_scatter(tensor, group)()),
    ):
        setattr(mappings, name, _for_tensor_groups(ours, getattr(mappings, name)))


def _for_tensor_groups(ours: Callable[..., torch.Tensor], theirs: Callable[..., torch.Tensor]) -> Any:
    def move(tensor: torch.Tensor, group: Any, *arguments: Any, **named: Any) -> torch.Tensor:
        if isinstance(group, TensorGroup):
            return ours(tensor, group)
        return theirs(tensor, group, *arguments, **named)

    return move


def _exchange(group: TensorGroup) -> TensorExchange:
    if group.exchange is None:
        raise RunError("tensor ranks give each other parts of sequences outside of a generation")
    return group.exchange


class _OneGenerator(random.CudaRNGStatesTracker):  # type: ignore[misc]
    @contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield


def ensure_parallel_state(tensor_group: TensorGroup | None = None) -> None:
    """Give megatron-core the process groups it asks for: those that stand, else private ones of one rank.

    The private ones are torch's fake ones, which have neither port nor thread and do nothing: that is what a collective
    of one rank amounts to, and the transports of recycle have groups of their own. A tensor group takes the place of
    the tensor-parallel group in megatron-core's `parallel_state`.

    Raises:
        RunError: torch.distributed stands with several ranks but megatron-core's groups do not.
    """
    if parallel_state.is_initialized():
        return
    if not torch.distributed.is_initialized():
        # Importing the module makes the backend known to torch.
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    elif torch.distributed.get_world_size() != 1:
        raise RunError("torch.distributed has several ranks; initialise megatron-core's parallel_state before a stage")
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    if tensor_group is not None:
        install()
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = tensor_group
        parallel_state.set_tensor_model_parallel_world_size(tensor_group.size())
        parallel_state.set_tensor_model_parallel_rank(tensor_group.rank())
