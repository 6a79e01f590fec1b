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
    Rewind,
    RuntimeMessage,
    Tick,
)
from recycle.exec.leader.ending import Ending
from recycle.exec.leader.generations import Generations, StageLost
from recycle.exec.leader.startup import Startup
from recycle.exec.leader.state import Phase, RunDescription
from recycle.exec.members import parse_workers, split_member, worker_of
from recycle.exec.protocol import (
    Batch,
    CutEnds,
    Ended,
    FaultReached,
    FinalState,
    FromWorker,
    Hello,
    Leaving,
    PeerEnds,
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
        self._run, self._job = run, run.job
        self.generations = generations = Generations(run, now)
        self._processes = generations.processes
        self._checkpoints, self._departures = generations.checkpoints, generations.departures
        self._startup, self._ending = Startup(generations), Ending(generations)
        self._has_warned = False
        self._reached: dict[int, str] = {}
        self._messages: dict[type, Callable[[Any], object]] = {
            Tick: self._tick,
            Batch: self._take_batch,
            FromWorker: self._hear,
            Ended: self._processes.take,
            Hello: self._greet,
            AgentAbsent: lambda absent: self._processes.part(absent.node),
            DepartureAsked: self._ask_to_leave,
            Planned: generations.answers.take,
            CheckpointCompleted: self._checkpoints.completed,
            CheckpointFound: self._startup.found,
            EndEarly: lambda _: self._ending.end_early(),
            Begin: self._begin,
        }
        self._said: dict[type, Callable[[str, Any], object]] = {
            Ready: lambda member, ready: self._processes.take_ready(member, ready.incarnation),
            Leaving: self._leave,
            SavedPart: lambda member, part: self._checkpoints.take(split_member(member)[0], part),
            StateTensors: lambda member, layout: generations.take_tensors(layout),
            FinalState: lambda member, final: self._ending.final.update({member: final.digests}),
            Warned: self._note_warning,
            FaultReached: self._reach_fault,
            CutEnds: self._relay_ends,
        }

    @property
    def ends_early(self) -> bool:
        """Whether the run was told to end before its last iteration, unless it had come there."""
        return self.generations.ends_early

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
        for ended in batch.ended:
            self._processes.take(ended)

    def _hear(self, said: FromWorker) -> None:
        handle = self._said.get(type(said.message))
        if handle is None:
            self.generations.heard.take(said)
        else:
            handle(said.member, said.message)

    def _leave(self, member: str, leaving: Leaving) -> None:
        worker = worker_of(member)
        if leaving.incarnation == self._processes[worker].incarnation:
            self._departures.ask(worker, by_signal=True)

    def _ask_to_leave(self, asked: DepartureAsked) -> None:
        for worker in asked.workers:
            self._departures.ask(worker, asked.seconds)

    # The beginning.

    def _begin(self, begin: Begin) -> None:
        self._checkpoints.kept = set(begin.kept)
        if begin.record is not None:
            self._take_over(begin)
            return
        self._warn_of_settings()
        if begin.checkpoint is not None:
            self._startup.resume(begin.checkpoint, begin.generation)
        self.generations.rejoins.expect_faults()

    def _take_over(self, begin: Begin) -> None:
        record, cursor, generations = begin.record, begin.cursor, self.generations
        assert record is not None
        live = parse_workers(record.live)
        self._processes.expect(live, record.incarnations, record.places, self._run.absent)
        is_newer = cursor is not None and cursor.generation == record.generation
        step = (cursor if cursor is not None and is_newer else record).committed
        self.generations.log("coordinator", node=begin.node, generation=record.generation, step=step + 1)
        generations.answers.adopt(generations.everybody - live, begin.plan, begin.hosts)
        generations.adopt(begin)
        generations.rejoins.expect_faults()
        self._startup.can_go_back = True
        if not record.plan:
            generations.enter(Phase.STARTING)
        self.generations.put(Rewind(generations.record.committed))  # the last leader may have gone back and died then

    def _greet(self, hello: Hello) -> None:
        """An agent has connected."""
        if self._processes.greet(hello):
            started = {process.worker for process in hello.processes}
            here = self._processes.workers_of(hello.node)
            self._departures.forget(worker for worker in here if str(worker) not in started)
            self.generations.rejoins.adopt()
        for said in hello.said:
            self._hear(said)

    def _warn_of_settings(self) -> None:
        if self._job.train.sharded_optimizer and self._job.train.optimizer_copies == 1:
            self._warn(
                "[train] optimizer_copies = 1: every death goes back to a checkpoint; with 2 any one of a stage may die"
            )
            if self._job.integrity.compares_states:
                self._warn(
                    "[integrity]: with [train] optimizer_copies = 1 no other worker holds the optimizer's state of a"
                    " shard, so only parameters are compared; with 2 the state is compared too"
                )

    def _warn(self, message: str) -> None:
        self.generations.log("warning", message=message)

    # What is due.

    def _tick(self, tick: Tick) -> None:
        generations, beats = self.generations, tick.beats
        if generations.phase is Phase.OVER:
            return
        generations.pass_time()
        self._strike()
        if self._ending.end_without_iteration():
            return
        match generations.phase:
            case Phase.GOING_BACK:
                self._startup.go_back()
            case Phase.STARTING:
                self._startup.start(beats)
            case Phase.FINISHED:
                pass
            case _:
                self._train(beats)
        if generations.phase is Phase.FINISHED:
            self._ending.finish(beats)

    def _train(self, beats: Any) -> None:
        generations = self.generations
        generations.rejoins.restart(beats)
        if self._checkpoints.pending:
            writers = map(str, generations.live | self._departures.leaving)
            self._checkpoints.tick(list(writers), generations.record.committed)
        try:
            generations.tick(beats)
        except StageLost as lost:
            self._startup.begin_to_go_back(lost, generations.live)
        if self._departures.everybody:
            self._ending.end_early()

    def _note_warning(self, member: str, warned: Warned) -> None:
        """Write the first warning of a worker as an event."""
        if not self._has_warned:
            self._has_warned = True
            self._warn(warned.message)

    # Faults on purpose.

    def _reach_fault(self, member: str, reached: FaultReached) -> None:
        self._reached.setdefault(reached.fault, member)
        if (struck := self.generations.struck.get(reached.fault)) is not None:
            self.generations.tell(Strike(reached.fault, struck))

    def _strike(self) -> None:
        """Write the event of each fault that has reached its point, then have it strike."""
        generations = self.generations
        for number in sorted(self._reached.keys() - generations.struck.keys()):
            fault, member = self._run.faults[number], self._reached[number]
            generations.struck[number] = member
            self.generations.log("fault", worker=str(fault.worker), step=generations.next_step, fault=fault.text)
            if generations.record.generation:
                generations.persist()
            self.generations.tell(Strike(number, member))
            if fault.other is not None and not self._processes[fault.other].is_running:
                self.generations.tell(PeerEnds(number, str(fault.worker), "", []))  # no process could tell them

    def _relay_ends(self, member: str, message: CutEnds) -> None:
        """Tell the other worker of a fault the ends of a process's connections."""
        fault = self._run.faults[message.fault]
        other = fault.other if worker_of(member) == fault.worker else fault.worker
        self.generations.tell(PeerEnds(message.fault, str(other), member, message.ends))
