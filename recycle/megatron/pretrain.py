"""Megatron-LM's `pretrain()` in a session, without a changed line of it or of the script that calls it.

These functions of its modules are replaced:

    initialize._initialize_distributed      compares the arguments with the job, and initializes parallel_state
    training.build_train_valid_test_data_iterators
                                            keeps the datasets, for iterators of any pipeline from any sample on
    training.train                          attaches the session; a returning process continues at its peers' iteration
    training.train_step                     is a step of the session
    training.training_log                   makes no collectives that other processes do not make
    training.get_forward_backward_func      returns the session's iteration and evaluation
    training.save_checkpoint                saves each stage once, by its first live host
    torch.distributed.get_rank              a live process stands in for the first and the last rank, which print

Megatron's rerun machine is switched off: it would repeat an iteration in this process alone.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from recycle.errors import RunError, first_line
from recycle.job import Job
from recycle.megatron.own_loop import Session, session
from recycle.megatron.peers import Peers
from recycle.megatron.script import LATE
from recycle.megatron.without_gpu import without_gpu
from recycle.megatron_versions import adam_steps_kept, installed_versions, optimizer_parts, parallel_rank, replaced

_REFUSED = (
    *(
        "async_save",
        "adlr_autoresume",
        "ckpt_convert_format",
        "data_parallel_random_init",
        "decrease_batch_size_if_needed",
    ),
    *("dist_ckpt_optim_fully_reshardable", "full_validation", "hybrid_context_parallel"),
    *("inprocess_restart", "iterations_to_skip", "moe_use_upcycling", "multiple_validation_sets"),
    *("non_persistent_save_interval", "perform_rl_step", "phase_transition_iterations", "rampup_batch_size"),
    *("save_dgrads_interval", "save_wgrads_interval", "skip_train", "use_megatron_fsdp", "use_torch_fsdp2"),
    *("use_tp_pp_dp_mapping", "vision_pretraining"),
)
"""Arguments of Megatron-LM that must not be set."""
_GLOO = "enable_gloo_process_groups", "use_gloo_process_groups"
"""Argument of Megatron-LM up to 0.18, and from 0.19 on."""
_OVERLAPS = "overlap_grad_reduce", "overlap_param_gather", "overlap_param_gather_with_optimizer_step"
_EXITS = "exit_interval", "exit_duration_in_mins", "exit_signal_handler"
"""Arguments of Megatron-LM that end a script; SIGTERM to the agents has the effect of the last one anyway."""
_START = "_initialize_distributed"
_REPLACED = ("train", "train_step", "training_log", "load_checkpoint", "save_checkpoint")


def run(script: Path, arguments: Sequence[str]) -> None:
    """Run a script of Megatron-LM in this process, which `recycle agent` has started."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    with nullcontext() if torch.cuda.is_available() else without_gpu(), session() as current:
        _Pretraining(current, script).install()
        try:
            runpy.run_path(str(script), run_name="__main__")
        except AssertionError as error:  # Megatron-LM's way to refuse arguments
            traceback.print_exc()
            raise RunError(f"{script.name}: {first_line(error)}") from None


def require_fit(script: str, args: Any, job: Job) -> None:
    """Raise RunError if arguments of Megatron-LM differ from the job, or ask for what a session cannot do."""
    shape, steps = job.shape, args.train_iters or (args.train_samples or 0) // args.global_batch_size
    for what, value, key, wanted in (
        ("pipeline-parallel size", args.pipeline_model_parallel_size, "[shape] ranks", shape.ranks),
        ("data-parallel size", args.data_parallel_size, "[shape] pipelines", shape.pipelines),
        ("virtual pipeline size", args.virtual_pipeline_model_parallel_size or 1, "[shape] chunks", shape.chunks),
        (
            "micro-batches",
            args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
            "[shape] micro_batches",
            shape.micro_batches,
        ),
        ("iterations", steps, "[train] steps", job.train.steps),
    ):
        if value != wanted:
            raise RunError(
                f"{script}: its arguments give {what} {value}, the job has {key} = {wanted}; change one of them"
            )
    settings = [name for name in _REFUSED if getattr(args, name, None)]
    batches = ("global_batch_size", "micro_batch_size")
    settings += [
        f"eval_{name}" for name in batches if getattr(args, f"eval_{name}", None) not in (None, getattr(args, name))
    ]
    settings += ["cuda_graph_impl"] if getattr(args, "cuda_graph_impl", "none") != "none" else []
    settings += ["dataloader_type"] if args.dataloader_type == "external" else []
    if settings:
        value = getattr(args, settings[0])
        option = f"--{settings[0].replace('_', '-')} {'' if value is True else value}".strip()
        raise RunError(f"{script}: {option}: is not supported in a session; remove it")
    if args.save is not None and args.ckpt_format not in ("torch", "torch_dist"):
        formats = "a session saves the formats torch and torch_dist; state one of them"
        raise RunError(f"{script}: --ckpt-format {args.ckpt_format}: {formats}")
    if args.save is not None and args.ckpt_format == "torch_dist" and importlib.util.find_spec("psutil") is None:
        raise RunError(f"{script}: --ckpt-format torch_dist: megatron-core needs psutil to save; install it")


class Samples:
    """A dataset, read from any sample on, for any data-parallel rank.

    Attributes:
        position: number of samples that all ranks have consumed.
    """

    def __init__(self, training: Any, dataset: Any, position: int) -> None:
        self._training, self.dataset, self.position = training, dataset, position
        self._open: dict[int, _Reader] = {}

    def iterator(self, pipeline: int) -> Iterator[Any] | None:
        if self.dataset is None:
            return None
        reader = self._open.get(pipeline)
        if reader is None or reader.position != self.position:
            with parallel_rank("DATA", pipeline):
                loader = self._training.build_pretraining_data_loader(self.dataset, self.position)
            is_cyclic = self._training.get_args().dataloader_type == "cyclic"
            items = self._training.cyclic_iter(loader) if is_cyclic else iter(loader)
            self._open[pipeline] = reader = _Reader(items, self.position, loader.batch_sampler)
        return reader


class _Reader:
    def __init__(self, items: Iterator[Any], position: int, sampler: Any) -> None:
        self._items, self.position = items, position
        self._samples = sampler.micro_batch_times_data_parallel_size

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        self.position += self._samples
        return item


class _Consumed:
    """The samples and operations before the run's iteration 0, which a returning process takes over from a peer."""

    def __init__(self, training: Any) -> None:
        self._args = args = training.get_args()
        self._operations = training.num_floating_point_operations(args, args.global_batch_size)
        self._before = {name: getattr(args, name) - count for name, count in self._counts(args.iteration).items()}

    def _counts(self, step: int) -> dict[str, float]:
        args, evaluations = self._args, 0
        if args.eval_interval and args.eval_iters:
            evaluations = step // args.eval_interval * args.eval_iters
        return {
            "consumed_train_samples": step * args.global_batch_size,
            "consumed_valid_samples": evaluations * args.global_batch_size,
            "num_floating_point_operations_so_far": step * self._operations,
        }

    def at(self, step: int) -> dict[str, Any]:
        return {name: self._before[name] + count for name, count in self._counts(step).items()}

    def state_dict(self) -> dict[str, float]:
        return dict(self._before)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._before = dict(state)


class _Optimizer:
    """The optimizer that `train_step` sees."""

    def __init__(self, optimizer: Any, step: Callable[[], Any]) -> None:
        self._optimizer, self.step = optimizer, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class _Pretraining:
    """The replaced functions."""

    def __init__(self, current: Session, script: Path) -> None:
        self._session, self._script = current, script
        self._samples: dict[int, Samples] = {}  # by the id of the iterator that stands for them
        self._acts_as: int | None = None
        self._steps: Iterator[int] = iter(())
        self._began = time.monotonic()

    def install(self) -> None:
        try:
            from megatron.core.datasets import utils as dataset_utils

            initialize: Any
            training: Any
            settings: Any
            names = "initialize", "training", "arguments"
            initialize, training, settings = (importlib.import_module(f"megatron.training.{name}") for name in names)
        except ImportError as error:
            reason = f"megatron.training cannot be imported ({first_line(error)})"
            remedy = "name a script in a folder of Megatron-LM, and install the packages that it needs"
            raise RunError(f"{self._script}: {reason}; {remedy}") from None
        package_info = self._script.resolve().parent / "megatron" / "core" / "package_info.py"
        own = installed_versions()["megatron-core"]
        version = runpy.run_path(str(package_info))["__version__"] if package_info.is_file() else own
        if version.split(".")[:2] != own.split(".")[:2]:
            raise RunError(
                f"{self._script}: belongs to Megatron-LM {version}, and megatron-core {own} is installed; install"
                f" megatron-core {version}, or check out core_v{own}"
            )
        self._training = training
        self._originals = {name: getattr(training, name) for name in _REPLACED}
        self._initialize_distributed = getattr(initialize, _START)
        setattr(initialize, _START, self._start)
        for name in (*_REPLACED, "build_train_valid_test_data_iterators"):
            setattr(training, name, getattr(self, name))
        training.get_forward_backward_func = lambda *_, **__: self.forward_backward
        self._compile_helpers = dataset_utils.compile_helpers
        dataset_utils.compile_helpers = lambda: None  # it is rank 0's in Megatron; see `_alone`
        own_rank = torch.distributed.get_rank

        def get_rank(group: Any = None) -> int:
            return self._rank() if group is None else group.rank() if hasattr(group, "rank") else own_rank(group)

        torch.distributed.get_rank = get_rank
        if not torch.cuda.is_available():
            initialize_megatron = training.initialize_megatron
            training.initialize_megatron = lambda *given, **named: initialize_megatron(
                *given, **named, allow_no_cuda=True
            )
            training.set_jit_fusion_options = lambda **_: None
            settings.get_device_arch_version = lambda: 10  # which asks for no variables of the environment
            if hasattr(initialize, "fused_kernels"):
                initialize.fused_kernels.load = lambda args: None

    def _rank(self) -> int:
        return self._session.acting_rank if self._acts_as is None else self._acts_as

    # The start.

    def _start(self, embedding_ranks: Any, position_embedding_ranks: Any, *others: Any, **named: Any) -> None:
        from megatron.core import parallel_state
        from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

        args = self._training.get_args()
        require_fit(self._script.name, args, job := self._session.job)
        self._exit_interval, self._exit_minutes, _ = (getattr(args, name) for name in _EXITS)
        vars(args).update(dict.fromkeys(_EXITS))  # Megatron would leave the session before its last step
        if args.use_distributed_optimizer or job.train.accumulation == "exact":
            for name in _OVERLAPS:
                if getattr(args, name, False):
                    setattr(args, name, False)
                    print(f"--{name.replace('_', '-')}: switched off; {LATE}")
        get_rerun_state_machine().set_mode(RerunMode.DISABLED)
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
            get_embedding_ranks=embedding_ranks,
            get_position_embedding_ranks=position_embedding_ranks,
            create_gloo_process_groups=any(getattr(args, name, False) for name in _GLOO),
        )
        self._initialize_distributed(embedding_ranks, position_embedding_ranks, *others, **named)
        args.ckpt_fully_parallel_save = args.ckpt_fully_parallel_load = False  # each stage by its first live host
        if self._session.copies_state:
            args.load = args.pretrained_checkpoint = None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Build datasets as the only process: indices that are missing are written by the first that comes."""
        with open(self._session.directory / "datasets.lock", "w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
                self._compile_helpers()
            self._acts_as = 0
            try:
                yield
            finally:
                self._acts_as = None

    def build_train_valid_test_data_iterators(self, provider: Any) -> list[Any]:
        from megatron.core.rerun_state_machine import RerunDataIterator

        training, args = self._training, self._training.get_args()
        with self._alone():
            train, valid, test = training.build_train_valid_test_data_loaders(provider)
        # Middle stages have no datasets; Megatron asks rank 0 for these flags.
        args.do_train, args.do_valid = args.train_iters > 0, args.eval_iters > 0
        iterators = []
        for loader, position in (
            (train, args.consumed_train_samples),
            (valid[0] if valid else None, args.consumed_valid_samples),
            (test, 0),
        ):
            iterators.append(RerunDataIterator(iter(())))
            dataset = getattr(loader, "dataset", None)
            self._samples[id(iterators[-1])] = Samples(training, dataset, position)
        return iterators

    def _samples_of(self, iterators: Any) -> Samples:
        """The samples of an iterator; of a list of iterators, the samples of the first chunk with a dataset."""
        kinds = [self._samples[id(each)] for each in (iterators if isinstance(iterators, list) else [iterators])]
        return next((samples for samples in kinds if samples.dataset is not None), kinds[0])

    # Training.

    def train(
        self,
        forward_step: Any,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        data: Any,
        valid: Any,
        *others: Any,
        **named: Any,
    ) -> Any:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.utils import get_model_config

        args, samples = self._training.get_args(), self._samples_of(data)
        consumed = _Consumed(self._training)
        get_model_config(model[0]).finalize_model_grads_func = finalize_model_grads

        def iterator_of(pipeline: int) -> Any:
            samples.position = consumed.at(self._session.step)["consumed_train_samples"]
            return samples.iterator(pipeline)

        self._session.attach(model, optimizer, scheduler, consumed, data=iterator_of, step=args.iteration)
        self._steps = self._session.steps()
        args.iteration = args.curr_iteration = next(self._steps)
        vars(args).update(consumed.at(args.iteration))
        self._samples_of(valid).position = args.consumed_valid_samples
        self._session.set_alone(True)  # peers of a returning process make no collectives at the start of `train`
        result = self._originals["train"](forward_step, model, optimizer, scheduler, data, valid, *others, **named)
        next(self._steps, None)
        is_tested = torch.tensor(int(args.do_test))
        torch.distributed.broadcast(is_tested, 0)
        args.do_test = bool(is_tested)
        return result

    def train_step(
        self, forward_step: Any, data: Any, model: Any, optimizer: Any, scheduler: Any, *others: Any, **named: Any
    ) -> Any:
        current, args = self._session, self._training.get_args()
        current.set_alone(False)
        if current.step != args.curr_iteration:
            next(self._steps)
        if self._is_last(current.step):
            current.stop()

        def step() -> Any:
            stepped = current.optimizer_step()
            if stepped[0]:  # before the next collective, in which a returning process may copy the state
                scheduler.step(increment=args.global_batch_size)
            return stepped

        stepped_scheduler = SimpleNamespace(step=lambda increment: None)
        result = self._originals["train_step"](
            forward_step, data, model, _Optimizer(optimizer, step), stepped_scheduler, *others, **named
        )
        if current.lacks_results and list(result[0]) == ["lm loss"]:
            result[0]["lm loss"] = torch.tensor(current.loss)
        if current.is_finished():
            args.train_iters = current.step + 1
        return result

    def _is_last(self, step: int) -> bool:
        minutes, interval = (time.monotonic() - self._began) / 60, self._exit_interval
        is_over = self._exit_minutes and minutes > self._exit_minutes
        return bool(is_over or (interval and (step + 1) % interval == 0))

    def training_log(self, *arguments: Any, is_first_iteration: bool = False, **named: Any) -> Any:
        """Megatron logs its first iteration with collectives, which peers of a returning process do not make."""
        is_first_iteration &= not self._session.copies_state
        return self._originals["training_log"](*arguments, **named, is_first_iteration=is_first_iteration)

    def forward_backward(
        self,
        *,
        forward_step_func: Any,
        data_iterator: Any,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        **_: Any,
    ) -> list[Any]:
        sizes: dict[str, Any] = {"seq_length": seq_length, "micro_batch_size": micro_batch_size}
        sizes["decoder_seq_length"] = decoder_seq_length
        if collect_non_loss_data:
            raise RunError("process_non_loss_data_func: a session does not collect such data; leave it out")
        if not forward_only:
            return self._session.forward_backward(forward_step_func, **sizes)
        samples = self._samples_of(data_iterator)
        results = self._session.evaluate(forward_step_func, data=samples.iterator, **sizes)
        samples.position += self._training.get_args().global_batch_size
        return results

    # Checkpoints.

    def load_checkpoint(self, model: Any, optimizer: Any, *others: Any, **named: Any) -> Any:
        # Rank 0 reads the state of all ranks.
        groups = _groups_of(optimizer) if self._is_torch else []
        with (
            torch.no_grad(),
            adam_steps_kept(optimizer),
            _ranked(0, groups),
            _shards_loaded_alone(self._parts(optimizer)),
        ):
            return self._originals["load_checkpoint"](model, optimizer, *others, **named)

    def _parts(self, optimizer: Any) -> list[Any]:
        """Of a distributed optimizer; [] of another one."""
        return optimizer_parts(optimizer) if self._training.get_args().use_distributed_optimizer else []

    @property
    def _is_torch(self) -> bool:
        """Whether checkpoints are of the format `torch`, and not `torch_dist`."""
        return bool(self._training.get_args().ckpt_format == "torch")

    def save_checkpoint(self, iteration: int, model: Any, optimizer: Any, *others: Any, **named: Any) -> None:
        from megatron.core import parallel_state

        current, original = self._session, partial(self._originals["save_checkpoint"], iteration, model, optimizer)
        passed = [named.get(f"{name}_group") for name in ("dp", "dp_cp", "expt_dp")]  # from Megatron-LM 0.19 on

        def save(peers: Peers) -> None:
            if self._is_torch:
                with _ranked(int(not current.is_saver), [*_groups_of(optimizer), *passed]):
                    original(*others, **named)
                return
            groups = [parallel_state.get_data_parallel_group(with_context_parallel=has) for has in (False, True)]
            groups.append(parallel_state.get_expert_data_parallel_group())
            with current.world.only_savers() as self._acts_as, ExitStack() as stack:
                if self._acts_as is not None:
                    stack.enter_context(_ranked(current.worker.pipeline % peers.shards, [*groups, *passed]))
                    stack.enter_context(_random_states_of_all(peers.shards))
                    for part in self._parts(optimizer):  # which may be of another instance
                        stack.enter_context(replaced(part, "distributed_optimizer_instance_id", 0))
                    original(*others, **named)

        try:
            current.repeat_together(save)
        finally:
            self._acts_as = None


@contextmanager
def _shards_loaded_alone(parts: Sequence[Any]) -> Iterator[None]:
    """Let this process read its shards of a `torch_dist` checkpoint without others, inside the block.

    megatron-core's distributed optimizer needs the state before torch's Adam creates it in its first step.
    """
    from megatron.core import dist_checkpointing
    from torch.distributed import checkpoint

    for inner in (part.optimizer for part in parts):
        for group in inner.param_groups if isinstance(inner, torch.optim.Adam) and not inner.state else ():
            for parameter in group["params"]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                inner.state[parameter] = {"step": torch.tensor(0.0), **moments}
    owners: tuple[tuple[Any, str, dict[str, bool]], ...] = (
        (dist_checkpointing, "load", {"validate_access_integrity": False}),
        (checkpoint, "load_state_dict", {"no_dist": True}),
    )
    with ExitStack() as stack:
        for owner, name, options in owners:
            stack.enter_context(replaced(owner, name, _with_options(getattr(owner, name), options)))
        yield


def _with_options(function: Callable[..., Any], options: Mapping[str, bool]) -> Callable[..., Any]:
    return lambda *arguments, **named: function(*arguments, **{**named, **options})


def _random_states_of_all(shards: int) -> AbstractContextManager[None]:
    """Save this process's random state for each data-parallel rank, where Megatron-LM has one of each.

    It has with expert parallelism. In a session random numbers do not depend on these states.
    """
    checkpointing = importlib.import_module("megatron.training.checkpointing")
    own = checkpointing.get_rng_state

    def get_rng_state(*arguments: Any, **named: Any) -> Any:
        state = own(*arguments, **named)
        *place, first = state.global_offset
        if len(place) == 1:
            return state
        ranks = range(first, state.global_shape[-1], shards)
        return [replace(state, global_offset=(*place, rank)) for rank in ranks]

    return replaced(checkpointing, "get_rng_state", get_rng_state)


def _groups_of(optimizer: Any) -> list[Any]:
    names = ("data_parallel_group", "data_parallel_group_gloo")
    return [getattr(part, name, None) for part in optimizer_parts(optimizer) for name in names]


@contextmanager
def _ranked(rank: int, groups: Sequence[Any]) -> Iterator[None]:
    """Give this process a rank in groups of hosts of a stage, of which rank 0 reads and writes checkpoints."""
    from megatron.core import parallel_state

    with ExitStack() as stack:
        name = "get_expert_data_parallel_rank"
        stack.callback(setattr, parallel_state, name, getattr(parallel_state, name))
        setattr(parallel_state, name, lambda *_, **__: rank)
        for group in set(groups) - {None}:
            group.rank = lambda: rank
            stack.callback(delattr, group, "rank")
        yield
