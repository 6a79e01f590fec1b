"""Expert parallelism inside a worker: each tensor rank has a T-th of the experts of every layer, whole.

All tensor ranks have all tokens of a micro-batch and route them alike, so no token has to travel: each rank runs its
own experts on the tokens that chose them, and the outputs are summed over the ranks, like those of a matrix that is cut
by rows. In the backward the gradients of tokens and of their weights for each expert, of which a rank has its experts'
share, are summed likewise. No token is dropped. The sums are those of `TensorGroup`, so they have the same bits in
every generation.

Megatron's own dispatchers move tokens between ranks of which each has other tokens; it refuses expert with tensor
parallelism where sequences are not cut.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher


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
