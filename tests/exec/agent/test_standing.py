"""What a process that connects is told, and what a new leader is told again."""

from __future__ import annotations

import pytest

from recycle.exec.agent.node_agent import LastWords, StandingOrders
from recycle.exec.protocol import (
    Acknowledged,
    Commit,
    Committed,
    Evaluated,
    EvaluationReport,
    EvaluationResult,
    FaultReached,
    FinalState,
    Formed,
    FromWorker,
    GenerationRecord,
    LeaderMessage,
    Leave,
    Leaving,
    Permit,
    Propose,
    Ready,
    Report,
    Saved,
    SavedPart,
    StateTensors,
    StepReport,
    Stop,
    Strike,
    WorkerMessage,
)


def propose(generation: int) -> Propose:
    return Propose(GenerationRecord(generation, ["0.0"], {"0.0": "0.0"}, "plan"), "text")


def committed(step: int, generation: int = 4) -> Committed:
    return Committed(generation, Commit(step, 1.5, 0.25, 1.0))


def standing(*messages: LeaderMessage) -> list[LeaderMessage]:
    orders = StandingOrders()
    for message in messages:
        orders.take(message)
    return orders.messages()


def test_newcomer_is_told_the_generation_and_its_last_two_commits() -> None:
    result = EvaluationResult(4, Evaluated(6, 2.5, 96.0))
    orders = [propose(4), Permit(4, "form"), Permit(4, "run"), *map(committed, range(8)), result, Stop(4)]
    assert standing(*orders) == [*orders[:3], committed(6), committed(7), result, Stop(4)]


def test_a_proposal_takes_the_place_of_all_that_concerns_the_generation_before() -> None:
    orders = [propose(4), Permit(4, "form"), Permit(4, "run"), committed(0), Stop(4), propose(5)]
    assert standing(*orders) == [propose(5)]


def test_strikes_and_departures_outlast_generations_and_are_told_first() -> None:
    others: list[LeaderMessage] = [Strike(0, "0.0"), Leave("0.1", 0), Leave("0.1", 1)]
    assert standing(propose(4), *others, propose(5)) == [others[0], others[2], propose(5)]


def test_orders_that_are_taken_twice_stand_once() -> None:
    orders = [Strike(0, "0.0"), propose(4), Permit(4, "form"), committed(0), Stop(4)]
    assert standing(*orders, *orders) == orders


class Node:
    """The last words of a node's processes."""

    def __init__(self) -> None:
        self.words = LastWords()

    def says(self, *messages: WorkerMessage, member: str = "0.0", generation: int = 0) -> None:
        for message in messages:
            self.words.take(FromWorker(member, message, generation))

    def remembered(self, member: str = "0.0") -> list[WorkerMessage]:
        return [said.message for said in self.words.all() if said.member == member]


@pytest.fixture
def node() -> Node:
    return Node()


def test_each_message_is_remembered_in_its_last_version(node: Node) -> None:
    node.says(Formed("why"), Formed(), generation=3)
    node.says(Formed("other"), member="0.1", generation=3)
    node.says(FaultReached(0), FaultReached(1))
    assert node.remembered() == [Formed(), FaultReached(0), FaultReached(1)]
    assert node.remembered("0.1") == [Formed("other")]


def test_report_is_remembered_until_its_step_is_passed_and_an_evaluation_stands_beside_it(node: Node) -> None:
    reports = [StepReport(step, Report({0: [1.0]}, None)) for step in (3, 4, 5)]
    evaluation = StepReport(4, EvaluationReport([1.0], [2.0]))
    node.says(*reports, evaluation, generation=4)
    node.words.told(committed(4))
    assert node.remembered() == [reports[1], reports[2], evaluation]
    node.words.told(committed(5))
    assert node.remembered() == [reports[2]]


def test_what_was_said_of_a_generation_is_forgotten_with_the_next_proposal(node: Node) -> None:
    node.says(Ready(0), FinalState({0: "aa"}))
    node.says(Acknowledged(False), Formed(), generation=4)
    node.says(Acknowledged(True), member="0.1", generation=5)
    node.words.told(propose(5))
    assert node.remembered() == [Ready(0), FinalState({0: "aa"})]
    assert node.remembered("0.1") == [Acknowledged(True)]


def test_process_that_has_ended_is_not_ready_and_does_not_leave_but_its_work_counts(node: Node) -> None:
    part = SavedPart(3, 0, 0, Saved())
    for member in ("0.0", "0.1"):
        node.says(Ready(0), Leaving(0), part, FinalState({0: "aa"}), member=member)
    node.words.ended(["0.0"])
    assert node.remembered() == [part, FinalState({0: "aa"})]
    assert node.remembered("0.1") == [Ready(0), Leaving(0), part, FinalState({0: "aa"})]


def test_parts_of_earlier_checkpoints_are_forgotten(node: Node) -> None:
    parts = [SavedPart(step, stage, 0, Saved()) for step in (1, 3, 5) for stage in (0, 1)]
    node.says(*parts)
    assert node.remembered() == parts[4:]
    layouts = [StateTensors(number, 0, plan, []) for number in (0, 1) for plan in ("", "other")]
    node.says(*layouts, *layouts)
    assert node.remembered() == [*parts[4:], *layouts]
