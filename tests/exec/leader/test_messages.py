"""What the leader, processes and agents say to each other: no message is missed, and none counts twice."""

import pytest

from recycle import Worker
from recycle.exec.agent.node_agent import StandingOrders, UnansweredMessages
from recycle.exec.leader.actions import Action, Begin, Persist, Tell
from recycle.exec.leader.state import Phase, PlannedFault, ReceivedMessages
from recycle.exec.protocol import (
    Acknowledged,
    Commit,
    Committed,
    Copied,
    CopyProgress,
    Cursor,
    CutOff,
    Evaluated,
    EvaluationReport,
    EvaluationResult,
    FaultReached,
    FinalState,
    Formed,
    FromWorker,
    GenerationRecord,
    Leave,
    Leaving,
    Permit,
    Propose,
    Ready,
    Report,
    Saved,
    SavedPart,
    StepReport,
    Stop,
    Trouble,
    WorkerMessage,
)
from recycle.exec.worker.member import MemberState
from tests.exec.leader.driver import LeaderDriver
from tests.exec.runs import job

SMALL = job(2, 2, 2, eval={"every": 3}, train={"checkpoint_every": 2})


FAULTS = [PlannedFault("stop:0.0@1", Worker(0, 0), 1)]


def history() -> LeaderDriver:
    """A run with all that a leader decides: two generations, a fault, a departure, an evaluation and a checkpoint."""
    driver = LeaderDriver(SMALL, 4, faults=FAULTS)
    driver.start_and_form()
    driver.report()
    driver.say("0.0", FaultReached(0))
    driver.report()
    driver.say("1.1", Leaving(0))
    driver.tick()
    driver.report()
    evaluate(driver)
    driver.end(Worker(1, 1), "ended with exit code 0")
    driver.start_and_form()
    driver.report()
    evaluate(driver)
    driver.save_parts()
    for name in driver.record.live:
        driver.say(name, FinalState({Worker.parse(name).rank: "digest"}))
    driver.tick()
    return driver


def evaluate(driver: LeaderDriver):
    for name in driver.record.live:
        driver.say(name, StepReport(driver.record.committed, EvaluationReport([3.0], [2.0])))
    driver.tick()


def known(state: MemberState):
    """What a process knows; of commits the last two."""
    steps = [step for step in range(4) if state.commit(step) is not None][-2:]
    return (
        state.generation,
        state.plan,
        state.is_over,
        state.permit("form"),
        state.permit("run"),
        [state.commit(step) for step in steps],
        [state.evaluated(step) for step in range(4)],
        state.strikes,
        state.may_leave,
    )


@pytest.mark.parametrize("name", ["0.0", "1.1"])
def test_late_process_learns_what_the_others_know(name):
    standing, member, count = StandingOrders(), MemberState(name, 0), 0
    for message in (action.message for action in history().actions if isinstance(action, Tell)):
        standing.take(message)
        member.take(message)
        member.begin()
        newcomer = MemberState(name, 0)
        for reported in standing.messages():
            newcomer.take(reported)
            newcomer.begin()
        if newcomer.generation == member.generation:  # it does not begin a generation that is over
            count += 1
            assert known(newcomer) == known(member)
    assert count >= 9
    assert member.may_leave == (name == "1.1")


def test_process_takes_nothing_that_concerns_another_generation():
    member, commit = MemberState("0.0", 0), Commit(0, 1.0, 1.0, 1.0)
    member.take(Propose(GenerationRecord(2, ["0.0"], {"0.0": "0.0"}, "plan")))
    assert member.begin() is not None
    member.take(Permit(1, "run"))
    member.take(Committed(1, commit))
    member.take(EvaluationResult(1, Evaluated(0, 2.5, 96.0)))
    assert (member.permit("run"), member.commit(0), member.evaluated(0)) == (None, None, None)
    member.take(Stop(1))
    assert not member.is_over
    member.take(Permit(2, "form", stale=True))
    member.take(Committed(2, commit))
    member.take(EvaluationResult(2, Evaluated(0, 2.5, 96.0)))
    assert (member.permit("form"), member.permit("run")) == (Permit(2, "form", stale=True), None)
    assert (member.commit(0), member.commit(1), member.evaluated(0)) == (commit, None, Evaluated(0, 2.5, 96.0))
    member.take(Propose(GenerationRecord(4, ["0.0"], {"0.0": "0.0"}, "plan")))
    assert member.is_over
    member.take(Leave("0.0", 1))
    member.take(Leave("0.1", 0))
    assert not member.may_leave
    member.begin()
    assert (member.permit("form"), member.commit(0), member.evaluated(0)) == (None, None, None)


# Another leader.


class Agent:
    """Keeps what the leader and the processes of its node have said, as a node's agent does."""

    def __init__(self, driver: LeaderDriver):
        self.words = UnansweredMessages()
        self.record, self.cursor = GenerationRecord(0, [], {}, ""), Cursor(0, "abandoned")
        self._taken, self._take = 0, driver.take
        driver.take = self.take
        self._driver = driver

    def take(self, message):
        for messages in [message] if isinstance(message, FromWorker) else getattr(message, "said", []):
            self.words.take(messages)
        self._take(message)
        for action in self._driver.actions[self._taken :]:
            self._see(action)
        self._taken = len(self._driver.actions)

    def _see(self, action: Action):
        match action:
            case Persist():
                self.record, self.cursor = action.record or self.record, action.cursor
            case Tell(message=message):
                self.words.drop_answered(message)

    def next_leader(self) -> LeaderDriver:
        """Another leader, which this agent connects to."""
        begin = Begin(record=self.record, cursor=self.cursor)
        driver = LeaderDriver(SMALL, 4, begin=begin, faults=FAULTS, is_connected=False)
        driver.processes = {0: dict(self._driver.processes[0])}
        driver.connect(0, messages=self.words.messages())
        return driver


def decide_no_more(driver: LeaderDriver):
    """The leader takes messages, and dies before it decides what follows from them."""
    driver.tick = lambda seconds=0.0: None


@pytest.mark.parametrize("step", [0, 1])
def test_next_leader_commits_what_was_reported_to_the_last(step):
    driver = LeaderDriver(SMALL, 4)
    agent = Agent(driver)
    driver.start_and_form()
    for _ in range(step):
        driver.report()
    decide_no_more(driver)
    driver.report()
    follower = agent.next_leader()
    assert (driver.record.committed, follower.record.committed) == (step - 1, step - 1)
    follower.tick()
    assert (follower.record.committed, follower.record.generation, follower.phase) == (step, 1, Phase.RUNNING)


def committed(step: int, generation=4) -> Committed:
    return Committed(generation, Commit(step, 1.5, 0.25, 1.0))


class Node:
    """The last words of a node's processes."""

    def __init__(self):
        self.words = UnansweredMessages()

    def says(self, *messages: WorkerMessage, member="0.0", generation=0):
        for message in messages:
            self.words.take(FromWorker(member, message, generation))

    def remembered(self, member="0.0") -> list[WorkerMessage]:
        return [messages.message for messages in self.words.messages() if messages.member == member]


@pytest.fixture
def node():
    return Node()


def test_report_is_remembered_until_its_step_is_passed_and_an_evaluation_stands_beside_it(node):
    reports = [StepReport(step, Report({0: [1.0]}, None)) for step in (3, 4, 5)]
    evaluation = StepReport(4, EvaluationReport([1.0], [2.0]))
    node.says(*reports, evaluation, generation=4)
    node.words.drop_answered(committed(4))
    assert node.remembered() == [reports[1], reports[2], evaluation]
    node.words.drop_answered(committed(5))
    assert node.remembered() == [reports[2]]


def test_reports_of_an_ended_process_count_but_not_its_ready_or_leaving(node):
    part = SavedPart(3, 0, 0, Saved())
    for member in ("0.0", "0.1"):
        node.says(Ready(0), Leaving(0), part, FinalState({0: "aa"}), member=member)
    node.words.drop_processes(["0.0"])
    assert node.remembered() == [part, FinalState({0: "aa"})]
    assert node.remembered("0.1") == [Ready(0), Leaving(0), part, FinalState({0: "aa"})]


# The leader.


REPORT, EVALUATION = Report({0: [1.0]}, 0.5), EvaluationReport([1.0], [8.0])


SAID = [
    *(Acknowledged(True, stale=True), Formed("why"), CopyProgress([Copied("1.0", 0, 1, 8, 0.1)])),
    *(Trouble("broke"), CutOff("1.0"), StepReport(4, REPORT), StepReport(4, EVALUATION)),
]


@pytest.fixture
def received():
    received = ReceivedMessages(tensor_parallel=2)
    received.start_generation(GenerationRecord(3, ["0.0"], {"0.0": "0.0"}, "plan"))
    return received


def everything(received: ReceivedMessages) -> list[object]:
    parts = [received.take_parts(Report, 4), received.take_parts(EvaluationReport, 4)]
    return [*(received.by_process(type(message)) for message in SAID if not isinstance(message, StepReport)), *parts]


@pytest.mark.parametrize(("member", "generation"), [("0.0", 2), ("0.0", 4), ("0.0", 0), ("1.0", 3), ("0.0t2", 3)])
def test_messages_of_other_generations_and_processes_count_for_nothing(received, member, generation):
    for message in SAID:
        received.take(FromWorker(member, message, generation))
        received.take(FromWorker("0.0t1" if isinstance(message, StepReport) else member, message, generation))
    assert everything(received) == [{}, {}, {}, {}, {}, None, None]
