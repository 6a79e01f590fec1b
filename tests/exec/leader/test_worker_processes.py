"""The latest process of each worker, the agents of the nodes, and the exchange of places."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from recycle.exec.leader.actions import AgentAbsent, Outbox, Send
from recycle.exec.leader.worker_processes import WorkerProcesses
from recycle.exec.protocol import AgentProcess, Ended, Hello, Kill, Start
from recycle.job.shape import Worker

FIRST, SECOND = Worker(0, 0), Worker(0, 1)
LEASE, TICK = 6.0, 0.25
GONE = "the agent of node 0 is gone"
KILLED = "killed by signal 9"


class Fleet(WorkerProcesses):
    """Processes of the workers of each node, all of whose agents are connected unless `connected` says otherwise."""

    def __init__(self, *nodes: str, connected: bool = True) -> None:
        self._out = Outbox()
        homes = {Worker.parse(worker): node for node, workers in enumerate(nodes) for worker in workers.split()}
        super().__init__(homes, LEASE, self._out)
        for node in range(len(nodes)) if connected else ():
            self.hello(node)

    def hello(self, node: int, *processes: AgentProcess, session: str = "first") -> bool:
        return self.greet(Hello(node, session, list(processes)))

    def start_both(self, generation: int = 0) -> None:
        for worker in (FIRST, SECOND):
            self.start(worker, generation)
        self.orders()

    def absent(self, *nodes: int, seconds: float = 0.0) -> None:
        """The connections to these agents are gone, for so long."""
        for node in nodes:
            self.part(AgentAbsent(node))
        for _ in range(round(seconds / TICK)):
            self._out.now += TICK
            self.tick(TICK)

    def end(self, worker: str, how: str = KILLED, lines: str = "", incarnation: int = 0) -> None:
        self.take(Ended(worker, incarnation, how, lines))

    def orders(self) -> list[object]:
        """(node, order) since the last call."""
        return [(send.node, send.order) for send in self._out.take() if isinstance(send, Send)]

    def running(self) -> list[bool]:
        return [self[worker].is_running for worker in (FIRST, SECOND)]

    def generations(self) -> list[int | None]:
        return [self[worker].generation for worker in (FIRST, SECOND)]


def named(*names: str) -> list[Worker]:
    return [Worker.parse(name) for name in names]


def start_of(
    worker: str, incarnation: int, generation: int, place: str = "", restored: int | None = None, node: int = 0
) -> tuple[int, Start]:
    return node, Start(worker, incarnation, place or worker, generation, restored)


def test_each_process_of_a_worker_has_the_next_number() -> None:
    fleet = Fleet("0.0 0.1")
    assert (fleet[FIRST].incarnation, fleet.running()[0], fleet.generations()[0]) == (-1, False, None)
    fleet.start(FIRST, 0)
    assert (fleet[FIRST].incarnation, fleet.running()[0], fleet.generations()[0]) == (0, True, 0)
    fleet.end("0.0", lines="last words")
    assert (fleet.running()[0], fleet[FIRST].how, fleet[FIRST].lines) == (False, KILLED, "last words")
    fleet.start(FIRST, 3, restored=7)
    assert (fleet[FIRST].incarnation, fleet.running()[0], fleet[FIRST].how) == (1, True, None)
    assert fleet.orders() == [start_of("0.0", 0, 0), start_of("0.0", 1, 3, restored=7)]


def test_end_of_the_latest_process_is_told_once() -> None:
    fleet = Fleet("0.0 0.1")
    fleet.start_both()
    fleet.end("0.0")
    fleet.end("0.0", "killed by signal 15")
    assert (fleet.take_ended(), fleet.take_ended()) == ({FIRST: KILLED}, {})
    fleet.start(FIRST, 1)
    fleet.end("0.0")
    assert (fleet.take_ended(), fleet.running()[0]) == ({}, True)


def test_only_a_running_process_is_killed() -> None:
    fleet = Fleet("0.0 0.1")
    fleet.kill(FIRST)
    fleet.start(FIRST, 0)
    fleet.kill(FIRST)
    fleet.end("0.0")
    fleet.kill(FIRST)
    assert fleet.orders() == [start_of("0.0", 0, 0), (0, Kill("0.0", 0))]


# Agents.


def test_agent_that_is_away_for_less_than_half_a_lease_has_kept_its_processes() -> None:
    fleet = Fleet("0.0", "0.1")
    fleet.start_both(5)
    for _ in range(3):  # each time counts anew
        fleet.absent(0)
        assert (fleet.missing_nodes([FIRST, SECOND]), fleet.is_awaited([FIRST])) == ([0], True)
        fleet.absent(seconds=2.5)
        assert not fleet.hello(0, AgentProcess("0.0", 0, 5))
    assert (fleet.missing_nodes([FIRST, SECOND]), fleet.is_awaited([FIRST])) == ([], False)
    fleet.absent(seconds=10)
    assert (fleet.running()[0], fleet.take_ended(), fleet.orders()) == (True, {}, [])


def test_processes_of_an_agent_that_is_away_for_longer_are_lost_and_may_be_started_again() -> None:
    fleet = Fleet("0.0", "0.1")
    fleet.start_both(5)
    fleet.absent(0, seconds=3)
    assert fleet.running()[0]
    fleet.absent(seconds=0.25)
    assert fleet.take_ended() == {FIRST: GONE}
    assert (fleet.missing_nodes([FIRST, SECOND]), fleet.is_awaited([FIRST])) == ([0], False)
    fleet.end("0.1", "ended with exit code 1")
    assert fleet.generations() == [None, 5]


def test_processes_of_an_agent_that_comes_back_after_it_was_given_up_are_killed() -> None:
    fleet = Fleet("0.0 0.1", "1.0 1.1")
    fleet.start_both(5)
    fleet.absent(0, seconds=4)
    assert fleet.hello(0, AgentProcess("0.0", 0, 5), AgentProcess("0.1", 0, 5, KILLED))
    assert (fleet.orders(), fleet.take_ended().keys()) == ([(0, Kill("0.0", 0))], {FIRST, SECOND})
    fleet.start(FIRST, 6)
    fleet.end("0.0")
    assert (fleet.orders(), fleet.running()[0]) == ([start_of("0.0", 1, 6)], True)


def test_new_session_of_a_node_means_that_its_processes_are_gone() -> None:
    fleet = Fleet("0.0", "0.1")
    fleet.start_both(5)
    assert fleet.hello(0, session="second")
    assert fleet.take_ended() == {FIRST: GONE}
    assert (fleet.generations()[0], fleet.running()) == (None, [False, True])
    fleet.start(FIRST, 5)
    assert fleet.orders() == [start_of("0.0", 1, 5)]


def test_process_that_ended_while_its_agent_was_away_has_ended() -> None:
    fleet = Fleet("0.0 0.1")
    fleet.start(FIRST, 0)
    fleet.absent(0)
    fleet.hello(0, AgentProcess("0.0", 0, 0, KILLED, "last words"))
    assert (fleet.take_ended(), fleet[FIRST].lines) == ({FIRST: KILLED}, "last words")


def test_process_whose_kill_did_not_arrive_is_killed_when_its_agent_is_back() -> None:
    fleet, running = Fleet("0.0 0.1"), [AgentProcess("0.0", 0, 0), AgentProcess("0.1", 0, 0)]
    fleet.start_both()
    fleet.absent(0)
    fleet.kill(FIRST)
    fleet.orders()
    for _ in range(2):
        fleet.hello(0, *running)
        assert fleet.orders() == [(0, Kill("0.0", 0))]
        fleet.absent(0)
    assert fleet.running()[0]
    fleet.hello(0, AgentProcess("0.0", 0, 0, KILLED), running[1])
    assert (fleet.take_ended(), fleet.orders()) == ({FIRST: KILLED}, [])


@pytest.mark.parametrize("before", [[], [AgentProcess("0.0", 0, 0, KILLED)]])
def test_process_whose_start_did_not_arrive_may_be_started_again(before: list[AgentProcess]) -> None:
    fleet = Fleet("0.0 0.1")
    fleet.start(FIRST, 0)
    fleet.end("0.0")
    fleet.take_ended()
    fleet.start(FIRST, 3)
    fleet.absent(0)
    fleet.orders()
    assert not fleet.hello(0, *before)
    assert (list(fleet.take_ended()), fleet.running()[0], fleet.generations()[0]) == ([FIRST], False, None)
    fleet.start(FIRST, 3)
    assert fleet.orders() == [start_of("0.0", 2, 3)]


# Another leader's processes.


def followed(incarnations: Mapping[str, int], *live: Worker, **more: object) -> Fleet:
    """What a leader has that follows another one, of two nodes whose agents are still to come."""
    fleet = Fleet("0.0", "0.1", connected=False)
    fleet.expect(live or (FIRST, SECOND), incarnations, **{"places": {}, **more})  # type: ignore[arg-type]
    return fleet


def test_next_leader_goes_on_with_the_processes_and_places_of_the_last() -> None:
    fleet = followed({"0.0": 2, "0.1": 4}, places={"0.0": "0.1", "0.1": "0.0"})
    assert (fleet.running(), [fleet.node(worker) for worker in (FIRST, SECOND)]) == ([True, True], [1, 0])
    fleet.hello(0, AgentProcess("0.1", 4, 7, KILLED, "last words"))
    fleet.hello(1, AgentProcess("0.0", 2, 7))
    assert fleet.take_ended() == {SECOND: KILLED}
    assert (fleet.incarnations, fleet.generations()[0]) == ({"0.0": 2, "0.1": 4}, 7)
    fleet.start(SECOND, 8)
    assert fleet.orders() == [start_of("0.1", 5, 8, place="0.0")]


def test_next_leader_gives_up_agents_that_do_not_come() -> None:
    fleet = followed({"0.0": 2})
    fleet.hello(1, AgentProcess("0.1", 0, 7))
    fleet.absent(seconds=2.5)
    assert fleet.is_awaited([FIRST])
    fleet.absent(seconds=1)
    assert fleet.take_ended() == {FIRST: GONE}
    fleet.hello(0, session="second")
    fleet.start(FIRST, 8)
    assert fleet.orders() == [start_of("0.0", 3, 8)]


def test_next_leader_finds_that_the_node_has_another_agent_or_other_processes() -> None:
    fleet = followed({"0.0": 2})
    fleet.hello(0, session="second")
    fleet.hello(1, AgentProcess("0.1", 1, 7))
    assert fleet.take_ended() == {FIRST: GONE, SECOND: "ended while there was no leader"}
    assert (fleet.running(), fleet.incarnations) == ([False, True], {"0.0": 2, "0.1": 1})


@pytest.mark.parametrize("incarnations", [{}, {"0.1": 3}])
def test_process_of_a_worker_that_has_no_part_is_killed_and_a_later_one_goes_on(incarnations: dict[str, int]) -> None:
    """The last leader has fenced it, and may have died before its agent knew."""
    fleet, number = followed(incarnations, FIRST), incarnations.get("0.1", 0)
    fleet.hello(1, AgentProcess("0.1", number, 7))
    assert (fleet.running()[1], fleet.orders()) == (False, [(1, Kill("0.1", number))])
    fleet.hello(1, AgentProcess("0.1", number + 1, 7))
    assert (fleet.running()[1], fleet.orders()) == (True, [])


def test_worker_that_the_run_starts_without_has_no_process_before_its_first() -> None:
    fleet = followed({}, FIRST, absent=frozenset({SECOND}))
    fleet.hello(1, AgentProcess("0.1", 0, 7))
    assert (fleet.running()[1], fleet.orders()) == (True, [])


# Places.


def test_missing_nodes_are_those_of_the_places() -> None:
    fleet = Fleet("0.0", "0.1", "1.0", "1.1")
    fleet.absent(2, 3)
    assert fleet.missing_nodes(named("1.1", "0.0", "1.0")) == [2, 3]
    assert fleet.missing_nodes(named("0.0", "0.1")) == []
    fleet.places = {Worker(0, 0): Worker(1, 1), Worker(1, 1): Worker(0, 0)}
    assert [fleet.missing_nodes(named(name)) for name in ("0.0", "1.1")] == [[3], []]


def test_position_without_a_node_exchanges_places_with_a_free_worker() -> None:
    fleet, positions = Fleet("0.0 0.1", "1.0 1.1", "2.0 2.1"), named("0.0", "0.1", "1.0", "1.1")
    fleet.move(positions, named("0.0", "1.0", "1.1", "2.0"))
    assert fleet.places == {Worker(0, 1): Worker(2, 0), Worker(2, 0): Worker(0, 1)}
    assert [fleet.node(worker) for worker in positions] == [0, 2, 1, 1]
    assert fleet.workers_of(2) == named("0.1", "2.1")
    fleet.start(Worker(0, 1), 2)
    assert fleet.orders() == [start_of("0.1", 0, 2, place="2.0", node=2)]


def test_positions_that_exchange_places_twice_are_where_they_were() -> None:
    fleet = Fleet("0.0 1.0", "0.1 1.1")
    fleet.move(named("0.0", "0.1"), named("0.0", "1.0"))
    assert fleet.places == {Worker(0, 1): Worker(1, 0), Worker(1, 0): Worker(0, 1)}
    fleet.move(named("0.0", "1.0"), named("0.0", "0.1"))
    assert fleet.places == {}


@pytest.mark.parametrize(("startable", "place"), [("0.0 0.1 2.0 2.1", "2.1"), ("0.0 0.1 2.0", "2.0")])
def test_place_on_a_node_without_a_peer_of_the_stage_is_preferred(startable: str, place: str) -> None:
    fleet = Fleet("0.0 2.0", "0.1 1.1", "1.0 2.1")
    fleet.move(named("0.0", "0.1", "1.0"), named(*startable.split()))
    assert fleet.places == {Worker(1, 0): Worker.parse(place), Worker.parse(place): Worker(1, 0)}
