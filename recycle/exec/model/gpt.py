"""One stage's part of a megatron-core GPT, with weights that depend on nothing but their global name.

The part runs on any device: the local layer spec with a core attention around torch's
`scaled_dot_product_attention`, learned absolute positions and no fused kernel. Each parameter is drawn
from a generator seeded by (seed, global name), so that P = 1, 2, 4 and every re-spawned worker start from equal bits;
whole, and then cut, so that every T does too.

Limits: no context or expert parallelism, and tensor parallelism without sequence parallelism.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from recycle.errors import RunError
from recycle.exec.model.tensor_group import TensorGroup
from recycle.job import Job
from recycle.sections import ModelSection

INITIAL_DEVIATION = 0.02
"""Standard deviation of weights, as in GPT-2; those that write into the residual stream divide it by sqrt(2 L)."""
SHARED_WEIGHT = "embedding.word_embeddings.weight"
"""The weight that a tied output layer uses too, and the name of its copy on the last stage."""
_RESIDUAL_WEIGHTS = ("linear_proj.weight", "linear_fc2.weight")
_CUT: Mapping[type[torch.nn.Module], Mapping[str, int]] = {
    ColumnParallelLinear: {"weight": 0, "bias": 0},
    RowParallelLinear: {"weight": 1},
    VocabParallelEmbedding: {"weight": 0},
}
"""Layer -> its parameters that are cut between tensor ranks -> along which dimension; all ranks hold every other.
megatron-core marks a parameter only where it initialises it itself."""


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """Core attention by `scaled_dot_product_attention`. Takes megatron-core's constructor arguments."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise RunError("core attention: context parallelism is not supported")
        self._scale = softmax_scale
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Causal attention.

        Args:
            query: [sequence, batch, heads, dim]; key and value alike, with as many or fewer (grouped) heads.

        Returns:
            [sequence, batch, heads * dim].
        """
        if attention_bias is not None or packed_seq_params is not None:
            raise RunError("core attention: a bias or packed sequences are not supported")
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        output = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self._dropout if self.training else 0.0,
            is_causal=True,
            scale=self._scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        sequence, batch = output.shape[2], output.shape[0]
        return output.permute(2, 0, 1, 3).reshape(sequence, batch, -1)


def transformer_config(model: ModelSection, **changes: Any) -> TransformerConfig:
    """megatron-core's configuration of the job's model; `changes` add to it or replace entries."""
    settings: dict[str, Any] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "ffn_hidden_size": model.ffn if model.ffn is not None else 4 * model.hidden,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.dropout if model.attention_dropout is None else model.attention_dropout,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
    }
    return TransformerConfig(**(settings | changes))


def layer_spec() -> ModuleSpec:
    """The local spec of a transformer layer, with `CausalAttention`."""
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    return spec


def build_part(job: Job, stage: int, tensor_rank: int = 0) -> GPTModel:
    """The GPTModel part of `stage`, initialised, on the CPU. megatron-core's `parallel_state` must stand.

    Args:
        tensor_rank: which part of the stage's weights it is, of as many as the job's tensor parallelism.
    """
    layers, tensor_parallel = job.layers_per_stage(), job.grid.tensor_parallel
    part = GPTModel(
        # Weights are drawn in fp32; with bf16 the optimizer keeps those and gives the part rounded ones.
        config=transformer_config(
            job.model, bf16=job.train.precision == "bf16", tensor_model_parallel_size=tensor_parallel
        ),
        # Stated layer by layer: the split need not be even, and a stage may have none.
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[layer_spec()] * layers[stage], layer_norm=WrappedTorchNorm
        ),
        vocab_size=job.model.vocabulary,
        max_sequence_length=job.model.sequence,
        pre_process=stage == 0,
        post_process=stage == len(layers) - 1,
        share_embeddings_and_output_weights=job.model.tied,
        position_embedding_type="learned_absolute",
    )
    initialise(part, job.model, sum(layers[:stage]), tensor_rank, tensor_parallel)
    return part


def global_names(part: GPTModel, first_layer: int) -> dict[str, torch.nn.Parameter]:
    """The parameters of a part by their name in the whole model, where layers count from 0.

    Args:
        part: a GPTModel part, whose layers count from 0 too.
        first_layer: of the part, in the whole model.
    """
    names: dict[str, torch.nn.Parameter] = {}
    for name, parameter in part.named_parameters():
        pieces = name.split(".")
        if pieces[:2] == ["decoder", "layers"]:
            pieces[2] = str(int(pieces[2]) + first_layer)
        elif name == "output_layer.weight" and part.share_embeddings_and_output_weights:
            pieces = [SHARED_WEIGHT]
        names[".".join(pieces)] = parameter
    return names


def cut_dimensions(part: Any) -> dict[torch.nn.Parameter, int]:
    """Each parameter of a model part that is cut into T equal parts -> the dimension along which.

    Tensor rank t has the t-th part.
    """
    return {
        parameter: cut[name]
        for module in part.modules()
        for kind, cut in _CUT.items()
        if isinstance(module, kind)
        for name, parameter in module.named_parameters(recurse=False)
        if name in cut
    }


@torch.no_grad()
def initialise(
    part: GPTModel, model: ModelSection, first_layer: int, tensor_rank: int = 0, tensor_parallel: int = 1
) -> None:
    """Draw every parameter by its global name: matrices normal, biases 0, norm weights 1. Parameters lie on the CPU."""
    cut = cut_dimensions(part)
    for name, parameter in global_names(part, first_layer).items():
        if parameter.dim() > 1:
            seed = hashlib.sha256(f"{model.seed}:{name}".encode()).digest()[:8]
            generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
            residual = name.endswith(_RESIDUAL_WEIGHTS)
            deviation = INITIAL_DEVIATION / (math.sqrt(2 * model.layers) if residual else 1.0)
            if tensor_parallel == 1 or parameter not in cut:
                parameter.normal_(0.0, deviation, generator=generator)
                continue
            sizes = list(parameter.shape)
            sizes[cut[parameter]] *= tensor_parallel
            whole = torch.empty(sizes).normal_(0.0, deviation, generator=generator)
            parameter.copy_(whole.chunk(tensor_parallel, cut[parameter])[tensor_rank])
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


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
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = tensor_group
        parallel_state.set_tensor_model_parallel_world_size(tensor_group.size())
        parallel_state.set_tensor_model_parallel_rank(tensor_group.rank())
