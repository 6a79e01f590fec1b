"""`session()`: a user's Megatron training loop that survives failures, as a worker of a run.

    with recycle.megatron.session() as session:
        model, optimizer, scheduler = build()
        session.attach(model, optimizer, scheduler, data=iterator_of)
        for step in session.steps():
            losses = session.forward_backward(forward_step, seq_length=..., micro_batch_size=...)
            session.optimizer_step()
            scheduler.step(increment=...)

`recycle agent JOB -- python script.py` starts the script once per worker. After a death the survivors' processes go on:
the call that was interrupted, or the next one, takes part in the next generation, whose plan re-routes the dead
workers' micro-batches, and repeats the iteration unless it was committed. A returning worker runs the same script, and
copies its state from a peer before its first step.

The session advances the worker's main loop (`recycle.exec.worker.main_loop`), which pauses between actions so that the
script can run. Heartbeats go on meanwhile; a script is waited for up to `[membership] script_timeout`.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import torch
from megatron.core import parallel_state

from recycle.errors import RecycleError, RunError, ScheduleError, first_line
from recycle.exec.device import DeviceState, Progress
from recycle.exec.hooks.hook import Generation, IterationHook
from recycle.exec.hooks.phases import Phase
from recycle.exec.leader.commit import evaluation_report
from recycle.exec.model.tensor_group import TensorGroup
from recycle.exec.planning.run_checks import check_for_run
from recycle.exec.profile.executed import executed
from recycle.exec.protocol import STAGE_LOST, Commit, EndAsked, FinalState, GenerationRecord
from recycle.exec.transport.base import TransportError
from recycle.exec.worker.iterations import Pause, Pauses
from recycle.exec.worker.specification import REFUSED, SESSION
from recycle.exec.worker.step_state import StepState
from recycle.exec.worker.worker import Participant
from recycle.ir.formats import named_schedule
from recycle.ir.instruction import Instruction
from recycle.ir.schedule import Schedule, loop_placement
from recycle.job import price
from recycle.job.shape import Worker
from recycle.megatron.chunk import Arguments
from recycle.megatron.live import LiveWorld
from recycle.megatron.micro_batches import IteratorOf
from recycle.megatron.order import ScheduleSource
from recycle.megatron.peers import Peers
from recycle.megatron.placement import current_grid
from recycle.megatron.script import Script, ScriptStages, seeded_apart
from recycle.megatron_versions import share_random_generator

_NEXT, _REDUCED, _STEPPED = range(3)
_PHASES = {"next": _NEXT, "reduced": _REDUCED, "stepped": _STEPPED}


def session(schedule: ScheduleSource | None = None) -> Session:
    """Return the session of this process, to be used as a context manager around the script's work.

    Args:
        schedule: runs while all workers live, in place of the planner's: a schedule of all pipelines, the name of a
            family, or the path of a schedule file; the same in all processes. It must place stages as Megatron does.

    Raises RunError if the process was not started by `recycle agent JOB -- COMMAND`.
    """
    return Session(schedule)


class Session:
    """See the module; `session()` makes it.

    Attributes:
        loss: mean loss of all micro-batches of the last committed step; None before the first.
        step: the iteration that runs, or comes next.
        worker: this process's position in the job, such as 1.0.
        world: the groups of this process.
    """

    _is_made: ClassVar = False

    def __init__(self, schedule: ScheduleSource | None = None) -> None:
        if SESSION not in os.environ:
            raise RunError("this process has no session; start the script with: recycle agent JOB -- python SCRIPT ...")
        if Session._is_made:
            raise RunError("session(): this process has a session already; a script makes one")
        Session._is_made = True
        self._is_in_script, self._own_schedule = True, schedule
        self._beats, self._failure = itertools.count(), ""
        self._final: FinalState | None = None
        atexit.register(self._end)
        self._progress: Progress | None = None  # heartbeats start with the participant
        self._longest: float | None = None
        self._process = Participant(os.environ[SESSION], self._device_state)
        self._progress = self._process.member.progress
        self.job, self.worker = self._process.job, self._process.worker
        limits = self.job.membership
        self._longest = limits.script_timeout / limits.hung_factor  # the leader allows an operation `hung_factor` times
        shape = self.job.shape
        size = self._process.tensor_parallel
        tensor = TensorGroup(self._process.tensor_rank, size) if size > 1 else None
        self.world = LiveWorld(self.worker, shape.pipelines, shape.ranks, tensor)
        self._script: Script | None = None
        self._hook: _SessionHook | None = None
        self._stages: ScriptStages
        self._pauses: Pauses[bool]
        self._at: tuple[int, int] = (-1, 0)
        self._is_over = self._has_left = False
        self.step = 0

    @property
    def loss(self) -> float | None:
        return None if self._hook is None else self._hook.loss

    def is_finished(self) -> bool:
        """Whether the run has committed its last step; SIGTERM to the agents makes the present step the last."""
        return self._is_over or (self._hook is not None and self._hook.is_finished)

    @property
    def lacks_results(self) -> bool:
        """Whether a worker may have died since the commit of the present step, and its results are lost."""
        return self._hook is not None and self._hook.began_after >= self.step

    @property
    def is_saver(self) -> bool:
        """Whether this process is the first live host of its stages, which saves them in the script's checkpoints."""
        peers = self.world.present
        return self.worker.pipeline == 0 if peers is None else peers.is_first_host(self.worker)

    @property
    def copies_state(self) -> bool:
        """Whether this process has returned, and gets its state from a peer at its first step."""
        return not self._process.is_first

    @property
    def directory(self) -> Path:
        """Of the run."""
        return Path(self._process.specification.run.directory)

    @property
    def acting_rank(self) -> int:
        """The rank for which this process prints: its own, or 0 or the last one if it stands in for that.

        Inside an iteration it is the process's own: megatron-core looks for it among the members of groups.
        """
        return self.world.acting_rank if self._is_in_script else self.world.rank

    def _device_state(self) -> DeviceState:
        """The script makes progress, whatever it does, unless it waits for its peers in a collective."""
        is_waiting = self._progress is not None and self._progress.waiting
        if self._is_in_script and not is_waiting:
            return DeviceState(next(self._beats), "script", self._longest)
        return self._process.transport.device_state()

    def __enter__(self) -> Self:
        try:
            self.world.join()
        except RunError as error:
            self._process.end(str(error), REFUSED)
        self.world.recover = self._recover
        is_split = self.world.tensor_parallel > 1
        share_random_generator(partial(seeded_apart, self._process.tensor_rank) if is_split else nullcontext)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RecycleError) and self._script is None:
            self._process.end(str(error), REFUSED)
        early: RunError | None = None
        is_done = error is None or (isinstance(error, SystemExit) and not error.code)
        if is_done and self._script is not None and not self._has_left:
            if self.is_finished():
                self._advance((self.job.train.steps, _REDUCED))
                self._final = self._process.final_state(self._stages)
                return
            error = early = RunError(
                f"the script leaves its session before step {self.step}; [train] steps = {self.job.train.steps}; to end"
                " early, call session.stop() and go on with the loop"
            )
        if error is not None and not isinstance(error, SystemExit):
            self._failure = _described(error)
            atexit.unregister(self._end)
            atexit.register(self._end)  # now the first, so that it can call the others: each of them once
        if early is not None:
            raise early

    def _end(self) -> None:
        """Tell the leader that the script has ended, which then ends the processes.

        If the script has failed, end the process before Python deletes its objects: heartbeats would stop first.
        """
        atexit.unregister(self._end)
        error = getattr(sys, "last_value", None)
        if self._final is not None and isinstance(error, Exception):  # after the session
            self._failure = _described(error)
        if self._failure:
            atexit._run_exitfuncs()  # noqa: SLF001  (the others)
            sys.stdout.flush()
            self._process.end(self._failure, 1)
        if self._final is not None:
            with suppress(RunError):  # the agent is gone
                self._process.member.send(self._final)

    # What the script calls.

    def attach(self, model: Any, optimizer: Any, *others: Any, data: IteratorOf, step: int = 0) -> None:
        """Give the session the script's objects, before the first step.

        Args:
            model: a chunk in megatron-core's DistributedDataParallel, or the list of the rank's chunks.
            optimizer: megatron-core's optimizer, or torch's.
            others: further objects with `state_dict` and `load_state_dict`, such as the learning rate's scheduler. A
                returning process copies their states from a peer.
            data: pipeline -> iterator over its micro-batches, from the first of iteration `session.step` on. It is
                called again when the iterator ends at the end of a step, and when micro-batches of another pipeline
                are re-routed to this process. It may return None where the forward step reads no data.
            step: the first step to run, if the script has loaded a checkpoint; the same in all processes.

        Raises:
            RunError: a setting of the model or the optimizer is not supported, or `parallel_state` differs from the
                job.
            ScheduleError: the session's schedule does not fit the job, or does not pass `check`.
        """
        if self._script is not None:
            raise RunError("session.attach: the session has a model already; call it once, with all chunks in a list")
        self._require_grid()
        schedule = self._checked_schedule()
        models = list(model) if isinstance(model, Sequence) else [model]
        _require_kinds(models, optimizer, others, data)
        if not isinstance(step, int) or not 0 <= step < self.job.train.steps:
            is_over = "; nothing is left to train" if step == self.job.train.steps else ""
            last = self.job.train.steps - 1
            raise RunError(f"step: {step!r} is not one of the run's, 0 to {last} ([train] steps){is_over}")
        process = self._process
        self._script = Script(self.job, self.world, models, optimizer, others, data)
        self._stages = ScriptStages(self.job, self.worker, self._script, self.world, process.is_first)
        hooks: list[IterationHook] = [process.injector(self._stages)] if process.specification.run.faults else []
        updates = process.step_state(self._stages, step - 1)
        self.step = step
        self._hook = _SessionHook(self.world, self._script, updates, self._script.is_sharded and not process.is_first)
        hooks = [*hooks, self._hook, *process.trace()]
        sent = schedule if self.world.rank == 0 else ""
        self._pauses = process.main_loop(self._stages, updates, hooks, self.world.tensor, step - 1, sent).pauses()

    def steps(self) -> Iterator[int]:
        """Iterate over the steps of the run, from 0 or from the step at which this process joins."""
        self._require_script()
        while not self.is_finished():
            self._advance((self.step, _NEXT))
            if self.is_finished():
                return
            self.step = self._at[0]
            self.world.begin_step(self.step)
            yield self.step
            if self._at < (self.step, _STEPPED):
                raise RunError(f"step {self.step}: the script did not call optimizer_step")
            self.step += 1

    def forward_backward(
        self,
        forward_step_func: Callable[..., Any],
        *,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
    ) -> list[Any]:
        """Run the forwards and backwards of an iteration that this process has by the present plan, and sum gradients.

        Args:
            forward_step_func: as for megatron-core's `get_forward_backward_func`; it reads one item of the iterator per
                micro-batch.
            seq_length, micro_batch_size, decoder_seq_length: as for megatron-core's function.

        Returns:
            What the loss function kept for each micro-batch whose last stage ran here, in order; [] elsewhere. If the
            iteration is repeated, the list changes in place.
        """
        script = self._require_script()
        if self.world.is_alone or self._at >= (self.step, _REDUCED):
            raise RunError(f"step {self.step}: call session.forward_backward once in each iteration of session.steps()")
        script.arguments = Arguments(forward_step_func, seq_length, micro_batch_size, decoder_seq_length)
        script.results = []
        self._advance((self.step, _REDUCED))
        return script.results

    def optimizer_step(self) -> tuple[bool, float | None, int | None]:
        """Wait for the commit of the iteration, and step the optimizer.

        Returns:
            Whether the optimizer stepped, the norm of the gradient and the number of its zeros, as megatron-core's
            `optimizer.step()`.
        """
        script = self._require_script()
        if self._at < (self.step, _REDUCED):
            raise RunError(f"step {self.step}: the script called optimizer_step before forward_backward")
        if self._at >= (self.step, _STEPPED):
            raise RunError(f"step {self.step}: call session.optimizer_step once in each iteration of session.steps()")
        self._advance((self.step, _STEPPED))
        success, norm, zeros = script.stepped
        return success, norm, zeros

    def evaluate(
        self,
        forward_step_func: Callable[..., Any],
        *,
        data: IteratorOf,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
    ) -> list[Any]:
        """Run the forwards of as many micro-batches as a step has, between two steps.

        A failure repeats the evaluation on all live processes. Arguments and result are as for `forward_backward`;
        `data` is as for `attach`, and is called again in each evaluation.
        """
        script, results = self._require_script(), list[Any]()
        if self.world.is_alone or self._at[1] == _REDUCED:
            moments = "before forward_backward, after optimizer_step, or after the loop"
            raise RunError(f"session.evaluate: call it in the loop over session.steps() {moments}")
        arguments = Arguments(forward_step_func, seq_length, micro_batch_size, decoder_seq_length)

        def run(peers: Peers) -> None:
            results[:] = script.evaluate(arguments, data, peers, self.step)

        self.repeat_together(run)
        return results

    def repeat_together(self, function: Callable[[Peers], None]) -> None:
        """Call a function in all live processes between two steps; after a failure, they all call it again."""

        def run(peers: Peers | None) -> list[torch.Tensor]:
            assert peers is not None
            function(peers)
            peers.gather(None, torch.zeros(1))  # all have finished, or all run it again
            return []

        self.world.complete(None, run)

    def stop(self) -> None:
        """Make the present step the last one, or the next one if `optimizer_step` was called; one process is enough.

        `steps()` then ends in all processes, and the agents end with exit code 0. The same command with `--resume`
        continues the run.
        """
        self._process.member.send(EndAsked())

    def save_profile(self, path: str | Path) -> None:
        """Write the times and bytes of the run so far as a profile, for `[times] profile`, in the first live process.

        Call it in all processes, between two steps. The profile has the times of `recycle profile RUN -o FILE`, and the
        bytes of the first forward's activations. Raises RecycleError if no iteration is in the trace.
        """
        script, rows = self._require_script(), list[tuple[Worker, torch.Tensor]]()

        def gather(peers: Peers) -> None:
            rows[:] = peers.gather(None, script.bytes_held()).items()

        self.repeat_together(gather)
        if self.worker != rows[0][0] or self._process.tensor_rank:
            return
        of_rank = {worker.rank: row.tolist() for worker, row in rows}
        by_stage = [row for chunk in zip(*map(of_rank.__getitem__, range(len(of_rank))), strict=True) for row in chunk]
        message, activation, static = map(list, zip(*by_stage, strict=True))
        replace(executed(self.directory).profile, message=message, activation=activation, static=static).save(path)

    def set_alone(self, is_alone: bool) -> None:
        """Let this process answer its collectives alone, as before `steps()`: others do not make them."""
        self.world.is_alone = is_alone

    # The main loop.

    def _advance(self, target: tuple[int, int]) -> None:
        """Run the main loop until it pauses at `target` = (step, phase), or after it."""
        with self._outside_script():
            try:
                while self._at < target and not self._is_over:
                    self._take(next(self._pauses))
            except StopIteration as end:
                self._leave(end)

    @contextmanager
    def _outside_script(self) -> Iterator[None]:
        self._is_in_script, self.world.recover = False, None
        if self._script is not None:
            self._script.called()
        try:
            yield
        finally:
            self._is_in_script, self.world.recover = True, self._recover

    def _leave(self, end: StopIteration) -> None:
        """The main loop has ended, after the last step or because this process leaves the run."""
        self._is_over = True
        if not end.value:
            self._has_left = True
            lost = self._process.member.stage_lost
            print(f"worker {self.worker} leaves the run{lost and ': '}{lost}", flush=True)
            sys.exit(STAGE_LOST if lost else 0)

    def _take(self, pause: Pause) -> None:
        self._at = pause.step, _PHASES[pause.phase]

    def _recover(self, error: TransportError) -> None:
        """Bring this process into the next generation, to where the script is."""
        target = self._at
        if self._is_over:
            raise RunError(f"a collective after the end of the run: {error}")
        with self._outside_script():
            if self.world.peers is not None:
                try:
                    self._take(self._pauses.throw(error))
                except StopIteration as end:
                    self._leave(end)
                    raise RunError("the run has ended before the script") from None
        self._at = min(self._at, (target[0], -1)) if self.world.peers is None else self._at
        self._advance(target)

    def _require_script(self) -> Script:
        if self._script is None:
            raise RunError("the session has no model; call session.attach(model, optimizer, ..., data=...) first")
        return self._script

    def _checked_schedule(self) -> str:
        source, shape = self._own_schedule, self.job.shape
        if source is None:
            return ""
        schedule = source if isinstance(source, Schedule) else named_schedule(str(source), shape)
        if schedule.shape != shape or schedule.failed:
            raise ScheduleError("session(schedule=...): is not a schedule of all workers of the job's [shape]")
        if schedule.placement != loop_placement(shape):
            raise ScheduleError("session(schedule=...): its stages are not on the ranks where Megatron places them")
        check_for_run(schedule, priced := price(self.job), priced.prices)
        return schedule.dumps()

    def _require_grid(self) -> None:
        if not parallel_state.model_parallel_is_initialized():
            raise RunError("parallel_state is not initialized; call initialize_model_parallel before session.attach")
        context, tensor, *experts = (
            getattr(parallel_state, f"get_{kind}_parallel_world_size")()
            for kind in ("context", "tensor_model", "expert_model", "expert_tensor")
        )
        if context > 1:
            raise RunError(f"context_parallel_size = {context}: a session does not support it; write 1")
        if experts not in ([1, tensor], [tensor, 1]):
            raise RunError(
                "expert_model_parallel_size = {}, expert_tensor_parallel_size = {}: the tensor ranks of a worker share"
                " its experts; write one of the two as 1, the other as tensor_model_parallel_size".format(*experts)
            )
        grid, shape = current_grid(), self.job.shape
        place = Worker(grid.replica, grid.rank)
        sizes = (grid.replicas, grid.ranks, grid.chunks, tensor)
        stated = (shape.pipelines, shape.ranks, shape.chunks, self.job.grid.tensor_parallel)
        if sizes != stated:
            raise RunError(
                "parallel_state has data, pipeline, virtual pipeline and tensor sizes {} {} {} {}, [shape] pipelines,"
                " ranks, chunks and tensor_parallel are {} {} {} {}".format(*sizes, *stated)
            )
        if place != self.worker:
            raise RunError(
                f"parallel_state places this process at replica {place.pipeline} and pipeline rank {place.rank}, and it"
                f" is worker {self.worker}; use Megatron's default order of ranks"
            )


def _described(error: BaseException) -> str:
    name, reason = type(error).__name__, first_line(error)
    return name if reason == name else f"{name}: {reason}"


def _require_kinds(models: Sequence[Any], optimizer: Any, others: Sequence[Any], data: Any) -> None:
    if not models or any(getattr(model, "ddp_config", None) is None for model in models):
        raise RunError("model: is not in megatron-core's DistributedDataParallel; wrap every chunk")
    for part in (optimizer, *others):
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise RunError(
                f"session.attach: {part!r:.100} has no state_dict and load_state_dict; pass the optimizer, and objects"
                " whose state a returning process copies"
            )
    if not callable(data):
        raise RunError("data: is not a function; pass one that returns an iterator for the number of a pipeline")


class _SessionHook(IterationHook):
    """Tells the groups and the script of each generation.

    With a distributed optimizer a generation may form before the script has returned from a step. A process that joins
    then gets what the script changes after the step at the beginning of the next iteration.

    Args:
        lacks: this process lacks such settings.
    """

    def __init__(self, world: LiveWorld, script: Script, updates: StepState, lacks: bool) -> None:
        self._world, self._script, self._updates, self._lacks = world, script, updates, lacks
        self._receivers: list[Worker] = []
        self.loss: float | None = None
        self.is_finished, self.began_after = False, -1

    def save(self, record: GenerationRecord, commit: Commit | None) -> None:
        """Called with every commit that this process learns of."""
        if commit is not None:
            self.loss, self.is_finished = commit.loss, commit.finished

    def begin_generation(self, generation: Generation) -> None:
        self._generation, schedule, self.began_after = generation, generation.schedule, generation.record.committed
        tied = schedule.shape.stages if schedule.ties else None
        transport: Any = generation.transport
        peers = Peers(transport, sorted(map(Worker.parse, generation.record.live)), tied, self._script.shards)
        self._script.peers = peers
        self._world.enter(peers, generation.record.committed + 1)
        if generation.record.committed < 0:
            self._script.share_embedding()
        self._require_equal_weights(peers, generation.record.committed)
        if self._script.is_sharded:
            lacking = peers.gather(None, torch.tensor([self._lacks]))
            self._receivers = [worker for worker, lacks in lacking.items() if lacks]

    def begin_iteration(self, iteration: int, program: Sequence[Instruction]) -> None:
        script, own = self._script, self._world.worker
        for receiver in self._receivers:
            hosts = (worker for worker in script.peers.live if worker.rank == receiver.rank)
            giver = next(worker for worker in hosts if worker not in self._receivers)
            if own == giver:
                script.peers.send(receiver, script.settings())
            elif own == receiver:
                script.load_settings(script.peers.receive(giver))
                self._lacks = False
        self._receivers = []

    def _require_equal_weights(self, peers: Peers, committed: int) -> None:
        """Raise RunError in all processes, with one text: the script is then not started again for the same error."""
        moment = f"after step {committed}" if committed >= 0 else "at the start"
        checksums, firsts = peers.gather(None, self._script.checksum()), dict[int, Worker]()
        for worker, checksum in sorted(checksums.items()):
            first = firsts.setdefault(worker.rank, worker)
            if checksum.isnan().any():
                raise RunError(f"worker {worker} has weights that are NaN {moment}")
            if not torch.equal(checksum, checksums[first]):
                remedy = "" if committed >= 0 else "; seed it alike in all processes"
                raise RunError(f"workers {first} and {worker} have different weights of one stage {moment}{remedy}")

    def reach(self, phase: Phase, step: int) -> None:
        if phase == "reduced":
            self._script.prepare_step()
        elif phase == "stepped" and self._script.is_sharded:
            self._script.gather_parameters()
            self._updates.mark_all_gathered(step)

    def rolled_back(self, committed: int) -> None:
        self._script.rolled_back(committed)

    def after_iteration(self, iteration: int, is_last: bool) -> None:
        """After the last iteration, wait until the script has ended in all processes."""
        generation = self._generation
        if is_last and generation.committed(iteration).evaluate:
            generation.commits.report_evaluation(iteration, evaluation_report([]))
            generation.commits.evaluated(iteration)

    def end_generation(self) -> None:
        self._world.peers = None
        self._script.interrupt()
