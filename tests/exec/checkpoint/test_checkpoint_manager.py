"""Both sides of a checkpoint on a real store: workers that copy and write, the launcher that completes and removes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed.checkpoint  # noqa: F401  two threads of one process import it at once otherwise

from recycle.exec.checkpoint import checkpoint
from recycle.exec.checkpoint.checkpoint import folder_of, writer_of
from recycle.exec.checkpoint.checkpoint_manager import CheckpointManager
from recycle.exec.membership.launcher_store import LauncherStore
from recycle.exec.membership.schema import SavedKey
from recycle.exec.model.emulated import EmulatedStage
from recycle.exec.protocol import Commit, GenerationRecord, Verified
from recycle.exec.worker.saver import Saver
from recycle.exec.worker.updates import Updates
from recycle.ir.families import one_f_one_b
from recycle.job import Job
from recycle.plans.hosting import Hosts
from tests.exec.runs import job

LIVE = ["0.0", "0.1", "1.0", "1.1"]
RECORD = GenerationRecord(1, LIVE, {name: name for name in LIVE}, "")


def manager(of: Job, root: Path, store: LauncherStore, **changes: Any) -> CheckpointManager:
    """The checkpoint manager of a job with two ranks, a stage each."""
    given: dict[str, Any] = {"text_digest": None, "log": print, "wake": print, "now": time.time}
    return CheckpointManager(job=of, root=root, store=store, **given | changes)


class Run:
    """A job of 2 x 2 without processes: a store, the launcher's checkpoints, and the savers of those who write."""

    def __init__(self, root: Path, of: Job) -> None:
        self.job, self.root, self.seconds = of, root, 0.0
        self.events: list[dict[str, Any]] = []
        self.store, _ = LauncherStore.host()
        self.woken = threading.Event()
        log = lambda kind, **details: self.events.append({"kind": kind, **details})  # noqa: E731
        self.checkpoints = manager(of, root, self.store, log=log, wake=self.woken.set, now=lambda: self.seconds)
        self.stages = {name: {int(name[2]): EmulatedStage(of, int(name[2]))} for name in LIVE}
        self.updates = {name: Updates(stages) for name, stages in self.stages.items()}
        self.savers = {name: Saver(root, name, stages, self.store) for name, stages in self.stages.items()}
        for saver in self.savers.values():
            saver.use_hosts_of(one_f_one_b(of.shape), RECORD)
        self.hosts = Hosts.at_start(of, None)

    def commit(self, step: int, last: bool = False, record: GenerationRecord = RECORD) -> Commit:
        """Every stage steps, and the launcher's side hears of the commit."""
        commit = Commit(step, 0.5, 0.25, 1.0, finished=last, checkpoint=self.checkpoints.due(step, last))
        for updates in self.updates.values():
            updates.step(*next(iter((index, commit) for index in updates._stages)))
        self.checkpoints.committed(commit, record, self.hosts)
        return commit

    def write(self, commit: Commit, *names: str, record: GenerationRecord = RECORD) -> None:
        for name in names or LIVE:
            self.savers[name].keep(record, commit, self.updates[name])
        for name in names or LIVE:
            self.savers[name].close()

    def complete(self, committed: int = 0) -> None:
        """Let the launcher's side do what it can."""
        deadline = time.monotonic() + 30
        self.checkpoints.tick(LIVE, committed)
        while any(pending.finishing for pending in self.checkpoints._pending.values()) and time.monotonic() < deadline:
            self.woken.wait(0.05)
            self.checkpoints.tick(LIVE, committed)

    def steps(self) -> list[int]:
        return [step for step, _ in checkpoint.folders(self.root)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    started = Run(tmp_path / "checkpoints", job(2, 2, 2, train={"checkpoint_every": 2, "checkpoint_keep": 2}))
    yield started
    started.checkpoints.close()


def test_one_host_writes_each_stage_not_always_of_the_same_pipeline() -> None:
    hosts = ["0.0", "1.0"], ["0.1", "1.1"]
    assert [writer_of(stage, hosts[stage], RECORD) for stage in (0, 1)] == ["0.0", "1.1"]
    joined = msgspec.structs.replace(RECORD, joins=["1.1"])
    assert writer_of(1, hosts[1], joined) == "0.1"
    assert writer_of(1, ["1.1"], joined) is None


def test_every_so_often_and_at_the_end_of_a_run_that_is_long_enough(run: Run) -> None:
    assert [step for step in range(6) if run.checkpoints.due(step, False)] == [1, 3, 5]
    assert run.checkpoints.due(4, True)
    assert not run.checkpoints.due(0, True)
    never = manager(job(2, 2, 2, train={"checkpoint_every": 0}), run.root, run.store)
    assert not any(never.due(n, True) for n in range(300))


def test_what_is_written_is_the_committed_state_although_training_went_on_at_once(run: Run) -> None:
    run.commit(0)
    commit = run.commit(1)
    expected = [run.stages[name][stage].state_digest() for stage, name in ((0, "0.0"), (1, "1.1"))]
    for name in LIVE:
        run.savers[name].keep(RECORD, commit, run.updates[name])
        for tensor in next(iter(run.stages[name].values())).state_tensors():
            tensor.fill_(3)
    run.write(commit)
    run.complete()
    assert [(event["kind"], event["step"]) for event in run.events] == [("checkpoint", 1)]
    assert "error" not in run.events[0], run.events
    fresh = [EmulatedStage(run.job, stage) for stage in (0, 1)]
    checkpoint.load(checkpoint.verify(folder_of(run.root, 1)).folder, fresh)
    assert [stage.state_digest() for stage in fresh] == expected


def test_a_step_that_is_not_committed_is_never_written(run: Run) -> None:
    run.commit(0)
    commit = run.commit(1)
    for name in LIVE:
        run.updates[name].step_ahead(int(name[2]), 2)
    run.write(commit)
    run.complete()
    assert run.events == []
    assert run.steps() == []
    for name in LIVE:
        run.updates[name].settle(1, commit)
    run.write(commit)
    run.complete()
    assert [event["step"] for event in run.events] == [1]


def test_the_copy_is_made_into_the_same_memory_each_time(run: Run) -> None:
    places = set()
    for step in range(6):
        commit = run.commit(step)
        run.write(commit)
        run.complete(step)
        places |= {tensor.data_ptr() for tensor in run.savers["0.0"]._copies.get(0, [])}
    assert len(places) == 4  # parameters and count of two layers
    assert [event["step"] for event in run.events] == [1, 3, 5]
    assert run.savers["1.0"]._copies == {}


def test_the_last_few_stay(run: Run) -> None:
    for step in range(8):
        run.write(run.commit(step))
        run.complete(step)
    assert run.steps() == [7, 5]


def test_none_is_asked_for_while_one_is_being_written_but_the_last_of_the_run_waits(run: Run) -> None:
    run.commit(0)
    assert run.commit(1).checkpoint
    run.commit(2)
    assert not run.commit(3).checkpoint
    assert run.commit(4, last=True).checkpoint


def test_a_part_that_cannot_be_written_makes_an_event_and_the_next_one_is_tried(run: Run) -> None:
    run.root.write_text("in the way")
    run.commit(0)
    run.write(run.commit(1))
    run.complete(1)
    assert [(event["kind"], event["step"]) for event in run.events] == [("checkpoint", 1)]
    assert "worker 0.0: " in run.events[0]["error"]
    assert "step-00000001: Not a directory" in run.events[0]["error"]
    run.root.unlink()
    run.commit(2)
    run.write(run.commit(3))
    run.complete(3)
    assert run.steps() == [3]


def test_a_writer_that_died_is_stood_in_for_while_its_step_is_the_last_and_given_up_later(run: Run) -> None:
    run.commit(0)
    commit = run.commit(1)
    run.write(commit, "0.0")
    live = ["0.0", "0.1", "1.0"]
    run.checkpoints.tick(live, 1)
    assert run.checkpoints.busy
    without = GenerationRecord(2, live, {name: name for name in live}, "")
    run.write(commit, *live, record=without)
    run.complete(1)
    assert run.events[0].keys() >= {"folder", "seconds"}
    run.commit(2)
    run.write(run.commit(3), "0.0")
    run.checkpoints.tick(live, 4)
    assert run.events[1] == {
        "kind": "checkpoint",
        "step": 3,
        "error": "worker 1.1 ended before it had written its part",
    }
    assert not run.checkpoints.busy


def test_one_that_is_not_complete_in_time_is_given_up(run: Run) -> None:
    run.commit(0)
    run.commit(1)
    run.seconds = 601.0
    run.checkpoints.tick(LIVE, 1)
    assert run.events == [{"kind": "checkpoint", "step": 1, "error": "not complete after 600 s"}]


def test_going_back_voids_what_was_announced(run: Run) -> None:
    run.commit(0)
    commit = run.commit(1)
    run.write(commit, "0.0")
    run.checkpoints.start_over()
    assert not run.store.has_all([SavedKey(1, 0)])
    assert run.checkpoints.newest(print) is None


def test_the_newest_checkpoint_that_training_may_go_back_to_is_kept(run: Run) -> None:
    verified = msgspec.structs.replace(RECORD, verified=Verified(1, None))
    for step in range(10):
        commit = run.commit(step, record=verified)
        if commit.checkpoint:
            run.write(commit)
            run.complete(step)
    assert run.steps() == [9, 7, 1]
