"""A script of the user's own in place of recycle's trainer: `recycle agent JOB -- python script.py`.

Real: the job of a script, and `recycle.megatron.session()` with its main loop, its collectives between two steps and
its end. Simulated: Python around the script, torch.distributed's groups, and what megatron-core has of a model
(`NumbersScript`).
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from greenlet import GreenletExit
from torch import Tensor

from recycle.errors import JobError, RecycleError, RunError
from recycle.exec.emulation import EmulatedStage
from recycle.exec.launch.request import job_of_script
from recycle.exec.protocol import STAGE_LOST, GenerationRecord
from recycle.exec.worker.specification import SESSION
from recycle.job import Job, PricedJob
from tests.exec.explore.kernel import Process, current
from tests.exec.explore.virtual import stand_in

if TYPE_CHECKING:
    from recycle.megatron.own_loop import Session
    from recycle.megatron.peers import Peers
    from tests.exec.explore.cluster import Cluster
    from tests.exec.explore.rules import Rules

COMMAND = ("python", "script.py")
UNIT_SECONDS = 0.1
LONG_SECONDS = 9.0, 60.0
"""Pauses of a script between two calls of its session: longer than any operation of recycle may take."""
Part = tuple[int, int]
"""A pipeline's rank, and a tensor rank: whose state a process has."""


@dataclass(frozen=True)
class UserScript:
    """What the user has written, and has asked `recycle agent` for.

    Attributes:
        restarts: `--restarts`.
        fails_at: step in which it raises an error in all processes, before the commit; the number of steps for after
            the last one, one more for after its session, -1 for never.
        stops_at: step in which one process calls `session.stop`; -1 for never.
        skips_at: step in which one process leaves out a collective that the others make; -1 for never.
        pauses: processes pause now and then between two steps.
    """

    restarts: int = 0
    fails_at: int = -1
    stops_at: int = -1
    skips_at: int = -1
    pauses: bool = False


def job_with_script(job: PricedJob) -> PricedJob:
    """The job that runs; its first plan is 1F1B."""
    change = msgspec.structs.replace
    return job_of_script(change(job, memory=change(job.memory, limit=None)), job.train.steps)


class ScriptError(Exception):
    """An error of the user's."""


class Count:
    """An object whose state a returning process copies, such as a scheduler of the learning rate."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.steps = state["steps"]


class NumbersStage(EmulatedStage):
    """A stage whose optimizer clips by its own limit, none."""

    def __init__(self, job: Job, index: int, count: Count) -> None:
        super().__init__(job, index, scale=UNIT_SECONDS)
        self._count = count

    def step(self, iteration: int, clip_factor: float) -> None:
        super().step(iteration, 1.0)

    def digests(self) -> dict[int, str]:
        return {number: f"{text} after {self._count.steps} steps" for number, text in super().digests().items()}


class NumbersScript:
    """As `recycle.megatron.script.Script`, for emulated stages."""

    shards, is_sharded = 1, False

    def __init__(self, job: Job, world: object, models: Any, optimizer: object, others: Any, data: object) -> None:
        (self.stages,), (self._count,) = models, others
        self.arguments: object = None
        self.results: list[Any] = []
        self.stepped = True, None, None
        self.peers: Peers

    def called(self) -> None:
        pass

    interrupt = share_embedding = called

    def rolled_back(self, committed: int) -> None:
        pass

    def prepare_step(self) -> None:
        """The norm of the gradient."""
        self.peers.gather(None, torch.zeros(1))

    def evaluate(self, arguments: object, data: object, peers: Peers, step: int) -> list[Any]:
        return [int(entry) for _ in range(2) for entry in peers.gather(None, torch.tensor(step)).values()]

    def checksum(self) -> Tensor:
        return torch.stack(
            [tensor.double().sum() for stage in self.stages.values() for tensor in stage.state_tensors()]
        )

    def state(self) -> dict[str, Any]:
        return state_of(self.stages, self._count)

    def load_state(self, state: Mapping[str, Any]) -> None:
        load_state(self.stages, self._count, state)


def state_of(stages: Mapping[int, NumbersStage], count: Count) -> dict[str, Any]:
    model = [tensor.clone() for stage in stages.values() for tensor in stage.state_tensors()]
    return {"model": model, "count": count.state_dict()}


def load_state(stages: Mapping[int, NumbersStage], count: Count, state: Mapping[str, Any]) -> None:
    tensors = [tensor for stage in stages.values() for tensor in stage.state_tensors()]
    for tensor, source in zip(tensors, state["model"], strict=True):
        tensor.copy_(source)
    count.load_state_dict(state["count"])


def _no_data(pipeline: int) -> Iterator[int]:
    return iter(())


class ScriptWorld:
    """The script of one run: its Python, its disk, and the rules of scripts.

    Attributes:
        script: what the user has written.
        states: step and part -> digest of the state after the step. All runs of a course have the same.
        saved: step -> part -> state; what the script has written.
        has_failed: it has raised its error.
        has_delayed: others have waited in vain for a process that paused.
    """

    def __init__(self, cluster: Cluster, script: UserScript) -> None:
        self._cluster, self.script = cluster, script
        self.states: dict[tuple[int, Part], str] = {}
        self.saved: dict[int, dict[Part, dict[str, Any]]] = {}
        self._results: dict[tuple[int, int, str], dict[Process, object]] = {}
        self._sessions: list[Session] = []
        self._at_exit: dict[Process, list[Callable[[], object]]] = {}
        self._environment: dict[str, str] = {}
        self._sys = stand_in(sys, last_value=None)
        self.has_failed = self.has_delayed = False
        self._starts = self._begin = 0

    @property
    def _rules(self) -> Rules:
        return self._cluster.rules

    # Python.

    def stand_ins(self, participant: type) -> list[tuple[Any, str, Any]]:
        """What stands in for names of recycle.megatron."""
        from recycle.megatron import own_loop, peers  # takes seconds

        def say(text: str, flush: bool = False) -> None:
            current().process.kernel.log(f"{current().process.name} prints: {text}")

        def forget(call: Callable[[], object]) -> None:
            calls = self._calls_at_exit
            calls[:] = [other for other in calls if other != call]

        at_exit = SimpleNamespace(
            register=lambda call: self._calls_at_exit.append(call), unregister=forget, _run_exitfuncs=self._exit
        )
        return [
            (own_loop, "print", say),
            (peers, "print", say),
            (own_loop, "os", stand_in(os, environ=self._environment)),
            (own_loop, "atexit", at_exit),
            (own_loop, "sys", self._sys),
            (own_loop, "Participant", participant),
            (own_loop, "Script", NumbersScript),
            (own_loop, "share_random_generator", lambda seeded: None),
            (own_loop, "_require_kinds", lambda *_: None),
            (own_loop.Session, "_require_grid", lambda session: None),
            (own_loop.LiveWorld, "join", lambda world: None),
        ]

    @property
    def _calls_at_exit(self) -> list[Callable[[], object]]:
        return self._at_exit.setdefault(current().process, [])

    def _exit(self) -> None:
        calls = self._calls_at_exit
        while calls:
            calls.pop()()

    def run(self, text: str) -> None:
        """As `recycle.exec.worker.command.run_command`: run the script, then end as Python does."""
        process, kernel, code, error = current().process, self._cluster.kernel, 0, None
        try:
            kernel.park(seconds=kernel.draw(0.0, 1.0))  # imports
            self._train(text)
        except SystemExit as ending:
            code = int(ending.code or 0)
            self._rules.struck(process)
        except GreenletExit:
            raise
        except Exception as raised:
            code, error = 1, raised
            process.lines = f"{type(raised).__name__}: {raised}"
        self._sys.last_value = error
        self._exit()
        process.end("", code)

    # The script.

    def _session(self, text: str) -> Session:
        from recycle.megatron import own_loop

        self._environment[SESSION], own_loop.Session._is_made = text, False
        return own_loop.session()

    def _train(self, text: str) -> None:
        scenario, script = self._cluster.scenario, self.script
        session = self._session(text)
        self._sessions.append(session)
        with session:
            shape, count = session.job.shape, Count()
            own = range(session.worker.rank, shape.stages, shape.ranks)
            stages = {index: NumbersStage(session.job, index, count) for index in own}
            part, begin = (session.worker.rank, session._process.tensor_rank), 0
            if (step := self.newest(session.job)) is not None:
                load_state(stages, count, self.saved[step][part])
                begin = step + 1
            if begin == scenario.steps:  # the session refuses the job
                self._rules.struck(current().process)
            self._begin = begin
            session.attach(stages, None, count, data=_no_data, step=begin)
            last = None if session.copies_state else begin - 1
            for step in session.steps():
                if last is not None and step != last + 1:
                    self._fail("steps", f"step {step} follows {last} in {current().process.name}")
                last = step
                session.forward_backward(lambda *_: None, seq_length=1, micro_batch_size=1)
                if step == script.fails_at:
                    self._raise(step)
                if step == script.stops_at and session.worker.pipeline == 0 == session.worker.rank:
                    session.stop()
                session.optimizer_step()
                count.steps += 1
                self._note_step(session, step, part, state_of(stages, count))
                self._pause()
                if step == script.skips_at and session.worker.pipeline == 0 == session.worker.rank:
                    self.has_failed = True
                else:
                    self._note_result(session, step, "all", None)
                self._note_result(session, step, f"rank {part}", session.worker.rank)
                if scenario.checkpoint_every and (step + 1) % scenario.checkpoint_every == 0:
                    self._save(session, step, part, state_of(stages, count))
                    self._note_result(session, step, "saved", None)
                if scenario.eval_every and (step + 1) % scenario.eval_every == 0:
                    self._note_evaluation(session, step)
            self._pause()
            if script.fails_at == scenario.steps and session.step == scenario.steps:
                self._raise(script.fails_at)
            self._note_result(session, session.step, "end", None)
        self._pause()
        if script.fails_at == scenario.steps + 1:
            self._raise(script.fails_at)

    def newest(self, job: Job) -> int | None:
        """Step of the newest complete checkpoint."""
        parts = job.shape.ranks * job.grid.tensor_parallel
        return max((step for step, states in self.saved.items() if len(states) == parts), default=None)

    def _save(self, session: Session, step: int, part: Part, state: dict[str, Any]) -> None:
        if session.is_saver:
            self._cluster.kernel.park(seconds=self._cluster.kernel.draw(0.0, 0.3))
            self.saved.setdefault(step, {})[part] = state

    def _pause(self) -> None:
        kernel = self._cluster.kernel
        chance = kernel.draws.random() if self.script.pauses else 1.0
        long = LONG_SECONDS[chance < 0.01] if chance < 0.1 else 0.0
        self.has_delayed = self.has_delayed or long > self._cluster.job.membership.transport_timeout
        kernel.park(seconds=long or kernel.draw(0.0, 0.05))

    def _raise(self, step: int) -> None:
        self._rules.struck(current().process)
        self.has_failed = True
        raise ScriptError(f"step {step}")

    # Rules.

    def _fail(self, rule: str, what: str) -> None:
        self._rules._fail(rule, what)

    def _note_step(self, session: Session, step: int, part: Part, state: Mapping[str, Any]) -> None:
        """A process has stepped: the step is committed, and all that have its part have the same bits."""
        if self._rules.committed < step:
            self._fail("persist", f"{current().process.name} has stepped in step {step}, which is not committed")
        text = f"{state['count']} {[tensor.tolist() for tensor in state['model']]}"
        digest = hashlib.sha256(text.encode()).hexdigest()
        if self.states.setdefault((step, part), digest) != digest:
            self._fail("bits", f"{current().process.name} has another state after step {step}")
        expected = self._rules.reference.metrics[step]["loss"] if self._rules.reference else session.loss
        if session.loss != expected:
            self._fail("bits", f"{current().process.name} sees loss {session.loss} of step {step}, not {expected}")

    def _note_result(self, session: Session, step: int, name: str, number: int | None) -> None:
        """A collective between two steps has one result, through failures."""

        def gather(peers: Peers | None) -> list[Tensor]:
            own = session.worker
            if peers is None:
                return []
            return [torch.stack([*peers.gather(number, torch.tensor([own.pipeline, own.rank, step])).values()])]

        result = [tensor.tolist() for tensor in session.world.complete(number, gather, by_all_tensor_ranks=False)]
        self._require_same(step, name + str(session._process.tensor_rank), result)

    def _note_evaluation(self, session: Session, step: int) -> None:
        session.evaluate(lambda *_: None, data=_no_data, seq_length=1, micro_batch_size=1)

    def _require_same(self, step: int, name: str, result: object) -> None:
        own, record, results = current().process, self._rules.record, self._results
        of_call = results.setdefault((self._starts, step, name), {})
        of_call[own] = result
        if record is None or str(own.worker) not in record.live:
            return  # it leaves, and the others call again
        for other, others in of_call.items():
            if others != result and other.is_alive and str(other.worker) in record.live:
                self._fail("collective", f"{own.name} gets {result} in {name} of step {step}, {other.name} {others}")

    def recorded(self, before: GenerationRecord | None, record: GenerationRecord) -> None:
        """Every start of the script counts once."""
        starts = 0 if before is None else before.script_starts
        is_one = record.script_starts == starts + 1 and not record.plan
        if not (record.script_starts == starts or is_one) or record.script_starts > self.script.restarts:
            self._fail("starts", f"the script was started again {record.script_starts} times, after {starts}")
        self._starts = record.script_starts

    def exited(self, error: RecycleError) -> None:
        """An agent has ended with an error."""
        text, script = str(error), self.script
        has_cause = re.search("too few|could not be ended", text)
        if "refused the job" in text:
            self._fail("failure", f"exit code {error.exit_code}, without the reason: {text}")
        if error.exit_code == STAGE_LOST and self._starts < script.restarts and not has_cause:
            self._fail("starts", f"the run ends after {self._starts} further starts of the script: {text}")
        scenario = self._cluster.scenario
        if not self.has_failed or scenario.faults or scenario.planned or scenario.crashes:
            return
        cause, code = "ScriptError", 1 if script.fails_at in (self._begin, scenario.steps + 1) else STAGE_LOST
        if script.skips_at >= 0:
            cause, code = "make the same collectives", RunError.exit_code
        if self._begin == scenario.steps:
            cause, code = "nothing is left to train", JobError.exit_code
        if cause not in text or error.exit_code != code:
            self._fail("failure", f"exit code {error.exit_code}: {text}")

    def close(self) -> None:
        """End the main loops: they would end when Python deletes them, in another run."""
        for session in self._sessions:
            with suppress(BaseException):
                session._pauses.close()
            session.__dict__.clear()

    def mend(self) -> None:
        """The user resumes the run, with a script that runs to its end."""
        self.script, self.has_failed = replace(self.script, fails_at=-1, stops_at=-1, skips_at=-1), False
        self._results.clear()
