"""Process groups that outlive their members: results with all, with dead and with returned processes."""

import pytest

from recycle import Worker
from recycle.exec.protocol import STAGE_LOST
from recycle.megatron.peers import EarlierPeers, Peers
from tests.megatron.live_workers import CALLS, SHAPE, VICTIM, LiveWorkers

pytestmark = pytest.mark.process

ALL = sorted(SHAPE.workers())
SURVIVORS = [worker for worker in ALL if worker != VICTIM]


@pytest.fixture(scope="module")
def workers():
    with LiveWorkers() as started:
        yield started


def value(worker: Worker) -> float:
    return 10.0 * worker.pipeline + worker.rank


def expected(live: list[Worker], own: Worker):
    """What the rules say; `live` is alone before the first generation."""

    def entry(worker):
        return value(worker if worker in live else Worker(0, worker.rank))

    hosts = [value(worker) for worker in live if worker.rank == own.rank]
    pipeline = [entry(Worker(own.pipeline, rank)) for rank in range(SHAPE.ranks)]
    by_rank = [Worker(k, r) for r in range(SHAPE.ranks) for k in range(SHAPE.pipelines)]
    firsts = [value(Worker(0, rank)) for rank in range(SHAPE.ranks)]
    found = {
        "sum world": sum(map(value, live)),
        "sum hosts": sum(hosts),
        "sum pipeline": sum(pipeline),
        "sum own": value(own),
        "largest world": max(map(value, live)),
        "largest hosts": max(hosts),
        "largest pipeline": max(pipeline),
        "largest own": value(own),
        "gathered world": [entry(worker) for worker in by_rank],
        "gathered hosts": [entry(Worker(k, own.rank)) for k in range(SHAPE.pipelines)],
        "gathered pipeline": pipeline,
        "gathered own": [value(own)],
        "mean hosts": sum(hosts) / SHAPE.pipelines,
        "large sum pipeline": sum(firsts),
        "broadcast pipeline": pipeline[-1],
        "scattered own": value(own),
        "objects": [str(worker if worker in live else Worker(0, worker.rank)) for worker in by_rank],
        "coalesced hosts": [sum(hosts), -sum(hosts)],
    }
    return found | ({"sum ends": firsts[0] + firsts[-1]} if own.rank != 1 else {})


def require_rules(workers: LiveWorkers, live: list[Worker]):
    workers.form(live)
    for worker, found in workers.answers(live, "collect").items():
        refused = found.pop("refused")
        assert found == expected(live, worker)
        calls = {"reduce_scatter", "send", "all_to_all", "all_gather"}
        assert set(refused) == {*calls, *(["all_reduce"] if worker.rank else [])}
        for call, error in refused.items():
            assert error.startswith(f"torch.distributed: a session does not support {call}"), error
    for error in workers.answers(live, "step").values():
        assert error.startswith("the optimizer's step makes a collective over all hosts of a stage")


def test_a_process_answers_alone_before_its_first_generation(workers):
    own = Worker(1, 2)
    found = workers.answers([own], "collect")[own]
    assert found["sum world"] == found["mean hosts"] == found["broadcast pipeline"] == value(own)
    assert found["gathered world"] == [value(own)] * SHAPE.worker_count
    assert found["objects"] == [str(own)] * SHAPE.worker_count


def test_collectives_run_over_live_processes_before_and_after_a_death_and_a_return(workers):
    for call in CALLS:
        require_rules(workers, ALL)
        errors = workers.kill_inside(call, ALL)
        # The hosts of other stages may have finished a collective in which the victim had no part.
        assert all(
            error.startswith("TransportError: ")
            for worker, error in errors.items()
            if call != "all_reduce of the hosts" or worker.rank == VICTIM.rank
        )
        require_rules(workers, SURVIVORS)
    require_rules(workers, ALL)


def test_an_interrupted_process_gets_the_result_that_the_others_have(workers):
    workers.form(ALL)
    for interrupted in (ALL[0], ALL[-1]):
        found = workers.sum_between_iterations(ALL, interrupted)
        assert found == {worker: [15.0, 1] for worker in ALL}
    require_rules(workers, ALL)


def test_the_first_live_host_of_each_stage_saves_in_a_world_of_its_own(workers):
    live = [worker for worker in ALL if worker != Worker(0, 0)]
    workers.form(live)
    found, savers = workers.answers(live, "save"), [Worker(1, 0), Worker(0, 1), Worker(0, 2)]
    for number, worker in enumerate(savers):
        assert found.pop(worker) == [number, list(map(str, savers)), f"for {number}"]
    assert list(found.values()) == [[], []]
    require_rules(workers, ALL)


def test_a_process_that_joins_has_no_part_in_collectives_of_earlier_steps(workers):
    workers.form(ALL)
    workers.kill_inside("all_reduce of all", ALL)
    found = workers.results_of_last_step(ALL, VICTIM)
    for worker in SURVIVORS:
        del found[worker]["refused"]
        assert {"sum ends": None, **found[worker]} == {**expected(SURVIVORS, worker), "sum ends": None}
    require_rules(workers, ALL)


def test_a_call_ends_the_process_when_a_stage_is_left_to_processes_that_joined_since():
    live = [Worker(0, 0), Worker(0, 1), Worker(1, 0)]
    transport = None
    peers = EarlierPeers(Peers(transport, live), Worker(0, 0), [Worker(1, 0)])
    assert peers.holder(Worker(1, 0)) == Worker(0, 0)
    with pytest.raises(SystemExit, match=str(STAGE_LOST)):
        EarlierPeers(Peers(transport, live), Worker(0, 0), [Worker(0, 1)])
