"""The leader of a run: a state machine from the start of the workers to their final states.

`Leader.take` gets one message and the time, and returns the actions that follow. Messages of processes and agents are
only noted; what follows from them is decided at the next `Tick`. The leader does no input or output and reads no clock,
so that a test can drive it with any order of messages.

All that another leader needs to go on is in the register (`Persist`) and in what agents say again. Of what the leader
keeps in memory, the age of heartbeats, the number of attempts to form and the one retry of a step that was not finite,
or whose hosts disagreed, begin again there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recycle.errors import RecycleError
from recycle.exec.leader.actions import (
    Action,
    AgentAbsent,
    Begin,
    CheckpointCompleted,
    CheckpointFound,
    DepartureAsked,
    EndEarly,
    Fail,
    Planned,
    RuntimeMessage,
    Tick,
)
from recycle.exec.leader.generations import Generations, StageLost
from recycle.exec.leader.lifecycle import Ending, Startup
from recycle.exec.leader.state import Phase, RunDescription
from recycle.exec.members import worker_names
from recycle.exec.protocol import (
    Batch,
    Ended,
    FaultReached,
    FinalState,
    FromWorker,
    Hello,
    Leaving,
    Ready,
    SavedPart,
    StateTensors,
    Strike,
    Warned,
)


class Leader:
    """Leads one run. The first message is `Begin`.

    Args:
        run: what is trained.
        now: time on the leader's clock.

    Attributes:
        generations: the generations of the run.
    """

    def __init__(self, run: RunDescription, now: float) -> None:
        self._run = run
        self.generations = generations = Generations(run, now)
        self._processes, self._departures = generations.processes, generations.departures
        self._startup, self._ending = Startup(generations), Ending(generations)
        self._has_warned = False
        self._messages: dict[type, Callable[[Any], object]] = {
            Tick: self._tick,
            Batch: self._take_batch,
            FromWorker: self._hear,
            Ended: self._processes.take,
            Hello: self._greet,
            AgentAbsent: self._processes.part,
            DepartureAsked: self._departures.ask_all,
            Planned: generations.answers.take,
            CheckpointCompleted: generations.checkpoints.completed,
            CheckpointFound: self._startup.found,
            EndEarly: self._ending.end_early,
            Begin: self._begin,
        }
        self._said: dict[type, Callable[[str, Any], object]] = {
            Ready: self._processes.take_ready,
            Leaving: self._departures.take,
            SavedPart: generations.checkpoints.take,
            StateTensors: generations.judge.take_tensors,
            FinalState: self._ending.take,
            Warned: self._take_warning,
            FaultReached: self._reach_fault,
        }

    def take(self, now: float, message: FromWorker | Batch | Ended | Hello | RuntimeMessage) -> list[Action]:
        """Take a message.

        Args:
            now: seconds, on a clock that does not go back.

        Returns:
            what follows from it, in order; `Fail` in the end where the run cannot go on.
        """
        self.generations.now = now
        try:
            self._messages[type(message)](message)
        except RecycleError as error:
            self.generations.put(Fail(error))
            self.generations.enter(Phase.OVER)
        return self.generations.take()

    def _take_batch(self, batch: Batch) -> None:
        for said in batch.said:
            self._hear(said)
        beats = self.generations.beats
        for ended in batch.ended:
            self._processes.take(ended)
            beats.forget(self.generations.members(ended.worker))
        beats.take(batch.beats)

    def _hear(self, said: FromWorker) -> None:
        take = self._said.get(type(said.message))
        if take is None:
            self.generations.heard.take(said)
        else:
            take(said.member, said.message)

    def _greet(self, hello: Hello) -> None:
        """An agent has connected."""
        if self._processes.greet(hello):
            started = {process.worker for process in hello.processes}
            here = self._processes.workers_of(hello.node)
            self._departures.forget(worker for worker in here if str(worker) not in started)
            self.generations.rejoins.adopt()
        for said in hello.said:
            self._hear(said)

    def _begin(self, begin: Begin) -> None:
        generations, train = self.generations, self._run.job.train
        generations.checkpoints.kept = set(begin.kept)
        if begin.record is not None:
            generations.adopt(begin, begin.record)
            self._startup.can_go_back = True
        elif begin.checkpoint is not None:
            self._startup.resume(begin.checkpoint, begin.generation)
        generations.rejoins.expect_faults()
        if begin.record is None and train.sharded_optimizer and train.optimizer_copies == 1:
            self._warn_of_single_copies()

    def _warn_of_single_copies(self) -> None:
        log = self.generations.log
        log(
            "warning",
            message="[train] optimizer_copies = 1: every death goes back to a checkpoint; with 2 any one of a stage may"
            " die",
        )
        if self._run.job.integrity.compares_states:
            log(
                "warning",
                message="[integrity]: with [train] optimizer_copies = 1 no other worker holds the optimizer's state of"
                " a shard, so only parameters are compared; with 2 the state is compared too",
            )

    def _take_warning(self, member: str, warned: Warned) -> None:
        """Write the first warning of a worker as an event."""
        if not self._has_warned:
            self._has_warned = True
            self.generations.log("warning", message=warned.message)

    # What is due.

    def _tick(self, tick: Tick) -> None:
        generations = self.generations
        if generations.phase is Phase.OVER:
            return
        generations.beats.are_due = tick.judges_beats
        generations.pass_time()
        if self._ending.end_without_iteration():
            return
        match generations.phase:
            case Phase.GOING_BACK:
                self._startup.go_back()
            case Phase.STARTING:
                self._startup.start()
            case Phase.BETWEEN | Phase.PROPOSED | Phase.FORMING | Phase.RUNNING:
                self._train()
        if generations.phase is Phase.FINISHED:
            self._ending.finish()

    def _train(self) -> None:
        generations, checkpoints = self.generations, self.generations.checkpoints
        generations.rejoins.restart()
        if checkpoints.pending:
            checkpoints.tick(worker_names(generations.live | self._departures.leaving), generations.record)
        try:
            generations.tick()
        except StageLost as lost:
            self._startup.begin_to_go_back(lost, generations.live)
        if self._departures.everybody:
            self._ending.end_early(None)

    # Faults on purpose.

    def _reach_fault(self, member: str, reached: FaultReached) -> None:
        """Write the event of a fault that has reached its point, then have it strike; once for all processes."""
        generations, number, fault = self.generations, reached.fault, self._run.faults[reached.fault]
        if number in generations.struck:
            return
        generations.struck[number] = member
        generations.log("fault", worker=str(fault.worker), step=generations.next_step, fault=fault.text)
        if generations.record.generation:
            generations.persist()
        generations.tell(Strike(number, member))
