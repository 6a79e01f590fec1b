"""Workers copy and write their parts of checkpoints; the leader's runtime completes, finds and removes them."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from recycle.exec.checkpoint import checkpoint
from recycle.exec.checkpoint.checkpoint import folder_of
from recycle.exec.checkpoint.completion import Answer, CheckpointCompletion
from recycle.exec.emulation import EmulatedStage
from recycle.exec.hooks.saver import Saver
from recycle.exec.leader.actions import CheckpointCompleted, CheckpointFound, CompleteCheckpoint, StoredCheckpoint
from recycle.exec.protocol import Commit, GenerationRecord, SavedPart
from recycle.exec.worker.step_state import StepState
from recycle.job import Job
from tests.exec.runs import job

LIVE = ["0.0", "0.1", "1.0", "1.1"]
HOSTS = {0: ["0.0", "1.0"], 1: ["0.1", "1.1"]}
RECORD = GenerationRecord(1, LIVE, {name: name for name in LIVE}, "")
PLAIN = Commit(1, 0.5, 0.25, 1.0)


class Run:
    """A 2 x 2 job without processes: its checkpoints, and the savers of its workers."""

    def __init__(self, root: Path, job: Job):
        self.job, self.root, self.warnings = job, root, []
        self.saved = {}
        self._woken = threading.Event()
        self.completion = CheckpointCompletion(job, root, None, lambda step: step == 1, self._woken.set)
        self.stages = {name: {int(name[2]): EmulatedStage(job, int(name[2]))} for name in LIVE}
        self.updates = {name: StepState(stages) for name, stages in self.stages.items()}
        self.savers = {
            name: Saver(root, name, stages, self.updates[name].all_at, self._announce)
            for name, stages in self.stages.items()
        }
        for name, saver in self.savers.items():
            hosts = {stage: HOSTS[stage] for stage in self.stages[name]}
            saver.begin_generation(SimpleNamespace(hosts=hosts))

    def _announce(self, part: SavedPart):
        self.saved[part.step, part.stage] = part.saved

    def commit(self, step: int) -> Commit:
        commit = Commit(step, 0.5, 0.25, 1.0, checkpoint=bool(step % 2))
        for name, updates in self.updates.items():
            updates.step(int(name[2]), commit)
        return commit

    def write(self, commit: Commit, *names: str, record: GenerationRecord = RECORD):
        for name in names or LIVE:
            self.savers[name].save(record, commit)
        for name in names or LIVE:
            self.savers[name].close()

    def written(self, step: int) -> list[int]:
        """The stages whose state after a step is written."""
        return [stage for stage in (0, 1) if (step, stage) in self.saved]

    def complete(self, commit: Commit, verified: int | None = None) -> CheckpointCompleted:
        saved = [self.saved[commit.step, stage] for stage in self.written(commit.step)]
        self.completion.complete(CompleteCheckpoint(commit, saved, verified))
        answer = self.answer()
        assert isinstance(answer, CheckpointCompleted)
        return answer

    def keep(self, step: int, verified: int | None = None) -> CheckpointCompleted:
        """Train two steps, to this one, and save its state."""
        self.commit(step - 1)
        commit = self.commit(step)
        self.write(commit)
        return self.complete(commit, verified)

    def answer(self) -> Answer:
        assert self._woken.wait(30)
        self._woken.clear()
        (answer,) = self.completion.poll(self.warnings.append)
        return answer

    def find(self, upto: int | None = None) -> StoredCheckpoint | None:
        self.completion.find(upto)
        answer = self.answer()
        assert isinstance(answer, CheckpointFound)
        return answer.checkpoint

    def steps(self) -> list[int]:
        return [step for step, _ in checkpoint.folders(self.root)]


@pytest.fixture
def run(tmp_path):
    started = Run(tmp_path / "checkpoints", job(2, 2, 2, train={"checkpoint_every": 2, "checkpoint_keep": 2}))
    yield started
    started.completion.close()


def test_checkpoint_has_the_committed_state_while_training_continues(run):
    run.commit(0)
    commit = run.commit(1)
    expected = [run.stages[name][stage].digests() for stage, name in ((0, "0.0"), (1, "1.1"))]
    for name in LIVE:
        run.savers[name].save(RECORD, commit)
        for tensor in next(iter(run.stages[name].values())).state_tensors():
            tensor.fill_(3)
    run.write(commit)
    assert run.complete(commit) == CheckpointCompleted(1)
    fresh = [EmulatedStage(run.job, stage) for stage in (0, 1)]
    checkpoint.load(checkpoint.verify(folder_of(run.root, 1)).folder, fresh)
    assert [stage.digests() for stage in fresh] == expected


def test_checkpoint_without_one_of_its_files_is_not_completed(run):
    """An agent may report a part again that the previous leader has removed."""
    run.commit(0)
    commit = run.commit(1)
    run.write(commit)
    name = next(iter(run.saved[1, 0].files))
    (folder_of(run.root, 1) / name).unlink()
    answer = run.complete(commit)
    assert answer == CheckpointCompleted(1, f"{folder_of(run.root, 1) / name}: No such file or directory")
    assert run.steps() == []


def test_uncommitted_step_is_never_written(run):
    run.commit(0)
    commit = run.commit(1)
    for name in LIVE:
        run.updates[name].step_ahead(int(name[2]), 2)
    run.write(commit)
    assert (run.written(1), run.steps()) == ([], [])
    for name in LIVE:
        run.updates[name].roll_to(1, commit)
    run.write(commit)
    assert run.written(1) == [0, 1]
    assert run.complete(commit) == CheckpointCompleted(1)


def test_last_checkpoints_are_kept(run):
    assert [run.keep(step).removed for step in (1, 3, 5, 7)] == [set(), set(), {1}, {3}]
    assert run.steps() == [7, 5]
    assert run.completion.kept() == {5, 7}


def test_newest_checkpoint_of_a_verified_state_is_kept(run):
    for step in (1, 3, 5, 7, 9):
        run.keep(step, verified=2)
    assert run.steps() == [9, 7, 1]


def test_newest_complete_checkpoint_up_to_a_step_is_found(run):
    assert run.find() is None
    for step in (1, 3):
        run.keep(step)
    folder_of(run.root, 5).mkdir()
    assert run.completion.kept() == {1, 3}
    newest = run.find()
    assert (newest.step, newest.commit.step, newest.commit.checkpoint, newest.has_metrics) == (3, 3, False, False)
    assert len(run.warnings) == 1
    assert run.find(upto=2) == StoredCheckpoint(1, PLAIN, True)
    next(folder_of(run.root, 1).glob("*.safetensors")).write_bytes(b"")
    assert run.find(upto=2) is None


def test_rewind_removes_later_checkpoints_after_pending_completions(run):
    for step in (1, 3):
        run.keep(step)
    run.commit(4)
    commit = run.commit(5)
    run.write(commit)
    saved = [run.saved[5, stage] for stage in (0, 1)]
    run.completion.complete(CompleteCheckpoint(commit, saved, 1))
    run.completion.rewind(2)
    assert run.steps() == [1]
    run.completion.discard(1)
    assert run.steps() == []
