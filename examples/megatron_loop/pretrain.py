"""A script with the parts of Megatron-LM's `pretrain()`, and with a session.

It has functions for model, datasets, batch and loss, data loaders that start at a number of consumed samples, training
with a learning rate's scheduler, a log, evaluation and checkpoints, and a test at the end. The lines with `# session`
are those that a failure needs.

    recycle agent examples/megatron_loop/job.toml -- python examples/megatron_loop/pretrain.py
    recycle agent examples/megatron_loop/job.toml --fault kill:1.1@3 -- python examples/megatron_loop/pretrain.py

Megatron-LM's own scripts need no change: `recycle agent JOB -- python -m recycle.megatron pretrain_gpt.py ...`
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

warnings.simplefilter("ignore")  # megatron-core tells of every optional package that is missing

from megatron.core import parallel_state  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402

import recycle.megatron  # noqa: E402
from recycle.megatron.without_gpu import without_gpu  # noqa: E402

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from train import ON_GPU, ROWS, SEQUENCE, VOCABULARY, build_model  # noqa: E402

SIZES = {"seq_length": SEQUENCE, "micro_batch_size": ROWS}


class Text(Dataset[torch.Tensor]):
    """Rows whose next token follows from the last one."""

    def __init__(self, samples: int, seed: int) -> None:
        self._samples, self._seed = samples, seed

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_000 + index)
        first = torch.randint(0, VOCABULARY, (1,), generator=generator)
        return (first + 7 * torch.arange(SEQUENCE + 1)) % VOCABULARY


def datasets_provider(samples: tuple[int, int, int]) -> list[Text]:
    return [Text(count, seed) for seed, count in enumerate(samples)]


def build_loader(dataset: Text, consumed: int, replica: int) -> Iterator[torch.Tensor]:
    """The micro-batches of a data-parallel replica after a number of samples that all replicas have consumed."""
    stride = ROWS * parallel_state.get_data_parallel_world_size()
    rows = [range(at + replica * ROWS, at + (replica + 1) * ROWS) for at in range(consumed, len(dataset), stride)]
    return iter(DataLoader(dataset, batch_sampler=rows))


def get_batch(data: Iterator[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = next(data).cuda() if ON_GPU else next(data)
    positions = torch.arange(SEQUENCE, device=tokens.device).expand(len(tokens), -1)
    return tokens[:, :-1], tokens[:, 1:].contiguous(), positions


def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total, tokens = output.float().sum(), torch.tensor(output.numel(), dtype=torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens])}


def forward_step(data: Iterator[torch.Tensor], model: torch.nn.Module) -> Any:
    tokens, labels, positions = get_batch(data)
    return model(input_ids=tokens, position_ids=positions, attention_mask=None, labels=labels), loss_func


def pretrain(given: argparse.Namespace) -> None:
    with recycle.megatron.session() as session:  # session: instead of init_process_group
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=given.pipeline)
        model, optimizer, scheduler = setup_model_and_optimizer(given)
        first = load_checkpoint(given, model, optimizer, scheduler)
        batch = ROWS * given.micro_batches * parallel_state.get_data_parallel_world_size()
        train, valid, test = datasets_provider((given.train_iters * batch, given.train_iters * batch, batch))
        data = lambda replica: build_loader(train, session.step * batch, replica)  # noqa: E731  # session: any replica
        session.attach(model, optimizer, scheduler, data=data, step=first)  # session
        for iteration in session.steps():  # session: instead of range
            if given.exit_interval and (iteration + 1) % given.exit_interval == 0:
                session.stop()  # session: instead of break
            losses = session.forward_backward(forward_step, **SIZES)  # session: instead of forward_backward_func
            success, norm, _ = session.optimizer_step()  # session: instead of optimizer.step
            if success:
                scheduler.step(increment=batch)
            rate = optimizer.param_groups[0]["lr"]
            log(f"iteration {iteration} | learning rate {rate:.3e} | grad norm {norm:.3f} |", losses)
            if given.eval_interval and (iteration + 1) % given.eval_interval == 0:
                consumed = (iteration + 1) // given.eval_interval * batch - batch
                log(f"validation after {iteration} |", evaluate(session, model, valid, consumed))
            if given.save is not None and session.is_saver:  # session: instead of a data-parallel rank of 0
                save_checkpoint(given, iteration, model, optimizer, scheduler)
        log("test |", evaluate(session, model, test, 0))


def setup_model_and_optimizer(given: argparse.Namespace) -> tuple[list[Any], Any, Any]:
    model = build_model(given)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-4, weight_decay=0.01, clip_grad=1.0), model
    )
    samples = given.train_iters * given.micro_batches * ROWS * parallel_state.get_data_parallel_world_size()
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=1e-4,
        lr_warmup_steps=samples // 4,
        lr_decay_steps=samples,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=samples,
        wd_incr_style="constant",
    )
    return model, optimizer, scheduler


def evaluate(session: Any, model: list[Any], dataset: Text, consumed: int) -> list[Any]:
    for chunk in model:
        chunk.eval()
    losses: list[Any] = session.evaluate(  # session: instead of forward_backward_func with forward_only
        forward_step, data=partial(build_loader, dataset, consumed), **SIZES
    )
    for chunk in model:
        chunk.train()
    return losses


def log(what: str, losses: list[dict[str, torch.Tensor]]) -> None:
    """Print the mean loss per token of all micro-batches, in the processes of the last stage."""
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return
    total = torch.stack([kept["lm loss"] for kept in losses]).sum(dim=0)
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
    print(f"{what} lm loss {float(total[0] / total[1])!r}", flush=True)


def _path(given: argparse.Namespace, iteration: int, rank: int) -> Path:
    return Path(given.save) / f"iter_{iteration:07d}" / f"rank_{rank:03d}.pt"


def save_checkpoint(given: argparse.Namespace, iteration: int, model: list[Any], *others: Any) -> None:
    path = _path(given, iteration, parallel_state.get_pipeline_model_parallel_rank())
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save([part.state_dict() for part in (*model, *others)], path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


def load_checkpoint(given: argparse.Namespace, model: list[Any], *others: Any) -> int:
    """Load the newest iteration that all ranks have saved. Returns the next one."""
    for iteration in reversed(range(given.train_iters if given.save is not None else 0)):
        if all(_path(given, iteration, rank).exists() for rank in range(given.pipeline)):
            path = _path(given, iteration, parallel_state.get_pipeline_model_parallel_rank())
            for part, state in zip((*model, *others), torch.load(path, weights_only=True), strict=True):
                part.load_state_dict(state)
            return iteration + 1
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", type=int, default=2, help="ranks of a pipeline")
    parser.add_argument("--chunks", type=int, default=1, choices=[1], help="model chunks of a rank")
    parser.add_argument("--tensor", type=int, default=1, choices=[1], help="tensor ranks of a worker")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--train-iters", type=int, default=10)
    parser.add_argument("--eval-interval", type=int, default=0, help="iterations between evaluations")
    parser.add_argument("--exit-interval", type=int, default=0, help="ends the script after a multiple of iterations")
    parser.add_argument("--save", type=Path, help="folder for a checkpoint of each iteration")
    torch.manual_seed(1234)
    pretrain(parser.parse_args())


if __name__ == "__main__":
    if ON_GPU:
        main()
    else:
        with without_gpu():
            main()
