"""A plan reaches its workers by the run directory, whatever its size, and by the store where the disk is full."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from recycle import RunError, Shape
from recycle.exec.membership.etcd_store import EtcdStore
from recycle.exec.membership.member import GenerationOver
from recycle.exec.membership.plan_files import pack_plan, read_plan, unpack_plan
from recycle.exec.membership.schema import PlanKey
from recycle.exec.membership.store import Store
from recycle.exec.planning.planning import PlanService
from recycle.exec.processes.waker import Waker
from recycle.ir.families import one_f_one_b
from recycle.ir.lower import lower
from recycle.ir.schedule import Schedule
from recycle.plans import schedule_hash
from recycle.runs import plan_file
from tests.exec.membership.test_takeover import store  # noqa: F401
from tests.exec.runs import Run, job

NOT_OVER = threading.Event()
LARGE = Shape(pipelines=24, ranks=64, micro_batches=64)


@pytest.fixture
def waker() -> Iterator[Waker]:
    made = Waker()
    yield made
    made.close()


def small() -> Schedule:
    return lower(one_f_one_b(Shape(pipelines=2, ranks=2, micro_batches=2)))


def test_the_store_of_a_run_holds_no_plan(launch: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(PlanKey, "encode", lambda key, value: written.append(key.generation) or value)
    run = launch(job(2, 2, 2), 4, "kill:1.1@1")
    plans = {event["plan"] for event in run.events if event["kind"] == "generation"}
    assert run.directory is not None
    assert written == []
    assert len(plans) == 2
    assert plans <= {path.stem for path in (run.directory / "plans").iterdir()}


def test_workers_get_their_plan_through_the_store_where_no_file_can_be_written(
    launch: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recycle.exec.planning.planning.plan_file", lambda folder, digest: folder / "no" / digest)
    run = launch(job(2, 2, 2), 4, "kill:1.1@1", directory=tmp_path)
    warnings = [event["message"] for event in run.events if event["kind"] == "warning"]
    assert len(run.losses) == 4
    assert list((tmp_path / "plans").iterdir()) == []
    assert all("goes through the store" in message for message in warnings)
    assert len(warnings) == 2


def test_a_plan_that_is_larger_than_a_key_of_etcd_fits_when_it_is_packed(store: Store) -> None:  # noqa: F811
    text = one_f_one_b(LARGE).dumps()
    assert len(text) > 1.5e6
    store.set(PlanKey(1), pack_plan(text))
    read = read_plan(Path("nowhere"), store, 1, schedule_hash(Schedule.loads(text)), NOT_OVER)
    assert read.dumps() == text
    if isinstance(store, EtcdStore):
        with pytest.raises(RunError, match="too large"):
            store.set(PlanKey(2), text)


def test_a_file_that_appears_late_is_waited_for_and_one_that_is_damaged_is_refused(
    store: Store,  # noqa: F811
    tmp_path: Path,
) -> None:
    digest, path = schedule_hash(small()), plan_file(tmp_path, schedule_hash(small()))
    path.write_text('{"format": ')
    with pytest.raises(
        RunError, match=rf"plan of generation 1 could not be read within 0.3 s: .*{digest}.json: not valid"
    ):
        read_plan(tmp_path, store, 1, digest, NOT_OVER, 0.3)
    other = one_f_one_b(Shape(pipelines=1, ranks=2, micro_batches=2))
    other.save(path)
    with pytest.raises(RunError, match="holds another schedule"):
        read_plan(tmp_path, store, 1, digest, NOT_OVER, 0.3)
    late = threading.Timer(0.3, small().save, [path])
    late.start()
    assert read_plan(tmp_path, store, 1, digest, NOT_OVER, 30.0).text() == small().text()
    late.join()


def test_nobody_waits_for_the_plan_of_a_generation_that_is_over(store: Store, tmp_path: Path) -> None:  # noqa: F811
    over = threading.Event()
    over.set()
    with pytest.raises(GenerationOver):
        read_plan(tmp_path, store, 1, "0" * 16, over)


@pytest.mark.parametrize("packed", ["no base64!", "aGVsbG8=", pack_plan(small().dumps())[:-40]])
def test_a_plan_in_the_store_that_is_not_whole_is_refused(packed: str) -> None:
    with pytest.raises(RunError, match="the plan in the store is damaged"):
        unpack_plan(packed)


def test_who_coordinates_next_takes_the_plan_that_is_there(tmp_path: Path, waker: Waker) -> None:
    of, schedule = job(2, 2, 2), small()
    first = PlanService(of, None, tmp_path, waker, schedule)
    ready = first.ready(frozenset())
    assert ready is not None
    next_one = PlanService(of, None, tmp_path, waker)
    with pytest.raises(RunError, match="no planner was given"):
        next_one.ready(frozenset())
    next_one.adopt(frozenset(), "another")
    assert next_one._used == {}
    next_one.adopt(frozenset(), ready.digest)
    assert next_one.ready(frozenset()) == ready
