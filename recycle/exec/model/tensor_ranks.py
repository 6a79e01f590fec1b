"""Resources that the tensor ranks of a worker share: sequences, experts, and megatron-core's process groups.

Sequence parallelism (Korthikanti et al., arXiv 2205.05198): outside of attention and feed-forward parts a tensor rank
holds a T-th of each sequence. A mixture of experts gathers the sequences, because its router needs all tokens.

Expert parallelism: each tensor rank has a T-th of the experts of every layer, whole. All tensor ranks have all tokens
of a micro-batch and route them alike, so no token is sent. Outputs and gradients are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor
from torch.distributed import ProcessGroup, all_gather_into_tensor, reduce_scatter_tensor
from torch.nn import Module, Parameter

from recycle import megatron_versions
from recycle.errors import RunError
from recycle.exec.model.tensor_group import TensorGroup


def groups_with_shared_experts() -> ProcessGroupCollection:
    """Process groups for a part whose experts are shared by the tensor ranks; needs `parallel_state`."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.ep = groups.tp
    return groups


def prepare_mixtures(part: Module) -> None:
    """Prepare each mixture of experts of a part for tensor ranks that all have all tokens."""
    for module in part.modules():
        if isinstance(module, MoELayer):
            # The layer refuses tensor ranks that have all tokens; it takes their number from this group only.
            module.attn_tp_group = module.token_dispatcher.tp_group
            if module.ep_group.size() > 1:
                module.token_dispatcher.__class__ = _OwnExpertsDispatcher


def own_expert_parameters(part: Module) -> set[Parameter]:
    shared = [layer for layer in _mixtures(part) if layer.ep_group.size() > 1]
    return {parameter for layer in shared for parameter in layer.experts.parameters()}


def first_expert(part: Module) -> int:
    """Number, within its layer, of the first expert of each mixture in a part."""
    return next((layer.local_expert_indices[0] for layer in _mixtures(part)), 0)


def _mixtures(part: Module) -> list[BaseMoELayer]:
    return [module for module in part.modules() if isinstance(module, BaseMoELayer)]


class _WholeSequencesLayer(MoELayer):  # type: ignore[misc]
    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        # All tensor ranks get the same gradient of the whole sequences, so each keeps its part of it.
        whole = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        output, bias = super().forward(whole, *arguments, **named)
        return scatter_to_sequence_parallel_region(output), bias


class _OwnExpertsDispatcher(MoEAllGatherTokenDispatcher):  # type: ignore[misc]
    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> Any:
        return (
            copy_to_tensor_model_parallel_region(hidden_states, self.ep_group),
            copy_to_tensor_model_parallel_region(probs, self.ep_group),
        )

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.to(self.local_probs.dtype)
        summed: Tensor = reduce_from_tensor_model_parallel_region(wide, self.ep_group)
        return summed.to(hidden_states.dtype)


def enable_sequence_parallel(part: Any) -> None:
    """Switch a part of megatron-core's GPTModel, which must be built without, to sequence parallelism."""
    part.config.sequence_parallel = True
    in_mixtures = {module for layer in _mixtures(part) for module in layer.modules()}
    for layer in _mixtures(part):
        layer.__class__ = _WholeSequencesLayer
    for module in part.modules():
        if module in in_mixtures:
            continue
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.sequence_parallel = True
        if isinstance(module, ColumnParallelLinear):
            module.allreduce_dgrad = False


def sequence_split_parameters(part: Module) -> set[Parameter]:
    """Parameters that all tensor ranks use on their part of the sequences: all except positions and mixtures.

    A rank's gradient covers its tokens; the full gradient is the sum over the ranks.
    """
    positions = {
        parameter
        for module in part.modules()
        if isinstance(module, LanguageModelEmbedding) and module.add_position_embedding
        for parameter in module.position_embeddings.parameters()
    }
    whole = {parameter for layer in _mixtures(part) for parameter in layer.parameters()}
    return set(part.parameters()) - positions - whole


def gather_sequences(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Gather sequences from the ranks' parts: [sequence / T, ...] to [sequence, ...]."""
    whole = tensor.new_empty(len(tensor) * group.size(), *tensor.shape[1:])
    all_gather_into_tensor(whole, tensor.detach().contiguous(), group)
    return whole


def begin_reduce_scatter(tensor: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Start a reduce-scatter, [sequence, ...] to [sequence / T, ...]; the returned call waits for the result."""
    part = tensor.new_empty(len(tensor) // group.size(), *tensor.shape[1:])
    pending = reduce_scatter_tensor(part, tensor.detach().contiguous(), group=group, async_op=True)

    def finish() -> Tensor:
        pending.wait()
        return part

    return finish


def ensure_parallel_state(tensor_group: TensorGroup | None = None) -> None:
    """Give megatron-core its process groups: existing groups, or else private groups of one rank.

    The private groups use torch's fake backend. A tensor group replaces the tensor-parallel group. Raises RunError if
    torch.distributed has several ranks but megatron-core's groups are not initialized.
    """
    if parallel_state.is_initialized():
        return
    if not torch.distributed.is_initialized():
        megatron_versions.join_world_of_one()
    elif torch.distributed.get_world_size() != 1:
        raise RunError("torch.distributed has several ranks; initialise megatron-core's parallel_state before a stage")
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    megatron_versions.share_random_generator()
    megatron_versions.complete_local_layers()
    if tensor_group is not None:
        megatron_versions.set_tensor_group(tensor_group)
