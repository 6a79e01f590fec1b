"""A worker's side of the protocol: its messages, its waits for decisions, and the interruption of generations."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Literal, TypeVar

from recycle.errors import RunError
from recycle.exec.device import DeviceState, Progress
from recycle.exec.links import LinkClosed, connect_locally
from recycle.exec.members import split_member
from recycle.exec.protocol import (
    Acknowledged,
    AgentMessage,
    Commit,
    Committed,
    CopyProgress,
    CutOff,
    Evaluated,
    EvaluationReport,
    EvaluationResult,
    FaultReached,
    Formed,
    GenerationRecord,
    GetKeys,
    Join,
    LeaderMessage,
    Leave,
    Permit,
    Propose,
    Report,
    Said,
    SetKey,
    StepReport,
    Stop,
    Strike,
    Trouble,
    Values,
    Warned,
    WorkerMessage,
)

AGENT = "the agent of this node"
INTERRUPT_SECONDS = 0.02
GENERATION_MESSAGES = (Acknowledged, Formed, CopyProgress, StepReport, Trouble, CutOff)
"""Messages that belong to a generation."""
_Answer = TypeVar("_Answer")


class GenerationOver(Exception):
    """The generation ended while this worker waited for a decision; not an error."""


class MemberState:
    """State from the leader's messages to a process, as a pure state machine.

    Attributes:
        generation: current generation of the process.
        over: the last generation that is known to be over.
        may_leave: the process may leave the run.
        stage_lost: why it leaves, if a stage has no live host.
        strikes: number of a fault -> the process that it struck first.
        earlier_strikes: faults that struck before the process's first generation; None before it.
    """

    def __init__(self, name: str, incarnation: int, generation: int = 0) -> None:
        self._worker, self._incarnation = split_member(name)[0], incarnation
        self.generation = self.over = generation
        self.live: Collection[str] = ()
        self._proposal: Propose | None = None
        self.plan = ""
        self._permits: dict[str, Permit] = {}
        self._commits: dict[int, Commit] = {}
        self._evaluated: Evaluated | None = None
        self.may_leave, self.stage_lost = False, ""
        self.strikes: dict[int, str] = {}
        self.earlier_strikes: frozenset[int] | None = None

    def take(self, message: LeaderMessage) -> None:
        """Process a message of the leader. A repeated message changes nothing."""
        match message:
            case Propose(record=record):
                if record.generation > self.generation:
                    self._proposal = message
                    self.over = max(self.over, record.generation - 1)
            case Permit() if message.generation == self.generation:
                self._permits[message.what] = message
            case Committed() if message.generation == self.generation:
                self._commits[message.commit.step] = message.commit
                self._commits = dict(sorted(self._commits.items())[-3:])
            case EvaluationResult() if message.generation == self.generation:
                self._evaluated = message.evaluated
            case Stop():
                self.over = max(self.over, message.generation)
            case Leave() if (message.worker, message.incarnation) == (self._worker, self._incarnation):
                self.may_leave, self.stage_lost = True, message.stage_lost
            case Strike():
                self.strikes[message.fault] = message.member

    def begin(self) -> GenerationRecord | None:
        """Begin the proposed generation, unless this process has no part in it or it is over. Returns its record."""
        proposal = self._proposal
        if proposal is None or proposal.record.generation <= max(self.generation, self.over):
            return None
        record = proposal.record
        if self._worker not in record.live or record.incarnations.get(self._worker, 0) != self._incarnation:
            return None  # not a member, or only an earlier process of this worker is
        self.generation, self.live, self.plan = record.generation, record.live, proposal.plan
        if self.earlier_strikes is None:
            self.earlier_strikes = frozenset(self.strikes)  # an agent sends these before it passes on a proposal
        self._permits, self._commits, self._evaluated = {}, {}, None
        return proposal.record

    @property
    def is_over(self) -> bool:
        return self.over >= self.generation

    def permit(self, what: Literal["form", "run"]) -> Permit | None:
        return self._permits.get(what)

    def commit(self, step: int) -> Commit | None:
        return self._commits.get(step)

    def evaluated(self, step: int) -> Evaluated | None:
        return self._evaluated if self._evaluated is not None and self._evaluated.step == step else None


class Member:
    """A process's connection to its agent.

    Args:
        interrupt: called repeatedly while the current generation is over; wakes the main thread. The next generation
            does not begin here before it has returned.
        lost: called with the reason when the agent is gone; should end the process.
        generation: the last one before this process; a resumed run counts on from its earlier generations.
    """

    def __init__(
        self,
        address: str,
        name: str,
        incarnation: int,
        heartbeat: float,
        interrupt: Callable[[], None],
        lost: Callable[[str], object],
        generation: int = 0,
        device: Callable[[], DeviceState] = DeviceState,
    ) -> None:
        self.name, self.progress = name, Progress(device)
        self.worker, _ = split_member(name)
        self._interrupt, self._lost = interrupt, lost
        self._state = MemberState(name, incarnation, generation)
        self._changed = threading.Condition()
        self.over = threading.Event()
        self._is_interrupting = False
        self._link = connect_locally(address, AgentMessage, AGENT)
        self._link.send(Join(name, incarnation))
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._beat, args=(heartbeat,), daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    # Messages from the leader.

    def _read(self) -> None:
        try:
            while True:
                for message in self._link.read():
                    with self._changed:
                        self._state.take(message)
                        self._changed.notify_all()
        except LinkClosed:
            self._lost(f"{AGENT} is gone")

    def _watch(self) -> None:
        """Interrupt the main thread repeatedly until it has left its stopped generation.

        One interrupt may come just before the thread waits. The lock keeps interrupts out of the next generation.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._state.is_over and self._is_interrupting)
                self.over.set()
                self._interrupt()
            time.sleep(INTERRUPT_SECONDS)

    def _wait_for(self, answer: Callable[[], _Answer | None]) -> _Answer | None:
        self.progress.set_waiting(True)
        with self._changed:
            self._changed.wait_for(lambda: answer() is not None or self._state.is_over)
            result = answer()
        self.progress.set_waiting(False)
        return result

    def next_record(self) -> GenerationRecord | None:
        """Wait for the next generation that includes this worker. Returns None if the worker may leave."""
        self.progress.begin_operation("settle")
        self.progress.set_waiting(True)
        with self._changed:
            self._is_interrupting = False
            while (record := self._state.begin()) is None:
                if self._state.may_leave:
                    return None
                self._changed.wait()
            self.over = threading.Event()  # threads of the last generation still look at its own
            self._is_interrupting = True
            self._changed.notify_all()
        self.progress.set_waiting(False)
        return record

    @property
    def plan(self) -> str:
        """Text of the current generation's plan file, if the run directory does not hold it; else empty."""
        return self._state.plan

    def permitted(self, what: Literal["form", "run"]) -> bool:
        """Wait until the generation may form or run; False if it is over instead."""
        return self._wait_for(lambda: self._state.permit(what)) is not None

    def is_stale_anywhere(self) -> bool:
        """Whether some process has live parameters of another iteration; call after permission to form."""
        permit = self._state.permit("form")
        return permit is not None and permit.stale

    def decision(self, step: int) -> Commit:
        commit = self._wait_for(lambda: self._state.commit(step))
        if commit is None:
            raise GenerationOver
        return commit

    def known_commit(self, step: int) -> Commit | None:
        """The commit of a step of the current generation, or None so far; from any thread."""
        return self._state.commit(step)

    def evaluated(self, step: int) -> Evaluated:
        result = self._wait_for(lambda: self._state.evaluated(step))
        if result is None:
            raise GenerationOver
        return result

    @property
    def stage_lost(self) -> str:
        return self._state.stage_lost

    # Messages to the leader.

    def send(self, message: WorkerMessage) -> None:
        """Send a message to the leader, with the generation's number if it belongs to one; from any thread.

        Raises RunError if the agent is gone.
        """
        try:
            self._link.send(Said(message, self._state.generation if isinstance(message, GENERATION_MESSAGES) else 0))
        except OSError:
            raise RunError(f"{AGENT} is gone") from None

    def report(self, step: int, report: Report) -> None:
        self.send(StepReport(step, report))

    def report_evaluation(self, step: int, report: EvaluationReport) -> None:
        self.send(StepReport(step, report))

    def warn(self, message: str) -> None:
        """Report a failure that training can do without; a run keeps only the first such message."""
        self.send(Warned(message))

    # Faults.

    @property
    def live(self) -> Collection[str]:
        return self._state.live

    def claim(self, fault: int) -> bool:
        strikes = self._state.strikes
        if fault in strikes:
            return False
        self.send(FaultReached(fault))
        with self._changed:
            self._changed.wait_for(lambda: fault in strikes)
        return strikes[fault] == self.name

    def await_strike(self, fault: int) -> bool:
        state = self._state
        with self._changed:
            self._changed.wait_for(lambda: state.earlier_strikes is not None and fault in state.strikes)
        return fault not in (state.earlier_strikes or ())

    # Heartbeats.

    def _beat(self, heartbeat: float) -> None:
        beats = 0
        try:
            while True:
                self._link.send(self.progress.heartbeat(beats))
                beats += 1
                time.sleep(heartbeat)
        except OSError:
            return  # the reader notices it too


class FormingKeys:
    """The part of torch's store interface on which process groups form, served by the agent. From any thread."""

    def __init__(self, address: str) -> None:
        self._link, self._lock = connect_locally(address, Values, AGENT), threading.Lock()

    def _ask(self, request: SetKey | GetKeys) -> list[bytes | None]:
        try:
            with self._lock:
                self._link.send(request)
                while not (answers := self._link.read()):
                    pass
        except (OSError, LinkClosed):
            raise RunError(f"{AGENT} is gone") from None
        return list(answers[0].values)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(SetKey(key, value.encode() if isinstance(value, str) else value))

    def get(self, key: str) -> bytes:
        """Read a key. Raises RuntimeError if it was not written."""
        (value,) = self._ask(GetKeys([key]))
        if value is None:
            raise RuntimeError(f"{key}: no such key")
        return value

    def check(self, keys: list[str]) -> bool:
        return None not in self._ask(GetKeys(list(keys)))
