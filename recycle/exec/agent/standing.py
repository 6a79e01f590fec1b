"""What a newcomer has to be told, and what a new leader has to be told again: pure."""

from __future__ import annotations

from collections.abc import Callable

from recycle.exec.protocol import (
    Committed,
    EvaluationResult,
    FaultReached,
    FromWorker,
    LeaderMessage,
    Leave,
    Leaving,
    Permit,
    Propose,
    Ready,
    SavedPart,
    StateTensors,
    StepReport,
    Stop,
    Strike,
)


class StandingOrders:
    """The messages of the leader that a process or an agent which connects now has to be told."""

    def __init__(self) -> None:
        self._of_generation: dict[object, LeaderMessage] = {}
        self._others: dict[object, LeaderMessage] = {}

    def take(self, message: LeaderMessage) -> None:
        """The leader has said this to all."""
        match message:
            case Propose():
                self._of_generation = {"propose": message}
            case Permit():
                self._of_generation["permit", message.what] = message
            case Committed():
                step = message.commit.step
                self._of_generation["commit", step] = message
                self._of_generation.pop(("commit", step - 2), None)
            case EvaluationResult():
                self._of_generation["evaluated"] = message
            case Stop():
                self._of_generation["stop"] = message
            case Leave():
                self._others["leave", message.worker] = message
            case Strike():
                self._others["strike", message.fault] = message

    def messages(self) -> list[LeaderMessage]:
        """The messages, in an order in which they can be taken."""
        return [*self._others.values(), *self._of_generation.values()]


class LastWords:
    """What the processes of a node have said and a new leader may still need, each in its last version."""

    def __init__(self) -> None:
        self._said: dict[object, FromWorker] = {}

    def take(self, said: FromWorker) -> None:
        """A process has said this."""
        match said.message:
            case StepReport(step=step, report=report):
                key: tuple[object, ...] = (type(report).__name__, step)
            case SavedPart() as part:
                key = ("saved", part.step, part.stage)
                self._forget(lambda other: isinstance(other.message, SavedPart) and other.message.step < part.step - 1)
            case StateTensors() as layout:
                key = ("tensors", layout.number, layout.plan)
            case FaultReached(fault=fault):
                key = ("fault", fault)
            case _:
                key = (type(said.message).__name__,)
        self._said[(said.member, *key)] = said

    def _forget(self, is_old: Callable[[FromWorker], bool]) -> None:
        self._said = {key: said for key, said in self._said.items() if not is_old(said)}

    def told(self, message: LeaderMessage) -> None:
        """The leader has said this: what it has answered is not needed any more."""
        if isinstance(message, Propose):
            self._forget(lambda said: 0 < said.generation < message.record.generation)
        elif isinstance(message, Committed):
            step = message.commit.step
            self._forget(lambda said: isinstance(said.message, StepReport) and said.message.step < step)

    def ended(self, members: list[str]) -> None:
        """These processes have ended: they are not ready any more, and do not leave."""
        gone = set(members)
        self._forget(lambda said: said.member in gone and isinstance(said.message, Ready | Leaving))

    def all(self) -> list[FromWorker]:
        """All of them."""
        return list(self._said.values())
