"""A training script of Megatron's, with a schedule of recycle's: one line of it is changed.

    torchrun --nproc-per-node 2 examples/megatron_loop/train.py --schedule zb-h1
    torchrun --nproc-per-node 4 examples/megatron_loop/train.py --pipeline 2 --schedule zb-h1
    torchrun --nproc-per-node 2 examples/megatron_loop/train.py --chunks 2 --schedule zb-v
    torchrun --nproc-per-node 2 examples/megatron_loop/train.py                              # Megatron's own 1F1B

Model, DDP and the sum of gradients are megatron-core's. The losses are the same bits whatever the schedule. Without a
GPU it runs over gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

warnings.simplefilter("ignore")  # megatron-core tells of every optional package that is missing

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.utils import get_model_config  # noqa: E402

import recycle.megatron  # noqa: E402
from recycle.exec.model.gpt import layer_spec  # noqa: E402
from recycle.megatron_versions import complete_local_layers  # noqa: E402

SEQUENCE, ROWS, VOCABULARY = 64, 2, 128
ON_GPU = torch.cuda.is_available()
LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "num_query_groups": 2,
}
LAYERS = {"gpt": {}, "llama": LLAMA, "mixtral": {**LLAMA, "num_moe_experts": 4, "moe_router_topk": 2}}
"""Kind of layers -> its settings in `TransformerConfig`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", help="a family or a schedule file; Megatron's own when left out")
    parser.add_argument("--pipeline", type=int, default=2, help="ranks of a pipeline")
    parser.add_argument("--chunks", type=int, default=1, help="model chunks of a rank")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    torch.manual_seed(1234)
    torch.distributed.init_process_group("nccl" if ON_GPU else "gloo")
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=given.pipeline,
        virtual_pipeline_model_parallel_size=given.chunks if given.chunks > 1 else None,
    )
    if ON_GPU:
        model_parallel_cuda_manual_seed(1234)
    model = build_model(given)
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)

    forward_backward_func = get_forward_backward_func()
    if given.schedule is not None:
        forward_backward_func = recycle.megatron.forward_backward_func(given.schedule)  # the line that is changed

    for step in range(given.steps):
        for chunk in model:
            chunk.zero_grad_buffer()
        replica = parallel_state.get_data_parallel_rank()
        data = [micro_batches(step, given.micro_batches, replica) for _ in model]
        losses = forward_backward_func(
            forward_step_func=forward_step,
            data_iterator=data if len(model) > 1 else data[0],
            model=model,
            num_microbatches=given.micro_batches,
            seq_length=SEQUENCE,
            micro_batch_size=ROWS,
        )
        for parameter in parameters:
            parameter.grad = parameter.main_grad.to(parameter.dtype)
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        if losses and parallel_state.get_data_parallel_rank() == 0:
            print(f"step {step}  loss {float(sum(losses) / len(losses))!r}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def build_model(given: argparse.Namespace) -> list[Any]:
    """The model chunks of this rank, in DDP."""
    bf16, fp16 = getattr(given, "bf16", False), getattr(given, "fp16", False)
    dtype = torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32
    layers = getattr(given, "layers", "gpt")
    tensor, has_own_experts = getattr(given, "tensor", 1), getattr(given, "expert_parallel", False)
    complete_local_layers()  # mixtures of experts ask for names of Transformer Engine
    config = TransformerConfig(
        **LAYERS[layers],
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        transformer_impl="local",
        hidden_dropout=getattr(given, "dropout", 0.0),
        attention_dropout=getattr(given, "dropout", 0.0),
        bf16=bf16,
        fp16=fp16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        calculate_per_token_loss=getattr(given, "per_token", False),
        use_cpu_initialization=not ON_GPU,
        tensor_model_parallel_size=tensor,
        sequence_parallel=getattr(given, "sequence_parallel", False),
        expert_model_parallel_size=tensor if has_own_experts else 1,
        expert_tensor_parallel_size=1 if has_own_experts else tensor,
        moe_token_dispatcher_type=getattr(given, "dispatcher", "allgather"),
        pipeline_model_parallel_size=given.pipeline,
        virtual_pipeline_model_parallel_size=given.chunks if given.chunks > 1 else None,
        batch_p2p_comm=ON_GPU,
        finalize_model_grads_func=finalize_model_grads,
    )
    chunks = []
    for number in range(given.chunks):
        vp_stage = number if given.chunks > 1 else None
        # Only a schedule on a V needs this block: it says which stage the chunk is.
        schedule = getattr(given, "schedule", None)
        with recycle.megatron.as_stage(schedule, vp_stage) if schedule and vp_stage else contextlib.nullcontext():
            module = GPTModel(
                config=config,
                transformer_layer_spec=layer_spec(
                    config
                ),  # megatron-core's local layers, with attention that runs on a CPU too
                vocab_size=VOCABULARY,
                max_sequence_length=SEQUENCE,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                share_embeddings_and_output_weights=getattr(given, "tied", False),
                position_embedding_type="learned_absolute" if layers == "gpt" else "rope",
                vp_stage=vp_stage,
            )
        draw(module)
        if ON_GPU:
            module.cuda()
        if bf16 or fp16:
            module = Float16Module(config, module)
        instances = getattr(given, "instances", 0)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=instances > 0,
            num_distributed_optimizer_instances=instances or 1,
            overlap_grad_reduce=getattr(given, "overlap", False),
            overlap_param_gather=getattr(given, "overlap", False) and instances > 0,
        )
        chunks.append(DistributedDataParallel(config, ddp, module))
    return chunks


@torch.no_grad()
def draw(module: GPTModel) -> None:
    """Weights that depend on nothing but the layer that they are in, so that every layout starts from the same."""
    for name, parameter in module.named_parameters():
        pieces = name.split(".")
        if "layers" in pieces:
            place = pieces.index("layers") + 1
            pieces[place] = str(module.decoder.layers[int(pieces[place])].layer_number)
        if parameter.dim() > 1:
            generator = torch.Generator().manual_seed(sum(map(ord, ".".join(pieces))))
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))


def micro_batches(step: int, count: int, replica: int) -> Iterator[torch.Tensor]:
    """Rows of text of a replica whose next token follows from the last one."""
    for index in range(count):
        generator = torch.Generator().manual_seed((step * 64 + replica) * 1024 + index)
        first = torch.randint(0, VOCABULARY, (ROWS, 1), generator=generator)
        tokens = (first + 7 * torch.arange(SEQUENCE + 1)) % VOCABULARY
        yield tokens.cuda() if ON_GPU else tokens


def forward_step(data: Iterator[torch.Tensor], model: torch.nn.Module) -> Any:
    tokens = next(data)
    positions = torch.arange(SEQUENCE, device=tokens.device).expand(ROWS, -1)
    output = model(
        input_ids=tokens[:, :-1], position_ids=positions, attention_mask=None, labels=tokens[:, 1:].contiguous()
    )

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not get_model_config(model).calculate_per_token_loss:
            mean = losses.float().mean()
            return mean, mean.detach().clone()
        counts = tokens[:, 1:] % 5 > 0
        total = (losses.float() * counts).sum()
        return total, counts.sum().int(), total.detach() / counts.sum()

    return output, loss


if __name__ == "__main__":
    if ON_GPU:
        main()
    else:
        from recycle.megatron.without_gpu import without_gpu

        with without_gpu():
            main()
