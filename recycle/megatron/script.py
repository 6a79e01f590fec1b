"""The model, optimizer and data of a user's Megatron script, as stages of a worker (`recycle.exec.worker`).

`ScriptStage` gives the interpreter a model chunk, `ScriptStages` the main loop all chunks of the process. Gradients are
summed by `finalize_model_grads`, over groups of the backend `live`. An iteration begins with zero gradients, so a
repeated iteration leaves nothing of the interrupted one.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from itertools import chain, product
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config
from torch import Tensor

from recycle.errors import RunError
from recycle.exec.model.stage import ReducedPart
from recycle.exec.model.state.accumulate import ExactSum, FlatLayout
from recycle.exec.protocol import STAGE_LOST, Copy, GenerationRecord
from recycle.exec.transport.base import MessageSpec, Transport
from recycle.exec.transport.groups import GroupTransport
from recycle.exec.worker.interpreter import Interpreter
from recycle.exec.worker.local_stages import LocalStages
from recycle.ir.communicators import lanes_of
from recycle.ir.instruction import Compute, Forward, Instruction
from recycle.ir.lower import forward_only, lower
from recycle.ir.schedule import Schedule
from recycle.job import Job
from recycle.job.shape import MicroBatch, Worker
from recycle.megatron.chunk import Arguments, Call, ModelChunk
from recycle.megatron.live import LiveWorld
from recycle.megatron.loop import model_attribute, require_fit
from recycle.megatron.micro_batches import IteratorOf, MicroBatches
from recycle.megatron.order import completing_computes
from recycle.megatron.peers import Peers
from recycle.megatron.transfer import receive_value, send_value
from recycle.megatron_versions import (
    forget_gradient_groups,
    gradient_buffers,
    loop_groups,
    optimizer_parts,
    reset_gradients,
    running_timers,
    without_sync,
    write_model_parameters,
)
from recycle.plans.hosting import Hosts

LATE = "a session sums gradients after the last backward, and gathers parameters after the step"
"""Why a session switches DDP's overlap off."""
_LOSS_GRID = 2.0**36
"""Losses are rounded to multiples of its inverse, 1.5e-11."""


class Script:
    """The user's objects in one process.

    Args:
        models: the process's chunks, in megatron-core's DDP.
        optimizer: megatron-core's, or torch's.
        others: further objects with `state_dict` and `load_state_dict`, which a returning process copies.

    Attributes:
        arguments: of the present iteration.
        results: of `Session.forward_backward`.
        stepped: (success, norm of the gradient, number of its zeros), as megatron-core's optimizer returns them.
        is_sharded: the optimizer is megatron-core's distributed one.
        shards: parts of a stage's optimizer state (`Peers`); 1 if each host holds all of it.
    """

    def __init__(
        self,
        job: Job,
        world: LiveWorld,
        models: Sequence[Any],
        optimizer: Any,
        others: Sequence[Any],
        iterator_of: IteratorOf,
    ) -> None:
        worker = world.worker
        self.job, self.models, self.optimizer, self.others = job, list(models), optimizer, list(others)
        shape, self.config = job.shape, get_model_config(models[0])
        indices = range(worker.rank, shape.stages, shape.ranks)
        self._require_support()
        ddp = models[0].ddp_config
        self.is_sharded = ddp.use_distributed_optimizer
        self.shards = shape.pipelines // ddp.num_distributed_optimizer_instances if self.is_sharded else 1
        self._switch_off_overlap()
        require_fit(models, indices, shape.stages, self.config, shape.ranks == 1 < shape.stages)
        self.stages = {
            index: ScriptStage(self, model, index, number if len(models) > 1 else None)
            for number, (index, model) in enumerate(zip(indices, models, strict=True))
        }
        self._data = {index: MicroBatches(iterator_of, shape.micro_batches) for index in indices}
        self.arguments: Arguments | None = None
        self.results: list[Any] = []
        self.stepped: tuple[Any, ...] = (True, None, None)
        self.peers: Peers
        self.call: Call
        self.completing: set[Compute] = set()
        self._reduced: set[int] = set()
        self._norms: dict[int, list[float]] = {}
        self._worker, self._world = worker, world
        self._sums = {index: self._exact_sums(model) for index, model in zip(indices, models, strict=True)}
        self._stack = ExitStack()
        self._evaluation: tuple[Arguments, Mapping[int, MicroBatches]]
        self._at = self._begun = -1
        self._scalers, self._is_megatron = loss_scalers(optimizer), hasattr(optimizer, "step_with_ready_grads")
        self._step_optimizer, optimizer.step = optimizer.step, self._refuse_step
        self._before: tuple[list[Tensor], list[Any]] = [], []
        self._loss_scale, self._tokens = 1.0, 0
        self._outer_timers: list[Any] = []
        for part in optimizer_parts(optimizer) if self._is_megatron else ():
            part.config.barrier_with_L1_time = False  # a step is not interrupted by the deaths of others

    def _exact_sums(self, model: Any) -> list[tuple[ExactSum, Tensor]]:
        """For each buffer of gradients the sum of all micro-batches; [] if the buffers themselves are the sums."""
        train = self.job.train
        if train.accumulation != "exact":
            return []
        addends = 2 * self.job.shape.global_micro_batches  # of I and of W
        return [
            (ExactSum(FlatLayout([buffer.shape]), addends, train.gradient_exponent, buffer.device), buffer)
            for buffer in gradient_buffers(model)
        ]

    def _refuse_step(self, *_: Any) -> None:
        raise RunError("optimizer.step: the optimizer would step twice; call only session.optimizer_step")

    def _require_support(self) -> None:
        config = self.config
        if config.finalize_model_grads_func is None:
            raise RunError(
                "config.finalize_model_grads_func is not set; set it to megatron-core's finalize_model_grads"
            )
        if model_attribute(self.models[0], "share_embeddings_and_output_weights") not in (None, self.job.model.tied):
            stated = str(not self.job.model.tied).lower()
            raise RunError(f"model: share_embeddings_and_output_weights = {stated}; state [model] tied = {stated}")
        if self.job.memory.offload != "off":
            raise RunError('[memory] offload: a session does not offload activations; set it to "off"')
        if config.num_moe_experts and config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
            raise RunError(
                "config.num_moe_experts is set: with tensor parallelism megatron-core needs sequence parallelism; set"
                " config.sequence_parallel"
            )
        if "global_aux_loss" in config.moe_router_load_balancing_type:
            raise RunError(
                "config.moe_router_load_balancing_type: global_aux_loss sums over workers in a forward; use aux_loss"
            )
        for model in self.models:
            ddp = model.ddp_config
            if ddp.use_distributed_optimizer and ddp.num_distributed_optimizer_instances == 1:
                raise RunError(
                    "DistributedDataParallelConfig.num_distributed_optimizer_instances = 1: each part of the"
                    " optimizer's state has one holder, and a death would lose it; set it to 2 or more, there and"
                    " in initialize_model_parallel"
                )

    def _switch_off_overlap(self) -> None:
        """Exact sums, and parts of a distributed optimizer, are exchanged when the last backward has ended."""
        ddp, config = self.models[0].ddp_config, self.config
        switched = [name for name in ("overlap_grad_reduce", "overlap_param_gather") if getattr(ddp, name)]
        if not switched or not (self.is_sharded or self.job.train.accumulation == "exact"):
            return
        print(f"{', '.join(switched)}: switched off; {LATE}", flush=True)
        for model in self.models:
            if model.use_forward_hook:
                model.disable_forward_pre_hook(param_sync=False)
        for model in self.models:
            model.ddp_config.overlap_grad_reduce = model.ddp_config.overlap_param_gather = False
        config.grad_sync_func = config.param_sync_func = None

    # An iteration.

    def begin(self, step: int) -> None:
        """Start an iteration from zero gradients."""
        assert self.arguments is not None
        self._reduced, self._at, self._begun = set(), step - 1, step
        self._before = [buffer.clone() for buffer in self._buffers()], [deepcopy(s.state_dict()) for s in self._scalers]
        self._loss_scale = float(self._scalers[0].scale) if self._scalers else 1.0
        self.completing.clear()
        reset_gradients(self.models)
        self.optimizer.zero_grad()
        for sums, _ in chain(*self._sums.values()):
            sums.clear()
        self._enter(self.arguments, self._data, step)
        self.call.seeded = lambda stage, micro_batch: self._seeded(step, stage, micro_batch)
        self._stack.enter_context(self.call.sync.off())

    def rolled_back(self, committed: int) -> None:
        """Undo what an iteration that was not committed has changed before its step."""
        if self._begun <= committed:
            return
        self._begun = committed
        buffers, scalers = self._before
        for buffer, before in zip(self._buffers(), buffers, strict=True):
            buffer.copy_(before)
        for scaler, state in zip(self._scalers, scalers, strict=True):
            scaler.load_state_dict(state)

    def _buffers(self) -> Iterator[Tensor]:
        """Such as the expert bias of a router, which `finalize_model_grads` changes."""
        return chain.from_iterable(model.module.buffers() for model in self.models)

    def _enter(
        self, arguments: Arguments, data: Mapping[int, MicroBatches], step: int, evaluates: bool = False
    ) -> None:
        self.interrupt()
        self.call = Call(
            self.models, arguments, loop_groups(), self.job.shape.micro_batches, self.completing, evaluates
        )
        self.call.collect = self._collect
        self.peers.transport.message = self.peers.transport.host_side().message = self.call.message
        for index, stage in self.stages.items():
            data[index].begin(step)
            stage.enter(self._stack, self.call, data[index].of)

    def evaluate(self, arguments: Arguments, iterator_of: IteratorOf, peers: Peers, step: int) -> list[Any]:
        """Run the forwards of an iteration over these processes. Returns what the loss function kept."""
        self.called()
        shape = self.job.shape
        data = {index: MicroBatches(iterator_of, shape.micro_batches) for index in self.stages}
        self._evaluation = arguments, data
        stages: Any = self.stages
        forwards: dict[Worker, list[Instruction]] = {worker: [] for worker in peers.live}
        for stage in range(shape.stages):
            for k, j in product(range(shape.pipelines), range(shape.micro_batches)):
                host = peers.holder(Worker(k, shape.rank_of(stage)))
                forwards[host].append(Forward(stage, MicroBatch(k, j)))
        dead = frozenset(shape.workers()) - set(peers.live)
        schedule, transport = lower(forward_only(Schedule.build(shape, forwards, failed=dead))), self.peers.transport
        program = schedule.program(self._worker)
        if not transport.connects(lanes_of(schedule)):
            transport = transport.host_side()
        interpreter = Interpreter(stages, shape.stages, transport, lambda stage: None)
        try:
            with torch.no_grad():
                interpreter.begin(program, step, batch=0)
                for instruction in program:
                    interpreter.execute(instruction)
            return self.call.results
        finally:
            self.interrupt()

    def begin_evaluation(self) -> None:
        self._enter(*self._evaluation, step=0, evaluates=True)

    def interrupt(self) -> None:
        """Leave the iteration under way, if any."""
        self._stack.close()
        for timer in running_timers(self.config):
            if timer not in self._outer_timers:
                timer.stop()

    def called(self) -> None:
        """The script calls the session; its own timers run on if the call is interrupted inside."""
        self._outer_timers = running_timers(self.config)

    def _seeded(self, step: int, stage: int, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        shape = self.job.shape
        number = (step * shape.pipelines + micro_batch.pipeline) * shape.micro_batches + micro_batch.index
        return _seeded((self.job.model.seed << 40) + number * shape.stages + stage)

    def _collect(self, stage: int) -> None:
        """Move a micro-batch's gradient to the exact sum."""
        for sums, buffer in self._sums[stage]:
            sums.add(0, buffer)
            buffer.zero_()

    def spoil(self, stage: int) -> None:
        """Make the gradient so far NaN, for a fault."""
        for tensor in (*gradient_buffers(self.stages[stage].model), *(sums.buffer for sums, _ in self._sums[stage])):
            tensor.fill_(math.nan)

    def reduce(self, stage: int) -> None:
        """Sum the gradients of all stages, when the last of them is complete."""
        self._reduced.add(stage)
        if len(self._reduced) < len(self.stages):
            return
        self.interrupt()
        exact, is_per_token = list(chain(*self._sums.values())), self.config.calculate_per_token_loss
        if exact:
            self.peers.transport.reduce(self._worker.rank, [sums.buffer for sums, _ in exact])
            for sums, buffer in exact:
                sums.mean(1 if is_per_token else self.job.shape.pipelines, buffer)
                if not sums.is_within_bounds():
                    buffer.fill_(math.nan)
        else:
            self.call.sync.start_remaining(list(self.stages))
        with without_sync(self.models, "finish_grad_sync") if exact else nullcontext():
            self.config.finalize_model_grads_func(
                self.models, None, pg_collection=loop_groups(), force_all_reduce=False
            )
        if is_per_token:
            self._divide_by_tokens()
        self.results[:] = self.call.results
        self._norms = {index: _norms_squared(stage.model) for index, stage in self.stages.items()}

    def _divide_by_tokens(self) -> None:
        """megatron-core would send the number of tokens along whole pipelines."""
        last = self.job.shape.ranks - 1
        tokens = self.peers.gather(None, self.call.tokens)
        self._tokens = sum(int(count) for worker, count in tokens.items() if worker.rank == last)
        for model in self.models if self._tokens else ():
            model.scale_gradients(1.0 / self._tokens)

    def mean_loss(self, loss: Tensor) -> float:
        """Of a micro-batch whose `forward_step` has returned `loss`, such that the mean over all is the step's."""
        if self.config.calculate_per_token_loss:
            return float(loss) * self.job.shape.global_micro_batches / max(1, self._tokens)
        return float(loss) * self.job.shape.micro_batches

    def norms_squared(self, stage: int) -> list[float]:
        """Of the reduced gradient of a stage, before the optimizer clips it; 0 if the loss scaler skips the step.

        First of parameters that are split over tensor ranks, then of the others.
        """
        return [norm / self._loss_scale**2 if self.stepped[0] else 0.0 for norm in self._norms[stage]]

    def prepare_step(self) -> None:
        """Do what needs other processes in the optimizer's step: the norm and the clipping of the gradient."""
        if not self._is_megatron:
            for parameter in self._parameters():
                parameter.grad = parameter.main_grad.to(parameter.dtype)
            return
        forget_gradient_groups(self.optimizer)
        self.optimizer.step_with_ready_grads = lambda: True  # an attribute of this object, which hides the method
        try:
            self.stepped = self._step_optimizer()
        finally:
            del self.optimizer.step_with_ready_grads

    def step(self, iteration: int) -> None:
        """Step the optimizer, once per iteration; needs no other process."""
        if self._at == iteration:
            return
        self._at = iteration
        with self._world.stepping(), without_sync(self.models, "start_param_sync"):
            if not self._is_megatron:
                self._step_optimizer()
            elif self.stepped[0]:
                self.optimizer.step_with_ready_grads()

    def gather_parameters(self) -> None:
        """Get the parts of the parameters that other hosts of the stages have stepped."""
        for model in self.models:
            model.start_param_sync(force_sync=True)

    def _parameters(self) -> Iterator[Any]:
        for model in self.models:
            yield from (parameter for parameter in model.parameters() if parameter.requires_grad)

    def share_embedding(self) -> None:
        """Give the last stage the embedding that it shares: a process by itself leaves the initial weight 0 there."""
        last = self.job.shape.stages - 1
        if not self.job.model.tied or not {0, last} & self.stages.keys() or self.job.shape.ranks == 1:
            return
        place = 0 if 0 in self.stages else last
        weight = model_attribute(self.stages[place].model, "shared_embedding_or_output_weight")().data
        if place:
            weight.zero_()
        torch.distributed.all_reduce(weight, group=loop_groups().embd)
        if hasattr(self.optimizer, "reload_model_params"):
            self.optimizer.reload_model_params()

    # The state.

    def _tensors(self) -> list[Tensor]:
        modules = [model.module for model in self.models]
        return [tensor.detach() for module in modules for tensor in (*module.parameters(), *module.buffers())]

    def checksum(self) -> Tensor:
        """Two numbers that depend on all weights."""
        weights = [tensor.double() for tensor in self._tensors() if tensor.is_floating_point()]
        sums = [sum(map(float, map(sum_of, weights))) for sum_of in (torch.sum, torch.linalg.vector_norm)]
        return torch.tensor(sums, dtype=torch.float64)

    def state(self) -> dict[str, Any]:
        return {
            "model": self._tensors(),
            "optimizer": None if self.is_sharded else self.optimizer.state_dict(),
            "scalers": [scaler.state_dict() for scaler in self._scalers],
            "random": torch.get_rng_state(),
            "settings": None if self.is_sharded else self.settings(),  # megatron-core's scheduler loads only once
        }

    def load_state(self, state: dict[str, Any]) -> None:
        for tensor, source in zip(self._tensors(), state["model"], strict=True):
            tensor.copy_(source)
        if not self.is_sharded:
            self.optimizer.load_state_dict(state["optimizer"])
        for scaler, source in zip(self._scalers, state["scalers"], strict=True):
            scaler.load_state_dict(source)
        if not self.is_sharded:
            self.load_settings(state["settings"])
        torch.set_rng_state(state["random"])

    def settings(self) -> dict[str, Any]:
        """What the script changes after a step: its further objects, and settings of a sharded optimizer's groups."""
        inner = inner_optimizers(self.optimizer) if self.is_sharded else []
        return {
            "others": [other.state_dict() for other in self.others],
            "groups": [
                [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
                for optimizer in inner
            ],
        }

    def load_settings(self, state: dict[str, Any]) -> None:
        for other, source in zip(self.others, state["others"], strict=True):
            if isinstance(other, OptimizerParamScheduler):
                other.num_steps = 0  # it adds the loaded steps to those of a checkpoint that the script has loaded
            other.load_state_dict(source)
        for optimizer, groups in zip(inner_optimizers(self.optimizer), state["groups"], strict=False):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)

    def bytes_held(self) -> Tensor:
        """For each chunk the bytes of a message, of a micro-batch's activations, and of parameters and their state."""
        (shape, dtype), stages = self.peers.transport.message, self.stages.values()
        message = math.prod(shape) * dtype.itemsize
        own = [_bytes([*stage.model.module.parameters(), *gradient_buffers(stage.model)]) for stage in stages]
        inner = inner_optimizers(self.optimizer) if self._is_megatron else [self.optimizer]
        state = [part for optimizer in inner for parts in optimizer.state.values() for part in parts.values()]
        weights = {tensor.data_ptr() for tensor in self._tensors()}
        copies = [copy for optimizer in inner for copy in _parameters_of(optimizer) if copy.data_ptr() not in weights]
        of_optimizer = 1 + _bytes([*filter(torch.is_tensor, state), *copies]) / sum(own)  # in proportion
        rows = [[message, stage.activation_bytes, size * of_optimizer] for stage, size in zip(stages, own, strict=True)]
        return torch.tensor(rows, dtype=torch.float64)

    def optimizer_part(self) -> list[Any]:
        """This process's part of a sharded optimizer's state, with the parameters that it steps."""
        inner = inner_optimizers(self.optimizer)
        return [
            [optimizer.state_dict(), [parameter.detach() for parameter in _parameters_of(optimizer)]]
            for optimizer in inner
        ]

    def load_optimizer_part(self, parts: list[Any]) -> None:
        for optimizer, (state, parameters) in zip(inner_optimizers(self.optimizer), parts, strict=True):
            optimizer.load_state_dict(state)
            for parameter, source in zip(_parameters_of(optimizer), parameters, strict=True):
                parameter.detach().copy_(source)
        write_model_parameters(self.optimizer)  # others gather this part from here


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    # `torch.manual_seed` takes a third of a millisecond without a GPU, because it queues a call for one.
    generators = [torch.default_generator, *torch.cuda.default_generators]
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def seeded_apart(tensor_rank: int) -> AbstractContextManager[None]:
    """Draw other numbers in each tensor rank inside the block, and afterwards the same ones again."""
    return _seeded((int(torch.randint(1 << 40, ())) << 20) + tensor_rank)


def loss_scalers(optimizer: Any) -> list[Any]:
    """megatron-core's scalers of the loss, for fp16; [] for another optimizer, or without one."""
    return [scaler for part in optimizer_parts(optimizer) if (scaler := getattr(part, "grad_scaler", None)) is not None]


def inner_optimizers(optimizer: Any) -> list[Any]:
    """torch's optimizers inside megatron-core's; with its distributed optimizer their parameters are parts."""
    return [part.optimizer for part in optimizer_parts(optimizer)]


def _parameters_of(optimizer: Any) -> Iterator[Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _norms_squared(model: Any) -> list[float]:
    norms: tuple[list[Tensor], ...] = [], []
    for parameter in model.parameters():
        if parameter.requires_grad and not getattr(parameter, "shared", False):
            is_own_expert = not getattr(parameter, "allreduce", True)
            is_copied = not (is_own_expert or getattr(parameter, "tensor_model_parallel", False))
            norms[is_copied].append(torch.linalg.vector_norm(parameter.main_grad))
    return [float(torch.stack(part).double().square().sum()) if part else 0.0 for part in norms]


class _Layout:
    """The part of `recycle.exec.model.stage.StateLayout` that the loop uses: the state stays with its stage."""

    incomplete: frozenset[int] = frozenset()

    def __init__(self, script: Script) -> None:
        self._script = script

    def reduce(self, stage: ScriptStage, transport: Transport, bucket: int, buckets: int) -> None:
        stage.script.reduce(stage.index)

    def reduced(self, stage: ScriptStage) -> Iterator[ReducedPart]:
        norms, has_copies = stage.script.norms_squared(stage.index), stage.script.job.grid.tensor_parallel > 1
        yield ReducedPart(stage.index, norms, (1,) if has_copies else (), 0)

    def gathered(self) -> list[Tensor]:
        """Not empty if a step changes only parts of the parameters."""
        return list(_parameters_of(self._script.optimizer)) if self._script.is_sharded else []


class ScriptStage(ModelChunk):
    """A chunk with what iterations need of a `recycle.exec.model.stage.Stage`."""

    def __init__(self, script: Script, model: Any, index: int, number: int | None) -> None:
        super().__init__(
            model, index, script.job.shape.stages, number, None, script.job.planner.decoupled, script.config
        )
        self.script, self.index, self.layout = script, index, _Layout(script)
        self.activation_bytes = 0

    def forward(self, micro_batch: MicroBatch, activation: Tensor | None) -> Tensor | None:
        if self.activation_bytes or self.call.forward_only:
            return super().forward(micro_batch, activation)
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        held: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                held[storage.data_ptr()] = storage.nbytes()
            return tensor if tensor.is_leaf else tensor.detach()  # an output would hold its own graph

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = super().forward(micro_batch, activation)
        self.activation_bytes = sum(held.values())
        return output

    def begin_iteration(self, step: int) -> None:
        if self.index == min(self.script.stages):
            self.script.begin(step)

    def expect(self, iteration: int, program: Any) -> None:
        self.script.completing.update(completing_computes(program))

    def begin_evaluation(self, batch: int) -> None:
        if self.index == min(self.script.stages):
            self.script.begin_evaluation()

    def message_spec(self) -> MessageSpec:
        """Only known when an iteration begins (`Script.begin`)."""
        return (0,), torch.float32

    def tied_buffers(self) -> list[Tensor]:
        """Nothing: `finalize_model_grads` sums shared weights."""
        return []

    def loss_sum(self) -> float | None:
        if not self._is_last:
            return None
        losses = [self.script.mean_loss(loss) for loss in self.call.losses.values()]
        # On a grid the sum is exact, and does not depend on which process runs a micro-batch.
        return sum(round(loss * _LOSS_GRID) / _LOSS_GRID if math.isfinite(loss) else loss for loss in losses)

    def watched_checksums(self) -> dict[MicroBatch, Any]:
        return {}

    def step(self, iteration: int, clip_factor: float) -> None:
        """The optimizer clips by its own limit."""
        self.script.step(iteration)

    def spoil_gradients(self) -> None:
        self.script.spoil(self.index)

    def flip(self, target: str, bit: int) -> None:
        raise RunError("fault flip: a session does not flip bits")

    def digests(self) -> dict[int, str]:
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
        return {self.index: digest.hexdigest()}


class ScriptStages(LocalStages):
    """All chunks of the process. They never change; a process that joins copies the state of all at once."""

    def __init__(self, job: Job, worker: Worker, script: Script, world: LiveWorld, holds: bool) -> None:
        self._script, self._world = script, world
        self._units = [unit for units in Hosts.at_start(job, None).units[worker] for unit in range(*units)]
        super().__init__(worker, lambda indices, **_: dict[int, Any](script.stages), (), script.stages, holds)

    def place(self, cut: Sequence[int], indices: Any) -> bool:
        if tuple(sorted(indices)) != tuple(sorted(self.stages)):
            raise RunError("the plan moves stages, which a session cannot")
        return False

    def _placed_units(self) -> Iterator[tuple[int, Any]]:
        yield from ((unit, None) for unit in self._units)

    def send(self, transport: GroupTransport, peer: Worker, copy: Copy) -> None:
        if copy.first == self._units[0]:
            send_value(transport, peer, self._script.state())

    def receive(self, transport: GroupTransport, peer: Worker, copy: Copy) -> int:
        if copy.first != self._units[0]:
            return 0
        state, size = receive_value(transport, peer)
        self._script.load_state(state)
        return size

    def gather(self, transport: GroupTransport, record: GenerationRecord, is_stale: bool) -> bool:
        """Give a joining process its part of a sharded optimizer's state, then complete the parameters of all."""
        script = self._script
        if not script.is_sharded:
            return False
        peers = Peers(transport, sorted(map(Worker.parse, record.live)), shards=script.shards)
        joining = sorted(map(Worker.parse, record.joins))
        for part in product(range(script.shards), range(script.job.shape.ranks)):
            self._copy_part(peers, Worker(*part), joining, record.committed)
        if is_stale:
            self._world.is_alone, self._world.peers = False, peers
            script.gather_parameters()
        return True

    def _copy_part(self, peers: Peers, part: Worker, joining: Collection[Worker], committed: int) -> None:
        script, holders = self._script, peers.holders(part)
        givers = [holder for holder in holders if holder not in joining]
        if not givers:
            print(
                f"part {part.pipeline} of the optimizer's state of rank {part.rank} has no live holder after step"
                f" {committed}; load the newest checkpoint",
                flush=True,
            )
            sys.exit(STAGE_LOST)
        for joiner in (holder for holder in holders if holder in joining):
            if self.worker == givers[0]:
                peers.send(joiner, script.optimizer_part())
            elif self.worker == joiner:
                script.load_optimizer_part(peers.receive(givers[0]))
                peers.transport.settle()
