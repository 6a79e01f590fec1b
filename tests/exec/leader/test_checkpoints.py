"""Which commits are kept, when a checkpoint is complete, and when it is given up."""

import msgspec
import pytest

from recycle.exec.leader.actions import (
    Action,
    CheckpointCompleted,
    CompleteCheckpoint,
    DiscardCheckpoint,
    Event,
    Outbox,
)
from recycle.exec.leader.checkpoints import Checkpoints, writer_of
from recycle.exec.protocol import Commit, GenerationRecord, Saved, SavedPart, Verified
from recycle.plans.hosting import Hosts
from tests.exec.leader.driver import missing_parts
from tests.exec.runs import job

LIVE = ["0.0", "0.1", "1.0", "1.1"]
RECORD = GenerationRecord(1, LIVE, {name: name for name in LIVE}, "")
SECTION = {"checkpoint_every": 2, "checkpoint_keep": 2}


class Kept:
    """The checkpoints of a job of 2 x 2; stage 0 is written by worker 0.0 and stage 1 by worker 1.1."""

    def __init__(self, tensor_parallel=1, **section):
        given = {"pipelines": 2, "ranks": 2, "micro_batches": 2, "tensor_parallel": tensor_parallel}
        self.job = job(2, 2, 2, shape=given, train=SECTION | section)
        self.outbox = Outbox()
        self.checkpoints = Checkpoints(self.job, self.outbox)

    @property
    def missing(self) -> list[tuple[int, int, int]]:
        return missing_parts(self.checkpoints)

    def commit(self, step: int, last=False, record: GenerationRecord = RECORD) -> Commit:
        """Commit a step."""
        commit = Commit(step, 0.5, 0.25, 1.0, finished=last, checkpoint=self.checkpoints.due(step, last))
        self.checkpoints.committed(commit, record, Hosts.at_start(self.job, None))
        return commit

    def save(self, step: int, *stages: int, rank=0, worker="0.0", **saved):
        """Parts of a checkpoint are written."""
        for stage in stages:
            self.checkpoints.take(worker, SavedPart(step, stage, rank, Saved(**saved)))

    def tick(self, committed: int, *live: str, after=0.0, verified: Verified | None = None) -> list[Action]:
        """The actions of a tick, and of what came before it.

        Args:
            after: seconds since the last tick.
        """
        self.outbox.now += after
        self.checkpoints.tick(live, msgspec.structs.replace(RECORD, committed=committed, verified=verified))
        return self.outbox.take_actions()


@pytest.fixture
def kept():
    return Kept()


def test_each_stage_has_one_writer_not_always_of_the_same_pipeline():
    hosts = ["0.0", "1.0"], ["0.1", "1.1"]
    assert [writer_of(stage, hosts[stage], RECORD) for stage in (0, 1)] == ["0.0", "1.1"]
    joined = msgspec.structs.replace(RECORD, joins=["1.1"])
    assert writer_of(1, hosts[1], joined) == "0.1"
    assert writer_of(1, ["1.1"], joined) is None


def test_checkpoints_are_due_at_the_interval_and_at_the_end(kept):
    assert [step for step in range(6) if kept.checkpoints.due(step, False)] == [1, 3, 5]
    assert kept.checkpoints.due(4, True)
    assert not kept.checkpoints.due(0, True)
    assert kept.outbox.take_actions() == [DiscardCheckpoint(step) for step in (1, 3, 5, 4)]
    never = Kept(checkpoint_every=0)
    assert not any(never.checkpoints.due(step, True) for step in range(300))


def test_no_checkpoint_is_asked_for_during_another_one_except_the_last_of_the_run(kept):
    kept.commit(0)
    assert kept.commit(1).checkpoint
    kept.commit(2)
    assert not kept.commit(3).checkpoint
    assert kept.commit(4, last=True).checkpoint


def test_checkpoint_is_completed_once_when_all_tensor_ranks_of_all_stages_have_written():
    kept = Kept(tensor_parallel=2)
    kept.checkpoints.kept = {-1}
    commit = kept.commit(1)
    assert kept.missing == [(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]
    kept.save(1, 0, 1, stall=0.25)
    kept.save(1, 0, rank=1, stall=0.5)
    assert kept.tick(1, *LIVE) == [DiscardCheckpoint(1)]
    assert kept.missing == [(1, 1, 1)]
    kept.save(1, 1, rank=1)
    parts = [Saved(stall=0.25), Saved(stall=0.5), Saved(stall=0.25), Saved()]
    assert kept.tick(1, *LIVE) == [CompleteCheckpoint(commit, parts, None)]
    assert kept.tick(1, *LIVE, after=2.0) == []
    assert (kept.missing, kept.checkpoints.is_finishing, kept.checkpoints.folder(1)) == ([], True, None)
    kept.checkpoints.completed(CheckpointCompleted(1, removed=frozenset({-1})))
    event = {"step": 1, "folder": "step-00000001", "seconds": 2.0, "stalled": 0.5}
    assert kept.tick(1, *LIVE) == [Event("checkpoint", event)]
    assert (bool(kept.checkpoints.pending), kept.checkpoints.kept) == (False, {1})
    assert kept.checkpoints.folder(1) == "step-00000001"


def test_failed_checkpoint_is_an_event_and_the_next_is_due(kept):
    kept.commit(1)
    kept.save(1, 0, 1, error="worker 0.0: No space left on device")
    *_, asked = kept.tick(1, *LIVE)
    assert isinstance(asked, CompleteCheckpoint)
    assert asked.saved[0].error == "worker 0.0: No space left on device"
    kept.checkpoints.completed(CheckpointCompleted(1, asked.saved[0].error))
    assert kept.tick(1, *LIVE) == [Event("checkpoint", {"step": 1, "error": "worker 0.0: No space left on device"})]
    assert kept.checkpoints.folder(1) is None
    assert kept.commit(3).checkpoint


def test_another_host_writes_for_a_dead_writer_of_the_last_committed_step_only(kept):
    live = ["0.0", "0.1", "1.0"]
    commit = kept.commit(1)
    kept.save(1, 0)
    kept.tick(1, *live)
    assert kept.missing == [(1, 1, 0)]
    kept.save(1, 1)
    assert kept.tick(1, *live) == [CompleteCheckpoint(commit, [Saved(), Saved()], None)]
    kept.checkpoints.completed(CheckpointCompleted(1))
    kept.commit(3)
    kept.save(3, 0)
    kept.tick(3, *live)
    error = "worker 1.1 ended before it had written its part"
    assert kept.tick(4, *live) == [Event("checkpoint", {"step": 3, "error": error})]
    assert not kept.checkpoints.pending
    kept.commit(5)
    kept.save(5, 0)
    kept.tick(5)
    assert not kept.checkpoints.pending  # with no live worker left


def test_part_of_a_worker_that_had_no_part_in_the_step_is_ignored(kept):
    """Its agent was away while the run went back to a checkpoint without it, and made the step again."""
    kept.commit(1, record=msgspec.structs.replace(RECORD, live=["0.1", "1.0", "1.1"]))
    kept.save(1, 0, worker="0.0")
    assert kept.missing == [(1, 0, 0), (1, 1, 0)]


def test_checkpoint_is_given_up_after_its_deadline(kept):
    kept.commit(1)
    assert kept.tick(1, *LIVE, after=600.0) == [DiscardCheckpoint(1)]
    given_up = Event("checkpoint", {"step": 1, "error": "not complete after 600 s"})
    assert kept.tick(1, *LIVE, after=1.0) == [given_up]
    kept.save(1, 0, 1)
    kept.checkpoints.completed(CheckpointCompleted(1))
    assert kept.tick(1, *LIVE) == []


def test_rewind_drops_what_is_kept_and_written_of_later_steps(kept):
    kept.checkpoints.kept = {1, 3}
    kept.commit(5)
    kept.checkpoints.rewind(2)
    assert (kept.checkpoints.kept, kept.missing) == ({1}, [])
    kept.commit(3)
    kept.checkpoints.rewind(3)
    assert kept.checkpoints.pending
