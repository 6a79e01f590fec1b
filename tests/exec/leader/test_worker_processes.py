"""The latest process of each worker, the agents of the nodes, and the exchange of places."""

from __future__ import annotations

import pytest

from recycle.exec.leader.actions import AgentAbsent, Outbox, Send
from recycle.exec.leader.worker_processes import WorkerProcesses
from recycle.exec.protocol import AgentProcess, Ended, Hello, Kill, Start
from recycle.job.shape import Worker

FIRST, SECOND = Worker(0, 0), Worker(0, 1)
LEASE, TICK = 6.0, 0.25
GONE = "the agent of node 0 is gone"


def processes_on(*nodes: str, connected: bool = True) -> tuple[WorkerProcesses, Outbox]:
    """Processes of the workers of each node, all of whose agents are connected."""
    homes = {Worker.parse(worker): node for node, workers in enumerate(nodes) for worker in workers.split()}
    outbox = Outbox()
    processes = WorkerProcesses(homes, LEASE, outbox)
    for node in set(homes.values()) if connected else ():
        processes.greet(Hello(node, "first", []))
    return processes, outbox


def pass_time(processes: WorkerProcesses, outbox: Outbox, seconds: float) -> None:
    for _ in range(round(seconds / TICK)):
        outbox.now += TICK
        processes.tick(TICK)


def named(*names: str) -> list[Worker]:
    return [Worker.parse(name) for name in names]


def test_each_process_of_a_worker_has_the_next_number() -> None:
    processes, outbox = processes_on("0.0 0.1")
    assert (processes[FIRST].incarnation, processes[FIRST].is_running, processes[FIRST].generation) == (
        -1,
        False,
        None,
    )
    processes.start(FIRST, 0)
    assert (processes[FIRST].incarnation, processes[FIRST].is_running, processes[FIRST].generation) == (
        0,
        True,
        0,
    )
    processes.take(Ended("0.0", 0, "killed by signal 9", "last words"))
    assert not processes[FIRST].is_running
    assert (processes[FIRST].how, processes[FIRST].lines) == ("killed by signal 9", "last words")
    processes.start(FIRST, 3, restored=7)
    assert (processes[FIRST].incarnation, processes[FIRST].is_running, processes[FIRST].how) == (1, True, None)
    assert outbox.take() == [
        Send(0, Start(str(FIRST), 0, str(FIRST), 0)),
        Send(0, Start(str(FIRST), 1, str(FIRST), 3, 7)),
    ]


def test_end_of_the_latest_process_is_told_once() -> None:
    processes, _ = processes_on("0.0 0.1")
    for worker in (FIRST, SECOND):
        processes.start(worker, 0)
    processes.take(Ended("0.0", 0, "killed by signal 9"))
    processes.take(Ended("0.0", 0, "killed by signal 15"))
    assert processes.take_ended() == {FIRST: "killed by signal 9"}
    assert processes.take_ended() == {}
    processes.start(FIRST, 1)
    processes.take(Ended("0.0", 0, "killed by signal 9"))
    assert processes.take_ended() == {}
    assert processes[FIRST].is_running


def test_only_a_running_process_is_killed() -> None:
    processes, outbox = processes_on("0.0 0.1")
    processes.kill(FIRST)
    processes.start(FIRST, 0)
    processes.kill(FIRST)
    processes.take(Ended("0.0", 0, "killed by signal 9"))
    processes.kill(FIRST)
    assert outbox.take() == [Send(0, Start(str(FIRST), 0, str(FIRST), 0)), Send(0, Kill(str(FIRST), 0))]


# Agents.


def test_agent_that_is_away_for_less_than_half_a_lease_has_kept_its_processes() -> None:
    processes, outbox = processes_on("0.0", "0.1")
    for worker in (FIRST, SECOND):
        processes.start(worker, 5)
    outbox.take()
    for _ in range(3):  # each time counts anew
        processes.part(AgentAbsent(0))
        assert (processes.missing_nodes([FIRST, SECOND]), processes.is_awaited([FIRST])) == ([0], True)
        pass_time(processes, outbox, 2.5)
        assert not processes.greet(Hello(0, "first", [AgentProcess("0.0", 0, 5)]))
    assert (processes.missing_nodes([FIRST, SECOND]), processes.is_awaited([FIRST])) == ([], False)
    pass_time(processes, outbox, 10)
    assert (processes[FIRST].is_running, processes.take_ended(), outbox.take()) == (True, {}, [])


def test_processes_of_an_agent_that_is_away_for_longer_are_lost_and_may_be_started_again() -> None:
    processes, outbox = processes_on("0.0", "0.1")
    for worker in (FIRST, SECOND):
        processes.start(worker, 5)
    processes.part(AgentAbsent(0))
    pass_time(processes, outbox, 3)
    assert processes[FIRST].is_running
    pass_time(processes, outbox, 0.25)
    assert processes.take_ended() == {FIRST: GONE}
    assert (processes.missing_nodes([FIRST, SECOND]), processes.is_awaited([FIRST])) == ([0], False)
    processes.take(Ended("0.1", 0, "ended with exit code 1"))
    assert [processes[worker].generation for worker in (FIRST, SECOND)] == [None, 5]


def test_processes_of_an_agent_that_comes_back_after_it_was_given_up_are_killed() -> None:
    processes, outbox = processes_on("0.0 0.1", "1.0 1.1")
    for worker in (FIRST, SECOND):
        processes.start(worker, 5)
    processes.part(AgentAbsent(0))
    pass_time(processes, outbox, 4)
    outbox.take()
    assert processes.greet(
        Hello(0, "first", [AgentProcess("0.0", 0, 5), AgentProcess("0.1", 0, 5, "killed by signal 9")])
    )
    assert outbox.take() == [Send(0, Kill(str(FIRST), 0))]
    assert set(processes.take_ended()) == {FIRST, SECOND}
    processes.start(FIRST, 6)
    processes.take(Ended("0.0", 0, "killed by signal 9"))
    assert outbox.take() == [Send(0, Start(str(FIRST), 1, str(FIRST), 6))]
    assert processes[FIRST].is_running


def test_new_session_of_a_node_means_that_its_processes_are_gone() -> None:
    processes, outbox = processes_on("0.0", "0.1")
    for worker in (FIRST, SECOND):
        processes.start(worker, 5)
    outbox.take()
    assert processes.greet(Hello(0, "second", []))
    assert processes.take_ended() == {FIRST: GONE}
    assert (processes[FIRST].generation, processes[SECOND].is_running) == (None, True)
    processes.start(FIRST, 5)
    assert outbox.take() == [Send(0, Start(str(FIRST), 1, str(FIRST), 5))]


def test_process_that_ended_while_its_agent_was_away_has_ended() -> None:
    processes, _ = processes_on("0.0 0.1")
    processes.start(FIRST, 0)
    processes.part(AgentAbsent(0))
    processes.greet(Hello(0, "first", [AgentProcess("0.0", 0, 0, "killed by signal 9", "last words")]))
    assert (processes.take_ended(), processes[FIRST].lines) == ({FIRST: "killed by signal 9"}, "last words")


def test_process_whose_kill_did_not_arrive_is_killed_when_its_agent_is_back() -> None:
    processes, outbox = processes_on("0.0 0.1")
    for worker in (FIRST, SECOND):
        processes.start(worker, 0)
    processes.part(AgentAbsent(0))
    processes.kill(FIRST)
    outbox.take()
    running = [AgentProcess("0.0", 0, 0), AgentProcess("0.1", 0, 0)]
    for _ in range(2):
        processes.greet(Hello(0, "first", running))
        assert outbox.take() == [Send(0, Kill(str(FIRST), 0))]
        processes.part(AgentAbsent(0))
    assert processes[FIRST].is_running
    processes.greet(Hello(0, "first", [AgentProcess("0.0", 0, 0, "killed by signal 9"), running[1]]))
    assert (processes.take_ended(), outbox.take()) == ({FIRST: "killed by signal 9"}, [])


@pytest.mark.parametrize("before", [[], [AgentProcess("0.0", 0, 0, "killed by signal 9")]])
def test_process_whose_start_did_not_arrive_may_be_started_again(before: list[AgentProcess]) -> None:
    processes, outbox = processes_on("0.0 0.1")
    processes.start(FIRST, 0)
    processes.take(Ended("0.0", 0, "killed by signal 9"))
    processes.take_ended()
    processes.start(FIRST, 3)
    processes.part(AgentAbsent(0))
    outbox.take()
    assert not processes.greet(Hello(0, "first", before))
    assert list(processes.take_ended()) == [FIRST]
    assert (processes[FIRST].is_running, processes[FIRST].generation) == (False, None)
    processes.start(FIRST, 3)
    assert outbox.take() == [Send(0, Start(str(FIRST), 2, str(FIRST), 3))]


# Another leader's processes.


def test_next_leader_goes_on_with_the_processes_and_places_of_the_last() -> None:
    processes, outbox = processes_on("0.0", "0.1", connected=False)
    processes.expect([FIRST, SECOND], {"0.0": 2, "0.1": 4}, {"0.0": "0.1", "0.1": "0.0"})
    assert [processes[worker].is_running for worker in (FIRST, SECOND)] == [True, True]
    assert [processes.node(worker) for worker in (FIRST, SECOND)] == [1, 0]
    processes.greet(Hello(0, "first", [AgentProcess("0.1", 4, 7, "killed by signal 9", "last words")]))
    processes.greet(Hello(1, "first", [AgentProcess("0.0", 2, 7)]))
    assert processes.take_ended() == {SECOND: "killed by signal 9"}
    assert (processes.incarnations, processes[FIRST].generation) == ({"0.0": 2, "0.1": 4}, 7)
    processes.start(SECOND, 8)
    assert outbox.take() == [Send(0, Start(str(SECOND), 5, str(FIRST), 8))]


def test_next_leader_gives_up_agents_that_do_not_come() -> None:
    processes, outbox = processes_on("0.0", "0.1", connected=False)
    processes.expect([FIRST, SECOND], {"0.0": 2}, {})
    processes.greet(Hello(1, "first", [AgentProcess("0.1", 0, 7)]))
    pass_time(processes, outbox, 2.5)
    assert processes.is_awaited([FIRST])
    pass_time(processes, outbox, 1)
    assert processes.take_ended() == {FIRST: GONE}
    processes.greet(Hello(0, "second", []))
    processes.start(FIRST, 8)
    assert outbox.take() == [Send(0, Start(str(FIRST), 3, str(FIRST), 8))]


def test_next_leader_finds_that_the_node_has_another_agent_or_other_processes() -> None:
    processes, _ = processes_on("0.0", "0.1", connected=False)
    processes.expect([FIRST, SECOND], {"0.0": 2}, {})
    processes.greet(Hello(0, "second", []))
    processes.greet(Hello(1, "first", [AgentProcess("0.1", 1, 7)]))
    assert processes.take_ended() == {FIRST: GONE, SECOND: "ended while there was no leader"}
    assert (processes[FIRST].is_running, processes[SECOND].is_running) == (False, True)
    assert processes.incarnations == {"0.0": 2, "0.1": 1}


@pytest.mark.parametrize("incarnations", [{}, {"0.1": 3}])
def test_process_of_a_worker_that_has_no_part_is_killed_and_a_later_one_goes_on(incarnations: dict[str, int]) -> None:
    """The last leader has fenced it, and may have died before its agent knew."""
    number = incarnations.get("0.1", 0)
    processes, outbox = processes_on("0.0", "0.1", connected=False)
    processes.expect([FIRST], incarnations, {})
    processes.greet(Hello(1, "first", [AgentProcess("0.1", number, 7)]))
    assert (processes[SECOND].is_running, outbox.take()) == (False, [Send(1, Kill(str(SECOND), number))])
    processes.greet(Hello(1, "first", [AgentProcess("0.1", number + 1, 7)]))
    assert (processes[SECOND].is_running, outbox.take()) == (True, [])


def test_worker_that_the_run_starts_without_has_no_process_before_its_first() -> None:
    processes, outbox = processes_on("0.0", "0.1", connected=False)
    processes.expect([FIRST], {}, {}, absent=frozenset({SECOND}))
    processes.greet(Hello(1, "first", [AgentProcess("0.1", 0, 7)]))
    assert (processes[SECOND].is_running, outbox.take()) == (True, [])


# Places.


def test_missing_nodes_are_those_of_the_places() -> None:
    processes, _ = processes_on("0.0", "0.1", "1.0", "1.1")
    processes.part(AgentAbsent(2))
    processes.part(AgentAbsent(3))
    assert processes.missing_nodes(named("1.1", "0.0", "1.0")) == [2, 3]
    assert processes.missing_nodes(named("0.0", "0.1")) == []
    processes.places = {Worker(0, 0): Worker(1, 1), Worker(1, 1): Worker(0, 0)}
    assert processes.missing_nodes(named("0.0")) == [3]
    assert processes.missing_nodes(named("1.1")) == []


def test_position_without_a_node_exchanges_places_with_a_free_worker() -> None:
    processes, outbox = processes_on("0.0 0.1", "1.0 1.1", "2.0 2.1")
    startable = named("0.0", "1.0", "1.1", "2.0")
    processes.move(named("0.0", "0.1", "1.0", "1.1"), startable)
    assert processes.places == {Worker(0, 1): Worker(2, 0), Worker(2, 0): Worker(0, 1)}
    assert [processes.node(worker) for worker in named("0.0", "0.1", "1.0", "1.1")] == [0, 2, 1, 1]
    assert processes.workers_of(2) == named("0.1", "2.1")
    processes.start(Worker(0, 1), 2)
    assert outbox.take() == [Send(2, Start(str(Worker(0, 1)), 0, str(Worker(2, 0)), 2))]


def test_positions_that_exchange_places_twice_are_where_they_were() -> None:
    processes, _ = processes_on("0.0 1.0", "0.1 1.1")
    processes.move(named("0.0", "0.1"), named("0.0", "1.0"))
    assert processes.places == {Worker(0, 1): Worker(1, 0), Worker(1, 0): Worker(0, 1)}
    processes.move(named("0.0", "1.0"), named("0.0", "0.1"))
    assert processes.places == {}


def test_place_on_a_node_without_a_peer_of_the_stage_is_preferred() -> None:
    positions = named("0.0", "0.1", "1.0")
    processes, _ = processes_on("0.0 2.0", "0.1 1.1", "1.0 2.1")
    processes.move(positions, named("0.0", "0.1", "2.0", "2.1"))
    assert processes.places == {Worker(1, 0): Worker(2, 1), Worker(2, 1): Worker(1, 0)}
    processes, _ = processes_on("0.0 2.0", "0.1 1.1", "1.0 2.1")
    processes.move(positions, named("0.0", "0.1", "2.0"))
    assert processes.places == {Worker(1, 0): Worker(2, 0), Worker(2, 0): Worker(1, 0)}
