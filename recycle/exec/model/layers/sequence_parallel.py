"""Sequence parallelism (Korthikanti et al., arXiv 2205.05198): between attention and feed-forward parts a tensor rank
holds a T-th of each sequence, so that norms, dropout, residual sums and messages between stages are cut as well.

Where a part needs whole sequences it gathers them, and where partial sums leave it each rank gets its T-th of the sum:
together they move what the all-reduce moves that stands there without. Both are made of the worker's exchange and add
in the order of tensor ranks, like `TensorGroup`, so the bits are the same in every generation. megatron-core's own ones
make their tensors on the current GPU; for a `TensorGroup` these take their place, and no other group is touched.

Limits: dense models that recycle builds. A mixture's router and auxiliary loss look at all tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel import mappings, random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from recycle.errors import RunError
from recycle.exec.model.tensor_group import TensorGroup


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


def _exchange(group: TensorGroup) -> Callable[[torch.Tensor], Callable[[], list[torch.Tensor]]]:
    if group.exchange is None:
        raise RunError("tensor ranks give each other parts of sequences outside of a generation")
    return group.exchange


class _OneGenerator(random.CudaRNGStatesTracker):  # type: ignore[misc]
    @contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield
