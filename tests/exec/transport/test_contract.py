"""The contract of transports under failures, rule by rule, on every transport that CPUs have.

docs/guides/transports.md lists the rules. NCCL's transport runs over the simulated accelerator.
"""

import os
import signal
import time
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from recycle import Shape
from recycle.ir.families import one_f_one_b
from tests.exec.transport.test_transports import SCHEDULES
from tests.exec.transport_workers import (
    ACTIONS,
    FAILED,
    SOON,
    WAITS,
    Participant,
    TransportWorkers,
    add_up,
    check_counts,
    copy_and_add,
    count,
    end_twice,
    identify,
    open_socket,
    receive,
    send,
    try_everything,
)
from tests.waiting import until

pytestmark = pytest.mark.process
KINDS = ["gloo", "accelerator", "staged"]
GRID = replace(one_f_one_b(Shape(2, 2, 3)), buckets=2)
ALL = range(4)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def workers():
    with TransportWorkers(5) as started:
        yield started


def form(workers: TransportWorkers, kind: str, **options):
    assert workers.form(kind, GRID, ALL, **options) == ["done"] * len(ALL)


def run(workers: TransportWorkers, ranks, action, *arguments):
    """Run an action in processes, in all of which it succeeds."""
    assert workers.run(ranks, action, *arguments) == ["done"] * len(ranks)


def leave(workers: TransportWorkers, ranks=ALL):
    """End the generation, as the leader's message does."""
    workers.tell(ranks, "stop")
    for outcome in workers.outcomes(ranks, SOON):
        assert outcome == "done" or outcome.startswith(FAILED), outcome
    run(workers, ranks, Participant.end)


def work(workers: TransportWorkers, kind: str, schedule=GRID, ranks=ALL):
    """Form a new generation, and check every bit of three iterations."""
    assert workers.form(kind, schedule, ranks) == ["done"] * len(ranks)
    run(workers, ranks, Participant.iterate, 3)


@pytest.mark.parametrize(("kind", "name"), [*product(KINDS[:2], SCHEDULES), ("staged", "in buckets")])
def test_every_message_and_sum_is_right_in_every_iteration(kind, name, workers):
    schedule = SCHEDULES[name]()
    ranks = range(len(schedule.live))
    work(workers, kind, schedule, ranks)
    leave(workers, ranks)


def test_end_of_a_generation_ends_every_wait(kind, workers):
    for actions in (ACTIONS[:4], ACTIONS[4:]):
        form(workers, kind)
        for rank, action in enumerate(actions):
            workers.begin([rank], action)
        assert workers.outcomes(ALL, 0.1) == [WAITS] * 4
        workers.tell(ALL, "stop")
        outcomes = workers.outcomes(ALL, SOON)
        assert "TransportError: the generation is over" in outcomes
        assert all(outcome.startswith(FAILED) for outcome in outcomes)  # peers may end first
        run(workers, ALL, Participant.end)
        work(workers, kind)
        leave(workers)


@pytest.mark.parametrize("end", ["send", "sum"])
def test_peers_of_a_killed_process_fail_before_they_are_told(end, kind, workers):
    schedule, victim, survivors = SCHEDULES["in buckets"](), 4, range(4)
    assert workers.form(kind, schedule, range(5)) == ["done"] * 5
    workers.tell(survivors, "beat")
    workers.begin(survivors, Participant.iterate, 3, end, victim)
    workers.send(victim, "begin", Participant.iterate, 3, end, victim)  # it may die before it answers
    workers.await_end(victim)
    until(lambda: any(outcome.startswith(FAILED) for outcome in workers.outcomes(survivors, 0.0)), SOON)
    workers.tell(survivors, "stop")
    assert all(outcome.startswith(FAILED) for outcome in workers.outcomes(survivors, SOON))
    run(workers, survivors, Participant.end)
    work(workers, kind, schedule, range(5))
    leave(workers, range(5))


def test_peers_of_a_process_that_gives_up_fail_before_they_are_told(kind, workers):
    form(workers, kind, impatient=3)
    workers.tell(ALL, "beat")
    for rank, action in ((1, add_up), (2, receive), (3, receive)):
        workers.begin([rank], action)
    (outcome,) = workers.outcomes([3])
    assert outcome.startswith(FAILED)
    assert kind == "accelerator" or "worker 2.0" in outcome
    run(workers, [3], Participant.end)
    for outcome in workers.outcomes([1, 2], SOON):
        assert outcome.startswith(FAILED)
        assert "3.0" in outcome
    leave(workers)
    work(workers, kind)
    leave(workers)


def test_waits_for_a_stopped_process_end_at_the_deadline_and_it_disturbs_no_later_generation(kind, workers):
    form(workers, kind, transport_timeout=0.5)
    (process,) = workers.run([3], identify)
    for rank, action in enumerate((send, add_up, receive, receive)):
        workers.begin([rank], action)
    os.kill(process, signal.SIGSTOP)
    try:
        assert all(outcome.startswith(FAILED) for outcome in workers.outcomes([0, 1, 2], SOON))
        leave(workers, [0, 1, 2])
        work(workers, kind, one_f_one_b(Shape(1, 3, 3)), [2, 0, 1])
    finally:
        os.kill(process, signal.SIGCONT)
    assert workers.outcomes([3], SOON)[0].startswith(FAILED)
    run(workers, [2, 0, 1], Participant.iterate, 2)
    leave(workers)
    work(workers, kind)
    leave(workers)


def test_operations_fail_at_once_after_an_error_and_after_the_end(kind, workers):
    form(workers, kind, transport_timeout=2.0)
    (outcome,) = workers.run([0], receive)
    assert outcome.startswith(FAILED)
    assert kind == "accelerator" or "worker 1.0" in outcome
    run(workers, [0], try_everything)
    workers.tell([0], "stop")
    run(workers, [0], try_everything)
    leave(workers)
    run(workers, [0], try_everything)
    work(workers, kind)
    leave(workers)


def test_processes_form_again_with_fewer_others_and_other_roles(kind, workers):
    pair, row = one_f_one_b(Shape(2, 1, 2)), one_f_one_b(Shape(1, 3, 3))
    steps = [
        [(GRID, [0, 1, 2, 3])],
        [(row, [0, 1, 2])],  # without the last
        [(pair, [0, 2])],  # without one in the middle
        [(pair, [2, 0])],
        [(one_f_one_b(Shape(1, 1, 1)), [rank]) for rank in ALL],
        [(pair, [0, 1]), (pair, [2, 3])],
        [(GRID, [3, 1, 0, 2])],
        [(GRID, [3, 1, 0, 2])],
        [(row, [1, 4, 3])],  # one that was in no generation before
    ]
    for groups in steps:
        for schedule, ranks in groups:
            work(workers, kind, schedule, ranks)
        for schedule, ranks in groups:
            if len(ranks) > 1:
                workers.begin(ranks[:1], add_up if schedule is pair else receive)
            leave(workers, ranks)


def test_what_completes_before_a_random_end_is_right_and_nothing_arrives_after_it(kind, workers):
    random = Random(7)
    for _ in range(5):
        ranks = random.sample(ALL, 4)
        assert workers.form(kind, GRID, ranks) == ["done"] * 4
        workers.begin(ranks, Participant.iterate, 50)
        time.sleep(random.uniform(0.0, 0.05))
        leave(workers, ranks)
    work(workers, kind)
    leave(workers)


def test_generation_can_end_in_every_state_twice_and_from_several_threads(kind, workers):
    workers.tell(ALL, "offer", kind, "none", {"hung_after": 5.0})  # a plug-in that has formed nothing
    run(workers, ALL, end_twice)
    form(workers, kind, hung_after=5.0)
    workers.begin(ALL, Participant.iterate, 50)
    for _ in range(3):
        workers.tell(ALL, "stop")
    leave(workers)
    run(workers, ALL, end_twice)
    work(workers, kind)
    leave(workers)


def test_forming_without_a_member_ends_at_its_deadline_or_with_the_generation(kind, workers):
    coming = workers.begin_forming(kind, GRID, ALL, absent=3, form_timeout=0.5)
    peers = [1, 2]  # a communicator per lane connects the other one to these only
    assert all(outcome.startswith(FAILED) for outcome in workers.outcomes(peers, SOON))
    leave(workers, coming)
    coming = workers.begin_forming(kind, GRID, ALL, absent=3)
    assert workers.outcomes(peers, 0.1) == [WAITS] * 2
    leave(workers, coming)
    work(workers, kind)
    leave(workers)


def test_tensors_of_all_types_and_sizes_keep_their_bits_after_forming_again(kind, workers):
    form(workers, kind)
    workers.begin([0], receive)
    leave(workers)
    form(workers, kind)
    run(workers, ALL, copy_and_add)
    leave(workers)


def test_forming_again_leaves_no_thread_and_no_socket_and_other_sockets_open(kind, workers):
    def interrupt(times: int):
        for turn in range(times):
            form(workers, kind)
            for rank, action in enumerate(ACTIONS[4 * (turn % 2) :][:4]):
                workers.begin([rank], action)
            leave(workers)
        work(workers, kind)

    interrupt(2)
    run(workers, ALL, open_socket)
    leave(workers)
    run(workers, ALL, count)
    interrupt(4)
    leave(workers)
    run(workers, ALL, check_counts)
