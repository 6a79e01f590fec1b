"""`forward_backward_func(schedule)`: any checked schedule in Megatron's training loop.

    forward_backward_func = get_forward_backward_func()                        # before
    forward_backward_func = recycle.megatron.forward_backward_func("zb-h1")    # after

The returned function has the arguments and result of megatron-core's. Megatron keeps the forward step, the loss, DDP,
`finalize_model_grads` and the optimizer; the schedule determines the order of F, B, I and W and the transfers between
ranks. Failures are not survived here: torchrun ends all workers when one dies. `recycle train` survives failures.

Limits: `_REFUSED`; with split backwards also fused gradient accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, cast

from megatron.core.utils import get_attr_wrapped_model, get_model_config

from recycle.errors import RunError
from recycle.exec.model.stage import Stage
from recycle.exec.protocol import Computed
from recycle.exec.transport.base import Transport
from recycle.exec.worker.interpreter import Interpreter
from recycle.ir.instruction import BackwardInput
from recycle.job.shape import MicroBatch
from recycle.megatron.chunk import Arguments, Call, ModelChunk
from recycle.megatron.lanes import PipelineLanes
from recycle.megatron.order import MegatronGrid, RankOrder, ScheduleSource, evaluation_order, training_order
from recycle.megatron.placement import current_grid
from recycle.megatron_versions import is_encoder_decoder, loop_groups

_OWN_SCHEDULE = "it selects one of megatron-core's own schedules"
_REFUSED: Mapping[str, str] = {
    "overlap_moe_expert_parallel_comm": _OWN_SCHEDULE,
    "hybrid_context_parallel": _OWN_SCHEDULE,
    "defer_embedding_wgrad_compute": "a schedule with W decides when the output layer's weight gradients are computed",
    "delay_wgrad_compute": "a schedule with W decides when weight gradients are computed",
    "num_microbatches_with_partial_activation_checkpoints": "it follows the order of megatron-core's own 1F1B",
    "variable_seq_lengths": "transfers have one shape",
    "mtp_standalone": "transfers have one shape",
    "fine_grained_activation_offloading": "it follows the order of megatron-core's own schedules",
    "cpu_offloading": "it follows the order of megatron-core's own schedules",
    # Only some versions of megatron-core have these.
    "overlap_dispatch_backward_with_experts_wgrad": "a schedule with W decides when weight gradients are computed",
    "moe_paged_stash": "it follows the order of megatron-core's own schedules",
    "flextron": "finalize_model_grads sums other losses than the schedule's",
}
"""Field of the model's config -> why it cannot be set."""
_SHARDED_WEIGHTS = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")


def forward_backward_func(schedule: ScheduleSource) -> ForwardBackward:
    """Return a function that runs an iteration of `schedule` in Megatron's training loop.

    Args:
        schedule: a schedule of one pipeline, or of one equal pipeline per data-parallel replica; a family's name, for
            any number of micro-batches; or the path of a schedule file.

    Returns:
        A function with the arguments and result of `megatron.core.pipeline_parallel.get_forward_backward_func()`'s. Its
        first call, and the first call with another number of micro-batches, check the schedule against the model and
        `parallel_state`, and raise ScheduleError, JobError or RunError.
    """
    return ForwardBackward(schedule)


class ForwardBackward:
    """See `forward_backward_func`.

    Attributes:
        computed: F, I, W and B of the last call by stage, with their seconds on this process.
    """

    def __init__(self, schedule: ScheduleSource) -> None:
        self._schedule = schedule
        self.computed: list[Computed] = []
        self._orders: dict[tuple[bool, int, MegatronGrid], RankOrder] = {}
        self._chunks: dict[tuple[int, ...], tuple[list[Any], list[ModelChunk]]] = {}

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Run one iteration: all forwards and, unless `forward_only`, all backwards and `finalize_model_grads_func`.

        The arguments are megatron-core's (see its `get_forward_backward_func`). Transfers have the shape [seq_length,
        micro_batch_size, hidden].

        Returns:
            The loss function's kept values of each micro-batch, in order, on the last stage; [] on the others.
        """
        models = list(model) if isinstance(model, list) else [model]
        config = get_model_config(models[0])
        if adjust_tensor_shapes_fn is not None:
            raise RunError("adjust_tensor_shapes_fn: transfers of a schedule have one shape")
        groups = pg_collection if pg_collection is not None else loop_groups()
        order = self._order(forward_only, num_microbatches)
        chunks = self._model_chunks(models, order, config)
        sizes = seq_length, micro_batch_size, decoder_seq_length
        arguments = Arguments(forward_step_func, *sizes, collect_non_loss_data, first_val_step)
        call = Call(models, arguments, groups, num_microbatches, order.completing, forward_only)
        lanes = PipelineLanes(groups.pp, *call.message, call.device)
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        self._run(call, order, chunks, _iterators(data_iterator, len(models)), lanes)
        if not forward_only:
            call.sync.start_remaining(order.stages)
            if config.finalize_model_grads_func is not None:
                config.finalize_model_grads_func(
                    models,
                    call.tokens if config.calculate_per_token_loss else None,
                    pg_collection=groups,
                    force_all_reduce=force_all_reduce,
                )
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return call.results

    def _run(
        self, call: Call, order: RankOrder, chunks: Sequence[ModelChunk], data: Sequence[Any], lanes: PipelineLanes
    ) -> None:
        stages = dict(zip(order.stages, chunks, strict=True))
        # Without reduces and steps the interpreter uses only what chunks and lanes provide.
        interpreter = Interpreter(
            cast("Mapping[int, Stage]", stages), order.all_stages, cast("Transport", lanes), lambda stage: None
        )
        with ExitStack() as stack:
            stack.callback(lanes.close)
            for chunk, batches in zip(chunks, data, strict=True):
                chunk.enter(stack, call, _same_for_all(batches))
            stack.enter_context(call.sync.off())
            self._sync_parameters(call, chunks)
            interpreter.begin(order.program, 0)
            for instruction in order.program:
                interpreter.execute(instruction)
            lanes.finish()
            self.computed = interpreter.compute

    def _sync_parameters(self, call: Call, chunks: Sequence[ModelChunk]) -> None:
        functions = call.config.param_sync_func
        if functions is None or call.forward_only or len(chunks) == 1:
            return
        for place, chunk in enumerate(chunks):
            function = functions[place] if isinstance(functions, list) else functions
            function(chunk.model.parameters())

    def _order(self, forward_only: bool, micro_batches: int) -> RankOrder:
        grid = current_grid()
        key = forward_only, micro_batches, grid
        if key not in self._orders:
            make = evaluation_order if forward_only else training_order
            self._orders[key] = make(self._schedule, grid, micro_batches)
        return self._orders[key]

    def _model_chunks(self, models: list[Any], order: RankOrder, config: Any) -> list[ModelChunk]:
        is_split = any(isinstance(instruction, BackwardInput) for instruction in order.program)
        key = (*map(id, models), is_split)
        if key not in self._chunks:
            require_fit(models, order.stages, order.all_stages, config, order.ends_share_rank)
            grid = current_grid()
            built = [
                ModelChunk(
                    model,
                    stage,
                    order.all_stages,
                    number if len(models) > 1 else None,
                    stage % grid.ranks if stage % grid.ranks != grid.rank else None,
                    is_split,
                    config,
                )
                for number, (model, stage) in enumerate(zip(models, order.stages, strict=True))
            ]
            self._chunks[key] = models, built
        return self._chunks[key][1]


def _same_for_all(data: Any) -> Callable[[MicroBatch], Any]:
    return lambda micro_batch: data


def _iterators(data: Any, count: int) -> list[Any]:
    iterators = data if isinstance(data, list) else [data]
    if len(iterators) != count:
        raise RunError(f"data_iterator: {len(iterators)} iterators for {count} model chunks; give each its own")
    return iterators


def require_fit(
    models: Sequence[Any], stages: Sequence[int], all_stages: int, config: Any, ends_share_rank: bool = False
) -> None:
    """Raise RunError for models or settings that the interpreter cannot run as these stages of `all_stages`."""
    if len(models) != len(stages):
        raise RunError(f"model: {len(models)} chunks, the schedule has {len(stages)} per rank")
    for name, why in _REFUSED.items():
        if getattr(config, name, None):
            raise RunError(f"config.{name} is set: {why}; switch it off")
    for name in _SHARDED_WEIGHTS:
        if getattr(config, name, 1) > 1:
            raise RunError(f"config.{name} is set: schedules do not gather weights; set it to 1")
    if getattr(config, "cuda_graph_impl", "none") != "none":
        raise RunError("config.cuda_graph_impl is set: the loop does not capture CUDA graphs; switch it off")
    if is_encoder_decoder(models[0]):
        raise RunError("model: encoder and decoder pass two tensors between stages; a schedule's stages pass one")
    for model, stage in zip(models, stages, strict=True):
        for name, wanted in (("pre_process", stage == 0), ("post_process", stage == all_stages - 1)):
            value = model_attribute(model, name)
            if value is not None and bool(value) != wanted:
                raise RunError(
                    f"model: the chunk of stage {stage} has {name} = {value}, expected {wanted}; build each chunk"
                    " inside recycle.megatron.as_stage(schedule, vp_stage)"
                )
        if ends_share_rank and model_attribute(model, "share_embeddings_and_output_weights"):
            raise RunError(
                "model: embedding and output layer share a weight and lie in two chunks of one rank, whose gradients"
                " megatron-core does not sum; untie them, or use a schedule on a loop"
            )


def model_attribute(model: Any, name: str) -> Any:
    """The attribute of a module inside DDP and other wrappers; None if it has none."""
    try:
        return get_attr_wrapped_model(model, name)
    except RuntimeError:
        return None
