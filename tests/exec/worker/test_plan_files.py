"""A generation's plan reaches its workers as a file, or in the proposal where the disk takes no file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from recycle import RunError, Shape
from recycle.exec.planning.planning import PlanService
from recycle.exec.processes.processes import Waker
from recycle.exec.worker.main_loop import read_plan
from recycle.ir.families import one_f_one_b
from recycle.ir.lower import lower
from recycle.ir.schedule import Schedule
from recycle.job.shape import Worker
from recycle.plans import schedule_hash
from recycle.plans.hosting import Hosts
from recycle.runs.logs import plan_file
from tests.exec.runs import Run, job

NOT_OVER = threading.Event()


@pytest.fixture
def waker() -> Iterator[Waker]:
    waker = Waker()
    yield waker
    waker.close()


def small() -> Schedule:
    return lower(one_f_one_b(Shape(pipelines=2, ranks=2, micro_batches=2)))


def test_workers_take_the_plan_from_the_proposal_where_no_file_can_be_written(
    launch: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recycle.exec.planning.planning.plan_file", lambda folder, digest: folder / "no" / digest)
    run = launch(job(2, 2, 2), 4, "kill:1.1@1", directory=tmp_path)
    assert len(run.losses) == 4
    assert list((tmp_path / "plans").iterdir()) == []
    assert len([event for event in run.events if event["kind"] == "warning"]) == 2


def test_late_file_is_waited_for_and_damaged_file_is_refused(tmp_path: Path) -> None:
    digest, path = schedule_hash(small()), plan_file(tmp_path, schedule_hash(small()))
    path.write_text('{"format": ')
    with pytest.raises(RunError, match=rf"plan of generation 1 .* within 0.3 s: .*{digest}.json"):
        read_plan(tmp_path, "", 1, digest, NOT_OVER, 0.3)
    one_f_one_b(Shape(pipelines=1, ranks=2, micro_batches=2)).save(path)
    with pytest.raises(RunError, match="holds another schedule"):
        read_plan(tmp_path, "", 1, digest, NOT_OVER, 0.3)
    late = threading.Timer(0.3, small().save, [path])
    late.start()
    assert read_plan(tmp_path, "", 1, digest, NOT_OVER, 30.0).text() == small().text()
    late.join()


def test_plan_of_the_proposal_needs_no_file_and_is_checked_likewise(tmp_path: Path) -> None:
    text, digest = small().dumps(), schedule_hash(small())
    assert read_plan(tmp_path, text, 1, digest, NOT_OVER, 0.0).text() == small().text()
    for damaged in (text[:-40], one_f_one_b(Shape(pipelines=1, ranks=2, micro_batches=2)).dumps()):
        with pytest.raises(RunError, match="could not be read"):
            read_plan(tmp_path, damaged, 1, digest, NOT_OVER, 0.0)


def test_next_leader_finds_the_plan_in_use_by_its_hash_and_dead_workers(tmp_path: Path, waker: Waker) -> None:
    two, schedule = job(2, 2, 2), small()
    own = PlanService(two, None, tmp_path, tmp_path, waker, schedule).own()
    assert own is not None
    assert own[0] == frozenset()
    service = PlanService(two, None, tmp_path, tmp_path, waker)
    assert service.own() is None
    assert service.adopted(frozenset(), own[1].digest) == own[1]
    assert service.adopted(frozenset({Worker(0, 0)}), own[1].digest) is None
    assert service.adopted(frozenset(), "another") is None
    assert service.hosts(own[1].digest) == own[1].hosts == Hosts.at_start(two, None)
    assert service.hosts("another") is None
