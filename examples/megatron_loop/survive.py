"""The loop of train.py as a script that survives failures; `+` marks the lines of a session.

    recycle agent examples/megatron_loop/job.toml -- python examples/megatron_loop/survive.py
    recycle agent examples/megatron_loop/job.toml --fault kill:1.1@3 -- python examples/megatron_loop/survive.py

Each process prints the mean loss of the micro-batches of all live hosts of the last stage (`logs/` of the run).
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch

warnings.simplefilter("ignore")  # megatron-core tells of every optional package that is missing

from megatron.core import parallel_state  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.utils import get_model_config  # noqa: E402

import recycle.megatron  # noqa: E402
from recycle.megatron.without_gpu import without_gpu  # noqa: E402

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from train import ON_GPU, ROWS, SEQUENCE, build_model, forward_step, micro_batches  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", help="a family or a schedule file; recycle plans when left out")
    parser.add_argument("--pipeline", type=int, default=2, help="ranks of a pipeline")
    parser.add_argument("--chunks", type=int, default=1, help="model chunks of a rank")
    parser.add_argument("--tensor", type=int, default=1, help="tensor ranks of a worker")
    parser.add_argument("--sequence-parallel", action="store_true", help="tensor ranks hold parts of the sequences")
    parser.add_argument("--expert-parallel", action="store_true", help="tensor ranks hold whole experts")
    parser.add_argument("--dispatcher", choices=("allgather", "alltoall"), default="allgather", help="of tokens")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--bf16", action="store_true", help="weights and activations in bf16")
    parser.add_argument("--fp16", action="store_true", help="weights and activations in fp16, with a scaled loss")
    parser.add_argument("--per-token", action="store_true", help="mean loss of all tokens, of which some do not count")
    parser.add_argument("--layers", choices=("gpt", "llama", "mixtral"), default="gpt")
    parser.add_argument("--instances", type=int, default=0, help="of the distributed optimizer; 0: not distributed")
    parser.add_argument("--overlap", action="store_true", help="what DDP exchanges overlaps with computation")
    parser.add_argument("--tied", action="store_true", help="embedding and output layer share a weight")
    parser.add_argument("--evaluate", type=int, default=0, help="steps between evaluations")
    parser.add_argument("--checkpoints", type=Path, help="folder for a checkpoint of each step")
    parser.add_argument("--profile", type=Path, help="file for the measured times and bytes")
    given = parser.parse_args()
    if given.instances and given.checkpoints is not None:
        parser.error("--checkpoints: the state_dict() of a distributed optimizer lacks its moments")
    torch.manual_seed(1234)
    with recycle.megatron.session(given.schedule) as session:  # + instead of init_process_group
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=given.tensor,
            pipeline_model_parallel_size=given.pipeline,
            virtual_pipeline_model_parallel_size=given.chunks if given.chunks > 1 else None,
            num_distributed_optimizer_instances=given.instances or 1,
            expert_model_parallel_size=given.tensor if given.expert_parallel else 1,
            expert_tensor_parallel_size=1 if given.expert_parallel else given.tensor,
        )
        model = build_model(given)
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                min_lr=1e-4,
                weight_decay=0.01,
                clip_grad=1.0,
                bf16=given.bf16,
                fp16=given.fp16,
                initial_loss_scale=2.0**6,
                loss_scale_window=3,
                use_distributed_optimizer=given.instances > 0,
            ),
            model,
        )
        if given.fp16:
            get_model_config(model[0]).grad_scale_func = optimizer.scale_loss
        scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=1e-3,
            min_lr=1e-4,
            lr_warmup_steps=3,
            lr_decay_steps=30,
            lr_decay_style="cosine",
            start_wd=0.01,
            end_wd=0.01,
            wd_incr_steps=30,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
        )
        rank, parts = parallel_state.get_pipeline_model_parallel_rank(), [*model, optimizer, scheduler]
        first = 0
        if given.checkpoints is not None:
            first = newest_step(given.checkpoints, given.pipeline) + 1
        if first:
            states = torch.load(given.checkpoints / f"step-{first - 1}-rank{rank}.pt", weights_only=True)
            for part, state in zip(parts, states, strict=True):
                part.load_state_dict(state)
        session.attach(  # +
            model,
            optimizer,
            scheduler,
            data=lambda pipeline: micro_batches(session.step, given.micro_batches, pipeline),
            step=first,
        )
        for step in session.steps():  # + instead of range
            losses = session.forward_backward(forward_step, seq_length=SEQUENCE, micro_batch_size=ROWS)  # +
            session.optimizer_step()  # + instead of optimizer.step()
            scheduler.step(increment=1)
            report(f"step {step}", losses)
            if given.evaluate and step % given.evaluate == 0:
                for chunk in model:
                    chunk.eval()
                losses = session.evaluate(
                    forward_step,
                    data=lambda pipeline: micro_batches(1 << 20, given.micro_batches, pipeline),
                    seq_length=SEQUENCE,
                    micro_batch_size=ROWS,
                )
                for chunk in model:
                    chunk.train()
                report(f"evaluation after step {step}", losses)
            if given.checkpoints is not None and session.is_saver:
                path = given.checkpoints / f"step-{step}-rank{rank}.pt"
                torch.save([part.state_dict() for part in parts], path.with_suffix(".tmp"))
                path.with_suffix(".tmp").rename(path)
        if given.profile is not None:
            session.save_profile(given.profile)


def report(what: str, losses: list[torch.Tensor]) -> None:
    """Print the mean over all hosts and tensor ranks of the last stage."""
    kept = [torch.zeros(()), *(loss.cpu() for loss in losses)]
    total = torch.stack([torch.tensor(float(len(losses))), torch.stack(kept).sum()])
    for group in (parallel_state.get_data_parallel_group(), parallel_state.get_tensor_model_parallel_group()):
        torch.distributed.all_reduce(total, group=group)
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        print(f"{what}  loss {float(total[1] / total[0])!r}", flush=True)


def newest_step(folder: Path, ranks: int) -> int:
    """The last step whose state all ranks have saved; -1 if there is none."""
    saved = Counter(int(path.name.split("-")[1]) for path in folder.glob("step-*-rank*.pt"))
    return max((step for step, count in saved.items() if count == ranks), default=-1)


if __name__ == "__main__":
    if ON_GPU:
        main()
    else:
        with without_gpu():
            main()
