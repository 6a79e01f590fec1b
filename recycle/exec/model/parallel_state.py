"""megatron-core's process groups in a process that has no use for them but for a tensor group."""

from __future__ import annotations

import torch
from megatron.core import parallel_state

from recycle.errors import RunError
from recycle.exec.model.layers.sequence_parallel import install
from recycle.exec.model.tensor_group import TensorGroup


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
