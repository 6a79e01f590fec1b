"""A script that calls its session wrongly, prints what is refused, trains nevertheless, and does more afterwards."""

import atexit
import gc
import os
import sys
import time
from argparse import Namespace
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

import recycle.megatron
from recycle import RunError
from recycle.exec.hooks import trace
from recycle.megatron.without_gpu import without_gpu
from recycle.runs.logs import log_path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "megatron_loop"))
from train import ROWS, SEQUENCE, build_model, forward_step, micro_batches

LONGER_THAN_DEAD_AFTER = 5.0
SIZES = {"seq_length": SEQUENCE, "micro_batch_size": ROWS}


def refused(what, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except RunError:
        print("refused:", what, flush=True)


def slow(append):
    def append_slowly(*arguments):
        time.sleep(1.0)
        return append(*arguments)

    return append_slowly


class Garbage:
    """In a cycle, as groups of an earlier generation may be."""

    collected_in = 0

    def __init__(self):
        self.cycle = self

    def __del__(self):
        Garbage.collected_in = os.getpid()


def is_collected_in_a_child():
    gc.disable()
    Garbage()
    if (child := os.fork()) == 0:
        gc.collect()
        os._exit(Garbage.collected_in == os.getpid())
    gc.enable()
    return os.waitpid(child, 0)[1] != 0


def detached(data, model):
    output, loss_of = forward_step(data, model)
    return output, lambda losses: tuple(part.detach() for part in loss_of(losses))


def main():
    torch.manual_seed(1)
    trace.append_iteration = slow(trace.append_iteration)
    if "--initialized" in sys.argv:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with recycle.megatron.session() as session:
        atexit.register(print, "at exit", flush=True)
        refused("a second session", recycle.megatron.session)
        print("a child collects:", is_collected_in_a_child())
        refused("no parallel_state", session.attach, [], None, data=None)
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
        model = build_model(Namespace(pipeline=2, chunks=1))
        if "--diverged" in sys.argv:
            next(model[0].parameters()).data.fill_(torch.nan)
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), model)

        def data(pipeline):
            return micro_batches(session.step, session.job.shape.micro_batches, pipeline)

        refused("no model", session.attach, [], optimizer, data=data)
        refused("a model without DDP", session.attach, optimizer, model, data=data)
        refused("no optimizer", session.attach, model, None, data=data)
        refused("an object without a state", session.attach, model, optimizer, 5, data=data)
        refused("an iterator", session.attach, model, optimizer, data=data(0))
        refused("a step that is not a number", session.attach, model, optimizer, data=data, step=1.0)
        session.attach(model, optimizer, data=data)
        refused("a second model", session.attach, model, optimizer, data=data)
        refused("a forward before the loop", session.forward_backward, forward_step, **SIZES)
        refused("an evaluation before the loop", session.evaluate, forward_step, data=data, **SIZES)
        for _ in session.steps():
            if "--exit-early" in sys.argv:
                sys.exit()
            if "--slow" in sys.argv and session.step > 1:
                time.sleep(5 * session.worker.rank)
            sizes = SIZES | {"seq_length": 32} if "--short" in sys.argv else SIZES
            session.forward_backward(detached if "--detached" in sys.argv else forward_step, **sizes)
            refused("a second forward", session.forward_backward, forward_step, **SIZES)
            refused("a step of the optimizer", optimizer.step)
            session.optimizer_step()
            refused("a second step", session.optimizer_step)
            if "--slow" not in sys.argv:
                session.stop()
        if "--exit-late" in sys.argv:
            sys.exit()
    print("steps traced:", log_path(session.directory, session.worker).read_text().count("\n"), flush=True)
    time.sleep(LONGER_THAN_DEAD_AFTER)
    print("ended", flush=True)


if __name__ == "__main__":
    with without_gpu():
        main()
