"""Who beats and does not answer while a generation begins is fenced, and so is who cannot form its groups twice."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pytest

from recycle import RunError
from recycle.exec.leader.compute_times import ComputeTimes
from recycle.exec.leader.rejoins import Rejoins
from recycle.exec.membership import coordinator
from recycle.exec.membership.coordinator import ATTEMPTS, END_SECONDS, Coordinator, GenerationPhase
from recycle.exec.membership.forming import GRACE_SECONDS
from recycle.exec.membership.interfaces import Ready
from recycle.exec.membership.schema import AcknowledgedKey, FormedKey, HeartbeatKey, ReportKey
from recycle.exec.membership.store import Store
from recycle.exec.membership.stores import host_store
from recycle.exec.protocol import Formed, GenerationRecord, Heartbeat, Report
from recycle.sections import MembershipSection
from recycle.shape import Worker
from tests.exec.runs import job

LIMITS = {"heartbeat": 0.5, "form_timeout": 4.0, "hung_after": 2.0, "transport_timeout": 10.0, "warm_up": 3.0}
TICK = 0.25


class Living:
    """Processes of which none ends before it is killed."""

    def __init__(self) -> None:
        self.killed: list[Worker] = []

    def gone(self) -> dict[Worker, str]:
        return {}

    def kill(self, worker: Worker) -> None:
        self.killed.append(worker)

    def running(self, worker: Worker) -> bool:
        return worker not in self.killed

    def started_in(self, worker: Worker) -> int:
        return 0

    def missing_nodes(self, workers: Collection[Worker]) -> list[int]:
        return [0]

    def incarnation(self, worker: Worker) -> int:
        return 0


class AnyPlan:
    """Everybody plays its own role."""

    def ready(self, failed: frozenset[Worker]) -> Ready | None:
        roles = {worker: worker for worker in job(3, 2, 2).shape.workers() if worker not in failed}
        return Ready("plan", "text", roles, {"barrier": 9.0})

    def observe(self, failed: frozenset[Worker], step: int, times: ComputeTimes) -> None:
        pass

    def has_better(self, failed: frozenset[Worker]) -> bool:
        return False


class Simulated:
    """A coordinator whose clock a test moves, and the answers of its workers, which all beat and say that they wait."""

    def __init__(self, store: Store, steps: int = 9, **sections: dict[str, Any]) -> None:
        self.now, self.processes, self.store = 1000.0, Living(), store
        self.events: list[tuple[str, str, str]] = []
        self.coordinator = Coordinator(
            job=job(3, 2, 2, membership=LIMITS, **sections),
            steps=steps,
            live=set(job(3, 2, 2).shape.workers()),
            store=store,
            processes=self.processes,  # type: ignore[arg-type]
            plans=AnyPlan(),
            log=self._log,
            committed=lambda commit, record: None,
            now=lambda: self.now,
            keeps=lambda step, is_last: is_last,
        )
        self._beats, self.is_still, self.waits = 0, False, True
        self.tick()

    def _log(self, kind: str, **details: Any) -> None:
        if kind == "detected":
            self.events.append((details["worker"], details["cause"], str(details["step"])))

    @property
    def record(self) -> GenerationRecord:
        return self.coordinator.record

    def tick(self, seconds: float = TICK) -> None:
        self.now += seconds
        self._beats += 1
        progress, longest = 0 if self.is_still else self._beats, 0.1 if self.waits else 9.0
        for worker in sorted(self.coordinator.live):
            self.store.set(HeartbeatKey(str(worker)), Heartbeat(self._beats, progress, self.waits, "form", longest))
        self.coordinator.tick()

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK)):
            self.tick()

    def acknowledge(self, without: Collection[str] = ()) -> None:
        for name in set(self.record.live) - set(without):
            self.store.set(AcknowledgedKey(self.record.generation, name), False)
        self.tick()

    def report(self) -> None:
        """Of the next iteration, by all; a worker hosts the stage of its rank."""
        for worker in sorted(self.coordinator.live):
            report = Report({worker.rank: [1e-6]}, 1.0 if worker.rank else None, checksums={worker.rank: 1})
            self.store.set(ReportKey(self.record.generation, self.record.committed + 1, str(worker)), report)
        self.tick()

    def form(self, without: Collection[str] = (), **answers: Formed) -> None:
        """Of workers by their names with an underscore for the dot; all others have formed."""
        given = {name.strip("w").replace("_", "."): answer for name, answer in answers.items()}
        for name in set(self.record.live) - set(without):
            self.store.set(FormedKey(self.record.generation, name), given.get(name, Formed()))
        self.tick()


@pytest.fixture
def store() -> Iterator[Store]:
    hosted, _, _ = host_store(MembershipSection())
    yield hosted
    hosted.close()


@pytest.fixture
def simulated(store: Store) -> Simulated:
    return Simulated(store)


def test_who_does_not_acknowledge_is_fenced_and_the_others_go_on(simulated: Simulated) -> None:
    simulated.acknowledge(without=["1.1"])
    simulated.run(LIMITS["form_timeout"] + LIMITS["hung_after"] - 1)
    assert simulated.coordinator.phase is GenerationPhase.PROPOSED
    simulated.run(2)
    assert simulated.events == [("1.1", "generation 1 was not acknowledged within 6 s", "0")]
    assert simulated.processes.killed == [Worker(1, 1)]
    assert simulated.record.generation == 2
    simulated.acknowledge()
    simulated.form()
    assert simulated.coordinator.phase is GenerationPhase.RUNNING


def test_a_pause_of_the_coordinator_counts_as_nobodys(simulated: Simulated) -> None:
    simulated.acknowledge(without=["1.1"])
    simulated.tick(seconds=100.0)
    simulated.run(4)
    assert simulated.events == []


def test_who_neither_forms_nor_fails_is_fenced_once_the_others_would_have_given_up(simulated: Simulated) -> None:
    simulated.acknowledge()
    late = Formed("waited in vain", expired=True)
    simulated.form(without=["0.1"], **{f"w{k}_{r}": late for k in range(3) for r in range(2)})
    simulated.run(2 * LIMITS["form_timeout"] - 1)
    assert simulated.events == []
    simulated.run(2)
    assert simulated.events == [("0.1", "groups of generation 1 did not form within 8 s", "0")]


def test_who_fails_first_to_form_twice_is_fenced_and_not_who_fails_in_consequence(simulated: Simulated) -> None:
    for generation in (1, 2):
        assert simulated.record.generation == generation
        simulated.acknowledge()
        simulated.form(without=["0.0", "1.0"], w2_1=Formed("the device is broken"))
        simulated.form(w2_1=Formed("the device is broken"), w0_0=Formed("closed by its peer"))
        simulated.run(GRACE_SECONDS + TICK)
    assert simulated.events == [("2.1", "could not form generation 2: the device is broken", "0")]
    simulated.acknowledge()
    simulated.form()
    assert simulated.coordinator.phase is GenerationPhase.RUNNING


def test_a_set_that_cannot_spare_anybody_is_given_up_after_some_attempts(simulated: Simulated) -> None:
    def attempt() -> None:
        simulated.acknowledge()
        simulated.form(without=["0.0", "1.0", "2.0"])
        simulated.run(2 * LIMITS["form_timeout"] + 1)

    for _ in range(ATTEMPTS - 1):
        attempt()
    with pytest.raises(RunError, match=rf"gave up after {ATTEMPTS} attempts .* not form within 8 s by workers 0\.0 1"):
        attempt()
    assert simulated.events == []


def test_a_worker_that_does_not_come_back_is_waited_for_until_a_deadline(simulated: Simulated) -> None:
    events: list[str] = []
    rejoins = Rejoins(
        simulated.processes,  # type: ignore[arg-type]
        lambda worker: False,
        lambda kind, **details: events.append(f"{kind} {details['worker']} {details['step']}"),
        lambda: simulated.now,
        5.0,
    )
    rejoins.expect(Worker(1, 1), 3, started=True)
    live = {worker for worker in job(3, 2, 2).shape.workers() if worker != Worker(1, 1)}
    admitted: list[Worker] = []
    assert rejoins.settled(live, 2, admitted.append)
    assert not rejoins.settled(live, 3, admitted.append)
    simulated.now += 4.9
    assert not rejoins.settled(live, 3, admitted.append)
    simulated.now += 0.2
    assert rejoins.settled(live, 3, admitted.append)
    assert (events, admitted, simulated.processes.killed) == (["fault 1.1 3"], [], [Worker(1, 1)])
    assert rejoins.settled(live, 4, admitted.append)


def test_a_generation_in_which_all_wait_for_what_never_comes_is_repeated(simulated: Simulated) -> None:
    simulated.acknowledge()
    simulated.form()
    simulated.run(2 * LIMITS["transport_timeout"])
    assert (simulated.record.generation, simulated.coordinator.phase) == (1, GenerationPhase.RUNNING)
    simulated.is_still = True
    simulated.run(LIMITS["transport_timeout"] - 1)
    assert simulated.record.generation == 1
    simulated.run(2)
    assert (simulated.record.generation, simulated.events) == (2, [])


def test_the_last_evaluation_may_wait_for_a_slow_disk(store: Store) -> None:
    """The last checkpoint waits for the one before, with a deadline of its own."""
    deadline = 60.0
    simulated = Simulated(store, 1, train={"checkpoint_deadline": deadline}, eval={"every": 1})
    simulated.acknowledge()
    simulated.form()
    simulated.report()
    assert simulated.record.is_evaluation_due
    simulated.is_still = True
    simulated.run(deadline - 1)
    assert (simulated.record.generation, simulated.coordinator.phase) == (1, GenerationPhase.RUNNING)
    simulated.run(2)
    assert simulated.record.generation == 2


def test_a_run_that_is_to_end_does_not_wait_for_a_worker_that_is_to_come_back(simulated: Simulated) -> None:
    """Its node is not there yet, and it was to take part from step 0 on."""
    simulated.acknowledge(without=["1.1"])
    simulated.run(LIMITS["form_timeout"] + LIMITS["hung_after"] - 2)
    simulated.coordinator.expect_rejoins([(Worker(1, 1), 0)])
    simulated.run(4)
    assert (simulated.record.generation, simulated.coordinator.phase) == (1, GenerationPhase.BETWEEN)
    simulated.coordinator.end_early()
    simulated.tick()
    assert (simulated.record.generation, simulated.coordinator.phase) == (2, GenerationPhase.PROPOSED)


def test_a_run_that_is_to_end_kills_no_worker_that_makes_no_progress_where_its_state_would_be_lost(
    simulated: Simulated,
) -> None:
    """All of them may be compiling."""
    simulated.acknowledge()
    simulated.form()
    simulated.report()
    assert simulated.record.committed == 0
    simulated.coordinator.end_early()
    simulated.is_still, simulated.waits = True, False
    simulated.run(END_SECONDS)
    simulated.coordinator.end_at_committed()
    assert (simulated.processes.killed, simulated.coordinator.phase) == ([], GenerationPhase.FINISHED)
    assert len(simulated.record.live) == 6


def test_a_plan_that_never_comes_ends_the_run(simulated: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "PLAN_SECONDS", 30.0)
    simulated.acknowledge(without=["1.1"])
    simulated.coordinator.plans.ready = lambda failed: None  # type: ignore[method-assign]
    simulated.run(LIMITS["form_timeout"] + LIMITS["hung_after"] + 1)
    simulated.run(28)
    assert simulated.coordinator.phase is GenerationPhase.BETWEEN
    with pytest.raises(RunError, match=r"no plan without workers 1\.1"):
        simulated.run(4)
